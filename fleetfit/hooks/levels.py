"""From the planner's splits to the levels of a method: the `make_levels` hooks that methods share."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from fleetfit.anatomy import unwrap
from fleetfit.core import Level, Problem
from fleetfit.errors import ConfigError, PlanError
from fleetfit.planner import LevelShape, Scaling, Targets, find_shapes, get_sizes, may_keep_shapes
from fleetfit.submodel import Submodel

_ANY = 1.0  # tolerance under a budget
_MAX_WHOLE = 2  # lines on what stays whole


def split_levels(
    problem: Problem,
    targets: Targets,
    scaling: Scaling | None = None,
    exits: Literal["all", "last"] = "all",
    default: Scaling = "both",
) -> list[Level]:
    """Return the levels that the planner finds, smallest first; the last is the full model.

    Where nothing fits, an architecture with `falls_back_to_width` gets the largest widths that the budgets allow, or
    the largest depths if its widths are too few to tell the levels apart.

    Args:
        problem: The problem.
        targets: Target ratio, tolerance and ceilings of each level, and perhaps the split that the run asks for.
        scaling: How the method splits levels; see `planner.find_shapes`. None: as the run asks for.
        exits: Whether a level's model has the shallower levels' exits too, or its last one only.
        default: How levels are split where neither the method nor the run says so.

    Raises:
        ConfigError: Both the method and the run say how levels are split, or shapes are listed that differ from it.
        PlanError: Nothing fits.
    """
    if scaling is not None and targets.scaling:
        raise ConfigError(
            f'fleet.scaling = "{targets.scaling}" has no effect: the method splits levels itself ("{scaling}"). Leave '
            "fleet.scaling out, or the method's own.",
            key="fleet.scaling",
        )
    if targets.scaling and targets.splits and not may_keep_shapes(targets.scaling, targets.fixed):
        raise ConfigError(
            f'fleet.scaling = "{targets.scaling}" has no effect: fleet.levels has the depth and width of each level '
            f'("{targets.fixed}"). Leave one of the two out.',
            key="fleet.scaling",
        )
    architecture, chosen = problem.architecture, scaling or targets.scaling or default
    try:
        shapes: Sequence[LevelShape] = find_shapes(architecture, problem.input_shape, targets, chosen)
    except PlanError as error:
        if not getattr(unwrap(architecture), "falls_back_to_width", False):
            raise
        shapes = _find_under(
            problem, targets, ("width",) if chosen in ("width", "depth") else ("width", "depth"), error
        )
    levels = []
    for index, shape in enumerate(shapes):
        sizes, kept = get_sizes(architecture, shape), shape.exits if exits == "all" else shape.exits[-1:]
        piece = Submodel({axis: range(sizes[axis]) for axis in architecture.axes}, kept)
        needs = shape.share if shape.needs is None else shape.needs
        levels.append(Level(shape.name or str(index + 1), piece, shape.width, needs, shape.further))
    return levels


def _find_under(
    problem: Problem, targets: Targets, splits: Sequence[Scaling], reason: PlanError
) -> Sequence[LevelShape]:
    """Return the largest levels that the budgets allow, by the first split whose levels differ."""
    under = replace(targets, tolerances=(_ANY,) * len(targets.ratios), strict=True)
    plans: list[Sequence[LevelShape]] = []
    for split in splits:
        with contextlib.suppress(PlanError):
            plans.append(find_shapes(problem.architecture, problem.input_shape, under, split))
    if not plans:
        whole: list[str] = getattr(unwrap(problem.architecture), "describe_whole", list)()
        raise PlanError(" ".join([str(reason), *whole[:_MAX_WHOLE]]), reason.tolerance, reason.scaling, reason.ceilings)
    return max(plans, key=lambda shapes: len({(shape.depth, shape.share) for shape in shapes}))


def find_split(levels: Any, targets: Targets) -> Scaling | None:
    """Return how a method's `make_levels` hook splits levels; None for a hook that is not made of `split_levels`."""
    function, keywords = (levels.func, levels.keywords) if isinstance(levels, partial) else (levels, {})
    if function is not split_levels:
        return None
    return keywords.get("scaling") or targets.scaling or keywords.get("default", "both")


def may_split(levels: Any) -> bool:
    """Return whether `fleet.scaling` decides how a method's `make_levels` hook splits levels."""
    function, keywords = (levels.func, levels.keywords) if isinstance(levels, partial) else (levels, {})
    return function is split_levels and keywords.get("scaling") is None


def keeps_early_exits(levels: Any) -> bool:
    """Return whether levels of a hook `make_levels` made of `split_levels` have the shallower levels' exits too."""
    return not isinstance(levels, partial) or levels.keywords.get("exits", "all") == "all"


def smallest_width(problem: Problem, targets: Targets) -> list[Level]:
    """Return the smallest of the width-only levels, as the only one."""
    return split_levels(problem, targets, "width")[:1]
