"""Records of run folders: unfinished runs, what is left out, and that a record is written as it was read."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import raises

from fleetfit.cost import Cost
from fleetfit.errors import RunError
from fleetfit.planner import Plan, PlannedLevel
from fleetfit.runs.comparison import read_comparison
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import NO_ACCURACIES, AccuracyRecord, RoundRecord, SummaryRecord
from fleetfit.runs.summary import make_summary

PLAN = Plan(
    "parameters",
    "both",
    6,
    (
        PlannedLevel("1", 3, 0.68, (3,), 6_983, 115_102, 0.125, 0.1, 0.121, 30),
        PlannedLevel("2", 6, 1.0, (3, 6), 57_550, 411_684, 1.0, 0.1, 1.0, 10),
    ),
    Cost(290, 280),
)
CONFIG = 'name = "mine"\nseed = 3\nrounds = 4\nmethod.name = "scalefl"\nmodel.name = "cnn"\ndata.name = "digits"\n'
DESCRIPTION = {"name": "mine", "method": "scalefl", "model": "cnn", "data": "digits", "seed": 3, "norm": "static"}


def report(number: int, **changes: Any) -> dict[str, Any]:
    train = {"loss": 0.5, "clients": 2}
    return {"round": number, "train": train, "failures": [], "bytes_down": 7, "bytes_up": 5, "seconds": 2, **changes}


EVALUATE = {
    "split": "test",
    "static": {
        "global": 0.75, "local": 0.5, "exits": [0.25, 0.75],
        "levels": {"1": {"local": 0.25, "clients": 3}, "2": {"local": None, "clients": 0}},
    },
}  # fmt: skip
REPORTS = [report(1), report(2, evaluate=EVALUATE), report(3)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    files = RunFolder.create(tmp_path / "run", {"config.toml": CONFIG, "plan.toml": PLAN.to_toml()})
    for one in REPORTS:
        files.append(one)
    return files


def test_an_unfinished_run_has_the_numbers_of_its_rounds_so_far(folder: RunFolder) -> None:
    """Those that it has when it ends there."""
    unfinished = RunFolder.open(folder.path)
    assert not unfinished.is_finished  # each file is read once
    folder.write("summary.json", json.dumps(make_summary(DESCRIPTION, PLAN, REPORTS, [])))
    finished = RunFolder.open(folder.path)
    assert (unfinished.is_finished, finished.is_finished) == (False, True)
    assert unfinished.find_problems() == finished.find_problems() == ()
    for name in ("method", "model", "data", "name", "seed", "norm", "rounds", "global_", "local", "levels",
                 "bytes_down", "bytes_up", "seconds", "waste", "failures", "evaluate"):  # fmt: skip
        assert getattr(unfinished.summary, name) == getattr(finished.summary, name), name
    assert unfinished.summary.headline == finished.summary.headline
    assert [(number, accuracies.global_) for number, accuracies in finished.evaluations] == [(2, 0.75)]
    assert (finished.summary.bytes_down, finished.summary.levels[0].local) == (21, 0.25)


def test_a_run_without_rounds_has_no_accuracies(tmp_path: Path) -> None:
    files = {"config.toml": CONFIG, "environment.json": '{"score": "R2"}'}
    record = RunFolder.open(RunFolder.create(tmp_path / "run", files).path)
    assert (record.rounds, record.evaluations, record.last, record.plan) == ([], [], NO_ACCURACIES, None)
    assert (record.name, record.method, record.seed, record.summary.bytes_up) == ("mine", "scalefl", 3, 0)
    assert record.summary.score == "R2"


def test_sums_that_are_too_large_are_left_out(folder: RunFolder) -> None:
    for number in (4, 5, 6):
        folder.append(report(number, bytes_down=2**62))
    assert RunFolder.open(folder.path).summary.rounds == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "environment.json", "fleet.json", "nodes.json"])
def test_a_damaged_file_is_left_out_and_named(folder: RunFolder, name: str) -> None:
    folder.write(name, '{"round": "x", "time": 3, "first": 3, "members": 3}\n')
    record = RunFolder.open(folder.path)
    (problem,) = record.find_problems()
    assert problem.startswith(name)
    assert record.config["seed"] == 3 and record.plan == PLAN


def test_a_private_run_withholds_its_sums(folder: RunFolder) -> None:
    privacy = {"epsilon": 1.0, "delta": 1e-3, "noise_multiplier": 1.0, "clipping_norm": 1.0, "rate": 0.1}
    folder.append(report(4, privacy=privacy, bytes_down=None, bytes_up=None))
    record = RunFolder.open(folder.path)
    assert record.is_private and record.summary.bytes_down is None
    summary = make_summary(DESCRIPTION, PLAN, [report(1, privacy=privacy)], [])
    assert (summary["bytes_down"], summary["failures"], summary["privacy"]) == (None, None, privacy)


def test_a_record_is_written_as_it_was_read() -> None:
    """Whole numbers stay whole, keys that the model lacks stay, and keys that are not there are not added."""
    record = RoundRecord.load(report(1, evaluate=EVALUATE, later={"a": [1, None]}))
    assert json.dumps(record.dump(), sort_keys=True) == json.dumps(
        report(1, evaluate=EVALUATE, later={"a": [1, None]}), sort_keys=True
    )
    assert type(record.seconds) is int


def test_a_number_is_found_by_its_key() -> None:
    accuracies = AccuracyRecord.load({**EVALUATE["static"], "of_a_plugin": 0.125, "order": "stored"})
    keys = ("global", "local", "of_a_plugin", "full", "order", "exits", "dump")
    assert [accuracies.number(key) for key in keys] == [0.75, 0.5, 0.125, None, None, None, None]


def test_a_later_format_is_refused(folder: RunFolder) -> None:
    folder.write("summary.json", json.dumps({"format": SummaryRecord.FORMAT + 1}))
    with raises(RunError, "format 2", "format 1", path=folder.path / "summary.json"):
        folder.read_summary()
    with raises(RunError, path=folder.path / "results.json"):
        read_comparison(folder.path)
