"""Read images with Pillow: open, orient, convert and resize them, for a whole set or batch by batch.

Small images are decoded on one thread: Pillow holds the interpreter's lock while it decodes them, and two threads took
1.3 times as long for 32x32 WebP. Large ones are decoded on several: 1.5 times as fast on two threads for 500x400 JPEG.

For encoded images only a memory-mapped index is in memory. A batch is read, decoded on several threads and resized, and
then discarded. Worker processes get the index. Images of Parquet files are copied once into one file of the cache,
because Parquet compresses rows in blocks: a single image cannot be read without its neighbors. The copy has the size
of the images in the Parquet files.
"""

import contextlib
import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data import cache
from fleetfit.errors import DataError, format_cause
from fleetfit.machine import available_cores

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000")
"""Formats that Pillow decodes itself. For others it may start a program: for EPS, Ghostscript executes the file."""
_LARGE_BYTES = 8192  # average file size from which threads are faster
_ORIENTATION, _QUARTER_TURNS = 0x112, range(5, 9)  # the tag of EXIF, and its values that swap width and height
_MAX_PIXELS = 1 << 26  # 8192 x 8192; a small file may claim any size
_FILES = 256  # in memory at a time
MAX_BYTES = 4 << 30
"""Limit for the decoded images of a named set."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom of a crop, in pixels."""
FindCrop = Callable[[int, tuple[int, int]], tuple[Box | None, bool]]
"""A row of a batch, width and height of its image -> the crop (None: the whole image), and whether to mirror it."""


@dataclass(frozen=True)
class Origin:
    """The file of a sample, for messages.

    Attributes:
        path: The file.
        row: Its row in the file, from 0; None if the file is a single sample.
    """

    path: Path
    row: int | None = None

    def __str__(self) -> str:
        return str(self.path) if self.row is None else f"row {self.row} of {self.path}"


@dataclass(frozen=True)
class ImageSpec:
    """Size, channels and orientation of the decoded images of a set.

    Attributes:
        size: Side in pixels to which images are cut (centered square) and resized; None: all must have the same size.
        channels: 1 (gray) or 3 (RGB); None: 1 if every image is gray, else 3 (always 3 for encoded images).
        center: Share of the shorter side for the square; only with a size.
        lazy: Whether images stay encoded; None: from 8 GiB of decoded images on.
        max_bytes: Limit of all decoded images, for a set of a known size.
        upright: Whether to apply the EXIF orientation.
    """

    size: int | None = None
    channels: int | None = None
    center: float = 1.0
    lazy: bool | None = None
    max_bytes: int | None = None
    upright: bool = True

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            DataError: A value is out of range.
        """
        if self.size is not None and self.size < 1:
            raise DataError(f"size must be at least 1 pixel, got {self.size}.", key="size")
        if self.channels not in (None, 1, 3):
            raise DataError(f"channels must be 1 (gray) or 3 (RGB), got {self.channels}.", key="channels")
        if not 0 < self.center <= 1:
            raise DataError(f"center must be above 0 and at most 1, got {self.center}.", key="center")
        if self.center < 1 and self.size is None:
            raise DataError(f"center = {self.center} needs a size. Set size.", key="center")


# ---- one image -------------------------------------------------------------------------------------------------------


def open_image(content: bytes, origin: Origin, upright: bool = False) -> Any:
    """Open a Pillow image. Only its header is read, unless its orientation is applied.

    Args:
        content: The bytes of an image file.
        origin: Its origin, for messages.
        upright: Whether to decode the image and apply its EXIF or XMP orientation.

    Raises:
        DataError: The bytes are not an image, or the image has too many pixels or more than 8 bits per channel.
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # Pillow's readers may raise any error
        raise _make_error(origin, f"cannot be opened as an image ({', '.join(FORMATS)}): {_explain(error)}") from None
    if image.width * image.height > _MAX_PIXELS:
        raise _make_error(
            origin, f"claims {image.width}x{image.height} pixels, more than {_MAX_PIXELS:,}. Make it smaller."
        )
    if image.mode[0] in "IF":
        raise _make_error(origin, f"has more than 8 bits per channel (mode {image.mode}). Convert it to 8 bits.")
    if upright:
        try:
            image.load()
        except Exception as error:
            raise _make_error(origin, f"cannot be decoded as an image: {_explain(error)}") from None
        with contextlib.suppress(Exception):  # ignore a damaged EXIF block, as viewers do
            ImageOps.exif_transpose(image, in_place=True)
    return image


