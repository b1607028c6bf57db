"""Callbacks: what they are told and in which order, once each, with the same bits; who raises; run files; trackers."""

import json
import logging
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from run_folders import TINY, Stopped, stopped_run
from support import raises, run_verb
from support.bits import have_same_state
from waiting import wait_until

import fleetfit as ff
from fleetfit.callbacks import RunStart, scalars
from fleetfit.config import load_experiment
from fleetfit.config.components import check_keys
from fleetfit.errors import ConfigError

QUICK: dict[str, Any] = {**TINY, "evaluate": {"every": 2, "statistics_samples": 60, "batch_norm": ["static"]}}


@pytest.fixture(autouse=True)
def restore_exit_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb.init` replaces `sys.exit` by one whose code is 0, not None, by default; later tests get Python's back."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


class Heard(ff.Callback):
    """Keeps all that it is told."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Any]] = []

    def on_start(self, start: RunStart) -> None:
        self.all.append(("start", start))

    def on_round(self, report: Mapping[str, Any]) -> None:
        self.all.append(("round", report))

    def on_evaluate(self, report: Mapping[str, Any]) -> None:
        self.all.append(("evaluate", report))

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        self.all.append(("end", summary))

    @property
    def rounds(self) -> list[int]:
        return [value["round"] for what, value in self.all if what == "round"]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, read without the package."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- what is told ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "private", "secure"])
def test_callbacks_get_the_folder_s_values_in_order(kind: str, tmp_path: Path) -> None:
    """Also where most is withheld: the seam has the same lines as the file, to the last key."""
    if kind == "private":
        pytest.importorskip("opacus.accountants", reason="the accountant is an extra: fleetfit[privacy]")
    if kind == "secure":
        pytest.importorskip("cryptography", reason="it is an extra: fleetfit[secure]")
    further = {
        "plain": {},
        "private": {
            "privacy": {"clipping_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01, "key_file": str(tmp_path / "key")}
        },
        "secure": {"secure": {}, "cohort": {"fraction": 1.0}},
    }[kind]
    further |= {"model": {**TINY["model"], "norm": False}, "local": {"epochs": 1, "lr": 0.1}}
    recorder = Heard()
    run = ff.run({**QUICK, **further}, out=tmp_path / "run", callbacks=[recorder])
    lines = read_metrics(run.folder)
    assert [what for what, _ in recorder.all] == ["start", "round", "round", "evaluate", "round", "evaluate", "end"]
    assert [value for what, value in recorder.all if what == "round"] == lines
    assert [value for what, value in recorder.all if what == "evaluate"] == lines[1:]
    assert recorder.all[-1][1] == json.loads((run.folder / "summary.json").read_text())
    start = recorder.all[0][1]
    assert (start.folder, start.title, start.group, start.rounds, start.done) == (run.folder, "run", "", 3, 0)
    assert start.config["rounds"] == 3 and start.config["method"]["name"] == "scalefl"


def test_a_run_that_is_told_of_has_the_same_bits(tmp_path: Path) -> None:
    """Whatever a callback draws, and whatever it does to what it is given."""

    def meddles(report: dict[str, Any]) -> None:
        torch.rand(5)
        report["train"].clear()
        report.get("evaluate", {}).clear()

    recorder = Heard()
    watched = ff.run(QUICK, out=tmp_path / "told", callbacks=[meddles, recorder])
    alone = ff.run(QUICK, out=tmp_path / "alone")
    assert have_same_state(watched, alone)
    assert [value for what, value in recorder.all if what == "round"] == read_metrics(watched.folder)
    assert watched.columns == alone.columns
    assert (watched.folder / "config.toml").read_text() == (alone.folder / "config.toml").read_text()
    assert not (alone.folder / "callbacks.json").exists()


def test_the_numbers_of_a_report_are_one_table() -> None:
    report = {
        "round": 3, "lr": 0.1, "train": {"loss": None, "by_level": {"1": 2}}, "failures": [{"client": 1}],
        "evaluate": {"split": "test", "static": {"local": 0.5, "exits": [0.25, 0.75], "per_client": {"local": {"0": 1}},
                                                 "levels": {"S1": {"local": 0.5}}}, "failures": []},
        "late": True,
    }  # fmt: skip
    assert scalars(report) == {
        "lr": 0.1, "train/by_level/1": 2.0, "failures": 1.0, "evaluate/static/local": 0.5,
        "evaluate/static/exits/1": 0.25, "evaluate/static/exits/2": 0.75, "evaluate/static/levels/S1/local": 0.5,
        "evaluate/failures": 0.0,
    }  # fmt: skip


# ---- who raises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3)], ids=["ValueError", "sys.exit"])
def test_a_raising_callback_is_named_and_dropped(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called = []

    def tracker(report: Mapping[str, Any]) -> None:
        called.append(report["round"])
        if report["round"] == 2:
            raise error

    recorder = Heard()
    run = ff.run(QUICK, out=tmp_path / "run", callbacks=[tracker, recorder])
    assert run.finished and called == [1, 2] and recorder.rounds == [1, 2, 3]
    first, last = caplog.messages
    assert all(name in first for name in ("tracker", "on_round", "round 2", "test_callbacks.py, line"))
    assert type(error).__name__ in first and "tracker" in last and "round 2" in last


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ff.RunError("that will do")], ids=["Ctrl-C", "RunError"])
def test_interrupts_and_own_errors_stop_a_resumable_run(error: BaseException, tmp_path: Path) -> None:
    def stops(report: Mapping[str, Any]) -> None:
        if report["round"] == 2:
            raise error

    recorder = Heard()
    with pytest.raises(type(error)):
        ff.run(QUICK, out=tmp_path / "run", callbacks=[recorder, stops])
    assert recorder.all[-1] == ("end", None) and recorder.rounds == [1, 2]
    assert ff.resume(tmp_path / "run").finished


# ---- going on --------------------------------------------------------------------------------------------------------


def test_rounds_that_are_done_again_are_not_told_again(tmp_path: Path) -> None:
    """With a checkpoint every two rounds, the third round is done twice; the callback of this name has heard of it."""
    settings = {**QUICK, "rounds": 5, "checkpoint": {"every": 2}}
    first, second = Heard(), Heard()

    def stops(report: Mapping[str, Any]) -> None:
        if report["round"] == 3:
            raise Stopped

    with pytest.raises(Stopped):
        ff.run(settings, out=tmp_path / "run", callbacks=[first], on_round=stops)
    run = ff.resume(tmp_path / "run", callbacks=[second])
    assert first.rounds == [1, 2, 3] and first.all[-1] == ("end", None)
    assert second.all[0][1].done == 2 and second.rounds == [4, 5]
    assert [v for what, v in second.all if what == "evaluate"] == read_metrics(run.folder)[3:]


def test_missed_reports_come_first_on_resume(tmp_path: Path) -> None:
    """One that had failed, and one that was not there: each hears every round once."""
    numbers: list[int] = []

    def tracker(report: Mapping[str, Any]) -> None:
        if report["round"] == 1 and not numbers:
            numbers.append(0)
            raise OSError("no network")
        numbers.append(report["round"])

    with pytest.raises(Stopped):
        ff.run({**QUICK, "rounds": 4}, out=tmp_path / "run", callbacks=[tracker], on_round=_stops_at_2)
    late = Heard()
    ff.resume(tmp_path / "run", callbacks=[tracker, late])
    assert numbers == [0, 1, 2, 3, 4] and late.rounds == [1, 2, 3, 4]


def _stops_at_2(report: Mapping[str, Any]) -> None:
    if report["round"] == 2:
        raise Stopped


def test_a_damaged_note_of_what_was_told_is_said(tmp_path: Path) -> None:
    stopped_run(QUICK, tmp_path / "run", 1)
    (tmp_path / "run" / "callbacks.json").write_text('{"told": {"x": "much"}}')
    with raises(ff.RunError, path=tmp_path / "run" / "callbacks.json"):
        ff.resume(tmp_path / "run", callbacks=[Heard()])


class _Stops(Heard):
    """Stops the run in one hook of a round."""

    def __init__(self, hook: str, at: int) -> None:
        super().__init__()
        self._hook, self._at = hook, at

    def _check(self, hook: str, report: Mapping[str, Any]) -> None:
        if (hook, report["round"]) == (self._hook, self._at):
            raise ff.RunError("enough")

    def on_round(self, report: Mapping[str, Any]) -> None:
        super().on_round(report)
        self._check("round", report)

    def on_evaluate(self, report: Mapping[str, Any]) -> None:
        super().on_evaluate(report)
        self._check("evaluate", report)


@pytest.mark.parametrize(
    ("hook", "at", "every"), [("round", 1, 1), ("round", 2, 1), ("evaluate", 2, 1), ("round", 3, 4), ("evaluate", 2, 3)]
)
def test_a_callback_that_stops_the_run_gets_no_round_twice(hook: str, at: int, every: int, tmp_path: Path) -> None:
    """Nor does the one after it miss a round; rounds 2 and 4 of 4 are evaluated."""
    settings = {**QUICK, "rounds": 4, "checkpoint": {"every": every}}
    stops, other = _Stops(hook, at), Heard()
    with raises(ff.RunError):
        ff.run(settings, out=tmp_path / "run", callbacks=[stops, other])
    assert stops.rounds == other.rounds == list(range(1, at + 1))
    assert ff.resume(tmp_path / "run", callbacks=[stops, other]).finished
    for one in (stops, other):
        assert one.rounds == [1, 2, 3, 4]
        assert [value["round"] for what, value in one.all if what == "evaluate"] == [2, 4]


# ---- in a run file ---------------------------------------------------------------------------------------------------

PLUG_IN = """
import json
from pathlib import Path

def lines(report, word="round"):
    with (Path(__file__).parent / "lines.txt").open("a") as file:
        file.write(f"{word} {report['round']}\\n")

class Ends:
    def __init__(self, file):
        self.file = file
    def on_end(self, summary):
        (Path(__file__).parent / self.file).write_text(json.dumps(summary))

def unclear(r):
    pass
"""


def run_file(folder: Path, *callbacks: Any, **changes: Any) -> Path:
    (folder / "mine.py").write_text(PLUG_IN)
    file = folder / "run.toml"
    file.write_text(tomli_w.dumps({"callbacks": list(callbacks), **QUICK, **changes}))
    return file


@pytest.mark.parametrize("engine", ["local", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_run_file_names_functions_and_classes_with_their_keys(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from the run file; `resume` finds them again in `config.toml`. On worker processes only this one tells."""
    file = run_file(
        tmp_path, "mine.py:lines", {"name": "mine.py:Ends", "file": "end.json"}, engine={"name": engine}
    )  # fmt: skip
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(Stopped):
        ff.run(file, out=tmp_path / "run", on_round=_stops_at_2)
    run = ff.resume(tmp_path / "run")
    assert (tmp_path / "lines.txt").read_text().splitlines() == ["round 1", "round 2", "round 3"]
    assert json.loads((tmp_path / "end.json").read_text()) == run.summary
    assert run.experiment.callbacks == [
        f"{tmp_path}/mine.py:lines", {"name": f"{tmp_path}/mine.py:Ends", "file": "end.json"}
    ]  # fmt: skip


def test_one_callback_name_is_enough(tmp_path: Path) -> None:
    file = run_file(tmp_path)
    recorder = Heard()
    run = ff.run(
        load_experiment(file, [f"callbacks={tmp_path}/mine.py:lines", "rounds=1"]), out=tmp_path / "run",
        callbacks=[recorder, {"name": f"{tmp_path}/mine.py:lines", "word": "also"}],
    )  # fmt: skip
    assert (tmp_path / "lines.txt").read_text().splitlines() == ["round 1", "also 1"] and recorder.rounds == [1]
    assert len(run.experiment.callbacks) == 2


WRONG: dict[str, tuple[Any, str]] = {
    "no such name": ("tensorbord", 'not among the callbacks: mlflow, tensorboard, wandb. Did you mean "tensorboard"?'),
    "no such key": ({"name": "wandb", "projekt": "x"}, 'has no "projekt"'),
    "a key of a wrong type": ({"name": "wandb", "tags": 3}, "tags"),
    "a key of a function": ({"name": "mine.py:lines", "wort": "x"}, 'Did you mean "word"?'),
    "a key that is needed": ("mine.py:Ends", 'needs "file"'),
    "a function whose report has another name": ("mine.py:unclear", "takes `report` first"),
    "no name": ({"project": "x"}, "a name and keys"),
    "a number": (3, "should be a list of names"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_run_file_is_refused_before_anything_is_trained(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, message = WRONG[what]
    file = run_file(tmp_path, entry)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        ff.run(file, out=tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


class Misspelt:
    def on_rounds(self, report: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("callback", "message"),
    [(Misspelt(), 'Did you mean "on_round"?'), (Heard, "is a class. Pass an object"), (3, "or be a function")],
    ids=["misspelled", "a class", "no callback"],
)
def test_an_object_that_is_no_callback_is_refused(callback: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ff.run(QUICK, out=tmp_path / "run", callbacks=[callback])
    assert message in str(caught.value) and not (tmp_path / "run").exists()
    with raises(ConfigError, "tensorboard", key="callbacks"):
        ff.run(QUICK, out=tmp_path / "run", callbacks="tensorboard")


def test_a_missing_extra_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with raises(ff.MissingExtra, f"fleetfit[{name}]"):
            ff.run(QUICK, out=tmp_path / "run", callbacks=[name])
    assert not (tmp_path / "run").exists()


# ---- comparisons -----------------------------------------------------------------------------------------------------

COMPARED = """
import json
from pathlib import Path

class Notes:
    def on_start(self, start):
        self.start = start
    def on_end(self, summary):
        notes = {"title": self.start.title, "group": self.start.group, "rounds": summary["rounds"]}
        (self.start.folder / "noted.json").write_text(json.dumps(notes))
"""


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_runs_of_a_comparison_have_own_callbacks_in_one_group(jobs: int, tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(COMPARED)
    rows = [{"method": {"name": "scalefl"}}, {"method": {"name": "fedavg"}}]
    file = tmp_path / "both.toml"
    tables = {**QUICK, "rounds": 1, "compare": {"row": rows}}
    file.write_text(tomli_w.dumps(tables))
    plain = ff.compare(file, out=tmp_path / "both", jobs=jobs)
    assert not list(tmp_path.glob("both/**/noted.json"))
    file.write_text(tomli_w.dumps({"callbacks": ["notes.py:Notes"], **tables}))
    again = ff.compare(file, out=tmp_path / "both", jobs=jobs)  # whom a run tells is no part of what it is
    assert again.table == plain.table and not list(tmp_path.glob("both/**/noted.json"))
    ff.compare(file, out=tmp_path / "new", jobs=jobs)
    notes = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("new/**/noted.json"))]
    assert notes == [
        {"title": f"{row}, seed 3", "group": "new", "rounds": 1} for row in ("fedavg", "scalefl")
    ]  # fmt: skip


def test_callbacks_do_not_change_a_comparison_s_folder(tmp_path: Path) -> None:
    from fleetfit.api.comparison import plan_comparison

    file, tables = tmp_path / "both.toml", {**QUICK, "compare": {"row": [{"label": "a"}]}}
    file.write_text(tomli_w.dumps(tables))
    before = plan_comparison(file).fingerprint
    file.write_text(tomli_w.dumps({"callbacks": ["tensorboard"], **tables}))
    assert plan_comparison(file).fingerprint == before
    file.write_text(tomli_w.dumps({**tables, "rounds": 7}))
    assert plan_comparison(file).fingerprint != before


# ---- trackers, by reading back what they wrote -----------------------------------------------------------------------


def test_tensorboard_has_every_number_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="it is an extra: fleetfit[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(Stopped):
        ff.run({**QUICK, "callbacks": ["tensorboard"], "rounds": 4}, out=tmp_path / "run", on_round=_stops_at_2)
    run = ff.resume(tmp_path / "run")
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in read_metrics(run.folder):
        for place, value in scalars(line).items():
            expected.setdefault(place, []).append((line["round"], value))
    assert sorted(events.Tags()["scalars"]) == sorted(expected)
    for place, points in expected.items():
        read = [(event.step, event.value) for event in events.Scalars(place)]
        assert [step for step, _ in read] == [step for step, _ in points], place
        assert [value for _, value in read] == pytest.approx([value for _, value in points], rel=1e-6), place


def offline_records(folder: Path) -> Iterator[Any]:
    """Yield the records of an offline run: a log of LevelDB's format (blocks of 32 KiB, records cut at their ends)."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into what is left of the block
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + size > len(data):  # the rest is not written yet
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def read_offline(folder: Path) -> dict[str, Any]:
    """Return run id, group, name, config, history by step and summary of an offline run, once it is all written.

    A process of wandb's own writes it, a moment after the run is over.
    """
    wait_until(lambda: any(record.WhichOneof("record_type") == "exit" for record in offline_records(folder)))
    content: dict[str, Any] = {"history": {}, "summary": {}, "config": {}}
    for record in offline_records(folder):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            content |= {"id": record.run.run_id, "group": record.run.run_group, "name": record.run.display_name}
            content["config"] |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
        elif kind == "history":
            row = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
            content["history"][row["_step"]] = {k: v for k, v in row.items() if not k.startswith("_")}
        elif kind == "summary":
            pairs = ((one.key or "/".join(one.nested_key), one.value_json) for one in record.summary.update)
            content["summary"] |= {key: json.loads(value) for key, value in pairs}
    return content


def test_wandb_has_every_number_and_resumes_its_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb", reason="it is an extra: fleetfit[wandb]")
    tracker = {"name": "wandb", "mode": "offline", "project": "p", "group": "mine"}
    with pytest.raises(Stopped):
        ff.run({"callbacks": [tracker], **QUICK}, out=tmp_path / "run", on_round=_stops_at_2, progress=False)
    second = int(time.time())
    wait_until(lambda: int(time.time()) > second)  # which is what wandb calls its folders by
    run = ff.resume(tmp_path / "run", progress=False)
    first, second = (read_offline(place) for place in sorted((run.folder / "wandb").glob("offline-run-*")))
    assert first["id"] == second["id"] and first["group"] == second["group"] == "mine" and first["name"] == "run"
    assert first["config"]["method"]["name"] == "scalefl" and first["config"]["rounds"] == 3
    steps = {line["round"]: scalars(line) for line in read_metrics(run.folder)}
    assert list(first["history"]) == [1, 2] and list(second["history"]) == [3]
    for step, values in (first["history"] | second["history"]).items():
        assert values == pytest.approx(steps[step])
    assert second["summary"]["final/local"] == run.summary["local"]
    assert "history" not in (output := capfd.readouterr().err) and len(output.splitlines()) < 8, (
        "what we print is enough"
    )


@pytest.mark.filterwarnings("ignore:The ``noload``")  # of MLflow's use of SQLAlchemy
def test_mlflow_has_every_number_and_resumes_its_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="it is an extra: fleetfit[mlflow]")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = {"name": "mlflow", "uri": uri, "experiment": "e", "group": "mine"}
    with pytest.raises(Stopped):
        ff.run({"callbacks": [tracker], **QUICK}, out=tmp_path / "run", on_round=_stops_at_2, progress=False)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("e").experiment_id
    assert [one.info.status for one in client.search_runs([experiment])] == ["FAILED"]
    run = ff.resume(tmp_path / "run", progress=False)
    (tracked,) = client.search_runs([experiment])
    assert tracked.info.status == "FINISHED" and tracked.info.run_name == "run" and tracked.data.tags["group"] == "mine"
    parameters = tracked.data.params
    assert (parameters["method.name"], parameters["rounds"]) == ("scalefl", "3")
    for line in read_metrics(run.folder):
        for name, value in scalars(line).items():
            points = client.get_metric_history(tracked.info.run_id, name)
            assert [point.value for point in points if point.step == line["round"]] == [pytest.approx(value)], name
    assert tracked.data.metrics["final/local"] == run.summary["local"]


@pytest.mark.filterwarnings("ignore:The ``noload``")  # of MLflow's use of SQLAlchemy
def test_mlflow_gets_names_that_it_accepts(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="it is an extra: fleetfit[mlflow]")
    from mlflow import MlflowClient

    from fleetfit.callbacks.mlflow import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    callback = mlflow(uri, "e")
    config = {"local": {"lr (first)": 0.1}, "recorded": {"latencies": {"a=1": [0.5]}}}
    callback.on_start(RunStart(tmp_path, "run", "", config, 1, 0))
    callback.on_end({"rounds": 1, "failure_reasons": {"diverged (loss: nan)": 2, "x" * 300: 1}})
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"local.lr _first_": "0.1"}
    values = {name.rpartition("/")[2]: value for name, value in run.data.metrics.items()}
    assert values["diverged _loss_ nan_"] == 2.0 and sorted(values.values()) == [1.0, 1.0, 2.0], "with the rounds"


@pytest.mark.slow
def test_the_runs_of_a_comparison_are_one_group_of_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="it is an extra: fleetfit[wandb]")
    file = tmp_path / "both.toml"
    rows = [{"method": {"name": "scalefl"}}, {"method": {"name": "fedavg"}}]
    tracker = {"name": "wandb", "mode": "offline"}
    file.write_text(tomli_w.dumps({"callbacks": [tracker], **QUICK, "rounds": 1, "compare": {"row": rows}}))
    ff.compare(file, out=tmp_path / "both")
    runs = [read_offline(place) for place in tmp_path.glob("both/**/offline-run-*")]
    assert {one["group"] for one in runs} == {"both"} and len({one["id"] for one in runs}) == 2
    assert sorted(one["name"] for one in runs) == ["fedavg, seed 3", "scalefl, seed 3"]


def test_the_command_line_says_which_callback_failed(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def bad(report):\n    return 1 / 0\n")
    file = run_file(tmp_path, "bad.py:bad", rounds=1)
    err = run_verb("run", file, "--out", tmp_path / "run", "--quiet", code=0).err
    assert all(name in err for name in (f"{tmp_path}/bad.py:bad", "on_round", "ZeroDivisionError", "(bad.py, line 2)"))
    logging.getLogger("fleetfit").handlers.clear()


def test_checking_the_keys_calls_no_callback(tmp_path: Path) -> None:
    file = run_file(tmp_path, {"name": "mine.py:Ends", "file": "end.json"})
    check_keys(load_experiment({"callbacks": [{"name": f"{file.parent}/mine.py:Ends", "file": "end.json"}]}))
    assert not (tmp_path / "end.json").exists()
