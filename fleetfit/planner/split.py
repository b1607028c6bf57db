"""Levels that keep whole blocks before they keep width: the split "depth_first", and the choice of a split.

Early blocks of a CNN have few parameters and run at a high resolution. So a budget of parameters pays for several of
them at full width, and the level takes more multiply-adds than one that is cut in all blocks. For each level, smallest
first:

1. Depth: of the exits that see enough of the image (`fleetfit.planner.receptive_field`), the shallowest at which the
   full width costs as much as the budget.
2. Width: the last stage is cut down to three quarters of its width, until the cost is nearest to the budget within
   the level's tolerance. Where that is not enough, all stages are cut and keep this ratio. The last stage has the axes
   that begin no earlier than the one that the exit's classifier reads.

An axis that runs through all blocks, such as a transformer's residual stream, is not cut: a level has as many whole
blocks as its budget allows. Where that is less than one block, or no more than the level before has, the split is
"both" (ScaleFL Eq. 1) for the whole fleet, or "width" where the model has fewer depths than the fleet has levels. So is
"auto" where it stands for "both".

Not from a paper. The rule of "auto" is that of few short trials (docs/adr/0025).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fleetfit.anatomy import Architecture, default_sizes
from fleetfit.cost import COSTS, WIDTHS, compute_cost, compute_mean_width, get_layout
from fleetfit.errors import PlanError, did_you_mean
from fleetfit.planner.budgets import KEPT, LevelShape, Scaling, Targets
from fleetfit.planner.receptive_field import find_first_seeing_exit
from fleetfit.planner.search import TINY, make_grids, search

_LAST_STAGE = 0.75  # how narrow the last stage gets, relative to the others
_BY_PLACE = ("multiply_adds", "latency_s")  # costs that early blocks of an image model have most of

Sizes = Mapping[str, int]


def find_shapes(
    architecture: Architecture,
    input_shape: Sequence[int],
    targets: Targets,
    scaling: Scaling = "both",
    depths: Sequence[int] | None = None,
    widths: Sequence[float] | None = None,
) -> tuple[LevelShape, ...]:
    """Return the shape of each level, smallest first; the last is the full model with every level's exit.

    Args:
        architecture: The model family.
        input_shape: Shape of one sample.
        targets: Target ratio, tolerance and ceilings of each level, or its shapes where they are fixed.
        scaling: How levels are split: "both" (ScaleFL Eq. 1), "width", "depth", "depth_first", or "auto".
        depths: Exits of the smaller levels, where they are given; not with "depth_first".
        widths: Widths of the smaller levels, where they are given; not with "depth_first".

    Raises:
        PlanError: Nothing fits.
    """
    if targets.splits and may_keep_shapes(scaling, targets.fixed):
        return _count_fixed(architecture, input_shape, targets)
    falls_back = scaling in ("auto", "depth_first")
    if scaling == "auto":
        scaling = choose_scaling(architecture, input_shape, targets.cost)
    if scaling == "depth_first":
        if depths is not None or widths is not None:
            raise PlanError(
                'the split "depth_first" chooses depths and widths itself. Leave them out, or split "both".',
                key="scaling",
            )
        try:
            shapes = _find_depth_first(architecture, input_shape, targets)
        except PlanError as error:
            find_shapes(architecture, input_shape, targets)  # its error, where "both" is no way out either
            raise error from None
        if shapes is not None:
            return shapes
    grid, further = make_grids(architecture, input_shape, targets)
    if not falls_back:
        return search(grid, targets, scaling, depths, widths, further)
    try:
        return search(grid, targets, "both", depths, widths, further)
    except PlanError as error:  # more levels than depths
        if depths is not None or widths is not None:
            raise
        try:
            return search(grid, targets, "width", further=further)
        except PlanError as other:
            nearer = min((other, error), key=lambda one: np.inf if one.tolerance is None else one.tolerance)
            raise nearer from None


def choose_scaling(architecture: Architecture, input_shape: Sequence[int], cost: str) -> Scaling:
    """Return the split that "auto" stands for.

    "depth_first", except in budgets of multiply-adds and latency where the model has stages: whole early blocks are
    dear there, and in trials were no better than "both".
    """
    return "both" if cost in _BY_PLACE and has_stages(architecture, input_shape) else "depth_first"


def has_stages(architecture: Architecture, input_shape: Sequence[int]) -> bool:
    """Return whether axes begin in later blocks, and none runs through all, as a transformer's residual stream does.

    Each block with such an axis has a tensor of its size: a layer that writes it, or a norm.
    """
    if not any(axis.block for axis in architecture.axes.values() if axis.scaled):
        return False
    blocks: dict[str, set[int]] = {}
    for tensor in get_layout(architecture, input_shape).complete.tensors.values():
        for axis in [axis for segment in tensor.dims[0] for axis in segment.axes] if tensor.dims else ():
            if tensor.exit is None and architecture.axes[axis].scaled:
                blocks.setdefault(axis, set()).add(tensor.block or 0)
    return all(len(numbers) < architecture.blocks for numbers in blocks.values())


def find_stage_start(architecture: Architecture, input_shape: Sequence[int], depth: int) -> int:
    """Return the first block of the last stage before an exit: where the axes begin that its classifier reads."""
    axes = architecture.axes
    read = {
        axis
        for tensor in get_layout(architecture, input_shape).complete.tensors.values()
        if tensor.exit == depth
        for dim in tensor.dims
        for segment in dim
        for axis in segment.axes
        if axes[axis].scaled
    }
    if read:
        return min(axes[axis].block for axis in read)
    return max((axis.block for axis in axes.values() if axis.scaled and axis.block < depth), default=0)


def may_keep_shapes(scaling: Scaling, fixed: str) -> bool:
    """Return whether levels that are fixed, split in one way, do for a run or a method that splits in another."""
    return fixed == KEPT or scaling in ("auto", "depth_first", fixed) or (scaling, fixed) == ("both", "depth_first")


def _count_fixed(architecture: Architecture, input_shape: Sequence[int], targets: Targets) -> tuple[LevelShape, ...]:
    """Return the levels of a saved plan, or listed ones, with their costs in this model."""
    exits, positions = {e for shape in targets.splits for e in shape.exits}, architecture.positions
    if exits - set(positions) or targets.splits[-1].depth != architecture.blocks:
        raise PlanError(
            f"the plan, or the given levels, were made for another model: it has exits "
            f"{list(targets.splits[-1].exits)}; this model has {architecture.blocks} blocks and allows exits after "
            f"{list(positions)}.",
            key="levels",
        )
    costs = _Costs(architecture, input_shape, targets)
    return tuple(costs.count(shape, get_sizes(architecture, shape)) for shape in targets.splits)


class _Costs:
    """Costs of sub-models as fractions of cost(M), in the targets' cost and in those with ceilings."""

    def __init__(self, architecture: Architecture, input_shape: Sequence[int], targets: Targets) -> None:
        self._architecture, self._targets = architecture, targets
        self._shape = tuple(input_shape)
        self._measures = {
            cost: COSTS[cost].parts(architecture, self._shape, targets.conditions)
            for cost in (targets.cost, *targets.ceilings)
            if COSTS[cost].by_layout
        }
        self._full_sizes = architecture.sizes(1.0)
        costs, last = (targets.cost, *targets.ceilings), (architecture.blocks,)
        self._full = {cost: self._compute(cost, self._full_sizes, last) for cost in costs}

    def _compute(self, cost: str, sizes: Sizes, exits: tuple[int, ...]) -> float:
        if cost not in self._measures:
            return compute_cost(self._architecture, (sizes, exits), self._shape, cost, self._targets.conditions)
        return self._measures[cost](sizes).compute_total(exits)

    def compute_share(self, sizes: Sizes, exits: tuple[int, ...], cost: str | None = None) -> float:
        """Return a cost, by default the targets', as a fraction of the full model's."""
        cost = cost or self._targets.cost
        return self._compute(cost, sizes, exits) / self._full[cost]

    def find_exceeded(self, level: int, sizes: Sizes, exits: tuple[int, ...]) -> dict[str, tuple[float, float]]:
        """Return the costs of a sub-model that a level may not have, each with its share and the budget."""
        targets = self._targets
        tolerance = 0.0 if targets.strict else targets.tolerances[level]
        limits = {targets.cost: targets.ratios[level]} | {c: most[level] for c, most in targets.ceilings.items()}
        shares = {cost: self.compute_share(sizes, exits, cost) for cost in limits}
        return {c: (shares[c], limit) for c, limit in limits.items() if shares[c] > limit * (1 + tolerance) + TINY}

    def count(self, shape: LevelShape, sizes: Sizes) -> LevelShape:
        """Return a shape with its width and costs; the full model costs cost(M)."""
        is_full = shape.depth == self._architecture.blocks and dict(sizes) == self._full_sizes
        shares = {
            cost: 1.0 if is_full else self.compute_share(sizes, shape.exits, cost)
            for cost in (self._targets.cost, *self._targets.ceilings)
        }
        width = shape.width
        if shape.widths:
            axes = sorted(list_axes(self._architecture, self._shape, shape.exits))
            width = compute_mean_width(self._architecture, sizes, axes)
        return replace(
            shape,
            width=width,
            share=shares[self._targets.cost],
            further={cost: shares[cost] for cost in self._targets.ceilings},
        )


