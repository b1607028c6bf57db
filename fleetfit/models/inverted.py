"""Networks of inverted residual blocks: MobileNetV2 (Sandler et al., CVPR 2018) and EfficientNet (Tan & Le, ICML 2019).

A block widens its input by a 1x1 convolution, filters each channel separately (a depthwise convolution), may weigh the
channels (squeeze and excite, in EfficientNet to a quarter of the block's input), and narrows them by a 1x1 convolution
without activation; where neither the stage nor the map's size changes, its input is added. Each convolution but those
of squeeze and excite has a norm. An early exit, which may sit after any block, is `head_layers` 3x3 convolutions with
norm and ReLU and a sixth of the stream's channels, global average pooling and a linear layer (ScaleFL, CVPR 2023, 4.1).

Axes: `stem` and `stage{s}` (from 1) are the residual streams, whose block is the stage's first; `expand{i}` and
`squeeze{i}` are the channels inside block i and have its number (or, `tied`, `expand_{stream}` those inside all blocks
that read a stream, with the number of the first); `exit{s}` are the channels inside early exits of a stage and `top`
those of the last 1x1 convolution, which come after all blocks. So "blocks before I whole, later ones narrowed"
(AdaptiveFL, DAC 2024, 3.2) is: an axis keeps its size if `axis.block < I`.

Widths as in ScaleFL: a stream has floor(width * channels), and what is derived from it follows it: a block expands its
narrowed input by the same factor, and squeezes it and the channels of an exit to the floor of a share.

MobileNetV2 has 3.50 M parameters with 1000 classes and 2.24 M with ten. EfficientNet-B0 has the paper's 5.29 M with
`top = 1280` and 1000 classes. EfficientNet-B4 is as ScaleFL builds it: with exits after blocks 22, 26 and 30 (stages 5,
6 and 7) and widths 0.75, 0.75 and 0.82 it has the parameters and multiply-adds of ScaleFL's Table 8, which prints 0.65,
0.65 and 0.82.

Differs from the papers: by default MobileNetV2's first two halvings are left out (`stride = 8`), for images of about
32x32, and B0 has no convolution of 1280 channels before the classifier, as in ScaleFL's B4. B4 differs from Tan & Le,
because ScaleFL's sizes need it: a stem of 32 channels instead of 48, the stage of 272 channels split in two with stride
2 both times (so the last map is 64 times smaller than the image, not 32), and no convolution of 1792 channels before
the classifier. It differs from ScaleFL's released code: dropout and drop-connect act in training only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from fleetfit.anatomy import Axis, default_sizes
from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.models.family import ConvFamily, Head, Norm, needs_group_norm

Activation = Literal["swish", "relu6"]
_ACTIVATIONS: Mapping[str, type[nn.Module]] = {"swish": nn.SiLU, "relu6": nn.ReLU6}
_EXIT_SHARE = 6  # ScaleFL's early exits have a sixth of the stream's channels


@dataclass(frozen=True)
class Stage:
    """A row of the paper's table.

    Attributes:
        channels: Channels of the residual stream, before they are multiplied.
        blocks: Blocks.
        kernel: Side of the depthwise convolutions.
        stride: Stride of the first block.
        expansion: How many times as many channels a block has inside as its input has; 1: no expanding convolution.
    """

    channels: int
    blocks: int
    kernel: int
    stride: int
    expansion: int


@dataclass(frozen=True)
class BlockSpec:
    """A block, sizes aside.

    Attributes:
        before: Axis of its input.
        after: Axis of its output.
        expand: Axis of the channels inside, or "": no expanding convolution, so they are its input's.
        squeeze: Axis of the squeezed channels, or "": no squeeze and excite.
        kernel: Side of the depthwise convolution.
        stride: Its stride.
        adds: Whether its input is added.
    """

    before: str
    after: str
    expand: str
    squeeze: str
    kernel: int
    stride: int
    adds: bool


# ---- the layers ------------------------------------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    """Weigh each channel by a number in 0..1 made of the means of all channels (Hu et al., CVPR 2018)."""

    def __init__(self, channels: int, squeezed: int, activation: Activation) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, squeezed, 1)
        self.active = _ACTIVATIONS[activation]()
        self.up = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return weighed maps [B, channels, height, width]."""
        means = x.mean((2, 3), keepdim=True)
        return x * self.up(self.active(self.down(means))).sigmoid()


