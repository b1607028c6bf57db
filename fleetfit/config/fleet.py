"""Who the clients are: budget groups, the targets of the levels, the plan, and who cannot take part.

Clients are dealt to budget groups by a shuffle seeded with the run's seed. Group sizes follow the shares, rounded
down, and what is left over goes to the groups with the largest remainders, the first of equal ones, so that every
client has a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import tomli_w

from fleetfit.config.schema import FleetSection
from fleetfit.cost import Cost, cost_grid, full_cost, submodel_cost
from fleetfit.errors import ConfigError, FleetFitError
from fleetfit.planner import Plan, PlannedLevel, Targets, levels_of_budgets
from fleetfit.planner.budgets import as_fractions
from fleetfit.seeds import numpy_rng
from fleetfit.values import Federation, Problem


@dataclass(frozen=True, eq=False)
class Fleet:
    """Who the clients are.

    Attributes:
        group: Index of each client's budget group [K].
        names: Name of each group.
        budgets: What each client affords, as a fraction of the full model's cost [K].
        tolerances: epsilon_k of each [K].
    """

    group: np.ndarray
    names: tuple[str, ...]
    budgets: np.ndarray
    tolerances: np.ndarray


def fleet_of(section: FleetSection, problem: Problem, clients: int, seed: int) -> Fleet:
    """Deal clients to budget groups; see the module's docstring for the rule."""
    full = cost_grid(problem.architecture, problem.input_shape, section.cost).full
    sizes = group_sizes([group.share for group in section.groups], clients)
    group = np.empty(clients, dtype=np.int64)
    group[numpy_rng(seed, "fleet").permutation(clients)] = np.repeat(np.arange(len(sizes)), sizes)
    budgets = as_fractions([g.budget for g in section.groups], full)
    tolerances = np.array([section.tolerance if g.tolerance is None else g.tolerance for g in section.groups])
    labels = tuple(g.name or _label(g.budget) for g in section.groups)
    return Fleet(group, labels, budgets[group], tolerances[group])


def group_sizes(shares: Sequence[float | None], clients: int) -> list[int]:
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


def _label(budget: float) -> str:
    near = Fraction(budget).limit_denominator(64)
    return str(near) if budget <= 1 and abs(float(near) - budget) < 1e-9 else f"{budget:g}"


def targets_of(section: FleetSection, fleet: Fleet) -> Targets:
    """Return what the levels should cost, or the settled levels of a saved plan."""
    levels = section.levels
    if isinstance(levels, dict):
        return _planned(tomli_w.dumps(levels), "fleet.levels", section)
    if isinstance(levels, str) and levels not in ("cluster", "halving"):
        path = Path(levels)
        if path.suffix != ".toml":
            raise ConfigError(
                '[fleet] levels: must be "cluster", "halving", a list of ratios or the .toml file of a saved plan, got '
                f'"{levels}".'
            )
        try:
            return _planned(path.read_text(encoding="utf-8"), str(path), section)
        except (OSError, UnicodeDecodeError):
            raise ConfigError(
                f"[fleet] levels: the plan {path} cannot be read; `fleetfit plan --save` writes one."
            ) from None
    return levels_of_budgets(fleet.budgets, levels, fleet.tolerances, section.cost)


def _planned(text: str, where: str, section: FleetSection) -> Targets:
    try:
        plan = Plan.from_toml(text)
        targets = plan.targets
    except FleetFitError as error:
        raise ConfigError(f"{where}: {error}") from None
    if plan.cost != section.cost:
        raise ConfigError(
            f'{where}: this plan counts {plan.cost}, but fleet.cost is "{section.cost}"; make them the same.'
        )
    return targets


# ---- what the user must know -------------------------------------------------------------------------------------


def notes_of(federation: Federation, fleet: Fleet) -> list[str]:
    """Name everybody who does not take part, and why."""
    notes = []
    least = min(level.needs for level in federation.levels)
    under = federation.level_of < 0
    for index, name in enumerate(fleet.names):
        ids = np.flatnonzero(under & (fleet.group == index))
        if len(ids):
            budget = f"budget {fleet.budgets[ids[0]]:.3g} of the full model"
            notes.append(
                f'{len(ids)} clients of group "{name}" ({budget}) cannot take part: the smallest level costs '
                f"{least:.3g}. Clients {ranges(ids)}."
            )
        if not (fleet.group == index).any():
            notes.append(f'group "{name}" has no clients: there are fewer clients than groups need.')
    empty = np.flatnonzero(~under & (federation.clients.num_examples == 0))
    if len(empty):
        notes.append(
            f"{len(empty)} clients cannot take part because they have no training data. Clients {ranges(empty)}."
        )
    return notes


def ranges(ids: Sequence[int] | np.ndarray) -> str:
    """Return ascending ids in short: "3, 7-9"."""
    found: list[list[int]] = []
    for i in map(int, ids):
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def plan_of(federation: Federation, fleet: Fleet, targets: Targets) -> Plan:
    """Return the method's levels, counted by building them, and who got which."""
    problem = federation.problem
    architecture, shape = problem.architecture, problem.input_shape
    whole = full_cost(architecture, shape)
    levels = tuple(_planned_level(federation, fleet, targets, index) for index in range(len(federation.levels)))
    everything = (
        submodel_cost(architecture, ({}, problem.exits), shape) if problem.exits[-1] == architecture.blocks else whole
    )
    heads = Cost(everything.parameters - whole.parameters, everything.multiply_adds - whole.multiply_adds)
    mode = "width" if all(level.depth == architecture.blocks for level in levels) else "both"
    mode = "depth" if mode == "both" and all(level.width == 1 for level in levels) else mode
    out = [f'{c} (group "{fleet.names[fleet.group[c]]}")' for c in np.flatnonzero(federation.level_of < 0)]
    return Plan(targets.cost, mode, architecture.blocks, levels, heads, tuple(out))


def _planned_level(federation: Federation, fleet: Fleet, targets: Targets, index: int) -> PlannedLevel:
    problem, level = federation.problem, federation.levels[index]
    architecture, shape = problem.architecture, problem.input_shape
    whole = full_cost(architecture, shape)
    is_full = level.width == 1 and level.submodel.depth == architecture.blocks
    counted = whole if is_full else submodel_cost(architecture, level.submodel, shape)
    grid = cost_grid(architecture, shape, targets.cost)
    share = 1.0 if is_full else grid.of(level.width, level.submodel.exits) / grid.full
    planned = len(targets.ratios) == len(federation.levels)  # a method may have levels of its own
    members = federation.level_of == index
    return PlannedLevel(
        level.name, level.submodel.depth, level.width, level.submodel.exits, counted.parameters, counted.multiply_adds,
        targets.ratios[index] if planned else share,
        targets.tolerances[index] if planned else float(fleet.tolerances.min()),
        share, int(members.sum()),
    )  # fmt: skip
