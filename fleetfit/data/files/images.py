"""Any labelled images on disk: Parquet files as Hugging Face `datasets` lays them out, or one folder for each class.

For example Tiny ImageNet, ImageNet, or a set of your own. Sets larger than memory stay encoded on disk and are decoded
batch by batch (`lazy`). Nothing is downloaded, and neither layout needs the library `datasets`.

Parquet: a folder with `train.parquet` or `train-00000-of-00002.parquet`, and likewise `validation` (or `valid`, `val`)
and `test`; the files may lie in a subfolder `data`, `plain_text` or one with the set's name. An image is a struct of
`bytes` and `path`, or bare bytes, in any of the formats that `fleetfit.data.encoded.FORMATS` names.

A folder for each class, the layout of ImageNet: `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`. The folders of the splits
are `train`, `validation` (or `valid`, `val`) and `test`; without `train` the class folders lie in the set's folder
itself. Images may lie one folder deeper, in `CLASS/images`, as in Tiny ImageNet. A `test` folder without class folders
holds unlabelled images and is left out.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fleetfit.data import cache
from fleetfit.data.cache import load_folder
from fleetfit.data.dataset import Data, Facts
from fleetfit.data.encoded import Encoded, Files, ImageSource, Origin, Source, decode, opened, read_size, unpacked
from fleetfit.data.files import parquet
from fleetfit.data.files.folders import (
    convert_saved_dataset,
    download,
    find_or_download,
    find_parquet_files,
    is_system_name,
    list_class_folders,
    resolve_folder,
)
from fleetfit.data.splits import ALIASES, SPLITS, fill_missing_splits, hold_out, make_empty_split_notes, subsample
from fleetfit.errors import DataError, MissingExtra, quote_some

_MOST_BYTES = 4 << 30  # of the known sets that are read whole
FACTS = Facts(train=None, test=None, classes=None, resolution="any", source="a folder of Parquet files or of classes")
LAZY_ABOVE = 8 << 30
"""Bytes of decoded images from which on they stay encoded, unless told otherwise."""
_IMAGE = ("img", "image")
_LABEL = ("label", "labels", "fine_label", "coarse_label", "character")
_ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_AT_ONCE = 256  # images in memory as files at a time

Index = tuple[NDArray[np.bytes_], NDArray[np.int64], dict[str, int]]


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
    exif_orientation: bool = True,
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
        exif_orientation: Whether images are turned as their EXIF orientation says, as viewers show them; false: as they
            are stored.
        hub: Whether `folder` is a repository of the Hugging Face hub ("zh-plus/tiny-imagenet"), downloaded once.

    Raises:
        DataError: A file, a column or an image is missing or wrong, or a share is out of range.
        MissingExtra: pyarrow or Pillow is not installed, or `datasets` is not and `hub` is set.
    """
    path = download(folder.rpartition("/")[2], folder) if hub else resolve_folder(folder)
    name = folder.rpartition("/")[2] if hub else path.resolve().name
    path = convert_saved_dataset(path)
    form = Form(size, channels, centre, lazy, upright=exif_orientation)
    if path.is_dir() and has_class_folders(path):
        if (image, label, groups) != (None, None, None):
            raise DataError(
                f"{path} has a folder for each class and no columns, so image, label and groups mean nothing.",
                path=path,
            )
        table = read_class_folders(name, path, form)
    else:
        table = read_parquet(name, str(path), image, label, groups, form)
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
    folder = find_or_download(name, folder, hub, repository)
    table = read_parquet(name, folder, label=label, form=Form(channels=channels, lazy=False, most_bytes=_MOST_BYTES))
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
    table: "LabelledImages",
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
        raise DataError(f"{name}: resize must be at least 1 pixel, got {resize}.", key="resize")
    strata = table.y if table.groups is None else table.groups
    splits = fill_missing_splits(table.sizes, strata, validation if samples is None else 0.0, test, seed)
    if samples is not None:
        splits["train"] = subsample(name, splits["train"], table.y[splits["train"]], samples, seed)
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
        notes=(*table.notes, *make_empty_split_notes(name, table.sizes)),
    )


