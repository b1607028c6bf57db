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
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000")
"""What Pillow decodes by itself. For others it may start a program: for EPS Ghostscript, which runs what is in it."""
_MOST_SAID = 300  # characters of a decoder's own message
_MOST_PIXELS = 1 << 26
"""Of an image: 8192 x 8192. A small file can claim any size."""


class Source(Protocol):
    """A file that holds images in rows."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def rows(self) -> int:
        """How many images it holds."""

    def images(self, column: str) -> Iterator[list[bytes]]:
        """Yield the encoded images, some at a time."""

    def place(self, row: int) -> str:
        """Return where a row is, for messages."""


Box = tuple[float, float, float, float]
"""Left, top, right, bottom of a part of an image, in pixels."""


def centred(width: int, height: int, share: float = 1.0) -> Box:
    """Return the square in the middle whose side is a share of the shorter side."""
    side = share * min(width, height)
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


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
    files: Sequence[Source],
    column: str,
    size: int | None,
    channels: int | None,
    allocate: Allocate,
    centre: float = 1.0,
) -> NDArray[np.uint8]:
    """Decode every image of every file into one array.

    Args:
        files: Where the images are.
        column: In which column.
        size: Side to which each is cut (centre, square) and resized; None: all must be as large as the first.
        channels: 1 or 3; None: 1 if every image is grey, else 3.
        allocate: Makes the array.
        centre: Share of the shorter side that the square keeps, used with a size only.

    Returns:
        uint8 [N, C, H, W].

    Raises:
        DataError: There are no images, or one cannot be decoded or has another size.
    """
    first = next((encoded for file in files for encoded in file.images(column) if encoded), None)
    if first is None:
        raise DataError(f"{files[0].path.parent} holds no images: its files have no rows.")
    width, height = (size, size) if size else opened(first[0], files[0].place(0)).size
    channels = channels or _channels(files, column)
    out = allocate((sum(file.rows for file in files), channels, height, width))
    pixels = out.view(np.ndarray)  # indexing a memory map itself is slow
    start = 0

    def one(target: NDArray[np.uint8], encoded: bytes, place: str) -> None:
        with opened(encoded, place) as picture:
            fill(target, picture, place, centred(picture.width, picture.height, centre) if size else None)

    with ThreadPoolExecutor(cores()) as pool:
        for file in files:
            row = 0
            for encoded in file.images(column):
                places = [file.place(row + i) for i in range(len(encoded))]
                work = (pixels[start : start + len(encoded)], encoded, places)
                for _ in pool.map(one, *work) if threads_pay(encoded) else map(one, *work):
                    pass
                row += len(encoded)
                start += len(encoded)
    return out


def cores() -> int:
    """Return how many threads decode, at most 8."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, own)


def threads_pay(encoded: Sequence[bytes]) -> bool:
    """Return whether images are large enough to be decoded on several threads."""
    return len(encoded) > 1 and sum(map(len, encoded)) > _LARGE_BYTES * len(encoded)


def opened(encoded: bytes, place: str) -> Any:
    """Return a Pillow image, of which only the header has been read.

    Raises:
        DataError: The bytes are no image, or one of more than 8 bits per channel.
    """
    pillow = need("PIL.Image")
    try:
        picture = pillow.open(io.BytesIO(encoded), formats=FORMATS)
    except Exception as error:  # Pillow's readers raise whatever they come across
        raise DataError(f"{place} holds no image that can be decoded ({', '.join(FORMATS)}): {_said(error)}") from error
    if picture.width * picture.height > _MOST_PIXELS:
        raise DataError(
            f"{place} claims {picture.width}x{picture.height} pixels, more than {_MOST_PIXELS:,}; make it smaller."
        )
    if picture.mode[0] in "IF":
        raise DataError(f"{place} has more than 8 bits per channel (mode {picture.mode}); convert it to 8 bits.")
    return picture


def _said(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:_MOST_SAID]


def _channels(files: Sequence[Source], column: str) -> int:
    """Return 1 if every image is grey, else 3."""
    for file in files:
        row = 0
        for encoded in file.images(column):
            for i, content in enumerate(encoded):
                if opened(content, file.place(row + i)).mode not in ("1", "L", "LA"):
                    return 3
            row += len(encoded)
    return 1


def fill(target: NDArray[np.uint8], picture: Any, place: str, box: Box | None, flip: bool = False) -> None:
    """Decode one opened image into its place.

    Args:
        target: uint8 [C, H, W].
        picture: What `opened` returned.
        place: Where it comes from, for messages.
        box: The part that is resized to the target's size; None: the image must have that size.
        flip: Whether it is mirrored left to right.

    Raises:
        DataError: The image cannot be decoded, or has another size.
    """
    try:
        picture = picture.convert("L" if len(target) == 1 else "RGB")
    except Exception as error:  # as above
        raise DataError(f"{place} holds no image that can be decoded: {_said(error)}") from error
    size = (target.shape[2], target.shape[1])
    if box is not None and (picture.size != size or box != (0, 0, *size)):
        picture = picture.resize(size, need("PIL.Image").Resampling.BILINEAR, box=box)
    if picture.size != size:
        raise DataError(
            f"{place} is {picture.width}x{picture.height} pixels, the first image {size[0]}x{size[1]}; "
            "give size = ... to bring all to one size."
        )
    pixels = np.asarray(picture)
    pixels = pixels[:, ::-1] if flip else pixels
    target[...] = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
