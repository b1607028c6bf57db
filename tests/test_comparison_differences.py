"""Paired differences of a real comparison: in the terminal, Markdown, CSV and JSON; against a row of one's choice."""

import csv
import statistics
from itertools import takewhile
from pathlib import Path

import pytest
from scipy import stats
from support import run_verb

import fleetfit as ff

TEXT = """
rounds = 2
data = { name = "tiny:tiny_data", partition = { kind = "iid", clients = 6 } }
model.name = "tiny:tiny"
fleet = { groups = [{ budget = 0.4 }, { budget = 1.0 }], tolerance = 0.5 }
local.epochs = 1
evaluate.every = 0
[[compare.row]]
label = "a scaled row"
method.name = "scalefl"
[[compare.row]]
label = "HeteroFL, lr 0.01"
method.name = "heterofl"
local.lr = 0.01
[[compare.row]]
method.name = "fedavg"
[[compare.setting]]
label = "many of the clients"
cohort.count = 4
[[compare.setting]]
label = "few of the clients"
cohort.count = 2
[compare.grid]
seed = [0, 1, 2]
[compare]
columns = ["local", "global_worst_tenth"]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("compared")
    (place / "three.toml").write_text(TEXT)
    return place


@pytest.fixture
def comparison(place: Path) -> ff.Comparison:
    return ff.compare(place / "three.toml", out=place / "out")


def compute_difference(
    comparison: ff.Comparison, row: str, against: str, setting: str, kind: str
) -> tuple[float, float, float]:
    """From the runs themselves, by scipy."""
    own, other = ([100 * run.accuracy(kind) for run in comparison.runs[label, setting]] for label in (row, against))
    interval = stats.ttest_rel(own, other).confidence_interval(0.95)
    return statistics.fmean(own) - statistics.fmean(other), interval.low, interval.high


def test_differences_are_those_of_the_runs_pair_by_pair(comparison: ff.Comparison) -> None:
    assert [(one.row, one.setting, one.column) for one in comparison.differences] == [
        (row, setting, column)
        for row in ("HeteroFL, lr 0.01", "fedavg")
        for setting in ("many of the clients", "few of the clients")
        for column in ("local", "global_worst_tenth")
    ]
    for one in comparison.differences:
        assert one.seeds == (0, 1, 2)
        mean, low, high = compute_difference(comparison, one.row, "a scaled row", one.setting, one.column)
        assert (one.mean, one.low, one.high) == pytest.approx((mean, low, high), abs=1e-3)


def test_markdown_and_csv_say_the_same(comparison: ff.Comparison) -> None:
    assert comparison.difference_table is not None
    markdown = (comparison.folder / "table.md").read_text()
    assert markdown == comparison.table.to_markdown() + "\n" + comparison.difference_table.to_markdown()
    with (comparison.folder / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert sum(line["what"] == "run" for line in lines) == 18
    for one in comparison.differences:
        for what, number in (("difference", one.mean), ("low", one.low), ("high", one.high)):
            (line,) = (i for i in lines if (i["what"], i["row"], i["setting"]) == (what, one.row, one.setting))
            assert float(line[one.column]) == pytest.approx(number, abs=1e-6)


def test_another_reference_is_asked_for_without_training(place: Path, comparison: ff.Comparison) -> None:
    """As an option and in the file; in at most 100 columns of text."""
    before = {p: p.stat().st_mtime_ns for p in (place / "out").rglob("metrics.jsonl")}
    out = ["--out", str(place / "out")]
    output = run_verb("compare", place / "three.toml", *out, "--against", "fedavg", code=0).out
    below = output[output.index("Differences from fedavg") :].splitlines()[1:]
    framed = list(takewhile(lambda line: line[:1] in "┏┃┡│└", below))
    assert len(framed) > 8 and max(map(len, framed)) <= 100
    mean, low, high = compute_difference(comparison, "a scaled row", "fedavg", "few of the clients", "local")
    assert f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]" in output
    (place / "three.toml").write_text(TEXT + 'against = "fedavg"\n')
    again = ff.compare(place / "three.toml", out=place / "out")
    (place / "three.toml").write_text(TEXT)
    assert {one.row for one in again.differences} == {"a scaled row", "HeteroFL, lr 0.01"}
    assert {p: p.stat().st_mtime_ns for p in (place / "out").rglob("metrics.jsonl")} == before


def test_one_row_has_nothing_to_differ_from(tmp_path: Path) -> None:
    head = TEXT[: TEXT.index("[[compare.row]]")]
    (tmp_path / "one.toml").write_text(head + "[compare.grid]\nseed = [0, 1]\n")
    comparison = ff.compare(tmp_path / "one.toml", out=tmp_path / "out")
    assert comparison.differences == () and comparison.difference_table is None
    assert (tmp_path / "out" / "table.md").read_text() == comparison.table.to_markdown()
