"""Who the clients are and who cannot take part, the plan, and what a method's levels should cost.

Clients are dealt to budget groups by a shuffle seeded with the run's seed. Group sizes follow the shares, rounded
down, and what is left over goes to the groups with the largest remainders, the first of equal ones, so that every
client has a group.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from fleetfit.config.schema import Experiment, FleetSection, LevelSection
from fleetfit.config.toml import path_exists, read_toml
from fleetfit.cost import Conditions, Cost, Piece, cost_of, full_cost, submodel_cost
from fleetfit.errors import ConfigError, FleetFitError, PlanError, truncate
from fleetfit.planner import (
    Amount,
    Budget,
    Plan,
    PlannedLevel,
    Targets,
    affords,
    budgets_by_cost,
    further_costs,
    given_levels,
    levels_of_budgets,
)
from fleetfit.report.text import short
from fleetfit.seeds import make_numpy_rng
from fleetfit.submodel import Submodel
from fleetfit.values import Federation, Level, Problem

# ---- budget groups, the plan, and who cannot take part -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DeviceBudgets:
    """Who the clients are.

    Attributes:
        group: Index of each client's budget group [K].
        names: Name of each group.
        budgets: What each client affords, as a fraction of the full model's cost [K].
        tolerances: epsilon_k of each [K].
        cost: What `budgets` are meant in.
        further: The same as `budgets` in each further cost that some budget names; infinite where one does not [K].
        conditions: Under which costs are counted, and what was measured.
    """

    group: np.ndarray
    names: tuple[str, ...]
    budgets: np.ndarray
    tolerances: np.ndarray
    cost: str = "parameters"
    further: Mapping[str, np.ndarray] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)


def deal_clients(
    section: FleetSection, problem: Problem, clients: int, seed: int, conditions: Conditions
) -> DeviceBudgets:
    """Deal clients to budget groups; see the module's docstring for the rule.

    Args:
        section: The fleet as configured.
        problem: What is trained.
        clients: How many there are.
        seed: The run's.
        conditions: Under which costs are counted; what a saved plan measured is added.
    """
    plan = load_saved_plan(section)
    conditions = replace(conditions, measured={**(plan.measured if plan else {}), **conditions.measured})
    whole: Piece = ({}, (problem.architecture.blocks,))

    def full(cost: str) -> float:
        return cost_of(problem.architecture, whole, problem.input_shape, cost, conditions)

    budgets: list[Budget] = [g.budget for g in section.groups]
    try:
        found = budgets_by_cost(budgets, section.cost, full)
    except (PlanError, ConfigError) as error:
        raise ConfigError(f"[fleet] groups: {error}") from None
    sizes = compute_group_sizes([group.share for group in section.groups], clients)
    group = np.empty(clients, dtype=np.int64)
    group[make_numpy_rng(seed, "fleet").permutation(clients)] = np.repeat(np.arange(len(sizes)), sizes)
    tolerances = np.array([section.tolerance if g.tolerance is None else g.tolerance for g in section.groups])
    labels = tuple(g.name or _label(g.budget) for g in section.groups)
    further = {cost: values[group] for cost, values in found.items() if cost != section.cost}
    return DeviceBudgets(
        group, labels, found[section.cost][group], tolerances[group], section.cost, further, conditions
    )


def compute_group_sizes(shares: Sequence[float | None], clients: int) -> list[int]:
    """Return how many clients each group has; groups without a share divide what the others leave, equally.

    Raises:
        ConfigError: The shares do not add up.
    """
    said = sum(share for share in shares if share is not None)
    silent = sum(share is None for share in shares)
    if said > 1 + 1e-6 or (silent == 0 and said < 1 - 1e-6) or (silent and said > 1 - 1e-6):
        raise ConfigError(f"[fleet] groups: the shares add up to {said:.6g}; they must be 1 in all"
                          f"{', with something left for the groups without a share' if silent else ''}.")  # fmt: skip
    exact = [clients * ((1 - said) / silent if share is None else share) for share in shares]
    sizes = [int(x + 1e-9) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (-round(exact[i] - sizes[i], 9), i))
    for i in by_remainder[: clients - sum(sizes)]:
        sizes[i] += 1
    return sizes


def _label(budget: Amount | Mapping[str, Amount]) -> str:
    if isinstance(budget, Mapping):
        return ", ".join(f"{cost} {_label(amount)}" for cost, amount in budget.items())
    if isinstance(budget, str):
        return budget
    near = Fraction(budget).limit_denominator(64)
    return str(near) if budget <= 1 and abs(float(near) - budget) < 1e-9 else f"{budget:g}"


# ---- what the user must know -------------------------------------------------------------------------------------


def describe_absent_clients(federation: Federation, fleet: DeviceBudgets) -> list[str]:
    """Name everybody who does not take part, and why."""
    notes = []
    under = federation.level_of < 0
    for index, name in enumerate(fleet.names):
        ids = np.flatnonzero(under & (fleet.group == index))
        if len(ids):
            budgets, reasons = _reasons(federation, fleet, int(ids[0]))
            notes.append(
                f'{len(ids)} clients of group "{name}" ({budgets}) cannot take part: the smallest level costs '
                f"{reasons}. Clients {format_ranges(ids)}."
            )
        if not (fleet.group == index).any():
            notes.append(f'group "{name}" has no clients: there are fewer clients than groups need.')
    empty = np.flatnonzero(~under & (federation.clients.num_examples == 0))
    if len(empty):
        notes.append(
            f"{len(empty)} clients cannot take part because they have no training data. Clients {format_ranges(empty)}."
        )
    return notes


def describe_single_level(experiment: Experiment, federation: Federation, plan: Plan) -> list[str]:
    """Say it where everybody trains the same piece of the model: whoever knows FedAvg expects the full one."""
    problem, method = federation.problem, experiment.method.name
    whole = full_cost(problem.architecture, problem.input_shape).parameters
    if len(plan.levels) > 1 or plan.levels[0].parameters >= whole:
        return []
    name = method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)
    return [
        f"{name} trains the model that the smallest budget affords, {short(plan.levels[0].parameters)} of "
        f"{short(whole)} parameters; all_large ignores budgets."
    ]


def _reasons(federation: Federation, fleet: DeviceBudgets, client: int) -> tuple[str, str]:
    """Return the budgets of a client under the smallest level, and what that level costs where it is too much."""
    if not fleet.further:
        least = min(level.needs for level in federation.levels)
        return f"budget {fleet.budgets[client]:.3g} of the full model", f"{least:.3g}"
    beside = _beside(federation, fleet, client)
    short = [(cost, *pair) for cost, pair in beside.items() if _too_much(fleet, client, pair)]
    budgets = ", ".join(f"{cost} {budget:.3g}" for cost, budget, _ in short)
    return f"budget {budgets} of the full model", ", ".join(f"{cost} {least:.3g}" for cost, _, least in short)


def _beside(federation: Federation, fleet: DeviceBudgets, client: int) -> dict[str, tuple[float, float]]:
    """Return by cost the budget of a client and what the smallest level needs."""
    smallest, clients = federation.levels[0], federation.clients
    found = {fleet.cost: (float(fleet.budgets[client]), smallest.needs)}
    return found | {c: (float(b[client]), smallest.further.get(c, 0.0)) for c, b in clients.further.items()}


def _too_much(fleet: DeviceBudgets, client: int, pair: tuple[float, float]) -> bool:
    return not bool(affords(pair[0], fleet.tolerances[client], pair[1]))


def format_ranges(ids: Sequence[int] | np.ndarray) -> str:
    """Return ascending ids in short: "3, 7-9"."""
    found: list[list[int]] = []
    for i in map(int, ids):
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def build_plan(federation: Federation, fleet: DeviceBudgets, targets: Targets) -> Plan:
    """Return the method's levels, counted by building them, and who got which."""
    problem = federation.problem
    architecture = problem.architecture
    levels = tuple(_planned_level(federation, fleet, targets, index) for index in range(len(federation.levels)))
    heads = count_early_heads(problem)
    mode = "width" if all(level.depth == architecture.blocks for level in levels) else "both"
    mode = "depth" if mode == "both" and all(level.width == 1 for level in levels) else mode
    out = [f"{c} ({_who(federation, fleet, int(c))})" for c in np.flatnonzero(federation.level_of < 0)]
    conditions = targets.conditions
    return Plan(targets.cost, mode, architecture.blocks, levels, heads, tuple(out), conditions.batch_size,
                conditions.measured)  # fmt: skip


