"""Server optimizers and FedDyn against plain loops over numbers, with elements that a round does not cover."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import raises
from support.training import assert_close, last_exit_loss, plain_sgd
from tiny import plain, tiny_federation
from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.core import Federation, Server, Simulation
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ConfigError
from fleetfit.hooks import build, weigh_equally
from fleetfit.layout import State
from fleetfit.rounds import Settings, run_round, start

# the means of two rounds; None: nobody trained the element
ROUNDS = [[1.5, None, 0.2], [1.0, 3.0, None]]
START = [1.0, 2.0, -0.5]


def moved(option: str, **values: Any) -> list[tuple[list[float], Mapping[str, Any]]]:
    """Step through the two rounds and return state and memory after each."""
    step = build({"name": "fedavg", "options": {option: values}}).step
    federation, _ = tiny_federation({"name": "fedavg"})
    server, states = Server({"w": torch.tensor(START)}), []
    for means in ROUNDS:
        mean = torch.tensor([math.nan if m is None else m for m in means])
        coverage = torch.tensor([0.0 if m is None else 2.0 for m in means])
        server = step(federation, server, Aggregate({"w": mean}, {"w": coverage}), [])
        states.append((server.state["w"].tolist(), server.memory))
    assert server.round == 0  # the core counts
    return states


def test_fedavgm_is_hsu_et_al_s_rule() -> None:
    """v <- beta v + d; x <- x + lr v, with d = mean - x."""
    beta, lr = 0.9, 0.5
    x, v = list(START), [0.0, 0.0, 0.0]
    for means, (state, memory) in zip(ROUNDS, moved("fedavgm", momentum=beta, lr=lr), strict=True):
        for i, m in enumerate(means):
            if m is not None:
                v[i] = beta * v[i] + (m - x[i])
                x[i] += lr * v[i]
        assert state == pytest.approx(x, rel=1e-6)
        assert memory["velocity"]["w"].tolist() == pytest.approx(v, rel=1e-6)


def test_a_step_on_a_part_of_the_state_reads_an_aggregate_by_name() -> None:
    """x <- x + (mean - x) / 2 in the first round, also where an aggregator gives its tensors in another order."""
    step = build({"name": "fedavg", "options": {"fedavgm": {"momentum": 0.9, "lr": 0.5}}}).step
    federation, _ = tiny_federation({"name": "fedavg"})
    part = {"level1/a": torch.tensor([0.0, 2.0]), "level1/b": torch.tensor([4.0])}
    mean = {"level1/b": torch.tensor([8.0]), "level1/a": torch.tensor([2.0, math.nan])}
    coverage = {"level1/b": torch.tensor([1.0]), "level1/a": torch.tensor([3.0, 0.0])}
    server = Server({"w": torch.tensor(START), **part})
    state = step(federation, server, Aggregate(mean, coverage, base_state=part), []).state
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        "w": START, "level1/a": [1.0, 2.0], "level1/b": [6.0],
    }  # fmt: skip


@pytest.mark.parametrize("begins", [None, 0.0, 0.04])
@pytest.mark.parametrize("option", ["fedadam", "fedyogi"])
def test_fedadam_and_fedyogi_are_algorithm_2(option: str, begins: float | None) -> None:
    """m <- b1 m + (1 - b1) d; v <- b2 v + (1 - b2) d^2, or v - (1 - b2) d^2 sign(v - d^2); x <- x + lr m / (sqrt(v) +
    tau); v begins at tau^2 or as told, and there is no bias correction.
    """
    lr, b1, b2, tau = 0.1, 0.9, 0.99, 1e-3
    x, m, v = list(START), [0.0] * 3, [tau**2 if begins is None else begins] * 3
    states = moved(option) if begins is None else moved(option, v0=begins)
    for means, (state, memory) in zip(ROUNDS, states, strict=True):
        for i, mean in enumerate(means):
            if mean is None:
                continue
            d = mean - x[i]
            m[i] = b1 * m[i] + (1 - b1) * d
            if option == "fedadam":
                v[i] = b2 * v[i] + (1 - b2) * d * d
            else:
                v[i] -= (1 - b2) * d * d * (1 if v[i] > d * d else -1 if v[i] < d * d else 0)
            x[i] += lr * m[i] / (math.sqrt(v[i]) + tau)
        assert state == pytest.approx(x, rel=1e-5)
        assert memory["first"]["w"].tolist() == pytest.approx(m, rel=1e-5)
        assert memory["second"]["w"].tolist() == pytest.approx(v, rel=1e-5)


def test_feddyns_server_is_algorithm_1() -> None:
    """h <- h - (alpha / K) sum_k (w_k - x); x <- mean - h / alpha, K = 6 clients in all, of which 2 took part.

    By hand for the first element in round 1, alpha 0.5: h = -0.5 / 6 * 2 * (1.5 - 1) = -1/12, x = 1.5 + 1/6.
    """
    alpha, everybody, took_part = 0.5, 6, 2
    x, h = list(START), [0.0, 0.0, 0.0]
    states = moved("feddyn", alpha=alpha)
    assert states[0][0][0] == pytest.approx(1.5 + 1 / 6, rel=1e-6)
    for means, (state, memory) in zip(ROUNDS, states, strict=True):
        for i, mean in enumerate(means):
            if mean is not None:
                h[i] -= alpha / everybody * took_part * (mean - x[i])
                x[i] = mean - h[i] / alpha
        assert state == pytest.approx(x, rel=1e-6)
        assert memory["h"]["w"].tolist() == pytest.approx(h, rel=1e-6)


@pytest.mark.parametrize("option", ["fedavgm", "fedadam", "fedyogi", "feddyn"])
def test_untrained_elements_keep_their_bits(option: str) -> None:
    """Neither by a nan nor by old momentum: element 2 has momentum from round 1 and is not covered in round 2."""
    first, second = moved(option)
    assert first[0][1] == START[1]
    assert second[0][2] == first[0][2] != START[2]
    assert all(later["w"][2] == before["w"][2] for later, before in zip(
        second[1].values(), first[1].values(), strict=True))  # fmt: skip
    assert all(bool(torch.isfinite(later["w"]).all()) for later in second[1].values())


# ---- FedDyn against a plain run ----------------------------------------------------------------------------------

LOCAL = plain(lr=0.05, epochs=3, batch_size="all")
CHOSEN = {0: [0, 1, 2, 3], 1: [1, 2], 2: [0, 2, 5]}


def by_round(federation: Federation, server: Server, rng: Any) -> list[int]:
    return CHOSEN[server.round]


def alike(spec: Mapping[str, Any]) -> tuple[Federation, Simulation]:
    """Six clients that all train the full model."""
    federation, simulation = tiny_federation({**spec, "hooks": {"choose_clients": by_round}}, norm=False)
    levels = (replace(federation.levels[2], needs=0.0),)
    return replace(federation, levels=levels), simulation


def plain_feddyn(federation: Federation, simulation: Simulation, alpha: float) -> State:
    """Acar et al., Algorithm 1, with full models: a loop over rounds, clients and tensors, in float64."""
    x = {n: t.double() for n, t in start(federation).state.items()}
    h = {n: torch.zeros_like(t) for n, t in x.items()}
    g = {client: {n: torch.zeros_like(t) for n, t in x.items()} for client in range(6)}
    for chosen in CHOSEN.values():
        trained = []
        for client in chosen:

            def penalty(weights: State, client: int = client, x: State = x) -> Tensor:
                linear = sum((g[client][n] * w).sum() for n, w in weights.items())
                return alpha / 2 * sum(((w - x[n]) ** 2).sum() for n, w in weights.items()) - linear  # type: ignore[return-value]

            data = simulation.device(client).data
            batches = [data.batch(data.split("train"))] * LOCAL.epochs
            w = plain_sgd(x, (1, 2, 3), batches, last_exit_loss, LOCAL, penalty)
            g[client] = {n: g[client][n] - alpha * (w[n] - x[n]) for n in x}
            trained.append(w)
        for n in x:
            h[n] = h[n] - alpha / 6 * sum(w[n] - x[n] for w in trained)
        x = {n: sum(w[n] for w in trained) / len(trained) - h[n] / alpha for n in x}  # type: ignore[misc]
    return x


def test_feddyn_is_algorithm_1() -> None:
    federation, simulation = alike({"name": "fedavg", "options": {"feddyn": {"alpha": 0.2}}})
    engine, server = local_engine(simulation), start(federation)
    for _ in CHOSEN:
        server, report = run_round(federation, engine, Settings(3, LOCAL), server)
        assert not report["failures"]
    assert_close(server.state, plain_feddyn(federation, simulation, 0.2), atol=2e-5)


def test_feddyn_by_samples_keeps_the_size_of_h() -> None:
    """Six clients of 28 samples each: weights by samples say what weights by count say, and so must h."""
    states = []
    for weight in ("by_count", "by_samples"):
        federation, simulation = alike({"name": "fedavg", "options": {"feddyn": {"alpha": 0.2}}})
        spec = {**federation.method_spec, "hooks": {**federation.method_spec["hooks"], "weigh": weight}}
        federation = replace(federation, method=build(spec), method_spec=spec)
        engine, server = local_engine(simulation), start(federation)
        for _ in CHOSEN:
            server, _ = run_round(federation, engine, Settings(3, LOCAL), server)
        states.append(server)
    first, second = ({**s.state, **{f"h of {name}": h for name, h in s.memory["h"].items()}} for s in states)
    assert_close(second, {name: tensor.double() for name, tensor in first.items()}, atol=2e-5)


def test_feddyn_works_with_moving_channels() -> None:
    """A gradient kept for other channels is moved to the new ones; and two parts that both count clients agree."""
    spec = {"name": "scalefl", "hooks": {"choose_channels": "rolling"}, "options": {"feddyn": {}}}
    federation, simulation = tiny_federation(spec)
    assert federation.method.weigh is weigh_equally
    engine, server = local_engine(simulation), start(federation)
    for _ in range(4):
        server, report = run_round(federation, engine, Settings(4, plain(lr=0.05, batch_size=8)), server)
        assert not report["failures"]
    assert all(bool(torch.isfinite(t).all()) for t in server.state.values())


@pytest.mark.parametrize("option", ["fedavgm", "fedadam", "fedyogi", "feddyn"])
def test_each_level_of_decoupled_has_its_own_moments(option: str) -> None:
    """A level alone in the fleet moves as it does beside others; and one that nobody trained in a round stays."""
    spec = {"name": "decoupled", "options": {option: {}}}

    def finished(chosen: Mapping[int, list[int]]) -> Server:
        hooks = {"choose_clients": lambda federation, server, rng: chosen[server.round]}
        federation, simulation = tiny_federation({**spec, "hooks": hooks}, norm=False)
        engine, server = local_engine(simulation), start(federation)
        for _ in chosen:
            server, report = run_round(federation, engine, Settings(3, plain(lr=0.1, batch_size="all")), server)
            assert not report["failures"]
        return server

    both, alone = finished({0: [0, 1], 1: [0], 2: [0, 1]}), finished({0: [0], 1: [0], 2: [0]})
    mine = {n: t for n, t in both.state.items() if n.startswith("level1/")}
    # a job's seed has its place in the round, so the samples of a batch are added up in another order
    assert mine and all(torch.allclose(t, alone.state[n], atol=1e-4) for n, t in mine.items())
    assert any(n.startswith("level2/") for n in next(iter(both.memory.values())))


@pytest.mark.parametrize(
    ("option", "key", "allowed", "refused"),
    [
        ("fedavgm", "momentum", [0.0, 0.99], [-0.1, 1.0]),
        ("fedavgm", "lr", [1e-6, 3.0], [0.0, -1.0]),
        *((option, key, [0.0, 0.99], [-0.1, 1.0]) for option in ("fedadam", "fedyogi") for key in ("beta1", "beta2")),
        *((option, key, [1e-6, 3.0], [0.0, -1.0]) for option in ("fedadam", "fedyogi") for key in ("lr", "tau")),
        *((option, "v0", [0.0, 3.0], [-1e-6]) for option in ("fedadam", "fedyogi")),
        ("feddyn", "alpha", [1e-6, 3.0], [0.0, -1.0]),
        ("fedprox", "mu", [0.0, 3.0], [-1e-6]),
        ("krum", "fraction", [1e-6, 0.49], [0.0, 0.5]),
        ("outliers", "threshold", [1.01, 9.0], [1.0, -1.0]),
        ("outliers", "min_clients", [3, 9], [2]),
        ("trimmed_mean", "fraction", [1e-6, 0.5], [0.0, 0.51]),
    ],
)
def test_settings_of_options_have_ranges(option: str, key: str, allowed: list[float], refused: list[float]) -> None:
    for value in allowed:
        build({"name": "fedavg", "options": {option: {key: value}}})
    for value in refused:
        with raises(ConfigError, value, key=f"method.options.{option}.{key}"):
            build({"name": "fedavg", "options": {option: {key: value}}})
