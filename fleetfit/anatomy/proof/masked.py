"""Part 3 of the proof: a small model equals the full model whose other channels are zero.

All axes are cut at once, in four ways. All but one granule of each, and one granule of each, find errors that the two
sizes between may miss: an even size may keep whole heads by luck. Where the two models differ, the small one runs again
with the size-dependent numbers of the full one's run (`fleetfit.anatomy.proof.replay`). Where they still differ, the
axes that fail alone and the first module that differs are named.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fleetfit.anatomy import Axis, Layout, find_fixed_groups, named_tensors
from fleetfit.anatomy.kernels import use_plain_attention
from fleetfit.anatomy.proof.full import (
    FullModel,
    KeptPlaces,
    describe_level,
    difference,
    overlay,
    read_outputs,
    use_float64,
)
from fleetfit.anatomy.proof.levels import load_level
from fleetfit.anatomy.proof.replay import Trace, record_operations, replay_operations
from fleetfit.errors import ModelError
from fleetfit.seeds import make_numpy_rng, make_torch_rng
from fleetfit.submodel import Channels, Submodel, random

# ---- a small model beside the masked full one ----------------------------------------------------------------------

_FAINT = 1e-12  # what is left of masked channels where zeros give no numbers (a weight norm divides by them)
WAYS = ("as it is", "with the full model's numbers", "with the full model's numbers and statistics")
"""How a small model may equal the masked full one."""


@dataclass
class MaskedCut:
    """A cut of all axes, or of one.

    Attributes:
        how: Which channels are kept, in words.
        channels: Kept channels by axis.
        error: How far the small model is from the masked full one.
        way: With which of the full model's numbers.
    """

    how: str
    channels: Mapping[str, Channels]
    error: float = float("inf")
    way: str = WAYS[0]


class CannotRun(Exception):
    """A model of these sizes cannot be built or run, which says nothing of the layout."""


def compare_cuts(
    full: FullModel, levels: Sequence[Submodel], now: Callable[[str], None], of_levels: bool
) -> list[MaskedCut]:
    """Compare the levels' channels, or the four cuts of all axes; where one of these does not run, the levels' sizes.

    Raises:
        ModelError: A level's sizes do not run.
    """
    cuts: list[MaskedCut] = []

    def add(cut: MaskedCut) -> None:
        now(f"a small model beside the full one, with {cut.how}")
        compare(full, cut, cuts[-1].way if cuts else WAYS[0])
        cuts.append(cut)

    left = levels if of_levels else ()
    for cut in () if of_levels else make_cuts(full.layout, full.seed):
        try:
            add(cut)
        except CannotRun:
            left = levels
    for cut in _make_level_cuts(full.layout, full.seed, left, of_levels):
        try:
            add(cut)
        except CannotRun as error:
            raise ModelError(f"a model with {cut.how} does not run: {error}", key="model") from error
    return cuts


def compare(full: FullModel, cut: MaskedCut, first: str = WAYS[0]) -> None:
    """Compare a cut's small model with the masked full one; note how far they are apart.

    Args:
        full: The full model.
        cut: The cut.
        first: The way to try first, that of another cut.

    Raises:
        CannotRun: The small model cannot be built or run.
    """
    module, expected, trace = run_masked(full, cut.channels)
    for way in sorted(WAYS, key=lambda w: w != first):
        error = difference(run_small(full, module, trace, way), expected)
        if error < cut.error:
            cut.error, cut.way = error, way
        if error <= full.tolerance:
            return


def run_masked(full: FullModel, channels: Mapping[str, Channels]) -> tuple[nn.Module, list[Tensor], Trace]:
    """Run the masked full model, then build the small one of some channels in its place.

    Returns:
        The small model, the full model's outputs, and its size-dependent numbers.

    Raises:
        CannotRun: The small model cannot be built.
    """
    places = KeptPlaces(full.layout, channels)
    with use_plain_attention():
        for faint in (0.0, _FAINT):
            expected: list[Tensor] = []
            full.load(places.mask(full.state, faint))
            trace = record_operations(full.module, lambda: expected.extend(full.run()))  # noqa: B023 called at once
            if all(bool(torch.isfinite(out).all()) for out in expected):
                break
    return build_small(full, channels), expected, trace


def run_small(full: FullModel, module: nn.Module, trace: Trace, way: str) -> list[Tensor]:
    """Return the small model's outputs, computed in one of the ways.

    Raises:
        CannotRun: It does not run.
    """
    replay: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if way != WAYS[0]:
        replay = replay_operations(module, trace, statistics=way == WAYS[2])
    with torch.no_grad(), use_plain_attention(), use_float64(), replay:
        try:
            return read_outputs(module, full.x)
        except Exception as error:
            raise CannotRun(str(error)) from error


def build_small(full: FullModel, channels: Mapping[str, Channels]) -> nn.Module:
    """Build the small model of some channels, and load its part of the state.

    Raises:
        CannotRun: It cannot be built, or the state does not fit.
    """
    try:
        return load_level(full, Submodel(channels, full.layout.exits))
    except ModelError as error:
        raise CannotRun(str(error)) from error


# ---- which channels ------------------------------------------------------------------------------------------------


def make_cuts(layout: Layout, seed: int, only: str = "") -> Iterator[MaskedCut]:
    """Yield the four cuts, of all axes at once or of one."""
    scaled = {name: axis for name, axis in layout.axes.items() if axis.scaled and only in ("", name)}
    granules = {name: axis.size // axis.granule for name, axis in scaled.items()}
    between = {name: _draw_count(name, n, seed) for name, n in granules.items()}
    for how, counts, is_prefix in (
        ("all but a granule of each axis", {name: max(1, n - 1) for name, n in granules.items()}, False),
        ("one granule of each axis", dict.fromkeys(granules, 1), False),
        ("the first channels of each axis", between, True),
        ("some channels of each axis", between, False),
    ):
        yield MaskedCut(how, {name: _choose(name, axis, counts[name] * axis.granule, is_prefix, how, seed)
                              for name, axis in scaled.items()})  # fmt: skip


def _make_level_cuts(layout: Layout, seed: int, levels: Sequence[Submodel], is_prefix: bool) -> Iterator[MaskedCut]:
    """Yield the levels' sizes, with the first channels or random ones."""
    seen = []
    for level in levels:
        sizes = {axis: n for axis, n in level.sizes.items() if layout.axes[axis].scaled}
        if sizes not in seen and any(n < layout.axes[axis].size for axis, n in sizes.items()):
            seen.append(sizes)
            how = f"{'the first' if is_prefix else 'random'} channels of the level with {describe_level(level)}"
            yield MaskedCut(how, {name: _choose(name, layout.axes[name], n, is_prefix, "level", seed)
                                  for name, n in sizes.items()})  # fmt: skip


