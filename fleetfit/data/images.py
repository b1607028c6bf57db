"""Any labelled images on disk, in Parquet files as Hugging Face `datasets` lays them out.

For example Tiny ImageNet, FEMNIST with its writers, or a set of your own. See `parquet` for the layouts.
"""

import os
from pathlib import Path

import torch

from fleetfit.data import parquet
from fleetfit.data._hold_out import completed
from fleetfit.data.dataset import Data, Facts
from fleetfit.errors import DataError

FACTS = Facts(train=None, test=None, classes=None, resolution="any", source="a folder of Parquet files")


def images(
    folder: str,
    image: str | None = None,
    label: str | None = None,
    groups: str | None = None,
    size: int | None = None,
    channels: int | None = None,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    augment: str | None = None,
    mean: tuple[float, ...] = (0.5,),
    std: tuple[float, ...] = (0.25,),
) -> Data:
    """Return a set of images, named after its folder.

    A folder without a test file but with a validation file has its validation file as the test set, as is the habit
    with ImageNet. What has no file is held out from the training images: in proportion for every label, or for every
    group where `groups` is given, so that each writer gives up a share of what it has.

    Args:
        folder: The set's folder; a relative path that does not exist is sought in the folder FLEETFIT_DATA.
        image: Column of the images; None: `img` or `image`.
        label: Column of the labels, integers or text; None: `label`, `labels`, `fine_label` or `coarse_label`.
        groups: Column of a natural group such as "writer_id", numbered in ascending order; None: no groups.
        size: Side in pixels; images are cut to a centred square and resized. None: all images must have one size.
        channels: 1 (grey) or 3 (RGB); None: 1 if every image is grey, else 3.
        validation: Share of the training images that is held out, if there is no validation file.
        test: Share of the images that is held out as the test set, if there is only a train file.
        seed: Of what is held out.
        augment: What training batches go through: None, "crop", "crop-flip", "flip" or "shift".
        mean: Per channel, or one for all, of pixels in [0, 1].
        std: Per channel, or one for all.

    Raises:
        DataError: A file, a column or an image is missing or wrong, or a share is out of range.
        MissingExtra: pyarrow or Pillow is not installed.
    """
    path = Path(folder).expanduser()
    root = os.environ.get("FLEETFIT_DATA")
    if root and not path.is_absolute() and not path.is_dir():
        path = Path(root).expanduser() / path
    name = path.resolve().name
    table = parquet.read(name, str(path), image, label, groups, size, channels)
    return from_table(name, table, validation, test, seed, augment, mean, std)


def named(
    name: str,
    facts: Facts,
    folder: str | None,
    channels: int,
    label: str | None,
    validation: float,
    augment: str | None,
    seed: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Data:
    """Return one of the known sets, after a look at whether the folder holds that set.

    Raises:
        DataError: As `images`, or the files are those of another set, or there is no test file.
        MissingExtra: pyarrow or Pillow is not installed.
    """
    table = parquet.read(name, folder, label=label, channels=channels)
    height, width = table.x.shape[2:]
    if f"{height}x{width}" != facts.resolution or table.classes != facts.classes:
        raise DataError(
            f"{name} has {facts.classes} classes of {facts.resolution} images, but the files hold "
            f"{table.classes} classes of {height}x{width}: is this another data set?"
        )
    if "test" not in table.sizes:
        raise DataError(f"{name}: there is no test.parquet beside its train file.")
    return from_table(name, table, validation, 0.0, seed, augment, mean, std)


def from_table(
    name: str,
    table: parquet.Table,
    validation: float,
    test: float,
    seed: int,
    augment: str | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Data:
    """Return the rows of the files as a data set, with whatever split they lack held out; see `images`."""
    strata = table.y if table.groups is None else table.groups
    splits = completed(table.sizes, strata, validation, test, seed)
    return Data(
        name=name,
        x=torch.from_numpy(table.x),
        y=torch.from_numpy(table.y),
        splits={split: torch.from_numpy(indices) for split, indices in splits.items()},
        classes=table.classes,
        groups=None if table.groups is None else torch.from_numpy(table.groups),
        class_names=table.class_names,
        mean=mean,
        std=std,
        augment=augment,
    )
