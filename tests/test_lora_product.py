"""LoRA's products, averaged exactly: against loops over numbers and numpy's singular values, alone and in runs."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support import aggregate_plainly, aggregate_updates, raises
from support.states import put_back

import fleetfit as ff
from fleetfit.aggregate import Aggregate, apply_mean
from fleetfit.anatomy import State, infer_layout
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Federation, Server, Update
from fleetfit.errors import ConfigError
from fleetfit.hooks import build, keep_prefix, weigh_by_samples
from fleetfit.models.vit import vit
from fleetfit.options.lora_product import factor_nearest
from fleetfit.peft.lora import A, B, lora
from fleetfit.submodel import Channels, Submodel, extract, random, rolling

RANK = 3
ARCHITECTURE = lora(vit(4, (1, 8, 8), depth=3, hidden=12, attention_heads=3, patch=4, heads="fixed"), rank=RANK)
LAYOUT = infer_layout(ARCHITECTURE, (1, 2, 3), input_shape=(1, 8, 8))
LAYERS = [name.removesuffix(B) for name in LAYOUT.tensors if name.endswith(B)]
FEDERATION = cast(Federation, SimpleNamespace(problem=SimpleNamespace(layout=LAYOUT)))
FACTORS = ["nearest", "balanced"]
PIECES: dict[str, list[tuple[float, tuple[int, ...], Any]]] = {
    "full": [(1.0, (1, 2, 3), keep_prefix)] * 3,
    "depth": [(1.0, (1,), keep_prefix), (1.0, (1, 2), keep_prefix), (1.0, (1,), keep_prefix)],
    "width": [(0.4, (1, 2, 3), keep_prefix), (0.7, (1, 2, 3), keep_prefix), (0.4, (3,), keep_prefix)],
    "rolling": [(0.4, (1, 2, 3), rolling), (0.7, (1, 2), rolling), (1.0, (1,), rolling)],
    "random": [(0.4, (1, 2, 3), random), (0.7, (1, 2), random), (0.4, (1, 2), random)],
}


def make_state(seed: int, scale: float = 1.0) -> State:
    rng = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(s, generator=rng) for n, s in LAYOUT.shapes({}, LAYOUT.exits).items()}


def piece(width: float, exits: tuple[int, ...], channels: Any, client: int) -> Submodel:
    rng = np.random.default_rng(client)
    chosen: dict[str, Channels] = {
        name: channels(ARCHITECTURE.axes[name], size, 1, client, rng) if ARCHITECTURE.axes[name].scaled else range(size)
        for name, size in ARCHITECTURE.sizes(width).items()
    }
    return Submodel(chosen, exits)


def update(client: int, submodel: Submodel, full: State, samples: int) -> Update:
    return Update(0, client, client, 0, submodel, submodel, extract(LAYOUT, full, submodel), samples, {})


def updates(kind: str) -> list[Update]:
    return [
        update(k, piece(*cut, k), {n: t + make_state(k + 10, 0.3)[n] for n, t in make_state(0).items()}, 5 + 7 * k)
        for k, cut in enumerate(PIECES[kind])
    ]


def merged(received: Sequence[Update], old: State, factors: str = "nearest") -> Aggregate:
    method = build({"name": "fedavg", "options": {"lora_product": {"factors": factors}}})
    return aggregate_updates(FEDERATION, Server(old), received, method.make_aggregator, weigh_by_samples)


def by_loops(received: Sequence[Update], old: State, layer: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean product [out, in] and who trained it: element by element, over full matrices with holes of NaN."""
    holes = {n: torch.full_like(t, float("nan")) for n, t in old.items()}
    products = []
    for one in received:
        placed = put_back(LAYOUT, holes, one.submodel, one.state)
        b, a = (placed[layer + end].double().numpy() for end in (B, A))
        products.append((b @ a, one.num_examples))  # NaN wherever a row of B or a column of A is missing
    mean = old[layer + B].double().numpy() @ old[layer + A].double().numpy()
    covered = np.zeros(mean.shape, dtype=bool)
    for i in range(mean.shape[0]):
        for j in range(mean.shape[1]):
            seen = [(p[i, j], w) for p, w in products if not np.isnan(p[i, j])]
            if seen:
                mean[i, j] = sum(w * x for x, w in seen) / sum(w for _, w in seen)
                covered[i, j] = True
    return mean, covered


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    """The nearest matrix of a rank (Eckart and Young)."""
    u, s, v = np.linalg.svd(matrix)
    return sum((s[i] * np.outer(u[:, i], v[i]) for i in range(min(rank, len(s)))), np.zeros_like(matrix))


