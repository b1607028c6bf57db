"""Build budgets, speeds and connections of the clients, and the targets of the levels, from `[fleet]`.

A shuffle with the run's seed deals clients to budget groups. Group sizes follow the shares, rounded down. The remaining
clients go to the groups with the largest remainders; ties go to the first group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from fleetfit.config.schema import AvailabilitySection, FleetSection, LevelSection, ProfileSection
from fleetfit.config.toml import path_exists, read_toml
from fleetfit.config.trace import read_trace
from fleetfit.core import Availability, DeviceResources, Drift, NodeDescription, Problem, Speed
from fleetfit.cost import Conditions, Piece, compute_cost
from fleetfit.errors import ConfigError, FleetFitError, PlanError, did_you_mean, truncate
from fleetfit.planner import Amount, Budget, Plan, Targets, convert_budgets, make_fixed_targets, make_targets
from fleetfit.profiles import PROFILES, DeviceProfile
from fleetfit.seeds import make_numpy_rng

# ---- budgets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DeviceBudgets:
    """The budget groups of the clients, and the budget of each client.

    Attributes:
        group: Index of each client's budget group [K].
        names: Name of each group.
        budgets: Budget of each client, as a fraction of the full model's cost [K].
        tolerances: epsilon_k of each [K].
        cost: The cost that `budgets` limit.
        further: Budgets in each further cost that a budget names; infinite for clients without one [K].
        conditions: Conditions under which costs are counted, and measured latencies.
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
    """Deal clients to budget groups by the rule of the module's docstring.

    Args:
        section: `[fleet]`.
        problem: The run's problem.
        clients: Number of clients.
        seed: The run's.
        conditions: Conditions under which costs are counted; the latencies of a saved plan are added.
    """
    plan = load_saved_plan(section)
    conditions = replace(conditions, measured={**(plan.measured if plan else {}), **conditions.measured})
    budgets: list[Budget] = [group.budget for group in section.groups]
    sizes = compute_group_sizes([group.fraction for group in section.groups], clients)
    group = np.empty(clients, dtype=np.int64)
    group[make_numpy_rng(seed, "fleet").permutation(clients)] = np.repeat(np.arange(len(sizes)), sizes)
    tolerances = np.array([section.tolerance if g.tolerance is None else g.tolerance for g in section.groups])
    names = tuple(g.name or _format_budget(g.budget) for g in section.groups)
    try:
        return _convert_budgets(section.cost, budgets, group, names, tolerances, problem, conditions)
    except (PlanError, ConfigError) as error:
        is_cost = error.key == "cost" and not any(isinstance(budget, Mapping) for budget in budgets)
        key = "fleet.cost" if is_cost else "fleet.groups"
        raise ConfigError(f"[fleet] groups: {error}", key=key, path=error.path) from None


def compute_node_budgets(
    section: FleetSection, problem: Problem, nodes: Sequence[NodeDescription], conditions: Conditions
) -> DeviceBudgets:
    """Return the budgets that nodes report; each node is a group."""
    budgets: list[Budget] = [math.inf if node.budget is None else node.budget for node in nodes]
    names, tolerances = tuple(node.name for node in nodes), np.array([node.tolerance for node in nodes])
    return _convert_budgets(section.cost, budgets, np.arange(len(nodes)), names, tolerances, problem, conditions)


def _convert_budgets(
    cost: str, budgets: Sequence[Budget], group: np.ndarray, names: tuple[str, ...], tolerances: np.ndarray,
    problem: Problem, conditions: Conditions,
) -> DeviceBudgets:  # fmt: skip
    """Return the budgets of clients, as fractions of the full model's cost, from those of their groups."""
    whole: Piece = ({}, (problem.architecture.blocks,))
    by_cost = convert_budgets(
        budgets, cost, lambda name: compute_cost(problem.architecture, whole, problem.input_shape, name, conditions)
    )
    further = {name: values[group] for name, values in by_cost.items() if name != cost}
    return DeviceBudgets(group, names, by_cost[cost][group], tolerances[group], cost, further, conditions)


def compute_group_sizes(shares: Sequence[float | None], clients: int) -> list[int]:
    """Return the number of clients of each group. Groups without a share divide the remainder equally.

    Raises:
        ConfigError: The shares do not add up to 1.
    """
    total = sum(share for share in shares if share is not None)
    open_groups = sum(share is None for share in shares)
    if total > 1 + 1e-6 or (open_groups == 0 and total < 1 - 1e-6) or (open_groups and total > 1 - 1e-6):
        remainder = ", and leave a remainder for the groups without a share" if open_groups else ""
        raise ConfigError(
            f"[fleet] groups: the shares add up to {total:.6g}; they must add up to 1{remainder}.", key="fleet.groups"
        )
    exact = [clients * ((1 - total) / open_groups if share is None else share) for share in shares]
    sizes = [int(x + 1e-9) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (-round(exact[i] - sizes[i], 9), i))
    for i in by_remainder[: clients - sum(sizes)]:
        sizes[i] += 1
    return sizes


