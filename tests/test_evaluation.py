"""The columns of an evaluation against an independent plain one, and what happens where something is missing.

The network on the plain side is the one of `test_train`, in float64, with the moments of the pooled training data
(static) or of the batch itself (batch).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.engines import RecordingEngine
from support.training import InlineEngine, Moments, batch_moments, plain_outputs, pooled_moments
from tiny import plain, tiny_data, tiny_federation, tiny_parts
from torch import Tensor

from fleetfit.core import Device, Evaluation, Failure, Federation, Job, Problem, Server, Simulation, Update
from fleetfit.core.tasks import classification
from fleetfit.engines.local import local as local_engine
from fleetfit.evaluation import (
    EvaluationScope,
    build_level_module,
    estimate_statistics,
    evaluate,
    evaluate_on_device,
    has_batch_norm,
)
from fleetfit.evaluation.statistics import compute_moments
from fleetfit.layout import State
from fleetfit.models.cnn import cnn
from fleetfit.rounds import Settings, run_round, start
from fleetfit.submodel import extract

CLIENTS = 20
WANTED = EvaluationScope(Evaluation(batch_size=128), statistics_samples=10**6)


@dataclass
class Trained:
    federation: Federation
    simulation: Simulation
    server: Server


@pytest.fixture(scope="module", params=["scalefl", "decoupled"])
def fleet(request: pytest.FixtureRequest) -> Trained:
    """Twenty clients of three levels, after five rounds in which twelve trained: neither at chance nor perfect."""
    federation, simulation = tiny_federation({"name": request.param}, clients=CLIENTS, cohort=12)
    data = tiny_data(480)
    simulation = replace(simulation, data=data, parts=tiny_parts(data, CLIENTS))
    counts = np.array([len(p["train"]) for p in simulation.parts])
    federation = replace(
        federation, clients=replace(federation.clients, num_examples=counts), device=simulation.device(None)
    )
    settings = Settings(9, plain(lr=0.1, epochs=2, batch_size=4))
    server = start(federation)
    for _ in range(5):
        server, _ = run_round(federation, local_engine(simulation), settings, server)
    return Trained(federation, simulation, server)


# ---- the plain evaluation -------------------------------------------------


def state_of(fleet: Trained, level: int) -> State:
    state, piece = fleet.server.state, fleet.federation.levels[level].submodel
    mine = {n.partition("/")[2]: t for n, t in state.items() if n.startswith(f"level{level + 1}/")}
    first = {n: t for n, t in state.items() if "/" not in n}
    return {n: t.double() for n, t in (mine or extract(fleet.federation.problem.layout, first, piece)).items()}


class Plain:
    """One level's model, and what it says of some samples."""

    def __init__(self, fleet: Trained, level: int, norm: str) -> None:
        self.state = state_of(fleet, level)
        self.exits = fleet.federation.levels[level].submodel.exits
        self.moments: Moments = batch_moments
        if norm == "static":
            moments = pooled_moments(fleet.federation, fleet.simulation, self.state, level)
            self.moments = lambda layer, z: (moments[f"{layer}.mean"], moments[f"{layer}.var"])

    def logits(self, x: Tensor) -> list[Tensor]:
        return plain_outputs(self.state, x.double(), self.exits, self.moments)

    def hits(self, x: Tensor, y: Tensor) -> list[float]:
        return [float((z.argmax(1) == y).double().mean()) for z in self.logits(x)]

    def ensemble(self, x: Tensor, y: Tensor) -> float:
        return float((torch.stack([F.softmax(z, 1) for z in self.logits(x)]).mean(0).argmax(1) == y).double().mean())


def mean(values: Sequence[float]) -> Any:
    return pytest.approx(sum(values) / len(values), abs=1e-9)


def share(fleet: Trained, client: int, split: str) -> tuple[Tensor, Tensor]:
    data = fleet.simulation.device(client).data
    return data.batch(data.split(split))


