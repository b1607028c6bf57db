"""What other splits of a run's levels would cost, and notes on levels that are not as the run asks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from fleetfit.config.assemble.fleet import build_targets, find_profile
from fleetfit.config.assemble.levels import PlannedProblem
from fleetfit.config.assembly import Assembly
from fleetfit.config.schema import Experiment
from fleetfit.core import Federation, Problem
from fleetfit.cost import Conditions, compute_cost, submodel_cost
from fleetfit.errors import PlanError
from fleetfit.hooks.levels import find_split, keeps_early_exits, may_split
from fleetfit.planner import LevelShape, Plan, Scaling, SplitLevel, Targets, find_shapes, get_sizes
from fleetfit.training.clock import STEP

_TOLERANCES = (0.2, 0.3, 0.5)  # tried where no level fits
_NOTED = 1.05  # how much more work than "both" a note names
SPLITS: tuple[Scaling, ...] = ("depth_first", "both", "width", "depth")


def compare_splits(assembly: Assembly) -> dict[Scaling, tuple[SplitLevel, ...]]:
    """Return the levels that each split makes of a run's budgets, smallest first, but for splits that do not fit."""
    experiment, budgets, problem = assembly.experiment, assembly.fleet, assembly.federation.problem
    targets = replace(build_targets(experiment.fleet, budgets, problem.architecture.blocks), splits=())
    shapes_by_split = {split: _find_shapes(problem, targets, split) for split in SPLITS}
    return {
        split: tuple(_cost_split_level(experiment, problem, shape, budgets.conditions) for shape in shapes)
        for split, shapes in shapes_by_split.items()
        if shapes
    }


def _find_shapes(problem: Problem, targets: Targets, split: Scaling) -> Sequence[LevelShape]:
    """Return the levels that the planner makes by a split; none if they do not fit."""
    try:
        return find_shapes(problem.architecture, problem.input_shape, targets, split)
    except PlanError:
        return ()


def _cost_split_level(
    experiment: Experiment, problem: Problem, shape: LevelShape, conditions: Conditions
) -> SplitLevel:  # fmt: skip
    architecture, blocks = problem.architecture, problem.architecture.blocks
    exits = (blocks,) if shape.depth == blocks and shape.width == 1 else shape.exits
    piece = (get_sizes(architecture, shape), exits)
    counts = submodel_cost(architecture, piece, problem.input_shape)
    memory, message = (
        compute_cost(architecture, piece, problem.input_shape, cost, conditions)
        for cost in ("memory_bytes", "size_bytes")
    )
    profiles = {group.profile if isinstance(group.profile, str) else group.name: find_profile(group.profile)
                for group in experiment.fleet.groups if group.profile is not None}  # fmt: skip
    work = STEP * counts.multiply_adds
    step_s = {
        str(name): conditions.batch_size * work / profile.multiply_adds_per_s for name, profile in profiles.items()
    }
    return SplitLevel(shape.depth, shape.width, counts, work, memory, message, step_s)


def describe_split(federation: Federation, planned: PlannedProblem) -> list[str]:
    """Note what levels with whole early blocks cost to train, where the planner and not the user chose them."""
    problem, targets = planned.problem, planned.targets
    is_chosen = find_split(planned.method.make_levels, targets) == "auto" and not targets.splits
    others = _find_shapes(problem, targets, "both") if is_chosen else ()
    if not others:
        return []
    clients = [int((federation.level_of == i).sum()) for i in range(len(planned.levels))]
    own = [submodel_cost(problem.architecture, level.submodel, problem.input_shape) for level in planned.levels]
    other = [
        submodel_cost(problem.architecture, (get_sizes(problem.architecture, shape), shape.exits), problem.input_shape)
        for shape in others
    ]
    work, other_work = (
        sum(n * cost.multiply_adds for n, cost in zip(clients, costs, strict=True)) for costs in (own, other)
    )
    ratio = work / max(1, other_work)
    if ratio < _NOTED:
        return []
    return [
        f"Levels keep whole early blocks: training takes {ratio:.3g} times the multiply-adds of fleet.scaling = "
        '"both". Set that for cheaper training; `fleetfit plan` compares them.'
    ]


