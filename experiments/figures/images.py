"""Images in figures: without ticks and normalization, and evenly spaced."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fleetfit.data import Data
from fleetfit.report.drawing import DARK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROUNDING = 1e-3


def remove_ticks(axes: "Axes", framed: bool = False) -> None:
    """Remove the ticks of axes, and show or hide their frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(visible=framed, color=DARK, linewidth=1.8)


def restore_images(images: Tensor, data: Data) -> Tensor:
    """Undo the normalization of images, to the range 0 to 1. Images of another range are stretched to it."""
    if data.mean:
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.mean, data.std))
        images = images * std + mean
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    in_range = (low >= -_ROUNDING) & (high <= 1 + _ROUNDING)
    stretched = (images - low) / (high - low).clamp_min(1e-12)
    return torch.where(in_range, images, stretched).clamp(0, 1)


def select_evenly(values: Tensor, count: int) -> Tensor:
    """Return `count` evenly spaced values: the middle values of equal stretches."""
    return values[(2 * torch.arange(count) + 1) * len(values) // max(1, 2 * count)]
