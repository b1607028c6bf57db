"""Figures of runs and comparisons for papers and slides: the plots of their pages. They need the extra `plots`.

Accuracy and training loss over rounds; accuracy over bytes, multiply-adds and simulated time; classes of the first
clients (ScaleFL, CVPR 2023, Figure 4 of its appendix); and the levels as rectangles with their accuracies (Figure 2).
`experiments/figures/` draws further figures of papers.
"""

import html
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleetfit.files import make_slug
from fleetfit.report.drawing import (
    COLORS,
    DARK,
    LIGHT,
    add_legend_below,
    add_notes,
    get_color,
    get_level_color,
    label_axes,
    make_figure,
    wrap_label,
)
from fleetfit.report.order import explain_order, explain_row_order
from fleetfit.report.page.accuracy import (
    hide_private_numbers,
    make_accuracy_section,
    make_run_accuracy_section,
    make_run_levels_section,
)
from fleetfit.report.page.blocks import PageSection, Paragraph, Plot, Plots
from fleetfit.report.page.participants import plot_partition
from fleetfit.report.page.plots import DASHES, SYMBOLS
from fleetfit.report.page.run_set import MAIN_KINDS, RunSet
from fleetfit.report.text import format_mean, get_score_name
from fleetfit.runs.comparison import ComparisonRecord
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import LevelRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL = 24  # characters of a row's label at full size
_MAX_COLUMNS = 3
_PANEL = (4.6, 3.4)  # inches
_STYLES = dict(zip(DASHES, ("-", "--", ":", "-.", (0, (8, 3)), (0, (8, 3, 2, 3))), strict=True))
_MARKERS = dict(zip(SYMBOLS, "osD^xPv*", strict=True))


def draw_run(run: RunFolder) -> "dict[str, Figure]":
    """Draw the figures of a run, and return them by file name.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    plots = _list_plots(make_run_accuracy_section(run))
    ends = _list_plots(make_run_levels_section(run))
    partition = plot_partition(run)
    seed = "" if run.summary.seed is None else f", seed {run.summary.seed}"
    title = f"{run.method} on {run.summary.data}{seed}"
    summaries = [hide_private_numbers(run)] if run.summary.levels else []
    figures = {
        "accuracy": _draw_plots([*_choose(plots, "accuracy"), *ends], title, explain_order(summaries)),
        "loss": _draw_plots(_choose(plots, "loss"), title),
        "cost": _draw_plots(_choose(plots, "accuracy-.*"), title),
        "levels": draw_levels(
            {run.method: [run.summary.levels]},
            score=get_score_name(run.summary),
            private=[run.method] * run.is_private,
        ),
        "partition": _draw_plots([partition] if partition is not None else [], title),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_comparison(record: ComparisonRecord) -> "dict[str, Figure]":
    """Draw accuracy, loss, costs and levels of all rows and seeds, for each setting, and return them by file name.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    runs = RunSet(record.rows, record.results).hide_private()
    figures: dict[str, Figure | None] = {}
    for number, setting in enumerate(runs.settings):
        section = make_accuracy_section(runs, setting, number)
        captions = [one.text for one in (section.blocks if section else ()) if isinstance(one, Paragraph)]
        plots = _list_plots(section)
        costs = _choose(plots, *(f"{kind}-.*" for kind in MAIN_KINDS))
        rows = runs.select(setting)
        summaries = {row.row: [hide_private_numbers(run) for run in row.records] for row in rows}
        levels = {row: [summary.levels for summary in of_row] for row, of_row in summaries.items()}
        private = {row.row for row in rows if row.is_private}
        suffix = f"-{make_slug(setting)}" if setting else ""
        figures |= {
            f"accuracy{suffix}": _draw_plots(
                _choose(plots, "accuracy-.*"), setting, [*captions, *explain_row_order(summaries)]
            ),
            f"loss{suffix}": _draw_plots(_choose(plots, "loss-.*"), setting, captions),
            f"cost{suffix}": _draw_plots(costs, setting, captions),
            f"levels{suffix}": draw_levels(levels, setting, runs.score, private) if levels else None,
        }
    return {name: figure for name, figure in figures.items() if figure is not None}


# ---- plots of a page -------------------------------------------------------------------------------------------------


def _list_plots(section: PageSection | None) -> list[Plot]:
    blocks = section.blocks if section is not None else ()
    return [plot for block in blocks if isinstance(block, Plots) for plot in block.plots]


def _choose(plots: Sequence[Plot], *patterns: str) -> list[Plot]:
    """Return the plots whose names match a pattern, pattern by pattern."""
    return [plot for pattern in patterns for plot in plots if re.fullmatch(pattern, plot.name)]


