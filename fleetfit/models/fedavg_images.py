"""The FedAvg paper's image models (McMahan et al., AISTATS 2017): plain stacks of layers, each a block.

- `mlp_2nn`: two fully connected layers of 200 units with ReLU, for inputs of any shape, which are flattened.
- `fedavg_cnn`: 5x5 convolutions of 32 and 64 channels, each with ReLU and 2x2 max pooling, and a fully connected layer
  of 512 units with ReLU.
- `fedavg_cifar_cnn`: TensorFlow's tutorial model of about 10^6 parameters: two 5x5 convolutions of 64 channels, each
  with ReLU and 3x3 max pooling with stride 2, and fully connected layers of 384 and 192 units with ReLU; 1,068,298
  parameters on the paper's 24x24 crops, 1,756,426 on whole 32x32 images.

A linear classifier may sit after any layer; after a convolution it pools its maps globally first.

Differs from the paper: the tutorial's local response normalisation is left out. It mixes each channel with its eight
neighbours, so a model without some of them would not be a part of the whole model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Architecture, Axis, ExitModel, interleaved
from fleetfit.models.blocks import Head, halved, kaiming


class PooledConv(nn.Module):
    """A 5x5 convolution, ReLU, max pooling with stride 2, which halves each side and rounds down."""

    def __init__(self, before: int, after: int, pool: int) -> None:
        super().__init__()
        self.pool = pool
        self.conv = nn.Conv2d(before, after, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height / 2, width / 2]."""
        x = F.relu(self.conv(x))
        return halved(x) if self.pool == 2 else F.max_pool2d(x, self.pool, stride=2, ceil_mode=True)


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
                self.blocks.append(PooledConv(before, stream[i], architecture.pool))
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
            raise ModelError("a stack of layers needs at least one hidden layer.", key="hidden")
        if self.convolutions and (len(sides) != 2 or places < 1):
            raise ModelError(
                f"a model with {len(self.convolutions)} convolutions that halve needs images (channels, height, width) "
                f"of {halvings}x{halvings} and more, got inputs of shape {self.input_shape}.",
                key="input_shape",
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


def stack(
    classes: int = 10,
    input_shape: tuple[int, ...] = (1, 28, 28),
    convolutions: tuple[int, ...] = (),
    hidden: tuple[int, ...] = (200, 200),
    pool: int = 2,
) -> Stack:
    """Return the family of a stack of layers.

    Args:
        classes: Classes; never cut.
        input_shape: Shape of one sample; with convolutions channels, height and width of images, 4x4 and more.
        convolutions: Channels of each convolution.
        hidden: Units of each hidden layer, shallow to deep.
        pool: Side of the pooling window.

    Raises:
        ModelError: There is no hidden layer or one without units, or the inputs are no images or too small for the
            convolutions.
    """
    return Stack(classes, tuple(input_shape), tuple(convolutions), tuple(hidden), pool)


SIZES = {
    "mlp_2nn": Preset(
        "The 2NN of the FedAvg paper (McMahan et al., AISTATS 2017): two hidden layers of 200 units, 199,210 "
        "parameters.",
        {"convolutions": (), "pool": 2},
    ),
    "fedavg_cnn": Preset(
        "The CNN of the FedAvg paper (McMahan et al., AISTATS 2017): two 5x5 convolutions; 1,663,370 parameters "
        "on MNIST.",
        {"convolutions": (32, 64), "hidden": (512,), "pool": 2},
    ),
    "fedavg_cifar_cnn": Preset(
        "The CIFAR CNN of the FedAvg paper (McMahan et al., AISTATS 2017), TensorFlow's tutorial model: about 10^6 "
        "parameters.",
        {"convolutions": (64, 64), "hidden": (384, 192), "pool": 3},
        {"input_shape": (3, 24, 24)},
    ),
}
mlp_2nn, fedavg_cnn, fedavg_cifar_cnn = make_presets(stack, SIZES)
