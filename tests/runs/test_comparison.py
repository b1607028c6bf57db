"""Comparisons on disk: which one a run belongs to, and runs whose folders are gone."""

import json
from pathlib import Path

from fleetfit.report.results import format_results
from fleetfit.runs.comparison import find_comparison, read_comparison
from fleetfit.runs.schema import ComparisonResults, CurvesRecord, RunResult


def test_a_run_finds_its_comparison(tmp_path: Path) -> None:
    folder, other = tmp_path / "both/tune/a/lr-0.1/seed-3", tmp_path / "both/a/seed-9"
    for path in (folder, other):
        path.mkdir(parents=True)
    runs = {"runs": [{"place": "tune/a/lr-0.1/seed-3", "title": "tuning, a"}]}
    (tmp_path / "both/runs.json").write_text(json.dumps(runs))
    assert find_comparison(folder) == ("tuning, a", "both")
    assert find_comparison(other) == ("", "")
    (tmp_path / "both/runs.json").write_text("{")
    assert find_comparison(folder) == ("", "")


def test_runs_without_their_folder_are_a_problem(tmp_path: Path) -> None:
    run = RunResult(
        row="a", setting="IID", seed=3, rounds=1, seconds=1.0, speed="exact", digest="0" * 64, final={"local": 1.0},
        curves=CurvesRecord(round=[]),
    )  # fmt: skip
    results = ComparisonResults(name="x", file="x.toml", versions={}, machine={}, against="a", settings={}, runs=[run])
    (tmp_path / "results.json").write_text(format_results(results))
    record = read_comparison(tmp_path)
    (problem,) = record.problems
    assert not record.rows and "a, IID, seed 3" in problem
