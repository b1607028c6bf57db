"""How often each exit was the teacher, beside what the exits know, as in ReeFL's Figure 7 (ICML 2024).

Left: accuracy of each exit in the last evaluation. Middle: in how many training steps each exit taught the others, at
the clients of the largest level, in the last round that had some, as the paper shows it. Right: all rounds and levels
together, a shade for each level.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fleetfit.report.drawing import COLORS, Metrics, Summary, empty, evaluated, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def teachers(summary: Summary, metrics: Metrics) -> "Figure | None":
    """Draw the teachers of a run; None where its method counts none.

    Args:
        summary: The run's final numbers.
        metrics: The reports of its rounds; `counts.teachers` has level -> exit -> steps.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    counts = _counts(metrics)
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
    _accuracy(left, summary, metrics)
    finish(middle, "exit after block", "steps as teacher", f"level {levels[-1]} in round {last}")
    _bars(middle, exits, {levels[-1]: counts[last][levels[-1]]}, levels)
    finish(right, "exit after block", "steps as teacher", f"all levels in {len(counts)} rounds")
    _bars(right, exits, total, levels)
    if len(levels) > 1:
        right.legend(title="level", frameon=False, fontsize=8, title_fontsize=8)
    return figure


def _counts(metrics: Metrics) -> dict[int, dict[str, dict[str, int]]]:
    """Return steps by round, level and exit; what clients count that is no exit is left out."""
    found = {}
    for report in metrics:
        levels = report.get("counts", {}).get("teachers", {})
        taught = {level: {e: n for e, n in steps.items() if e.isdecimal()} for level, steps in levels.items()}
        kept = {level: steps for level, steps in taught.items() if steps}
        if kept:
            found[report["round"]] = kept
    return found


def _accuracy(axes: "Axes", summary: Summary, metrics: Metrics) -> None:
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


def _bars(axes: "Axes", exits: Sequence[int], taught: Mapping[str, Mapping[str, int]], levels: Sequence[str]) -> None:
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
