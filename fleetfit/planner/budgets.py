"""Turn budgets of clients into the levels' targets, and assign levels to clients (ScaleFL 3.1.1, Task 1)."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fleetfit.cost import COSTS, Conditions
from fleetfit.errors import PlanError, did_you_mean

# ---- targets and shapes of levels: the values between the planner's two tasks ---------------------------------------

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Scaling = Literal["both", "width", "depth", "depth_first", "auto"]
KEPT = "kept"
"""`Targets.fixed` of levels that a run has trained."""


@dataclass(frozen=True)
class LevelShape:
    """One level's sub-model.

    Attributes:
        depth: Blocks kept; its own exit sits after them.
        width: Fraction of the channels kept (s_w); with `widths`, the mean over the axes that the depth has.
        exits: Its exits, shallow to deep, the shallower levels' included.
        share: Its cost as a fraction of cost(M).
        further: The same of each further cost that budgets name.
        needs: What a client must afford for it, where that is not its cost.
        widths: Fraction kept of each axis, where they differ; axes not named are whole. Empty: `width` cuts all axes.
        name: Its number in a run whose levels changed; empty: its position.
    """

    depth: int
    width: float
    exits: tuple[int, ...]
    share: float
    further: Mapping[str, float] = field(default_factory=dict, hash=False)
    needs: float | None = None
    widths: Mapping[str, float] = field(default_factory=dict, hash=False)
    name: str = ""


@dataclass(frozen=True)
class Targets:
    """Target costs of the levels.

    Attributes:
        ratios: r_l of each level, ascending, as a fraction of cost(M); the last is 1.
        tolerances: epsilon_l of each level: how far its cost may be from its target, as a fraction of it.
        cost: Name of the cost that the budgets are meant in.
        strict: Admit only costs at or under the target, and at or under the ceilings.
        splits: The levels themselves where they are fixed (a saved plan); empty: search for them.
        fixed: How `splits` cut the model; `KEPT` for the levels of a run that continues with others, which any method
            keeps.
        ceilings: Each further cost that budgets name: the most that each level may cost, as a fraction of cost(M); a
            level may exceed it by its tolerance. Infinite where no client of the level names the cost.
        conditions: Under which costs are counted.
        scaling: The scaling of the levels that the run asks for (`fleet.scaling`); "": the method's.
    """

    ratios: tuple[float, ...]
    tolerances: tuple[float, ...]
    cost: str = "parameters"
    strict: bool = False
    splits: tuple[LevelShape, ...] = ()
    fixed: str = "both"
    ceilings: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    conditions: Conditions = field(default_factory=Conditions)
    scaling: Scaling | Literal[""] = ""

    def __post_init__(self) -> None:
        ratios = self.ratios
        if not ratios or ratios[-1] != 1 or min(ratios) <= 0 or list(ratios) != sorted(set(ratios)):
            raise PlanError(
                f"target ratios must be above 0, strictly ascending, and end with 1, got {list(ratios)}.", key="ratios"
            )
        if len(self.tolerances) != len(ratios) or any(not math.isfinite(t) or t < 0 for t in self.tolerances):
            raise PlanError(
                f"each of the {len(ratios)} levels needs a tolerance of at least 0, got {self.tolerances}.",
                key="tolerances",
            )
        for cost, most in self.ceilings.items():
            if len(most) != len(ratios) or not all(ceiling > 0 for ceiling in most):
                raise PlanError(
                    f"each of the {len(ratios)} levels needs a ceiling above 0 of {cost}, got {most}.", key="ceilings"
                )


def make_fixed_targets(
    depths: Sequence[int],
    widths: Sequence[float | Mapping[str, float]],
    budgets: Sequence[float],
    cost: str = "parameters",
    tolerance: float = 0.0,
    further: Iterable[str] = (),
    conditions: Conditions | None = None,
) -> Targets:
    """Return targets of fixed levels, each with the budget that a client needs for it.

    Args:
        depths: Blocks of each level, smallest first; the last is the full depth.
        widths: Fraction of the channels of each; by axis where they differ, and axes not named are whole.
        budgets: The budget for each, as a fraction of the full model's cost; the last is 1.
        cost: Name of the budgets' cost.
        tolerance: epsilon of every level.
        further: Further costs that budgets name; they do not limit fixed levels.
        conditions: Under which costs are counted.

    Raises:
        PlanError: They do not grow from level to level up to the full model.
    """
    blocks = depths[-1]
    by_axis = [dict(width) if isinstance(width, Mapping) else {} for width in widths]
    uniform = [1.0 if isinstance(width, Mapping) else width for width in widths]
    scaling: Scaling = "width" if set(depths) == {blocks} else "depth_first" if any(by_axis) else "both"
    scaling = "depth" if set(uniform) == {1.0} and not any(by_axis) else scaling
    # levels with a width per axis may differ in width alone at some depths
    grows = list(depths) == sorted(depths if scaling in ("width", "depth_first") else set(depths))
    is_full = (uniform[-1], budgets[-1]) == (1.0, 1.0) and all(width == 1 for width in by_axis[-1].values())
    if not grows or list(uniform) != sorted(uniform) or not is_full:
        raise PlanError(
            "depth grows and width does not shrink from level to level, and the last one is the full model with a "
            f"budget of 1; got depths {list(depths)}, widths {list(widths)} and budgets {list(budgets)}.",
            key="levels",
        )
    splits = tuple(
        LevelShape(
            depth, width, (blocks,) if scaling == "width" else tuple(sorted(set(depths[: i + 1]))), budget,
            needs=budget, widths=axes,
        )
        for i, (depth, width, budget, axes) in enumerate(zip(depths, uniform, budgets, by_axis, strict=True))
    )  # fmt: skip
    none = dict.fromkeys(further, (math.inf,) * len(splits))
    return Targets(tuple(budgets), (tolerance,) * len(splits), cost, splits=splits, fixed=scaling, ceilings=none,
                   conditions=conditions or Conditions())  # fmt: skip


# ---- tasks of the planner ------------------------------------------------------------------------------------------

Amount = float | str
"""A number up to 1 is a fraction of cost(M), a larger one and text with a unit ("20 ms") are absolute."""
Budget = Amount | Mapping[str, Amount]
"""A device's budget: in the fleet's cost, or in several costs by name."""

_MAX_LEVELS = 8
_SAMPLE = 1000  # quantiles of the budgets that are clustered
_SLACK = 1e-9  # 1.1 * 0.125 must cover a level that costs 0.1375
_UNITS = {
    "_s": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "_bytes": {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9},
    "": {"K": 1e3, "M": 1e6, "G": 1e9},
}


# ---- budgets as users write them -----------------------------------------------------------------------------------


def as_fractions(budgets: npt.ArrayLike, full: float) -> Floats:
    """Return budgets as fractions of cost(M): those up to 1 are fractions already, larger ones are absolute.

    Args:
        budgets: One per client.
        full: cost(M) in the budgets' unit.

    Raises:
        PlanError: A budget is not a positive finite number.
    """
    values = _check_budgets(budgets)
    return np.where(values > 1, values / full, values)


def convert_budgets(budgets: Sequence[Budget], cost: str, full: Callable[[str], float]) -> dict[str, Floats]:
    """Return the budget of each client in each cost that a budget names, as fractions of cost(M) [K].

    Args:
        budgets: One per client.
        cost: The cost of plain numbers, which every budget must name. It comes first.
        full: cost(M) in a cost.

    Returns:
        By cost; infinite where a client's budget does not name a further cost.

    Raises:
        PlanError: A budget makes no sense, or does not name `cost`.
    """
    tables = [dict(b) if isinstance(b, Mapping) else {cost: b} for b in budgets]
    for index, budget in enumerate(tables):
        if cost not in budget:
            raise PlanError(
                f"budget #{index + 1} names {', '.join(budget) or 'nothing'}, and must name {cost} too, which the "
                f"levels are planned in; {cost} = 1.0 is no limit.",
                key="budgets",
            )
    by_cost = {}
    for name in dict.fromkeys([cost, *(name for budget in tables for name in budget)]):
        whole = full(name)
        amounts = [budget.get(name, math.inf) for budget in tables]
        numbers = [parse_amount(a, name) / whole if isinstance(a, str) else float(a) for a in amounts]
        finite = np.array([1.0 if n == math.inf else n for n in numbers])  # infinite ones are checked as 1
        are_fractions = np.array([isinstance(a, str) for a in amounts])
        by_cost[name] = np.where(are_fractions, finite, as_fractions(finite, whole))
        by_cost[name][np.isinf(numbers)] = math.inf
    return by_cost


def find_budget_error(budget: Budget, cost: str) -> str:
    """Return the error of a budget that shows without the model, or "".

    Args:
        budget: A user's budget of a device.
        cost: The cost of plain numbers, which every budget must name.
    """
    unknown = [name for name in budget if name not in COSTS] if isinstance(budget, Mapping) else []
    if unknown:
        return f'"{unknown[0]}" is no cost; there are {", ".join(COSTS)}.{did_you_mean(unknown[0], COSTS)}'
    try:
        convert_budgets([budget], cost, lambda name: 1e12)
    except (PlanError, OverflowError) as error:
        return str(error).replace("budget #1", "its budget")
    return ""


def parse_amount(text: str, cost: str) -> float:
    """Return an amount with a unit in the unit of a cost: "20 ms" of latency_s is 0.02.

    Raises:
        PlanError: The text is no such amount.
    """
    units = next(table for ending, table in _UNITS.items() if cost.endswith(ending))
    matched = re.fullmatch(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    if matched is not None and matched[2] in units:
        return float(matched[1]) * units[matched[2]]
    example = f"20 {list(units)[1]}"
    raise PlanError(f'a budget of {cost} is a number, or text with a unit ({", ".join(units)}) such as "{example}"; '
                    f'got "{text}".', key="budget")  # fmt: skip


# ---- levels --------------------------------------------------------------------------------------------------------


def make_targets(
    budgets: npt.ArrayLike,
    how: str | Sequence[float] = "cluster",
    tolerances: npt.ArrayLike = 0.1,
    cost: str = "parameters",
    strict: bool = False,
    further: Mapping[str, npt.ArrayLike] | None = None,
    conditions: Conditions | None = None,
) -> Targets:
    """Choose the number of levels, their target ratios r_l, their tolerances, and their ceilings in further costs.

    Args:
        budgets: Budget of each client, as a fraction of cost(M).
        how: "cluster": k-means on log budgets, L by silhouette (up to 8 distinct budgets: each is a level), r_l the
            smallest budget of the cluster, r_L = 1. "halving": 1, 1/2, 1/4, ... until the smallest client fits. Or the
            ratios themselves, ascending; the full model is added where it is missing.
        tolerances: epsilon_k of each client, or one for all; a level's is the smallest among its clients.
        cost: Name of the cost, passed on.
        strict: Passed on.
        further: Budgets in further costs, as fractions; a level's ceiling is the smallest among its clients.
        conditions: Passed on.

    Raises:
        PlanError: Budgets, tolerances or ratios that make no sense.
    """
    values = _check_budgets(budgets)
    slack = np.broadcast_to(np.asarray(tolerances, dtype=np.float64), values.shape)
    if not (np.isfinite(slack) & (slack >= 0)).all():
        raise PlanError(f"a tolerance must be a number of at least 0, got {tolerances!r}.", key="tolerance")
    others = {name: np.asarray(budget, dtype=np.float64) for name, budget in (further or {}).items()}
    if how == "cluster":
        whole = np.logical_and.reduce([affords(budget, slack, 1.0) for budget in (values, *others.values())])
        ratios, members = _cluster(np.minimum(values, 1.0), bool(whole.any()))
    elif isinstance(how, str) and how != "halving":
        raise PlanError(f'levels must be "cluster", "halving" or a list of ratios, got "{how}".', key="levels")
    else:
        if isinstance(how, str):  # 1, 1/2, 1/4, ... ascending, until the smallest client fits
            halvings = max(0, math.ceil(-math.log2(float((values * (1 + slack)).min())) - _SLACK))
            ratios = tuple(0.5**i for i in range(min(halvings, _MAX_LEVELS - 1), -1, -1))
        else:
            ratios = tuple(float(r) for r in how)
            ratios = ratios if ratios and ratios[-1] == 1 else (*ratios, 1.0)
        members = assign(values, slack, ratios)

    def find_smallest(numbers: Floats) -> list[float]:
        return [float(numbers[members == level].min(initial=np.inf)) for level in range(len(ratios))]

    least = float(slack.min())
    epsilons = tuple(t if math.isfinite(t) else least for t in find_smallest(slack))
    ceilings = {name: tuple(find_smallest(budget)) for name, budget in others.items()}
    return Targets(ratios, epsilons, cost, strict, ceilings=ceilings, conditions=conditions or Conditions())


def affords(budgets: npt.ArrayLike, tolerances: npt.ArrayLike, needed: float) -> Bools:
    """Return whether each client affords a cost [K]: needed <= (1 + epsilon_k) B_k."""
    limits = np.asarray(budgets, dtype=np.float64) * (1 + np.asarray(tolerances, dtype=np.float64)) * (1 + _SLACK)
    return np.asarray(limits >= needed)


def assign(
    budgets: npt.ArrayLike,
    tolerances: npt.ArrayLike,
    level_costs: Sequence[float],
    further: Sequence[tuple[npt.ArrayLike, Sequence[float]]] = (),
) -> Ints:
    """Return each client's level [K]: the largest whose every cost is at most (1 + epsilon_k) B_k; -1 where none is.

    Args:
        budgets: B_k of each client [K].
        tolerances: epsilon_k of each client [K], or one for all.
        level_costs: Cost of each level, in the budgets' unit, smallest level first.
        further: Budgets and level costs of each further cost.
    """
    levels = np.full(np.shape(budgets), -1, dtype=np.int64)
    for level, needed in enumerate(level_costs):
        fits = affords(budgets, tolerances, needed)
        for further_budgets, costs in further:
            fits = fits & affords(further_budgets, tolerances, costs[level])
        levels[fits] = level
    return levels


def _check_budgets(budgets: npt.ArrayLike) -> Floats:
    values = np.atleast_1d(np.asarray(budgets, dtype=np.float64))
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if not values.size:
        raise PlanError("there are no budgets: name at least one client or group.", key="budgets")
    if wrong.size:
        raise PlanError(
            f"a budget must be a number above 0, got {values[wrong[0]]} for client {wrong[0]}.", key="budgets"
        )
    return values


def _cluster(budgets: Floats, whole: bool) -> tuple[tuple[float, ...], Ints]:
    """Return the ratios and each client's cluster; the top one is the full model's if a client affords it."""
    distinct = np.unique(budgets)
    edges = (distinct[1:] + distinct[:-1]) / 2 if len(distinct) <= _MAX_LEVELS else _find_edges(budgets)
    members: Ints = np.searchsorted(edges, budgets, side="right")
    floors = [float(budgets[members == c].min()) for c in range(len(edges) + 1)]
    if whole or floors[-1] == 1:
        floors[-1] = 1.0
    else:
        floors.append(1.0)
    return tuple(floors), members


def _find_edges(budgets: Floats) -> Floats:
    """Cluster log budgets by k-means and return the budgets halfway between neighboring centers."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    points = np.sort(budgets)
    if len(points) > _SAMPLE:
        points = points[np.linspace(0, len(points) - 1, _SAMPLE).round().astype(np.int64)]
    distinct = np.log(np.unique(points))
    if len(distinct) <= 2:  # other budgets are too rare to be in the sample
        return np.asarray(np.exp((distinct[1:] + distinct[:-1]) / 2))
    logs = np.log(points)[:, None]
    best: tuple[float, Any] = (-np.inf, None)
    for count in range(2, min(_MAX_LEVELS, len(distinct) - 1) + 1):
        model = KMeans(count, n_init=10, random_state=0).fit(logs)
        score = float(silhouette_score(logs, model.labels_))
        if score > best[0] + _SLACK:
            best = (score, model)
    centers = np.sort(best[1].cluster_centers_.ravel())
    return np.asarray(np.exp((centers[1:] + centers[:-1]) / 2))
