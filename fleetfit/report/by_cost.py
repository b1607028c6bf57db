"""Accuracy after so many megabytes, simulated seconds or multiply-adds: what the rounds until then added up to."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fleetfit.report.drawing import Metrics, Summary, color, empty, evaluated, finish, in_percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            "bytes": report["bytes_down"] + report["bytes_up"],
            "seconds": report.get("simulated_s"),
            "multiply_adds": report.get("multiply_adds"),
        }[cost]
        total, said = total + (added or 0), said or added is not None
        found[report["round"]] = total
    return found if said else {}
