"""`[compare.tune]`: every row the same grid on validation data, with its own seeds; the tables say what each got."""

import csv
import json
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support import compare_text, raises, run_verb

import fleetfit as ff
from fleetfit.api.comparison import ComparisonPlan, plan_comparison, read_results
from fleetfit.api.comparison.execute import Eta
from fleetfit.errors import ConfigError, RunError
from fleetfit.report.tables import find_grid_edges, make_tuning_table
from fleetfit.runs.schema import TuningCandidate, TuningResult

DATA = """
import torch
from dataclasses import replace
from tiny import tiny_data

def with_test(shift: int = 0, none: bool = False):
    data = tiny_data()
    y = data.y.clone()
    y[data.splits["test"]] = (y[data.splits["test"]] + shift) % 4
    splits = {**data.splits, **({"validation": torch.empty(0, dtype=torch.int64)} if none else {})}
    return replace(data, y=y, splits=splits)
"""
HEAD = """
rounds = 3
data = { name = "data.py:with_test", partition = { kind = "iid", clients = 6 } }
model.name = "tiny:tiny"
fleet = { groups = [{ budget = 0.4 }, { budget = 1.0 }], tolerance = 0.5 }
local.epochs = 1
cohort.count = 4
evaluate.every = 1
[[compare.row]]
label = "Scale"
method.name = "scalefl"
[[compare.row]]
method.name = "fedavg"
"""
TUNE = "[compare.tune]\nlocal.lr = [0.00001, 0.05, 0.1]\nlocal.weight_decay = [0.0, 0.0005]\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path) -> Path:
    (tmp_path / "data.py").write_text(DATA)
    return tmp_path


def run_comparison(place: Path, text: str, out: str = "out", **more: Any) -> ff.Comparison:
    return compare_text(place, HEAD + text, "tuned.toml", out, **more)


# ---- what is tried, and on what --------------------------------------------------------------------------------------


