"""Encoded images: one at a time, all of a set as one array of pixels, or batch by batch where memory is too small.

Small images are decoded on one thread: Pillow holds the interpreter's lock while it decodes them, and two threads took
1.3 times as long for 32x32 WebP. Large ones are decoded on several: 1.5 times as fast on two threads for 500x400 JPEG.

Of images that stay encoded only where each lies is held in memory, and even that is memory-mapped. A batch is read,
decoded by Pillow on several threads and brought to size; nothing is kept. Worker processes get the places, not the
images. Images of Parquet files are copied once, end to end, into one file of the cache: Parquet compresses rows in
blocks, so that a single image cannot be read without its neighbours; in one plain file any image is one read. The copy
takes as much room as the images do in the Parquet files.
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
from fleetfit.data.cache import Allocate, load_folder
from fleetfit.errors import DataError, format_cause, import_optional
from fleetfit.machine import available_cores

_LARGE_BYTES = 8192  # average file size from which threads pay
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000")
"""What Pillow decodes by itself. For others it may start a program: for EPS Ghostscript, which runs what is in it."""
_ORIENTATION, _QUARTER_TURNS = 0x112, range(5, 9)  # the tag of EXIF, and its values that swap width and height
_MOST_PIXELS = 1 << 26
"""Of an image: 8192 x 8192. A small file can claim any size."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom of a part of an image, in pixels."""
Part = Callable[[int, tuple[int, int]], tuple[Box | None, bool]]
"""A row of a batch, width and height of its image -> what is cut out (None: all of it), and whether it is mirrored."""


@dataclass(frozen=True)
class Origin:
    """Where a sample comes from, for messages.

    Attributes:
        path: The file.
        row: Its row there, from 0; None: the file holds one sample.
    """

    path: Path
    row: int | None = None

    def __str__(self) -> str:
        return str(self.path) if self.row is None else f"row {self.row} of {self.path}"


# ---- one image -------------------------------------------------------------------------------------------------------


def centred(width: int, height: int, share: float = 1.0) -> Box:
    """Return the square in the middle whose side is a share of the shorter side."""
    side = share * min(width, height)
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def _pillow() -> Any:
    return import_optional("PIL.Image", "images", "Decoding images")


def opened(encoded: bytes, place: Origin, upright: bool = False) -> Any:
    """Return a Pillow image, of which only the header has been read unless it is turned.

    Args:
        encoded: The bytes of an image file.
        place: Where it comes from, for messages.
        upright: Whether the image is decoded and turned or mirrored as its EXIF or XMP orientation says.

    Raises:
        DataError: The bytes are no image, or one of more than 8 bits per channel.
    """
    pillow = _pillow()
    try:
        picture = pillow.open(io.BytesIO(encoded), formats=FORMATS)
    except Exception as error:  # Pillow's readers raise whatever they come across
        raise DataError(
            f"{place} holds no image that can be decoded ({', '.join(FORMATS)}): {format_cause(error)}",
            path=place.path,
            row=place.row,
        ) from error
    if picture.width * picture.height > _MOST_PIXELS:
        raise DataError(
            f"{place} claims {picture.width}x{picture.height} pixels, more than {_MOST_PIXELS:,}; make it smaller.",
            path=place.path,
            row=place.row,
        )
    if picture.mode[0] in "IF":
        raise DataError(
            f"{place} has more than 8 bits per channel (mode {picture.mode}); convert it to 8 bits.",
            path=place.path,
            row=place.row,
        )
    if upright:
        _turn_upright(picture, place)
    return picture


def read_size(picture: Any, upright: bool) -> tuple[int, int]:
    """Return width and height of an opened image as they are, or as it is seen; nothing is decoded."""
    known = picture.format != "PNG" or "exif" in picture.info  # else `getexif` decodes the image to look behind it
    turned = False
    if upright and known and picture.format != "TIFF":  # of which Pillow says the size as it is seen
        with contextlib.suppress(Exception):  # a damaged EXIF block, as below
            turned = picture.getexif().get(_ORIENTATION, 1) in _QUARTER_TURNS
    return (picture.height, picture.width) if turned else (picture.width, picture.height)


def _turn_upright(picture: Any, place: Origin) -> None:
    try:
        picture.load()
    except Exception as error:  # as above
        raise _undecodable(place, error) from error
    with contextlib.suppress(Exception):  # viewers ignore a damaged EXIF block, too
        import_optional("PIL.ImageOps", "images", "Decoding images").exif_transpose(picture, in_place=True)


def _undecodable(place: Origin, error: Exception) -> DataError:
    return DataError(
        f"{place} holds no image that can be decoded: {format_cause(error)}", path=place.path, row=place.row
    )


