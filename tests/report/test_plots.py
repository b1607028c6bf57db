"""Plots: drawn from numbers as they stand in a run folder, and refused with a sentence without matplotlib."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fleetfit.errors import MissingExtra
from fleetfit.report import drawing, plots

pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")

LEVELS = [
    {"level": "1", "width": 0.5, "depth": 2, "blocks": 4, "exits": [2], "local": 0.6},
    {"level": "2", "width": 1.0, "depth": 4, "blocks": 4, "exits": [2, 4], "local": None},
]
SUMMARY = {"method": "scalefl", "data": "digits", "norm": "static", "levels": LEVELS}


def report(round: int, accuracy: float | None) -> dict[str, Any]:
    columns = {"global": accuracy, "local": 0.5, "levels": {"1": {"local": 0.6}, "2": {"local": None}}}
    clock = {"simulated_s": 90.0, "multiply_adds": 2_000_000_000}
    return {"round": round, "bytes_down": 1_000_000, "bytes_up": 500_000, **clock} | (
        {} if accuracy is None else {"evaluate": {"static": columns}}
    )


METRICS = [report(1, None), report(2, 0.4), report(3, 0.8)]


def test_accuracy_is_drawn_at_the_rounds_that_were_evaluated() -> None:
    axes = plots.accuracy_of_run(SUMMARY, METRICS).axes[0]
    lines = {str(line.get_label()): line for line in axes.lines}
    assert list(lines["global"].get_xdata()) == [2, 3]
    assert list(lines["global"].get_ydata()) == pytest.approx([40, 80])
    assert set(lines) == {"global", "local", "local, level 1", "local, level 2"}


def test_a_comparison_draws_the_tables_accuracies_and_its_targets() -> None:
    figure = plots.accuracy_of_rows({"a": (SUMMARY, METRICS)}, ["global"], {"global": [0.9], "local": [0.1]})
    (axes,) = figure.axes
    target, curve = axes.lines
    assert list(target.get_ydata()) == [90.0, 90.0]
    assert list(curve.get_ydata()) == pytest.approx([40, 80])
    assert len(plots.accuracy_of_rows({"a": (SUMMARY, METRICS)}).axes) == 2, "local and global by default"


def test_bytes_are_added_up_over_all_rounds() -> None:
    for axes in plots.accuracy_against({"a": (SUMMARY, METRICS)}, "bytes").axes:
        assert list(axes.lines[0].get_xdata()) == pytest.approx([3.0, 4.5])  # MB after rounds 2 and 3, 1.5 each
        assert axes.get_xlabel() == "sent, both directions (MB)"


def test_seconds_and_multiply_adds_are_added_up_in_a_unit_that_suits_them() -> None:
    """90 s a round: 3 and 4.5 min after rounds 2 and 3; 4 and 6 thousand million multiply-adds."""
    axes = plots.accuracy_against({"a": (SUMMARY, METRICS)}, "seconds").axes[1]
    assert list(axes.lines[0].get_xdata()) == pytest.approx([3.0, 4.5])
    assert list(axes.lines[0].get_ydata()) == pytest.approx([40, 80])
    assert axes.get_xlabel() == "simulated time (min)"
    axes = plots.accuracy_against({"a": (SUMMARY, METRICS)}, "multiply_adds").axes[0]
    assert list(axes.lines[0].get_xdata()) == pytest.approx([4.0, 6.0])
    assert axes.get_xlabel() == "multiply-adds of clients ($10^{9}$)"


def test_a_round_without_clients_takes_no_time() -> None:
    some = [METRICS[0], {**METRICS[1], "simulated_s": None}, METRICS[2]]
    assert plots.spent(some, "seconds") == {1: 90.0, 2: 90.0, 3: 180.0}


def test_what_no_run_reports_is_not_drawn(tmp_path: Path) -> None:
    """Without profiles there are no seconds; beside a run with them, one without has no line."""
    timeless = [{**m, "simulated_s": None} for m in METRICS]
    files = plots.plots_of_comparison(tmp_path, {("a", ""): [SUMMARY]}, {("a", ""): timeless})
    assert sorted(f.name for f in files) == ["accuracy.png", "bytes.png", "levels.png", "multiply-adds.png"]
    both = plots.accuracy_against({"a": (SUMMARY, METRICS), "b": (SUMMARY, timeless)}, "seconds").axes[0]
    assert [len(line.get_xdata()) for line in both.lines] == [2, 0]
    old = [{k: v for k, v in m.items() if k not in ("simulated_s", "multiply_adds")} for m in METRICS]
    files = plots.plots_of_comparison(tmp_path, {("a", ""): [SUMMARY]}, {("a", ""): old})
    assert sorted(f.name for f in files) == ["accuracy.png", "bytes.png", "levels.png"]


def test_shapes_have_the_levels_width_and_depth() -> None:
    axes = plots.shapes({"a": SUMMARY}).axes[0]
    frame, level = axes.patches
    assert (frame.get_width(), frame.get_height()) == (1, 1)
    assert (level.get_width(), level.get_height()) == (0.5, 0.5)
    assert axes.get_title() == "level 1\n60.00%"


def test_a_dots_area_follows_the_count_and_no_samples_have_no_dot() -> None:
    dots = plots.partition_dots([[4, 0], [1, 2]], "digits").axes[0].collections[0]
    assert [tuple(map(int, point)) for point in dots.get_offsets()] == [(0, 0), (1, 0), (1, 1)]
    sizes = dots.get_sizes()
    assert sizes[0] == pytest.approx(4 * sizes[1])
    assert sizes[2] == pytest.approx(2 * sizes[1])


def test_a_runs_plots_are_files(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text(json.dumps({"first": {"class_counts": [[1, 2], [3, 0]]}}))
    files = plots.plots_of_run(tmp_path, SUMMARY, METRICS)
    assert sorted(f.name for f in files) == [
        "accuracy.png", "bytes.png", "levels.png", "multiply-adds.png", "partition.png", "seconds.png",
    ]  # fmt: skip
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


def test_a_comparisons_plots_are_one_set_per_setting(tmp_path: Path) -> None:
    keys = [("a", "alpha = 1"), ("b", "alpha = 1"), ("a", "alpha = 9")]
    files = plots.plots_of_comparison(tmp_path, {k: [SUMMARY] for k in keys}, dict.fromkeys(keys, METRICS))
    assert sorted(f.name for f in files) == [
        f"{kind}-alpha-{alpha}.png"
        for kind in ("accuracy", "bytes", "levels", "multiply-adds", "seconds")
        for alpha in (1, 9)
    ]


def test_without_matplotlib_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not drawing.available()
    with pytest.raises(MissingExtra, match=r"fleetfit\[plots\]"):
        plots.plots_of_run(tmp_path, SUMMARY, METRICS)


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    """No figure manager and no window: a run on a machine without a screen draws too."""
    import sys

    before = "matplotlib.pyplot" in sys.modules
    plots.accuracy_of_run(SUMMARY, METRICS)
    assert ("matplotlib.pyplot" in sys.modules) == before
