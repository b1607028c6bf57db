"""VGG-16 (Simonyan & Zisserman, ICLR 2015) with norms, for small and large images: 13 convolutions and two wide layers.

Thirteen 3x3 convolutions with 64 to 512 channels, each with norm and ReLU, the map halved after numbers 2, 4, 7, 10 and
13; then two linear layers of 4096 with ReLU and dropout, and a linear classifier. With batch norm and ten classes on
32x32 images that are the 33.65 M parameters of AdaptiveFL's Table 1 (DAC 2024); without the norms it would be 33.64 M.

The 13 convolutions are blocks 0 to 12 and the two wide layers blocks 13 and 14, so blocks are the paper's layers,
counted from 0. Each has an axis of its own with its block's number. So AdaptiveFL's sub-model (r_w, I), whose first I
layers are whole, is: an axis keeps its size if `axis.block < I`, else floor(r_w * size). An exit after a convolution
is `head_layers` 3x3 convolutions with norm and ReLU, global average pooling and a linear layer (ScaleFL, CVPR 2023,
4.1); after a wide layer it is a linear layer.

Differs from the paper: the norms; the convolutions keep their biases beside them, which AdaptiveFL's count includes.
Where a map is one pixel high or wide, it is not halved again, so images of 16x16 work.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.layout import Axis
from fleetfit.models.family import ConvFamily, Head, MakeNorm, Norm, halve, needs_group_norm

_FACTORS = (1, 1, 2, 2, 4, 4, 4, 8, 8, 8, 8, 8, 8)  # channels of the convolutions, as multiples of the first's
_DEEP = len(_FACTORS)
_HALVING = (1, 3, 6, 9, 12)  # blocks after whose convolution the map is halved


class VggBlock(nn.Module):
    """A 3x3 convolution with bias, norm, ReLU, optional 2x2 max pooling."""

    def __init__(self, before: int, after: int, halves: bool, norm: MakeNorm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.norm = norm(after)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height, width], each side halved if the block pools."""
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        return halve(x) if self.halves else x


class WideBlock(nn.Module):
    """A linear layer on flat features, ReLU, dropout."""

    def __init__(self, before: int, after: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(before, after)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, after] of maps [B, channels, height, width] or features [B, before]."""
        return self.drop(F.relu(self.linear(x.flatten(1))))


@dataclass(frozen=True)
class Vgg(ConvFamily):
    """The family; made by `vgg16`, which explains the fields."""

    classes: int
    input_shape: tuple[int, ...]
    base: int
    wide: int
    norm: Norm
    group: int
    dropout: float
    head_layers: int
    blocks = _DEEP + 2

    @cached_property
    def halvings(self) -> tuple[int, ...]:
        """Blocks that halve the map after their convolution, except if it is one pixel high or wide."""
        side = min(self.input_shape[1:])
        return tuple(i for n, i in enumerate(_HALVING) if side >> n > 1)

    @cached_property
    def pixels(self) -> int:
        """Pixels of the map that is flattened, per channel."""
        return (self.input_shape[1] >> len(self.halvings)) * (self.input_shape[2] >> len(self.halvings))

    def _make_axes(self) -> dict[str, Axis]:
        granule = self.granule
        axes = {f"layer{i}": Axis(factor * self.base, granule, block=i) for i, factor in enumerate(_FACTORS)}
        return axes | {f"layer{i}": Axis(self.wide, block=i) for i in range(_DEEP, self.blocks)}

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        before, after = axes[f"layer{i - 1}"] if i else self.input_shape[0], axes[f"layer{i}"]
        if i < _DEEP:
            return VggBlock(before, after, i in self.halvings, self.make_norm)
        return WideBlock(before * (self.pixels if i == _DEEP else 1), after, self.dropout)

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        if e <= _DEEP:
            return Head(axes[f"layer{e - 1}"], axes["classes"], self.head_layers, self.make_norm)
        return nn.Linear(axes[f"layer{e - 1}"], axes["classes"])


@needs_group_norm
def vgg16(
    classes: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    base: int = 64,
    wide: int = 4096,
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.5,
    head_layers: int = 3,
) -> Vgg:
    """Return the family of VGG-16.

    Args:
        classes: Classes; never cut.
        input_shape: Channels, height and width of an image; the first wide layer's size depends on it.
        base: Channels of the first two convolutions; the later ones have 2, 4 and 8 times as many.
        wide: Features of each of the two wide layers.
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together.
        dropout: Share of features dropped after each wide layer.
        head_layers: Convolutions in an exit after a convolution.

    Raises:
        ModelError: The input is not an image, the norm is unknown, or the group does not divide the layers.
    """
    if len(input_shape) != 3:
        raise ModelError(
            f"VGG-16 takes images, whose shape is (channels, height, width), got {tuple(input_shape)}.",
            key="input_shape",
        )
    return Vgg(classes, tuple(input_shape), base, wide, norm, group, dropout, head_layers)
