"""One row of tensors per sample: in memory up to a budget, beyond it in a temporary file.

The file has no name, so the system removes it with the process. If the disk is full, further rows are not stored.
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
class MemoryBudget:
    """The memory that several stores share, in bytes."""

    total: float
    used: int = 0


class RowStore:
    """One row for each stored sample; a row is some tensors of fixed shapes.

    Attributes:
        full: Whether a row found no room.
    """

    def __init__(self, samples: int, examples: Sequence[Tensor], budget: MemoryBudget) -> None:
        """Make an empty store.

        Args:
            samples: How many there are, at most.
            examples: Tensors [B, ...] with the shapes and types of a row.
            budget: Of the memory.
        """
        self._formats = [(tuple(t.shape[1:]), t.dtype, t[0].numel() * t.element_size()) for t in examples]
        self._width = sum(size for _, _, size in self._formats)
        self._budget, self._samples = budget, samples
        self._positions = torch.full((samples,), _ABSENT, dtype=torch.int64)  # in the file from `samples` on
        room = int(max(0, budget.total - budget.used) // self._width)
        memory = torch.empty((min(samples, room), self._width), dtype=torch.uint8)  # pages are taken when written
        self._memory, self._in_memory, self._in_file = memory.numpy(), 0, 0
        self._file: IO[bytes] | None = None
        self._mapped: mmap.mmap | None = None
        self._resources = contextlib.ExitStack()
        weakref.finalize(self, self._resources.close)
        self.full = False

    def find_missing(self, indices: Tensor) -> Tensor:
        """Return the samples without a row, each once."""
        return torch.unique(indices[self._positions[indices] == _ABSENT])

    def add(self, indices: Tensor, tensors: Sequence[Tensor]) -> None:
        """Store the rows [B, ...] of samples that have none, as far as there is room."""
        count = len(indices)
        if not count:
            return
        flat = [t.detach().to("cpu").reshape(count, -1).contiguous() for t in tensors]
        rows = np.concatenate([t.view(torch.uint8).numpy() for t in flat], axis=1)
        free = int(max(0, self._budget.total - self._budget.used)) // self._width  # other stores use the budget, too
        room = min(count, len(self._memory) - self._in_memory, free)
        start = self._in_memory
        self._memory[start : start + room] = rows[:room]
        self._positions[indices[:room]] = torch.arange(start, start + room)
        self._in_memory += room
        self._budget.used += room * self._width
        if room < count and not self.full:
            try:
                self._write(indices[room:], rows[room:])
            except OSError:
                self.full = True

    def _write(self, indices: Tensor, rows: np.ndarray) -> None:
        if self._file is None:
            size = self._samples * self._width
            file = tempfile.TemporaryFile(prefix="fleetfit-", buffering=0)  # noqa: SIM115
            self._file = self._resources.enter_context(file)
            file.truncate(size)
            self._mapped = self._resources.enter_context(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        self._file.seek(self._in_file * self._width)
        left = memoryview(rows.tobytes())
        while len(left):
            left = left[os.write(self._file.fileno(), left) :]
        start = self._samples + self._in_file
        self._positions[indices] = torch.arange(start, start + len(indices))
        self._in_file += len(indices)

    def get(self, indices: Tensor) -> list[Tensor]:
        """Return the rows of samples that have one, as tensors [B, ...] on the host."""
        positions = self._positions[indices].numpy()
        if self._mapped is None:
            rows = self._memory.take(positions, axis=0)
        else:
            rows = np.empty((len(positions), self._width), dtype=np.uint8)
            in_file = positions >= self._samples
            rows[~in_file] = self._memory[positions[~in_file]]
            file_rows = np.frombuffer(self._mapped, dtype=np.uint8).reshape(self._samples, self._width)
            rows[in_file] = file_rows[positions[in_file] - self._samples]
        tensors, start = [], 0
        for shape, dtype, size in self._formats:
            column = torch.from_numpy(np.ascontiguousarray(rows[:, start : start + size]))
            tensors.append(column.view(-1).view(dtype).view(len(positions), *shape))
            start += size
        return tensors

    def close(self) -> None:
        """Return the memory to the budget, and remove the file."""
        self._budget.used -= self._in_memory * self._width
        self._memory, self._in_memory = self._memory[:0], 0
        self._resources.close()
