"""Plots of a run folder and of a comparison; they need the extra `plots`.

Accuracy over rounds, and after so many megabytes, simulated seconds or multiply-adds; the levels' shapes with their
accuracies, as in ScaleFL's Figure 2; class counts of the first 20 clients, as in Figure 4 of its appendix; how often
each exit was the teacher, where a method counts that, as in ReeFL's Figure 7.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfit.records import RunFolder
from fleetfit.report.columns import ON_THE_WAY
from fleetfit.report.drawing import (
    COLORS,
    DARK,
    LIGHT,
    Metrics,
    Summary,
    color,
    empty,
    evaluated,
    figure_with_axes,
    finish,
    in_percent,
    plots_in,
    saved,
)
from fleetfit.report.recorded import class_counts_in
from fleetfit.report.text import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MOST_CLIENTS = 50  # whose samples are drawn: a fleet's file has all of them


def plots_of_run(folder: Path, summary: Summary, metrics: Metrics) -> list[Path]:
    """Draw every plot of a run into `folder/plots`.

    Args:
        folder: The run folder; its `fleet.json` has the class counts.
        summary: Its final numbers.
        metrics: The reports of its rounds.

    Returns:
        The files.

    Raises:
        MissingExtra: matplotlib is not installed.
        RunError: A file is damaged, or the pictures cannot be written.
    """
    figures = {
        "accuracy": accuracy_of_run(summary, metrics),
        **by_cost({summary["method"]: (summary, metrics)}),
        "levels": shapes({summary["method"]: summary}),
    }
    counts = class_counts_in(RunFolder(folder))
    if counts:
        figures["partition"] = partition_dots(counts[:_MOST_CLIENTS], summary["data"])
    taught = teachers(summary, metrics)
    if taught is not None:
        figures["teachers"] = taught
    return saved(figures, plots_in(folder))


def plots_of_comparison(
    folder: Path,
    results: Mapping[tuple[str, str], Sequence[Summary]],
    metrics: Mapping[tuple[str, str], Metrics],
    columns: Sequence[str] = ("local", "global"),
    targets: Sequence[float] = (),
    target_on: str = "global",
) -> list[Path]:
    """Draw accuracies and shapes of all rows into `folder/plots`, for the first seed of each setting.

    Args:
        folder: The comparison's.
        results: Summaries of all seeds by (row, setting).
        metrics: Reports of the rounds of the first seed.
        columns: What the table shows; the accuracies among them are drawn where they were measured on the way.
        targets: Accuracies that rounds are counted to, drawn as lines.
        target_on: Which accuracy those are about.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figures = {}
    wanted = [name for name in (*columns, *([target_on] if targets else [])) if name in (*ON_THE_WAY, "avg", "full")]
    kinds = list(dict.fromkeys(wanted)) or ["local", "global"]
    for setting in dict.fromkeys(setting for _, setting in results):
        rows = {row: (found[0], metrics[(row, s)]) for (row, s), found in results.items() if s == setting}
        ending = re.sub(r"[^\w.]+", "-", f"-{setting}").rstrip("-").lower() if setting else ""
        figures[f"accuracy{ending}"] = accuracy_of_rows(rows, kinds, {target_on: targets})
        figures |= {f"{name}{ending}": figure for name, figure in by_cost(rows).items()}
        figures[f"levels{ending}"] = shapes({row: summary for row, (summary, _) in rows.items()})
    return saved(figures, plots_in(folder))


# ---- over rounds -----------------------------------------------------------------------------------------------------


