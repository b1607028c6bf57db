"""Products of axes and numbers in one dimension: every cut equals the index set that loops over all factors give."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import product as every
from unittest import mock

import numpy as np
import torch
from hypothesis import assume, given, settings, strategies as st
from support.states import put_back

from fleetfit.anatomy.arrange import multiply
from fleetfit.hooks import keep_prefix
from fleetfit.layout import Axis, Layout, Segment, TensorLayout
from fleetfit.submodel import (
    SlicePlan,
    Submodel,
    extract,
    move_state,
    narrow_state,
    random,
    rolling,
    window,
)  # fmt: skip

MOST = 1_000_000  # elements of a matrix
patient = settings(deadline=None, max_examples=50)
CUT = import_module("fleetfit.submodel.submodel")
CHOICES = {"prefix": keep_prefix, "window": window, "rolling": rolling, "random": random}
NAMES = ("a", "b", "c")
Factors = tuple[str | int, ...]
Chosen = Mapping[str, Sequence[int]]

axes = st.fixed_dictionaries(
    {n: st.builds(lambda n, g: Axis(n * g, g), st.integers(2, 4), st.integers(1, 3)) for n in NAMES}
)
factors = st.builds(
    lambda names, numbers, order: tuple(x for _, x in sorted(zip(order, [*names, *numbers], strict=False))),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 3), max_size=2),
    st.permutations(range(5)),
)
seeds = st.integers(0, 2**32 - 1)


def length(some: Factors, sizes: Mapping[str, int]) -> int:
    total = 1
    for factor in some:
        total *= sizes[factor] if isinstance(factor, str) else factor
    return total


def make_layout(axes: Mapping[str, Axis], rows: Factors, columns: Factors) -> Layout:
    sizes = {name: axis.size for name, axis in axes.items()}
    assume(length(rows, sizes) * length(columns, sizes) <= MOST)
    segments = (multiply(rows), multiply(columns))
    dims = {"matrix": segments, "both": ((*segments[0], Segment(None, 2), *segments[1]),)}
    dims |= {f"plain_{name}": ((Segment(name),),) for name in axes}
    return Layout(axes, (1,), {name: TensorLayout(own, None, None, True) for name, own in dims.items()})


def places(some: Factors, axes: Mapping[str, Axis], channels: Chosen) -> list[int]:
    """Count through all factors, the outermost slowest, and keep what is kept of each axis, in its order."""
    positions = []
    choices = [list(channels[f]) if isinstance(f, str) else list(range(f)) for f in some]
    whole = [axes[f].size if isinstance(f, str) else f for f in some]
    for digits in every(*choices):
        at = 0
        for digit, size in zip(digits, whole, strict=True):
            at = at * size + digit
        positions.append(at)
    return positions


def chosen(axes: Mapping[str, Axis], how: str, seed: int) -> dict[str, tuple[int, ...]]:
    """Some granules of each axis, chosen one way or the other."""
    rng = np.random.default_rng(seed)
    channels = {}
    for name, axis in axes.items():
        n = int(rng.integers(1, axis.size // axis.granule + 1)) * axis.granule
        channels[name] = tuple(CHOICES[how](axis, n, int(rng.integers(9)), 5, rng))
    return channels


def numbered(layout: Layout) -> dict[str, torch.Tensor]:
    shapes = layout.shapes({}, layout.exits)
    return {name: torch.arange(int(np.prod(s)), dtype=torch.float32).view(s) for name, s in shapes.items()}


def expected(layout: Layout, rows: Factors, columns: Factors, channels: Chosen) -> tuple[torch.Tensor, torch.Tensor]:
    state = numbered(layout)
    n = length(rows, layout.full_sizes)
    first, second = places(rows, layout.axes, channels), places(columns, layout.axes, channels)
    return state["matrix"].numpy()[np.ix_(first, second)], [*first, n, n + 1, *(n + 2 + i for i in second)]


@given(axes, factors, factors, st.sampled_from(sorted(CHOICES)), seeds, st.booleans())
@patient
def test_a_cut_equals_loops_over_the_factors(
    axes: dict[str, Axis], rows: Factors, columns: Factors, how: str, seed: int, large: bool
) -> None:
    layout, channels = make_layout(axes, rows, columns), chosen(axes, how, seed)
    piece = Submodel(channels, (1,))
    with mock.patch.multiple(
        CUT, LARGE=0 if large else 1 << 20, FEW=0 if large else 1 << 20
    ):  # by strips and slices, or by index
        _check_cut(layout, rows, columns, piece)


def _check_cut(layout: Layout, rows: Factors, columns: Factors, piece: Submodel) -> None:
    chosen_channels = {axis: tuple(channels) for axis, channels in piece.channels.items()}
    matrix, both = expected(layout, rows, columns, chosen_channels)
    state = numbered(layout)
    part = extract(layout, state, piece)
    assert np.array_equal(part["matrix"].numpy(), matrix)
    assert part["both"].tolist() == both
    assert {name: tuple(t.shape) for name, t in part.items()} == layout.shapes(piece.sizes, piece.exits)
    # what is put back lies where it came from, and nothing else has moved
    after = put_back(layout, state, piece, {name: -1 - tensor for name, tensor in part.items()})
    for name, tensor in part.items():
        there = torch.zeros(state[name].numel(), dtype=torch.bool)
        there[tensor.flatten().long()] = True
        assert torch.equal(after[name].flatten(), torch.where(there, -1 - state[name].flatten(), state[name].flatten()))


@given(axes, factors, factors, st.sampled_from(sorted(CHOICES)), seeds, seeds)
@patient
def test_moving_states_and_flat_buffers_agree(
    axes: dict[str, Axis], rows: Factors, columns: Factors, how: str, seed: int, other: int
) -> None:
    layout = make_layout(axes, rows, columns)
    source, target = (Submodel(chosen(axes, how, s), (1,)) for s in (seed, other))
    state = numbered(layout)
    own, zeros = extract(layout, state, source), {name: torch.zeros_like(t) for name, t in state.items()}
    moved, placed = move_state(layout, own, source, target), put_back(layout, zeros, source, own)
    assert all(torch.equal(moved[name], t) for name, t in extract(layout, placed, target).items())
    compiled = SlicePlan(layout, source)
    full = torch.cat([t.flatten() for t in state.values()])
    counted = torch.zeros_like(full)
    compiled.scatter(counted, torch.ones(compiled.size), add=True)
    assert int(counted.sum()) == compiled.size
    assert set(counted.tolist()) <= {0.0, 1.0}
    assert torch.equal(compiled.gather(full), torch.cat([t.flatten() for t in extract(layout, state, source).values()]))


@given(axes, factors, factors, seeds)
@patient
def test_narrowing_a_sub_model_is_cutting_the_full_one(
    axes: dict[str, Axis], rows: Factors, columns: Factors, seed: int
) -> None:
    """The channels kept of a sub-model's channels are those kept of the full model's."""
    layout, channels = make_layout(axes, rows, columns), chosen(axes, "random", seed)
    state = numbered(layout)
    piece = Submodel(channels, (1,))
    granule = axes["a"].granule
    fewer = narrow_state(layout, extract(layout, state, piece), piece.sizes, {"a": range(granule)})
    direct = extract(layout, state, Submodel({**channels, "a": channels["a"][:granule]}, (1,)))
    assert all(torch.equal(fewer[name], t) for name, t in direct.items())
