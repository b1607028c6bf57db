"""Sub-models: which channels of each axis and which exits are kept; cut them out, put them back, move between them.

ScaleFL 3.1.2 and Algorithm 2 (CVPR 2023): the layers behind the exit are removed and each hidden dimension keeps
floor(s_w * D) channels, the first ones by default. FedRolex (NeurIPS 2022): the kept channels roll over the axis.

Differs from the paper: channels are chosen per axis and not per matrix, so that a concatenated or stacked dimension
keeps the same channels in each of its stretches (the literal upper-left block is wrong there); rolling starts at
round 0 with the prefix and moves forward.

Speed: a state is one flat buffer. All index work of a (layout, sub-model) is done once, in a `SlicePlan`. Elements at
regular distances move as strips (`fleetfit.submodel.strips`), the small and scattered rest by one flat index, and
scattered channels of tensors above `LARGE` elements by slices, so that the index is never larger than the model.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit.errors import ModelError
from fleetfit.layout import Axis, Layout, Segment, State
from fleetfit.submodel.buffers import empty_like
from fleetfit.submodel.state import FlatState, concat_state
from fleetfit.submodel.strips import Span, Strip, find_strips, merge_strips

# ---- a sub-model as a value: the kept channels of each axis, and the exits -----------------------------------------

Channels = range | tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Submodel:
    """A piece of a model: kept channels by axis (axes not named are whole) and exits; no blocks after the last exit."""

    channels: Mapping[str, Channels]
    exits: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", {a: _make_channels(c) for a, c in self.channels.items()})
        object.__setattr__(self, "exits", tuple(int(e) for e in self.exits))
        object.__setattr__(self, "_key", (frozenset(self.channels.items()), self.exits))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Submodel) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    _key = (frozenset[tuple[str, Channels]](), ())  # replaced per object; equality and hash by value

    @property
    def sizes(self) -> dict[str, int]:
        """Kept channels per axis, as a count."""
        return {axis: len(channels) for axis, channels in self.channels.items()}

    @property
    def depth(self) -> int:
        """Blocks kept."""
        return self.exits[-1]

    def is_part_of(self, other: "Submodel") -> bool:
        """Return whether every element of this sub-model is in the other; both name the axes that the other narrows."""
        if not set(self.exits) <= set(other.exits):
            return False
        return all(
            axis in self.channels and _within(self.channels[axis], kept) for axis, kept in other.channels.items()
        )


def _within(some: Channels, kept: Channels) -> bool:
    if isinstance(some, range) and isinstance(kept, range):
        return not some or (kept.start <= some.start and some.stop <= kept.stop)
    return set(some) <= set(kept)


def _rises(kept: Channels) -> bool:
    return isinstance(kept, range) or all(a < b for a, b in pairwise(kept))


def normalize_channels(axis: str, kept: Iterable[int]) -> Channels:
    """Return the channels of an axis from a method's hook; a range where they are one.

    Raises:
        ModelError: They are not in rising order, or one of them occurs twice.
    """
    channels = _make_channels(kept)
    if not _rises(channels):
        raise ModelError(
            f'the method\'s channels hook must give the channels of axis "{axis}" in rising order, each once; '
            f"it gave {channels}.",
            key="channels",
        )
    return channels


def _make_channels(kept: Iterable[int]) -> Channels:
    """Return a range where the channels are one, else a tuple."""
    if isinstance(kept, range) and kept.step == 1:
        return kept
    channels = tuple(int(c) for c in kept)
    if channels and channels == tuple(range(channels[0], channels[0] + len(channels))):
        return range(channels[0], channels[0] + len(channels))
    return channels


# ---- a sub-model as a payload of messages, files and memories ------------------------------------------------------


def dump_submodel(piece: Submodel) -> dict[str, Any]:
    """Return a sub-model as a table of channels, ranges or lists, and exits."""
    channels = {
        axis: {"from": kept.start, "to": kept.stop} if isinstance(kept, range) else list(kept)
        for axis, kept in piece.channels.items()
    }
    return {"channels": channels, "exits": list(piece.exits)}


def parse_submodel(payload: Any) -> Submodel:
    """Return the sub-model of plain values, without allocating memory by its size.

    Raises:
        ModelError: They are not a sub-model. `find_mismatch` compares its channels and exits with a model's.
    """
    if not isinstance(payload, Mapping) or not isinstance(payload.get("channels"), dict) or "exits" not in payload:
        raise ModelError("a sub-model must be a table of channels and exits.")
    channels, exits = payload["channels"], payload["exits"]
    if not _are_counts(exits) or not all(isinstance(axis, str) for axis in channels):
        raise ModelError("a sub-model's exits must be a list of whole numbers, and its axes names.", key="exits")
    return Submodel({axis: _parse_channels(kept) for axis, kept in channels.items()}, tuple(exits))


def dump_prefixes(pieces: Sequence[Submodel]) -> dict[str, Any]:
    """Return sub-models with the first channels of the same axes as one table of sizes and exits."""
    axes = list(pieces[0].channels)
    sizes = [[len(piece.channels[axis]) for axis in axes] for piece in pieces]
    return {"axes": axes, "sizes": sizes, "exits": [list(piece.exits) for piece in pieces]}


def parse_prefixes(payload: Any) -> tuple[Submodel, ...]:
    """Return the sub-models that `dump_prefixes` wrote, without allocating memory by their sizes.

    Raises:
        ModelError: They are malformed.
    """
    try:
        axes, rows = payload["axes"], list(zip(payload["sizes"], payload["exits"], strict=True))
        if all(isinstance(axis, str) for axis in axes) and all(_are_counts(counts) for row in rows for counts in row):
            return tuple(Submodel(dict(zip(axes, map(range, sizes), strict=True)), exits) for sizes, exits in rows)
    except (KeyError, TypeError, ValueError):
        pass
    raise ModelError("levels must be a table of axes, sizes and exits, of whole numbers.", key="levels")


def _parse_channels(payload: Any) -> Channels:
    if isinstance(payload, dict) and payload.keys() == {"from", "to"} and _are_counts([*payload.values()]):
        return range(payload["from"], payload["to"])
    if _are_counts(payload):
        return tuple(payload)
    raise ModelError("a sub-model's channels must be a list, or a range, of whole numbers.", key="channels")


def _are_counts(payload: Any) -> bool:
    return isinstance(payload, list | tuple) and all(type(n) is int and 0 <= n < 2**31 for n in payload)


def find_mismatch(layout: Layout, piece: Submodel) -> str | None:
    """Return why a sub-model does not fit a model, or None, without allocating memory by its size."""
    for axis, kept in piece.channels.items():
        size = layout.axes[axis].size if axis in layout.axes else 0
        first = kept[: size + 1]
        if not first or min(first) < 0 or max(first) >= size or len(first) > size:
            return "its sub-model keeps channels that the model does not have."
        if not _rises(kept):
            return "its sub-model keeps channels twice, or not in rising order."
    if not piece.exits or not set(piece.exits) <= set(layout.exits) or tuple(sorted(set(piece.exits))) != piece.exits:
        return "its sub-model has exits that the model does not have."
    return None


def pack_state(piece: Submodel, state: State) -> dict[str, Any]:
    """Return the payload of a state and its sub-model, for a memory: the next sub-model may be another one."""
    return {"state": state, **dump_submodel(piece)}


# ---- which channels to keep: the functions for the hook `choose_channels` ------------------------------


def window(axis: Axis, n: int, round: int, client: int | None, rng: np.random.Generator) -> Channels:
    """Keep n neighboring channels that start at a granule drawn for each client and round; evaluation: the first n."""
    if client is None:
        return range(n)
    first = int(rng.integers((axis.size - n) // axis.granule + 1)) * axis.granule
    return range(first, first + n)


def rolling(axis: Axis, n: int, round: int, client: int | None, rng: np.random.Generator) -> Channels:
    """Keep n channels from granule `round` on, wrapping around (FedRolex); evaluation: the first n."""
    if client is None or n == axis.size:
        return range(n)
    granules = axis.size // axis.granule
    chosen = sorted((round + i) % granules for i in range(n // axis.granule))
    return _of_granules(chosen, axis.granule)


def random(axis: Axis, n: int, round: int, client: int | None, rng: np.random.Generator) -> Channels:
    """Keep n channels of random granules, drawn for each client and round; evaluation: the first n."""
    if client is None or n == axis.size:
        return range(n)
    chosen = np.sort(rng.choice(axis.size // axis.granule, n // axis.granule, replace=False))
    return _of_granules(chosen.tolist(), axis.granule)


def _of_granules(granules: Sequence[int], granule: int) -> Channels:
    return _make_channels(g * granule + i for g in granules for i in range(granule))


# ---- the index work of a sub-model, done once: from the full model's flat buffer to the sub-model's and back -------

LARGE = 1 << 20  # elements above which scattered channels of a tensor are cut by slices, not by an index
FEW = 2048  # elements below which a strip of its own costs more than its places in the index
_CACHED_PLANS = 64

_Slices = tuple[slice, list[list[Span]], slice, tuple[int, ...]]  # here, stretches, there, full shape


def find_spans(
    layout: Layout, dims: Iterable[tuple[Segment, ...]], submodel: Submodel
) -> dict[tuple[Segment, ...], list[Span]]:
    """Return the kept stretches of dimensions, in the order of the kept channels.

    Raises:
        ModelError: The sub-model does not fit the layout.
    """
    _check_fits(layout, submodel)
    return {dim: _spans(dim, layout.axes, layout.full_sizes, submodel.channels) for dim in dims}


def _spans(
    dim: Sequence[Segment], axes: Mapping[str, Axis], full_sizes: Mapping[str, int], channels: Mapping[str, Channels]
) -> list[Span]:
    """Return the kept stretches of one dimension, neighbors merged, in the order of the kept channels."""
    spans: list[Span] = []
    start = 0
    for segment in dim:
        for offset, n in _segment_spans(segment, axes, full_sizes, channels):
            if spans and sum(spans[-1]) == start + offset:
                spans[-1] = (spans[-1][0], spans[-1][1] + n)
            else:
                spans.append((start + offset, n))
        start += segment.length(axes, full_sizes)
    return spans


def _segment_spans(
    segment: Segment, axes: Mapping[str, Axis], full_sizes: Mapping[str, int], channels: Mapping[str, Channels]
) -> Iterable[Span]:
    if segment.axis is None or not any(axis in channels for axis in segment.axes):
        return [(0, segment.length(axes, full_sizes))]
    kept, granule, per = channels.get(segment.axis), axes[segment.axis].granule, segment.per
    if kept is None:
        kept = range(full_sizes[segment.axis])
    if segment.per_granule:
        return [(c // granule, 1) for c in kept[::granule]]
    if segment.within:
        per = sum(inner.length(axes, full_sizes) for inner in segment.within)
        owned = _spans(segment.within, axes, full_sizes, channels)
        if owned != [(0, per)]:
            return [(c * per + s, n) for c in kept for s, n in owned]
    if isinstance(kept, range):
        return [(kept.start * per, len(kept) * per)]
    return [(c * per, per) for c in kept]


def _take(tensor: Tensor, spans: Sequence[Sequence[Span]]) -> Tensor:
    """Return the kept elements of a tensor: a view where each dimension has one stretch."""
    for d, kept in enumerate(spans):
        if len(kept) == 1:
            tensor = tensor.narrow(d, *kept[0])
        elif len(kept) <= 4:
            tensor = torch.cat([tensor.narrow(d, s, n) for s, n in kept], dim=d)
        else:
            index = torch.cat([torch.arange(s, s + n) for s, n in kept])
            tensor = tensor.index_select(d, index.to(tensor.device))
    return tensor


class SlicePlan:
    """The compiled index work of one sub-model: from the full model's flat buffer to the sub-model's and back.

    Attributes:
        names: Its tensors in canonical order.
        shapes: Their shapes in the sub-model.
        size: Elements of its flat buffer.
    """

    def __init__(self, layout: Layout, submodel: Submodel) -> None:
        """Do the index work.

        Raises:
            ModelError: The sub-model does not fit the layout.
        """
        _check_fits(layout, submodel)
        self.shapes = layout.shapes(submodel.sizes, submodel.exits)
        self.names = list(self.shapes)
        self.size = sum(math.prod(shape) for shape in self.shapes.values())
        full_shapes = layout.shapes(layout.full_sizes, layout.exits)
        full_size = sum(math.prod(shape) for shape in full_shapes.values())
        self.whole = self.size == full_size and all(isinstance(c, range) for c in submodel.channels.values())
        self._source = (layout.axes, layout.full_sizes, layout.tensors, submodel.channels, full_shapes)

    @cached_property
    def _moves(self) -> tuple[list[Strip], tuple[Tensor, Tensor] | None, list["_Slices"]]:
        """The elements as strips; what is small or scattered by index; scattered parts of large tensors by slices."""
        full_shapes = self._source[-1]
        offsets = dict(zip(full_shapes, accumulate(map(math.prod, full_shapes.values()), initial=0), strict=False))
        strips: list[Strip] = []
        places: list[tuple[Tensor, Tensor]] = []
        slices: list[_Slices] = []
        here = 0
        for name, spans in self._stretches.items():
            shape, kept, there = full_shapes[name], self.shapes[name], offsets[name]
            size, count = math.prod(shape), math.prod(kept)
            own_strips = find_strips(spans, shape, kept, there, here)
            if own_strips is not None:
                strips += own_strips
            elif size <= LARGE:
                far = _take(torch.arange(there, there + size).view(shape), spans).reshape(-1)
                places.append((far, torch.arange(here, here + count)))
            else:
                slices.append((slice(here, here + count), spans, slice(there, there + size), shape))
            here += count
        joined = merge_strips(strips)
        places += [strip.compute_indices() for strip in joined if strip.count < FEW]
        index = (torch.cat([far for far, _ in places]), torch.cat([near for _, near in places])) if places else None
        return [strip for strip in joined if strip.count >= FEW], index, slices

    def gather(self, full: Tensor) -> Tensor:
        """Return the sub-model's flat buffer [size], a copy, of the full model's [full size]."""
        if self.whole:
            return empty_like(full).copy_(full)
        out = empty_like(full, self.size)
        strips, index, slices = self._moves
        for strip in strips:
            strip.view_submodel(out).copy_(strip.view_full(full))
        if index is not None:
            out.index_copy_(0, _on(index[1], full), full.index_select(0, _on(index[0], full)))
        for here, spans, there, shape in slices:
            piece = _take(full[there].view(shape), spans)
            out[here].view(piece.shape).copy_(piece)
        return out

    @cached_property
    def _stretches(self) -> dict[str, list[list[Span]]]:
        axes, full_sizes, tensors, channels, _ = self._source
        return {name: [_spans(dim, axes, full_sizes, channels) for dim in tensors[name].dims] for name in self.names}

    def through(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sub-model's tensors as parts of the full model's, through which gradients flow into them."""
        return {name: _take(full[name], spans) for name, spans in self._stretches.items()}

    def scatter(self, full: Tensor, flat: Tensor, add: bool = False) -> None:
        """Write a sub-model's flat buffer to its places in the full one, or add it there, in place."""
        if self.whole:
            full.add_(flat) if add else full.copy_(flat)
            return
        strips, index, slices = self._moves
        for strip in strips:
            target, source = strip.view_full(full), strip.view_submodel(flat)
            target.add_(source) if add else target.copy_(source)
        if index is not None:
            far, chosen = _on(index[0], full), flat.index_select(0, _on(index[1], full))
            full.scatter_add_(0, far, chosen) if add else full.index_copy_(0, far, chosen)
        for here, spans, there, shape in slices:
            _write(full[there].view(shape), spans, flat[here], add)

    def scatter_scalar(self, full: Tensor, value: float) -> None:
        """Add one number to each of the sub-model's places in the full buffer, in place."""
        if self.whole:
            full.add_(value)
            return
        strips, index, slices = self._moves
        for strip in strips:
            strip.view_full(full).add_(value)
        one = full.new_full((1,), value)
        if index is not None:
            full.scatter_add_(0, _on(index[0], full), one.expand(len(index[0])))
        for here, spans, there, shape in slices:
            _write(full[there].view(shape), spans, one.expand(here.stop - here.start), True)

    def views(self, flat: Tensor) -> State:
        """Return a flat buffer as named tensors that share its memory."""
        return FlatState(flat, self.shapes)

    def zero(self, flat: Tensor, names: Iterable[str]) -> Tensor:
        """Set some tensors of a flat buffer to 0, in place; return the buffer."""
        tensors = self.views(flat)
        for name in names:
            tensors[name].zero_()
        return flat


