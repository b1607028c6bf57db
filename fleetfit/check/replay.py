"""What of a model's arithmetic depends on a size, recorded in one run of it and put into another one.

A narrow model divides by its own head size and norms over its own channels, the full model with the other channels at
zero by those of the full one. So the two differ although the layout is right. `recorded` notes, operation by operation,
the numbers in arithmetic, how many elements are reduced, and the statistics; `replayed` runs a narrow model with them.
An operation is found again by the module that it runs in, its kind, and its order there, so it does not matter if one
of the two models needs a copy more. What moves or only copies numbers is left alone.

A statistic over fewer elements than in the full model is made up in one of two ways: the missing elements count as
zeros, or, where they are not zeros in the full model, its statistic is taken.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fleetfit.layout.meta import Operations

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
    """What is known of one operation of the full model.

    Attributes:
        numbers: Numbers and 0-dimensional tensors among its arguments, by their place.
        count: Elements that each of its results is made of, if it reduces.
        zeros: How many of them are zeros at least.
        statistics: What it found: its result, or mean and 1/deviation of a norm, or the log of a softmax' sum.
    """

    numbers: dict[int | str, Any] = field(default_factory=dict)
    count: int = 0
    zeros: int = 0
    statistics: tuple[Tensor, ...] = ()


Trace = Mapping[Operation, Sequence[OperationRecord]]


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Have attention computed by plain operations, so that its scale is one of the numbers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def recorded(module: nn.Module, run: Callable[[], Any]) -> Trace:
    """Return what the size-dependent operations of a module's run were."""
    found: dict[Operation, list[OperationRecord]] = defaultdict(list)
    with _places(module) as place, _Recording(place, found):
        run()
    return found


@contextlib.contextmanager
def replayed(module: nn.Module, trace: Trace, statistics: bool) -> Iterator[None]:
    """Have a module's run take the numbers and counts of a trace.

    Args:
        module: The narrow module.
        trace: That of the full one.
        statistics: Take its statistics too, where the missing elements are not zeros.
    """
    with _places(module) as place, _Replaying(place, trace, statistics):
        yield