@pytest.mark.parametrize("norm", ["static", "batch"])
def test_columns_are_those_of_a_plain_evaluation(fleet: Trained, norm: str) -> None:
    """global and local, the worst tenth (two of twenty clients), exits, ensemble, best exit, avg and full, levels."""
    scope = replace(WANTED, norms=(norm,))
    columns = evaluate(fleet.federation, local_engine(fleet.simulation), fleet.server, scope)[0][norm]
    models = [Plain(fleet, level, norm) for level in range(3)]
    test = {c: share(fleet, c, "test") for c in range(CLIENTS)}
    full = {c: models[2].hits(*test[c]) for c in test}
    own = {c: models[c % 3].hits(*test[c]) for c in test}
    by_client = sorted(h[-1] for h in full.values()), sorted(h[-1] for h in own.values())
    assert columns["global"] == mean(by_client[0])
    assert columns["local"] == mean(by_client[1])
    assert columns["global_worst_tenth"] == mean(by_client[0][:2])
    assert columns["local_worst_tenth"] == mean(by_client[1][:2])
    assert columns["global_clients"] == columns["local_clients"] == CLIENTS
    assert columns["per_client"]["global"] == pytest.approx({str(c): h[-1] for c, h in full.items()})
    assert columns["per_client"]["local"] == pytest.approx({str(c): h[-1] for c, h in own.items()})
    exits = len(models[2].exits)
    assert columns["exits"] == [mean([h[e] for h in full.values()]) for e in range(exits)]
    assert columns["mean_over_exits"] == mean([h[e] for h in full.values() for e in range(exits)])
    assert columns["ensemble"] == mean([models[2].ensemble(*test[c]) for c in test])
    for level in range(3):
        mine = [own[c] for c in test if c % 3 == level]
        entry = columns["levels"][str(level + 1)]
        assert entry["clients"] == len(mine)
        assert entry["local"] == mean([h[-1] for h in mine])
        assert entry["exits"] == [mean([h[e] for h in mine]) for e in range(len(models[level].exits))]
    best = {}
    for c in test:  # the shallower of equally good exits
        on_validation = models[2].hits(*share(fleet, c, "validation"))
        best[c] = full[c][on_validation.index(max(on_validation))]
    assert columns["best_exit"] == mean(list(best.values()))
    whole = fleet.simulation.data.batch(fleet.simulation.data.split("test"))
    scores = [model.hits(*whole) for model in models]
    assert columns["full"] == pytest.approx(scores[2][-1])
    assert columns["avg"] == mean([s[-1] for s in scores])
    assert columns["test_exits"] == pytest.approx(scores[2])
    assert columns["test_levels"] == pytest.approx({str(i + 1): s[-1] for i, s in enumerate(scores)})
    assert columns["test_samples"] == len(whole[1])
    assert columns["global_samples"] == sum(len(y) for _, y in test.values())
    assert len({round(s[-1], 6) for s in scores}) > 1 and 0.3 < scores[2][-1] < 1  # there is something to confuse


def test_both_norm_policies_are_columns(fleet: Trained) -> None:
    columns, moments = evaluate(fleet.federation, local_engine(fleet.simulation), fleet.server, WANTED)
    assert list(columns) == ["split", "static", "batch"]
    assert columns["split"] == "test"
    assert columns["static"] != {k: v for k, v in columns["batch"].items() if k in columns["static"]}
    assert columns["batch"]["batch_size"] == 128 and columns["batch"]["order"].startswith("shuffled")
    assert "batch_size" not in columns["static"]
    assert "best_exit" in columns["static"] and "best_exit" not in columns["batch"]
    assert set(moments) == {0, 1, 2}
    stored = replace(WANTED, evaluation=Evaluation(batch_size=8, shuffle=False))
    again = evaluate(fleet.federation, local_engine(fleet.simulation), fleet.server, stored)[0]
    assert again["batch"]["batch_size"] == 8 and again["batch"]["order"] == "stored"


