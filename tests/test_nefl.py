"""NeFL's widths: which tensors are norms, both means by plain loops, and who trains, evaluates and exports them."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_folders import stopped_run
from small_models import problem_of
from support import raises
from support.bits import assert_same_bits, has_same_bits, have_same_state
from support.engines import RecordingEngine, choose_always
from support.training import batch_moments, plain_outputs
from tiny import plain, tiny_data, tiny_federation
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.anatomy import Architecture, Axis, State
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Evaluation, Federation, Level, Problem, Simulation, Update
from fleetfit.core.tasks import classification
from fleetfit.engines.local import local as local_engine
from fleetfit.engines.processes import processes
from fleetfit.errors import ConfigError
from fleetfit.evaluation import EvaluationScope, evaluate
from fleetfit.hooks import build
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.seeds import make_numpy_rng

SIZES = [(4, 6), (8, 12)]
"""Channels of the axes a and b at the widths 0.5 and 1."""
NORMS = [f"blocks.{i}.1.{kind}" for i in range(3) for kind in ("weight", "bias")]
LOCAL = plain(lr=0.3, epochs=2, batch_size=8)
HERE = Path(__file__).parent
TINY: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": f"{HERE}/tiny.py:tiny_data", "partition": {"kind": "iid", "clients": 6}},
    "model": {"name": f"{HERE}/tiny.py:tiny"},
    "method": {"name": "nefl", "tiers": 1},
    "fleet": {"levels": [0.3, 1.0], "tolerance": 0.25, "groups": [{"budget": 0.35}, {"budget": 1.0}]},
    "local": {"epochs": 1, "batch_size": 8, "lr": 0.1},
    "cohort": {"count": 5},
    "evaluate": {"every": 0, "statistics_samples": 60},
}


def fleet(
    spec: Mapping[str, Any], widths: tuple[float, ...] = (0.5, 1.0), **more: Any
) -> tuple[Federation, Simulation]:
    """Clients of levels of one exit: those of the last one that they afford; budgets are 0.2, 0.5 and 1, in turn."""
    federation, simulation = tiny_federation(spec, **more)
    problem = federation.problem.replace_exits((3,))
    needs = (0.2, 1.0) if len(widths) == 2 else (0.2, 0.5, 1.0)
    levels = tuple(
        Level(str(i + 1), problem.submodel(width, (3,)), width, need)
        for i, (width, need) in enumerate(zip(widths, needs, strict=True))
    )
    problem = problem.replace_levels(level.submodel for level in levels)
    return replace(federation, problem=problem, levels=levels), replace(simulation, problem=problem)


def narrow(state: Mapping[str, Tensor], level: int) -> dict[str, Tensor]:
    """The first channels of every tensor of TinyNet; inputs and classes are whole."""
    a, b = SIZES[level]
    sizes = {"stem.weight": (a, 16), "stem.bias": (a,), "heads.3.weight": (4, a), "heads.3.bias": (4,)}
    for i in range(3):
        sizes |= {f"blocks.{i}.0.weight": (b, a), f"blocks.{i}.0.bias": (b,)}
        sizes |= {f"blocks.{i}.1.weight": (b,), f"blocks.{i}.1.bias": (b,)}
        sizes |= {f"blocks.{i}.4.weight": (a, b), f"blocks.{i}.4.bias": (a,)}
    return {name: state[name][tuple(map(slice, sizes[name]))] for name in state if name in sizes}


# ---- which tensors are norms -------------------------------------------------


@dataclass(frozen=True)
class Mixed(Architecture):
    """Norms of PyTorch, one of its own, one that inherits, and parts that are none whatever their names say."""

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {"a": Axis(8)}

    @property
    def blocks(self) -> int:
        return 1

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        a = axes["a"]
        return nn.Sequential(
            nn.Linear(16, a), nn.GroupNorm(1, a), nn.LayerNorm(a), nn.RMSNorm(a), OwnNorm(a), Special(a), NormFree(a),
            nn.PReLU(a), nn.Linear(a, 4),
        )  # fmt: skip


class OwnNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))


class Special(nn.BatchNorm1d):
    pass


class NormFree(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.Linear(size, size)


def test_norms_are_found_by_their_class() -> None:
    problem = Problem(Mixed(), (16,), classification, (1,))
    expected = {"1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "4.scale", "5.weight", "5.bias"}
    assert problem.norms == expected


@pytest.mark.parametrize("name", ["cnn", "resnet", "resnet18", "bert", "vit", "vim", "mlp"])
def test_norms_of_built_in_models(name: str) -> None:
    """They are the layers whose weight is a vector; a ResNet's stem has one that no name tells."""
    problem = problem_of(name)
    shapes = problem.layout.shapes({}, problem.exits)
    layers = {n.removesuffix("weight") for n, shape in shapes.items() if n.endswith(".weight") and len(shape) == 1}
    assert problem.norms == {layer + kind for layer in layers for kind in ("weight", "bias")} & shapes.keys()
    assert name != "resnet" or {"stem.1.weight", "stem.1.bias"} <= problem.norms