def accuracy_of_run(summary: Summary, metrics: Metrics) -> "Figure":
    """Draw local and global accuracy over rounds, and the local accuracy of each level."""
    figure, axes = figure_with_axes(6.4, 4.0)
    measured = evaluated(metrics, summary["norm"])
    rounds = [done for done, _ in measured]
    names = list(measured[-1][1]["levels"]) if measured and len(measured[-1][1]["levels"]) > 1 else []
    for i, name in enumerate(names):
        shade = str(0.82 - 0.42 * i / max(1, len(names) - 1))
        values = [in_percent(columns["levels"].get(name, {}).get("local")) for _, columns in measured]
        axes.plot(rounds, values, color=shade, linewidth=1.1, label=f"local, level {name}")
    for kind, shade in (("local", COLORS[1]), ("global", COLORS[0])):
        values = [in_percent(columns[kind]) for _, columns in measured]
        axes.plot(rounds, values, color=shade, linewidth=2, marker="o", markersize=4, label=kind)
    finish(axes, "round", "accuracy (%)", f"{summary['method']} on {summary['data']}")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def accuracy_of_rows(
    rows: Mapping[str, tuple[Summary, Metrics]],
    kinds: Sequence[str] = ("local", "global"),
    targets: Mapping[str, Sequence[float]] | None = None,
) -> "Figure":
    """Draw accuracies over rounds of several methods, one kind beside the other, and the targets as lines.

    Args:
        rows: Summary and reports of each row.
        kinds: Accuracies, by their columns' names.
        targets: Accuracies to reach by kind.
    """
    figure = empty(max(5.4, 4.6 * len(kinds)), 3.8)
    for place, kind in enumerate(kinds, 1):
        axes = figure.add_subplot(1, len(kinds), place)
        for target in (targets or {}).get(kind, ()):
            axes.axhline(100 * target, color=DARK, linewidth=0.9, linestyle="--")
        for i, (name, (summary, metrics)) in enumerate(rows.items()):
            measured = evaluated(metrics, summary["norm"])
            values = [in_percent(columns.get(kind)) for _, columns in measured]
            mark = "o" if len(measured) <= 40 else ""
            axes.plot([done for done, _ in measured], values, color=color(i), marker=mark, markersize=3.5, label=name)
        finish(axes, "round", "accuracy (%)", f"{kind.replace('_', ' ')} accuracy")
    figure.axes[-1].legend(frameon=False, fontsize=9, loc="lower right")
    return figure


# ---- over what the rounds until then added up to ---------------------------------------------------------------------

_FILES = {"bytes": "bytes", "seconds": "seconds", "multiply_adds": "multiply-adds"}
_LABELS = {"bytes": "sent, both directions", "seconds": "simulated time", "multiply_adds": "multiply-adds of clients"}
_UNITS: Mapping[str, tuple[tuple[float, str], ...]] = {
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")),
    "seconds": ((3600, "h"), (60, "min"), (1, "s")),
    "multiply_adds": ((1e15, "$10^{15}$"), (1e12, "$10^{12}$"), (1e9, "$10^{9}$")),
}  # largest first


def by_cost(rows: Mapping[str, tuple[Summary, Metrics]]) -> dict[str, "Figure"]:
    """Draw accuracy against each cost that at least one of the runs reports, by the name of its file."""
    return {
        file: accuracy_against(rows, cost)
        for cost, file in _FILES.items()
        if any(spent(metrics, cost) for _, metrics in rows.values())
    }


def accuracy_against(rows: Mapping[str, tuple[Summary, Metrics]], cost: str) -> "Figure":
    """Draw local and global accuracy of one run or several against a cost, side by side.

    Args:
        rows: Summary and metrics by name.
        cost: "bytes" (down and up), "seconds" (simulated) or "multiply_adds".
    """
    figure = empty(9.2, 3.8)
    until = {name: spent(metrics, cost) for name, (_, metrics) in rows.items()}
    most = max((total for totals in until.values() for total in totals.values()), default=0.0)
    scale, unit = next(((s, u) for s, u in _UNITS[cost] if most >= 2 * s), _UNITS[cost][-1])
    for place, kind in enumerate(("local", "global"), 1):
        axes = figure.add_subplot(1, 2, place)
        for i, (name, (summary, metrics)) in enumerate(rows.items()):
            measured = [pair for pair in evaluated(metrics, summary["norm"]) if until[name]]
            at = [until[name][done] / scale for done, _ in measured]
            values = [in_percent(columns[kind]) for _, columns in measured]
            mark = "o" if len(measured) <= 40 else ""
            axes.plot(at, values, color=color(i), marker=mark, markersize=3.5, label=name)
        axes.set_xlim(left=0)
        finish(axes, f"{_LABELS[cost]} ({unit})", "accuracy (%)", f"{kind} accuracy")
    if len(rows) > 1:
        figure.axes[1].legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def spent(metrics: Metrics, cost: str) -> dict[int, float]:
    """Return by round what all rounds until then cost; nothing where no round says it.

    A round without clients has no seconds, and adds none.
    """
    total, found, said = 0.0, {}, False
    for report in metrics:
        added = {
            "bytes": None if report["bytes_down"] is None else report["bytes_down"] + report["bytes_up"],
            "seconds": report.get("simulated_s"),
            "multiply_adds": report.get("multiply_adds"),
        }[cost]
        total, said = total + (added or 0), said or added is not None
        found[report["round"]] = total
    return found if said else {}


