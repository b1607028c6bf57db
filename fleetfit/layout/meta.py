"""The meta device, where nothing is computed: modes that see operations, and the shapes of the usual ones.

PyTorch's own kernels for the meta device are written in Python, and the first call of one imports sympy and PyTorch's
compiler: two seconds in each process. Whoever looks at shapes only needs none of that; what is not among the usual
operations, or does not fit, is left to those kernels and their messages.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fleetfit.tensor_defaults import tensor_defaults


class Operations(TorchDispatchMode):
    """Sees every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, and PyTorch's compiler takes two seconds to import only to be told so."""
        return False


class _Shapes(Operations):
    """Answers the usual operations on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Make tensors on the meta device, and run the usual operations on them by their shapes."""
    with tensor_defaults("meta", torch.float32), _Shapes():
        yield


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that a mode sees, by its shapes where a rule knows them."""
    kwargs = keep_on_meta(func, args, kwargs)
    out = answered(func, args, kwargs)
    return func(*args, **kwargs) if out is NotImplemented else out


def keep_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of an operation, so that `.to(device)` leaves on the meta device what has no numbers."""
    moved = func is _ATEN._to_copy.default and args[0].is_meta and kwargs.get("device") is not None
    return {**kwargs, "device": torch.device("meta")} if moved else kwargs


def answered(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation gives on the meta device, or NotImplemented where no rule knows it.

    Args:
        func: The operation, as a mode sees it.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    rule = _rule(func)
    if rule is None or not kwargs.keys().isdisjoint(_ELSEWHERE):
        return _counted(func, args, kwargs) if func in _COUNTED else NotImplemented
    given = list(_tensors(args)) + list(_tensors(kwargs.values()))
    if not given or not all(t.is_meta for t in given):
        return NotImplemented
    return _pointwise(func, args, kwargs, given) if rule is _pointwise else rule(*args, **kwargs)


@functools.cache
def _rule(func: Any) -> Callable[..., Any] | None:
    """Return what knows an operation's result; asked for thousands of times while a module is built."""
    if func in _RULES:
        return _RULES[func]
    if torch.Tag.nondeterministic_seeded in func.tags:  # nothing may draw from a generator to learn a type
        return None
    return _pointwise if torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1 else None


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


# ---- the rules -----------------------------------------------------------------------------------------------------

_ELSEWHERE = ("device", "memory_format", "out")  # arguments that say where a result goes, or how it lies in memory


def _pointwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> Any:
    shape = _broadcast([tensor.shape for tensor in given])
    if shape is None:
        return NotImplemented
    written = func._schema.arguments[0].alias_info
    if written is not None and written.is_write:
        return args[0] if args[0].shape == shape else NotImplemented
    try:
        one = func(*map(_one, args), **{key: _one(value) for key, value in kwargs.items()})  # on a CPU, for its type
    except (RuntimeError, TypeError):
        return NotImplemented
    if all(tensor.is_contiguous() for tensor in given):
        return torch.empty(shape, dtype=one.dtype, device="meta")
    return _like(given[0], dtype=one.dtype) if given[0].shape == shape else NotImplemented


def _like(x: Tensor, dtype: torch.dtype | None = None, **more: Any) -> Any:
    strides = x.stride()
    if any(more.values()) or (not x.is_contiguous() and (0 in strides or len({*strides}) < len(strides))):
        return NotImplemented
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")
    return torch.empty_strided(x.shape, _side_by_side(x.shape, strides), dtype=dtype or x.dtype, device="meta")


def _one(value: Any) -> Any:
    """Return a tensor of one element that is like another one; anything else as it is."""
    return torch.ones((1,) * value.dim(), dtype=value.dtype) if isinstance(value, Tensor) else value


def _broadcast(shapes: Sequence[torch.Size]) -> torch.Size | None:
    """Return the shape of what becomes of tensors element by element; None where they do not fit."""
    most = max(map(len, shapes))
    sizes = [{1, *here} for here in zip(*((1,) * (most - len(s)) + tuple(s) for s in shapes), strict=True)]
    return None if any(len(here) > 2 for here in sizes) else torch.Size(max(here - {1}, default=1) for here in sizes)


def _side_by_side(shape: torch.Size, strides: Sequence[int]) -> list[int]:
    """Return the strides of elements without gaps, whose dimensions have the order that they have by `strides`."""
    found, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: strides[d]):
        found[d] = step
        step *= shape[d]
    return found


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
                 transposed: bool, output_padding: Any, groups: int) -> Any:  # fmt: skip
    n = weight.dim() - 2
    lies = _plain(x, weight) if n > 1 else x.dtype == weight.dtype  # a sequence has one memory format only
    if transposed or not lies or x.dim() != n + 2 or x.shape[1] != weight.shape[1] * groups:
        return NotImplemented
    if weight.shape[0] % groups or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    sizes = _windows(x.shape[2:], weight.shape[2:], _each(stride, n), _each(padding, n), _each(dilation, n))
    return x.new_empty([x.shape[0], weight.shape[0], *sizes]) if min(sizes) > 0 else NotImplemented