def product(state: State, layer: str) -> np.ndarray:
    return state[layer + B].double().numpy() @ state[layer + A].double().numpy()


# ---- the mean product and its factors -------------------------------------------------


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("kind", PIECES)
def test_the_product_is_nearest_to_the_mean(kind: str, factors: str) -> None:
    """Everything else is the plain mean; what nobody trained stays, a layer that nobody had bit for bit."""
    old, received = make_state(0), updates(kind)
    new = apply_mean(old, merged(received, old, factors))
    plain = apply_mean(old, aggregate_plainly(FEDERATION, Server(old), received, weigh_by_samples))
    trained = 0
    for layer in LAYERS:
        mean, covered = by_loops(received, old, layer)
        if not covered.any():
            assert all(torch.equal(new[layer + end], old[layer + end]) for end in (A, B))
            continue
        trained += 1
        np.testing.assert_allclose(product(new, layer), best(mean, RANK), atol=2e-5)
    assert trained == (6 if kind != "depth" else 4)
    thin = {layer + end for layer in LAYERS for end in (A, B)}
    assert all(torch.equal(new[n], plain[n]) for n in old if n not in thin)
    assert len(thin) < len(old)


@pytest.mark.parametrize("kind", PIECES)
def test_the_product_beats_plain_means(kind: str) -> None:
    """And the round says how far both are, over all layers that were trained."""
    old, received = make_state(0), updates(kind)
    aggregate = merged(received, old)
    plain = apply_mean(old, aggregate_plainly(FEDERATION, Server(old), received, weigh_by_samples))
    lost, apart, size = 0.0, 0.0, 0.0
    for layer in LAYERS:
        mean, covered = by_loops(received, old, layer)
        if covered.any():
            off = np.square(product(apply_mean(old, aggregate), layer) - mean).sum()
            off_apart = np.square(product(plain, layer) - mean).sum()
            assert off < off_apart
            lost, apart, size = lost + off, apart + off_apart, size + np.square(mean).sum()
    expected = {"lost": (lost / size) ** 0.5, "lost_apart": (apart / size) ** 0.5}
    assert aggregate.metrics == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("factors", FACTORS)
def test_equal_updates_keep_their_product(factors: str) -> None:
    """With the nearest factors A and B themselves; balanced ones have equal squares: B^T B = A A^T, diagonal."""
    old, same = make_state(0), make_state(1)
    full = piece(1.0, (1, 2, 3), keep_prefix, 0)
    new = apply_mean(old, merged([update(k, full, same, 3 + k) for k in range(3)], old, factors))
    for layer in LAYERS:
        np.testing.assert_allclose(product(new, layer), product(same, layer), atol=2e-5)
        if factors == "nearest":
            assert all(torch.allclose(new[layer + end], same[layer + end], atol=1e-4) for end in (A, B))
            continue
        singular = torch.linalg.svdvals(torch.from_numpy(product(same, layer)))[:RANK].float().diag()
        assert torch.allclose(new[layer + B].T @ new[layer + B], singular, atol=1e-4)
        assert torch.allclose(new[layer + A] @ new[layer + A].T, singular, atol=1e-4)
        largest = new[layer + A].abs().argmax(dim=1)
        assert bool((new[layer + A][range(RANK), largest] > 0).all())