# ---- levels and clients ----------------------------------------------------------------------------------------------


def shapes(rows: Mapping[str, Summary]) -> "Figure":
    """Draw each level as a rectangle, width by depth of the full model, with its local accuracy above."""
    from matplotlib.patches import Rectangle

    most = max(len(summary["levels"]) for summary in rows.values())
    figure = empty(1.0 + 1.75 * most, 0.5 + 2.25 * len(rows))
    for r, (name, summary) in enumerate(rows.items()):
        for i, level in enumerate(summary["levels"]):
            axes = figure.add_subplot(len(rows), most, r * most + i + 1)
            deep, wide = level["depth"] / level["blocks"], level["width"]
            axes.add_patch(Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=LIGHT, linewidth=1.2))
            axes.add_patch(Rectangle((0, 1 - deep), wide, deep, facecolor=color(r), alpha=0.85, linewidth=0))
            for exit in level["exits"]:
                at = 1 - exit / level["blocks"]
                axes.plot([0, wide], [at, at], color="white" if exit < level["depth"] else DARK, linewidth=1.4)
            axes.text(wide / 2, -0.05, f"{100 * wide:.0f}% wide", ha="center", va="top", fontsize=8, color=DARK)
            axes.text(1.04, 1 - deep / 2, f"{100 * deep:.0f}% deep", rotation=270, va="center", fontsize=8, color=DARK)
            accuracy = "no clients" if level["local"] is None else f"{percent(level['local'])}%"
            axes.set_title(f"level {level['level']}\n{accuracy}", fontsize=9, color=DARK)
            axes.set(xlim=(-0.02, 1.16), ylim=(-0.16, 1.02))
            axes.set_axis_off()
            if i == 0:
                axes.text(-0.08, 0.5, name, rotation=90, ha="right", va="center", fontsize=10, fontweight="bold")
    figure.supxlabel("grey frame: full model; lines: exits; percentages above: local accuracy", fontsize=8, color=DARK)
    return figure


