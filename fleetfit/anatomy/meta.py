"""The meta device, where nothing is computed: modes that see operations, and shape rules of the usual operations.

PyTorch's own kernels for the meta device are Python functions, and the first call of most of them imports sympy and
PyTorch's compiler. That takes 1.3 s of CPU time in each process, as long as `import torch` (torch 2.13, Intel Xeon),
before the first training step of every run. So the operations of usual models have a rule here. Operations without a
rule, and arguments that do not fit one, are left to PyTorch's kernels and their messages. A test compares each rule
with them.
"""

import contextlib
import functools
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


class Watching(Operations):
    """Calls a function with the arguments and the result of each operation."""

    def __init__(self, see: Callable[[Sequence[Any], Any], Any]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see([*args, *(kwargs or {}).values()], out)
        return out


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
    if func is _ATEN._to_copy.default and args[0].is_meta and kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("meta")}  # there are no numbers to move
    out = apply_to_values(func, args, kwargs) if reads_values(func) else NotImplemented
    if out is not NotImplemented:
        return out
    out = apply_rule(func, args, kwargs) if by_rules else NotImplemented
    out = func(*args, **kwargs) if out is NotImplemented else out
    record_values(func, args, kwargs, out)
    return out


def apply_rule(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation on the meta device, or NotImplemented without a rule that fits.

    Args:
        func: The operation, as a mode sees it.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    if func.overloadpacket is _ATEN.arange and torch.device(kwargs.get("device") or "cpu").type == "meta":
        numbers = func(*args, **{**kwargs, "device": torch.device("cpu")})
        return torch.empty(numbers.shape, dtype=numbers.dtype, device="meta")
    rule = _find_rule(func)
    if rule is None or not kwargs.keys().isdisjoint(_PLACEMENT):
        return NotImplemented
    tensors = list(iter_tensors(args)) + list(iter_tensors(kwargs.values()))
    if not tensors or not all(t.is_meta for t in tensors):
        return NotImplemented
    if rule is _run_without_rows:
        return rule(func, args, kwargs)
    return rule(func, args, kwargs, tensors) if rule is _pointwise else rule(*args, **kwargs)


@functools.cache
def _find_rule(func: Any) -> Callable[..., Any] | None:
    """Return the rule of an operation; called thousands of times while a module is built."""
    if func in _RULES:
        return _RULES[func]
    if func in _ROWS:
        return _run_without_rows
    if torch.Tag.nondeterministic_seeded in func.tags:  # the probe for a type must not draw from a generator
        return None
    return _pointwise if torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1 else None


# ---- the rules -----------------------------------------------------------------------------------------------------

_PLACEMENT = ("device", "memory_format", "out")  # arguments on the place of a result


def _pointwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
    try:
        shape = torch.broadcast_tensors(*[torch.empty((), device="cpu").expand(x.shape) for x in tensors])[0].shape
        # run on one element on the CPU, for the type
        dtype = func(*map(_make_probe, args), **{key: _make_probe(value) for key, value in kwargs.items()}).dtype
    except (RuntimeError, TypeError):
        return NotImplemented
    alias = func._schema.arguments[0].alias_info
    if alias is not None and alias.is_write:
        return args[0] if args[0].shape == shape else NotImplemented
    if all(tensor.is_contiguous() for tensor in tensors):
        return torch.empty(shape, dtype=dtype, device="meta")
    return _empty_like(tensors[0], dtype=dtype) if tensors[0].shape == shape else NotImplemented


def _empty_like(x: Tensor, dtype: torch.dtype | None = None, **more: Any) -> Any:
    strides = x.stride()
    if any(more.values()) or (not x.is_contiguous() and (0 in strides or len({*strides}) < len(strides))):
        return NotImplemented
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")
    dense, step = [0] * x.dim(), 1  # without gaps, in the same order
    for d in sorted(range(x.dim()), key=lambda d: strides[d]):
        dense[d], step = step, step * x.shape[d]
    return torch.empty_strided(x.shape, dense, dtype=dtype or x.dtype, device="meta")


def _make_probe(value: Any) -> Any:
    """Return a tensor of one element with a tensor's type and dimensions; anything else as it is."""
    return torch.ones((1,) * value.dim(), dtype=value.dtype) if isinstance(value, Tensor) else value


def _run_without_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the CPU with no rows, where nothing is computed; return its results with all rows."""
    rows = [args[place] for place in _ROWS[func]]
    takes_any_order = func in _ANY_ORDER or (func is _ATEN.convolution.default and args[1].dim() == 3)
    if {x.shape[:1] for x in rows} != {rows[0].shape[:1]} or not rows[0].dim():
        return NotImplemented
    if not (takes_any_order or all(x.is_contiguous() for x in iter_tensors(args))):
        return NotImplemented
    if func is _ATEN.mean.dim and (not args[1] or any(d % rows[0].dim() == 0 for d in args[1])):
        return NotImplemented
    empty = [torch.empty((), dtype=x.dtype, device="cpu").expand((0, *x.shape[1:]) if i in _ROWS[func] else x.shape)
             if isinstance(x, Tensor) else x for i, x in enumerate(args)]  # fmt: skip
    try:
        out = func(*empty, **kwargs)
    except (RuntimeError, IndexError):
        return NotImplemented
    results = [x.new_empty((len(rows[0]), *x.shape[1:]), device="meta") for x in iter_tensors([out])]
    return results[0] if isinstance(out, Tensor) else tuple(results)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first, *others = tensors
    at = dim % first.dim() if first.dim() else 0
    rest = [t.shape[:at] + t.shape[at + 1 :] for t in tensors]
    fits = all((t.dim(), t.dtype) == (first.dim(), first.dtype) for t in others) and all(r == rest[0] for r in rest)
    is_plain = all(t.is_contiguous() and t.is_floating_point() for t in tensors)
    if not fits or (first.dim() not in (1, 2, 3) and not is_plain):
        return NotImplemented
    return first.new_empty([*first.shape[:at], sum(t.shape[at] for t in tensors), *first.shape[at + 1 :]])


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _repeat(x: Tensor, times: Sequence[int]) -> Any:
    new = len(times) - x.dim()
    if new < 0 or min(times, default=1) < 0:
        return NotImplemented
    return x.new_empty([size * n for size, n in zip((*[1] * new, *x.shape), times, strict=True)])


_ATEN = torch.ops.aten
_ANY_ORDER = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.native_layer_norm.default,
    _ATEN.embedding.default,
}
"""Operations whose results are contiguous, however their arguments are."""
_ROWS: Mapping[Any, Sequence[int]] = {
    _ATEN.convolution.default: (0,),
    _ATEN.max_pool2d_with_indices.default: (0,),
    _ATEN.mm.default: (0,),
    _ATEN.addmm.default: (1,),
    _ATEN.bmm.default: (0, 1),
    _ATEN.mean.dim: (0,),
    _ATEN.native_layer_norm.default: (0,),
    _ATEN._softmax.default: (0,),
    _ATEN._safe_softmax.default: (0,),
    _ATEN.embedding.default: (1,),
}
"""Operations on rows that do not depend on each other: the arguments whose first dimension they are."""
_RULES: dict[Any, Callable[..., Any]] = {
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    _ATEN.repeat.default: _repeat,
    _ATEN.empty_like.default: _empty_like,
    _ATEN.normal_.default: lambda x, *_, **__: x,
    _ATEN.uniform_.default: lambda x, *_, **__: x,
}