def _on(index: Tensor, full: Tensor) -> Tensor:
    return index if full.device == index.device else index.to(full.device)


def narrow_state(layout: Layout, state: State, sizes: Mapping[str, int], channels: Mapping[str, Channels]) -> State:
    """Return some channels of a sub-model's state.

    Args:
        layout: The model's layout.
        state: The sub-model's state, or some of its tensors.
        sizes: The sub-model's sizes; axes not named are whole.
        channels: By axis, which of the sub-model's channels to keep; axes not named stay as they are.
    """
    sizes, tensors = {**layout.full_sizes, **sizes}, layout.tensors
    return {
        name: _take(tensor, [_spans(dim, layout.axes, sizes, channels) for dim in tensors[name].dims])
        for name, tensor in state.items()
    }


def _write(target: Tensor, spans: Sequence[Sequence[Span]], flat: Tensor, add: bool) -> None:
    """Write (or add) a flat piece into the kept stretches of a tensor, in place."""
    shape = [sum(n for _, n in kept) for kept in spans]
    source = flat.view(shape) if flat.is_contiguous() else flat.reshape(shape)

    def visit(t: Tensor, s: Tensor, d: int) -> None:
        if d == len(spans):
            t.add_(s) if add else t.copy_(s)
            return
        at = 0
        for start, n in spans[d]:
            visit(t.narrow(d, start, n), s.narrow(d, at, n), d + 1)
            at += n

    visit(target, source, 0)


