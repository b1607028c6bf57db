"""Random crops and flips of whole training batches, without a loop over samples, and random parts of images.

Every random number comes from the host's generator, and everything after it moves whole pixels (a resized crop adds
whole numbers), so that a batch of images is the same bits on every device. Padding is black: it happens before
normalisation, as in He et al., "Deep Residual Learning for Image Recognition" (2016), section 4.2.

"resized-crop" is the augmentation with which ImageNet models are trained: a random part of each image, brought to one
size. Szegedy et al., "Going Deeper with Convolutions" (2015), section 6: a patch of 8% to 100% of the area, of an
aspect ratio between 3/4 and 4/3.

Differs from the paper: aspect ratios are uniform in their logarithm, as in today's training recipes, so that 3/4 is as
likely as 4/3; the images are mirrored too; where ten draws give no patch that lies inside, the largest one in the
middle is taken. Images in memory are interpolated between four pixels, which is all there is to do where a patch is
enlarged; encoded ones are cut before they are brought to size and may have to be made smaller, with an average over all
pixels.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data.encoded import Box, Encoded
from fleetfit.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Augmentation:
    """What happens to a training image: a random shift, a random flip, or both.

    Attributes:
        shift: Largest shift in pixels, given the length of a side.
        flip: Whether an image is mirrored left to right with probability one half.
    """

    shift: str
    flip: bool

    def reach(self, side: int) -> int:
        """Return the largest shift along a side of that many pixels."""
        return {"none": 0, "pixel": 1, "eighth": max(1, side // 8)}[self.shift]


AUGMENTATIONS = {
    "crop-flip": Augmentation("eighth", True),  # 4 pixels at 32x32
    "crop": Augmentation("eighth", False),
    "flip": Augmentation("none", True),
    "shift": Augmentation("pixel", False),  # small pictures such as 8x8 digits
}
RESIZED_CROP = "resized-crop"
"""A random part of an image at the image's size, perhaps mirrored."""


def check_augmentation(name: str, x: Tensor | Encoded) -> None:
    """Refuse a name that is no augmentation and data that are no images.

    Args:
        name: A key of `AUGMENTATIONS`, or "resized-crop".
        x: The samples that it would be used on.

    Raises:
        DataError: The name is unknown or `x` is not [N, C, H, W].
    """
    known = (*AUGMENTATIONS, RESIZED_CROP)
    if name not in known:
        raise DataError(
            f'augment = "{name}" is unknown; choose among {", ".join(known)}.{did_you_mean(name, known)}', key="augment"
        )
    if x.ndim != 4:
        raise DataError(f'augment = "{name}" needs images [N, C, H, W], got x of shape {list(x.shape)}.', key="augment")


def picked(x: Tensor | Encoded, indices: Tensor, name: str | None, rng: torch.Generator | None) -> Tensor:
    """Return samples, augmented where there are both a name and a generator."""
    if name is None or rng is None:
        return x.index_select(0, indices)
    if name == RESIZED_CROP and isinstance(x, Encoded):
        return _encoded_crops(x, indices, rng)
    return augmented(x.index_select(0, indices), name, rng)


def augmented(x: Tensor, name: str, rng: torch.Generator) -> Tensor:
    """Return a batch with each image padded with zeros, cropped at a random place and perhaps mirrored.

    With reach p, height H, width W and one whole number r drawn uniformly for each sample b, output pixel (i, j) is
    input pixel (i + dy - p, j' + dx - p), or 0 outside the image, where j' is W - 1 - j if the sample is mirrored and
    j if not; dx, dy and the mirroring are the digits of r. "resized-crop": `resized_crops`.

    Args:
        x: Images [B, C, H, W] of any dtype, on any device.
        name: A key of `AUGMENTATIONS`, or "resized-crop".
        rng: A generator on the host; it advances by as many draws for every sample.

    Returns:
        A new tensor of the same shape, dtype and device.
    """
    if name == RESIZED_CROP:
        return resized_crops(x, rng)
    how = AUGMENTATIONS[name]
    batch, channels, height, width = x.shape
    tall, wide = how.reach(height), how.reach(width)
    corners, places = _tables(height, width, tall, wide, how.flip, x.device)
    draw = torch.randint(len(corners), (batch,), generator=rng).to(x.device, non_blocking=True)
    place = corners.index_select(0, draw)
    place = places.index_select(0, draw & 1).add_(place) if how.flip else places + place
    padded = torch.constant_pad_nd(x, (wide, wide, tall, tall)).view(batch, channels, -1)
    return padded.gather(2, place.unsqueeze(1).expand(-1, channels, -1)).view(x.shape)


@functools.lru_cache(maxsize=32)
def _tables(height: int, width: int, tall: int, wide: int, flip: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what a draw means, in flat indices of a padded image.

    Returns:
        The top left corner of the crop for each possible draw, [draws, 1], and the pixels of the crop at the top left,
        [1, H * W] as they are or [2, H * W] as they are and mirrored; a draw's last bit chooses.
    """
    stride = width + 2 * wide
    plain = torch.arange(height).unsqueeze(1) * stride + torch.arange(width)
    both = [plain, plain.flip(1)] if flip else [plain]
    corners = torch.arange(2 * tall + 1).unsqueeze(1) * stride + torch.arange(2 * wide + 1)
    corners = corners.view(-1, 1).repeat_interleave(len(both), dim=0)
    return corners.to(device), torch.stack(both).view(len(both), -1).to(device)


# ---- resized crops ---------------------------------------------------------------------------------------------------


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


def _encoded_crops(x: Encoded, indices: Tensor, rng: torch.Generator) -> Tensor:
    """Return a random patch of each encoded image asked for, mirrored with probability one half; see `Encoded.parts`.

    Args:
        x: The images.
        indices: int64 [B].
        rng: A generator on the host; it advances by as many draws for every image.
    """
    numbers = draws(len(indices), rng)

    def part(row: int, size: tuple[int, int]) -> tuple[Box, bool]:
        left, top, wide, tall, mirrored = patch(numbers[row], *size)
        return (left, top, left + wide, top + tall), mirrored

    return x.parts(indices, part)


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