def test_only_batch_statistics_depend_on_batches(fleet: Trained) -> None:
    """The test set sorted by label, in batches: the normalization hides what the batch has in common."""
    data = fleet.simulation.data
    test = data.split("test")
    by_label = test[torch.sort(data.y[test], stable=True).indices]
    data = replace(data, splits={**data.splits, "test": by_label})
    federation = replace(fleet.federation, device=Device(fleet.federation.problem, data))
    simulation = replace(fleet.simulation, data=data)
    scores: dict[tuple[int, bool], tuple[float, float]] = {}
    for size in (6, 96):
        for shuffle in (True, False):
            scope = replace(WANTED, evaluation=Evaluation(batch_size=size, shuffle=shuffle))
            columns = evaluate(federation, local_engine(simulation), fleet.server, scope)[0]
            scores[(size, shuffle)] = columns["static"]["full"], columns["batch"]["full"]
    # between batch sizes, static columns may differ a little: a deeper layer's moments depend on the statistics jobs'
    # batches
    assert scores[(96, True)][0] == scores[(96, False)][0]
    assert scores[(6, True)][0] == pytest.approx(scores[(6, False)][0], abs=0.03)
    assert scores[(6, False)][1] < scores[(6, True)][1] - 0.1


def test_models_without_batch_norm_have_one_column() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"}, norm=False)
    columns, moments = evaluate(federation, local_engine(simulation), start(federation), WANTED)
    assert list(columns) == ["split", "static"] and moments == {}
    columns, _ = evaluate(
        federation, local_engine(simulation), start(federation), replace(WANTED, norms=("batch", "static"))
    )
    assert [k for k in columns if k != "split"] == ["batch"]


@pytest.mark.parametrize(("norm", "expected"), [("batch", True), ("group", False)])
def test_only_batch_norm_needs_a_policy(norm: Any, expected: bool) -> None:
    federation, _ = tiny_federation({"name": "fedavg"})
    problem = Problem(cnn(norm=norm), (1, 8, 8), classification, (6,))
    assert has_batch_norm(replace(federation, problem=problem)) is expected


# ---- what is missing -------------------------------------------------


def columns_of(federation: Federation, simulation: Simulation, scope: EvaluationScope = WANTED) -> dict[str, Any]:
    return evaluate(federation, local_engine(simulation), start(federation), scope)[0]


def without(simulation: Simulation, client: int, split: str) -> Simulation:
    parts = [dict(p) for p in simulation.parts]
    parts[client][split] = parts[client][split][:0]
    return replace(simulation, parts=parts)


def test_a_client_without_test_data_does_not_count() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"})
    columns = columns_of(federation, without(simulation, 2, "test"))["static"]
    assert columns["global_clients"] == columns["local_clients"] == 5
    assert set(columns["per_client"]["global"]) == {"0", "1", "3", "4", "5"}
    values = columns["per_client"]["global"].values()
    assert columns["global"] == pytest.approx(sum(values) / 5)
    assert columns["levels"]["3"]["clients"] == 1


def test_clients_without_test_data() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"})
    for client in range(6):
        simulation = without(simulation, client, "test")
    columns = columns_of(federation, simulation)["static"]
    assert columns["global"] is None and columns["local"] is None and columns["global_worst_tenth"] is None
    assert columns["global_clients"] == 0 and columns["exits"] == []
    assert columns["full"] > 0  # the server's own test set is there


def test_best_exit_counts_clients_with_validation_data() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"})
    for client in range(6):
        simulation = without(simulation, client, "validation")
    assert "best_exit" not in columns_of(federation, simulation)["static"]


def test_levels_without_clients() -> None:
    """No client of level 2: an empty row; none of level 3 either: the largest model trained is level 1's."""
    federation, simulation = tiny_federation({"name": "scalefl"})
    for reported, top, clients in (([0.2, 0.2, 1.0] * 2, 3, [4, 0, 2]), ([0.2] * 6, 1, [6])):
        other = replace(federation, clients=replace(federation.clients, budget=np.array(reported)))
        columns = columns_of(other, simulation)["static"]
        assert list(columns["levels"]) == [str(i + 1) for i in range(top)]
        assert [v["clients"] for v in columns["levels"].values()] == clients
        assert columns["levels"].get("2", {"local": None})["local"] is None
        assert len(columns["exits"]) == len(federation.levels[top - 1].submodel.exits)
        assert set(columns["test_levels"]) == set(columns["levels"])
    assert columns["global"] == columns["local"]


def test_clients_below_all_levels_count_in_global() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"})
    reported = federation.clients.budget
    assert reported is not None
    reported = reported.copy()
    reported[0] = 0.05
    columns = columns_of(replace(federation, clients=replace(federation.clients, budget=reported)), simulation)[
        "static"
    ]
    assert (columns["global_clients"], columns["local_clients"]) == (6, 5)
    assert "0" in columns["per_client"]["global"] and "0" not in columns["per_client"]["local"]


