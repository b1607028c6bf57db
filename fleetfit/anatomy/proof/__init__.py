"""Prove a layout before anything is trained with it.

Everything is computed in float64 with every parameter redrawn, biases and norm affines too. The parts are
`permutation`, `levels`, `masked` with `replay`, and `derived`; each module says what it compares.

Each part is needed: layouts that are wrong pass the first two by luck, such as heads of a fixed number cut in granules
of a head's size. A right layout is exact to about 1e-13; a wrong one is off by 1e-3 and more. Tensors that no output
depends on, such as the biases of keys, are listed: their layout cannot be proved, and does not matter.
"""

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fleetfit.anatomy import Architecture, Layout, infer_layout, make_input
from fleetfit.anatomy.proof.derived import check_derived_state, settle_derived_state
from fleetfit.anatomy.proof.full import (
    TOLERANCE as TOLERANCE,
    FullModel,
    describe_level,
    format_architecture as format_architecture,
)
from fleetfit.anatomy.proof.levels import check_depths, load_level
from fleetfit.anatomy.proof.masked import (
    WAYS,
    MaskedCut,
    compare_cuts,
    describe_failure,
    find_failing_axes,
    find_unused_tensors,
    suggest_group_axis,
)
from fleetfit.anatomy.proof.permutation import check_permutations
from fleetfit.errors import ModelError, join_some
from fleetfit.machine import isolate_torch_state, use_threads
from fleetfit.seeds import isolate_rng, make_torch_rng
from fleetfit.submodel import Submodel

_BATCH = 4
WIDTHS = (0.3, 0.5, 0.8, 1.0)
"""The widths of `make_sample_levels`."""
_MAX_EXITS = 6  # exits that are checked where the caller names no layout
_PATIENCE_S = 1.5  # of silence, before a step is named
_MAX_REMEMBERED = 64
_SMALL = 100_000  # elements of a state that is computed on one thread
_reports: dict[Hashable, "LayoutReport"] = {}

Say = Callable[[str], None]


@dataclass(frozen=True)
class LayoutReport:
    """What was proved.

    Attributes:
        architecture: The architecture, as text.
        axes: Of each axis its size and granule, as text.
        permutation: By axis, how far a permutation moved the outputs; axes of one granule are absent.
        levels: The levels whose shapes and states fit, as text.
        cuts: How far each small model was from the masked full one, by the channels that were kept.
        numbers: Whether that needed the full model's size-dependent numbers.
        not_proved: Axes that are not proved, and the architecture's reason; empty for a whole proof.
        differs: How the small models differ, where an axis is not proved.
        inert: Tensors that move no output, so that their layout cannot be proved.
    """

    architecture: str
    axes: Mapping[str, str]
    permutation: Mapping[str, float]
    levels: tuple[str, ...]
    cuts: Mapping[str, float] = field(default_factory=dict)
    numbers: bool = False
    not_proved: Mapping[str, str] = field(default_factory=dict)
    differs: str = ""
    inert: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.architecture}: the layout is {'NOT PROVED' if self.not_proved else 'right'}."]
        for axis, text in self.axes.items():
            moved = self.permutation.get(axis)
            proof = "nothing to permute" if moved is None else f"permuting it moves outputs by {moved:.0e}"
            lines.append(f"  axis {axis}: {text}; {proof}")
        lines += [f"  level with {level}: shapes as predicted, state loads" for level in self.levels]
        return "\n".join([*lines, *(f"  {line}" for line in self.describe_cuts())])

    def describe_cuts(self) -> list[str]:
        """Return sentences on the small models beside the masked full one."""
        sentences = []
        if self.not_proved:
            sentences.append(self.warning)
        elif self.cuts:
            errors = ", ".join(f"{how}: {error:.0e}" for how, error in self.cuts.items())
            which = ", with its size-dependent numbers" if self.numbers else ""
            sentences.append(f"small models equal the full one with its other channels at zero{which} ({errors})")
        if self.inert:
            sentences.append(f"cannot be proved, since no output depends on it: {join_some(self.inert, 6)}")
        return sentences

    @property
    def warning(self) -> str:
        """A sentence on the axes that are not proved; empty for a whole proof."""
        axes = ", ".join(f'"{axis}"' for axis in self.not_proved)
        reason = next(iter(self.not_proved.values()), "")
        return f"The layout is NOT PROVED for {axes} (size_dependent: {reason}): {self.differs}." if axes else ""


@isolate_torch_state()
def check_layout(
    architecture: Architecture,
    layout: Layout | None = None,
    levels: Sequence[Submodel] = (),
    input_shape: Sequence[int] | None = None,
    example: Tensor | None = None,
    say: Say | None = None,
    seed: int = 0,
    proved: LayoutReport | None = None,
) -> LayoutReport:
    """Prove a layout, or say where it is wrong.

    Args:
        architecture: The model family.
        layout: Its layout; by default inferred with up to six exits.
        levels: Sub-models to build; by default four of different width and depth.
        input_shape: Shape of one sample, of which random ones are drawn.
        example: A batch to use instead.
        say: Called with each step of a proof that takes more than a second or two.
        seed: Of parameters, inputs and channels.
        proved: The proof of this architecture with all its exits. Then only the levels are checked: a forward that
            compares sizes may take another path at theirs than at those of the proof.

    Returns:
        `proved`, or a report that prints readably. Without `example` it is made once in a process for the same
        architecture (by its parameters, where it compares by them), layout, levels and shape.

    Raises:
        ModelError: The layout is wrong; the message names the axis and the tensors to look at. Or it could not be
            proved, and the architecture does not say why (`size_dependent`).
    """
    if example is None and input_shape is None:
        raise ModelError(
            "check_layout needs input_shape, the shape of one sample, or an example batch.", key="input_shape"
        )
    shape = tuple(input_shape or ())
    key = None if example is not None else _make_key(architecture, layout, levels, (*shape, -1, seed, proved is None))
    if key is not None and key in _reports:
        return _reports[key]
    with isolate_rng(torch.device("cpu")):  # building draws numbers, and nothing else may notice
        sample_shape = shape if example is None else tuple(example.shape[1:])
        layout = layout or infer_layout(architecture, select_exits(architecture), input_shape=sample_shape)
        layout = layout.complete
        rng = make_torch_rng("check_layout", seed)
        x = make_input(architecture, shape, _BATCH, rng) if example is None else example
        is_small = sum(map(math.prod, layout.shapes({}, layout.exits).values())) < _SMALL
        # small models take longer on more threads, most so on a busy machine
        with use_threads(1) if is_small else contextlib.nullcontext():
            full = FullModel(architecture, layout, x, rng, seed)
            report = _prove(full, tuple(levels) or make_sample_levels(architecture, layout), say, proved)
    if key is not None:
        while len(_reports) >= _MAX_REMEMBERED:
            _reports.pop(next(iter(_reports)))
        _reports[key] = report
    return report


