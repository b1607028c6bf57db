"""Budgets of clients become the levels' targets, and clients get their level (ScaleFL 3.1.1, Task 1)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetfit.errors import PlanError
from fleetfit.planner.targets import Floats, Ints, Targets

_MOST_LEVELS = 8
_SAMPLE = 1000  # clustering looks at so many quantiles of the budgets
_SLACK = 1e-9  # 1.1 * 0.125 must cover a level that costs 0.1375


def as_fractions(budgets: npt.ArrayLike, full: float) -> Floats:
    """Return budgets as fractions of cost(M): those up to 1 are fractions already, larger ones are absolute.

    Args:
        budgets: One per client.
        full: cost(M) in the budgets' unit.

    Raises:
        PlanError: A budget is not a positive finite number.
    """
    given = _checked(budgets)
    return np.where(given > 1, given / full, given)


def levels_of_budgets(
    budgets: npt.ArrayLike,
    how: str | Sequence[float] = "cluster",
    tolerances: npt.ArrayLike = 0.1,
    cost: str = "parameters",
    strict: bool = False,
) -> Targets:
    """Choose the number of levels, their target ratios r_l and their tolerances.

    Args:
        budgets: What each client affords, as a fraction of cost(M).
        how: "cluster": k-means on log budgets, L by silhouette (up to 8 distinct budgets: each is a level), r_l the
            smallest budget of the cluster, r_L = 1. "halving": 1, 1/2, 1/4, ... until the smallest client fits. Or the
            ratios themselves, ascending; the full model is added where it is missing.
        tolerances: epsilon_k of each client, or one for all; a level's is the smallest among its clients.
        cost: Name of the cost, passed on.
        strict: Passed on.

    Raises:
        PlanError: Budgets, tolerances or ratios that make no sense.
    """
    given = _checked(budgets)
    slack = np.broadcast_to(np.asarray(tolerances, dtype=np.float64), given.shape)
    if not (np.isfinite(slack) & (slack >= 0)).all():
        raise PlanError(f"a tolerance must be a number of at least 0, got {tolerances!r}.")
    if how == "cluster":
        ratios, member = _clustered(np.minimum(given, 1.0), slack)
    elif isinstance(how, str) and how != "halving":
        raise PlanError(f'levels must be "cluster", "halving" or a list of ratios, got "{how}".')
    else:
        ratios = _halved(float((given * (1 + slack)).min())) if isinstance(how, str) else _with_full(how)
        member = assign(given, slack, ratios)
    everybody = float(slack.min())
    smallest = [float(slack[member == level].min(initial=np.inf)) for level in range(len(ratios))]
    return Targets(ratios, tuple(t if math.isfinite(t) else everybody for t in smallest), cost, strict)


def assign(budgets: npt.ArrayLike, tolerances: npt.ArrayLike, level_costs: Sequence[float]) -> Ints:
    """Return each client's level [K]: the largest whose cost is at most (1 + epsilon_k) B_k; -1 under the smallest.

    Args:
        budgets: B_k of each client [K].
        tolerances: epsilon_k of each client [K], or one for all.
        level_costs: Cost of each level, in the budgets' unit, smallest level first.
    """
    limits = np.asarray(budgets, dtype=np.float64) * (1 + np.asarray(tolerances, dtype=np.float64)) * (1 + _SLACK)
    levels = np.full(limits.shape, -1, dtype=np.int64)
    for level, needed in enumerate(level_costs):
        levels[limits >= needed] = level
    return levels


def _checked(budgets: npt.ArrayLike) -> Floats:
    given = np.atleast_1d(np.asarray(budgets, dtype=np.float64))
    wrong = np.flatnonzero(~(np.isfinite(given) & (given > 0)))
    if not given.size:
        raise PlanError("there are no budgets: name at least one client or group.")
    if wrong.size:
        raise PlanError(f"a budget must be a number above 0, got {given[wrong[0]]} for client {wrong[0]}.")
    return given


def _with_full(ratios: Sequence[float]) -> tuple[float, ...]:
    found = tuple(float(r) for r in ratios)
    return found if found and found[-1] == 1 else (*found, 1.0)


def _halved(smallest: float) -> tuple[float, ...]:
    """Return 1, 1/2, 1/4, ... ascending, until the smallest client fits."""
    steps = max(0, math.ceil(-math.log2(smallest) - _SLACK))
    return tuple(0.5**i for i in range(min(steps, _MOST_LEVELS - 1), -1, -1))


def _clustered(budgets: Floats, slack: Floats) -> tuple[tuple[float, ...], Ints]:
    """Return the ratios and each client's cluster; the top one is the full model's if anybody affords it."""
    distinct = np.unique(budgets)
    edges = (distinct[1:] + distinct[:-1]) / 2 if len(distinct) <= _MOST_LEVELS else _edges(budgets)
    member: Ints = np.searchsorted(edges, budgets, side="right")
    floors = [float(budgets[member == c].min()) for c in range(len(edges) + 1)]
    if (budgets * (1 + slack) * (1 + _SLACK)).max() >= 1:
        floors[-1] = 1.0
    else:
        floors.append(1.0)
    return tuple(floors), member


def _edges(budgets: Floats) -> Floats:
    """Cluster log budgets by k-means and return the budgets halfway between neighbouring centres."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    points = np.sort(budgets)
    if len(points) > _SAMPLE:
        points = points[np.linspace(0, len(points) - 1, _SAMPLE).round().astype(np.int64)]
    logs = np.log(points)[:, None]
    best: tuple[float, Any] = (-np.inf, None)
    for count in range(2, min(_MOST_LEVELS, len(np.unique(points)) - 1) + 1):
        model = KMeans(count, n_init=10, random_state=0).fit(logs)
        score = float(silhouette_score(logs, model.labels_))
        if score > best[0] + _SLACK:
            best = (score, model)
    centres = np.sort(best[1].cluster_centers_.ravel())
    return np.asarray(np.exp((centres[1:] + centres[:-1]) / 2))
