"""Properties of layouts and sub-models, over architectures, widths, depths and channels drawn at random."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.bits import assert_same_bits
from support.states import put_back
from zoo import RIGHT, Deep

from fleetfit.anatomy import Architecture, Axis, Layout, State, build_module, infer_layout, outputs
from fleetfit.anatomy.proof import TOLERANCE, check_layout
from fleetfit.hooks import keep_prefix
from fleetfit.models.cnn import cnn
from fleetfit.submodel import Submodel, extract, full_submodel, move_state, random, rolling, window

patient = settings(deadline=None)  # a busy machine is no failure

FAMILIES: dict[str, Architecture] = {
    **{name: make() for name, make in RIGHT.items()},
    "blocks": Deep(),
    "cnn": cnn(classes=4),
    "cnn, group norm": cnn(classes=4, norm="group"),
}
SHAPES = {
    **{name: make().input_shape for name, make in RIGHT.items()},
    "blocks": (5,),
    "cnn": (1, 8, 8),
    "cnn, group norm": (1, 8, 8),
}
LAYOUTS = {name: infer_layout(family, input_shape=SHAPES[name]) for name, family in FAMILIES.items()}
CHOICES = {"prefix": keep_prefix, "window": window, "rolling": rolling, "random": random}

names = st.sampled_from(sorted(FAMILIES))
seeds = st.integers(0, 2**32 - 1)
widths = st.integers(1, 100).map(lambda w: w / 100)
axes = st.tuples(st.integers(1, 12), st.integers(1, 4)).map(lambda t: Axis(t[0] * t[1], t[1]))


def drawn_state(layout: Layout, seed: int) -> State:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) for name, shape in layout.shapes({}, layout.exits).items()}


def drawn_piece(layout: Layout, seed: int) -> Submodel:
    """Any whole granules of any axis, also unscaled ones, in any order, and any exits."""
    rng = np.random.default_rng(seed)
    channels = {}
    for name, axis in layout.axes.items():
        granules = axis.size // axis.granule
        chosen = rng.permutation(granules)[: rng.integers(1, granules + 1)]
        chosen = np.sort(chosen) if rng.integers(2) else chosen
        channels[name] = tuple(int(g) * axis.granule + i for g in chosen for i in range(axis.granule))
    exits = rng.permutation(layout.exits)[: rng.integers(1, len(layout.exits) + 1)]
    return Submodel(channels, tuple(sorted(int(e) for e in exits)))


@given(names, seeds)
@patient
def test_extract_then_put_back_is_the_identity(name: str, seed: int) -> None:
    layout = LAYOUTS[name]
    state, piece = drawn_state(layout, seed), drawn_piece(layout, seed)
    assert_same_bits(put_back(layout, state, piece, extract(layout, state, piece)), state)


@given(names, seeds, seeds)
@patient
def test_put_back_then_extract_gives_the_piece(name: str, seed: int, other: int) -> None:
    layout = LAYOUTS[name]
    piece = drawn_piece(layout, seed)
    state = extract(layout, drawn_state(layout, other), piece)
    assert_same_bits(extract(layout, put_back(layout, drawn_state(layout, seed), piece, state), piece), state)


@given(names, seeds, seeds)
@patient
def test_move_state_goes_through_the_full_model(name: str, seed: int, other: int) -> None:
    layout = LAYOUTS[name]
    full, source, target = drawn_state(layout, seed), drawn_piece(layout, seed), drawn_piece(layout, other)
    state, zeros = extract(layout, full, source), {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    moved = move_state(layout, state, source, target)
    assert_same_bits(moved, extract(layout, put_back(layout, zeros, source, state), target))


@given(names)
@patient
def test_width_one_is_the_full_model(name: str) -> None:
    family, layout = FAMILIES[name], LAYOUTS[name]
    sizes = family.sizes(1.0)
    assert sizes == layout.full_sizes
    piece = Submodel({axis: range(n) for axis, n in sizes.items()}, layout.exits)
    assert piece == full_submodel(layout)
    state = drawn_state(layout, 0)
    assert_same_bits(extract(layout, state, piece), state)


@given(names, widths, widths)
@patient
def test_prefixes_nest(name: str, one: float, other: float) -> None:
    """The narrower sub-model is the same piece of the wider one as of the full model."""
    family, layout = FAMILIES[name], LAYOUTS[name]
    narrow, wide = (
        Submodel({a: range(n) for a, n in family.sizes(w).items()}, layout.exits) for w in sorted((one, other))
    )
    assert narrow.is_part_of(wide)
    state = drawn_state(layout, 1)
    moved = move_state(layout, extract(layout, state, wide), wide, narrow)
    assert_same_bits(moved, extract(layout, state, narrow))


@given(names, widths, seeds)
@patient
def test_predicted_shapes_are_the_built_ones(name: str, width: float, seed: int) -> None:
    family, layout = FAMILIES[name], LAYOUTS[name]
    sizes, exits = family.sizes(width), drawn_piece(layout, seed).exits
    with torch.device("meta"):
        module = build_module(family, sizes, exits)
    built = {n: tuple(p.shape) for n, p in module.named_parameters(remove_duplicate=False) if n not in layout.aliases}
    assert built == layout.shapes(sizes, exits)


@given(axes, st.integers(1, 100), st.integers(0, 50), seeds, st.sampled_from(sorted(CHOICES)))
@patient
def test_choices_keep_whole_granules(axis: Axis, share: int, round: int, seed: int, how: str) -> None:
    n = max(1, axis.size // axis.granule * share // 100) * axis.granule
    channels = list(CHOICES[how](axis, n, round, 3, np.random.default_rng(seed)))
    assert len(set(channels)) == n
    assert channels == sorted(channels)
    assert 0 <= channels[0] <= channels[-1] < axis.size
    granules = [c // axis.granule for c in channels]
    assert all(granules.count(g) == axis.granule for g in granules)


@given(axes, st.integers(1, 100), st.integers(0, 50))
@patient
def test_rolling_windows_cover_all_channels_alike(axis: Axis, share: int, start: int) -> None:
    """In as many rounds as there are granules, each channel is kept as often as every other one."""
    granules = axis.size // axis.granule
    n = max(1, granules * share // 100) * axis.granule
    counts = np.zeros(axis.size, dtype=int)
    for round in range(start, start + granules):
        counts[list(rolling(axis, n, round, 0, np.random.default_rng(0)))] += 1
    assert set(counts.tolist()) == {n // axis.granule}


@given(names, seeds)
@settings(patient, max_examples=40)
def test_permuted_channels_compute_the_same(name: str, seed: int) -> None:
    """Permuting all axes at once by whole granules, classes left alone, leaves the outputs as they are."""
    family, layout = FAMILIES[name], LAYOUTS[name]
    rng = np.random.default_rng(seed)
    channels = {
        axis: tuple(int(g) * a.granule + i for g in rng.permutation(a.size // a.granule) for i in range(a.granule))
        for axis, a in layout.axes.items()
        if a.scaled
    }
    state = drawn_state(layout, seed)
    shape = SHAPES.get(name) or family.input_shape
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    module = build_module(family, layout.full_sizes, layout.exits).double().eval()
    logits = []
    for each in (state, extract(layout, state, Submodel(channels, layout.exits))):
        module.load_state_dict({**each, **{twin: each[first] for twin, first in layout.aliases.items()}})
        with torch.no_grad():
            logits.append(outputs(module, x))
    for ours, theirs in zip(*logits, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-9 * float(ours.abs().max())


@given(name=names, width=widths, seed=seeds)
@settings(patient, max_examples=40)
def test_random_channels_equal_the_masked_full_model(name: str, width: float, seed: int) -> None:
    family, layout = FAMILIES[name], LAYOUTS[name]
    exits = drawn_piece(layout, seed).exits
    level = Submodel({axis: range(n) for axis, n in family.sizes(width).items()}, exits)
    shape = SHAPES.get(name) or family.input_shape
    report = check_layout(family, layout, [level], input_shape=shape, seed=seed)
    assert len(report.cuts) == 4 and max(report.cuts.values()) < TOLERANCE / 100


@pytest.mark.parametrize("how", ["window", "random"])
def test_choices_depend_on_client_and_round_only(how: str) -> None:
    axis = Axis(40)
    choices = {tuple(CHOICES[how](axis, 10, 0, 0, np.random.default_rng(seed))) for seed in range(20)}
    assert len(choices) > 10
    again = [tuple(CHOICES[how](axis, 10, round, 0, np.random.default_rng(1))) for round in (0, 5)]
    assert again[0] == again[1]