def _check_fits(layout: Layout, submodel: Submodel) -> None:
    for axis, kept in submodel.channels.items():
        if axis not in layout.axes:
            raise ModelError(
                f'a sub-model names axis "{axis}"; the model has {", ".join(layout.axes)}.', key="channels"
            )
        size, granule = layout.axes[axis].size, layout.axes[axis].granule
        if not len(kept) or min(kept) < 0 or max(kept) >= size or len(set(kept)) != len(kept):
            raise ModelError(
                f'kept channels of axis "{axis}" must be distinct and in 0..{size - 1}, got {kept!r}.', key="channels"
            )
        if layout.axes[axis].scaled and granule > 1:
            for i in range(0, len(kept), granule):
                if kept[i] % granule or list(kept[i : i + granule]) != list(range(kept[i], kept[i] + granule)):
                    raise ModelError(
                        f'kept channels of axis "{axis}" must be whole granules of {granule}, got {list(kept)}.',
                        key="channels",
                    )
    if not submodel.exits or any(e not in layout.exits for e in submodel.exits):
        raise ModelError(f"a sub-model has exits {submodel.exits}; the model has {layout.exits}.", key="exits")


def get_slice_plan(layout: Layout, submodel: Submodel) -> SlicePlan:
    """Return the index work of a sub-model, from the layout's small cache."""
    plans = layout.slice_plans
    plan: SlicePlan | None = plans.pop(submodel, None)
    if plan is None:
        plan = SlicePlan(layout, submodel)
        while len(plans) >= _CACHED_PLANS:
            plans.pop(next(iter(plans)))
    plans[submodel] = plan  # last used, last dropped
    return plan


