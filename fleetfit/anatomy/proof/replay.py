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
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.anatomy.kernels import track_modules
from fleetfit.anatomy.meta import Operations

_ARITHMETIC = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "clamp", "clamp_min",
    "clamp_max", "maximum", "minimum", "addcmul", "addcdiv", "lerp", "sqrt", "rsqrt", "reciprocal", "exp", "log",
    "full", "full_like", "fill", "scalar_tensor",
}  # fmt: skip
_ZERO = 1e-11  # of the largest element: channels that are masked by a faint factor count as zeros too

Operation = tuple[str, str]
"""The module that an operation runs in, and its kind."""


@dataclass
class OperationRecord:
    """One operation of the full model.

    Attributes:
        numbers: Numbers and 0-dimensional tensors among its arguments, by their place.
        count: Elements that each of its results is made of, if it reduces.
        zeros: How many of them are zeros at least.
        statistics: Its result, or mean and 1/deviation of a norm, or the log of a softmax' sum.
    """

    numbers: dict[int | str, Any] = field(default_factory=dict)
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


class _Mode(Operations):
    """Knows the module in which an operation runs: the last of a stack."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack = stack

    def operation(self, func: Any) -> Operation:
        return self.stack[-1], func.overloadpacket.__name__.rstrip("_")


class _Recording(_Mode):
    def __init__(self, stack: list[str], trace: dict[Operation, list[OperationRecord]]) -> None:
        super().__init__(stack)
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = self.operation(func)
        kind = operation[1]
        if kind in _ARITHMETIC:
            numbers = _numbers(args, kwargs)
            if numbers:  # copies, since some operations work in place
                copies = {place: n.clone() if isinstance(n, Tensor) else n for place, n in numbers.items()}
                self.trace[operation].append(OperationRecord(copies))
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        reduction = _REDUCTIONS.get(kind)
        call = None if reduction is None else reduction.read_call(args, kwargs)
        if reduction is not None and call is not None:
            x = call.x
            zero = x.abs() <= _ZERO * x.abs().amax() if x.numel() else x.bool()
            zeros = int(zero.sum(call.dims).min()) if x.numel() else 0
            statistics = tuple(s.clone() for s in reduction.get_statistics(call, out))
            self.trace[operation].append(OperationRecord({}, call.count, zeros, statistics))
        return out


class _Replaying(_Mode):
    def __init__(self, stack: list[str], trace: Trace, statistics: bool) -> None:
        super().__init__(stack)
        self.left = {operation: deque(entries) for operation, entries in trace.items()}
        self.statistics = statistics

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = self.operation(func)
        kind = operation[1]
        if kind in _ARITHMETIC:
            numbers = _numbers(args, kwargs)
            record = self._next(operation) if numbers else None
            if record is not None and record.numbers.keys() == numbers.keys():
                if isinstance(args[0], Tensor) and 0 in numbers and func.overloadpacket.__name__.endswith("_"):
                    args[0].copy_(record.numbers[0])
                    numbers.pop(0)
                args = tuple(record.numbers[i] if i in numbers else a for i, a in enumerate(args))
                kwargs = {key: record.numbers[key] if key in numbers else value for key, value in kwargs.items()}
            return func(*args, **kwargs)
        reduction = _REDUCTIONS.get(kind)
        call = None if reduction is None else reduction.read_call(args, kwargs)
        record = None if call is None else self._next(operation)
        if reduction is None or call is None or record is None or record.count <= call.count:
            return func(*args, **kwargs)
        missing = record.count - call.count
        if self.statistics and record.zeros < missing:
            out = reduction.use_statistics(call, record.statistics)
            if out is not None:
                return out
        return reduction.add_zeros(call, missing)

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


@dataclass(frozen=True)
class _Call:
    """A call of a reduction.

    Attributes:
        x: The reduced tensor.
        dims: The reduced dimensions.
        args: The operation's arguments.
        kwargs: Its arguments by name.
    """

    x: Tensor
    dims: list[int]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def count(self) -> int:
        """Elements that each result is made of."""
        return math.prod(self.x.shape[d] for d in self.dims)

    @property
    def keeps_dims(self) -> bool:
        """Whether the reduced dimensions stay; this is the only boolean argument of a reduction."""
        return any(value is True for value in (*self.args[1:], self.kwargs.get("keepdim")))

    def shape(self, keepdim: bool) -> list[int]:
        """Return the shape of a result."""
        return [1 if d in self.dims else n for d, n in enumerate(self.x.shape) if keepdim or d not in self.dims]

    def moments(self, missing: int, correction: float) -> tuple[Tensor, Tensor]:
        """Return mean and variance of x and `missing` zeros, dimensions kept."""
        total = self.count + missing
        mean = self.x.sum(self.dims, keepdim=True) / total
        squares = (self.x - mean).square().sum(self.dims, keepdim=True) + missing * mean.square()
        return mean, squares / (total - correction)


class _Reduction:
    """One kind of operation that reduces."""

    dim_argument = 1
    """The place of the dimensions among its arguments."""

    def read_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call | None:
        """Return the call, or None if it is not a reduction of real numbers."""
        x = args[0]
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
            return None
        dim = args[self.dim_argument] if len(args) > self.dim_argument else kwargs.get("dim")
        if isinstance(dim, Tensor):  # the larger of two
            return None
        dims = list(range(x.dim())) if dim in (None, [], ()) else [dim] if isinstance(dim, int) else list(dim)
        return _Call(x, sorted(d % x.dim() for d in dims), args, kwargs)

    def get_statistics(self, call: _Call, out: Any) -> tuple[Tensor, ...]:
        """Return the statistics of a call with this result."""
        return (out,) if isinstance(out, Tensor) else tuple(out)

    def add_zeros(self, call: _Call, missing: int) -> Any:
        """Compute it with `missing` further zeros."""
        raise NotImplementedError

    def use_statistics(self, call: _Call, statistics: Sequence[Tensor]) -> Any:
        """Compute it with the full model's statistics; None where they are of another shape."""
        shape = call.shape(call.keeps_dims)
        if any(list(s.shape) != shape for s in statistics):
            return None
        copies = tuple(s.clone() for s in statistics)
        return copies[0] if len(copies) == 1 else copies