def _max_pool(x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False) -> Any:
    size, step, pad, gap = (_each(v, 2) for v in (kernel, stride or kernel, padding, dilation))
    if x.dim() != 4 or not _plain(x) or any(2 * p > k for p, k in zip(pad, size, strict=True)):
        return NotImplemented
    sizes = _windows(x.shape[2:], size, step, pad, gap, ceil)
    if min(sizes) < 1:
        return NotImplemented
    shape = [*x.shape[:2], *sizes]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _windows(lengths: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
             dilation: Sequence[int], ceil: bool = False) -> list[int]:  # fmt: skip
    """Return how often a window of a kernel's size fits, by dimension; `ceil`: also where it ends outside."""
    found = []
    for length, size, step, pad, gap in zip(lengths, kernel, stride, padding, dilation, strict=True):
        left = length + 2 * pad - gap * (size - 1) - 1
        count = (left + (step - 1 if ceil else 0)) // step + 1 if left >= 0 else 0
        found.append(count - 1 if ceil and (count - 1) * step >= length + pad else count)
    return found


def _each(values: Any, n: int) -> list[int]:
    found = [values] if isinstance(values, int) else list(values)
    return found * n if len(found) == 1 else found


def _mm(a: Tensor, b: Tensor) -> Any:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        return NotImplemented
    return a.new_empty([a.shape[0], b.shape[1]])


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Any:
    out = _mm(a, b)
    if out is NotImplemented or bias.dtype != a.dtype or _broadcast([bias.shape, out.shape]) != out.shape:
        return NotImplemented
    return out


def _bmm(a: Tensor, b: Tensor) -> Any:
    if a.dim() != 3 or b.dim() != 3 or a.dtype != b.dtype or (a.shape[0], a.shape[2]) != (b.shape[0], b.shape[1]):
        return NotImplemented
    return a.new_empty([a.shape[0], a.shape[1], b.shape[2]])


def _mean(x: Tensor, dim: Any, keepdim: bool = False, **more: Any) -> Any:
    if more or not dim or not _plain(x) or not all(-x.dim() <= d < x.dim() for d in dim):
        return NotImplemented
    gone = {d % x.dim() for d in dim}
    return x.new_empty([1 if d in gone else size for d, size in enumerate(x.shape) if keepdim or d not in gone])


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, *_: Any) -> Any:
    least = x.dim() - len(shape)
    fits = all(t is None or (t.shape == tuple(shape) and t.dtype == x.dtype) for t in (weight, bias))
    if not x.is_floating_point() or not fits or least < 0 or tuple(x.shape[least:]) != tuple(shape):
        return NotImplemented
    each = [*x.shape[:least], *(1 for _ in shape)]
    return x.new_empty(x.shape), x.new_empty(each), x.new_empty(each)


def _softmax(x: Tensor, dim: int, *more: Any, **by_name: Any) -> Any:
    if any(more) or any(by_name.values()) or not _plain(x) or not -x.dim() <= dim < x.dim():
        return NotImplemented
    return x.new_empty(x.shape)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first, *others = tensors
    at = dim % first.dim() if first.dim() else 0
    rest = [t.shape[:at] + t.shape[at + 1 :] for t in tensors]
    alike = all((t.dim(), t.dtype) == (first.dim(), first.dtype) for t in others) and all(r == rest[0] for r in rest)
    if not alike or (first.dim() not in (1, 2, 3) and not _plain(*tensors)):
        return NotImplemented
    return first.new_empty([*first.shape[:at], sum(t.shape[at] for t in tensors), *first.shape[at + 1 :]])


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first, most = tensors[0], tensors[0].dim() + 1
    if any((t.shape, t.dtype) != (first.shape, first.dtype) for t in tensors) or not -most <= dim < most:
        return NotImplemented
    return first.new_empty([*first.shape[: dim % most], len(tensors), *first.shape[dim % most :]])


def _repeat(x: Tensor, times: Sequence[int]) -> Any:
    new = len(times) - x.dim()
    if new < 0 or min(times, default=1) < 0:
        return NotImplemented
    return x.new_empty([size * n for size, n in zip((*[1] * new, *x.shape), times, strict=True)])


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Any:
    if weight.dim() != 2 or indices.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    return weight.new_empty([*indices.shape, weight.shape[1]])


def _counted(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _arange(*((0,) if func is _ATEN.arange.default else ()), *args, **kwargs)


def _arange(start: Any, end: Any, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any) -> Any:
    if device is None or torch.device(device).type != "meta" or layout not in (None, torch.strided) or end < start:
        return NotImplemented
    usual = torch.int64 if isinstance(start, int) and isinstance(end, int) else torch.get_default_dtype()
    return torch.empty(math.ceil(end - start), dtype=dtype or usual, device="meta")


def _plain(*tensors: Tensor) -> bool:
    """Tell whether tensors are contiguous, floating-point and of one type."""
    return all(t.is_contiguous() and t.is_floating_point() and t.dtype == tensors[0].dtype for t in tensors)


_ATEN = torch.ops.aten
_COUNTED = {_ATEN.arange.default, _ATEN.arange.start}
_RULES: dict[Any, Callable[..., Any]] = {
    _ATEN.convolution.default: _convolution,
    _ATEN.max_pool2d_with_indices.default: _max_pool,
    _ATEN.mm.default: _mm,
    _ATEN.addmm.default: _addmm,
    _ATEN.bmm.default: _bmm,
    _ATEN.mean.dim: _mean,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN._softmax.default: _softmax,
    _ATEN._safe_softmax.default: _softmax,
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    _ATEN.repeat.default: _repeat,
    _ATEN.empty_like.default: _like,
    _ATEN.normal_.default: lambda x, *_, **__: x,
    _ATEN.uniform_.default: lambda x, *_, **__: x,
    _ATEN.embedding.default: _embedding,
}
