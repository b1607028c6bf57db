"""Prove a layout before anything is trained with it.

Everything is computed in float64 with every parameter redrawn, biases and norm affines too:
1. permuting an axis everywhere, by whole granules, must not change the full model's outputs;
2. every level's predicted shapes are those that the builder makes, its state loads strictly, and at full width its
   exits give what the full model gives there;
3. a small model of all axes cut at once, in four ways, equals the full model with its other channels at zero. Where the
   arithmetic depends on a size (a norm over channels, a scale by the head's size) the small model runs with the full
   one's numbers;
4. what a training forward computes from the parameters and keeps is, for a small model, its part of the full one's.

Each part is needed: layouts that are wrong pass the first two by luck, such as heads of a fixed number cut in granules
of a head's size. A right layout is exact to about 1e-13; a wrong one is off by 1e-3 and more. What no output depends
on, such as the biases of keys, is listed: nothing can be said of it, and nothing depends on it.
"""

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fleetfit.check.derived import check_derived_state, settle_derived_state
from fleetfit.check.full import TOLERANCE, Full, describe, named
from fleetfit.check.masked import WAYS, MaskedCut, compared, inert
from fleetfit.check.parting import by_axis, failing_axes, fixed_groups, in_words, parting
from fleetfit.check.shapes import check_depths, loaded, permuted
from fleetfit.errors import ModelError
from fleetfit.layout import Architecture, Layout, infer_layout, some_input
from fleetfit.seeds import isolate_rng, make_torch_rng
from fleetfit.submodel import Submodel
from fleetfit.tensor_defaults import isolate_torch_state

__all__ = ["TOLERANCE", "WIDTHS", "LayoutReport", "check_layout", "named", "some_exits", "some_levels"]

_BATCH = 4
WIDTHS = (0.3, 0.5, 0.8, 1.0)
"""The widths of `some_levels`."""
_MOST_EXITS = 6  # exits that are checked where the caller names no layout
_MOST_LISTED = 6
_PATIENCE_S = 3.0  # a proof that takes longer says what it does
_MOST_REMEMBERED = 64
_SMALL = 100_000  # elements of a state
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
        cuts: By what was kept, how far the small model was from the masked full one.
        numbers: Whether that needed the full model's size-dependent numbers.
        not_proved: Axes that are not proved, and what the architecture says of them; empty for a whole proof.
        differs: What is known of the difference, where an axis is not proved.
        inert: Tensors that move no output, so that nothing can be said of their layout.
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
        return "\n".join([*lines, *(f"  {line}" for line in self.on_cuts())])

    def on_cuts(self) -> list[str]:
        """Return what is known of small models beside the masked full one, in sentences."""
        said = []
        if self.not_proved:
            said.append(self.warning)
        elif self.cuts:
            found = ", ".join(f"{how}: {error:.0e}" for how, error in self.cuts.items())
            which = ", with its size-dependent numbers" if self.numbers else ""
            said.append(f"small models equal the full one with its other channels at zero{which} ({found})")
        if self.inert:
            more = f" and {len(self.inert) - _MOST_LISTED} more" if len(self.inert) > _MOST_LISTED else ""
            said.append(
                f"cannot be proved, since no output depends on it: {', '.join(self.inert[:_MOST_LISTED])}{more}"
            )
        return said

    @property
    def warning(self) -> str:
        """What must be seen before anything is trained; empty for a whole proof."""
        axes = ", ".join(f'"{axis}"' for axis in self.not_proved)
        why = next(iter(self.not_proved.values()), "")
        return f"The layout is NOT PROVED for {axes} (size_dependent: {why}): {self.differs}." if axes else ""


