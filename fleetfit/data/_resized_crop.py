"""A random part of each image, brought to one size: the augmentation with which ImageNet models are trained.

Szegedy et al., "Going Deeper with Convolutions" (2015), section 6: a patch of 8% to 100% of the area, of an aspect
ratio between 3/4 and 4/3.

Differs from the paper: aspect ratios are uniform in their logarithm, as in today's training recipes, so that 3/4 is as
likely as 4/3; the images are mirrored too; where ten draws give no patch that lies inside, the largest one in the
middle is taken. Images in memory are interpolated between four pixels, which is all there is to do where a patch is
enlarged; encoded ones are cut before they are brought to size and may have to be made smaller, with an average over all
pixels.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TRIES = 10
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_DRAWS = 2 * _TRIES + 3
_FRACTION = 256  # steps between two pixels: then sums of products stay below 2^24, exact in float32 everywhere


def draws(count: int, rng: torch.Generator) -> NDArray[np.float64]:
    """Return what decides about the patches of so many images, uniform in [0, 1), [count, draws]."""
    numbers: NDArray[np.float64] = torch.rand(count, _DRAWS, generator=rng, dtype=torch.float64).numpy()
    return numbers


def patch(numbers: NDArray[np.float64], width: int, height: int) -> tuple[int, int, int, int, bool]:
    """Return left, top, width and height of an image's patch, and whether it is mirrored.

    Args:
        numbers: One row of `draws`.
        width: Of the image, in pixels.
        height: Of the image, in pixels.
    """
    across, down, mirrored = (float(value) for value in numbers[-3:])
    least, most = map(math.log, _RATIO)
    for share, shape in numbers[:-3].reshape(_TRIES, 2).tolist():
        area = (_AREA[0] + (_AREA[1] - _AREA[0]) * share) * width * height
        ratio = math.exp(least + (most - least) * shape)
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            left, top = int(across * (width - wide + 1)), int(down * (height - tall + 1))
            return left, top, wide, tall, mirrored < 0.5
    wide, tall = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
    return (width - wide) // 2, (height - tall) // 2, wide, tall, mirrored < 0.5


def resized_crops(x: Tensor, rng: torch.Generator) -> Tensor:
    """Return a random patch of each image in memory, mirrored with probability one half, at the images' size.

    Output pixel (i, j) lies at row (i + 1/2) * height / H - 1/2 of the patch, between two of its rows (the nearer edge
    where it lies outside), and likewise in columns. Its value is interpolated in steps of 1/256 of a pixel, so that
    uint8 images get the same bits on every device.

    Args:
        x: Images [B, C, H, W], uint8 or float, on any device.
        rng: A generator on the host.
    """
    batch, channels, height, width = x.shape
    found = [patch(row, width, height) for row in draws(batch, rng)]
    left, top, wide, tall, mirrored = (np.array(column) for column in zip(*found, strict=True))
    columns, shares = _sources(left, wide, width)
    columns[mirrored], shares[mirrored] = columns[mirrored, ::-1], shares[mirrored, ::-1]
    rows = _mixing(*_sources(top, tall, height), height).to(x.device)
    across = _mixing(columns, shares, width).to(x.device)
    out = rows @ x.transpose(1, 2).to(torch.float32).reshape(batch, height, channels * width)
    out = (out.view(batch, height * channels, width) @ across.mT).mul_(1 / _FRACTION**2)
    if x.dtype == torch.uint8:
        out.add_(0.5)  # conversion cuts off
    return out.view(batch, height, channels, width).transpose(1, 2).to(x.dtype).contiguous()


def _sources(
    start: NDArray[np.int64], length: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first of the two source pixels of each output pixel and the second one's share of 256, each [B, size].

    Where both are the last pixel of a patch, the share is 0.
    """
    place = (np.arange(size) + 0.5) * (length[:, None] / size) - 0.5
    steps = np.rint(np.clip(place, 0, length[:, None] - 1) * _FRACTION).astype(np.int64)
    return start[:, None] + steps // _FRACTION, steps % _FRACTION


def _mixing(first: NDArray[np.int64], share: NDArray[np.int64], size: int) -> Tensor:
    """Return the matrices [B, size, size] that interpolate along one side, times 256: two numbers in each row."""
    places = torch.from_numpy(np.stack([first, np.minimum(first + 1, size - 1)], axis=2))
    parts = torch.from_numpy(np.stack([_FRACTION - share, share], axis=2).astype(np.float32))
    batch, rows = first.shape
    mixing = torch.zeros(batch * rows, size)
    return mixing.scatter_add_(1, places.view(-1, 2), parts.view(-1, 2)).view(batch, rows, size)
