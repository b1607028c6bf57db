"""A layout in plain words: what scales and where, what was inferred, what is declared, which exits there are."""

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from fleetfit.check import LayoutReport
from fleetfit.layout import Architecture, Axis, Declaration, Layout, Segment, explains

_NUMBER = re.compile(r"(^|\.)(blocks|heads)\.(\d+)(?=\.)")
_MOST_LISTED = 8
_MOST_PLACED = 3  # tensors of one block that are named
_SEGMENTS = ("start", "segment", "head")


def what_scales(architecture: Architecture) -> Iterator[str]:
    """Yield a line per axis, and one for the depth; nothing is built for it."""
    for name, axis in architecture.axes.items():
        yield f'axis "{name}": {_described(axis)}'
    yield f"depth: {_count(architecture.blocks, 'block')}; {_places(architecture)}"
    why = getattr(architecture, "size_dependent", "")
    if why:
        yield f"a narrow model computes something else than the full one with its other channels zeroed: {why}"


def what_was_inferred(layout: Layout) -> Iterator[str]:
    """Yield a line per axis, where it appears, and one for what has a fixed size."""
    sizes = {name: _numbers(shape) for name, shape in layout.shapes({}, layout.exits).items()}
    total = sum(n for name, n in sizes.items() if layout.tensors[name].trainable)
    for axis in layout.axes:
        users = {name: dims for name in layout.tensors if (dims := _dimensions(layout, name, axis))}
        if not users:
            yield f'"{axis}" appears nowhere: remove the axis, or use its size in build.'
            continue
        moved = sum(sizes[name] for name in users if layout.tensors[name].trainable)
        told = sum(_is_told(layout.tensors[name].dims[d]) for name, dims in users.items() for d in dims)
        yield (
            f'"{axis}": {_count(sum(map(len, users.values())), "dimension")}{f" ({told} as declared)" if told else ""} '
            f"of {_count(len(users), 'tensor')} with {moved:,} of {total:,} parameters: {_listed(users, layout)}"
        )
    fixed = {name: dims for name in layout.tensors if (dims := _dimensions(layout, name, None))}
    if fixed:
        yield f"fixed size: {_count(sum(map(len, fixed.values())), 'dimension')}: {_listed(fixed, layout)}"
    found = list(_found_by_building(layout))
    if found:
        yield f"with fewer exits, by building it so: {'; '.join(found)}"


def _found_by_building(layout: Layout) -> Iterator[str]:
    """Yield what comes with each block and each exit, where names do not say it."""
    places: dict[str, list[str]] = {}
    for name, tensor in layout.tensors.items():
        said = {match[0].strip(".") for match in _NUMBER.finditer(name)}
        if tensor.exit is not None and f"heads.{tensor.exit}" not in said:
            places.setdefault(f"the exit after block {tensor.exit} has", []).append(name)
        elif tensor.exit is None and tensor.block is not None and f"blocks.{tensor.block}" not in said:
            places.setdefault(f"block {tensor.block} has", []).append(name)
    for place, names in list(places.items())[:_MOST_LISTED]:
        more = f" and {len(names) - _MOST_PLACED} more" if len(names) > _MOST_PLACED else ""
        yield f"{place} {', '.join(names[:_MOST_PLACED])}{more}"
    if len(places) > _MOST_LISTED:
        yield f"and {len(places) - _MOST_LISTED} more likewise"
    if layout.by_order:
        yield "classifiers are numbered in their order, so that a level has the first ones"


def what_is_declared(architecture: Architecture, layout: Layout) -> Iterator[str]:
    """Yield a line per declaration: what it says, and where it is in force."""
    declared: Mapping[str, Declaration | tuple[Declaration, ...]] = getattr(architecture, "declared", {})
    for pattern, value in declared.items():
        for one in value if isinstance(value, tuple) else (value,):
            yield f'"{pattern}": {one}: {_in_force(one, pattern, layout)}'
    if not declared:
        yield "nothing, and nothing has to be"


def what_exits(architecture: Architecture, module: nn.Module) -> Iterator[str]:
    """Yield what can be done with the exits of a module, and what it lacks."""
    missing = [name for name in _SEGMENTS if not hasattr(module, name)]
    if len(architecture.positions) == 1:
        yield (
            "one, after the last block: nothing can stop early, and levels differ in width only, as with methods "
            'heterofl and fedrolex; scalefl needs method.split = "width"'
        )
        if missing:
            yield (
                "forward alone is enough for that; for more exits, set blocks and positions, build what the last exit "
                "needs, and return the logits of each exit"
            )
        return
    yield f"{len(architecture.positions)} places; a level ends with one of them and has those before it"
    if missing:
        yield (
            f"the module has no {_enumerated(missing, 'and')}: it trains all the same, but its exits are computed all "
            "at once, so that a deployed model cannot stop early; inherit from fleetfit.ExitModel for that"
        )
    else:
        yield "start, segment and head are there and give what forward gives: a deployed model can stop at any exit"


