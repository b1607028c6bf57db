"""Runs from Python: end to end, cut off and taken up again, compared; the numbers in the folder are those returned."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from support import Expected, raises
from support.bits import has_same_bits
from torch import nn

import fleetfit as ff
from fleetfit.api.comparison import format_label, plan_comparison
from fleetfit.config import load_experiment, to_toml
from fleetfit.errors import ConfigError, ModelError, RunError
from fleetfit.models.cnn import cnn
from fleetfit.runs.folder import RunFolder

SMALL: dict[str, Any] = {
    "rounds": 3,
    "data": {"partition": {"clients": 8}},
    "local": {"epochs": 1, "max_steps": 4},
    "cohort": {"count": 4},
    "evaluate": {"every": 2, "statistics_samples": 200, "batch_norm": ["static", "batch"]},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    """One finished run, for the tests that only look at it."""
    return ff.run(SMALL, out=tmp_path_factory.mktemp("runs") / "run")


def test_a_data_frame_has_the_numbers_of_all_rounds(done: ff.Run) -> None:
    pytest.importorskip("pandas")
    frame = done.to_frame()
    assert list(frame.index) == [1, 2, 3]
    assert list(frame["loss"]) == [line["train"]["loss"] for line in done.metrics]
    assert list(frame["local"].isna()) == ["evaluate" not in line for line in done.metrics]
    assert frame["local"].iloc[-1] == done.accuracy("local")
    assert frame["levels/2/local"].iloc[-1] == done.accuracy("local", level=2)
    assert frame["evaluate/batch/global"].iloc[-1] == done.accuracy("global", norm="batch")


def test_a_run_without_rounds_is_an_empty_frame(tmp_path: Path) -> None:
    pytest.importorskip("pandas")

    class Stops(ff.Callback):
        def on_start(self, start: Any) -> None:
            raise RunError("not now")

    with raises(RunError):
        ff.run(SMALL, out=tmp_path / "run", callbacks=[Stops()])
    frame = ff.load(tmp_path / "run").to_frame()
    assert frame.empty and frame.index.name == "round"


def states_equal(a: ff.Run, b: ff.Run) -> bool:
    x, y = (RunFolder.open(r.folder).load_checkpoint() for r in (a, b))
    assert x is not None and y is not None
    return has_same_bits(x["server"]["state"], y["server"]["state"])


def timeless(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in ("seconds", "seconds_of")} for line in metrics]


# ---- one run -------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_whole_folder(done: ff.Run) -> None:
    names = {p.name for p in done.folder.iterdir() if not p.name.startswith(".")}
    assert {"config.toml", "environment.json", "plan.toml", "fleet.json", "metrics.jsonl", "summary.json"} <= names
    assert [line["round"] for line in done.metrics] == [1, 2, 3]
    assert [("evaluate" in line) for line in done.metrics] == [False, True, True]
    assert done.finished
    assert [p.name for p in (done.folder / "checkpoints").iterdir()] == [
        "round-000002.safetensors",
        "round-000003.safetensors",
    ]


def test_numbers_printed_are_numbers_in_the_folder(done: ff.Run) -> None:
    summary = json.loads((done.folder / "summary.json").read_text())
    columns = done.metrics[-1]["evaluate"]["static"]
    assert summary["global"] == columns["global"] == done.accuracy("global")
    assert summary["local"] == columns["local"] == done.accuracy()
    assert summary["bytes_up"] == sum(line["bytes_up"] for line in done.metrics)
    for level in summary["levels"]:
        if level["local"] is not None:
            assert level["local"] == done.accuracy(level=int(level["level"]))


def test_batch_statistics_are_a_column_of_their_own(done: ff.Run) -> None:
    assert done.accuracy("global", norm="batch") == done.columns["batch"]["global"]
    assert done.columns["batch"]["batch_size"] == 128
    with raises(ConfigError, "layer", "static", key="norm"):
        done.accuracy(norm="layer")


def test_accuracies_that_do_not_exist(done: ff.Run) -> None:
    with raises(ConfigError, "globle", '"global"', key="kind"):
        done.accuracy("globle")
    with raises(ConfigError, '"global_clients"', key="kind") as caught:  # a count
        done.accuracy("global_clients")
    assert "local_samples" not in str(caught.value)
    with raises(ConfigError, "1, 2, 3, 4", "9", key="level"):
        done.accuracy(level=9)
    with raises(ConfigError, '"global"', "2", key="level"):
        done.accuracy("global", level=2)


def test_the_model_of_a_level_is_a_plain_module(done: ff.Run) -> None:
    run = ff.load(done.folder)
    data, parts = run.assembly.data, run.assembly.simulation.parts
    mine = [c for c in range(8) if run.assembly.federation.level_of[c] == 1]
    model = run.model(level=2)
    assert not model.training
    scores = []
    for client in mine:
        x, y = data.batch(parts[client]["test"])
        with torch.no_grad():
            scores.append(float((model(x)[-1].argmax(1) == y).float().mean()))
    assert sum(scores) / len(scores) == pytest.approx(run.accuracy(level=2))
    with raises(ConfigError, "5"):
        run.model(level=5)


def test_the_model_of_a_level_owns_its_tensors(done: ff.Run, tmp_path: Path) -> None:
    """It is written as a file, and training it changes nothing of the run."""
    run = ff.load(done.folder)
    model, x = run.model(level=1), torch.rand(8, *run.assembly.federation.problem.input_shape)
    save_model(model, str(tmp_path / "level-1.safetensors"))
    before = run.model(level=1)(x)[-1].detach()
    for norm in [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]:
        norm.running_mean.add_(1)
    assert not torch.equal(model(x)[-1], before)
    assert torch.equal(run.model(level=1)(x)[-1], before)


def test_one_image_at_a_time_gives_the_same_answer(done: ff.Run) -> None:
    run = ff.load(done.folder)
    x, _ = run.assembly.data.batch(torch.arange(6))
    model = run.model()
    with torch.no_grad():
        together = model(x)[-1]
        alone = torch.cat([model(x[i : i + 1])[-1] for i in range(6)])
    assert torch.allclose(together, alone, atol=1e-5)


def test_evaluating_again_gives_the_same_columns(done: ff.Run) -> None:
    again = ff.load(done.folder).evaluate()
    assert again["static"]["global"] == done.accuracy("global")
    other = ff.load(done.folder).evaluate(evaluate={"split": "validation"})
    assert other["split"] == "validation"
    with raises(ff.DataError, "digits", "validation"):
        ff.load(done.folder).evaluate(data={"name": "digits", "validation": 0.0}, evaluate={"split": "validation"})


def test_a_model_is_not_evaluated_on_data_it_does_not_fit(done: ff.Run) -> None:
    x = torch.randint(0, 255, (90, 1, 8, 8), dtype=torch.uint8)
    data = ff.Data("three", x, torch.arange(90) % 3, {"train": torch.arange(60), "test": torch.arange(60, 90)}, 3)
    with raises(ModelError, "digits", "three"):
        ff.load(done.folder).evaluate(data={"name": data, "partition": {"kind": "iid"}})


def test_the_report_of_each_round_is_handed_over(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []
    run = ff.run(SMALL, out=tmp_path / "run", rounds=2, on_round=seen.append)
    assert seen == run.metrics


def test_objects_run_in_this_process_and_are_asked_for_again(tmp_path: Path) -> None:
    x = torch.randint(0, 255, (90, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = ff.Data("three", x, torch.arange(90) % 3, {"train": torch.arange(60), "test": torch.arange(60, 90)}, 3)
    parts = {"data": {"name": data, "partition": {"kind": "iid", "clients": 4}}, "model": cnn(classes=3)}
    run = ff.run(out=tmp_path / "run", rounds=1, local={"epochs": 1}, **parts)
    numbers = ff.load(run.folder)
    assert numbers.metrics == run.metrics and numbers.plan == run.plan and numbers.notes == run.notes
    assert numbers.accuracy() == run.accuracy() and numbers._repr_html_() == run._repr_html_()
    for use in (numbers.model, numbers.predict, numbers.evaluate, lambda: ff.resume(run.folder, rounds=2)):
        with raises(RunError, "data=..., model=...", key="data"):
            use()
    assert ff.load(run.folder, **parts).predict().labels == run.predict().labels


def test_nothing_is_written_when_something_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ff.run(SMALL, out=tmp_path / "run", cohort={"count": 99})
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_in_it_is_refused(done: ff.Run) -> None:
    with raises(RunError, done.folder):
        ff.run(SMALL, out=done.folder)


def test_batch_norm_free_models_have_one_column(tmp_path: Path) -> None:
    run = ff.run(SMALL, out=tmp_path / "run", rounds=1, model={"name": "cnn", "norm": "group"})
    assert run.model(1)(torch.zeros(1, 1, 8, 8))[0].shape == (1, 10)
    assert 0 <= run.accuracy() <= 1


# ---- cut off and taken up again ------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by a test in the middle of a run."""