def test_every_row_gets_the_same_grid_and_every_file_lists_it(place: Path) -> None:
    comparison = run_comparison(place, TUNE)
    grid = [{"local.lr": lr, "local.weight_decay": decay} for lr in (0.00001, 0.05, 0.1) for decay in (0.0, 0.0005)]
    assert [(one.row, one.setting) for one in comparison.tuning] == [("Scale", ""), ("fedavg", "")]
    for one in comparison.tuning:
        assert [dict(tried.values) for tried in one.candidates] == grid
        best = max(one.candidates, key=lambda tried: tried.score or 0)
        assert one.chosen == best.values, "the first of the best"
        (run,) = comparison.runs[one.row, one.setting]
        assert run.experiment.local.lr == one.chosen["local.lr"]
    stored = read_results(comparison.folder / "results.json")
    assert stored.tuning == list(comparison.tuning)
    assert [run.tuned for run in stored.runs] == [one.chosen for one in comparison.tuning]
    assert comparison.tuning_table is not None and len(comparison.tuning_table.rows) == 12
    assert comparison.tuning_table.to_markdown() in (comparison.folder / "table.md").read_text()
    with (comparison.folder / "table.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["what"] == "candidate"]
    assert [(line["row"], float(line["validation"])) for line in lines] == [
        (one.row, tried.score) for one in comparison.tuning for tried in one.candidates
    ]
    assert lines[0]["tuned"] == "local.lr = 1e-05, local.weight_decay = 0.0"


def test_scores_are_accuracies_on_validation_data(place: Path) -> None:
    comparison = run_comparison(place, "[compare.tune]\nlocal.lr = [0.1, 0.05]\n")
    for tried in comparison.tuning[0].candidates:
        (folder,) = (place / "out" / "tune" / "scale").glob(f"lr-{tried.values['local.lr']}/seed-*")
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["evaluate"]["split"] == "validation"
        assert tried.score == round(100 * summary["local"], 4)


def test_test_data_have_no_say(place: Path) -> None:
    """With other test labels the final numbers are others, and what is tried and chosen is the same."""
    one = run_comparison(place, TUNE)
    other = run_comparison(place, TUNE, "other", overrides=["data.shift=2"])
    assert one.tuning == other.tuning
    assert one.table.rows != other.table.rows


def test_seeds_are_those_of_no_run_unless_they_are_given(place: Path) -> None:
    text = "[compare.grid]\nseed = [0, 3]\n[compare.tune]\nlocal.lr = [0.1, 0.05]\n"
    comparison = run_comparison(place, text)
    assert {tried.seed for one in comparison.tuning for tried in one.candidates} == {4}
    seeds = [json.loads(path.read_text())["seed"] for path in (place / "out" / "tune").rglob("summary.json")]
    assert seeds == [4] * 4
    assert {run.experiment.seed for runs in comparison.runs.values() for run in runs} == {0, 3}


def test_several_seeds_choose_by_their_mean(place: Path) -> None:
    comparison = run_comparison(
        place, "[compare.tune]\nlocal.lr = [0.1, 0.02, 0.3]\n[compare]\ntune_seeds = [8, 5, 11]\n"
    )
    for one in comparison.tuning:
        means: dict[float, float] = {}
        for lr in (0.1, 0.02, 0.3):
            scores = {tried.seed: tried.score or 0.0 for tried in one.candidates if tried.values["local.lr"] == lr}
            assert list(scores) == [8, 5, 11]
            means[lr] = statistics.fmean(scores.values())
        assert one.chosen["local.lr"] == max(means, key=lambda lr: means[lr])
    assert comparison.tuning_table is not None
    assert "validation" in comparison.tuning_table.notes[0] and " 8, 5, 11" in comparison.tuning_table.notes[0]


# ---- rounds of the tuning runs ---------------------------------------------------------------------------------------


def plan_file(place: Path, text: str) -> ComparisonPlan:
    (place / "planned.toml").write_text(HEAD + text)
    return plan_comparison(place / "planned.toml")


SHORTER = "[compare.tune]\nlocal.lr = [0.1, 0.02]\n[compare]\nsmallest_baseline = false\ntune_rounds = 2\n"


def test_tuning_runs_have_rounds_of_their_own(place: Path) -> None:
    """A candidate is a run of two rounds with a cosine over these two; the table's runs have three."""
    cosine = 'local.schedule = { kind = "cosine", minimum = 0.01 }\n'
    comparison = compare_text(place, f"{cosine}{HEAD}{SHORTER}", "tuned.toml", "out")
    assert {run.experiment.rounds for runs in comparison.runs.values() for run in runs} == {3}
    base = tomllib.loads((cosine + HEAD).replace("data.py", f"{place / 'data.py'}"))
    del base["compare"]
    for one in comparison.tuning:
        for tried in one.candidates:
            alone = ff.run(
                {**base, "rounds": 2, "seed": tried.seed},
                method={"name": "scalefl" if one.row == "Scale" else "fedavg"},
                local={**base["local"], "lr": tried.values["local.lr"]},
                evaluate={"every": 1, "split": "validation"},
                out=place / f"{one.row}-{tried.values['local.lr']}",
                progress=False,
            )
            assert tried.score == round(100 * alone.files.read_summary().number("local"), 4)
    results = read_results(comparison.folder / "results.json")
    assert results.tune_rounds == 2
    assert comparison.tuning_table is not None and " 2 rounds" in comparison.tuning_table.notes[0]


def test_the_fewest_rounds_are_those_of_the_tuning_runs(place: Path) -> None:
    """Evaluations that FleetFit chooses are the same in all rows, and complete, as rounds to a target need them."""
    text = SHORTER + 'tune_on = "rounds"\ntarget = 0.3\n'
    head = HEAD.replace("evaluate.every = 1\n", "").replace("local.epochs = 1", "local.max_steps = 1")
    comparison = compare_text(place, head + text, "tuned.toml", "out")
    tried = [one for choice in comparison.tuning for one in choice.candidates]
    assert all(one.rounds is None or one.rounds <= 2 for one in tried) and any(one.rounds for one in tried)
    for folder in {path.parent for path in (place / "out" / "tune").rglob("config.toml")}:
        run = ff.load(folder)
        assert run.experiment.evaluate.every == 1 and run.experiment.evaluate.between is None
        assert len(run.metrics) == 2


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("tune_rounds = 0\n[compare.tune]\nlocal.lr = [0.1, 0.2]\n", "compare.tune_rounds"),
        ("tune_rounds = 4\n[compare.tune]\nlocal.lr = [0.1, 0.2]\n", "compare.tune_rounds"),
        ("tune_rounds = 2\n", "compare.tune_rounds"),
        ("tune_seeds = [7]\n", "compare.tune_seeds"),
        ('tune_on = "global"\n', "compare.tune_on"),
        ("tune_rounds = 2\n[compare.tune]\nrounds = [2, 3]\n", "compare.tune.rounds"),
        (
            "tune_rounds = 2\n[compare.tune]\nlocal.lr = [0.1, 0.2]\n[compare.grid]\nrounds = [3, 1]\n",
            "compare.tune_rounds",
        ),
    ],
)
def test_keys_that_no_tuning_run_can_have_are_refused(place: Path, text: str, key: str) -> None:
    with raises(ConfigError, key=key):
        run_comparison(place, f"[compare]\n{text}")
    assert not (place / "out").exists()


