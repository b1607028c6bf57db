"""How long a comparison takes yet: by a clock that is given in, and what a real one says on the way."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fleetfit as ff
from fleetfit.api.comparison.remaining import ComparisonProgress, ExpectedRun, Remaining
from fleetfit.cli import main


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def report(round: int, seconds: float, evaluation: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"round": round, "seconds": seconds}
    if evaluation is not None:
        found |= {"evaluate": {}, "seconds_of": {"evaluation": evaluation}}
    return found


def rounds(left: Remaining, clock: Clock, key: str, numbers: Any, each: float) -> None:
    for number in numbers:
        clock.now += each
        left.round(key, report(number, each))


def runs(**groups: tuple[str, str]) -> dict[Any, ExpectedRun]:
    return {key: ExpectedRun(group, rounds=10, every=0) for key, group in groups.items()}


# ---- by a clock that is given in -------------------------------------------------------------------------------------


def test_nothing_is_known_before_the_first_round() -> None:
    clock = Clock()
    left = Remaining(runs(a=("A", ""), b=("A", "")), clock=clock)
    assert left.progress == ComparisonProgress(
        runs=2, tuning=0, finished=0, jobs=1, seconds_left=None, rows=1, rows_measured=0
    )
    left.began("a")
    clock.now += 30
    assert left.seconds_left() is None
    left.round("a", report(1, 4.0))
    assert left.seconds_left() == 9 * 4.0 + 26.0 + 10 * 4.0, "and 26 s before the first round, of the other run too"


def test_the_first_round_counts_only_as_long_as_there_is_no_other() -> None:
    """It warms up: 10 s, then 2 s. Of ten rounds eight are left, then the ten of the other run."""
    clock = Clock()
    left = Remaining(runs(a=("A", ""), b=("A", "")), clock=clock)
    left.began("a")
    rounds(left, clock, "a", [1], 10.0)
    assert left.seconds_left() == 90.0 + 100.0
    rounds(left, clock, "a", [2], 2.0)
    assert left.seconds_left() == 8 * 2.0 + 10 * 2.0


def test_time_goes_by_within_a_round() -> None:
    clock = Clock()
    left = Remaining(runs(a=("A", "")), clock=clock)
    left.began("a")
    rounds(left, clock, "a", range(1, 6), 3.0)
    clock.now += 2.0
    assert left.seconds_left() == 5 * 3.0 - 2.0
    clock.now += 50.0
    assert left.seconds_left() == 5 * 3.0 - 3.0, "a round that takes long is not less than no round"


def test_rows_are_measured_for_themselves() -> None:
    """A: 3 s a round, B: 5 s. A's second seed is as long as its first."""
    clock = Clock()
    left = Remaining(runs(a=("A", ""), b=("B", ""), c=("A", ""), d=("B", "")), clock=clock)
    left.began("a")
    rounds(left, clock, "a", range(1, 11), 3.0)
    left.finished("a")
    left.began("b")
    rounds(left, clock, "b", [1, 2], 5.0)
    assert left.seconds_left() == 8 * 5.0 + 10 * 3.0 + 10 * 5.0


def test_a_row_that_has_not_run_goes_by_its_multiply_adds() -> None:
    """A takes 3 s for 6 multiply-adds, so B with 20 takes 10 s, C with unknown ones as long as A."""
    clock = Clock()
    work = {("A", ""): 6.0, ("B", ""): 20.0}
    left = Remaining(runs(a=("A", ""), b=("B", ""), c=("C", "")), work=work, clock=clock)
    left.began("a")
    rounds(left, clock, "a", range(1, 11), 3.0)
    left.finished("a")
    assert left.seconds_left() == 10 * 10.0 + 10 * 3.0
    assert (left.progress.rows, left.progress.rows_measured) == (3, 1)


def test_another_setting_of_the_row_is_nearer_than_another_row() -> None:
    clock = Clock()
    work = {("A", "x"): 1.0, ("B", "x"): 2.0, ("B", "y"): 4.0}
    left = Remaining(runs(a=("A", "x"), b=("B", "x"), c=("B", "y")), work=work, clock=clock)
    for key, each in (("a", 100.0), ("b", 1.0)):
        left.began(key)
        rounds(left, clock, key, range(1, 11), each)
        left.finished(key)
    assert left.seconds_left() == 10 * 2.0


def test_evaluations_are_counted_apart() -> None:
    """Ten rounds of 2 s; every fourth round and the last evaluate, 8 s each."""
    clock = Clock()
    left = Remaining({"a": ExpectedRun(("A", ""), 10, every=4), "b": ExpectedRun(("A", ""), 10, every=4)}, clock=clock)
    left.began("a")
    rounds(left, clock, "a", [1, 2, 3], 2.0)
    assert left.seconds_left() == 7 * 2.0 + 10 * 2.0, "what an evaluation takes is not known yet"
    clock.now += 10.0
    left.round("a", report(4, 10.0, evaluation=8.0))
    assert left.seconds_left() == 6 * 2.0 + 2 * 8.0 + 10 * 2.0 + 3 * 8.0


