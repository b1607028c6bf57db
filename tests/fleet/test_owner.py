"""Two real nodes over TLS: the owner of one approves a run before it takes part, and both logs are verified."""

import json
from pathlib import Path

import pytest
from deployment import Deployment
from fleet.waiting import finished
from support import run_verb

from fleetfit.fleet.node_log import HEADS, read_log
from fleetfit.fleet.terms import compute_fingerprint

pytestmark = pytest.mark.fleet
DIVISION = {"kind": "iid", "clients": 2}


def test_an_owner_approves_a_run_and_verifies_the_log(tmp_path: Path) -> None:
    settings = {
        name: {"budget": 1.0, "data": {"name": "digits", "partition": DIVISION, "client": client}}
        for client, name in enumerate(("node-a", "node-b"))
    }
    settings["node-b"]["policy"] = {"approval": True, "methods": ["fedavg"], "jobs_a_day": 100}
    table = {"rounds": 2, "data": {"name": "digits", "partition": DIVISION}, "model": {"name": "mlp"},
             "method": {"name": "fedavg"}, "local": {"epochs": 1, "lr": 0.05},
             "engine": {"name": "flower", "nodes": 1, "deadline_s": 60}}  # fmt: skip
    with Deployment(tmp_path / "lab", settings, kept=False) as lab:
        lab.register(*settings)
        for name in settings:
            lab.start_node(name)
        config = lab.folder / "node-b" / "node.toml"
        alone = finished(lab, "waiting", table, tmp_path / "waiting")
        members = json.loads((alone.folder / "nodes.json").read_text())
        assert [member["name"] for member in members["members"]] == ["node-a"]
        fingerprint = compute_fingerprint(members["terms"])
        run_verb("flower", "approve", config, fingerprint, "--yes", code=0)
        both = finished(lab, "approved", {**table, "engine": {"name": "flower", "nodes": 2}}, tmp_path / "approved")
        assert len(json.loads((both.folder / "nodes.json").read_text())["members"]) == 2
        file = lab.folder / "node-b" / "fleetfit-node" / "node-b" / "log.jsonl"
        entries, _ = read_log(file)
        assert {entry["event"] for entry in entries} == {"allowed", "refused", "left"}
        trained = [entry for entry in entries if entry["event"] == "left" and entry.get("kind") == "train"]
        assert [entry["round"] for entry in trained] == [0, 1]
        assert {entry["fingerprint"] for entry in entries} == {fingerprint}
        heads = both.folder / HEADS
        run_verb("flower", "log", config, "--heads", heads, code=0)
        file.write_text(file.read_text().replace('"event": "refused"', '"event": "allowed"', 1))
        run_verb("flower", "log", config, "--heads", heads, code=2)
