"""Where tensors are made, and of which type, where code names neither."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def tensor_defaults(device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Set PyTorch's default device and floating-point type for a block; both are as before afterwards.

    Args:
        device: The default device; None leaves it as it is.
        dtype: The default type, which is the whole process's, other threads' too; None leaves it as it is.
    """
    before, there = torch.get_default_dtype(), None if device is None else torch.device(device)
    wanted = before if dtype is None else dtype
    try:
        if wanted != before:
            torch.set_default_dtype(wanted)
        with contextlib.nullcontext() if there in (None, torch.get_default_device()) else there:
            yield
    finally:
        if wanted != before:
            torch.set_default_dtype(before)
