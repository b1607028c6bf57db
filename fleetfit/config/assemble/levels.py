"""Plan the levels of a run from the budgets, count them, and assign them to the clients."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from fleetfit.anatomy import Architecture, State
from fleetfit.config.assemble.data import build_data, build_partition
from fleetfit.config.assemble.engine import Computing, choose_computing, find_server_device, set_feature_cache
from fleetfit.config.assemble.fleet import DeviceBudgets, build_targets, deal_clients, target_full_model
from fleetfit.config.assemble.local import choose_training
from fleetfit.config.assemble.method import build_method_spec, check_model, check_needs, choose_for_task
from fleetfit.config.assemble.model import build_problem, find_derived
from fleetfit.config.components import check_keys
from fleetfit.config.keys import format_key, replace_key
from fleetfit.config.schema import CLIENTS, Experiment, FleetSection
from fleetfit.core import DataDescription, Federation, Level, Problem
from fleetfit.cost import Conditions, Cost, compute_cost, full_cost, submodel_cost, training_memory
from fleetfit.data import Data, count_samples
from fleetfit.errors import ConfigError, DataError, MissingExtra, PlanError, format_ranges, quote_some
from fleetfit.hooks import Method, apply_model_hook, build
from fleetfit.hooks.levels import find_split
from fleetfit.planner import (
    LevelShape,
    Plan,
    PlannedLevel,
    Scaling,
    Targets,
    affords,
    compute_further_costs,
    find_scaling,
    is_same_split,
    keep_shapes,
)
from fleetfit.report.text import format_count
from fleetfit.submodel import Submodel
from fleetfit.training import initial_base


class Population:
    """Simulated clients: the facts from which levels are planned.

    Attributes:
        experiment: The run.
        data: The data set, or its description.
        count: Number of clients.
        largest: Largest number of training samples of a client; None if unknown.
    """

    def __init__(
        self, experiment: Experiment, data: Data | DataDescription, count: int, largest: int | None
    ) -> None:  # fmt: skip
        self.experiment, self.data, self.count, self.largest = experiment, data, count, largest

    def find_budgets(self, fleet: FleetSection, problem: Problem, conditions: Conditions) -> DeviceBudgets:
        """Return the budgets of the clients, to whom the groups of `fleet` deal them."""
        return deal_clients(fleet, problem, self.count, self.experiment.seed, conditions)


@dataclass(frozen=True, eq=False)
class PlannedProblem:
    """The problem of a run, and its levels.

    Attributes:
        experiment: The run, with the defaults that depend on its data and model.
        data: The data set, or its description.
        problem: With the exits of the levels.
        method: The method that the spec builds.
        method_spec: The spec, from which workers and nodes build the method.
        budgets: Budgets of the clients.
        targets: Costs that the levels should have.
        levels: The method's.
        computing: How the levels are computed.
    """

    experiment: Experiment
    data: Data | DataDescription
    problem: Problem
    method: Method
    method_spec: Mapping[str, Any]
    budgets: DeviceBudgets
    targets: Targets
    levels: tuple[Level, ...]
    computing: Computing

    def cost(self, level: Level | None, cost: str) -> float:
        """Return the planned cost of a level; of the full model for None."""
        return compute_level_cost(self.problem, level, cost, self.budgets.conditions)

    def memory(self, level: Level) -> int:
        """Return the predicted bytes of a training step of a level, with all the exits that it trains."""
        problem, submodel, conditions = self.problem, level.submodel, self.budgets.conditions
        sizes = {**problem.layout.full_sizes, **submodel.sizes}
        return training_memory(
            problem.architecture, sizes, submodel.exits, problem.input_shape, conditions.batch_size, conditions.moments
        )


def plan_problem(
    experiment: Experiment, population: Population, base: State | None, accelerator: torch.device | None = None,
    say: Callable[[str], None] | None = None, kept: Plan | None = None,
) -> PlannedProblem:  # fmt: skip
    """Build the problem and plan its levels.

    Args:
        experiment: The run.
        population: The clients.
        base: The part of the model that is never trained, or None to make it.
        accelerator: Device that computes the levels; the engine's by default.
        say: Called with a sentence before a slow step.
        kept: The levels that the run has had so far, which keep their shapes; None for a new run.
    """
    experiment = choose_for_task(experiment, population.data)
    method_spec = build_method_spec(experiment)
    method = build(method_spec)
    problem = apply_model_hook(build_problem(experiment, population.data, say), method_spec)
    experiment = choose_training(experiment, problem.architecture, method)
    experiment, budgets, targets, levels = _plan_budgets(experiment, population, problem, method, kept)
    problem = problem.replace_exits({e for level in levels for e in level.submodel.exits})
    problem = problem.replace_levels(level.submodel for level in levels)
    check_model(experiment, problem)
    problem = replace(problem, base=initial_base(problem, experiment.seed) if base is None else base)
    problem = set_feature_cache(problem, experiment.engine)
    device = accelerator or find_server_device(experiment.engine)
    computing = choose_computing(experiment.engine, experiment.recorded, problem, levels, device, kept is not None)
    problem = problem.replace_arithmetic(computing.computed)
    return PlannedProblem(
        experiment, population.data, problem, method, method_spec, budgets, targets, levels, computing
    )


def _plan_budgets(
    experiment: Experiment, population: Population, problem: Problem, method: Method, kept: Plan | None
) -> tuple[Experiment, DeviceBudgets, Targets, tuple[Level, ...]]:
    """Plan levels for the fleet's budgets. Default budgets below every sub-model of a plain module are dropped.

    Levels that a run has had so far keep their shapes.

    Raises:
        PlanError: No levels fit the budgets.
    """

    def plan(experiment: Experiment) -> tuple[Experiment, DeviceBudgets, Targets, tuple[Level, ...]]:
        budgets = population.find_budgets(experiment.fleet, problem, make_conditions(experiment, population.largest))
        targets = (
            build_targets(experiment.fleet, budgets, problem.architecture.blocks)
            if method.needs_budgets
            else target_full_model(budgets)
        )
        if kept is None or not method.needs_budgets:
            levels = method.make_levels(problem, targets)
        else:
            targets, levels = _keep_levels(kept, targets, problem, method)
        return experiment, budgets, targets, add_further_costs(levels, problem, budgets)

    try:
        return plan(experiment)
    except PlanError:
        fleet = experiment.fleet
        if find_derived(problem.architecture) is None or fleet.model_fields_set & {"groups", "levels"}:
            raise
        for first in range(1, len(fleet.groups) - 1):  # a fleet of full models only is not what a run expects
            with suppress(PlanError):
                return plan(replace_key(experiment, "fleet.groups", fleet.groups[first:]))
        raise


def _keep_levels(kept: Plan, targets: Targets, problem: Problem, method: Method) -> tuple[Targets, list[Level]]:
    """Return the targets and levels of a run that has trained some: the same, or those that it continues with.

    Raises:
        PlanError: No level fits a new target, or the method makes others of the levels that the run has.
    """
    architecture = problem.architecture
    if not kept.changes:
        with suppress(PlanError):
            levels = method.make_levels(problem, targets)
            shapes = [_make_shape(architecture, level) for level in levels]
            if [shape.exits for shape in shapes] == [level.exits for level in kept.levels] and all(
                is_same_split(shape, level.shape) for shape, level in zip(shapes, kept.levels, strict=True)
            ):
                return targets, levels
    split = find_split(method.make_levels, targets) or cast(Scaling, kept.scaling)
    if kept.levels[-1].depth == architecture.blocks and kept.levels[-1].width == 1:
        targets = keep_shapes(kept, targets, architecture, problem.input_shape, split)
        levels = method.make_levels(problem, targets)
        if [level.name for level in levels] == [shape.name for shape in targets.splits]:
            return targets, levels
    raise PlanError(
        "with these budgets the method trains another model than before. Continue with budgets of the same levels, or "
        "start a new run, which init_from begins with the trained model.",
        key="fleet.groups",
    )


def _make_shape(architecture: Architecture, level: Level) -> LevelShape:
    submodel, widths = level.submodel, find_widths(architecture, level)
    return LevelShape(submodel.depth, level.width, submodel.exits, level.needs, widths=widths)


def make_conditions(experiment: Experiment, largest: int | None) -> Conditions:
    """Return the conditions for counting costs; `largest` is the batch size if all samples are one batch."""
    local = experiment.local
    size = largest if local.batch_size == "all" else local.batch_size
    if size is None:
        raise ConfigError(
            '[local] batch_size: "all" needs the data. Set a number: --set local.batch_size=64.', key="local.batch_size"
        )
    return Conditions(size, dict(experiment.recorded.latencies), local.moments)


def add_further_costs(levels: Iterable[Level], problem: Problem, budgets: DeviceBudgets) -> tuple[Level, ...]:
    """Add the further costs of levels that a method leaves out, except to levels that need no budget.

    A level that needs the whole budget of the first cost, such as each one of `exclusivefl`, needs those of the others.
    """

    def compute_share(level: Level, cost: str) -> float:
        part, full = (compute_level_cost(problem, one, cost, budgets.conditions) for one in (level, None))
        return part / full

    def list_shares(level: Level) -> Mapping[str, float]:
        if level.needs >= 1:
            return dict.fromkeys(budgets.further, 1.0)
        absent = [cost for cost in budgets.further if cost not in level.further]
        return {**level.further, **{cost: compute_share(level, cost) for cost in absent}}

    return tuple(replace(level, further=list_shares(level)) if level.needs > 0 else level for level in levels)


# ---- the levels of an experiment, without a run --------------------------------------------------------------------


def plan_levels(
    experiment: Experiment, facts: DataDescription | None = None, accelerator: torch.device | None = None
) -> PlannedProblem:
    """Plan the levels of a run, as `fleetfit plan` prints them.

    Args:
        experiment: The run.
        facts: Description of the data; without it, the run's data are loaded.
        accelerator: Device that computes the levels; the engine's by default.

    Raises:
        FleetFitError: Keys do not go together, or the data cannot be loaded.
    """
    check_needs(experiment, build(build_method_spec(experiment)))
    check_keys(experiment)
    if facts is None:
        try:
            data = build_data(experiment.data)
        except (DataError, MissingExtra) as error:
            raise DataError(
                f"{error} To plan without the data, describe a sample: --input-shape 3,32,32 --classes 10.",
                key=error.key,
                path=error.path,
            ) from None
        parts = build_partition(experiment, data)
        population = Population(experiment, data, len(parts), max(1, int(count_samples(parts).max())))
    else:
        population = Population(experiment, facts, experiment.data.partition.clients or CLIENTS, None)
    return plan_problem(experiment, population, {}, accelerator)


# ---- the plan of a run ---------------------------------------------------------------------------------------------


def build_plan(federation: Federation, budgets: DeviceBudgets, targets: Targets) -> Plan:
    """Return the method's levels with their counted costs, and the clients of each."""
    architecture = federation.problem.architecture
    levels = tuple(_build_planned_level(federation, budgets, targets, i) for i in range(len(federation.levels)))
    absent = []
    for client in map(int, np.flatnonzero(federation.level_of < 0)):
        failed = [cost for cost, _, _ in find_failed_costs(federation, budgets, client)] if budgets.further else []
        group = f'group "{budgets.names[budgets.group[client]]}"'
        absent.append(f"{client} ({', '.join([group, *failed])})")
    conditions = targets.conditions
    return Plan(
        targets.cost, find_scaling(levels, architecture.blocks), architecture.blocks, levels,
        count_early_heads(federation.problem), tuple(absent), conditions.batch_size, conditions.measured,
    )  # fmt: skip