def test_a_comparison_with_another_criterion_is_another_one(place: Path) -> None:
    criteria = ["", 'tune_on = "global"', 'tune_on = "rounds"\ntarget = 0.9', 'tune_on = "rounds"\ntarget = 0.8']
    files = [SHORTER.replace("tune_rounds = 2", f"tune_rounds = 2\n{criterion}") for criterion in criteria]
    assert len({plan_file(place, file).fingerprint for file in files}) == 4


def test_a_comparison_with_other_tuning_rounds_is_another_one(place: Path) -> None:
    """It has another folder by default, and a folder with runs of other rounds is refused; the same call resumes."""
    one = run_comparison(place, SHORTER)
    other = SHORTER.replace("tune_rounds = 2", "tune_rounds = 1")
    assert plan_file(place, SHORTER).fingerprint != plan_file(place, other).fingerprint
    with raises(RunError, "rounds is 2 there and 1 here"):
        run_comparison(place, other)
    assert run_comparison(place, SHORTER).tuning == one.tuning


def test_the_time_left_counts_the_rounds_of_the_tuning_runs(place: Path) -> None:
    """Two rows, each with two tuning runs of two rounds and a run of three; one round has passed."""
    plan = plan_file(place, SHORTER)
    eta = Eta([*plan.tuning_runs, *plan.runs])
    eta.add_round(plan.tuning_runs[0], {"round": 1, "seconds": 5.0})
    assert eta.progress.seconds_left == (2 * (2 * 2 + 3) - 1) * 5.0


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        ("[compare.tune]\nlocal.lr = [0.1, 0.2]\n[compare.grid]\ndata.none = [true]\n", "data.validation"),
        ("[compare.tune]\nlocal.lr = [0.1, 0.1]\n", "[compare.tune]"),
        ("[compare.tune]\nlocal.lr = [0.1, 0.2]\n[compare]\ntune_seeds = [1, 1]\n", "[compare.tune]"),
        ("[compare.tune]\nlocal.lr = [0.1, 0.2]\n[privacy]\n", "[compare.tune]"),
        ("[compare]\ntune_seeds = [-1]\n", "[compare] tune_seeds"),
        ("[compare]\ntune_seeds = []\n", "[compare] tune_seeds"),
    ],
)
def test_what_cannot_be_tuned_is_said_before_anything_is_trained(place: Path, text: str, mention: str) -> None:
    with raises(ConfigError, mention):
        run_comparison(place, text)
    assert not (place / "out").exists()


def test_missing_validation_data_is_reported_before_training(place: Path) -> None:
    text = '[[compare.row]]\nlabel = "bare"\nmethod.name = "fedavg"\ndata.none = true\n'
    with raises(ConfigError, 'row "bare"', key="compare.tune"):
        run_comparison(place, text + TUNE)
    assert not (place / "out").exists()