def make_interrupt(rounds: int) -> Any:
    def on_round(report: Mapping[str, Any]) -> None:
        if report["round"] == rounds:
            raise Stop

    return on_round


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_was_cut_off_ends_as_an_unbroken_one(tmp_path: Path, done: ff.Run, every: int) -> None:
    with pytest.raises(Stop):
        ff.run(SMALL, out=tmp_path / "run", checkpoint={"every": every}, on_round=make_interrupt(1))
    assert not ff.load(tmp_path / "run").finished
    run = ff.resume(tmp_path / "run")
    assert states_equal(run, done)
    assert timeless(run.metrics) == timeless(done.metrics)
    resumed = json.loads((run.folder / "environment.json").read_text())["resumed"]
    assert [entry["round"] for entry in resumed] == [1 if every == 1 else 0]


def test_a_finished_run_is_not_run_again(done: ff.Run) -> None:
    before = (done.folder / "metrics.jsonl").read_text()
    assert ff.resume(done.folder, on_round=make_interrupt(1)).finished
    assert (done.folder / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("open_run", [ff.load, ff.resume])
def test_an_opened_run_keeps_its_settings(open_run: Any, done: ff.Run) -> None:
    for key, value in (("local", {"lr": 1.0}), ("seed", 9)):
        with raises(ConfigError, "config.toml", key=key):
            open_run(done.folder, **{key: value})


def test_none_is_no_object(done: ff.Run) -> None:
    assert ff.load(done.folder, model=None, data=None).accuracy() == done.accuracy()


@pytest.mark.parametrize("call", [ff.run, ff.plan, ff.compare])
def test_data_are_not_the_first_argument(call: Any) -> None:
    for value in (torch.zeros(3, 2), ["fedavg", "scalefl"]):
        with raises(ConfigError, "data=", key="file"):
            call(value)


def test_resume_after_the_last_round_only_writes_the_summary(tmp_path: Path, done: ff.Run) -> None:
    with pytest.raises(Stop):
        ff.run(SMALL, out=tmp_path / "run", on_round=make_interrupt(3))
    run = ff.resume(tmp_path / "run", on_round=make_interrupt(3))
    assert run.finished
    assert run.accuracy() == done.accuracy()


def test_client_memory_and_server_memory_are_in_the_checkpoint(tmp_path: Path) -> None:
    method = tmp_path / "counting.py"
    method.write_text(
        "from dataclasses import replace\n"
        "from fleetfit.hooks import Method, take_mean\n\n"
        "def remember(job, device, result):\n"
        "    return {'rounds': (device.memory or {'rounds': 0})['rounds'] + 1}\n\n"
        "def adapt(job, device):\n"
        "    rounds = device.memory['rounds'] if device.memory else 0\n"
        "    return replace(job, local=job.local.replace(lr=job.local.lr / (1 + rounds)))\n\n"
        "def step(federation, server, aggregate, reports):\n"
        "    after = take_mean(federation, server, aggregate, reports)\n"
        "    return replace(after, memory=(server.memory or 0) + len(reports))\n\n"
        "def counting():\n"
        "    return Method(update_client_memory=remember, adapt_job=adapt, step=step)\n"
    )
    section = {**SMALL, "method": {"name": f"{method}:counting"}, "cohort": {"count": 8}}
    whole = ff.run(section, out=tmp_path / "whole")
    with pytest.raises(Stop):
        ff.run(section, out=tmp_path / "cut", on_round=make_interrupt(2))
    run = ff.resume(tmp_path / "cut")
    assert states_equal(run, whole)
    a, b = (RunFolder.open(r.folder).load_checkpoint() for r in (run, whole))
    assert a is not None and b is not None
    assert a["server"]["memory"] == b["server"]["memory"] > 0
    assert a["clients"] == b["clients"]
    assert len(a["clients"]) > 0


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    """Kill a real process after some rounds and a part of another one, the writing of checkpoints included.

    Rounds are counted in what is written, so that a machine that is busy at times does not matter.
    """
    (tmp_path / "run.toml").write_text(
        "rounds = 12\n[data.partition]\nclients = 8\n[local]\nepochs = 1\n[cohort]\ncount = 4\n[evaluate]\nevery = 4\n"
    )
    program = "import sys; from fleetfit import run; run(sys.argv[1], out=sys.argv[2])"

    def start(out: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", program, tmp_path / "run.toml", out])

    def wait_for(folder: Path, rounds: int, process: subprocess.Popen[bytes]) -> float:
        written = folder / "metrics.jsonl"
        while process.poll() is None:
            if folder.exists() and (not rounds or (written.exists() and written.read_text().count("\n") >= rounds)):
                break
            time.sleep(0.002)
        return time.monotonic()

    process = start(tmp_path / "whole")
    began = wait_for(tmp_path / "whole", 0, process)
    assert process.wait() == 0
    a_round = (time.monotonic() - began) / 12
    whole, kills, cut = ff.load(tmp_path / "whole"), 5, 0
    for i in range(kills):
        folder = tmp_path / f"killed-{i}"
        process = start(folder)
        wait_for(folder, i, process)
        time.sleep(a_round * i / kills)
        process.send_signal(signal.SIGKILL)
        process.wait()
        cut += not ff.load(folder).finished
        run = ff.resume(folder)
        assert states_equal(run, whole)
        assert timeless(run.metrics) == timeless(whole.metrics)
    assert cut > kills / 2


def test_a_kill_while_a_checkpoint_is_written(tmp_path: Path, done: ff.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every flush to disk of a whole run in turn: what is on disk then can be taken up again."""
    calls, stop_at = 0, 0
    original = os.fsync

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise Stop
        original(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    ff.run(SMALL, out=tmp_path / "counted")
    total = calls
    assert total >= 12  # folder, three rounds of line, checkpoint and its folder, summary
    for stop_at in range(2, total + 1, 3):
        calls, folder = 0, tmp_path / f"run-{stop_at}"
        with pytest.raises(Stop):
            ff.run(SMALL, out=folder)
        calls = -1000
        if folder.exists():
            assert states_equal(ff.resume(folder), done), stop_at


# ---- comparisons ---------------------------------------------------------------------------------------------------

COMPARE = """
rounds = 2
[data]
partition = { clients = 8 }
[local]
epochs = 1
[cohort]
count = 4
[evaluate]
every = 0
statistics_samples = 200
[[compare.row]]
label = "Scale"
method.name = "scalefl"
method.beta = 0.2
[[compare.row]]
method.name = "fedavg"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "both.toml").write_text(COMPARE + "[compare.grid]\nseed = [0, 1]\ndata.partition.alpha = [1.0, 100]\n")
    return tmp_path / "both.toml"


def test_rows_by_settings_by_seeds(tmp_path: Path, file: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def on_run(title: str, number: int, count: int, run: ff.Run) -> None:
        seen.append((title, number, count))

    comparison = ff.compare(file, out=tmp_path / "out", on_run=on_run)
    assert seen[0] == ("Scale, alpha = 1.0, seed 0", 1, 8)
    assert comparison.table.columns == ("method", "local", "global", "local", "global")
    assert comparison.table.groups == (("", 1), ("alpha = 1.0", 2), ("alpha = 100", 2))
    assert [row[0] for row in comparison.table.rows] == ["Scale", "fedavg"]
    runs = comparison.runs[("Scale", "alpha = 1.0")]
    assert [run.experiment.seed for run in runs] == [0, 1]
    assert runs[0].experiment.method.settings["beta"] == 0.2
    a, b = (100 * run.accuracy("global") for run in runs)
    assert comparison.table.rows[0][2] == f"{(a + b) / 2:.2f} ± {abs(a - b) / 2**0.5:.2f}"
    assert (tmp_path / "out" / "table.md").read_text().startswith(comparison.table.to_markdown())
    assert (tmp_path / "out" / "table.csv").read_text().startswith("what,row,setting,seed,against,seeds,tuned,")
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["runs"]) == 8


def test_rows_share_split_and_fleet(tmp_path: Path, file: Path) -> None:
    file.write_text(COMPARE)
    comparison = ff.compare(file, out=tmp_path / "out")
    one, two = (comparison.runs[(row, "")][0] for row in ("Scale", "fedavg"))
    fleets = [json.loads((run.folder / "fleet.json").read_text())["first"] for run in (one, two)]
    assert fleets[0]["class_counts"] == fleets[1]["class_counts"]
    assert fleets[0]["group"] == fleets[1]["group"]


def test_finished_runs_are_not_run_again_and_cut_off_ones_go_on(tmp_path: Path, file: Path) -> None:
    file.write_text(COMPARE + "[compare.grid]\nseed = [0, 1]\n")

    def stopping(title: str, number: int, count: int, run: ff.Run) -> Any:
        return make_interrupt(1) if number == 2 else None

    with pytest.raises(Stop):
        ff.compare(file, out=tmp_path / "out", on_run=stopping)
    was: list[tuple[bool, int]] = []

    def on_run(title: str, number: int, count: int, run: ff.Run) -> None:
        was.append((run.finished, len(run.metrics)))

    ff.compare(file, out=tmp_path / "out", on_run=on_run)
    assert was[:3] == [(True, 2), (False, 1), (False, 0)]


def test_the_default_folder_depends_on_what_is_compared(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file.write_text(COMPARE)
    first = ff.compare(file).folder
    assert ff.compare(file).folder == first
    assert ff.compare(file, local={"lr": 0.05}).folder != first


def test_a_folder_with_other_runs_is_refused(tmp_path: Path, file: Path) -> None:
    file.write_text(COMPARE)
    ff.compare(file, out=tmp_path / "out")
    with raises(RunError, "local.lr", "0.05"):
        ff.compare(file, out=tmp_path / "out", local={"lr": 0.05})


def test_tuning_uses_validation_data_only(tmp_path: Path, file: Path) -> None:
    file.write_text(COMPARE + "[compare.tune]\nlocal.lr = [0.000001, 0.1]\n")
    comparison = ff.compare(file, out=tmp_path / "out")
    assert comparison.tuned == {("Scale", ""): "lr = 0.1", ("fedavg", ""): "lr = 0.1"}
    assert comparison.runs[("Scale", "")][0].experiment.local.lr == 0.1
    assert any("Scale: lr = 0.1" in note for note in comparison.table.notes)
    tried = sorted((tmp_path / "out" / "tune").rglob("summary.json"))
    assert len(tried) == 4
    assert {json.loads(path.read_text())["evaluate"]["split"] for path in tried} == {"validation"}
    assert comparison.runs[("Scale", "")][0].columns["split"] == "test"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[compare.row]]\nmethod.name = 'fedavg'\n" * 2, Expected("row #2", '"fedavg"', key="compare.row.1.label")),
        ("[[compare.row]]\nmethod.name = 'fedavgg'\n", Expected('row "fedavgg": "fedavgg"')),
        ("[[compare.row]]\nmethod.name = 'fedavg'\nmethod.beta = 1\n", Expected('row "fedavg"', '"beta"')),
        ("[[compare.row]]\nlocl.lr = 1\n", Expected('row "fleetfit": locl', '"local"')),
        ("[compare.grid]\nseed = 3\n", Expected("[compare.grid] seed", 3, key="compare.grid.seed")),
        ("[compare.tune]\nlocal.lr = []\n", Expected("[compare.tune] local.lr", "[]", key="compare.tune.local.lr")),
        ("[compare.grid]\nseed = [1, 1]\n", Expected(key="compare")),
        ("[compare]\nrows = []\n", Expected("[compare] rows", '"row"')),
    ],
)
def test_a_wrong_comparison_is_refused_before_anything_runs(
    tmp_path: Path, file: Path, text: str, expected: Expected
) -> None:
    file.write_text(text)
    with raises(ConfigError, expected):
        ff.compare(file, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


PRINTED = """
rounds = 2
evaluate = { every = 1 }
data.partition.clients = 8
local.epochs = 1
cohort.count = 4
[compare]
columns = ["global", "full", "rounds"]
target = [0.05, 0.999]
note = "8 clients"
[[compare.row]]
method.name = "fedavg"
paper = [81.46, "-", 10, 100, 77.72, 77.0, 20, 200]
[[compare.row]]
label = "ScaleFL"
method.name = "scalefl"
[[compare.setting]]
label = "IID"
data.partition = { kind = "iid", clients = 8 }
[[compare.setting]]
label = "non-IID"
data.partition.alpha = 0.5
"""


def test_named_settings_printed_numbers_and_targets(tmp_path: Path, file: Path) -> None:
    file.write_text(PRINTED)
    comparison = ff.compare(file, out=tmp_path / "out")
    shown = ("global", "full", "rounds to 5%", "rounds to 99.9%")
    assert comparison.table.columns == ("method", *shown, *shown)
    assert comparison.table.groups == (("", 1), ("IID", 4), ("non-IID", 4))
    assert [row[0] for row in comparison.table.rows] == ["fedavg", "fedavg (paper)", "ScaleFL"]
    assert comparison.table.rows[1][1:] == ("81.46", "-", "10", "100", "77.72", "77.00", "20", "200")
    assert comparison.table.rows[2][3:5] == ("1 (1.0x)", "-"), "10% is chance; nobody gets 99.9% in two rounds"
    kinds = {key[1]: runs[0].experiment.data.partition for key, runs in comparison.runs.items()}
    assert (kinds["IID"].kind, kinds["non-IID"].kind) == ("iid", "dirichlet")
    assert kinds["non-IID"].settings["alpha"] == 0.5
    run = comparison.runs["fedavg", "IID"][0]
    assert comparison.table.rows[0][2] == f"{100 * run.accuracy('full'):.2f}"
    assert any(note.endswith(": 8 clients") for note in comparison.table.notes)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["printed"][0]["numbers"] == {"global": 81.46, "rounds to 5%": 10, "rounds to 99.9%": 100}
    assert results["runs"][0]["final"]["full"] == pytest.approx(100 * run.accuracy("full"), abs=1e-4)
    assert "| fedavg (paper) | 81.46 | - | 10 | 100 |" in (tmp_path / "out" / "table.md").read_text()


def test_printed_numbers_belong_to_settings_of_the_file(tmp_path: Path) -> None:
    table = tomllib.loads(PRINTED)
    fewer = {"setting": table["compare"]["setting"][1:], "columns": ["full"]}
    plan = plan_comparison(table, compare=fewer)
    assert plan.columns == ["full"]
    assert plan.printed["fedavg", "non-IID", "full"] == 77.0


def test_the_whole_test_set_at_every_evaluation(tmp_path: Path) -> None:
    small = ["rounds=2", "data.partition.clients=8", "cohort.count=2", "local.epochs=1", "evaluate.every=1"]
    last, always = (
        ff.run(load_experiment(None, [*small, f"evaluate.whole_test_set={text}"]), out=tmp_path / text)
        for text in ("false", "true")
    )
    assert ["full" in m["evaluate"]["static"] for m in last.metrics] == [False, True]
    assert ["full" in m["evaluate"]["static"] for m in always.metrics] == [True, True]
    assert last.columns == always.columns


def test_tuning_for_the_fewest_rounds(tmp_path: Path, file: Path) -> None:
    """At a rate that moves nothing the target is never reached; the other reaches it."""
    file.write_text(
        COMPARE.replace("every = 0", "every = 1")
        + "[compare]\ntarget = 0.2\ntune_on = 'rounds'\n[compare.tune]\nlocal.lr = [0.000001, 0.1]\n"
    )
    comparison = ff.compare(file, out=tmp_path / "out")
    assert comparison.tuned == {("Scale", ""): "lr = 0.1", ("fedavg", ""): "lr = 0.1"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "columns = ['locl']",
            Expected('"locl"', '"rounds", "local, batch"', 'Did you mean "local"?', key="compare.columns"),
        ),
        ("columns = []", Expected("[compare] columns")),
        ("columns = ['rounds']", Expected('"rounds"', "target = 0.97", key="compare.columns")),
        ("target = 97", Expected("[compare] target")),
        ("target = 0.97\ntarget_on = 'ful'", Expected('"ful"', '"full"', key="compare.target_on")),
        ("target = 0.97\ntarget_on = 'full'", Expected("evaluate.whole_test_set = true", key="compare.target_on")),
        ("tune_on = 'rounds'", Expected('"rounds"', "target = 0.97", key="compare.tune_on")),
        ("[[compare.setting]]\nrounds = 1", Expected("setting #1", key="compare.setting.0.label")),
        ("[[compare.setting]]\nlabel = 'a'\n" * 2, Expected('"a"', key="compare.setting")),
        ("[[compare.setting]]\nlabel = 'a'\nlocl.lr = 1", Expected("locl")),
        ("[[compare.setting]]\nlabel = 'a'\npaper = [1]", Expected(key="compare.setting.0.paper")),
        ("[[compare.row]]\npaper = [1]", Expected('row "fleetfit"', 2, "local; global", key="compare.row.0.paper")),
        ("[[compare.row]]\npaper = 84.5", Expected(84.5, key="compare.row.0.paper")),
        ("[[compare.row]]\npaper = [1, 'x']", Expected("'x'", key="compare.row.0.paper")),
        ("noet = 'x'", Expected("[compare] noet", '"note"')),
    ],
)
def test_a_wrong_table_is_refused_before_anything_runs(tmp_path: Path, text: str, expected: Expected) -> None:
    (tmp_path / "x.toml").write_text(f"[compare]\n{text}\n")
    with raises(ConfigError, expected):
        ff.compare(tmp_path / "x.toml", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_labels_of_settings() -> None:
    assert format_label((("data.name", "cifar10"), ("data.partition.alpha", 1.0))) == "cifar10, alpha = 1.0"
    assert format_label(()) == ""


def test_a_run_file_and_its_resolved_form_give_the_same_state(tmp_path: Path, done: ff.Run) -> None:
    again = ff.run(tomllib.loads(to_toml(done.experiment)), out=tmp_path / "again")
    assert states_equal(again, done)
    assert timeless(again.metrics) == timeless(done.metrics)
