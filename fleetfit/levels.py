"""From the planner's splits to the levels of a method: the `levels` hooks that methods share."""

from dataclasses import replace
from typing import Literal

from fleetfit.errors import PlanError
from fleetfit.layout import unwrap
from fleetfit.planner import Mode, Targets, make_grids, search
from fleetfit.values import Level, Problem

_ANY = 1.0  # tolerance under a budget


def split_levels(
    problem: Problem, targets: Targets, mode: Mode = "both", exits: Literal["all", "last"] = "all"
) -> list[Level]:
    """Return the levels that the planner finds (ScaleFL Eq. 1), smallest first; the last is the full model.

    Where nothing fits, an architecture with `falls_back_to_width` gets the largest widths that the budgets allow.

    Args:
        problem: The problem.
        targets: Target ratio, tolerance and ceilings of each level.
        mode: Cut width and depth, width only (full depth, one exit), or depth only.
        exits: Whether a level's model has the shallower levels' exits too, or its last one only.

    Raises:
        PlanError: Nothing fits.
    """
    grid, further = make_grids(problem.architecture, problem.input_shape, targets)
    try:
        splits = search(grid, targets, mode, further=further)
    except PlanError:
        if not getattr(unwrap(problem.architecture), "falls_back_to_width", False):
            raise
        under = replace(targets, tolerances=(_ANY,) * len(targets.ratios), strict=True)
        splits = search(grid, under, "width", further=further)
    levels = []
    for index, split in enumerate(splits):
        kept = split.exits if exits == "all" else split.exits[-1:]
        piece = problem.submodel(split.width, kept)
        needs = split.share if split.needs is None else split.needs
        levels.append(Level(str(index + 1), piece, split.width, needs, split.further))
    return levels


def smallest_width(problem: Problem, targets: Targets) -> list[Level]:
    """Return the smallest of the width-only levels, as the only one."""
    return split_levels(problem, targets, "width")[:1]
