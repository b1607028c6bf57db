"""Part 3 of the proof: a sub-model with random channels equals the full model with the other channels zeroed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fleetfit.check.full import TOLERANCE, Full, describe, difference
from fleetfit.check.shapes import loaded
from fleetfit.errors import ModelError
from fleetfit.layout import Layout, outputs
from fleetfit.seeds import numpy_rng
from fleetfit.submodel import Submodel, extract, put_back, random

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # those that mix channels; batch norm does not


def random_channels(full: Full, level: Submodel) -> float:
    """Compare a sub-model of a level's sizes, with random channels, with the masked full model; return how they differ.

    Raises:
        ModelError: They differ by more than rounding.
    """
    layout = full.layout
    piece = Submodel({axis: _drawn(layout, axis, n) for axis, n in level.sizes.items()}, level.exits)
    module = loaded(full, piece)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in full.state.items()}
    masked = put_back(layout, nothing, piece, extract(layout, full.state, piece))
    hooks = [
        norm.register_forward_hook(_restricted(module.get_submodule(name), _kept(layout, piece, f"{name}.weight")))
        for name, norm in full.module.named_modules()
        if isinstance(norm, _NORMS) and layout.tensors[f"{name}.weight"].present(piece.exits)
    ]
    try:
        everything = full.outputs(masked)
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        ours = outputs(module, full.x)
    error = difference(ours, [everything[layout.exits.index(e)] for e in piece.exits])
    if error > TOLERANCE:
        raise ModelError(
            f"level with {describe(level)}: a sub-model with random channels differs from the full model with the "
            f"other channels zeroed by {error:.2g} of the outputs' size. Either the layout is wrong, or the model's "
            "arithmetic depends on a size, or it has a norm over channels of its own making; in the last two cases "
            "leave this part of the check out."
        )
    return error


def unreachable(full: Full) -> str:
    """Return why random channels cannot be compared, or an empty string."""
    declared = getattr(full.architecture, "size_dependent", "")
    if declared:
        return f"the model's arithmetic depends on a size: {declared}"
    for name, part in full.module.named_modules():
        if isinstance(part, _NORMS) and f"{name}.weight" not in full.layout.tensors:
            return f'the norm "{name}" has no weights, so its channels cannot be told'
    return ""


def _drawn(layout: Layout, axis: str, n: int) -> range | tuple[int, ...]:
    if not layout.axes[axis].scaled:
        return range(n)
    return random(layout.axes[axis], n, 0, 0, numpy_rng("check_layout", axis, n))


def _kept(layout: Layout, piece: Submodel, name: str) -> Tensor:
    """Return the places of a tensor, counted flat, that a sub-model keeps."""
    places = {key: torch.zeros(shape) for key, shape in layout.shapes({}, layout.exits).items()}
    places[name] = torch.arange(places[name].numel(), dtype=torch.float32).view_as(places[name])
    return extract(layout, places, piece)[name].flatten().long()


def _restricted(small: nn.Module, kept: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """Return a hook that norms the kept channels alone, as the sub-model does, and leaves zeros elsewhere."""
    shape = small.get_parameter("weight").shape

    def hook(norm: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x, found = inputs[0], torch.zeros_like(out)
        if isinstance(norm, nn.GroupNorm):
            return found.index_copy(1, kept, small(x.index_select(1, kept)))
        flat = x.flatten(-len(shape)).index_select(-1, kept)
        normed = small(flat.unflatten(-1, shape)).flatten(-len(shape))
        return found.flatten(-len(shape)).index_copy(-1, kept, normed).view_as(out)

    return hook