def test_a_keeps_its_singular_values() -> None:
    """No other A of these singular values and this row space is nearer: none that is turned, a little or at random."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        exact = torch.randn(7, 6, generator=rng, dtype=torch.float64)
        was = torch.tensor([[5.0], [1.0], [0.2]]) * torch.randn(3, 6, generator=rng, dtype=torch.float64)
        a = factor_nearest(exact, was)[1]
        torch.testing.assert_close(torch.linalg.svdvals(a), torch.linalg.svdvals(was))
        w, d, _ = torch.linalg.svd(was, full_matrices=False)
        space = torch.linalg.svd(a, full_matrices=False)[2]
        turn = (w / d).T @ a @ space.T  # a = w d turn space
        for size in [1e-3] * 50 + [1.0] * 50:
            slightly = size * torch.randn(3, 3, generator=rng, dtype=torch.float64)
            other = (w * d) @ turn @ torch.linalg.matrix_exp(slightly - slightly.T) @ space
            assert (a - was).norm() < (other - was).norm()


def test_matrices_of_rank_one() -> None:
    """The best approximation of rank one is the largest singular value's; A keeps its length."""
    rng = torch.Generator().manual_seed(0)
    product, a = torch.randn(5, 4, generator=rng).double(), torch.randn(1, 4, generator=rng).double()
    b, factor = factor_nearest(product, a)
    u, s, v = np.linalg.svd(product.numpy())
    np.testing.assert_allclose((b @ factor).numpy(), s[0] * np.outer(u[:, 0], v[0]), atol=1e-12)
    assert float(factor.norm()) == pytest.approx(float(a.norm()))


def test_a_layer_without_product_can_still_learn() -> None:
    """Where B is zero for everybody, as at first, A is its mean and not zero too."""
    old, received = make_state(0), []
    for one in updates("full"):
        state = {n: torch.zeros_like(t) if n.endswith(B) else t for n, t in one.state.items()}
        received.append(update(one.index, one.submodel, state, one.num_examples))
    new, plain = merged(received, old).mean, aggregate_plainly(FEDERATION, Server(old), received, weigh_by_samples).mean
    for layer in LAYERS:
        assert torch.allclose(new[layer + A], plain[layer + A], atol=1e-5)
        assert not new[layer + B].any()


def test_untrained_products_stay() -> None:
    """All A_k stay as sent, so the mean product has the rank: rows of B and columns of A that moved still agree."""
    old, received = make_state(0), []
    for k, one in enumerate(updates("width")):
        full = {n: t + make_state(k + 30, 0.3)[n] if n.endswith(B) else t for n, t in old.items()}
        received.append(update(k, one.submodel, full, one.num_examples))
    new = apply_mean(old, merged(received, old))
    for layer in LAYERS:
        mean, covered = by_loops(received, old, layer)
        assert covered.any() and not covered.all()
        beside = ~covered.any(axis=1)  # rows that nobody had
        assert beside.any()
        np.testing.assert_allclose(product(new, layer)[beside], product(old, layer)[beside], atol=0.5)
        np.testing.assert_allclose(product(new, layer), best(mean, RANK), atol=2e-5)


@pytest.mark.parametrize(("out", "into", "rank"), [(6, 3, 5), (3, 6, 5), (2, 2, 4), (1, 4, 2)])
@pytest.mark.parametrize("columns", [0, 1, 5])
def test_any_shapes_and_ranks(out: int, into: int, rank: int, columns: int) -> None:
    """More rank than the layer has; and an A that is zero, or has less than its rank."""
    rng = torch.Generator().manual_seed(2)
    exact = torch.randn(out, into, generator=rng, dtype=torch.float64)
    a = torch.randn(rank, columns, generator=rng, dtype=torch.float64) @ torch.randn(columns, into, dtype=torch.float64,
                                                                                   generator=rng)  # fmt: skip
    b, a = factor_nearest(exact, a)
    assert tuple(b.shape) == (out, rank) and tuple(a.shape) == (rank, into)
    np.testing.assert_allclose((b @ a).numpy(), best(exact.numpy(), rank), atol=1e-9)


# ---- with what else there is -------------------------------------------------


