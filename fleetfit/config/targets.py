"""What a method's levels should cost, as `[fleet] levels` says it: searched for, given, or saved in a plan."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from fleetfit.config.fleet import Fleet, counted_piece, saved_plan
from fleetfit.config.schema import FleetSection, LevelSection
from fleetfit.cost import cost_of
from fleetfit.errors import ConfigError, FleetFitError, PlanError
from fleetfit.planner import Targets, given_levels, levels_of_budgets
from fleetfit.submodel import Submodel
from fleetfit.values import Level, Problem


def targets_of(section: FleetSection, fleet: Fleet, blocks: int) -> Targets:
    """Return what the levels should cost, or the settled levels that are given or saved in a plan.

    Args:
        section: What the run file says.
        fleet: Who the clients are.
        blocks: Full depth of the model.
    """
    levels, plan = section.levels, saved_plan(section)
    given = [level for level in levels if isinstance(level, LevelSection)] if isinstance(levels, list) else []
    if given:
        return _given(given, fleet, blocks)
    if plan is None:
        assert not isinstance(levels, dict)
        sought = levels if isinstance(levels, str) else [level for level in levels if isinstance(level, float)]
        return levels_of_budgets(fleet.budgets, sought, fleet.tolerances, section.cost, False, fleet.further,
                                 fleet.conditions)  # fmt: skip
    where = levels if isinstance(levels, str) else "fleet.levels"
    if plan.cost != section.cost:
        raise ConfigError(
            f'{where}: this plan counts {plan.cost}, but fleet.cost is "{section.cost}"; make them the same.'
        )
    try:
        none = dict.fromkeys(fleet.further, (np.inf,) * len(plan.levels))  # settled: there is nothing to search
        return replace(plan.targets, ceilings=none, conditions=fleet.conditions)
    except FleetFitError as error:
        raise ConfigError(f"{where}: {error}") from None


def _given(levels: Sequence[LevelSection], fleet: Fleet, blocks: int) -> Targets:
    """Return the targets of the levels that are given."""
    depths = [blocks if level.depth is None else level.depth for level in levels]
    try:
        if depths[-1] != blocks:
            raise PlanError(f"the last one is the full model, with all {blocks} blocks; got {depths[-1]}.")
        return given_levels(depths, [level.width for level in levels], [level.budget for level in levels], fleet.cost,
                            float(fleet.tolerances.min()), fleet.further, fleet.conditions)  # fmt: skip
    except PlanError as error:
        raise ConfigError(f"[fleet] levels: {error}") from None


def only_full(fleet: Fleet) -> Targets:
    """Return the full model as the only target: what a server knows that never learns a budget."""
    return Targets((1.0,), (float(fleet.tolerances.min()),), fleet.cost, conditions=fleet.conditions)


def with_further(levels: Iterable[Level], problem: Problem, fleet: Fleet) -> tuple[Level, ...]:
    """Add what levels need in the further costs of budgets where a method has not said it.

    A level that needs nothing of the fleet's cost is for everybody, and needs nothing of the others.
    """

    def needed(level: Level, cost: str) -> float:
        piece, whole = counted_piece(problem, level), Submodel({}, (problem.architecture.blocks,))
        part, full = (
            cost_of(problem.architecture, p, problem.input_shape, cost, fleet.conditions) for p in (piece, whole)
        )
        return part / full

    return tuple(
        replace(level, further={c: needed(level, c) for c in fleet.further} | dict(level.further))
        if level.needs > 0
        else level
        for level in levels
    )
