"""The module of a network of inverted residual blocks; `fleetfit.models._inverted` describes the family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from fleetfit.layout import ExitModel
from fleetfit.models.blocks import Head, kaiming, norm_layer

if TYPE_CHECKING:
    from fleetfit.models._inverted import Inverted

Activation = Literal["swish", "relu6"]
_ACTIVATIONS: Mapping[str, type[nn.Module]] = {"swish": nn.SiLU, "relu6": nn.ReLU6}


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
