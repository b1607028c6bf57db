"""Tensors that move no output: no comparison of outputs can tell whether their layout is right."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fleetfit.check.full import Full, load
from fleetfit.check.replay import plain_attention
from fleetfit.layout import Layout, named_tensors, outputs
from fleetfit.seeds import torch_rng

_NOTHING = 1e-12  # of the largest effect of an element


def inert(full: Full) -> tuple[str, ...]:
    """Return the cut tensors, or stretches of them, without effect on any output, such as the biases of keys."""
    load(full.module, {**full.base, **full.state})
    own = {name: tensor for name, tensor, is_parameter in named_tensors(full.module) if is_parameter}
    names = [name for name in full.layout.tensors if name in own and _is_cut(full.layout, name)]
    rng = torch_rng("check_layout", full.seed, "inert")
    before = [own[name].requires_grad for name in names]
    try:
        with torch.enable_grad(), plain_attention():
            for name in names:
                own[name].requires_grad_(True)
            found = outputs(full.module, full.x)
            total = torch.stack([(out * torch.randn(out.shape, generator=rng).to(out)).sum() for out in found]).sum()
            effects = torch.autograd.grad(total, [own[name] for name in names], allow_unused=True)
    except (RuntimeError, NotImplementedError):  # a model without gradients has nothing to train
        return ()
    finally:
        for name, needed in zip(names, before, strict=True):
            own[name].requires_grad_(needed)
    moved = {
        name: torch.zeros_like(own[name]) if effect is None else (effect * own[name].detach()).abs()
        for name, effect in zip(names, effects, strict=True)
    }
    least = _NOTHING * max((float(effect.max()) for effect in moved.values()), default=0.0)
    return tuple(text for name in names for text in _without(full.layout, name, moved[name] <= least))


def _is_cut(layout: Layout, name: str) -> bool:
    axes = (axis for dim in layout.tensors[name].dims for s in dim for axis in s.axes)
    return any(layout.axes[axis].scaled for axis in axes)


def _without(layout: Layout, name: str, still: Tensor) -> Iterator[str]:
    """Yield a tensor that is still, or the stretches of a stacked or concatenated first dimension that are."""
    if bool(still.all()):
        yield name
        return
    first = layout.tensors[name].dims[0]
    at = 0
    for segment in first if len(first) > 1 else ():
        length = segment.length(layout.axes, layout.full_sizes)
        if bool(still[at : at + length].all()):
            yield f"{name}[{at}:{at + length}]"
        at += length