def _draw_plots(plots: Sequence[Plot], title: str, notes: Sequence[str] = ()) -> "Figure | None":
    """Draw plots of a page side by side; None without any.

    Args:
        plots: The plots.
        title: Above the figure.
        notes: Sentences below it, with the plots' captions.
    """
    if not plots:
        return None
    lines = math.ceil(len(plots) / _MAX_COLUMNS)
    columns = math.ceil(len(plots) / lines)
    figure = make_figure(1.0 + _PANEL[0] * columns, 1.2 + _PANEL[1] * lines)
    figure.suptitle(title, fontsize=10, color=DARK, x=0.01, ha="left")
    for number, plot in enumerate(plots, 1):
        axes = figure.add_subplot(lines, columns, number)
        for before, trace in zip([None, *plot.traces], plot.traces, strict=False):
            if trace.get("visible") != "legendonly":
                _draw_trace(axes, trace, before)
        x, y = plot.layout["xaxis"], plot.layout["yaxis"]
        label_axes(axes, x["title"]["text"], y["title"]["text"], wrap_label(plot.title, 60))
        for axis, set_limits, set_ticks in ((x, axes.set_xlim, axes.set_xticks), (y, axes.set_ylim, axes.set_yticks)):
            set_limits(*axis.get("range", [0] if "rangemode" in axis else []))
            if "tickvals" in axis:
                set_ticks(axis["tickvals"], [html.unescape(text) for text in axis["ticktext"]], parse_math=False)
    if len({tuple(axes.get_legend_handles_labels()[1]) for axes in figure.axes}) == 1:
        add_legend_below(figure.axes[0], 3 * columns, panels=True)
    else:
        for axes in figure.axes:
            add_legend_below(axes)
    captions = list(dict.fromkeys(plot.caption.partition(" Click a label")[0] for plot in plots if plot.caption))
    add_notes(figure, [*captions, *(note for note in notes if not any(note in caption for caption in captions))])
    return figure


def _draw_trace(axes: "Axes", trace: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    """Draw a trace of plotly.js: a line, dots, or a band above the trace before it."""
    xs, ys, marker = trace["x"], trace["y"], trace.get("marker", {})
    line, label = trace.get("line", {}), html.unescape(trace.get("name", "")) if trace.get("showlegend", True) else ""
    if "fill" in trace:
        assert before is not None
        color, opacity = _read_color(trace["fillcolor"])
        axes.fill_between(xs, before["y"], ys, color=color, alpha=opacity, linewidth=0)
    elif "lines" not in trace["mode"]:
        color, opacity = _read_color(marker["color"])
        axes.scatter(xs, ys, [size**2 for size in marker["size"]], color=color, alpha=opacity, linewidths=0)
    elif line["width"]:
        color, opacity = _read_color(line["color"])
        axes.plot(
            xs, ys, color=color, alpha=opacity, linewidth=line["width"], linestyle=_STYLES[line.get("dash", "solid")],
            marker=_MARKERS[marker["symbol"]] if "markers" in trace["mode"] else "", markersize=4, label=label,
        )  # fmt: skip


def _read_color(text: str) -> tuple[str, float]:
    """Return the color and the opacity of "@2/0.5"."""
    number, _, opacity = text.removeprefix("@").partition("/")
    return COLORS[int(number)], float(opacity or 1)


# ---- levels ----------------------------------------------------------------------------------------------------------


def draw_levels(
    rows: Mapping[str, Sequence[Sequence[LevelRecord]]],
    title: str = "",
    score: str = "accuracy",
    private: Collection[str] = (),
) -> "Figure":
    """Draw each level as a rectangle, width by depth of the full model, with its local accuracy above it.

    Several rows have a color each; of one row, each level has one.

    Args:
        rows: The levels of each seed by row. The first seed's are drawn.
        title: The label of the setting.
        score: The name of the accuracy.
        private: The rows that withhold it.
    """
    from matplotlib.patches import Rectangle

    most = max(len(seeds[0]) for seeds in rows.values())
    figure = make_figure(1.0 + 1.75 * most, 0.7 + 2.25 * len(rows))
    if title:
        figure.suptitle(title, fontsize=10, color=DARK, x=0.01, ha="left")
    for r, (name, seeds) in enumerate(rows.items()):
        for i, level in enumerate(seeds[0]):
            axes = figure.add_subplot(len(rows), most, r * most + i + 1)
            depth, width = level.depth / level.blocks, level.width
            axes.add_patch(Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=LIGHT, linewidth=1.2))
            color = get_level_color(i) if len(rows) == 1 else get_color(r)
            axes.add_patch(Rectangle((0, 1 - depth), width, depth, facecolor=color, alpha=0.85, linewidth=0))
            for exit in level.exits:
                y = 1 - exit / level.blocks
                axes.plot([0, width], [y, y], color="white" if exit < level.depth else DARK, linewidth=1.4)
            axes.text(width / 2, -0.05, f"{100 * width:.0f}% wide", ha="center", va="top", fontsize=8, color=DARK)
            axes.text(
                1.08, 1 - depth / 2, f"{100 * depth:.0f}% deep", rotation=270, va="center", fontsize=8, color=DARK
            )
            accuracy = format_mean([levels[i].local for levels in seeds if i < len(levels)])
            if accuracy == "-":
                missing = "withheld" if name in private else "not measured"
                accuracy = missing if level.clients else "no clients"
            else:
                accuracy += "%"
            axes.set_title(f"level {level.level}\n{accuracy}", fontsize=9, color=DARK)
            axes.set(xlim=(-0.02, 1.24), ylim=(-0.16, 1.02))
            axes.set_axis_off()
            if i == 0:
                size, letters = (10, _LABEL) if len(name) <= _LABEL else (7, 34)
                axes.text(
                    -0.08, 0.5, wrap_label(name, letters),
                    rotation=90, ha="right", va="center", fontsize=size, fontweight="bold",
                )  # fmt: skip
    count = max(len(seeds) for seeds in rows.values())
    over = f" (mean ± standard deviation of {count} seeds)" if count > 1 else ""
    add_notes(figure, [f"gray frame: full model; lines: exits; above: local {score}{over}"])
    return figure
