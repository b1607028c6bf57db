"""How often each exit was the teacher in a run of ReeFL (ICML 2024, Figure 7).

    .venv/bin/python -m experiments.figures.teachers RUN

Writes RUN/plots/teachers.png.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.figures.script import run_script
from fleetfit.report.curves import to_percent
from fleetfit.report.drawing import COLORS, get_level_color, label_axes, make_figure
from fleetfit.report.text import get_score_name
from fleetfit.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_teachers(run: RunFolder) -> "Figure | None":
    """Draw the number of steps of each exit as teacher, next to the accuracy of the exits (ReeFL, ICML 2024, Figure 7).

    Left: accuracy of each exit in the last evaluation. Middle: training steps with each exit as teacher, on the clients
    of the largest level, in the last round with some, as in the paper. Right: the same for all rounds and levels, with
    a color for each level.

    Returns:
        The figure; None if the run's method does not count teachers.
    """
    rounds = {
        report.round: steps
        for report in run.rounds
        if (steps := {k: v for k, v in report.counts.teachers.items() if v})
    }
    if not rounds:
        return None
    levels = sorted({level for steps in rounds.values() for level in steps}, key=int)
    last = max(number for number, steps in rounds.items() if levels[-1] in steps)
    totals = {level: Counter[str]() for level in levels}
    for steps in rounds.values():
        for level, by_exit in steps.items():
            totals[level].update(by_exit)
    exits = sorted({int(exit) for by_exit in totals.values() for exit in by_exit})
    figure = make_figure(10.5, 3.4)
    left, middle, right = figure.subplots(1, 3)
    _draw_exit_accuracy(left, run)
    label_axes(middle, "exit after block", "steps as teacher", f"level {levels[-1]} in round {last}")
    label_axes(right, "exit after block", "steps as teacher", f"all levels in {len(rounds)} rounds")
    for axes in (middle, right):
        axes.locator_params(axis="y", integer=True)
    for axes, by_level in ((middle, {levels[-1]: rounds[last][levels[-1]]}), (right, totals)):
        below = [0] * len(exits)
        for level, by_exit in by_level.items():
            heights = [by_exit.get(str(exit), 0) for exit in exits]
            shade = get_level_color(levels.index(level))
            axes.bar(range(len(exits)), heights, bottom=below, color=shade, width=0.7, label=level)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        axes.set_xticks(range(len(exits)), [str(exit) for exit in exits])
        axes.grid(visible=False, axis="x")
    if len(levels) > 1:
        right.legend(title="level", frameon=False, fontsize=8, title_fontsize=8)
    return figure


def _draw_exit_accuracy(axes: "Axes", run: RunFolder) -> None:
    """Draw the accuracy of each exit of the largest level in the last evaluation as a bar."""
    heights = [to_percent(share) for share in run.last.exits]
    after = f"after round {run.evaluations[-1][0]}" if run.evaluations else "never evaluated"
    axes.bar(range(len(heights)), heights, color=COLORS[1], width=0.7)
    for x, height in enumerate(heights):
        axes.annotate(f"{height:.1f}", (x, height), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    title = f"{run.method} on {run.summary.data}, {after}"
    label_axes(axes, "exit after block", f"{get_score_name(run.summary)} (%)", title)
    axes.set_xticks(range(len(heights)), [str(exit) for exit in run.summary.levels[-1].exits[: len(heights)]])
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw how often each exit was the teacher in a run; return the exit code."""

    def draw(options: argparse.Namespace) -> tuple[dict[str, "Figure"], list[str]]:
        figure = draw_teachers(RunFolder.open(options.folder))
        return ({}, ["The run counts no teachers, as ReeFL's do."]) if figure is None else ({"teachers": figure}, [])

    return run_script(argparse.ArgumentParser(prog="teachers", description=main.__doc__), draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
