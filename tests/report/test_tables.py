"""Tables: what they say is what they were given."""

from typing import Any

import pytest

from fleetfit.cost import Cost
from fleetfit.data import Facts
from fleetfit.planner import Plan, PlannedLevel
from fleetfit.report import tables
from fleetfit.report.text import Table, format_bytes, format_count, format_duration, format_mean
from fleetfit.runs.schema import NO_ACCURACIES, SummaryRecord
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
    ('7 (group "tiny")',),
)
COLUMNS = {
    "global": 0.9,
    "local": 0.8,
    "levels": {"1": {"local": 0.75, "clients": 30}, "2": {"local": None, "clients": 0}},
    "per_client": {"global": {"0": 0.9}},
}
METRICS = [
    {"round": 1, "train": {"loss": None, "clients": 0}, "bytes_down": 1_000_000, "bytes_up": 10, "failures": [],
     "seconds": 1.5},
    {"round": 2, "train": {"loss": 0.5, "clients": 3}, "bytes_down": 500_000, "bytes_up": 20,
     "failures": [{"client": 3}], "seconds": 2.5, "evaluate": {"split": "test", "static": COLUMNS,
                  "batch": {**COLUMNS, "global": 0.7, "batch_size": 128, "order": "shuffled"}}},
]  # fmt: skip
DESCRIPTION = {"name": "", "method": "scalefl", "model": "cnn", "data": "digits", "seed": 0, "norm": "static"}


@pytest.fixture
def summary() -> dict[str, Any]:
    return make_summary(DESCRIPTION, PLAN, METRICS, ["a note"])


@pytest.fixture
def record(summary: dict[str, Any]) -> SummaryRecord:
    return SummaryRecord.load(summary)


def test_a_summary_adds_up_and_leaves_the_clients_out(summary: dict[str, Any]) -> None:
    assert (summary["rounds"], summary["bytes_down"], summary["bytes_up"]) == (2, 1_500_000, 30)
    assert (summary["failures"], summary["empty_rounds"], summary["seconds"]) == (1, 1, 4.0)
    assert (summary["global"], summary["local"]) == (0.9, 0.8)
    assert [level["local"] for level in summary["levels"]] == [0.75, None]
    assert "per_client" not in summary["evaluate"]["static"]
    assert summary["left_out"] == ['7 (group "tiny")']


def test_the_level_table_has_what_the_issue_asks_for(record: SummaryRecord) -> None:
    table = tables.make_level_table(record)
    assert dict(zip(table.columns, table.rows[0], strict=True)) == {
        "level": "1",
        "width": "0.68",
        "depth": "3/6",
        "exits (after block)": "1 (3)",
        "parameters": "6.98 K",
        "multiply-adds": "115.1 K",
        "clients": "30",
        "local accuracy %": "75.00",
    }
    assert table.rows[1][-1] == "-"


def test_counts_of_samples_are_of_the_accuracies_that_have_them() -> None:
    counts = {"global_samples": 300, "local_samples": 200, "test_samples": 1000}
    accuracies = NO_ACCURACIES.model_copy(update=counts)
    kinds = ("global", "local", "avg", "full", "ensemble", "personal", "local_worst_tenth")
    texts = {kind: tables.format_sample_counts(accuracies, kind) for kind in kinds}
    assert {kind for kind, text in texts.items() if text} == {"global", "local"}
    assert "300" in texts["global"] and "200" in texts["local"]


def test_the_totals_name_both_batch_norm_policies(record: SummaryRecord) -> None:
    rows = dict(tables.make_total_table(record).rows)
    assert rows["global accuracy %"] == "90.00"
    assert rows["global / local accuracy %, batch statistics, batches of 128, shuffled"] == "70.00 / 80.00"
    assert "1.5 MB / 30 B" in rows.values()
    assert rows["failed jobs"] == "1"
    first, second = tables.make_total_table(record).notes
    assert first == "a note" and "level 2" in second  # nobody of that level was evaluated