# ---- as they were found, decoded or not ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelledImages:
    """The rows of all files of a set, one split after the other.

    Attributes:
        x: uint8 [N, C, H, W], or encoded images that look like it.
        y: int64 [N].
        sizes: split -> number of rows, in the order of the rows; only the splits that are there.
        classes: Number of classes.
        class_names: One per class, or ().
        groups: int64 [N], or None if no column of groups was asked for.
        notes: Sentences on what was found.
    """

    x: NDArray[np.uint8] | Encoded
    y: NDArray[np.int64]
    sizes: dict[str, int]
    classes: int
    class_names: tuple[str, ...]
    groups: NDArray[np.int64] | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """What images are brought to.

    Attributes:
        size: Side in pixels to which images are cut (centre, square) and resized; None: they must have one size.
        channels: 1 (grey) or 3 (RGB); None: 1 if every image is grey, else 3; 3 where images stay encoded.
        centre: Share of the shorter side that the square keeps, used with a size only.
        lazy: Whether images stay encoded; None: from 8 GiB of decoded images on.
        most_bytes: What all decoded images may take, where that is known beforehand.
        upright: Whether images are turned as their EXIF orientation says.
    """

    size: int | None = None
    channels: int | None = None
    centre: float = 1.0
    lazy: bool | None = None
    most_bytes: int | None = None
    upright: bool = True

    def check(self, name: str) -> None:
        """Refuse what is out of range.

        Raises:
            DataError: It is.
        """
        if self.size is not None and self.size < 1:
            raise DataError(f"{name}: size must be at least 1 pixel, got {self.size}.", key="size")
        if self.channels not in (None, 1, 3):
            raise DataError(f"{name}: channels must be 1 (grey) or 3 (RGB), got {self.channels}.", key="channels")
        if not 0 < self.centre <= 1:
            raise DataError(f"{name}: centre must be above 0 and at most 1, got {self.centre}.", key="centre")
        if self.centre < 1 and self.size is None:
            raise DataError(f"{name}: centre = {self.centre} needs a size to bring the square to.", key="centre")


AS_THEY_ARE = Form()


def pictures(
    name: str,
    sources: Sequence[Source],
    column: str,
    form: Form,
    stamps: Callable[[], Sequence[Path]],
    places: Callable[[], ImageSource],
) -> NDArray[np.uint8] | Encoded:
    """Return all images of some files, decoded from the cache or still encoded, whichever the form asks for.

    Args:
        name: Of the set.
        sources: What the images are read from.
        column: In which column.
        form: What they are brought to; checked.
        stamps: Gives the files that change when the images do.
        places: Makes the index of encoded images.

    Raises:
        DataError: There are no images, or one that is looked at is wrong.
    """
    rows = sum(source.rows for source in sources)
    if not rows:
        raise DataError(
            f"{sources[0].path.parent} holds no images: its files have no rows.", path=sources[0].path.parent
        )
    if form.most_bytes is not None:
        _check_bytes(name, rows, _size_of_first(sources[0], column, upright=False), form.most_bytes)
    if form.lazy is not False:
        height, width = (form.size, form.size) if form.size else _size_of_first(sources[0], column, form.upright)
        shape = (form.channels or 3, height, width)
        if form.lazy or rows * math.prod(shape) > LAZY_ABOVE:
            return Encoded(places(), shape, form.centre if form.size else None, form.upright)
    try:
        return cache.load_array(
            cache.make_key(name, stamps(), [column, form.size, form.channels, form.centre, form.upright]),
            rows,
            lambda allocate: decode(sources, column, form.size, form.channels, allocate, form.centre, form.upright),
        )
    except MemoryError:
        raise DataError(
            f"{name}: memory cannot hold {rows:,} decoded images. With size = ... they get smaller, and with lazy = "
            "true they stay encoded.",
            key="lazy",
        ) from None


def _size_of_first(source: Source, column: str, upright: bool) -> tuple[int, int]:
    """Return height and width of the first image."""
    first = next((some for some in source.images(column) if some), None)
    if first is None:
        raise DataError(f"{source.path} has no rows.", path=source.path)
    with opened(first[0], source.place(0), upright) as picture:
        return picture.height, picture.width


