"""A SuperLink and four unequal nodes, each a process of its own, over TLS with registered keys."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deployment import Deployment
from fleet.waiting import finished, secrets_in, stop_run, until, worker_of
from support.bits import assert_same_bits

import fleetfit as ff
from fleetfit.privacy import compute_epsilon
from fleetfit.training.runtime import has_bf16

pytestmark = pytest.mark.fleet

BUDGETS = {"node-a": 0.125, "node-b": 0.25, "node-c": 0.5, "node-d": 1.0}
DIVISION = {"kind": "dirichlet", "alpha": 1.0, "clients": 4}
SMALLEST_MB = 150  # what node-a lets a job take
PLAIN_MODULE = {"name": f"{Path(__file__).parents[1] / 'plain_models.py'}:Residual", "width": 8}


def node_settings(**changes: Any) -> dict[str, dict[str, Any]]:
    return {
        name: {"budget": budget, "tolerance": 0.2, **changes,
               "data": {"name": "digits", "partition": DIVISION, "client": client}}
        for client, (name, budget) in enumerate(BUDGETS.items())
    }  # fmt: skip


def run_file(method: str, **changes: Any) -> dict[str, Any]:
    return {
        "seed": 0, "rounds": 2, "data": {"name": "digits", "partition": DIVISION}, "model": {"name": "cnn"},
        "method": {"name": method}, "local": {"epochs": 1, "lr": 0.05}, "cohort": {"fraction": 1.0},
        "evaluate": {"every": 0, "batch_norm": ["static"]}, **changes,
    }  # fmt: skip


def fleet() -> dict[str, Any]:
    return {"tolerance": 0.2, "groups": [{"budget": b} for b in BUDGETS.values()]}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Clients of the simulation get their budgets in an order of its own; the nodes get the same ones."""
    folder = tmp_path_factory.mktemp("fleet")
    base = ff.run({**run_file("scalefl"), "rounds": 1, "fleet": fleet()}, out=folder / "order")
    settings = node_settings(allow=[PLAIN_MODULE["name"]])
    for client, (name, budget) in enumerate(zip(BUDGETS, base.assembly.fleet.budgets, strict=True)):
        settings[name]["budget"] = float(budget)
        settings[name]["data"]["client"] = client
        if budget == min(BUDGETS.values()):
            settings[name]["memory_limit"] = f"{SMALLEST_MB} MB"
    with Deployment(folder / "lab", settings, kept=False) as deployment:
        deployment.register(*BUDGETS)
        for name in BUDGETS:
            deployment.start_node(name)
        yield deployment


@pytest.mark.parametrize(("method", "model"), [("scalefl", {"name": "cnn"}), ("adaptivefl", PLAIN_MODULE)])
def test_a_fleet_equals_the_simulation(method: str, model: dict[str, Any], lab: Deployment, tmp_path: Path) -> None:
    """A plain module, too, which nodes build from their own file and compare with the plan of the server."""
    table = run_file(method, model=model)
    base = ff.run({**table, "fleet": fleet()}, out=tmp_path / "local")
    began = time.monotonic()
    run = finished(lab, method, {**table, "engine": {"name": "flower", "nodes": 4}}, tmp_path / "run")
    print(f"\n{method}: {time.monotonic() - began:.0f} s for 2 rounds and an evaluation")
    assert_same_bits(run.server.state, base.server.state)
    assert [r["train"] for r in run.metrics] == [r["train"] for r in base.metrics]
    assert [r["failures"] for r in run.metrics] == [r["failures"] for r in base.metrics]  # AdaptiveFL: who declined
    assert run.columns["static"]["per_client"]["local"].keys() == base.columns["static"]["per_client"]["local"].keys()
    if method == "scalefl":  # their own levels, statistics apart: those the smallest cannot measure elsewhere
        assert run.accuracy("local") == pytest.approx(base.accuracy("local"), abs=0.02)
        assert secrets_in(lab, tmp_path) == []