# ---- the means -------------------------------------------------


@pytest.mark.parametrize("clients", [(0, 1, 2, 3, 4, 5), (0, 1, 3), (2, 5)])
def test_two_rounds_by_hand(clients: tuple[int, ...]) -> None:
    """Norms: sum n_i w_i / sum n_i over the clients of a level; all else over clients whose level has the element.

    Clients 2 and 5 have the large level, all others the small one. Without a client old values stay, to the last bit.
    """
    spec = {"name": "nefl", "hooks": {"choose_clients": choose_always(*clients)}}
    federation, simulation = fleet(spec, shares=(3, 5, 7, 11, 13, 3))
    server, engine = start(federation), RecordingEngine(simulation)
    shared = dict(server.state)
    own = [{name: tensor for name, tensor in narrow(server.state, level).items() if name in NORMS} for level in (0, 1)]
    for _ in range(2):
        engine.jobs.clear()
        engine.replies.clear()
        server, report = run_round(federation, engine, Settings(2, LOCAL), server)
        updates = [reply for reply in engine.replies if isinstance(reply, Update)]
        assert not report["failures"] and [update.client for update in updates] != [] and len(updates) == len(clients)
        for job in engine.jobs:
            assert job.level == (1 if job.client in (2, 5) else 0)
            assert_same_bits(job.state, {**narrow(shared, job.level), **own[job.level]})
        for level in {update.level for update in updates}:
            trained = [update for update in updates if update.level == level]
            samples = sum(update.num_examples for update in trained)
            for name in NORMS:
                total = sum(update.state[name].double() * update.num_examples for update in trained)
                actual = server.state[f"level{level + 1}/{name}"]
                torch.testing.assert_close(actual.double(), total / samples, rtol=1e-6, atol=1e-8)
                assert not torch.equal(actual, own[level][name])
                own[level][name] = actual
        for name in shared.keys() - set(NORMS):
            sums, weights = torch.zeros(shared[name].shape, dtype=torch.float64), torch.zeros(shared[name].shape)
            for update in updates:
                narrow({name: sums}, update.level)[name].add_(update.state[name] * update.num_examples)
                narrow({name: weights}, update.level)[name].add_(update.num_examples)
            covered, actual = weights > 0, server.state[name]
            torch.testing.assert_close(actual[covered].double(), (sums / weights)[covered], rtol=1e-6, atol=1e-8)
            assert torch.equal(actual[~covered], shared[name][~covered])
            shared[name] = actual
    levels = {1 if client in (2, 5) else 0 for client in clients}
    assert server.state.keys() == shared.keys() | {f"level{level + 1}/{n}" for level in levels for n in NORMS}


def test_a_level_that_nobody_trains_keeps_its_norms() -> None:
    """Also after it was trained; and the shared parts of its model move on."""
    cohorts = iter([[0, 2], [2, 5], [2, 5]])
    spec = {"name": "nefl", "hooks": {"choose_clients": lambda federation, server, rng: next(cohorts)}}
    federation, simulation = fleet(spec)
    first, *_, last = run(federation, local_engine(simulation), Settings(3, LOCAL), start(federation))
    for name in NORMS:
        assert has_same_bits(last.server.state[f"level1/{name}"], first.server.state[f"level1/{name}"])
        assert not torch.equal(last.server.state[f"level2/{name}"], first.server.state[f"level2/{name}"])
    assert not torch.equal(last.server.state["stem.weight"][:4], first.server.state["stem.weight"][:4])