def _make_key(architecture: Any, layout: Layout | None, levels: Sequence[Submodel], more: tuple[int, ...]) -> Any:
    """Return the key of a report, or None for an architecture that cannot be hashed."""
    layout_key: tuple[Any, ...] = ()
    if layout is not None:
        parts = (layout.axes, layout.tensors, layout.aliases, layout.base)
        layout_key = (layout.exits, *(tuple(part.items()) for part in parts))
    key = (architecture, getattr(architecture, "size_dependent", ""), layout_key, tuple(levels), more)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def make_reporter(work: str, say: Say | None) -> Say:
    """Return a function that says which step of some work comes next, after a time without a sentence."""
    last = time.monotonic()

    def now(step: str) -> None:
        nonlocal last
        if say is not None and time.monotonic() - last > _PATIENCE_S:
            last = time.monotonic()
            say(f"{work}: {step}")

    return now


def _prove(full: FullModel, levels: Sequence[Submodel], say: Say | None, proved: LayoutReport | None) -> LayoutReport:
    layout = full.layout
    name = type(getattr(full.architecture, "net", full.architecture)).__name__  # the instance's, where it is derived
    now = make_reporter(f"Proving the layout of {name}", say)
    if proved is None:
        derived, permutation = settle_derived_state(full), check_permutations(full, now)
    now("a model of each level")
    for level in levels:
        if level.exits != layout.exits or {**layout.full_sizes, **level.sizes} != layout.full_sizes:
            load_level(full, level)  # the full model is one
    check_depths(full, [level.exits for level in levels])
    cuts = compare_cuts(full, levels, now, of_levels=proved is not None)
    failed = [cut for cut in cuts if not cut.error <= full.tolerance]
    if proved is not None:
        for cut in failed:
            raise ModelError(
                f"with {cut.how}, the model computes something else than the full model with its other channels at "
                f"zero: they differ by {cut.error:.2g} of the outputs' size. Does forward compare sizes, as in x.shape "
                "== y.shape? Sizes that differ in the full model may be equal in a level. Decide by what does not "
                "depend on the width, such as the number of the block.",
                key="model",
            )
        return proved
    if derived:
        now("the state that training forwards change")
    check_derived_state(full, derived, cuts)
    now("the tensors that move no output")
    unused = find_unused_tensors(full)
    not_proved, differs = _excuse_failure(full, failed) if failed else ({}, "")
    axes = {
        name: f"{axis.size} channels in granules of {axis.granule}" + ("" if axis.scaled else ", never cut")
        for name, axis in layout.axes.items()
    }
    return LayoutReport(
        architecture=format_architecture(full.architecture),
        axes=axes,
        permutation=permutation,
        levels=tuple(map(describe_level, levels)),
        cuts={cut.how: cut.error for cut in cuts},
        numbers=any(cut.way != WAYS[0] for cut in cuts),
        not_proved=not_proved,
        differs=differs,
        inert=unused,
    )


def _excuse_failure(full: FullModel, failed: Sequence[MaskedCut]) -> tuple[Mapping[str, str], str]:
    """Return the axes that are not proved, with the architecture's reason, and a description of the failure."""
    axes, worst = find_failing_axes(full), max(failed, key=lambda cut: cut.error)
    failure = describe_failure(full, worst, axes)
    reason = getattr(full.architecture, "size_dependent", "")
    if reason:
        unproved = axes or [name for name, axis in full.layout.axes.items() if axis.scaled]
        return dict.fromkeys(unproved, reason), failure
    raise ModelError(
        f"the layout could not be proved: {failure}. Look at granules (do heads, or "
        "groups of a norm or a convolution, keep their members when the axis is cut?), and at axes that are "
        'one. If a narrow model is meant to compute something else, give the reason: size_dependent = "why" in the '
        f"architecture.{suggest_group_axis(full, worst, axes)}"
    )


def select_exits(architecture: Architecture) -> tuple[int, ...]:
    """Return up to six positions, evenly spread, the last one among them."""
    positions = tuple(architecture.positions)
    step = max(1, -(-len(positions) // _MAX_EXITS))
    return positions[::-1][::step][::-1]


def make_sample_levels(architecture: Architecture, layout: Layout) -> list[Submodel]:
    """Return four levels of fixed widths whose depths go up to each quarter of the layout's exits."""
    levels = []
    for i, width in enumerate(WIDTHS):
        exits = layout.exits[: max(1, len(layout.exits) * (i + 1) // 4)]
        sizes = architecture.sizes(width)
        levels.append(Submodel({axis: range(sizes[axis]) for axis in layout.axes}, exits))
    return levels