def _draw_count(name: str, granules: int, seed: int) -> int:
    """Return a number of granules between two and two less than all, where there are that many."""
    least, most = min(2, granules), max(1, granules - 2)
    return int(make_numpy_rng("check_layout", seed, "between", name).integers(min(least, most), max(least, most) + 1))


def _choose(name: str, axis: Axis, n: int, is_prefix: bool, how: str, seed: int) -> Channels:
    if is_prefix or axis.ordered or not axis.scaled:
        return range(n)
    return random(axis, n, 0, 0, make_numpy_rng("check_layout", seed, how, name))


# ---- tensors that move no output -----------------------------------------------------------------------------------

_NEGLIGIBLE = 1e-12  # of the largest effect of an element
_TEXTS = 2  # are enough here: the pass keeps all activations
_LARGE, _LARGE_SHARE = 2**20, 1 / 8  # of all parameters; the gradient of such a tensor is not computed


def find_unused_tensors(full: FullModel) -> tuple[str, ...]:
    """Return the cut tensors, or stretches of them, without effect on any output, such as the biases of keys."""
    layout = full.layout
    full.load(full.state)
    own = {name: tensor for name, tensor, is_parameter in named_tensors(full.module) if is_parameter}
    parts = {
        name: _list_parts(layout, name)
        for name, tensor in layout.tensors.items()
        if name in own and any(layout.axes[axis].scaled for dim in tensor.dims for s in dim for axis in s.axes)
    }
    most = max(_LARGE, _LARGE_SHARE * sum(tensor.numel() for tensor in own.values()))
    large = [name for name in parts if own[name].numel() > most]
    effects = _measure_gradients(full, {name: own[name] for name in parts if name not in large}, parts)
    least = _NEGLIGIBLE * max((most for most, *_ in effects.values()), default=0.0)
    negligible = {name: [effect <= least for effect in some] for name, some in effects.items()}
    negligible |= {name: [_measure_zeros(full, name, part) <= full.tolerance for part in parts[name]] for name in large}
    unused: list[str] = []
    for name, (is_whole, *stretches) in negligible.items():
        ranges = [f"{name}[{part.start}:{part.stop}]" for part in parts[name][1:]]
        unused += [name] if is_whole else itertools.compress(ranges, stretches)
    return tuple(unused)


