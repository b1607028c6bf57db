"""Fifty light nodes, which train nothing, come, are killed or leave, and come again; a class of devices joins."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from fleet.waiting import until

import fleetfit as ff

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
COUNT, GROUP, COHORT = 50, 5, 10
RUN: dict[str, Any] = {
    "rounds": 3, "model": {"name": "mlp_2nn"}, "method": {"name": "heterofl"}, "local": {"epochs": 1},
    "fleet": {"groups": [{"budget": 1.0}]}, "evaluate": {"every": 0, "clients": 5},
    "cohort": {"count": COHORT, "quorum": 0.7, "over_selection": 0.5},
    "engine": {"name": "flower", "nodes": 25, "deadline_s": 20.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("crowd") / "lab", {}, kept=False) as deployment:
        names = [f"light-{number}" for number in range(COUNT)]
        for name in names:
            deployment.add_node(name, {})
        deployment.register(*names)
        yield deployment


def start(lab: Deployment, name: str, numbers: range, budget: float = 1.0) -> Path:
    """Start nodes in one process, which writes what each was sent into the file when it is told to end."""
    keys = [str(lab.folder / f"light-{number}" / "key") for number in numbers]
    out = lab.folder / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.light_nodes", f"127.0.0.1:{lab.port}", str(lab.ca), str(out), *keys]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    lab.start(name, command, {"PYTHONPATH": path, "LIGHT_BUDGET": str(budget)})
    return out


def resume(lab: Deployment, folder: Path, *changes: str) -> ff.Run:
    words = [word for change in changes for word in ("--set", change)]
    process = lab.start("resume", ["fleetfit", "flower", "resume", str(folder), "lab", *words])
    until(lambda: process.poll() is not None, "the end", lambda: lab.log("resume"))
    run = ff.load(folder)
    assert run.finished, lab.log("resume")
    return run


def test_fifty_nodes_come_and_go(lab: Deployment, tmp_path: Path) -> None:
    """A node that was killed is refused for half a minute; the run ends without it, and is resumed with it."""
    start(lab, "steady", range(2 * GROUP, COUNT))
    start(lab, "killed", range(GROUP))
    start(lab, "leaving", range(GROUP, 2 * GROUP))
    folder = tmp_path / "run"
    run = lab.start_run("crowd", RUN, out=str(folder))
    until((folder / "metrics.jsonl").exists, "a round", lambda: lab.log("run-crowd"))
    lab.stop("killed", sudden=True)
    lab.stop("leaving")
    again = start(lab, "again", range(2 * GROUP))
    until(lambda: run.poll() is not None, "the end", lambda: lab.log("run-crowd"))
    until(lambda: lab.log("again").count(" has joined") == 2 * GROUP, "those that left", lambda: lab.log("again"))
    crowd = resume(lab, folder, "rounds=5")
    lab.stop("again")
    lab.stop("steady")
    assert [report["round"] for report in crowd.metrics] == list(range(1, 6))
    trained = [report["train"]["clients"] for report in crowd.metrics]
    assert min(trained) >= 0.7 * COHORT, trained
    members = json.loads((folder / "nodes.json").read_text())["members"]
    assert len(members) == len({member["node"] for member in members}) == COUNT, "who comes again has its old number"
    messages = [entry["messages"] for entry in json.loads(again.read_text())]
    assert all(one.get("setup") for one in messages) and any(one.get("train") for one in messages), messages


def test_a_class_of_devices_is_added_on_resume(lab: Deployment, tmp_path: Path) -> None:
    start(lab, "large", range(3))
    table = {**RUN, "rounds": 2, "cohort": {"fraction": 1.0}, "engine": {"name": "flower", "nodes": 3}}
    folder = tmp_path / "run"
    run = lab.start_run("large-only", table, out=str(folder))
    until(lambda: run.poll() is not None, "the end", lambda: lab.log("run-large-only"))
    before = ff.load(folder).plan.levels
    assert [level.name for level in before] == ["1"]

    start(lab, "small", range(3, 5), budget=0.25)
    until(lambda: lab.log("small").count(" has joined") == 2, "the small ones", lambda: lab.log("small"))
    run = resume(lab, folder, "rounds=5", "fleet.levels=[0.25, 1.0]")
    assert [level.name for level in run.plan.levels] == ["2", "1"] and run.plan.changes[0].round == 2
    assert run.plan.levels[1].exits == before[0].exits and run.plan.levels[1].parameters == before[0].parameters
    assert [report["train"]["by_level"] for report in run.metrics[:2]] == [{"1": 3}] * 2
    assert run.metrics[-1]["train"]["by_level"] == {"1": 3, "2": 2} and not run.metrics[-1]["failures"]
