"""ResNet for small images (He et al., CVPR 2016) of any depth 6n+2, with the early exits of ScaleFL (CVPR 2023, 4.1).

A stem, then three stages of n basic blocks with 16, 32 and 64 channels. A block whose shape changes has a 1x1
convolution with norm as its shortcut (option B). An early exit is three 3x3 convolutions with norm and ReLU, global
average pooling and a linear layer; the last exit is pooling and the linear layer alone. With exits after blocks 36, 42
and 48 and widths 0.70, 0.70 and 0.75, depth 110 has the parameters and multiply-adds of ScaleFL's Table 1.

Differs from the paper: He et al. use parameter-free shortcuts (option A) on CIFAR; ScaleFL's printed sizes need option
B. The channels inside a block belong to the axis of its stage, so they are cut like the stream around them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Architecture, Axis, ExitModel
from fleetfit.models.blocks import Head, Norm, granule_of, kaiming, needs_group_norm, norm_layer

_STAGES = {"stage1": 16, "stage2": 32, "stage3": 64}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut; between them are `inner` channels, by default as many as after them."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm, group: int, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or after
        self.conv1 = nn.Conv2d(before, inner, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, inner, group)
        self.conv2 = nn.Conv2d(inner, after, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, after, group)
        self.shortcut: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height / stride, width / stride]."""
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x), inplace=True)


class ResNetModule(ExitModel):
    """The module of one sub-model; its names are those of the full model."""

    def __init__(self, architecture: "ResNet", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        norm, group = architecture.norm, architecture.group
        stream = [axes[stage] for stage in _STAGES]
        per_stage = architecture.blocks // len(stream)
        self.exits = exits
        self.stem = nn.Sequential(
            nn.Conv2d(architecture.channels, stream[0], 3, padding=1, bias=False),
            norm_layer(norm, stream[0], group),
            nn.ReLU(inplace=True),
        )
        self.blocks = nn.ModuleList()
        for i in range(exits[-1]):
            stage = i // per_stage
            first = stage > 0 and i % per_stage == 0
            before, after = stream[stage - 1 if first else stage], stream[stage]
            block = BasicBlock(before, after, 2 if first else 1, norm, group)
            if first:  # by place, not by shape: narrow stages may happen to be equally wide
                block.shortcut = nn.Sequential(
                    nn.Conv2d(before, after, 1, stride=2, bias=False), norm_layer(norm, after, group)
                )
            self.blocks.append(block)
        self.heads = nn.ModuleDict(
            {
                str(e): Head(
                    stream[(e - 1) // per_stage],
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
        """Return the stem's feature maps [B, stage1, height, width] of images [B, channels, height, width]."""
        carry: Tensor = self.stem(x)
        return carry


@dataclass(frozen=True)
class ResNet(Architecture):
    """The family of one depth; made by `resnet`, which says what the fields mean."""

    classes: int
    channels: int
    depth: int
    norm: Norm
    group: int
    dropout: float
    head_layers: int
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.depth < 8 or (self.depth - 2) % 6:
            raise ModelError(
                f"a ResNet for small images has depth 6n+2 (8, 14, 20, 32, 56, 110, ...), got {self.depth}.",
                key="depth",
            )
        n, granule = (self.depth - 2) // 6, granule_of(self.norm, self.group)
        axes = {stage: Axis(size, granule, block=i * n) for i, (stage, size) in enumerate(_STAGES.items())}
        object.__setattr__(self, "axes", {**axes, "classes": Axis(self.classes, scaled=False)})
        object.__setattr__(self, "blocks", 3 * n)

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        return ResNetModule(self, axes, exits)


@needs_group_norm
def resnet(
    classes: int = 10,
    channels: int = 3,
    depth: int = 110,
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.0,
    head_layers: int = 3,
) -> ResNet:
    """Return the ResNet family of a depth.

    Args:
        classes: Classes; never cut.
        channels: Channels of the images; never cut.
        depth: 6n+2 layers, hence 3n blocks; a classifier may sit after any block.
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together.
        dropout: Share of features dropped before each linear layer.
        head_layers: Convolutions in an early exit.

    Raises:
        ModelError: The depth is not 6n+2, or the group does not divide the stages.
    """
    return ResNet(classes, channels, depth, norm, group, dropout, head_layers)


SIZES = {
    "resnet20": Preset(
        "ResNet-20 for small images: 9 blocks in three stages of 16, 32 and 64 channels.", {"depth": 20}
    ),
    "resnet32": Preset(
        "ResNet-32 for small images: 15 blocks in three stages of 16, 32 and 64 channels.", {"depth": 32}
    ),
    "resnet56": Preset(
        "ResNet-56 for small images: 27 blocks in three stages of 16, 32 and 64 channels.", {"depth": 56}
    ),
    "resnet110": Preset(
        "ResNet-110 for small images: 54 blocks in three stages of 16, 32 and 64 channels.", {"depth": 110}
    ),
}
resnet20, resnet32, resnet56, resnet110 = make_presets(resnet, SIZES)
