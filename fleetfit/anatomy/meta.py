"""The meta device, where nothing is computed: modes that see operations, and shape rules of the usual operations.

PyTorch's own kernels for the meta device are Python functions, and the first call of most of them imports sympy and
PyTorch's compiler. That takes 1.3 s of CPU time in each process, as long as `import torch` (torch 2.13, Intel Xeon),
before the first training step of every run. So the operations of usual models have a rule here. Operations without a
rule, and arguments that do not fit one, are left to PyTorch's kernels and their messages. A test compares each rule
with them.
"""

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fleetfit.anatomy.known_values import apply_to_values, iter_tensors, reads_values, record_values
from fleetfit.machine import tensor_defaults


class Operations(TorchDispatchMode):
    """A mode that sees every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, so that PyTorch's compiler need not be imported."""
        return False


class _ShapeRules(Operations):
    """Runs the usual operations on the meta device by their rules."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Make tensors on the meta device, and run the usual operations on them by their shapes."""
    with tensor_defaults("meta", torch.float32), _ShapeRules():
        yield


class _ParameterRules(_ShapeRules):
    """Runs operations on the meta device by their rules; what has numbers is computed as ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_meta = any(x.is_meta for x in iter_tensors([*args, *kwargs.values()]))
        return run(func, args, kwargs) if on_meta else func(*args, **kwargs)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let each parameter forget its numbers when this thread registers it; all other tensors keep theirs."""
    thread = threading.get_ident()

    def forget(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if threading.get_ident() == thread:
            forget_numbers(parameter)

    handle = register_module_parameter_registration_hook(forget)
    try:
        with warnings.catch_warnings(), _ParameterRules():
            warnings.filterwarnings("ignore", ".*to a meta parameter")  # of a checkpoint that the constructor loads
            yield
    finally:
        handle.remove()


def forget_numbers(parameter: nn.Parameter) -> None:
    """Move a floating-point parameter to the meta device; it stays the same object, wherever it is referred to.

    Raises:
        RuntimeError: Something else depends on its numbers, such as a graph for gradients.
    """
    if parameter.is_floating_point() and not parameter.is_meta and not nn.parameter.is_lazy(parameter):
        shape_only = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, shape_only)


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], by_rules: bool = True) -> Any:
    """Run an operation that a mode sees.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
        by_rules: Whether by its rule, where it has one.
    """
    kwargs = _keep_on_meta(func, args, kwargs)
    out = apply_to_values(func, args, kwargs) if reads_values(func) else NotImplemented
    if out is not NotImplemented:
        return out
    out = apply_rule(func, args, kwargs) if by_rules else NotImplemented
    out = func(*args, **kwargs) if out is NotImplemented else out
    record_values(func, args, kwargs, out)
    return out


def _keep_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of an operation; `.to(device)` leaves tensors without numbers on the meta device."""
    moved = func is _ATEN._to_copy.default and args[0].is_meta and kwargs.get("device") is not None
    return {**kwargs, "device": torch.device("meta")} if moved else kwargs


def apply_rule(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation on the meta device, or NotImplemented without a rule that fits.

    Args:
        func: The operation, as a mode sees it.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    if func in (_ATEN.arange.default, _ATEN.arange.start):
        return _arange(*((0,) if func is _ATEN.arange.default else ()), *args, **kwargs)
    rule = _find_rule(func)
    if rule is None or not kwargs.keys().isdisjoint(_PLACEMENT):
        return NotImplemented
    tensors = list(iter_tensors(args)) + list(iter_tensors(kwargs.values()))
    if not tensors or not all(t.is_meta for t in tensors):
        return NotImplemented
    return _pointwise(func, args, kwargs, tensors) if rule is _pointwise else rule(*args, **kwargs)


@functools.cache
def _find_rule(func: Any) -> Callable[..., Any] | None:
    """Return the rule of an operation; called thousands of times while a module is built."""
    if func in _RULES:
        return _RULES[func]
    if torch.Tag.nondeterministic_seeded in func.tags:  # the probe for a type must not draw from a generator
        return None
    return _pointwise if torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1 else None


# ---- the rules -----------------------------------------------------------------------------------------------------

_PLACEMENT = ("device", "memory_format", "out")  # arguments on the place of a result


def _pointwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
    shape = _broadcast([tensor.shape for tensor in tensors])
    if shape is None:
        return NotImplemented
    alias = func._schema.arguments[0].alias_info
    if alias is not None and alias.is_write:
        return args[0] if args[0].shape == shape else NotImplemented
    try:  # run on one element on the CPU, for the type
        dtype = func(*map(_make_probe, args), **{key: _make_probe(value) for key, value in kwargs.items()}).dtype
    except (RuntimeError, TypeError):
        return NotImplemented
    if all(tensor.is_contiguous() for tensor in tensors):
        return torch.empty(shape, dtype=dtype, device="meta")
    return _empty_like(tensors[0], dtype=dtype) if tensors[0].shape == shape else NotImplemented


def _empty_like(x: Tensor, dtype: torch.dtype | None = None, **more: Any) -> Any:
    strides = x.stride()
    if any(more.values()) or (not x.is_contiguous() and (0 in strides or len({*strides}) < len(strides))):
        return NotImplemented
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")
    return torch.empty_strided(x.shape, _make_dense_strides(x.shape, strides), dtype=dtype or x.dtype, device="meta")


def _make_probe(value: Any) -> Any:
    """Return a tensor of one element with a tensor's type and dimensions; anything else as it is."""
    return torch.ones((1,) * value.dim(), dtype=value.dtype) if isinstance(value, Tensor) else value


