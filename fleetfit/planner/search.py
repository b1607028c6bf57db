"""The grid search of ScaleFL Eq. 1 over depth and width, all levels together.

For each level l, (s_d, s_w) = argmin |s_d - s_w| subject to |cost(split(M; s_d, s_w)) / (r_l cost(M)) - 1| <=
epsilon_l, and where budgets name further costs, to each of them being at most (1 + epsilon_l) times the level's
ceiling. Depths are the positions of an architecture (s_d = position / blocks), widths go from 0.01 to 1 by 0.01.

The search is exact for costs that add up. Training memory and latency are estimated by parts; the levels that the
search returns are then counted or measured. Where one breaks a bound, each estimate is corrected by its error at the
nearest counted pair, and the search is repeated.

The bound is the optimum of a relaxed problem, in which the shallower classifiers that a level carries may be any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from fleetfit.anatomy import Architecture
from fleetfit.cost import Grid, cost_grid
from fleetfit.errors import PlanError, join_some
from fleetfit.planner.budgets import (
    Bools,
    Floats,
    LevelShape,
    Scaling,
    Targets,
)

# ---- depth first over the levels, best pair first, cut by a lower bound of the rest ---------------------------------

TINY = 1e-9
Key = tuple[float, float, int]  # sum of |s_d - s_w|, sum of |cost / target - 1|, minus the sum of depths
Pairs = tuple[tuple[int, int], ...]


@dataclass
class Search:
    """One search; rows are positions, columns widths, levels the smaller ones (level L is the full model).

    Attributes:
        grid: Costs in the targets' cost.
        targets: What the levels should cost.
        scaling: What is cut.
        depths: Exits of the smaller levels, where they are given.
        widths: Widths of the smaller levels, where they are given.
        further: The grid of each cost with ceilings.
        factors: By cost, what the estimate of each pair is multiplied by [P, W]; 1 where there is none.
        any_will_do: Stop at the first solution.
    """

    grid: Grid
    targets: Targets
    scaling: Scaling
    depths: Sequence[int] | None = None
    widths: Sequence[float] | None = None
    further: Mapping[str, Grid] = field(default_factory=dict)
    factors: Mapping[str, Floats] = field(default_factory=dict)
    any_will_do: bool = False
    key: Key = (np.inf, np.inf, 0)
    pairs: Pairs = ()

    def best(self) -> tuple[LevelShape, ...] | None:
        """Return the splits, or None when nothing fits."""
        if np.isfinite(self._ahead[0].min()):
            self._descend([], -1, 0, (0.0, 0.0, 0))
        if not np.isfinite(self.key[0]):
            return None
        grid, splits = self.grid, []
        exits: list[int] = []
        for row, column in self.pairs:
            exits = [grid.positions[row]] if self.scaling == "width" else [*exits, grid.positions[row]]
            share = grid.estimate(grid.widths[column], exits) / grid.full
            if grid.cost in self.factors:
                share *= float(self.factors[grid.cost][row, column])
            splits.append(LevelShape(exits[-1], grid.widths[column], tuple(exits), share))
        last = (grid.blocks,) if self.scaling == "width" else (*exits, grid.blocks)
        return (*splits, LevelShape(grid.blocks, 1.0, last, 1.0))

    def _descend(self, rows: list[int], row: int, column: int, key: Key, pairs: Pairs = ()) -> None:
        """Try every pair of the next level that can still beat the best key."""
        level = len(pairs)
        if level == len(self.targets.ratios) - 1:
            key = (round(key[0], 9), round(key[1], 9), key[2])  # ties are ties, whatever the last bits say
            if (key, *zip(*pairs, strict=True)) < (self.key, *zip(*self.pairs, strict=True)):
                self.key, self.pairs = key, pairs
            return
        cost = self._cost(self.grid, rows)
        low, high = self.bounds(level)
        fits = self._allowed(level) & (cost >= low) & (cost <= high) & self._under(level, rows)
        fits[: row + 1 if self.scaling != "width" else 0] = False
        fits[:, :column] = False
        p, w = np.nonzero(fits)
        total = self._gap[p, w] + self._ahead[level + 1][p, w]
        off = np.abs(cost[p, w] / self.targets.ratios[level] - 1)
        for i in np.lexsort((-p, off, total.round(9))):
            if not key[0] + total[i] <= self.key[0] + TINY or (self.any_will_do and np.isfinite(self.key[0])):
                break
            r, c = int(p[i]), int(w[i])
            so_far = (key[0] + float(self._gap[r, c]), key[1] + float(off[i]), key[2] - self.grid.positions[r])
            self._descend([*rows, r], r, c, so_far, (*pairs, (r, c)))

    # ---- bounds of a level's cost ------------------------------------------------------------------------------------

    def bounds(self, level: int) -> tuple[float, float]:
        """Return the least and the most that a level may cost, as fractions of cost(M)."""
        if self.depths is not None and self.widths is not None:
            return 0.0, np.inf
        ratio, tolerance = self.targets.ratios[level], self.targets.tolerances[level]
        high = ratio if self.targets.strict else ratio * (1 + tolerance)
        return ratio * (1 - tolerance) - TINY, high + TINY

    def limit(self, cost: str, level: int) -> float:
        """Return the most that a level may cost in a further cost, as a fraction of cost(M)."""
        if self.depths is not None and self.widths is not None:
            return np.inf
        tolerance = 0.0 if self.targets.strict else self.targets.tolerances[level]
        return self.targets.ceilings[cost][level] * (1 + tolerance) + TINY

    def _under(self, level: int, rows: Sequence[int] = ()) -> Bools:
        """Return which pairs are under every ceiling of a level that carries classifiers at these rows [P, W]."""
        under = np.ones_like(self._own(self.grid), dtype=np.bool_)
        for cost, grid in self.further.items():
            under &= self._cost(grid, rows) <= self.limit(cost, level)
        return under

    def _allowed(self, level: int) -> Bools:
        """Return which pairs the scaling and the given depths and widths leave to a level [P, W]."""
        rows = np.array(self.grid.positions)
        columns = np.array(self.grid.widths)
        row_ok = rows == self.grid.blocks if self.scaling == "width" else rows < self.grid.blocks
        column_ok = columns == 1 if self.scaling == "depth" else columns > 0
        if self.depths is not None:
            row_ok = row_ok & (rows == self.depths[level])
        if self.widths is not None:
            column_ok = column_ok & (np.abs(columns - self.widths[level]) < TINY)
        return row_ok[:, None] & column_ok

    # ---- costs of pairs ----------------------------------------------------------------------------------------------

    def _cost(self, grid: Grid, rows: Sequence[int] = ()) -> Floats:
        """Return the cost of every pair that carries classifiers at these rows [P, W]."""
        cost = self._own(grid)
        if rows and self.scaling != "width":
            cost = cost + grid.heads[list(rows)].sum(0) / grid.full
        return cost * self.factors.get(grid.cost, 1.0)

    @staticmethod
    def _own(grid: Grid) -> Floats:
        """Return the cost of trunk and own classifier as a fraction of cost(M) [P, W]."""
        return (grid.trunk + grid.heads) / grid.full

    @cached_property
    def _gap(self) -> Floats:
        """What Eq. 1 minimizes [P, W]; nothing where only one dimension is free."""
        if self.scaling != "both":
            return np.zeros_like(self._own(self.grid))
        return np.abs(np.array(self.grid.positions)[:, None] / self.grid.blocks - np.array(self.grid.widths))

    @cached_property
    def _ahead(self) -> list[Floats]:
        """Lower bound of what levels l and later add, seen from level l-1's pair [P, W]; entry 0: from the start."""
        levels = len(self.targets.ratios) - 1
        bounds = [np.zeros_like(self._gap)]
        for level in range(levels - 1, -1, -1):
            least, most = (heads * self.factors.get(self.grid.cost, 1.0) for heads in self._shallower(level))
            low, high = self.bounds(level)
            own = self._cost(self.grid)
            possible = self._allowed(level) & (own + most >= low) & (own + least <= high) & self._under(level)
            value = np.where(possible, self._gap + bounds[0], np.inf)
            value = np.minimum.accumulate(value[::-1, ::-1], axis=0)[::-1, ::-1]
            value = np.minimum.accumulate(value[:, ::-1], axis=1)[:, ::-1]
            if level and self.scaling != "width":  # strictly deeper than the level before
                value = np.vstack([value[1:], np.full((1, value.shape[1]), np.inf)])
            bounds.insert(0, value)
        return bounds

    def _shallower(self, level: int) -> tuple[Floats, Floats]:
        """Return the least and the most that `level` classifiers at shallower positions cost [P, W]."""
        heads = self.grid.heads / self.grid.full
        least, most = np.zeros_like(heads), np.zeros_like(heads)
        if self.scaling == "width":
            return least, most
        for row in range(1, len(least)):
            before = np.sort(heads[:row], axis=0)
            least[row] = before[:level].sum(0)
            most[row] = before[max(0, row - level) :].sum(0)
        return least, most


