"""Plan a fleet: budgets to levels, levels to sub-models, clients to levels."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fleetfit.cost import Conditions, Cost, Piece, cost_grid, cost_of, full_cost, latency_of, submodel_cost
from fleetfit.errors import PlanError
from fleetfit.layout import Architecture
from fleetfit.planner.budgets import Budget, affords, as_fractions, assign, budgets_by_cost, levels_of_budgets
from fleetfit.planner.plan import Plan, PlannedLevel
from fleetfit.planner.search import grids_of, search
from fleetfit.planner.targets import Floats, Mode, Split, Targets
from fleetfit.submodel import Submodel

_PRINTED = ("parameters", "multiply_adds")  # every plan has them


def make_plan(
    architecture: Architecture,
    input_shape: Sequence[int],
    budgets: Mapping[str, Budget] | Sequence[Budget] | Floats,
    tolerances: npt.ArrayLike = 0.1,
    how: str | Sequence[float] = "cluster",
    cost: str = "parameters",
    mode: Mode = "both",
    strict: bool = False,
    depths: Sequence[int] | None = None,
    widths: Sequence[float] | None = None,
    also: Iterable[str] = (),
    conditions: Conditions | None = None,
) -> Plan:
    """Plan a fleet.

    Args:
        architecture: The model family.
        input_shape: Shape of one sample.
        budgets: Budget by client name, or one per client (its index is its name): a fraction of cost(M) up to 1,
            absolute above; or a table of costs and budgets, all of which must fit.
        tolerances: epsilon_k of each client, or one for all.
        how: "cluster", "halving", or target ratios; see `levels_of_budgets`.
        cost: What budgets are meant in, a name in `fleetfit.cost.COSTS`.
        mode: What is cut; see `search`.
        strict: Admit only levels at or under every budget of theirs.
        depths: Exits of the smaller levels, where they are given.
        widths: Widths of the smaller levels, where they are given. With both given, the levels cost what they cost,
            unless `how` is a list of ratios.
        also: Costs that the plan shows although no budget names them.
        conditions: Under which costs are counted.

    Raises:
        PlanError: Budgets that make no sense, or nothing fits.
    """
    conditions = conditions or Conditions()
    names = list(budgets) if isinstance(budgets, Mapping) else None
    grid = cost_grid(architecture, input_shape, cost, conditions)
    given = _fractions(architecture, input_shape, budgets, cost, grid.full, conditions)
    further = {name: values for name, values in given.items() if name != cost}
    if depths is not None and widths is not None and isinstance(how, str):
        how = _shares(grid.full, [grid.exactly(w, tuple(depths[: i + 1])) for i, w in enumerate(widths)])
    targets = levels_of_budgets(given[cost], how, tolerances, cost, strict, further, conditions)
    splits = search(grid, targets, mode, depths, widths, grids_of(architecture, input_shape, targets)[1])
    costs = [(further[name], [s.further[name] for s in splits]) for name in further]
    level_of = assign(given[cost], tolerances, [s.share for s in splits], costs)
    counts = np.bincount(level_of[level_of >= 0], minlength=len(splits)).tolist()
    shown = [name for name in dict.fromkeys([cost, *further, *also]) if name not in _PRINTED]
    levels = tuple(
        _planned(architecture, input_shape, i, split, targets, int(counts[i]), shown) for i, split in enumerate(splits)
    )
    whole, bare = submodel_cost(architecture, ({}, splits[-1].exits), input_shape), full_cost(architecture, input_shape)
    heads = Cost(whole.parameters - bare.parameters, whole.multiply_adds - bare.multiply_adds)
    smallest = {cost: splits[0].share, **splits[0].further}
    left_out = [
        f"{index if names is None else names[index]}{_because(given, tolerances, smallest, index)}"
        for index in np.flatnonzero(level_of < 0).tolist()
    ]
    return Plan(cost, mode, architecture.blocks, levels, heads, tuple(left_out), conditions.batch_size,
                conditions.measured)  # fmt: skip


def _fractions(
    architecture: Architecture,
    input_shape: Sequence[int],
    budgets: Mapping[str, Budget] | Sequence[Budget] | Floats,
    cost: str,
    full: float,
    conditions: Conditions,
) -> dict[str, Floats]:
    """Return what each client affords in each cost."""
    said = list(budgets.values()) if isinstance(budgets, Mapping) else budgets
    if isinstance(said, np.ndarray) or not any(isinstance(budget, Mapping | str) for budget in said):
        return {cost: as_fractions(said, full)}  # type: ignore[arg-type]
    whole: Piece = ({}, (architecture.blocks,))
    return budgets_by_cost(said, cost, lambda name: cost_of(architecture, whole, input_shape, name, conditions))


def _because(given: Mapping[str, Floats], tolerances: npt.ArrayLike, smallest: Mapping[str, float], client: int) -> str:
    """Name the costs of the smallest level that a client does not afford, where there are several."""
    if len(given) == 1:
        return ""
    slack = np.broadcast_to(np.asarray(tolerances, dtype=np.float64), given[next(iter(given))].shape)[client]
    return f" ({', '.join(c for c, b in given.items() if not affords(b[client], slack, smallest[c]))})"


def _shares(full: float, costs: Sequence[float]) -> list[float]:
    found = [c / full for c in costs]
    if found != sorted(set(found)) or any(share >= 1 for share in found):
        raise PlanError(
            f"the given depths and widths must make each level dearer than the one before, got costs {found}."
        )
    return found


def _planned(
    architecture: Architecture,
    input_shape: Sequence[int],
    index: int,
    split: Split,
    targets: Targets,
    clients: int,
    shown: Sequence[str],
) -> PlannedLevel:
    """Count one level exactly, by building it."""
    sizes, exits = architecture.sizes(split.width), split.exits
    if index == len(targets.ratios) - 1:
        sizes, exits = architecture.sizes(1.0), (architecture.blocks,)
    piece = Submodel({axis: range(n) for axis, n in sizes.items()}, exits)
    counted = submodel_cost(architecture, piece, input_shape)
    return PlannedLevel(
        str(index + 1), split.depth, split.width, split.exits, counted.parameters, counted.multiply_adds,
        targets.ratios[index], targets.tolerances[index], split.share, clients,
        further_costs(architecture, piece, input_shape, shown, targets.conditions),
    )  # fmt: skip


def further_costs(
    architecture: Architecture,
    submodel: Submodel,
    input_shape: Sequence[int],
    costs: Iterable[str],
    conditions: Conditions,
) -> dict[str, float]:
    """Return further costs of a sub-model by name, and with a latency its spread."""
    found = {}
    for cost in costs:
        found[cost] = float(cost_of(architecture, submodel, input_shape, cost, conditions))
        if cost == "latency_s":
            sizes = {**architecture.sizes(1.0), **submodel.sizes}
            measured = latency_of(architecture, sizes, submodel.exits, input_shape, conditions)
            found["latency_spread_s"] = measured.spread_s
    return found
