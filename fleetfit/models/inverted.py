"""Networks of inverted residual blocks: MobileNetV2 (Sandler et al., CVPR 2018) and EfficientNet (Tan & Le, ICML 2019).

A block widens its input by a 1x1 convolution, filters each channel by itself (a depthwise convolution), may weigh the
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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Architecture, Axis, ExitModel, default_sizes
from fleetfit.models.blocks import Head, Norm, granule_of, kaiming, needs_group_norm, norm_layer

Activation = Literal["swish", "relu6"]
_ACTIVATIONS: Mapping[str, type[nn.Module]] = {"swish": nn.SiLU, "relu6": nn.ReLU6}
_EXIT = 6  # ScaleFL's early exits have a sixth of the stream's channels


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
class Place:
    """What a block is like, sizes aside.

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


# ---- the module ----------------------------------------------------------------------------------------------------


def convolution(
    before: int, after: int, kernel: int, stride: int, family: "Inverted", groups: int = 1, active: bool = True
) -> nn.Sequential:
    """Return a convolution, norm and, if active, the family's activation."""
    steps: list[nn.Module] = [
        nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False),
        norm_layer(family.norm, after, family.group),
    ]
    return nn.Sequential(*steps, *([_ACTIVATIONS[family.activation]()] if active else []))


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
    kept = torch.rand(len(x), 1, 1, 1, dtype=x.dtype, device=x.device) >= share
    return x * kept / (1 - share)


class InvertedBlock(nn.Module):
    """Expand, filter, squeeze and excite, project; `sizes` are those before, inside, squeezed to (0: not) and after."""

    def __init__(self, family: "Inverted", place: Place, sizes: tuple[int, int, int, int], dropped: float) -> None:
        super().__init__()
        before, inside, squeezed, after = sizes
        self.adds, self.dropped = place.adds, dropped
        self.expand = convolution(before, inside, 1, 1, family) if place.expand else nn.Identity()
        self.filter = convolution(inside, inside, place.kernel, place.stride, family, groups=inside)
        self.squeeze = SqueezeExcite(inside, squeezed, family.activation) if squeezed else nn.Identity()
        self.project = convolution(inside, after, 1, 1, family, active=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height / stride, width / stride]."""
        branch = self.project(self.squeeze(self.filter(self.expand(x))))
        if not self.adds:
            return branch
        if self.training and self.dropped:
            branch = drop_connect(branch, self.dropped)
        return x + branch


class InvertedModule(ExitModel):
    """The module of one sub-model; its names are those of the full model."""

    def __init__(self, family: "Inverted", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        self.exits = exits
        self.stem = convolution(family.channels, axes["stem"], 3, family.stem_stride, family)
        self.blocks = nn.ModuleList()
        for i, place in enumerate(family.places[: exits[-1]]):
            before, after = axes[place.before], axes[place.after]
            inside = axes[place.expand] if place.expand else before
            sizes = (before, inside, axes[place.squeeze] if place.squeeze else 0, after)
            self.blocks.append(InvertedBlock(family, place, sizes, family.drop_connect * i / family.blocks))
        self.heads = nn.ModuleDict({str(e): _head(family, axes, e) for e in exits})
        kaiming(self)

    def start(self, x: Tensor) -> Tensor:
        """Return the stem's feature maps [B, stem, height, width], halved if its stride is 2."""
        return self.stem(x)


def _head(family: "Inverted", axes: Mapping[str, int], e: int) -> nn.Module:
    """Return the classifier after e blocks: with convolutions if it is early; the last may have a 1x1 convolution."""
    stage = family.places[e - 1].after
    channels, classes = axes[stage], axes["classes"]
    if e < family.blocks:
        inner = axes.get(stage.replace("stage", "exit"))  # absent without convolutions
        return Head(channels, classes, family.head_layers, family.norm, family.group, inner=inner)
    if not family.top:
        return Head(channels, classes, dropout=family.dropout)
    top = convolution(channels, axes["top"], 1, 1, family)
    return nn.Sequential(top, Head(axes["top"], classes, dropout=family.dropout))


