"""Many sub-models: the costs of every depth and width of an architecture, by parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetfit.cost.count import Conditions, Piece, call_once, get_layout, get_sizes_and_exits, submodel_cost
from fleetfit.cost.latency import get_latency, latency_s
from fleetfit.cost.memory import memory_bytes, training_memory
from fleetfit.cost.parts import Measure, Profile, message_size, multiply_adds, parameters, size_bytes
from fleetfit.errors import ConfigError, ModelError, did_you_mean
from fleetfit.layout import Architecture

Floats = npt.NDArray[np.float64]
Sizes = Mapping[str, int]

WIDTHS = tuple(w / 100 for w in range(1, 101))
"""The widths that the grid search of ScaleFL Eq. 1 goes through."""


@dataclass(frozen=True)
class CostKind:
    """One kind of cost.

    Attributes:
        compute: The cost of one sub-model: (architecture, sizes of all axes, exits, shape of a sample, conditions).
        parts: Makes the measure of a set of sizes by parts.
        samples: None where the parts add up exactly; else at how many sets of sizes they are taken, the other sets are
            interpolated, and the sum is an estimate.
    """

    compute: Callable[[Architecture, Sizes, tuple[int, ...], tuple[int, ...], Conditions], float]
    parts: Callable[[Architecture, tuple[int, ...], Conditions], Measure]
    samples: int | None = None


COSTS: Mapping[str, CostKind] = {
    "parameters": CostKind(
        lambda architecture, sizes, exits, shape, _: submodel_cost(architecture, (sizes, exits), shape).parameters,
        parameters,
    ),
    "multiply_adds": CostKind(
        lambda architecture, sizes, exits, shape, _: submodel_cost(architecture, (sizes, exits), shape).multiply_adds,
        multiply_adds,
    ),
    "size_bytes": CostKind(
        lambda architecture, sizes, exits, *_: message_size(get_layout(architecture).shapes(sizes, exits)), size_bytes
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


@dataclass(frozen=True, eq=False)
class Grid:
    """Costs of every depth and width of an architecture.

    Attributes:
        cost: The cost's name.
        blocks: Full depth.
        positions: Block counts after which a classifier may sit (P of them).
        widths: Widths (W of them), ascending; the last is 1.
        trunk: Cost of the blocks up to each position and the rest, without classifiers [P, W].
        heads: Cost of each position's classifier [P, W].
        measure: The cost of a width and exits itself, where trunk and heads are estimates.
    """

    cost: str
    blocks: int
    positions: tuple[int, ...]
    widths: tuple[float, ...]
    trunk: np.ndarray[Any, np.dtype[np.float64]]
    heads: np.ndarray[Any, np.dtype[np.float64]]
    measure: Callable[[float, tuple[int, ...]], float] | None = None

    @property
    def full(self) -> float:
        """cost(M): the full model without early classifiers."""
        return float(self.trunk[-1, -1] + self.heads[-1, -1])

    def estimate(self, width: float, exits: Sequence[int]) -> float:
        """Return the cost of a sub-model with these exits, its last one its depth: the sum of its parts.

        Raises:
            ModelError: The grid has no such width or position.
        """
        column = int(np.argmin(np.abs(np.array(self.widths) - width)))
        unknown = [e for e in exits if e not in self.positions]
        if unknown or abs(self.widths[column] - width) > 1e-9 or not exits:
            raise ModelError(f"the cost grid has no width {width} with exits {tuple(exits)}; widths go by 0.01 up to "
                             f"1, exits are among {self.positions}.", key="width")  # fmt: skip
        rows = [self.positions.index(e) for e in exits]
        return float(self.trunk[rows[-1], column] + self.heads[rows, column].sum())

    def compute(self, width: float, exits: Sequence[int]) -> float:
        """Return the cost of a sub-model, counted or measured where the sum of its parts is an estimate."""
        return self.estimate(width, exits) if self.measure is None else self.measure(width, tuple(exits))


def cost_grid(
    architecture: Architecture,
    input_shape: Sequence[int],
    cost: str = "parameters",
    conditions: Conditions | None = None,
) -> Grid:
    """Return the costs of every depth and width; what does not depend on the machine is cached by the parameters.

    Raises:
        ConfigError: There is no such cost.
    """
    get_cost_kind(cost)
    if cost == "latency_s":
        return _make_grid(architecture, tuple(input_shape), cost, conditions or Conditions())
    unmeasured = Conditions() if conditions is None else replace(conditions, measured={})
    return call_once(_make_grid, architecture, tuple(input_shape), cost, unmeasured)


def _make_grid(architecture: Architecture, input_shape: tuple[int, ...], cost: str, conditions: Conditions) -> Grid:
    positions, kind = tuple(architecture.positions), COSTS[cost]
    every = [architecture.sizes(width) for width in WIDTHS]
    keys = [tuple(sorted(sizes.items())) for sizes in every]
    distinct = dict(zip(keys, every, strict=True))
    sampled = list(distinct)
    if kind.samples is not None and len(sampled) > kind.samples:
        sampled = [sampled[i] for i in np.linspace(0, len(sampled) - 1, kind.samples).round().astype(int)]
    measure = kind.parts(architecture, input_shape, conditions)
    columns = {key: _make_columns(positions, measure(distinct[key])) for key in sampled}
    if len(sampled) < len(distinct):
        columns = _interpolate(columns, {key: _mean_width(architecture, sizes) for key, sizes in distinct.items()})
    trunk, heads = (np.stack([columns[key][i] for key in keys], axis=1) for i in (0, 1))
    if kind.samples is None:
        return Grid(cost, architecture.blocks, positions, WIDTHS, trunk, heads)

    def compute(width: float, exits: tuple[int, ...]) -> float:
        return compute_cost(architecture, (architecture.sizes(width), exits), input_shape, cost, conditions)

    scale = compute(1.0, (architecture.blocks,)) / (trunk[-1, -1] + heads[-1, -1])
    return Grid(cost, architecture.blocks, positions, WIDTHS, trunk * scale, heads * scale, compute)


def _make_columns(positions: Sequence[int], profile: Profile) -> Floats:
    """Return the cost up to each position and that of its classifier [2, P]."""
    upto = np.cumsum([profile.rest, *profile.blocks])
    return np.array([upto[list(positions)], [profile.heads[p] for p in positions]])


def _mean_width(architecture: Architecture, sizes: Sizes) -> float:
    """Return the mean fraction of channels that is kept."""
    scaled = [name for name, axis in architecture.axes.items() if axis.scaled]
    return float(np.mean([sizes[name] / architecture.axes[name].size for name in scaled])) if scaled else 1.0


def _interpolate(columns: Mapping[Any, Floats], widths: Mapping[Any, float]) -> dict[Any, Floats]:
    """Interpolate the columns of all sizes, linearly in the mean width."""
    sampled = [widths[key] for key in columns]
    values = np.stack(list(columns.values()))
    flat = values.reshape(len(values), -1)
    rows = np.array([[np.interp(width, sampled, column) for column in flat.T] for width in widths.values()])
    return {key: row.reshape(values.shape[1:]) for key, row in zip(widths, rows, strict=True)}
