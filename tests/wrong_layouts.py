"""A generator of wrong layouts: each is a right one with a mistake that people make, and shapes that still add up.

A dimension is written as its factors, outermost first: three stacked copies of an axis are (3, axis), neighbors of a
channel (axis, 4), fused heads (3, heads, 8). Mistakes reorder them, split or merge numbers, take one axis for another
or for none, reorder what is concatenated, turn a tensor, change a granule, untie an axis, or misplace a tensor in
depth; in one tensor, in all of its kind, or in all tensors with a dimension like it, alone or two at a time.
"""

import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.anatomy import Architecture, Axis, Layout, Segment, TensorLayout
from fleetfit.submodel import Submodel, extract

Dimension = tuple[Segment, ...]
Factors = tuple[int | str, ...]


@dataclass(frozen=True)
class Wrong:
    """A wrong layout.

    Attributes:
        kind: The kind of mistake.
        what: The mistake, in words.
        architecture: The family that makes it.
        layout: Its layout.
    """

    kind: str
    what: str
    architecture: Architecture
    layout: Layout


class Told(Architecture):
    """A family that says other axes of itself than it has; `twins` are those that it does not build."""

    def __init__(self, inner: Architecture, axes: Mapping[str, Axis], twins: Mapping[str, str]) -> None:
        self.inner, self.axes, self.twins = inner, dict(axes), dict(twins)
        self.blocks, self.tokens = inner.blocks, getattr(inner, "tokens", 0)
        self.positions = tuple(inner.positions)

    def sizes(self, width: float) -> dict[str, int]:
        theirs = self.inner.sizes(width)
        full_sizes = {}
        for name, axis in self.axes.items():
            n = theirs[self.twins.get(name, name)]
            full_sizes[name] = max(1, n // axis.granule) * axis.granule
        return full_sizes

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return self.inner.build({name: axes[name] for name in self.inner.axes}, exits)


# ---- dimensions as factors -----------------------------------------------------------------------------------------


def factors_of(dim: Dimension) -> Factors | None:
    """Return the factors of a dimension, or None for a concatenation."""
    if len(set(dim)) > 1:
        return None
    segment = dim[0]
    copies: Factors = (len(dim),) if len(dim) > 1 else ()
    if segment.axis is None:
        return (*copies, segment.per)
    if segment.per_granule:
        return None
    if segment.within:
        inner = factors_of(segment.within)
        return None if inner is None else (*copies, segment.axis, *inner)
    return (*copies, segment.axis, *((segment.per,) if segment.per > 1 else ()))


def dimension_of(factors: Factors) -> Dimension:
    """Return the dimension of some factors."""
    numbers = [f for f in factors if isinstance(f, int)]
    if len(numbers) == len(factors):
        return (Segment(None, math.prod(numbers)),)
    first, rest = factors[0], factors[1:]
    if isinstance(first, int):
        return dimension_of(rest) * first
    if all(isinstance(f, int) for f in rest):
        return (Segment(first, per=math.prod(rest)),)  # type: ignore[arg-type]
    return (Segment(first, within=dimension_of(rest)),)


def misread(dim: Dimension, layout: Layout) -> Iterator[tuple[str, Dimension]]:
    """Yield what a dimension may be taken for, of the same size in the full model."""
    factors = factors_of(dim)
    if factors is not None:
        yield from _other_factors(factors, layout)
        yield from _other_axes(factors, layout)
    elif not any(s.per_granule for s in dim):
        for order in itertools.permutations(dim):
            yield "order of what is concatenated", order
        first, last = dim[0], dim[-1]
        if first.axis is None and first.per > 1:
            yield "a fixed part in two", (Segment(None, first.per - 1), *dim[1:], Segment(None, 1))
        if last.axis is None and last.per > 1:
            yield "a fixed part in two", (Segment(None, 1), *dim[:-1], Segment(None, last.per - 1))


def _other_factors(factors: Factors, layout: Layout) -> Iterator[tuple[str, Dimension]]:
    """Yield other orders of the factors, and of their numbers split or merged."""
    axes = [f for f in factors if isinstance(f, str)]
    numbers = [f for f in factors if isinstance(f, int)]
    splits = {tuple(numbers), (math.prod(numbers),)}
    if len(numbers) == 1:
        splits |= {(a, numbers[0] // a) for a in range(2, numbers[0]) if numbers[0] % a == 0}
    for split in sorted(splits):
        for order in itertools.permutations((*split, *axes)):
            yield "order or factor of copies", dimension_of(order)


def _other_axes(factors: Factors, layout: Layout) -> Iterator[tuple[str, Dimension]]:
    """Yield one axis for another, none where there is one, and one where there is none."""
    axes = [f for f in factors if isinstance(f, str)]
    size = math.prod(layout.axes[f].size if isinstance(f, str) else f for f in factors)
    for a, b in itertools.product(axes, layout.axes):
        if b not in axes and layout.axes[b].size == layout.axes[a].size:
            yield "another axis", dimension_of(tuple(b if f == a else f for f in factors))
    if axes:
        yield "no axis", (Segment(None, size),)
    for a, axis in layout.axes.items():
        if axis.scaled and a not in axes and size % axis.size == 0:
            yield "an axis too many", dimension_of((size // axis.size, a) if size > axis.size else (a,))
            if size > axis.size:
                yield "an axis too many", dimension_of((a, size // axis.size))


# ---- layouts -------------------------------------------------------------------------------------------------------


def wrong_layouts(architecture: Architecture, layout: Layout) -> Iterator[Wrong]:
    """Yield the wrong layouts of an architecture with one mistake, in a fixed order, each once."""
    seen = {_content(layout, layout)}
    every = itertools.chain(
        _misread(architecture, layout),
        _turned(architecture, layout),
        _granules(architecture, layout),
        _untied(architecture, layout),
        _misplaced(architecture, layout),
        _aliases(architecture, layout),
    )
    for wrong in every:
        content = _content(wrong.layout, layout)
        # an axis that is taken for another one everywhere is tied to it: nothing is wrong with that
        tied = wrong.kind == "another axis" and _axes_in(wrong.layout) < _axes_in(layout)
        if content not in seen and not tied:
            seen.add(content)
            yield wrong


def some_wrong(
    layouts: Iterable[Wrong], architecture: Architecture, layout: Layout, count: int, seed: int
) -> list[Wrong]:
    """Return so many of them, of each kind as many where there are enough, a fifth of them with two mistakes."""
    rng = random.Random(seed)
    kinds: dict[str, list[Wrong]] = {}
    for wrong in layouts:
        kinds.setdefault(wrong.kind, []).append(wrong)
    for members in kinds.values():
        rng.shuffle(members)
    chosen = [w for row in itertools.zip_longest(*kinds.values()) for w in row if w is not None][: count - count // 5]
    plain = [w for members in kinds.values() for w in members if w.architecture is architecture and w.kind != "aliases"]
    for _ in range(min(count // 5, len(plain) // 2)):
        one, two = rng.sample(plain, 2)
        tensors = {
            name: two.layout.tensors[name] if two.layout.tensors[name] != right else one.layout.tensors[name]
            for name, right in layout.tensors.items()
        }
        both = replace(layout, tensors=tensors)
        chosen.append(Wrong("two mistakes", f"{one.what}; {two.what}", architecture, both))
    return chosen


def _axes_in(layout: Layout) -> set[str]:
    return {axis for t in layout.tensors.values() for dim in t.dims for s in dim for axis in s.axes}


def relabeled(state: Mapping[str, Tensor], right: Layout, wrong: Layout) -> dict[str, Tensor] | None:
    """Return the state of which the right layout cuts what the wrong one cuts of this one; None where there is none.

    If the full model computes the same with it, the wrong layout is a right one too: units that are alike under other
    names.
    """
    changed = dict(state)
    for name, tensor in state.items():
        if name not in wrong.tensors or wrong.axes != right.axes:
            return None
        for d, (ours, theirs) in enumerate(zip(right.tensors[name].dims, wrong.tensors[name].dims, strict=True)):
            if ours != theirs:
                to, source = _places(ours, right), _places(theirs, right)
                if [len(p) for p in to] != [len(p) for p in source]:
                    return None
                order = torch.empty(tensor.shape[d], dtype=torch.long)
                order[torch.cat(to)] = torch.cat(source)
                changed[name] = changed[name].index_select(d, order)
    return changed


def _places(dim: Dimension, layout: Layout) -> list[Tensor]:
    """Return the places of each combination of granules of a dimension's axes, in the order in which they are cut."""
    axes = sorted({axis for s in dim for axis in s.axes})
    alone = Layout(layout.axes, layout.exits, {"": TensorLayout((dim,), None, None, True)})
    places = {"": torch.arange(float(alone.shapes({}, layout.exits)[""][0]))}
    granules = [range(layout.axes[a].size // layout.axes[a].granule) for a in axes]
    combinations = []
    for chosen in itertools.product(*granules):
        ranges = {
            a: range(g * layout.axes[a].granule, (g + 1) * layout.axes[a].granule)
            for a, g in zip(axes, chosen, strict=True)
        }
        combinations.append(extract(alone, places, Submodel(ranges, layout.exits))[""].long())
    return combinations


def _content(wrong: Layout, right: Layout) -> Any:
    """Return what a layout is, as far as it differs from another one: most have nearly all tensors of that one."""
    changed = [(n, t) for n, t in wrong.tensors.items() if t is not right.tensors.get(n) and t != right.tensors.get(n)]
    lacking = [n for n in right.tensors if n not in wrong.tensors]
    return tuple(wrong.axes.items()), tuple(changed), tuple(lacking), tuple(wrong.aliases.items())


def _with_dims(layout: Layout, changes: Mapping[tuple[str, int], Dimension]) -> Layout:
    tensors = dict(layout.tensors)
    for (name, d), dim in changes.items():
        dims = tensors[name].dims
        tensors[name] = replace(tensors[name], dims=(*dims[:d], dim, *dims[d + 1 :]))
    return replace(layout, tensors=tensors)


@cache
def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _misread(architecture: Architecture, layout: Layout) -> Iterator[Wrong]:
    places = [(name, d, dim) for name, t in layout.tensors.items() for d, dim in enumerate(t.dims)]
    of_dim: dict[Dimension, list[tuple[str, int]]] = {}
    for name, d, dim in places:
        of_dim.setdefault(dim, []).append((name, d))
    taken_for = {dim: list(misread(dim, layout)) for dim in of_dim}
    for name, d, dim in places:
        alike = of_dim[dim]
        kin = [(n, e) for n, e in alike if e == d and _pattern(n) == _pattern(name)]
        for kind, taken in taken_for[dim]:
            for members in ([(name, d)], kin, alike):
                what = f"{members[0]}{' and alike' if len(members) > 1 else ''}: {kind}, {factors_of(taken) or taken}"
                yield Wrong(kind, what, architecture, _with_dims(layout, dict.fromkeys(members, taken)))


def _turned(architecture: Architecture, layout: Layout) -> Iterator[Wrong]:
    for name, tensor in layout.tensors.items():
        sizes = [sum(s.length(layout.axes, layout.full_sizes) for s in dim) for dim in tensor.dims]
        for a, b in itertools.combinations(range(len(sizes)), 2):
            if sizes[a] == sizes[b]:
                changes = {(name, a): tensor.dims[b], (name, b): tensor.dims[a]}
                yield Wrong("turned", f"{name}: {a} for {b}", architecture, _with_dims(layout, changes))


def _granules(architecture: Architecture, layout: Layout) -> Iterator[Wrong]:
    for name, axis in layout.axes.items():
        for granule in range(1, axis.size):
            if not axis.scaled or axis.size % granule or granule % axis.granule == 0:
                continue
            axes = {**layout.axes, name: replace(axis, granule=granule)}
            other = Told(architecture, axes, {})
            yield Wrong("granule", f"{name}: granule {granule}", other, replace(layout, axes=axes))


def _untied(architecture: Architecture, layout: Layout) -> Iterator[Wrong]:
    """An axis under two names: the second for one tensor, for every other one, or for those of a kind."""
    for name, axis in layout.axes.items():
        users = [n for n, t in layout.tensors.items() if any(name in s.axes for dim in t.dims for s in dim)]
        if not axis.scaled or axis.size == axis.granule:
            continue
        twin = f"{name}_too"
        axes = {**layout.axes, twin: axis}
        groups = {_pattern(n): [m for m in users if _pattern(m) == _pattern(n)] for n in users}
        for members in [users[::2], *groups.values(), *([n] for n in users)]:
            if len(members) < len(users):
                tensors = {
                    n: _renamed(t, name, twin) if n in members else t for n, t in layout.tensors.items()
                }  # fmt: skip
                other = Told(architecture, axes, {twin: name})
                yield Wrong("untied", f"{name} in {members[:3]}", other, replace(layout, axes=axes, tensors=tensors))


def _renamed(tensor: TensorLayout, axis: str, twin: str) -> TensorLayout:
    def named(segment: Segment) -> Segment:
        return replace(
            segment,
            axis=twin if segment.axis == axis else segment.axis,
            within=tuple(named(inner) for inner in segment.within),
        )

    return replace(tensor, dims=tuple(tuple(named(s) for s in dim) for dim in tensor.dims))


def _misplaced(architecture: Architecture, layout: Layout) -> Iterator[Wrong]:
    for name, tensor in layout.tensors.items():
        for block, exit_ in ((None, None), (0, None), (architecture.blocks - 1, None), (None, layout.exits[0])):
            if (block, exit_) != (tensor.block, tensor.exit) and len(layout.exits) > 1:
                moved = {**layout.tensors, name: replace(tensor, block=block, exit=exit_)}
                yield Wrong("depth", f"{name}: {block}, {exit_}", architecture, replace(layout, tensors=moved))


def _aliases(architecture: Architecture, layout: Layout) -> Iterator[Wrong]:
    for one, other in itertools.permutations(layout.tensors, 2):
        if layout.tensors[one].dims == layout.tensors[other].dims:
            tensors = {name: t for name, t in layout.tensors.items() if name != one}
            aliases = {**layout.aliases, one: other}
            what = f"{one} for {other}"
            yield Wrong("aliases", what, architecture, replace(layout, tensors=tensors, aliases=aliases))
