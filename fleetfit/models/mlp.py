"""A multilayer perceptron with residual blocks for tables and other vectors: six blocks of width 64.

After the residual network for tables of Gorishniy et al. ("Revisiting Deep Learning Models for Tabular Data", NeurIPS
2021): a linear layer, then blocks x + W2 relu(W1 norm(x)), and before the classifier a norm and ReLU. Inputs of any
shape are flattened. A classifier may sit after any block, so four levels have room for balanced splits.

Differs from the paper: the norm is a layer norm, which needs no statistics of a client's few rows; dropout is 0 by
default.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.layout import Axis
from fleetfit.models.family import Family, FamilyModule


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
        inner = F.dropout(F.relu(self.inner(self.norm(x))), self.dropout, self.training)
        return x + self.outer(inner)


class PerceptronHead(nn.Module):
    """Norm, ReLU and a linear classifier."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.fc(F.relu(self.norm(x)))


class PerceptronModule(FamilyModule):
    """A module whose stem takes flat samples."""

    stem: nn.Linear

    def start(self, x: Tensor) -> Tensor:
        """Return [B, hidden] of samples of any shape."""
        return self.stem(x.flatten(1))


@dataclass(frozen=True)
class Perceptron(Family):
    """The family; made by `mlp`, which explains the fields."""

    module_class = PerceptronModule
    classes: int
    input_shape: tuple[int, ...]
    hidden: int
    blocks: int
    dropout: float

    def _make_axes(self) -> dict[str, Axis]:
        return {"hidden": Axis(self.hidden), "inner": Axis(2 * self.hidden)}

    def _build_stem(self, axes: Mapping[str, int]) -> nn.Module:
        return nn.Linear(math.prod(self.input_shape), axes["hidden"])

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        return ResidualBlock(axes["hidden"], axes["inner"], self.dropout)

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        return PerceptronHead(axes["hidden"], axes["classes"])


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
