"""Accuracy over cost: over the budget of early stopping, and of each level (ScaleFL, CVPR 2023, 6.3 and Figure 3).

Differs from the paper: Figure 3 has a line for each method and a marker for each level. Here the figure shows one run,
with a line for each level from its first exit to its last, which has a large marker. Parameters and seconds of an exit
include all earlier classifiers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetfit.report.drawing import COLORS, DARK, add_legend_below, add_notes, get_color, label_axes, make_figure
from fleetfit.report.order import is_behind
from fleetfit.report.text import format_count, format_percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_BUDGET_MARGIN = 1.05  # largest budget in the figure, as a share of the last exit's cost
_COST_LABELS = {"multiply_adds": "average multiply-adds of a sample", "latency_s": "average time of a sample"}
_COUNTS = ((1e9, "G"), (1e6, "M"), (1e3, "K"))


def draw_accuracy_over_budget(calibration: Mapping[str, Any], title: str = "") -> "Figure":
    """Draw a calibration's curve with the chosen budget, the single exits, and the accuracy of the last exit.

    Args:
        calibration: The result of `Calibration.numbers`.
        title: The title; the level by default.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    from matplotlib.patheffects import withStroke

    figure = make_figure(6.4, 4.0)
    axes = figure.add_subplot()
    cost, costs = calibration["cost"], calibration["costs"]
    scale, unit = (1e-3, "ms") if cost == "latency_s" else _fit_count(costs[-1])
    accuracies = [100 * accuracy for accuracy in calibration["accuracies"]]
    axes.axhline(accuracies[-1], color=DARK, linewidth=1.0, linestyle="--", label="last exit, for every sample")
    choice = {**calibration["test"], "budget": calibration["budget"]}
    points = sorted([*calibration["curve"], choice], key=lambda point: point["budget"])
    axes.plot(
        [point["cost"] / scale for point in points], [100 * point["accuracy"] for point in points],
        color=COLORS[0], marker=".", markersize=5, label="early stopping",
    )  # fmt: skip
    exits = list(zip([value / scale for value in costs], accuracies, strict=True))
    axes.plot(*zip(*exits, strict=True), "s", color=COLORS[1], markersize=6, label="single exits")
    for i, exit in enumerate(exits, 1):
        axes.annotate(
            f"exit {i}", exit, xytext=(0, -7), textcoords="offset points", ha="center", va="top", fontsize=8,
            color=COLORS[1], path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )  # fmt: skip
    if choice["budget"] <= _BUDGET_MARGIN * costs[-1]:
        axes.axvline(choice["budget"] / scale, color=COLORS[0], linewidth=1.2, linestyle=":")
    axes.plot(
        [choice["cost"] / scale], [100 * choice["accuracy"]],
        color=COLORS[0], marker="o", markersize=10, markerfacecolor="white", markeredgewidth=2, linestyle="none",
        label=f"budget {format_cost(choice['budget'], cost)}: {format_percent(choice['accuracy'])}%",
    )  # fmt: skip
    label_axes(axes, f"{_COST_LABELS[cost]} ({unit})", "accuracy (%)", title or f"level {calibration['level']}")
    axes.margins(x=0.07, y=0.14)
    add_legend_below(axes, 2)
    if is_behind(calibration["accuracies"]):
        add_notes(figure, ["A deeper exit is behind a shallower one."])
    return figure


def format_cost(value: float, cost: str) -> str:
    """Return the cost of a sample with its unit: "35 ms", "1.90 M multiply-adds"."""
    return f"{1e3 * value:.3g} ms" if cost == "latency_s" else f"{format_count(value)} multiply-adds"


def _fit_count(largest: float) -> tuple[float, str]:
    return next(((size, unit) for size, unit in _COUNTS if largest >= size), (1.0, "1"))


@dataclass(frozen=True)
class LevelCost:
    """Accuracy and cost of the exits of a level's model.

    Attributes:
        name: Name of the level.
        accuracies: Local accuracy of each exit, from 0 to 1 [E].
        parameters: Parameters of a model that ends at the exit, including earlier classifiers [E].
        latencies_s: Seconds until the exit's prediction of one sample [E]; NaN if not measured.
    """

    name: str
    accuracies: tuple[float, ...]
    parameters: tuple[float, ...]
    latencies_s: tuple[float, ...]


def draw_accuracy_by_level(levels: Sequence[LevelCost], title: str = "", score: str = "accuracy") -> "Figure":
    """Draw the accuracy of each level and its exits over parameters and over seconds, side by side.

    Args:
        levels: Smallest first.
        title: The title.
        score: The name of the accuracy.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure = make_figure(9.2, 4.0)
    figure.suptitle(title, fontsize=10, color=DARK)
    scale, unit = _fit_count(max(level.parameters[-1] for level in levels))
    left, right = figure.subplots(1, 2, sharey=True)
    for i, level in enumerate(levels):
        color, marker, heights = get_color(i), MARKERS[i % len(MARKERS)], [100 * a for a in level.accuracies]
        for axes, costs in (
            (left, [count / scale for count in level.parameters]),
            (right, [1e3 * seconds for seconds in level.latencies_s]),
        ):
            axes.plot(costs, heights, color=color, marker=marker, markersize=3.5, linewidth=1.0, alpha=0.7)
            axes.plot(
                costs[-1:], heights[-1:], color=color, marker=marker, markersize=7 + 1.5 * min(i, 6), linestyle="none",
                label=f"level {level.name}",
            )  # fmt: skip
    for axes in (left, right):
        axes.margins(x=0.08, y=0.12)
        axes.set_xlim(left=0)
    label_axes(left, f"parameters ({unit})" if scale > 1 else "parameters", f"local {score} (%)", "over size")
    label_axes(right, "time of one sample on this machine (ms)", "", "over time")
    add_legend_below(left, 6)
    behind = [level.name for level in levels if is_behind(level.accuracies)]
    notes = [f"A deeper exit is behind a shallower one in level {', '.join(behind)}."] if behind else []
    if is_behind([level.accuracies[-1] for level in levels]):
        notes.append("A larger level is behind a smaller one, each on the data of its own clients.")
    add_notes(figure, notes)
    return figure
