"""Figures of runs and comparisons for papers and slides. They need the extra `plots`.

Accuracy and training loss over rounds; accuracy over bytes, multiply-adds and simulated time; the levels as rectangles
with their accuracies (ScaleFL, CVPR 2023, Figure 2); classes of the first clients (Figure 4 of its appendix). The page
has the same curves, from `fleetfit.report.curves`; `experiments/figures/` draws further figures of papers.

Markers are measurements. Panels side by side have the same accuracy axis. Each seed is a thin line, and the mean is a
thick line. Notes below a figure list deeper exits and larger levels that are behind smaller ones.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fleetfit.files import make_slug
from fleetfit.report.columns import ON_THE_WAY
from fleetfit.report.curves import (
    COSTS,
    MOST_CLIENTS,
    Series,
    accuracy_curve,
    accuracy_curves,
    accuracy_over_cost,
    choose_unit,
    cost_curve,
    exit_curves,
    explain_partial,
    level_curves,
    loss_curves,
)
from fleetfit.report.drawing import (
    COLORS,
    DARK,
    LIGHT,
    add_legend_below,
    add_notes,
    draw_series,
    get_color,
    get_level_color,
    get_line_style,
    get_shade,
    label_axes,
    make_figure,
    share_accuracy_axis,
    wrap_label,
)
from fleetfit.report.order import explain_order, explain_row_order
from fleetfit.report.text import format_mean, get_score_name
from fleetfit.runs.comparison import RowRecord
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import LevelRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANEL = 3.5  # inches
_LABEL = 24  # characters of a row's label at full size
_CLASS = 18  # characters of a class's name
_WIDTHS = (3.4, 1.8)  # points, so that equal lines (as for one level) are both visible


def draw_run(run: RunFolder) -> "dict[str, Figure]":
    """Draw the figures of a run, and return them by file name.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    rows, title = [RowRecord(run.method, "", [(run.seed, run)])], _describe(run)
    figures = {
        "accuracy": draw_run_accuracy(run),
        "loss": draw_loss(rows, title),
        "cost": draw_accuracy_over_cost(rows, _list_main_kinds([run]), title),
        "levels": draw_levels({run.method: [run.summary.levels]}, score=get_score_name(run.summary)),
        "partition": (
            draw_class_counts(run.class_counts[:MOST_CLIENTS], run.summary.data, run.class_names)
            if run.class_counts
            else None
        ),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_comparison(
    rows: Sequence[RowRecord],
    columns: Sequence[str] = ("local", "global"),
    targets: Sequence[float] = (),
    target_on: str = "global",
) -> "dict[str, Figure]":
    """Draw accuracy, loss, costs and levels of all rows and seeds, for each setting.

    Args:
        rows: The runs.
        columns: Columns of the table. The accuracies among them are drawn.
        targets: Target accuracies from 0 to 1, drawn as lines.
        target_on: The accuracy of the targets.

    Returns:
        Figures by file name.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    names = [*columns, *([target_on] if targets else [])]
    kinds = list(dict.fromkeys(name for name in names if name in (*ON_THE_WAY, "avg", "full")))
    runs = [run for row in rows for run in row.records]
    kinds = kinds or ["local", "global"]
    if all(run.is_private for run in runs):
        kinds = [kind for kind in kinds if kind in ("avg", "full")] or _list_main_kinds(runs)
    figures: dict[str, Figure | None] = {}
    for setting in dict.fromkeys(row.setting for row in rows):
        group = [row for row in rows if row.setting == setting]
        main = [kind for kind in kinds if kind in ("local", "global")] or kinds
        levels = {row.row: [run.summary.levels for run in row.records] for row in group}
        suffix = f"-{make_slug(setting)}" if setting else ""
        figures |= {
            f"accuracy{suffix}": draw_accuracy(group, kinds, {target_on: targets}, setting),
            f"loss{suffix}": draw_loss(group, setting),
            f"cost{suffix}": draw_accuracy_over_cost(group, main, setting),
            f"levels{suffix}": draw_levels(levels, setting, _get_score(group)),
        }
    return {name: figure for name, figure in figures.items() if figure is not None}


# ---- titles ----------------------------------------------------------------------------------------------------------


def _describe(run: RunFolder) -> str:
    seed = "" if run.summary.seed is None else f", seed {run.summary.seed}"
    return f"{run.method} on {run.summary.data}{seed}"


def _set_title(figure: "Figure", title: str, rows: Sequence[RowRecord] = ()) -> None:
    """Set the title of a figure. For rows it explains the lines: "3 seeds (thin) and their mean"."""
    counts = sorted({len(row.runs) for row in rows})
    if counts and "seed" not in title:
        number = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        seeds = "one seed" if counts[-1] == 1 else f"{number} seeds (thin) and their mean"
        title = f"{title}: {seeds}" if title else seeds
    figure.suptitle(title, fontsize=10, color=DARK, x=0.01, ha="left")


def _get_score(rows: Sequence[RowRecord]) -> str:
    return get_score_name(*(run.summary for row in rows for run in row.records))


def _list_main_kinds(runs: Sequence[RunFolder]) -> list[str]:
    return ["avg", "full"] if all(run.is_private for run in runs) else ["local", "global"]


# ---- over rounds -----------------------------------------------------------------------------------------------------


def draw_run_accuracy(run: RunFolder) -> "Figure":
    """Draw the accuracies of a run and its levels over rounds, next to those of its exits."""
    exits = [series for series in exit_curves(run) if any(series.curves.values())]
    panels = 2 if len(exits) > 1 else 1
    figure = make_figure(1.2 + 4.6 * panels, 4.4)
    _set_title(figure, _describe(run))
    axes = figure.subplots(1, panels, sharex=True, sharey=True, squeeze=False)[0]
    levels = level_curves(run)
    levels = [series for series in levels if any(series.curves.values())] if len(levels) > 1 else []
    for i, series in enumerate(levels):
        label = Series(f"local, {series.label}", series.curves)
        draw_series(axes[0], label, get_level_color(i), 1.1)
    for kind, color, width in zip(_list_main_kinds([run]), (COLORS[1], COLORS[0]), _WIDTHS, strict=True):
        draw_series(axes[0], Series(kind, {run.seed: accuracy_curve(run, kind)}), color, width)
    description = "on the server's test set" if run.is_private else "mean over clients"
    label_axes(axes[0], "round", f"{get_score_name(run.summary)} (%)", f"{description}; markers: measured")
    if panels > 1:
        for i, series in enumerate(exits):
            draw_series(axes[1], series, get_shade(COLORS[2], i, len(exits)), 1.6)
        label_axes(axes[1], "round", "", "exits (after block) of the largest model")
    share_accuracy_axis(axes)
    axes[0].set_xlim(0, _count_rounds([run]) * 1.03)
    for panel in axes:
        add_legend_below(panel)
    add_notes(figure, [*explain_partial([run]), *explain_order([run.summary])])
    return figure


def draw_accuracy(
    rows: Sequence[RowRecord],
    kinds: Sequence[str] = ("local", "global"),
    targets: Mapping[str, Sequence[float]] | None = None,
    title: str = "",
) -> "Figure":
    """Draw accuracies of rows over rounds, a panel for each kind.

    Args:
        rows: The runs of one setting.
        kinds: The accuracies.
        targets: Accuracies to reach by kind, from 0 to 1; drawn as lines.
        title: The label of the setting.
    """
    figure = make_figure(1.0 + max(4.6, 4.2 * len(kinds)), 4.4)
    _set_title(figure, title, rows)
    score = _get_score(rows)
    panels = figure.subplots(1, len(kinds), sharex=True, sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for target in (targets or {}).get(kind, ()):
            axes.axhline(100 * target, color=DARK, linewidth=0.9, linestyle="--")
        for i, series in enumerate(accuracy_curves(rows, kind)):
            draw_series(axes, series, get_color(i), style=get_line_style(i))
        label_axes(axes, "round", f"{score} (%)" if axes is panels[0] else "", f"{kind.replace('_', ' ')} {score}")
    share_accuracy_axis(panels)
    panels[0].set_xlim(0, _count_rounds([run for row in rows for run in row.records]) * 1.03)
    add_legend_below(panels[0], 3 * len(kinds))
    order = explain_row_order({row.row: [run.summary for run in row.records] for row in rows})
    add_notes(figure, [*explain_partial([run for row in rows for run in row.records]), *order])
    return figure


def draw_loss(rows: Sequence[RowRecord], title: str = "") -> "Figure | None":
    """Draw the training loss of rows over rounds; None if no round reports one.

    Args:
        rows: The runs of one setting.
        title: The label of the setting.
    """
    lines = loss_curves(rows)
    if not any(curve for series in lines for curve in series.curves.values()):
        return None
    figure = make_figure(6.4, 4.2)
    axes = figure.add_subplot()
    _set_title(figure, title, rows)
    for i, series in enumerate(lines):
        draw_series(axes, series, get_color(i), style=get_line_style(i))
    warning = "; methods add up different losses" if len(rows) > 1 else ""
    label_axes(axes, "round", "training loss", f"mean over the clients of each round{warning}")
    axes.set_xlim(0, _count_rounds([run for row in rows for run in row.records]) * 1.03)
    if len(rows) > 1:
        add_legend_below(axes, 4)
    return figure


def _count_rounds(runs: Sequence[RunFolder]) -> int:
    return max((report.round for run in runs for report in run.rounds), default=1)


# ---- over costs ------------------------------------------------------------------------------------------------------


def draw_accuracy_over_cost(
    rows: Sequence[RowRecord], kinds: Sequence[str] = ("local", "global"), title: str = ""
) -> "Figure | None":
    """Draw accuracy over bytes, multiply-adds and simulated time, if a run reports them.

    Args:
        rows: The runs of one setting. The kinds of a single run share a panel.
        kinds: The accuracies.
        title: The label of the setting.

    Returns:
        A figure with a column of panels for each cost and a row for each kind; None if no run reports a cost.
    """
    runs = [run for row in rows for run in row.records]
    costs = [cost for cost in COSTS if any(cost_curve(run, cost) for run in runs)]
    if not costs:
        return None
    lines = [kinds] if len(runs) == 1 else [[kind] for kind in kinds]
    figure = make_figure(1.0 + max(4.6, _PANEL * len(costs)), 1.3 + 2.6 * len(lines))
    _set_title(figure, title, rows)
    panels = figure.subplots(len(lines), len(costs), sharey=True, sharex="col", squeeze=False)
    for column, cost in enumerate(costs):
        unit = choose_unit(rows, cost)
        largest = max(curve[-1].y for run in runs if (curve := cost_curve(run, cost)))
        for axes, line in zip(panels[:, column], lines, strict=True):
            for j, kind in enumerate(line):
                for i, series in enumerate(accuracy_over_cost(rows, kind, cost)):
                    if len(runs) == 1:
                        draw_series(axes, Series(kind, series.curves), get_color(1 - j), _WIDTHS[j % 2])
                    else:
                        draw_series(axes, series, get_color(i), style=get_line_style(i))
            x = f"{COSTS[cost].label} ({unit.name})" if line is lines[-1] else ""
            kind = "" if len(runs) == 1 else line[0].replace("_", " ")
            label_axes(axes, x, "" if column else f"{kind} {_get_score(rows)} (%)".strip(), "")
            axes.set_xlim(0, 1.03 * largest / unit.size or 1)
    share_accuracy_axis(panels.flat)
    add_legend_below(panels[-1][0], 3 * len(costs), panels=True)
    add_notes(figure, explain_partial(runs))
    return figure


# ---- levels and clients ----------------------------------------------------------------------------------------------


def draw_levels(
    rows: Mapping[str, Sequence[Sequence[LevelRecord]]], title: str = "", score: str = "accuracy"
) -> "Figure":
    """Draw each level as a rectangle, width by depth of the full model, with its local accuracy above it.

    Several rows have a colour each; of one row, each level has one.

    Args:
        rows: The levels of each seed by row. The first seed's are drawn.
        title: The label of the setting.
        score: The name of the accuracy.
    """
    from matplotlib.patches import Rectangle

    most = max(len(seeds[0]) for seeds in rows.values())
    figure = make_figure(1.0 + 1.75 * most, 0.7 + 2.25 * len(rows))
    if title:
        _set_title(figure, title)
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
            if accuracy == "-":  # withheld in runs with `[privacy]`
                accuracy = "withheld" if level.clients else "no clients"
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
    add_notes(figure, [f"grey frame: full model; lines: exits; above: local {score}{over}"])
    return figure


def draw_class_counts(class_counts: Sequence[Sequence[int]], data: str, class_names: Sequence[str] = ()) -> "Figure":
    """Draw a dot for each client and class, with an area proportional to the number of training samples.

    Args:
        class_counts: Training samples [clients, classes].
        data: The data set's name.
        class_names: Names of the classes, by default their numbers.
    """
    clients, classes = len(class_counts), len(class_counts[0])
    figure = make_figure(max(4.5, 1.4 + 0.32 * clients), max(3.0, min(9.0, 1.4 + 0.3 * classes)))
    axes = figure.add_subplot()
    largest = max(1, *(max(counts) for counts in class_counts))
    gap = min(0.32, 7.5 / classes) * 72  # points between two classes
    scale = (0.95 * gap) ** 2 / largest
    dots = [(k, c, n * scale) for k, counts in enumerate(class_counts) for c, n in enumerate(counts) if n]
    if dots:
        axes.scatter(*zip(*dots, strict=True), color=COLORS[0], alpha=0.75, linewidths=0)
    title = f"training samples of the first {clients} clients, {data} (largest dot: {largest})"
    label_axes(axes, "client", "class", wrap_label(title, int(12 * figure.get_figwidth())))
    axes.set(xlim=(-0.8, clients - 0.2), ylim=(-0.8, classes - 0.2))
    axes.set_xticks(range(0, clients, 1 if clients <= 20 else 5))
    ticks = range(0, classes, max(1, classes // 20))
    names = [wrap_label(class_names[c], _CLASS, 1) if class_names else str(c) for c in ticks]
    axes.set_yticks(ticks, names, parse_math=False)
    return figure
