"""Augment training batches: random crops, flips and resized crops.

Random numbers come from the host's generator. Crops and flips move whole pixels, and resized crops add whole numbers,
so a batch has the same bits on every device. Padding is black, because it happens before normalization, as in He et
al., "Deep Residual Learning for Image Recognition" (2016), section 4.2.

"resized-crop" is the augmentation of ImageNet models: a random crop of each image, resized to one size. Szegedy et al.,
"Going Deeper with Convolutions" (2015), section 6: a crop of 8% to 100% of the area, of an aspect ratio between 3/4 and
4/3.

Differs from the paper: aspect ratios are uniform in their logarithm, as in today's training recipes, so that 3/4 is as
likely as 4/3; images are mirrored too; after ten draws without a crop inside the image, the largest central one is
taken. Images in memory are interpolated between four pixels, which suffices since they are only enlarged; encoded ones
are cropped at their full size and may shrink, by an average over all pixels.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data.image_reader import Box, EncodedImages
from fleetfit.errors import DataError, did_you_mean

AUGMENTATIONS: dict[str, tuple[Callable[[int], int], bool]] = {
    "crop-flip": (lambda side: max(1, side // 8), True),  # 4 pixels at 32x32
    "crop": (lambda side: max(1, side // 8), False),
    "flip": (lambda side: 0, True),
    "shift": (lambda side: 1, False),  # small images such as 8x8 digits
}
"""Largest shift in pixels along a side of some pixels, and whether images are mirrored with probability one half."""
RESIZED_CROP = "resized-crop"
"""A random crop, resized to the image's size and optionally mirrored."""


def check_augmentation(name: str, x: Tensor | EncodedImages) -> None:
    """Check the name of an augmentation, and that samples are images.

    Args:
        name: A key of `AUGMENTATIONS`, or "resized-crop".
        x: The samples.

    Raises:
        DataError: The name is unknown or `x` is not [N, C, H, W].
    """
    choices = (*AUGMENTATIONS, RESIZED_CROP)
    if name not in choices:
        raise DataError(
            f'augment = "{name}" is unknown. Choose one of {", ".join(choices)}.{did_you_mean(name, choices)}',
            key="augment",
        )
    if x.ndim != 4:
        raise DataError(f'augment = "{name}" needs images [N, C, H, W], got x of shape {list(x.shape)}.', key="augment")


def select_samples(x: Tensor | EncodedImages, indices: Tensor, name: str | None, rng: torch.Generator | None) -> Tensor:
    """Return samples, augmented if both a name and a generator are given."""
    if name is None or rng is None:
        return x.index_select(0, indices)
    if name == RESIZED_CROP and isinstance(x, EncodedImages):
        return _crop_encoded(x, indices, rng)
    return augment_batch(x.index_select(0, indices), name, rng)


def augment_batch(x: Tensor, name: str, rng: torch.Generator) -> Tensor:
    """Pad each image with zeros, crop it at a random place and optionally mirror it.

    With largest shift p, height H, width W and one whole number r drawn uniformly for each sample b, output pixel
    (i, j) is input pixel (i + dy - p, j' + dx - p), or 0 outside the image, where j' is W - 1 - j if the sample is
    mirrored and j if not; dx, dy and the mirroring are the digits of r. "resized-crop": see `crop_and_resize`.

    Args:
        x: Images [B, C, H, W] of any dtype, on any device.
        name: A key of `AUGMENTATIONS`, or "resized-crop".
        rng: A generator on the host; it advances equally for every sample.

    Returns:
        A new tensor of the same shape, dtype and device.
    """
    if name == RESIZED_CROP:
        return crop_and_resize(x, rng)
    find_shift, flip = AUGMENTATIONS[name]
    batch, channels, height, width = x.shape
    pad_y, pad_x = find_shift(height), find_shift(width)
    corners, pixels = _make_index_tables(height, width, pad_y, pad_x, flip, x.device)
    draw = torch.randint(len(corners), (batch,), generator=rng).to(x.device, non_blocking=True)
    index = corners.index_select(0, draw)
    index = pixels.index_select(0, draw & 1).add_(index) if flip else pixels + index
    padded = torch.constant_pad_nd(x, (pad_x, pad_x, pad_y, pad_y)).view(batch, channels, -1)
    return padded.gather(2, index.unsqueeze(1).expand(-1, channels, -1)).view(x.shape)


