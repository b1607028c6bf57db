"""The text of `results.json`: its size, its lines, thinned curves; what was written is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from fleetfit.report.results import format_results, thin_curves
from fleetfit.runs.comparison import read_results
from fleetfit.runs.schema import ComparisonResults, CurvesRecord, RunResult, TuningCandidate, TuningResult

VERSIONS = {"fleetfit": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.9"}
SETTINGS = {name: {f"key_{i}": i for i in range(10)} for name in ("data", "model", "fleet", "local", "cohort")}


def run(row: str, setting: str, seed: int, rounds: int, every: int = 1) -> RunResult:
    evaluated = range(every, rounds + 1, every)
    series = [round(45 + (seed + 7 * r) % 1000 / 97, 2) for r in evaluated]
    curves = {
        "round": list(evaluated),
        "local": series,
        "global": series,
        "loss": [round(1 + r / 977, 3) for r in evaluated],
        "per_exit": {str(i): [round(a, 1) for a in series] for i in range(1, 5)},
    }
    final = {name: 47.1234 + i for i, name in enumerate(("local", "global", "local_worst_tenth", "global_worst_tenth",
             "ensemble", "mean_over_exits", "best_exit", "avg", "full", "waste", "local_batch", "global_batch",
             "avg_batch", "full_batch"))} | {"rounds_to_40": 31.5, "parameters": 272_474, "multiply_adds": 10**13,
             "bytes_down": 10**9, "bytes_up": 10**9, "failures": 0}  # fmt: skip
    return RunResult(
        row=row, setting=setting, seed=seed, overrides={"method.name": "scalefl", "data.partition.alpha": 100.0},
        tuned={"local.lr": 0.1}, rounds=rounds, seconds=812.25, training_seconds=640.5, speed="fast",
        digest="0123456789abcdef" * 4, final=final, per_level={str(i): 45.1234 for i in range(1, 5)},
        per_exit={str(i): 40.1234 for i in range(1, 5)}, curves=CurvesRecord.load(curves),
    )  # fmt: skip


def whole(runs: list[RunResult]) -> ComparisonResults:
    tried = [TuningCandidate(values={"local.lr": lr}, score=40 + lr, seed=5) for lr in (0.1, 0.03)]
    tuning = [TuningResult(row="ScaleFL", setting="alpha = 100", chosen={"local.lr": 0.1}, candidates=tried)]
    return ComparisonResults(
        name="table", file="experiments/table.toml", versions=VERSIONS, commit="a" * 40,
        machine={"processor": "a", "cores": 4}, against="HeteroFL", settings=SETTINGS, runs=runs, tuning=tuning,
    )  # fmt: skip


def test_the_results_of_a_large_table_are_small() -> None:
    """Below 60 kB, though each of its 50 runs was evaluated 400 times at four exits."""
    runs = [
        run(f"a row with a name {i}", f"CIFAR-10, alpha = {a}", seed, 400)
        for i in range(5) for a in (1, 100) for seed in range(5)
    ]  # fmt: skip
    text = format_results(whole(runs))
    assert 50_000 < len(text.encode()) < 60_000
    stored = json.loads(text)["runs"]
    assert {len(one["curves"]["round"]) for one in stored} == {len(stored[0]["curves"]["round"])}
    assert len(stored[0]["curves"]["round"]) >= 5
    assert stored[0]["curves"]["round"][-1] == 400, "the last point is kept"
    assert stored[0]["final"] == runs[0].final, "and the final numbers as they are"


def test_the_number_of_points_is_found_in_few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends and, by halves, four of the 14 numbers between."""
    runs = [run(f"a row with a name {i}", "", seed, 400) for i in range(8) for seed in range(6)]
    trials: list[int] = []

    def thin(curves: CurvesRecord, points: int) -> dict[str, Any]:
        trials.append(points)
        return thin_curves(curves, points)

    monkeypatch.setattr("fleetfit.report.results.thin_curves", thin)
    stored = json.loads(format_results(whole(runs)))["runs"]
    points = len(stored[0]["curves"]["round"])
    assert 5 < points < 20 and len(set(trials)) <= 6


@pytest.mark.parametrize(("rounds", "every", "expected"), [
    (3, 1, [1, 2, 3]),
    (100, 5, [*range(5, 101, 5)]),
    (39, 1, [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39]),
])  # fmt: skip
def test_curves_keep_twenty_points_evenly_and_the_last(rounds: int, every: int, expected: list[int]) -> None:
    """38 steps between 39 points, in 19: two each."""
    one = run("a", "", 0, rounds, every)
    (stored,) = json.loads(format_results(whole([one])))["runs"]
    assert stored["curves"]["round"] == expected
    by_round = dict(zip(one.curves.round, one.curves.local, strict=True))
    assert stored["curves"]["local"] == [by_round[r] for r in expected], "every series at the same rounds"
    assert stored["curves"]["per_exit"]["4"] == [round(by_round[r], 1) for r in expected]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    results = whole([run("a", "x", 0, 20), run("b", "", 1, 3)])
    (tmp_path / "a.json").write_text(format_results(results))
    assert read_results(tmp_path / "a.json") == results


def test_a_run_more_is_a_line_more() -> None:
    """So that a difference between two versions of a file is as small as what has changed."""
    one, two = (format_results(whole([run("a", "", seed, 20) for seed in range(n)])) for n in (4, 5))
    added = set(two.splitlines()) - set(one.splitlines())
    assert len(added) == 2, "the new run, and the comma behind the one before"
    assert sum('"seed":4' in line for line in added) == 1


def test_what_was_not_measured_is_absent(tmp_path: Path) -> None:
    bare = RunResult(
        row="a", setting="", seed=0, rounds=1, seconds=1.0, speed="exact", digest="", final={"local": 1.0},
        curves=CurvesRecord(round=[]),
    )  # fmt: skip
    results = ComparisonResults(
        name="a", file="a.toml", versions=VERSIONS, machine={}, against="a", settings={}, runs=[bare]
    )
    text = format_results(results)
    assert "training_seconds" not in text and '"commit": null' in text and '"tuning": []' in text
    (tmp_path / "a.json").write_text(text)
    assert read_results(tmp_path / "a.json") == results
