"""Parts 1 and 2 of the proof: permuted axes change nothing, and every level has the predicted shapes.

Where there are many axes they are permuted in groups, each by its own permutation: every axis is in a group that any
given other one is not in, so that two which only move together (a residual stream under two names) are found.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from fleetfit.check.full import Full, KeptPlaces, describe, difference, in_float64, load
from fleetfit.errors import ModelError
from fleetfit.layout import Layout, build_module, named_tensors, outputs
from fleetfit.seeds import make_torch_rng
from fleetfit.submodel import Submodel, extract

# ---- part 1: permuting an axis everywhere must not change what the full model computes -----------------------------

_TRIED_ALONE = 200  # tensors that are tried one by one when something is wrong


def permuted(full: Full, now: Callable[[str], None]) -> dict[str, float]:
    """Permute every axis of more than one granule everywhere; return how far the outputs moved, by axis.

    Raises:
        ModelError: They moved, so the layout is wrong; says where to look.
    """
    orders = {
        axis: kept for axis in full.layout.axes if (kept := _permutation(full.layout, axis, full.seed)) is not None
    }
    scaled = [axis for axis in orders if full.layout.axes[axis].scaled]
    found = {axis: _alone(full, axis, orders[axis]) for axis in orders if axis not in scaled}
    groups = _groups(scaled)
    for i, group in enumerate(groups, 1):
        now(f"permutation {i} of {len(groups)}")
        error = _moved(full, {axis: orders[axis] for axis in group})
        if error > full.tolerance:
            for axis in group:
                _alone(full, axis, orders[axis])
            raise ModelError(
                f"permuting the channels of axes {_listed(group)} together changes the outputs by {error:.2g} of their "
                "size, though each alone does not. Look at the tensors that follow two of them."
            )
        found |= {axis: max(error, found.get(axis, 0.0)) for axis in group}
    return {axis: found[axis] for axis in orders}


def _groups(axes: Sequence[str]) -> list[list[str]]:
    """Return each axis alone, or, where that is fewer, groups by the bits of the axes' numbers."""
    bits = max(1, (len(axes) - 1).bit_length())
    if len(axes) <= 2 * bits:
        return [[axis] for axis in axes]
    return [[axis for i, axis in enumerate(axes) if (i >> bit) % 2 == one] for bit in range(bits) for one in (0, 1)]


def _alone(full: Full, axis: str, kept: tuple[int, ...]) -> float:
    """Permute one axis; return how far the outputs moved."""
    error = _moved(full, {axis: kept})
    if not full.layout.axes[axis].scaled and error > full.tolerance:  # classes: the logits may be permuted with them
        index = torch.tensor(kept)
        ours = full.outputs(KeptPlaces(full.layout, {axis: kept}).cut(full.state))
        theirs = [t.index_select(-1, index) if t.shape[-1] == len(kept) else t for t in full.expected]
        error = difference(ours, theirs)
    if error > full.tolerance:
        raise ModelError(
            f'permuting the channels of axis "{axis}" everywhere changes the outputs by {error:.2g} of their size, so '
            f"its layout is wrong. {_suspicion(full, axis, kept)}"
        )
    return error


def _permutation(layout: Layout, axis: str, seed: int) -> tuple[int, ...] | None:
    granule = layout.axes[axis].granule
    count = layout.axes[axis].size // granule
    if count < 2 or layout.axes[axis].ordered:
        return None
    order = torch.randperm(count, generator=make_torch_rng("check_layout", seed, axis)).tolist()
    if order == sorted(order):
        order = order[::-1]
    return tuple(g * granule + i for g in order for i in range(granule))


def _moved(full: Full, channels: Mapping[str, tuple[int, ...]], but: str = "") -> float:
    """Return how far the outputs move when axes are permuted, in all tensors but one."""
    state = dict(KeptPlaces(full.layout, channels).cut(full.state))
    if but:
        state[but] = full.state[but]
    return difference(full.outputs(state), full.expected)


