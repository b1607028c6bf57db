"""Personal predictions: the formula by hand, in one pass with `local`, beside it and never mixed with it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_folders import stop_before_round
from support import raises
from support.attacks import TINY
from support.bits import have_same_state
from support.comparisons import compare_text
from support.engines import OneByOne, RecordingEngine
from support.training import make_job
from tiny import TinyNet, plain, tiny_data, tiny_federation, tiny_parts
from torch import Tensor

import fleetfit as ff
from fleetfit.anatomy import outputs
from fleetfit.api.comparison import plan_comparison
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Evaluation, Federation, Server, Simulation, Update
from fleetfit.data import Data
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ConfigError
from fleetfit.evaluation import EvaluationScope, build_level_module, evaluate
from fleetfit.messages import dump_job, load_job, pack, unpack
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.training import run_job
from fleetfit.validation import find_job_error, find_update_error

CLIENTS = 12
PRIOR = (0.1, 0.2, 0.3, 0.4)
PLAIN = EvaluationScope(Evaluation(batch_size=64), statistics_samples=10**6)
PERSONAL = replace(PLAIN, evaluation=replace(PLAIN.evaluation, personal=True))


def fleet(name: str = "scalefl", steps: int = 6, **model: Any) -> tuple[Federation, Simulation, Server]:
    """Clients of three levels; client k has one training sample of class k mod 4, so that their classes differ."""
    federation, simulation = tiny_federation({"name": name}, clients=CLIENTS, cohort=6, **model)
    data = tiny_data(480)
    parts = tiny_parts(data, CLIENTS)
    for k, part in enumerate(parts):
        rare = data.y[part["train"]] == k % 4
        part["train"] = torch.cat([part["train"][~rare], part["train"][rare][:1]])
    simulation = replace(simulation, data=data, parts=parts)
    samples = np.array([len(part["train"]) for part in parts])
    clients = replace(federation.clients, num_examples=samples)
    federation = replace(federation, clients=clients, device=simulation.device(None))
    server = start(federation)
    for _ in range(steps):
        server, _ = run_round(
            federation, local_engine(simulation), Settings(9, plain(lr=0.2, epochs=3, batch_size=4)), server
        )
    return federation, simulation, server


def offset_by_hand(simulation: Simulation, client: int, prior: Sequence[float]) -> Tensor:
    """log((n_kc + 1) / (n_k + 4)) - log p(c)."""
    labels = simulation.data.y[simulation.parts[client]["train"]].tolist()
    own = [(labels.count(c) + 1) / (len(labels) + 4) for c in range(4)]
    return torch.tensor([math.log(a) - math.log(b) for a, b in zip(own, prior, strict=True)])


# ---- the number ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [PRIOR, ()])
@pytest.mark.parametrize("norm", [True, False])
def test_personal_is_local_with_the_offset_by_hand(norm: bool, prior: tuple[float, ...]) -> None:
    """All other columns are those of an evaluation without it. Without p the fleet's frequencies are uniform."""
    federation, simulation, server = fleet(norm=norm)
    server = replace(server, prior=prior)
    columns, statistics = evaluate(federation, local_engine(simulation), server, PERSONAL)
    modules = [build_level_module(federation, server, level, statistics) for level in range(3)]
    shares = []
    for client in range(CLIENTS):
        data = simulation.device(client).data
        x, y = data.batch(data.split("test"))
        with torch.no_grad():
            logits = outputs(modules[client % 3], x)[-1]
        hits = (logits + offset_by_hand(simulation, client, prior or (0.25,) * 4)).argmax(1) == y
        shares.append(float(hits.double().mean()))
    static = columns["static"]
    assert static["personal"] == pytest.approx(sum(shares) / CLIENTS, abs=1e-9)
    assert static["personal"] != static["local"], "there is something to confuse"
    plain_columns, _ = evaluate(federation, local_engine(simulation), server, PLAIN)
    assert plain_columns["static"] == {k: v for k, v in static.items() if k != "personal"}


