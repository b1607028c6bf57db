"""Prove a layout before anything is trained with it.

Everything is computed in float64 with every parameter redrawn, biases and norm affines too:
1. permuting an axis everywhere, by whole granules, must not change the full model's outputs;
2. every level's predicted shapes are those that the builder makes, and its state loads strictly;
3. (on request) a sub-model with random channels equals the full model with the other channels zeroed and each norm over
   channels restricted to the kept ones. Models whose arithmetic depends on a size are exempt: leave this part out.

A right layout is exact to about 1e-15 (2e-7 where a module computes in fp32 inside); a wrong one is off by 0.06 and
more.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from fleetfit.check.channels import random_channels, unreachable
from fleetfit.check.full import TOLERANCE, Full, describe, named
from fleetfit.check.permute import permuted
from fleetfit.check.shapes import loaded
from fleetfit.errors import ModelError
from fleetfit.layout import Architecture, Layout, infer_layout, some_input
from fleetfit.seeds import torch_rng
from fleetfit.submodel import Submodel

__all__ = ["TOLERANCE", "WIDTHS", "LayoutReport", "check_layout", "named", "some_exits", "some_levels"]

_BATCH = 4
WIDTHS = (0.3, 0.5, 0.8, 1.0)
"""The widths of `some_levels`."""
_MOST_EXITS = 6  # exits that are checked where the caller names no layout


@dataclass(frozen=True)
class LayoutReport:
    """What was proved.

    Attributes:
        architecture: The architecture, as text.
        axes: Of each axis its size and granule, as text.
        permutation: By axis, how far a permutation moved the outputs; axes of one granule are absent.
        levels: The levels whose shapes and states fit, as text.
        channels: By level, how far random channels were from the masked full model; empty when that part was not run.
        exempt: Why the part with random channels was not run, if it was not.
    """

    architecture: str
    axes: Mapping[str, str]
    permutation: Mapping[str, float]
    levels: tuple[str, ...]
    channels: Mapping[str, float] = field(default_factory=dict)
    exempt: str = ""

    def __str__(self) -> str:
        lines = [f"{self.architecture}: the layout is right."]
        for axis, text in self.axes.items():
            moved = self.permutation.get(axis)
            proof = "nothing to permute" if moved is None else f"permuting it moves outputs by {moved:.0e}"
            lines.append(f"  axis {axis}: {text}; {proof}")
        for level in self.levels:
            proof = f"; random channels differ by {self.channels[level]:.0e}" if level in self.channels else ""
            lines.append(f"  level with {level}: shapes as predicted, state loads{proof}")
        if self.exempt:
            lines.append(f"  random channels: not checked, {self.exempt}")
        return "\n".join(lines)


def check_layout(
    architecture: Architecture,
    layout: Layout | None = None,
    levels: Sequence[Submodel] = (),
    channels_part: bool = False,
    input_shape: Sequence[int] | None = None,
    example: Tensor | None = None,
) -> LayoutReport:
    """Prove a layout, or say where it is wrong.

    Args:
        architecture: The model family.
        layout: Its layout; by default inferred with up to six exits.
        levels: Sub-models to build; by default four of different width and depth.
        channels_part: Also compare random channels with the masked full model.
        input_shape: Shape of one sample, of which random ones are drawn.
        example: A batch to use instead.

    Returns:
        A report that prints readably. Without `layout` and `example` it is cached by the architecture's parameters.

    Raises:
        ModelError: The layout is wrong; the message names the axis and the tensors to look at.
    """
    if example is None and input_shape is None:
        raise ModelError("check_layout needs input_shape, the shape of one sample, or an example batch.")
    shape = tuple(input_shape or ())
    if layout is None and example is None and _can_hash(architecture):
        return _remembered(cast(Hashable, architecture), tuple(levels), channels_part, shape)
    return _checked(architecture, layout, levels, channels_part, shape, example)


def _can_hash(architecture: object) -> bool:
    try:
        hash(architecture)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def _remembered(
    architecture: Hashable, levels: tuple[Submodel, ...], channels_part: bool, input_shape: tuple[int, ...]
) -> LayoutReport:
    return _checked(cast(Architecture, architecture), None, levels, channels_part, input_shape, None)


def _checked(
    architecture: Architecture,
    layout: Layout | None,
    levels: Sequence[Submodel],
    channels_part: bool,
    input_shape: tuple[int, ...],
    example: Tensor | None,
) -> LayoutReport:
    layout = (layout or infer_layout(architecture, some_exits(architecture))).complete
    rng = torch_rng("check_layout")
    if example is None:
        example = some_input(architecture, input_shape, _BATCH, rng)
    full = Full(architecture, layout, example, rng)
    permutation = {axis: moved for axis in layout.axes if (moved := permuted(full, axis)) is not None}
    levels = levels or some_levels(architecture, layout)
    for level in levels:
        loaded(full, level)
    exempt = unreachable(full) if channels_part else "it was not asked for"
    channels = {} if exempt else {describe(level): random_channels(full, level) for level in levels}
    axes = {
        name: f"{axis.size} channels in granules of {axis.granule}" + ("" if axis.scaled else ", never cut")
        for name, axis in layout.axes.items()
    }
    return LayoutReport(named(architecture), axes, permutation, tuple(map(describe, levels)), channels, exempt)


def some_exits(architecture: Architecture) -> tuple[int, ...]:
    """Return up to six positions, evenly spread, the last one among them."""
    positions = tuple(architecture.positions)
    step = max(1, -(-len(positions) // _MOST_EXITS))
    return positions[::-1][::step][::-1]


def some_levels(architecture: Architecture, layout: Layout) -> list[Submodel]:
    """Return four levels of fixed widths whose depths go up to each quarter of the layout's exits."""
    found = []
    for i, width in enumerate(WIDTHS):
        exits = layout.exits[: max(1, len(layout.exits) * (i + 1) // 4)]
        sizes = architecture.sizes(width)
        found.append(Submodel({axis: range(sizes[axis]) for axis in layout.axes}, exits))
    return found