# ---- the sizes of a shape --------------------------------------------------------------------------------------------


def get_sizes(architecture: Architecture, shape: LevelShape) -> dict[str, int]:
    """Return the size of each axis: by the width, or by the width of each axis where a shape has these.

    Raises:
        PlanError: The shape has a width of an axis that the model lacks or never cuts.
    """
    if not shape.widths:
        return architecture.sizes(shape.width)
    axes = architecture.axes
    scaled = [name for name, axis in axes.items() if axis.scaled]
    for name in shape.widths:
        if name not in scaled:
            raise PlanError(
                f'the model has no axis "{name}" that can be cut; its axes are {", ".join(scaled)}.'
                f"{did_you_mean(name, scaled)}",
                key="levels",
            )
    return {name: default_sizes({name: axis}, shape.widths.get(name, 1.0))[name] for name, axis in axes.items()}


def list_axes(architecture: Architecture, input_shape: Sequence[int], exits: tuple[int, ...]) -> set[str]:
    """Return the axes of the tensors that a sub-model with these exits has."""
    tensors = get_layout(architecture, input_shape).complete.tensors.values()
    segments = (segment for t in tensors if t.present(exits) for dim in t.dims for segment in dim)
    return {axis for segment in segments for axis in segment.axes}


# ---- depth first -----------------------------------------------------------------------------------------------------


