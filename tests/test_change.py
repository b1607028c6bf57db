"""A run goes on with other rounds or other levels: old levels keep shapes and numbers, and records say what changed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import HEAD, STACK
from support import raises, run_verb
from support.bits import assert_same_bits

import fleetfit as ff
from fleetfit.api.change import change_run
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.config.records import restore_records
from fleetfit.errors import ConfigError, FleetFitError, PlanError, RunError
from fleetfit.planner import LevelChange, Plan
from fleetfit.rounds.restore import _match_levels
from fleetfit.runs.folder import RunFolder, parse_round

TABLE: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 8}},
    "model": {"name": "cnn"},
    "local": {"epochs": 1, "max_steps": 2, "lr": 0.05},
    "cohort": {"count": 4},
    "evaluate": {"every": 0, "batch_norm": ["static"]},
}


def groups(*budgets: float) -> dict[str, Any]:
    return {"groups": [{"budget": budget} for budget in budgets]}


def begin(folder: Path, method: str = "scalefl", fleet: Mapping[str, Any] | None = None, **changes: Any) -> ff.Run:
    table = {**TABLE, "method": {"name": method}, "fleet": fleet or groups(0.25, 1.0), **changes}
    return ff.run(table, out=folder, progress=False)


def shapes(plan: Plan) -> dict[str, Any]:
    return {level.name: (level.depth, level.width, level.exits) for level in plan.levels}


def test_more_rounds_are_those_of_a_run_that_had_them(tmp_path: Path) -> None:
    whole = begin(tmp_path / "whole", rounds=4)
    begin(tmp_path / "run")
    run = ff.resume(tmp_path / "run", rounds=4, progress=False)
    assert_same_bits(run.server.state, whole.server.state)
    assert (tmp_path / "run" / "config.toml").read_text() == (tmp_path / "whole" / "config.toml").read_text()
    assert not run.files.is_edited()
    assert [(one.round, one.keys) for one in RunFolder(run.folder).environment.changed] == [(2, ["rounds"])]
    assert not run.plan.changes and len(run.notes) == len(whole.notes) + 1
    again = ff.resume(tmp_path / "run", progress=False)
    assert len(again.metrics) == 4 and again.notes == run.notes


def test_checkpoints_may_become_fewer(tmp_path: Path) -> None:
    whole = begin(tmp_path / "whole", rounds=7)
    begin(tmp_path / "run")
    run = ff.resume(tmp_path / "run", rounds=7, checkpoint={"every": 3, "keep": 2}, progress=False)
    assert [parse_round(path) for path in run.files.checkpoints()] == [6, 7]
    assert_same_bits(run.server.state, whole.server.state)
    # The comparison that began it still knows it.
    assert restore_records(whole.experiment, run.experiment) == run.experiment


@pytest.mark.parametrize("method", ["scalefl", "heterofl", "fleetfit", "nefl"])
def test_a_level_is_added_and_one_is_dropped(method: str, tmp_path: Path) -> None:
    before = shapes(begin(tmp_path / "run", method, cohort={"fraction": 1.0}).plan)
    run = ff.resume(tmp_path / "run", rounds=4, fleet=groups(0.25, 0.5, 1.0), progress=False)
    added = shapes(run.plan)
    assert list(added) == ["1", "3", "2"] and {**added, **before} == added
    assert added["3"][2] == tuple(e for e in before["2"][2] if e <= added["3"][0]), "no further exit"
    assert run.plan.changes == (LevelChange(2, ("3",), ()),)
    assert run.plan == run.assembly.plan == Plan.from_toml((tmp_path / "run" / "plan.toml").read_text())
    share = run.plan.levels[1].share
    assert run.plan.levels[0].share < share < 1 and share == pytest.approx(0.5, rel=0.1)
    assert [report["train"]["by_level"] for report in run.metrics[:2]] == [{"1": 4, "2": 4}] * 2
    assert [report["train"]["by_level"] for report in run.metrics[2:]] == [{"1": 3, "2": 2, "3": 3}] * 2
    columns = run.columns["static"]
    assert set(columns["levels"]) == set(columns["test_levels"]) == {"1", "2", "3"}
    assert [level["level"] for level in run.summary["levels"]] == ["1", "3", "2"]
    assert set(json.loads((run.folder / "fleet.json").read_text())["groups"]) == {"1/4", "1/2", "1"}
    assert run.accuracy("local", level=3) == columns["levels"]["3"]["local"]
    assert run.model(level=3) is not None and len(ff.load(tmp_path / "run").notes) == len(run.notes)

    run = ff.resume(tmp_path / "run", rounds=5, fleet=groups(0.25, 1.0), progress=False)
    assert shapes(run.plan) == before
    run = ff.resume(tmp_path / "run", rounds=6, fleet=groups(0.5, 1.0), progress=False)
    assert list(shapes(run.plan)) == ["4", "2"], "a number is not given twice"
    assert run.plan.changes[1:] == (LevelChange(4, (), ("3",)), LevelChange(5, ("4",), ("1",)))


def test_a_kill_after_the_change_costs_no_bit(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(report: Mapping[str, Any]) -> None:
        raise Stop

    runs = []
    for name in ("whole", "cut"):
        begin(tmp_path / name, "nefl")
        fleet = groups(0.25, 0.5, 1.0)
        if name == "cut":
            with pytest.raises(Stop):
                ff.resume(tmp_path / name, rounds=5, fleet=fleet, on_round=stop, progress=False)
            runs.append(ff.resume(tmp_path / name, progress=False))
        else:
            runs.append(ff.resume(tmp_path / name, rounds=5, fleet=fleet, progress=False))
    assert_same_bits(runs[1].server.state, runs[0].server.state)
    assert runs[1].notes == runs[0].notes and runs[1].plan == runs[0].plan
    assert [r["train"] for r in runs[1].metrics] == [r["train"] for r in runs[0].metrics]


def test_a_fast_run_keeps_how_its_levels_are_computed(tmp_path: Path) -> None:
    before = begin(tmp_path / "run", engine={"speed": "fast"}).experiment.recorded.computing
    ff.resume(tmp_path / "run", rounds=3, fleet=groups(0.25, 0.5, 1.0), progress=False)
    after = ff.load(tmp_path / "run").experiment.recorded.computing
    assert set(after) == {"1", "2", "3"} and {**after, **before} == after


def test_an_edited_file_is_the_same_change(tmp_path: Path) -> None:
    for name in ("set", "edited"):
        begin(tmp_path / name)
    by_key = ff.resume(tmp_path / "set", rounds=3, fleet=groups(0.25, 0.5, 1.0), progress=False)
    (tmp_path / "edited" / "config.toml").write_text((tmp_path / "set" / "config.toml").read_text())
    edited = ff.resume(tmp_path / "edited", progress=False)
    assert edited.files.is_edited() and not by_key.files.is_edited()
    assert edited.plan == by_key.plan
    assert_same_bits(edited.server.state, by_key.server.state)


def test_listed_levels_keep_their_shapes(tmp_path: Path) -> None:
    listed = [{"budget": 0.3, "width": 0.5}, {"budget": 1.0}]
    before = shapes(begin(tmp_path / "run", "heterofl", {**groups(0.3, 1.0), "levels": listed}).plan)
    levels = {"levels": [listed[0], {"budget": 0.6, "width": 0.75}, listed[1]]}
    run = ff.resume(tmp_path / "run", rounds=3, fleet={**groups(0.3, 0.6, 1.0), **levels}, progress=False)
    assert shapes(run.plan) == {"1": before["1"], "3": (6, 0.75, (6,)), "2": before["2"]}
    assert [level.needs for level in run.assembly.federation.levels] == [0.3, 0.6, 1.0]
    run = ff.resume(tmp_path / "run", rounds=4, fleet={"levels": [0.3, 0.45, 1.0]}, progress=False)
    assert list(shapes(run.plan)) == ["1", "4", "2"]

    deep = [{"budget": 0.3, "depth": 4, "width": 0.5}, {"budget": 1.0}]
    begin(tmp_path / "deep", fleet={**groups(0.3, 1.0), "levels": deep})
    levels["levels"] = [deep[0], {"budget": 0.6, "depth": 5, "width": 0.75}, deep[1]]
    with raises(PlanError, key="fleet.levels"):  # it has no exit after block 5
        ff.resume(tmp_path / "deep", rounds=4, fleet=levels, progress=False)


def test_what_does_not_fit_changes_no_file(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run").folder
    depth = begin(tmp_path / "depth", "depthfl").folder
    one = begin(tmp_path / "one", "fedavg").folder
    early = {"every": 1, "split": "validation", "patience": 1}
    stopped = begin(tmp_path / "early", rounds=9, local={"max_steps": 1, "lr": 1e-9}, evaluate=early).folder
    cases: list[tuple[Path, dict[str, Any], str, type[FleetFitError]]] = [
        (folder, {"rounds": 1}, "rounds", ConfigError),
        (folder, {"fleet": groups(0.25, 0.5, 1.0)}, "rounds", ConfigError),  # it has no round left
        (folder, {"rounds": 3, "fleet": {"tolerance": 0.2}}, "fleet.tolerance", ConfigError),
        (folder, {"rounds": 3, "fleet": {"groups": 3}}, "fleet.groups", ConfigError),
        (folder, {"rounds": "many"}, "rounds", ConfigError),
        (stopped, {"rounds": 20}, "evaluate.patience", ConfigError),
        (depth, {"rounds": 3, "fleet": groups(0.25, 0.5, 1.0)}, "fleet.levels", PlanError),
        (one, {"rounds": 3, "fleet": groups(0.125, 1.0)}, "fleet.groups", PlanError),
    ]
    for path, change, key, kind in cases:
        before = {file: file.read_bytes() for file in path.iterdir() if file.is_file()}
        with raises(kind, key=key):
            ff.resume(path, progress=False, **change)
        assert {file: file.read_bytes() for file in path.iterdir() if file.is_file()} == before, change
    # The ways out that errors name.
    trained = len(ff.load(stopped).metrics)
    run_verb("resume", stopped, "--set", "evaluate.patience=3")
    assert len(ff.load(stopped).metrics) > trained
    assert ff.resume(stopped, evaluate={"patience": 99}, progress=False).finished
    # The new devices train the next smaller level.
    fleet = {**groups(0.25, 0.5, 1.0), "levels": [0.25, 1.0]}
    run = ff.resume(depth, rounds=3, fleet=fleet, progress=False)
    assert not run.plan.changes and [level.clients for level in run.plan.levels] == [6, 2]


def test_a_change_is_written_after_all_checks(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("a,b,label\n" + "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(200)))
    gone = ff.run({**TABLE, "data": {"name": str(data)}, "model": {}}, out=tmp_path / "gone", progress=False).folder
    data.unlink()
    wrong, damaged = begin(tmp_path / "wrong").folder, begin(tmp_path / "damaged").folder
    for path in (damaged / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    for path, more in ((gone, {}), (wrong, {"callbacks": ["nonsense"]}), (damaged, {})):
        before = (path / "config.toml").read_bytes()
        with pytest.raises(FleetFitError):
            ff.resume(path, rounds=4, progress=False, **more)
        assert (path / "config.toml").read_bytes() == before and (path / "summary.json").exists()


def test_a_kill_while_the_change_is_written_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, write = begin(tmp_path / "run").folder, RunFolder.write

    def stop(self: RunFolder, name: str, text: str) -> None:
        if name == "config.toml":
            raise KeyboardInterrupt
        write(self, name, text)

    monkeypatch.setattr(RunFolder, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        ff.resume(folder, rounds=4, progress=False)
    monkeypatch.undo()
    assert not RunFolder(folder).environment.changed and not RunFolder(folder).is_edited()
    run = ff.resume(folder, rounds=3, progress=False)
    assert [one.keys for one in RunFolder(folder).environment.changed] == [["rounds"]] and len(run.metrics) == 3
    assert not RunFolder(folder).is_edited()


def test_no_levels_are_guessed_where_the_plan_is_damaged(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run").folder
    ff.resume(folder, rounds=3, fleet=groups(0.25, 0.5, 1.0), progress=False)
    plan = folder / "plan.toml"
    plan.write_text(plan.read_text()[:100])
    with raises(RunError, path=plan):
        ff.load(folder).model(level=2)


def test_the_classifier_of_a_dropped_level_goes_where_no_other_has_it(tmp_path: Path) -> None:
    begin(tmp_path / "run", "inclusivefl", groups(0.25, 0.5, 1.0), model={"name": "cnn", "norm": "group"})
    run = ff.resume(tmp_path / "run", rounds=3, fleet=groups(0.25, 1.0), progress=False)
    assert {name.split(".")[1] for name in run.server.state if name.startswith("heads.")} == {"3", "6"}
    assert run.model(level=1) is not None and run.model(level=3) is not None


def test_classifiers_in_order_keep_their_tensors(tmp_path: Path) -> None:
    """Their names say nothing of exits, and the exits stay when a level goes."""
    heads = "nn.ModuleList(nn.Linear(hidden, classes) for _ in exits)"
    text = HEAD + STACK.replace("nn.ModuleDict({str(e): nn.Linear(hidden, classes) for e in exits})", heads)
    text = text.replace("nn.Linear(5, hidden)", "nn.Linear(64, hidden)").replace(
        "self.stem(x)", "self.stem(x.flatten(1))"
    )
    (tmp_path / "stack.py").write_text(text)
    model = {"name": f"{tmp_path}/stack.py:Stack"}
    before = begin(tmp_path / "run", "scalefl", groups(0.25, 0.5, 1.0), model=model)
    change_run(RunFolder(before.folder), {"rounds": 3, "fleet": groups(0.5, 1.0)}, {})
    after = ff.load(before.folder)
    assert [level.name for level in after.assembly.federation.levels] == ["2", "3"]
    assert {"heads.0.weight", "heads.1.weight"} <= after.server.state.keys()
    assert_same_bits(after.server.state, before.server.state)


def test_the_command_line_changes_the_same_keys(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run").folder
    run_verb("resume", folder, "--set", "rounds=3", "--set", "fleet.groups=[{budget=0.25}, {budget=0.5}, {budget=1.0}]")
    assert list(shapes(ff.load(folder).plan)) == ["1", "3", "2"] and len(ff.load(folder).metrics) == 3
    for word in ("local.lr=0.1", "model.name=mlp", "engine.workers=2", "engine.deadline_s=3"):
        before = (folder / "config.toml").read_bytes()
        assert word.partition("=")[0].partition(".")[2] in run_verb("resume", folder, "--set", word, code=2).err
        assert (folder / "config.toml").read_bytes() == before


def test_a_checkpoint_of_before_has_the_same_levels_by_their_new_places() -> None:
    table = {**TABLE, "method": {"name": "nefl"}}
    plan = assemble(load_experiment({**table, "fleet": groups(0.25, 1.0)})).plan
    federation = assemble(load_experiment({**table, "fleet": groups(0.25, 0.5, 1.0)}), kept=plan).federation
    assert [level.name for level in federation.levels] == ["1", "3", "2"] and federation.numbers == (1, 3, 2)
    tensors = [torch.full((1,), float(i)) for i in range(3)]
    state = {"a": tensors[0], "level1/b": tensors[1], "level2/b": tensors[2]}
    server = {"state": state, "round": 2, "memory": {"momentum": state}, "trained": {0: 0, 5: 1}}
    before = {"server": server, "clients": {}, "statistics": {0: {"x": tensors[0]}, 1: {"x": tensors[1]}}}
    after = _match_levels(before, federation)
    moved = {"a": tensors[0], "level1/b": tensors[1], "level3/b": tensors[2]}
    assert after["server"] == {"state": moved, "round": 2, "memory": {"momentum": moved}, "trained": {0: 0, 5: 2}}
    assert after["statistics"] == {0: {"x": tensors[0]}, 2: {"x": tensors[1]}}
    gone = _match_levels({**before, "levels": ["4", "2"]}, federation)
    assert gone["server"]["state"] == {"a": tensors[0], "level3/b": tensors[2]}
    assert gone["server"]["trained"] == {5: 2} and gone["statistics"] == {2: {"x": tensors[1]}}
    assert _match_levels({**before, "levels": ["1", "3", "2"]}, federation) == {**before, "levels": ["1", "3", "2"]}
