"""The coverage-weighted mean: the only averaging code.

x_j <- sum_k w_k x_kj / sum_k w_k over the updates k that contain element j; an element that nobody trained keeps its
value bit for bit. With w_k = 1 this is ScaleFL's Eq. 2 and Algorithm 3, with w_k = samples AdaptiveFL's Algorithm 2.
A parameter that no gradient reached on a client is contained in its update, and not counted.

Updates are folded in fp32 in the order in which they are added. Neighbours of the same sub-model are summed first,
each by one pass over its flat buffer, and put in place together: the order of dispatch (largest cost first) makes
them neighbours, the cost is about that of copying the updates, and memory does not grow with their number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fleetfit.errors import RunError
from fleetfit.layout import Layout, State
from fleetfit.submodel import FlatState, Submodel, cut, flat_of, shapes_of, whole


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What a round's updates add up to.

    Attributes:
        mean: The weighted mean of each element; where coverage is 0 it means nothing.
        coverage: Sum of the aggregation weights of those who trained the element.
        extra: Whatever a method's own merge adds.
        before: What the mean replaces, where that is not the server's whole state (Decoupled: some levels' models).
        metrics: What the server reports of its own work, plain values; the round's report has them under "server".
    """

    mean: State
    coverage: State
    extra: Any = None
    before: State | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Mean:
    """A running coverage-weighted mean over unequal sub-models."""

    def __init__(self, layout: Layout, device: torch.device | None = None) -> None:
        """Start with nothing added."""
        self._layout = layout
        self._full = cut(layout, whole(layout))
        self._device = torch.device("cpu") if device is None else device
        self._sums: tuple[Tensor, Tensor] | None = None  # weighted total and coverage, made by the first group
        self._group: tuple[Submodel, tuple[str, ...]] | None = None
        self._sum: Tensor = torch.empty(0)
        self._room: Tensor | None = None
        self._weight = 0.0

    def add(self, submodel: Submodel, state: State, weight: float, untrained: tuple[str, ...] = ()) -> None:
        """Fold one update in.

        Args:
            submodel: What the update contains.
            state: Its tensors, in canonical order.
            weight: Its aggregation weight, finite and at least 0.
            untrained: Names of the tensors that do not count.

        Raises:
            RunError: The weight is negative or not finite.
        """
        if not 0 <= weight < float("inf"):
            raise RunError(f"an aggregation weight must be finite and at least 0, got {weight}.")
        flat = flat_of(state).to(self._device)
        if (submodel, untrained) == self._group:
            self._sum.add_(flat, alpha=weight)
            self._weight += weight
            return
        self._close()
        self._group, self._weight = (submodel, untrained), weight
        compiled = cut(self._layout, submodel)
        if compiled.whole and not untrained:  # its places are the buffer itself
            if self._sums is None:
                self._sums = flat * weight, torch.zeros_like(flat)
                self._sum = self._sums[0]
            else:
                self._sum = self._sums[0].add_(flat, alpha=weight)
            return
        if self._room is None or self._room.numel() < compiled.size:
            self._room = torch.empty_like(flat)
        self._sum = torch.mul(flat, weight, out=self._room[: compiled.size])

    def _close(self) -> None:
        """Put the current group's sum in its place."""
        if self._group is None:
            return
        submodel, untrained = self._group
        compiled = cut(self._layout, submodel)
        total, coverage = self._made()
        if untrained:
            counts = torch.full_like(self._sum, self._weight)
            for buffer in (self._sum, counts):
                for name in untrained:
                    compiled.views(buffer)[name].zero_()
            compiled.scatter(coverage, counts, add=True)
        else:
            compiled.scatter_scalar(coverage, self._weight)
        if untrained or not compiled.whole:
            compiled.scatter(total, self._sum, add=True)
        self._group = None

    def _made(self) -> tuple[Tensor, Tensor]:
        if self._sums is None:
            total = torch.zeros(self._full.size, device=self._device)
            self._sums = total, torch.zeros_like(total)
        return self._sums

    def result(self, extra: Any = None) -> Aggregate:
        """Return the mean and the coverage of what was added."""
        self._close()
        total, coverage = self._made()
        mean = total.div_(coverage)  # 0 / 0 where nobody trained: `applied` does not look there
        return Aggregate(self._full.views(mean), self._full.views(coverage), extra)


def applied(state: State, aggregate: Aggregate) -> State:
    """Return the state with the mean where somebody trained, bit for bit as it was elsewhere."""
    old, mean, coverage = flat_of(state), flat_of(aggregate.mean), flat_of(aggregate.coverage)
    if mean.numel() and bool(coverage.min() > 0):
        new = mean.to(old.device)
    else:
        new = torch.where(coverage > 0, mean, old.to(mean.device)).to(old.device)
    return FlatState(new, shapes_of(state))
