"""The FedAvg paper's image models: 5x5 convolutions with max pooling, then fully connected layers, each a block."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.layout import Architecture, Axis, ExitModel, interleaved
from fleetfit.models.blocks import Head, kaiming


class ConvBlock(nn.Module):
    """A 5x5 convolution, ReLU, max pooling with stride 2, which halves each side and rounds down."""

    def __init__(self, before: int, after: int, pool: int) -> None:
        super().__init__()
        self.pool = pool
        self.conv = nn.Conv2d(before, after, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height / 2, width / 2]."""
        return F.max_pool2d(F.relu(self.conv(x)), self.pool, stride=2, ceil_mode=self.pool > 2)


class FullBlock(nn.Module):
    """A fully connected layer and ReLU; maps are flattened first."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.fc = nn.Linear(before, after)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after]."""
        return F.relu(self.fc(x.flatten(1)))


class StackModule(ExitModel):
    """The module of one sub-model; its names are those of the full model."""

    def __init__(self, architecture: "Stack", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        convolutions, channels = len(architecture.convolutions), architecture.input_shape[0]
        stream = [axes[name] for name in architecture.layers]
        self.exits = exits
        self.blocks = nn.ModuleList()
        for i in range(exits[-1]):
            before = stream[i - 1] if i else channels
            if i < convolutions:
                self.blocks.append(ConvBlock(before, stream[i], architecture.pool))
            else:
                places = architecture.places if i == convolutions else 1
                self.blocks.append(FullBlock(before * places, stream[i]))
        self.heads = nn.ModuleDict()
        for e in exits:
            head = Head if e <= convolutions else nn.Linear
            self.heads[str(e)] = head(stream[e - 1], axes["classes"])
        kaiming(self)

    def start(self, x: Tensor) -> Tensor:
        """Return the images as they are."""
        return x


@dataclass(frozen=True)
class Stack(Architecture):
    """A family of plain stacks of layers.

    Attributes:
        classes: Classes; never cut.
        input_shape: Shape of one sample; (channels, height, width) where there are convolutions.
        convolutions: Channels of each convolution.
        full: Channels of each fully connected layer.
        pool: Side of the pooling window, 2 or 3.
    """

    classes: int
    input_shape: tuple[int, ...]
    convolutions: tuple[int, ...]
    full: tuple[int, ...]
    pool: int = 2
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)
    places: int = field(init=False, repr=False, compare=False)
    layers: tuple[str, ...] = field(init=False, repr=False, compare=False)
    declared: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        halvings = 2 ** len(self.convolutions)
        sides = self.input_shape[1:]
        places = math.prod(side // halvings for side in sides)
        if not (self.convolutions or self.full):
            raise ModelError("a stack of layers needs at least one hidden layer.")
        if self.convolutions and (len(sides) != 2 or places < 1):
            raise ModelError(
                f"a model with {len(self.convolutions)} convolutions that halve needs images (channels, height, width) "
                f"of {halvings}x{halvings} and more, got inputs of shape {self.input_shape}."
            )
        named = [f"conv{i + 1}" for i in range(len(self.convolutions))] + [f"fc{i + 1}" for i in range(len(self.full))]
        sizes = (*self.convolutions, *self.full)
        axes = {name: Axis(size, block=i) for i, (name, size) in enumerate(zip(named, sizes, strict=True))}
        flat = {f"blocks.{len(self.convolutions)}.fc.weight": interleaved(places, dim=1)} if self.convolutions else {}
        object.__setattr__(self, "axes", {**axes, "classes": Axis(self.classes, scaled=False)})
        object.__setattr__(self, "blocks", len(sizes))
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "layers", tuple(named))
        object.__setattr__(self, "declared", flat)

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        return StackModule(self, axes, exits)
