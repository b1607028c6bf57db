"""The module of a multi-scale dense network; `fleetfit.models.msdnet` describes the family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fleetfit.layout import ExitModel
from fleetfit.models.blocks import Head, conv_norm_relu, kaiming

if TYPE_CHECKING:
    from fleetfit.models.msdnet import Msdnet

Features = tuple[Tensor, ...]
"""Feature maps of the scales that are alive, fine to coarse."""


@dataclass(frozen=True)
class Step:
    """What one layer does at one scale; names are those of axes.

    Attributes:
        scale: The scale, from 0, the finest.
        own: The parts of the features that it reads at its own scale.
        finer: The parts that it reads at the next finer scale; none if it reads only its own.
        normal: What it adds from its own scale.
        down: What it adds from the finer scale, or "".
        reduced: What its features are reduced to afterwards, because a scale ends here, or "".
    """

    scale: int
    own: tuple[str, ...]
    finer: tuple[str, ...]
    normal: str
    down: str
    reduced: str

    @property
    def joined(self) -> tuple[str, ...]:
        """The parts of the features before they are reduced, in order."""
        return (*self.own, self.down, self.normal) if self.down else (*self.own, self.normal)

    @property
    def result(self) -> tuple[str, ...]:
        """The parts of the features afterwards."""
        return (self.reduced,) if self.reduced else self.joined


def _bottleneck(before: int, inner: int, after: int, stride: int, family: "Msdnet") -> nn.Sequential:
    return nn.Sequential(
        *conv_norm_relu(before, inner, 1, 1, family.norm, family.group),
        *conv_norm_relu(inner, after, 3, stride, family.norm, family.group),
    )


class StepModule(nn.Module):
    """Add channels to a scale's features: from the scale itself, and from the next finer one if it is alive."""

    def __init__(self, family: "Msdnet", step: Step, axes: Mapping[str, int]) -> None:
        super().__init__()
        own, finer = (sum(axes[part] for part in parts) for parts in (step.own, step.finer))
        self.normal = _bottleneck(own, axes[f"{step.normal}_inner"], axes[step.normal], 1, family)
        self.down = _bottleneck(finer, axes[f"{step.down}_inner"], axes[step.down], 2, family) if step.down else None
        self.reduce: nn.Module = nn.Identity()
        if step.reduced:
            joined = sum(axes[part] for part in step.joined)
            self.reduce = nn.Sequential(*conv_norm_relu(joined, axes[step.reduced], 1, 1, family.norm, family.group))

    def forward(self, own: Tensor, finer: Tensor | None) -> Tensor:
        """Return [B, more channels, height, width] of a scale's features and of the next finer scale's."""
        added = [] if self.down is None else [self.down(finer)]
        return self.reduce(torch.cat([own, *added, self.normal(own)], dim=1))


class Layer(nn.Module):
    """A block: one step at each scale that is alive."""

    def __init__(self, family: "Msdnet", steps: Sequence[Step], axes: Mapping[str, int]) -> None:
        super().__init__()
        self.scales = family.scales
        self.scale = nn.ModuleDict({str(step.scale): StepModule(family, step, axes) for step in steps})

    def forward(self, carry: Features) -> Features:
        """Return the features after the block, without those of a scale that ends in it."""
        old = dict(enumerate(carry, self.scales - len(carry)))
        return tuple(step(old[int(s)], old.get(int(s) - 1)) for s, step in self.scale.items())


class MsdnetModule(ExitModel):
    """The module of one sub-model; its names are those of the full model."""

    def __init__(self, family: "Msdnet", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        norm, group = family.norm, family.group
        sides = [family.channels, *(axes[f"stem{s}"] for s in range(family.scales))]
        self.exits = exits
        self.stem = nn.ModuleList(
            nn.Sequential(*conv_norm_relu(sides[s], sides[s + 1], 3, 2 if s else 1, norm, group))
            for s in range(family.scales)
        )
        self.blocks = nn.ModuleList(Layer(family, steps, axes) for steps in family.steps[: exits[-1]])
        self.heads = nn.ModuleDict()
        for e in exits:
            channels = sum(axes[part] for part in family.steps[e - 1][-1].result)
            self.heads[str(e)] = Head(
                channels, axes["classes"], family.head_layers, norm, group, inner=axes["head"], stride=2
            )
        kaiming(self)

    def start(self, x: Tensor) -> Features:
        """Return feature maps of each scale, fine to coarse: [B, stem{s}, height / 2^s, width / 2^s]."""
        found = []
        for layer in self.stem:
            x = layer(x)
            found.append(x)
        return tuple(found)

    def head(self, i: int, carry: Features) -> Tensor:
        """Return the logits [B, classes] of exit i, which reads the coarsest scale."""
        logits: Tensor = self.heads[str(self.exits[i])](carry[-1])
        return logits
