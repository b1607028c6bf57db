"""Differences paired by seed: intervals by hand and against scipy, what has no interval, the table, CSV."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from fleetfit.report.comparison_csv import format_comparison_csv
from fleetfit.report.page.run_set import RunSet
from fleetfit.report.statistics import Difference, confidence_interval, explain_smallest, paired_differences
from fleetfit.report.tables import make_difference_table
from fleetfit.runs.schema import ComparisonResults, CurvesRecord, PaperNumbers, RunResult

Finals = Mapping[tuple[str, str], Mapping[int, Mapping[str, float]]]


def results(finals: Finals, against: str = "A") -> ComparisonResults:
    runs = [
        RunResult(
            row=row,
            setting=setting,
            seed=seed,
            rounds=75,
            seconds=10.0 + seed,
            training_seconds=8.0,
            speed="fast",
            digest="",
            final=dict(final),
            curves=CurvesRecord(round=[]),
        )
        for (row, setting), by_seed in finals.items()
        for seed, final in by_seed.items()
    ]
    return ComparisonResults(name="x", file="x.toml", versions={}, machine={}, against=against, settings={}, runs=runs)


def local(values: Sequence[float], start: int = 0) -> dict[int, dict[str, float]]:
    return {seed: {"local": value} for seed, value in enumerate(values, start)}


def test_a_row_that_lacks_a_seed_says_so_and_has_no_speed_up() -> None:
    both = {seed: {"local": 50.0 + 10 * seed, "rounds_to_97": 10.0} for seed in range(3)}
    record = results({("A", ""): both, ("B", ""): {0: both[0], 2: both[2]}, ("C", ""): both})
    runs = RunSet([], record.model_copy(update={"columns": ["local", "rounds to 97%"]}))
    rows = {row: cells for row, *cells in runs.make_table().rows}
    assert all("2 of 3 seeds" in cell for cell in rows["B"]) and rows["B"][0].startswith("60.00 ± 14.14")
    assert rows["A"][0] == rows["C"][0] == "60.00 ± 10.00" and rows["C"][1].endswith("(1.0x)")


# ---- Student's t -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100).map(lambda x: round(x, 4)), min_size=2, max_size=12))
def test_intervals_are_those_of_scipy(values: list[float]) -> None:
    interval = confidence_interval(values)
    if max(values) - min(values) < 1e-9:
        assert interval is None
        return
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert interval is not None
    assert math.isclose(interval[0], expected.low, rel_tol=1e-8, abs_tol=1e-8)
    assert math.isclose(interval[1], expected.high, rel_tol=1e-8, abs_tol=1e-8)


def test_an_interval_by_hand() -> None:
    """Differences 1, 2, 3, 4, 5: mean 3, s = sqrt(10 / 4) = 1.58114, s / sqrt(5) = 0.70711.

    t(4) = 2.776 in any printed table, so the half width is 1.9632.
    """
    low, high = confidence_interval([1.0, 2.0, 3.0, 4.0, 5.0]) or (0.0, 0.0)
    assert (round(low, 3), round(high, 3)) == (1.037, 4.963)


# ---- pairs -----------------------------------------------------------------------------------------------------------


def test_pairs_are_of_one_seed() -> None:
    """Values vary by tens from seed to seed, the differences by a tenth: unpaired, nothing could be told."""
    a, b = [40.0, 60.0, 50.0], [42.1, 62.0, 51.9]
    (difference,) = paired_differences(results({("A", ""): local(a), ("B", ""): local(b)}), ["local"])
    assert difference.seeds == (0, 1, 2) and difference.order == 1
    assert math.isclose(difference.mean or 0, 2.0)
    half = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert math.isclose(difference.low or 0, 2.0 - half) and math.isclose(difference.high or 0, 2.0 + half)


def test_only_seeds_that_both_have_count() -> None:
    differences = paired_differences(
        results({("A", ""): local([1, 2, 3]), ("B", ""): local([9, 9, 9], start=2)}), ["local"]
    )
    assert [(one.seeds, one.mean) for one in differences] == [((2,), 6.0)]


def test_the_order_is_told_beyond_the_interval_alone() -> None:
    """[1, 2, 3]: 2 +- 4.303 / sqrt(3) = [-0.48, 4.48]."""
    finals = {("A", ""): local([0, 0, 0]), ("B", ""): local([1, 2, 3]), ("C", ""): local([-1.1, -1.0, -0.9])}
    near, far = paired_differences(results(finals), ["local"])
    assert (near.order, far.order) == (0, -1)
    cells = [row[-1] for row in make_difference_table([near, far], "A").rows]
    assert cells == ["+2.00 [-0.48, +4.48]", "-1.00 [-1.25, -0.75] *"]


def test_another_reference_turns_the_sign() -> None:
    finals = {("A", ""): local([0, 1]), ("B", ""): local([1, 5])}
    ((one,), (other,)) = (paired_differences(results(finals), ["local"], against) for against in ("A", "B"))
    assert (one.row, other.row) == ("B", "A")
    assert (other.mean, other.low, other.high) == tuple(-(x or 0) for x in (one.mean, one.high, one.low))


def test_settings_stay_apart() -> None:
    finals = {(row, s): local([x, x + d]) for row, s, x, d in
              (("A", "x", 1, 0), ("A", "y", 2, 0), ("B", "x", 4, 1), ("B", "y", 3, 1))}  # fmt: skip
    differences = paired_differences(results(finals), ["local"])
    assert [(one.setting, one.mean) for one in differences] == [("x", 3.5), ("y", 1.5)]


# ---- what has no interval --------------------------------------------------------------------------------------------


def notes(differences: Sequence[Difference]) -> str:
    return " ".join(make_difference_table(differences, "A").notes)


def test_one_seed_is_said_in_words() -> None:
    (difference,) = paired_differences(results({("A", ""): local([1]), ("B", ""): local([9])}), ["local"])
    assert (difference.mean, difference.low, difference.high, difference.order) == (8.0, None, None, 0)
    assert make_difference_table([difference], "A").rows[0][-1] == "+8.00"
    assert "excludes zero" not in notes([difference])


def test_seeds_that_differ_alike_have_no_interval() -> None:
    """Accuracies on few samples are coarse: an interval without width would claim an order that chance can make."""
    (difference,) = paired_differences(results({("A", ""): local([1, 2]), ("B", ""): local([2, 3])}), ["local"])
    assert (difference.mean, difference.low, difference.order) == (1.0, None, 0)
    assert "excludes zero" not in notes([difference])


def test_a_number_that_is_missing_is_no_pair() -> None:
    """Rounds to a target are compared where both got there."""
    finals: Finals = {
        ("A", ""): {0: {"rounds_to_97": 20.0}, 1: {"rounds_to_97": 30.0}, 2: {}},
        ("B", ""): {0: {"rounds_to_97": 10.0}, 1: {}, 2: {"rounds_to_97": 1.0}},
        ("C", ""): {0: {}, 1: {}, 2: {}},
    }
    one, none = paired_differences(results(finals), ["rounds to 97%"])
    assert (one.seeds, one.mean) == ((0,), -10.0)
    assert (none.seeds, none.mean) == ((), None)
    assert [row[-2:] for row in make_difference_table([one, none], "A").rows] == [("1", "-10.0"), ("0", "-")]
    assert '"-"' in notes([one, none])


# ---- the tables ------------------------------------------------------------------------------------------------------


def test_only_differences_with_an_interval_count_as_intervals() -> None:
    one, other = Difference("B", "", "local", (0, 1), 1.0, 0.5, 1.5), Difference("C", "", "local", (0,), 1.0)
    assert "1 intervals" in notes([one, other])


def test_settings_have_a_column_only_where_there_are_some() -> None:
    one = Difference("B", "", "local", (0, 1), 1.0, 0.5, 1.5)
    assert make_difference_table([one], "A").columns == ("row", "column", "seeds", "difference [95% interval]")
    table = make_difference_table([one, Difference("B", "IID", "local", (0,), 1.0)], "A")
    assert table.columns[1] == "setting" and table.title == "Differences from A"


def lines(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text)))


HEADER = (
    "what,row,setting,seed,against,seeds,tuned,rounds,validation,local,global,local_worst_tenth,global_worst_tenth,ensemble,"
    "mean_over_exits,best_exit,avg,full,waste,local_static,global_static,avg_static,full_static,local_batch,"
    "global_batch,avg_batch,full_batch,rounds_to_40,rounds_to_97.5,parameters,multiply_adds,bytes_down,bytes_up,"
    "simulated_s,failures,training_seconds,seconds"
)


def test_columns_of_attacks_are_there_where_some_run_has_them() -> None:
    comparison = results(
        {("A", "x"): {0: {"local": 40.0, "honest_excluded_2": 12.5}}, ("B", "x"): {0: {"local": 42.0}}}
    )
    text = format_comparison_csv(comparison.model_copy(update={"columns": ["backdoor"], "targets": [0.4, 0.975]}))
    assert {*text.splitlines()[0].split(",")} - {*HEADER.split(",")} == {"honest_excluded_2", "backdoor"}
    assert [line["honest_excluded_2"] for line in lines(text)[:2]] == ["12.5", ""]


def test_numbers_with_fewer_common_seeds_have_lines_of_their_own() -> None:
    finals = {("A", ""): local([1, 2, 3]), ("B", ""): local([2, 3, 4])}
    finals["A", ""][0]["global"] = finals["B", ""][0]["global"] = 5.0
    comparison = results(finals).model_copy(update={"columns": ["local", "global"]})
    differences = [line for line in lines(format_comparison_csv(comparison)) if line["what"] == "difference"]
    assert [(line["seeds"], line["local"], line["global"]) for line in differences] == [
        ("3", "1.0", ""),
        ("1", "", "0.0"),
    ]


def test_the_csv_has_numbers_and_a_stable_header() -> None:
    finals: Finals = {
        ("A", "x"): {0: {"local": 40.0, "rounds_to_40": 7.5, "bytes_up": 10}, 1: {"local": 41.0, "bytes_up": 30}},
        ("B", "x"): {0: {"local": 42.0, "bytes_up": 1}, 1: {"local": 45.0, "bytes_up": 1}},
    }
    printed = [PaperNumbers(row="A", setting="x", numbers={"rounds to 40%": 12.0, "rounds to 99%": 5.0})]
    update = {"columns": ["local"], "targets": [0.4, 0.975], "printed": printed}
    text = format_comparison_csv(results(finals).model_copy(update=update))
    assert text.splitlines()[0] == HEADER
    records = lines(text)
    assert [(line["what"], line["row"], line["seed"]) for line in records] == [
        ("run", "A", "0"), ("run", "A", "1"), ("run", "B", "0"), ("run", "B", "1"),
        ("mean", "A", ""), ("deviation", "A", ""), ("mean", "B", ""), ("deviation", "B", ""),
        ("difference", "B", ""), ("low", "B", ""), ("high", "B", ""), ("paper", "A", ""),
    ]  # fmt: skip
    by = {(line["what"], line["row"]): line for line in records[4:]}
    assert float(by["mean", "A"]["local"]) == 40.5 and float(by["mean", "A"]["bytes_up"]) == 20
    assert by["mean", "A"]["rounds_to_40"] == "", "one seed did not get there"
    assert records[0]["rounds_to_40"] == "7.5" and records[1]["rounds_to_40"] == ""
    assert float(by["deviation", "B"]["local"]) == pytest.approx(math.sqrt(4.5), abs=1e-6)
    assert float(by["difference", "B"]["local"]) == 3.0
    half = stats.t.ppf(0.975, 1) * math.sqrt(2) / math.sqrt(2)
    assert float(by["low", "B"]["local"]) == pytest.approx(3 - half, abs=1e-5)
    assert float(by["high", "B"]["local"]) == pytest.approx(3 + half, abs=1e-5)
    assert (by["low", "B"]["against"], by["low", "B"]["seeds"]) == ("A", "2")
    assert by["paper", "A"]["rounds_to_40"] == "12.0"
    for line in records:
        numbers = [value for name, value in line.items() if name not in ("what", "row", "setting", "against") and value]
        assert all(math.isfinite(float(value)) for value in numbers)


# ---- the smallest model ----------------------------------------------------------------------------------------------


def make_results_with_smallest(finals: Finals) -> ComparisonResults:
    return results(finals).model_copy(update={"smallest": "S"})


def test_the_smallest_model_is_in_no_difference_but_as_reference() -> None:
    comparison = make_results_with_smallest(
        {("A", ""): local([1, 2]), ("B", ""): local([2, 4]), ("S", ""): local([3, 4])}
    )
    assert [one.row for one in paired_differences(comparison, ["local"])] == ["B"]
    assert [one.row for one in paired_differences(comparison, ["local"], "S")] == ["A", "B"]


def test_the_smallest_model_is_as_good_if_no_interval_is_above() -> None:
    """A less S is 1, 0, 2: mean 1, s = 1, t(2) = 4.3027, so that the half width is 4.3027 / sqrt(3) = 2.4842: open.

    B less S is 3.0, 3.1, 3.2: mean 3.1, s = 0.1, half width 0.2484: above zero. C less S is 0.1, 0, 0.2: as good.
    """
    smallest = {("S", ""): local([50, 52, 54])}
    few = {("A", ""): local([51, 52, 56]), **smallest}
    (sentence,) = explain_smallest(make_results_with_smallest(few))
    assert "+1.00 [-1.48, +3.48] in local (A)" in sentence and "3 seeds" in sentence and "open" in sentence
    assert explain_smallest(results(few)) == []
    assert explain_smallest(make_results_with_smallest({**few, ("B", ""): local([53, 55.1, 57.2])})) == []
    (sentence,) = explain_smallest(make_results_with_smallest({("C", ""): local([50.1, 52, 54.2]), **smallest}))
    assert "+0.10 [-0.15, +0.35] in local (C)" in sentence and "open" not in sentence
    both = {("C", ""): local([50.1, 52, 54.2]), ("A", ""): local([49.5, 51, 55.0]), **smallest}
    (sentence,) = explain_smallest(make_results_with_smallest(both))
    assert "(C)" in sentence and "open" in sentence  # A less S is -0.5, -1, 1: it ends at 2.4
    (sentence,) = explain_smallest(make_results_with_smallest({("E", ""): local([50, 52, 54]), **smallest}))
    assert "open" not in sentence  # equal, without an interval


def test_the_smallest_model_is_judged_by_setting_and_accuracy() -> None:
    """Without an interval a higher mean counts; `global` 0.1 above is enough."""
    both = {(("A"), "x"): {0: {"local": 50.0, "global": 60.1}}, ("S", "x"): {0: {"local": 55.0, "global": 60.0}}}
    assert explain_smallest(make_results_with_smallest(both)) == []
    both |= {("A", "y"): {0: {"local": 50.0, "global": 59.9}}, ("S", "y"): {0: {"local": 55.0, "global": 60.0}}}
    (sentence,) = explain_smallest(make_results_with_smallest(both))
    assert " in y" in sentence and "-5.00 in local (A) and -0.10 in global (A)" in sentence
    assert "1 seed)" in sentence and "open" in sentence


def test_a_row_without_a_common_seed_gives_no_verdict() -> None:
    assert (
        explain_smallest(make_results_with_smallest({("A", ""): local([1.0]), ("S", ""): local([2.0], start=1)})) == []
    )
