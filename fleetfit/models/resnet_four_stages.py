"""The residual networks of four stages of basic blocks (He et al., CVPR 2016, Table 1): depths 18 and 34.

Stages of 64, 128, 256 and 512 channels; a block whose shape changes has a 1x1 convolution with norm as its shortcut
(option B, as in the paper on ImageNet). An early exit is `head_layers` 3x3 convolutions with norm and ReLU, global
average pooling and a linear layer (ScaleFL, CVPR 2023, 4.1); the last one is pooling and the linear layer.

Axes: the residual stream of a stage is one axis, whose block is the stage's first, and the channels inside a block are
an axis of that block. So "blocks before I whole, later ones narrowed" (AdaptiveFL, DAC 2024, 3.2) is: an axis keeps its
size if `axis.block < I`. A stage that begins before I keeps its whole stream; inside its later blocks channels are cut.

Differs from the paper: the stem for small images (3x3 convolution, no pooling) is the default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

from torch import Tensor, nn

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Architecture, Axis, ExitModel
from fleetfit.models.blocks import Head, Norm, conv_norm_relu, granule_of, kaiming, needs_group_norm, norm_layer
from fleetfit.models.resnet import BasicBlock

Stem = Literal["small", "large"]


class FourStagesModule(ExitModel):
    """The module of one sub-model; its names are those of the full model."""

    def __init__(self, architecture: "FourStages", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        norm, group, places = architecture.norm, architecture.group, architecture.places
        self.exits = exits
        self.stem = _stem(architecture.stem, architecture.channels, axes["stage1"], norm, group)
        self.blocks = nn.ModuleList()
        for i, (stage, first) in enumerate(places[: exits[-1]]):
            after, moved = axes[f"stage{stage}"], first and stage > 1  # by place, not by shape
            before, stride = (axes[f"stage{stage - 1}"], 2) if moved else (after, 1)
            block = BasicBlock(before, after, stride, norm, group, axes[f"inner{i}"])
            if moved:
                block.shortcut = nn.Sequential(
                    nn.Conv2d(before, after, 1, stride=2, bias=False), norm_layer(norm, after, group)
                )
            self.blocks.append(block)
        self.heads = nn.ModuleDict(
            {
                str(e): Head(
                    axes[f"stage{places[e - 1][0]}"],
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
        """Return the stem's feature maps [B, stage1, height, width], a quarter of the images' sides if it is large."""
        return self.stem(x)


def _stem(stem: Stem, before: int, after: int, norm: Norm, group: int) -> nn.Sequential:
    if stem == "small":
        return nn.Sequential(*conv_norm_relu(before, after, 3, 1, norm, group))
    return nn.Sequential(*conv_norm_relu(before, after, 7, 2, norm, group), nn.MaxPool2d(3, stride=2, padding=1))


@dataclass(frozen=True)
class FourStages(Architecture):
    """The family of one depth; made by `four_stages`, which says what the fields mean."""

    classes: int
    channels: int
    per_stage: tuple[int, int, int, int]
    base: int
    stem: Stem
    norm: Norm
    group: int
    dropout: float
    head_layers: int
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.stem not in ("small", "large"):
            raise ModelError(f'stem must be "small" (3x3) or "large" (7x7 and pooling), got {self.stem!r}.', key="stem")
        granule = granule_of(self.norm, self.group)
        begins = accumulate(self.per_stage[:-1], initial=0)
        axes = {f"stage{s}": Axis(self.base << (s - 1), granule, block=b) for s, b in enumerate(begins, 1)}
        axes |= {f"inner{i}": Axis(self.base << (s - 1), granule, block=i) for i, (s, _) in enumerate(self.places)}
        object.__setattr__(self, "axes", {**axes, "classes": Axis(self.classes, scaled=False)})
        object.__setattr__(self, "blocks", sum(self.per_stage))

    @cached_property
    def places(self) -> tuple[tuple[int, bool], ...]:
        """Of each block its stage, from 1, and whether it is the stage's first."""
        return tuple((s, i == 0) for s, count in enumerate(self.per_stage, 1) for i in range(count))

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        return FourStagesModule(self, axes, exits)


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
) -> FourStages:
    """Return the family with so many blocks in its stages.

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
    return FourStages(classes, channels, per_stage, base, stem, norm, group, dropout, head_layers)


SIZES = {
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
resnet18, resnet34 = make_presets(four_stages, SIZES)
