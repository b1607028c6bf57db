"""Modules on an accelerator: what `forward` makes without naming a device is made there, too."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fleetfit.layout.axes import Architecture, some_input
from fleetfit.layout.infer import build_module
from fleetfit.layout.meta import Operations, on_meta, run
from fleetfit.tensor_defaults import tensor_defaults

_RUN = ("forward", "start", "segment", "head")
_BATCH = 2


def place_module(
    module: nn.Module,
    device: torch.device,
    architecture: Architecture,
    sizes: Mapping[str, int],
    exits: tuple[int, ...],
    input_shape: Sequence[int],
) -> nn.Module:
    """Move a module to a device.

    A default device costs some time in each operation, so it is set only where the module makes tensors that name none.

    Args:
        module: The module, which is changed.
        device: Where to.
        architecture: What it was built from, and with which sizes and exits.
        sizes: Size of every axis.
        exits: Its exits.
        input_shape: Shape of one sample.
    """
    module.to(device)
    if device.type != "cpu" and _makes_tensors(architecture, sizes, exits, input_shape):
        for name in _RUN:
            if hasattr(module, name):
                setattr(module, name, _run_there(getattr(module, name), device))
    return module


def _run_there(method: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def there(*args: Any, **kwargs: Any) -> Any:
        with tensor_defaults(device):
            return method(*args, **kwargs)

    return there


def _makes_tensors(
    architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...], input_shape: Sequence[int]
) -> bool:
    """Run on the meta device, in training and in evaluation; tell whether a tensor is made on the host meanwhile."""
    with on_meta():
        module, x = build_module(architecture, sizes, exits), some_input(architecture, input_shape, _BATCH)
    made = _OnHost()
    for training in (True, False):
        with contextlib.suppress(Exception), torch.no_grad(), made:  # a run says itself what is wrong
            module.train(training)(x)
    return made.any


class _OnHost(Operations):
    """Sees whether an operation gives a tensor on the host; single numbers may lie there anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = run(func, args, kwargs or {})
        self.any |= any(isinstance(t, Tensor) and not t.is_meta and t.dim() > 0 for t in tree_leaves(out))
        return out
