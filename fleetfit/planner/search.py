"""The grid search of ScaleFL Eq. 1 over depth and width, all levels together.

For each level l, (s_d, s_w) = argmin |s_d - s_w| subject to |cost(split(M; s_d, s_w)) / (r_l cost(M)) - 1| <=
epsilon_l. Depths are the positions of an architecture (s_d = position / blocks), widths go from 0.01 to 1 by 0.01.

The search is exact: depth first over the levels, best pair first, cut by a lower bound on what the remaining levels
add. The bound is the optimum of a relaxed problem, in which the shallower classifiers that a level carries may be any.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fleetfit.cost import Grid
from fleetfit.errors import PlanError
from fleetfit.planner.targets import Floats, Mode, Split, Targets

_TINY = 1e-9


def search(
    grid: Grid,
    targets: Targets,
    mode: Mode = "both",
    depths: Sequence[int] | None = None,
    widths: Sequence[float] | None = None,
) -> tuple[Split, ...]:
    """Return the split of each level, smallest first; the last is the full model with every level's exit.

    Args:
        grid: Costs of all depths and widths.
        targets: Target ratio and tolerance of each level, or its splits where a saved plan settles them.
        mode: "both": Eq. 1. "width": full depth, one exit, the width with the nearest cost. "depth": width 1, the
            depths with the nearest costs.
        depths: Exits of the smaller levels, where they are given.
        widths: Widths of the smaller levels, where they are given. With both given, targets are not asked.

    Raises:
        PlanError: Nothing fits; the message names the nearest pairs and the tolerance that would admit them.
    """
    if targets.splits and targets.mode == mode:
        return _settled(grid, targets)
    if mode not in ("both", "width", "depth"):
        raise PlanError(f'a split must be "both", "width" or "depth", got {mode!r}.')
    smaller = len(targets.ratios) - 1
    for name, given in (("depths", depths), ("widths", widths)):
        if given is not None and len(given) != smaller:
            raise PlanError(f"{len(targets.ratios)} levels need {smaller} {name} (the last level is the full model), "
                            f"got {len(given)}.")  # fmt: skip
    _check_given(grid, depths, widths)
    found = _Search(grid, targets, mode, depths, widths).best()
    if found is None:
        raise PlanError(_explain(grid, targets, mode, depths, widths))
    return found


def _check_given(grid: Grid, depths: Sequence[int] | None, widths: Sequence[float] | None) -> None:
    allowed = [p for p in grid.positions if p < grid.blocks]
    if depths is not None and (list(depths) != sorted(set(depths)) or any(d not in allowed for d in depths)):
        raise PlanError(f"depths of the smaller levels must grow strictly and be among {allowed}, got {list(depths)}.")
    if widths is not None and (
        list(widths) != sorted(widths) or any(min(abs(w - known) for known in grid.widths) > _TINY for w in widths)
    ):
        raise PlanError(f"widths must not shrink from level to level and go by 0.01 up to 1, got {list(widths)}.")


def one_level(grid: Grid, ratio: float, tolerance: float = 0.1) -> Split:
    """Return the pair that Eq. 1 picks for one target ratio alone, with no other classifier than its own.

    Raises:
        PlanError: No pair is within the tolerance.
    """
    cost = (grid.trunk + grid.heads) / grid.full
    gap, off = _gap(grid), np.abs(cost / ratio - 1)
    rows, columns = np.nonzero(off <= tolerance + _TINY)
    if not rows.size:
        row, column = divmod(int(np.argmin(off)), off.shape[1])
        raise PlanError(f"no depth and width cost {ratio:.3g} of the model within {tolerance:.3g}; the nearest is "
                        f"{grid.positions[row]} of {grid.blocks} blocks at width {grid.widths[column]:.2f}, costing "
                        f"{cost[row, column]:.3f}, which a tolerance of {np.ceil(off.min() * 100) / 100:.2f} would "
                        "admit.")  # fmt: skip
    first = np.lexsort((-rows, off[rows, columns], gap[rows, columns].round(9)))[0]
    row, column = int(rows[first]), int(columns[first])
    depth = grid.positions[row]
    return Split(depth, grid.widths[column], (depth,), float(cost[row, column]))


def _gap(grid: Grid) -> Floats:
    """Return |s_d - s_w| of every pair [P, W]."""
    gap: Floats = np.abs(np.array(grid.positions)[:, None] / grid.blocks - np.array(grid.widths))
    return gap


def _settled(grid: Grid, targets: Targets) -> tuple[Split, ...]:
    """Return the splits of a saved plan, with their cost in this model."""
    strange = sorted({e for s in targets.splits for e in s.exits} - set(grid.positions))
    if strange or targets.splits[-1].depth != grid.blocks:
        raise PlanError(f"the plan was made for another model: it has exits {list(targets.splits[-1].exits)}; this "
                        f"model has {grid.blocks} blocks and allows exits after {list(grid.positions)}.")  # fmt: skip
    smaller = [replace(s, share=grid.of(s.width, s.exits) / grid.full) for s in targets.splits[:-1]]
    return (*smaller, replace(targets.splits[-1], share=1.0))


# ---- all levels together -------------------------------------------------------------------------------------------

Key = tuple[float, float, int]  # sum of |s_d - s_w|, sum of |cost / target - 1|, minus the sum of depths


@dataclass
class _Search:
    """One search; rows are positions, columns widths, levels the smaller ones (level L is the full model)."""

    grid: Grid
    targets: Targets
    mode: Mode
    depths: Sequence[int] | None
    widths: Sequence[float] | None
    any_will_do: bool = False
    key: Key = (np.inf, np.inf, 0)
    pairs: list[tuple[int, int]] = field(default_factory=list)

    def best(self) -> tuple[Split, ...] | None:
        """Return the splits, or None when nothing fits."""
        if np.isfinite(self.ahead[0].min()):
            self._descend([], -1, 0, (0.0, 0.0, 0))
        if not np.isfinite(self.key[0]):
            return None
        grid, found = self.grid, []
        exits: list[int] = []
        for row, column in self.pairs:
            exits = [grid.positions[row]] if self.mode == "width" else [*exits, grid.positions[row]]
            share = grid.of(grid.widths[column], exits) / grid.full
            found.append(Split(exits[-1], grid.widths[column], tuple(exits), share))
        last = (grid.blocks,) if self.mode == "width" else (*exits, grid.blocks)
        return (*found, Split(grid.blocks, 1.0, last, 1.0))

    def _descend(
        self, rows: list[int], row: int, column: int, key: Key, pairs: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """Try every pair of the next level that can still beat the best key."""
        level = len(pairs)
        if level == len(self.targets.ratios) - 1:
            key = (round(key[0], 9), round(key[1], 9), key[2])  # ties are ties, whatever the last bits say
            if key < self.key:
                self.key, self.pairs = key, list(pairs)
            return
        cost = self.own + self.heads[rows].sum(0) if self.mode != "width" else self.own
        low, high = self._bounds(level)
        fits = self._allowed(level) & (cost >= low) & (cost <= high)
        fits[: row + 1 if self.mode != "width" else 0] = False
        fits[:, :column] = False
        p, w = np.nonzero(fits)
        total = self.gap[p, w] + self.ahead[level + 1][p, w]
        off = np.abs(cost[p, w] / self.targets.ratios[level] - 1)
        for i in np.lexsort((-p, off, total.round(9))):
            if not key[0] + total[i] <= self.key[0] + _TINY or (self.any_will_do and np.isfinite(self.key[0])):
                break
            r, c = int(p[i]), int(w[i])
            so_far = (key[0] + float(self.gap[r, c]), key[1] + float(off[i]), key[2] - self.grid.positions[r])
            self._descend([*rows, r], r, c, so_far, (*pairs, (r, c)))

    @cached_property
    def own(self) -> Floats:
        """Cost of trunk and own classifier as a fraction of cost(M) [P, W]."""
        return (self.grid.trunk + self.grid.heads) / self.grid.full

    @cached_property
    def heads(self) -> Floats:
        """Cost of each classifier as a fraction of cost(M) [P, W]."""
        return self.grid.heads / self.grid.full

    @cached_property
    def gap(self) -> Floats:
        """What Eq. 1 minimises [P, W]; nothing where only one dimension is free."""
        return _gap(self.grid) if self.mode == "both" else np.zeros_like(self.own)

    def _bounds(self, level: int) -> tuple[float, float]:
        if self.depths is not None and self.widths is not None:
            return 0.0, np.inf
        ratio, tolerance = self.targets.ratios[level], self.targets.tolerances[level]
        high = ratio if self.targets.strict else ratio * (1 + tolerance)
        return ratio * (1 - tolerance) - _TINY, high + _TINY

    def _allowed(self, level: int) -> npt.NDArray[np.bool_]:
        """Return which pairs the mode and the given depths and widths leave to a level [P, W]."""
        rows = np.array(self.grid.positions)
        columns = np.array(self.grid.widths)
        row_ok = rows == self.grid.blocks if self.mode == "width" else rows < self.grid.blocks
        column_ok = columns == 1 if self.mode == "depth" else columns > 0
        if self.depths is not None:
            row_ok = row_ok & (rows == self.depths[level])
        if self.widths is not None:
            column_ok = column_ok & (np.abs(columns - self.widths[level]) < _TINY)
        return row_ok[:, None] & column_ok

    @cached_property
    def ahead(self) -> list[Floats]:
        """Lower bound of what levels l and later add, seen from level l-1's pair [P, W]; entry 0: from the start."""
        levels = len(self.targets.ratios) - 1
        bounds = [np.zeros_like(self.own)]
        for level in range(levels - 1, -1, -1):
            least, most = self._shallower(level)
            low, high = self._bounds(level)
            possible = self._allowed(level) & (self.own + most >= low) & (self.own + least <= high)
            value = np.where(possible, self.gap + bounds[0], np.inf)
            value = np.minimum.accumulate(value[::-1, ::-1], axis=0)[::-1, ::-1]
            value = np.minimum.accumulate(value[:, ::-1], axis=1)[:, ::-1]
            if level and self.mode != "width":  # strictly deeper than the level before
                value = np.vstack([value[1:], np.full((1, value.shape[1]), np.inf)])
            bounds.insert(0, value)
        return bounds

    def _shallower(self, level: int) -> tuple[Floats, Floats]:
        """Return the least and the most that `level` classifiers at shallower positions cost [P, W]."""
        least, most = np.zeros_like(self.heads), np.zeros_like(self.heads)
        if self.mode == "width":
            return least, most
        for row in range(1, len(least)):
            before = np.sort(self.heads[:row], axis=0)
            least[row] = before[:level].sum(0)
            most[row] = before[max(0, row - level) :].sum(0)
        return least, most