@pytest.mark.slow
def test_a_private_fleet_reports_its_budget_and_no_node(lab: Deployment, tmp_path: Path) -> None:
    """Half of four nodes are to be expected in a round; what nodes did stands in no line of the run and no file."""
    pytest.importorskip("opacus", reason="the accountant is an extra: fleetfit[privacy]")
    key = tmp_path / "keys" / "run.key"
    privacy = {"clipping_norm": 0.3, "noise_multiplier": 2.0, "delta": 0.01, "key_file": str(key)}
    table = run_file(
        "scalefl", rounds=3, model={"name": "cnn", "norm": "group"}, cohort={"fraction": 0.5}, privacy=privacy
    )
    run = finished(lab, "private", {**table, "engine": {"name": "flower", "nodes": 4}}, tmp_path / "run")
    log = lab.log("run-private")
    assert [r["privacy"]["epsilon"] for r in run.metrics] == [compute_epsilon(2.0, 0.5, n, 0.01) for n in (1, 2, 3)]
    for report in run.metrics:
        assert report["train"] == {"loss": None, "clients": None, "samples": None, "by_level": {}}
        assert f"Round {report['round']}/3: epsilon" in log
    assert "loss" not in log and " at level " not in log
    assert any((tensor != 0).any() for tensor in run.server.state.values())
    assert key.read_text().strip() not in log
    assert secrets_in(lab, tmp_path / "run") == []


def test_a_fast_fleet_equals_the_simulation(lab: Deployment, tmp_path: Path) -> None:
    """On one machine; in bf16 where it has the instructions, which both sides find out by themselves."""
    model = {"name": "vit", "hidden": 96, "depth": 4, "attention_heads": 12, "patch": 2}
    table, engine = run_file("scalefl", model=model), {"name": "flower", "nodes": 4}
    base = ff.run({**table, "fleet": fleet(), "engine": {"speed": "fast"}}, out=tmp_path / "local")
    run = finished(lab, "fast", {**table, "engine": {**engine, "speed": "fast"}}, tmp_path / "run")
    assert run.experiment.recorded.computing == base.experiment.recorded.computing
    assert any("bf16" in how for how in run.experiment.recorded.computing.values()) == has_bf16(torch.device("cpu"))
    assert_same_bits(run.server.state, base.server.state)
    assert [r["train"] for r in run.metrics] == [r["train"] for r in base.metrics]


def test_the_smallest_device_trains_its_level(lab: Deployment, tmp_path: Path) -> None:
    """The point of it all: within the same real memory, level 1 is trained and the full model fails."""
    table = run_file("scalefl", rounds=1, model={"name": "resnet18"}, fleet={"tolerance": 0.2},
                     local={"epochs": 1, "lr": 0.05, "batch_size": 32, "max_steps": 2},
                     evaluate={"every": 0, "batch_norm": ["batch"]})  # fmt: skip
    engine = {"name": "flower", "nodes": 4}
    small = finished(lab, "small", {**table, "engine": engine}, tmp_path / "small")
    assert small.metrics[0]["train"]["by_level"] == {"1": 1, "2": 1, "3": 1, "4": 1}
    whole = finished(lab, "whole", {**table, "method": {"name": "all_large"}, "engine": engine}, tmp_path / "whole")
    [failure] = whole.metrics[0]["failures"]
    budgets = small.assembly.federation.clients.budget
    assert budgets is not None
    least = int(budgets.argmin())
    assert failure["client"] == least and "memory" in failure["reason"]
    assert whole.metrics[0]["train"]["clients"] == 3


def test_a_node_that_joins_in_mid_run_takes_part(lab: Deployment, tmp_path: Path) -> None:
    """The run is as long as the node takes to come; its rounds wait for another one meanwhile, which costs less."""
    out = tmp_path / "run"
    lab.start_run("join", run_file("scalefl", rounds=1000, engine={"name": "flower", "nodes": 4}), out=str(out))

    def clients() -> list[int]:
        text = (out / "metrics.jsonl").read_text() if (out / "metrics.jsonl").exists() else ""
        return [json.loads(line)["train"]["clients"] for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    until(clients, "the first round", lambda: lab.log("run-join"))
    resting = worker_of(lab, "node-a")
    os.kill(resting.pid, signal.SIGSTOP)
    data = {"name": "digits", "client": 4, "partition": {**DIVISION, "clients": 5}}
    lab.add_node("node-e", {"budget": 0.25, "tolerance": 0.2, "data": data})
    lab.register("node-e")
    lab.start_node("node-e")
    until(lambda: "SuperNode ID:" in lab.log("node-e"), "the fifth node", lambda: lab.log("node-e"))
    os.kill(resting.pid, signal.SIGCONT)
    until(lambda: 5 in clients(), "a round with the fifth node", lambda: lab.log("run-join"))
    stop_run(lab, "join")
    lab.stop("node-e")
    assert clients()[0] == 4
    assert "Node node-e " in lab.log("run-join")
