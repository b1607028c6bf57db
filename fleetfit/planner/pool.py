"""AdaptiveFL's pool of sub-models (Jia et al., DAC 2024, 3.1 and 3.2): layers up to I whole, deeper ones narrowed.

A sub-model (r_w, I) keeps the channels of the first I layers and floor(r_w * size) of each deeper one, the first ones.
With p of them for each of the ratios of S and M, and the full model, the pool is {S_p, ..., S_1, M_p, ..., M_1, L_1},
from small to large. Number 1 has the largest I.

An axis belongs to the layer `Axis.block`, counted from 0, so that I layers are those below I. Models whose layers share
an axis, such as a residual stream, narrow it from its first block on.

Differs from the paper: nothing known. Table 1's settings (ratios 0.40 and 0.66; I of 4, 6 and 8) are the defaults; the
paper does not say which I a pool of p = 1 has, and here it is the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fleetfit.errors import PlanError
from fleetfit.layout import Architecture
from fleetfit.submodel import Submodel

_LETTERS = "SM"


@dataclass(frozen=True)
class PoolModel:
    """One sub-model of a pool.

    Attributes:
        name: "S3" to "S1", "M3" to "M1", "L1".
        width: r_w, the kept fraction of the deeper layers' channels.
        whole: I, how many layers are whole; None where all are.
        submodel: The sub-model, with the last exit.
    """

    name: str
    width: float
    whole: int | None
    submodel: Submodel


def pool(
    architecture: Architecture,
    p: int = 3,
    widths: Sequence[float] = (0.4, 0.66),
    starts: Sequence[int] = (4, 6, 8),
) -> tuple[PoolModel, ...]:
    """Return the pool of a model, from S_p to L_1.

    Args:
        architecture: The model family.
        p: Sub-models of each ratio; the largest p of `starts` are used.
        widths: r_w of S and of M.
        starts: I: how many layers are whole, ascending.

    Raises:
        PlanError: There are fewer than p starts, or ratios or starts make no sense.
    """
    if not 1 <= p <= len(starts) or list(starts) != sorted(set(starts)) or starts[0] < 0:
        raise PlanError(f"a pool of p = {p} takes {p} or more numbers of whole layers, ascending, got {list(starts)}.")
    if len(widths) != len(_LETTERS) or not 0 < widths[0] < widths[1] < 1:
        raise PlanError(f"a pool takes two width ratios between 0 and 1, for S and for M, got {list(widths)}.")
    found = [
        PoolModel(f"{letter}{p - i}", width, whole, narrowed(architecture, width, whole))
        for letter, width in zip(_LETTERS, widths, strict=True)
        for i, whole in enumerate(starts[-p:])
    ]
    return (*found, PoolModel("L1", 1.0, None, narrowed(architecture, 1.0, architecture.blocks)))


def narrowed(architecture: Architecture, width: float, whole: int) -> Submodel:
    """Return the sub-model whose layers from `whole` on keep a fraction of their channels (r_w, I), at full depth."""
    sizes = architecture.sizes(width)
    kept = {
        name: range(axis.size if axis.block < whole or not axis.scaled else sizes[name])
        for name, axis in architecture.axes.items()
    }
    return Submodel(kept, (architecture.blocks,))
