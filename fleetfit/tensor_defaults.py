"""The default device and type of tensors, and isolation from the caller's modes of PyTorch."""

import contextlib
from collections.abc import Iterator

import torch

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


@contextlib.contextmanager
def tensor_defaults(device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Set PyTorch's default device and floating-point type for a block; both are as before afterwards.

    Args:
        device: The default device; None leaves it as it is.
        dtype: The default type, which is the whole process's, other threads' too; None leaves it as it is.
    """
    before, target = torch.get_default_dtype(), None if device is None else torch.device(device)
    try:
        if dtype not in (None, before):
            torch.set_default_dtype(dtype)
        with contextlib.nullcontext() if target in (None, torch.get_default_device()) else target:
            yield
    finally:
        if torch.get_default_dtype() != before:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def isolate_torch_state() -> Iterator[None]:
    """Compute in float32 on the host, with gradients and without autocast, whatever the caller's state.

    `torch.set_default_dtype`, `set_default_device`, `no_grad`, `inference_mode` and `autocast` around a call of
    FleetFit change nothing in it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(tensor_defaults("cpu", torch.float32))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in _AUTOCAST:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
