"""Networks of inverted residual blocks: MobileNetV2 (Sandler et al., CVPR 2018) and EfficientNet (Tan & Le, ICML 2019).

A block widens its input by a 1x1 convolution, filters each channel by itself (a depthwise convolution), may weigh the
channels (squeeze and excite), and narrows them by a 1x1 convolution without activation; where neither the stage nor the
map's size changes, its input is added. Each convolution but those of squeeze and excite has a norm.

Axes: `stem` and `stage{s}` (from 1) are the residual streams, whose block is the stage's first; `expand{i}` and
`squeeze{i}` are the channels inside block i and have its number (or, `tied`, `expand_{stream}` those inside all blocks
that read a stream, with the number of the first); `exit{s}` are the channels inside early exits of a stage and `top`
those of the last 1x1 convolution, which come after all blocks. So "blocks before I whole, later ones narrowed"
(AdaptiveFL, DAC 2024, 3.2) is: an axis keeps its size if `axis.block < I`.

Widths as in ScaleFL (CVPR 2023): a stream has floor(width * channels), and what is derived from it follows it: a block
expands its narrowed input by the same factor, and squeezes it and the channels of an exit to the floor of a share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from fleetfit.errors import ModelError
from fleetfit.layout import Architecture, Axis, default_sizes
from fleetfit.models._inverted_module import Activation, InvertedModule, Place
from fleetfit.models.blocks import Norm, granule_of

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
        raise ModelError(f"stride must be a power of two from 1 to {most}, got {total}.")
    return tuple(kept)
