"""The grid search of ScaleFL Eq. 1 over depth and width, all levels together.

For each level l, (s_d, s_w) = argmin |s_d - s_w| subject to |cost(split(M; s_d, s_w)) / (r_l cost(M)) - 1| <=
epsilon_l, and where budgets name further costs, to each of them being at most (1 + epsilon_l) times the level's
ceiling. Depths are the positions of an architecture (s_d = position / blocks), widths go from 0.01 to 1 by 0.01.

The search is exact (`fleetfit.planner.tree`) for costs that add up. Training memory and latency are estimated by parts;
the levels that are found are then counted or measured, and where one breaks a bound, each estimate is corrected by
what it was off at the nearest pair that was seen, and the search is repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fleetfit.cost import Grid, cost_grid
from fleetfit.errors import PlanError
from fleetfit.layout import Architecture
from fleetfit.planner.targets import Floats, Mode, Split, Targets
from fleetfit.planner.tree import TINY, Search, gap_of

_ATTEMPTS = 8


def grids_of(architecture: Architecture, input_shape: Sequence[int], targets: Targets) -> tuple[Grid, dict[str, Grid]]:
    """Return the costs of all depths and widths in the targets' cost, and in each cost with ceilings."""

    def grid(cost: str) -> Grid:
        return cost_grid(architecture, input_shape, cost, targets.conditions)

    return grid(targets.cost), {cost: grid(cost) for cost in targets.ceilings}


def search(
    grid: Grid,
    targets: Targets,
    mode: Mode = "both",
    depths: Sequence[int] | None = None,
    widths: Sequence[float] | None = None,
    further: Mapping[str, Grid] | None = None,
) -> tuple[Split, ...]:
    """Return the split of each level, smallest first; the last is the full model with every level's exit.

    Args:
        grid: Costs of all depths and widths.
        targets: Target ratio, tolerance and ceilings of each level, or its splits where a saved plan settles them.
        mode: "both": Eq. 1. "width": full depth, one exit, the width with the nearest cost. "depth": width 1, the
            depths with the nearest costs.
        depths: Exits of the smaller levels, where they are given.
        widths: Widths of the smaller levels, where they are given. With both given, targets are not asked.
        further: The grid of each cost with ceilings; see `grids_of`.

    Raises:
        PlanError: Nothing fits; the message names the nearest pairs and the tolerance that would admit them.
    """
    others = dict(further or {})
    if targets.splits and targets.mode == mode:
        return _settled(grid, targets, others)
    if mode not in ("both", "width", "depth"):
        raise PlanError(f'a split must be "both", "width" or "depth", got {mode!r}.')
    if others.keys() != targets.ceilings.keys():
        raise PlanError(f"the search needs the costs of {', '.join(targets.ceilings)}, got {', '.join(others)}.")
    smaller = len(targets.ratios) - 1
    for name, given in (("depths", depths), ("widths", widths)):
        if given is not None and len(given) != smaller:
            raise PlanError(f"{len(targets.ratios)} levels need {smaller} {name} (the last level is the full model), "
                            f"got {len(given)}.")  # fmt: skip
    _check_given(grid, depths, widths)
    wanted = Search(grid, targets, mode, depths, widths, others)
    seen: list[Split] = []
    for _ in range(_ATTEMPTS):
        found = wanted.best()
        if found is None:
            raise PlanError(_explain(wanted))
        counted = tuple(_counted(split, grid, others) for split in found)
        if all(_within(wanted, level, split) for level, split in enumerate(counted[:-1])):
            return counted
        seen += counted
        factors = {g.cost: _corrections(g, g is grid, seen) for g in (grid, *others.values()) if g.measure is not None}
        wanted = replace(wanted, factors=factors, key=(np.inf, np.inf, 0), pairs=())
    raise PlanError(
        f"the levels' {' and '.join(g.cost for g in (grid, *others.values()) if g.measure)} came out otherwise than "
        f"estimated in {_ATTEMPTS} searches: allow a larger tolerance."
    )


def _check_given(grid: Grid, depths: Sequence[int] | None, widths: Sequence[float] | None) -> None:
    allowed = [p for p in grid.positions if p < grid.blocks]
    if depths is not None and (list(depths) != sorted(set(depths)) or any(d not in allowed for d in depths)):
        raise PlanError(f"depths of the smaller levels must grow strictly and be among {allowed}, got {list(depths)}.")
    if widths is not None and (
        list(widths) != sorted(widths) or any(min(abs(w - known) for known in grid.widths) > TINY for w in widths)
    ):
        raise PlanError(f"widths must not shrink from level to level and go by 0.01 up to 1, got {list(widths)}.")


def one_level(grid: Grid, ratio: float, tolerance: float = 0.1) -> Split:
    """Return the pair that Eq. 1 picks for one target ratio alone, with no other classifier than its own.

    Raises:
        PlanError: No pair is within the tolerance.
    """
    cost = (grid.trunk + grid.heads) / grid.full
    gap, off = gap_of(grid), np.abs(cost / ratio - 1)
    rows, columns = np.nonzero(off <= tolerance + TINY)
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


