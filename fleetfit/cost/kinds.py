"""The kinds of cost by name, and one cost of one sub-model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fleetfit.anatomy import Architecture
from fleetfit.cost.count import Conditions, Piece, get_layout, get_sizes_and_exits, submodel_cost
from fleetfit.cost.latency import get_latency, latency_s
from fleetfit.cost.memory import memory_bytes, training_memory
from fleetfit.cost.parts import (
    Measure,
    message_size,
    multiply_adds,
    non_embedding_parameters,
    parameters,
    size_bytes,
)
from fleetfit.errors import ConfigError, did_you_mean

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class CostKind:
    """One kind of cost.

    Attributes:
        compute: The cost of one sub-model: (architecture, sizes of all axes, exits, shape of a sample, conditions).
        parts: Makes the measure of a set of sizes by parts.
        samples: None where the parts add up exactly; else at how many sets of sizes they are taken, the other sets are
            interpolated, and the sum is an estimate.
        by_layout: Whether the parts come from the layout alone, so that they are fast and exact for any sizes.
    """

    compute: Callable[[Architecture, Sizes, tuple[int, ...], tuple[int, ...], Conditions], float]
    parts: Callable[[Architecture, tuple[int, ...], Conditions], Measure]
    samples: int | None = None
    by_layout: bool = False


COSTS: Mapping[str, CostKind] = {
    "parameters": CostKind(
        lambda architecture, sizes, exits, shape, _: submodel_cost(architecture, (sizes, exits), shape).parameters,
        parameters,
        by_layout=True,
    ),
    "non_embedding_parameters": CostKind(
        lambda model, sizes, exits, *rest: non_embedding_parameters(model, *rest)(sizes).compute_total(exits),
        non_embedding_parameters,
        by_layout=True,
    ),
    "multiply_adds": CostKind(
        lambda architecture, sizes, exits, shape, _: submodel_cost(architecture, (sizes, exits), shape).multiply_adds,
        multiply_adds,
    ),
    "size_bytes": CostKind(
        lambda architecture, sizes, exits, shape, _: message_size(get_layout(architecture, shape).shapes(sizes, exits)),
        size_bytes,
        by_layout=True,
    ),
    "memory_bytes": CostKind(
        lambda architecture, sizes, exits, shape, conditions: training_memory(
            architecture, sizes, exits, shape, conditions.batch_size, conditions.moments
        ),
        memory_bytes,
        samples=8,
    ),
    "latency_s": CostKind(
        lambda *submodel_and_conditions: get_latency(*submodel_and_conditions).median_s, latency_s, samples=5
    ),
}
"""Every cost by its name in `fleet.cost` and in budgets."""


def get_cost_kind(cost: str) -> CostKind:
    """Return a cost by its name.

    Raises:
        ConfigError: There is no such cost.
    """
    if cost not in COSTS:
        raise ConfigError(
            f'"{cost}" is not a cost; choose one of {", ".join(COSTS)}.{did_you_mean(cost, COSTS)}', key="cost"
        )
    return COSTS[cost]


def compute_cost(
    architecture: Architecture,
    submodel: Piece,
    input_shape: Sequence[int],
    cost: str = "parameters",
    conditions: Conditions | None = None,
) -> float:
    """Return one cost of a sub-model, all its classifiers included: counted, predicted or measured, not estimated.

    Args:
        architecture: The model family.
        submodel: The sub-model, or a pair of sizes by axis (axes not named are whole) and exits.
        input_shape: Shape of one sample.
        cost: A name in `COSTS`.
        conditions: Batch size, and what was measured before.

    Raises:
        ConfigError: There is no such cost.
        ModelError: The model cannot be built or does not accept the input.
    """
    sizes, exits = get_sizes_and_exits(architecture, submodel)
    return get_cost_kind(cost).compute(architecture, sizes, exits, tuple(input_shape), conditions or Conditions())
