"""One sub-model counted exactly, by building it on the meta device: parameters and multiply-adds.

Torch's counter sees convolutions, matrix products, attention and LSTMs there (on a CPU it misses the last two). A
module may add other operations, such as a Mamba scan, with a method `extra_flops(self, inputs) -> int`: the FLOPs
(two per multiply-add) of a call with these inputs, the tuple of `forward`'s arguments.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from fleetfit.anatomy import (
    Architecture,
    Layout,
    batch_norms,
    build_module,
    explain_errors,
    infer_layout,
    make_input,
    meta,
)
from fleetfit.submodel import Submodel

BATCH_SIZE = 16
"""Samples in a training step, by default."""


@dataclass(frozen=True)
class Conditions:
    """Under which conditions costs are counted.

    Attributes:
        batch_size: Samples in one training step, which memory depends on.
        moments: Numbers that the optimizer keeps of each trained parameter, which memory depends on: one of SGD.
        measured: Measurements on a machine by their keys. A key is measured once, so that a run can record the numbers
            and resume with them.
    """

    batch_size: int = BATCH_SIZE
    measured: dict[str, list[float]] = field(default_factory=dict, hash=False, compare=False)
    moments: int = 1


# ---- counting ------------------------------------------------------------------------------------------------------

Piece = Submodel | tuple[Mapping[str, int], Sequence[int]]
"""A sub-model, or a pair of sizes by axis (axes not named are whole) and exits."""
R = TypeVar("R")
_BATCH = 2  # batch norm refuses a single value per channel


@dataclass(frozen=True)
class Cost:
    """What a sub-model costs.

    Attributes:
        parameters: Numbers in its parameters, frozen ones and classifiers included.
        multiply_adds: Multiply-adds of one forward pass of one sample; half of what torch counts as FLOPs.
    """

    parameters: int
    multiply_adds: int


def submodel_cost(architecture: Architecture, submodel: Piece, input_shape: Sequence[int]) -> Cost:
    """Return the cost of a sub-model, all its classifiers included, by building it on the meta device.

    Args:
        architecture: The model family.
        submodel: The sub-model, or a pair of sizes by axis (axes not named are whole) and exits.
        input_shape: Shape of one sample, such as (3, 32, 32).

    Raises:
        ModelError: The model cannot be built or does not accept the input.
    """
    sizes, exits = get_sizes_and_exits(architecture, submodel)
    return call_once(_submodel_cost, architecture, tuple(sorted(sizes.items())), exits, tuple(input_shape))


def full_cost(architecture: Architecture, input_shape: Sequence[int]) -> Cost:
    """Return cost(M): the full model without early classifiers."""
    return submodel_cost(architecture, ({}, (architecture.blocks,)), input_shape)


def get_sizes_and_exits(architecture: Architecture, submodel: Piece) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the size of every axis, and the exits."""
    sizes, exits = (submodel.sizes, submodel.exits) if isinstance(submodel, Submodel) else submodel
    whole = {name: axis.size for name, axis in architecture.axes.items()}
    return {**whole, **sizes}, tuple(exits)


def get_layout(architecture: Architecture, input_shape: Sequence[int]) -> Layout:
    """Return the layout with every possible exit."""
    return call_once(_infer, architecture, tuple(input_shape))


def _infer(architecture: Architecture, input_shape: tuple[int, ...]) -> Layout:
    return infer_layout(architecture, input_shape=input_shape)


def _submodel_cost(
    architecture: Architecture, key: tuple[tuple[str, int], ...], exits: tuple[int, ...], input_shape: tuple[int, ...]
) -> Cost:
    module, counted = count(architecture, dict(key), exits, input_shape)
    return Cost(sum(p.numel() for p in module.parameters()), sum(counted.values()))


def count(
    architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...], input_shape: tuple[int, ...]
) -> tuple[nn.Module, dict[str, int]]:
    """Run a module on the meta device; return it and the multiply-adds of one sample by module, children not counted.

    Raises:
        ModelError: The model cannot be built or does not accept the input.
    """
    module, x = on_meta(architecture, sizes, exits, input_shape, _BATCH)
    for norm in batch_norms(module).values():
        norm.forward = lambda x: x  # type: ignore[assignment]  # torch counts nothing there, and takes long
    module.eval().requires_grad_(False)  # the tracker fails on a parameter that is the input of a layer
    running = ModuleTracker()
    explained = explain_errors(architecture, input_shape, "meta", sizes=sizes)
    with explained, torch.no_grad(), _count_extra(module) as extra, running, _Flops(running) as counter:
        module(x)
    counts = counter.by_module
    root = type(module).__name__
    total = {name.removeprefix(root).removeprefix("."): n for name, n in counts.items() if name.startswith(root)}
    total[""] = counts["Global"]
    own = dict(total)
    for name, n in total.items():
        if name:
            own[_find_parent(name, total)] -= n
    for name, n in extra.items():
        own[name] = own.get(name, 0) + n
    return module, {name: n // (2 * _BATCH) for name, n in own.items()}


def on_meta(
    architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...], input_shape: Sequence[int], batch: int
) -> tuple[nn.Module, Tensor]:
    """Build a module and inputs for it [batch, ...] on the meta device."""
    with meta.on_meta():
        return build_module(architecture, sizes, exits), make_input(architecture, input_shape, batch)


class _Flops(meta.Operations):
    """Counts the FLOPs that torch has formulas for."""

    def __init__(self, running: ModuleTracker) -> None:
        super().__init__()
        # children included, by the names of the tracker: `Class.child`; "Global" is all of them
        self.by_module: dict[str, int] = defaultdict(int)
        self._running = running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or those that it consists of, and count it."""
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        out = meta.run(func, args, kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=out)
            for name in set(self._running.parents):
                self.by_module[name] += flops
        return out


@contextlib.contextmanager
def _count_extra(module: nn.Module) -> Iterator[dict[str, int]]:
    """Collect `extra_flops` of modules by their names, while the module runs."""
    flops: dict[str, int] = {}

    def add(name: str, part: Any, inputs: tuple[Any, ...], _: Any) -> None:
        flops[name] = flops.get(name, 0) + int(part.extra_flops(inputs))

    with contextlib.ExitStack() as hooks:
        for name, part in module.named_modules():
            if hasattr(part, "extra_flops"):
                hooks.enter_context(part.register_forward_hook(functools.partial(add, name)))
        yield flops


def _find_parent(name: str, modules: Mapping[str, Any]) -> str:
    while name:
        name = name.rpartition(".")[0]
        if name in modules:
            break
    return name


# ---- results by architecture ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _call_cached(function: Callable[..., Any], *key: Hashable) -> Any:
    return function(*key)


def call_once(function: Callable[..., R], architecture: Architecture, *key: Hashable) -> R:
    """Call a function once for equal architectures; for one that cannot be hashed, each time."""
    try:
        hash(architecture)
    except TypeError:
        return function(architecture, *key)
    return cast(R, _call_cached(function, cast(Hashable, architecture), *key))