def declining_two(job: Job, device: Device) -> Job | None:
    return None if job.kind == "evaluate" and job.client == 2 else job


def test_constant_channels_have_no_negative_variance() -> None:
    """n x^2 / n - (n x / n)^2 is a little less than 0 for some x; the root of that would be no number."""
    x = torch.linspace(0.01, 3, 200, dtype=torch.float64)
    n = torch.tensor([7.0], dtype=torch.float64)
    added = torch.stack([x] * 7)
    sums = {"norm.sum": added.sum(0), "norm.squares": (added * added).sum(0), "norm.count": n}
    assert bool((sums["norm.squares"] / n - (sums["norm.sum"] / n) ** 2 < 0).any())
    moments = compute_moments(sums)
    assert bool((moments["norm.var"] >= 0).all()) and bool((moments["norm.var"] < 1e-12).all())
    torch.testing.assert_close(moments["norm.mean"], x.float())


def test_a_client_that_cannot_evaluate_is_reported() -> None:
    federation, simulation = tiny_federation({"name": "scalefl", "hooks": {"adapt_job": declining_two}})
    columns = columns_of(federation, simulation, replace(WANTED, norms=("static",), whole=False))
    assert [(f["client"], f["level"]) for f in columns["failures"]] == [(2, 3)] * 2  # globally, and locally
    assert "declined" in columns["failures"][0]["reason"]
    assert columns["static"]["global_clients"] == 5


def declining_the_whole(job: Job, device: Device) -> Job | None:
    return None if job.kind == "evaluate" and job.client is None and job.level == 2 else job


def test_columns_without_a_score_are_empty() -> None:
    federation, simulation = tiny_federation({"name": "scalefl", "hooks": {"adapt_job": declining_the_whole}})
    federation = replace(federation, device=simulation.device(None))
    scope = replace(WANTED, evaluation=Evaluation(batch_size=128, metrics=("own_metric:share",)))
    columns = columns_of(federation, simulation, scope)["batch"]
    assert columns["full"] is None
    for own in (columns, columns["metrics"]["share"]):
        assert own["test_exits"] == [] and list(own["test_levels"]) == ["1", "2"]


def declining_statistics(job: Job, device: Device) -> Job | None:
    return None if job.kind == "statistics" else job


def test_static_columns_use_no_batch_statistics() -> None:
    """Where no client could run its statistics job, the headline must say so or be empty, not use each batch's own
    moments.
    """
    federation, simulation = tiny_federation({"name": "scalefl", "hooks": {"adapt_job": declining_statistics}})
    columns = columns_of(federation, simulation)
    batch = {key: value for key, value in columns["batch"].items() if key in ("global", "local", "full", "exits")}
    static = {key: columns.get("static", {}).get(key) for key in batch}
    assert static != batch or "failures" in columns


def test_failed_statistics_are_reported() -> None:
    """One training sample cannot go through batch norm: its statistics are missing, and the columns say so."""
    federation, simulation = tiny_federation({"name": "scalefl"})
    parts = [dict(p) for p in simulation.parts]
    parts[3]["train"] = parts[3]["train"][:1]
    columns = columns_of(federation, replace(simulation, parts=parts))
    assert any(f["client"] == 3 for f in columns.get("failures", []))


def test_one_test_sample_fails_under_batch_statistics() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"})
    parts = [dict(p) for p in simulation.parts]
    parts[3]["test"] = parts[3]["test"][:1]
    columns = columns_of(federation, replace(simulation, parts=parts))
    assert (columns["static"]["global_clients"], columns["batch"]["global_clients"]) == (6, 5)
    assert {f["client"] for f in columns["failures"]} == {3}


def test_clients_without_training_data_are_evaluated() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"})
    counts = federation.clients.num_examples.copy()
    counts[4] = 0
    federation = replace(federation, clients=replace(federation.clients, num_examples=counts))
    columns = columns_of(federation, without(simulation, 4, "train"))
    assert columns["static"]["global_clients"] == 6 and "failures" not in columns


