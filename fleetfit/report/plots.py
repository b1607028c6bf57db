"""Plots of a run folder and of a comparison; they need the extra `plots`.

Accuracy over rounds and against bytes sent; the levels' shapes with their accuracies, as in ScaleFL's Figure 2; class
counts of the first 20 clients, as in Figure 4 of its appendix.
"""

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetfit.errors import MissingExtra
from fleetfit.report.columns import ON_THE_WAY
from fleetfit.report.text import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#1f5fa8", "#d1661b", "#2f8a4b", "#8a4fa3", "#b3272d", "#6b5b4b", "#17808a", "#a8891f")
_LIGHT, _DARK = "#d9dee4", "#3c4650"
Metrics = Sequence[Mapping[str, Any]]
Summary = Mapping[str, Any]


def available() -> bool:
    """Tell whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


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
    """
    figures = {
        "accuracy": accuracy_of_run(summary, metrics),
        "bytes": accuracy_by_bytes({summary["method"]: (summary, metrics)}),
        "levels": shapes({summary["method"]: summary}),
    }
    if (folder / "fleet.json").is_file():
        first = json.loads((folder / "fleet.json").read_text(encoding="utf-8"))["first"]
        if first["class_counts"]:
            figures["partition"] = partition_dots(first["class_counts"], summary["data"])
    return _saved(figures, folder / "plots")


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
        figures[f"bytes{ending}"] = accuracy_by_bytes(rows)
        figures[f"levels{ending}"] = shapes({row: summary for row, (summary, _) in rows.items()})
    return _saved(figures, folder / "plots")


# ---- the plots -----------------------------------------------------------------------------------------------------


def accuracy_of_run(summary: Summary, metrics: Metrics) -> "Figure":
    """Draw local and global accuracy over rounds, and the local accuracy of each level."""
    figure, axes = _figure(6.4, 4.0)
    evaluated = _evaluated(metrics, summary["norm"])
    rounds = [done for done, _ in evaluated]
    names = list(evaluated[-1][1]["levels"]) if evaluated and len(evaluated[-1][1]["levels"]) > 1 else []
    for i, name in enumerate(names):
        shade = str(0.82 - 0.42 * i / max(1, len(names) - 1))
        values = [_percent(columns["levels"].get(name, {}).get("local")) for _, columns in evaluated]
        axes.plot(rounds, values, color=shade, linewidth=1.1, label=f"local, level {name}")
    for kind, color in (("local", _COLORS[1]), ("global", _COLORS[0])):
        values = [_percent(columns[kind]) for _, columns in evaluated]
        axes.plot(rounds, values, color=color, linewidth=2, marker="o", markersize=4, label=kind)
    _finish(axes, "round", "accuracy (%)", f"{summary['method']} on {summary['data']}")
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
    figure = _empty(max(5.4, 4.6 * len(kinds)), 3.8)
    for place, kind in enumerate(kinds, 1):
        axes = figure.add_subplot(1, len(kinds), place)
        for target in (targets or {}).get(kind, ()):
            axes.axhline(100 * target, color=_DARK, linewidth=0.9, linestyle="--")
        for i, (name, (summary, metrics)) in enumerate(rows.items()):
            evaluated = _evaluated(metrics, summary["norm"])
            values = [_percent(columns.get(kind)) for _, columns in evaluated]
            mark = "o" if len(evaluated) <= 40 else ""
            axes.plot([done for done, _ in evaluated], values, color=_color(i), marker=mark, markersize=3.5, label=name)
        _finish(axes, "round", "accuracy (%)", f"{kind.replace('_', ' ')} accuracy")
    figure.axes[-1].legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def accuracy_by_bytes(rows: Mapping[str, tuple[Summary, Metrics]]) -> "Figure":
    """Draw global accuracy against the bytes sent until then, down and up together."""
    figure, axes = _figure(6.4, 4.0)
    for i, (name, (summary, metrics)) in enumerate(rows.items()):
        sent, total = {}, 0
        for report in metrics:
            total += report["bytes_down"] + report["bytes_up"]
            sent[report["round"]] = total / 1e6
        evaluated = _evaluated(metrics, summary["norm"])
        values = [_percent(columns["global"]) for _, columns in evaluated]
        axes.plot([sent[done] for done, _ in evaluated], values, color=_color(i), marker="o", markersize=4, label=name)
    _finish(axes, "sent, both directions (MB)", "global accuracy (%)", "accuracy against bytes")
    if len(rows) > 1:
        axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def shapes(rows: Mapping[str, Summary]) -> "Figure":
    """Draw each level as a rectangle, width by depth of the full model, with its local accuracy above."""
    from matplotlib.patches import Rectangle

    most = max(len(summary["levels"]) for summary in rows.values())
    figure = _empty(1.0 + 1.75 * most, 0.5 + 2.25 * len(rows))
    for r, (name, summary) in enumerate(rows.items()):
        for i, level in enumerate(summary["levels"]):
            axes = figure.add_subplot(len(rows), most, r * most + i + 1)
            deep, wide = level["depth"] / level["blocks"], level["width"]
            axes.add_patch(Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=_LIGHT, linewidth=1.2))
            axes.add_patch(Rectangle((0, 1 - deep), wide, deep, facecolor=_color(r), alpha=0.85, linewidth=0))
            for exit in level["exits"]:
                at = 1 - exit / level["blocks"]
                axes.plot([0, wide], [at, at], color="white" if exit < level["depth"] else _DARK, linewidth=1.4)
            axes.text(wide / 2, -0.05, f"{100 * wide:.0f}% wide", ha="center", va="top", fontsize=8, color=_DARK)
            axes.text(1.04, 1 - deep / 2, f"{100 * deep:.0f}% deep", rotation=270, va="center", fontsize=8, color=_DARK)
            accuracy = "no clients" if level["local"] is None else f"{percent(level['local'])}%"
            axes.set_title(f"level {level['level']}\n{accuracy}", fontsize=9, color=_DARK)
            axes.set(xlim=(-0.02, 1.16), ylim=(-0.16, 1.02))
            axes.set_axis_off()
            if i == 0:
                axes.text(-0.08, 0.5, name, rotation=90, ha="right", va="center", fontsize=10, fontweight="bold")
    figure.supxlabel("grey frame: full model; lines: exits; percentages above: local accuracy", fontsize=8, color=_DARK)
    return figure