def read_size(image: Any, upright: bool) -> tuple[int, int]:
    """Return width and height of an opened image, as stored or upright, without decoding it."""
    has_header = (
        image.format != "PNG" or "exif" in image.info
    )  # otherwise `getexif` decodes the image to read the data behind it
    is_turned = False
    if upright and has_header and image.format != "TIFF":  # Pillow's size of a TIFF is the upright size
        with contextlib.suppress(Exception):  # a damaged EXIF block
            is_turned = image.getexif().get(_ORIENTATION, 1) in _QUARTER_TURNS
    return (image.height, image.width) if is_turned else (image.width, image.height)


def make_center_box(width: int, height: int, share: float = 1.0, shape: Sequence[int] = (1, 1)) -> Box:
    """Return a share of the largest central box with the proportions of a shape (height, width)."""
    box_width = share * min(width, height * shape[1] / shape[0])
    box_height = share * min(height, width * shape[0] / shape[1])
    return (width - box_width) / 2, (height - box_height) / 2, (width + box_width) / 2, (height + box_height) / 2


def decode_into(target: NDArray[np.uint8], image: Any, origin: Origin, box: Box | None, flip: bool = False) -> None:
    """Decode an opened image into an array.

    Args:
        target: uint8 [C, H, W].
        image: From `open_image`.
        origin: Its origin, for messages.
        box: The crop to resize to the target's size; None: the image must have that size.
        flip: Whether to mirror it left to right.

    Raises:
        DataError: The image cannot be decoded, or has another size.
    """
    try:
        image = image.convert("L" if len(target) == 1 else "RGB")
    except Exception as error:  # Pillow's decoders may raise any error
        raise _make_error(origin, f"cannot be decoded as an image: {_explain(error)}") from None
    size = (target.shape[2], target.shape[1])
    if box is not None and (image.size != size or box != (0, 0, *size)):
        from PIL.Image import Resampling

        image = image.resize(size, Resampling.BILINEAR, box=box)
    if image.size != size:
        raise _make_error(
            origin,
            f"is {image.width}x{image.height} pixels, but the first image is {size[0]}x{size[1]}. Set size to resize "
            "all images.",
            key="size",
        )
    pixels = np.asarray(image)
    pixels = pixels[:, ::-1] if flip else pixels
    target[...] = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _explain(error: Exception) -> str:
    return f"{format_cause(error).rstrip('.')}. Replace the image by an intact one, or remove it."


def _make_error(origin: Origin, problem: str, key: str | None = None) -> DataError:
    return DataError(f"{origin} {problem}", key=key, path=origin.path, row=origin.row)


def count_threads() -> int:
    """Return the number of decoding threads, at most 8."""
    return min(8, available_cores())


def _should_use_threads(contents: Sequence[bytes]) -> bool:
    return len(contents) > 1 and sum(map(len, contents)) > _LARGE_BYTES * len(contents)


# ---- all images of a set, as one array -------------------------------------------------------------------------------


class ImageSource(Protocol):
    """Encoded images in the order of the samples."""

    def __len__(self) -> int: ...

    def batches(self) -> Iterator[list[bytes]]:
        """Yield all images in batches."""

    def origin(self, index: int) -> Origin:
        """Return the origin of an image, for messages."""


def read_first_size(source: ImageSource, upright: bool) -> tuple[int, int]:
    """Return width and height of the first image.

    Raises:
        DataError: The image cannot be opened.
    """
    first = next(contents[0] for contents in source.batches() if contents)
    with open_image(first, source.origin(0), upright) as image:
        width, height = image.size
        return width, height


