"""The search itself: depth first over the levels, best pair first, cut by a lower bound on what the rest adds.

The bound is the optimum of a relaxed problem, in which the shallower classifiers that a level carries may be any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fleetfit.cost import Grid
from fleetfit.planner.targets import Bools, Floats, Mode, Split, Targets

TINY = 1e-9
Key = tuple[float, float, int]  # sum of |s_d - s_w|, sum of |cost / target - 1|, minus the sum of depths
Pairs = tuple[tuple[int, int], ...]


def gap_of(grid: Grid) -> Floats:
    """Return |s_d - s_w| of every pair [P, W]."""
    gap: Floats = np.abs(np.array(grid.positions)[:, None] / grid.blocks - np.array(grid.widths))
    return gap


@dataclass
class Search:
    """One search; rows are positions, columns widths, levels the smaller ones (level L is the full model).

    Attributes:
        grid: Costs in the targets' cost.
        targets: What the levels should cost.
        mode: What is cut.
        depths: Exits of the smaller levels, where they are given.
        widths: Widths of the smaller levels, where they are given.
        further: The grid of each cost with ceilings.
        factors: By cost, what the estimate of each pair is multiplied by [P, W]; 1 where there is none.
        any_will_do: Stop at the first solution.
    """

    grid: Grid
    targets: Targets
    mode: Mode
    depths: Sequence[int] | None = None
    widths: Sequence[float] | None = None
    further: Mapping[str, Grid] = field(default_factory=dict)
    factors: Mapping[str, Floats] = field(default_factory=dict)
    any_will_do: bool = False
    key: Key = (np.inf, np.inf, 0)
    pairs: Pairs = ()

    def best(self) -> tuple[Split, ...] | None:
        """Return the splits, or None when nothing fits."""
        if np.isfinite(self._ahead[0].min()):
            self._descend([], -1, 0, (0.0, 0.0, 0))
        if not np.isfinite(self.key[0]):
            return None
        grid, found = self.grid, []
        exits: list[int] = []
        for row, column in self.pairs:
            exits = [grid.positions[row]] if self.mode == "width" else [*exits, grid.positions[row]]
            share = grid.of(grid.widths[column], exits) / grid.full
            if grid.cost in self.factors:
                share *= float(self.factors[grid.cost][row, column])
            found.append(Split(exits[-1], grid.widths[column], tuple(exits), share))
        last = (grid.blocks,) if self.mode == "width" else (*exits, grid.blocks)
        return (*found, Split(grid.blocks, 1.0, last, 1.0))

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
        fits[: row + 1 if self.mode != "width" else 0] = False
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

    # ---- what a level may cost ---------------------------------------------------------------------------------------

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
        """Return which pairs the mode and the given depths and widths leave to a level [P, W]."""
        rows = np.array(self.grid.positions)
        columns = np.array(self.grid.widths)
        row_ok = rows == self.grid.blocks if self.mode == "width" else rows < self.grid.blocks
        column_ok = columns == 1 if self.mode == "depth" else columns > 0
        if self.depths is not None:
            row_ok = row_ok & (rows == self.depths[level])
        if self.widths is not None:
            column_ok = column_ok & (np.abs(columns - self.widths[level]) < TINY)
        return row_ok[:, None] & column_ok

    # ---- what pairs cost ---------------------------------------------------------------------------------------------

    def _cost(self, grid: Grid, rows: Sequence[int] = ()) -> Floats:
        """Return the cost of every pair that carries classifiers at these rows [P, W]."""
        cost = self._own(grid)
        if rows and self.mode != "width":
            cost = cost + grid.heads[list(rows)].sum(0) / grid.full
        return cost * self.factors.get(grid.cost, 1.0)

    @staticmethod
    def _own(grid: Grid) -> Floats:
        """Return the cost of trunk and own classifier as a fraction of cost(M) [P, W]."""
        own: Floats = (grid.trunk + grid.heads) / grid.full
        return own

    @cached_property
    def _gap(self) -> Floats:
        """What Eq. 1 minimises [P, W]; nothing where only one dimension is free."""
        return gap_of(self.grid) if self.mode == "both" else np.zeros_like(self._own(self.grid))

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
            if level and self.mode != "width":  # strictly deeper than the level before
                value = np.vstack([value[1:], np.full((1, value.shape[1]), np.inf)])
            bounds.insert(0, value)
        return bounds

    def _shallower(self, level: int) -> tuple[Floats, Floats]:
        """Return the least and the most that `level` classifiers at shallower positions cost [P, W]."""
        heads = self.grid.heads / self.grid.full
        least, most = np.zeros_like(heads), np.zeros_like(heads)
        if self.mode == "width":
            return least, most
        for row in range(1, len(least)):
            before = np.sort(heads[:row], axis=0)
            least[row] = before[:level].sum(0)
            most[row] = before[max(0, row - level) :].sum(0)
        return least, most
