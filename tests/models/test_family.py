"""What families share: layers of models for images, the names of their sizes, and their keys."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import Expected, raises

from fleetfit import names
from fleetfit.errors import ModelError
from fleetfit.factories import call_factory
from fleetfit.models.family import Head, halve
from fleetfit.models.msdnet import msdnet
from fleetfit.models.resnet import ResNet, resnet


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 2, 7, 5), (3, 1, 2, 3), (2, 4, 28, 28)])
def test_halving_has_the_numbers_of_pytorch(shape: tuple[int, ...]) -> None:
    """The largest of four neighbors, with and without gradients, also of -0.0, infinities and NaN."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = x.view(-1)
    flat[::5], flat[1::7], flat[2::11], flat[3::13] = 0.0, -0.0, float("-inf"), float("nan")
    with torch.no_grad():
        for images in (x, x.contiguous(memory_format=torch.channels_last), x.double()):
            torch.testing.assert_close(halve(images), F.max_pool2d(images, 2), rtol=0, atol=0, equal_nan=True)
    images = x.nan_to_num(1.0, 0.0, -9.0).requires_grad_()
    halve(images).square().sum().backward()
    ours, images.grad = images.grad, None
    F.max_pool2d(images, 2).square().sum().backward()
    assert ours is not None and images.grad is not None and torch.equal(ours, images.grad)


def test_an_image_of_one_row_is_refused_either_way() -> None:
    x = torch.zeros(1, 1, 1, 8)
    with torch.no_grad(), pytest.raises(RuntimeError):
        halve(x)
    with pytest.raises(RuntimeError):
        halve(x.requires_grad_())


def test_dropout_acts_in_training_only() -> None:
    head = Head(8, 3, dropout=0.5)
    x = torch.randn(4, 8, 2, 2)
    assert torch.equal(head.eval()(x), head(x))
    head.train()
    assert not torch.equal(head(x), head(x))


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        *(("resnet", {"depth": depth}, Expected("6n+2", depth, key="depth")) for depth in (2, 9, 11, 21, 111)),
        *((name, {"norm": "layer"}, Expected('"batch"', '"group"', key="norm")) for name in
          ("cnn", "resnet", "resnet18", "vgg16", "msdnet", "mobilenetv2", "efficientnet_b0", "efficientnet_b4")),
        *((name, {"norm": "group", "group": 0}, Expected(1, 0, key="group")) for name in ("cnn", "resnet", "vgg16")),
        ("cnn", {"norm": "group", "group": 8}, Expected(28, 8, key="granule")),
        ("resnet", {"norm": "group", "group": 5}, Expected(16, 5, key="granule")),
        ("vgg16", {"norm": "group", "group": 3}, Expected(64, 3, key="granule")),
        ("msdnet", {"norm": "group", "group": 4}, Expected(6, 4, key="granule")),
        ("resnet18", {"stem": "medium"}, Expected('"small"', key="stem")),
        ("resnet34", {"stem": "medium"}, Expected('"small"', key="stem")),
        ("vgg16", {"input_shape": (7,)}, Expected("(7,)", key="input_shape")),
        ("msdnet", {"layers": 0}, Expected(1, key="layers")),
        ("mobilenetv2", {"stride": 12}, Expected(1, 32, 12, key="stride")),
        ("efficientnet_b0", {"stride": 128}, Expected(1, 32, 128, key="stride")),
        ("efficientnet_b4", {"stride": 128}, Expected(1, 64, 128, key="stride")),
        ("mlp", {"hidden": 0}, Expected(0, key="hidden")),
        ("mlp_2nn", {"hidden": ()}, Expected(key="hidden")),
        ("fedavg_cnn", {"input_shape": (1, 3, 28)}, Expected("4x4", "(1, 3, 28)", key="input_shape")),
        ("fedavg_cifar_cnn", {"input_shape": (80,)}, Expected("(80,)", key="input_shape")),
        ("char_lstm", {"classes": 10, "vocabulary": 0}, Expected(key="vocabulary")),
        ("word_lstm", {"layers": 0}, Expected(0, key="layers")),
        ("char_lstm", {"cell": "gru"}, Expected('"plain"', '"peephole"', key="cell")),
        ("vim", {"input_shape": (3, 30, 32)}, Expected(16, "(3, 30, 32)", key="patch")),
        ("vim", {"input_shape": (80,)}, Expected("(80,)", key="patch")),
        ("vim", {"depth": 0}, Expected(1, key="depth")),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused(name: str, keys: dict[str, Any], expected: Expected) -> None:
    with raises(ModelError, expected):
        names.resolve("models", name)(**keys)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("resnet", {"depth": 14}), ("resnet18", {"stem": "large", "base": 16}), ("resnet34", {"stem": "large"}),
        ("efficientnet_b0", {"stride": 4, "drop_connect": 0.1}), ("efficientnet_b4", {"stride": 4}),
        ("mobilenetv2", {"stride": 32, "top": 0}), ("msdnet24", {"norm": "group"}), ("vgg16", {"wide": 64}),
    ],
)  # fmt: skip
def test_keys_come_from_a_configuration(name: str, keys: dict[str, Any]) -> None:
    data = {"classes": 7, **({"input_shape": (1, 28, 28)} if name == "vgg16" else {"channels": 1})}
    factory = names.resolve("models", name)
    architecture = call_factory(factory, name, "[model]", keys, **data)
    same, other = factory(**data, **keys), factory(**data)
    assert architecture == same != other and hash(architecture) == hash(same)


def test_names_of_sizes() -> None:
    for depth in (20, 32, 56, 110):
        assert names.resolve("models", f"resnet{depth}")(7, 1, norm="group") == resnet(7, 1, depth, "group")
        assert str(depth) in names.describe_entry("models", f"resnet{depth}")
    for depth, blocks in ((18, (2, 2, 2, 2)), (34, (3, 4, 6, 3))):
        architecture = names.resolve("models", f"resnet{depth}")(7, 1)
        assert architecture == ResNet(7, 1, blocks, 64, "small", True, "batch", 2, 0.0, 3)
    assert names.resolve("models", "msdnet24")(7, 1) == msdnet(7, 1, 24, 3, 16, 6, 128, 2)
