"""Reuse large flat buffers, for states of the full model's size, of which each round needs a few.

glibc's allocator requests more than 32 MiB anew from the system each time, and the first write to every page is slow:
three times the cost of writing it. So a released buffer is used again, and new ones have pages of 2 MiB. A buffer is in
use as long as any tensor views it; it is not returned by hand.
"""

import contextlib
import mmap
import sys
import threading
import weakref

import torch
from torch import Tensor

_LARGE = 32 * 1024 * 1024  # bytes
_RESERVE = 3  # buffers that are kept without a user

_Buffer = tuple[mmap.mmap, "weakref.ref[memoryview]"]  # a buffer, and the view that tensors hold

_buffers: list[_Buffer] = []  # the latest last
_lock = threading.RLock()  # a buffer may be freed in any thread


def empty_like(flat: Tensor, size: int | None = None) -> Tensor:
    """Return an uninitialized flat buffer of the same type and device, and of the same size by default."""
    count = flat.numel() if size is None else size
    bytes_needed = count * flat.element_size()
    if bytes_needed <= _LARGE or flat.device.type != "cpu" or not sys.platform.startswith("linux"):
        return flat.new_empty(count)
    with _lock:
        try:
            memory = _take_unused(bytes_needed)
            if memory is None:
                memory = mmap.mmap(-1, bytes_needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with contextlib.suppress(OSError):  # huge pages are optional
                    memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # no memory: torch's own error says so
            return flat.new_empty(count)
        view = memoryview(memory)
        _buffers.append((memory, weakref.ref(view, lambda _: release(_RESERVE))))
    return torch.frombuffer(view, dtype=flat.dtype, count=count)


def release(reserve: int = 0) -> None:
    """Return unused buffers to the system, the oldest first, until `reserve` of them are left."""
    with _lock:
        unused = [buffer for buffer in list(_buffers) if buffer[1]() is None]
        for buffer in unused[: max(0, len(unused) - reserve)]:
            _remove(buffer)


def _take_unused(bytes_needed: int) -> mmap.mmap | None:
    for buffer in _buffers:
        memory, view = buffer
        if view() is None and bytes_needed <= len(memory) <= bytes_needed + bytes_needed // 8:
            _remove(buffer)
            return memory
    return None


def _remove(buffer: _Buffer) -> None:
    with contextlib.suppress(ValueError):
        _buffers.remove(buffer)
