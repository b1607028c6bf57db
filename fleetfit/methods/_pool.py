"""AdaptiveFL's pool of sub-models (Jia et al., DAC 2024, 3.1 and 3.2): layers up to I whole, deeper ones narrowed.

A sub-model (r_w, I) keeps the channels of the first I layers and floor(r_w * size) of each deeper one, the first ones.
With p of them for each of the ratios of S and M, and the full model, the pool is {S_p, ..., S_1, M_p, ..., M_1, L_1},
from small to large. Number 1 has the largest I.

An axis belongs to the layer `Axis.block`, counted from 0, so that I layers are those below I. Models whose layers share
an axis, such as a residual stream, narrow it from its first block on.

Differs from the paper: nothing known. Table 1's ratios (0.40 and 0.66) and its I (4, 6 and 8 of VGG-16's 15 layers) are
the defaults; of a model with more or fewer layers the same share of them, at layers where an axis begins. The paper
does not say which I a pool of p = 1 has, and here it is the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from fleetfit.anatomy import Architecture
from fleetfit.core import Level, Problem
from fleetfit.cost import compute_cost
from fleetfit.errors import PlanError
from fleetfit.planner import Targets
from fleetfit.submodel import Submodel

_LETTERS = "SM"
_STARTS = (4 / 15, 6 / 15, 8 / 15)  # of the layers: Table 1's I


@dataclass(frozen=True)
class PoolModel:
    """One sub-model of a pool."""

    name: str  # "S3" to "S1", "M3" to "M1", "L1"
    width: float  # r_w, the kept fraction of the deeper layers' channels
    whole: int | None  # I, how many layers are whole; None where all are
    submodel: Submodel  # with the last exit


def make_pool(
    architecture: Architecture,
    p: int | None = None,
    widths: Sequence[float] = (0.4, 0.66),
    starts: Sequence[int] | None = None,
) -> tuple[PoolModel, ...]:
    """Return the pool of a model, from S_p to L_1.

    Args:
        architecture: The model family.
        p: Sub-models of each ratio; the largest p of `starts` are used. By default all, or 3, or as many as the model
            has layers that make a difference.
        widths: r_w of S and of M.
        starts: I: how many layers are whole, ascending; by default chosen from the model (4, 6 and 8 for VGG-16).

    Raises:
        PlanError: There are fewer than p starts, two sub-models are the same, or ratios or starts make no sense.
    """
    if p is None:
        p = min(len(_STARTS), len(list_starts(architecture))) if starts is None else len(starts)
    starts = choose_starts(architecture, p) if starts is None else starts
    if not 1 <= p <= len(starts) or list(starts) != sorted(set(starts)) or starts[0] < 0:
        raise PlanError(
            f"a pool takes p >= 1, and p or more numbers of whole layers, ascending, got {p} and {list(starts)}.",
            key="starts",
        )
    if len(widths) != len(_LETTERS) or not 0 < widths[0] < widths[1] < 1:
        raise PlanError(
            f"a pool takes two width ratios between 0 and 1, for S and for M, got {list(widths)}.", key="widths"
        )
    pool = [
        PoolModel(f"{letter}{p - i}", width, whole, narrow(architecture, width, whole))
        for letter, width in zip(_LETTERS, widths, strict=True)
        for i, whole in enumerate(starts[-p:])
    ]
    pool.append(PoolModel("L1", 1.0, None, narrow(architecture, 1.0, architecture.blocks)))
    for i, model in enumerate(pool):
        same = [other.name for other in pool[:i] if other.submodel == model.submodel]
        if same:
            raise PlanError(
                f"{same[0]} and {model.name} of the pool are the same sub-model: no channels of this model begin "
                "between the layers that differ. Give starts at which some do: "
                f"{', '.join(map(str, list_starts(architecture)))}.",
                key="starts",
            )
    return tuple(pool)


def unite(submodels: Sequence[Submodel]) -> Submodel:
    """Return the smallest sub-model of nested prefixes that contains all of these."""
    sizes = [submodel.sizes for submodel in submodels]
    widest = {axis: range(max(size[axis] for size in sizes)) for axis in sizes[0]}
    return Submodel(widest, submodels[-1].exits)


def list_starts(architecture: Architecture) -> list[int]:
    """Return the numbers of whole layers that make a difference: those at which a scaled axis begins."""
    return sorted({axis.block for axis in architecture.axes.values() if axis.scaled})


def choose_starts(architecture: Architecture, p: int) -> tuple[int, ...]:
    """Return p numbers of whole layers, as near as the model has them to Table 1's share of the layers.

    Raises:
        PlanError: The model has fewer than p, or p is above 3.
    """
    possible = list_starts(architecture)
    if not 1 <= p <= min(len(_STARTS), len(possible)):
        raise PlanError(
            f"a pool of p = {p} needs as many numbers of whole layers at which channels begin, and this model has "
            f"{', '.join(map(str, possible))}. Choose p up to {min(len(_STARTS), len(possible))}"
            f"{', or give starts' if len(possible) > len(_STARTS) else ''}.",
            key="p",
        )
    targets = [share * architecture.blocks for share in _STARTS[-p:]]
    return min(
        combinations(possible, p),
        key=lambda starts: sum(abs(start - target) for start, target in zip(starts, targets, strict=True)),
    )


def narrow(architecture: Architecture, width: float, whole: int) -> Submodel:
    """Return the sub-model whose layers from `whole` on keep a fraction of their channels (r_w, I), at full depth."""
    sizes = architecture.sizes(width)
    channels = {
        name: range(axis.size if axis.block < whole or not axis.scaled else sizes[name])
        for name, axis in architecture.axes.items()
    }
    return Submodel(channels, (architecture.blocks,))


def make_pool_levels(problem: Problem, targets: Targets, models: Sequence[PoolModel]) -> list[Level]:
    """Return the models of a pool, smallest first; S_1, M_1 and L_1 count in the average over levels."""
    costs = [
        compute_cost(problem.architecture, model.submodel, problem.input_shape, targets.cost, targets.conditions)
        for model in models
    ]
    return [
        Level(m.name, m.submodel, m.width, cost / costs[-1], averaged=m.name in ("S1", "M1", "L1"))
        for m, cost in zip(models, costs, strict=True)
    ]
