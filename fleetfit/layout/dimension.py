"""What one dimension of a tensor is made of: read off its growth, or declared where growth leaves several ways."""

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence

from fleetfit.errors import ModelError
from fleetfit.layout.axes import Axis
from fleetfit.layout.declare import Declaration
from fleetfit.layout.layout import Segment
from fleetfit.layout.undeclared import concatenated, multiplied, stacked_or_flat


def dimension(
    axes: Mapping[str, Axis], name: str, d: int, size: int, growth: Mapping[str, int], declared: Sequence[Declaration]
) -> tuple[Segment, ...]:
    """Explain one dimension by stretches of axes.

    Args:
        axes: The architecture's axes.
        name: The tensor.
        d: The dimension.
        size: Its size in the full model.
        growth: By axis that moves it, how much it grows when that axis grows by one granule.
        declared: What is declared of the tensor.

    Raises:
        Undeclared: Growth leaves several ways, and no declaration says which.
        ModelError: No way gives this growth, or a declaration contradicts it.
    """
    where = f'"{name}", dimension {d} of size {size}'
    ours = [x for x in declared if x.of_dimension and x.dim in (None, d)]
    if not growth:
        wrong = next((x for x in ours if x.dim == d), None)
        if wrong is not None:
            raise ModelError(
                f"{where} is declared {wrong.kind}, but no axis moves it. Remove the declaration or mend its dim."
            )
        return (Segment(None, size),)
    alone = next(iter(growth)) if len(growth) == 1 else None
    if alone is not None:
        for plain in (Segment(alone), Segment(alone, per_granule=True)):
            if _fits((plain,), axes, size, growth):
                return (plain,)
    for one in ours:
        stretches = tuple(_stretches(one, axes, growth))
        if _fits(stretches, axes, size, growth):
            return stretches
    return _unexplained(axes, where, name, d, size, growth, ours)


def explains(one: Declaration, axes: Mapping[str, Axis], found: Sequence[Segment]) -> bool:
    """Tell whether a declaration is what explains a dimension; growth alone explains whole axes."""
    moving = {axis: 0 for s in found for axis in s.axes}
    plain = len(found) == 1 and found[0] in (Segment(found[0].axis), Segment(found[0].axis, per_granule=True))
    return bool(moving) and not plain and tuple(_stretches(one, axes, moving)) == tuple(found)


def _fits(stretches: Sequence[Segment], axes: Mapping[str, Axis], size: int, growth: Mapping[str, int]) -> bool:
    return _total(stretches, axes) == size and _grown(stretches, axes) == dict(growth)


def _total(stretches: Sequence[Segment], axes: Mapping[str, Axis], larger: str = "") -> int:
    sizes = {name: axis.size + axis.granule * (name == larger) for name, axis in axes.items()}
    return sum(s.length(axes, sizes) for s in stretches)


def _grown(stretches: Sequence[Segment], axes: Mapping[str, Axis]) -> dict[str, int]:
    """Return by how much stretches grow with one more granule of each axis that moves them."""
    moving = [axis for axis in axes if any(axis in s.axes for s in stretches)]
    return {axis: _total(stretches, axes, axis) - _total(stretches, axes) for axis in moving}


def _stretches(one: Declaration, axes: Mapping[str, Axis], growth: Mapping[str, int]) -> Iterator[Segment]:
    """Yield the stretches that a declaration means in a dimension that these axes move."""
    if one.kind == "product":
        yield from _multiplied(one.parts)
    elif one.kind == "segments":
        for part in one.parts:
            if isinstance(part, int):
                yield Segment(None, part)
            elif isinstance(part, Declaration):
                found = _multiplied(part.parts)
                yield from (s for s in found if set(s.axes) <= growth.keys())
            else:
                yield from (Segment(axis) for axis in axes if fnmatch.fnmatchcase(axis, part) and axis in growth)
    elif len(growth) == 1:
        (axis,) = growth
        yield from (Segment(axis),) * one.factor if one.kind == "blocked" else (Segment(axis, per=one.factor),)


def _multiplied(factors: Sequence[str | int | Declaration]) -> tuple[Segment, ...]:
    """Return the stretches of a product, outermost factor first."""
    copies = 1
    for i, factor in enumerate(factors):
        if isinstance(factor, int):
            copies *= factor
            continue
        inner = _multiplied(factors[i + 1 :])
        fixed = not inner[0].axes
        mine = Segment(str(factor), per=inner[0].per) if fixed else Segment(str(factor), within=inner)
        return (mine,) * copies
    return (Segment(None, copies),)


def _unexplained(
    axes: Mapping[str, Axis],
    where: str,
    name: str,
    d: int,
    size: int,
    growth: Mapping[str, int],
    declared: Sequence[Declaration],
) -> tuple[Segment, ...]:
    """Raise what there is to say of a dimension that nothing explains."""
    proportional = all(by * axes[axis].size == size * axes[axis].granule for axis, by in growth.items())
    composed = [x for x in declared if x.kind in ("segments", "product")]
    if composed and not (proportional and len(growth) == 1):
        stretches = tuple(_stretches(composed[0], axes, growth))
        raise ModelError(
            f"{where}: {composed[0]} adds up to {_total(stretches, axes)} and grows by {_grown(stretches, axes)} per "
            f"granule, but the builder has {size} and {dict(growth)}."
        )
    if len(growth) > 1 and proportional and size % math.prod(axes[axis].size for axis in growth) == 0:
        raise multiplied(name, where, size, growth, axes)
    if len(growth) > 1 or not proportional:
        raise concatenated(name, where, size, growth, axes)
    axis, slope = next(iter(growth.items()))
    if size % axes[axis].size:
        raise ModelError(
            f'{where} has {slope} elements per granule of axis "{axis}" ({axes[axis].granule} channels): neither one '
            "per granule nor a whole number per channel. Set the axis's granule so that it divides."
        )
    raise stacked_or_flat(name, where, axis, d, size // axes[axis].size, declared)