def partition_dots(class_counts: Sequence[Sequence[int]], data: str) -> "Figure":
    """Draw a dot for each client and class, its area in proportion to the client's training samples of that class.

    Args:
        class_counts: Training samples [clients, classes].
        data: The data set's name.
    """
    clients, classes = len(class_counts), len(class_counts[0])
    figure, axes = figure_with_axes(max(4.5, 1.4 + 0.32 * clients), max(3.0, min(9.0, 1.4 + 0.3 * classes)))
    most = max(1, *(max(counts) for counts in class_counts))
    step = min(0.32, 7.5 / classes) * 72  # points between two classes
    scale = (0.95 * step) ** 2 / most
    points = [(k, c, n * scale) for k, counts in enumerate(class_counts) for c, n in enumerate(counts) if n]
    axes.scatter(*zip(*points, strict=True), color=COLORS[0], alpha=0.75, linewidths=0) if points else None
    finish(axes, "client", "class", f"training samples of the first {clients} clients, {data} (largest dot: {most})")
    axes.set(xlim=(-0.8, clients - 0.2), ylim=(-0.8, classes - 0.2))
    axes.set_xticks(range(0, clients, 1 if clients <= 20 else 5))
    axes.set_yticks(range(0, classes, max(1, classes // 20)))
    return figure


# ---- teachers --------------------------------------------------------------------------------------------------------


def teachers(summary: Summary, metrics: Metrics) -> "Figure | None":
    """Draw how often each exit was the teacher, beside what the exits know (ReeFL, ICML 2024, Figure 7).

    Left: accuracy of each exit in the last evaluation. Middle: in how many training steps each exit taught the others,
    at the clients of the largest level, in the last round that had some, as the paper shows it. Right: all rounds and
    levels together, a shade for each level.

    Args:
        summary: The run's final numbers.
        metrics: The reports of its rounds; `counts.teachers` has level -> exit -> steps.

    Returns:
        The figure; None where the run's method counts no teachers.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    counts = _taught_in(metrics)
    if not counts:
        return None
    levels = sorted({level for found in counts.values() for level in found}, key=int)
    last = max(round for round, found in counts.items() if levels[-1] in found)
    total: dict[str, Counter[str]] = {level: Counter() for level in levels}
    for found in counts.values():
        for level, taught in found.items():
            total[level].update(taught)
    exits = sorted({int(exit) for taught in total.values() for exit in taught})
    figure = empty(10.5, 3.4)
    left, middle, right = figure.subplots(1, 3)
    _accuracy_of_exits(left, summary, metrics)
    finish(middle, "exit after block", "steps as teacher", f"level {levels[-1]} in round {last}")
    _steps(middle, exits, {levels[-1]: counts[last][levels[-1]]}, levels)
    finish(right, "exit after block", "steps as teacher", f"all levels in {len(counts)} rounds")
    _steps(right, exits, total, levels)
    if len(levels) > 1:
        right.legend(title="level", frameon=False, fontsize=8, title_fontsize=8)
    return figure


def _taught_in(metrics: Metrics) -> dict[int, dict[str, dict[str, int]]]:
    """Return steps by round, level and exit; what clients count that is no exit is left out."""
    found = {}
    for report in metrics:
        levels = report.get("counts", {}).get("teachers", {})
        taught = {level: {e: n for e, n in steps.items() if e.isdecimal()} for level, steps in levels.items()}
        kept = {level: steps for level, steps in taught.items() if steps}
        if kept:
            found[report["round"]] = kept
    return found


def _accuracy_of_exits(axes: "Axes", summary: Summary, metrics: Metrics) -> None:
    """Draw the accuracy of each exit of the largest model, as far as it was evaluated."""
    measured = evaluated(metrics, summary["norm"])
    values = [100 * accuracy for accuracy in measured[-1][1].get("exits", [])] if measured else []
    places = range(len(values))
    axes.bar(places, values, color=COLORS[1], width=0.7)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f"{value:.1f}", (place, value), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    after = f"after round {measured[-1][0]}" if measured else "never evaluated"
    finish(axes, "exit after block", "accuracy (%)", f"{summary['method']} on {summary['data']}, {after}")
    axes.set_xticks(places, [str(exit) for exit in summary["levels"][-1]["exits"][: len(values)]])
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.1)


def _steps(axes: "Axes", exits: Sequence[int], taught: Mapping[str, Mapping[str, int]], levels: Sequence[str]) -> None:
    """Draw steps by exit, one level on top of the other; the largest level is the darkest."""
    from matplotlib.colors import to_rgb

    places, below = range(len(exits)), [0] * len(exits)
    for level, counts in taught.items():
        steps = [counts.get(str(exit), 0) for exit in exits]
        pale = 0.8 * (1 - (levels.index(level) + 1) / len(levels))
        shade = [pale + (1 - pale) * part for part in to_rgb(COLORS[0])]
        axes.bar(places, steps, bottom=below, color=shade, width=0.7, label=level)
        below = [a + b for a, b in zip(below, steps, strict=True)]
    axes.set_xticks(places, [str(exit) for exit in exits])
    axes.grid(visible=False, axis="x")