# ---- all levels together -------------------------------------------------------------------------------------------

_ATTEMPTS = 8
_LISTED = 6  # shares in an error
_TINY_SHARE = 1e-3  # who means a share does not mean so little


def make_grids(
    architecture: Architecture, input_shape: Sequence[int], targets: Targets
) -> tuple[Grid, dict[str, Grid]]:
    """Return the costs of all depths and widths in the targets' cost, and in each cost with ceilings."""
    costs = (targets.cost, *targets.ceilings)
    grid, *others = (cost_grid(architecture, input_shape, cost, targets.conditions) for cost in costs)
    return grid, dict(zip(targets.ceilings, others, strict=True))


def search(
    grid: Grid,
    targets: Targets,
    scaling: Scaling = "both",
    depths: Sequence[int] | None = None,
    widths: Sequence[float] | None = None,
    further: Mapping[str, Grid] | None = None,
) -> tuple[LevelShape, ...]:
    """Return the split of each level, smallest first; the last is the full model with every level's exit.

    Args:
        grid: Costs of all depths and widths.
        targets: Target ratio, tolerance and ceilings of each level.
        scaling: "both": Eq. 1. "width": full depth, one exit, the width with the nearest cost. "depth": width 1, the
            depths with the nearest costs.
        depths: Exits of the smaller levels, where they are given.
        widths: Widths of the smaller levels, where they are given. With both given, targets are not asked.
        further: The grid of each cost with ceilings; see `make_grids`.

    Raises:
        PlanError: Nothing fits; the message names the nearest pairs, and what would admit them.
    """
    others = dict(further or {})
    if scaling not in ("both", "width", "depth"):
        raise PlanError(f'scaling must be "both", "width" or "depth", got {scaling!r}.', key="scaling")
    smaller = len(targets.ratios) - 1
    for name, values in (("depths", depths), ("widths", widths)):
        if values is not None and len(values) != smaller:
            raise PlanError(f"{len(targets.ratios)} levels need {smaller} {name} (the last level is the full model), "
                            f"got {len(values)}.", key=name)  # fmt: skip
    _check_shapes(grid, depths, widths)
    query = Search(grid, targets, scaling, depths, widths, others)
    splits = _find_splits(query)
    if splits is None:
        raise _explain(query) if _restart(query, any_will_do=True).best() is None else _explain_measured(query)
    return splits


