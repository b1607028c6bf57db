"""2x2 max pooling has the numbers of PyTorch's, whether gradients are wanted or not."""

import pytest
import torch
import torch.nn.functional as F

from fleetfit.models.blocks import halved


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 2, 7, 5), (3, 1, 2, 3), (2, 4, 28, 28)])
def test_the_largest_of_four_neighbours(shape: tuple[int, ...]) -> None:
    """Negative numbers, zeros of both signs, infinities and what is no number, among others."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = x.view(-1)
    flat[::5], flat[1::7], flat[2::11], flat[3::13] = 0.0, -0.0, float("-inf"), float("nan")
    with torch.no_grad():
        for given in (x, x.contiguous(memory_format=torch.channels_last), x.double()):
            torch.testing.assert_close(halved(given), F.max_pool2d(given, 2), rtol=0, atol=0, equal_nan=True)
    wanted = x.nan_to_num(1.0, 0.0, -9.0).requires_grad_()
    halved(wanted).square().sum().backward()
    ours, wanted.grad = wanted.grad, None
    F.max_pool2d(wanted, 2).square().sum().backward()
    assert ours is not None and wanted.grad is not None and torch.equal(ours, wanted.grad)


def test_an_image_of_one_row_is_refused_either_way() -> None:
    x = torch.zeros(1, 1, 1, 8)
    with torch.no_grad(), pytest.raises(RuntimeError, match="too small"):
        halved(x)
    with pytest.raises(RuntimeError, match="too small"):
        halved(x.requires_grad_())
