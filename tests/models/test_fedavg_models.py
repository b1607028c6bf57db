"""The FedAvg paper's image models: the printed sizes, term by term, and what they compute."""

import pytest
import torch
from support import raises
from torch import nn
from torch.nn import functional as F
from zoo import arrange

from fleetfit.anatomy import Segment, build_module, infer_layout
from fleetfit.anatomy.proof import check_layout
from fleetfit.cost import full_cost, submodel_cost
from fleetfit.errors import ModelError
from fleetfit.models.fedavg_images import Stack, fedavg_cifar_cnn, fedavg_cnn, mlp_2nn


def linear(before: int, after: int) -> int:
    return before * after + after


def conv(before: int, after: int) -> int:
    return linear(25 * before, after)


PRINTED = {
    "2NN": (mlp_2nn(), (1, 28, 28), linear(784, 200) + linear(200, 200) + linear(200, 10), 199_210),
    "CNN": (
        fedavg_cnn(),
        (1, 28, 28),
        conv(1, 32) + conv(32, 64) + linear(64 * 7 * 7, 512) + linear(512, 10),
        1_663_370,
    ),
    "CIFAR, 24x24": (
        fedavg_cifar_cnn(),
        (3, 24, 24),
        conv(3, 64) + conv(64, 64) + linear(64 * 6 * 6, 384) + linear(384, 192) + linear(192, 10),
        1_068_298,  # the paper: about 10^6
    ),
    "CIFAR, 32x32": (
        fedavg_cifar_cnn(input_shape=(3, 32, 32)),
        (3, 32, 32),
        conv(3, 64) + conv(64, 64) + linear(64 * 8 * 8, 384) + linear(384, 192) + linear(192, 10),
        1_756_426,
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_as_printed(name: str) -> None:
    architecture, shape, count, printed = PRINTED[name]
    assert full_cost(architecture, shape).parameters == count == printed


def test_multiply_adds_by_hand() -> None:
    """Convolutions work on 28x28 and 14x14 places (24x24 and 12x12)."""
    assert full_cost(mlp_2nn(), (1, 28, 28)).multiply_adds == 784 * 200 + 200 * 200 + 200 * 10
    digits = 25 * 32 * 28**2 + 25 * 32 * 64 * 14**2 + 64 * 49 * 512 + 512 * 10
    assert full_cost(fedavg_cnn(), (1, 28, 28)).multiply_adds == digits
    cifar = 25 * 3 * 64 * 24**2 + 25 * 64 * 64 * 12**2 + 64 * 36 * 384 + 384 * 192 + 192 * 10
    assert full_cost(fedavg_cifar_cnn(), (3, 24, 24)).multiply_adds == cifar


def test_a_narrow_and_shallow_piece_by_hand() -> None:
    """Exits after both convolutions pool globally, so their classifiers have one input per channel."""
    architecture = fedavg_cnn(7, (3, 20, 12))
    sizes = architecture.sizes(0.3)
    assert sizes == {"conv1": 9, "conv2": 19, "fc1": 153, "classes": 7}
    cost = submodel_cost(architecture, (sizes, (1, 2, 3)), (3, 20, 12))
    body = conv(3, 9) + conv(9, 19) + linear(19 * 5 * 3, 153)
    assert cost.parameters == body + linear(9, 7) + linear(19, 7) + linear(153, 7)
    assert submodel_cost(architecture, (sizes, (2,)), (3, 20, 12)).parameters == conv(3, 9) + conv(9, 19) + linear(
        19, 7
    )


def test_the_cnn_is_the_sequence_that_the_paper_names() -> None:
    architecture = fedavg_cnn(4, (2, 9, 8))
    module = build_module(architecture, architecture.sizes(0.2), (2, 3))
    first, second, full = module.blocks
    flat = nn.Sequential(
        *(first.conv, nn.ReLU(), nn.MaxPool2d(2), second.conv, nn.ReLU(), nn.MaxPool2d(2)), nn.Flatten(), full.fc
    )
    x = torch.randn(3, 2, 9, 8)
    early, last = module(x)
    torch.testing.assert_close(last, module.heads["3"](F.relu(flat(x))))
    torch.testing.assert_close(early, module.heads["2"].fc(flat[:6](x).mean((2, 3))))


@pytest.mark.parametrize("side", [2, 3, 4, 5, 6, 7, 24])
def test_pooling_by_three_covers_the_border(side: int) -> None:
    """Windows start at 0, 2, 4, ... and the last one of an even side is cut off by the border: side / 2 of them, which
    on even sides is TensorFlow's "SAME".
    """
    architecture = Stack(2, (1, side, side), (1,), (3,), pool=3)
    block = build_module(architecture, architecture.sizes(1.0), (1,)).requires_grad_(False).blocks[0]
    x = torch.randn(1, 1, side, side)
    maps = F.relu(block.conv(x))[0, 0]
    count = side // 2
    expected = [[maps[2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max() for j in range(count)] for i in range(count)]
    torch.testing.assert_close(block(x)[0, 0], torch.tensor(expected))


def test_a_flatten_taken_as_stacked_copies_is_refused() -> None:
    architecture = Stack(3, (1, 8, 8), (4,), (5,))
    layout = infer_layout(architecture, input_shape=(1, 8, 8))
    assert layout.tensors["blocks.1.fc.weight"].dims[1] == (Segment("conv1", per=16),)
    wrong = arrange(layout, {("blocks.1.fc.weight", 1): (Segment("conv1"),) * 16})
    with raises(ModelError, '"conv1"', "blocks.1.fc"):
        check_layout(architecture, wrong, example=torch.randn(2, 1, 8, 8))


def test_inputs_of_any_shape() -> None:
    module = build_module(mlp_2nn(4, (16,), (6,)), {"fc1": 6, "classes": 4}, (1,))
    assert module(torch.randn(3, 16))[0].shape == (3, 4)
    assert len({mlp_2nn(), mlp_2nn(), mlp_2nn(hidden=(200,)), fedavg_cnn()}) == 3
