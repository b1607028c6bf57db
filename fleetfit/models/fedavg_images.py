"""The FedAvg paper's image models (McMahan et al., AISTATS 2017): plain stacks of layers, each a block.

- `mlp_2nn`: two fully connected layers of 200 units with ReLU, for inputs of any shape, which are flattened.
- `fedavg_cnn`: 5x5 convolutions of 32 and 64 channels, each with ReLU and 2x2 max pooling, and a fully connected layer
  of 512 units with ReLU.
- `fedavg_cifar_cnn`: TensorFlow's tutorial model of about 10^6 parameters: two 5x5 convolutions of 64 channels, each
  with ReLU and 3x3 max pooling with stride 2, and fully connected layers of 384 and 192 units with ReLU; 1,068,298
  parameters on the paper's 24x24 crops, 1,756,426 on whole 32x32 images.

A linear classifier may sit after any layer; after a convolution it pools its maps globally first.

Differs from the paper: the tutorial's local response normalization is left out. It mixes each channel with its eight
neighbors, so a model without some of them would not be a part of the whole model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Axis
from fleetfit.models.family import Family, Head, halve, initialize_kaiming


class PooledConv(nn.Module):
    """A 5x5 convolution, ReLU, max pooling with stride 2, which halves each side and rounds down."""

    def __init__(self, before: int, after: int, pool: int) -> None:
        super().__init__()
        self.pool = pool
        self.conv = nn.Conv2d(before, after, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height / 2, width / 2]."""
        x = F.relu(self.conv(x))
        return halve(x) if self.pool == 2 else F.max_pool2d(x, self.pool, stride=2, ceil_mode=True)


class FullBlock(nn.Module):
    """A fully connected layer and ReLU; maps are flattened first."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.fc = nn.Linear(before, after)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after]."""
        return F.relu(self.fc(x.flatten(1)))


@dataclass(frozen=True)
class Stack(Family):
    """The family; made by `stack`, which explains the fields."""

    classes: int
    input_shape: tuple[int, ...]
    convolutions: tuple[int, ...]
    hidden: tuple[int, ...]
    pool: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", len(self.layers))
        super().__post_init__()

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The axis of each layer."""
        return (
            *(f"conv{i}" for i in range(1, len(self.convolutions) + 1)),
            *(f"fc{i}" for i in range(1, len(self.hidden) + 1)),
        )

    @cached_property
    def pixels(self) -> int:
        """Pixels per channel of the map that is flattened; of inputs without convolutions, elements per channel."""
        return math.prod(side // 2 ** len(self.convolutions) for side in self.input_shape[1:])

    def _make_axes(self) -> dict[str, Axis]:
        sizes = zip(self.layers, (*self.convolutions, *self.hidden), strict=True)
        return {name: Axis(size, block=i) for i, (name, size) in enumerate(sizes)}

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        before, after = axes[self.layers[i - 1]] if i else self.input_shape[0], axes[self.layers[i]]
        if i < len(self.convolutions):
            return PooledConv(before, after, self.pool)
        return FullBlock(before * (self.pixels if i == len(self.convolutions) else 1), after)

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        head = Head if e <= len(self.convolutions) else nn.Linear
        return head(axes[self.layers[e - 1]], axes["classes"])

    def _initialize(self, module: nn.Module) -> None:
        initialize_kaiming(module)


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
        pool: Side of the pooling window, 2 or 3.

    Raises:
        ModelError: There is no hidden layer or one without units, or the inputs are not images or too small for the
            convolutions.
    """
    if not (convolutions or hidden):
        raise ModelError("a stack of layers needs at least one hidden layer.", key="hidden")
    side = 2 ** len(convolutions)
    if convolutions and (len(input_shape) != 3 or min(input_shape[1:]) < side):
        raise ModelError(
            f"a model with {len(convolutions)} convolutions that halve needs images (channels, height, width) of "
            f"{side}x{side} and more, got inputs of shape {tuple(input_shape)}.",
            key="input_shape",
        )
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
