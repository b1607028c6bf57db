"""Columns of a comparison: rounds to a target by hand, speed-ups, the waste rate, a paper's numbers below ours."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from fleetfit.report import columns, tables
from fleetfit.runs.schema import EvaluationRecord, RoundRecord, SummaryRecord

CURVE = [(1, 0.5), (2, 0.7), (3, 0.6), (4, 0.8), (6, 0.9)]


@pytest.mark.parametrize(
    ("target", "rounds"),
    [
        (0.4, 1.0),  # reached by the first evaluation: nothing is known of what was before
        (0.5, 1.0),
        (0.6, 1.5),  # half way from 0.5 to 0.7
        (0.7, 2.0),
        (0.75, 3.5),  # round 3 fell back to 0.6, but the best so far stayed 0.7: half way from (3, 0.7) to (4, 0.8)
        (0.85, 5.0),  # half way from round 4 to round 6
        (0.9, 6.0),
        (0.91, None),
    ],
)
def test_rounds_to_a_target_by_hand(target: float, rounds: float | None) -> None:
    assert columns.find_rounds_to(CURVE, target) == (None if rounds is None else pytest.approx(rounds, abs=1e-9))


def test_no_evaluation_reaches_nothing() -> None:
    assert columns.find_rounds_to([], 0.1) is None


def brute_force(points: Sequence[tuple[int, float]], target: float, steps: int = 2000) -> float | None:
    """Walk along the best-so-far polyline in small steps until it is at the target."""
    best = list(itertools.accumulate((a for _, a in points), max))
    if best and best[0] >= target:
        return points[0][0]
    for i in range(1, len(points)):
        for k in range(steps + 1):
            if best[i - 1] + (best[i] - best[i - 1]) * k / steps >= target:
                return points[i - 1][0] + (points[i][0] - points[i - 1][0]) * k / steps
    return None


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0, 1)), min_size=1, max_size=6), st.floats(0.05, 0.99))
def test_the_crossing_is_where_walking_along_the_curve_meets_it(gaps: list[tuple[int, float]], target: float) -> None:
    points = list(zip(itertools.accumulate(gap for gap, _ in gaps), (a for _, a in gaps), strict=True))
    crossing, walked = columns.find_rounds_to(points, target), brute_force(points, target)
    if crossing is None or walked is None:
        assert (crossing is None) == (walked is None) or max(a for _, a in points) == pytest.approx(target)
    else:
        assert crossing == pytest.approx(walked, abs=5 / 2000 + 1e-6)


def test_the_tables_of_the_fedavg_paper() -> None:
    """McMahan et al., Table 1, 2NN, IID, B = 10: 316 rounds with C = 0, 87 with C = 0.1, hence 3.6x."""
    name = columns.rounds_column(0.97)
    assert name == "rounds to 97%"
    assert columns.format_cell(name, [316.0]) == "316"
    assert columns.format_cell(name, [87.0], [316.0]) == "87 (3.6x)"
    assert columns.format_cell(name, [None], [316.0]) == "-"
    assert columns.format_cell(name, [87.0], [None]) == "87", "no speed-up over a row that never got there"


def test_seeds_count_only_together() -> None:
    """Mean of 10, 12 and 17 is 13, their deviation sqrt((9 + 1 + 16) / 2) = 3.606; 26 / 13 = 2."""
    name = columns.rounds_column(0.5)
    assert columns.format_cell(name, [10.0, 12.0, 17.0], [20.0, 26.0, 32.0]) == "13.0 ± 3.6 (2.0x)"
    assert columns.format_cell(name, [10.0, None, 17.0], [20.0, 26.0, 32.0]) == "2 of 3 seeds"
    assert columns.format_cell(name, [10.0, 12.0, 17.0], [20.0, None, 32.0]) == "13.0 ± 3.6"
    assert columns.format_cell("local", [0.5, None, 0.7]) == "60.00 ± 14.14 (2 of 3 seeds)"
    assert [columns.format_cell("local", values) for values in ([None, None], [0.5])] == ["-", "50.00"]


def evaluation(**policies: dict[str, float]) -> EvaluationRecord:
    return EvaluationRecord.load(
        {norm: {"global": None, "local": None, "levels": {}, **accuracies} for norm, accuracies in policies.items()}
    )


def test_numbers_of_a_run() -> None:
    def report(done: int, accuracy: float | None = None) -> RoundRecord:
        evaluate = {} if accuracy is None else {"evaluate": evaluation(static={"global": accuracy, "local": 0.9})}
        return RoundRecord.model_construct(round=done, **evaluate)

    rounds = [report(1, 0.2), report(2), report(3, 0.6)]
    summary = SummaryRecord.model_construct(
        norm="static", local=0.9, global_=0.6, waste=0.2, evaluate=evaluation(static={"avg": 0.55, "global": 0.6})
    )
    names = columns.expand_columns(["local", "avg", "full", "waste", "rounds"], [0.4, 0.7])
    assert names == ["local", "avg", "full", "waste", "rounds to 40%", "rounds to 70%"]
    numbers = columns.find_numbers(summary, rounds, names, [0.4, 0.7])
    assert numbers == pytest.approx(
        {"local": 0.9, "avg": 0.55, "full": None, "waste": 0.2, "rounds to 40%": 2.0, "rounds to 70%": None}
    )
    assert columns.find_numbers(summary, rounds, names, [0.4], "local")["rounds to 40%"] == 1.0


def test_batch_statistics_are_a_column_beside_the_static_ones() -> None:
    both = evaluation(static={"global": 0.5}, batch={"global": 0.6})
    summary = SummaryRecord.model_construct(norm="static", evaluate=both)
    numbers = columns.find_numbers(summary, [], ["global", "global, batch"])
    assert numbers == {"global": 0.5, "global, batch": 0.6}
    nothing = summary.model_copy(update={"evaluate": EvaluationRecord()})
    assert columns.find_numbers(nothing, [], ["local, batch"]) == {"local, batch": None}


def test_a_papers_numbers_stand_below_ours() -> None:
    to = "rounds to 97%"
    results = {("a", "x"): [{"local": 0.1, to: 10.0}], ("b", "x"): [{"local": 0.2, to: 5.0}]}
    printed = {("a", "x", to): 1455.0, ("b", "x", to): 87.0, ("b", "x", "local"): 84.5}
    table = tables.make_comparison_table(["a", "b"], ["x"], results, columns=["local", to], printed=printed)
    assert table.headings == ["method", "x local", "x rounds to 97%"]
    assert table.rows == (
        ("a", "10.00", "10"),
        ("a (paper)", "-", "1455"),
        ("b", "20.00", "5 (2.0x)"),
        ("b (paper)", "84.50", "87 (16.7x)"),
    )


def test_a_row_without_printed_numbers_has_one_line() -> None:
    table = tables.make_comparison_table(["a"], [""], {("a", ""): [{"local": 0.1}]}, columns=["local"], printed={})
    assert table.rows == (("a", "10.00"),)
