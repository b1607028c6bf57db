"""A forward pass with labels: which places of which parameters are the same channel.

Each place of each dimension of a parameter or buffer has a number, its label. The pass carries labels beside tensors:
- an operation that moves elements moves their labels by the same call;
- an operation that combines elements unites their labels, and united places can only be cut together;
- a label that meets something of a fixed size is fixed, with the reason.

The labels of a tensor are a list of integer tensors that broadcast to its shape. Each has size 1 along the dimensions
in which it does not vary.
"""

import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from fleetfit.anatomy.known_values import iter_tensors
from fleetfit.anatomy.meta import Operations
from fleetfit.layout import Dimension

Labels = Tensor
"""Integers of size 1 along dimensions in which they do not vary."""
_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_STANDARD, _PACKAGES = sysconfig.get_paths()["stdlib"], ("site-packages", "dist-packages")
_OBSERVER = str(Path(__file__).with_name("guided.py"))
_MANY_PAIRS = 2_000_000  # pairs that are not worth sorting


class Reason(NamedTuple):
    """Why places are not cut.

    Attributes:
        cause: The operation, or another cause in words.
        module: The module in whose forward it ran.
        line: The line of code that called it, such as "net.py:12"; "" if unknown.
    """

    cause: str
    module: str = ""
    line: str = ""

    def __str__(self) -> str:
        inside = f" in {self.module}" if self.module else ""
        return f"{self.cause}{inside}{f' ({self.line})' if self.line else ''}"


OF_SAMPLES = Reason("a size of the samples")
FLATTENED = Reason("it is flattened together with an axis that is cut")