def _who(federation: Federation, fleet: DeviceBudgets, client: int) -> str:
    """Name the group of a client under the smallest level, and the costs that failed where there are several."""
    said = f'group "{fleet.names[fleet.group[client]]}"'
    if not fleet.further:
        return said
    beside = _beside(federation, fleet, client)
    return ", ".join([said, *(cost for cost, pair in beside.items() if _too_much(fleet, client, pair))])


def _planned_level(federation: Federation, fleet: DeviceBudgets, targets: Targets, index: int) -> PlannedLevel:
    problem, level = federation.problem, federation.levels[index]
    architecture, shape, conditions = problem.architecture, problem.input_shape, targets.conditions
    piece, whole = find_counted_submodel(problem, level), Submodel({}, (architecture.blocks,))
    counted = submodel_cost(architecture, piece, shape)
    cost, full = (cost_of(architecture, p, shape, targets.cost, conditions) for p in (piece, whole))
    share = cost / full
    planned = len(targets.ratios) == len(federation.levels)  # a method may have levels of its own
    members = federation.level_of == index
    shown = [c for c in (targets.cost, *fleet.further) if c not in ("parameters", "multiply_adds")]
    return PlannedLevel(
        level.name, level.submodel.depth, level.width, level.submodel.exits, counted.parameters, counted.multiply_adds,
        targets.ratios[index] if planned else share,
        targets.tolerances[index] if planned else float(fleet.tolerances.min()),
        share, int(members.sum()), further_costs(architecture, piece, shape, shown, conditions),
    )  # fmt: skip