def _build_planned_level(federation: Federation, budgets: DeviceBudgets, targets: Targets, index: int) -> PlannedLevel:
    problem, level = federation.problem, federation.levels[index]
    architecture, shape, conditions = problem.architecture, problem.input_shape, targets.conditions
    piece = find_counted_submodel(problem, level)
    counts = submodel_cost(architecture, piece, shape)
    cost, full = (compute_level_cost(problem, one, targets.cost, conditions) for one in (level, None))
    share = cost / full
    follows_targets = len(targets.ratios) == len(federation.levels)  # a method may have levels of its own
    further = [c for c in (targets.cost, *budgets.further) if c not in ("parameters", "multiply_adds")]
    return PlannedLevel(
        level.name, level.submodel.depth, level.width, level.submodel.exits, counts.parameters, counts.multiply_adds,
        targets.ratios[index] if follows_targets else share,
        targets.tolerances[index] if follows_targets else float(budgets.tolerances.min()),
        share, int((federation.level_of == index).sum()),
        compute_further_costs(architecture, piece, shape, further, conditions),
        find_widths(architecture, level),
    )  # fmt: skip


def find_widths(architecture: Architecture, level: Level) -> dict[str, float]:
    """Return the kept fraction of each axis of a level that is cut; empty where its width alone says it."""
    sizes = level.submodel.sizes
    if sizes == {axis: architecture.sizes(level.width)[axis] for axis in sizes}:
        return {}
    axes = architecture.axes
    return {axis: n / axes[axis].size for axis, n in sizes.items() if axes[axis].scaled and n < axes[axis].size}