# ---- when nothing fits ---------------------------------------------------------------------------------------------


def _explain(
    grid: Grid, targets: Targets, mode: Mode, depths: Sequence[int] | None, widths: Sequence[float] | None
) -> str:
    """Say which tolerance would do, and which pairs it would admit."""
    smaller = len(targets.ratios) - 1
    ratios = ", ".join(f"{r:.3g}" for r in targets.ratios[:-1])
    start = f"no {'widths' if mode == 'width' else 'depths' if mode == 'depth' else 'depths and widths'} cost {ratios}"
    start += f" of the model within the levels' tolerances ({', '.join(f'{t:.3g}' for t in targets.tolerances[:-1])})"
    depths_left = sum(p < grid.blocks for p in grid.positions)
    if mode != "width" and smaller > depths_left:
        return f"{start}: {smaller} smaller levels need as many different depths, and the model has {depths_left}."

    def at(percent: int) -> tuple[Split, ...] | None:
        wider = tuple(max(t, percent / 100) for t in targets.tolerances)
        return _Search(grid, replace(targets, tolerances=wider), mode, depths, widths, any_will_do=True).best()

    low, high = int(100 * min(targets.tolerances)), 100
    if at(high) is None:
        return f"{start}, and no tolerance up to 1 would help: choose other target ratios or fewer levels."
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle) else (middle, high)
    wider = replace(targets, tolerances=tuple(max(t, high / 100) for t in targets.tolerances))
    nearest = _Search(grid, wider, mode, depths, widths).best() or ()
    pairs = "; ".join(
        f"level {i + 1}: {s.depth} of {grid.blocks} blocks at width {s.width:.2f} costs {s.share:.3f} for {r:.3g}"
        for i, (s, r) in enumerate(zip(nearest[:-1], targets.ratios[:-1], strict=True))
    )
    return f"{start}. The nearest: {pairs}. A tolerance of {high / 100:.2f} would admit them."
