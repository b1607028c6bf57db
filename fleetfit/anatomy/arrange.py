"""The order of places that growth leaves open, read off a guided pass of a small model.

The model has three granules of each axis: two would not tell an order from its reverse. Where growth alone tells the
places of a dimension, its labels get the axis's granules as tags; what a pass has united with them has the same tag.
Products of axes are read from one pass for each axis.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fleetfit.anatomy.architecture import Architecture, make_input
from fleetfit.anatomy.growth import Growing, Growth, OddOrder, fits, read_runs
from fleetfit.anatomy.guided import NotRead, run_guided, run_labeled
from fleetfit.anatomy.hints import explain_errors, find_fixed_groups
from fleetfit.anatomy.kernels import plain_kernels
from fleetfit.anatomy.labels import LabeledPass
from fleetfit.anatomy.weight_norms import settle_norms
from fleetfit.errors import ModelError, format_cause
from fleetfit.layout import Dimension, Layout, Segment, Segments, TensorLayout
from fleetfit.machine import isolate_torch_state
from fleetfit.seeds import isolate_rng, make_torch_rng

_GRANULES = 3
_BATCH = 2
Sizes = Mapping[str, int]
Build = Callable[[Sizes], nn.Module]


@isolate_torch_state()
def arrange(
    architecture: Architecture, build: Build, input_shape: Sequence[int] | None, growing: Growing
) -> dict[Dimension, Segments]:
    """Return the segments of the dimensions that growth does not explain.

    Args:
        architecture: The model family.
        build: Builds its module with the exits in question.
        input_shape: Shape of one sample; None: there is no pass.
        growing: What growth tells.

    Raises:
        ModelError: No pass shows how a dimension is arranged, or the full model does not accept such samples.
    """
    if input_shape is None:
        raise _explain(growing, NotRead("it takes input_shape, the shape of one sample", "Pass it."))
    axes = growing.axes
    full = {name: axis.size for name, axis in axes.items()}
    # Rows of a table that forward indexes, such as positions, are all there.
    small = {name: n if axes[name].ordered else _GRANULES * axes[name].granule for name, n in full.items()}
    for sizes, is_guided in ((small, True), (small, False), (full, True)):
        try:
            return _Reader(architecture, build, input_shape, growing, sizes, is_guided).read()
        except NotRead as error:
            reason = error
        except Exception as error:  # a forward that does not run at these sizes may fail in any way
            reason = NotRead(f"forward fails with {format_cause(error, typed=True).rstrip('.')}")
    module = build(full)
    with plain_kernels(), explain_errors(architecture, input_shape):
        module.eval()(make_input(architecture, input_shape, _BATCH, make_torch_rng("arrange")))
    dims: dict[str, list[Segments]] = {}
    for (name, _), segments in growing.known.items():
        dims.setdefault(name, []).append(segments)
    known = Layout(axes, (), {name: TensorLayout(tuple(own), None, None, True) for name, own in dims.items()})
    raise _explain(growing, reason, find_fixed_groups(known, module, build(small), axes))


def _explain(growing: Growing, reason: NotRead, groups: str = "") -> ModelError:
    name, d = growing.open[0]
    moving = " and ".join(f'"{axis}"' for axis in growing.growth[name, d])
    more = f" (and {len(growing.open) - 1} more)" if len(growing.open) > 1 else ""
    return ModelError(
        f'"{name}", dimension {d} of size {growing.sizes[name, d]}{more} moves with {moving}, and '
        f"a forward pass does not show the order of its places: {reason}.{groups or f' {reason.advice}'}",
        key="model",
    )


class _View:
    """The units of a pass: which are fixed, and by unit its axis and granule (`tags`)."""

    def __init__(self, labeled: LabeledPass) -> None:
        self._ranges, (self._units, self._fixed) = labeled.ranges, labeled.find_units()
        self.tags: dict[int, tuple[str, int]] = {}
        labeled.release()

    def list_units(self, dim: Dimension) -> list[int]:
        """Return the unit of each place of a dimension."""
        labels = self._ranges.get(dim, range(0))
        units: list[int] = self._units[labels.start : labels.stop].tolist()
        return units

    def is_fixed(self, unit: int) -> bool:
        """Return whether a unit moves with no axis."""
        return unit not in self.tags and unit in self._fixed


@dataclass
class _Reader:
    """Reads arrangements off passes of a model of some sizes."""

    architecture: Architecture
    build: Build
    input_shape: Sequence[int]
    growing: Growing
    sizes: Sizes
    is_guided: bool

    def read(self) -> dict[Dimension, Segments]:
        """Return the segments of the dimensions that growth does not explain.

        Raises:
            NotRead: The passes do not show them.
        """
        growth = self.growing.growth
        result: dict[Dimension, Segments] = {}
        view = self._run(self._list_axes(self.growing.open), {})
        for dim in self.growing.open:
            try:
                result[dim] = self._check(dim, list(self._parse(view, view.list_units(dim), growth[dim])))
            except NotRead:
                continue
        left = [dim for dim in self.growing.open if dim not in result]
        views = {axis: self._run([axis], result) for axis in self._list_axes(left)}
        for dim in left:
            result[dim] = self._check(
                dim, list(self._parse_stretches(dim, {axis: views[axis] for axis in growth[dim]}))
            )
        return result

    def _list_axes(self, dims: Sequence[Dimension]) -> list[str]:
        return [axis for axis in self.growing.axes if any(axis in self.growing.growth[dim] for dim in dims)]

    def _check(self, dim: Dimension, segments: Sequence[Segment]) -> Segments:
        """Return segments that fit the full model."""
        if not fits(tuple(segments), self.growing.axes, self.growing.sizes[dim], self.growing.growth[dim]):
            raise NotRead("what it shows of a smaller model has another size in the full one")
        return tuple(segments)

    def _run(self, followed: Sequence[str], read: Mapping[Dimension, Segments]) -> _View:
        """Run the passes that follow some axes, and tag units of dimensions that growth or another pass explains."""
        axes = self.growing.axes
        rng = make_torch_rng("arrange")
        with isolate_rng(torch.device("cpu"), 0), plain_kernels():
            x = make_input(self.architecture, self.input_shape, _BATCH, rng)
            module = self._build(self.sizes)
            if self.is_guided:
                larger = {name: n + axes[name].granule * (name in followed) for name, n in self.sizes.items()}
                labeled = run_guided(module, self._build(larger), x)
            else:
                labeled = LabeledPass(module, x)
                run_labeled(module, x, labeled)
        view = _View(labeled)
        for dim, segments in {**self.growing.known, **read}.items():
            units, start = view.list_units(dim), 0
            for segment in segments:
                n, axis = segment.length(axes, self.sizes), segment.axis
                if axis is not None and axis in followed and not segment.within:
                    members = 1 if segment.per_granule else axes[axis].granule * segment.per
                    for i, unit in enumerate(units[start : start + n]):
                        view.tags.setdefault(unit, (axis, i // members))
                start += n
        return view

    def _build(self, sizes: Sizes) -> nn.Module:
        module = self.build(sizes)
        settle_norms(module)
        return module

    # ---- one axis at each place ----------------------------------------------------------------------------------

    def _parse(self, view: _View, units: Sequence[int], growth: Growth) -> Iterator[Segment]:
        """Yield the segments of places that move with one axis each, or with none."""
        tags = self._list_tags(view, units, growth)
        if not tags:
            raise NotRead("it has places in a kernel")
        axes = self.growing.axes
        try:
            runs = read_runs(tags, {axis: n // axes[axis].granule for axis, n in self.sizes.items()})
        except OddOrder as error:
            raise NotRead("channels come in another order in one place than in another") from error
        for axis, n in runs:
            granule = 1 if axis is None else axes[axis].granule
            if n % granule == 0:
                yield Segment(axis, per=n // granule)
            elif axis is not None and n == 1:
                yield Segment(axis, per_granule=True)
            else:
                raise NotRead(f'{n} places for each granule of axis "{axis}"')

    def _list_tags(self, view: _View, units: Sequence[int], growth: Growth) -> list[tuple[str, int] | None]:
        """Return the tag of each place, None for fixed ones; free ones get tags."""
        is_free = [unit not in view.tags and not view.is_fixed(unit) for unit in units]
        start = 0
        for free, members in itertools.groupby(range(len(units)), is_free.__getitem__):
            stretch = [units[i] for i in members]
            if free:
                if len(growth) > 1:
                    raise NotRead("nothing shows which axis a place follows")
                self._tag_free(view, stretch, next(iter(growth)))
            start += len(stretch)
        tags = [view.tags.get(unit) for unit in units]
        if any(tag is not None and tag[0] not in growth for tag in tags):
            raise NotRead("places follow an axis that does not move them")
        return tags

    def _tag_free(self, view: _View, units: Sequence[int], axis: str) -> None:
        """Tag a stretch of units that follow nothing: any order is right that is the same everywhere.

        Each channel owns its neighbors, or all channels come several times, or units come as they come first.
        """
        granule = self.growing.axes[axis].granule
        count, length = self.sizes[axis] // granule, len(units)
        first = {unit: i for i, unit in enumerate(dict.fromkeys(units))}
        ways = (
            [i * count // length for i in range(length)],
            [i % self.sizes[axis] // granule for i in range(length)],
            [first[unit] * count // len(first) for unit in units],
        )
        for way in ways:
            chosen: dict[int, int] = {}
            if length % count == 0 and all(chosen.setdefault(u, g) == g for u, g in zip(units, way, strict=True)):
                view.tags |= {unit: (axis, g) for unit, g in chosen.items()}
                return
        raise NotRead(f'no order of the channels of axis "{axis}" fits')

    # ---- products ------------------------------------------------------------------------------------------------

    def _parse_stretches(self, dim: Dimension, views: Mapping[str, _View]) -> Iterator[Segment]:
        """Yield the segments of a dimension, some of them products: by stretches of places that the same axes move."""
        units = {axis: view.list_units(dim) for axis, view in views.items()}
        length = min(map(len, units.values()))
        moving = [
            tuple(axis for axis in views if not views[axis].is_fixed(units[axis][place])) for place in range(length)
        ]
        if not length:
            raise NotRead("it has places in a kernel")
        start = 0
        for axes, members in itertools.groupby(moving):
            end = start + sum(1 for _ in members)
            if not axes:
                yield Segment(None, end - start)
            elif len(axes) == 1:
                yield from self._parse(views[axes[0]], units[axes[0]][start:end], {axes[0]: 1})
            else:
                while start < end:
                    factors = self._find_product(views, {a: units[a][start:end] for a in axes})
                    yield from multiply(factors)
                    start += math.prod(self._get_sizes(factors))
            start = end

    def _get_sizes(self, factors: Sequence[str | int]) -> list[int]:
        return [self.sizes[f] if isinstance(f, str) else f for f in factors]

    def _find_product(self, views: Mapping[str, _View], units: Mapping[str, Sequence[int]]) -> tuple[str | int, ...]:
        """Return the factors, outermost first, of the longest product at the start of a stretch."""
        length = min(map(len, units.values()))
        one = math.prod(self.sizes[axis] for axis in units)
        for number in range(length // one, 0, -1):
            all_factors: list[str | int] = [*([number] if number > 1 else []), *units]
            for factors in itertools.permutations(all_factors):
                if all(self._agrees(views[axis], units[axis], axis, factors) for axis in units):
                    return factors
        raise NotRead("no product of axes has this order")

    def _agrees(self, view: _View, units: Sequence[int], axis: str, factors: tuple[str | int, ...]) -> bool:
        """Return whether the places of a product are the same granule of an axis where they are one unit."""
        sizes = self._get_sizes(factors)
        at = factors.index(axis)
        inner, granule = math.prod(sizes[at + 1 :]), self.growing.axes[axis].granule
        chosen: dict[int, int] = {}
        for place, unit in enumerate(units[: math.prod(sizes)]):
            g = place // inner % sizes[at] // granule
            if view.tags.get(unit, (axis, g)) != (axis, g) or chosen.setdefault(unit, g) != g:
                return False
        return True


def multiply(factors: Sequence[str | int]) -> Segments:
    """Return the segments of a product, outermost factor first."""
    copies = 1
    for i, factor in enumerate(factors):
        if isinstance(factor, int):
            copies *= factor
            continue
        inner = multiply(factors[i + 1 :])
        is_fixed = not inner[0].axes
        return (Segment(factor, per=inner[0].per) if is_fixed else Segment(factor, within=inner),) * copies
    return (Segment(None, copies),)
