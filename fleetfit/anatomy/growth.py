"""How dimensions grow with the axes, and what explains it."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleetfit.errors import ModelError
from fleetfit.layout import Axis, Dimension, Segment, Segments, get_length

Growth = Mapping[str, int]
"""By axis how much a dimension grows when that axis grows by one granule."""


@dataclass(frozen=True)
class Growing:
    """What growth tells of a model.

    Attributes:
        axes: The architecture's axes.
        sizes: The size in the full model of each dimension that grows.
        growth: How each of them grows.
        known: The segments of those that growth explains.
    """

    axes: Mapping[str, Axis]
    sizes: Mapping[Dimension, int]
    growth: Mapping[Dimension, Growth]
    known: Mapping[Dimension, Segments]

    @property
    def open(self) -> list[Dimension]:
        """The dimensions that growth does not explain."""
        return [dim for dim in self.growth if dim not in self.known]


class OddOrder(Exception):
    """Channels come in another order in one place than in another, or not all of them; its `args` are their axes."""


def read_runs(tags: Sequence[tuple[str, int] | None], counts: Mapping[str, int]) -> list[tuple[str | None, int]]:
    """Return the axes of a dimension's places in order: all granules of one each time, or None for places of no axis.

    Args:
        tags: The axis and granule of each place, None for fixed ones.
        counts: The number of granules of each axis.

    Returns:
        Axes with their places per granule; None with the number of places.

    Raises:
        OddOrder: The granules of an axis do not follow each other.
    """
    runs: list[tuple[str | None, int]] = []
    start = 0
    while start < len(tags):
        tag, places = next(itertools.groupby(tags[start:]))
        n = len(list(places))
        axis, end = (None, start + n) if tag is None else (tag[0], start + n * counts[tag[0]])
        if axis is not None and list(tags[start:end]) != [(axis, g) for g in range(counts[axis]) for _ in range(n)]:
            raise OddOrder(*sorted({tag[0] for tag in tags[start:end] if tag}))
        runs.append((axis, n))
        start = end
    return runs


def fits(segments: Segments, axes: Mapping[str, Axis], size: int, growth: Growth) -> bool:
    """Return whether segments have a dimension's size and growth in the full model."""
    full = {name: axis.size for name, axis in axes.items()}
    moving = {axis for s in segments for axis in s.axes}
    larger = {a: get_length(segments, {**full, a: full[a] + axes[a].granule}, axes) - size for a in moving}
    return get_length(segments, full, axes) == size and larger == dict(growth)


def explain_by_growth(axes: Mapping[str, Axis], where: str, size: int, growth: Growth) -> Segments | None:
    """Return the segments of a dimension that does not grow, or grows as one axis does; None for another one.

    Args:
        axes: The architecture's axes.
        where: The dimension, for the message.
        size: Its size in the full model.
        growth: By axis that moves it, how much it grows when that axis grows by one granule.

    Raises:
        ModelError: It has neither one place per granule nor a whole number per channel.
    """
    if not growth:
        return (Segment(None, size),)
    if len(growth) > 1:
        return None
    axis, slope = next(iter(growth.items()))
    for segment in (Segment(axis), Segment(axis, per_granule=True)):
        if fits((segment,), axes, size, growth):
            return (segment,)
    if slope * axes[axis].size == size * axes[axis].granule and size % axes[axis].size:
        raise ModelError(
            f'{where} has {slope} elements per granule of axis "{axis}" ({axes[axis].granule} channels): neither one '
            "per granule nor a whole number per channel. Set the axis's granule so that it divides."
        )
    return None