@pytest.mark.parametrize(("heads", "prior"), [(1.0, ()), (0.0, PRIOR)])
def test_one_pass_equals_single_clients(
    heads: float, prior: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classifiers of zeros leave the choice to the offset alone, and that of client 0 to a tie."""
    federation, simulation, server = fleet()
    state = {n: t * heads if n.startswith("heads.") else t for n, t in server.state.items()}
    server = replace(server, state=state, prior=prior)
    batches: list[int] = []
    plain_start = TinyNet.start

    def count(net: TinyNet, x: Tensor) -> Tensor:
        batches.append(len(x))
        return plain_start(net, x)

    monkeypatch.setattr(TinyNet, "start", count)
    alone, _ = evaluate(federation, OneByOne(simulation), server, PERSONAL)
    apart = len(batches)
    batches.clear()
    together, _ = evaluate(federation, local_engine(simulation), server, PERSONAL)
    passes = list(batches)
    assert together == alone and "failures" not in together
    if heads:
        batches.clear()
        evaluate(federation, local_engine(simulation), server, PLAIN)
        assert len(passes) < apart and sum(passes) <= sum(batches) + 16, "no second pass but for two close calls"


def test_next_tokens_get_the_offset_at_each_position(tmp_path: Path) -> None:
    """Against the plain logits of the model, client by client."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5, (60, 6), generator=rng).sort(1).values
    splits = {"train": torch.arange(40), "test": torch.arange(40, 60)}
    data = Data("tokens", x, x.roll(-1, 1), splits, 5, task="next_token", vocabulary=5)
    outcome = ff.run(
        rounds=1, data={"name": data, "partition": {"kind": "iid", "clients": 4}}, model={"name": "word_lstm"},
        fleet={"groups": [{"budget": 1.0}]}, method="fedavg", evaluate={"personal": True}, out=tmp_path / "run",
    )  # fmt: skip
    prior, module, shares = outcome.server.prior, outcome.model(), []
    for client in range(4):
        own = outcome.assembly.simulation.device(client).data
        labels = own.y[own.split("train")].flatten().tolist()
        offset = torch.tensor(
            [math.log((labels.count(c) + 1) / (len(labels) + 5)) - math.log(prior[c]) for c in range(5)]
        )
        tokens, y = own.batch(own.split("test"))
        with torch.no_grad():
            shares.append(float(((outputs(module, tokens)[-1] + offset).argmax(-1) == y).double().mean()))
    assert outcome.accuracy("personal") == pytest.approx(sum(shares) / 4, abs=1e-9)


def test_devices_that_choose_their_own_level_have_it() -> None:
    """AdaptiveFL's server does not know the levels; each device's own model, with the offset by hand."""
    federation, simulation, server = fleet("adaptivefl", steps=2, norm=False)
    server = replace(server, prior=PRIOR)
    engine = RecordingEngine(simulation)
    columns, _ = evaluate(federation, engine, server, PERSONAL)
    shares = []
    for job, reply in zip(engine.jobs, engine.replies, strict=True):
        if job.evaluation.own and job.client is not None:
            assert isinstance(reply, Update)
            module = build_level_module(federation, server, federation.level_index(reply.submodel), None)
            data = simulation.device(job.client).data
            x, y = data.batch(data.split("test"))
            with torch.no_grad():
                logits = outputs(module, x)[-1] + offset_by_hand(simulation, job.client, PRIOR)
            shares.append(float((logits.argmax(1) == y).double().mean()))
    assert len(shares) == CLIENTS
    assert columns["static"]["personal"] == pytest.approx(sum(shares) / CLIENTS, abs=1e-9)


# ---- jobs and messages -----------------------------------------------------------------------------------------------


def test_asking_clients_changes_no_training() -> None:
    federation, simulation, _ = fleet(steps=0, norm=False)
    engines = [RecordingEngine(simulation) for _ in range(2)]
    settings = [Settings(2, plain(lr=0.1, batch_size=8), scope=scope) for scope in (PERSONAL, PLAIN)]
    (*_, last), (*_, other) = (
        list(run(federation, engine, one, start(federation))) for engine, one in zip(engines, settings, strict=True)
    )
    jobs, plain_jobs = (engine.jobs for engine in engines)
    assert [job.kind for job in jobs].count("labels") == CLIENTS and not any(j.kind == "labels" for j in plain_jobs)
    assert last.server.prior and not other.server.prior
    assert all(torch.equal(last.server.state[name], t) for name, t in other.server.state.items())
    assert not any(job.prior for job in jobs if job.kind == "train")
    scored = [job for job in jobs if job.kind == "evaluate"]
    assert any(job.evaluation.personal for job in scored)
    for job in scored:
        is_personal = job.evaluation.split == "test"
        assert job.evaluation.personal == is_personal and job.prior == (last.server.prior if is_personal else ())
    assert "personal" in last.report["evaluate"]["static"] and "personal" not in other.report["evaluate"]["static"]


def test_the_request_travels_only_if_set() -> None:
    federation, _, _ = fleet(steps=0)
    layout = federation.problem.layout
    job = make_job(federation, 2, 2, kind="evaluate")
    personal = replace(job, evaluation=Evaluation(personal=True), prior=PRIOR)
    restored = load_job(unpack(pack(dump_job(personal, layout))), layout)
    assert restored.evaluation.personal and restored.prior == PRIOR
    assert "personal" not in dump_job(job, layout)["evaluation"]
    assert find_job_error(personal, federation.problem) is None
    wrong: Any = "yes"
    assert find_job_error(replace(job, evaluation=Evaluation(personal=wrong)), federation.problem) is not None


@pytest.mark.parametrize("lie", [-1.0, 1e9, math.nan, None, "all", [1.0]])
def test_an_impossible_score_is_refused(lie: Any) -> None:
    federation, simulation, _ = fleet(steps=0, norm=False)
    job = make_job(federation, 2, 2, kind="evaluate", prior=PRIOR, evaluation=Evaluation(personal=True))
    update, _ = run_job(job, simulation.device(2))
    assert isinstance(update, Update) and find_update_error(update, job, federation) is None
    assert find_update_error(replace(update, metrics={**update.metrics, "personal": lie}), job, federation) is not None


def test_priors_of_other_classes_fail() -> None:
    federation, simulation, server = fleet(steps=0, norm=False)
    columns, _ = evaluate(federation, local_engine(simulation), replace(server, prior=(0.5, 0.5)), PERSONAL)
    assert {failure["client"] for failure in columns["failures"]} >= set(range(CLIENTS))


# ---- runs ------------------------------------------------------------------------------------------------------------

PLAIN_TABLE: dict[str, Any] = {**TINY, "method": {"name": "scalefl"}, "rounds": 2}
TABLE: dict[str, Any] = {**PLAIN_TABLE, "evaluate": {**TINY["evaluate"], "personal": True}}


def read_records(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return metrics.jsonl and summary.json, without what differs from run to run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    for one in (*lines, summary):
        one.pop("seconds"), one.pop("seconds_of")
    return lines, summary


def test_a_run_reports_it_beside_local(tmp_path: Path) -> None:
    """Everything else is as without the key, except for the bytes of the answers to the server's question."""
    outcome = ff.run(TABLE, out=tmp_path / "run")
    base = ff.run(PLAIN_TABLE, out=tmp_path / "base")
    assert have_same_state(outcome, base) and outcome.accuracy("local") == base.accuracy("local")
    lines, summary = read_records(outcome.folder)
    base_lines, base_summary = read_records(base.folder)
    share = outcome.accuracy("personal")
    assert summary["evaluate"]["static"].pop("personal") == lines[-1]["evaluate"]["static"].pop("personal") == share
    assert lines[0].pop("prior")["clients"] == 10
    for one in (lines[0], base_lines[0], summary, base_summary):
        one.pop("bytes_down"), one.pop("bytes_up")
    assert (lines, summary) == (base_lines, base_summary)
    with raises(ConfigError, "personal", key="kind"):
        base.accuracy("personal")
    pages = [(run.folder / "report.html").read_text() for run in (outcome, base)]
    assert "Personal:" in pages[0] and "Personal:" not in pages[1]


@pytest.mark.parametrize("after", [0, 1])
def test_a_resumed_run_has_equal_records(after: int, tmp_path: Path) -> None:
    table = {**TABLE, "evaluate": {**TABLE["evaluate"], "every": 1}}
    base = ff.run(table, out=tmp_path / "unbroken")
    stop_before_round(table, tmp_path / "broken", after)
    resumed = ff.resume(tmp_path / "broken")
    assert read_records(resumed.folder)[0] == read_records(base.folder)[0]
    assert resumed.accuracy("personal") == base.accuracy("personal")


def test_privacy_withholds_it(tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="the accountant is an extra: fleetfit[privacy]")
    privacy = {"clipping_norm": 0.3, "noise_multiplier": 1.0, "key_file": str(tmp_path / "key")}
    table = {**TABLE, "model": {"name": "tiny:tiny", "norm": False}, "privacy": privacy}
    assembly = assemble(load_experiment(table))
    assert [one.key for one in assembly.unused] == ["evaluate.personal"]
    outcome = ff.run(table, out=tmp_path / "run")
    assert outcome.server.prior == () and outcome.columns["static"]["personal"] is None
    assert not any(line["evaluate"]["static"]["personal"] for line in outcome.metrics if "evaluate" in line)
    with raises(ConfigError, key="evaluate.personal"):
        ff.run(
            load_experiment({**table, "evaluate": TINY["evaluate"]}, ["evaluate.personal=true"]), out=tmp_path / "other"
        )


@pytest.mark.parametrize("task", ["regression", "multi_label"])
def test_without_classes_it_is_refused(task: str) -> None:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, :2] > 0).float() if task == "multi_label" else x[:, :2]
    data = Data("lines", x, y, {"train": torch.arange(48), "test": torch.arange(48, 60)}, 2, task=task)
    table: Mapping[str, Any] = {
        "model": {"name": "mlp"}, "data": {"name": data, "partition": {"kind": "iid", "clients": 4}},
    }  # fmt: skip
    with raises(ConfigError, task, key="evaluate.personal"):
        assemble(load_experiment(table, evaluate={"personal": True}))