def test_devices_choose_the_level_of_their_budget() -> None:
    """The server knows none: each answer says which model it is of. Two devices each afford 0.2, 0.5 and 1.0."""
    federation, simulation = tiny_federation({"name": "adaptivefl"})
    columns = columns_of(federation, simulation)["static"]
    levels = columns["levels"]
    assert {name: level["clients"] for name, level in levels.items()} == {"S1": 2, "M1": 2, "L1": 2}
    own, whole = (columns["per_client"][key] for key in ("local", "global"))
    assert levels["L1"]["local"] == pytest.approx((whole["2"] + whole["5"]) / 2)
    assert levels["S1"]["local"] == pytest.approx((own["0"] + own["3"]) / 2)


# ---- what is asked for -------------------------------------------------


class Watching(InlineEngine):
    """Notes the jobs."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.jobs: list[Job] = []

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        def record() -> Iterator[Job]:
            for job in jobs:
                self.jobs.append(job)
                yield job

        yield from super().run(record())


def test_validation_runs_never_read_test_data() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"})
    engine = Watching(simulation)
    scope = replace(WANTED, evaluation=Evaluation(split="validation"))
    columns, _ = evaluate(federation, engine, start(federation), scope)
    assert columns["split"] == "validation"
    assert {j.evaluation.split for j in engine.jobs if j.kind == "evaluate"} == {"validation"}
    assert {j.evaluation.split for j in engine.jobs if j.kind == "statistics"} == {"train"}
    assert {j.kind for j in engine.jobs} == {"evaluate", "statistics"}


def test_clients_without_data_get_no_statistics_job() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"})
    counts = federation.clients.num_examples.copy()
    counts[4] = 0
    federation = replace(federation, clients=replace(federation.clients, num_examples=counts))
    engine = Watching(without(simulation, 4, "train"))
    evaluate(federation, engine, start(federation), WANTED)
    assert {j.client for j in engine.jobs if j.kind == "statistics"} == {0, 1, 2, 3, 5}
    assert {j.client for j in engine.jobs if j.kind == "evaluate"} == {0, 1, 2, 3, 4, 5, None}


def test_each_device_shuffles_its_data_by_itself() -> None:
    """The server's own, too: no two draw the same order, and one draws the same for all levels."""
    federation, simulation = tiny_federation({"name": "scalefl"})
    engine = Watching(simulation)
    evaluate(federation, engine, start(federation), replace(WANTED, norms=("batch",)))
    drawn = {(j.client, j.seed) for j in engine.jobs if j.kind == "evaluate" and j.evaluation.split == "test"}
    assert len(drawn) == len({seed for _, seed in drawn}) == 7


def test_the_evaluated_clients_stay_the_same() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"}, clients=12)
    scope = replace(WANTED, clients=5)
    first, again = (columns_of(federation, simulation, scope)["static"]["per_client"] for _ in range(2))
    assert first == again and len(first["global"]) == 5


def decline_locally(job: Job, device: Device) -> Job | None:
    """Decline evaluations of a client's own level, for clients 2 and 3: of the largest level and the smallest."""
    return None if job.evaluation.scope == "local" and job.client in (2, 3) else job


def test_devices_tell_local_from_global_evaluations() -> None:
    """A client at the largest level is evaluated twice then, so that each column has its own."""
    federation, simulation = tiny_federation({"name": "scalefl", "hooks": {"adapt_job": decline_locally}})
    columns, _ = evaluate(federation, local_engine(simulation), start(federation), WANTED)
    for norm in ("static", "batch"):
        assert set(columns[norm]["per_client"]["local"]) == {"0", "1", "4", "5"}
        assert columns[norm]["global_clients"] == 6
    assert sorted((f["client"], f["level"]) for f in columns["failures"]) == [(2, 3), (2, 3), (3, 1), (3, 1)]


def test_full_clients_are_evaluated_once() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"})
    engine = RecordingEngine(simulation)
    evaluate(federation, engine, start(federation), replace(WANTED, norms=("batch",), whole=False))
    scopes = [(job.level, job.client, job.evaluation.scope) for job in engine.jobs]
    assert scopes == [*((2, c, "global") for c in range(6)), *((i, c, "local") for i in (1, 0) for c in (i, i + 3))]


