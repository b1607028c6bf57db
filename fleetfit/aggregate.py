"""The coverage-weighted mean: the only averaging code.

x_j <- sum_k w_k x_kj / sum_k w_k over the updates k that contain element j; an element that nobody trained keeps its
value bit for bit. With w_k = 1 this is ScaleFL's Eq. 2 and Algorithm 3, with w_k = samples AdaptiveFL's Algorithm 2.
A parameter that no gradient reached on a client is contained in its update, and not counted.

Updates are folded in fp32 in the order in which they are added. Neighbours of the same sub-model are summed first,
each by one pass over its flat buffer, and put in place together: the order of dispatch (largest cost first) makes
them neighbours, the cost is about that of copying the updates, and memory does not grow with their number.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fleetfit.buffers import empty_like
from fleetfit.errors import RunError
from fleetfit.layout import Layout, State
from fleetfit.submodel import FlatState, SlicePlan, Submodel, concat_state, full_submodel, get_shapes, get_slice_plan

_LEAST = torch.finfo(torch.float32).tiny  # of a weight that is above 0 in the coverage's numbers, too

_BLOCK = 1 << 16  # elements


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What a round's updates add up to.

    Attributes:
        mean: The weighted mean of each element; where coverage is 0 it means nothing.
        coverage: Sum of the aggregation weights of those who trained the element.
        extra: What a method's own aggregator adds.
        before: What the mean replaces, where that is not the server's whole state (Decoupled: some levels' models).
        metrics: What the server reports of its own work, plain values; the round's report has them under "server".
        everywhere: The coverage's buffer and how often it had been written to when it was above 0 in all places; None
            where that is not known.
    """

    mean: State
    coverage: State
    extra: Any = None
    before: State | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    everywhere: tuple[Tensor, int] | None = None


@dataclass(frozen=True, eq=False)
class SummedBlock:
    """Sums over the clients that cover the same elements.

    Attributes:
        places: Of the elements in the full model's flat buffer, int64, each once.
        sums: What the clients' movements add up to, whole numbers of one step, int64.
        counts: Of how many clients a gradient reached the element, int64.
        clients: How many clients are in it.
    """

    places: Tensor
    sums: Tensor
    counts: Tensor
    clients: int


def average_sums(layout: Layout, state: State, blocks: Iterable[SummedBlock], step: float) -> Aggregate:
    """Return the mean of clients that count alike, of sums of what they moved.

    Args:
        layout: Of the model.
        state: The server's, of which clients were sent parts.
        blocks: Without an element in common.
        step: How far a 1 moves an element.
    """
    before = concat_state(state)
    mean, coverage = before.cpu().clone(), torch.zeros(before.numel())
    for block in blocks:
        moved = block.sums.double() * step / block.counts.clamp_min(1)
        mean[block.places] = (mean[block.places].double() + moved).float()
        coverage[block.places] = block.counts.float()
    full = get_slice_plan(layout, full_submodel(layout))
    return Aggregate(full.views(mean.to(before.device)), full.views(coverage.to(before.device)))


