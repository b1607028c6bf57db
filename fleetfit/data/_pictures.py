"""Labelled images as they were found on disk, decoded or not."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetfit.data import _cache
from fleetfit.data._decode import Source, decode, opened
from fleetfit.data._encoded import Encoded, Places
from fleetfit.errors import DataError
from fleetfit.paths import given

LAZY_ABOVE = 8 << 30
"""Bytes of decoded images from which on they stay encoded, unless told otherwise."""


@dataclass(frozen=True)
class Table:
    """The rows of all files of a set, one split after the other.

    Attributes:
        x: uint8 [N, C, H, W], or encoded images that look like it.
        y: int64 [N].
        sizes: split -> number of rows, in the order of the rows; only the splits that are there.
        classes: Number of classes.
        class_names: One per class, or ().
        groups: int64 [N], or None if no column of groups was asked for.
    """

    x: NDArray[np.uint8] | Encoded
    y: NDArray[np.int64]
    sizes: dict[str, int]
    classes: int
    class_names: tuple[str, ...]
    groups: NDArray[np.int64] | None


@dataclass(frozen=True)
class Form:
    """What images are brought to.

    Attributes:
        size: Side in pixels to which images are cut (centre, square) and resized; None: they must have one size.
        channels: 1 (grey) or 3 (RGB); None: 1 if every image is grey, else 3; 3 where images stay encoded.
        centre: Share of the shorter side that the square keeps, used with a size only.
        lazy: Whether images stay encoded; None: from 8 GiB of decoded images on.
        most_bytes: What all decoded images may take, where that is known beforehand.
    """

    size: int | None = None
    channels: int | None = None
    centre: float = 1.0
    lazy: bool | None = None
    most_bytes: int | None = None

    def check(self, name: str) -> None:
        """Refuse what is out of range.

        Raises:
            DataError: It is.
        """
        if self.size is not None and self.size < 1:
            raise DataError(f"{name}: size must be at least 1 pixel, got {self.size}.")
        if self.channels not in (None, 1, 3):
            raise DataError(f"{name}: channels must be 1 (grey) or 3 (RGB), got {self.channels}.")
        if not 0 < self.centre <= 1:
            raise DataError(f"{name}: centre must be above 0 and at most 1, got {self.centre}.")
        if self.centre < 1 and self.size is None:
            raise DataError(f"{name}: centre = {self.centre} needs a size to bring the square to.")


AS_THEY_ARE = Form()


def pictures(
    name: str,
    sources: Sequence[Source],
    column: str,
    form: Form,
    stamps: Callable[[], Sequence[Path]],
    places: Callable[[], Places],
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
        raise DataError(f"{sources[0].path.parent} holds no images: its files have no rows.")
    if form.most_bytes is not None:
        _check_bytes(name, rows, _size_of_first(sources[0], column), form.most_bytes)
    if form.lazy is not False:
        height, width = (form.size, form.size) if form.size else _size_of_first(sources[0], column)
        shape = (form.channels or 3, height, width)
        if form.lazy or rows * math.prod(shape) > LAZY_ABOVE:
            return Encoded(places(), shape, form.centre if form.size else None)
    try:
        return _cache.cached(
            _cache.key(name, stamps(), [column, form.size, form.channels, form.centre]),
            rows,
            lambda allocate: decode(sources, column, form.size, form.channels, allocate, form.centre),
        )
    except MemoryError:
        raise DataError(
            f"{name}: there is no room for {rows:,} decoded images. With size = ... they get smaller, and with lazy = "
            "true they stay encoded."
        ) from None


def _size_of_first(source: Source, column: str) -> tuple[int, int]:
    """Return height and width of the first image."""
    first = next((some for some in source.images(column) if some), None)
    if first is None:
        raise DataError(f"{source.path} has no rows.")
    with opened(first[0], source.place(0)) as picture:
        return picture.height, picture.width


def _check_bytes(name: str, rows: int, size: tuple[int, int], most: int) -> None:
    if rows * math.prod(size) > most:
        raise DataError(
            f"{name}: {rows:,} images, of which the first has {size[0]}x{size[1]} pixels, are more than this data set "
            "holds: is this another one?"
        )


def set_folder(folder: str) -> Path:
    """Return a set's folder: a relative path that does not exist is sought in the folder FLEETFIT_DATA."""
    path = given(folder, "data.folder")
    root = os.environ.get("FLEETFIT_DATA")
    if root and not path.is_absolute() and not path.exists():
        return Path(root).expanduser() / path
    return path


def found_folder(name: str, folder: str | None) -> Path | None:
    """Return the folder of a known set, where it is the one given, or lies below it or below FLEETFIT_DATA; or None."""
    root = folder if folder is not None else os.environ.get("FLEETFIT_DATA")
    if not root:
        return None
    base = Path(root).expanduser()
    tops = [base / name, base] if folder is not None else [base / name]
    return next((top for top in tops if top.is_dir()), None)