def describe_levels(plan: Plan) -> list[str]:
    """Name the levels whose costs are not within their tolerance, and those that are equal."""
    missed = [level for level in plan.levels if not _is_near(level.share, level.target, level.tolerance)]
    equal: dict[tuple[object, ...], list[str]] = {}
    for level in plan.levels:
        equal.setdefault((level.exits, level.parameters, level.multiply_adds), []).append(level.name)
    costs = [f"level {one.name} takes {one.share:.3g} for a budget of {one.target:.3g}" for one in missed]
    notes = [f"Not within their tolerance, as shares of the full model's {plan.cost}: {', '.join(costs)}."] * bool(
        costs
    )
    return notes + [f"Levels {' and '.join(names)} are equal." for names in equal.values() if len(names) > 1]


def describe_groups(experiment: Experiment, groups: np.ndarray, federation: Federation) -> list[str]:
    """Note which levels the clients of each named group train, so that a level's accuracy is that of its groups.

    Args:
        experiment: The run.
        groups: The group of each client, by position in `fleet.groups`.
        federation: With the clients' levels, also where the server does not know them.
    """
    names = [group.name for group in experiment.fleet.groups]
    if len(names) < 2 or None in names:
        return []
    parts = []
    for index, name in enumerate(names):
        levels = sorted({*federation.level_of[np.equal(groups, index)].tolist()} - {-1})
        parts.append(f"{name} {', '.join(str(federation.numbers[level]) for level in levels) or 'none'}")
    return [f"Levels of the groups: {'; '.join(parts)}."]


def describe_misses(planned: PlannedProblem, plan: Plan, on_a_fleet: bool) -> list[str]:
    """Note levels that miss their budgets, are equal or have no early exit, with a key that was tried and helps.

    Args:
        planned: The problem and its levels.
        plan: The plan of the levels.
        on_a_fleet: The budgets are those of nodes, so that no key changes their cost or tolerance.
    """
    hook, targets = planned.method.make_levels, planned.targets
    if find_split(hook, targets) is None or targets.splits or len(plan.levels) < 2:
        return []
    misses = describe_levels(plan)
    if misses:
        key = _find_remedy(
            planned,
            on_a_fleet,
            lambda shapes, targets: all(
                map(_is_near, [shape.share for shape in shapes], targets.ratios, targets.tolerances)
            ),
        )
        advice = (
            f"Set {key}, which is within their tolerance"
            if key
            else "Set budgets near these shares, and one for equal levels"
        )
        misses.append(f"{advice}.")
    notes = [" ".join(misses)] * bool(misses)
    wants_exits = keeps_early_exits(hook) and (may_split(hook) or find_split(hook, targets) != "width")
    if wants_exits and all(len(level.submodel.exits) == 1 for level in planned.levels):
        key = _find_remedy(planned, on_a_fleet, lambda shapes, _: len(shapes[-1].exits) > 1)
        notes += [f"Set {key} for levels with early exits."] * bool(key)
    return notes


def _is_near(share: float, target: float, tolerance: float) -> bool:
    return abs(share / target - 1) <= tolerance + 1e-6


def _find_remedy(
    planned: PlannedProblem, on_a_fleet: bool, helps: Callable[[Sequence[LevelShape], Targets], bool]
) -> str | None:
    """Return the first keys of `[fleet]` with which the planner finds levels that help; None if none do."""
    for keys, targets, split in _list_remedies(planned, on_a_fleet):
        shapes = _find_shapes(planned.problem, targets, split)
        if shapes and helps(shapes, targets):
            return keys
    return None


def _list_remedies(planned: PlannedProblem, on_a_fleet: bool) -> Iterator[tuple[str, Targets, Scaling]]:
    """Yield keys of `[fleet]` to try, and the targets and the split that they make."""
    fleet, budgets, blocks = planned.experiment.fleet, planned.budgets, planned.problem.architecture.blocks
    hook, targets = planned.method.make_levels, planned.targets
    split: Scaling = find_split(hook, targets) or "both"
    exact: Scaling = "both" if may_split(hook) else split
    change = "" if exact == split else 'fleet.scaling = "both"'
    if change:
        yield change, targets, exact
    is_absolute = any(not isinstance(group.budget, int | float) or group.budget > 1 for group in fleet.groups)
    if on_a_fleet or is_absolute or budgets.further:
        return
    if targets.cost == "parameters":
        yield 'fleet.cost = "multiply_adds"', replace(targets, cost="multiply_adds"), split
    if any(group.tolerance is not None for group in fleet.groups):
        return
    for tolerance in _TOLERANCES:
        if tolerance > fleet.tolerance:
            wider = replace(budgets, tolerances=np.full_like(budgets.tolerances, tolerance))
            keys = " and ".join(filter(None, (f"fleet.tolerance = {tolerance}", change)))
            yield keys, build_targets(fleet, wider, blocks), exact
