"""Modules on an accelerator: tensors that `forward` makes without naming a device are made there, too."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fleetfit.anatomy.architecture import Architecture, make_input
from fleetfit.anatomy.infer import build_module
from fleetfit.anatomy.meta import Operations, on_meta, run
from fleetfit.machine import tensor_defaults

_METHODS = ("forward", "start", "segment", "head")
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

    A default device costs time in each operation. It is set only where the module makes tensors without naming one.

    Args:
        module: The module, which is changed.
        device: The device.
        architecture: The model family.
        sizes: Size of every axis.
        exits: Its exits.
        input_shape: Shape of one sample.
    """
    module.to(device)
    if device.type != "cpu" and _makes_tensors(architecture, sizes, exits, input_shape):
        for name in _METHODS:
            if hasattr(module, name):
                setattr(module, name, tensor_defaults(device)(getattr(module, name)))
    return module


def _makes_tensors(
    architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...], input_shape: Sequence[int]
) -> bool:
    """Run on the meta device, in training and in evaluation; return whether a tensor is made on the host."""
    with on_meta():
        module, x = build_module(architecture, sizes, exits), make_input(architecture, input_shape, _BATCH)
    host_tensors = _HostTensors()
    for training in (True, False):
        with contextlib.suppress(Exception), torch.no_grad(), host_tensors:  # the run itself raises its errors
            module.train(training)(x)
    return host_tensors.any


class _HostTensors(Operations):
    """Sees whether an operation returns a tensor on the host; single numbers may be there anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = run(func, args, kwargs or {})
        self.any |= any(isinstance(t, Tensor) and not t.is_meta and t.dim() > 0 for t in tree_leaves(out))
        return out