def _broadcast(shapes: Sequence[torch.Size]) -> torch.Size | None:
    """Return the shape of an element-wise result; None where the shapes do not fit."""
    most = max(map(len, shapes))
    sizes = [{1, *dim} for dim in zip(*((1,) * (most - len(s)) + tuple(s) for s in shapes), strict=True)]
    return None if any(len(dim) > 2 for dim in sizes) else torch.Size(max(dim - {1}, default=1) for dim in sizes)


def _make_dense_strides(shape: torch.Size, strides: Sequence[int]) -> list[int]:
    """Return strides without gaps whose dimensions have the order of `strides`."""
    dense, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: strides[d]):
        dense[d] = step
        step *= shape[d]
    return dense


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
                 transposed: bool, output_padding: Any, groups: int) -> Any:  # fmt: skip
    n = weight.dim() - 2
    is_plain = _is_plain(x, weight) if n > 1 else x.dtype == weight.dtype  # a sequence has one memory format only
    if transposed or not is_plain or x.dim() != n + 2 or x.shape[1] != weight.shape[1] * groups:
        return NotImplemented
    if weight.shape[0] % groups or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    sizes = _windows(
        x.shape[2:], weight.shape[2:], _repeat_value(stride, n), _repeat_value(padding, n), _repeat_value(dilation, n)
    )
    return x.new_empty([x.shape[0], weight.shape[0], *sizes]) if min(sizes) > 0 else NotImplemented


def _max_pool(x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False) -> Any:
    size, step, pad, gap = (_repeat_value(v, 2) for v in (kernel, stride or kernel, padding, dilation))
    if x.dim() != 4 or not _is_plain(x) or any(2 * p > k for p, k in zip(pad, size, strict=True)):
        return NotImplemented
    sizes = _windows(x.shape[2:], size, step, pad, gap, ceil)
    if min(sizes) < 1:
        return NotImplemented
    shape = [*x.shape[:2], *sizes]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _windows(lengths: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
             dilation: Sequence[int], ceil: bool = False) -> list[int]:  # fmt: skip
    """Return how often a kernel's window fits, by dimension; `ceil`: also where it ends outside."""
    counts = []
    for length, size, step, pad, gap in zip(lengths, kernel, stride, padding, dilation, strict=True):
        left = length + 2 * pad - gap * (size - 1) - 1
        count = (left + (step - 1 if ceil else 0)) // step + 1 if left >= 0 else 0
        counts.append(count - 1 if ceil and (count - 1) * step >= length + pad else count)
    return counts


def _repeat_value(values: Any, n: int) -> list[int]:
    sizes = [values] if isinstance(values, int) else list(values)
    return sizes * n if len(sizes) == 1 else sizes


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
    if more or not dim or not _is_plain(x) or not all(-x.dim() <= d < x.dim() for d in dim):
        return NotImplemented
    dims = {d % x.dim() for d in dim}
    return x.new_empty([1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims])


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, *_: Any) -> Any:
    least = x.dim() - len(shape)
    fits = all(t is None or (t.shape == tuple(shape) and t.dtype == x.dtype) for t in (weight, bias))
    if not x.is_floating_point() or not fits or least < 0 or tuple(x.shape[least:]) != tuple(shape):
        return NotImplemented
    statistics = [*x.shape[:least], *(1 for _ in shape)]
    return x.new_empty(x.shape), x.new_empty(statistics), x.new_empty(statistics)


def _softmax(x: Tensor, dim: int, *more: Any, **by_name: Any) -> Any:
    if any(more) or any(by_name.values()) or not _is_plain(x) or not -x.dim() <= dim < x.dim():
        return NotImplemented
    return x.new_empty(x.shape)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first, *others = tensors
    at = dim % first.dim() if first.dim() else 0
    rest = [t.shape[:at] + t.shape[at + 1 :] for t in tensors]
    fits = all((t.dim(), t.dtype) == (first.dim(), first.dtype) for t in others) and all(r == rest[0] for r in rest)
    if not fits or (first.dim() not in (1, 2, 3) and not _is_plain(*tensors)):
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


def _arange(start: Any, end: Any, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any) -> Any:
    if device is None or torch.device(device).type != "meta" or layout not in (None, torch.strided) or end < start:
        return NotImplemented
    default = torch.int64 if isinstance(start, int) and isinstance(end, int) else torch.get_default_dtype()
    return torch.empty(math.ceil(end - start), dtype=dtype or default, device="meta")


def _is_plain(*tensors: Tensor) -> bool:
    """Return whether tensors are contiguous, floating-point and of one type."""
    return all(t.is_contiguous() and t.is_floating_point() and t.dtype == tensors[0].dtype for t in tensors)


_ATEN = torch.ops.aten
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
    _ATEN.empty_like.default: _empty_like,
    _ATEN.normal_.default: lambda x, *_, **__: x,
    _ATEN.uniform_.default: lambda x, *_, **__: x,
    _ATEN.embedding.default: _embedding,
}
