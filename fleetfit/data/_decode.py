"""Encoded images become one array of pixels.

Small images are decoded on one thread: Pillow holds the interpreter's lock while it decodes them, and two threads took
1.3 times as long for 32x32 WebP. Large ones are decoded on several: 1.5 times as fast on two threads for 500x400 JPEG.
"""

import importlib
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetfit.data._cache import Allocate
from fleetfit.errors import DataError, MissingExtra

_LARGE_BYTES = 8192  # average file size from which threads pay


class Source(Protocol):
    """A file that holds images in rows."""

    path: Path
    rows: int

    def images(self, column: str) -> Iterator[list[bytes]]:
        """Yield the encoded images, some at a time."""


def need(module: str, extra: str = "images", what: str = "Reading images from Parquet files") -> Any:
    """Return a module that only comes with an extra.

    Args:
        module: Its name.
        extra: The extra of FleetFit that has it.
        what: The feature that needs it, as the start of a sentence.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(extra, what) from error


def decode(
    files: Sequence[Source], column: str, size: int | None, channels: int | None, allocate: Allocate
) -> NDArray[np.uint8]:
    """Decode every image of every file into one array.

    Args:
        files: Where the images are.
        column: In which column.
        size: Side to which each is cut (centre, square) and resized; None: all must be as large as the first.
        channels: 1 or 3; None: 1 if every image is grey, else 3.
        allocate: Makes the array.

    Returns:
        uint8 [N, C, H, W].

    Raises:
        DataError: There are no images, or one cannot be decoded or has another size.
    """
    first = next((encoded for file in files for encoded in file.images(column) if encoded), None)
    if first is None:
        raise DataError(f"{files[0].path.parent} holds no images: its files have no rows.")
    width, height = (size, size) if size else _opened(first[0], f"row 0 of {files[0].path}").size
    channels = channels or _channels(files, column)
    out = allocate((sum(file.rows for file in files), channels, height, width))
    pixels = out.view(np.ndarray)  # indexing a memory map itself is slow
    start = 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for file in files:
            row = 0
            for encoded in file.images(column):
                places = [f"row {row + i} of {file.path}" for i in range(len(encoded))]
                work = (pixels[start : start + len(encoded)], encoded, places, [size] * len(encoded))
                large = sum(map(len, encoded)) > _LARGE_BYTES * len(encoded)
                for _ in pool.map(_fill, *work) if large else map(_fill, *work):
                    pass
                row += len(encoded)
                start += len(encoded)
    return out


def _opened(encoded: bytes, place: str) -> Any:
    """Return a Pillow image, of which only the header has been read."""
    pillow = need("PIL.Image")
    try:
        picture = pillow.open(io.BytesIO(encoded))
    except Exception as error:  # Pillow's readers raise whatever they come across
        raise DataError(f"{place} holds no image that can be decoded: {error}") from error
    if picture.mode[0] in "IF":
        raise DataError(f"{place} has more than 8 bits per channel (mode {picture.mode}); convert it to 8 bits.")
    return picture


def _channels(files: Sequence[Source], column: str) -> int:
    """Return 1 if every image is grey, else 3."""
    for file in files:
        row = 0
        for encoded in file.images(column):
            for i, content in enumerate(encoded):
                if _opened(content, f"row {row + i} of {file.path}").mode not in ("1", "L", "LA"):
                    return 3
            row += len(encoded)
    return 1


def _fill(target: NDArray[np.uint8], encoded: bytes, place: str, size: int | None) -> None:
    """Decode one image into its place, [C, H, W]."""
    with _opened(encoded, place) as picture:
        try:
            picture = picture.convert("L" if len(target) == 1 else "RGB")
        except Exception as error:  # as above
            raise DataError(f"{place} holds no image that can be decoded: {error}") from error
    if size is not None and picture.size != (size, size):
        pillow = need("PIL.Image")
        picture = need("PIL.ImageOps").fit(picture, (size, size), method=pillow.Resampling.BILINEAR)
    if picture.size != target.shape[:0:-1]:
        raise DataError(
            f"{place} is {picture.width}x{picture.height} pixels, the first image {target.shape[2]}x{target.shape[1]}; "
            "give size = ... to bring all to one size."
        )
    pixels = np.asarray(picture)
    target[...] = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