@pytest.mark.parametrize("option", ["fedavgm", "fedadam", "fedyogi", "feddyn"])
def test_server_optimizers_move_a_matrix_as_a_whole(option: str) -> None:
    """What nobody trained moves with the factors; FedDyn's h, which is what clients did, does not."""
    old, received = make_state(0), updates("width")
    spec: dict[str, Any] = {"name": "fedavg", "options": {"lora_product": {}, option: {}}}
    federation = cast(Federation, SimpleNamespace(problem=FEDERATION.problem, clients=range(9)))
    aggregate = merged(received, old)
    after = build(spec).step(federation, Server(old), aggregate, ())
    assert all(bool(torch.isfinite(t).all()) for t in after.state.values())
    plain = aggregate_plainly(FEDERATION, Server(old), received, weigh_by_samples)
    for name in (layer + end for layer in LAYERS for end in (A, B)):
        alone = plain.coverage[name] == 0
        assert alone.any() and bool((after.state[name] != old[name]).all())
        assert torch.equal(aggregate.coverage[name][~alone], plain.coverage[name][~alone])
        if option == "feddyn":
            assert after.memory["h"][name][alone].abs().max() < 1e-20 < after.memory["h"][name][~alone].abs().max()
            assert torch.equal(after.state[name][alone], aggregate.mean[name][alone])


def test_a_round_without_updates_is_the_plain_mean() -> None:
    old = make_state(0)
    aggregate = merged([], old)
    assert all(torch.equal(t, old[n]) for n, t in apply_mean(old, aggregate).items()) and not aggregate.metrics


@pytest.mark.parametrize("tuning", ["full", "serial_adapter"])
def test_a_run_without_lora_is_refused(tuning: str) -> None:
    described = {**RUN, "method": {"name": "depthfl", "alpha": 0.0, "options": {"lora_product": {}}}}
    with raises(ConfigError, "lora_B", "[peft] name", '"lora"'):
        assemble(load_experiment({**described, "peft": {"name": tuning}}))


RUN: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "digits", "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 6}},
    "model": {"name": "vit", "hidden": 16, "depth": 2, "attention_heads": 2, "patch": 4},
    "peft": {"name": "lora", "rank": 2},
    "fleet": {"groups": [{"budget": 0.5}, {"budget": 1.0}], "tolerance": 0.5},
    "local": {"epochs": 1, "lr": 0.1, "clip_value": 1.0},
    "cohort": {"count": 4},
    "evaluate": {"batch_norm": ["static"], "every": 0},
}


def ran(name: str, out: Path, engine: str = "local", plus: bool = True) -> ff.Run:
    alone = {"depthfl": {"alpha": 0.0}}.get(name, {})
    method = {"name": name, **alone, "options": {"lora_product": {}} if plus else {}}
    workers = {"workers": 2} if engine == "processes" else {}
    return ff.run({**RUN, "method": method, "engine": {"name": engine, **workers}}, out=out)


@pytest.mark.parametrize("name", ["depthfl", "scalefl"])
def test_runs_by_depth_and_by_width(name: str, tmp_path: Path) -> None:
    """It is not the plain mean, and each round says how far that would have been from the mean product."""
    run, plain = ran(name, tmp_path / "product"), ran(name, tmp_path / "plain", plus=False)
    assert not [f for m in run.metrics for f in m["failures"]]
    assert not all(torch.equal(t, plain.server.state[n]) for n, t in run.server.state.items())
    assert all(0 <= m["server"]["lost"] < m["server"]["lost_apart"] for m in run.metrics)
    assert "server" not in plain.metrics[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depthfl", "scalefl", "reefl"])
def test_runs_have_the_same_bits_on_every_engine(name: str, tmp_path: Path) -> None:
    here, there = ran(name, tmp_path / "local"), ran(name, tmp_path / "processes", "processes")
    assert all(torch.equal(t, there.server.state[n]) for n, t in here.server.state.items())
    assert [m["server"] for m in here.metrics] == [m["server"] for m in there.metrics]