def count_early_heads(problem: Problem) -> Cost:
    """Return what the full model's early classifiers cost, which its level leaves out."""
    architecture, shape = problem.architecture, problem.input_shape
    if problem.exits[-1] != architecture.blocks:
        return Cost(0, 0)
    whole, everything = full_cost(architecture, shape), submodel_cost(architecture, ({}, problem.exits), shape)
    return Cost(everything.parameters - whole.parameters, everything.multiply_adds - whole.multiply_adds)


def find_counted_submodel(problem: Problem, level: Level) -> Submodel:
    """Return the sub-model as which a level is counted: the full model without its early classifiers."""
    blocks = problem.architecture.blocks
    return Submodel({}, (blocks,)) if level.width == 1 and level.submodel.depth == blocks else level.submodel


def load_saved_plan(section: FleetSection) -> Plan | None:
    """Return the plan that the section names or holds, or None where it says how to find the levels."""
    levels = section.levels
    if isinstance(levels, list) or levels in ("cluster", "halving"):
        return None
    where = "[fleet] levels" if isinstance(levels, str) else "fleet.levels"
    try:
        if not isinstance(levels, str):
            return Plan.of_table(levels)
        if Path(levels).suffix == ".toml":
            if not path_exists(Path(levels)):
                raise ConfigError(
                    f"the plan {truncate(levels, 200)} cannot be read; `fleetfit plan --save` writes one."
                )
            return Plan.of_table(read_toml(levels))
    except FleetFitError as error:
        raise ConfigError(f"{where}: {error}") from None
    raise ConfigError(
        f'[fleet] levels: must be "cluster", "halving", a list of ratios or the .toml file of a saved plan, got '
        f'"{truncate(levels)}".'
    )


# ---- what a method's levels should cost, as `[fleet] levels` says it: searched for, given, or saved in a plan ------


def build_targets(section: FleetSection, fleet: DeviceBudgets, blocks: int) -> Targets:
    """Return what the levels should cost, or the settled levels that are given or saved in a plan.

    Args:
        section: What the run file says.
        fleet: Who the clients are.
        blocks: Full depth of the model.
    """
    levels, plan = section.levels, load_saved_plan(section)
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


def _given(levels: Sequence[LevelSection], fleet: DeviceBudgets, blocks: int) -> Targets:
    """Return the targets of the levels that are given."""
    depths = [blocks if level.depth is None else level.depth for level in levels]
    try:
        if depths[-1] != blocks:
            raise PlanError(f"the last one is the full model, with all {blocks} blocks; got {depths[-1]}.")
        return given_levels(depths, [level.width for level in levels], [level.budget for level in levels], fleet.cost,
                            float(fleet.tolerances.min()), fleet.further, fleet.conditions)  # fmt: skip
    except PlanError as error:
        raise ConfigError(f"[fleet] levels: {error}") from None


def target_full_model(fleet: DeviceBudgets) -> Targets:
    """Return the full model as the only target: what a server knows that never learns a budget."""
    return Targets((1.0,), (float(fleet.tolerances.min()),), fleet.cost, conditions=fleet.conditions)


def add_further_costs(levels: Iterable[Level], problem: Problem, fleet: DeviceBudgets) -> tuple[Level, ...]:
    """Add what levels need in the further costs of budgets where a method has not said it.

    A level that needs nothing of the fleet's cost is for everybody, and needs nothing of the others.
    """

    def needed(level: Level, cost: str) -> float:
        piece, whole = find_counted_submodel(problem, level), Submodel({}, (problem.architecture.blocks,))
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