def _check_bytes(name: str, rows: int, size: tuple[int, int], most: int) -> None:
    if rows * math.prod(size) > most:
        raise DataError(
            f"{name}: {rows:,} images, of which the first has {size[0]}x{size[1]} pixels, are more than this data set "
            "holds: is this another one?"
        )


def read_parquet(
    name: str,
    folder: str | None,
    image: str | None = None,
    label: str | None = None,
    groups: str | None = None,
    form: Form = AS_THEY_ARE,
    splits: Sequence[str] = SPLITS,
) -> LabelledImages:
    """Read a set, and decode it unless it stays encoded.

    Args:
        name: The set's name, for messages and as a folder name.
        folder: Its folder or the folder above; None: the environment variable FLEETFIT_DATA names the folder above.
        image: Column of the images; None: `img` or `image`.
        label: Column of the labels, integers or text; None: `label`, `labels`, `fine_label`, `coarse_label` or
            `character`.
        groups: Column of a natural group (writer, speaker), or None.
        form: What images are brought to.
        splits: Which splits are read; others may be there.

    Raises:
        DataError: A file, a column or an image is missing or wrong.
        MissingExtra: pyarrow or Pillow is not installed.
    """
    form.check(name)
    there = {split: paths for split, paths in find_parquet_files(name, folder).items() if split in splits}
    files = [parquet.File(path) for paths in there.values() for path in paths]
    image = files[0].column(image, _IMAGE, "image")
    label = files[0].column(label, _LABEL, "label")
    y, classes, class_names = parquet.labels_of(files, label)
    return LabelledImages(
        x=pictures(
            name, files, image, form, lambda: [file.path for file in files], lambda: unpacked(name, files, image)
        ),
        y=y,
        sizes={split: sum(file.rows for file in files if file.path in paths) for split, paths in there.items()},
        classes=classes,
        class_names=class_names,
        groups=None if groups is None else parquet.numbered(parquet.values_of(files, groups))[0],
    )


# ---- one folder for each class ---------------------------------------------------------------------------------------


def has_class_folders(folder: Path) -> bool:
    """Return whether a folder looks like this layout."""
    train = folder / "train"
    return (
        bool(list_class_folders(train))
        if train.is_dir()
        else any(_images_of(place) for place in list_class_folders(folder))
    )


