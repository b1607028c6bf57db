"""Part 1 of the proof: permuting an axis everywhere does not change what the full model computes.

Axes are permuted in groups, each axis in an order of its own, so that two axes which only move together (a residual
stream under two names) are found. Axes of many granules are one group. Few granules have few orders, and two axes may
have the same one: of any two such axes, some group has one without the other.
"""

from collections.abc import Callable, Mapping

import torch

from fleetfit.anatomy.proof.full import FullModel, KeptPlaces, difference, overlay
from fleetfit.errors import ModelError, quote_some
from fleetfit.layout import Axis, Layout, Segment
from fleetfit.seeds import make_torch_rng

_MANY = 16  # granules: two axes have the same order by chance once in 16!
_MAX_TRIED = 200  # tensors that are tried one by one when something is wrong


def check_permutations(full: FullModel, now: Callable[[str], None]) -> dict[str, float]:
    """Permute every axis of more than one granule everywhere; return how far the outputs moved, by axis.

    Raises:
        ModelError: They moved, so the layout is wrong; the message says where to look.
    """
    axes = full.layout.axes
    orders = {axis: order for axis in axes if (order := _draw_order(full.layout, axis, full.seed)) is not None}
    scaled = {axis: axes[axis] for axis in orders if axes[axis].scaled}
    errors = {axis: _permute(full, axis, orders[axis]) for axis in orders if axis not in scaled}
    groups = _group_axes(scaled)
    for i, group in enumerate(groups, 1):
        now(f"permutation {i} of {len(groups)}")
        error = _measure_change(full, {axis: orders[axis] for axis in group})
        if error > full.tolerance:
            for axis in group:
                _permute(full, axis, orders[axis])
            raise ModelError(
                f"permuting the channels of axes {quote_some(group)} together changes the outputs by {error:.2g} of "
                "their size, though each alone does not. Look at the tensors that follow two of them."
            )
        errors |= {axis: max(error, errors.get(axis, 0.0)) for axis in group}
    return {axis: errors[axis] for axis in orders}


def _draw_order(layout: Layout, axis: str, seed: int) -> tuple[int, ...] | None:
    """Return the channels of an axis in another order of its granules; None where there is no other."""
    granule = layout.axes[axis].granule
    count = layout.axes[axis].size // granule
    if count < 2 or layout.axes[axis].ordered:
        return None
    order = torch.randperm(count, generator=make_torch_rng("check_layout", seed, axis)).tolist()
    if order == sorted(order):
        order = order[::-1]
    return tuple(g * granule + i for g in order for i in range(granule))


def _group_axes(axes: Mapping[str, Axis]) -> list[list[str]]:
    """Return axes of many granules, then the others by the bits of their numbers from 1."""
    wide = [name for name, axis in axes.items() if axis.size // axis.granule >= _MANY]
    narrow = [name for name in axes if name not in wide]
    bits = range(len(narrow).bit_length())
    return [wide] * bool(wide) + [[name for i, name in enumerate(narrow, 1) if (i >> bit) % 2] for bit in bits]


def _permute(full: FullModel, axis: str, order: tuple[int, ...]) -> float:
    """Permute one axis; return how far the outputs moved."""
    logits = full.outputs(KeptPlaces(full.layout, {axis: order}).cut(full.state))
    error = difference(logits, full.expected)
    if not full.layout.axes[axis].scaled and error > full.tolerance:  # classes: the logits may be permuted with them
        index = torch.tensor(order)
        expected = [t.index_select(-1, index) if t.shape[-1] == len(order) else t for t in full.expected]
        error = difference(logits, expected)
    if error > full.tolerance:
        raise ModelError(
            f'permuting the channels of axis "{axis}" everywhere changes the outputs by {error:.2g} of their size, so '
            f"its layout is wrong. {_find_suspects(full, axis, order)}"
        )
    return error


def _measure_change(full: FullModel, orders: Mapping[str, tuple[int, ...]], unchanged: str = "") -> float:
    """Return how far the outputs move when axes are permuted, in all tensors but one."""
    state = KeptPlaces(full.layout, orders).cut(full.state)
    if unchanged:
        state = overlay(state, {unchanged: full.state[unchanged]})
    return difference(full.outputs(state), full.expected)


def _find_suspects(full: FullModel, axis: str, order: tuple[int, ...]) -> str:
    """Say where to look: an axis that must move with this one, or single tensors."""
    axes, tensors = full.layout.axes, full.layout.tensors
    for name, other in axes.items():
        same = name != axis and (other.size, other.granule) == (axes[axis].size, axes[axis].granule)
        beside = any({axis, name} <= {a for s in dim for a in s.axes} for t in tensors.values() for dim in t.dims)
        if same and not beside and _measure_change(full, {axis: order, name: order}) <= full.tolerance:
            return (
                f'Permuted together with axis "{name}" it is right: the two are one stream (a residual sum?), so give '
                "them one axis."
            )
    dims = {name: [dim for dim in t.dims if any(axis in s.axes for s in dim)] for name, t in tensors.items()}
    plain = {
        name: all(dim in ((Segment(axis),), (Segment(axis, per_granule=True),)) for dim in dims[name]) for name in dims
    }
    followers = sorted(filter(dims.__getitem__, dims), key=plain.__getitem__)  # first those with an order of places
    single = [
        name
        for name in followers[:_MAX_TRIED]
        if _measure_change(full, {axis: order}, unchanged=name) <= full.tolerance
    ]
    if single:
        return f"It is right when {quote_some(single)} stays as it is: that tensor does not follow the axis."
    return (
        f"Look at the tensors that follow it ({quote_some(followers)}) and at what they are added to or multiplied by."
    )
