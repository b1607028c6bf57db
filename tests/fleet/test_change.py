"""A fleet's run continues with other levels, and nodes move between them."""

import importlib.metadata
import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from local_fleet import Lab, described
from local_grid import node_file
from own_terms import add_terms
from support import raises

from fleetfit.api.change import change_run
from fleetfit.config import load_experiment
from fleetfit.errors import ConfigError, RunError
from fleetfit.fleet import node as nodes_side
from fleetfit.fleet.node_log import read_log
from fleetfit.fleet.protocol import check_header, make_needs, pack_message, read_answer
from fleetfit.fleet.server_app import adapt_experiment
from fleetfit.fleet.terms import make_terms
from fleetfit.messages import unpack
from fleetfit.names import compute_file_digest
from fleetfit.runs.folder import RunFolder

BUDGETS = [0.5, 0.6, 1.0, 0.5, 1.0]


def change(lab: Lab, budgets: dict[int, float] | None = None, **sections: object) -> None:
    """Change the run's file, and the budgets of some nodes in their own files, which they read when they start."""
    for client, budget in (budgets or {}).items():
        lab.budgets[client] = budget
        lab.config(client)
    nodes_side.get_node.cache_clear()
    lab.grid.offline = set()
    change_run(RunFolder(lab.folder / "run"), sections, {})
    lab.lines.clear()


def test_a_level_is_added_and_one_is_dropped_when_a_run_is_resumed(tmp_path: Path) -> None:
    lab = Lab(tmp_path, described({"name": "scalefl"}, rounds=2, cohort={"fraction": 1.0}), list(BUDGETS))
    run = lab.serve()
    before = {level.name: (level.depth, level.width, level.exits) for level in run.plan.levels}
    assert {f"Node node-{i} trains level {1 + (budget == 1.0)}." for i, budget in enumerate(BUDGETS)} <= {*lab.lines}

    change(lab, {0: 0.2, 2: 0.5}, rounds=4, fleet={"levels": [0.2, 0.5, 1.0]})
    run = lab.serve(resume=True)
    after = {level.name: (level.depth, level.width, level.exits) for level in run.plan.levels}
    assert list(after) == ["3", "1", "2"] and {**after, **before} == after
    assert {"Node node-0 trains level 3.", "Node node-2 trains level 1."} <= {*lab.lines}
    assert [report["train"]["by_level"] for report in run.metrics] == [{"1": 3, "2": 2}] * 2 + [
        {"3": 1, "1": 3, "2": 1}
    ] * 2
    assert not any(report["failures"] for report in run.metrics) and run.plan.changes[0].added == ("3",)
    assert [level["clients"] for level in run.columns["static"]["levels"].values()] == [1, 3, 1]

    change(lab, rounds=5, fleet={"levels": [0.5, 1.0]})
    run = lab.serve(resume=True)
    assert json.loads((run.folder / "fleet.json").read_text())["first"]["level"] == [0, 1, 1, 1, 2]
    assert run.metrics[-1]["train"]["by_level"] == {"1": 3, "2": 1} and run.plan.changes[1].dropped == ("3",)
    [reason] = [line for line in lab.lines if line.startswith("Node node-0 trains nothing")]
    assert " 0.2 " in reason and "parameters" in reason


def test_nodes_of_now_are_planned_for(tmp_path: Path) -> None:
    """By a rule, such as "cluster", levels follow from the nodes that have enrolled since."""
    table = described({"name": "scalefl"}, rounds=2, cohort={"fraction": 1.0})
    table["fleet"]["levels"] = "cluster"
    lab = Lab(tmp_path, table, [0.5, 0.5, 1.0, 0.5, 1.0])
    lab.serve()
    change(lab, {0: 0.2}, rounds=3)
    run = lab.serve(resume=True)  # the node moves, and the levels stay
    assert not run.plan.changes and run.metrics[-1]["train"]["clients"] == 4
    change(lab, rounds=4, fleet={"levels": "cluster"})
    run = lab.serve(resume=True)
    assert [level.name for level in run.plan.levels] == ["3", "1", "2"]
    assert run.metrics[-1]["train"]["by_level"] == {"3": 1, "1": 2, "2": 2}
    change(lab, fleet={"levels": "cluster"})  # for the same nodes: no change, where a finished run would be refused
    assert len(run.files.environment.changed) == len(RunFolder(run.folder).environment.changed)


