"""The small CNN: its size by hand, the images it takes, and that it learns the digits."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from fleetfit.anatomy import build_module
from fleetfit.cost import full_cost
from fleetfit.models.cnn import cnn


def test_parameters_by_hand() -> None:
    convolutions = 9 * (1 * 28 + 2 * 28 * 28 + 28 * 42 + 2 * 42 * 42)
    expected = convolutions + 2 * 3 * (28 + 42) + (42 * 10 + 10)
    module = build_module(cnn(), cnn().sizes(1.0), (6,))
    assert sum(p.numel() for p in module.parameters()) == expected == 57_550


def test_multiply_adds_by_hand() -> None:
    """The image is halved before blocks 1 and 3: 28, then 14, then 7 places a side."""
    places = [28**2, 14**2, 14**2, 7**2, 7**2, 7**2]
    channels = [1, 28, 28, 28, 42, 42, 42]
    expected = sum(9 * channels[i] * channels[i + 1] * places[i] for i in range(6)) + 42 * 10
    assert full_cost(cnn(), (1, 28, 28)).multiply_adds == expected == 5_038_404


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (1, 28), (3, 32), (1, 11)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_images_of_8x8_and_more(channels: int, side: int, norm: str) -> None:
    architecture = cnn(classes=5, channels=channels, norm=norm)
    module = build_module(architecture, architecture.sizes(0.5), (1, 4, 6))
    assert [tuple(out.shape) for out in module(torch.randn(3, channels, side, side))] == [(3, 5)] * 3


def test_equal_parameters_are_equal_architectures() -> None:
    assert cnn(5, dropout=0.1) == cnn(5, dropout=0.1)
    assert hash(cnn(5)) == hash(cnn(5))
    assert len({cnn(5), cnn(5), cnn(6), cnn(5, norm="group")}) == 3
    assert "classes=5" in repr(cnn(5))


def test_options() -> None:
    module = build_module(cnn(dropout=0.3, head_layers=1), cnn().sizes(1.0), (3, 6))
    assert {m.p for m in module.modules() if isinstance(m, nn.Dropout)} == {0.3}
    assert [sum(isinstance(m, nn.Conv2d) for m in module.heads[e].modules()) for e in ("3", "6")] == [1, 0]
    assert cnn(norm="group", group=7).sizes(0.6) == {"stage1": 14, "stage2": 21, "classes": 10}


@pytest.mark.parametrize("norm", ["batch", pytest.param("group", marks=pytest.mark.slow)])
def test_it_learns_the_digits(norm: str) -> None:
    """Trained centrally for six epochs, every exit that the planner would choose classifies unseen digits."""
    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    x = (x.float().view(-1, 1, 8, 8) / 16 - 0.5) / 0.25
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    train, test = order[:1400], order[1400:]
    module = build_module(cnn(norm=norm), cnn().sizes(1.0), (3, 4, 5, 6))
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(6):
        for batch in train[torch.randperm(len(train))].split(16):
            optimizer.zero_grad()
            sum(F.cross_entropy(out, y[batch]) for out in module(x[batch])).backward()
            optimizer.step()
    with torch.no_grad():
        logits = module.eval()(x[test])
    accuracies = [float((out.argmax(1) == y[test]).float().mean()) for out in logits]
    assert min(accuracies[1:]) > 0.95
    assert accuracies[0] > 0.7
