"""The coverage-weighted mean: the only averaging code.

x_j <- sum_k w_k x_kj / sum_k w_k over the updates k that contain element j; without any the element keeps its value
bit for bit. With w_k = 1 this is ScaleFL's Eq. 2 and Algorithm 3, with w_k = samples AdaptiveFL's Algorithm 2.
A parameter that no gradient reached on a client is contained in its update, and not counted.

Updates are summed in fp32 in the order in which they are added. Neighbors of the same sub-model are summed first, each
in one pass over its flat buffer, and added to the total together: the order of dispatch (largest cost first) makes them
neighbors, the cost is about that of copying the updates, and memory does not grow with their number.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fleetfit.layout import Layout, State
from fleetfit.submodel import FlatState, Submodel, concat_state, full_submodel, get_shapes, get_slice_plan
from fleetfit.submodel.buffers import empty_like

_BLOCK = 1 << 16  # elements


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The average of a round's updates.

    Attributes:
        mean: The weighted mean of each element; undefined for elements with coverage 0.
        coverage: Sum of the aggregation weights of the clients that trained the element.
        extra: Values that a method's own aggregator adds.
        base_state: The tensors that the mean replaces, if not the server's whole state (Decoupled: some levels').
        metrics: The server's own metrics, plain values; the round's report has them under "server".
    """

    mean: State
    coverage: State
    extra: Any = None
    base_state: State | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SummedBlock:
    """Sums over the clients that cover the same elements.

    Attributes:
        places: The elements' indices in the full model's flat buffer, int64, each once.
        sums: The sums of the clients' movements, whole numbers of one step, int64.
        counts: The number of clients on which a gradient reached the element, int64.
        clients: The number of clients in the block.
    """

    places: Tensor
    sums: Tensor
    counts: Tensor
    clients: int


def average_sums(layout: Layout, state: State, blocks: Iterable[SummedBlock], step: float) -> Aggregate:
    """Return the mean of clients that count alike, from sums of their movements.

    Args:
        layout: The model's layout.
        state: The server's; clients were sent parts of it.
        blocks: Blocks without an element in common.
        step: The movement of an element that a 1 stands for.
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
        self._layout = layout
        self._full = get_slice_plan(layout, full_submodel(layout))
        self._device = torch.device("cpu") if device is None else device
        self._total: Tensor | None = None
        self._coverage: Tensor | None = None
        self._group: tuple[Submodel, tuple[str, ...]] | None = None
        self._first: tuple[Tensor, float] | None = None  # of a group of one update: it, and its weight
        self._sum = self._room = torch.empty(0)
        self._weight = 0.0

    def add(self, submodel: Submodel, state: State, weight: float, untrained: tuple[str, ...] = ()) -> None:
        """Add an update.

        Args:
            submodel: The update's sub-model.
            state: Its tensors, in canonical order; they must not change before the next update is added.
            weight: Its aggregation weight, finite and at least 0.
            untrained: Names of the tensors that do not count.
        """
        flat = concat_state(state).to(self._device)
        if (submodel, untrained) != self._group:
            self._flush_group()
            self._group, self._weight = (submodel, untrained), weight
            if self._total is not None and self._is_full_model():
                self._sum = self._total.add_(flat, alpha=weight)
            else:
                self._first = flat, weight
            return
        self._weight += weight
        if self._first is None:
            self._sum.add_(flat, alpha=weight)
            return
        first, first_weight = self._first
        self._first, self._sum = None, self._get_sum_buffer(first)
        _add_weighted(first, first_weight, flat, weight, self._sum)

    def _is_full_model(self) -> bool:
        """Return whether the group covers the full model, so that its sum is the total."""
        assert self._group is not None
        submodel, untrained = self._group
        return get_slice_plan(self._layout, submodel).whole and not untrained

    def _get_sum_buffer(self, flat: Tensor) -> Tensor:
        if self._is_full_model():
            self._total = empty_like(flat)
            return self._total
        if self._room.numel() < flat.numel():
            self._room = empty_like(flat)
        return self._room[: flat.numel()]

    def _flush_group(self) -> None:
        if self._group is None:
            return
        if self._first is not None:
            flat, weight = self._first
            is_sum = weight == 1 and not self._is_full_model()
            self._sum = flat if is_sum else torch.mul(flat, weight, out=self._get_sum_buffer(flat))
            self._first = None
        submodel, untrained = self._group
        compiled = get_slice_plan(self._layout, submodel)
        if untrained:
            total, coverage = self._get_buffers()
            weights = torch.full_like(self._sum, self._weight)
            compiled.scatter(coverage, compiled.zero(weights, untrained), add=True)
            compiled.scatter(total, compiled.zero(self._sum.clone(), untrained), add=True)
        elif compiled.whole:
            if self._coverage is None:
                self._coverage = empty_like(self._sum).fill_(self._weight)
            else:
                self._coverage.add_(self._weight)
        else:
            total, coverage = self._get_buffers()
            compiled.scatter_scalar(coverage, self._weight)
            compiled.scatter(total, self._sum, add=True)
        self._group = None

    def _get_buffers(self) -> tuple[Tensor, Tensor]:
        """Return the weighted total and the coverage, of the full model's size."""
        if self._total is None:
            self._total = torch.zeros(self._full.size, device=self._device)
        if self._coverage is None:
            self._coverage = torch.zeros_like(self._total)
        return self._total, self._coverage

    def result(self, extra: Any = None) -> Aggregate:
        """Return the mean and the coverage of the updates since the last call."""
        self._flush_group()
        total, coverage = self._get_buffers()
        self._total = self._coverage = None
        mean = total.div_(coverage)  # 0 / 0 for elements that no client trained; `apply_mean` does not read them
        return Aggregate(self._full.views(mean), self._full.views(coverage), extra)


def _add_weighted(first: Tensor, first_weight: float, second: Tensor, second_weight: float, out: Tensor) -> None:
    """Write the weighted sum of two updates; if both weights are 1, in one pass and with the same bits."""
    if first_weight == second_weight == 1:
        torch.add(first, second, out=out)
        return
    # block by block, so that the second pass reads from the processor's cache
    for a, b, result in zip(first.split(_BLOCK), second.split(_BLOCK), out.split(_BLOCK), strict=True):
        torch.mul(a, first_weight, out=result).add_(b, alpha=second_weight)


def apply_mean(state: State, aggregate: Aggregate) -> State:
    """Return the state with the mean of the elements that a client trained; the others keep their bits."""
    old, mean, coverage = concat_state(state), concat_state(aggregate.mean), concat_state(aggregate.coverage)
    if bool(coverage.numel()) and bool(coverage.amin() > 0):
        new = mean.to(old.device)  # without a copy
    else:
        new = torch.where(coverage > 0, mean, old.to(mean.device)).to(old.device)
    return FlatState(new, get_shapes(state))
