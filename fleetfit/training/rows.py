"""Rows of tensors by the number of a sample: in memory within a bound, and beyond it in a file that is gone at the end.

The file has no name, so that it is removed with the process, however that ends. Where the disk is full, rows that find
no room are not kept.
"""

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from torch import Tensor

_ABSENT = -1


@dataclass(eq=False)
class Bound:
    """How many bytes may be kept in memory, by all that share the bound.

    Attributes:
        bytes: As many.
        used: So many are.
    """

    bytes: float
    used: int = 0


class KeptRows:
    """One row for each sample that was put in; a row is some tensors of fixed shapes.

    Attributes:
        on_disk: Rows that are in the file.
        full: Whether no more find room.
    """

    def __init__(self, samples: int, like: Sequence[Tensor], bound: Bound) -> None:
        """Keep nothing yet.

        Args:
            samples: How many there are, at most.
            like: Tensors [B, ...] as they will come.
            bound: Of the memory.
        """
        self._kinds = [(tuple(t.shape[1:]), t.dtype) for t in like]
        self._sizes = [t[0].numel() * t.element_size() for t in like]
        self._width = max(1, sum(self._sizes))
        self._bound, self._samples = bound, samples
        self._place = torch.full((samples,), _ABSENT, dtype=torch.int64)
        room = int(max(0, bound.bytes - bound.used) // self._width)
        own = torch.empty((min(samples, room), self._width), dtype=torch.uint8)  # a page is there once it is written
        self._memory, self._typed = own.numpy(), None
        if len(self._kinds) == 1:  # then a row is one tensor, and rows are taken as they are
            shape, dtype = self._kinds[0]
            self._typed = own.view(-1).view(dtype).view(len(own), *shape)
        self._in_memory = self.on_disk = 0
        self._file: IO[bytes] | None = None
        self._mapped: mmap.mmap | None = None
        self._opened = contextlib.ExitStack()
        weakref.finalize(self, self._opened.close)
        self.full = False

    def lacking(self, indices: Tensor) -> Tensor:
        """Return which of these samples have no row, each once."""
        return torch.unique(indices[self._place[indices] == _ABSENT])

    def put(self, indices: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Keep the rows of samples that have none; tell whether there was room for all of them."""
        count = len(indices)
        rows = np.concatenate([_bytes_of(t, count) for t in tensors], axis=1)
        free = int(max(0, self._bound.bytes - self._bound.used)) // self._width  # others fill the bound, too
        room = min(count, len(self._memory) - self._in_memory, free)
        if room:
            at = self._in_memory
            self._memory[at : at + room] = rows[:room]
            self._place[indices[:room]] = torch.arange(at, at + room)
            self._in_memory += room
            self._bound.used += room * self._width
        return room == count or self._write(indices[room:], rows[room:])

    def _write(self, indices: Tensor, rows: np.ndarray) -> bool:
        if self.full:
            return False
        try:
            if self._file is None:
                size = self._samples * self._width
                file = tempfile.TemporaryFile(prefix="fleetfit-", buffering=0)  # noqa: SIM115
                self._file = self._opened.enter_context(file)
                file.truncate(size)
                mapped = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ)
                self._mapped = self._opened.enter_context(mapped)
            self._file.seek(self.on_disk * self._width)
            left = memoryview(rows.tobytes())
            while len(left):
                left = left[os.write(self._file.fileno(), left) :]
        except OSError:
            self.full = True
            return False
        first = self._samples + self.on_disk  # places beyond all that memory can have
        self._place[indices] = torch.arange(first, first + len(indices))
        self.on_disk += len(indices)
        return True

    def get(self, indices: Tensor) -> list[Tensor]:
        """Return the rows of samples that have one, as tensors [B, ...] on the host."""
        chosen = self._place.index_select(0, indices)
        if self._typed is not None and not self.on_disk:
            return [self._typed.index_select(0, chosen)]
        places = chosen.numpy()
        far = places >= self._samples
        if far.all():
            rows = np.empty((len(far), self._width), dtype=np.uint8)
        else:
            rows = self._memory.take(np.where(far, 0, places), axis=0)
        if far.any():
            assert self._mapped is not None
            written = np.frombuffer(self._mapped, dtype=np.uint8).reshape(self._samples, self._width)
            rows[far] = written[places[far] - self._samples]
        ends = np.cumsum(self._sizes)
        parts = [rows[:, end - size : end] for end, size in zip(ends, self._sizes, strict=True)]
        return [
            torch.from_numpy(np.ascontiguousarray(part)).view(-1).view(dtype).view(len(places), *shape)
            for part, (shape, dtype) in zip(parts, self._kinds, strict=True)
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._bound.used -= self._in_memory * self._width
        self._memory, self._typed, self._in_memory = self._memory[:0], None, 0
        self._opened.close()


def _bytes_of(tensor: Tensor, count: int) -> np.ndarray:
    flat = tensor.detach().to("cpu").reshape(count, -1).contiguous()
    found: np.ndarray = flat.view(torch.uint8).numpy() if flat.numel() else np.empty((count, 0), dtype=np.uint8)
    return found