class Mean:
    """A running coverage-weighted mean over unequal sub-models."""

    def __init__(self, layout: Layout, device: torch.device | None = None) -> None:
        """Start with nothing added."""
        self._layout = layout
        self._full = get_slice_plan(layout, full_submodel(layout))
        self._device = torch.device("cpu") if device is None else device
        self._total: Tensor | None = None
        self._coverage: Tensor | None = None
        self._group: tuple[Submodel, tuple[str, ...]] | None = None
        self._first: tuple[Tensor, float] | None = None  # of the group, as long as it is alone
        self._sum = self._room = torch.empty(0)
        self._weight = 0.0
        self._everywhere = False  # whether somebody trained the whole model

    def add(self, submodel: Submodel, state: State, weight: float, untrained: tuple[str, ...] = ()) -> None:
        """Fold one update in.

        Args:
            submodel: What the update contains.
            state: Its tensors, in canonical order; they must stay as they are until the next is added.
            weight: Its aggregation weight, finite and at least 0.
            untrained: Names of the tensors that do not count.

        Raises:
            RunError: The weight is negative or not finite.
        """
        if not 0 <= weight < float("inf"):
            raise RunError(f"an aggregation weight must be finite and at least 0, got {weight}.", key="weight")
        flat = concat_state(state).to(self._device)
        if (submodel, untrained) != self._group:
            self._close()
            self._group, self._weight = (submodel, untrained), weight
            if self._total is not None and self._in_place():
                self._sum = self._total.add_(flat, alpha=weight)
            else:
                self._first = flat, weight
            return
        self._weight += weight
        if self._first is None:
            self._sum.add_(flat, alpha=weight)
            return
        first, before = self._first
        self._first, self._sum = None, self._made_room(first)
        _add_up(first, before, flat, weight, self._sum)

    def _in_place(self) -> bool:
        """Tell whether the group's places are the full buffer itself."""
        assert self._group is not None
        submodel, untrained = self._group
        return get_slice_plan(self._layout, submodel).whole and not untrained

    def _made_room(self, flat: Tensor) -> Tensor:
        """Return a buffer for the group's sum."""
        if self._in_place():
            self._total = empty_like(flat)
            return self._total
        if self._room.numel() < flat.numel():
            self._room = empty_like(flat)
        return self._room[: flat.numel()]

    def _close(self) -> None:
        """Put the current group's sum in its place."""
        if self._group is None:
            return
        if self._first is not None:
            flat, weight = self._first
            alone = weight == 1 and not self._in_place()  # then it can be put in place as it is
            self._sum = flat if alone else torch.mul(flat, weight, out=self._made_room(flat))
            self._first = None
        submodel, untrained = self._group
        compiled = get_slice_plan(self._layout, submodel)
        if untrained:
            self._put_in_part(compiled, untrained)
        elif compiled.whole:
            self._coverage = _added(self._coverage, self._weight, self._sum)
            self._everywhere = self._everywhere or self._weight > _LEAST
        else:
            compiled.scatter_scalar(self._made()[1], self._weight)
            compiled.scatter(self._made()[0], self._sum, add=True)
        self._group = None

    def _put_in_part(self, compiled: SlicePlan, untrained: tuple[str, ...]) -> None:
        """Put the group's sum in its place, but for the tensors that do not count."""
        total, coverage = self._made()
        found, counts = self._sum.clone(), torch.full_like(self._sum, self._weight)
        for buffer in (found, counts):
            for name in untrained:
                compiled.views(buffer)[name].zero_()
        compiled.scatter(coverage, counts, add=True)
        compiled.scatter(total, found, add=True)

    def _made(self) -> tuple[Tensor, Tensor]:
        """Return the weighted total and the coverage, of the full model's size."""
        if self._total is None:
            self._total = torch.zeros(self._full.size, device=self._device)
        if self._coverage is None:
            self._coverage = torch.zeros_like(self._total)
        return self._total, self._coverage

    def result(self, extra: Any = None) -> Aggregate:
        """Return the mean and the coverage of what was added."""
        self._close()
        total, coverage = self._made()
        mean = total.div_(coverage)  # 0 / 0 where nobody trained: `applied` does not look there
        known = (coverage, coverage._version) if self._everywhere else None
        return Aggregate(self._full.views(mean), self._full.views(coverage), extra, everywhere=known)


def _add_up(first: Tensor, before: float, flat: Tensor, weight: float, out: Tensor) -> None:
    """Write the weighted sum of two updates; where a weight is 1, in one pass and with the same bits."""
    if before == weight == 1:
        torch.add(first, flat, out=out)
        return
    for one, other, here in zip(first.split(_BLOCK), flat.split(_BLOCK), out.split(_BLOCK), strict=True):
        torch.mul(one, before, out=here).add_(other, alpha=weight)  # the second pass finds it in the processor's cache


def _added(coverage: Tensor | None, weight: float, like: Tensor) -> Tensor:
    return empty_like(like).fill_(weight) if coverage is None else coverage.add_(weight)


def apply_mean(state: State, aggregate: Aggregate) -> State:
    """Return the state with the mean where somebody trained, bit for bit as it was elsewhere."""
    old, mean, coverage = concat_state(state), concat_state(aggregate.mean), concat_state(aggregate.coverage)
    if _everywhere(aggregate, coverage):
        new = mean.to(old.device)
    else:
        new = torch.where(coverage > 0, mean, old.to(mean.device)).to(old.device)
    return FlatState(new, get_shapes(state))


def _everywhere(aggregate: Aggregate, coverage: Tensor) -> bool:
    """Tell whether somebody trained each element; it is known unless the coverage was replaced or written to since."""
    if aggregate.everywhere is not None:
        buffer, version = aggregate.everywhere
        if buffer is coverage and buffer._version == version:
            return True
    return bool(coverage.numel()) and bool(coverage.amin() > 0)
