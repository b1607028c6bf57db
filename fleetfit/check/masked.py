"""Part 3 of the proof: a sub-model equals the full model whose other channels are zero.

All axes are cut at once, in four ways: all but one granule of each; one granule of each; a size between, as a prefix
and at random. The first two find what sizes between let pass (an even size may keep whole heads by luck). The small
model is built, loaded with its part of the state, and compared with the full one; where they differ, it runs again
with the size-dependent numbers of the full model's run (`fleetfit.check.replay`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fleetfit.check.full import Full, KeptPlaces, describe, difference, in_float64, load
from fleetfit.check.replay import Trace, plain_attention, recorded, replayed
from fleetfit.errors import ModelError
from fleetfit.layout import Axis, Layout, State, build_module, named_tensors, outputs
from fleetfit.seeds import make_numpy_rng, make_torch_rng
from fleetfit.submodel import Channels, Submodel, random

# ---- small and masked ----------------------------------------------------------------------------------------------

_FAINT = 1e-12  # what is left of masked channels where zeros give no numbers (a weight norm divides by them)
WAYS = ("as it is", "with the full model's numbers", "with the full model's numbers and statistics")
"""How a small model may equal the masked full one."""


@dataclass
class MaskedCut:
    """A cut of all axes, or of one.

    Attributes:
        how: What is kept, in words.
        channels: Kept channels by axis.
        error: How far the small model is from the masked full one.
        way: With which of the full model's numbers.
    """

    how: str
    channels: Mapping[str, Channels]
    error: float = float("inf")
    way: str = WAYS[0]


@dataclass
class Masked:
    """The masked full model's run, and the small model beside it.

    Attributes:
        places: What is kept.
        module: The small model, loaded.
        expected: The full model's outputs.
        trace: The full model's size-dependent numbers.
        faint: What was left of the masked channels.
    """

    places: KeptPlaces
    module: nn.Module
    expected: list[Tensor]
    trace: Trace
    faint: float
    tried: dict[str, float] = field(default_factory=dict)


class CannotRun(Exception):
    """A model of these sizes cannot be built or run, which says nothing of the layout."""


def compared(full: Full, levels: Sequence[Submodel], now: Callable[[str], None]) -> list[MaskedCut]:
    """Compare the four cuts of all axes; where one does not run, the levels' sizes with random channels.

    Raises:
        ModelError: A level's sizes do not run.
    """
    cuts, run_all = [], True
    way = WAYS[0]
    for cut in cuts_of(full.layout, full.seed):
        now(f"a small model beside the full one, with {cut.how}")
        try:
            compare(full, cut, way)
        except CannotRun:
            run_all = False
            continue
        way = cut.way
        cuts.append(cut)
    for cut in () if run_all else _of_levels(full.layout, full.seed, levels):
        try:
            compare(full, cut, way)
        except CannotRun as error:
            raise ModelError(f"a model of a level's sizes, {cut.how}, does not run: {error}") from error
        way = cut.way
        cuts.append(cut)
    return cuts


def compare(full: Full, cut: MaskedCut, first: str = WAYS[0]) -> None:
    """Compare a cut's small model with the masked full one; note how far they are apart.

    Args:
        full: The full model.
        cut: The cut.
        first: The way to try first, that of another cut.

    Raises:
        CannotRun: The small model cannot be built or run.
    """
    beside = masked(full, cut.channels)
    for way in sorted(WAYS, key=lambda w: w != first):
        error = difference(outputs_of(full, beside, way), beside.expected)
        beside.tried[way] = error
        if error < cut.error:
            cut.error, cut.way = error, way
        if error <= full.tolerance:
            return


def masked(full: Full, channels: Mapping[str, Channels]) -> Masked:
    """Build and load the small model of some channels, and run the masked full one.

    Raises:
        CannotRun: The small model cannot be built.
    """
    places = KeptPlaces(full.layout, channels)
    module = build_small(full, places)
    faint = 0.0
    with plain_attention():
        while True:
            expected: list[Tensor] = []
            full.load(places.masked(full.state, faint))
            trace = recorded(full.module, lambda: expected.extend(full.run()))  # noqa: B023 called before it goes on
            if faint or all(bool(torch.isfinite(out).all()) for out in expected):
                return Masked(places, module, expected, trace, faint)
            faint = _FAINT


def outputs_of(full: Full, beside: Masked, way: str) -> list[Tensor]:
    """Return the small model's outputs, computed in one of the ways.

    Raises:
        CannotRun: It does not run.
    """
    module, numbers = beside.module, way != WAYS[0]
    context = replayed(module, beside.trace, way == WAYS[2]) if numbers else contextlib.nullcontext()
    with torch.no_grad(), plain_attention(), in_float64(), context:
        try:
            return outputs(module, full.x)
        except Exception as error:
            raise CannotRun(str(error)) from error


def build_small(full: Full, places: KeptPlaces) -> nn.Module:
    """Build the small model of some channels, and load its part of the state.

    Raises:
        CannotRun: It cannot be built, or the state does not fit.
    """
    layout = full.layout
    try:
        module = build_module(full.architecture, {**layout.full_sizes, **places.sizes}, layout.exits).eval().double()
    except ModelError as error:
        raise CannotRun(str(error)) from error
    built = {name: tuple(t.shape) for name, t, _ in named_tensors(module) if name not in full.base}
    state = places.cut(full.state)
    odd = [name for name, tensor in state.items() if built.get(name) != tuple(tensor.shape)]
    if odd:
        raise CannotRun(f'"{odd[0]}" is {built.get(odd[0])}, not {tuple(state[odd[0]].shape)}')
    load_small(full, module, state)
    return module


def load_small(full: Full, module: nn.Module, state: State) -> None:
    """Load a state into a small model, and what is never trained."""
    load(module, {**{n: t for n, t in full.base.items() if n in dict(module.state_dict())}, **state})


# ---- which channels ------------------------------------------------------------------------------------------------


def cuts_of(layout: Layout, seed: int, only: str = "") -> Iterator[MaskedCut]:
    """Yield the four cuts, of all axes at once or of one."""
    for how, count, prefix in (
        ("all but a granule of each axis", _all_but_one, False),
        ("one granule of each axis", _one, False),
        ("the first channels of each axis", _between, True),
        ("some channels of each axis", _between, False),
    ):
        cut = {name: a for name, a in layout.axes.items() if a.scaled and (not only or name == only)}
        sizes = {name: count(name, axis, seed) * axis.granule for name, axis in cut.items()}
        yield MaskedCut(how, {name: _kept(name, axis, sizes[name], prefix, how, seed) for name, axis in cut.items()})


def _of_levels(layout: Layout, seed: int, levels: Sequence[Submodel]) -> Iterator[MaskedCut]:
    """Yield the levels' sizes with random channels."""
    seen = []
    for level in levels:
        sizes = {axis: n for axis, n in level.sizes.items() if layout.axes[axis].scaled}
        if sizes not in seen and any(n < layout.axes[axis].size for axis, n in sizes.items()):
            seen.append(sizes)
            channels = {name: _kept(name, layout.axes[name], n, False, "level", seed) for name, n in sizes.items()}
            yield MaskedCut(f"random channels of the level with {describe(level)}", channels)