def partition_dots(class_counts: Sequence[Sequence[int]], data: str) -> "Figure":
    """Draw a dot for each client and class, its area in proportion to the client's training samples of that class.

    Args:
        class_counts: Training samples [clients, classes].
        data: The data set's name.
    """
    clients, classes = len(class_counts), len(class_counts[0])
    figure, axes = _figure(max(4.5, 1.4 + 0.32 * clients), max(3.0, min(9.0, 1.4 + 0.3 * classes)))
    most = max(1, *(max(counts) for counts in class_counts))
    step = min(0.32, 7.5 / classes) * 72  # points between two classes
    scale = (0.95 * step) ** 2 / most
    points = [(k, c, n * scale) for k, counts in enumerate(class_counts) for c, n in enumerate(counts) if n]
    axes.scatter(*zip(*points, strict=True), color=_COLORS[0], alpha=0.75, linewidths=0) if points else None
    _finish(axes, "client", "class", f"training samples of the first {clients} clients, {data} (largest dot: {most})")
    axes.set(xlim=(-0.8, clients - 0.2), ylim=(-0.8, classes - 0.2))
    axes.set_xticks(range(0, clients, 1 if clients <= 20 else 5))
    axes.set_yticks(range(0, classes, max(1, classes // 20)))
    return figure


# ---- how they look -------------------------------------------------------------------------------------------------


def _empty(width: float, height: float) -> "Figure":
    if not available():
        raise MissingExtra("plots", "Drawing plots")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _figure(width: float, height: float) -> tuple["Figure", "Axes"]:
    figure = _empty(width, height)
    return figure, figure.add_subplot()


def _finish(axes: "Axes", x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.locator_params(axis="x", integer=x == "round")
    axes.set_title(title, fontsize=10, loc="left", color=_DARK)
    axes.grid(color=_LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_LIGHT)
    axes.tick_params(color=_LIGHT, labelcolor=_DARK)


def _saved(figures: Mapping[str, "Figure"], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=130)
    return files


def _evaluated(metrics: Metrics, norm: str) -> list[tuple[int, Mapping[str, Any]]]:
    return [(m["round"], m["evaluate"][norm]) for m in metrics if norm in m.get("evaluate", {})]


def _percent(value: float | None) -> float:
    return float("nan") if value is None else 100 * value


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]