def _suspicion(full: Full, axis: str, kept: tuple[int, ...]) -> str:
    """Say where to look: an axis that must move with this one, a declaration, or single tensors."""
    axes, tensors = full.layout.axes, full.layout.tensors
    for other, theirs in axes.items():
        same = other != axis and (theirs.size, theirs.granule) == (axes[axis].size, axes[axis].granule)
        beside = any({axis, other} <= {a for s in dim for a in s.axes} for t in tensors.values() for dim in t.dims)
        if same and not beside and _moved(full, {axis: kept, other: kept}) <= full.tolerance:
            return (
                f'Permuted together with axis "{other}" it is right: the two are one stream (a residual sum?), so give '
                "them one axis."
            )
    users = {name: [dim for dim in tensor.dims if any(axis in s.axes for s in dim)] for name, tensor in tensors.items()}
    users = {name: dims for name, dims in users.items() if dims}
    declared = [
        name for name, dims in users.items() if any(len(dim) > 1 or dim[0].per > 1 or dim[0].within for dim in dims)
    ]
    if declared:
        words = "blocked, interleaved, product or segments, and their order"
        return f"Look at what is declared ({words}) for {_listed(declared)}."
    single = [name for name in list(users)[:_TRIED_ALONE] if _moved(full, {axis: kept}, but=name) <= full.tolerance]
    if single:
        return f"It is right when {_listed(single)} stays as it is: that tensor does not follow the axis."
    return (
        f"Look at the tensors that follow it ({_listed(list(users))}) and at what they are added to or multiplied by."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f'"{name}"' for name in names[:4]) + more


# ---- part 2: every level has the predicted shapes and loads strictly; its exits compute what they should -----------


def check_depths(full: Full, exits: Iterable[tuple[int, ...]]) -> None:
    """Check that models of full width with fewer exits give what the full model gives there.

    Raises:
        ModelError: One does not.
    """
    for some in dict.fromkeys(exits):
        if some == full.layout.exits:
            continue
        module = loaded(full, Submodel({}, some))
        with torch.no_grad(), in_float64():
            ours = outputs(module, full.x)
        error = difference(ours, [full.expected[full.layout.exits.index(e)] for e in some])
        if error > full.tolerance:
            raise ModelError(
                f"a model of full width with exits {', '.join(map(str, some))} gives other outputs than the full model "
                f"at these exits; they differ by {error:.2g} of their size. What a block or a classifier computes must "
                "not depend on how many follow it."
            )


def loaded(full: Full, level: Submodel) -> nn.Module:
    """Build a level's module in float64, compare its shapes with the predicted ones, and load its state.

    Raises:
        ModelError: They differ.
    """
    layout = full.layout
    module = build_module(full.architecture, {**layout.full_sizes, **level.sizes}, level.exits).eval()
    built = {name: tuple(tensor.shape) for name, tensor, _ in named_tensors(module)}
    own = {name: shape for name, shape in built.items() if name not in layout.aliases and name not in full.base}
    _compare(full, level, layout.shapes(level.sizes, level.exits), own)
    module.double()
    base = {name: tensor for name, tensor in full.base.items() if name in built}
    load(module, {**base, **extract(layout, full.state, level)})
    return module


def _compare(
    full: Full, level: Submodel, predicted: dict[str, tuple[int, ...]], built: dict[str, tuple[int, ...]]
) -> None:
    where = f"level with {describe(level)}"
    odd = sorted(predicted.keys() ^ built.keys())
    if odd:
        which = "and the builder does not make it" if odd[0] in predicted else "and the builder makes it all the same"
        raise ModelError(
            f'{where}: "{odd[0]}" {"is" if odd[0] in predicted else "is not"} part of it by the layout, {which}. '
            "A level has no blocks after its last exit, and the classifiers of its exits only. Names tell which is "
            "which, blocks.{i}.* and heads.{block count}.*, or a declaration: block(i), exit_after(block count)."
        )
    for name, shape in predicted.items():
        if built[name] != shape:
            axes = sorted({axis for dim in full.layout.tensors[name].dims for s in dim for axis in s.axes})
            raise ModelError(
                f'{where}: the layout predicts {shape} for "{name}" (axes: {", ".join(axes) or "none"}), the builder '
                f"makes {built[name]}. A size that is derived by rounding must be an axis of its own, or its granule "
                "be set so that it divides."
            )