def _settled(grid: Grid, targets: Targets, further: Mapping[str, Grid]) -> tuple[Split, ...]:
    """Return the splits of a saved plan, with their cost in this model."""
    strange = sorted({e for s in targets.splits for e in s.exits} - set(grid.positions))
    if strange or targets.splits[-1].depth != grid.blocks:
        raise PlanError(f"the plan, or what is given as levels, was made for another model: it has exits "
                        f"{list(targets.splits[-1].exits)}; this model has {grid.blocks} blocks and allows exits after "
                        f"{list(grid.positions)}.")  # fmt: skip
    return tuple(_counted(split, grid, further) for split in targets.splits)


# ---- estimates -----------------------------------------------------------------------------------------------------


def _counted(split: Split, grid: Grid, further: Mapping[str, Grid]) -> Split:
    """Return a split with its costs themselves; level L costs cost(M)."""

    def share(costs: Grid) -> float:
        whole = split.depth == grid.blocks and split.width == 1
        return 1.0 if whole else costs.exactly(split.width, split.exits) / costs.full

    return replace(split, share=share(grid), further={cost: share(costs) for cost, costs in further.items()})


def _within(wanted: Search, level: int, split: Split) -> bool:
    """Tell whether a level is within its bounds; costs that add up are, since the search saw to it."""
    low, high = wanted.bounds(level)
    fine = wanted.grid.measure is None or low <= split.share <= high
    return fine and all(
        split.further[cost] <= wanted.limit(cost, level)
        for cost, grid in wanted.further.items()
        if grid.measure is not None
    )


def _corrections(grid: Grid, primary: bool, seen: Sequence[Split]) -> Floats:
    """Return by what the estimate of each pair was off at the nearest pair that was counted [P, W]."""
    widths, depths = np.array(grid.widths), np.array(grid.positions)[:, None] / grid.blocks
    off = [
        (split.share if primary else split.further[grid.cost]) * grid.full / grid.of(split.width, split.exits)
        for split in seen
    ]
    far = [np.abs(depths - split.depth / grid.blocks) + np.abs(widths - split.width) for split in reversed(seen)]
    nearest: Floats = np.array(off)[::-1][np.argmin(far, axis=0)]
    return nearest


# ---- when nothing fits ---------------------------------------------------------------------------------------------


def _explain(wanted: Search) -> str:
    """Say which tolerance would do, and which pairs it would admit."""
    grid, targets, mode = wanted.grid, wanted.targets, wanted.mode
    smaller = len(targets.ratios) - 1
    ratios = ", ".join(f"{r:.3g}" for r in targets.ratios[:-1])
    start = f"no {'widths' if mode == 'width' else 'depths' if mode == 'depth' else 'depths and widths'} cost {ratios}"
    start += f" of the model within the levels' tolerances ({', '.join(f'{t:.3g}' for t in targets.tolerances[:-1])})"
    for cost, ceilings in targets.ceilings.items():
        start += f" and at most {', '.join(f'{c:.3g}' for c in ceilings[:-1])} of its {cost}"
    depths_left = sum(p < grid.blocks for p in grid.positions)
    if mode != "width" and smaller > depths_left:
        return f"{start}: {smaller} smaller levels need as many different depths, and the model has {depths_left}."

    def at(percent: int, any_will_do: bool = True) -> tuple[Split, ...] | None:
        wider = replace(targets, tolerances=tuple(max(t, percent / 100) for t in targets.tolerances))
        return replace(wanted, targets=wider, any_will_do=any_will_do, key=(np.inf, np.inf, 0), pairs=()).best()

    without = replace(wanted, further={}, key=(np.inf, np.inf, 0), pairs=()).best() if targets.ceilings else None
    if without is not None:
        return (f"{start}. The budgets of {' and '.join(targets.ceilings)} are too small for those of {targets.cost}, "
                f"for which these would do: {_said(without, grid, targets)}.")  # fmt: skip
    low, high = int(100 * min(targets.tolerances)), 100
    if at(high) is None:
        return f"{start}, and no tolerance up to 1 would help: choose other target ratios or fewer levels."
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle) else (middle, high)
    nearest = at(high, any_will_do=False) or ()
    return f"{start}. The nearest: {_said(nearest, grid, targets)}. A tolerance of {high / 100:.2f} would admit them."


def _said(splits: Sequence[Split], grid: Grid, targets: Targets) -> str:
    return "; ".join(
        f"level {i + 1}: {s.depth} of {grid.blocks} blocks at width {s.width:.2f} costs {s.share:.3f} for {r:.3g}"
        for i, (s, r) in enumerate(zip(splits[:-1], targets.ratios[:-1], strict=False))
    )