def fill(target: NDArray[np.uint8], picture: Any, place: Origin, box: Box | None, flip: bool = False) -> None:
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
        raise _undecodable(place, error) from error
    size = (target.shape[2], target.shape[1])
    if box is not None and (picture.size != size or box != (0, 0, *size)):
        picture = picture.resize(size, _pillow().Resampling.BILINEAR, box=box)
    if picture.size != size:
        raise DataError(
            f"{place} is {picture.width}x{picture.height} pixels, the first image {size[0]}x{size[1]}; "
            "give size = ... to bring all to one size.",
            key="size",
            path=place.path,
            row=place.row,
        )
    pixels = np.asarray(picture)
    pixels = pixels[:, ::-1] if flip else pixels
    target[...] = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def cores() -> int:
    """Return how many threads decode, at most 8."""
    return min(8, available_cores())


def threads_pay(encoded: Sequence[bytes]) -> bool:
    """Return whether images are large enough to be decoded on several threads."""
    return len(encoded) > 1 and sum(map(len, encoded)) > _LARGE_BYTES * len(encoded)


# ---- all images of a set, as one array -------------------------------------------------------------------------------


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

    def place(self, row: int) -> Origin:
        """Return where a row is, for messages."""


def decode(
    files: Sequence[Source],
    column: str,
    size: int | None,
    channels: int | None,
    allocate: Allocate,
    centre: float = 1.0,
    upright: bool = True,
) -> NDArray[np.uint8]:
    """Decode every image of every file into one array.

    Args:
        files: Where the images are.
        column: In which column.
        size: Side to which each is cut (centre, square) and resized; None: all must be as large as the first.
        channels: 1 or 3; None: 1 if every image is grey, else 3.
        allocate: Makes the array.
        centre: Share of the shorter side that the square keeps, used with a size only.
        upright: Whether images are turned as their EXIF orientation says.

    Returns:
        uint8 [N, C, H, W].

    Raises:
        DataError: There are no images, or one cannot be decoded or has another size.
    """
    first = next((encoded for file in files for encoded in file.images(column) if encoded), None)
    if first is None:
        raise DataError(f"{files[0].path.parent} holds no images: its files have no rows.", path=files[0].path.parent)
    width, height = (size, size) if size else opened(first[0], files[0].place(0), upright).size
    channels = channels or _channels(files, column)
    out = allocate((sum(file.rows for file in files), channels, height, width))
    pixels = out.view(np.ndarray)  # indexing a memory map itself is slow
    start = 0

    def one(target: NDArray[np.uint8], encoded: bytes, place: Origin) -> None:
        with opened(encoded, place, upright) as picture:
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


# ---- images that stay encoded ----------------------------------------------------------------------------------------


class ImageSource(Protocol):
    """Where encoded images lie."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """Return one encoded image."""

    def place(self, index: int) -> Origin:
        """Return where it lies, for messages."""

    def taken_apart(self) -> tuple[dict[str, Any], np.ndarray]:
        """Return plain values, and the index as an array."""


@dataclass(frozen=True, eq=False)
class Files:
    """One file for each image.

    Attributes:
        root: The folder that the names are seen from.
        names: Paths below it, bytes [N]; may be memory-mapped.
    """

    root: Path
    names: NDArray[np.bytes_]

    def __len__(self) -> int:
        return len(self.names)

    def _path(self, index: int) -> Path:
        return self.root / bytes(self.names[index]).decode(errors="surrogateescape")

    def read(self, index: int) -> bytes:
        """Return one encoded image."""
        return _read(self._path(index), 0, -1)

    def place(self, index: int) -> Origin:
        """Return the path of its file."""
        return Origin(self._path(index))

    def taken_apart(self) -> tuple[dict[str, Any], np.ndarray]:
        """Return plain values, and the names."""
        return {"kind": "files", "root": str(self.root)}, self.names


@dataclass(frozen=True, eq=False)
class Rows:
    """Images end to end in one file, unpacked from the rows of others.

    Attributes:
        path: The file.
        offsets: Where each image begins, and the end of the last, int64 [N + 1]; may be memory-mapped.
        sources: Name of each file that the rows come from, and the number of its first row here; for messages.
    """

    path: Path
    offsets: NDArray[np.int64]
    sources: tuple[tuple[str, int], ...]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, index: int) -> bytes:
        """Return one encoded image."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return _read(self.path, start, end - start)

    def place(self, index: int) -> Origin:
        """Return the row and the file that it comes from."""
        name, first = next(source for source in reversed(self.sources) if source[1] <= index)
        return Origin(Path(name), index - first)

    def taken_apart(self) -> tuple[dict[str, Any], np.ndarray]:
        """Return plain values, and the offsets."""
        sources = [list(source) for source in self.sources]
        return {"kind": "rows", "path": str(self.path), "sources": sources}, self.offsets