@contextlib.contextmanager
def _places(module: nn.Module) -> Iterator[list[str]]:
    """Keep the name of the running module at the end of a list."""
    stack = [""]
    hooks: list[Any] = []
    for name, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):
            hooks.append(part.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
            hooks.append(part.register_forward_hook(lambda *_: (stack.pop(), None)[1], always_call=True))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


class _Mode(Operations):
    """Knows where an operation runs."""

    def __init__(self, place: list[str]) -> None:
        super().__init__()
        self.place = place

    def operation(self, func: Any) -> Operation:
        return self.place[-1], func.overloadpacket.__name__.rstrip("_")


class _Recording(_Mode):
    def __init__(self, place: list[str], found: dict[Operation, list[OperationRecord]]) -> None:
        super().__init__(place)
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = self.operation(func)
        kind = operation[1]
        if kind in _ARITHMETIC:
            numbers = _numbers(args, kwargs)
            if numbers:  # copies, since some operations work in place
                kept = {place: n.clone() if isinstance(n, Tensor) else n for place, n in numbers.items()}
                self.found[operation].append(OperationRecord(kept))
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        reduction = _REDUCTIONS.get(kind)
        reduced = None if reduction is None else reduction.reduced(args, kwargs)
        if reduction is not None and reduced is not None:
            x, dims, count = reduced
            zero = x.abs() <= _ZERO * x.abs().amax() if x.numel() else x.bool()
            zeros = int(zero.sum(dims).min()) if x.numel() else 0
            statistics = tuple(found.clone() for found in reduction.found(x, dims, args, kwargs, out))
            self.found[operation].append(OperationRecord({}, count, zeros, statistics))
        return out


class _Replaying(_Mode):
    def __init__(self, place: list[str], trace: Trace, statistics: bool) -> None:
        super().__init__(place)
        self.left = {operation: deque(entries) for operation, entries in trace.items()}
        self.statistics = statistics

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = self.operation(func)
        kind = operation[1]
        if kind in _ARITHMETIC:
            numbers = _numbers(args, kwargs)
            theirs = self._next(operation) if numbers else None
            if theirs is not None and theirs.numbers.keys() == numbers.keys():
                if isinstance(args[0], Tensor) and 0 in numbers and func.overloadpacket.__name__.endswith("_"):
                    args[0].copy_(theirs.numbers[0])
                    numbers.pop(0)
                args = tuple(theirs.numbers[i] if i in numbers else a for i, a in enumerate(args))
                kwargs = {key: theirs.numbers[key] if key in numbers else value for key, value in kwargs.items()}
            return func(*args, **kwargs)
        reduction = _REDUCTIONS.get(kind)
        reduced = None if reduction is None else reduction.reduced(args, kwargs)
        theirs = None if reduced is None else self._next(operation)
        if reduction is None or reduced is None or theirs is None or theirs.count <= reduced[2]:
            return func(*args, **kwargs)
        x, dims, count = reduced
        missing = theirs.count - count
        if self.statistics and theirs.zeros < missing:
            out = reduction.with_statistics(x, dims, args, kwargs, theirs)
            if out is not None:
                return out
        return reduction.with_zeros(x, dims, args, kwargs, missing)

    def _next(self, operation: Operation) -> OperationRecord | None:
        entries = self.left.get(operation)
        return entries.popleft() if entries else None


def _numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """Return the numbers and 0-dimensional tensors of an operation on real numbers."""
    everything = [*enumerate(args), *((key, kwargs[key]) for key in ("alpha", "value", "fill_value") if key in kwargs)]
    tensors = [value for value in args if isinstance(value, Tensor)]
    if tensors and not any(t.is_floating_point() for t in tensors):
        return {}
    return {
        place: value
        for place, value in everything
        if (isinstance(value, int | float) and not isinstance(value, bool))
        or (isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point())
    }


# ---- reductions ----------------------------------------------------------------------------------------------------

Reduced = tuple[Tensor, list[int], int]
"""What is reduced, over which dimensions, how many elements each result is made of."""


class _Reduction:
    """One kind of operation that reduces."""

    def reduced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reduced | None:
        """Return what is reduced, or None if it is no matter of real numbers."""
        x = args[0]
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
            return None
        said = self.said(args, kwargs)
        if isinstance(said, Tensor):  # the larger of two
            return None
        dims = list(range(x.dim())) if said in (None, [], ()) else [said] if isinstance(said, int) else list(said)
        dims = sorted(d % x.dim() for d in dims)
        count = 1
        for d in dims:
            count *= x.shape[d]
        return x, dims, count

    def said(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the dimensions as they were said."""
        return args[1] if len(args) > 1 else kwargs.get("dim")

    def found(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[Tensor, ...]:
        """Return its statistics."""
        return (out,) if isinstance(out, Tensor) else tuple(out)

    def with_zeros(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], missing: int
    ) -> Any:
        """Compute it with so many zeros more."""
        raise NotImplementedError

    def with_statistics(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], theirs: OperationRecord
    ) -> Any:
        """Compute it with the full model's statistics; None where they are of another shape."""
        kept = _keeps(args, kwargs)
        shape = [1 if d in dims else n for d, n in enumerate(x.shape)] if kept else _left(x, dims)
        if any(list(s.shape) != shape for s in theirs.statistics):
            return None
        given = tuple(s.clone() for s in theirs.statistics)
        return given[0] if len(given) == 1 else given


def _left(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [n for d, n in enumerate(x.shape) if d not in dims]


def _keeps(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a reduction keeps its dimensions; it is the one truth value that a reduction takes."""
    return any(value is True for value in (*args[1:], kwargs.get("keepdim")))


class _Mean(_Reduction):
    def with_zeros(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], missing: int
    ) -> Any:
        count = _count(x, dims)
        return x.mean(dims, keepdim=_keeps(args, kwargs)) * (count / (count + missing))


class _Sum(_Reduction):
    """A sum, or a norm, which zeros do not change."""

    def __init__(self, again: Callable[..., Tensor]) -> None:
        self.again = again

    def with_zeros(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], missing: int
    ) -> Any:
        return self.again(*args, **kwargs)


class _Norm(_Sum):
    """A vector norm, whose dimensions come after its order."""

    def said(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[2] if len(args) > 2 else kwargs.get("dim")


class _Spread(_Reduction):
    """Variance or deviation, perhaps with the mean."""

    def __init__(self, root: bool, mean: bool) -> None:
        self.root, self.mean = root, mean

    def with_zeros(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], missing: int
    ) -> Any:
        correction = kwargs.get("correction")
        mean, variance = _moments(x, dims, missing, 1 if correction is None else correction)
        spread = variance.sqrt() if self.root else variance
        if not _keeps(args, kwargs):
            mean, spread = mean.reshape(_left(x, dims)), spread.reshape(_left(x, dims))
        return (spread, mean) if self.mean else spread


def _count(x: Tensor, dims: Sequence[int]) -> int:
    count = 1
    for d in dims:
        count *= x.shape[d]
    return count


def _moments(x: Tensor, dims: list[int], missing: int, correction: float) -> tuple[Tensor, Tensor]:
    """Return mean and variance of x and so many zeros, dimensions kept."""
    total = _count(x, dims) + missing
    mean = x.sum(dims, keepdim=True) / total
    squares = (x - mean).square().sum(dims, keepdim=True) + missing * mean.square()
    return mean, squares / (total - correction)


class _Most(_Reduction):
    """The largest, or the smallest."""

    def __init__(self, again: Callable[..., Any], sign: int) -> None:
        self.again, self.sign = again, sign

    def with_zeros(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], missing: int
    ) -> Any:
        found = self.again(*args, **kwargs)
        if isinstance(found, Tensor):
            return found.clamp_min(0) if self.sign > 0 else found.clamp_max(0)
        return (found[0].clamp_min(0) if self.sign > 0 else found[0].clamp_max(0), *found[1:])


class _Softmax(_Reduction):
    """Softmax, its logarithm, or the logarithm of its sum; zeros are elements with exp(0) = 1."""

    def __init__(self, gives: str) -> None:
        self.gives = gives

    def found(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[Tensor, ...]:
        return (torch.logsumexp(x, dims, keepdim=True),)

    def with_zeros(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], missing: int
    ) -> Any:
        most = x.amax(dims, keepdim=True).clamp_min(0)
        total = (x - most).exp().sum(dims, keepdim=True) + missing * (-most).exp()
        return self._given(x, dims, args, kwargs, most + total.log())

    def with_statistics(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], theirs: OperationRecord
    ) -> Any:
        if list(theirs.statistics[0].shape) != [1 if d in dims else n for d, n in enumerate(x.shape)]:
            return None
        return self._given(x, dims, args, kwargs, theirs.statistics[0])

    def _given(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], total: Tensor
    ) -> Tensor:
        if self.gives == "sum":
            return total if _keeps(args, kwargs) else total.reshape(_left(x, dims))
        return (x - total).exp() if self.gives == "share" else x - total


class _Normalising(_Reduction):
    """Layer and group norm, which give their means and scales beside what they normalise."""

    def found(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[Tensor, ...]:
        return out[1], out[2]


class _LayerNorm(_Normalising):
    def reduced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reduced | None:
        x, shape = args[0], args[1]
        dims = list(range(x.dim() - len(shape), x.dim()))
        return x, dims, _count(x, dims)

    def with_zeros(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], missing: int
    ) -> Any:
        mean, variance = _moments(x, dims, missing, 0)
        return self._normed(x, args, mean, (variance + args[4]).rsqrt())

    def with_statistics(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], theirs: OperationRecord
    ) -> Any:
        mean, scale = theirs.statistics
        if mean.shape != torch.Size([1 if d in dims else n for d, n in enumerate(x.shape)]):
            return None
        return self._normed(x, args, mean, scale)

    def _normed(self, x: Tensor, args: Sequence[Any], mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = (x - mean) * scale
        out = out if args[2] is None else out * args[2]
        return out if args[3] is None else out + args[3], mean, scale


class _GroupNorm(_Normalising):
    """Its arguments: input, weight, bias, samples, channels, places, groups, epsilon."""

    def reduced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reduced | None:
        x = args[0].reshape(args[3], args[6], -1)
        return x, [2], x.shape[2]

    def with_zeros(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], missing: int
    ) -> Any:
        mean, variance = _moments(x, dims, missing, 0)
        return self._normed(x, args, mean[..., 0], (variance[..., 0] + args[7]).rsqrt())

    def with_statistics(
        self, x: Tensor, dims: list[int], args: Sequence[Any], kwargs: Mapping[str, Any], theirs: OperationRecord
    ) -> Any:
        mean, scale = theirs.statistics
        return self._normed(x, args, mean, scale) if mean.shape == x.shape[:2] else None

    def _normed(self, x: Tensor, args: Sequence[Any], mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = ((x - mean[..., None]) * scale[..., None]).reshape(args[0].shape)
        channels = (1, -1, *[1] * (out.dim() - 2))
        out = out if args[1] is None else out * args[1].reshape(channels)
        return out if args[2] is None else out + args[2].reshape(channels), mean, scale


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