def _find_splits(query: Search) -> tuple[LevelShape, ...] | None:
    """Search until the levels are within their bounds when they are counted; None: nothing fits."""
    grid, others = query.grid, query.further
    seen: list[LevelShape] = []
    for _ in range(_ATTEMPTS):
        estimated = query.best()
        if estimated is None:
            return None
        counted = tuple(_count_split(split, grid, others) for split in estimated)
        if all(_is_within_bounds(query, level, split) for level, split in enumerate(counted[:-1])):
            return counted
        seen += counted[:-1]  # level L costs cost(M), without the early heads that its estimate has
        factors = {g.cost: _corrections(g, g is grid, seen) for g in (grid, *others.values()) if g.measure is not None}
        query = _restart(query, factors=factors)
    return None


def _restart(query: Search, **changes: Any) -> Search:
    """Return a search without a result, with some of its attributes changed."""
    return replace(query, key=(np.inf, np.inf, 0), pairs=(), **changes)


def _check_shapes(grid: Grid, depths: Sequence[int] | None, widths: Sequence[float] | None) -> None:
    allowed = [p for p in grid.positions if p < grid.blocks]
    if depths is not None and (list(depths) != sorted(set(depths)) or any(d not in allowed for d in depths)):
        raise PlanError(
            f"depths of the smaller levels must grow strictly and be among {allowed}, got {list(depths)}.", key="depths"
        )
    if widths is not None and (
        list(widths) != sorted(widths) or any(min(abs(w - other) for other in grid.widths) > TINY for w in widths)
    ):
        raise PlanError(
            f"widths must not shrink from level to level and go by 0.01 up to 1, got {list(widths)}.", key="widths"
        )