def decode_all(source: ImageSource, spec: ImageSpec, allocate: cache.Allocate) -> NDArray[np.uint8]:
    """Decode all images of a source into one array, uint8 [N, C, H, W].

    Args:
        source: The images, at least one.
        spec: Size, channels and orientation.
        allocate: Makes the array.

    Raises:
        DataError: An image cannot be decoded or has another size.
    """
    size = (spec.size, spec.size) if spec.size else read_first_size(source, spec.upright)
    array = allocate((len(source), spec.channels or _find_channels(source), size[1], size[0]))
    pixels = array.view(np.ndarray)  # indexing a memory map directly is slow

    def decode(index: int, content: bytes) -> None:
        origin = source.origin(index)
        with open_image(content, origin, spec.upright) as image:
            width, height = image.size
            box = make_center_box(width, height, spec.center) if spec.size else None
            decode_into(pixels[index], image, origin, box)

    start = 0
    with ThreadPoolExecutor(count_threads()) as pool:
        for contents in source.batches():
            indices = range(start, start + len(contents))
            for _ in (pool.map if _should_use_threads(contents) else map)(decode, indices, contents):
                pass
            start += len(contents)
    return array


def _find_channels(source: ImageSource) -> int:
    """Return 1 if every image is gray, else 3."""
    index = 0
    for contents in source.batches():
        for content in contents:
            if open_image(content, source.origin(index)).mode not in ("1", "L", "LA"):
                return 3
            index += 1
    return 1


# ---- images that stay encoded ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """One file for each image.

    Attributes:
        root: The folder of the names.
        names: Paths below it, bytes [N]; may be memory-mapped.
    """

    root: Path
    names: NDArray[np.bytes_]

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return self.root / bytes(self.names[index]).decode(errors="surrogateescape")

    def paths(self) -> list[Path]:
        """Return the paths of all images."""
        return [self.path(index) for index in range(len(self))]

    def read(self, index: int) -> bytes:
        """Return an encoded image."""
        return _read_range(self.path(index), 0, -1)

    def batches(self) -> Iterator[list[bytes]]:
        """Yield all images in batches."""
        for start in range(0, len(self), _FILES):
            yield [self.read(i) for i in range(start, min(len(self), start + _FILES))]

    def origin(self, index: int) -> Origin:
        """Return the path of an image."""
        return Origin(self.path(index))

    def to_payload(self) -> tuple[dict[str, Any], np.ndarray]:
        """Return plain values, and the names."""
        return {"kind": "files", "root": str(self.root)}, self.names


@dataclass(frozen=True, eq=False)
class PackedImages:
    """Images concatenated in one file, copied from rows of other files.

    Attributes:
        path: The file.
        offsets: The beginning of each image and the end of the last, int64 [N + 1]; may be memory-mapped.
        sources: Name of each source file, and the index of its first image.
    """

    path: Path
    offsets: NDArray[np.int64]
    sources: tuple[tuple[str, int], ...]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, index: int) -> bytes:
        """Return an encoded image."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return _read_range(self.path, start, end - start)

    def origin(self, index: int) -> Origin:
        """Return the source file and row of an image."""
        name, first = next(source for source in reversed(self.sources) if source[1] <= index)
        return Origin(Path(name), index - first)

    def to_payload(self) -> tuple[dict[str, Any], np.ndarray]:
        """Return plain values, and the offsets."""
        sources = [list(source) for source in self.sources]
        return {"kind": "rows", "path": str(self.path), "sources": sources}, self.offsets


ImageIndex = ImageFiles | PackedImages
"""Encoded images that can be read individually."""


def pack_images(key: str, source: ImageSource, sources: Sequence[tuple[str, int]]) -> PackedImages:
    """Concatenate images in a file of the cache.

    Args:
        key: Name of the folder in the cache.
        source: The images.
        sources: Name of each source file, and the index of its first image.

    Raises:
        DataError: A row has no image, or the file cannot be written.
    """

    def build(folder: Path) -> None:
        offsets = np.zeros(len(source) + 1, dtype=np.int64)
        index = 0
        with (folder / "images.bin").open("wb") as file:
            for contents in source.batches():
                file.writelines(contents)
                offsets[index + 1 : index + 1 + len(contents)] = [len(content) for content in contents]
                index += len(contents)
        np.save(folder / "offsets.npy", np.cumsum(offsets))
        (folder / "sources.json").write_text(json.dumps(sources))

    def load(folder: Path) -> PackedImages:
        offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        if (folder / "images.bin").stat().st_size != offsets[-1]:
            raise ValueError("images and index have different lengths")
        sources = tuple((str(path), int(first)) for path, first in json.loads((folder / "sources.json").read_text()))
        return PackedImages(folder / "images.bin", offsets, sources)

    return cache.load_folder(key, build, load)


