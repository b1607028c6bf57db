"""A small convolutional network for digits and 28x28 images: six blocks in two stages, 57,550 parameters.

Each block is a 3x3 convolution, norm and ReLU; the image is halved before blocks 1 and 3. A classifier (global average
pooling and a linear layer, after `head_layers` convolutions in early exits) may sit after any block, so four levels
have room for balanced splits. It works for images of 8x8 and more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.layout import Axis
from fleetfit.models.family import ConvFamily, Head, MakeNorm, Norm, halve, needs_group_norm

_STAGES = {"stage1": 28, "stage2": 42}
_STREAM = [stage for stage in _STAGES for _ in range(3)]  # the stage of each block
_HALVING = (1, 3)  # blocks that start with 2x2 max pooling


class ConvBlock(nn.Module):
    """Optional 2x2 max pooling, a 3x3 convolution, norm, ReLU."""

    def __init__(self, before: int, after: int, halves: bool, norm: MakeNorm) -> None:
        super().__init__()
        self.halves = halves
        self.conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm = norm(after)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height, width], each side halved if the block pools."""
        x = halve(x) if self.halves else x
        return F.relu(self.norm(self.conv(x)), inplace=True)


@dataclass(frozen=True)
class Cnn(ConvFamily):
    """The family; made by `cnn`, which explains the fields."""

    classes: int
    channels: int
    norm: Norm
    group: int
    dropout: float
    head_layers: int
    blocks = len(_STREAM)

    def _make_axes(self) -> dict[str, Axis]:
        return {stage: Axis(size, self.granule, block=_STREAM.index(stage)) for stage, size in _STAGES.items()}

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        before = axes[_STREAM[i - 1]] if i else self.channels
        return ConvBlock(before, axes[_STREAM[i]], i in _HALVING, self.make_norm)

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        layers = self.head_layers if e < self.blocks else 0
        return Head(axes[_STREAM[e - 1]], axes["classes"], layers, self.make_norm, self.dropout)


@needs_group_norm
def cnn(
    classes: int = 10,
    channels: int = 1,
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.0,
    head_layers: int = 0,
) -> Cnn:
    """Return the family of the small CNN.

    Args:
        classes: Classes; never cut.
        channels: Channels of the images; never cut.
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together; 28 and 42 must be multiples of it.
        dropout: Share of features dropped before each linear layer.
        head_layers: Convolutions in an early exit.

    Raises:
        ModelError: The norm is unknown or the group does not divide the stages.
    """
    return Cnn(classes, channels, norm, group, dropout, head_layers)
