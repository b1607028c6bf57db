"""Random crops and flips of whole training batches, without a loop over samples.

Every random number comes from the host's generator, and everything after it moves whole pixels (a resized crop adds
whole numbers), so that a batch of images is the same bits on every device. Padding is black: it happens before
normalisation, as in He et al., "Deep Residual Learning for Image Recognition" (2016), section 4.2.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fleetfit.data._encoded import Encoded
from fleetfit.data._resized_crop import resized_crops
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
"""A random part of an image at the image's size, perhaps mirrored: see `_resized_crop`."""


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
        raise DataError(f'augment = "{name}" is unknown; choose among {", ".join(known)}.{did_you_mean(name, known)}')
    if x.ndim != 4:
        raise DataError(f'augment = "{name}" needs images [N, C, H, W], got x of shape {list(x.shape)}.')


def picked(x: Tensor | Encoded, indices: Tensor, name: str | None, rng: torch.Generator | None) -> Tensor:
    """Return samples, augmented where there are both a name and a generator."""
    if name is None or rng is None:
        return x.index_select(0, indices)
    if name == RESIZED_CROP and isinstance(x, Encoded):
        return x.resized_crops(indices, rng)
    return augmented(x.index_select(0, indices), name, rng)


def augmented(x: Tensor, name: str, rng: torch.Generator) -> Tensor:
    """Return a batch with each image padded with zeros, cropped at a random place and perhaps mirrored.

    With reach p, height H, width W and one whole number r drawn uniformly for each sample b, output pixel (i, j) is
    input pixel (i + dy - p, j' + dx - p), or 0 outside the image, where j' is W - 1 - j if the sample is mirrored and
    j if not; dx, dy and the mirroring are the digits of r. "resized-crop" is explained in `_resized_crop`.

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
    draw = torch.randint(len(corners), (batch,), generator=rng).to(x.device)
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
