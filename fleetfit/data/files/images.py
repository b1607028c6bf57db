"""Labeled images on disk: Parquet files in the form of Hugging Face `datasets`, or class folders, optionally zipped.

Examples are Tiny ImageNet, ImageNet, and your own sets. Sets larger than memory stay encoded on disk and are decoded
batch by batch (`lazy`). Neither layout downloads anything or needs the library `datasets`.

Parquet: a folder with `train.parquet` or `train-00000-of-00002.parquet`, and likewise `validation` (or `valid`, `val`)
and `test`; the files may be in a subfolder `data`, `plain_text` or one with the set's name. An image is a struct of
`bytes` and `path`, or bare bytes, in any of the formats of `fleetfit.data.image_reader.FORMATS`.

A folder for each class, the layout of ImageNet: `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`. The folders of the splits
are `train`, `validation` (or `valid`, `val`) and `test`; without `train` the class folders are in the set's folder
itself. Images may be one folder deeper, in `CLASS/images`, as in Tiny ImageNet. A `test` folder without class folders
has unlabeled images and is left out. A zip archive of such folders is unpacked once into the cache.

Images of devices: `DEVICE/CLASS/*.jpg` (`train/DEVICE/CLASS`, ...), or a CSV file of file, label and device beside the
images (see `fleetfit.data.files.labeled`).
"""

import bisect
import functools
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fleetfit.data import cache
from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files import parquet
from fleetfit.data.files.folders import (
    convert_saved_dataset,
    download,
    find_parquet_files,
    is_system_name,
    list_folder,
    resolve_folder,
)
from fleetfit.data.files.labeled import (
    IMAGES,
    find_class_folders,
    find_labeled_files,
    find_new_files,
    read_new_parquet,
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
from fleetfit.data.rows import Rows, make_new_data
from fleetfit.data.splits import SPLITS
from fleetfit.errors import DataError, format_cause
from fleetfit.files import check_file

FACTS = Facts(source="a folder of Parquet files or of classes")
LAZY_ABOVE = 8 << 30
"""Bytes of decoded images above which they stay encoded, unless `lazy` is set."""
_MAX_OPENED = 64  # files whose size is read, approximately, to tell what sizes there are

_IMAGE = ("img", "image")
_LABEL = ("label", "labels", "fine_label", "coarse_label", "character")
_MAX_UNPACKED, _MAX_RATIO = 1 << 30, 200  # a zip archive that exceeds both limits is refused: bytes, times its own size
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)  # RuntimeError: a password


