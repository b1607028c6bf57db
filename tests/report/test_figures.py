"""Figures: drawn from the records of runs, and refused with a sentence without matplotlib."""

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from support import raises
from support.runs import make_run_record

from fleetfit.errors import MissingExtra
from fleetfit.report import drawing, figures
from fleetfit.report.page.blocks import Page, Plots
from fleetfit.report.page.run_page import make_run_page
from fleetfit.report.page.run_set import collect_runs
from fleetfit.runs.comparison import ComparisonRecord, RowRecord
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
PRIVACY = {"epsilon": 1.0, "delta": 0.001, "noise_multiplier": 1.0, "clipping_norm": 0.3, "rate": 0.1}


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


def make_comparison(rows: list[RowRecord]) -> ComparisonRecord:
    return ComparisonRecord(Path("compared"), collect_runs(rows).results, rows, ())


def draw_rows(rows: dict[str, list[RunFolder]]) -> dict[str, Any]:
    return figures.draw_comparison(make_comparison(make_row_records(rows)))


def get_lines_by_label(axes: Any) -> dict[str, Any]:
    """Return the lines that the legend names."""
    return {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}


def get_figure_text(figure: Any) -> str:
    """Return what stands above and below a figure."""
    titles = [legend.get_title().get_text() for legend in figure.legends]
    return " ".join([figure.get_suptitle(), figure.get_supxlabel(), *titles]).replace("\n", " ")


def list_points(line: Any) -> list[tuple[float, float]]:
    return [*zip(line.get_xdata(), line.get_ydata(), strict=True)]


