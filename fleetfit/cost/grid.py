"""Many sub-models: the costs of every depth and width of an architecture, by parts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetfit.anatomy import Architecture
from fleetfit.cost.count import Conditions, call_once
from fleetfit.cost.kinds import COSTS, Sizes, compute_cost, get_cost_kind
from fleetfit.errors import ModelError

Floats = npt.NDArray[np.float64]

WIDTHS = tuple(w / 100 for w in range(1, 101))
"""The widths that the grid search of ScaleFL Eq. 1 goes through."""


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
    columns: dict[Any, Floats] = {}  # the cost up to each position, and that of its classifier [2, P]
    for key in sampled:
        profile = measure(distinct[key])
        upto = np.cumsum([profile.rest, *profile.blocks])
        columns[key] = np.array([upto[list(positions)], [profile.heads[p] for p in positions]])
    if len(sampled) < len(distinct):
        widths = {key: compute_mean_width(architecture, sizes) for key, sizes in distinct.items()}
        columns = _interpolate(columns, widths)
    trunk, heads = (np.stack([columns[key][i] for key in keys], axis=1) for i in (0, 1))
    if kind.samples is None:
        return Grid(cost, architecture.blocks, positions, WIDTHS, trunk, heads)

    def compute(width: float, exits: tuple[int, ...]) -> float:
        return compute_cost(architecture, (architecture.sizes(width), exits), input_shape, cost, conditions)

    scale = compute(1.0, (architecture.blocks,)) / (trunk[-1, -1] + heads[-1, -1])
    return Grid(cost, architecture.blocks, positions, WIDTHS, trunk * scale, heads * scale, compute)


def compute_mean_width(architecture: Architecture, sizes: Sizes, axes: Iterable[str] | None = None) -> float:
    """Return the mean kept fraction of the channels of axes, by default of all."""
    fractions = [
        sizes[name] / architecture.axes[name].size
        for name in (architecture.axes if axes is None else axes)
        if architecture.axes[name].scaled
    ]
    return float(np.mean(fractions)) if fractions else 1.0


def _interpolate(columns: Mapping[Any, Floats], widths: Mapping[Any, float]) -> dict[Any, Floats]:
    """Interpolate the columns of all sizes, linearly in the mean width."""
    sampled = [widths[key] for key in columns]
    values = np.stack(list(columns.values()))
    flat = values.reshape(len(values), -1)
    rows = np.array([[np.interp(width, sampled, column) for column in flat.T] for width in widths.values()])
    return {key: row.reshape(values.shape[1:]) for key, row in zip(widths, rows, strict=True)}
