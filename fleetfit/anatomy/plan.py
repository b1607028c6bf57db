"""What was derived from an instance, as plain values: enough to build every level of another instance like it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fleetfit.anatomy.masks import InputMask
from fleetfit.errors import ModelError, truncate
from fleetfit.layout import (
    Dimension,
    Segment,
    Segments as Segments,
    dump_segments,
    get_length,
    parse_segments,
    read_size as _read_size,
    read_value as _read,
)

_MAX_DIMS = 5  # of the output after which an exit sits
_MAX_CHANNELS = 1 << 20  # that a classifier reads
FORMAT = 1
"""The version of the payload."""


@dataclass(frozen=True)
class SizeNumber:
    """A number in a module that depends on the sizes of axes.

    Attributes:
        module: The module's name.
        attribute: The attribute that has it.
        index: Its index, where the attribute is a sequence.
        value: Its value in the instance.
        meaning: The segments whose length it is.
    """

    module: str
    attribute: str
    index: int | None
    value: int
    meaning: Segments

    @property
    def keys(self) -> list[str]:
        """The way to it from the module: attributes, and indexes of sequences."""
        return [*self.attribute.split("."), *([] if self.index is None else [str(self.index)])]


@dataclass(frozen=True)
class ExitPoint:
    """A module after which an early classifier sits.

    Attributes:
        module: The module's name.
        dims: The number of dimensions of its output.
        channels: The dimension of the output's channels.
        segments: The segments of this dimension.
        is_own: Whether the output is the instance's own early logits, which need no further classifier.
    """

    module: str
    dims: int
    channels: int
    segments: Segments
    is_own: bool = False


@dataclass(frozen=True)
class DerivedPlan:
    """The axes, exits and numbers of an instance.

    Attributes:
        tensors: The shape of each parameter and buffer, by name.
        axes: The number of units of each axis.
        segments: The segments of each dimension that is cut.
        numbers: The numbers in modules that depend on sizes.
        exits: The early exits, shallow to deep; the instance's own classifier comes after them.
        blocks: By tensor the number of exits before its first use; tensors that no pass used are absent.
        classes: The logits' last dimension.
        vocabulary: Tokens that the instance knows; 0 for real numbers.
        next_tokens: Whether it gives logits at each place.
        ordered: Axes of which only the first units can be kept.
        whole: What stays whole: by the name that an axis would have, its size and the reason.
        kept: Norms that compute with their own running statistics, which are frozen.
        mask: Its mask for padding.
        answers: What forward reads from samples for messages and checks, for passes without numbers.
        tail: The instance's last modules, where early exits share them.
        unused: Parameters that the samples do not use; they stay as they are.
    """

    tensors: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, int]
    segments: Mapping[Dimension, Segments]
    numbers: tuple[SizeNumber, ...]
    exits: tuple[ExitPoint, ...]
    blocks: Mapping[str, int]
    classes: int
    vocabulary: int = 0
    next_tokens: bool = False
    ordered: frozenset[str] = frozenset()
    whole: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    mask: InputMask | None = None
    answers: tuple[bool, ...] = ()
    tail: tuple[str, ...] = ()
    unused: frozenset[str] = frozenset()

    def rename_axes(self, names: Mapping[str, str | None]) -> "DerivedPlan":
        """Return the plan with other names of axes; axes not named keep theirs, and those of None are not cut."""
        names = {axis: names.get(axis, axis) for axis in self.axes}

        def rename(segment: Segment) -> Segment:
            name = None if segment.axis is None else names[segment.axis]
            is_left = segment.axis is None or name is not None
            return Segment(name, segment.per * (1 if is_left else self.axes[str(segment.axis)]))

        return replace(
            self,
            axes={name: size for axis, size in self.axes.items() if (name := names[axis]) is not None},
            segments={dimension: tuple(map(rename, segments)) for dimension, segments in self.segments.items()},
            numbers=tuple(replace(number, meaning=tuple(map(rename, number.meaning))) for number in self.numbers),
            exits=tuple(replace(point, segments=tuple(map(rename, point.segments))) for point in self.exits),
            ordered=frozenset(name for axis in self.ordered if (name := names[axis]) is not None),
        )

    def find_first_blocks(self) -> dict[str, int]:
        """Return the first block with each axis: the least number of exits before a tensor that has it."""
        first = dict.fromkeys(self.axes, len(self.exits))
        for (name, _), segments in self.segments.items():
            for segment in segments:
                if segment.axis is not None and name in self.blocks:
                    first[segment.axis] = min(first[segment.axis], self.blocks[name])
        return first

    def to_payload(self) -> dict[str, Any]:
        """Return it as lists, texts and whole numbers, with its format version."""
        return {
            "format": FORMAT,
            "tensors": {name: list(shape) for name, shape in self.tensors.items()},
            "axes": dict(self.axes),
            "segments": [[name, d, dump_segments(segments)] for (name, d), segments in self.segments.items()],
            "numbers": [[n.module, n.attribute, n.index, n.value, dump_segments(n.meaning)] for n in self.numbers],
            "exits": [[e.module, e.dims, e.channels, dump_segments(e.segments), e.is_own] for e in self.exits],
            "blocks": dict(self.blocks),
            "classes": self.classes,
            "vocabulary": self.vocabulary,
            "next_tokens": self.next_tokens,
            "ordered": sorted(self.ordered),
            "whole": [[name, size, reason] for name, (size, reason) in self.whole.items()],
            "kept": sorted(self.kept),
            "mask": None if self.mask is None else self.mask.to_payload(),
            "answers": list(self.answers),
            "tail": list(self.tail),
            "unused": sorted(self.unused),
        }

    @staticmethod
    def from_payload(payload: Any) -> "DerivedPlan":
        """Return the plan of a payload.

        Raises:
            ModelError: The payload is of another format version, or damaged.
        """
        version = payload.get("format") if isinstance(payload, Mapping) else None
        if type(version) is not int or version != FORMAT:
            raise ModelError(
                f"the plan of a derived model has format {truncate(repr(version))}, and this FleetFit reads {FORMAT}. "
                "Install the same version of FleetFit on server and nodes.",
                key="derive.format",
            )
        try:
            segments, text = partial(parse_segments, axes=payload["axes"]), partial(_read, str)
            plan = DerivedPlan(
                {text(name): tuple(map(_read_size, shape)) for name, shape in payload["tensors"].items()},
                {text(axis): _read_size(size) for axis, size in payload["axes"].items()},
                {(text(name), _read_size(d)): segments(rows) for name, d, rows in payload["segments"]},
                tuple(
                    SizeNumber(text(m), text(a), None if i is None else _read_size(i), _read_size(v), segments(rows))
                    for m, a, i, v, rows in payload["numbers"]
                ),
                tuple(
                    ExitPoint(text(m), _read_size(dims), _read_size(d), segments(rows), _read(bool, is_own))
                    for m, dims, d, rows, is_own in payload["exits"]
                ),
                {text(name): _read_size(block) for name, block in payload["blocks"].items()},
                _read_size(payload["classes"]),
                _read_size(payload["vocabulary"]),
                _read(bool, payload["next_tokens"]),
                frozenset(map(text, payload["ordered"])),
                {text(name): (_read_size(size), text(reason)) for name, size, reason in payload["whole"]},
                frozenset(map(text, payload["kept"])),
                InputMask.from_payload(payload["mask"]),
                tuple(_read(bool, answer) for answer in payload.get("answers", ())),
                tuple(map(text, payload.get("tail", ()))),
                frozenset(map(text, payload.get("unused", ()))),
            )
            plan._check()
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            problem = truncate(f"{type(error).__name__}: {error}")
            raise ModelError(f"the plan of a derived model is damaged: {problem}.", key="derive") from None
        return plan

    def _check(self) -> None:
        """Refuse axes, tensors, exits and lengths that do not fit one another."""
        every = [*self.segments.values(), *(n.meaning for n in self.numbers), *(e.segments for e in self.exits)]
        if any(segment.per_granule or segment.within for segments in every for segment in segments):
            raise ValueError("segments of a granule or of a product")
        lengths = [(segments, self.tensors[name][d]) for (name, d), segments in self.segments.items()]
        lengths += [(number.meaning, number.value) for number in self.numbers]
        if any(get_length(segments, self.axes) != length for segments, length in lengths):
            raise ValueError("segments of another length")
        widths = [get_length(e.segments, self.axes) for e in self.exits]
        if any(not 1 <= e.channels < e.dims <= _MAX_DIMS for e in self.exits) or not all(
            0 < width <= _MAX_CHANNELS for width in widths
        ):
            raise ValueError("an exit without channels")
        if self.blocks.keys() - self.tensors.keys() or max(self.blocks.values(), default=0) > len(self.exits):
            raise ValueError("blocks of other tensors or exits")
        if self.ordered - self.axes.keys() or min(self.axes.values(), default=1) < 1 or self.classes < 1:
            raise ValueError("axes that have no unit, or none at all")
