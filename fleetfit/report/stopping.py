"""Accuracy over what a prediction costs: with early stopping, and of each level (ScaleFL, CVPR 2023).

Early stopping as in appendix 6.3: each point of the curve is a budget, drawn at what the average test sample really
costs under it; beside it each exit on its own, and the last exit's accuracy, which everybody would get.

Levels as in Figure 3: local accuracy over parameters, and over the time of one sample on this machine.

Differs from the paper: Figure 3 has one line for each method, and a marker for each level. Here one run is drawn: a
line for each level from its first exit to its last, whose marker is the large one. All classifiers on the way count,
in parameters as in seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetfit.report.drawing import (
    COLORS,
    DARK,
    color,
    empty,
    figure_with_axes,
    finish,
    in_percent,
    legend_below,
    noted,
)
from fleetfit.report.order import is_behind
from fleetfit.report.text import format_count, format_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_NEAR = 1.05  # a budget up to so much above the last exit's cost is still on the picture
_LABELS = {"multiply_adds": "average multiply-adds of a sample", "latency_s": "average time of a sample"}


# ---- early stopping --------------------------------------------------------------------------------------------------


def accuracy_over_budget(numbers: Mapping[str, Any], title: str = "") -> "Figure":
    """Draw a calibration's curve with the chosen budget, each exit on its own, and the last exit's accuracy.

    Args:
        numbers: What `Calibration.numbers` returns.
        title: What stands above.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure, axes = figure_with_axes(6.4, 4.0)
    scale, unit = _unit(numbers["cost"], numbers["costs"][-1])
    axes.axhline(in_percent(numbers["accuracies"][-1]), color=DARK, linewidth=1.0, linestyle="--",
                 label="last exit, for every sample")  # fmt: skip
    chosen = {**numbers["test"], "budget": numbers["budget"]}
    points = sorted([*numbers["curve"], chosen], key=lambda point: point["budget"])
    axes.plot(
        [point["cost"] / scale for point in points], [in_percent(point["accuracy"]) for point in points],
        color=COLORS[0], marker=".", markersize=5, label="early stopping",
    )  # fmt: skip
    _exits(axes, [cost / scale for cost in numbers["costs"]], [in_percent(a) for a in numbers["accuracies"]])
    if chosen["budget"] <= _NEAR * numbers["costs"][-1]:
        axes.axvline(chosen["budget"] / scale, color=COLORS[0], linewidth=1.2, linestyle=":")
    axes.plot(
        [chosen["cost"] / scale], [in_percent(chosen["accuracy"])],
        color=COLORS[0], marker="o", markersize=10, markerfacecolor="white", markeredgewidth=2, linestyle="none",
        label=f"budget {amount(chosen['budget'], numbers['cost'])}: {format_percent(chosen['accuracy'])}%",
    )  # fmt: skip
    finish(axes, f"{_LABELS[numbers['cost']]} ({unit})", "accuracy (%)", title or f"level {numbers['level']}")
    axes.margins(x=0.07, y=0.14)
    legend_below(axes, 2)
    if is_behind(numbers["accuracies"]):
        noted(figure, ["A deeper exit is behind a shallower one."])
    return figure


def _exits(axes: "Axes", costs: Sequence[float], accuracies: Sequence[float]) -> None:
    """Draw a marker with a name for each exit, set apart from the lines behind it."""
    from matplotlib.patheffects import withStroke

    axes.plot(costs, accuracies, color=COLORS[1], marker="s", markersize=6, linestyle="none",
              label="each exit on its own")  # fmt: skip
    for i, place in enumerate(zip(costs, accuracies, strict=True), 1):
        axes.annotate(
            f"exit {i}", place, xytext=(0, -7), textcoords="offset points", ha="center", va="top", fontsize=8,
            color=COLORS[1], path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )  # fmt: skip


def amount(value: float, cost: str) -> str:
    """Return a budget or a cost with its unit: "35 ms", "1.90 M multiply-adds"."""
    return f"{1e3 * value:.3g} ms" if cost == "latency_s" else f"{format_count(value)} multiply-adds"


def _unit(cost: str, most: float) -> tuple[float, str]:
    """Return what numbers of a cost are divided by, and the unit that they then have."""
    if cost == "latency_s":
        return 1e-3, "ms"
    return next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "K")) if most >= s), (1.0, "1"))


# ---- levels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LevelCost:
    """What the exits of a level's model reach, and what they cost.

    Attributes:
        name: Of the level.
        accuracies: Local accuracy of each exit, from 0 to 1 [E].
        parameters: Of a model that ends there, earlier classifiers included [E].
        latencies_s: Until the exit's prediction of one sample, seconds [E]; not a number where it was not measured.
    """

    name: str
    accuracies: tuple[float, ...]
    parameters: tuple[float, ...]
    latencies_s: tuple[float, ...]


def accuracy_by_level(levels: Sequence[LevelCost], title: str = "", measure: str = "accuracy") -> "Figure":
    """Draw the accuracy of each level and of its exits over parameters and over seconds, side by side.

    Args:
        levels: Smallest first.
        title: What stands above.
        measure: What the accuracies are.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure = empty(9.2, 4.0)
    figure.suptitle(title, fontsize=10, color=DARK)
    most = max(level.parameters[-1] for level in levels)
    scale, unit = next(((s, f" ({u})") for s, u in ((1e6, "M"), (1e3, "K")) if most >= s), (1.0, ""))
    left, right = figure.subplots(1, 2, sharey=True)
    _lines(left, levels, [[n / scale for n in level.parameters] for level in levels])
    _lines(right, levels, [[1e3 * seconds for seconds in level.latencies_s] for level in levels])
    finish(left, f"parameters{unit}", f"local {measure} (%)", "over size")
    finish(right, "time of one sample on this machine (ms)", "", "over time")
    legend_below(left, 6)
    behind = [level.name for level in levels if is_behind(level.accuracies)]
    said = [f"A deeper exit is behind a shallower one in level {', '.join(behind)}."] if behind else []
    if is_behind([level.accuracies[-1] for level in levels]):
        said.append("A larger level is behind a smaller one, each on the data of its own clients, which differ.")
    noted(figure, said)
    return figure


def _lines(axes: "Axes", levels: Sequence[LevelCost], costs: Sequence[Sequence[float]]) -> None:
    """Draw a line for each level: small markers for its exits, a larger one for its last, larger with the level."""
    for i, (level, at) in enumerate(zip(levels, costs, strict=True)):
        shade, marker, heights = color(i), MARKERS[i % len(MARKERS)], [in_percent(a) for a in level.accuracies]
        axes.plot(at, heights, color=shade, marker=marker, markersize=3.5, linewidth=1.0, alpha=0.7)
        axes.plot(
            at[-1:], heights[-1:], color=shade, marker=marker, markersize=7 + 1.5 * min(i, 6), linestyle="none",
            label=f"level {level.name}",
        )  # fmt: skip
    axes.margins(x=0.08, y=0.12)
    axes.set_xlim(left=0)