def list_page_lines(page: Page) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the points of the visible lines of each plot of a page, by the plot's title and the line's label."""
    blocks = [block for section in page.sections for block in section.blocks if isinstance(block, Plots)]
    return {
        plot.title: {
            trace["name"]: [*zip(trace["x"], trace["y"], strict=True)]
            for trace in plot.traces
            if "dash" in trace.get("line", {}) and trace.get("visible") != "legendonly"
        }
        for block in blocks
        for plot in block.plots
    }


# ---- the plots of the page -------------------------------------------------------------------------------------------


def test_figures_of_a_run_are_the_plots_of_its_page(tmp_path: Path) -> None:
    page, drawn = list_page_lines(make_run_page(RUN, tmp_path / "report.html")), figures.draw_run(RUN)
    titles = {name: [axes.get_title("left").replace("\n", " ") for axes in drawn[name].axes] for name in drawn}
    assert len(titles["accuracy"]) == 3 and len(titles["cost"]) == 3 and len(titles["loss"]) == 1
    for name in ("accuracy", "cost", "loss"):
        for title, axes in zip(titles[name], drawn[name].axes, strict=True):
            assert {label: list_points(line) for label, line in get_lines_by_label(axes).items()} == page[title]
    assert [axes.get_xlabel() for axes in drawn["cost"].axes] == [
        "sent, both directions (MB)", "multiply-adds of clients (G)", "simulated time (min)"
    ]  # fmt: skip
    accuracy = get_lines_by_label(drawn["accuracy"].axes[0])
    assert list_points(accuracy["global"]) == [(2, 40), (3, 80)], "only at the rounds that were evaluated"
    assert accuracy["global"].get_marker() == "s"
    assert get_figure_text(drawn["accuracy"]).startswith("scalefl on digits, seed 7")


def test_every_seed_is_drawn_with_their_mean_and_a_band() -> None:
    """40 and 60 after round 2, 80 and 60 after round 3: thin lines, a thick one at 50 and 70, the deviation."""
    figure = draw_rows({"a": TWO})["accuracy"]
    axes = next(one for one in figure.axes if one.get_title("left") == "Global")
    mean = get_lines_by_label(axes)["a"]
    thin = [line for line in axes.lines if line is not mean]
    assert [list(line.get_ydata()) for line in thin] == [[40, 80], [60, 60]]
    assert list(mean.get_ydata()) == [50, 70]
    assert mean.get_linewidth() > 2 * thin[0].get_linewidth()
    (band,) = axes.collections
    heights = sorted({round(float(y), 3) for x, y in band.get_paths()[0].vertices if x == 2})
    assert heights == [pytest.approx(50 - 14.142, abs=1e-3), pytest.approx(50 + 14.142, abs=1e-3)]
    assert "Thin lines: each seed" in get_figure_text(figure)


def test_what_is_in_the_wrong_order_is_said_below() -> None:
    final = {"global": 0.4, "local": 0.5, "levels": {}, "exits": [0.7, 0.4], "test_levels": {"1": 0.5, "2": 0.45}}
    behind = make_run_record({**SUMMARY, "evaluate": {"static": final}}, METRICS)
    words = get_figure_text(figures.draw_run(behind)["accuracy"])
    assert "exit 1 70.0%, exit 2 40.0%" in words and "level 1 50.0%, level 2 45.0%" in words
    assert "caught up in a." in get_figure_text(draw_rows({"a": [behind], "b": ONE})["accuracy"])
    assert "caught up" not in get_figure_text(figures.draw_run(RUN)["accuracy"])


def test_no_two_rows_look_the_same() -> None:
    drawn = draw_rows({f"row {i}": ONE for i in range(20)})
    for name in ("accuracy", "loss", "cost"):
        lines = get_lines_by_label(drawn[name].axes[0]).values()
        assert len({(line.get_color(), str(line._unscaled_dash_pattern), line.get_marker()) for line in lines}) == 20


@pytest.mark.parametrize(
    "rows", [{"a": 1}, {"a": 2, "b": 1}, {f"a long name of a row, number {i}": 1 for i in range(9)}]
)
def test_legends_and_notes_lie_off_the_data_and_off_each_other(rows: dict[str, int]) -> None:
    metrics = [report(1, 0.4), report(2, 0.5)]
    metrics[0]["evaluate"]["partial"] = {"clients": 11, "samples": 150}
    drawn = draw_rows({name: [make_run_record(SUMMARY, metrics)] * seeds for name, seeds in rows.items()})
    for figure in (drawn["accuracy"], drawn["cost"], drawn["loss"]):
        figure.set_dpi(130)  # as files are written
        figure.canvas.draw()
        [note] = [text for text in figure.findobj(Text) if "11 clients" in text.get_text()]
        box = note.get_window_extent()
        texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text is not note]
        assert not [text.get_text() for text in texts if text.get_window_extent().overlaps(box)]
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        for legend in legends:
            assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_a_private_run_has_what_the_server_measures() -> None:
    """Nothing is said of its clients, and so nothing of them is drawn."""
    columns = {"avg": 0.4, "full": 0.5, "local": None, "global": None, "levels": {}}
    private = [{**report(1, 0.1), "evaluate": {"static": columns}}]
    run = make_run_record({**SUMMARY, "privacy": PRIVACY}, private)
    drawn = figures.draw_run(run)
    (axes,) = drawn["accuracy"].axes
    assert sorted(list(line.get_ydata()) for line in get_lines_by_label(axes).values()) == [[40], [50]]
    assert {"loss", "cost"} & drawn.keys() == set()
    level = shapes({**LEVELS[1], "clients": 3})
    titles = [
        figures.draw_levels({"a": [level]}, private=rows).axes[0].get_title().split("\n")[1] for rows in (["a"], ["b"])
    ]
    assert titles == ["withheld", "not measured"], "which is not that there are none"
    compared = draw_rows({"a": [run]})
    assert {"loss", "cost"} & compared.keys() == set() and len(compared["accuracy"].axes) == 2


def test_dots_of_classes_follow_the_counts_and_have_names(tmp_path: Path) -> None:
    run = make_run_record(SUMMARY, METRICS, [[4, 0], [1, 2]])
    fleet = run.fleet.model_copy(
        update={"first": run.fleet.first.model_copy(update={"class_names": [r"$\dog$", "<b>"]})}
    )
    figure = figures.draw_run(run.replace_contents(fleet=fleet))["partition"]
    dots = figure.axes[0].collections[0]
    assert [tuple(map(int, point)) for point in dots.get_offsets()] == [(0, 0), (1, 0), (1, 1)]
    sizes = dots.get_sizes()
    assert sizes[0] == pytest.approx(4 * sizes[1], rel=0.02) and sizes[2] == pytest.approx(2 * sizes[1], rel=0.02)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [r"$\dog$", "<b>"]
    drawing.save_figure(figure, tmp_path / "classes.png")  # no mathematics in a name


# ---- levels ----------------------------------------------------------------------------------------------------------


def test_shapes_have_the_levels_width_and_depth() -> None:
    axes = figures.draw_levels({"a": [shapes(*LEVELS)]}).axes[0]
    frame, level = axes.patches
    assert (frame.get_width(), frame.get_height()) == (1, 1)
    assert (level.get_width(), level.get_height()) == (0.5, 0.5)
    assert axes.get_title() == "level 1\n60.00%"
    seeds = figures.draw_levels({"a": [shapes(*LEVELS), shapes({**LEVELS[0], "local": 0.8}, LEVELS[1])]})
    assert [axes.get_title() for axes in seeds.axes] == ["level 1\n70.00 ± 14.14%", "level 2\nno clients"]
    assert "of 2 seeds" in get_figure_text(seeds)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_levels_have_colors_of_their_own(count: int) -> None:
    levels = [{**LEVELS[0], "level": str(i + 1), "width": 0.5 + 0.05 * i} for i in range(count)]
    axes = figures.draw_levels({"a": [shapes(*levels)]}).axes
    assert len({one.patches[1].get_facecolor() for one in axes}) == count
    rows = figures.draw_levels({"a": [shapes(*levels)], "b": [shapes(*levels)]}).axes
    assert len({one.patches[1].get_facecolor() for one in rows}) == 2, "of several rows, each has one"


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_runs_figures_are_files(tmp_path: Path) -> None:
    drawn = figures.draw_run(make_run_record(SUMMARY, METRICS, [[1, 2], [3, 0]]))
    files = drawing.save_figures(drawn, tmp_path / "plots")
    assert sorted(f.name for f in files) == [
        "accuracy.png", "cost.png", "levels.png", "loss.png", "partition.png",
    ]  # fmt: skip
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


def test_a_comparisons_figures_are_one_set_per_setting() -> None:
    groups = [*make_row_records({"a": TWO, "b": TWO}, "alpha = 1"), *make_row_records({"a": TWO}, "alpha = 9")]
    assert sorted(figures.draw_comparison(make_comparison(groups))) == [
        f"{kind}-alpha-{alpha}" for kind in ("accuracy", "cost", "levels", "loss") for alpha in (1, 9)
    ]


def test_a_setting_whose_runs_are_gone_has_no_levels() -> None:
    groups = [*make_row_records({"a": ONE}, "x"), *make_row_records({"a": ONE}, "y")]
    record = ComparisonRecord(Path("compared"), collect_runs(groups).results, groups[:1], ())
    assert {name for name in figures.draw_comparison(record) if "levels" in name} == {"levels-x"}


def test_without_matplotlib_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not drawing.is_available()
    with raises(MissingExtra, extra="plots"):
        figures.draw_run(RUN)


def test_drawing_leaves_pyplot_alone() -> None:
    """No figure manager and no window: a run on a machine without a screen draws too."""
    before = "matplotlib.pyplot" in sys.modules
    figures.draw_run(RUN)
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_a_regression_draws_r2() -> None:
    run = make_run_record({**SUMMARY, "score": "R2"}, METRICS)
    for figure in (figures.draw_run(run)["accuracy"], draw_rows({"a": [run]})["accuracy"]):
        assert {axes.get_ylabel() for axes in figure.axes} == {"R2 (%)"}
    assert "local R2" in get_figure_text(figures.draw_levels({"a": [shapes(*LEVELS)]}, score="R2"))
    both = draw_rows({"a": [run], "b": ONE})["accuracy"]
    assert both.axes[0].get_ylabel() == "score (%)", "runs of both kinds"


def test_long_labels_leave_room_for_what_is_drawn(tmp_path: Path) -> None:
    """matplotlib gives its layout up with a warning where labels take all the room."""
    rows = {f"{i} " + "a label of many words, " * 4: TWO for i in range(3)}
    drawn = {**draw_rows(rows), "one": figures.draw_levels({"x" * 88: [shapes(*LEVELS)]})}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawing.save_figures(drawn, tmp_path)