@pytest.mark.parametrize(
    ("total", "every", "done", "expected"),
    [(10, 0, 0, 1), (10, 0, 9, 1), (10, 0, 10, 0), (10, 5, 0, 2), (10, 5, 5, 1), (10, 4, 0, 3), (10, 4, 8, 1),
     (10, 1, 3, 7), (3, 5, 0, 1)],
)  # fmt: skip
def test_how_many_evaluations_are_left(total: int, every: int, done: int, expected: int) -> None:
    assert ExpectedRun(("A", ""), total, every).evaluations(done) == expected


def test_jobs_share_what_is_left() -> None:
    """Three runs of 40 s on two lines: 40 and 80."""
    clock = Clock()
    left = Remaining(runs(a=("A", ""), b=("A", ""), c=("A", ""), d=("A", "")), jobs=2, clock=clock)
    left.began("a")
    rounds(left, clock, "a", range(1, 11), 4.0)
    left.finished("a")
    assert left.seconds_left() == 80.0
    left.began("b")
    left.began("c")
    clock.now += 4.0
    left.round("b", report(1, 4.0))
    left.round("c", report(1, 4.0))
    assert left.seconds_left() == 36.0 + 40.0


def test_runs_that_tune_come_before_the_others() -> None:
    """Three that tune, 40 s each, on two lines: 80 s; then one run of 40 s, which cannot begin before."""
    clock = Clock()
    tuning = {f"t{i}": ExpectedRun(("A", ""), 10, 0, tunes=True) for i in range(4)}
    left = Remaining({**tuning, **runs(a=("A", ""))}, jobs=2, clock=clock)
    left.began("t0")
    rounds(left, clock, "t0", range(1, 11), 4.0)
    left.finished("t0")
    assert left.seconds_left() == 80.0 + 40.0
    assert left.progress == ComparisonProgress(
        runs=5, tuning=4, finished=1, jobs=2, seconds_left=120.0, rows=1, rows_measured=1
    )


def test_what_was_measured_before_counts_until_it_is_measured_anew() -> None:
    """Another day the machine was slower: 9 s a round, now 2 s; of the run that was cut off six rounds are left."""
    clock = Clock()
    left = Remaining(runs(a=("A", ""), b=("A", ""), c=("A", "")), clock=clock)
    left.known("a", [report(i, 9.0) for i in range(1, 11)], finished=True)
    left.known("b", [report(i, 9.0) for i in range(1, 5)], finished=False)
    assert left.seconds_left() == 6 * 9.0 + 10 * 9.0
    assert left.progress.finished == 1
    left.began("b")
    rounds(left, clock, "b", [5, 6], 2.0)
    assert left.seconds_left() == 4 * 2.0 + 10 * 2.0


def test_nothing_is_left_at_the_end() -> None:
    clock = Clock()
    left = Remaining(runs(a=("A", "")), clock=clock)
    left.known("a", [report(1, 9.0)], finished=True)
    assert left.seconds_left() == 0.0


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


pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_comparison_says_how_far_it_is(tmp_path: Path, jobs: int) -> None:
    """Eight runs, four of which tune; what is left is known from the first round on; the second time all are there."""
    (tmp_path / "file.toml").write_text(TEXT)
    told: list[ComparisonProgress] = []
    first: list[int] = []

    def on_run(title: str, number: int, count: int, run: ff.Run) -> Any:
        def on_round(done: Mapping[str, Any]) -> None:
            if not first:
                first.append(sum(one.seconds_left is None for one in told))
                assert told[-1].seconds_left, "told before the round is"

        return on_round

    def compared() -> None:
        ff.compare(tmp_path / "file.toml", out=tmp_path / "out", jobs=jobs, on_run=on_run, on_progress=told.append)

    compared()
    assert {(one.runs, one.tuning, one.jobs) for one in told} == {(8, 4, jobs)}
    assert told[0].finished == 0 and told[0].seconds_left is None
    unknown = [one.seconds_left is None for one in told]
    assert unknown == sorted(unknown, reverse=True) and sum(unknown) == first[0]
    assert [one.finished for one in told] == sorted(one.finished for one in told)
    assert len(told) == 1 + 8 * (3 + 1), "at the beginning, after each round and after each run"
    assert (told[-1].finished, told[-1].seconds_left) == (8, 0.0)
    told.clear()
    compared()
    assert [(one.finished, one.seconds_left) for one in told] == [(8, 0.0)]


def test_the_command_says_it_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.toml").write_text(TEXT)

    def said(*more: str) -> list[str]:
        with pytest.raises(SystemExit) as caught:
            main(["compare", str(tmp_path / "file.toml"), "--out", str(tmp_path / "out"), *more])
        assert not caught.value.code
        return capsys.readouterr().out.splitlines()

    lines = said()
    assert "8 runs, of which 4 tune before the others." in lines
    whole = [line for line in lines if line.startswith("The whole comparison takes about ")]
    assert len(whole) == 1 and whole[0].endswith("more, by the rounds measured so far, of 1 row of 2.")
    rounds = [line for line in lines if "round 2/3" in line]
    assert len(rounds) == 8 and all(" left of all" in line for line in rounds)
    guessed = ["  perhaps " in line for line in rounds]
    assert guessed == [True, True] + [False] * 6, "the first row tunes twice, and then the second one"
    again = said()
    assert "8 runs, of which 4 tune before the others; 8 are finished." in again
    assert not any("takes about" in line for line in again)
    assert not any("runs, of which" in line for line in said("--quiet"))
