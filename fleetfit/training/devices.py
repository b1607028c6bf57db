"""Where tensors are computed on, by name; and keeping freed memory for the next step.

glibc maps each large block anew and zeroes it page by page; training allocates the same blocks at every step. Keeping
them saves up to a third of the CPU time of small models. Where there is no glibc, nothing happens.

The library behind torch's convolutions compiles a kernel for each shape and keeps the last 1,024. Batches of clients
have many sizes, levels many shapes: an evaluation of the default run alone takes more, and would compile them anew each
time, and those of training after it.
"""

import contextlib
import ctypes
import functools
import gc
import os
import sys

import torch

from fleetfit import buffers
from fleetfit.errors import ConfigError


def accelerator_named(device: str) -> torch.device:
    """Return the torch device of a name: "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: There is no such device on this machine.
    """
    try:
        found = torch.device(device or "nothing")
    except RuntimeError:
        raise ConfigError(
            f'engine.device must be "cpu", "cuda" or "cuda:N", got "{device}".', key="engine.device"
        ) from None
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f'engine.device must be "cpu", "cuda" or "cuda:N", got "{device}".', key="engine.device")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ConfigError(
                f'engine.device is "{device}", but this machine has {count} CUDA devices.', key="engine.device"
            )
        found = torch.device("cuda", found.index or 0)
    return found


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_LARGEST = 32 * 1024 * 1024  # the largest threshold that glibc takes
_SMALLEST = 128 * 1024  # the one that glibc begins with
_KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"  # environment variable, read when the first kernel is made


@functools.cache
def keep_freed_memory() -> None:
    """Ask this process's allocator to keep what is freed, and torch's library its kernels; once per process."""
    os.environ.setdefault(_KERNELS, "4096")
    _set_allocator({_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: 2**31 - 1})


@functools.cache
def keep_no_freed_memory() -> None:
    """Ask this process's allocator to give each large block back where it is freed; once per process.

    Left alone, glibc raises its threshold with each block that is freed, until tensors lie in the heap, between small
    things that stay: what they leave there counts as this process's, and fits fewer and fewer of the next ones.
    """
    _set_allocator({_MMAP_THRESHOLD: _SMALLEST, _TRIM_THRESHOLD: _SMALLEST})


def _set_allocator(thresholds: dict[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for name, value in thresholds.items():
        mallopt(name, value)


def give_back_freed_memory() -> None:
    """Give the memory that this process does not use back to the system, as far as its allocator can."""
    gc.collect()
    buffers.forget()
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