def test_a_private_run_with_other_nodes_is_refused_before_a_file_changes(tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="the accountant is an extra: fleetfit[privacy]")
    privacy = {"clipping_norm": 0.5, "noise_multiplier": 1.0, "key_file": str(tmp_path / "run.key")}  # delta by nodes
    model = {"name": "tiny:tiny", "norm": False}
    table = described({"name": "scalefl"}, rounds=2, model=model, privacy=privacy, evaluate={"every": 0})
    lab = Lab(tmp_path, table, list(BUDGETS))
    run = lab.serve()
    nodes = json.loads((run.folder / "nodes.json").read_text())
    nodes["members"].append({**nodes["members"][0], "node": "106", "name": "node-5"})
    (run.folder / "nodes.json").write_text(json.dumps(nodes))
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with raises(RunError, key="privacy"):
        change(lab, rounds=4, fleet={"levels": [0.5, 0.6, 1.0]})
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


def test_only_more_rounds_are_another_run_for_an_owner(tmp_path: Path) -> None:
    lab = Lab(tmp_path, described({"name": "scalefl"}, rounds=2), list(BUDGETS))
    lab.serve()

    def fingerprints() -> list[str]:
        path = tmp_path / "node-0" / "fleetfit-node" / "node-0" / "log.jsonl"
        return list(dict.fromkeys(entry["fingerprint"] for entry in read_log(path)[0]))

    (lab.folder / "run" / "summary.json").unlink()
    last = sorted((lab.folder / "run" / "checkpoints").iterdir())[-1]
    last.unlink()
    change(lab, fleet={"levels": [0.2, 0.5, 1.0]}, engine={"deadline_s": 30.0})
    assert lab.serve(resume=True).experiment.engine.settings["deadline_s"] == 30.0
    assert len(fingerprints()) == 1
    change(lab, rounds=3)
    assert len(lab.serve(resume=True).metrics) == 3 and len(fingerprints()) == 2


def test_budgets_are_the_nodes_own(tmp_path: Path) -> None:
    lab = Lab(tmp_path, described({"name": "scalefl"}, rounds=1), list(BUDGETS))
    lab.serve()
    for sections, key in (
        ({"fleet": {"groups": [{"budget": 0.5}]}}, "fleet.groups"),
        ({"engine": {"name": "local"}}, "engine.name"),
        ({"local": {"lr": 0.1}}, "local.lr"),
    ):
        with raises(ConfigError, key=key):
            change(lab, rounds=2, **sections)


# ---- nodes that differ -----------------------------------------------------------------------------------------------


def ask(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    return read_answer(nodes_side.answer(str(path), {"header": pack_message(header)}))


def test_a_node_refuses_what_its_version_does_not_know(tmp_path: Path) -> None:
    path = node_file(tmp_path, "node", {"budget": 0.5, "data": {"name": "digits"}})
    needs = make_needs(load_experiment({"model": {"name": "tiny:tiny"}}))
    assert needs.keys() == {"fleetfit", "envelope", "plan", "memory_format"}
    assert make_needs(load_experiment({"engine": {"speed": "fast"}})).keys() == {"fleetfit", "envelope"}
    hello = add_terms({"what": "hello", "transform": "", "needs": needs})
    assert "hello" in ask(path, hello)
    for key, value in (("memory_format", "rule-9"), ("plan", 7), ("envelope", 9), ("sparsity", 1)):
        with raises(RunError, key=f"needs.{key}"):
            check_header(unpack(pack_message({**hello, "needs": {**needs, key: value, "fleetfit": "8.7.6"}})))
        reason = ask(path, {**hello, "needs": {**needs, key: value, "fleetfit": "8.7.6"}})["refused"]
        assert str(value) in reason and "8.7.6" in reason and importlib.metadata.version("fleetfit") in reason


def test_a_node_whose_own_file_differs_is_refused_with_both_hashes(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("def net(): ...\n")
    name = f"{file}:net"
    terms = make_terms(adapt_experiment(load_experiment({"model": {"name": name}})), "")
    server = sha256(file.read_bytes()).hexdigest()
    assert terms["code"] == {name: server}
    hello = add_terms({"what": "hello", "transform": ""}, model=terms["model"])
    data = {"budget": 0.5, "data": {"name": "digits"}}
    path, stranger = (node_file(tmp_path, n, {**data, "allow": a}) for n, a in (("node", [name]), ("stranger", [])))
    assert "hello" in ask(path, hello)
    file.write_text("def net(): return 1\n")
    own = sha256(file.read_bytes()).hexdigest()
    reason = ask(path, hello)["refused"]
    assert own in reason and server in reason and str(file) in reason
    assert own not in str(ask(stranger, hello)), "no server learns the hash of a file that it may not name"
    file.unlink()
    assert server in ask(path, hello)["refused"]


def test_code_of_a_module_counts_before_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, digest = compute_file_digest("plugin_method:counting")
    assert file is not None and file.name == "plugin_method.py" and digest == sha256(file.read_bytes()).hexdigest()
    (tmp_path / "beside_the_run.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])  # as of an installed script
    assert compute_file_digest("beside_the_run:f")[0] == tmp_path / "beside_the_run.py"
    assert compute_file_digest("no_such_module:f") == compute_file_digest("scalefl") == (None, "")
