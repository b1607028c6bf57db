"""The index work of a sub-model, done once: from the full model's flat buffer to the sub-model's and back."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fleetfit.errors import ModelError
from fleetfit.layout import Axis, Layout, Segment, State
from fleetfit.submodel.flat import FlatState
from fleetfit.submodel.piece import Channels, Submodel

LARGE = 1 << 20  # elements above which a tensor is cut by slices
_KEPT_CUTS = 64

Span = tuple[int, int]  # start, length


def _spans(
    dim: Sequence[Segment], axes: Mapping[str, Axis], full_sizes: Mapping[str, int], channels: Mapping[str, Channels]
) -> list[Span]:
    """Return the kept stretches of one dimension, neighbours merged, in the order of the kept channels."""
    found: list[Span] = []
    start = 0
    for segment in dim:
        found.extend((start + s, n) for s, n in _segment_spans(segment, axes, full_sizes, channels))
        start += segment.length(axes, full_sizes)
    merged: list[Span] = []
    for s, n in found:
        if merged and merged[-1][0] + merged[-1][1] == s:
            merged[-1] = (merged[-1][0], merged[-1][1] + n)
        else:
            merged.append((s, n))
    return merged


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


class Cut:
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
        self.size = sum(_numel(shape) for shape in self.shapes.values())
        full_shapes = layout.shapes(layout.full_sizes, layout.exits)
        self._full_size = sum(_numel(shape) for shape in full_shapes.values())
        self.whole = self.size == self._full_size and all(isinstance(c, range) for c in submodel.channels.values())
        self._source = (layout.axes, layout.full_sizes, layout.tensors, submodel.channels, full_shapes)

    @cached_property
    def _pieces(self) -> list[tuple[str, slice, Tensor | list[list[Span]], slice, tuple[int, ...]]]:
        """Small neighbouring tensors under one flat index, each large one with its slices. Made at the first use."""
        full_shapes = self._source[-1]
        offsets = dict(zip(full_shapes, accumulate(map(_numel, full_shapes.values()), initial=0), strict=False))
        pieces: list[tuple[str, slice, Tensor | list[list[Span]], slice, tuple[int, ...]]] = []
        small: list[Tensor] = []
        done = 0  # elements of the sub-model's buffer that are placed

        def close() -> None:
            nonlocal done
            if small:
                index = torch.cat(small)
                pieces.append(("index", slice(done, done + len(index)), index, slice(0, self._full_size), ()))
                done += len(index)
                small.clear()

        for name, spans in self._stretches.items():
            shape, first, n = full_shapes[name], offsets[name], _numel(full_shapes[name])
            if n <= LARGE:
                places = torch.arange(first, first + n).view(shape)
                small.append(_take(places, spans).reshape(-1))
            else:
                close()
                kept = _numel(self.shapes[name])
                pieces.append(("slices", slice(done, done + kept), spans, slice(first, first + n), shape))
                done += kept
        close()
        return pieces

    def gather(self, full: Tensor) -> Tensor:
        """Return the sub-model's flat buffer [size], a copy, of the full model's [full size]."""
        if self.whole:
            return full.clone()
        out = full.new_empty(self.size)
        for kind, here, how, there, shape in self._pieces:
            if kind == "index":
                torch.index_select(full, 0, self._on(how, full), out=out[here])
            else:
                piece = _take(full[there].view(shape), how)  # type: ignore[arg-type]
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
        for kind, here, how, there, shape in self._pieces:
            if kind == "index":
                index = self._on(how, full)
                full.scatter_add_(0, index, flat[here]) if add else full.index_copy_(0, index, flat[here])
            else:
                _write(full[there].view(shape), how, flat[here], add)  # type: ignore[arg-type]

    def scatter_scalar(self, full: Tensor, value: float) -> None:
        """Add one number to each of the sub-model's places in the full buffer, in place."""
        if self.whole:
            full.add_(value)
            return
        for kind, here, how, there, shape in self._pieces:
            flat = full.new_full((1,), value).expand(here.stop - here.start)
            if kind == "index":
                full.scatter_add_(0, self._on(how, full), flat)
            else:
                _write(full[there].view(shape), how, flat, True)  # type: ignore[arg-type]

    def views(self, flat: Tensor) -> State:
        """Return a flat buffer as named tensors that share its memory."""
        return FlatState(flat, self.shapes)

    def _on(self, index: object, full: Tensor) -> Tensor:
        assert isinstance(index, Tensor)
        return index if full.device == index.device else index.to(full.device)


def narrowed(layout: Layout, state: State, sizes: Mapping[str, int], channels: Mapping[str, Channels]) -> State:
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


def _numel(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _check_fits(layout: Layout, submodel: Submodel) -> None:
    for axis, kept in submodel.channels.items():
        if axis not in layout.axes:
            raise ModelError(f'a sub-model names axis "{axis}"; the model has {", ".join(layout.axes)}.')
        size, granule = layout.axes[axis].size, layout.axes[axis].granule
        if not len(kept) or min(kept) < 0 or max(kept) >= size or len(set(kept)) != len(kept):
            raise ModelError(f'kept channels of axis "{axis}" must be distinct and in 0..{size - 1}, got {kept!r}.')
        if layout.axes[axis].scaled and granule > 1:
            _check_granules(axis, list(kept), granule)
    if not submodel.exits or any(e not in layout.exits for e in submodel.exits):
        raise ModelError(f"a sub-model has exits {submodel.exits}; the model has {layout.exits}.")


def _check_granules(axis: str, kept: list[int], granule: int) -> None:
    for i in range(0, len(kept), granule):
        if kept[i] % granule or kept[i : i + granule] != list(range(kept[i], kept[i] + granule)):
            raise ModelError(f'kept channels of axis "{axis}" must be whole granules of {granule}, got {kept}.')


def cut(layout: Layout, submodel: Submodel) -> Cut:
    """Return the index work of a sub-model, from the layout's small cache."""
    cuts = layout.cuts
    found: Cut | None = cuts.pop(submodel, None)
    if found is None:
        found = Cut(layout, submodel)
        while len(cuts) >= _KEPT_CUTS:
            cuts.pop(next(iter(cuts)))
    cuts[submodel] = found  # last used, last dropped
    return found
