"""A multilayer perceptron with residual blocks for tables and other vectors: six blocks of width 64.

After the residual network for tables of Gorishniy et al. ("Revisiting Deep Learning Models for Tabular Data", NeurIPS
2021): a linear layer, then blocks x + W2 relu(W1 norm(x)), and before the classifier a norm and ReLU. Inputs of any
shape are flattened. A classifier may sit after any block, so four levels have room for balanced splits.

Differs from the paper: the norm is a layer norm, which needs no statistics of a client's few rows; there is no dropout
unless asked for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.layout import Architecture, Axis, ExitModel


class ResidualBlock(nn.Module):
    """x + W2 relu(W1 norm(x))."""

    def __init__(self, hidden: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.inner = nn.Linear(hidden, inner)
        self.outer = nn.Linear(inner, hidden)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, hidden] of x [B, hidden]."""
        within = F.dropout(F.relu(self.inner(self.norm(x))), self.dropout, self.training)
        out: Tensor = x + self.outer(within)
        return out


class PerceptronHead(nn.Module):
    """Norm, ReLU and a linear classifier."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.fc(F.relu(self.norm(x)))


class PerceptronModule(ExitModel):
    """The module of one sub-model; its names are those of the full model."""

    def __init__(self, architecture: "Perceptron", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        hidden, inner = axes["hidden"], axes["inner"]
        self.exits = exits
        self.stem = nn.Linear(math.prod(architecture.input_shape), hidden)
        self.blocks = nn.ModuleList(ResidualBlock(hidden, inner, architecture.dropout) for _ in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): PerceptronHead(hidden, axes["classes"]) for e in exits})

    def start(self, x: Tensor) -> Tensor:
        """Return [B, hidden] of samples of any shape."""
        return self.stem(x.flatten(1))


@dataclass(frozen=True)
class Perceptron(Architecture):
    """The family; made by `mlp`, which says what the fields mean."""

    classes: int
    input_shape: tuple[int, ...]
    hidden: int
    layers: int
    dropout: float
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axes = {"hidden": Axis(self.hidden), "inner": Axis(2 * self.hidden)}
        object.__setattr__(self, "axes", {**axes, "classes": Axis(self.classes, scaled=False)})
        object.__setattr__(self, "blocks", self.layers)

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        return PerceptronModule(self, axes, exits)


def mlp(
    classes: int = 10, input_shape: tuple[int, ...] = (16,), hidden: int = 64, layers: int = 6, dropout: float = 0.0
) -> Perceptron:
    """Return the family of residual perceptrons.

    Args:
        classes: Classes, or targets of a regression; never cut.
        input_shape: Shape of one sample, which is flattened.
        hidden: Width; twice as wide inside of a block.
        layers: Residual blocks.
        dropout: Share of the features inside a block that is dropped in training.

    Raises:
        ModelError: A size is below 1, or dropout is out of range.
    """
    if hidden < 1 or layers < 1 or not 0 <= dropout < 1:
        raise ModelError(
            f"mlp needs hidden and layers of at least 1 and dropout from 0 to below 1, got {hidden}, {layers} and "
            f"{dropout}.",
            key="hidden",
        )
    return Perceptron(classes, tuple(input_shape), hidden, layers, dropout)
