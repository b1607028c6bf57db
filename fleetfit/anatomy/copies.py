"""A level's module: a deep copy of the instance, with cut parameters and the numbers in its modules set.

The copy's `memo` maps each parameter and buffer to its cut one before anything is copied, so that ties and
parametrizations survive and nothing is copied whole. The instance is left as it is.
"""

import contextlib
import copy
import io
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from fleetfit.anatomy import get_length, keep_statistics, named_tensors
from fleetfit.anatomy.known_values import set_values
from fleetfit.anatomy.labels import list_tensors
from fleetfit.anatomy.meta import forget_numbers, parameters_on_meta
from fleetfit.anatomy.plan import DerivedPlan
from fleetfit.errors import ModelError, format_cause

_TABLES = (dict, OrderedDict, set)
_SHARED = (type(threading.Lock()), type(threading.RLock()), io.IOBase, types.ModuleType)


class PastExit(BaseException):
    """Ends a forward pass behind the last exit; no `except Exception` of the instance's code catches it.

    Its `args` are what the module behind the exit would have read.
    """


class Absent(nn.Module):
    """Stands for a module behind the last exit of a level."""

    def forward(self, *inputs: Any, **others: Any) -> None:
        """End the pass: training may skip the block of the last exit, such as with layer drop."""
        raise PastExit(*inputs, *others.values())


def build_without_numbers(build: Callable[[], Any]) -> Any:
    """Build a module whose parameters have shapes alone: a device has memory for the level that it trains.

    A constructor that needs their numbers builds the whole module first: one that computes with them, or makes
    other tensors of them. Weights that are parametrized keep their numbers, since a copy of the module reads them.

    Args:
        build: Makes the module; what is no module is returned as it is.
    """
    with contextlib.suppress(Exception), parameters_on_meta():  # its own errors come again
        net = build()
        if not any(map(_needs_numbers, net.modules() if isinstance(net, nn.Module) else ())):
            return net
    net = build()
    for part in net.modules() if isinstance(net, nn.Module) else ():
        for parameter in () if isinstance(part, ParametrizationList) else part.parameters(recurse=False):
            with contextlib.suppress(RuntimeError):
                forget_numbers(parameter)
    return net


def _needs_numbers(part: nn.Module) -> bool:
    """Return whether a module with parameters on the meta device has other tensors there, or parametrizations."""
    others = (x for x in tree_leaves(vars(part)) if isinstance(x, Tensor) and not isinstance(x, nn.Parameter))
    return isinstance(part, ParametrizationList) or any(x.is_meta for x in others)


def find_drawn_constants(net: nn.Module, other: nn.Module) -> list[str]:
    """Return the names of tensors and arrays that differ between two instances, and that no state carries."""
    others = dict(_iter_constants(other))
    return [name for name, x in _iter_constants(net) if name in others and not _is_equal(x, others[name])]


