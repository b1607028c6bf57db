"""The levels of a run that continues with other budgets: old levels keep their shapes, and new ones fit in between.

A level that the new targets have too, within a hundredth of its own, keeps its shape and its number. The others are
dropped, but for the full model. A new level ends at an exit that the model has: a further exit would be a classifier
that no round has trained, and the state would be another. Of the depths and widths that cost its target within the
tolerance, it has the one nearest to ScaleFL Eq. 1. Its number is the one after the highest that a level has had.

Not from a paper.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fleetfit.anatomy import Architecture
from fleetfit.cost import Grid
from fleetfit.errors import PlanError
from fleetfit.planner.budgets import KEPT, LevelShape, Scaling, Targets
from fleetfit.planner.plan import LevelChange, Plan, PlannedLevel
from fleetfit.planner.search import TINY, make_grids

_NEAR = 0.01  # a target that differs by less is the same
_COUNTED = 8  # shapes that are counted for a level whose cost is estimated


def keep_shapes(
    plan: Plan, targets: Targets, architecture: Architecture, input_shape: Sequence[int], split: Scaling
) -> Targets:
    """Return targets whose levels have the shapes of a plan, as far as it has them.

    Args:
        plan: The levels that the run has.
        targets: Those that it continues with.
        architecture: The model family.
        input_shape: Shape of one sample.
        split: How the method splits levels.

    Raises:
        PlanError: No sub-model that ends at an exit of the model has the cost of a new level.
    """
    exits = sorted({e for level in plan.levels for e in level.exits})
    names = _iter_new_names(plan)
    old = _match(plan, targets)
    grid, further = make_grids(architecture, input_shape, targets)
    shapes: list[LevelShape] = []
    for index in range(len(targets.ratios)):
        listed = targets.splits[index] if targets.splits else None
        if (kept := old[index]) is not None:
            needs = None if listed is None else listed.needs
            shape = replace(kept.shape, name=kept.name, needs=needs)
        elif listed is not None:
            if listed.depth not in exits:
                raise PlanError(
                    f"a new level ends at an exit that the model has: {', '.join(map(str, exits))}; got depth "
                    f"{listed.depth}.",
                    key="fleet.levels",
                )
            own = tuple(e for e in exits if e <= listed.depth)
            shape = replace(listed, exits=own, name=next(names))
        else:
            above = next((level.share for level in old[index + 1 :] if level is not None), 1.0)
            below = shapes[-1].share if shapes else 0.0
            shape = _find_shape(index, targets, (grid, further), exits, split, (below, above))
            shape = replace(shape, name=next(names))
        shapes.append(shape)
    return replace(targets, splits=tuple(shapes), fixed=KEPT)


def add_change(plan: Plan, before: Plan, round: int) -> Plan:
    """Return a plan with the changes of the one before, and its own if their levels differ.

    Args:
        plan: The plan.
        before: The one with which the run continued until then.
        round: The last round of then.
    """
    names, old = [level.name for level in plan.levels], [level.name for level in before.levels]
    added, dropped = tuple(n for n in names if n not in old), tuple(n for n in old if n not in names)
    changes = (*before.changes, LevelChange(round, added, dropped)) if added or dropped else before.changes
    return replace(plan, changes=changes)


def _iter_new_names(plan: Plan) -> Iterator[str]:
    used = [level.name for level in plan.levels]
    used += [name for change in plan.changes for name in (*change.added, *change.dropped)]
    highest = max((int(name) for name in used if name.isdecimal()), default=0)
    return map(str, itertools.count(highest + 1))


def _match(plan: Plan, targets: Targets) -> list[PlannedLevel | None]:
    """Return the level of the plan that each target has; None for a new one. The last is the full model."""
    found: list[PlannedLevel | None] = []
    for index, ratio in enumerate(targets.ratios[:-1]):
        same = [level for level in plan.levels[:-1] if level not in found and _is_same(level, index, ratio, targets)]
        found.append(min(same, key=lambda level: abs(level.target - ratio), default=None))
    return [*found, plan.levels[-1]]


def is_same_split(one: LevelShape, other: LevelShape) -> bool:
    """Return whether two levels keep the same blocks and the same part of the channels."""
    return (one.depth, one.width, dict(one.widths)) == (other.depth, other.width, dict(other.widths))


def _is_same(level: PlannedLevel, index: int, ratio: float, targets: Targets) -> bool:
    if targets.splits:
        return is_same_split(targets.splits[index], level.shape)
    most = ratio * (1 + targets.tolerances[index]) + TINY  # its devices still afford it
    return abs(level.target / ratio - 1) < _NEAR and level.share <= most


def _find_shape(
    index: int,
    targets: Targets,
    grids: tuple[Grid, Mapping[str, Grid]],
    exits: Sequence[int],
    split: Scaling,
    between: tuple[float, float],
) -> LevelShape:
    """Return the shape of a new level, whose cost is between those of the next smaller and the next larger one."""
    grid, further = grids
    ratio, tolerance = targets.ratios[index], targets.tolerances[index]
    for depth, width in _list_pairs(grid, ratio, tolerance, exits, split):
        own = tuple(e for e in exits if e <= depth)
        share = grid.compute(width, own) / grid.full
        others = {cost: one.compute(width, own) / one.full for cost, one in further.items()}
        fits = all(share <= targets.ceilings[cost][index] * (1 + tolerance) + TINY for cost, share in others.items())
        is_near = abs(share / ratio - 1) <= tolerance + TINY
        if fits and is_near and between[0] + TINY < share < between[1] - TINY:
            return LevelShape(depth, width, own, share, others)
    raise PlanError(
        f"no new level that ends at an exit of the model ({', '.join(map(str, exits))}) costs {ratio:.3g} of the "
        f"model within its tolerance ({tolerance:.3g}), between the levels that the run keeps. Set a larger tolerance, "
        "or list fleet.levels without it: its devices then train the next smaller level.",
        key="fleet.levels",
    )


def _list_pairs(
    grid: Grid, ratio: float, tolerance: float, exits: Iterable[int], split: Scaling
) -> list[tuple[int, float]]:
    """Return the depths and widths whose estimated cost is near a ratio, the best by Eq. 1 first."""
    keys = []
    for depth in exits:
        own = tuple(e for e in exits if e <= depth)
        for width in grid.widths:
            is_whole = depth == grid.blocks and width == 1
            if is_whole or (split == "depth" and width < 1) or (split == "width" and depth < grid.blocks):
                continue
            off = abs(grid.estimate(width, own) / grid.full / ratio - 1)
            gap = abs(depth / grid.blocks - width) if split not in ("width", "depth") else 0.0
            if grid.measure is not None or off <= tolerance + TINY:
                keys.append((round(gap, 9), round(off, 9), -depth, depth, width))
    if grid.measure is not None:  # estimates: the nearest first
        keys.sort(key=lambda key: key[1])
        keys = sorted(keys[:_COUNTED])
    return [(depth, width) for *_, depth, width in sorted(keys)]
