"""Values of tensors on the meta device that depend on neither samples nor parameters.

Masks and positions are made of sizes alone, and a forward pass may look at them, as in `if (steps == 0).all()`. What is
made of sizes is computed on the CPU, too, and so is what is made of it; its values are kept beside the meta tensor.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MOST = 2**20
"""Elements of a tensor whose values are kept."""
_ATTRIBUTE = "_fleetfit_values"
_FACTORIES = {
    "arange", "ones", "zeros", "full", "linspace", "logspace", "eye", "scalar_tensor", "tril_indices", "triu_indices",
}  # fmt: skip
_ALIKE = {"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}
"""Operations that read the shape of their first tensor alone."""
_UNIFORM = {"rand", "rand_like", "uniform", "uniform_"}
"""Random numbers from 0 to 1. One of them is as its mean: forward may decide by it."""


@functools.cache
def reads_values(func: Any) -> bool:
    """Return whether an operation's result, or its shape, depends on values."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def apply_to_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation that reads values: numbers, or tensors on the meta device.

    NotImplemented where a tensor has unknown values.
    """
    out = _compute(func, args, kwargs)
    if out is NotImplemented and func is torch.ops.aten.index.Tensor:
        return _index(func, *args)
    if not isinstance(out, Tensor):
        return out
    result = torch.empty(out.shape, dtype=out.dtype, device="meta")
    set_values(result, out)
    return result


def _index(func: Any, x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Return the places of a tensor without values that masks with values choose."""
    chosen: list[Tensor | None] = []
    for index in indices:
        values = None if index is None or index.dtype != torch.bool else get_values(index)
        chosen += [index] if values is None else [each.to("meta") for each in values.nonzero(as_tuple=True)]
    is_masked = any(index is not None and index.dtype == torch.bool for index in indices)
    is_known = all(index is None or index.dtype != torch.bool for index in chosen)
    return func(x, chosen) if is_masked and is_known else NotImplemented


def record_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Keep the values of an operation's results on the meta device, or forget those of what it has written into."""
    kind, first = _find_kind(func), args[0] if args else None
    if kind == "random" and func.overloadpacket.__name__ in _UNIFORM and out.is_meta and out.numel() == 1:
        set_values(out, torch.full(out.shape, 0.5, dtype=out.dtype, device="cpu"))  # `if rand() < drop: skip the block`
        return
    is_unknown = isinstance(first, Tensor) and first.is_meta and not hasattr(first, _ATTRIBUTE)
    if kind == "empty" or (kind != "constant" and is_unknown):
        return  # nearly every call
    results = list(iter_tensors([out]))
    if not results or not results[0].is_meta:
        return
    values = _compute(func, args, kwargs) if results[0].numel() <= _MOST else NotImplemented
    if values is not NotImplemented:
        for x, own in zip(results, iter_tensors([values]), strict=True):
            set_values(x, own)
    elif func._schema.is_mutable:
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and (known := getattr(x, _ATTRIBUTE, None)) is not None:
                known.untyped_storage().resize_(0)  # those of all its views are forgotten, too


def set_values(x: Tensor, values: Tensor) -> None:
    """Keep the values of a tensor on the meta device, unless it is large."""
    if values.numel() <= _MOST:
        setattr(x, _ATTRIBUTE, values)


def get_values(x: Tensor) -> Tensor | None:
    """Return the values of a tensor; None where they are unknown, as those of every parameter are."""
    values: Tensor | None = getattr(x, _ATTRIBUTE, None)
    if values is None:
        return None if x.is_meta else x
    is_empty = values.numel() > 0 and values.untyped_storage().nbytes() == 0
    return None if is_empty or isinstance(x, nn.Parameter) or values.shape != x.shape else values


def iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from iter_tensors(value)


@functools.cache
def _find_kind(func: Any) -> str:
    """Return whether a result is "empty" or "random", is "constant" or made of "sizes" alone; "" for others."""
    name = func.overloadpacket.__name__
    if "empty" in name:
        return "empty"
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "random"
    return "sizes" if name in _FACTORIES else "constant" if name in _ALIKE else ""


def _replace_tensors(value: Any) -> Any:
    """Return nested lists with the values of their tensors, in 2 microseconds; PyTorch's `tree_map` takes 30."""
    if isinstance(value, list | tuple):
        return [_replace_tensors(inner) for inner in value]
    return get_values(value) if isinstance(value, Tensor) else value


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation gives for the values of its tensors; NotImplemented where one has unknown values.

    One that writes into a tensor writes into its values, which those of its views share.
    """
    kind = _find_kind(func)
    if kind == "constant":
        args = [torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:]]
    tensors = [*iter_tensors(args), *iter_tensors(kwargs.values())]
    is_made = bool(tensors) or kind == "sizes"
    if not is_made or kind in ("empty", "random") or any(get_values(x) is None for x in tensors):
        return NotImplemented
    args, kwargs = _replace_tensors(args), {key: _replace_tensors(value) for key, value in kwargs.items()}
    try:
        return func(*args, **{**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs)
    except RuntimeError:  # there is no such operation on the CPU
        return NotImplemented