def count_early_heads(problem: Problem) -> Cost:
    """Return the cost of the full model's early classifiers, which the plan does not count."""
    architecture, shape = problem.architecture, problem.input_shape
    if problem.exits[-1] != architecture.blocks:
        return Cost(0, 0)
    whole, all_exits = full_cost(architecture, shape), submodel_cost(architecture, ({}, problem.exits), shape)
    return Cost(all_exits.parameters - whole.parameters, all_exits.multiply_adds - whole.multiply_adds)


def compute_level_cost(problem: Problem, level: Level | None, cost: str, conditions: Conditions) -> float:
    """Return the planned cost of a level; of the full model for None."""
    piece = Submodel({}, (problem.architecture.blocks,)) if level is None else find_counted_submodel(problem, level)
    return compute_cost(problem.architecture, piece, problem.input_shape, cost, conditions)


def find_counted_submodel(problem: Problem, level: Level) -> Submodel:
    """Return the counted sub-model of a level; the full model is counted without early classifiers."""
    blocks = problem.architecture.blocks
    return Submodel({}, (blocks,)) if level.width == 1 and level.submodel.depth == blocks else level.submodel


# ---- notes ---------------------------------------------------------------------------------------------------------


def describe_absent_clients(federation: Federation, budgets: DeviceBudgets) -> list[str]:
    """List the clients that do not take part, with the reason."""
    notes, without = [], []
    is_under = federation.level_of < 0
    for index, name in enumerate(budgets.names):
        ids = np.flatnonzero(is_under & (budgets.group == index))
        if len(ids):
            client = int(ids[0])
            afforded, required = f"{budgets.budgets[client]:.3g}", f"{min(lv.needs for lv in federation.levels):.3g}"
            if budgets.further:
                failed = find_failed_costs(federation, budgets, client)
                afforded = ", ".join(f"{cost} {budget:.3g}" for cost, budget, _ in failed)
                required = ", ".join(f"{cost} {least:.3g}" for cost, _, least in failed)
            notes.append(
                f'{_count_clients(len(ids))} of group "{name}" (budget {afforded} of the full model) cannot take part: '
                f"the smallest level costs {required}. Give the group a larger budget or tolerance"
                f"{', or take a method with several levels' * (len(federation.levels) == 1)}. Clients "
                f"{format_ranges(ids)}."
            )
        if not (budgets.group == index).any():
            without.append(name)
    if without:
        notes.append(
            f"No client is in {'group' if len(without) == 1 else 'groups'} {quote_some(without)}: the run has "
            f"{_count_clients(len(budgets.group))}. Use more clients, or a larger fraction for the group."
        )
    empty = np.flatnonzero(~is_under & (federation.clients.num_examples == 0))
    if len(empty):
        notes.append(
            f"{_count_clients(len(empty))} without training data cannot take part: {format_ranges(empty)}. Use fewer "
            "clients or more data."
        )
    return notes