def _find_depth_first(
    architecture: Architecture, input_shape: Sequence[int], targets: Targets
) -> tuple[LevelShape, ...] | None:
    """Return the shape of each level; None where whole blocks do not meet the budgets."""
    costs = _Costs(architecture, input_shape, targets)
    sizes_and_exits: list[tuple[Sizes, tuple[int, ...]]] = []
    exits: tuple[int, ...] = ()
    is_cut = has_stages(architecture, input_shape) or architecture.blocks == 1
    first = find_first_seeing_exit(architecture, input_shape)
    for level in range(len(targets.ratios) - 1):
        if is_cut:
            sizes, exits = _find_level(architecture, input_shape, costs, targets, level, exits, first)
        else:
            sizes = architecture.sizes(1.0)
            above = max((first - 1, *exits))
            deeper = [p for p in architecture.positions if above < p < architecture.blocks]
            depth = max((p for p in deeper if not costs.find_exceeded(level, sizes, (*exits, p))), default=0)
            if not depth:
                return None
            exits = (*exits, depth)
        sizes_and_exits.append((sizes, exits))
    wider = architecture.sizes(1.0)
    last = tuple(dict.fromkeys((*exits, architecture.blocks)))
    shapes = [LevelShape(architecture.blocks, 1.0, last, 1.0, dict.fromkeys(targets.ceilings, 1.0))]
    for sizes, own in reversed(sizes_and_exits):
        # axes that a level lacks are as wide as in the level above, so that levels are parts of each other
        present = list_axes(architecture, input_shape, own)
        wider = {a: n if a in present else wider[a] for a, n in sizes.items()}
        widths = {a: wider[a] / axis.size for a, axis in architecture.axes.items() if wider[a] < axis.size}
        shapes.insert(0, costs.count(LevelShape(own[-1], 1.0, own, 1.0, widths=widths), wider))
    return tuple(shapes)


def _find_level(
    architecture: Architecture,
    input_shape: Sequence[int],
    costs: _Costs,
    targets: Targets,
    level: int,
    exits: tuple[int, ...],
    first: int,
) -> tuple[Sizes, tuple[int, ...]]:
    """Return sizes and exits of one level: the shallowest exit that uses the budget, and the width that meets it."""
    ratio, full = targets.ratios[level], architecture.sizes(1.0)
    least = ratio * (1 - targets.tolerances[level]) - TINY
    for depth in (p for p in architecture.positions if p >= max((first, *exits))):
        own = tuple(dict.fromkeys((*exits, depth)))
        if depth == architecture.blocks or costs.compute_share(full, own) >= least:
            break
    start = find_stage_start(architecture, input_shape, depth)
    # widths of the front and of the last stage, widest first; one stage has no front
    last_alone = [(1.0, width) for width in reversed(WIDTHS) if width >= _LAST_STAGE] if start else []
    together = [(width, (_LAST_STAGE if start else 1.0) * width) for width in reversed(WIDTHS)]
    pairs = last_alone + together

    def make_sizes(index: int) -> Sizes:
        front, last = (architecture.sizes(width) for width in pairs[index])
        return {name: (last if axis.block >= start else front)[name] for name, axis in architecture.axes.items()}

    widest = bisect_left(range(len(pairs)), True, key=lambda i: not costs.find_exceeded(level, make_sizes(i), own))
    if widest == len(pairs):
        exceeded = costs.find_exceeded(level, make_sizes(-1), own).items()
        needed = " and ".join(f"{cost} {share:.3g} for a budget of {limit:.3g}" for cost, (share, limit) in exceeded)
        raise PlanError(
            f"no width of {depth} of {architecture.blocks} blocks fits the budgets of level {level + 1}: the narrowest "
            f"takes {needed} of the full model. Raise them"
            + (', or set fleet.scaling = "both", which keeps fewer blocks.' if depth > 1 else "."),
            key="scaling",
        )
    end = len(last_alone) if widest < len(last_alone) else len(pairs)

    def is_under(index: int) -> bool:
        return costs.compute_share(make_sizes(index), own) <= ratio + TINY

    under = min(bisect_left(range(end), True, widest, key=is_under), end - 1)
    nearest = min(
        {widest, max(widest, under - 1), under},
        key=lambda i: (round(abs(costs.compute_share(make_sizes(i), own) / ratio - 1), 9), i),
    )
    return make_sizes(nearest), own
