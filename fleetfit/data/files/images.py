"""Labelled images on disk: Parquet files in the form of Hugging Face `datasets`, or class folders, optionally zipped.

Examples are Tiny ImageNet, ImageNet, and your own sets. Sets larger than memory stay encoded on disk and are decoded
batch by batch (`lazy`). Neither layout downloads anything or needs the library `datasets`.

Parquet: a folder with `train.parquet` or `train-00000-of-00002.parquet`, and likewise `validation` (or `valid`, `val`)
and `test`; the files may be in a subfolder `data`, `plain_text` or one with the set's name. An image is a struct of
`bytes` and `path`, or bare bytes, in any of the formats of `fleetfit.data.image_reader.FORMATS`.

A folder for each class, the layout of ImageNet: `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`. The folders of the splits
are `train`, `validation` (or `valid`, `val`) and `test`; without `train` the class folders are in the set's folder
itself. Images may be one folder deeper, in `CLASS/images`, as in Tiny ImageNet. A `test` folder without class folders
has unlabelled images and is left out. A zip archive of such folders is unpacked once into the cache.

Images of devices: `DEVICE/CLASS/*.jpg` (`train/DEVICE/CLASS`, ...), or a CSV file of file, label and device beside the
images (see `fleetfit.data.files.devices`).
"""

import bisect
import functools
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray

from fleetfit.data import cache
from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files import parquet
from fleetfit.data.files.devices import (
    ListedFiles,
    describe_devices,
    find_file_table,
    label_new_files,
    list_devices,
    read_file_table,
)
from fleetfit.data.files.folders import (
    convert_saved_dataset,
    download,
    find_or_download,
    find_parquet_files,
    is_system_name,
    list_class_folders,
    resolve_folder,
)
from fleetfit.data.image_reader import (
    EncodedImages,
    ImageFiles,
    ImageIndex,
    ImageSpec,
    Origin,
    PackedImages,
    decode_all,
    open_image,
    pack_images,
    read_first_size,
    read_size,
)
from fleetfit.data.splits import ALIASES, SPLITS, fill_missing_splits, hold_out, make_empty_split_notes, subsample
from fleetfit.errors import DataError, format_cause, quote_some
from fleetfit.files import check_file

_MAX_BYTES = 4 << 30  # limit for the decoded images of a named set
FACTS = Facts(train=None, test=None, classes=None, resolution="any", source="a folder of Parquet files or of classes")
LAZY_ABOVE = 8 << 30
"""Bytes of decoded images above which they stay encoded, unless `lazy` is set."""
_MOST_OPENED = 64  # files whose size is read, approximately, to tell what sizes there are

_IMAGE = ("img", "image")
_LABEL = ("label", "labels", "fine_label", "coarse_label", "character")
_MAX_UNPACKED, _MAX_RATIO = 1 << 30, 200  # a zip archive that exceeds both limits is refused: bytes, times its own size
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)  # RuntimeError: a password
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

