"""The adapter of serial and parallel adapters: down to a few features and up again."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fleetfit.errors import ModelError
from fleetfit.peft._tuned import ADDED, Tuned

SUBLAYERS = ("*.attention", "*.mlp", "*.mixer")
"""Patterns of the sub-layers of transformer and Mamba blocks."""


class Adapter(nn.Module):
    """A layer down to `rank` features, GELU, and a layer up, which begins at zero: it adds nothing at first."""

    def __init__(self, before: int, after: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(before, rank), nn.Linear(rank, after)
        if not self.up.weight.is_meta:
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [..., after] for x [..., before]."""
        return self.up(F.gelu(self.down(x)))


@dataclass(frozen=True)
class Adapted(Tuned):
    """A family with adapters at its sub-layers.

    Attributes:
        rank: Features in the middle of an adapter.
        serial: Whether an adapter reads its sub-layer's output, and not its input.
    """

    rank: int
    serial: bool
    more = "an adapter, which has an activation between its layers,"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ModelError(f"[peft] rank must be at least 1, got {self.rank}.", key="peft.rank")
        super().__post_init__()

    def make_module(self, part: nn.Module) -> nn.Module:
        """Return the adapter of a sub-layer, whose output is added to the sub-layer's from now on."""
        linear = [inner for inner in part.modules() if isinstance(inner, nn.Linear)]
        before = linear[-1].out_features if self.serial else linear[0].in_features
        serial = self.serial

        def add(part: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            return output + part.get_submodule(ADDED)(output if serial else inputs[0])

        part.register_forward_hook(add)
        return Adapter(before, linear[-1].out_features, self.rank)