def _read(path: Path, start: int, length: int) -> bytes:
    """Return a part of a file; a file is opened for each, so that threads and processes share nothing."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            found = file.read(length)
    except OSError as error:
        raise DataError(
            f"{path} can no longer be read: {error}. Start again to rebuild its index.", path=path
        ) from error
    if 0 <= length != len(found):
        raise DataError(f"{path} has become shorter. Start again to unpack it.", path=path)
    return found


class Encoded:
    """Encoded images that look to `Data` like a tensor of uint8 images [N, C, H, W].

    Attributes:
        shape: N, C, H, W of the decoded images.
        device: Where batches go after they have been decoded.
    """

    dtype = torch.uint8
    ndim = 4

    def __init__(
        self,
        places: ImageSource,
        shape: Sequence[int],
        centre: float | None = 1.0,
        upright: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        """Take them as they are; nothing is read.

        Args:
            places: Where the images lie.
            shape: C, H, W of the decoded images.
            centre: Share of the shorter side that the square in the middle keeps, 0 < centre <= 1; it is brought to
                H x W. None: every image must be H x W.
            upright: Whether images are turned as their EXIF orientation says.
            device: Where batches go.
        """
        self.shape = torch.Size((len(places), *shape))
        self.device = torch.device(device)
        self._places, self._centre, self._upright = places, centre, upright

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        """Return shape and kind; nothing is decoded."""
        return f"Encoded({list(self.shape)}, {type(self._places).__name__.lower()}, {self.device})"

    def index_select(self, dim: int, indices: Tensor) -> Tensor:
        """Return the square in the middle of each image asked for, uint8 [B, C, H, W].

        Raises:
            DataError: An image is gone, cannot be decoded, or has the wrong size.
        """
        if dim != 0:
            raise ValueError(f"encoded images are selected along dimension 0, not {dim}.")
        share = self._centre
        if share is None:
            return self.parts(indices, lambda row, size: (None, False))
        return self.parts(indices, lambda row, size: (centred(*size, share), False))

    def to(self, device: torch.device | str) -> "Encoded":
        """Return the same images for batches on another device; they are decoded on the host."""
        return Encoded(self._places, self.shape[1:], self._centre, self._upright, device)

    def cpu(self) -> "Encoded":
        """Return the same images for batches on the host."""
        return self.to("cpu")

    def taken_apart(self) -> tuple[dict[str, Any], np.ndarray]:
        """Return where the images lie: plain values, and the index as an array."""
        nest, index = self._places.taken_apart()
        return {**nest, "shape": list(self.shape[1:]), "centre": self._centre, "upright": self._upright}, index

    @staticmethod
    def put_together(nest: Mapping[str, Any], index: np.ndarray) -> "Encoded":
        """Return what `taken_apart` took apart."""
        places: ImageSource
        if nest["kind"] == "files":
            places = Files(Path(nest["root"]), index)
        else:
            sources = tuple((str(name), int(first)) for name, first in nest["sources"])
            places = Rows(Path(nest["path"]), index, sources)
        return Encoded(places, nest["shape"], nest["centre"], nest["upright"])

    def parts(self, indices: Tensor, part: Part) -> Tensor:
        """Return a part of each image asked for, brought to H x W, uint8 [B, C, H, W].

        Args:
            indices: int64 [B].
            part: Says for a place in the batch and the size of its image what is cut out and if it is mirrored.

        Raises:
            DataError: As `index_select`.
        """
        wanted = indices.tolist()
        out = torch.empty((len(wanted), *self.shape[1:]), dtype=torch.uint8)
        pixels = out.numpy()

        def one(row: int) -> None:
            place = self._places.place(wanted[row])
            with opened(self._places.read(wanted[row]), place, self._upright) as picture:
                box, flip = part(row, picture.size)
                fill(pixels[row], picture, place, box, flip)

        rows = range(len(wanted))
        several = len(wanted) > 1 and threads_pay([self._places.read(wanted[0])] * 2)
        for _ in _pool().map(one, rows) if several else map(one, rows):
            pass
        return out.to(self.device)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), thread_name_prefix="decode")


# ---- images of Parquet files, end to end -----------------------------------------------------------------------------


def unpacked(name: str, files: Sequence[Source], column: str) -> Rows:
    """Return where each image of a column lies.

    Raises:
        DataError: A row has no image, or there is no room in the cache.
    """

    def build(folder: Path) -> None:
        offsets = np.zeros(sum(file.rows for file in files) + 1, dtype=np.int64)
        sources: list[tuple[str, int]] = []
        at = row = 0
        with (folder / "images.bin").open("wb") as out:
            for file in files:
                sources.append((str(file.path), row))
                for encoded in file.images(column):
                    out.writelines(encoded)
                    ends = at + np.cumsum([len(image) for image in encoded], dtype=np.int64)
                    offsets[row + 1 : row + 1 + len(encoded)] = ends
                    row, at = row + len(encoded), int(ends[-1]) if len(ends) else at
        np.save(folder / "offsets.npy", offsets)
        (folder / "sources.json").write_text(json.dumps(sources))

    def load(folder: Path) -> Rows:
        offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        if (folder / "images.bin").stat().st_size != offsets[-1]:
            raise ValueError("the images have another length than their index says")
        sources = tuple((str(path), int(first)) for path, first in json.loads((folder / "sources.json").read_text()))
        return Rows(folder / "images.bin", offsets, sources)

    return load_folder(cache.make_key(name, [file.path for file in files], ["encoded", column], suffix=""), build, load)
