"""Figures: drawn from the records of runs, and refused with a sentence without matplotlib."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
from support import raises
from support.runs import make_run_record

from fleetfit.errors import MissingExtra
from fleetfit.report import drawing, figures
from fleetfit.report.curves import COSTS, cost_curve
from fleetfit.runs.comparison import RowRecord
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import LevelRecord

pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
from matplotlib.text import Text

SIZES = {"parameters": 100, "multiply_adds": 1000, "clients": 0}
LEVELS = [
    {"level": "1", "width": 0.5, "depth": 2, "blocks": 4, "exits": [2], "local": 0.6, **SIZES},
    {"level": "2", "width": 1.0, "depth": 4, "blocks": 4, "exits": [2, 4], "local": None, **SIZES},
]
SUMMARY = {
    "method": "scalefl", "model": "cnn", "data": "digits", "norm": "static", "seed": 7, "rounds": 4, "levels": LEVELS,
    "global": 0.8, "local": 0.5, "evaluate": {}, "bytes_down": 4_000_000, "bytes_up": 2_000_000, "waste": 0.0,
    "failures": 0, "seconds": 4.0, "notes": [],
}  # fmt: skip
PRIVACY = {"epsilon": 1.0, "delta": 0.001, "noise": 1.0, "clip": 0.3, "rate": 0.1}


def report(round: int, accuracy: float | None, loss: float | None = 0.5) -> dict[str, Any]:
    levels = {name: {"local": local, "clients": 1} for name, local in (("1", 0.6), ("2", 0.3))}
    columns = {"global": accuracy, "local": 0.5, "levels": levels, "exits": [0.7, accuracy]}
    clock = {"simulated_s": 90.0, "multiply_adds": 2_000_000_000, "train": {"loss": loss, "clients": 2}}
    fields = {"round": round, "bytes_down": 1_000_000, "bytes_up": 500_000, "failures": [], "seconds": 1.0, **clock}
    return fields | ({} if accuracy is None else {"evaluate": {"static": columns}})


def shapes(*levels: Any) -> list[LevelRecord]:
    return list(map(LevelRecord.load, levels))


def make_row_records(rows: dict[str, list[RunFolder]], setting: str = "") -> list[RowRecord]:
    return [RowRecord(row, setting, list(enumerate(runs))) for row, runs in rows.items()]


METRICS = [report(1, None, 2.0), report(2, 0.4), report(3, 0.8), report(4, None, None)]
OTHER = [report(1, None, 1.0), report(2, 0.6), report(3, 0.6), report(4, None)]
RUN = make_run_record(SUMMARY, METRICS)
ONE = [RUN]
TWO = [RUN, make_run_record(SUMMARY, OTHER)]


def draw_accuracy(rows: Any, *more: Any) -> Any:
    return figures.draw_accuracy(make_row_records(rows), *more)


def draw_costs(rows: Any) -> Any:
    return figures.draw_accuracy_over_cost(make_row_records(rows))


def get_lines_by_label(axes: Any) -> dict[str, Any]:
    """Return the lines that the legend names."""
    return {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}


def get_figure_text(figure: Any) -> str:
    """Return what stands above and below a figure."""
    return f"{figure.get_suptitle()} {figure.get_supxlabel()}".replace("\n", " ")


def test_accuracy_is_drawn_at_the_rounds_that_were_evaluated() -> None:
    """No value is carried into a round that measured none: rounds 1 and 4 have no marker, and the axis has them."""
    figure = figures.draw_run_accuracy(RUN)
    left, right = figure.axes
    lines = get_lines_by_label(left)
    assert set(lines) == {"global", "local", "local, level 1", "local, level 2"}
    for line in (*lines.values(), *get_lines_by_label(right).values()):
        assert list(line.get_xdata()) == [2, 3]
        assert line.get_marker() == "o"
    assert list(lines["global"].get_ydata()) == pytest.approx([40, 80])
    assert left.get_xlim()[0] == 0 and left.get_xlim()[1] > 4
    assert set(get_lines_by_label(right)) == {"exit 1 (2)", "exit 2 (4)"}
    assert list(get_lines_by_label(right)["exit 1 (2)"].get_ydata()) == pytest.approx([70, 70])
    assert get_figure_text(figure).startswith("scalefl on digits, seed 7")


@pytest.mark.parametrize(
    "rows", [{"a": 1}, {"a": 2, "b": 1}, {f"a long name of a row, number {i}": 1 for i in range(9)}]
)
@pytest.mark.parametrize("costs", [("multiply_adds", "simulated_s"), ()])
def test_the_note_on_clients_does_not_cover_the_legend(rows: dict[str, int], costs: tuple[str, ...]) -> None:
    """Also in a figure of one panel, where the note has several lines."""
    metrics = [report(1, 0.4), report(2, 0.5)]
    metrics[0]["evaluate"]["partial"] = {"clients": 11, "samples": 150}
    metrics = [{key: value for key, value in one.items() if key in costs or key not in COSTS} for one in metrics]
    run = make_run_record(SUMMARY, metrics)
    figure = draw_costs({name: [run] * seeds for name, seeds in rows.items()})
    figure.set_dpi(130)  # as files are written
    figure.canvas.draw()
    [note] = [text for text in figure.findobj(Text) if "11 clients" in text.get_text()]
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text is not note]
    box = note.get_window_extent()
    assert not [text.get_text() for text in texts if text.get_window_extent().overlaps(box)]
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width


def test_what_was_not_measured_is_no_point_of_a_line() -> None:
    gap = [report(1, 0.4), report(2, 0.5), report(3, 0.6)]
    gap[1]["evaluate"]["static"]["global"] = None
    assert list(
        get_lines_by_label(figures.draw_run_accuracy(make_run_record(SUMMARY, gap)).axes[0])["global"].get_xdata()
    ) == [
        1,
        3,
    ]


def test_panels_side_by_side_have_the_same_axes() -> None:
    """Also where what they show lies far apart; and what hardly moves is not drawn as if it moved much."""
    run = figures.draw_run_accuracy(RUN)
    rows = draw_accuracy({"a": ONE}, ["local", "global"])
    cost = draw_costs({"a": TWO})
    assert cost is not None
    for figure in (run, rows, cost):
        assert len({axes.get_ylim() for axes in figure.axes}) == 1
        low, high = figure.axes[0].get_ylim()
        assert all(low < y < high for axes in figure.axes for line in axes.lines for y in line.get_ydata())
    still = draw_accuracy({"a": [make_run_record(SUMMARY, [report(1, 0.5), report(2, 0.501)])]})
    low, high = still.axes[0].get_ylim()
    assert high - low >= 10


def test_legends_lie_off_the_data() -> None:
    cost = draw_costs({"a": TWO, "b": ONE})
    assert cost is not None
    for figure in (figures.draw_run_accuracy(RUN), draw_accuracy({"a": TWO, "b": ONE}), cost):
        figure.canvas.draw()
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        assert legends
        for legend in legends:
            box = legend.get_window_extent()
            assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
            assert figure.bbox.y0 <= box.y0 and box.x1 <= figure.bbox.x1, "and inside the figure"


def test_every_seed_is_drawn_and_it_is_said() -> None:
    """40 and 60 after round 2, 80 and 60 after round 3: thin lines, and thick ones through 50 and 70."""
    figure = draw_accuracy({"a": TWO}, ["global"])
    thin = [line for line in figure.axes[0].lines if str(line.get_label()).startswith("_")]
    assert [list(line.get_ydata()) for line in thin] == [pytest.approx([40, 80]), pytest.approx([60, 60])]
    mean = get_lines_by_label(figure.axes[0])["a"]
    assert list(mean.get_ydata()) == pytest.approx([50, 70])
    assert mean.get_linewidth() > 2 * thin[0].get_linewidth()
    assert "2 seeds (thin) and their mean" in get_figure_text(figure)
    assert "1 to 2 seeds" in get_figure_text(draw_accuracy({"a": TWO, "b": ONE}))
    assert "one seed" in get_figure_text(draw_accuracy({"a": ONE}))


def test_no_two_rows_look_the_same() -> None:
    rows = {f"row {i}": ONE for i in range(20)}
    for figure in (draw_accuracy(rows, ["global"]), figures.draw_loss(make_row_records(rows)), draw_costs(rows)):
        assert figure is not None
        looks = [(line.get_color(), line.get_linestyle()) for line in get_lines_by_label(figure.axes[0]).values()]
        assert len(set(looks)) == 20


def test_a_mean_stands_only_where_all_seeds_were_measured() -> None:
    lacking = [report(2, 0.6), report(3, 0.6)]
    lacking[1]["evaluate"]["static"]["global"] = None
    figure = draw_accuracy({"a": [RUN, make_run_record(SUMMARY, lacking)]}, ["global"])
    assert list(get_lines_by_label(figure.axes[0])["a"].get_xdata()) == [2]


def test_a_comparison_draws_accuracies_and_targets() -> None:
    figure = draw_accuracy({"a": ONE}, ["global"], {"global": [0.9], "local": [0.1]})
    (axes,) = figure.axes
    target, curve = axes.lines
    assert list(target.get_ydata()) == [90.0, 90.0]
    assert list(curve.get_ydata()) == pytest.approx([40, 80])
    assert len(draw_accuracy({"a": ONE}).axes) == 2, "local and global by default"


def test_losses_are_drawn_of_every_round_that_has_one() -> None:
    figure = figures.draw_loss(make_row_records({"a": TWO}))
    assert figure is not None
    mean = get_lines_by_label(figure.axes[0])["a"]
    assert list(mean.get_xdata()) == [1, 2, 3] and list(mean.get_ydata()) == pytest.approx([1.5, 0.5, 0.5])
    assert figures.draw_loss(make_row_records({"a": [make_run_record(SUMMARY, [report(1, None, None)])]})) is None, (
        "as with [secure]"
    )


def test_what_is_in_the_wrong_order_is_said_below() -> None:
    final = {"global": 0.4, "local": 0.5, "levels": {}, "exits": [0.7, 0.4], "test_levels": {"1": 0.5, "2": 0.45}}
    behind = {**SUMMARY, "evaluate": {"static": final}}
    words = get_figure_text(figures.draw_run_accuracy(make_run_record(behind, METRICS)))
    assert "After 4 rounds the deeper exits have not caught up: exit 1 70.0%, exit 2 40.0%" in words
    assert "level 1 50.0%, level 2 45.0%" in words
    both = get_figure_text(draw_accuracy({"a": [make_run_record(behind, METRICS)], "b": ONE}))
    assert "The deeper exits have not caught up in a." in both
    assert "caught up" not in get_figure_text(figures.draw_run_accuracy(RUN))


def cost_axes(rows: Any, cost: str) -> list[Any]:
    figure = draw_costs(rows)
    assert figure is not None
    shown = {axes.get_xlabel(): column for column, axes in enumerate(figure.axes[-3:])}
    column = next(column for label, column in shown.items() if label.startswith(cost))
    return figure.axes[column::3]


def test_bytes_are_added_up_over_all_rounds() -> None:
    for axes in cost_axes({"a": TWO}, "sent, both directions (MB)"):
        assert list(axes.lines[0].get_xdata()) == pytest.approx([3.0, 4.5])  # MB after rounds 2 and 3, 1.5 each


def test_cumulative_costs_have_a_suitable_unit() -> None:
    """90 s a round: 3 and 4.5 min after rounds 2 and 3; 4 and 6 thousand million multiply-adds."""
    _, axes = cost_axes({"a": TWO}, "simulated time (min)")
    assert list(axes.lines[0].get_xdata()) == pytest.approx([3.0, 4.5])
    assert list(axes.lines[0].get_ydata()) == pytest.approx([40, 80])
    axes, _ = cost_axes({"a": TWO}, "multiply-adds of clients (G)")
    assert list(axes.lines[0].get_xdata()) == pytest.approx([4.0, 6.0])


def test_a_run_has_local_and_global_in_one_panel() -> None:
    figure = draw_costs({"a": ONE})
    assert figure is not None
    assert len(figure.axes) == 3 and all(set(get_lines_by_label(axes)) == {"local", "global"} for axes in figure.axes)


def test_a_round_without_clients_takes_no_time() -> None:
    some = [METRICS[0], {**METRICS[1], "simulated_s": None}, *METRICS[2:]]
    curve = cost_curve(make_run_record(SUMMARY, some), "simulated_s")
    assert [(point.round, point.y) for point in curve] == [(1, 90.0), (2, 90.0), (3, 180.0), (4, 270.0)]


def test_what_no_run_reports_is_not_drawn() -> None:
    """Without profiles there are no seconds; beside a run with them, one without has no line."""

    def costs(*seeds: Any) -> list[str]:
        figure = draw_costs({str(i): [make_run_record(SUMMARY, one)] for i, one in enumerate(seeds)})
        assert figure is not None
        return [label for axes in figure.axes if (label := axes.get_xlabel())]

    timeless = [{**m, "simulated_s": None} for m in METRICS]
    assert costs(timeless) == ["sent, both directions (MB)", "multiply-adds of clients (G)"]
    (axes, _) = cost_axes({"a": TWO, "b": [make_run_record(SUMMARY, timeless)]}, "simulated")
    assert [len(line.get_xdata()) for line in get_lines_by_label(axes).values()] == [2, 0]
    old = [{k: v for k, v in m.items() if k not in ("simulated_s", "multiply_adds")} for m in METRICS]
    assert costs(old) == ["sent, both directions (MB)"]
    secret = [{**m, "bytes_down": None, "bytes_up": None} for m in old]
    assert draw_costs({"a": [make_run_record(SUMMARY, secret)]}) is None


def test_a_private_run_has_what_the_server_measures() -> None:
    """Nothing is said of its clients, and so nothing of them is drawn."""
    columns = {"avg": 0.4, "full": 0.5, "local": None, "global": None, "levels": {}}
    private = [{**report(1, 0.1), "evaluate": {"static": columns}}]
    (axes,) = figures.draw_run_accuracy(make_run_record({**SUMMARY, "privacy": PRIVACY}, private)).axes
    assert {name: list(line.get_ydata()) for name, line in get_lines_by_label(axes).items()} == {
        "avg": [pytest.approx(40)], "full": [pytest.approx(50)]
    }  # fmt: skip
    shape = figures.draw_levels({"a": [shapes({**LEVELS[1], "clients": 3})]}).axes[0]
    assert shape.get_title() == "level 2\nwithheld", "which is not that there are none"


def test_a_private_comparison_draws_server_measurements() -> None:
    drawn = figures.draw_comparison(
        make_row_records({"a": [make_run_record({**SUMMARY, "privacy": PRIVACY}, METRICS)]})
    )
    assert [axes.get_title("left") for axes in drawn["accuracy"].axes] == ["avg accuracy", "full accuracy"]


def test_shapes_have_the_levels_width_and_depth() -> None:
    axes = figures.draw_levels({"a": [shapes(*LEVELS)]}).axes[0]
    frame, level = axes.patches
    assert (frame.get_width(), frame.get_height()) == (1, 1)
    assert (level.get_width(), level.get_height()) == (0.5, 0.5)
    assert axes.get_title() == "level 1\n60.00%"
    seeds = figures.draw_levels({"a": [shapes(*LEVELS), shapes({**LEVELS[0], "local": 0.8}, LEVELS[1])]})
    assert [axes.get_title() for axes in seeds.axes] == ["level 1\n70.00 ± 14.14%", "level 2\nno clients"]
    assert "of 2 seeds" in get_figure_text(seeds)


def test_the_area_of_a_dot_follows_the_count() -> None:
    dots = figures.draw_class_counts([[4, 0], [1, 2]], "digits").axes[0].collections[0]
    assert [tuple(map(int, point)) for point in dots.get_offsets()] == [(0, 0), (1, 0), (1, 1)]
    sizes = dots.get_sizes()
    assert sizes[0] == pytest.approx(4 * sizes[1])
    assert sizes[2] == pytest.approx(2 * sizes[1])


def test_a_class_has_its_name_on_the_axis(tmp_path: Path) -> None:
    counts = [[4, 0, 1], [1, 2, 0]]
    named = figures.draw_class_counts(counts, "pets", ["cat", r"$\dog$", "a name of many more letters"]).axes[0]
    *short, long = [label.get_text() for label in named.get_yticklabels()]
    drawing.save_figure(named.get_figure(), tmp_path / "classes.png")  # no mathematics in a name
    assert short == ["cat", r"$\dog$"] and long.startswith("a name of") and len(long) <= 18
    assert [label.get_text() for label in figures.draw_class_counts(counts, "pets").axes[0].get_yticklabels()] == list(
        "012"
    )


@pytest.mark.parametrize("count", [2, 4, 6])
def test_levels_have_colours_of_their_own(count: int) -> None:
    levels = [{**LEVELS[0], "level": str(i + 1), "width": 0.5 + 0.05 * i} for i in range(count)]
    axes = figures.draw_levels({"a": [shapes(*levels)]}).axes
    assert len({one.patches[1].get_facecolor() for one in axes}) == count
    rows = figures.draw_levels({"a": [shapes(*levels)], "b": [shapes(*levels)]}).axes
    assert len({one.patches[1].get_facecolor() for one in rows}) == 2, "of several rows, each has one"


def test_a_runs_figures_are_files(tmp_path: Path) -> None:
    drawn = figures.draw_run(make_run_record(SUMMARY, METRICS, [[1, 2], [3, 0]]))
    files = drawing.save_figures(drawn, tmp_path / "plots")
    assert sorted(f.name for f in files) == [
        "accuracy.png", "cost.png", "levels.png", "loss.png", "partition.png",
    ]  # fmt: skip
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


def test_a_comparisons_figures_are_one_set_per_setting() -> None:
    groups = [*make_row_records({"a": TWO, "b": TWO}, "alpha = 1"), *make_row_records({"a": TWO}, "alpha = 9")]
    assert sorted(figures.draw_comparison(groups)) == [
        f"{kind}-alpha-{alpha}" for kind in ("accuracy", "cost", "levels", "loss") for alpha in (1, 9)
    ]


def test_without_matplotlib_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not drawing.is_available()
    with raises(MissingExtra, extra="plots"):
        figures.draw_run(RUN)


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    """No figure manager and no window: a run on a machine without a screen draws too."""
    import sys

    before = "matplotlib.pyplot" in sys.modules
    figures.draw_run_accuracy(RUN)
    assert ("matplotlib.pyplot" in sys.modules) == before


def _labels(figure: Any) -> str:
    labels = [text for one in figure.axes for text in (one.get_ylabel(), one.get_title(), one.get_title("left"))]
    return " ".join([*labels, get_figure_text(figure)])


def test_a_regression_draws_r2_which_may_be_negative() -> None:
    """A run that says so, and one that does not; axes show numbers below zero."""
    summary = {**SUMMARY, "score": "R2"}
    alone = _labels(figures.draw_run_accuracy(make_run_record(summary, METRICS)))
    assert "R2 (%)" in alone and "accuracy" not in alone
    rows = draw_accuracy({"a": [make_run_record(summary, METRICS)]})
    assert "local R2" in _labels(rows) and "accuracy" not in _labels(rows)
    assert "local R2" in _labels(figures.draw_levels({"a": [shapes(*LEVELS)]}, score="R2"))
    both = _labels(draw_accuracy({"a": [make_run_record(summary, METRICS)], "b": ONE}))
    assert "score (%)" in both, "runs of both kinds"
    axes = drawing.make_figure(4, 3).add_subplot()
    axes.plot([1, 2], [-30.0, 40.0])
    drawing.share_accuracy_axis([axes])
    assert axes.get_ylim()[0] < -30


def test_long_labels_leave_room_for_what_is_drawn(tmp_path: Path) -> None:
    """matplotlib gives its layout up with a warning where labels take all the room."""
    rows = {f"{i} " + "a label of many words, " * 4: TWO for i in range(3)}
    drawn = {
        "accuracy": draw_accuracy(rows), "cost": draw_costs(rows),
        "levels": figures.draw_levels({name: [shapes(*LEVELS)] for name in rows}),
        "one": figures.draw_levels({"x" * 88: [shapes(*LEVELS)]}),
        "loss": figures.draw_loss(make_row_records(rows)),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawing.save_figures({name: figure for name, figure in drawn.items() if figure is not None}, tmp_path)