def _all_but_one(name: str, axis: Axis, seed: int) -> int:
    return max(1, axis.size // axis.granule - 1)


def _one(name: str, axis: Axis, seed: int) -> int:
    return 1


def _between(name: str, axis: Axis, seed: int) -> int:
    """Return a number of granules between two and two less than all, where there are so many."""
    granules = axis.size // axis.granule
    least, most = min(2, granules), max(1, granules - 2)
    return int(make_numpy_rng("check_layout", seed, "between", name).integers(min(least, most), max(least, most) + 1))


def _kept(name: str, axis: Axis, n: int, prefix: bool, how: str, seed: int) -> Channels:
    if prefix or axis.ordered or not axis.scaled:
        return range(n)
    return random(axis, n, 0, 0, make_numpy_rng("check_layout", seed, how, name))


# ---- tensors that move no output -----------------------------------------------------------------------------------

_NOTHING = 1e-12  # of the largest effect of an element


def inert(full: Full) -> tuple[str, ...]:
    """Return the cut tensors, or stretches of them, without effect on any output, such as the biases of keys."""
    load(full.module, {**full.base, **full.state})
    own = {name: tensor for name, tensor, is_parameter in named_tensors(full.module) if is_parameter}
    names = [name for name in full.layout.tensors if name in own and _is_cut(full.layout, name)]
    rng = make_torch_rng("check_layout", full.seed, "inert")
    before = [own[name].requires_grad for name in names]
    try:
        with torch.enable_grad(), plain_attention(), in_float64():
            for name in names:
                own[name].requires_grad_(True)
            found = outputs(full.module, full.x)
            total = torch.stack([(out * torch.randn(out.shape, generator=rng).to(out)).sum() for out in found]).sum()
            effects = torch.autograd.grad(total, [own[name] for name in names], allow_unused=True)
    except (RuntimeError, NotImplementedError):  # a model without gradients has nothing to train
        return ()
    finally:
        for name, needed in zip(names, before, strict=True):
            own[name].requires_grad_(needed)
    moved = {
        name: torch.zeros_like(own[name]) if effect is None else (effect * own[name].detach()).abs()
        for name, effect in zip(names, effects, strict=True)
    }
    least = _NOTHING * max((float(effect.max()) for effect in moved.values()), default=0.0)
    return tuple(text for name in names for text in _without(full.layout, name, moved[name] <= least))


def _is_cut(layout: Layout, name: str) -> bool:
    axes = (axis for dim in layout.tensors[name].dims for s in dim for axis in s.axes)
    return any(layout.axes[axis].scaled for axis in axes)


def _without(layout: Layout, name: str, still: Tensor) -> Iterator[str]:
    """Yield a tensor that is still, or the stretches of a stacked or concatenated first dimension that are."""
    if bool(still.all()):
        yield name
        return
    first = layout.tensors[name].dims[0]
    at = 0
    for segment in first if len(first) > 1 else ():
        length = segment.length(layout.axes, layout.full_sizes)
        if bool(still[at : at + length].all()):
            yield f"{name}[{at}:{at + length}]"
        at += length
