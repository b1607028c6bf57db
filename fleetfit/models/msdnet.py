"""Multi-scale dense network (Huang et al., ICLR 2018) for small images, with any number of layers, scales and channels.

Features of several scales go side by side through the layers. At each scale a layer adds channels: made from the
features of that scale and, but for the finest one, from those of the next finer scale by a convolution with stride 2;
each by a 1x1 convolution and a 3x3 convolution with norm and ReLU. Scale s has 2^s times the finest one's channels.
After each share of the layers the finest scale ends, and 1x1 convolutions halve the channels of the others. A
classifier reads the coarsest scale: two 3x3 convolutions with stride 2, norm and ReLU, global average pooling, a linear
layer; the last one too (the "3-layer CNN" of ScaleFL, CVPR 2023, 4.1). 24 layers with exits after 15, 18, 21 and 24
have the parameters and multiply-adds of ScaleFL's Table 7.

Axes: features are concatenated, so what reads them is declared by `segments`. Layers between two ends of a scale share
axes: `normal{k}_{s}` and `down{k}_{s}` are what they add at scale s while k scales have ended (with `_inner` behind the
1x1 convolution), `reduced{k}_{s}` what is left when the k-th scale has ended, `stem{s}` the first features, `head` the
channels inside classifiers. An axis's block is the first that has it; `head` comes after all blocks. Widths as in
ScaleFL: base, growth and head channels are each cut to the floor, and everything else follows from them.

Differs from the paper: a 1x1 convolution before a 3x3 one may widen, where base is below twice the growth.
Differs from ScaleFL's released code: wherever features are cut, each concatenated part is cut by itself, so that a
sub-model computes with the channels that it was given (there, behind the first exit, it is the leading ones of all). As
there, the finer scales in the last layer of a sub-model feed nothing: they belong to its size, but no gradient reaches
them, so they are neither moved by weight decay nor counted in the average (see `fleetfit.training`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Architecture, Axis, ExitModel, default_sizes, segments
from fleetfit.layout.axes import Declaration
from fleetfit.models.blocks import Head, Norm, conv_norm_relu, granule_of, kaiming, needs_group_norm

Features = tuple[Tensor, ...]
"""Feature maps of the scales that are alive, fine to coarse."""


@dataclass(frozen=True)
class ScaleStep:
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

    def __init__(self, family: "Msdnet", step: ScaleStep, axes: Mapping[str, int]) -> None:
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

    def __init__(self, family: "Msdnet", steps: Sequence[ScaleStep], axes: Mapping[str, int]) -> None:
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


@dataclass(frozen=True)
class Msdnet(Architecture):
    """The family; made by `msdnet`, which says what the fields mean."""

    classes: int
    channels: int
    layers: int
    scales: int
    base: int
    growth: int
    head_channels: int
    head_layers: int
    norm: Norm
    group: int
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if min(self.layers, self.scales, self.base, self.growth, self.head_channels) < 1:
            raise ModelError(
                "layers, scales, base, growth and head_channels of an MSDNet must be at least 1.", key="layers"
            )
        granule = granule_of(self.norm, self.group)
        first = {
            axis: i for i, steps in reversed(list(enumerate(self.steps))) for step in steps for axis in _made(step)
        }
        sizes = self._all(self.base, self.growth, self.head_channels)
        axes = {name: Axis(size, granule, block=first.get(name, 0)) for name, size in sizes.items()}
        axes["head"] = Axis(self.head_channels, granule, block=self.layers)
        object.__setattr__(self, "axes", {**axes, "classes": Axis(self.classes, scaled=False)})
        object.__setattr__(self, "blocks", self.layers)

    def ended(self, layer: int) -> int:
        """Return how many scales have ended after a layer: one ends in the first layer of each share but the first."""
        return max(0, layer - 1) // -(-self.layers // self.scales)

    @cached_property
    def steps(self) -> tuple[tuple[ScaleStep, ...], ...]:
        """Of each block its steps, fine to coarse."""
        parts: dict[int, tuple[str, ...]] = {s: (f"stem{s}",) for s in range(self.scales)}
        found = []
        for n in range(1, self.layers + 1):
            before, after, steps = self.ended(n - 1), self.ended(n), []
            for s in range(after, self.scales):
                down = f"down{before}_{s}" if s > before else ""
                reduced = f"reduced{after}_{s}" if after > before else ""
                steps.append(ScaleStep(s, parts[s], parts[s - 1] if down else (), f"normal{before}_{s}", down, reduced))
            parts |= {step.scale: step.result for step in steps}
            found.append(tuple(steps))
        return tuple(found)

    def _all(self, base: int, growth: int, head: int) -> dict[str, int]:
        """Return the size of each axis but the classes, from the three numbers that width cuts."""
        found = {f"stem{s}": base << s for s in range(self.scales)}
        channels = base
        for n in range(1, self.layers + 1):
            before, after = self.ended(n - 1), self.ended(n)
            for s in range(after, self.scales):
                both = s > before  # two halves then
                added = (growth << s) >> both
                found |= {f"normal{before}_{s}": added, f"normal{before}_{s}_inner": added << s}
                if both:
                    found |= {f"down{before}_{s}": added, f"down{before}_{s}_inner": added << (s - 1)}
            channels += growth
            if after > before:
                channels = max(1, channels // 2)
                found |= {f"reduced{after}_{s}": channels << s for s in range(after, self.scales)}
        return {**found, "head": head}

    def sizes(self, width: float) -> dict[str, int]:
        """Return the size of each axis: base, growth and head to the floor, the others as they follow from them."""
        three = {"base": Axis(self.base), "growth": Axis(self.growth), "head": Axis(self.head_channels)}
        kept = self._all(**default_sizes(three, width))
        units = {name: axis.granule for name, axis in self.axes.items()}
        return {n: max(1, size // units[n]) * units[n] for n, size in kept.items()} | {"classes": self.classes}

    @cached_property
    def declared(self) -> Mapping[str, Any]:
        """What reads concatenated features, and in which order they lie."""
        found: dict[str, Declaration] = {}
        for i, steps in enumerate(self.steps):
            for step in steps:
                where = f"blocks.{i}.scale.{step.scale}"
                found[f"{where}.normal.0.weight"] = segments(*step.own, dim=1)
                if step.down:
                    found[f"{where}.down.0.weight"] = segments(*step.finer, dim=1)
                if step.reduced:
                    found[f"{where}.reduce.0.weight"] = segments(*step.joined, dim=1)
            read = "body.0" if self.head_layers else "fc"
            found[f"heads.{i + 1}.{read}.weight"] = segments(*steps[-1].result, dim=1)
        return found

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        return MsdnetModule(self, axes, exits)


def _made(step: ScaleStep) -> tuple[str, ...]:
    """Return the axes that a step makes."""
    made = (step.normal, f"{step.normal}_inner", step.reduced)
    return (*made, step.down, f"{step.down}_inner") if step.down else made


@needs_group_norm
def msdnet(
    classes: int = 10,
    channels: int = 3,
    layers: int = 24,
    scales: int = 3,
    base: int = 16,
    growth: int = 6,
    head_channels: int = 128,
    head_layers: int = 2,
    norm: Norm = "batch",
    group: int = 2,
) -> Msdnet:
    """Return the family of a multi-scale dense network.

    Args:
        classes: Classes; never cut.
        channels: Channels of the images; never cut.
        layers: Layers, which are the blocks; a classifier may sit after any of them.
        scales: Scales; each has half the height and width and twice the channels of the one before.
        base: Channels of the finest scale's first features.
        growth: Channels that a layer adds at the finest scale.
        head_channels: Channels inside a classifier.
        head_layers: Convolutions in each classifier, the last one's too.
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together; base and growth must be multiples.

    Raises:
        ModelError: A number is below 1, the norm unknown, or the group does not divide what is made of base and growth.
    """
    return Msdnet(classes, channels, layers, scales, base, growth, head_channels, head_layers, norm, group)


SIZES = {
    "msdnet24": Preset(
        "MSDNet-24 (Huang et al., ICLR 2018) as in ScaleFL (CVPR 2023): 24 layers, 3 scales, 16 channels, growth 6.",
        {"layers": 24, "scales": 3, "base": 16, "growth": 6, "head_channels": 128, "head_layers": 2},
    ),
}
(msdnet24,) = make_presets(msdnet, SIZES)
