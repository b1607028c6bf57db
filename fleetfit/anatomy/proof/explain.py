"""A layout in words, for `check-model`: axes, inferred dimensions, the order of places, exits, and the proof."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from fleetfit.anatomy import Architecture, Layout, Segment, VisitsExits
from fleetfit.anatomy.proof import LayoutReport
from fleetfit.errors import format_ranges, join_some

_NUMBER = re.compile(r"(^|\.)(blocks|heads)\.(\d+)(?=\.)")
_MAX_LISTED = 8
_MAX_OF_BLOCK = 3  # tensors of one block that are named
_SEGMENTS = ("start", "segment", "head")


def describe_axes(architecture: Architecture) -> Iterator[str]:
    """Yield a line per axis, and one for the depth."""
    for name, axis in architecture.axes.items():
        if not axis.scaled:
            yield f'axis "{name}": {axis.size}, never cut'
            continue
        groups = f"in groups of {axis.granule}, {axis.size // axis.granule} in all"
        steps = "one by one" if axis.granule == 1 else groups
        first = f"; from block {axis.block} on" if axis.block else ""
        yield f'axis "{name}": {_count(axis.size, "channel")}, cut {steps}{first}'
    positions = tuple(architecture.positions)
    if positions == tuple(range(1, architecture.blocks + 1)) and len(positions) > 1:
        places = "a classifier may sit after any of them"
    else:
        places = f"a classifier may sit after block {_enumerate([str(p) for p in positions], 'or')}"
    yield f"depth: {_count(architecture.blocks, 'block')}; {places}"
    if reason := getattr(architecture, "size_dependent", ""):
        yield f"a narrow model computes something else than the full one with its other channels zeroed: {reason}"


def describe_layout(layout: Layout) -> Iterator[str]:
    """Yield a line per axis on the dimensions that follow it, and one on those of a fixed size."""
    sizes = {name: math.prod(shape) for name, shape in layout.shapes({}, layout.exits).items()}
    total = sum(n for name, n in sizes.items() if layout.tensors[name].trainable)
    for axis in layout.axes:
        users = {name: dims for name in layout.tensors if (dims := _find_dimensions(layout, name, axis))}
        if not users:
            yield f'"{axis}" appears nowhere: remove the axis, or use its size in build.'
            continue
        moved = sum(sizes[name] for name in users if layout.tensors[name].trainable)
        yield (
            f'"{axis}": {_count(sum(map(len, users.values())), "dimension")} of {_count(len(users), "tensor")} with '
            f"{moved:,} of {total:,} parameters: {_list_tensors(users, layout)}"
        )
    fixed = {name: dims for name in layout.tensors if (dims := _find_dimensions(layout, name, None))}
    if fixed:
        yield f"fixed size: {_count(sum(map(len, fixed.values())), 'dimension')}: {_list_tensors(fixed, layout)}"
    places = list(_list_places(layout))
    if places:
        yield f"with fewer exits, by building it so: {'; '.join(places)}"


def _list_places(layout: Layout) -> Iterator[str]:
    """Yield the tensors of each block and each exit whose names do not contain it."""
    places: dict[str, list[str]] = {}
    for name, tensor in layout.tensors.items():
        numbers = {match[0].strip(".") for match in _NUMBER.finditer(name)}
        if tensor.exit is not None and f"heads.{tensor.exit}" not in numbers:
            places.setdefault(f"the exit after block {tensor.exit} has", []).append(name)
        elif tensor.exit is None and tensor.block is not None and f"blocks.{tensor.block}" not in numbers:
            places.setdefault(f"block {tensor.block} has", []).append(name)
    for place, names in list(places.items())[:_MAX_LISTED]:
        yield f"{place} {join_some(names, _MAX_OF_BLOCK)}"
    if len(places) > _MAX_LISTED:
        yield f"and {len(places) - _MAX_LISTED} more likewise"
    if layout.by_order:
        yield "classifiers are numbered in their order, so that a level has the first ones"


def describe_orders(layout: Layout) -> Iterator[str]:
    """Yield a line per kind of dimension whose order growth does not tell, as a forward pass shows it."""
    users: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in layout.tensors.items():
        for d, dim in enumerate(tensor.dims):
            if _has_order(dim):
                dims = users.setdefault(_format_dimension(dim), {})
                dims[name] = (*dims.get(name, ()), d)
    for order, tensors in users.items():
        yield f"{order}: {_list_tensors(tensors, layout)}"
    for name, other in layout.aliases.items():
        yield f"{name} is {other}, stored and averaged once"
    if not users and not layout.aliases:
        yield "nothing: each dimension follows one axis"


def describe_exits(architecture: Architecture, module: nn.Module) -> Iterator[str]:
    """Yield how the exits of a module can be used, and which of its methods are missing."""
    missing = [name for name in _SEGMENTS if not hasattr(module, name)]
    if len(architecture.positions) == 1:
        yield (
            "one, after the last block: nothing can stop early, and levels differ in width only, as with methods "
            'heterofl and fedrolex; scalefl needs method.scaling = "width"'
        )
        if missing:
            yield (
                "forward alone is enough for that; for more exits, set blocks and positions, build what the last exit "
                "needs, and return the logits of each exit"
            )
        return
    yield f"{len(architecture.positions)} places; a level ends with one of them and has those before it"
    if isinstance(module, VisitsExits):
        yield "a hook after each exit can end the forward pass: a deployed model can stop at any exit"
    elif missing:
        yield (
            f"the module has no {_enumerate(missing, 'and')}: it trains all the same, but its exits are computed all "
            "at once, so that a deployed model cannot stop early; inherit from fleetfit.architecture.ExitModel for that"
        )
    else:
        yield "start, segment and head are there and give what forward gives: a deployed model can stop at any exit"


def describe_proof(report: LayoutReport) -> Iterator[str]:
    """Yield the results of the proof: permutations, levels, and small models."""
    errors = ", ".join(f'"{axis}" by {error:.0e}' for axis, error in report.permutation.items())
    if errors:
        verdict = "permuting" if report.not_proved else "the layout is right: permuting"
        yield f"{verdict} axes everywhere moves the outputs by nothing but rounding ({errors})"
    untried = [axis for axis in report.axes if axis not in report.permutation]
    if untried:
        yield f"of one granule, nothing to permute: {', '.join(untried)}"
    yield f"{_count(len(report.levels), 'level')} built: every tensor has the predicted shape, and the state loads"
    yield from report.describe_cuts()


# ---- words ---------------------------------------------------------------------------------------------------------


def _enumerate(words: Sequence[str], last: str) -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _find_dimensions(layout: Layout, name: str, axis: str | None) -> tuple[int, ...]:
    """Return the dimensions of a tensor that follow an axis, or no axis at all."""
    followed = [{axis for segment in dim for axis in segment.axes} for dim in layout.tensors[name].dims]
    return tuple(d for d, axes in enumerate(followed) if (axis in axes if axis is not None else not axes))


def _list_tensors(users: Mapping[str, tuple[int, ...]], layout: Layout) -> str:
    """Return tensors with their dimensions; those that several blocks or classifiers share as one."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name, dims in users.items():
        index = "" if len(layout.tensors[name].dims) == 1 else f"[{', '.join(map(str, dims))}]"
        number = _NUMBER.search(name)
        groups.setdefault((_NUMBER.sub(r"\1\2.#", name), index), []).append(int(number[3]) if number else 0)
    words = [name.replace("#", format_ranges(numbers, ",")) + index for (name, index), numbers in groups.items()]
    return join_some(words, _MAX_LISTED)


def _has_order(dim: Sequence[Segment]) -> bool:
    """Return whether a dimension that moves is something else than one axis."""
    first = dim[0]
    return any(s.axes for s in dim) and (len(dim) > 1 or first.per > 1 or bool(first.within))


def _format_dimension(dim: Sequence[Segment]) -> str:
    """Return segments as a sum of products, outermost factor first."""
    parts = [(segment, len(list(members))) for segment, members in itertools.groupby(dim)]
    return " + ".join(f"{n} x {_format_segment(s)}" if n > 1 else _format_segment(s) for s, n in parts)


def _format_segment(segment: Segment) -> str:
    if segment.axis is None:
        return str(segment.per)
    if segment.within:
        inner = _format_dimension(segment.within)
        return f"{segment.axis} x {f'({inner})' if ' + ' in inner else inner}"
    return f"{segment.axis} x {segment.per}" if segment.per > 1 else segment.axis
