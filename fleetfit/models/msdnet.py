"""Multi-scale dense network (Huang et al., ICLR 2018) for small images, with any number of layers, scales and channels.

Features of several scales go side by side through the layers. At each scale a layer adds channels: made from the
features of that scale and, but for the finest one, from those of the next finer scale by a convolution with stride 2;
each by a 1x1 convolution and a 3x3 convolution with norm and ReLU. Scale s has 2^s times the finest one's channels.
After each share of the layers the finest scale ends, and 1x1 convolutions halve the channels of the others. A
classifier reads the coarsest scale: two 3x3 convolutions with stride 2, norm and ReLU, global average pooling, a linear
layer; the last one too (the "3-layer CNN" of ScaleFL, CVPR 2023, 4.1). 24 layers with exits after 15, 18, 21 and 24
have the parameters and multiply-adds of ScaleFL's Table 7.

Axes: layers between two ends of a scale share
axes: `normal{k}_{s}` and `down{k}_{s}` are what they add at scale s while k scales have ended (with `_inner` behind the
1x1 convolution), `reduced{k}_{s}` what is left when the k-th scale has ended, `stem{s}` the first features, `head` the
channels inside classifiers. An axis's block is the first that has it; `head` comes after all blocks. Widths as in
ScaleFL: base, growth and head channels are each cut to the floor, and everything else follows from them.

Differs from the paper: a 1x1 convolution before a 3x3 one may widen, where base is below twice the growth. Differs from
ScaleFL's released code: wherever features are cut, each concatenated part is cut separately, so a sub-model computes
with its own channels (the released code takes the leading ones of all behind the first exit). As there, the finer
scales in the last layer of a sub-model feed nothing: they belong to its size, but no gradient reaches them, so they are
neither moved by weight decay nor counted in the average (see `fleetfit.training`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fleetfit.anatomy import Axis, default_sizes
from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.models.family import ConvFamily, FamilyModule, Head, MakeNorm, Norm, conv_norm_relu, needs_group_norm

Features = tuple[Tensor, ...]
"""Feature maps of the scales that are alive, fine to coarse."""


@dataclass(frozen=True)
class ScaleStep:
    """One layer at one scale; names are those of axes.

    Attributes:
        scale: The scale, from 0, the finest.
        own: The parts of the features that it reads at its own scale.
        finer: The parts that it reads at the next finer scale; none if it reads only its own.
        normal: The part that it adds from its own scale.
        down: The part that it adds from the finer scale, or "".
        reduced: The part to which all are reduced afterwards if a scale ends, or "".
    """

    scale: int
    own: tuple[str, ...]
    finer: tuple[str, ...]
    normal: str
    down: str
    reduced: str

    @property
    def concatenated(self) -> tuple[str, ...]:
        """The parts of the features before they are reduced, in order."""
        return (*self.own, self.down, self.normal) if self.down else (*self.own, self.normal)

    @property
    def result(self) -> tuple[str, ...]:
        """The parts of the features afterwards."""
        return (self.reduced,) if self.reduced else self.concatenated

    @property
    def added(self) -> tuple[str, ...]:
        """The axes that begin with this step."""
        axes = (self.normal, f"{self.normal}_inner", self.reduced)
        return (*axes, self.down, f"{self.down}_inner") if self.down else axes


def _make_bottleneck(before: int, inner: int, after: int, stride: int, norm: MakeNorm) -> nn.Sequential:
    return nn.Sequential(*conv_norm_relu(before, inner, 1, 1, norm), *conv_norm_relu(inner, after, 3, stride, norm))


class StepModule(nn.Module):
    """Add channels to a scale's features: from the scale itself, and from the next finer one if it is alive."""

    def __init__(self, family: "Msdnet", step: ScaleStep, axes: Mapping[str, int]) -> None:
        super().__init__()
        norm = family.make_norm
        own, finer = (sum(axes[part] for part in parts) for parts in (step.own, step.finer))
        self.normal = _make_bottleneck(own, axes[f"{step.normal}_inner"], axes[step.normal], 1, norm)
        self.down = _make_bottleneck(finer, axes[f"{step.down}_inner"], axes[step.down], 2, norm) if step.down else None
        self.reduce: nn.Module = nn.Identity()
        if step.reduced:
            before = sum(axes[part] for part in step.concatenated)
            self.reduce = nn.Sequential(*conv_norm_relu(before, axes[step.reduced], 1, 1, norm))

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


class MsdnetModule(FamilyModule):
    """A module with a stem for each scale, whose classifiers read the coarsest one."""

    stem: nn.ModuleList

    def start(self, x: Tensor) -> Features:
        """Return feature maps of each scale, fine to coarse: [B, stem{s}, height / 2^s, width / 2^s]."""
        features = []
        for layer in self.stem:
            x = layer(x)
            features.append(x)
        return tuple(features)

    def head(self, i: int, carry: Features) -> Tensor:
        """Return the logits [B, classes] of exit i, which reads the coarsest scale."""
        return super().head(i, carry[-1])


