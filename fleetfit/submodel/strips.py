"""Strips: the elements of a sub-model in the full model's flat buffer, as a few strided views.

A strip is a grid of elements with one stride per dimension, in the full model's buffer and in the sub-model's. The kept
part of a matrix is one strip if a prefix or a window is kept, and two or four if a window wraps around. Equal tensors
at equal distances (the blocks of a stage, the layers of an encoder) are one strip together. So a sub-model of hundreds
of tensors is some ten strips, which are copied and added as views, at about the speed of a plain copy and without an
index.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, product
from operator import itemgetter

import torch
from torch import Tensor

Span = tuple[int, int]  # start, length
_MAX_STRIPS = 16  # of one tensor; scattered channels are moved by an index instead


@dataclass(frozen=True)
class Strip:
    """A grid of elements.

    Attributes:
        sizes: Of its dimensions.
        full_strides: Strides in the full model's buffer.
        strides: Strides in the sub-model's buffer.
        full_offset: Of the first element in the full model's buffer.
        offset: Of the first element in the sub-model's buffer.
    """

    sizes: tuple[int, ...]
    full_strides: tuple[int, ...]
    strides: tuple[int, ...]
    full_offset: int
    offset: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def view_full(self, full: Tensor) -> Tensor:
        """Return the elements in the full model's flat buffer, as a view."""
        return full.as_strided(self.sizes, self.full_strides, full.storage_offset() + self.full_offset)

    def view_submodel(self, flat: Tensor) -> Tensor:
        """Return the elements in the sub-model's flat buffer, as a view."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.offset)

    def compute_indices(self) -> tuple[Tensor, Tensor]:
        """Return the indices of the elements in the full model's buffer and in the sub-model's."""
        full, own = torch.tensor([self.full_offset]), torch.tensor([self.offset])
        for size, full_stride, stride in zip(self.sizes, self.full_strides, self.strides, strict=True):
            steps = torch.arange(size)
            full = (full[:, None] + steps * full_stride).reshape(-1)
            own = (own[:, None] + steps * stride).reshape(-1)
        return full, own


def find_strips(
    spans: Sequence[Sequence[Span]],
    full_shape: Sequence[int],
    shape: Sequence[int],
    full_offset: int,
    offset: int,
) -> list[Strip] | None:
    """Return the strips of one tensor, or None if they would be many.

    Args:
        spans: The kept spans of each dimension, in the order of the kept channels.
        full_shape: Of the tensor in the full model.
        shape: Of the tensor in the sub-model.
        full_offset: Of the tensor in the full model's buffer.
        offset: Of the tensor in the sub-model's buffer.
    """
    runs = [_find_runs(dim) for dim in spans]
    if math.prod(map(len, runs)) > _MAX_STRIPS:
        return None
    full_strides, strides = _contiguous_strides(full_shape), _contiguous_strides(shape)
    strips = []
    for chosen in product(*runs):
        start, own_start, dims = full_offset, offset, list[tuple[int, int, int]]()
        for (length, count, step, first), full_stride, stride in zip(chosen, full_strides, strides, strict=True):
            start, own_start = start + first[0] * full_stride, own_start + first[1] * stride
            dims += [(count, step[0] * full_stride, step[1] * stride), (length, full_stride, stride)]
        strips.append(_make_strip(dims, start, own_start))
    return strips


def _find_runs(spans: Sequence[Span]) -> list[tuple[int, int, tuple[int, int], tuple[int, int]]]:
    """Return (length, count, step, first offsets) of spans of one length at one distance, in one dimension."""
    own_starts = accumulate((length for _, length in spans), initial=0)
    offsets = [(length, (start, own)) for (start, length), own in zip(spans, own_starts, strict=False)]
    return [
        (length, *run)
        for length, group in groupby(offsets, key=itemgetter(0))
        for run in _find_regular([offset for _, offset in group])
    ]


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _make_strip(dims: Iterable[tuple[int, int, int]], full_offset: int, offset: int) -> Strip:
    """Return a strip with as few dimensions as possible; each is (size, stride in full, stride)."""
    merged: list[tuple[int, int, int]] = []
    for size, full_stride, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == full_stride * size and merged[-1][2] == stride * size:
            merged[-1] = (merged[-1][0] * size, full_stride, stride)
        else:
            merged.append((size, full_stride, stride))
    sizes, full_strides, strides = zip(*(merged or [(1, 1, 1)]), strict=True)
    return Strip(sizes, full_strides, strides, full_offset, offset)


def merge_strips(strips: Iterable[Strip]) -> list[Strip]:
    """Return the same elements as fewer strips: adjacent ones joined, and equal ones at equal distances made one."""
    groups: dict[tuple[tuple[int, ...], ...], list[tuple[int, int]]] = {}
    for strip in _join_adjacent(strips):
        groups.setdefault((strip.sizes, strip.full_strides, strip.strides), []).append(
            (strip.full_offset, strip.offset)
        )
    return [
        _make_strip([(count, *step), *zip(*dims, strict=True)], *offsets)
        for dims, group in groups.items()
        for count, step, offsets in _find_regular(group)
    ]


def _join_adjacent(strips: Iterable[Strip]) -> list[Strip]:
    joined: list[Strip] = []
    for strip in strips:
        last = joined[-1] if joined else strip
        flat = last.full_strides == last.strides == strip.full_strides == strip.strides == (1,)
        ends = (last.full_offset + last.count, last.offset + last.count)
        if joined and flat and ends == (strip.full_offset, strip.offset):
            joined[-1] = Strip((last.count + strip.count,), (1,), (1,), last.full_offset, last.offset)
        else:
            joined.append(strip)
    return joined


def _find_regular(offsets: Sequence[tuple[int, int]]) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Return (count, step, first offsets) of runs of offsets with equal steps in both buffers."""
    runs: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    last = (0, 0)
    for offset in offsets:
        step = (offset[0] - last[0], offset[1] - last[1])
        if runs and runs[-1][0] == 1 and min(step) > 0:
            runs[-1] = (2, step, runs[-1][2])
        elif runs and runs[-1][1] == step:
            runs[-1] = (runs[-1][0] + 1, step, runs[-1][2])
        else:
            runs.append((1, (0, 0), offset))
        last = offset
    return runs
