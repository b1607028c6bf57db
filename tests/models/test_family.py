"""The layers that families for images share."""

import pytest
import torch
import torch.nn.functional as F

from fleetfit.models.family import Head, halve


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 2, 7, 5), (3, 1, 2, 3), (2, 4, 28, 28)])
def test_halving_has_the_numbers_of_pytorch(shape: tuple[int, ...]) -> None:
    """The largest of four neighbours, with and without gradients, also of -0.0, infinities and NaN."""
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