def _count_clients(count: int) -> str:
    return f"{count} client{'' if count == 1 else 's'}"


def describe_default_budgets(chosen: FleetSection, fleet: FleetSection) -> list[str]:
    """Return a note on the default budgets that `_plan_budgets` dropped."""
    absent = len(fleet.groups) - len(chosen.groups)
    if not absent:
        return []
    left, out = (", ".join(f"{one.budget:g}" for one in groups) for groups in (chosen.groups, fleet.groups[:absent]))
    return [f"The budgets are {left}: no levels of this network fit {out} as well. Set fleet.groups for others."]


def describe_percentages(fleet: FleetSection) -> list[str]:
    """List the budgets of groups that look like percentages, and are absolute."""
    return [
        f"{format_key(f'fleet.groups.{index}.budget')} = {budget:g} is absolute: {budget:g} {fleet.cost}. For "
        f"{budget:g}% of the full model write {budget / 100:g}."
        for index, group in enumerate(fleet.groups)
        if not isinstance(budget := group.budget, str | dict) and 1 < budget <= 100
    ]


def find_failed_costs(
    federation: Federation, budgets: DeviceBudgets, client: int
) -> list[tuple[str, float, float]]:  # fmt: skip
    """Return (cost, budget, cost of the smallest level) where that level exceeds a client's budget."""
    smallest, further = federation.levels[0], federation.clients.further
    rows = [
        (budgets.cost, float(budgets.budgets[client]), smallest.needs),
        *((c, float(b[client]), smallest.further.get(c, 0.0)) for c, b in further.items()),
    ]
    tolerance = budgets.tolerances[client]
    return [(cost, budget, needs) for cost, budget, needs in rows if not affords(budget, tolerance, needs)]


def describe_single_level(experiment: Experiment, federation: Federation, plan: Plan) -> list[str]:
    """Note that all clients train the same sub-model, because users of FedAvg expect the full model."""
    problem, method = federation.problem, experiment.method.name
    whole = full_cost(problem.architecture, problem.input_shape).parameters
    if len(plan.levels) > 1 or plan.levels[0].parameters >= whole:
        return []
    name = method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)
    return [
        f"{name} trains the sub-model that fits the smallest budget, {format_count(plan.levels[0].parameters)} of "
        f"{format_count(whole)} parameters. Use all_large to ignore budgets."
    ]