class _Mean(_Reduction):
    def add_zeros(self, call: _Call, missing: int) -> Any:
        return call.x.mean(call.dims, keepdim=call.keeps_dims) * (call.count / (call.count + missing))


class _Sum(_Reduction):
    """A sum, or a norm, which zeros do not change."""

    def __init__(self, again: Callable[..., Tensor]) -> None:
        self.again = again

    def add_zeros(self, call: _Call, missing: int) -> Any:
        return self.again(*call.args, **call.kwargs)


class _Norm(_Sum):
    """A vector norm, whose dimensions come after its order."""

    dim_argument = 2


class _Spread(_Reduction):
    """Variance or deviation, perhaps with the mean."""

    def __init__(self, root: bool, mean: bool) -> None:
        self.root, self.mean = root, mean

    def add_zeros(self, call: _Call, missing: int) -> Any:
        correction = call.kwargs.get("correction")
        mean, variance = call.moments(missing, 1 if correction is None else correction)
        shape = call.shape(call.keeps_dims)
        mean, spread = mean.reshape(shape), (variance.sqrt() if self.root else variance).reshape(shape)
        return (spread, mean) if self.mean else spread


class _Most(_Reduction):
    """The largest, or the smallest."""

    def __init__(self, again: Callable[..., Any], sign: int) -> None:
        self.again, self.sign = again, sign

    def add_zeros(self, call: _Call, missing: int) -> Any:
        out = self.again(*call.args, **call.kwargs)
        values, *indices = [out] if isinstance(out, Tensor) else out
        values = values.clamp_min(0) if self.sign > 0 else values.clamp_max(0)
        return (values, *indices) if indices else values


