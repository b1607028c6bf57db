"""Record the size-dependent arithmetic of a full model's run, and replay it in the run of a narrow model.

A narrow model divides by its own head size and norms over its own channels; the full model, with the other channels at
zero, by those of the full one. So the two differ although the layout is right. `record_operations` records, operation
by operation, the numbers in arithmetic, the number of reduced elements, and the statistics; `replay_operations` runs a
narrow model with them. An operation is matched by its module, its kind, and its order there, so that one more copy in
one of the two models does not matter. Operations that only move or copy numbers are not recorded.

Where a statistic is over fewer elements than in the full model, the missing elements count as zeros; where they are not
zeros in the full model, its statistic is used.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fleetfit.anatomy.kernels import track_modules
from fleetfit.anatomy.meta import Operations

_ARITHMETIC = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "clamp", "clamp_min",
    "clamp_max", "maximum", "minimum", "addcmul", "addcdiv", "lerp", "sqrt", "rsqrt", "reciprocal", "exp", "log",
    "full", "full_like", "fill", "scalar_tensor",
}  # fmt: skip
_ZERO = 1e-11  # of the largest element: channels that are masked by a faint factor count as zeros too

_SOFTMAX, _NORMS = ("_softmax", "_safe_softmax", "_log_softmax"), ("native_layer_norm", "native_group_norm")
_REDUCTIONS = {
    *_SOFTMAX, *_NORMS, "mean", "sum", "linalg_vector_norm", "norm", "var", "std", "var_mean", "std_mean", "amax",
    "amin", "max", "min", "logsumexp",
}  # fmt: skip

Operation = tuple[str, str]
"""The module that an operation runs in, and its kind."""


@dataclass(frozen=True)
class OperationRecord:
    """One operation of the full model.

    Attributes:
        numbers: Numbers and 0-dimensional tensors among its arguments, by their place.
        count: Elements that each of its results is made of, if it reduces.
        zeros: How many of them are zeros at least.
        statistics: What `_Reduction.measure` gives for them.
    """

    numbers: Mapping[int | str, Any]
    count: int = 0
    zeros: int = 0
    statistics: tuple[Tensor, ...] = ()


Trace = Mapping[Operation, Sequence[OperationRecord]]


def record_operations(module: nn.Module, run: Callable[[], Any]) -> Trace:
    """Return the size-dependent operations of a module's run."""
    trace: dict[Operation, list[OperationRecord]] = defaultdict(list)
    with track_modules(module) as stack, _Recording(stack, trace):
        run()
    return trace


@contextlib.contextmanager
def replay_operations(module: nn.Module, trace: Trace, statistics: bool) -> Iterator[None]:
    """Run a module with the numbers and counts of a trace.

    Args:
        module: The narrow module.
        trace: The full model's.
        statistics: Use its statistics too, where the missing elements are not zeros.
    """
    with track_modules(module) as stack, _Replaying(stack, trace, statistics):
        yield


def _find_operation(stack: Sequence[str], func: Any) -> Operation:
    return stack[-1], func.overloadpacket.__name__.rstrip("_")


class _Recording(Operations):
    def __init__(self, stack: Sequence[str], trace: dict[Operation, list[OperationRecord]]) -> None:
        super().__init__()
        self.stack, self.trace = stack, trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _find_operation(self.stack, func)
        if operation[1] in _ARITHMETIC:
            numbers = _numbers(args, kwargs)
            if numbers:  # copies, since some operations work in place
                copies = {place: n.clone() if isinstance(n, Tensor) else n for place, n in numbers.items()}
                self.trace[operation].append(OperationRecord(copies))
        elif (reduction := _read_reduction(func, args, kwargs)) is not None:
            rows = reduction.rows
            zero = rows.abs() <= _ZERO * rows.abs().amax() if rows.numel() else rows.bool()
            zeros = int(zero.sum(-1).min()) if rows.numel() else 0
            self.trace[operation].append(OperationRecord({}, rows.shape[-1], zeros, reduction.measure(rows)))
        return func(*args, **kwargs)


