"""What the machine has: processor cores of this process, and the errors in which its memory ran out."""

import os

from fleetfit.errors import format_cause

_OUT_OF_MEMORY = (  # of FleetFit, PyTorch and the C++ library
    "no memory was left", "allocate memory", "out of memory", "not enough memory", "bad_alloc",
)  # fmt: skip


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_out_of_memory(error: BaseException | str) -> bool:
    """Return whether an error, or the message of one, means that no memory was left, on the host or a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is PyTorch's
        return True
    message = error if isinstance(error, str) else format_cause(error)
    return any(words in message for words in _OUT_OF_MEMORY)