def images(
    folder: str,
    image: str | None = None,
    label: str | None = None,
    groups: str | None = None,
    size: int | None = None,
    center: float = 1.0,
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
            `character`. In a table of files it is detected.
        groups: Column of a natural group such as "writer_id", numbered in ascending order; None: no groups. Folders of
            devices are groups.
        size: Side in pixels. Images are cut to a centered square and resized. None: all images must have the same size.
        center: Share of the shorter side that the square keeps; with ImageNet often 0.875, 224 of 256 pixels.
        channels: 1 (gray) or 3 (RGB); None: 1 if every image is gray, else 3 (always 3 if images stay encoded).
        lazy: Whether images stay encoded on disk and are decoded batch by batch; None: above 8 GiB of decoded images.
        validation: Share of the training images to hold out, if there is no validation set.
        test: Share of the images to hold out as the test set, if there is only a training set.
        seed: Seed of held out samples.
        augment: Augmentation of training batches: "crop", "crop-flip", "flip", "resized-crop" or "shift"; None or
            "none": nothing.
        mean: Per channel, or one for all, of pixels in [0, 1].
        std: Per channel, or one for all.
        resize: Side in pixels to which batches are resized after augmentation; None: no resizing.
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
    spec = ImageSpec(size, channels, center, lazy, upright=exif_orientation)
    rows = find_labeled_files(name, path, IMAGES, label, groups)
    rows = load_images(name, rows or read_parquet(name, str(path), image, label, groups), spec)
    splits = rows.divide(name, validation, test, seed, samples)
    return rows.make_data(name, rows.x, splits, augment, resize, mean=mean, std=std, file_names=rows.file_names)


def prepare_images(path: Path, facts: Data, settings: Mapping[str, Any], halves: bool = False) -> Data | None:
    """Return new images of a file, a folder, an archive or a table, still encoded (see `transform.KINDS`)."""
    labels = (settings["label"],) if settings.get("label") else _LABEL
    folder = unpack_zip(path) if path.is_file() and path.suffix.lower() == ".zip" else path
    files = find_new_files(folder, IMAGES, facts, settings.get("label") if settings.get("image") else None)
    source: ImageFiles | _ParquetImages
    if files is not None and files.file_names is not None:
        notes, y, file_names = [*files.notes], files.y, files.file_names
        source = ImageFiles(files.folder.absolute(), file_names)
    elif tables := read_new_parquet(folder, facts, labels):
        (rows, y), notes, file_names = tables, [], None
        source = _ParquetImages(rows, rows[0].find_bytes_column(settings.get("image"), _IMAGE, "image"))
    else:
        return None
    upright = settings.get("exif_orientation") is not False
    height, width = facts.x.shape[2:]
    first_width, first_height = read_first_size(source, upright)
    if settings.get("size") is None and (first_height, first_width) != (height, width):
        notes.append(
            f"{path.name}: the first image has {first_height}x{first_width} pixels (height x width). Images are cut to "
            f"the proportions of the training images and resized to {height}x{width}."
        )
    index: ImageIndex = source if isinstance(source, ImageFiles) else source.pack(path.stem)
    x = EncodedImages(index, facts.x.shape[1:], settings.get("center") or 1.0, upright)
    return make_new_data(facts, path.resolve().name, x, y, halves, notes=tuple(notes), file_names=file_names)


def load_images(name: str, rows: Rows, spec: ImageSpec) -> Rows:
    """Return labeled rows or files with their images, decoded from the cache or still encoded, as specified.

    Raises:
        DataError: There are no images, or one of them is wrong.
        MissingExtra: Pillow is not installed.
    """
    source: ImageFiles | _ParquetImages = rows.x
    notes: list[str] = []
    if rows.file_names is not None:
        source = ImageFiles(rows.folder, rows.file_names)
        notes = _describe_resizing(name, source, spec)
    count = len(source)
    if not count:
        raise DataError(f"{rows.folder} has no images: its files have no rows.", path=rows.folder)
    if spec.max_bytes is not None:
        width, height = read_first_size(source, upright=False)
        if count * width * height > spec.max_bytes:
            raise DataError(
                f"{name}: {count:,} images, the first of {height}x{width} pixels, are more than this data set has. Is "
                "this another data set?"
            )
    if spec.lazy is not False:
        width, height = (spec.size, spec.size) if spec.size else read_first_size(source, spec.upright)
        shape = (spec.channels or 3, height, width)
        if spec.lazy or count * math.prod(shape) > LAZY_ABOVE:
            index: ImageIndex = source if isinstance(source, ImageFiles) else source.pack(name)
            x = EncodedImages(index, shape, spec.center if spec.size else None, spec.upright)
            return replace(rows, x=x, notes=(*notes, *rows.notes))
    column = "" if isinstance(source, ImageFiles) else source.column
    key = cache.make_key(name, source.paths(), [column, spec.size, spec.channels, spec.center, spec.upright])
    try:
        pixels = cache.load_array(key, count, lambda allocate: decode_all(source, spec, allocate))
    except MemoryError:
        raise DataError(
            f"{name}: memory cannot hold {count:,} decoded images. Set a smaller size, or keep them "
            "encoded with lazy = true.",
            key="lazy",
        ) from None
    return replace(rows, x=pixels, notes=(*notes, *rows.notes))


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
        return Origin(self.files[number].path, index - self.starts[number])

    def paths(self) -> list[Path]:
        return [file.path for file in self.files]

    def pack(self, name: str) -> PackedImages:
        key = cache.make_key(name, self.paths(), ["encoded", self.column])
        return pack_images(key, self, list(zip(map(str, self.paths()), self.starts[:-1], strict=True)))


def read_parquet(
    name: str,
    folder: str | None,
    image: str | None = None,
    label: str | None = None,
    groups: str | None = None,
    splits: Sequence[str] = SPLITS,
) -> Rows:
    """Return the rows of a set in Parquet files, for `load_images`.

    Args:
        name: The set's name, for messages and as a folder name.
        folder: Its folder or the parent folder; None: the environment variable FLEETFIT_DATA is the parent folder.
        image: Column of the images; None: `img` or `image`.
        label: Column of the labels, integers or text; None: `label`, `labels`, `fine_label`, `coarse_label` or
            `character`.
        groups: Column of a natural group (writer, speaker), or None.
        splits: The splits to read.

    Raises:
        DataError: A file or a column is missing or wrong.
    """
    paths = find_parquet_files(name, folder)
    files = {split: [parquet.File(path) for path in paths[split]] for split in splits if split in paths}
    every = [file for some in files.values() for file in some]
    image = every[0].find_bytes_column(image, _IMAGE, "image")
    y, classes, class_names = parquet.read_labels(every, every[0].column(label, _LABEL, "label"))
    group = None if groups is None else parquet.encode_values(parquet.read_values(every, groups))[0]
    sizes = {split: sum(file.rows for file in some) for split, some in files.items()}
    x = _ParquetImages(every, image)
    return Rows(x, y, sizes, classes, class_names, group, folder=every[0].path.parent)


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
                    if member.filename.lower().endswith(IMAGES)
                    and not any(map(is_system_name, PurePosixPath(member.filename).parts))
                ]
                size = sum(member.file_size for member in members)
                if size > max(_MAX_UNPACKED, _MAX_RATIO * path.stat().st_size):
                    raise DataError(f"{path} claims to unpack to {size:,} bytes. It is damaged.", path=path)
                for member in members:
                    # Stays inside the folder: zipfile drops "..", drives and leading slashes.
                    archive.extract(member, target)
        except _ZIP_ERRORS as error:
            raise DataError(f"{path} cannot be read as a zip archive: {format_cause(error)}", path=path) from None
        if not members:
            raise DataError(f"{path} has no images: expected CLASS/*.jpg or train/CLASS/*.jpg in it.", path=path)

    folder = cache.load_folder(cache.make_key(path.stem, [path], ["zip"]), build, lambda folder: folder)
    while not find_class_folders(folder, IMAGES) and len(folders := list_folder(folder)[0]) == 1:
        folder = folders[0]  # one folder may enclose the class folders
    return folder


def _describe_resizing(name: str, images: ImageFiles, spec: ImageSpec) -> list[str]:
    """Return a note on the sizes of the files, if they are resized."""
    if spec.size is None:
        return []
    paths = [images.path(i) for i in range(0, len(images), max(1, len(images) // _MAX_OPENED))]
    sides = [side for size in sample_sizes(paths, len(paths), spec.upright) for side in size]
    low, high = min(sides), max(sides)
    if low == high == spec.size:
        return []
    some = "the files" if len(paths) == len(images) else f"{len(paths)} of {len(images):,} files, which were opened,"
    sides_range = f"{low}" if low == high else f"{low} to {high}"
    return [
        f"{name}: {some} have sides of {sides_range} pixels. Centered squares are resized to {spec.size}x{spec.size}; "
        "data.size sets another side."
    ]


def sample_sizes(images: Sequence[Path], count: int = _MAX_OPENED, upright: bool = True) -> list[tuple[int, int]]:
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