def what_was_proved(report: LayoutReport) -> Iterator[str]:
    """Yield what a permutation of each axis did, and that the levels are what was predicted."""
    moved = ", ".join(f'"{axis}" by {by:.0e}' for axis, by in report.permutation.items())
    if moved:
        right = "permuting" if report.not_proved else "the layout is right: permuting"
        yield f"{right} axes everywhere moves the outputs by nothing but rounding ({moved})"
    untried = [axis for axis in report.axes if axis not in report.permutation]
    if untried:
        yield f"of one granule, nothing to permute: {', '.join(untried)}"
    yield f"{_count(len(report.levels), 'level')} built: every tensor has the predicted shape, and the state loads"
    yield from report.on_cuts()


# ---- words ---------------------------------------------------------------------------------------------------------


def _described(axis: Axis) -> str:
    if not axis.scaled:
        return f"{axis.size}, never cut"
    steps = "one by one" if axis.granule == 1 else f"in groups of {axis.granule}, {axis.size // axis.granule} in all"
    return f"{_count(axis.size, 'channel')}, cut {steps}" + (f"; from block {axis.block} on" if axis.block else "")


def _places(architecture: Architecture) -> str:
    positions = tuple(architecture.positions)
    if positions == tuple(range(1, architecture.blocks + 1)) and len(positions) > 1:
        return "a classifier may sit after any of them"
    return f"a classifier may sit after block {_enumerated([str(p) for p in positions], 'or')}"


def _enumerated(words: Sequence[str], last: str) -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _numbers(shape: Sequence[int]) -> int:
    found = 1
    for n in shape:
        found *= n
    return found


def _dimensions(layout: Layout, name: str, axis: str | None) -> tuple[int, ...]:
    """Return the dimensions of a tensor that follow an axis, or no axis at all."""

    def follows(dim: Sequence[Segment]) -> bool:
        return not any(s.axes for s in dim) if axis is None else any(axis in s.axes for s in dim)

    return tuple(d for d, dim in enumerate(layout.tensors[name].dims) if follows(dim))


def _is_told(dim: Sequence[Segment]) -> bool:
    """Tell whether a dimension needed a declaration."""
    return len(dim) > 1 or dim[0].per > 1 or bool(dim[0].within)


def _listed(users: Mapping[str, tuple[int, ...]], layout: Layout) -> str:
    """Return tensors with their dimensions, what several blocks or classifiers have alike as one."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name, dims in users.items():
        vector = len(layout.tensors[name].dims) == 1
        shown = "" if vector else f"[{', '.join(map(str, dims))}]"
        number = _NUMBER.search(name)
        groups.setdefault((_NUMBER.sub(r"\1\2.#", name), shown), []).append(int(number[3]) if number else 0)
    words = [name.replace("#", _ranges(numbers)) + shown for (name, shown), numbers in groups.items()]
    more = f" and {len(words) - _MOST_LISTED} more" if len(words) > _MOST_LISTED else ""
    return ", ".join(words[:_MOST_LISTED]) + more


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in short: 0-2,5."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _in_force(one: Declaration, pattern: str, layout: Layout) -> str:
    if one.kind == "alias":
        names = [name for name in layout.aliases if fnmatch.fnmatchcase(name, pattern)]
        said = "the same tensor under another name, kept and averaged once"
        return f"{', '.join(names)}: {said}" if names else "matches no second name of a tensor; remove it"
    matching = [name for name in layout.tensors if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
        return "matches no tensor; remove or mend it"
    if not one.of_dimension:
        what = f"part of block {one.factor}" if one.kind == "block" else f"part of the exit after block {one.factor}"
        return f"{what}: {_count(len(matching), 'tensor')}"
    used = {name: dims for name in matching if (dims := _uses(one, layout, layout.tensors[name].dims))}
    if not used:
        return "not needed; growth alone tells"
    meaning = {
        "blocked": f"{one.factor} stacked copies of an axis",
        "interleaved": f"each channel owns {one.factor} neighbours",
        "segments": "a concatenation",
        "product": "a product, outermost factor first",
    }[one.kind]
    return f"{meaning}, in {_count(sum(map(len, used.values())), 'dimension')}: {_listed(used, layout)}"


def _uses(one: Declaration, layout: Layout, dims: Sequence[Sequence[Segment]]) -> tuple[int, ...]:
    """Return the dimensions that a declaration explains."""
    return tuple(d for d, dim in enumerate(dims) if one.dim in (None, d) and explains(one, layout.axes, dim))