@dataclass(frozen=True)
class Msdnet(ConvFamily):
    """The family; made by `msdnet`, which explains the fields."""

    module_class = MsdnetModule
    classes: int
    channels: int
    blocks: int
    scales: int
    base: int
    growth: int
    head_channels: int
    head_layers: int
    norm: Norm
    group: int

    @cached_property
    def steps(self) -> tuple[tuple[ScaleStep, ...], ...]:
        """Of each block its steps, fine to coarse."""
        parts: dict[int, tuple[str, ...]] = {s: (f"stem{s}",) for s in range(self.scales)}
        layers = []
        for layer in range(1, self.blocks + 1):
            before, after, steps = self._count_ended(layer - 1), self._count_ended(layer), []
            for s in range(after, self.scales):
                down = f"down{before}_{s}" if s > before else ""
                reduced = f"reduced{after}_{s}" if after > before else ""
                steps.append(ScaleStep(s, parts[s], parts[s - 1] if down else (), f"normal{before}_{s}", down, reduced))
            parts |= {step.scale: step.result for step in steps}
            layers.append(tuple(steps))
        return tuple(layers)

    def sizes(self, width: float) -> dict[str, int]:
        """Return the size of each axis: base, growth and head to the floor, the others as they follow from them."""
        three = {"base": Axis(self.base), "growth": Axis(self.growth), "head": Axis(self.head_channels)}
        sizes = self._derive_sizes(**default_sizes(three, width))
        granules = {name: axis.granule for name, axis in self.axes.items()}
        return {name: max(1, size // granules[name]) * granules[name] for name, size in sizes.items()} | {
            "classes": self.classes
        }

    def _count_ended(self, layer: int) -> int:
        """Return the number of ended scales after a layer: one ends in the first layer of each share but the first."""
        return max(0, layer - 1) // -(-self.blocks // self.scales)

    def _derive_sizes(self, base: int, growth: int, head: int) -> dict[str, int]:
        """Return the size of each axis but the classes, from the three numbers that width cuts."""
        sizes = {f"stem{s}": base << s for s in range(self.scales)}
        channels = base
        for layer in range(1, self.blocks + 1):
            before, after = self._count_ended(layer - 1), self._count_ended(layer)
            for s in range(after, self.scales):
                both = s > before  # two halves then
                added = (growth << s) >> both
                sizes |= {f"normal{before}_{s}": added, f"normal{before}_{s}_inner": added << s}
                if both:
                    sizes |= {f"down{before}_{s}": added, f"down{before}_{s}_inner": added << (s - 1)}
            channels += growth
            if after > before:
                channels = max(1, channels // 2)
                sizes |= {f"reduced{after}_{s}": channels << s for s in range(after, self.scales)}
        return {**sizes, "head": head}

    def _make_axes(self) -> dict[str, Axis]:
        granule = self.granule
        first = {"head": self.blocks}  # the first block with an axis
        for i, steps in enumerate(self.steps):
            for axis in (axis for step in steps for axis in step.added):
                first.setdefault(axis, i)
        sizes = self._derive_sizes(self.base, self.growth, self.head_channels)
        return {name: Axis(size, granule, block=first.get(name, 0)) for name, size in sizes.items()}

    def _build_stem(self, axes: Mapping[str, int]) -> nn.Module:
        channels = [self.channels, *(axes[f"stem{s}"] for s in range(self.scales))]
        return nn.ModuleList(
            nn.Sequential(*conv_norm_relu(channels[s], channels[s + 1], 3, 2 if s else 1, self.make_norm))
            for s in range(self.scales)
        )

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        return Layer(self, self.steps[i], axes)

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        channels = sum(axes[part] for part in self.steps[e - 1][-1].result)
        return Head(channels, axes["classes"], self.head_layers, self.make_norm, inner=axes["head"], stride=2)


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
        ModelError: A number is below 1, the norm unknown, or the group does not divide base and growth.
    """
    if min(layers, scales, base, growth, head_channels) < 1:
        raise ModelError(
            "layers, scales, base, growth and head_channels of an MSDNet must be at least 1.", key="layers"
        )
    return Msdnet(classes, channels, layers, scales, base, growth, head_channels, head_layers, norm, group)


SIZES = {
    "msdnet24": Preset(
        "MSDNet-24 (Huang et al., ICLR 2018) as in ScaleFL (CVPR 2023): 24 layers, 3 scales, 16 channels, growth 6.",
        {"layers": 24, "scales": 3, "base": 16, "growth": 6, "head_channels": 128, "head_layers": 2},
    ),
}
(msdnet24,) = make_presets(msdnet, SIZES)
