"""Batch augmentation against a plain loop over samples and pixels."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import raises

from fleetfit.data.augment import AUGMENTATIONS, augment_batch, check_augmentation
from fleetfit.errors import DataError


def augment_by_loops(x: torch.Tensor, draws: list[int], reach: tuple[int, int], flip: bool) -> torch.Tensor:
    """Shift and mirror one pixel at a time; a draw's digits are (dy, dx, mirrored), the last in base 2 or absent."""
    out = torch.zeros_like(x)
    tall, wide = reach
    _, _, height, width = x.shape
    for b, draw in enumerate(draws):
        corner, mirrored = divmod(draw, 2) if flip else (draw, 0)
        dy, dx = divmod(corner, 2 * wide + 1)
        for i in range(height):
            for j in range(width):
                row = i + dy - tall
                column = (width - 1 - j if mirrored else j) + dx - wide
                if 0 <= row < height and 0 <= column < width:
                    out[b, :, i, j] = x[b, :, row, column]
    return out


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(AUGMENTATIONS)),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(2, 17), st.integers(2, 17)),
    seed=st.integers(0, 2**32),
)
def test_equals_loops(name: str, shape: tuple[int, int, int, int], seed: int) -> None:
    x = torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    side = {
        "crop-flip": lambda n: max(1, n // 8),
        "crop": lambda n: max(1, n // 8),
        "flip": lambda n: 0,
        "shift": lambda n: 1,
    }
    tall, wide, flip = side[name](shape[2]), side[name](shape[3]), name in ("crop-flip", "flip")
    many = (2 * tall + 1) * (2 * wide + 1) * (2 if flip else 1)
    draws = torch.randint(many, (shape[0],), generator=torch.Generator().manual_seed(seed + 1)).tolist()

    augmented = augment_batch(x, name, torch.Generator().manual_seed(seed + 1))

    assert augmented.dtype == x.dtype
    assert torch.equal(augmented, augment_by_loops(x, draws, (tall, wide), flip))


def test_cifar_pads_four_pixels_and_mirrors_half() -> None:
    # column j of the picture holds j + 1, so the first column of the center row tells shift and mirroring apart
    x = torch.arange(1, 33, dtype=torch.uint8).expand(4000, 1, 32, 32)
    out = augment_batch(x, "crop-flip", torch.Generator().manual_seed(0))[:, 0, 16]
    rising = out[:, 15] > out[:, 14]
    assert 0.45 < rising.float().mean() < 0.55
    shifts = (out[rising, 15].long() - 16).unique().tolist()
    assert shifts == [-4, -3, -2, -1, 0, 1, 2, 3, 4]


def test_every_shift_is_as_likely_as_any_other() -> None:
    x = torch.zeros(9000, 1, 8, 8, dtype=torch.uint8)
    x[:, 0, 4, 4] = 1
    out = augment_batch(x, "shift", torch.Generator().manual_seed(0))
    counts = out.sum(0, dtype=torch.int64)[0, 3:6, 3:6]
    assert counts.sum() == 9000
    assert counts.min() > 850
    assert counts.max() < 1150


def test_generator_alone_decides() -> None:
    x = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8)
    rng = torch.Generator().manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = augment_batch(x, "crop-flip", rng), augment_batch(x, "crop-flip", rng)
    assert not torch.equal(first, second)
    assert torch.equal(augment_batch(x, "crop-flip", torch.Generator().manual_seed(5)), first)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_bits_on_a_gpu() -> None:
    x = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8)
    host = augment_batch(x, "crop-flip", torch.Generator().manual_seed(5))
    assert torch.equal(augment_batch(x.cuda(), "crop-flip", torch.Generator().manual_seed(5)).cpu(), host)


def test_unknown_name_suggests() -> None:
    with raises(DataError, 'augment = "crop-flop"', '"crop-flip"', key="augment"):
        check_augmentation("crop-flop", torch.zeros(1, 1, 8, 8))


def test_samples_that_are_not_images() -> None:
    with raises(DataError, "[N, C, H, W]", "[3, 8]", key="augment"):
        check_augmentation("flip", torch.zeros(3, 8))