def _iter_constants(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and arrays of an instance that are not sent, by name."""
    sent = {id(tensor) for _, tensor, _ in named_tensors(net)}
    for name, part in net.named_modules():
        for path, leaf in tree_flatten_with_path(vars(part))[0]:
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
                leaf = torch.as_tensor(leaf)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not (leaf.is_meta or id(leaf) in sent):
                keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
                yield ".".join(filter(None, [name, *(key for key in keys if key != "_buffers")])), leaf.detach()


def _is_equal(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same shape and numbers, of which some may be NaN."""
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


def copy_instance(net: nn.Module) -> nn.Module:
    """Return a copy of an instance, with all tensors that its modules have.

    Raises:
        ModelError: It has something that cannot be copied.
    """
    try:
        return copy.deepcopy(net, _copy_plain_values(net, {}))
    except Exception as error:  # of any class that its modules hold
        raise ModelError(
            f"{type(net).__name__} cannot be copied, and each level is a copy: {format_cause(error)}. Leave out of the "
            "module what is not the model's.",
            key="model",
        ) from error


def copy_all_but_parameters(net: nn.Module) -> nn.Module:
    """Return a copy of an instance that has the instance's own parameters, and runs no forward pass."""
    return copy.deepcopy(net, _copy_plain_values(net, {id(parameter): parameter for parameter in net.parameters()}))


def copy_level(
    net: nn.Module, plan: DerivedPlan, sizes: Mapping[str, int], absent: Collection[str] = frozenset()
) -> nn.Module:
    """Return a copy of an instance with these sizes; who calls it sets its mode.

    Args:
        net: The instance.
        plan: What was derived from it.
        sizes: The units of each axis; the others stay whole.
        absent: Tensors behind the last exit.
    """
    sizes = {**plan.axes, **sizes}
    memo = _cut_tensors(net, plan, sizes, absent)
    modules = dict(net.named_modules(remove_duplicate=False))
    incomplete = _list_modules(absent)
    for name in incomplete - _list_modules(name for name, _ in list_tensors(net) if name not in absent):
        if not isinstance(modules[name], nn.ModuleList | nn.ModuleDict | nn.Sequential):
            memo[id(modules[name])] = Absent()
    level = copy.deepcopy(net, _copy_plain_values(net, memo))
    copies = {name: memo[id(whole)] for name, whole in modules.items() if id(whole) in memo}  # none inside absent ones
    for part in level.modules():
        if isinstance(part, ParametrizationList):  # in training mode, to read a weight with spectral norm changes it
            part.eval()
    for name, part in copies.items():
        if name not in incomplete and getattr(part, "weight", part) is not None:
            _resize(modules[name], part)
        for table in (part._parameters, part._buffers):
            table |= dict.fromkeys(leaf for leaf in table if f"{name}.{leaf}".lstrip(".") in absent)
    for name in plan.kept & copies.keys():
        keep_statistics(copies[name])
    for number in plan.numbers:
        if not isinstance(part := copies.get(number.module, Absent()), Absent):
            _set_number(part, number.keys, get_length(number.meaning, sizes))
    return level


def _cut_tensors(
    net: nn.Module, plan: DerivedPlan, sizes: Mapping[str, int], absent: Collection[str]
) -> dict[int, Any]:
    """Return the cut parameters and buffers of a level, by the identity of the instance's; absent ones are empty."""
    memo: dict[int, Any] = {}
    device = torch.get_default_device()
    for name, tensor in list_tensors(net):
        if id(tensor) not in memo:
            is_absent = name in absent
            cut = torch.empty(0, dtype=tensor.dtype) if is_absent else _cut(name, tensor, plan, sizes, device)
            memo[id(tensor)] = nn.Parameter(cut, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cut
    return memo


def _copy_plain_values(net: nn.Module, memo: dict[int, Any]) -> dict[int, Any]:
    """Add the tensors that are no parameters or buffers, what is empty, and what copies share: locks, files, modules.

    Tensors such as those of old weight norm, or of caches, may be refused by deepcopy. Each module has ten empty
    tables, of hooks for the most part, which take deepcopy as long as all the rest.
    """
    for part in net.modules():
        for value in vars(part).values():
            if type(value) in _TABLES and not value:
                memo.setdefault(id(value), type(value)())
            elif isinstance(value, _SHARED):
                memo[id(value)] = value
            elif isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = value.detach().clone().to(torch.get_default_device())
    return memo


def _cut(name: str, tensor: Tensor, plan: DerivedPlan, sizes: Mapping[str, int], device: torch.device) -> Tensor:
    """Return a tensor's prefix at some sizes, on a device; its shape on the meta device, zeros from there."""
    is_meta = device.type == "meta"
    has_numbers = not (is_meta or tensor.is_meta)
    shape, cut = list(tensor.shape), tensor.detach()
    for d, whole in enumerate(tensor.shape):
        segments = plan.segments.get((name, d))
        if segments is None:
            continue
        shape[d] = get_length(segments, sizes)
        if shape[d] != whole and has_numbers:
            parts = cut.split([get_length([segment], plan.axes) for segment in segments], d)
            left = [p.narrow(d, 0, get_length([s], sizes)) for p, s in zip(parts, segments, strict=True)]
            cut = torch.cat(left, d) if len(left) > 1 else left[0]
    if is_meta:
        empty = torch.empty(shape, dtype=tensor.dtype)
        if not tensor.is_floating_point():
            set_values(empty, cut.to("cpu", copy=True))
        return empty
    if not has_numbers:
        return torch.zeros(shape, dtype=tensor.dtype)
    return cut.clone(memory_format=torch.contiguous_format).to(device)


def _list_modules(names: Iterable[str]) -> set[str]:
    """Return the names of the modules that tensors are in, those around them too."""
    parts = [name.split(".")[:-1] for name in names]
    return {".".join(some[: i + 1]) for some in parts for i in range(len(some))}


def get_number(part: Any, keys: Sequence[str]) -> Any:
    """Return what a module has in an attribute, in one of an object, or in a sequence; None where it has nothing."""
    for key in keys:
        if isinstance(part, tuple | list):
            part = part[int(key)] if key.isdecimal() and int(key) < len(part) else None
        else:
            part = getattr(part, "__dict__", {}).get(key)
    return part


def _set_number(owner: Any, keys: Sequence[str], value: int) -> Any:
    """Set a number of a module, an object or a sequence; return the owner, or the sequence in its place."""
    key, *rest = keys
    if isinstance(owner, tuple | list):
        values = list(owner)
        values[int(key)] = _set_number(values[int(key)], rest, value) if rest else value
        return type(owner)(values)
    setattr(owner, key, _set_number(getattr(owner, key), rest, value) if rest else value)
    return owner


_SIZES: tuple[tuple[Any, dict[str, tuple[str, int]]], ...] = (
    (nn.Linear, {"out_features": ("weight", 0), "in_features": ("weight", 1)}),
    (nn.modules.batchnorm._NormBase, {"num_features": ("weight", 0)}),
    (nn.GroupNorm, {"num_channels": ("weight", 0)}),
    ((nn.Embedding, nn.EmbeddingBag), {"num_embeddings": ("weight", 0), "embedding_dim": ("weight", 1)}),
    (nn.RNNBase, {"input_size": ("weight_ih_l0", 1), "hidden_size": ("weight_hh_l0", 1)}),
    (nn.LSTM, {"hidden_size": ("weight_hr_l0", 1), "proj_size": ("weight_hr_l0", 0)}),  # with projections
    (nn.RNNCellBase, {"input_size": ("weight_ih", 1), "hidden_size": ("weight_hh", 1)}),
    (nn.PReLU, {"num_parameters": ("weight", 0)}),
)
"""Sizes in PyTorch's modules, each with a parameter and its dimension of this size."""


def _resize(whole: Any, part: Any) -> None:
    """Set the numbers of a copy of one of PyTorch's modules, by the shapes of its parameters."""
    for kinds, sizes in _SIZES:
        if isinstance(whole, kinds):
            for attribute, (name, d) in sizes.items():
                if isinstance(parameter := getattr(part, name, None), Tensor):
                    setattr(part, attribute, parameter.shape[d])
    if isinstance(whole, nn.modules.conv._ConvNd):
        rows, columns = part.weight.shape[:2]
        if whole.groups > 1 and not whole.transposed:
            part.groups = whole.groups * rows // whole.weight.shape[0]
        channels = (columns * part.groups, rows)
        part.in_channels, part.out_channels = channels[::-1] if whole.transposed else channels
    elif isinstance(whole, nn.LayerNorm | nn.RMSNorm):
        part.normalized_shape = tuple(part.weight.shape)
    elif isinstance(whole, nn.GroupNorm):
        part.num_groups = max(1, whole.num_groups * part.num_channels // whole.num_channels)
    elif isinstance(whole, nn.MultiheadAttention):
        part.embed_dim = part.out_proj.weight.shape[0]
        part.num_heads = whole.num_heads * part.embed_dim // whole.embed_dim
        inner = [part.k_proj_weight, part.v_proj_weight]
        part.kdim, part.vdim = (part.embed_dim if one is None else one.shape[1] for one in inner)
    elif isinstance(whole, nn.Transformer):
        part.d_model, part.nhead = next(part.parameters()).shape[-1], part.decoder.layers[0].self_attn.num_heads
    elif isinstance(whole, nn.TransformerEncoder):
        part.use_nested_tensor = False  # PyTorch decides it where the encoder is made, by heads that a level may lack
