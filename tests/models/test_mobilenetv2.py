import pytest
import torch
from proofs import built, get_shapes, proven, trains, whole_before
from torch import nn

from fleetfit.anatomy import build_module, infer_layout
from fleetfit.cost import full_cost, submodel_cost
from fleetfit.models.inverted import mobilenetv2, multiply_channels

TABLE = ((16, 1), (24, 2), (32, 3), (64, 4), (96, 3), (160, 3), (320, 1))  # channels, blocks


def count_parameters(width: float, classes: int) -> int:
    total = 27 * int(32 * width) + 2 * int(32 * width)
    before = int(32 * width)
    for s, (channels, blocks) in enumerate(TABLE):
        after = int(channels * width)
        for _ in range(blocks):
            inside = 6 * before if s else before
            total += (before * inside + 2 * inside) * bool(s)  # the first block does not expand
            total += 9 * inside + 2 * inside + inside * after + 2 * after
            before = after
    top = int(1280 * width)
    return total + before * top + 2 * top + top * classes + classes


def test_known_sizes() -> None:
    """torchvision's 3,504,872 parameters and 0.30 G multiply-adds; 2.24 M for CIFAR-10."""
    large = full_cost(mobilenetv2(1000, stride=32), (3, 224, 224))
    assert large.parameters == count_parameters(1.0, 1000) == 3_504_872
    assert large.multiply_adds == pytest.approx(0.3e9, rel=0.01)
    small = full_cost(mobilenetv2(), (3, 32, 32))
    assert small.parameters == count_parameters(1.0, 10) == 2_236_682
    architecture = mobilenetv2()
    cost = submodel_cost(architecture, (architecture.sizes(0.37), (17,)), (3, 32, 32))
    assert cost.parameters == count_parameters(0.37, 10)
    assert full_cost(mobilenetv2(1000, width_multiplier=0.5, stride=32), (3, 224, 224)).parameters == 1_968_680


@pytest.mark.parametrize(
    ("channels", "times", "expected"), [(24, 0.25, 8), (16, 0.5, 8), (32, 0.35, 16), (160, 0.5, 80)]
)
def test_the_multiplier_keeps_multiples_of_eight(channels: int, times: float, expected: int) -> None:
    """0.35 of 32 is 11.2: 8 would be less than 0.9 of it."""
    assert multiply_channels(channels, times) == expected


def test_the_layout_is_proven() -> None:
    """With group norm: `test_efficientnet.py`, on fewer blocks."""
    proven(mobilenetv2(3, 2, width_multiplier=0.25, top=12), (2, 8, 8), (4, 11, 17))


def test_it_trains() -> None:
    trains(mobilenetv2(4, 3, width_multiplier=0.5, top=32, dropout=0.0, head_layers=0), (3, 16, 16), (5, 12, 17))


@pytest.mark.parametrize(
    ("stride", "sides"),
    [(32, [32, 32, 16, 8, 4, 4, 2, 2]), (8, [64, 64, 64, 32, 16, 16, 8, 8]), (1, [64] * 8)],
)
def test_halvings_are_left_out_from_the_first_on(stride: int, sides: list[int]) -> None:
    architecture = mobilenetv2(4, 1, width_multiplier=0.25, stride=stride)
    module = build_module(architecture, architecture.sizes(1.0), (17,)).eval()
    carry = module.start(torch.randn(1, 1, 64, 64))
    side_lengths = [carry.shape[-1]]
    for i, block in enumerate(module.blocks, 1):
        carry = block(carry)
        if i in (1, 3, 6, 10, 13, 16, 17):
            side_lengths.append(carry.shape[-1])
    assert side_lengths == sides


def test_every_block_has_channels_of_its_own_inside() -> None:
    architecture = mobilenetv2()
    assert [architecture.axes[f"expand{i}"].block for i in range(1, 17)] == list(range(1, 17))
    assert {architecture.axes[f"expand{i}"].size for i in (2, 3)} == {6 * 24}
    assert "expand0" not in architecture.axes
    sizes = whole_before(architecture, 4, 0.5)
    assert [sizes[n] for n in ("stem", "stage2", "stage3", "stage4")] == [32, 24, 32, 32]
    assert [sizes[f"expand{i}"] for i in (3, 4, 6, 7)] == [144, 96, 96, 192]
    assert sizes["top"] == 640
    layout = infer_layout(architecture, (17,))
    module = built(architecture, sizes, (17,))
    assert get_shapes(module) == layout.shapes(sizes, (17,))
    assert layout.tensors["blocks.5.filter.0.weight"].dims[0][0].axis == "expand5"
    assert layout.tensors["blocks.0.filter.0.weight"].dims[0][0].axis == "stem"
    filters = [m for m in module.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert len(filters) == 17 and all(m.groups == m.in_channels == m.out_channels for m in filters)


def test_it_computes_what_transformers_computes() -> None:
    """The same weights in Hugging Face's MobileNetV2, whose norms divide by sqrt(var + 0.001)."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.MobileNetV2ForImageClassification(
        transformers.MobileNetV2Config(num_labels=5, tf_padding=False, depth_multiplier=0.35, finegrained_output=True)
    ).eval()
    architecture = mobilenetv2(5, width_multiplier=0.35, stride=32)
    ours = architecture.build(architecture.sizes(1.0), (17,)).eval()
    for part in ours.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eps = 0.001
    torch.manual_seed(0)
    own_state = {n: t for n, t in ours.state_dict().items() if t.is_floating_point()}
    their_state = {n: t for n, t in theirs.state_dict().items() if t.is_floating_point()}
    assert [tuple(t.shape) for t in own_state.values()] == [
        tuple(t.shape) for t in their_state.values()
    ]  # one order in both
    for mine, other in zip(own_state.values(), their_state.values(), strict=True):
        other.copy_(
            torch.rand_like(other) + 0.5 if other.dim() < 2 else torch.randn_like(other) / other[0].numel() ** 0.5
        )
        mine.copy_(other)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x)[-1], theirs(x).logits, rtol=1e-4, atol=1e-4)