def drop_connect(x: Tensor, share: float) -> Tensor:
    """Zero whole samples with a probability, and divide the others by 1 - share (Huang et al., ECCV 2016)."""
    mask = torch.rand(len(x), 1, 1, 1, dtype=x.dtype, device=x.device) >= share
    return x * mask / (1 - share)


class InvertedBlock(nn.Module):
    """Expand, filter, squeeze and excite, project; in training the branch of `dropped` of the samples is dropped."""

    def __init__(self, family: "Inverted", spec: BlockSpec, axes: Mapping[str, int], dropped: float) -> None:
        super().__init__()
        before, after = axes[spec.before], axes[spec.after]
        inner = axes[spec.expand] if spec.expand else before
        self.adds, self.dropped = spec.adds, dropped
        self.expand = family.make_convolution(before, inner, 1) if spec.expand else nn.Identity()
        self.filter = family.make_convolution(inner, inner, spec.kernel, spec.stride, groups=inner)
        self.squeeze = SqueezeExcite(inner, axes[spec.squeeze], family.activation) if spec.squeeze else nn.Identity()
        self.project = family.make_convolution(inner, after, 1, active=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height / stride, width / stride]."""
        branch = self.project(self.squeeze(self.filter(self.expand(x))))
        if not self.adds:
            return branch
        if self.training and self.dropped:
            branch = drop_connect(branch, self.dropped)
        return x + branch


# ---- the family ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inverted(ConvFamily):
    """The family; made by `network`, which explains the fields; `stem` is the channels of the first convolution."""

    classes: int
    channels: int
    stem: int
    stages: tuple[Stage, ...]
    width_multiplier: float
    top: int
    squeeze: int
    activation: Activation
    norm: Norm
    group: int
    stride: int
    dropout: float
    drop_connect: float
    head_layers: int
    tied: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", sum(stage.blocks for stage in self.stages))
        super().__post_init__()

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides of the stem and of each stage."""
        return reduce_strides((2, *(stage.stride for stage in self.stages)), self.stride)

    @cached_property
    def block_specs(self) -> tuple[BlockSpec, ...]:
        """Each block, sizes aside."""
        specs: list[BlockSpec] = []
        for s, stage in enumerate(self.stages, 1):
            for i in range(stage.blocks):
                stream = s if i else s - 1
                before = f"stage{stream}" if stream else "stem"
                suffix = f"_{before}" if self.tied else str(len(specs))
                specs.append(
                    BlockSpec(
                        before,
                        after=f"stage{s}",
                        expand=f"expand{suffix}" if stage.expansion > 1 else "",
                        squeeze=f"squeeze{suffix}" if self.squeeze else "",
                        kernel=stage.kernel,
                        stride=1 if i else self.strides[s],
                        adds=i > 0,
                    )
                )
        return tuple(specs)

    @cached_property
    def _derived(self) -> Mapping[str, tuple[str, int, int, int]]:
        """Of each axis that follows another one: that axis, its factor and divisor, and the block of the first."""
        expansions = [stage.expansion for stage in self.stages for _ in range(stage.blocks)]
        derived: dict[str, tuple[str, int, int, int]] = {}
        for i, (spec, expansion) in enumerate(zip(self.block_specs, expansions, strict=True)):
            if spec.expand:
                derived.setdefault(spec.expand, (spec.before, expansion, 1, i))
            if spec.squeeze:
                derived.setdefault(spec.squeeze, (spec.before, 1, self.squeeze, i))
        for spec in self.block_specs[:-1] if self.head_layers else ():
            derived.setdefault(spec.after.replace("stage", "exit"), (spec.after, 1, _EXIT_SHARE, self.blocks))
        return derived

    def sizes(self, width: float) -> dict[str, int]:
        """Return the size of each axis: streams floor(width * size), the others from the narrowed stream."""
        sizes = default_sizes(self.axes, width)
        for name, (parent, factor, divisor, _) in self._derived.items():
            sizes[name] = _round_down(sizes[parent] * factor // divisor, self.axes[name].granule)
        return sizes

    def make_convolution(
        self, before: int, after: int, kernel: int, stride: int = 1, groups: int = 1, active: bool = True
    ) -> nn.Sequential:
        """Return a convolution, norm and, if active, the activation."""
        layers: list[nn.Module] = [
            nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False),
            self.make_norm(after),
        ]
        return nn.Sequential(*layers, *([_ACTIVATIONS[self.activation]()] if active else []))

    def _make_axes(self) -> dict[str, Axis]:
        granule = self.granule
        axes = {"stem": Axis(multiply_channels(self.stem, self.width_multiplier), granule)}
        first = 0
        for s, stage in enumerate(self.stages, 1):
            axes[f"stage{s}"] = Axis(multiply_channels(stage.channels, self.width_multiplier), granule, block=first)
            first += stage.blocks
        for name, (parent, factor, divisor, block) in self._derived.items():
            unit = 1 if name.startswith("squeeze") else granule  # squeeze and excite has no norm
            axes[name] = Axis(_round_down(axes[parent].size * factor // divisor, unit), unit, block=block)
        if self.top:
            axes["top"] = Axis(self.top, granule, block=self.blocks)
        return axes

    def _build_stem(self, axes: Mapping[str, int]) -> nn.Module:
        return self.make_convolution(self.channels, axes["stem"], 3, self.strides[0])

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        return InvertedBlock(self, self.block_specs[i], axes, self.drop_connect * i / self.blocks)

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        stage = self.block_specs[e - 1].after
        channels, classes = axes[stage], axes["classes"]
        if e < self.blocks:
            inner = axes.get(stage.replace("stage", "exit"))  # absent without convolutions
            return Head(channels, classes, self.head_layers, self.make_norm, inner=inner)
        if not self.top:
            return Head(channels, classes, dropout=self.dropout)
        top = self.make_convolution(channels, axes["top"], 1)
        return nn.Sequential(top, Head(axes["top"], classes, dropout=self.dropout))


def _round_down(channels: int, granule: int) -> int:
    return max(1, channels // granule) * granule


def multiply_channels(channels: int, multiplier: float) -> int:
    """Return a product rounded to the nearest multiple of 8, but to no less than 0.9 of it (both papers)."""
    if multiplier == 1:
        return channels
    exact = channels * multiplier
    nearest = max(8, int(exact + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * exact else nearest + 8


def reduce_strides(strides: Sequence[int], total: int) -> tuple[int, ...]:
    """Leave out halvings, from the first on, until the product of the strides is the total.

    Raises:
        ModelError: No product equals the total.
    """
    reduced = list(strides)
    for i in range(len(reduced)):
        if math.prod(reduced) > total:
            reduced[i] = 1
    if math.prod(reduced) != total:
        raise ModelError(f"stride must be a power of two from 1 to {math.prod(strides)}, got {total}.", key="stride")
    return tuple(reduced)


# ---- the networks ----------------------------------------------------------------------------------------------------


@needs_group_norm
def network(
    classes: int = 10,
    channels: int = 3,
    width_multiplier: float = 1.0,
    stride: int = 32,
    top: int = 0,
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.2,
    drop_connect: float = 0.2,
    head_layers: int = 3,
    *,
    stages: tuple[Stage, ...],
    squeeze: int,
    activation: Activation,
    tied: bool,
) -> Inverted:
    """Return the family of a table of stages, behind a stem of 32 channels.

    Args:
        classes: Classes; never cut.
        channels: Channels of the images; never cut.
        width_multiplier: Times the paper's channels, to multiples of 8, the last 1x1 convolution aside.
        stride: How many times smaller the last map is than the image, a power of two up to 32 (EfficientNet-B4: 64),
            which is for 224x224; 8 is good for 32x32 images. Halvings are left out from the first on.
        top: Channels of a 1x1 convolution before the last classifier, 1280 in both papers; 0: there is none.
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together.
        dropout: Share of features dropped before the last classifier.
        drop_connect: Share of samples whose branch is dropped in the last block; it grows from 0 with the block.
        head_layers: Convolutions in an early exit.
        stages: The paper's table.
        squeeze: Share of a block's input channels to which squeeze and excite squeezes, as 1 / squeeze; 0: none.
        activation: "swish" or "relu6".
        tied: Whether all blocks that read the same stream keep the same channels inside; saves time where blocks are
            many, because a layout is found axis by axis.

    Raises:
        ModelError: The stride is not a power of two or too large, the norm is unknown, or the group divides no stage.
    """
    return Inverted(
        classes,
        channels,
        stem=32,
        stages=stages,
        width_multiplier=width_multiplier,
        top=top,
        squeeze=squeeze,
        activation=activation,
        norm=norm,
        group=group,
        stride=stride,
        dropout=dropout,
        drop_connect=drop_connect,
        head_layers=head_layers,
        tied=tied,
    )


_MOBILENETV2 = (
    Stage(16, 1, 3, 1, 1),
    Stage(24, 2, 3, 2, 6),
    Stage(32, 3, 3, 2, 6),
    Stage(64, 4, 3, 2, 6),
    Stage(96, 3, 3, 1, 6),
    Stage(160, 3, 3, 2, 6),
    Stage(320, 1, 3, 1, 6),
)  # Table 2
_EFFICIENTNET_B0 = (
    Stage(16, 1, 3, 1, 1),
    Stage(24, 2, 3, 2, 6),
    Stage(40, 2, 5, 2, 6),
    Stage(80, 3, 3, 2, 6),
    Stage(112, 3, 5, 1, 6),
    Stage(192, 4, 5, 2, 6),
    Stage(320, 1, 3, 1, 6),
)  # Table 1
_EFFICIENTNET_B4 = (
    Stage(24, 2, 3, 1, 1),
    Stage(32, 4, 3, 2, 6),
    Stage(56, 4, 5, 2, 6),
    Stage(112, 6, 3, 2, 6),
    Stage(160, 6, 5, 1, 6),
    Stage(272, 4, 5, 2, 6),
    Stage(272, 4, 5, 2, 6),
    Stage(448, 2, 3, 1, 6),
)
_EFFICIENT = {"squeeze": 4, "activation": "swish", "tied": True}
SIZES = {
    "mobilenetv2": Preset(
        "MobileNetV2 (Sandler et al., CVPR 2018, Table 2): 17 inverted residual blocks, for small images or 224x224.",
        {"stages": _MOBILENETV2, "squeeze": 0, "activation": "relu6", "drop_connect": 0.0, "tied": False},
        {"stride": 8, "top": 1280},
    ),
    "efficientnet_b0": Preset(
        "EfficientNet-B0 (Tan & Le, ICML 2019, Table 1) with the exits of ScaleFL's B4: 16 blocks, 224x224 or small "
        "images.",
        {"stages": _EFFICIENTNET_B0, **_EFFICIENT},
    ),
    "efficientnet_b4": Preset(
        "EfficientNet-B4 (Tan & Le, ICML 2019) as ScaleFL (CVPR 2023, 4.1) builds it, for 224x224 images: 32 blocks.",
        {"stages": _EFFICIENTNET_B4, **_EFFICIENT, "width_multiplier": 1.0, "top": 0},
        {"classes": 1000, "stride": 64, "dropout": 0.4},
    ),
}
mobilenetv2, efficientnet_b0, efficientnet_b4 = make_presets(network, SIZES)