def _read_range(path: Path, start: int, length: int) -> bytes:
    """Return a part of a file; all of it for length -1. Each call opens the file, so that threads share nothing."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            content = file.read(length)
    except OSError as error:
        raise DataError(
            f"{path} can no longer be read: {error}. Start again to rebuild the index.", path=path
        ) from None
    if 0 <= length != len(content):
        raise DataError(f"{path} is shorter than before. Start again to unpack it.", path=path)
    return content


class EncodedImages:
    """Encoded images with the interface of a tensor of uint8 images [N, C, H, W], as far as `Data` needs it.

    Args:
        index: The images.
        shape: C, H, W of the decoded images.
        center: Share of the largest central box with the proportions H : W, 0 < center <= 1, which is resized to
            H x W. None: every image must be H x W.
        upright: Whether to apply the EXIF orientation.
        device: Device of the batches.

    Attributes:
        shape: N, C, H, W of the decoded images.
        device: Device of the decoded batches.
    """

    dtype = torch.uint8
    ndim = 4

    def __init__(
        self,
        index: ImageIndex,
        shape: Sequence[int],
        center: float | None = 1.0,
        upright: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = torch.Size((len(index), *shape))
        self.device = torch.device(device)
        self._index, self._center, self._upright = index, center, upright

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        """Return shape and kind; nothing is decoded."""
        return f"EncodedImages({list(self.shape)}, {type(self._index).__name__}, {self.device})"

    def index_select(self, dim: int, indices: Tensor) -> Tensor:
        """Return the central box of images, uint8 [B, C, H, W].

        Raises:
            DataError: An image is missing, cannot be decoded, or has the wrong size.
        """
        if dim != 0:
            raise ValueError(f"encoded images are selected along dimension 0, not {dim}.")
        share = self._center
        if share is None:
            return self.crop(indices, lambda row, size: (None, False))
        return self.crop(indices, lambda row, size: (make_center_box(*size, share, self.shape[2:]), False))

    def crop(self, indices: Tensor, find_crop: FindCrop) -> Tensor:
        """Return a crop of each image, resized to H x W, uint8 [B, C, H, W].

        Args:
            indices: int64 [B].
            find_crop: Returns the crop for a row of the batch and the size of its image, and whether it is mirrored.

        Raises:
            DataError: As `index_select`.
        """
        numbers = indices.tolist()
        batch = torch.empty((len(numbers), *self.shape[1:]), dtype=torch.uint8)
        pixels = batch.numpy()

        def decode(row: int) -> None:
            origin = self._index.origin(numbers[row])
            with open_image(self._index.read(numbers[row]), origin, self._upright) as image:
                box, flip = find_crop(row, image.size)
                decode_into(pixels[row], image, origin, box, flip)

        use_threads = len(numbers) > 1 and _should_use_threads([self._index.read(numbers[0])] * 2)
        for _ in (_make_pool().map if use_threads else map)(decode, range(len(numbers))):
            pass
        return batch.to(self.device)

    def to(self, device: torch.device | str) -> "EncodedImages":
        """Return the same images for batches on another device. They are decoded on the host."""
        return EncodedImages(self._index, self.shape[1:], self._center, self._upright, device)

    def cpu(self) -> "EncodedImages":
        """Return the same images for batches on the host."""
        return self.to("cpu")

    def to_payload(self) -> tuple[dict[str, Any], np.ndarray]:
        """Return the index: plain values, and an array."""
        payload, index = self._index.to_payload()
        return {**payload, "shape": list(self.shape[1:]), "center": self._center, "upright": self._upright}, index

    @staticmethod
    def from_payload(payload: Mapping[str, Any], array: np.ndarray) -> "EncodedImages":
        """Return the images of `to_payload`."""
        index: ImageIndex
        if payload["kind"] == "files":
            index = ImageFiles(Path(payload["root"]), array)
        else:
            sources = tuple((str(name), int(first)) for name, first in payload["sources"])
            index = PackedImages(Path(payload["path"]), array, sources)
        return EncodedImages(index, payload["shape"], payload["center"], payload["upright"])


@functools.cache
def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count_threads(), thread_name_prefix="decode")