def test_the_test_sample_stays_the_same(fleet: Trained) -> None:
    """Of 96 test samples 20 count, the same ones; the clients' columns are as without it."""
    engine, server, scope = local_engine(fleet.simulation), fleet.server, replace(WANTED, samples=20)
    full = evaluate(fleet.federation, engine, server, WANTED)[0]["static"]
    some, later = (
        evaluate(fleet.federation, engine, replace(server, round=server.round + more), scope)[0]["static"]
        for more in (0, 3)
    )
    assert (some["test_samples"], later["test_samples"], full["test_samples"]) == (20, 20, 96)
    whole = {"avg", "full", "test_levels", "test_exits", "test_samples"}
    assert {key for key in full if some[key] != full[key]} == whole
    assert some == later
    on_device = evaluate_on_device(fleet.federation, server, scope, fleet.simulation.device(None), {})
    assert on_device["batch"]["samples"] == 20


def test_evaluation_changes_no_server_and_no_memory() -> None:
    federation, simulation = tiny_federation({"name": "plugin_method:counting"})
    engine = local_engine(simulation)
    server, _ = run_round(federation, engine, Settings(2, plain(lr=0.1)), start(federation))
    before, state = engine.dump_memories(), {n: t.clone() for n, t in server.state.items()}
    evaluate(federation, engine, server, WANTED)
    assert str(engine.dump_memories()) == str(before) and before
    assert all(torch.equal(server.state[n], t) for n, t in state.items())


def test_handed_out_modules_are_the_evaluated_ones(fleet: Trained) -> None:
    """A level's plain nn.Module in eval mode has the accuracy that the column reports."""
    columns, moments = evaluate(
        fleet.federation, local_engine(fleet.simulation), fleet.server, replace(WANTED, norms=("static",))
    )
    x, y = fleet.simulation.data.batch(fleet.simulation.data.split("test"))
    for level in range(3):
        module = build_level_module(fleet.federation, fleet.server, level, moments)
        assert not module.training
        with torch.no_grad():
            right = float((module(x)[-1].argmax(1) == y).float().mean())
        assert right == pytest.approx(columns["static"]["test_levels"][str(level + 1)])


@pytest.mark.parametrize("norm", ["static", "batch"])
def test_columns_on_a_device_equal_a_plain_evaluation(fleet: Trained, norm: str) -> None:
    """Every level on the same data, the last one evaluated as the full model."""
    static = replace(WANTED, norms=("static",))
    _, moments = evaluate(fleet.federation, local_engine(fleet.simulation), fleet.server, static)
    scope = replace(WANTED, norms=(norm,), evaluation=replace(WANTED.evaluation, batch_size=10**6))
    evaluated = evaluate_on_device(fleet.federation, fleet.server, scope, fleet.simulation.device(None), moments)
    columns = evaluated[norm]
    assert (evaluated["split"], evaluated["data"]) == ("test", "tiny")
    test = fleet.simulation.data.batch(fleet.simulation.data.split("test"))
    models = [Plain(fleet, level, norm) for level in range(3)]
    scores = [model.hits(*test) for model in models]
    assert columns["ensemble"] == pytest.approx(models[2].ensemble(*test))
    assert columns["mean_over_exits"] == mean(scores[2])
    assert columns["full"] == pytest.approx(scores[2][-1]) and columns["exits"] == pytest.approx(scores[2])
    assert columns["avg"] == mean([s[-1] for s in scores]) and columns["samples"] == len(test[1])
    assert columns["levels"] == {
        str(i + 1): {"accuracy": pytest.approx(s[-1]), "exits": pytest.approx(s)} for i, s in enumerate(scores)
    }


def test_statistics_repeat_and_belong_to_a_level(fleet: Trained) -> None:
    a, b = (
        estimate_statistics(fleet.federation, InlineEngine(fleet.simulation), fleet.server, WANTED)[0] for _ in range(2)
    )
    assert all(torch.equal(a[level][n], b[level][n]) for level in a for n in a[level])
    assert {level: len(a[level]["blocks.0.1.mean"]) for level in a} == {0: 6, 1: 8, 2: 12}
    assert not any("mean" in name or "running" in name for name in fleet.server.state)
