"""Large flat buffers, used again: for states of the full model's size, of which each round needs a few.

What is larger than 32 MiB, glibc's allocator asks of the system anew each time, and every page of it costs when it is
first written: in all three times what it costs to write it. So a buffer that nobody holds any more is used again, and
new ones are asked for in pages of 2 MiB. A buffer is held as long as any tensor looks at it, so nobody has to hand it
back.
"""

import contextlib
import mmap
import sys
import threading
import weakref

import torch
from torch import Tensor

_LARGE = 32 * 1024 * 1024  # bytes
_KEPT = 3  # buffers that nobody holds

_Entry = tuple[mmap.mmap, "weakref.ref[memoryview]"]  # a buffer, and what tensors hold of it

_known: list[_Entry] = []  # the latest last
_lock = threading.RLock()  # what frees a buffer may run anywhere


def empty_like(flat: Tensor, size: int | None = None) -> Tensor:
    """Return a flat buffer of the same type and place, with any numbers in it; of the same size where none is given."""
    count = flat.numel() if size is None else size
    needed = count * flat.element_size()
    if needed <= _LARGE or flat.device.type != "cpu" or not sys.platform.startswith("linux"):
        return flat.new_empty(count)
    with _lock:
        try:
            memory = memoryview(found := _free(needed) or _new(needed))
        except OSError:  # there is no room: torch's own error says so
            return flat.new_empty(count)
        _known.append((found, weakref.ref(memory, _freed)))
    return torch.frombuffer(memory, dtype=flat.dtype, count=count)


def forget() -> None:
    """Give the buffers that nobody holds back to the system."""
    with _lock:
        _drop(0)


def _freed(holder: object) -> None:
    with _lock:
        _drop(_KEPT)


def _free(needed: int) -> mmap.mmap | None:
    for entry in _known:
        known, holder = entry
        if holder() is None and needed <= len(known) <= needed + needed // 8:
            _remove(entry)
            return known
    return None


def _new(needed: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, needed)
    found = mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it is a wish
            found.madvise(mmap.MADV_HUGEPAGE)
    return found


def _drop(kept: int) -> None:
    """Drop buffers that nobody holds, the oldest first, until so many of them are left."""
    free = [entry for entry in list(_known) if entry[1]() is None]
    for entry in free[: max(0, len(free) - kept)]:
        _remove(entry)


def _remove(entry: _Entry) -> None:
    with contextlib.suppress(ValueError):
        _known.remove(entry)