class _Replaying(Operations):
    def __init__(self, stack: Sequence[str], trace: Trace, statistics: bool) -> None:
        super().__init__()
        self.stack, self.statistics = stack, statistics
        self.left = {operation: deque(entries) for operation, entries in trace.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _find_operation(self.stack, func)
        if operation[1] in _ARITHMETIC:
            numbers = _numbers(args, kwargs)
            record = self._next(operation) if numbers else None
            if record is not None and record.numbers.keys() == numbers.keys():
                if isinstance(args[0], Tensor) and 0 in numbers and func.overloadpacket.__name__.endswith("_"):
                    args[0].copy_(record.numbers[0])
                    numbers.pop(0)
                args = tuple(record.numbers[i] if i in numbers else a for i, a in enumerate(args))
                kwargs = {key: record.numbers[key] if key in numbers else value for key, value in kwargs.items()}
            return func(*args, **kwargs)
        out, reduction = func(*args, **kwargs), _read_reduction(func, args, kwargs)
        record = None if reduction is None else self._next(operation)
        if reduction is None or record is None or record.count <= (count := reduction.rows.shape[-1]):
            return out
        missing = record.count - count
        fits = all(s.shape == reduction.rows.shape[:-1] for s in record.statistics)
        if self.statistics and record.zeros < missing and fits:
            return reduction.finish(record.statistics, out)
        return reduction.finish(reduction.measure(pad(reduction.rows, (0, missing))), out)

    def _next(self, operation: Operation) -> OperationRecord | None:
        entries = self.left.get(operation)
        return entries.popleft() if entries else None


def _numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """Return the numbers and 0-dimensional tensors of an operation on real numbers."""
    values = [*enumerate(args), *((key, kwargs[key]) for key in ("alpha", "value", "fill_value") if key in kwargs)]
    tensors = [value for value in args if isinstance(value, Tensor)]
    if tensors and not any(t.is_floating_point() for t in tensors):
        return {}
    return {
        place: value
        for place, value in values
        if (isinstance(value, int | float) and not isinstance(value, bool))
        or (isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point())
    }


# ---- reductions ----------------------------------------------------------------------------------------------------


def _read_reduction(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "_Reduction | None":
    """Return a call as a reduction, or None if it is not one of real numbers."""
    kind, x = func.overloadpacket.__name__, args[0] if args else None
    if kind not in _REDUCTIONS or not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
        return None
    if kind == "native_group_norm":  # its arguments: input, weight, bias, samples, channels, places, groups, epsilon
        return _Reduction(func, args, kwargs, x.reshape(args[3], args[6], -1), [2])
    if kind == "native_layer_norm":  # input, shape, weight, bias, epsilon
        return _Reduction(func, args, kwargs, x, list(range(x.dim() - len(args[1]), x.dim())))
    at = 2 if "norm" in kind else 1
    dim = args[at] if len(args) > at else kwargs.get("dim")
    if isinstance(dim, Tensor):  # the larger of two
        return None
    dims = list(range(x.dim())) if dim in (None, [], ()) else [dim] if isinstance(dim, int) else list(dim)
    args = [-1 if i == at and isinstance(dim, int) else [-1] if i == at and dim else a for i, a in enumerate(args)]
    kwargs = {**kwargs, "dim": [-1]} if kwargs.get("dim") else kwargs
    return _Reduction(func, args, kwargs, x, sorted(d % x.dim() for d in dims))


@dataclass(frozen=True)
class _Reduction:
    """A call of an operation that reduces some dimensions of `x`; it may give a tensor of its shape all the same.

    `args` and `kwargs` are those for `rows`.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    x: Tensor
    dims: list[int]

    @property
    def kind(self) -> str:
        return str(self.func.overloadpacket.__name__)

    @cached_property
    def rows(self) -> Tensor:
        """What is reduced as the last dimension [..., count]."""
        return self.x.movedim(self.dims, list(range(-len(self.dims), 0))).flatten(-len(self.dims))

    def measure(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the results for rows; of a norm mean and 1/deviation, of a softmax the logarithm of its sum."""
        if self.kind in _NORMS:
            out: Any = torch.native_layer_norm(rows, rows.shape[-1:], None, None, self.args[-1])[1:]
        else:
            out = torch.logsumexp(rows, -1) if self.kind in _SOFTMAX else self.func(rows, *self.args[1:], **self.kwargs)
        return tuple(each.reshape(rows.shape[:-1]) for each in (out if isinstance(out, tuple) else (out,)))

    def finish(self, measured: Sequence[Tensor], own: Any) -> Any:
        """Return the result with what was measured of more elements, in the shape of the own result."""
        columns = [one[..., None] for one in measured]
        if self.kind in _SOFTMAX:
            share = self._restore(self.rows - columns[0])
            return share if self.kind == "_log_softmax" else share.exp()
        if self.kind in _NORMS:
            x, (mean, scale) = self.args[0], columns
            out = self._restore((self.rows - mean) * scale)
            if self.kind == "native_layer_norm":
                weight, bias = self.args[2:4]
            else:
                channels = (-1, *[1] * (x.dim() - 2))
                weight, bias = (None if one is None else one.reshape(channels) for one in self.args[1:3])
            out = out if weight is None else out * weight
            return out if bias is None else out + bias, mean.reshape_as(own[1]), scale.reshape_as(own[2])
        results = [
            one.reshape(other.shape).clone() if one.is_floating_point() else other  # places stay its own
            for one, other in zip(columns, own if isinstance(own, tuple) else (own,), strict=True)
        ]
        return tuple(results) if isinstance(own, tuple) else results[0]

    def _restore(self, rows: Tensor) -> Tensor:
        """Return rows in the shape of the argument."""
        whole = rows.unflatten(-1, [self.x.shape[d] for d in self.dims])
        restored: Tensor = whole.movedim(list(range(-len(self.dims), 0)), self.dims).reshape(self.args[0].shape)
        return restored
