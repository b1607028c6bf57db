"""Images that stay encoded on disk until a batch asks for them, for sets larger than memory.

Held in memory are only where each image lies, and even that is memory-mapped. A batch is read, decoded by Pillow on
several threads and brought to size; nothing is kept. Worker processes get the places, not the images.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data import _decode, _resized_crop
from fleetfit.data._decode import Box, centred, cores, opened, threads_pay
from fleetfit.errors import DataError


class Places(Protocol):
    """Where encoded images lie."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """Return one encoded image."""

    def place(self, index: int) -> str:
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

    def place(self, index: int) -> str:
        """Return the path of its file."""
        return str(self._path(index))

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

    def place(self, index: int) -> str:
        """Return the row and the file that it comes from."""
        name, first = next(source for source in reversed(self.sources) if source[1] <= index)
        return f"row {index - first} of {name}"

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
        raise DataError(f"{path} cannot be read any more: {error}. Start again; its index is made anew.") from error
    if 0 <= length != len(found):
        raise DataError(f"{path} has become shorter. Start again; it is unpacked anew.")
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
        self, places: Places, shape: Sequence[int], centre: float | None = 1.0, device: torch.device | str = "cpu"
    ) -> None:
        """Take them as they are; nothing is read.

        Args:
            places: Where the images lie.
            shape: C, H, W of the decoded images.
            centre: Share of the shorter side that the square in the middle keeps, 0 < centre <= 1; it is brought to
                H x W. None: every image must be H x W.
            device: Where batches go.
        """
        self.shape = torch.Size((len(places), *shape))
        self.device = torch.device(device)
        self._places, self._centre = places, centre

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
            return self._decoded(indices, lambda row, size: (None, False))
        return self._decoded(indices, lambda row, size: (centred(*size, share), False))

    def resized_crops(self, indices: Tensor, rng: torch.Generator) -> Tensor:
        """Return a random part of each image asked for, mirrored with probability one half, uint8 [B, C, H, W].

        Args:
            indices: int64 [B].
            rng: A generator on the host; it advances by as many draws for every image.

        Raises:
            DataError: As `index_select`.
        """
        numbers = _resized_crop.draws(len(indices), rng)

        def part(row: int, size: tuple[int, int]) -> tuple[Box, bool]:
            left, top, wide, tall, mirrored = _resized_crop.patch(numbers[row], *size)
            return (left, top, left + wide, top + tall), mirrored

        return self._decoded(indices, part)

    def to(self, device: torch.device | str) -> "Encoded":
        """Return the same images for batches on another device; they are decoded on the host."""
        return Encoded(self._places, self.shape[1:], self._centre, device)

    def cpu(self) -> "Encoded":
        """Return the same images for batches on the host."""
        return self.to("cpu")

    def taken_apart(self) -> tuple[dict[str, Any], np.ndarray]:
        """Return where the images lie: plain values, and the index as an array."""
        nest, index = self._places.taken_apart()
        return {**nest, "shape": list(self.shape[1:]), "centre": self._centre}, index

    @staticmethod
    def put_together(nest: Mapping[str, Any], index: np.ndarray) -> "Encoded":
        """Return what `taken_apart` took apart."""
        places: Places
        if nest["kind"] == "files":
            places = Files(Path(nest["root"]), index)
        else:
            sources = tuple((str(name), int(first)) for name, first in nest["sources"])
            places = Rows(Path(nest["path"]), index, sources)
        return Encoded(places, nest["shape"], nest["centre"])

    def _decoded(self, indices: Tensor, part: Callable[[int, tuple[int, int]], tuple[Box | None, bool]]) -> Tensor:
        """Return a batch; `part` says for a row and the size of its image what is cut out and if it is mirrored."""
        wanted = indices.tolist()
        out = torch.empty((len(wanted), *self.shape[1:]), dtype=torch.uint8)
        pixels = out.numpy()

        def one(row: int) -> None:
            place = self._places.place(wanted[row])
            with opened(self._places.read(wanted[row]), place) as picture:
                box, flip = part(row, picture.size)
                _decode.fill(pixels[row], picture, place, box, flip)

        rows = range(len(wanted))
        several = len(wanted) > 1 and threads_pay([self._places.read(wanted[0])] * 2)
        for _ in _pool().map(one, rows) if several else map(one, rows):
            pass
        return out.to(self.device)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), thread_name_prefix="decode")
