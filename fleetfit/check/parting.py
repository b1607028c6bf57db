"""Where a layout could not be proved: the axes that fail alone, and the modules where the two models part."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.check.full import Full, KeptPlaces, difference
from fleetfit.check.masked import WAYS, CannotRun, Masked, MaskedCut, compare, cuts_of, masked, outputs_of
from fleetfit.check.replay import plain_attention
from fleetfit.layout import Layout, same_number

_MOST_TRIED = 4096  # ways to find a small output in the full one


def failing_axes(full: Full) -> list[str]:
    """Return the axes that fail when they alone are cut."""
    layout = full.layout
    scaled = [name for name, axis in layout.axes.items() if axis.scaled]
    return [name for name in scaled if any(_fails(full, cut) for cut in cuts_of(layout, full.seed, name))]


def _fails(full: Full, cut: MaskedCut) -> bool:
    try:
        compare(full, cut)
    except CannotRun:
        return False
    return cut.error > full.tolerance


def parting(full: Full, cut: MaskedCut) -> str:
    """Return in words the first module whose output the small model does not have, and the last one before it.

    Everything counts that is equal in one of the ways, with or without the full model's numbers.
    """
    try:
        beside = masked(full, cut.channels)
        runs = []
        for way in WAYS:
            found: list[tuple[str, Tensor]] = []
            with _Outputs(beside.module, found):
                outputs_of(full, beside, way)
            runs.append(found)
    except CannotRun:
        return ""
    theirs: list[tuple[str, Tensor]] = []
    full.load(beside.places.masked(full.state, beside.faint))
    with plain_attention(), _Outputs(full.module, theirs):
        full.run()
    return max((_first_apart(full, beside, ours, theirs) for ours in runs), default=(0, ""))[1]


def _first_apart(
    full: Full, beside: Masked, ours: Sequence[tuple[str, Tensor]], theirs: Sequence[tuple[str, Tensor]]
) -> tuple[int, str]:
    """Return how many outputs are equal, and where the first is that is not."""
    before = ""
    for i, ((name, small), (other, large)) in enumerate(zip(ours, theirs, strict=False)):
        if name != other:
            break
        if not _part_of(small, large, full.layout, beside.places, full.tolerance):
            return i, f'first at "{name}"' + (f' (equal up to "{before}")' if before else "")
        before = name
    return min(len(ours), len(theirs)), f'after "{before}"' if before else ""


def _part_of(small: Tensor, large: Tensor, layout: Layout, places: KeptPlaces, tolerance: float) -> bool:
    """Tell whether a small output is the kept part of a large one, whichever axes its dimensions follow."""
    if small.dim() != large.dim():
        return False
    choices: list[list[Tensor | None]] = []
    for ours, theirs in zip(small.shape, large.shape, strict=True):
        choices.append([None] if ours == theirs else _candidates(ours, theirs, layout, places))
    for choice in itertools.islice(itertools.product(*choices), _MOST_TRIED):
        part = large
        for d, kept in enumerate(choice):
            part = part if kept is None else part.index_select(d, kept)
        if difference([small], [part]) <= max(tolerance, 1e-9):
            return True
    return False


def _candidates(ours: int, theirs: int, layout: Layout, places: KeptPlaces) -> list[Tensor | None]:
    """Return the ways in which so many of so many places may be kept, as tensors and axes have them."""
    found: dict[tuple[int, ...], Tensor] = {}
    vectors = [kept for dim, kept in places.kept.items() if places.full[dim] == theirs and len(kept) == ours]
    for name, kept in places.channels.items():
        axis = layout.axes[name]
        channels = torch.tensor(list(kept))
        if (len(channels), axis.size) == (ours, theirs):
            vectors.append(channels)
        if (len(channels) // axis.granule, axis.size // axis.granule) == (ours, theirs):
            vectors.append(channels[:: axis.granule] // axis.granule)
    for vector in vectors:
        found.setdefault(tuple(vector.tolist()), vector)
    return list(found.values())


class _Outputs:
    """While it is open, notes what each module gives that has parameters of its own or is made of nothing else."""

    def __init__(self, module: nn.Module, found: list[tuple[str, Tensor]]) -> None:
        self.module, self.found = module, found
        self.hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, part in self.module.named_modules():
            own = next(part.parameters(recurse=False), None) is not None
            if name and (own or next(part.children(), None) is None):
                self.hooks.append(part.register_forward_hook(lambda _, __, out, name=name: self._note(name, out)))

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, name: str, out: Any) -> None:
        tensor = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            self.found.append((name, tensor.detach().clone()))


def fixed_groups(full: Full, failed: MaskedCut, axes: Sequence[str]) -> str:
    """Return which module keeps its number of groups or heads when the axes are cut, and what to do; or ""."""
    try:
        small = masked(full, failed.channels).module
    except CannotRun:
        return ""
    return same_number(full.layout, full.module, small, axes or list(full.layout.axes))


def in_words(full: Full, failed: MaskedCut, axes: Sequence[str], places: str) -> str:
    """Return what is known of a failure, without a verdict."""
    alone = ", ".join(f'"{axis}"' for axis in axes)
    who = f"{'axis' if len(axes) == 1 else 'axes'} {alone} {'fails' if len(axes) == 1 else 'fail'} alone"
    who = who if axes else "no axis fails alone, only several together"
    return (
        f"with {failed.how} kept, the small model and the full one with its other channels at zero differ by "
        f"{failed.error:.2g} of the outputs' size, with the full model's size-dependent numbers too: {who}"
        + (f"; the two part {places}" if places else "")
    )


def by_axis(axes: Sequence[str], layout: Layout, why: str) -> Mapping[str, str]:
    """Return why each axis is not proved: those that fail alone, or all that are cut."""
    return dict.fromkeys(axes or [name for name, axis in layout.axes.items() if axis.scaled], why)