# ---- states of sub-models: extract them, put them back, move them from one sub-model to another, check them --------


def compute_norm(state: State) -> float:
    """Return the Euclidean norm of a state; infinite or NaN where its square overflows float32."""
    flat = concat_state(state)
    return math.sqrt(flat.dot(flat))


def is_finite(state: State) -> bool:
    """Return whether the norm of a state is finite.

    Larger values count as infinite: their variance, norm or product is not a number.
    """
    return math.isfinite(compute_norm(state))


def full_submodel(layout: Layout) -> Submodel:
    """Return the full model as a sub-model."""
    return Submodel({name: range(axis.size) for name, axis in layout.axes.items()}, layout.exits)


def extract(layout: Layout, state: State, submodel: Submodel) -> State:
    """Return a sub-model's state, a copy, from the full model's.

    Raises:
        ModelError: The sub-model or the state does not fit the layout.
    """
    full = make_flat_state(layout, full_submodel(layout), state)
    compiled = get_slice_plan(layout, submodel)
    return compiled.views(compiled.gather(concat_state(full)))


def make_flat_state(layout: Layout, submodel: Submodel, state: State) -> State:
    """Return a sub-model's state in its one form: a `FlatState` in the layout's order.

    Raises:
        ModelError: A tensor is missing, unexpected, or of another shape.
    """
    plan = get_slice_plan(layout, submodel)
    if isinstance(state, FlatState) and list(state) == plan.names:
        return state
    check_shapes(state, plan.shapes)
    return plan.views(concat_state({name: state[name] for name in plan.names}))


