"""Part 1 of the proof: permuting an axis everywhere must not change what the full model computes."""

from collections.abc import Mapping, Sequence

import torch

from fleetfit.check.full import TOLERANCE, Full, difference
from fleetfit.errors import ModelError
from fleetfit.layout import Layout
from fleetfit.seeds import torch_rng
from fleetfit.submodel import Submodel, extract

_TRIED_ALONE = 200  # tensors that are tried one by one when something is wrong


def permuted(full: Full, axis: str) -> float | None:
    """Permute an axis everywhere; return how far the outputs moved, or None for an axis of one granule.

    Raises:
        ModelError: They moved, so the layout is wrong; says where to look.
    """
    kept = _permutation(full.layout, axis)
    if kept is None:
        return None
    error = _moved(full, {axis: kept})
    if not full.layout.axes[axis].scaled and error > TOLERANCE:  # classes: the logits may be permuted with them
        index = torch.tensor(kept)
        ours = full.outputs(extract(full.layout, full.state, Submodel({axis: kept}, full.layout.exits)))
        theirs = [t.index_select(-1, index) if t.shape[-1] == len(kept) else t for t in full.expected]
        error = difference(ours, theirs)
    if error > TOLERANCE:
        raise ModelError(
            f'permuting the channels of axis "{axis}" everywhere changes the outputs by {error:.2g} of their size, so '
            f"its layout is wrong. {_suspicion(full, axis, kept)}"
        )
    return error


def _permutation(layout: Layout, axis: str) -> tuple[int, ...] | None:
    granule = layout.axes[axis].granule
    count = layout.axes[axis].size // granule
    if count < 2 or layout.axes[axis].ordered:
        return None
    order = torch.randperm(count, generator=torch_rng("check_layout", axis)).tolist()
    if order == sorted(order):
        order = order[::-1]
    return tuple(g * granule + i for g in order for i in range(granule))


def _moved(full: Full, channels: Mapping[str, tuple[int, ...]], but: str = "") -> float:
    """Return how far the outputs move when axes are permuted, in all tensors but one."""
    state = dict(extract(full.layout, full.state, Submodel(channels, full.layout.exits)))
    if but:
        state[but] = full.state[but]
    return difference(full.outputs(state), full.expected)


def _suspicion(full: Full, axis: str, kept: tuple[int, ...]) -> str:
    """Say where to look: an axis that must move with this one, a declaration, or single tensors."""
    axes, tensors = full.layout.axes, full.layout.tensors
    for other, theirs in axes.items():
        same = other != axis and (theirs.size, theirs.granule) == (axes[axis].size, axes[axis].granule)
        beside = any({axis, other} <= {s.axis for s in dim} for t in tensors.values() for dim in t.dims)
        if same and not beside and _moved(full, {axis: kept, other: kept}) <= TOLERANCE:
            return (
                f'Permuted together with axis "{other}" it is right: the two are one stream (a residual sum?), so give '
                "them one axis."
            )
    users = {name: [dim for dim in tensor.dims if any(s.axis == axis for s in dim)] for name, tensor in tensors.items()}
    users = {name: dims for name, dims in users.items() if dims}
    declared = [name for name, dims in users.items() if any(len(dim) > 1 or dim[0].per > 1 for dim in dims)]
    if declared:
        return f"Look at what is declared (blocked, interleaved or segments, and their order) for {_listed(declared)}."
    single = [name for name in list(users)[:_TRIED_ALONE] if _moved(full, {axis: kept}, but=name) <= TOLERANCE]
    if single:
        return f"It is right when {_listed(single)} stays as it is: that tensor does not follow the axis."
    return (
        f"Look at the tensors that follow it ({_listed(list(users))}) and at what they are added to or multiplied by."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f'"{name}"' for name in names[:4]) + more