@pytest.mark.parametrize("norm", [False, True])
def test_without_norms_it_is_heterofl(norm: bool) -> None:
    """By samples, bit for bit; with norms it is not."""
    states = []
    for name in ("nefl", "heterofl"):
        spec = {"name": name, "hooks": {"weigh": "by_samples"}}
        federation, simulation = fleet(spec, norm=norm, shares=(3, 5, 7, 11, 13, 3), dropout=0.2)
        *_, last = run(federation, local_engine(simulation), Settings(3, LOCAL), start(federation))
        states.append({name: last.server.state[name] for name in federation.problem.layout.tensors})
    assert has_same_bits(*states) is not norm


def test_a_model_without_norms_is_noted() -> None:
    notes = {}
    for norm in (True, False):
        tables = {**TINY, "model": {**TINY["model"], "norm": norm}}
        notes[norm] = [note for note in assemble(load_experiment(tables)).notes if "nefl" in note]
    assert not notes[True] and len(notes[False]) == 1


# ---- drawn levels -------------------------------------------------


@pytest.mark.parametrize("tiers", [0, 1, 2, 5])
def test_a_client_draws_from_its_own_level_and_those_below(tiers: int) -> None:
    """1,200 draws each: uniform within 5 standard deviations, and the same again from the same generator."""
    spec = {"name": "nefl", "tiers": tiers, "hooks": {"choose_clients": choose_always(0, 1, 2)}}
    federation, _ = fleet(spec, widths=(0.5, 0.75, 1.0))
    server, counts = start(federation), Counter[tuple[int, int]]()
    for seed in range(1200):
        slots = federation.method.assign(federation, server, make_numpy_rng(seed, "cohort"))
        assert slots == federation.method.assign(federation, server, make_numpy_rng(seed, "cohort"))
        for client, level, submodel in slots:
            assert submodel == federation.levels[level].submodel
            counts[client, level] += 1
    assert set(counts) == {(own, level) for own in range(3) for level in range(max(0, own - tiers), own + 1)}
    for (own, _), count in counts.items():
        assert abs(count - 1200 / (min(own, tiers) + 1)) < 5 * (1200 / 4) ** 0.5


def test_a_drawn_level_trains_the_norms_of_that_level() -> None:
    spec = {"name": "nefl", "tiers": 1, "hooks": {"choose_clients": choose_always(2, 5)}}
    federation, simulation = fleet(spec)
    engine, server = RecordingEngine(simulation), start(federation)
    for _ in range(6):
        engine.jobs.clear()
        before = server.state
        server, _ = run_round(federation, engine, Settings(6, LOCAL), server)
        levels = {job.level for job in engine.jobs}
        for level in (0, 1):
            names = [f"level{level + 1}/{name}" for name in NORMS]
            moved = [name for name in names if name in server.state and not has_same_bits(
                server.state[name], before.get(name, torch.empty(0)))]  # fmt: skip
            assert moved == (names if level in levels else [])
        if levels == {0, 1}:
            return
    raise AssertionError("no round drew both levels")


def test_tiers_below_zero_are_refused() -> None:
    with raises(ConfigError, key="method.tiers"):
        build({"name": "nefl", "tiers": -1})


# ---- who has them -------------------------------------------------


def test_workers_have_the_same_bits() -> None:
    federation, simulation = fleet({"name": "nefl", "tiers": 1})
    states = []
    for engine in (local_engine(simulation), processes(simulation, workers=2)):
        with contextlib.closing(engine):
            *_, last = run(federation, engine, Settings(3, LOCAL), start(federation))
        states.append(last.server.state)
    assert_same_bits(*states)
    assert {"level1/blocks.0.1.weight", "level2/blocks.0.1.weight"} <= states[0].keys()