# ---- estimates -----------------------------------------------------------------------------------------------------


def _count_split(split: LevelShape, grid: Grid, further: Mapping[str, Grid]) -> LevelShape:
    """Return a split with its costs themselves; level L costs cost(M)."""

    def share(costs: Grid) -> float:
        whole = split.depth == grid.blocks and split.width == 1
        return 1.0 if whole else costs.compute(split.width, split.exits) / costs.full

    return replace(split, share=share(grid), further={cost: share(costs) for cost, costs in further.items()})


def _is_within_bounds(query: Search, level: int, split: LevelShape) -> bool:
    """Return whether a level is within its bounds; where costs add up, the search has ensured it."""
    low, high = query.bounds(level)
    is_within = query.grid.measure is None or low <= split.share <= high
    return is_within and all(
        split.further[cost] <= query.limit(cost, level)
        for cost, grid in query.further.items()
        if grid.measure is not None
    )


def _corrections(grid: Grid, primary: bool, seen: Sequence[LevelShape]) -> Floats:
    """Return the ratio of cost to estimate at the counted pair that is nearest to each pair [P, W]."""
    widths, depths = np.array(grid.widths), np.array(grid.positions)[:, None] / grid.blocks
    ratios = [
        (split.share if primary else split.further[grid.cost]) * grid.full / grid.estimate(split.width, split.exits)
        for split in seen
    ]
    distances = [np.abs(depths - split.depth / grid.blocks) + np.abs(widths - split.width) for split in reversed(seen)]
    return np.array(ratios)[::-1][np.argmin(distances, axis=0)]


# ---- when nothing fits ---------------------------------------------------------------------------------------------


def _explain(query: Search) -> PlanError:
    """Return an error that names the tolerance, scaling or budgets with which levels fit; each was tried."""
    grid, targets, scaling = query.grid, query.targets, query.scaling
    smaller = len(targets.ratios) - 1
    ratios = ", ".join(f"{r:.3g}" for r in targets.ratios[:-1])
    words = {"width": "widths", "depth": "depths"}
    start = f"no {words.get(scaling, 'depths and widths')} cost {ratios}"
    start += f" of the model within the levels' tolerances ({', '.join(f'{t:.3g}' for t in targets.tolerances[:-1])})"
    for cost, ceilings in targets.ceilings.items():
        start += f" and at most {', '.join(f'{c:.3g}' for c in ceilings[:-1])} of its {cost}"
    if grid.estimate(grid.widths[0], (grid.positions[0],)) >= grid.full:
        return PlanError(
            "no part of the model can be cut, so no level is smaller than it. Train it whole on every device that can: "
            "fleet.groups = [{ budget = 1.0 }]."
        )
    unbounded = _restart(query, further={}).best() if targets.ceilings else None
    if unbounded is not None:
        return _explain_ceilings(query, unbounded, start)
    free = query.depths is None and query.widths is None
    cut = (
        "width"
        if scaling != "width" and free and _find_splits(_restart(query, scaling="width", any_will_do=True))
        else None
    )
    otherwise = (
        ' Levels that differ in width alone fit: --scaling width of fleetfit plan, fleet.scaling = "width" in a run '
        "file, or a method that cuts width, such as heterofl."
    )
    depths = sum(p < grid.blocks for p in grid.positions)
    if scaling != "width" and smaller > depths:
        reason = f"{start}: {smaller} smaller levels need as many different depths, and the model has {depths}."
        return PlanError(reason + (otherwise if cut else f" Plan at most {depths + 1} levels."), scaling=cut)
    percent = _least_tolerance(query)
    hint = ""
    if targets.ratios[0] < _TINY_SHARE:
        hint = f" The smallest budget is {targets.ratios[0] * grid.full:.4g} of the full model's {grid.full:.6g} "
        hint += f"{grid.cost}: a budget above 1 is an amount, not a share."
    if percent is None:
        remedy = otherwise if cut else f" {_describe_shares(grid)} Choose other budgets, or fewer levels."
        return PlanError(f"{start}, and no tolerance up to 1 would help.{remedy}{hint}", scaling=cut)
    nearest = _format_splits(_widen(query, percent).best() or (), grid, targets)
    reason = f"{start}. The nearest: {nearest}. A tolerance of {percent / 100:.2f} would admit them."
    return PlanError(reason + (otherwise if cut else "") + hint, percent / 100, cut)


