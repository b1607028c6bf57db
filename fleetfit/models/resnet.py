"""ResNet for small images (He et al., CVPR 2016) of any depth 6n+2, with the early exits of ScaleFL (CVPR 2023, 4.1).

A stem, then stages of basic blocks. A block whose shape changes has a 1x1 convolution with norm as its shortcut (option
B). An early exit is `head_layers` 3x3 convolutions with norm and ReLU, global average pooling and a linear layer; the
last exit is pooling and the linear layer alone.

Small images (`resnet`): three stages of n blocks with 16, 32 and 64 channels. The channels inside a block belong to the
axis of its stage, so they are cut like the stream around them. With exits after blocks 36, 42 and 48 and widths 0.70,
0.70 and 0.75, depth 110 has the parameters and multiply-adds of ScaleFL's Table 1. Differs from the paper: He et al.
use parameter-free shortcuts (option A) on CIFAR; ScaleFL's printed sizes need option B.

Four stages (`four_stages`, He et al., Table 1: depths 18 and 34) of 64, 128, 256 and 512 channels. The residual stream
of a stage is one axis, whose block is the stage's first, and the channels inside a block are an axis of that block. So
"blocks before I whole, later ones narrowed" (AdaptiveFL, DAC 2024, 3.2) is: an axis keeps its size if `axis.block < I`.
A stage that begins before I keeps its whole stream; inside its later blocks channels are cut. Differs from the paper:
the stem for small images (3x3 convolution, no pooling) is the default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Axis
from fleetfit.models.family import ConvFamily, Head, MakeNorm, Norm, conv_norm_relu, needs_group_norm

Stem = Literal["small", "large"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, with `inner` channels between them; stride 2 begins a stage."""

    def __init__(self, before: int, inner: int, after: int, stride: int, norm: MakeNorm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, inner, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(inner)
        self.conv2 = nn.Conv2d(inner, after, 3, padding=1, bias=False)
        self.norm2 = norm(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:  # by position, not by shape: narrow stages may happen to be equally wide
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), norm(after))

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height / stride, width / stride]."""
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x), inplace=True)


@dataclass(frozen=True)
class ResNet(ConvFamily):
    """The family of one depth; made by `resnet` and `four_stages`, which explain the other fields.

    Attributes:
        inner_axes: Whether the channels inside each block are an axis, or are cut with the stream around them.
    """

    classes: int
    channels: int
    per_stage: tuple[int, ...]
    base: int
    stem: Stem
    inner_axes: bool
    norm: Norm
    group: int
    dropout: float
    head_layers: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", len(self.stages))
        super().__post_init__()

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stage of each block, from 1."""
        return tuple(stage for stage, count in enumerate(self.per_stage, 1) for _ in range(count))

    def _make_axes(self) -> dict[str, Axis]:
        granule, sizes = self.granule, {stage: self.base << (stage - 1) for stage in self.stages}
        axes = {f"stage{s}": Axis(size, granule, block=self.stages.index(s)) for s, size in sizes.items()}
        if self.inner_axes:
            axes |= {f"inner{i}": Axis(sizes[s], granule, block=i) for i, s in enumerate(self.stages)}
        return axes

    def _build_stem(self, axes: Mapping[str, int]) -> nn.Module:
        if self.stem == "small":
            return nn.Sequential(*conv_norm_relu(self.channels, axes["stage1"], 3, 1, self.make_norm))
        layers = conv_norm_relu(self.channels, axes["stage1"], 7, 2, self.make_norm)
        return nn.Sequential(*layers, nn.MaxPool2d(3, stride=2, padding=1))

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        before, stage = self.stages[max(0, i - 1)], self.stages[i]
        after = axes[f"stage{stage}"]
        inner = axes[f"inner{i}"] if self.inner_axes else after
        return BasicBlock(axes[f"stage{before}"], inner, after, 2 if stage > before else 1, self.make_norm)

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        layers = self.head_layers if e < self.blocks else 0
        return Head(axes[f"stage{self.stages[e - 1]}"], axes["classes"], layers, self.make_norm, self.dropout)


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
    if depth < 8 or (depth - 2) % 6:
        raise ModelError(
            f"a ResNet for small images has depth 6n+2 (8, 14, 20, 32, 56, 110, ...), got {depth}.", key="depth"
        )
    per_stage = ((depth - 2) // 6,) * 3
    return ResNet(classes, channels, per_stage, 16, "small", False, norm, group, dropout, head_layers)


@needs_group_norm
def four_stages(
    classes: int = 10,
    channels: int = 3,
    base: int = 64,
    stem: Stem = "small",
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.0,
    head_layers: int = 3,
    *,
    per_stage: tuple[int, int, int, int],
) -> ResNet:
    """Return the family of a number of blocks in each of four stages.

    Args:
        classes: Classes; never cut.
        channels: Channels of the images; never cut.
        base: Channels of the first stage; the later ones have 2, 4 and 8 times as many.
        stem: "small" for images of about 32x32: a 3x3 convolution. "large" for 224x224: a 7x7 convolution with stride 2
            and 3x3 max pooling with stride 2.
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together.
        dropout: Share of features dropped before each linear layer.
        head_layers: Convolutions in an early exit.
        per_stage: Blocks of each stage.

    Raises:
        ModelError: The stem or norm is unknown, or the group does not divide the stages.
    """
    if stem not in ("small", "large"):
        raise ModelError(f'stem must be "small" (3x3) or "large" (7x7 and pooling), got {stem!r}.', key="stem")
    return ResNet(classes, channels, per_stage, base, stem, True, norm, group, dropout, head_layers)


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

FOUR_STAGES = {
    "resnet18": Preset(
        "ResNet-18 (He et al., CVPR 2016): 8 basic blocks in four stages of 64 to 512 channels, for small or large "
        "images.",
        {"per_stage": (2, 2, 2, 2)},
    ),
    "resnet34": Preset(
        "ResNet-34 (He et al., CVPR 2016): 16 basic blocks in four stages of 64 to 512 channels, for small or large "
        "images.",
        {"per_stage": (3, 4, 6, 3)},
    ),
}
resnet18, resnet34 = make_presets(four_stages, FOUR_STAGES)