# ---- the family ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inverted(Architecture):
    """A family of inverted residual blocks.

    Attributes:
        classes: Classes; never cut.
        channels: Channels of the images; never cut.
        stem: Channels of the first convolution, before they are multiplied.
        stages: The table.
        multiplier: Times the table's channels, to multiples of 8.
        top: Channels of a 1x1 convolution before the last classifier; 0: there is none.
        squeeze: Share of a block's input channels to which squeeze and excite squeezes, as 1 / squeeze; 0: none.
        activation: "swish" or "relu6".
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together.
        stride: How many times smaller the last map is than the image; halvings are left out from the first on.
        dropout: Share of features dropped before the last classifier.
        drop_connect: Share of samples whose branch is dropped in the last block; it grows from 0 with the block.
        head_layers: Convolutions in an early exit.
        tied: Whether all blocks that read the same stream keep the same channels inside; saves time where blocks are
            many, because a layout is found axis by axis.
    """

    classes: int
    channels: int
    stem: int
    stages: tuple[Stage, ...]
    multiplier: float
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
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        count = sum(stage.blocks for stage in self.stages)
        object.__setattr__(self, "blocks", count)
        granule = granule_of(self.norm, self.group)
        axes = {"stem": Axis(multiplied(self.stem, self.multiplier), granule)}
        first = 0
        for s, stage in enumerate(self.stages, 1):
            axes[f"stage{s}"] = Axis(multiplied(stage.channels, self.multiplier), granule, block=first)
            first += stage.blocks
        for name, (parent, times, divided, block) in self._derived.items():
            unit = 1 if name.startswith("squeeze") else granule  # squeeze and excite has no norm
            axes[name] = Axis(_rounded(axes[parent].size * times // divided, unit), unit, block=block)
        if self.top:
            axes["top"] = Axis(self.top, granule, block=count)
        object.__setattr__(self, "axes", {**axes, "classes": Axis(self.classes, scaled=False)})

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """What each block is like."""
        strides = thinned((2, *(stage.stride for stage in self.stages)), self.stride)
        found: list[Place] = []
        for s, stage in enumerate(self.stages, 1):
            for i in range(stage.blocks):
                before = f"stage{s - (i == 0)}" if s - (i == 0) else "stem"
                stride = strides[s] if i == 0 else 1
                inside = f"_{before}" if self.tied else str(len(found))
                expand, squeeze = f"expand{inside}" if stage.expansion > 1 else "", f"squeeze{inside}"
                found.append(
                    Place(before, f"stage{s}", expand, squeeze if self.squeeze else "", stage.kernel, stride, i > 0)
                )
        return tuple(found)

    @cached_property
    def stem_stride(self) -> int:
        """The first convolution's stride."""
        return thinned((2, *(stage.stride for stage in self.stages)), self.stride)[0]

    @cached_property
    def _derived(self) -> Mapping[str, tuple[str, int, int, int]]:
        """Of each axis that follows another one: that one, how many times and which share of it, its block."""
        expansions = [stage.expansion for stage in self.stages for _ in range(stage.blocks)]
        found: dict[str, tuple[str, int, int, int]] = {}
        for i, (place, expansion) in enumerate(zip(self.places, expansions, strict=True)):
            if place.expand:
                found.setdefault(place.expand, (place.before, expansion, 1, i))
            if place.squeeze:
                found.setdefault(place.squeeze, (place.before, 1, self.squeeze, i))
        for place in self.places[:-1] if self.head_layers else ():
            found.setdefault(place.after.replace("stage", "exit"), (place.after, 1, _EXIT, self.blocks))
        return found

    def sizes(self, width: float) -> dict[str, int]:
        """Return the size of each axis: streams floor(width * size), the others from the narrowed stream."""
        kept = default_sizes(self.axes, width)
        for name, (parent, times, divided, _) in self._derived.items():
            kept[name] = _rounded(kept[parent] * times // divided, self.axes[name].granule)
        return kept

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        return InvertedModule(self, axes, exits)


def _rounded(channels: int, granule: int) -> int:
    return max(1, channels // granule) * granule


def multiplied(channels: int, multiplier: float) -> int:
    """Return so many times the channels, to the nearest multiple of 8, but no less than 0.9 of them (both papers)."""
    if multiplier == 1:
        return channels
    wanted = channels * multiplier
    nearest = max(8, int(wanted + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * wanted else nearest + 8


def thinned(strides: Sequence[int], total: int) -> tuple[int, ...]:
    """Leave out halvings, from the first on, until what is left multiplies to a total.

    Raises:
        ModelError: It never does.
    """
    kept = list(strides)
    for i in range(len(kept)):
        if math.prod(kept) > total:
            kept[i] = 1
    if math.prod(kept) != total:
        most = math.prod(strides)
        raise ModelError(f"stride must be a power of two from 1 to {most}, got {total}.", key="stride")
    return tuple(kept)


# ---- the networks --------------------------------------------------------------------------------------------------


@needs_group_norm
def network(
    classes: int = 10,
    channels: int = 3,
    multiplier: float = 1.0,
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
        multiplier: Times the paper's channels, to multiples of 8, the last 1x1 convolution aside.
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
        tied: Whether all blocks that read the same stream keep the same channels inside.

    Raises:
        ModelError: The stride is no power of two up to what it may be, the norm is unknown, or the group divides no
            stage.
    """
    return Inverted(
        classes,
        channels,
        stem=32,
        stages=stages,
        multiplier=multiplier,
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
        {"stages": _EFFICIENTNET_B4, **_EFFICIENT, "multiplier": 1.0, "top": 0},
        {"classes": 1000, "stride": 64, "dropout": 0.4},
    ),
}
mobilenetv2, efficientnet_b0, efficientnet_b4 = make_presets(network, SIZES)
