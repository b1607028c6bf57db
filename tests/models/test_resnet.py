"""ResNet's structure and sizes, counted by hand."""

import pytest
import torch
from support import raises
from torch import nn

from fleetfit import names
from fleetfit.errors import ConfigError, ModelError
from fleetfit.factories import call_factory
from fleetfit.layout import build_module
from fleetfit.models.blocks import Head
from fleetfit.models.resnet import ResNet, resnet


def by_hand(n: int, exits: tuple[int, ...], stages: tuple[int, int, int], classes: int = 10) -> int:
    """Parameters of a ResNet 6n+2, term by term: convolutions without biases, norms with two numbers per channel."""
    total = 3 * 9 * stages[0] + 2 * stages[0]  # stem
    for i in range(exits[-1]):
        after = stages[i // n]
        before = stages[(i - 1) // n] if i else stages[0]
        total += 9 * before * after + 9 * after * after + 4 * after
        if before != after or (i % n == 0 and i):
            total += before * after + 2 * after  # shortcut
    for e in exits:
        c = stages[(e - 1) // n]
        total += c * classes + classes + (0 if e == 3 * n else 3 * (9 * c * c + 2 * c))
    return total


def count(architecture: ResNet, width: float, exits: tuple[int, ...]) -> int:
    with torch.device("meta"):
        module = build_module(architecture, architecture.sizes(width), exits)
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("depth", [8, 14, 20, 32, 56, 110])
def test_parameters_of_every_depth(depth: int) -> None:
    n = (depth - 2) // 6
    assert count(resnet(depth=depth), 1.0, (3 * n,)) == by_hand(n, (3 * n,), (16, 32, 64))


def test_known_sizes() -> None:
    """ResNet-20 with option B, and ScaleFL's Table 1 for ResNet-110: 0.21, 0.46, 0.86, 1.73 M."""
    assert count(resnet(depth=20), 1.0, (9,)) == 272_474
    assert count(resnet(), 0.70, (36,)) == by_hand(18, (36,), (11, 22, 44)) == 210_253
    assert count(resnet(), 0.70, (36, 42)) == by_hand(18, (36, 42), (11, 22, 44)) == 465_727
    assert count(resnet(), 0.75, (36, 42, 48)) == by_hand(18, (36, 42, 48), (12, 24, 48)) == 866_730
    assert count(resnet(), 1.0, (54,)) == 1_730_714


@pytest.mark.parametrize("depth", [20, 32, 56, 110])
def test_each_depth_has_a_name(depth: int) -> None:
    made = names.resolve("models", f"resnet{depth}")(classes=7, channels=1, norm="group")
    assert made == resnet(7, 1, depth, "group")
    assert hash(made) == hash(resnet(7, 1, depth, "group"))
    assert made != resnet(7, 1, depth, "batch")
    assert f"{depth}" in names.describe_entry("models", f"resnet{depth}")


def test_settings_come_from_a_configuration() -> None:
    made = call_factory(names.resolve("models", "resnet"), "resnet", "[model]", {"depth": 14}, classes=5, channels=1)
    assert made == resnet(classes=5, channels=1, depth=14)
    with raises(ConfigError, '"batch"', '"group"'):
        call_factory(names.resolve("models", "resnet20"), "resnet20", "[model]", {"norm": "layer"}, classes=5)


def test_logits_of_every_exit_and_halved_images() -> None:
    architecture = resnet(classes=7, channels=1, depth=14)
    module = build_module(architecture, architecture.sizes(0.5), (1, 3, 6)).eval()
    seen = {}
    for i, block in enumerate(module.blocks):
        block.register_forward_hook(lambda part, x, out, i=i: seen.update({i: tuple(out.shape[1:])}))
    logits = module(torch.randn(2, 1, 12, 12))
    assert [tuple(out.shape) for out in logits] == [(2, 7)] * 3
    assert seen == {0: (8, 12, 12), 1: (8, 12, 12), 2: (16, 6, 6), 3: (16, 6, 6), 4: (32, 3, 3), 5: (32, 3, 3)}


def test_shortcuts_sit_where_stages_meet_even_if_narrow_stages_are_equally_wide() -> None:
    architecture = resnet(depth=14)
    module = build_module(architecture, {"stage1": 1, "stage2": 1, "stage3": 1, "classes": 10}, (6,))
    kinds = [type(block.shortcut) for block in module.blocks]
    assert [kind is nn.Sequential for kind in kinds] == [False, False, True, False, True, False]


def test_early_exits_are_three_convolutions_and_the_last_is_none() -> None:
    module = build_module(resnet(depth=8), resnet(depth=8).sizes(1.0), (1, 3))
    convolutions = {e: sum(isinstance(m, nn.Conv2d) for m in head.modules()) for e, head in module.heads.items()}
    assert convolutions == {"1": 3, "3": 0}


def test_group_norm_cuts_whole_groups() -> None:
    architecture = resnet(depth=8, norm="group", group=4)
    assert architecture.sizes(0.7) == {"stage1": 8, "stage2": 20, "stage3": 44, "classes": 10}
    norms = [
        m for m in build_module(architecture, architecture.sizes(0.7), (3,)).modules() if isinstance(m, nn.GroupNorm)
    ]
    assert norms
    assert {m.num_channels // m.num_groups for m in norms} == {4}


def test_dropout_acts_in_training_only() -> None:
    head = Head(8, 3, dropout=0.5)
    x = torch.randn(4, 8, 2, 2)
    assert torch.equal(head.eval()(x), head(x))
    head.train()
    assert not torch.equal(head(x), head(x))


def test_initial_weights_have_the_scale_of_he() -> None:
    architecture = resnet(depth=20)
    module = build_module(architecture, architecture.sizes(1.0), (9,))
    weight = module.blocks[8].conv2.weight.detach()
    assert float(weight.std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.05)
    assert not module.heads["9"].fc.bias.any()


@pytest.mark.parametrize("depth", [2, 9, 11, 21, 111])
def test_other_depths_are_refused(depth: int) -> None:
    with raises(ModelError, "6n+2", depth, key="depth"):
        resnet(depth=depth)


def test_other_norms_and_groups_are_refused() -> None:
    with raises(ModelError, '"batch"', '"group"', key="norm"):
        resnet(norm="layer")
    with raises(ModelError, 16, 5, key="granule"):
        resnet(norm="group", group=5)
    with raises(ModelError, 1, 0, key="group"):
        resnet(norm="group", group=0)