class _Softmax(_Reduction):
    """Softmax, its logarithm, or the logarithm of its sum; zeros are elements with exp(0) = 1."""

    def __init__(self, gives: str) -> None:
        self.gives = gives

    def get_statistics(self, call: _Call, out: Any) -> tuple[Tensor, ...]:
        return (torch.logsumexp(call.x, call.dims, keepdim=True),)

    def add_zeros(self, call: _Call, missing: int) -> Any:
        most = call.x.amax(call.dims, keepdim=True).clamp_min(0)
        total = (call.x - most).exp().sum(call.dims, keepdim=True) + missing * (-most).exp()
        return self._compute(call, most + total.log())

    def use_statistics(self, call: _Call, statistics: Sequence[Tensor]) -> Any:
        return self._compute(call, statistics[0]) if list(statistics[0].shape) == call.shape(keepdim=True) else None

    def _compute(self, call: _Call, total: Tensor) -> Tensor:
        if self.gives == "sum":
            return total.reshape(call.shape(call.keeps_dims))
        return (call.x - total).exp() if self.gives == "share" else call.x - total


class _LayerNorm(_Reduction):
    """Its arguments: input, shape, weight, bias, epsilon."""

    def read_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call | None:
        return _Call(args[0], list(range(args[0].dim() - len(args[1]), args[0].dim())), args, kwargs)

    def get_statistics(self, call: _Call, out: Any) -> tuple[Tensor, ...]:
        return out[1], out[2]

    def add_zeros(self, call: _Call, missing: int) -> Any:
        mean, variance = call.moments(missing, 0)
        return self._normalize(call, mean, (variance + call.args[4]).rsqrt())

    def use_statistics(self, call: _Call, statistics: Sequence[Tensor]) -> Any:
        mean, scale = statistics
        return self._normalize(call, mean, scale) if list(mean.shape) == call.shape(keepdim=True) else None

    def _normalize(self, call: _Call, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, _, weight, bias, *_ = call.args
        out = (call.x - mean) * scale
        out = out if weight is None else out * weight
        return out if bias is None else out + bias, mean, scale


class _GroupNorm(_Reduction):
    """Its arguments: input, weight, bias, samples, channels, places, groups, epsilon."""

    def read_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call | None:
        return _Call(args[0].reshape(args[3], args[6], -1), [2], args, kwargs)

    def get_statistics(self, call: _Call, out: Any) -> tuple[Tensor, ...]:
        return out[1], out[2]

    def add_zeros(self, call: _Call, missing: int) -> Any:
        mean, variance = call.moments(missing, 0)
        return self._normalize(call, mean[..., 0], (variance[..., 0] + call.args[7]).rsqrt())

    def use_statistics(self, call: _Call, statistics: Sequence[Tensor]) -> Any:
        mean, scale = statistics
        return self._normalize(call, mean, scale) if mean.shape == call.x.shape[:2] else None

    def _normalize(self, call: _Call, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias, *_ = call.args
        out = ((call.x - mean[..., None]) * scale[..., None]).reshape(x.shape)
        channels = (1, -1, *[1] * (out.dim() - 2))
        out = out if weight is None else out * weight.reshape(channels)
        return out if bias is None else out + bias.reshape(channels), mean, scale


_aten: Any = torch.ops.aten
_REDUCTIONS: Mapping[str, _Reduction] = {
    "mean": _Mean(),
    "sum": _Sum(_aten.sum),
    "linalg_vector_norm": _Norm(_aten.linalg_vector_norm),
    "norm": _Norm(_aten.norm),
    "var": _Spread(root=False, mean=False),
    "std": _Spread(root=True, mean=False),
    "var_mean": _Spread(root=False, mean=True),
    "std_mean": _Spread(root=True, mean=True),
    "amax": _Most(_aten.amax, 1),
    "amin": _Most(_aten.amin, -1),
    "max": _Most(_aten.max, 1),
    "min": _Most(_aten.min, -1),
    "_softmax": _Softmax("share"),
    "_safe_softmax": _Softmax("share"),
    "_log_softmax": _Softmax("log"),
    "logsumexp": _Softmax("sum"),
    "native_layer_norm": _LayerNorm(),
    "native_group_norm": _GroupNorm(),
}
