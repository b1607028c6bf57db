"""A level is the module that the instance's own constructor builds with smaller widths."""

from typing import Any

import pytest
import torch
from bed import ENTRIES, Entry
from support.bits import assert_same_bits
from support.derivation import derive
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.anatomy.derive import DerivedArchitecture
from fleetfit.anatomy.observe import get_logits

FACTOR = 0.5
NARROW = [name for name, entry in ENTRIES.items() if entry.narrow]
QUICK = [name for name in NARROW if name != "swin"][::3]
DIFFERENT = {
    "resnext": "a level has fewer groups, the constructor's module smaller ones",
    "resnet_group_norm": "a level has fewer groups, the constructor's module smaller ones",
    "weight_standardization": "a level has fewer groups, the constructor's module smaller ones",
    "vit_chunked_qkv": "its stream stays whole",
}
"""Modules whose levels are not the constructor's modules, with the reason."""


def list_narrow() -> list[Any]:
    marks = {name: pytest.mark.xfail(strict=True, reason=reason) for name, reason in DIFFERENT.items()}
    return [
        pytest.param(name, marks=[m for m in (marks.get(name), None if name in QUICK else pytest.mark.slow) if m])
        for name in NARROW
    ]


def read_sizes(architecture: DerivedArchitecture, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the sizes of axes in a module of these shapes, from the dimensions that follow one axis alone."""
    sizes = {axis: n if axis == "classes" else int(n * FACTOR) for axis, n in architecture.plan.axes.items()}
    for (name, d), segments in architecture.plan.segments.items():
        axes = {s.axis for s in segments}
        if len(axes) == 1:
            sizes[str(segments[0].axis)] = shapes[name][d] // sum(s.per for s in segments)
    return sizes


def train_one_step(net: nn.Module, entry: Entry) -> None:
    torch.manual_seed(3)
    x = entry.example()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    out = net.train()(x)
    logits: Tensor = get_logits(out)
    F.cross_entropy(logits.flatten(0, -2), torch.arange(logits[..., 0].numel()) % logits.shape[-1]).backward()
    optimizer.step()


def test_enough_modules_are_compared() -> None:
    assert len(NARROW) - len(DIFFERENT) >= 10


@pytest.mark.parametrize("name", list_narrow())
def test_a_level_is_what_the_constructor_builds(name: str) -> None:
    entry, architecture = derive(name)
    assert entry.narrow is not None
    torch.manual_seed(5)
    narrow = entry.narrow(FACTOR).eval()
    shapes = {key: tuple(tensor.shape) for key, tensor in narrow.state_dict().items()}
    level = architecture.build(read_sizes(architecture, shapes), (architecture.blocks,)).eval()
    state = {key.removeprefix("net."): tensor for key, tensor in level.state_dict().items()}
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == shapes
    narrow.load_state_dict(state)
    x = entry.example()
    with torch.no_grad():
        assert torch.equal(level(x)[-1], get_logits(narrow(x)))
    for net in (level, narrow):
        train_one_step(net, entry)
    assert_same_bits(
        {key.removeprefix("net."): tensor for key, tensor in level.state_dict().items()}, narrow.state_dict()
    )
