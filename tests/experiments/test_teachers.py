"""How often each exit was the teacher: bars add up what the rounds counted."""

from typing import Any

import pytest
from support.runs import make_run_record

from experiments.figures.teachers import draw_teachers

pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")

SIZES = {"parameters": 100, "multiply_adds": 1000, "clients": 2}
LEVELS = [
    {"level": "1", "width": 1.0, "depth": 2, "blocks": 4, "exits": [2], "local": 0.6, **SIZES},
    {"level": "2", "width": 1.0, "depth": 4, "blocks": 4, "exits": [2, 4], "local": 0.7, **SIZES},
]
SUMMARY = {
    "method": "reefl", "model": "vit", "data": "digits", "norm": "static", "rounds": 3, "levels": LEVELS,
    "global": 0.5, "local": 0.5, "evaluate": {}, "bytes_down": 3, "bytes_up": 3, "waste": 0.0, "failures": 0,
    "seconds": 3.0, "notes": [],
}  # fmt: skip


def report(round: int, counts: dict[str, Any], exits: list[float] | None = None) -> dict[str, Any]:
    columns = {"global": 0.5, "local": 0.5, "levels": {}, "exits": exits or []}
    result: dict[str, Any] = {"round": round, "bytes_down": 1, "bytes_up": 1, "simulated_s": None, "multiply_adds": 1,
                             "train": {"loss": None, "clients": 1}, "failures": [], "seconds": 1.0}  # fmt: skip
    result |= {"counts": {"teachers": counts}} if counts else {}
    return result | ({"evaluate": {"static": columns}} if exits else {})


METRICS = [
    report(1, {"1": {"2": 5}, "2": {"2": 3, "4": 1}}, [0.2, 0.3]),
    report(2, {"1": {"2": 6}, "2": {"2": 1, "4": 4}}, [0.6, 0.8]),
    report(3, {"1": {"2": 7}}),
]


def bars(axes: Any) -> list[list[tuple[float, float]]]:
    """Foot and height of each bar, level by level."""
    return [[(bar.get_y(), bar.get_height()) for bar in group] for group in axes.containers]


def test_the_largest_level_in_its_last_round_and_all_rounds_together() -> None:
    """18 steps at level 1 below, then 3 + 1 and 1 + 4 at level 2; the largest level did not train in round 3."""
    figure = draw_teachers(make_run_record(SUMMARY, METRICS))
    assert figure is not None
    left, middle, right = figure.axes
    assert bars(middle) == [[(0, 1), (0, 4)]]
    assert middle.get_title(loc="left") == "level 2 in round 2"
    assert bars(right) == [[(0, 18), (0, 0)], [(18, 4), (0, 5)]]
    assert [label.get_text() for label in right.get_xticklabels()] == ["2", "4"]
    assert [height for _, height in bars(left)[0]] == pytest.approx([60, 80])
    assert [label.get_text() for label in left.get_xticklabels()] == ["2", "4"]


def test_it_is_drawn_for_runs_that_count_only() -> None:
    others = [{key: value for key, value in m.items() if key != "counts"} for m in METRICS]
    assert draw_teachers(make_run_record(SUMMARY, others)) is None