def _format_budget(budget: Amount | Mapping[str, Amount]) -> str:
    """Return the default name of a group: 0.125 as "1/8"."""
    if isinstance(budget, Mapping):
        return ", ".join(f"{cost} {_format_budget(amount)}" for cost, amount in budget.items())
    if isinstance(budget, str):
        return budget
    near = Fraction(budget).limit_denominator(64)
    return str(near) if budget <= 1 and abs(float(near) - budget) < 1e-9 else f"{budget:g}"


# ---- simulated devices ---------------------------------------------------------------------------------------------


def build_resources(section: FleetSection, budgets: DeviceBudgets, seed: int) -> DeviceResources:
    """Return budgets, speeds and connections of the simulated devices."""
    drift = None
    if section.drift is not None:
        drift = Drift(section.drift.sd, section.drift.jump, section.drift.low)
        drift = drift if section.drift.jump else Drift(section.drift.sd, 0.0)  # `low` has no effect
    return DeviceResources(
        {budgets.cost: budgets.budgets, **budgets.further},
        budgets.tolerances,
        drift,
        budgets.conditions,
        seed,
        build_speeds(section, budgets.group, seed),
        section.jitter,
        build_availability(section.availability, len(budgets.budgets), seed),
    )


def build_speeds(section: FleetSection, group: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Return the speed of each client [K] by field of `Speed`; empty without profiles.

    Args:
        section: `[fleet]`.
        group: Index of each client's group [K].
        seed: The run's, from which slow clients are drawn.

    Raises:
        ConfigError: `slow` or `jitter` is set without profiles.
    """
    if section.groups[0].profile is None:
        for key in ("slow", "jitter"):
            if getattr(section, key):
                raise ConfigError(
                    f"[fleet] {key}: needs a profile for each group. Set profile in every group, or leave {key} out.",
                    key=f"fleet.{key}",
                )
        return {}
    profiles = [find_profile(g.profile) for g in section.groups if g.profile is not None]
    speeds = {f.name: np.array([getattr(p, f.name) for p in profiles])[group] for f in fields(Speed)}
    if section.slow is not None:
        is_slow = draw_slow_clients(group, section.slow.fraction, seed)
        speeds["multiply_adds_per_s"] = np.where(is_slow, 1 / section.slow.factor, 1.0) * speeds["multiply_adds_per_s"]
        for name in ("down_bytes_per_s", "up_bytes_per_s"):
            speeds[name] = np.where(is_slow, 1 / section.slow.link, 1.0) * speeds[name]
    return speeds


def draw_slow_clients(group: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Draw round(share * K) slow clients, bool [K]; each group has a number in proportion to its size."""
    order = make_numpy_rng(seed, "slow").permutation(len(group))
    order = order[np.argsort(group[order], kind="stable")]
    cumulative = np.floor(np.arange(len(group) + 1) * share + 0.5)
    is_slow = np.zeros(len(group), dtype=bool)
    is_slow[order] = np.diff(cumulative) > 0
    return is_slow


def find_profile(profile: str | ProfileSection, key: str = "fleet.groups.profile") -> DeviceProfile:
    """Return the profile of a name or of a table of figures.

    Args:
        profile: The name or the table.
        key: Its key, for an error.

    Raises:
        ConfigError: The name is unknown.
    """
    if not isinstance(profile, str):
        return DeviceProfile(**dict(profile))
    if profile not in PROFILES:
        raise ConfigError(
            f'[fleet] groups.profile: "{truncate(profile)}" is not among the profiles: {", ".join(PROFILES)}. Name '
            f"one, or write a table of figures.{did_you_mean(profile, PROFILES)}",
            key=key,
        )
    return PROFILES[profile]


def check_profiles(section: FleetSection) -> None:
    """Check that all groups or no group has a profile, and that the names are known."""
    missing = [i for i, group in enumerate(section.groups) if group.profile is None]
    if 0 < len(missing) < len(section.groups):
        raise ConfigError(
            f"[fleet] groups: {', '.join(f'#{i + 1}' for i in missing)} have no profile, but others have. Set a "
            "profile in all groups or in none.",
            key=f"fleet.groups.{missing[0]}.profile",
        )
    for i, group in enumerate(section.groups):
        if group.profile is not None:
            find_profile(group.profile, f"fleet.groups.{i}.profile")


def build_availability(section: AvailabilitySection | None, clients: int, seed: int) -> Availability | None:
    """Return when clients are connected; None if they always are.

    Raises:
        ConfigError: Keys exclude each other, or the trace is of other clients.
    """
    if section is None:
        return None
    where, key = "[fleet] availability", "fleet.availability"
    if section.trace is not None:
        for name in ("online", "spread", "rounds", "day"):
            if name in section.model_fields_set and getattr(section, name):
                raise ConfigError(
                    f"{where}: the trace already determines who is online. Leave out {name} or the trace.",
                    key=f"{key}.{name}",
                )
        return Availability(clients, leave=section.leave, trace=read_trace(section.trace, clients), seed=seed)
    online = 1.0 if section.online is None else section.online
    if section.rounds is not None and online == 1:
        raise ConfigError(
            f"{where}: with online = 1 clients never go offline. Leave rounds out, or lower online.",
            key=f"{key}.rounds",
        )
    if section.rounds is not None and section.rounds * (1 - online) < 1:
        raise ConfigError(
            f"{where} rounds: clients that are online {online:g} of the time stay for {1 / (1 - online):.4g} rounds if "
            f"each round is drawn independently; rounds must be at least that, got {section.rounds:g}.",
            key=f"{key}.rounds",
        )
    return Availability(clients, online, section.spread, section.rounds, section.day, section.leave, seed=seed)


# ---- the targets of levels -----------------------------------------------------------------------------------------


def build_targets(section: FleetSection, budgets: DeviceBudgets, blocks: int) -> Targets:
    """Return the target costs of the levels, or the levels of `[fleet] levels` or of a saved plan, and their split.

    Args:
        section: `[fleet]`.
        budgets: Budgets of the clients.
        blocks: Full depth of the model.
    """
    levels: Any = section.levels
    if (plan := load_saved_plan(section)) is not None:
        targets = _build_saved_targets(plan, section, budgets)
    elif isinstance(levels, list) and isinstance(levels[0], LevelSection):
        targets = _build_listed_targets(levels, budgets, blocks)
    else:
        targets = make_targets(
            budgets.budgets, levels, budgets.tolerances, section.cost, False, budgets.further, budgets.conditions
        )
    return replace(targets, scaling=section.scaling or "")


def _build_saved_targets(plan: Plan, section: FleetSection, budgets: DeviceBudgets) -> Targets:
    path = section.levels if isinstance(section.levels, str) else None
    where = path or "fleet.levels"
    if plan.cost != section.cost:
        raise ConfigError(
            f'{where}: this plan counts {plan.cost}, but fleet.cost is "{section.cost}". Set fleet.cost = '
            f'"{plan.cost}", or plan again.',
            key="fleet.cost",
            path=path,
        )
    unlimited = dict.fromkeys(budgets.further, (np.inf,) * len(plan.levels))  # listed levels, which are not searched
    try:
        return replace(plan.targets, ceilings=unlimited, conditions=budgets.conditions)
    except FleetFitError as error:
        raise ConfigError(f"{where}: {error}", key="fleet.levels", path=error.path or path) from None


def _build_listed_targets(levels: Sequence[LevelSection], budgets: DeviceBudgets, blocks: int) -> Targets:
    depths = [blocks if level.depth is None else level.depth for level in levels]
    try:
        if depths[-1] != blocks:
            raise PlanError(f"the last level must be the full model with all {blocks} blocks; got {depths[-1]}.")
        return make_fixed_targets(
            depths, [level.width for level in levels], [level.budget for level in levels], budgets.cost,
            float(budgets.tolerances.min()), budgets.further, budgets.conditions,
        )  # fmt: skip
    except PlanError as error:
        raise ConfigError(f"[fleet] levels: {error}", key="fleet.levels", path=error.path) from None


def target_full_model(budgets: DeviceBudgets) -> Targets:
    """Return the full model as the only target, for methods in which the server never learns budgets."""
    return Targets((1.0,), (float(budgets.tolerances.min()),), budgets.cost, conditions=budgets.conditions)


def load_saved_plan(section: FleetSection) -> Plan | None:
    """Return the plan that `[fleet] levels` names or holds; None if it has a rule or levels."""
    levels = section.levels
    if isinstance(levels, list) or levels in ("cluster", "halving"):
        return None
    key = "fleet.levels"
    if not isinstance(levels, str):
        try:
            return Plan.from_table(levels)
        except FleetFitError as error:
            raise ConfigError(f"{key}: {error}", key=key, path=error.path) from None
    if Path(levels).suffix != ".toml":
        raise ConfigError(
            '[fleet] levels: must be "cluster", "halving", a list of ratios or the .toml file of a saved plan, got '
            f'"{truncate(levels)}".',
            key=key,
        )
    if not path_exists(Path(levels)):
        raise ConfigError(
            f"[fleet] levels: the plan {truncate(levels, 200)} cannot be read. Write one with `fleetfit plan --save`.",
            key=key,
            path=levels,
        )
    try:
        return Plan.from_table(read_toml(levels))
    except FleetFitError as error:
        raise ConfigError(f"[fleet] levels: {error}", key=key, path=error.path or levels) from None