def test_the_plan_table_says_what_level_l_leaves_out_and_who_is_left_out() -> None:
    table = tables.make_plan_table(PLAN, "title")
    assert table.rows[0] == ("1", "0.68", "3/6", "1 (3)", "6.98 K", "115.1 K", "0.125 ± 10%", "0.121", "30")
    assert "Level 2 " in table.notes[0] and "290 parameters" in table.notes[0]
    assert '7 (group "tiny")' in table.notes[1]


@pytest.mark.parametrize(
    ("values", "text"),
    [([], "-"), ([None], "-"), ([0.5], "50.00"), ([0.5, 0.7], "60.00 ± 14.14"), ([0.5, None, 0.7], "60.00 ± 14.14")],
)
def test_mean_and_standard_deviation(values: list[float | None], text: str) -> None:
    """50 and 70: mean 60, sample variance (100 + 100) / 1, standard deviation sqrt(200) = 14.142."""
    assert format_mean(values) == text


def test_methods_are_rows_and_settings_have_local_and_global() -> None:
    results = {("a", "x"): [{"local": 0.1, "global": 0.2}], ("b", "y"): [{"local": 0.3, "global": None}]}
    table = tables.make_comparison_table(["a", "b"], ["x", "y"], results)
    assert table.rows == (("a", "10.00", "20.00", "-", "-"), ("b", "-", "-", "30.00", "-"))
    assert table.headings == ["method", "x local", "x global", "y local", "y global"]


def test_levels_of_rows_repeat_no_total(record: SummaryRecord) -> None:
    table = tables.make_row_level_table({("ScaleFL", "alpha = 1"): [record, record]})
    assert table.rows[0][0] == "ScaleFL, alpha = 1"
    assert table.rows[0][-3:] == ("75.00 ± 0.00", "90.00 ± 0.00", "1.5 MB / 30 B")
    assert table.rows[1][0] == ""
    assert table.rows[1][-2:] == ("", "")


def test_markdown() -> None:
    table = Table(("", "a"), (("x|y", '1,"2"'),), "title", ("note",), (("", 1), ("g", 1)))
    assert table.to_markdown() == '**title**\n\n|  | g a |\n| --- | --- |\n| x\\|y | 1,"2" |\n\nnote\n'


def test_latex() -> None:
    table = Table(("row", "a_1"), (("50%", "1 ± 2"), ("x & y", "<1")), "", ("note",), (("", 1), ("g", 1)))
    assert table.to_latex().splitlines() == [
        r"\begin{tabular}{lr}", r"\toprule", r"\multicolumn{1}{c}{} & \multicolumn{1}{c}{g} \\", r"row & a\_1 \\",
        r"\midrule", r"50\% & 1 $\pm$ 2 \\", r"x \& y & $<$1 \\", r"\bottomrule", r"\end{tabular}", "", "note",
    ]  # fmt: skip


def test_data_sets_as_in_table_2() -> None:
    table = tables.make_data_table({"cifar": vars(Facts(50_000, 10_000, 10, "32x32", "somebody")), "own": None,
                               "images": vars(Facts(None, None, None, "any", "a folder"))})  # fmt: skip
    assert table.rows == (
        ("cifar", "50,000", "10,000", "10", "32x32"),
        ("own", "", "", "", ""),
        ("images", "any", "any", "any", "any"),
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(950, "950"), (6_983, "6.98 K"), (57_550, "57.5 K"), (1_731_000, "1.73 M"), (999_960, "1.00 M"), (4e9, "4.00 G")],
)
def test_counts_in_short(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (1_500, "1.5 kB"), (999_960, "1.0 MB"), (2_800_000, "2.8 MB"), (3e9, "3.0 GB")]
)
def test_bytes_in_short(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.21, "3.2 s"), (59.96, "1 min 00 s"), (250, "4 min 10 s"), (7500, "2 h 05 min")]
)
def test_durations_in_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