class _CalledFunction(TorchFunctionMode):
    """Knows the function of PyTorch that runs, as it is called in code: its operations have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Any = None

    @property
    def name(self) -> str:
        """Its name, such as "torch.fft.rfft"; "" if it has none."""
        return "" if self.function is None else torch.overrides.resolve_name(self.function) or ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.function = self.function, func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.function = before


class CalledOperations(Operations):
    """Sees each operation, and which function of PyTorch the code calls."""

    def __init__(self) -> None:
        super().__init__()
        self._called = _CalledFunction()

    def __enter__(self) -> Self:
        self._called.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._called.__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def is_text(self) -> bool:
        """Whether a tensor is written as text."""
        return self._called.function in (Tensor.__repr__, Tensor.__format__)


class LabeledPass(CalledOperations):
    """Sees each operation of a forward pass, and carries labels from parameters to outputs.

    Args:
        module: The module that will run.
        x: The samples.
        choices: Which of the labels in `flattened` can be cut, by the order in which they come; the first by default.

    Attributes:
        ranges: The labels of each dimension that can be cut.
        first_use: By parameter or buffer, the number of the first operation that used it.
        step: The number of operations so far.
        stack: The modules whose forwards run, the innermost last; who runs the pass keeps it.
        reasons: Labels that were fixed, with the reason.
        flattened: Labels that came to lie along one dimension, by the order in which that happened.
        ordered: Labels of places whose order matters, as in a cumulative sum: only the first ones can be kept.
        branches: Where Python read a number that depends on the samples, or a shape depends on them.
        questions: Where Python read yes or no of the samples.
        vocabulary: Rows of the table in which the samples are looked up; 0 for other samples.
    """

    _keeps_tables = True  # a table of inner places stays whole, see `_merge`

    def __init__(self, module: nn.Module, x: Tensor, choices: Sequence[int] | None = None) -> None:
        super().__init__()
        self.flattened: list[list[np.ndarray]] = []
        self._choices = choices
        self._views: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.ranges: dict[Dimension, range] = {}
        self.first_use: dict[str, int] = {}
        self.step, self.vocabulary = 0, 0
        self.stack: Sequence[str | None] = [None]
        self.ordered: list[np.ndarray] = []
        self.reasons: list[tuple[np.ndarray, Reason]] = []
        self.branches: list[Reason] = []
        self.questions: list[Reason] = []
        self._pairs: list[np.ndarray] = []
        self._labels: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._alive: list[Tensor] = []  # an identity must not be used again
        self._sources: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._marks = 0
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._operation = ""
        self._x = x
        self.x_mark = self.mark(x)
        self._next = 1
        kernels = {
            id(p) for part in module.modules() if isinstance(part, nn.modules.conv._ConvNd) for p in part.parameters()
        }
        for name, tensor in list_tensors(module):
            if tensor in self._names:
                continue
            self._names[tensor] = name
            dims = range(min(tensor.dim(), 2) if id(tensor) in kernels else tensor.dim())
            is_cut = tensor.is_floating_point()
            self._labels[tensor] = []
            for d in dims if is_cut else ():
                if self._has_labels(name, d, tensor):
                    start, self._next = self._next, self._next + tensor.shape[d]
                    self.ranges[name, d] = range(start, self._next)
                    along = [-1 if e == d else 1 for e in range(tensor.dim())]
                    self._labels[tensor].append(torch.arange(start, self._next).reshape(along))

    @property
    def module(self) -> str | None:
        """The module whose forward runs, if any."""
        return self.stack[-1]

    def _has_labels(self, name: str, d: int, tensor: Tensor) -> bool:
        """Return whether the places of a dimension get labels."""
        return tensor.shape[d] > 1

    def release(self) -> None:
        """Let go of the tensors of the pass: labels stay, and those of a tensor are known no more."""
        for one in (self._labels, self._sources, self._names, self._views, self._alive):
            one.clear()

    # ---- what a tensor was made of ------------------------------------------------------------------------------

    def mark(self, x: Tensor) -> int:
        """Give a tensor a bit that everything made of it has in `sources`; return the bit."""
        bit = 1 << self._marks
        self._marks += 1
        self._sources[x] = self.sources(x) | bit
        self._alive.append(x)
        return bit

    def sources(self, x: Tensor) -> int:
        """Return the bits of the marked tensors that a tensor was made of."""
        bits: int = self._sources.get(x, 0)
        return bits

    # ---- labels ---------------------------------------------------------------------------------------------------

    def labels(self, x: Any) -> list[Labels]:
        """Return the labels of a tensor; none of anything else."""
        return self._labels.get(x, []) if isinstance(x, Tensor) else []

    def unite(self, a: Labels, b: Labels) -> None:
        """Note that labels can only be cut together, place by place."""
        a, b = (one.reshape(-1) for one in torch.broadcast_tensors(a, b))
        differ = a != b
        if bool(differ.any()):
            pairs = torch.stack([a[differ], b[differ]], 1)
            self._pairs.append((torch.unique(pairs, dim=0) if len(pairs) < _MANY_PAIRS else pairs).numpy())

    def tie(self, labels: Labels, d: int) -> None:
        """Unite all labels along a dimension."""
        if labels.shape[d] > 1:
            self.unite(labels, labels.narrow(d, 0, 1))

    def fix(self, labels: Labels, reason: Reason | None = None) -> None:
        """Note that places can never be cut."""
        self.reasons.append((np.unique(labels.numpy()), reason or self.make_reason()))

    def fix_along(self, labels: Labels, d: int, reason: Reason | None = None) -> None:
        """Note that a dimension can never be cut: places that vary along others too can only go together along it."""
        if vary(labels) == {d}:
            self.fix(labels, reason)
        else:
            self.tie(labels, d)

    def _explain(self, x: Tensor) -> Reason | None:
        """Return why places of a tensor have no labels, if they are the samples' own."""
        return OF_SAMPLES if self.sources(x) & self.x_mark else None

    def make_reason(self, cause: str = "") -> Reason:
        """Return a reason, the function that runs by default, with the module and the line of code."""
        cause = cause or self._called.name or self._operation
        frame = sys._getframe(1)
        while frame is not None and is_hidden(frame.f_code.co_filename):
            if frame.f_code.co_filename == _OBSERVER:  # no code but PyTorch's called it, as in an nn.Sequential
                return Reason(cause, self.module or "")
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None or self.module is None:
            return Reason(cause)
        return Reason(cause, self.module, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")

    def find_units(self) -> tuple[np.ndarray, dict[int, Reason]]:
        """Return the unit of each label, and why units are fixed, by unit."""
        pairs = np.concatenate(self._pairs) if self._pairs else np.zeros((0, 2), np.int64)
        units = np.arange(self._next)  # of each label the least one that it is united with
        while len(pairs):
            pairs = np.sort(units[pairs], 1)
            pairs = pairs[pairs[:, 0] < pairs[:, 1]]
            np.minimum.at(units, pairs[:, 1], pairs[:, 0])
            while (units[units] != units).any():
                units = units[units]
        fixed: dict[int, Reason] = {int(units[0]): Reason("a place without a parameter")}
        for labels, reason in self.reasons:
            for unit in np.unique(units[labels]).tolist():
                fixed.setdefault(unit, reason)
        return units, fixed

    def _set(self, x: Any, labels: Iterable[Labels]) -> None:
        if isinstance(x, Tensor):
            self._labels[x] = [one for one in map(_shrink, labels) if vary(one)]
            self._alive.append(x)

    def _merge(self, operands: Iterable[Sequence[Labels]]) -> list[Labels]:
        """Return the labels of several operands of one shape, and unite those that vary along the same dimensions."""
        merged: list[Labels] = []
        for labels in operands:
            for one in labels:
                overlapping = [i for i, other in enumerate(merged) if vary(other) & vary(one)]
                for i in overlapping:
                    small, large = sorted((merged[i], one), key=lambda labels: len(vary(labels)))
                    if self._keeps_tables and vary(small) < vary(large) and min(vary(large)) not in vary(small):
                        # a table of inner places, the same at each outer place (a norm per head): it stays whole
                        self.fix(small)
                        for d in vary(small):
                            self.tie(large, d)
                    else:
                        self.unite(merged[i], one)
                if not overlapping:
                    merged.append(one)
                elif all(len(vary(one)) > len(vary(merged[i])) for i in overlapping):
                    merged[overlapping[0]] = one
        return merged

    def _collapse(self, labels: Labels, dims: Collection[int]) -> Labels:
        """Tie labels along dimensions; return those at the first place of these."""
        for d in sorted(vary(labels).intersection(dims)):
            self.tie(labels, d)
            labels = labels.narrow(d, 0, 1)
        return labels

    def _flatten(self, labels: Labels, d: int) -> Labels:
        """Return the labels along one dimension, with those along others tied."""
        return self._collapse(labels, vary(labels) - {d}).reshape(-1)

    # ---- the rules of operations ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._operation = func.overloadpacket.__name__
        self.step += 1
        operands, results = list(iter_tensors(args)), list(iter_tensors([out]))
        self._note_results(results)
        bits = 0
        for x in operands:
            bits |= self.sources(x)
            if x in self._names:
                self.first_use.setdefault(self._names[x], self.step)
        for result in results if bits else ():
            self._sources[result] = self.sources(result) | bits
            self._alive.append(result)
        if self._operation in READS and bits & self.x_mark and not self.is_text:
            (self.questions if isinstance(out, bool) else self.branches).append(self.make_reason("forward"))
        if self._operation in _TABLES and not self._x.is_floating_point() and self.sources(args[1]) & self.x_mark:
            self.vocabulary = self.vocabulary or args[0].shape[0]
        name = self._operation.rstrip("_")
        if name in _MOVES and isinstance(out, Tensor) and out is not args[0]:
            self._views[out] = (args[0], func, args[1:], kwargs)
            self._alive.append(out)
        if name not in _CREATE and any(self.labels(x) for x in operands):
            _find_rule(func, name, args)(self, func, args, kwargs, out)
            if operands and out is operands[0]:
                self._write_back(out)
        return out

    def _note_results(self, results: Sequence[Tensor]) -> None:
        """See the results of an operation before they get labels."""

    def _pointwise(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        result = next(iter_tensors([out]))
        self._combine([x for x in iter_tensors(args) if x.dim() <= result.dim()], result)

    def _combine(self, operands: Sequence[Tensor], result: Tensor) -> list[Labels]:
        """Unite operands place by place, with an operand's values where it has places and no labels."""
        dims = result.dim()
        aligned = [[_align(one, dims) for one in self.labels(x)] for x in operands]
        merged = self._merge(aligned)
        for x, own in zip(operands, aligned, strict=True):
            lead = dims - x.dim()
            labeled = frozenset().union(*map(vary, own))
            for d in range(lead, dims):
                if x.shape[d - lead] > 1 and d not in labeled and not _is_uniform(x, d - lead):
                    for one in merged:
                        if d in vary(one):
                            self.fix_along(one, d, self._explain(x))
        self._set(result, merged)
        return merged

    def _layer_norm(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._combine([args[0], *iter_tensors(args[2:4])], next(iter_tensors([out])))

    def _batch_norm(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._combine([args[0], *self._on_channels(args[0], args[1:5])], next(iter_tensors([out])))

    def _group_norm(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        groups = args[6]
        for one in self._combine([args[0], *self._on_channels(args[0], args[1:3])], out[0]):
            if groups > 1 and 1 in vary(one):
                self._tie_groups(self._flatten(one, 1).reshape(groups, -1))

    def _tie_groups(self, table: Labels) -> None:
        """Unite the channels [groups, members] of a norm that can only be cut together."""
        self.tie(table, 1)

    def _on_channels(self, x: Tensor, vectors: Iterable[Any]) -> list[Tensor]:
        """Return vectors of channels with labels as tensors that broadcast to x."""
        shape, shaped = [-1, *[1] * (x.dim() - 2)], []
        for vector in iter_tensors(vectors):
            shaped.append(vector.reshape(shape))
            self._set(shaped[-1], [one.reshape(shape) for one in self.labels(vector)])
        return shaped

    def _move(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        x, results = args[0], list(iter_tensors([out]))
        if out is x:  # in place: the shape of before is in the labels alone
            if self._operation != "as_strided_":  # which changes strides alone where PyTorch calls it
                self._set(x, [getattr(torch, self._operation.rstrip("_"))(one, *args[1:]) for one in self.labels(x)])
            return
        labels_of: list[list[Labels]] = [[] for _ in results]
        for one in self.labels(x):
            whole = one.expand(x.shape)
            if self._operation in _RESHAPES:
                moved = whole.reshape(results[0].shape)
            elif self._operation == "as_strided":
                moved = torch.empty_strided(x.shape, x.stride(), dtype=torch.int64).copy_(whole).as_strided(*args[1:])
            elif self._operation in _COPIES:
                moved = whole
            else:
                moved = func(whole, *args[1:], **kwargs)
            for own, labels in zip(labels_of, iter_tensors([moved]), strict=True):
                own.append(_shrink(labels))
        for result, own in zip(results, labels_of, strict=True):
            self._set(result, self._choose_flattened(own) if self._operation in _RESHAPES else own)

    def _choose_flattened(self, own: Sequence[Labels]) -> list[Labels]:
        """Return the labels of a reshaped tensor; of those along one dimension, such as heads and channels, one."""
        chosen: list[Labels] = []
        for pattern in _group_overlapping(map(vary, own)):
            along = [one for one in own if vary(one) & pattern]
            if len(along) > 1:
                choice = 0 if self._choices is None else self._choices[len(self.flattened)]
                self.flattened.append([np.unique(one.numpy()) for one in along])
                for i, one in enumerate(along):
                    if i != choice and self._choices is not None:
                        self.fix(one, FLATTENED)
                along = [along[choice]]
            chosen += along
        return chosen

    def _copy(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._set(out, [_align(one, out.dim()) for one in self.labels(args[1])])

    def _write_back(self, view: Tensor) -> None:
        """Give the tensor that a view looks into the labels of what was written there."""
        if view not in self._views:
            return
        base, func, args, kwargs = self._views[view]
        labels = []
        for pattern in _group_overlapping(map(vary, self.labels(view))):
            whole = torch.zeros(base.shape, dtype=torch.int64)
            for one in self.labels(base):
                if vary(one) & pattern:
                    whole = one.expand(base.shape).clone()
            part = func(whole, *args, **kwargs)
            for one in self.labels(view):
                if vary(one) & pattern:
                    part.copy_(one.expand(part.shape))
            labels.append(whole)
        self._set(base, labels)
        self._write_back(base)

    def _view_as_complex(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        d = args[0].dim() - 1
        self._set(out, [self._collapse(one, {d}).squeeze(d) for one in self.labels(args[0])])

    def _view_as_real(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._set(out, [one.unsqueeze(-1) for one in self.labels(args[0])])

    def _index(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        x, index = args[:2]
        self._set(out, [func(one.expand(x.shape), index) for one in self.labels(x)])

    def _look_up(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A table's rows are samples' tokens; each is a row of channels."""
        result = next(iter_tensors([out]))
        for one in self.labels(args[0]):
            if 0 in vary(one):
                self.fix(one, OF_SAMPLES)
        lead = [1] * (result.dim() - 1)
        self._set(result, [one.reshape([*lead, -1]) for one in self.labels(args[0]) if 1 in vary(one)])

    def _pad(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        x, pad = args[0], args[1]
        padded = []
        for one in self.labels(x):
            own = [n if (x.dim() - 1 - i // 2) in vary(one) else 0 for i, n in enumerate(pad)]
            padded.append(func(one, own, 0))
        self._set(out, padded)

    def _gate(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """The first half is multiplied by a function of the second (GLU)."""
        x = args[0]
        d = (args[1] if len(args) > 1 else -1) % x.dim()
        halves = []
        for one in self.labels(x):
            if d in vary(one):
                half = one.shape[d] // 2
                self.unite(one.narrow(d, 0, half), one.narrow(d, half, half))
                one = one.narrow(d, 0, half)
            halves.append(one)
        self._set(out, halves)

    def _multiply(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Matrix products: [g, i, k] x [g, k, j], some of these dimensions absent, perhaps with something added."""
        adds = self._operation in ("addmm", "baddbmm", "addmv")
        added, (a, b) = (args[0] if adds else None), args[1:3] if adds else args[:2]
        why_a, why_b = self._explain(a), self._explain(b)
        a, left = self._view(a, {3: (0, 1, 2), 2: (1, 2), 1: (2,)})
        b, right = self._view(b, {3: (0, 1, 2), 2: (1, 2), 1: (1,)})
        for x in left:
            for y in right:
                if 2 in vary(x) and 1 in vary(y):
                    self.unite(x.unsqueeze(3), y.unsqueeze(1))
        if not any(1 in vary(y) for y in right):
            self._fix_summed(left, 2, b.movedim(1, 2), why_b)
        if not any(2 in vary(x) for x in left):
            self._fix_summed(right, 1, a.movedim(2, 1), why_a)
        sums = [[self._collapse(one, {d}) for one in own if vary(one) != {d}] for own, d in ((left, 2), (right, 1))]
        merged = self._merge(sums)
        kept = {3: (0, 1, 2), 2: (1, 2), 1: (1,), 0: ()}[out.dim()]
        shaped = [one.reshape([one.shape[d] for d in kept]) for one in merged]
        if added is not None:
            shaped = self._merge([shaped, [_align(one, out.dim()) for one in self.labels(added)]])
        self._set(out, shaped)

    def _view(self, x: Tensor, places: Mapping[int, Sequence[int]]) -> tuple[Tensor, list[Labels]]:
        """Return a factor and its labels with three dimensions."""
        where = places[x.dim()]

        def widen(t: Tensor) -> Tensor:
            return t.reshape([t.shape[where.index(d)] if d in where else 1 for d in range(3)])

        return widen(x), [widen(one) for one in self.labels(x)]

    def _fix_summed(self, labels: Iterable[Labels], d: int, other: Tensor, reason: Reason | None) -> None:
        """Fix places that are summed over with places of another tensor that have no labels; zeros add nothing."""
        if _is_uniform(other, d):
            return
        counts = (other != 0).movedim(d, 0).flatten(1).any(1)
        for one in labels:
            if vary(one) == {d}:
                self.fix(one.reshape(-1)[counts], reason)
            elif d in vary(one):
                self.tie(one, d)

    def _convolve(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        x, weight, bias, _, _, _, is_transposed, _, groups = args
        d_in, d_out = (0, 1) if is_transposed else (1, 0)
        inner = [one.reshape(-1) for one in self.labels(weight) if d_in in vary(one)]
        outer = [one.reshape(-1) for one in self.labels(weight) if d_out in vary(one)]
        for one in self.labels(weight):  # places of the kernel
            if not vary(one) & {0, 1}:
                self.fix(one)
        channels = [self._flatten(one, 1) for one in self.labels(x) if 1 in vary(one)]
        if groups == 1:
            self._connect(x, channels, inner)
        elif is_transposed:
            for one in (*channels, *inner, *outer):
                self.fix(one)
        else:
            self._connect_groups(channels, inner, outer, groups)
        for one in self.labels(bias):
            for w in outer:
                self.unite(one.reshape(-1), w)
        results = [w.reshape([-1 if d == 1 else 1 for d in range(out.dim())]) for w in outer]
        for one in self.labels(x):  # of places, or of samples
            if 1 not in vary(one):
                if all(d == 0 or (weight.shape[d] == 1 and x.shape[d] == out.shape[d]) for d in vary(one)):
                    results.append(one)
                else:
                    self.fix(one)
        self._set(out, results)

    def _connect(self, x: Tensor, channels: Sequence[Labels], inner: Sequence[Labels]) -> None:
        """Unite the channels of a convolution's input with its weight's."""
        for one in channels:
            for w in inner:
                self.unite(one, w)
            if not inner:
                self.fix(one)
        if not channels:
            self._fix_summed([w.reshape(1, -1) for w in inner], 1, x, self._explain(x))

    def _connect_groups(
        self, channels: Sequence[Labels], inner: Sequence[Labels], outer: Sequence[Labels], groups: int
    ) -> None:
        """Let whole groups come and go, with input and output channels."""
        for w in inner:
            self.fix(w)
        for one in (*channels, *outer):
            self.tie(one.reshape(groups, -1), 1)
        for w in outer:
            for one in channels:
                self.unite(one.reshape(groups, -1)[:, 0], w.reshape(groups, -1)[:, 0])
            if not channels:
                self.fix(w)

    def _reduce(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        x, results = args[0], list(iter_tensors([out]))
        dims = _read_dims(self._operation, args, kwargs, x.dim())
        reduced = [self._collapse(one, dims) for one in self.labels(x) if not vary(one) <= dims]
        if results[0].dim() != x.dim():
            reduced = [one.reshape([n for d, n in enumerate(one.shape) if d not in dims]) for one in reduced]
        for result in results:
            if result.dim() == results[0].dim():
                self._set(result, reduced)

    def _join(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Concatenate, or stack."""
        stacks = self._operation == "stack"
        d = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
        parts = [(x.unsqueeze(d), [one.unsqueeze(d) for one in self.labels(x)]) if stacks else (x, self.labels(x))
                 for x in args[0]]  # fmt: skip
        parts = [(x, own) for x, own in parts if x.dim() == out.dim()]  # an empty tensor of old may be among them
        joined = []
        for pattern in _group_overlapping(vary(one) for _, own in parts for one in own):
            mine = [(x, [one for one in own if vary(one) & pattern]) for x, own in parts]
            if d in pattern:
                joined.append(self._join_along(mine, d))
            else:
                joined.append(self._join_beside(mine, out))
        self._set(out, joined)

    def _join_along(self, parts: Sequence[tuple[Tensor, list[Labels]]], d: int) -> Labels:
        """Return the labels of parts that vary along the joined dimension; parts without labels are fixed."""
        whole = []
        for x, own in parts:
            for other in own[1:]:
                self.unite(own[0], other)
            whole.append(own[0].expand(x.shape) if own else torch.zeros(x.shape, dtype=torch.int64))
        return torch.cat(whole, d)

    def _join_beside(self, parts: Sequence[tuple[Tensor, list[Labels]]], out: Tensor) -> Labels:
        """Return the labels of parts that vary along other dimensions than the joined one: all parts have the same."""
        first = next(own[0] for _, own in parts if own)
        for x, own in parts:
            for one in own:
                self.unite(first, one)
            for d in sorted(vary(first)) if not own else ():
                if not _is_uniform(x, d):
                    self.fix_along(first, d)
        return first.expand([out.shape[d] if n > 1 else 1 for d, n in enumerate(first.shape)])

    def _keep_places(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keep labels where an operation of some places is these places of its result; else fix them."""
        results = [
            result
            for result in iter_tensors([out])
            if result.dim() and (result.is_floating_point() or result.is_complex())
        ]
        operands = [x for x in iter_tensors(args) if self.labels(x)]
        for x, result in ((x, result) for x in operands for result in results):
            for one in self.labels(x):
                dims = vary(one)
                fits = result.dim() == x.dim() and all(x.shape[d] == result.shape[d] for d in dims)
                is_free = self._operation in _SOFTMAX or (fits and self._commutes(func, args, kwargs, result, dims))
                if fits and not is_free:
                    fits = self._commutes(func, args, kwargs, result, dims, first=True)
                    self.ordered.append(np.unique(one.numpy()))
                if not fits:
                    self.fix(one)
                    continue
                for other in self.labels(result):
                    if vary(other) & dims:
                        self.unite(other, one)
                if not any(vary(other) & dims for other in self.labels(result)):
                    self._set(result, [*self.labels(result), one])

    def _commutes(
        self, func: Any, args: Any, kwargs: Any, result: Tensor, dims: frozenset[int], first: bool = False
    ) -> bool:
        """Return whether an operation of every second place, or the first half, gives these places of its result."""

        def take(x: Tensor, along: Iterable[int]) -> Tensor:
            for d in along:
                n = x.shape[d]
                x = x.index_select(d, torch.arange(n // 2) if first else torch.arange(1, n, 2))
            return x

        def thin(x: Any) -> Any:
            if isinstance(x, list | tuple):
                return type(x)(map(thin, x))
            if isinstance(x, Tensor) and self.labels(x) and x.dim() == result.dim():
                return take(x, [d for d in dims if x.shape[d] == result.shape[d]])
            return x

        try:
            if self._operation.endswith("_"):  # in place: its argument has changed, so both are computed anew
                func = getattr(torch.ops.aten, self._operation.rstrip("_"))
                result = next(iter_tensors([func(*args, **kwargs)]))
            thinned = next(t for t in iter_tensors([func(*thin(args), **kwargs)]) if t.dtype == result.dtype)
        except Exception:  # an operation may refuse other sizes in any way
            return False
        expected = take(result, dims)
        return thinned.shape == expected.shape and torch.allclose(thinned, expected, 1e-4, 1e-6, equal_nan=True)


_Rule = Callable[[LabeledPass, Any, Any, Any, Any], None]
_RESHAPES = {"view", "_unsafe_view", "_reshape_alias"}
_COPIES = {"_to_copy", "clone", "detach", "alias", "contiguous", "lift_fresh", "lift_fresh_copy"}
_MOVES = {
    *_RESHAPES, *_COPIES, "reshape", "permute", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze",
    "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "chunk", "unbind",
    "index_select", "gather", "roll", "flip", "rot90", "repeat", "repeat_interleave", "diagonal", "unfold", "narrow",
    "movedim", "view_as", "expand_as", "flatten", "unflatten", "as_strided", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle", "native_channel_shuffle",
}  # fmt: skip
_REDUCE = {
    "sum", "mean", "amax", "amin", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "logsumexp",
    "prod", "argmax", "argmin", "any", "all", "max", "min", "median",
}  # fmt: skip
_CREATE = {
    "arange", "zeros", "ones", "full", "empty", "scalar_tensor", "zeros_like", "ones_like", "full_like", "empty_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "rand", "randn", "rand_like", "randn_like", "eye", "linspace",
}  # fmt: skip
_POINTWISE = {  # those which PyTorch does not tag as such
    "native_dropout", "masked_fill", "where", "addcmul", "addcdiv", "lerp", "gelu", "_weight_norm_interface",
    "prelu", "_prelu_kernel", "bernoulli",
}  # fmt: skip
_SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax"}
"""Places of a softmax stay places; the proof compares the sum over fewer."""
READS = {"_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "masked_select", "unique", "_unique2"}
"""Operations from which Python learns a number, or a shape depends on numbers."""
_TABLES = {"embedding", "_embedding_bag", "_embedding_bag_forward_only"}
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_MOVES, LabeledPass._move),
    **dict.fromkeys(("cat", "stack"), LabeledPass._join),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot"), LabeledPass._multiply),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), LabeledPass._layer_norm),
    "convolution": LabeledPass._convolve,
    "copy": LabeledPass._copy,
    "index": LabeledPass._index,
    "view_as_complex": LabeledPass._view_as_complex,
    "view_as_real": LabeledPass._view_as_real,
    "embedding": LabeledPass._look_up,
    "constant_pad_nd": LabeledPass._pad,
    "glu": LabeledPass._gate,
    "native_group_norm": LabeledPass._group_norm,
}


def _find_rule(func: Any, name: str, args: Sequence[Any]) -> _Rule:
    if name in _RULES:
        return _RULES[name]
    if "batch_norm" in name:
        return LabeledPass._batch_norm
    if name in _REDUCE and not (len(args) > 1 and isinstance(args[1], Tensor)):
        return LabeledPass._reduce
    if torch.Tag.pointwise in func.tags or name in _POINTWISE:
        return LabeledPass._pointwise
    return LabeledPass._keep_places


def is_hidden(file: str) -> bool:
    """Return whether a file's lines say nothing to a person: PyTorch's, FleetFit's and Python's own."""
    return file.startswith(_HIDDEN) or (file.startswith(_STANDARD) and not any(part in file for part in _PACKAGES))


def vary(labels: Labels) -> frozenset[int]:
    """Return the dimensions in which labels vary."""
    return frozenset(d for d, n in enumerate(labels.shape) if n > 1)


def keep_along(labels: Labels, d: int) -> Labels:
    """Return the labels along one dimension [size], at the first place of all others."""
    return labels[tuple(slice(None) if other == d else 0 for other in range(labels.dim()))]


def list_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers by name, second names too."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _shrink(labels: Labels) -> Labels:
    for d in range(labels.dim()):
        if labels.shape[d] > 1 and (labels.stride(d) == 0 or bool((labels == labels.narrow(d, 0, 1)).all())):
            labels = labels.narrow(d, 0, 1)
    return labels


def _align(labels: Labels, dims: int) -> Labels:
    return labels.reshape([1] * (dims - labels.dim()) + list(labels.shape))


def _is_uniform(x: Tensor, d: int) -> bool:
    """Return whether a tensor has the same values at each place of a dimension."""
    return bool((x == x.narrow(d, 0, 1)).all())


def _group_overlapping(patterns: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Return the unions of patterns that have a dimension in common."""
    groups: list[frozenset[int]] = []
    for pattern in patterns:
        overlapping = [g for g in groups if g & pattern]
        groups = [g for g in groups if not g & pattern] + [pattern.union(*overlapping)]
    return groups


def _read_dims(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dims: int) -> frozenset[int]:
    """Return the dimensions over which a call reduces."""
    at = 2 if "norm" in name else 1
    dim = kwargs["dim"] if "dim" in kwargs else args[at] if len(args) > at else None
    if isinstance(dim, bool) or dim is None or dim == []:
        return frozenset(range(dims))
    return frozenset(d % dims for d in ([dim] if isinstance(dim, int) else dim))
