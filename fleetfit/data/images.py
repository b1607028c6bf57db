"""Any labelled images on disk: Parquet files as Hugging Face `datasets` lays them out, or one folder for each class.

For example Tiny ImageNet, ImageNet, or a set of your own. See `parquet` and `_class_folders` for the layouts. Sets
larger than memory stay encoded on disk and are decoded batch by batch (`lazy`).
"""

import numpy as np
import torch

from fleetfit.data import parquet
from fleetfit.data._class_folders import has_class_folders, read_class_folders
from fleetfit.data._hold_out import completed, drawn, hold_out
from fleetfit.data._hub import folder_of, from_hub
from fleetfit.data._pictures import Form, Table, set_folder
from fleetfit.data.dataset import Data, Facts
from fleetfit.errors import DataError

_MOST_BYTES = 4 << 30  # of the known sets that are read whole
FACTS = Facts(train=None, test=None, classes=None, resolution="any", source="a folder of Parquet files or of classes")


def images(
    folder: str,
    image: str | None = None,
    label: str | None = None,
    groups: str | None = None,
    size: int | None = None,
    centre: float = 1.0,
    channels: int | None = None,
    lazy: bool | None = None,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    augment: str | None = None,
    mean: tuple[float, ...] = (0.5,),
    std: tuple[float, ...] = (0.25,),
    resize: int | None = None,
    samples: int | None = None,
    hub: bool = False,
) -> Data:
    """Return a set of images, named after its folder.

    A folder without a test set but with a validation set has its validation set as the test set, as is the habit with
    ImageNet. What is not there is held out from the training images: in proportion for every label, or for every
    group where `groups` is given, so that each writer gives up a share of what it has.

    Args:
        folder: The set's folder; a relative path that does not exist is sought in the folder FLEETFIT_DATA.
        image: Column of the images; None: `img` or `image`.
        label: Column of the labels, integers or text; None: `label`, `labels`, `fine_label`, `coarse_label` or
            `character`.
        groups: Column of a natural group such as "writer_id", numbered in ascending order; None: no groups.
        size: Side in pixels; images are cut to a centred square and resized. None: all images must have one size.
        centre: Share of the shorter side that the square keeps; with ImageNet often 0.875, 224 of 256 pixels.
        channels: 1 (grey) or 3 (RGB); None: 1 if every image is grey, else 3; where images stay encoded, 3.
        lazy: Whether images stay encoded on disk and are decoded batch by batch; None: above 8 GiB of decoded images.
        validation: Share of the training images that is held out, if there is no validation set.
        test: Share of the images that is held out as the test set, if there is only a training set.
        seed: Of what is held out.
        augment: What training batches go through: "crop", "crop-flip", "flip", "resized-crop" or "shift"; None or
            "none": nothing.
        mean: Per channel, or one for all, of pixels in [0, 1].
        std: Per channel, or one for all.
        resize: Side in pixels to which batches are enlarged, last of all; None: they stay as they are.
        samples: So many training images only, drawn in proportion for every label, those held out for validation
            included; None: all.
        hub: Whether `folder` is a repository of the Hugging Face hub ("zh-plus/tiny-imagenet"), downloaded once.

    Raises:
        DataError: A file, a column or an image is missing or wrong, or a share is out of range.
        MissingExtra: pyarrow or Pillow is not installed, or `datasets` is not and `hub` is set.
    """
    path = from_hub(folder.rpartition("/")[2], folder) if hub else set_folder(folder)
    name = folder.rpartition("/")[2] if hub else path.resolve().name
    form = Form(size, channels, centre, lazy)
    if path.is_dir() and has_class_folders(path):
        if (image, label, groups) != (None, None, None):
            raise DataError(
                f"{path} has a folder for each class and no columns, so image, label and groups mean nothing."
            )
        table = read_class_folders(name, path, form)
    else:
        table = parquet.read(name, str(path), image, label, groups, form)
    return from_table(name, table, validation, test, seed, augment, mean, std, resize, samples)


def named(
    name: str,
    facts: Facts,
    repository: str,
    folder: str | None,
    channels: int,
    label: str | None,
    validation: float,
    augment: str | None,
    seed: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    resize: int | None,
    samples: int | None,
    hub: bool,
) -> Data:
    """Return one of the known sets, after a look at whether the folder holds that set.

    Raises:
        DataError: As `images`, or the files are those of another set, or there is no test file.
        MissingExtra: As `images`.
    """
    folder = folder_of(name, folder, hub, repository)
    table = parquet.read(name, folder, label=label, form=Form(channels=channels, lazy=False, most_bytes=_MOST_BYTES))
    height, width = table.x.shape[2:]
    if f"{height}x{width}" != facts.resolution or table.classes != facts.classes:
        raise DataError(
            f"{name} has {facts.classes} classes of {facts.resolution} images, but the files hold "
            f"{table.classes} classes of {height}x{width}: is this another data set?"
        )
    if "test" not in table.sizes:
        raise DataError(f"{name}: there is no test.parquet beside its train file.")
    return from_table(name, table, validation, 0.0, seed, augment, mean, std, resize, samples)


def from_table(
    name: str,
    table: Table,
    validation: float,
    test: float,
    seed: int,
    augment: str | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    resize: int | None = None,
    samples: int | None = None,
) -> Data:
    """Return the rows of the files as a data set, with whatever split they lack held out; see `images`."""
    if resize is not None and resize < 1:
        raise DataError(f"{name}: resize must be at least 1 pixel, got {resize}.")
    strata = table.y if table.groups is None else table.groups
    splits = completed(table.sizes, strata, validation if samples is None else 0.0, test, seed)
    if samples is not None:
        splits["train"] = drawn(name, splits["train"], table.y[splits["train"]], samples, seed)
        if not len(splits["validation"]):
            rest = splits["train"]
            splits["train"], splits["validation"] = hold_out(rest, strata[rest], validation, seed)
    return Data(
        name=name,
        x=torch.from_numpy(table.x) if isinstance(table.x, np.ndarray) else table.x,
        y=torch.from_numpy(table.y),
        splits={split: torch.from_numpy(indices) for split, indices in splits.items()},
        classes=table.classes,
        groups=None if table.groups is None else torch.from_numpy(table.groups),
        class_names=table.class_names,
        mean=mean,
        std=std,
        augment=None if augment == "none" else augment,
        resize=None if resize is None else (resize, resize),
    )
