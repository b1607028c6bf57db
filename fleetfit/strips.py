"""Strips: the places of a sub-model's elements in the full model's flat buffer, as a few regular patterns.

A strip is a grid of places with one distance in each of its dimensions, in the full buffer and in the sub-model's. The
kept part of a matrix is one where a prefix or a window is kept, and two or four where a window wraps around; equal
tensors at equal distances (the blocks of a stage, the layers of an encoder) are one together. So a sub-model of
hundreds of tensors is some ten strips, which are copied and added as views, at about the speed of a plain copy and
without an index.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

Span = tuple[int, int]  # start, length
_MOST = 16  # strips of one tensor: channels that are scattered are for an index


@dataclass(frozen=True)
class Strip:
    """A grid of places.

    Attributes:
        sizes: Of its dimensions.
        far: Distance between neighbours of each dimension in the full model's buffer.
        near: The same in the sub-model's.
        there: The first place in the full model's buffer.
        here: The first place in the sub-model's.
    """

    sizes: tuple[int, ...]
    far: tuple[int, ...]
    near: tuple[int, ...]
    there: int
    here: int

    @property
    def count(self) -> int:
        """Places in it."""
        n = 1
        for size in self.sizes:
            n *= size
        return n

    def of_full(self, full: Tensor) -> Tensor:
        """Return the places in the full model's flat buffer, as a view."""
        return full.as_strided(self.sizes, self.far, full.storage_offset() + self.there)

    def of_piece(self, flat: Tensor) -> Tensor:
        """Return the places in the sub-model's flat buffer, as a view."""
        return flat.as_strided(self.sizes, self.near, flat.storage_offset() + self.here)


def strips_of(
    spans: Sequence[Sequence[Span]], shape: Sequence[int], kept: Sequence[int], there: int, here: int
) -> list[Strip] | None:
    """Return the strips of one tensor, or None where they would be many.

    Args:
        spans: The kept stretches of each dimension, in the order of the kept channels.
        shape: Of the tensor in the full model.
        kept: Its shape in the sub-model.
        there: Where it begins in the full model's buffer.
        here: Where it begins in the sub-model's.
    """
    runs = [_runs(stretches) for stretches in spans]
    count = 1
    for found in runs:
        count *= len(found)
    if count > _MOST:
        return None
    far, near = _distances(shape), _distances(kept)
    return [_grid(chosen, far, near, there, here) for chosen in product(*runs)]


@dataclass(frozen=True)
class _Run:
    """Stretches of one length at one distance in one dimension; `at`: where they begin in the sub-model's."""

    start: int
    length: int
    count: int
    distance: int
    at: int


def _runs(spans: Iterable[Span]) -> list[_Run]:
    found: list[_Run] = []
    at = 0
    for start, length in spans:
        last = found[-1] if found else None
        step = start - (last.start + (last.count - 1) * last.distance) if last else 0
        if last and length == last.length and step > 0 and (last.count == 1 or step == last.distance):
            found[-1] = _Run(last.start, length, last.count + 1, step, last.at)
        else:
            found.append(_Run(start, length, 1, 0, at))
        at += length
    return found


def _distances(shape: Sequence[int]) -> list[int]:
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= size
    return found[::-1]


def _grid(runs: Sequence[_Run], far: Sequence[int], near: Sequence[int], there: int, here: int) -> Strip:
    dims = []  # size, distance in the full buffer and in the sub-model's
    for run, f, n in zip(runs, far, near, strict=True):
        there, here = there + run.start * f, here + run.at * n
        dims += [(run.count, run.distance * f, run.length * n), (run.length, f, n)]
    return _strip(dims, there, here)


def _strip(dims: Iterable[tuple[int, int, int]], there: int, here: int) -> Strip:
    """Return a strip with as few dimensions as possible."""
    kept: list[tuple[int, int, int]] = []
    for size, far, near in dims:
        if size == 1:
            continue
        if kept and kept[-1][1] == far * size and kept[-1][2] == near * size:
            kept[-1] = (kept[-1][0] * size, far, near)
        else:
            kept.append((size, far, near))
    kept = kept or [(1, 1, 1)]
    return Strip(tuple(d[0] for d in kept), tuple(d[1] for d in kept), tuple(d[2] for d in kept), there, here)


def together(strips: Iterable[Strip]) -> list[Strip]:
    """Return the same places as fewer strips: neighbours joined, and equal ones at equal distances made one."""
    alike: dict[tuple[tuple[int, ...], ...], list[tuple[int, int]]] = {}
    for strip in _joined(strips):
        alike.setdefault((strip.sizes, strip.far, strip.near), []).append((strip.there, strip.here))
    found = []
    for dims, places in alike.items():
        for count, step, (there, here) in _regular(places):
            found.append(_strip([(count, *step), *zip(*dims, strict=True)], there, here))
    return found


def _joined(strips: Iterable[Strip]) -> list[Strip]:
    found: list[Strip] = []
    for strip in strips:
        last = found[-1] if found else None
        plain = strip.far == strip.near == (1,)
        ends = (last.there + last.count, last.here + last.count) if last and last.far == last.near == (1,) else None
        if last and plain and ends == (strip.there, strip.here):
            found[-1] = Strip((last.count + strip.count,), (1,), (1,), last.there, last.here)
        else:
            found.append(strip)
    return found


def _regular(places: Sequence[tuple[int, int]]) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Return (count, distances, first place) of runs of places at equal distances in both buffers."""
    found: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    last = (0, 0)
    for place in places:
        step = (place[0] - last[0], place[1] - last[1])
        if found and found[-1][0] == 1 and min(step) > 0:
            found[-1] = (2, step, found[-1][2])
        elif found and found[-1][1] == step:
            found[-1] = (found[-1][0] + 1, step, found[-1][2])
        else:
            found.append((1, (0, 0), place))
        last = place
    return found


def places_of(strip: Strip) -> tuple[Tensor, Tensor]:
    """Return the places of a strip in the full model's buffer and in the sub-model's, as indices."""
    far, near = torch.tensor([strip.there]), torch.tensor([strip.here])
    for size, f, n in zip(strip.sizes, strip.far, strip.near, strict=True):
        steps = torch.arange(size)
        far, near = (far[:, None] + steps * f).reshape(-1), (near[:, None] + steps * n).reshape(-1)
    return far, near
