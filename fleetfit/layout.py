"""The layout of a model: the axis of each stretch of each dimension, and the block or exit of each tensor."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from fleetfit.errors import ModelError, truncate

State = Mapping[str, Tensor]
"""Tensors by name."""
Dimension = tuple[str, int]
"""A tensor's name, and one of its dimensions."""
T = TypeVar("T")
_MOST = 2**40  # numbers of a tensor


@dataclass(frozen=True)
class Axis:
    """One scalable size of an architecture.

    Attributes:
        size: Channels of the full model.
        granule: Channels come and go in whole granules (a head, a norm group).
        scaled: False for an axis that width never cuts, such as the classes.
        block: The first block that the axis belongs to.
        ordered: Whether the channels stand for places, as rows of a position table do, so that they cannot be permuted.
    """

    size: int
    granule: int = 1
    scaled: bool = True
    block: int = 0
    ordered: bool = False

    def __post_init__(self) -> None:
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in (self.size, self.granule, self.block)):
            raise ModelError(f"size, granule and block of an axis must be whole numbers, got {self}.", key="size")
        if self.size < 1 or self.granule < 1 or self.size % self.granule:
            raise ModelError(
                f"an axis of size {self.size} cannot be cut in granules of {self.granule}: both must be at least 1 and "
                "the size a multiple of the granule.",
                key="granule",
            )