def move_state(layout: Layout, state: State, source: Submodel, target: Submodel) -> State:
    """Return a state, a copy, moved from one sub-model to another; elements that the source lacks are 0."""
    if source == target:
        return {name: tensor.clone() for name, tensor in state.items()}
    flat = concat_state(make_flat_state(layout, source, state))
    return get_slice_plan(layout, target).views(move_flat(layout, flat, source, target))


def find_positions(part: Submodel, whole: Submodel) -> Submodel:
    """Return the positions of a part's channels among those of a sub-model that contains it."""
    if part.channels == whole.channels:
        return Submodel({}, part.exits)
    positions = {axis: {channel: i for i, channel in enumerate(channels)} for axis, channels in whole.channels.items()}
    channels = {
        axis: tuple(positions[axis][channel] for channel in kept) if axis in positions else kept
        for axis, kept in part.channels.items()
    }
    return Submodel(channels, part.exits)


def narrow_layout(layout: Layout, submodel: Submodel) -> Layout:
    """Return the layout in which a sub-model is the full model."""
    axes = {
        name: replace(axis, size=len(submodel.channels.get(name, range(axis.size))))
        for name, axis in layout.axes.items()
    }
    tensors = {name: tensor for name, tensor in layout.tensors.items() if tensor.present(submodel.exits)}
    return Layout(axes, submodel.exits, tensors)


def move_flat(layout: Layout, flat: Tensor, source: Submodel, target: Submodel) -> Tensor:
    """Return a number for each element of a sub-model from those of another, both flat; 0 where the source has none."""
    if source == target:
        return flat
    full = torch.zeros(get_slice_plan(layout, full_submodel(layout)).size)
    get_slice_plan(layout, source).scatter(full, flat)
    return get_slice_plan(layout, target).gather(full)


def check_shapes(state: State, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a state with the expected names and shapes, by equality: a size of one does not broadcast.

    Raises:
        ModelError: A tensor is missing, unexpected, or of another shape.
    """
    if state.keys() != shapes.keys():
        missing, extra = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
        raise ModelError(
            f"a state does not fit its sub-model: missing {missing[:3]}, unexpected {extra[:3]}.", key="state"
        )
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise ModelError(
                f'a state does not fit its sub-model: "{name}" is {tuple(state[name].shape)}, expected {shape}.',
                key="state",
            )
