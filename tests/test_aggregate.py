"""The coverage-weighted mean against plain loops; its bounds; what nobody trained stays bit for bit."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.states import put_back
from tiny import Tiny

from fleetfit.aggregate import Mean, apply_mean
from fleetfit.anatomy import State, infer_layout
from fleetfit.submodel import Submodel, concat_state, extract, full_submodel, random

ARCHITECTURE = Tiny()
IDLE = ("stem.bias", "blocks.0.0.weight")  # names that some updates have not trained
LAYOUT = infer_layout(ARCHITECTURE)
AXES = ARCHITECTURE.axes


def full_state(seed: int) -> State:
    rng = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=rng) for n, s in LAYOUT.shapes({}, LAYOUT.exits).items()}


def piece_of(seed: int) -> Submodel:
    rng = np.random.default_rng(seed)
    a, b = int(rng.integers(1, 9)), 2 * int(rng.integers(1, 7))
    depth = int(rng.integers(1, 4))
    channels = {"a": random(AXES["a"], a, 0, 1, rng), "b": random(AXES["b"], b, 0, 1, rng)}
    if rng.integers(2):
        channels["classes"] = tuple(sorted(rng.choice(4, 2, replace=False).tolist()))
    return Submodel(channels, tuple(range(1, depth + 1)))


def by_loops(old: State, updates: list[tuple[Submodel, State, float]]) -> tuple[State, State]:
    """Put each update into a full-size tensor of NaN, and average element by element what is not NaN, in float64."""
    holes = {n: torch.full_like(t, float("nan")) for n, t in old.items()}
    placed = [(put_back(LAYOUT, holes, piece, state), w) for piece, state, w in updates]
    new, coverage = {}, {}
    for name, before in old.items():
        flat, cover = before.flatten().double().clone(), torch.zeros(before.numel())
        for j in range(before.numel()):
            pairs = [(float(p[name].flatten()[j]), w) for p, w in placed]
            seen = [(x, w) for x, w in pairs if x == x]
            if seen:
                flat[j] = sum(w * x for x, w in seen) / sum(w for _, w in seen)
                cover[j] = sum(w for _, w in seen)
        new[name], coverage[name] = flat.view(before.shape), cover.view(before.shape)
    return new, coverage


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0.5, 50)), min_size=1, max_size=4))
@settings(max_examples=12, deadline=None)
def test_mean_is_the_formula(drawn: list[tuple[int, float]]) -> None:
    old = full_state(0)
    updates = [
        (piece_of(s), extract(LAYOUT, full_state(s + 100 + i), piece_of(s)), w) for i, (s, w) in enumerate(drawn)
    ]
    mean = Mean(LAYOUT)
    for update in updates:
        mean.add(*update)
    aggregate = mean.result()
    after = apply_mean(old, aggregate)
    expected, coverage = by_loops(old, updates)
    for name in old:
        assert torch.allclose(after[name].double(), expected[name], rtol=1e-5, atol=1e-6), name
        assert torch.allclose(aggregate.coverage[name], coverage[name], rtol=1e-5)
        untouched = coverage[name] == 0
        assert torch.equal(after[name][untouched], old[name][untouched])


@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.floats(0.1, 100))
@settings(max_examples=30, deadline=None)
def test_mean_lies_between_its_inputs(seeds: list[int], weight: float) -> None:
    mean = Mean(LAYOUT)
    states = [full_state(s) for s in seeds]
    for state in states:
        mean.add(full_submodel(LAYOUT), state, weight)
    after = apply_mean(full_state(1), mean.result())
    for name, tensor in after.items():
        stacked = torch.stack([s[name] for s in states])
        slack = stacked.abs().amax(0) * len(seeds) * 6e-7 + 1e-12
        assert (tensor >= stacked.amin(0) - slack).all() and (tensor <= stacked.amax(0) + slack).all()


def test_no_update_leaves_every_bit() -> None:
    old = full_state(3)
    old["stem.bias"][0] = -0.0
    after = apply_mean(old, Mean(LAYOUT).result())
    assert all(torch.equal(after[n].view(torch.int32), old[n].view(torch.int32)) for n in old)


def test_equation_2_by_hand() -> None:
    """ScaleFL Eq. 2 with two levels: the small client covers the upper left; count weights.

    stem.bias has 8 channels; a level-1 client (4 channels) sends ones, a level-3 client (8) sends threes:
    the first four become (1 + 3) / 2 = 2, the others 3.
    """
    small = Submodel({"a": range(4), "b": range(12)}, (1, 2, 3))
    mean = Mean(LAYOUT)
    full = {n: torch.full(s, 3.0) for n, s in LAYOUT.shapes({}, LAYOUT.exits).items()}
    mean.add(full_submodel(LAYOUT), full, 1.0)
    mean.add(small, {n: torch.ones(s) for n, s in LAYOUT.shapes(small.sizes, small.exits).items()}, 1.0)
    assert apply_mean(full_state(0), mean.result())["stem.bias"].tolist() == [2.0] * 4 + [3.0] * 4


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0, 3.0])
def test_equal_weights_of_any_size_give_the_plain_mean(weight: float) -> None:
    mean = Mean(LAYOUT)
    for seed in (1, 2):
        mean.add(full_submodel(LAYOUT), full_state(seed), weight)
    state = apply_mean(full_state(0), mean.result())
    for name, tensor in full_state(1).items():
        torch.testing.assert_close(state[name], (tensor + full_state(2)[name]) / 2)


def test_a_weight_of_0_counts_for_nothing() -> None:
    """Alone it leaves every bit; beside others it is as if it were not there."""
    alone, beside, without = Mean(LAYOUT), Mean(LAYOUT), Mean(LAYOUT)
    for mean, seeds in ((alone, (1,)), (beside, (1, 2)), (without, (2,))):
        for seed in seeds:
            mean.add(full_submodel(LAYOUT), full_state(seed), 0.0 if seed == 1 else 3.0)
    for mean, expected in ((alone, full_state(0)), (beside, apply_mean(full_state(0), without.result()))):
        state = apply_mean(full_state(0), mean.result())
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_mean_begins_anew_after_its_result() -> None:
    mean = Mean(LAYOUT)
    for seed in (1, 2):
        mean.add(full_submodel(LAYOUT), full_state(seed), 3.0)
        state = apply_mean(full_state(0), mean.result())
        for name, tensor in full_state(seed).items():
            torch.testing.assert_close(state[name], tensor)
    assert not any(bool(coverage.any()) for coverage in mean.result().coverage.values())


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.floats(0.5, 4.0)), min_size=1, max_size=5), st.data())
@settings(max_examples=40, deadline=None)
def test_untrained_elements_do_not_count(updates: list[tuple[int, bool, float]], data: st.DataObject) -> None:
    """Neither for sub-models nor for the full model, whether the neighbor before it is the same one or not."""
    old = full_state(1)
    total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in old.items()}
    counts = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in old.items()}
    mean = Mean(LAYOUT)
    for seed, idle, weight in updates:
        piece = full_submodel(LAYOUT) if data.draw(st.booleans()) else piece_of(seed)
        sent = extract(LAYOUT, full_state(seed), piece)
        untrained = tuple(name for name in IDLE if idle and name in sent)
        mean.add(piece, sent, weight, untrained)
        zeros = {n: torch.zeros_like(t) for n, t in old.items()}
        values = put_back(LAYOUT, zeros, piece, sent)
        ones = put_back(LAYOUT, zeros, piece, {n: torch.ones_like(t) for n, t in sent.items()})
        for name in old:
            if name not in untrained:
                total[name] += weight * values[name].double()
                counts[name] += weight * ones[name].double()
    aggregate = mean.result()
    after = apply_mean(old, aggregate)
    for name, tensor in old.items():
        torch.testing.assert_close(aggregate.coverage[name].double(), counts[name], rtol=1e-5, atol=1e-6)
        expected = torch.where(counts[name] > 0, total[name] / counts[name], tensor.double())
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(after[name][counts[name] == 0], tensor[counts[name] == 0])


def some_pieces(seeds: list[int]) -> list[Submodel]:
    """The whole model for every third seed, else a piece."""
    return [full_submodel(LAYOUT) if seed % 3 == 0 else piece_of(seed) for seed in seeds]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_mean_has_the_bits_of_its_definition(seeds: list[int], ones: bool) -> None:
    """In float32: neighbors of one piece are summed in order, sums put in place in order, and divided once.

    Each whole model is put in place by itself. Weights are powers of two, whose products are exact: elsewhere torch's
    own add may round a product into its sum.
    """
    pieces = some_pieces(seeds)
    updates = [extract(LAYOUT, full_state(10 + i), piece) for i, piece in enumerate(pieces)]
    weights = [1.0 if ones else [0.5, 2.0, 4.0][i % 3] for i in range(len(pieces))]
    groups: list[tuple[Submodel, dict[str, torch.Tensor], float]] = []
    for piece, update, weight in zip(pieces, updates, weights, strict=True):
        weighed = {n: weight * t for n, t in update.items()}
        if groups and piece != full_submodel(LAYOUT) and groups[-1][0] == piece:
            _, before, counted = groups.pop()
            weighed, weight = {n: before[n] + t for n, t in weighed.items()}, counted + weight
        groups.append((piece, weighed, weight))
    zeros = {n: torch.zeros(s) for n, s in LAYOUT.shapes({}, LAYOUT.exits).items()}
    total, counts = dict(zeros), dict(zeros)
    for piece, values, weight in groups:
        put = put_back(LAYOUT, zeros, piece, values)
        seen = put_back(LAYOUT, zeros, piece, {n: torch.full(v.shape, weight) for n, v in values.items()})
        total, counts = {n: total[n] + put[n] for n in zeros}, {n: counts[n] + seen[n] for n in zeros}
    mean = Mean(LAYOUT)
    for piece, update, weight in zip(pieces, updates, weights, strict=True):
        mean.add(piece, update, weight)
    aggregate = mean.result()
    for name in zeros:
        covered = counts[name] > 0
        assert torch.equal(aggregate.coverage[name], counts[name])
        assert torch.equal(aggregate.mean[name][covered], (total[name] / counts[name])[covered]), name


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([1.0, 3.0]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_updates_are_read_only(seeds: list[int], weight: float, idle: bool) -> None:
    pieces = some_pieces(seeds)
    updates = [extract(LAYOUT, full_state(10 + i), piece) for i, piece in enumerate(pieces)]
    before = [{n: t.clone() for n, t in update.items()} for update in updates]
    mean = Mean(LAYOUT)
    for piece, update in zip(pieces, updates, strict=True):
        mean.add(piece, update, weight, tuple(n for n in IDLE if idle and n in update))
    apply_mean(full_state(0), mean.result())
    for update, copy in zip(updates, before, strict=True):
        assert all(torch.equal(update[n], t) for n, t in copy.items())


def test_a_coverage_that_a_method_changes_is_looked_at() -> None:
    """A method may take tensors out of the mean: in place, or with a coverage of its own."""
    old = full_state(0)
    for change in ("in place", "another"):
        mean = Mean(LAYOUT)
        mean.add(full_submodel(LAYOUT), full_state(1), 1.0)
        mean.add(full_submodel(LAYOUT), full_state(2), 1.0)
        aggregate = mean.result()
        if change == "in place":
            aggregate.coverage["stem.bias"].zero_()
        else:
            aggregate = replace(aggregate, coverage={**aggregate.coverage, "stem.bias": torch.zeros(8)})
        after = apply_mean(old, aggregate)
        assert torch.equal(after["stem.bias"], old["stem.bias"])
        assert torch.equal(after["stem.weight"], aggregate.mean["stem.weight"])


@pytest.mark.parametrize("cohort", [10, 100, 1000])
def test_memory_does_not_grow_with_the_cohort(cohort: int) -> None:
    """Of all updates that were folded at most one is still held, and what else is held is as after ten."""
    mean, alive = Mean(LAYOUT), []
    pieces = some_pieces([3, 4, 5])
    for i in range(cohort):
        piece = pieces[3 * i // cohort]
        update = extract(LAYOUT, full_state(i % 7), piece)
        alive.append(weakref.ref(concat_state(update)))
        mean.add(piece, update, 1.0)
        del update
        assert sum(ref() is not None for ref in alive) <= 1
    held = {id(t): t.numel() for t in vars(mean).values() if isinstance(t, torch.Tensor)}
    assert sum(held.values()) <= 4 * sum(t.numel() for t in full_state(0).values())


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0.5, 50)), min_size=1, max_size=12), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_regions_add_up_to_the_whole(drawn: list[tuple[int, float]], count: int) -> None:
    """Regional servers that send mean and coverage have together what one server has, up to rounding.

    A sum of n terms in fp32 differs from the exact one by at most about n u sum |w x|, with u = 2^-24: in each region,
    in the sum over regions, and in the server's own sum. A mean adds one rounding, and its product with the coverage
    another.
    """
    updates = [
        (piece_of(s), extract(LAYOUT, full_state(s + 100 + i), piece_of(s)), w) for i, (s, w) in enumerate(drawn)
    ]
    whole, sizes = Mean(LAYOUT), Mean(LAYOUT)
    for piece, state, weight in updates:
        whole.add(piece, state, weight)
        sizes.add(piece, {name: tensor.abs() for name, tensor in state.items()}, weight)
    regions = []
    for number in range(count):
        region = Mean(LAYOUT)
        for update in updates[number::count]:
            region.add(*update)
        regions.append(region.result())
    expected, magnitude = whole.result(), sizes.result()
    terms = len(updates) + count + 4
    for name, mean in expected.mean.items():
        covered = expected.coverage[name] > 0
        sums, weights = torch.zeros_like(mean), torch.zeros_like(mean)
        for region in regions:
            has_any = region.coverage[name] > 0
            sums[has_any] += (region.mean[name] * region.coverage[name])[has_any]
            weights += region.coverage[name]
        assert torch.equal(weights > 0, covered)
        assert torch.allclose(weights, expected.coverage[name], rtol=terms * 2**-23)
        error = ((sums / weights).double() - mean.double()).abs()[covered]
        assert (error <= 2 * terms * 2**-24 * magnitude.mean[name].double()[covered] * (1 + 1e-5)).all(), name