def test_a_level_is_evaluated_with_its_own_norms() -> None:
    """The accuracy of each level on the test set, by a plain forward pass with the batch's own statistics."""
    federation, simulation = fleet({"name": "nefl"}, shares=(3, 5, 7, 11, 13, 3))
    federation = replace(federation, device=simulation.device(None))
    engine = RecordingEngine(simulation)
    *_, last = run(federation, engine, Settings(3, LOCAL), start(federation))
    data, state = tiny_data(), last.server.state
    x, y = data.batch(data.split("test"))
    scope = EvaluationScope(Evaluation(batch_size=len(y)), norms=("batch",))
    columns, _ = evaluate(federation, engine, last.server, scope)
    right = []
    for level in (0, 1):
        own = {**narrow(state, level), **{name: state[f"level{level + 1}/{name}"] for name in NORMS}}
        (logits,) = plain_outputs(own, x, (3,), batch_moments)
        right.append(float((logits.argmax(1) == y).float().mean()))
        assert columns["batch"]["test_levels"][str(level + 1)] == pytest.approx(right[-1])
        foreign = {**own, **{name: state[f"level2/{name}"][: SIZES[level][1]] for name in NORMS}}
        (others,) = plain_outputs(foreign, x, (3,), batch_moments)
        assert torch.allclose(others, logits) is (level == 1)
    for job in (job for job in engine.jobs if job.kind != "train"):
        assert all(has_same_bits(job.state[name], state[f"level{job.level + 1}/{name}"]) for name in NORMS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    return ff.run(TINY, out=tmp_path_factory.mktemp("nefl") / "whole")


def test_a_resumed_run_is_the_uninterrupted_one(whole: ff.Run, tmp_path: Path) -> None:
    stopped_run(TINY, tmp_path / "run", after=2)
    assert have_same_state(ff.resume(tmp_path / "run"), whole)


def test_a_run_with_server_momentum_is_resumed(tmp_path: Path) -> None:
    """The momentum has a tensor of its own for each level in place of the shared one."""
    momentum = {**TINY, "method": {**TINY["method"], "options": {"fedavgm": {"momentum": 0.5}}}}
    whole = ff.run(momentum, out=tmp_path / "whole")
    velocity = whole.server.memory["velocity"]
    assert NORMS[0] not in velocity and f"level1/{NORMS[0]}" in velocity
    stopped_run(momentum, tmp_path / "run", after=2)
    assert have_same_state(ff.resume(tmp_path / "run"), whole)


def test_the_model_of_a_level_has_its_own_norms(whole: ff.Run) -> None:
    state: State = whole.server.state
    for level, other in ((1, 2), (2, 1)):
        tensors = dict(whole.model(level).named_parameters())
        for name in NORMS:
            own = state[f"level{level}/{name}"]
            n = min(len(own), len(state[f"level{other}/{name}"]))
            assert has_same_bits(tensors[name].detach(), own)
            assert not torch.equal(own[:n], state[f"level{other}/{name}"][:n])
        assert has_same_bits(tensors["stem.bias"].detach(), state["stem.bias"][: len(tensors["stem.bias"])])


def test_a_run_begins_with_the_norms_of_the_largest_level(whole: ff.Run, tmp_path: Path) -> None:
    run = ff.run(TINY, out=tmp_path / "run", init_from=whole.folder, method="fedavg", rounds=1)
    first = start(run.assembly.federation).state
    assert np.all([has_same_bits(first[name], whole.server.state[f"level2/{name}"]) for name in NORMS])
    assert has_same_bits(first["stem.weight"], whole.server.state["stem.weight"])


@pytest.mark.parametrize("method", ["nefl", "decoupled"])
def test_tensors_of_a_level_need_the_same_channels_in_all_rounds(method: str) -> None:
    """They are sent and averaged by position."""
    with raises(ConfigError, key="method.hooks.choose_channels"):
        assemble(load_experiment({**TINY, "method": {"name": method, "hooks": {"choose_channels": "rolling"}}}))