Index = tuple[NDArray[np.bytes_], NDArray[np.int64], dict[str, int]]
"""Names of the images, their labels, and the sizes of the splits."""


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

    Without a test set, the validation set is the test set, as usual with ImageNet. Missing splits are held out of the
    training images: in proportion for each label, or for each group if `groups` is set.

    Args:
        folder: The set's folder, or a zip archive of class folders. A relative path that does not exist is looked up in
            the folder FLEETFIT_DATA.
        image: Column of the images; None: `img` or `image`. In a table of files its column is found.
        label: Column of the labels, integers or text; None: `label`, `labels`, `fine_label`, `coarse_label` or
            `character`. In a table of files see `find_file_table`.
        groups: Column of a natural group such as "writer_id", numbered in ascending order; None: no groups. Folders of
            devices are groups.
        size: Side in pixels. Images are cut to a centred square and resized. None: all images must have the same size.
        centre: Share of the shorter side that the square keeps; with ImageNet often 0.875, 224 of 256 pixels.
        channels: 1 (grey) or 3 (RGB); None: 1 if every image is grey, else 3 (always 3 if images stay encoded).
        lazy: Whether images stay encoded on disk and are decoded batch by batch; None: above 8 GiB of decoded images.
        validation: Share of the training images to hold out, if there is no validation set.
        test: Share of the images to hold out as the test set, if there is only a training set.
        seed: Seed of held out samples.
        augment: Augmentation of training batches: "crop", "crop-flip", "flip", "resized-crop" or "shift"; None or
            "none": nothing.
        mean: Per channel, or one for all, of pixels in [0, 1].
        std: Per channel, or one for all.
        resize: Side in pixels to which batches are resized after augmentation; None: they keep their size.
        samples: Number of training images to draw, in proportion for every label, those held out for validation
            included; None: all.
        exif_orientation: Whether to apply the EXIF orientation, as viewers do; false: images stay as stored.
        hub: Whether `folder` is a repository of the Hugging Face hub ("zh-plus/tiny-imagenet"), downloaded once.

    Raises:
        DataError: A file, a column or an image is missing or wrong, or a share is out of range.
        MissingExtra: `hub` is set, but `datasets` is not installed.
    """
    path = download(folder.rpartition("/")[2], folder) if hub else resolve_folder(folder)
    name = folder.rpartition("/")[2] if hub else path.resolve().name.removesuffix(".zip")
    path = unpack_zip(path) if path.suffix.lower() == ".zip" else convert_saved_dataset(path)
    spec = ImageSpec(size, channels, centre, lazy, upright=exif_orientation)
    is_table = path.is_file() or (image, label, groups) != (None, None, None)
    file_table = find_file_table(path, SUFFIXES, label, groups) if is_table else None
    if file_table is not None:
        labelled = read_listed_images(name, path if path.is_dir() else path.parent, read_file_table(file_table), spec)
    elif path.is_dir() and has_class_folders(path):
        if (image, label, groups) != (None, None, None):
            raise DataError(
                f"{path} has a folder per class and no columns. Leave image, label and groups out.", path=path
            )
        labelled = read_class_folders(name, path, spec)
    else:
        labelled = read_parquet(name, str(path), image, label, groups, spec)
    return make_data(name, labelled, validation, test, seed, augment, mean, std, resize, samples)


def read_images_like(
    trained: Data,
    path: Path,
    paths: Sequence[Path],
    size: int | None,
    centre: float,
    upright: bool,
    listed: Sequence[str | None] | None = None,
) -> Data:
    """Return images as test samples in the shape of a training set. They stay encoded on disk.

    An image has the label of its row in a table of files, or of the nearest folder that is named after a class. If one
    has none, the data have no labels.

    Args:
        trained: The training set.
        path: The file or folder that the user named.
        paths: Its images, at least one.
        size: Side to which training images were resized; None: they all had the same size.
        centre: Share of the shorter side that was kept.
        upright: Whether to apply the EXIF orientation.
        listed: The label of each image in a table of files; None: without such a table.

    Raises:
        DataError: The first image cannot be opened.
    """
    names, labels, notes = label_new_files(trained, path, paths, listed)
    source = ImageFiles((path if path.is_dir() else path.parent).absolute(), names)
    height, width = trained.x.shape[2:]
    first_width, first_height = read_first_size(source, upright)
    if size is None and (first_height, first_width) != (height, width):
        notes.append(
            f"{path.name}: the first image has {first_height}x{first_width} pixels (height x width). Images are cut to "
            f"the proportions of the training images and resized to {height}x{width}."
        )
    return Data(
        name=path.resolve().name,
        x=EncodedImages(source, trained.x.shape[1:], centre, upright),
        y=torch.from_numpy(np.zeros(len(names), dtype=np.int64) if labels is None else labels),
        splits={"test": torch.arange(len(names))},
        classes=trained.classes,
        class_names=trained.class_names,
        mean=trained.mean,
        std=trained.std,
        resize=trained.resize,
        labelled=labels is not None,
        notes=tuple(notes),
        file_names=source.names,
    )


@dataclass(frozen=True)
class LabelledImages:
    """The images of all files of a set, one split after the other.

    Attributes:
        x: uint8 [N, C, H, W], or encoded images of that shape.
        y: int64 [N].
        sizes: Split -> number of images, in their order; only the splits that exist.
        classes: Number of classes.
        class_names: One per class, or ().
        groups: int64 [N], or None without a column of groups.
        notes: Sentences on the files.
        file_names: The file of each image, bytes [N]; None if images are not files.
    """

    x: NDArray[np.uint8] | EncodedImages
    y: NDArray[np.int64]
    sizes: dict[str, int]
    classes: int
    class_names: tuple[str, ...]
    groups: NDArray[np.int64] | None
    notes: tuple[str, ...] = ()
    file_names: NDArray[np.bytes_] | None = None


def read_listed_images(name: str, folder: Path, files: ListedFiles, spec: ImageSpec) -> LabelledImages:
    """Read the images of a table of files.

    Raises:
        DataError: An image is wrong.
        MissingExtra: Pillow is not installed.
    """
    spec.check(name)
    folder = folder.resolve()
    names = np.array([os.fsencode(path.resolve().relative_to(folder)) for path in files.paths], dtype=np.bytes_)
    images = ImageFiles(folder, names)
    return LabelledImages(
        x=_load_images(name, folder, images, spec),
        y=files.y,
        sizes=files.sizes,
        classes=len(files.class_names),
        class_names=files.class_names,
        groups=files.groups,
        notes=(*_describe_resizing(name, images, spec), *files.notes),
        file_names=names,
    )


def make_data(
    name: str,
    labelled: LabelledImages,
    validation: float,
    test: float,
    seed: int,
    augment: str | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    resize: int | None = None,
    samples: int | None = None,
) -> Data:
    """Return images as a data set, with missing splits held out (see `images`).

    Raises:
        DataError: A share, `resize` or `samples` is out of range.
    """
    if resize is not None and resize < 1:
        raise DataError(f"{name}: resize must be at least 1 pixel, got {resize}.", key="resize")
    strata = labelled.y if labelled.groups is None else labelled.groups
    splits = fill_missing_splits(labelled.sizes, strata, validation if samples is None else 0.0, test, seed)
    if samples is not None:
        train = subsample(name, splits["train"], labelled.y[splits["train"]], samples, seed)
        splits["train"] = train
        if not len(splits["validation"]):
            splits["train"], splits["validation"] = hold_out(train, strata[train], validation, seed)
    return Data(
        name=name,
        x=torch.from_numpy(labelled.x) if isinstance(labelled.x, np.ndarray) else labelled.x,
        y=torch.from_numpy(labelled.y),
        splits={split: torch.from_numpy(indices) for split, indices in splits.items()},
        classes=labelled.classes,
        groups=None if labelled.groups is None else torch.from_numpy(labelled.groups),
        class_names=labelled.class_names,
        mean=mean,
        std=std,
        augment=None if augment == "none" else augment,
        resize=None if resize is None else (resize, resize),
        notes=(*labelled.notes, *make_empty_split_notes(name, labelled.sizes)),
        file_names=labelled.file_names,
    )


def _load_images(
    name: str, folder: Path, source: "ImageFiles | _ParquetImages", spec: ImageSpec
) -> NDArray[np.uint8] | EncodedImages:
    """Return the images of a set, decoded from the cache or still encoded, depending on the specification.

    Args:
        name: The set's name.
        folder: The folder of the images, for messages.
        source: The images.
        spec: Size, channels and orientation; checked.

    Raises:
        DataError: There are no images, or one of them is wrong.
    """
    rows = len(source)
    if not rows:
        raise DataError(f"{folder} has no images: its files have no rows.", path=folder)
    if spec.max_bytes is not None:
        width, height = read_first_size(source, upright=False)
        if rows * width * height > spec.max_bytes:
            raise DataError(
                f"{name}: {rows:,} images, the first of {height}x{width} pixels, are more than this data set has. Is "
                "this another data set?"
            )
    if spec.lazy is not False:
        width, height = (spec.size, spec.size) if spec.size else read_first_size(source, spec.upright)
        shape = (spec.channels or 3, height, width)
        if spec.lazy or rows * math.prod(shape) > LAZY_ABOVE:
            index: ImageIndex = source if isinstance(source, ImageFiles) else source.pack(name)
            return EncodedImages(index, shape, spec.centre if spec.size else None, spec.upright)
    column = "" if isinstance(source, ImageFiles) else source.column
    key = cache.make_key(name, source.paths(), [column, spec.size, spec.channels, spec.centre, spec.upright])
    try:
        return cache.load_array(key, rows, lambda allocate: decode_all(source, spec, allocate))
    except MemoryError:
        raise DataError(
            f"{name}: memory cannot hold {rows:,} decoded images. Set a smaller size, or keep them "
            "encoded with lazy = true.",
            key="lazy",
        ) from None


# ---- Parquet files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ParquetImages:
    """The images of a column, one file after the other."""

    files: Sequence[parquet.File]
    column: str

    @functools.cached_property
    def starts(self) -> list[int]:
        """The index of the first image of each file, and the number of images."""
        return [0, *np.cumsum([file.rows for file in self.files]).tolist()]

    def __len__(self) -> int:
        return self.starts[-1]

    def batches(self) -> Iterator[list[bytes]]:
        for file in self.files:
            yield from file.images(self.column)

    def origin(self, index: int) -> Origin:
        number = bisect.bisect_right(self.starts, index) - 1
        return self.files[number].place(index - self.starts[number])

    def paths(self) -> list[Path]:
        return [file.path for file in self.files]

    def pack(self, name: str) -> PackedImages:
        key = cache.make_key(name, self.paths(), ["encoded", self.column], suffix="")
        return pack_images(key, self, list(zip(map(str, self.paths()), self.starts[:-1], strict=True)))


def read_parquet(
    name: str,
    folder: str | None,
    image: str | None = None,
    label: str | None = None,
    groups: str | None = None,
    spec: ImageSpec | None = None,
    splits: Sequence[str] = SPLITS,
) -> LabelledImages:
    """Read a set from Parquet files, and decode it unless it stays encoded.

    Args:
        name: The set's name, for messages and as a folder name.
        folder: Its folder or the parent folder; None: the environment variable FLEETFIT_DATA is the parent folder.
        image: Column of the images; None: `img` or `image`.
        label: Column of the labels, integers or text; None: `label`, `labels`, `fine_label`, `coarse_label` or
            `character`.
        groups: Column of a natural group (writer, speaker), or None.
        spec: Size, channels and orientation of the images.
        splits: The splits to read.

    Raises:
        DataError: A file, a column or an image is missing or wrong.
    """
    spec = spec or ImageSpec()
    spec.check(name)
    split_files = {
        split: [parquet.File(path) for path in split_paths]
        for split, split_paths in find_parquet_files(name, folder).items()
        if split in splits
    }
    all_files = [file for files in split_files.values() for file in files]
    image = all_files[0].column(image, _IMAGE, "image")
    label = all_files[0].column(label, _LABEL, "label")
    y, classes, class_names = parquet.read_labels(all_files, label)
    return LabelledImages(
        x=_load_images(name, all_files[0].path.parent, _ParquetImages(all_files, image), spec),
        y=y,
        sizes={split: sum(file.rows for file in files) for split, files in split_files.items()},
        classes=classes,
        class_names=class_names,
        groups=None if groups is None else parquet.encode_values(parquet.read_values(all_files, groups))[0],
    )


def read_named_set(
    name: str, facts: Facts, repository: str, folder: str | None, hub: bool, channels: int, label: str | None
) -> LabelledImages:
    """Read a named set from Parquet files, downloaded with `hub`, and compare it with its key figures.

    Raises:
        DataError: As `images`, or the files are those of another set, or there is no test file.
        MissingExtra: `hub` is set, but `datasets` is not installed.
    """
    folder = find_or_download(name, folder, hub, repository)
    spec = ImageSpec(channels=channels, lazy=False, max_bytes=_MAX_BYTES)
    labelled = read_parquet(name, folder, label=label, spec=spec)
    height, width = labelled.x.shape[2:]
    if f"{height}x{width}" != facts.resolution or labelled.classes != facts.classes:
        raise DataError(
            f"{name} has {facts.classes} classes of {facts.resolution} images, but the files have "
            f"{labelled.classes} classes of {height}x{width}. Is this another data set?"
        )
    if "test" not in labelled.sizes:
        raise DataError(f"{name}: test.parquet is missing next to its train file.")
    return labelled


# ---- one folder for each class ---------------------------------------------------------------------------------------


def unpack_zip(path: Path) -> Path:
    """Unpack the images of a zip archive of class folders, once, into the cache; return the folder.

    Raises:
        DataError: The archive is missing or damaged, has no images, or claims an excessive size.
    """
    check_file(path, DataError)

    def build(target: Path) -> None:
        try:
            with zipfile.ZipFile(path) as archive:
                members = [
                    member
                    for member in archive.infolist()
                    if member.filename.lower().endswith(SUFFIXES)
                    and not any(map(is_system_name, PurePosixPath(member.filename).parts))
                ]
                size = sum(member.file_size for member in members)
                if size > max(_MAX_UNPACKED, _MAX_RATIO * path.stat().st_size):
                    raise DataError(f"{path} claims to unpack to {size:,} bytes. It is damaged.", path=path)
                for member in members:
                    # Stays inside the folder: zipfile drops "..", drives and leading slashes.
                    archive.extract(member, target)
        except _ZIP_ERRORS as error:
            raise DataError(f"{path} cannot be read as a zip archive: {format_cause(error)}", path=path) from error
        if not members:
            raise DataError(f"{path} has no images: expected CLASS/*.jpg or train/CLASS/*.jpg in it.", path=path)

    folder = cache.load_folder(cache.make_key(path.stem, [path], ["zip"], suffix=""), build, lambda folder: folder)
    while not has_class_folders(folder) and len(folders := list_class_folders(folder)) == 1:
        folder = folders[0]  # one folder may enclose the class folders
    return folder


def has_class_folders(folder: Path) -> bool:
    """Return whether a folder has class folders of images, also within folders of devices."""
    train = folder / "train"
    if train.is_dir():
        return bool(list_class_folders(train))
    return any(map(_list_images, list_class_folders(folder))) or bool(list_devices(folder, _list_images))


def has_images(folder: Path) -> bool:
    """Return whether the class folders of a set (of its training split) have images."""
    train = folder / "train"
    return any(map(_list_images, _find_classes(train if train.is_dir() else folder, has_devices(folder))))


def has_devices(folder: Path) -> bool:
    """Return whether a set of class folders has them within folders of devices."""
    train = folder / "train"
    return bool(list_devices(train if train.is_dir() else folder, _list_images))


def _find_classes(split_folder: Path, by_device: bool) -> list[Path]:
    """Return the class folders of a split, also those within folders of devices."""
    outer = list_class_folders(split_folder)
    return [path for device in outer for path in list_class_folders(device)] if by_device else outer


def sample_images(folder: Path, count: int = 64) -> list[Path]:
    """Return some evenly spaced images of class folders, about as many as `count`."""
    class_folders = _find_classes(_find_split_folders(folder.name, folder)["train"], has_devices(folder))
    per_class = max(1, count // max(1, len(class_folders)))
    images = []
    for class_folder in class_folders[:: max(1, len(class_folders) // count)]:
        names = _list_images(class_folder)
        images += [class_folder / name for name in names[:: max(1, len(names) // per_class)][:per_class]]
    return images


def _describe_resizing(name: str, images: ImageFiles, spec: ImageSpec) -> list[str]:
    """Return a note on the sizes of the files, if they are resized."""
    if spec.size is None:
        return []
    paths = [images.path(i) for i in range(0, len(images), max(1, len(images) // _MOST_OPENED))]
    sides = [side for size in sample_sizes(paths, len(paths), spec.upright) for side in size]
    low, high = min(sides), max(sides)
    if low == high == spec.size:
        return []
    some = "the files" if len(paths) == len(images) else f"{len(paths)} of {len(images):,} files, which were opened,"
    sides_range = f"{low}" if low == high else f"{low} to {high}"
    return [
        f"{name}: {some} have sides of {sides_range} pixels. Centred squares are resized to {spec.size}x{spec.size}; "
        "data.size sets another side."
    ]


def sample_sizes(images: Sequence[Path], count: int = _MOST_OPENED, upright: bool = True) -> list[tuple[int, int]]:
    """Return width and height of some evenly spaced images.

    Args:
        images: The images.
        count: Approximate number of images to open.
        upright: Whether to apply the EXIF orientation.
    """
    sizes = []
    for path in images[:: max(1, len(images) // count)]:
        with open_image(path.read_bytes(), Origin(path)) as image:
            sizes.append(read_size(image, upright))
    return sizes


def read_class_folders(name: str, folder: Path, spec: ImageSpec) -> LabelledImages:
    """Read a set from class folders. Their names in the training split are the classes in ascending order.

    Args:
        name: The set's name, for messages and the cache.
        folder: Its folder.
        spec: Size, channels and orientation of the images.

    Raises:
        DataError: A folder or an image is missing or wrong.
    """
    spec.check(name)
    folder = folder.resolve()
    split_folders = _find_split_folders(name, folder)
    by_device = has_devices(folder)
    class_folders = {split: _find_classes(path, by_device) for split, path in split_folders.items()}
    class_names = tuple(sorted({class_folder.name for class_folder in class_folders["train"]}))
    image_folders = [
        path
        for split, split_folder in split_folders.items()
        for path in (
            split_folder,
            *(list_class_folders(split_folder) if by_device else ()),
            *(path for top in class_folders[split] for path in (top, top / "images") if path.is_dir()),
        )
    ]
    key = cache.make_key(name, image_folders, ["class folders", *split_folders, *class_names], suffix="")
    names, y, sizes = cache.load_folder(
        key, lambda target: _write_index(target, folder, class_folders, class_names), _read_index
    )
    images = ImageFiles(folder, names)
    x = _load_images(name, folder, images, spec)
    counts = np.bincount(y[: sizes["train"]], minlength=len(class_names))
    empty = [class_names[i] for i in np.flatnonzero(counts == 0)]
    note = (
        f"{name}: class folders without images in {split_folders['train']}: {quote_some(empty)} ({len(empty)} of "
        f"{len(class_names)}). They count as classes. Remove the folders to exclude them."
    )
    notes, groups = [*_describe_resizing(name, images, spec), *([note] if empty else [])], None
    if by_device:
        depth = len(split_folders["train"].relative_to(folder).parts)
        devices, groups = np.unique([Path(os.fsdecode(one)).parts[depth] for one in names], return_inverse=True)
        notes.insert(0, describe_devices(name, devices.tolist(), class_names))
    return LabelledImages(x, y, sizes, len(class_names), class_names, groups, tuple(notes), names)


def _list_images(class_folder: Path) -> list[str]:
    """Return the sorted names of the images of a class, relative to its folder."""
    names = []
    for folder, prefix in ((class_folder, ""), (class_folder / "images", "images/")):
        if folder.is_dir():
            entries = (e for e in os.scandir(folder) if e.name.lower().endswith(SUFFIXES) and e.is_file())
            names += [prefix + entry.name for entry in entries if not is_system_name(entry.name)]
    return sorted(names)


def _find_split_folders(name: str, folder: Path) -> dict[str, Path]:
    """Return the folder of each split that exists, "train" first."""
    split_folders = {}
    for split, aliases in ALIASES.items():
        path = next((folder / alias for alias in aliases if (folder / alias).is_dir()), None)
        if path is not None and (split != "test" or list_class_folders(path)):
            split_folders[split] = path
    if "train" not in split_folders:
        return {"train": folder}
    for path in split_folders.values():
        if not any(map(_list_images, _find_classes(path, has_devices(folder)))):
            raise DataError(
                f"{name}: {path} has no class folders with images. Put the images of each class into a folder with "
                "the name of the training class.",
                path=path,
            )
    return split_folders


def _write_index(target: Path, folder: Path, class_folders: dict[str, list[Path]], class_names: Sequence[str]) -> None:
    """Write the relative path of each image, its label, and the sizes of the splits."""
    labels = {name: label for label, name in enumerate(class_names)}
    names: list[bytes] = []
    y: list[int] = []
    sizes = {}
    for split, split_class_folders in class_folders.items():
        start = len(names)
        for class_folder in split_class_folders:
            if class_folder.name not in labels:
                raise DataError(
                    f"{class_folder}: the class has no training images.",
                    path=class_folder,
                )
            paths = [class_folder / name for name in _list_images(class_folder)]
            names += [os.fsencode(path.relative_to(folder)) for path in paths]
            y += [labels[class_folder.name]] * len(paths)
        sizes[split] = len(names) - start
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