# ---- going on, and side by side --------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tuning_that_was_cut_off_goes_on(place: Path, jobs: int) -> None:
    text = "[compare.tune]\nlocal.lr = [0.1, 0.05]\n"

    def stopping(title: str, number: int, count: int, run: ff.Run) -> Any:
        def stop(report: Any) -> None:
            if title.startswith("tuning, fedavg"):
                raise Stop

        return stop

    with pytest.raises(Stop):
        run_comparison(place, text, jobs=jobs, on_run=stopping)
    was: dict[str, bool] = {}

    def on_run(title: str, number: int, count: int, run: ff.Run) -> None:
        was[title] = run.finished

    again = run_comparison(place, text, jobs=jobs, on_run=on_run)
    assert not was["tuning, fedavg, lr = 0.05"]
    assert jobs > 1 or was["tuning, Scale, lr = 0.1"]  # side by side, it may have been cut off, too
    whole = run_comparison(place, text, "whole")
    assert again.tuning == whole.tuning and again.table == whole.table


# ---- words -----------------------------------------------------------------------------------------------------------


def tuning(chosen: Any, *values: Any, key: str = "local.lr") -> TuningResult:
    return TuningResult(
        row="A", setting="IID", chosen={key: chosen},
        candidates=[TuningCandidate(values={key: one}, score=50.0 + i, seed=1) for i, one in enumerate(values)],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "values", "end"),
    [
        (0.1, (0.01, 0.1, 1.0), None),
        (1.0, (0.01, 1.0, 0.1), "largest"),
        (0.01, (0.1, 0.01, 1.0), "smallest"),
        (0.1, (0.1, 0.05), "largest"),
        (0.1, (0.1,), None),
        ("adamw", ("sgd", "adamw"), None),
        (True, (True, False), None),
    ],
)
def test_a_value_at_the_edge_of_its_grid_is_said(chosen: Any, values: Any, end: str | None) -> None:
    notes = find_grid_edges([tuning(chosen, *values)])
    note = f"A, IID: local.lr = {chosen} is the {end} value tried. Try values beyond it."
    assert notes == ([note] if end else [])


def test_equal_scores_are_no_edge() -> None:
    tied = tuning(1.0, 0.1, 1.0)
    tied = tied.model_copy(update={"candidates": [one.model_copy(update={"score": 50.0}) for one in tied.candidates]})
    (note,) = find_grid_edges([tied])
    assert "equally good" in note
    scores = {0.1: (80.0, 82.0), 1.0: (81.0, 81.0)}
    means = [TuningCandidate(values={"local.lr": lr}, score=one, seed=0) for lr in scores for one in scores[lr]]
    assert tied.model_copy(update={"candidates": means}).is_tied
    assert not tied.model_copy(update={"candidates": means[:2]}).is_tied, "two seeds of one value"
    failed = [one.model_copy(update={"score": None}) for one in means]
    (note,) = find_grid_edges([tied.model_copy(update={"candidates": failed})])
    assert "equally good" not in note


def test_rounds_that_choose_are_in_the_table() -> None:
    tried = ((0.1, 1, 4.0), (0.1, 2, 6.0), (0.2, 1, 3.0), (0.2, 2, None), (0.3, 1, None), (0.3, 2, None))
    values = [
        TuningCandidate(values={"local.lr": lr}, score=50 + lr, seed=seed, rounds=rounds) for lr, seed, rounds in tried
    ]
    values.append(TuningCandidate(values={"local.lr": 0.3}, seed=3))
    table = make_tuning_table(
        [TuningResult(row="A", setting="", chosen={"local.lr": 0.1}, candidates=values)], "rounds"
    )
    assert table.rows == (
        ("A", "local.lr = 0.1", "5.0", "50.10 ± 0.00", "chosen"),
        ("A", "local.lr = 0.2", "1 of 2 seeds", "50.20 ± 0.00", ""),
        ("A", "local.lr = 0.3", "-", "50.30 ± 0.00 (2 of 3 seeds)", ""),
    )


def test_the_terminal_shows_it(place: Path) -> None:
    (place / "tuned.toml").write_text(HEAD + "[compare.tune]\nlocal.lr = [0.00001, 0.05]\n")
    output = run_verb("compare", place / "tuned.toml", "--out", place / "out", code=0).out
    assert any("local.lr = 0.05 " in line for line in output.splitlines() if not line.startswith("│")), "in a note"
    assert sum("local.lr = 1e-05" in line for line in output.splitlines() if line.startswith("│")) == 2