@isolate_torch_state()
def check_layout(
    architecture: Architecture,
    layout: Layout | None = None,
    levels: Sequence[Submodel] = (),
    input_shape: Sequence[int] | None = None,
    example: Tensor | None = None,
    say: Say | None = None,
    seed: int = 0,
) -> LayoutReport:
    """Prove a layout, or say where it is wrong.

    Args:
        architecture: The model family.
        layout: Its layout; by default inferred with up to six exits.
        levels: Sub-models to build; by default four of different width and depth.
        input_shape: Shape of one sample, of which random ones are drawn.
        example: A batch to use instead.
        say: Called with what is being done where it takes more than a moment.
        seed: Of parameters, inputs and channels.

    Returns:
        A report that prints readably. Without `example` it is made once in a process for the same architecture (by its
        parameters, where it compares by them), layout, levels and shape.

    Raises:
        ModelError: The layout is wrong; the message names the axis and the tensors to look at. Or it could not be
            proved, and the architecture does not say why (`size_dependent`).
    """
    if example is None and input_shape is None:
        raise ModelError(
            "check_layout needs input_shape, the shape of one sample, or an example batch.", key="input_shape"
        )
    shape = tuple(input_shape or ())
    key = None if example is not None else _key(architecture, layout, levels, (*shape, -1, seed))
    if key is not None and key in _reports:
        return _reports[key]
    with isolate_rng(torch.device("cpu")):  # building draws numbers, and nothing else may notice
        layout = (layout or infer_layout(architecture, some_exits(architecture))).complete
        rng = make_torch_rng("check_layout", seed)
        x = some_input(architecture, shape, _BATCH, rng) if example is None else example
        with _threads_for(layout):
            full = Full(architecture, layout, x, rng, seed)
            report = _proved(full, tuple(levels) or some_levels(architecture, layout), say)
    if key is not None:
        while len(_reports) >= _MOST_REMEMBERED:
            _reports.pop(next(iter(_reports)))
        _reports[key] = report
    return report


@contextlib.contextmanager
def _threads_for(layout: Layout) -> Iterator[None]:
    """Compute small models on one thread: many take longer to agree than one to compute, most so on a busy machine."""
    before = torch.get_num_threads()
    if sum(map(math.prod, layout.shapes({}, layout.exits).values())) < _SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _key(architecture: Any, layout: Layout | None, levels: Sequence[Submodel], more: tuple[int, ...]) -> Any:
    """Return what a report depends on, or None for an architecture that cannot be told from another."""
    ours: tuple[Any, ...] = ()
    if layout is not None:
        parts = (layout.axes, layout.tensors, layout.aliases, layout.base)
        ours = (layout.exits, *(tuple(part.items()) for part in parts))
    key = (architecture, getattr(architecture, "size_dependent", ""), ours, tuple(levels), more)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _proved(full: Full, levels: Sequence[Submodel], say: Say | None) -> LayoutReport:
    layout, until = full.layout, time.monotonic() + _PATIENCE_S

    def now(what: str) -> None:
        if say is not None and time.monotonic() > until:
            say(f"Proving the layout of {type(full.architecture).__name__}: {what}")

    kept = settle_derived_state(full)
    permutation = permuted(full, now)
    now("a model of each level")
    for level in levels:
        loaded(full, level)
    check_depths(full, [level.exits for level in levels])
    cuts = compared(full, levels, now)
    if kept:
        now("the state that training forwards change")
    check_derived_state(full, kept, cuts)
    now("what moves no output")
    still = inert(full)
    failed = [cut for cut in cuts if not cut.error <= full.tolerance]
    not_proved, differs = _unproved(full, failed) if failed else ({}, "")
    axes = {
        name: f"{axis.size} channels in granules of {axis.granule}" + ("" if axis.scaled else ", never cut")
        for name, axis in layout.axes.items()
    }
    return LayoutReport(
        architecture=named(full.architecture),
        axes=axes,
        permutation=permutation,
        levels=tuple(map(describe, levels)),
        cuts={cut.how: cut.error for cut in cuts},
        numbers=any(cut.way != WAYS[0] for cut in cuts),
        not_proved=not_proved,
        differs=differs,
        inert=still,
    )


def _unproved(full: Full, failed: Sequence[MaskedCut]) -> tuple[Mapping[str, str], str]:
    """Return the axes that are not proved, with the architecture's reason, and what is known.

    Raises:
        ModelError: The architecture gives no reason.
    """
    axes, worst = failing_axes(full), max(failed, key=lambda cut: cut.error)
    text = in_words(full, worst, axes, parting(full, worst))
    why = getattr(full.architecture, "size_dependent", "")
    if why:
        return by_axis(axes, full.layout, why), text
    raise ModelError(
        f"the layout could not be proved: {text}. Look at what is declared for the tensors there, at granules (do "
        "heads, or groups of a norm or a convolution, keep their members when the axis is cut?), and at axes that are "
        "one. Where a narrow model is meant to compute something else, say so in the architecture: "
        f'size_dependent = "why".{fixed_groups(full, worst, axes)}'
    )


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
