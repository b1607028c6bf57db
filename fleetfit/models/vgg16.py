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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.layout import Architecture, Axis, ExitModel, interleaved
from fleetfit.models.blocks import Head, Norm, granule_of, halved, kaiming, needs_group_norm, norm_layer

_TIMES = (1, 1, 2, 2, 4, 4, 4, 8, 8, 8, 8, 8, 8)  # channels of the convolutions, in those of the first
_HALVED = (1, 3, 6, 9, 12)  # blocks after whose convolution the map is halved


class VggBlock(nn.Module):
    """A 3x3 convolution with bias, norm, ReLU, optional 2x2 max pooling."""

    def __init__(self, before: int, after: int, halve: bool, norm: Norm, group: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.norm = norm_layer(norm, after, group)
        self.halve = halve

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height, width], each side halved where the block pools."""
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        return halved(x) if self.halve else x


class WideBlock(nn.Module):
    """A linear layer on flat features, ReLU, dropout."""

    def __init__(self, before: int, after: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(before, after)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, after] of maps [B, channels, height, width] or features [B, before]."""
        return self.drop(F.relu(self.linear(x.flatten(1))))


class VggModule(ExitModel):
    """The module of one sub-model; its names are those of the full model."""

    def __init__(self, architecture: "Vgg", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        norm, group, deep = architecture.norm, architecture.group, len(_TIMES)
        widths = [axes[f"layer{i}"] for i in range(architecture.blocks)]
        inputs = [architecture.input_shape[0], *widths]
        inputs[deep] *= architecture.pixels
        self.exits = exits
        self.blocks = nn.ModuleList(
            VggBlock(inputs[i], widths[i], i in architecture.halved, norm, group)
            if i < deep
            else WideBlock(inputs[i], widths[i], architecture.dropout)
            for i in range(exits[-1])
        )
        self.heads = nn.ModuleDict(
            {
                str(e): Head(widths[e - 1], axes["classes"], architecture.head_layers, norm, group)
                if e <= deep
                else nn.Linear(widths[e - 1], axes["classes"])
                for e in exits
            }
        )
        kaiming(self)

    def start(self, x: Tensor) -> Tensor:
        """Return the images [B, channels, height, width] as they are."""
        return x


@dataclass(frozen=True)
class Vgg(Architecture):
    """The family; made by `vgg16`, which says what the fields mean."""

    classes: int
    input_shape: tuple[int, ...]
    base: int
    wide: int
    norm: Norm
    group: int
    dropout: float
    head_layers: int
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.input_shape) != 3:
            raise ModelError(
                f"VGG-16 takes images, whose shape is (channels, height, width), got {self.input_shape}.",
                key="input_shape",
            )
        granule = granule_of(self.norm, self.group)
        axes = {f"layer{i}": Axis(times * self.base, granule, block=i) for i, times in enumerate(_TIMES)}
        axes |= {f"layer{i}": Axis(self.wide, block=i) for i in (len(_TIMES), len(_TIMES) + 1)}
        object.__setattr__(self, "axes", {**axes, "classes": Axis(self.classes, scaled=False)})
        object.__setattr__(self, "blocks", len(axes))

    @cached_property
    def halved(self) -> tuple[int, ...]:
        """Blocks after whose convolution the map is halved: not where it is one pixel high or wide."""
        side = min(self.input_shape[1:])
        return tuple(i for n, i in enumerate(_HALVED) if side >> n > 1)

    @cached_property
    def pixels(self) -> int:
        """Pixels of the map that is flattened, per channel."""
        return (self.input_shape[1] >> len(self.halved)) * (self.input_shape[2] >> len(self.halved))

    @cached_property
    def declared(self) -> Mapping[str, Any]:
        """Each channel owns its pixels in what the first wide layer reads."""
        return {f"blocks.{len(_TIMES)}.linear.weight": interleaved(self.pixels, dim=1)}

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        return VggModule(self, axes, exits)


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
        ModelError: The input is no image, the norm unknown, or the group does not divide the layers.
    """
    return Vgg(classes, tuple(input_shape), base, wide, norm, group, dropout, head_layers)