@functools.lru_cache(maxsize=32)
def _make_index_tables(
    height: int, width: int, pad_y: int, pad_x: int, flip: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the flat indices into a padded image for each draw.

    Returns:
        The top left corner of the crop for each possible draw, [draws, 1], and the pixels of the top left crop,
        [1, H * W] as they are or [2, H * W] as they are and mirrored; a draw's last bit chooses.
    """
    stride = width + 2 * pad_x
    plain = torch.arange(height).unsqueeze(1) * stride + torch.arange(width)
    variants = [plain, plain.flip(1)] if flip else [plain]
    corners = torch.arange(2 * pad_y + 1).unsqueeze(1) * stride + torch.arange(2 * pad_x + 1)
    corners = corners.view(-1, 1).repeat_interleave(len(variants), dim=0)
    return corners.to(device), torch.stack(variants).view(len(variants), -1).to(device)


# ---- resized crops ---------------------------------------------------------------------------------------------------


_TRIES = 10
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_NUMBERS = 2 * _TRIES + 3
_FRACTION = 256  # steps between two pixels: then sums of products stay below 2^24, exact in float32 everywhere


def draw_crop_numbers(count: int, rng: torch.Generator) -> NDArray[np.float64]:
    """Return the random numbers of `count` crops, uniform in [0, 1), [count, numbers]."""
    numbers: NDArray[np.float64] = torch.rand(count, _NUMBERS, generator=rng, dtype=torch.float64).numpy()
    return numbers


def find_crop(numbers: NDArray[np.float64], width: int, height: int) -> tuple[int, int, int, int, bool]:
    """Return left, top, width and height of an image's crop, and whether it is mirrored.

    Args:
        numbers: One row of `draw_crop_numbers`.
        width: Width of the image in pixels.
        height: Height of the image in pixels.
    """
    x, y, mirror = (float(value) for value in numbers[-3:])
    low, high = map(math.log, _RATIO)
    for area_share, ratio_share in numbers[:-3].reshape(_TRIES, 2).tolist():
        area = (_AREA[0] + (_AREA[1] - _AREA[0]) * area_share) * width * height
        ratio = math.exp(low + (high - low) * ratio_share)
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = int(x * (width - crop_width + 1)), int(y * (height - crop_height + 1))
            return left, top, crop_width, crop_height, mirror < 0.5
    crop_width, crop_height = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height, mirror < 0.5


def crop_and_resize(x: Tensor, rng: torch.Generator) -> Tensor:
    """Return a random crop of each image in memory, mirrored with probability one half, at the images' size.

    Output pixel (i, j) is at row (i + 1/2) * height / H - 1/2 of the crop, between two of its rows (the nearer edge
    where it is outside), and likewise in columns. Its value is interpolated in steps of 1/256 of a pixel, so that
    uint8 images get the same bits on every device.

    Args:
        x: Images [B, C, H, W], uint8 or float, on any device.
        rng: A generator on the host.
    """
    batch, channels, height, width = x.shape
    crops = [find_crop(row, width, height) for row in draw_crop_numbers(batch, rng)]
    left, top, crop_width, crop_height, mirrored = (np.array(column) for column in zip(*crops, strict=True))
    columns, shares = _find_source_pixels(left, crop_width, width)
    columns[mirrored], shares[mirrored] = columns[mirrored, ::-1], shares[mirrored, ::-1]
    vertical = _make_interpolation(*_find_source_pixels(top, crop_height, height), height).to(x.device)
    horizontal = _make_interpolation(columns, shares, width).to(x.device)
    out = vertical @ x.transpose(1, 2).to(torch.float32).reshape(batch, height, channels * width)
    out = (out.view(batch, height * channels, width) @ horizontal.mT).mul_(1 / _FRACTION**2)
    if x.dtype == torch.uint8:
        out.add_(0.5)  # the conversion truncates
    return out.view(batch, height, channels, width).transpose(1, 2).to(x.dtype).contiguous()


def _crop_encoded(x: EncodedImages, indices: Tensor, rng: torch.Generator) -> Tensor:
    numbers = draw_crop_numbers(len(indices), rng)

    def find_box(row: int, size: tuple[int, int]) -> tuple[Box, bool]:
        left, top, width, height, mirrored = find_crop(numbers[row], *size)
        return (left, top, left + width, top + height), mirrored

    return x.crop(indices, find_box)


def _find_source_pixels(
    start: NDArray[np.int64], length: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first of the two source pixels of each output pixel and the second one's share of 256, each [B, size].

    Where both are the last pixel of a crop, the share is 0.
    """
    position = (np.arange(size) + 0.5) * (length[:, None] / size) - 0.5
    steps = np.rint(np.clip(position, 0, length[:, None] - 1) * _FRACTION).astype(np.int64)
    return start[:, None] + steps // _FRACTION, steps % _FRACTION


def _make_interpolation(first: NDArray[np.int64], share: NDArray[np.int64], size: int) -> Tensor:
    """Return the matrices [B, size, size] that interpolate along one side, times 256: two numbers in each row."""
    pixels = torch.from_numpy(np.stack([first, np.minimum(first + 1, size - 1)], axis=2))
    shares = torch.from_numpy(np.stack([_FRACTION - share, share], axis=2).astype(np.float32))
    batch, rows = first.shape
    matrices = torch.zeros(batch * rows, size)
    return matrices.scatter_add_(1, pixels.view(-1, 2), shares.view(-1, 2)).view(batch, rows, size)
