"""A small convolutional network for digits and 28x28 images: six blocks in two stages, 57,550 parameters.

Each block is a 3x3 convolution, norm and ReLU; the image is halved before blocks 1 and 3. A classifier (global average
pooling and a linear layer, after `head_layers` convolutions in early exits) may sit after any block, so four levels
have room for balanced splits. It works for images of 8x8 and more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.layout import Architecture, Axis, ExitModel
from fleetfit.models.blocks import Head, Norm, granule_of, halved, kaiming, needs_group_norm, norm_layer

_STAGES = {"stage1": 28, "stage2": 42}
_PER_STAGE = 3
_HALVED = (1, 3)  # blocks that start with 2x2 max pooling


class ConvBlock(nn.Module):
    """Optional 2x2 max pooling, a 3x3 convolution, norm, ReLU."""

    def __init__(self, before: int, after: int, halve: bool, norm: Norm, group: int) -> None:
        super().__init__()
        self.halve = halve
        self.conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm = norm_layer(norm, after, group)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height, width], each side halved where the block pools."""
        x = halved(x) if self.halve else x
        return F.relu(self.norm(self.conv(x)), inplace=True)


class CnnModule(ExitModel):
    """The module of one sub-model; its names are those of the full model."""

    def __init__(self, architecture: "Cnn", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        norm, group = architecture.norm, architecture.group
        stream = [axes[stage] for stage in _STAGES for _ in range(_PER_STAGE)]
        inputs = [architecture.channels, *stream]
        self.exits = exits
        self.blocks = nn.ModuleList(
            ConvBlock(inputs[i], stream[i], i in _HALVED, norm, group) for i in range(exits[-1])
        )
        self.heads = nn.ModuleDict(
            {
                str(e): Head(
                    stream[e - 1],
                    axes["classes"],
                    layers=0 if e == architecture.blocks else architecture.head_layers,
                    norm=norm,
                    group=group,
                    dropout=architecture.dropout,
                )
                for e in exits
            }
        )
        kaiming(self)

    def start(self, x: Tensor) -> Tensor:
        """Return the images [B, channels, height, width] as they are."""
        return x


@dataclass(frozen=True)
class Cnn(Architecture):
    """The family; made by `cnn`, which says what the fields mean."""

    classes: int
    channels: int
    norm: Norm
    group: int
    dropout: float
    head_layers: int
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        granule = granule_of(self.norm, self.group)
        axes = {stage: Axis(size, granule, block=i * _PER_STAGE) for i, (stage, size) in enumerate(_STAGES.items())}
        object.__setattr__(self, "axes", {**axes, "classes": Axis(self.classes, scaled=False)})
        object.__setattr__(self, "blocks", _PER_STAGE * len(_STAGES))

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        return CnnModule(self, axes, exits)


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