def _measure_gradients(
    full: FullModel, tensors: Mapping[str, Tensor], parts: Mapping[str, Sequence[slice]]
) -> Mapping[str, Sequence[float]]:
    """Return the largest effect of an element, by tensor of each of its parts; none without gradients."""
    rng = make_torch_rng("check_layout", full.seed, "inert")
    effects = {name: [0.0] * len(parts[name]) for name in tensors}

    def measure(name: str, parameter: Tensor) -> None:
        """Keep the effects, and let the gradient go."""
        assert parameter.grad is not None
        effect = parameter.grad.mul_(parameter.detach()).abs_()
        effects[name] = [float(effect[part].max()) if effect[part].numel() else 0.0 for part in parts[name]]
        parameter.grad = None

    before = [parameter.requires_grad for parameter in tensors.values()]
    with contextlib.ExitStack() as hooks:
        try:
            for name, parameter in tensors.items():
                parameter.requires_grad_(True)
                hooks.callback(parameter.register_post_accumulate_grad_hook(partial(measure, name)).remove)
            with torch.enable_grad(), use_plain_attention(), use_float64():
                logits = read_outputs(full.module, full.x if full.x.is_floating_point() else full.x[:_TEXTS])
                weights = [torch.randn(out.shape, generator=rng).to(out) for out in logits]
                sums = [(out * weight).sum() for out, weight in zip(logits, weights, strict=True) if out.requires_grad]
                # of one number: gradients that are given import sympy
                torch.autograd.backward(torch.stack(sums).sum(), inputs=[*tensors.values()])
        except (RuntimeError, NotImplementedError):  # a model without gradients has nothing to train
            return {}
        finally:
            for parameter, requires_grad in zip(tensors.values(), before, strict=True):
                parameter.requires_grad_(requires_grad)
    return effects


def _measure_zeros(full: FullModel, name: str, part: slice) -> float:
    """Return how far the outputs move when a part of a tensor is zero."""
    numbers = full.state[name].clone()
    numbers[part] = 0
    return difference(full.outputs(overlay(full.state, {name: numbers})), full.expected)


def _list_parts(layout: Layout, name: str) -> list[slice]:
    """Return the whole of a tensor, and the stretches of a stacked or concatenated first dimension."""
    first = layout.tensors[name].dims[0]
    lengths = [segment.length(layout.axes, layout.full_sizes) for segment in first if len(first) > 1]
    return [slice(None), *itertools.starmap(slice, itertools.pairwise(itertools.accumulate(lengths, initial=0)))]


# ---- where a layout is not proved: the axes that fail alone, and the first module that differs ---------------------


