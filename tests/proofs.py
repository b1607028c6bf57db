"""What the tests of single architectures share: the proof of a layout, a little training, AdaptiveFL's sub-models."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from fleetfit.anatomy import Architecture, build_module, infer_layout
from fleetfit.anatomy.proof import check_layout


def proven(architecture: Architecture, shape: tuple[int, ...], exits: tuple[int, ...] = ()) -> None:
    """All parts of the proof."""
    layout = infer_layout(architecture, exits, input_shape=shape) if exits else None
    report = check_layout(architecture, layout, input_shape=shape)
    assert not report.not_proved
    assert len(report.cuts) >= 3
    assert max(report.cuts.values()) < 1e-9
    assert max(report.permutation.values()) < 1e-9


def trains(architecture: Architecture, shape: tuple[int, ...], exits: tuple[int, ...], lr: float = 0.02) -> None:
    """A narrow piece learns a random batch by heart: its loss falls at every exit."""
    torch.manual_seed(0)
    module = build_module(architecture, architecture.sizes(0.5), exits).train()
    x, y = torch.randn(8, *shape), torch.arange(8) % architecture.axes["classes"].size
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(25):
        each = torch.stack([F.cross_entropy(logits, y) for logits in module(x)])
        optimizer.zero_grad()
        each.sum().backward()
        optimizer.step()
        losses.append(each.detach())
    assert bool(torch.isfinite(losses[-1]).all())
    assert bool((losses[-1] < 0.7 * losses[0]).all()), (losses[0], losses[-1])


def whole_before(architecture: Architecture, block: int, width: float) -> dict[str, int]:
    """AdaptiveFL's (r_w, I): axes that begin before block I are whole, the others cut."""
    cut = architecture.sizes(width)
    return {name: axis.size if axis.block < block else cut[name] for name, axis in architecture.axes.items()}


def get_shapes(module: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """Shapes of parameters by name."""
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def built(architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
    """A module without data."""
    with torch.device("meta"):
        return build_module(architecture, sizes, exits)