@dataclass(frozen=True)
class Segment:
    """One stretch of a dimension.

    Attributes:
        axis: Its axis, or None for a stretch of fixed size.
        per: Elements per channel; of a fixed stretch, its size.
        per_granule: One element per granule of the axis instead (a bias per head).
        within: Stretches that each channel owns instead of `per` elements: the inner factors of a product of axes.
    """

    axis: str | None
    per: int = 1
    per_granule: bool = False
    within: tuple["Segment", ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes on which its length depends, the outermost first."""
        outer = () if self.axis is None else (self.axis,)
        return tuple(dict.fromkeys((*outer, *(axis for inner in self.within for axis in inner.axes))))

    def length(self, axes: Mapping[str, Axis], sizes: Mapping[str, int]) -> int:
        """Return its length when the axes have these sizes."""
        if self.axis is None:
            return self.per
        if self.within:
            return sizes[self.axis] * get_length(self.within, sizes, axes)
        return sizes[self.axis] // axes[self.axis].granule if self.per_granule else sizes[self.axis] * self.per


def get_length(
    segments: Iterable[Segment], sizes: Mapping[str, int], axes: Mapping[str, Axis] = MappingProxyType({})
) -> int:
    """Return the length of a dimension when the axes have these sizes; `axes` are needed for granules alone."""
    return sum(segment.length(axes, sizes) for segment in segments)


@dataclass(frozen=True)
class TensorLayout:
    """The layout of one tensor.

    Attributes:
        dims: Per dimension its stretches; lengths add up to the shape.
        block: The block that it belongs to, or None.
        exit: The exit (block count) whose head it belongs to, or None.
        trainable: Whether it is a parameter that is trained; else a buffer that is averaged.
    """

    dims: tuple[tuple[Segment, ...], ...]
    block: int | None
    exit: int | None
    trainable: bool

    def present(self, exits: tuple[int, ...]) -> bool:
        """Return whether a sub-model with these exits has the tensor."""
        if self.exit is not None:
            return self.exit in exits
        return self.block is None or self.block < exits[-1]


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a model with all its exits.

    Attributes:
        axes: The architecture's axes.
        exits: Exits of the full model, shallow to deep; the last is the full depth.
        tensors: By name, in canonical order: parameters first, then buffers that are averaged.
        aliases: Second names of tensors, by name.
        base: Tensors that are never trained and are not sent.
        by_order: Tensors of classifiers that are numbered by their order, as in an `nn.ModuleList`, so that their names
            mean the same only in sub-models whose exits are the first ones.
    """

    axes: Mapping[str, Axis]
    exits: tuple[int, ...]
    tensors: Mapping[str, TensorLayout]
    aliases: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[str, TensorLayout] = field(default_factory=dict)
    by_order: frozenset[str] = frozenset()

    @cached_property
    def frozen(self) -> "Layout":
        """The layout of the tensors that are never trained."""
        return Layout(self.axes, self.exits, self.base, by_order=self.by_order)

    @cached_property
    def complete(self) -> "Layout":
        """The layout of all tensors, trained or not."""
        if not self.base:
            return self
        return Layout(self.axes, self.exits, {**self.tensors, **self.base}, self.aliases, by_order=self.by_order)

    @cached_property
    def full_sizes(self) -> dict[str, int]:
        """The size of each axis in the full model."""
        return {name: axis.size for name, axis in self.axes.items()}

    def shapes(self, sizes: Mapping[str, int], exits: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor that a sub-model of these sizes and exits has.

        Raises:
            ModelError: Classifiers are numbered by their order, and these are not the first exits.
        """
        if self.by_order and exits != self.exits[: len(exits)]:
            raise ModelError(
                f'classifiers are numbered by their order ("{min(self.by_order)}"), so that a sub-model needs the '
                f"first ones of the exits {self.exits}; this one has {exits}. Name them by their block count, such as "
                "nn.ModuleDict({str(e): ... for e in exits}), or take a method whose levels keep the shallower exits."
            )
        sizes = {**self.full_sizes, **sizes}
        return {
            name: tuple(get_length(dim, sizes, self.axes) for dim in tensor.dims)
            for name, tensor in self.tensors.items()
            if tensor.present(exits)
        }

    def to_payload(self) -> dict[str, Any]:
        """Return it as lists, texts and whole numbers, without the axes and exits, which the model's spec gives.

        Dimensions repeat, so each kind of them is written once, and tensors have the kinds' numbers.
        """
        kinds: dict[Segments, int] = {}

        def dump(tensors: Mapping[str, TensorLayout]) -> list[list[Any]]:
            return [
                [name, [kinds.setdefault(dim, len(kinds)) for dim in one.dims], one.block, one.exit, one.trainable]
                for name, one in tensors.items()
            ]

        return {
            "tensors": dump(self.tensors),
            "base": dump(self.base),
            "aliases": dict(self.aliases),
            "by_order": sorted(self.by_order),
            "dims": [dump_segments(dim) for dim in kinds],
        }

    @staticmethod
    def from_payload(payload: Any, axes: Mapping[str, Axis], exits: tuple[int, ...]) -> "Layout":
        """Return the layout of a payload, which may come from a stranger.

        Whether it is the model's is seen where a level is built: its names and shapes are compared.

        Args:
            payload: As `to_payload` returns it.
            axes: The architecture's axes.
            exits: Exits of the full model.

        Raises:
            ModelError: The payload is damaged, or of another model.
        """
        try:
            kinds = [parse_segments(rows, axes) for rows in payload["dims"]]

            def parse(rows: Any) -> dict[str, TensorLayout]:
                return {
                    read_value(str, name): TensorLayout(
                        tuple(kinds[read_size(kind)] for kind in dims),
                        None if block is None else read_size(block),
                        None if e is None else read_size(e),
                        read_value(bool, trainable),
                    )
                    for name, dims, block, e, trainable in rows
                }

            tensors, base = parse(payload["tensors"]), parse(payload["base"])
            aliases = {name: read_value(str, other) for name, other in payload["aliases"].items()}
            by_order = frozenset(read_value(str, name) for name in payload["by_order"])
            names = tensors.keys() | base.keys()
            if tensors.keys() & base.keys() or aliases.keys() & names or not {*aliases.values(), *by_order} <= names:
                raise ValueError("names of no tensor, or of two")
            layout = Layout(dict(axes), exits, tensors, aliases, base, by_order)
            if any(math.prod(shape) > _MOST for shape in layout.complete.shapes({}, exits).values()):
                raise ValueError("a tensor that has too many numbers")
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"the layout that came with the model is damaged: {truncate(f'{type(error).__name__}: {error}')}. "
                "Install the same version of FleetFit on server and nodes.",
                key="layout",
            ) from None
        return layout

    @cached_property
    def slice_plans(self) -> dict[Any, Any]:
        """The cache of `fleetfit.submodel.get_slice_plan`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave cached properties out when the layout goes to another process."""
        return {key: value for key, value in self.__dict__.items() if key not in ("slice_plans", "frozen", "complete")}


# ---- plain values ----------------------------------------------------------------------------------------------------

Segments = tuple[Segment, ...]


def dump_segments(segments: Segments) -> list[list[Any]]:
    """Return a row for each segment: `axis` and `per`, followed by `per_granule` and `within` where it has them."""
    return [
        [s.axis, s.per, *([s.per_granule, dump_segments(s.within)] if s.per_granule or s.within else [])]
        for s in segments
    ]


def parse_segments(rows: Any, axes: Collection[str]) -> Segments:
    """Return the segments of rows.

    Raises:
        LookupError: One has an unknown axis.
        TypeError: A value is of another type.
        ValueError: A row or a number is none.
    """
    segments = []
    for axis, per, *more in rows:
        if axis is not None and read_value(str, axis) not in axes:
            raise KeyError(truncate(axis))
        per_granule, within = more or (False, ())
        inner = parse_segments(within, axes)
        segments.append(Segment(axis, read_size(per), read_value(bool, per_granule), inner))
    return tuple(segments)


def read_value(kind: type[T], value: Any) -> T:
    """Return a value of a type.

    Raises:
        TypeError: It is of another one.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} expected, got {truncate(repr(value))}")
    return value


def read_size(value: Any) -> int:
    """Return a whole number below 2^40.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise ValueError(f"a size of {truncate(repr(value))}")
    return value
