"""How long a comparison takes yet: estimates from given rounds, and the reports of a real comparison."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import run_verb

import fleetfit as ff
from fleetfit.api.comparison.execute import Eta
from fleetfit.api.comparison.plan import PlannedRun
from fleetfit.api.progress import ComparisonProgress
from fleetfit.config import load_experiment


def make_planned_run(row: str, number: int = 0, rounds: int = 10, tried: Any = None) -> PlannedRun:
    place = Path(f"{'tune/' if tried else ''}{row}/{number}")
    return PlannedRun(row, "", number, (), load_experiment({"rounds": rounds}), place, f"{row}, {number}", tried)


def add_rounds(eta: Eta, run: PlannedRun, seconds: Sequence[float], first: int = 1) -> None:
    for number, each in enumerate(seconds, first):
        eta.add_round(run, {"round": number, "seconds": each})


# ---- estimates -------------------------------------------------------------------------------------------------------


def test_nothing_is_known_before_the_first_round() -> None:
    runs = [make_planned_run("A", 0), make_planned_run("A", 1)]
    eta = Eta(runs)
    assert eta.progress == ComparisonProgress(
        runs=2, tuning=0, finished=0, jobs=1, seconds_left=None, rows=1, rows_measured=0
    )
    add_rounds(eta, runs[0], [4.0])
    assert eta.progress.seconds_left == 9 * 4.0 + 10 * 4.0


def test_each_row_has_its_own_mean() -> None:
    """A: 10, 2 and 3 s, so 5 s a round; B: 1 s. The second seed of A counts as its first."""
    runs = [make_planned_run("A", 0), make_planned_run("B", 0), make_planned_run("A", 1)]
    eta = Eta(runs)
    add_rounds(eta, runs[0], [10.0, 2.0, 3.0])
    add_rounds(eta, runs[1], [1.0, 1.0])
    assert eta.progress.seconds_left == pytest.approx(7 * 5.0 + 8 * 1.0 + 10 * 5.0)


def test_a_row_without_rounds_takes_the_mean_of_the_others() -> None:
    runs = [make_planned_run("A"), make_planned_run("B"), make_planned_run("C", rounds=3)]
    eta = Eta(runs)
    add_rounds(eta, runs[0], [3.0] * 10)
    eta.add_finished(runs[0])
    add_rounds(eta, runs[1], [5.0] * 10)
    eta.add_finished(runs[1])
    assert eta.progress.seconds_left == 3 * 4.0
    assert (eta.progress.rows, eta.progress.rows_measured) == (3, 2)


@pytest.mark.parametrize(("count", "expected"), [(4, 80.0), (1, 40.0)])
def test_jobs_share_all_runs_but_not_the_longest(count: int, expected: float) -> None:
    runs = [make_planned_run("A", i) for i in range(count + 1)]
    eta = Eta(runs, jobs=2)
    add_rounds(eta, runs[0], [4.0] * 10)
    eta.add_finished(runs[0])
    assert eta.progress.seconds_left == expected


def test_runs_that_tune_count_too() -> None:
    runs = [make_planned_run("A", 0, tried=(("local.lr", 0.1),)), make_planned_run("A", 0)]
    eta = Eta(runs)
    add_rounds(eta, runs[0], [4.0] * 10)
    eta.add_finished(runs[0])
    assert eta.progress == ComparisonProgress(
        runs=2, tuning=1, finished=1, jobs=1, seconds_left=40.0, rows=1, rows_measured=1
    )


def test_a_resumed_run_has_its_last_rounds_left() -> None:
    """Its checkpoint is of round 3, so round 4 is repeated."""
    run = make_planned_run("A")
    eta = Eta([run])
    add_rounds(eta, run, [2.0] * 4)
    assert eta.progress.seconds_left == 6 * 2.0
    add_rounds(eta, run, [2.0], first=4)
    assert eta.progress.seconds_left == 6 * 2.0
    eta.add_finished(run)
    assert (eta.progress.finished, eta.progress.seconds_left) == (1, 0.0)


# ---- a real one ------------------------------------------------------------------------------------------------------

TEXT = """
rounds = 3
data = { name = "tiny:tiny_data", partition = { kind = "iid", clients = 6 } }
model.name = "tiny:tiny"
fleet = { groups = [{ budget = 0.4 }, { budget = 1.0 }], tolerance = 0.5 }
local.epochs = 1
cohort.count = 2
evaluate.every = 1
[[compare.row]]
method.name = "scalefl"
[[compare.row]]
method.name = "fedavg"
[compare.grid]
seed = [0, 1]
[compare.tune]
local.lr = [0.1, 0.05]
"""


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_comparison_says_how_far_it_is(tmp_path: Path, jobs: int) -> None:
    """Eight runs, four of which tune; what is left is known from the first round on; the second time all are there."""
    (tmp_path / "file.toml").write_text(TEXT)
    reports: list[ComparisonProgress] = []
    first: list[int] = []

    def on_run(title: str, number: int, count: int, run: ff.Run) -> Any:
        def on_round(done: Mapping[str, Any]) -> None:
            if not first:
                first.append(sum(one.seconds_left is None for one in reports))
                assert reports[-1].seconds_left, "told before the round is"

        return on_round

    def compared() -> None:
        ff.compare(tmp_path / "file.toml", out=tmp_path / "out", jobs=jobs, on_run=on_run, on_progress=reports.append)

    compared()
    assert {(one.runs, one.tuning, one.jobs) for one in reports} == {(8, 4, jobs)}
    assert reports[0].finished == 0 and reports[0].seconds_left is None
    unknown = [one.seconds_left is None for one in reports]
    assert unknown == sorted(unknown, reverse=True) and sum(unknown) == first[0]
    assert [one.finished for one in reports] == sorted(one.finished for one in reports)
    assert len(reports) == 1 + 8 * (3 + 1), "at the beginning, after each round and after each run"
    assert (reports[-1].finished, reports[-1].seconds_left) == (8, 0.0)
    reports.clear()
    compared()
    assert [(one.finished, one.seconds_left) for one in reports] == [(8, 0.0)]


def test_the_command_says_it_in_words(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(TEXT)

    def list_lines(*more: str) -> list[str]:
        return run_verb("compare", tmp_path / "file.toml", "--out", tmp_path / "out", *more, code=0).out.splitlines()

    lines = list_lines()
    assert re.findall(r"\d+", next(line for line in lines if "tune" in line)) == ["8", "4"]
    assert sum("1 of 2 rows" in line for line in lines) == 1
    rounds = [line for line in lines if "round 2/3" in line]
    assert len(rounds) == 8 and all(" left" in line for line in rounds)
    guessed = ["  perhaps " in line for line in rounds]
    assert guessed == [True, True] + [False] * 6, "the first row tunes twice, and then the second one"
    again = list_lines()
    assert re.findall(r"\d+", next(line for line in again if "tune" in line)) == ["8", "4", "8"]
    assert not any(" of 2 rows" in line for line in again)
    assert not any("tune" in line for line in list_lines("--quiet"))