def find_failing_axes(full: FullModel) -> list[str]:
    """Return the axes that fail when they alone are cut."""

    def fails(cut: MaskedCut) -> bool:
        try:
            compare(full, cut)
        except CannotRun:
            return False
        return cut.error > full.tolerance

    axes = full.layout.axes.items()
    return [name for name, axis in axes if axis.scaled and any(map(fails, make_cuts(full.layout, full.seed, name)))]


def describe_failure(full: FullModel, cut: MaskedCut, axes: Sequence[str]) -> str:
    """Say how far a cut's small model is from the full one, which axes fail, and where the two begin to differ."""
    names = ", ".join(f'"{axis}"' for axis in axes)
    failing = f"{'axis' if len(axes) == 1 else 'axes'} {names} {'fails' if len(axes) == 1 else 'fail'} alone"
    failing = failing if axes else "no axis fails alone, only several together"
    place = _find_divergence(full, cut)
    return (
        f"with {cut.how} kept, the small model and the full one with its other channels at zero differ by "
        f"{cut.error:.2g} of the outputs' size, with the full model's size-dependent numbers too: {failing}"
        + (f"; the two part {place}" if place else "")
    )


def suggest_group_axis(full: FullModel, cut: MaskedCut, axes: Sequence[str]) -> str:
    """Return which module keeps its number of groups or heads when the axes are cut, and what to do; or ""."""
    try:
        small = build_small(full, cut.channels)
    except CannotRun:
        return ""
    return find_fixed_groups(full.layout, full.module, small, axes or list(full.layout.axes))


def _find_divergence(full: FullModel, cut: MaskedCut) -> str:
    """Return the first module whose output the small model does not have, and the last one before it, in words.

    An output counts as equal if it is equal in one of the ways, with or without the full model's numbers.
    """
    small_runs = []
    try:
        with _record_outputs(full.module) as full_outputs:
            module, _, trace = run_masked(full, cut.channels)
        for way in WAYS:
            with _record_outputs(module) as small_outputs:
                run_small(full, module, trace, way)
            small_runs.append(small_outputs)
    except CannotRun:
        return ""
    return max(_compare_outputs(outputs, full_outputs[-len(outputs) :], full.tolerance) for outputs in small_runs)[1]


@contextlib.contextmanager
def _record_outputs(module: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Record the output of each module that has parameters of its own or no children."""
    recorded: list[tuple[str, Tensor]] = []

    def record(name: str, output: object) -> None:
        tensor = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            recorded.append((name, tensor.detach().clone()))

    with contextlib.ExitStack() as hooks:
        for name, part in module.named_modules():
            if name and (next(part.parameters(recurse=False), None) is not None or next(part.children(), None) is None):
                hooks.enter_context(part.register_forward_hook(lambda _, __, out, name=name: record(name, out)))
        yield recorded


def _compare_outputs(
    small_outputs: Sequence[tuple[str, Tensor]], full_outputs: Sequence[tuple[str, Tensor]], tolerance: float
) -> tuple[int, str]:
    """Return how many outputs are equal, and which is the first that differs."""
    before = ""
    for i, ((name, small), (other, large)) in enumerate(zip(small_outputs, full_outputs, strict=False)):
        if name != other:
            break
        if not _is_part(small, large, tolerance):
            return i, f'first at "{name}"' + (f' (equal up to "{before}")' if before else "")
        before = name
    return min(len(small_outputs), len(full_outputs)), f'after "{before}"' if before else ""


def _is_part(small: Tensor, large: Tensor, tolerance: float) -> bool:
    """Return whether a large output has each number of a small one, wherever: axes that differ mix them soon."""
    numbers, known = small.flatten(), large.flatten().sort().values
    if not small.numel() or not large.numel():
        return small.numel() == large.numel()
    after = torch.searchsorted(known, numbers).clamp(max=len(known) - 1)
    apart = torch.minimum((known[after] - numbers).abs(), (known[(after - 1).clamp(min=0)] - numbers).abs())
    return bool((apart <= tolerance * large.abs().max()).all())