def sizes_of_some(folder: Path, most: int = 64, upright: bool = True) -> list[tuple[int, int]]:
    """Return width and height of some images of class folders, evenly spread; none where Pillow is not installed.

    Args:
        folder: The set's folder.
        most: About so many are looked at.
        upright: Whether images are turned as their EXIF orientation says.
    """
    place = _split_folders(folder.name, folder)["train"]
    classes = list_class_folders(place)
    found = []
    for one in classes[:: max(1, len(classes) // most)]:
        names = _images_of(one)
        each = max(1, most // len(classes))
        for name in names[:: max(1, len(names) // each)][:each]:
            try:
                with opened((one / name).read_bytes(), Origin(one / name)) as picture:
                    found.append(read_size(picture, upright))
            except MissingExtra:
                return []
    return found


def read_class_folders(name: str, folder: Path, form: Form) -> LabelledImages:
    """Read a set; labels follow the names of the class folders of the training images, in ascending order.

    Args:
        name: The set's name, for messages and the cache.
        folder: Its folder.
        form: What images are brought to.

    Raises:
        DataError: A folder or an image is missing or wrong.
        MissingExtra: Pillow is not installed.
    """
    form.check(name)
    folder = folder.resolve()
    places = _split_folders(name, folder)
    classes = [place.name for place in list_class_folders(places["train"])]
    seen = [deep for place in places.values() for deep in (place, *_with_images(place))]
    stem = cache.make_key(name, seen, ["class folders", *places, *classes], suffix="")
    names, y, sizes = load_folder(stem, lambda target: _write_index(target, folder, places, classes), _read_index)
    counts = np.bincount(y[: sizes["train"]], minlength=len(classes))
    source = _Images(Files(folder, names))
    return LabelledImages(
        x=pictures(name, [source], "", form, source.paths, lambda: source.files),
        y=y,
        sizes=sizes,
        classes=len(classes),
        class_names=tuple(classes),
        groups=None,
        notes=_empty_classes(name, places["train"], [classes[i] for i in np.flatnonzero(counts == 0)], len(classes)),
    )


def _empty_classes(name: str, train: Path, empty: Sequence[str], count: int) -> tuple[str, ...]:
    if not empty:
        return ()
    return (
        f"{name}: class folders without images in {train}: {quote_some(empty)} ({len(empty)} of {count}). They count "
        "as classes. Remove the folders to train without them.",
    )


@dataclass(frozen=True)
class _Images:
    """The images of the folders as a `Source`."""

    files: Files

    @property
    def path(self) -> Path:
        return self.files.root / "train"

    @property
    def rows(self) -> int:
        return len(self.files)

    def images(self, column: str) -> Iterator[list[bytes]]:
        for start in range(0, self.rows, _AT_ONCE):
            yield [self.files.read(i) for i in range(start, min(self.rows, start + _AT_ONCE))]

    def place(self, row: int) -> Origin:
        return self.files.place(row)

    def paths(self) -> list[Path]:
        return [self.files.place(row).path for row in range(self.rows)]


def _with_images(place: Path) -> list[Path]:
    """Return the folders in which a split's images lie, class by class."""
    return [deep for one in list_class_folders(place) for deep in (one, one / "images") if deep.is_dir()]


def _images_of(place: Path) -> list[str]:
    """Return the names of the images of a class folder, sorted."""
    found = []
    for deep in (place, place / "images"):
        if deep.is_dir():
            prefix = "" if deep == place else "images/"
            entries = (e for e in os.scandir(deep) if e.name.lower().endswith(_ENDINGS) and e.is_file())
            found += [prefix + e.name for e in entries if not is_system_name(e.name)]
    return sorted(found)


def _split_folders(name: str, folder: Path) -> dict[str, Path]:
    """Return the folder of each split that is there, "train" first."""
    found = {}
    for split, aliases in ALIASES.items():
        place = next((folder / alias for alias in aliases if (folder / alias).is_dir()), None)
        if place is None or (split == "test" and not list_class_folders(place)):
            continue
        found[split] = place
    if "train" not in found:
        return {"train": folder}
    lacking = [place for place in found.values() if not any(_images_of(one) for one in list_class_folders(place))]
    if lacking:
        raise DataError(
            f"{name}: {lacking[0]} has no class folders with images in them. Put the images of each class into a "
            "folder of its own, with the same names as the class folders of the training images.",
            path=lacking[0],
        )
    return found


def _write_index(target: Path, folder: Path, places: dict[str, Path], classes: list[str]) -> None:
    """Write the path of each image below the set's folder, its label, and how many each split has."""
    label = {name: number for number, name in enumerate(classes)}
    names: list[bytes] = []
    y: list[int] = []
    sizes = {}
    for split, place in places.items():
        before = len(names)
        for one in list_class_folders(place):
            if one.name not in label:
                raise DataError(f"{one}: this class is not among the training images in {places['train']}.", path=one)
            images = [os.fsencode((one / name).relative_to(folder)) for name in _images_of(one)]
            names += images
            y += [label[one.name]] * len(images)
        sizes[split] = len(names) - before
    np.save(target / "names.npy", np.array(names, dtype=np.bytes_))
    np.save(target / "y.npy", np.array(y, dtype=np.int64))
    (target / "sizes.json").write_text(json.dumps(sizes))


def _read_index(folder: Path) -> Index:
    names = np.load(folder / "names.npy", mmap_mode="r")
    y = np.load(folder / "y.npy")
    sizes = json.loads((folder / "sizes.json").read_text())
    if not len(names) == len(y) == sum(sizes.values()):
        raise ValueError("the parts of the index have different lengths")
    return names, y, sizes