# ---- comparisons -----------------------------------------------------------------------------------------------------

COMPARED = """
rounds = 2
data = { name = "tiny:tiny_data", partition = { kind = "dirichlet", alpha = 0.5, clients = 6 } }
model.name = "tiny:tiny"
fleet = { groups = [{ budget = 0.4 }, { budget = 1.0 }], tolerance = 0.5 }
local.epochs = 1
evaluate = { every = 0, personal = true }
[compare]
smallest_baseline = false
columns = ["local", "personal"]
[[compare.row]]
method.name = "scalefl"
[[compare.row]]
method.name = "heterofl"
"""


def test_a_comparison_has_it_as_a_column(tmp_path: Path) -> None:
    comparison = compare_text(tmp_path, COMPARED)
    shares = {row: runs[0].accuracy("personal") for (row, _), runs in comparison.runs.items()}
    assert comparison.table.columns[-1].startswith("personal")
    assert [cells[-1] for _, *cells in comparison.table.rows] == [f"{100 * share:.2f}" for share in shares.values()]
    differences = {one.column: one.mean for one in comparison.differences}
    assert differences["personal"] == pytest.approx(100 * (shares["heterofl"] - shares["scalefl"]), abs=1e-3)
    results = json.loads(comparison.results.read_text())
    assert {run["row"]: run["final"]["personal"] for run in results["runs"]} == pytest.approx(
        {row: 100 * share for row, share in shares.items()}, abs=1e-3
    )
    assert "personal" in (comparison.folder / "table.csv").read_text().partition("\n")[0].split(",")
    without = compare_text(
        tmp_path, COMPARED.replace(", personal = true", "").replace(', "personal"', ""), out="without"
    )
    assert "personal" not in (without.folder / "table.csv").read_text()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ('columns = ["local", "personal"]', "compare.columns"),
        ('target = 0.5\ntarget_on = "personal"', "compare.target_on"),
    ],
)
def test_the_column_needs_the_key(change: str, key: str, tmp_path: Path) -> None:
    text = COMPARED.replace(", personal = true", "").replace('columns = ["local", "personal"]', change)
    (tmp_path / "file.toml").write_text(text)
    with raises(ConfigError, "evaluate.personal", key=key):
        plan_comparison(tmp_path / "file.toml")
