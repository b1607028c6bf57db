import pytest
import torch
from proofs import built, get_shapes, proven, trains, whole_before
from torch import nn

from fleetfit.anatomy import build_module, infer_layout
from fleetfit.cost import full_cost, submodel_cost
from fleetfit.models.vgg16 import vgg16

CIFAR = (3, 32, 32)


@pytest.mark.parametrize(
    ("width", "whole", "parameters", "multiply_adds"),
    [
        (1.00, 0, 33.65, 333.22),
        (0.66, 8, 16.81, 272.17),
        (0.66, 6, 15.41, 239.95),
        (0.66, 4, 14.84, 203.41),
        (0.40, 8, 8.39, 239.00),
        (0.40, 6, 6.48, 191.31),
        (0.40, 4, 5.67, 139.07),
    ],
)
def test_adaptivefl_s_table_1(width: float, whole: int, parameters: float, multiply_adds: float) -> None:
    """Its pool for p = 3, in millions; they count some 1 M operations that are neither convolutions nor linear."""
    cost = submodel_cost(vgg16(), (whole_before(vgg16(), whole, width), (15,)), CIFAR)
    assert cost.parameters / 1e6 == pytest.approx(parameters, rel=2e-3)
    assert cost.multiply_adds / 1e6 == pytest.approx(multiply_adds, rel=1e-2)


def count_parameters(widths: list[int], pixels: int, classes: int, channels: int = 3) -> int:
    total, before = 0, channels
    for n in widths[:13]:
        total += 9 * before * n + n + 2 * n  # kernel, bias, norm
        before = n
    before *= pixels
    for n in widths[13:]:
        total += before * n + n
        before = n
    return total + before * classes + classes


def test_sizes_by_hand_and_as_known() -> None:
    full = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512, 4096, 4096]
    assert full_cost(vgg16(), CIFAR).parameters == count_parameters(full, 1, 10) == 33_646_666
    large = vgg16(1000, (3, 224, 224))
    assert (
        full_cost(large, (3, 224, 224)).parameters == count_parameters(full, 49, 1000) == 138_365_992
    )  # torchvision's vgg16_bn
    narrow = [int(0.3 * n) for n in full]
    cost = submodel_cost(large, (large.sizes(0.3), (15,)), (3, 224, 224))
    assert cost.parameters == count_parameters(narrow, 49, 1000)


@pytest.mark.parametrize("side", [8, 16, 28, 32, 64])
def test_maps_are_halved_until_one_pixel_is_left(side: int) -> None:
    architecture = vgg16(4, (1, side, side), base=2, wide=3)
    module = build_module(architecture, architecture.sizes(1.0), (2, 13, 15)).eval()
    sides = []
    for block in module.blocks[:13]:
        block.register_forward_hook(lambda part, x, out: sides.append(out.shape[-1]))
    assert [tuple(z.shape) for z in module(torch.randn(2, 1, side, side))] == [(2, 4)] * 3
    expected, now = [], side
    for i in range(1, 14):
        now = max(1, now // 2) if i in (2, 4, 7, 10, 13) else now
        expected.append(now)
    assert sides == expected
    assert architecture.pixels == sides[-1] ** 2


def test_the_layout_with_group_norm_is_proven() -> None:
    """With batch norm: test_every_model.py."""
    proven(vgg16(3, (2, 8, 8), base=4, wide=6, norm="group"), (2, 8, 8), (3, 8, 13, 14, 15))


def test_a_flattened_map_goes_by_channel() -> None:
    """Four pixels per channel: rows of the first wide layer go by channel."""
    architecture = vgg16(3, (2, 64, 64), base=2, wide=5)
    assert architecture.pixels == 4
    proven(architecture, (2, 64, 64), (2, 15))
    (part,) = infer_layout(architecture, (15,), input_shape=(2, 64, 64)).tensors["blocks.13.linear.weight"].dims[1]
    assert (part.axis, part.per) == ("layer12", 4)


def test_it_trains() -> None:
    trains(vgg16(4, (3, 16, 16), base=8, wide=32, dropout=0.1), (3, 16, 16), (5, 13, 15))


def test_layers_before_i_stay_whole() -> None:
    architecture = vgg16(base=8, wide=20)
    sizes = whole_before(architecture, 5, 0.5)
    assert [sizes[f"layer{i}"] for i in range(15)] == [8, 8, 16, 16, 32, *[16] * 2, *[32] * 6, 10, 10]
    layout = infer_layout(architecture, (7, 15))
    assert get_shapes(built(architecture, sizes, (15,))) == layout.shapes(sizes, (15,))


def test_dropout_follows_the_wide_layers_only() -> None:
    module = built(vgg16(dropout=0.3, base=2, wide=3), vgg16(base=2, wide=3).sizes(1.0), (3, 15))
    assert {n: m.p for n, m in module.named_modules() if isinstance(m, nn.Dropout)} == {
        "blocks.13.drop": 0.3,
        "blocks.14.drop": 0.3,
        "heads.3.drop": 0.0,
    }