def _describe_shares(grid: Grid) -> str:
    """Return a sentence on the shares of the full model's cost that sub-models have."""
    narrowest = grid.widths[0]
    by_depth = [grid.estimate(1.0, (p,)) / grid.full for p in grid.positions if p < grid.blocks]
    by_width = grid.estimate(narrowest, (grid.blocks,)) / grid.full
    least = min(grid.estimate(narrowest, (p,)) / grid.full for p in grid.positions)
    parts = [f"whole blocks cost {join_some([f'{share:.3g}' for share in by_depth], _LISTED)}"] * bool(by_depth)
    parts += [f"all blocks {by_width:.3g} at the narrowest", f"no sub-model less than {least:.3g}"]
    return f"Of the model's {grid.cost}, {'; '.join(parts)}."


def _widen(query: Search, percent: int, any_will_do: bool = False) -> Search:
    targets = query.targets
    wider = replace(targets, tolerances=tuple(max(t, percent / 100) for t in targets.tolerances))
    return _restart(query, targets=wider, any_will_do=any_will_do)


def _least_tolerance(query: Search) -> int | None:
    """Return the least tolerance, in percent, with which levels fit; None: none up to 1 does."""
    low, high = int(100 * min(query.targets.tolerances)), 100
    if _widen(query, high, any_will_do=True).best() is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _widen(query, middle, any_will_do=True).best() else (middle, high)
    if query.grid.measure is None:
        return high
    return next((percent for percent in range(high, 101) if _find_splits(_widen(query, percent))), None)


def _explain_measured(query: Search) -> PlanError:
    """Return an error that names a tolerance, where the levels' costs differ from their estimates by parts."""
    low = 100 * min(query.targets.tolerances)
    percent = next((p for p in (5, 10, 20, 40, 80, 100) if p > low and _find_splits(_widen(query, p))), None)
    costs = " and ".join(grid.cost for grid in (query.grid, *query.further.values()) if grid.measure)
    reason = f"the levels' {costs} differed from their estimates in {_ATTEMPTS} searches"
    if percent is None:
        return PlanError(f"{reason}, and no tolerance up to 1 helps: plan in another cost, or fewer levels.")
    return PlanError(f"{reason}. A tolerance of {percent / 100:.2f} would admit some.", percent / 100)


def _explain_ceilings(query: Search, splits: Sequence[LevelShape], start: str) -> PlanError:
    """Return an error that names the further budgets with which the levels fit."""
    grid, targets = query.grid, query.targets
    counted = [_count_split(split, grid, query.further) for split in splits]
    needed = {
        cost: tuple(
            max(c, float(np.ceil(split.further[cost] * 1000 - TINY) / 1000))  # three digits, as the message has them
            for c, split in zip(targets.ceilings[cost], counted, strict=True)
        )
        for cost in targets.ceilings
    }
    raised = "; ".join(f"{cost} {', '.join(f'{c:.3f}' for c in needed[cost][:-1])}" for cost in needed)
    return PlanError(
        f"{start}. The budgets of {' and '.join(targets.ceilings)} are too small for those of {targets.cost}, "
        f"for which these would do: {_format_splits(splits, grid, targets)}. Raise them, as shares of the full "
        f"model's, to: {raised}.",
        ceilings=needed,
    )


def _format_splits(splits: Sequence[LevelShape], grid: Grid, targets: Targets) -> str:
    return "; ".join(
        f"level {i + 1}: {s.depth} of {grid.blocks} blocks at width {s.width:.2f} costs {s.share:.3f} for {r:.3g}"
        for i, (s, r) in enumerate(zip(splits[:-1], targets.ratios[:-1], strict=False))
    )
