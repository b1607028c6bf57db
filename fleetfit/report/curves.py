"""Curves of runs as numbers: accuracy, loss and costs, for the page and the figures.

Accuracies are in percent with four decimals, other numbers have six digits. A curve has a point for each round with the
number. A run with `[privacy]` only has curves of the server's test set, even if its folder has more.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from fleetfit.report.text import exit_names
from fleetfit.runs.comparison import RowRecord
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import RoundRecord

KINDS = {
    "local": "local",
    "global": "global",
    "local_worst_tenth": "local, worst tenth",
    "global_worst_tenth": "global, worst tenth",
    "ensemble": "all exits together",
    "mean_over_exits": "mean over exits",
    "full": "largest level, whole test set",
    "avg": "mean of the levels, whole test set",
    "backdoor": "success of the backdoor",
    "personal": "personal",
}
"""Accuracies that an evaluation may have, with their labels."""
SERVER_KINDS = ("full", "avg", "backdoor")
"""Accuracies on the server's test set, which a run with `[privacy]` reports."""
MAX_CLIENTS = 50
"""Number of clients whose samples are drawn by class."""


T = TypeVar("T")


class Point(NamedTuple):
    """A point of a curve.

    Attributes:
        round: The round of the measurement.
        x: The round, or a cost.
        y: The number.
    """

    round: int
    x: float
    y: float


class MeanPoint(NamedTuple):
    """A point of the mean over seeds.

    Attributes:
        round: The round of the measurements.
        x: Mean of the places.
        y: Mean of the numbers.
        deviation: Standard deviation of the numbers; 0 for one seed.
    """

    round: int
    x: float
    y: float
    deviation: float


Curve = Sequence[Point]


@dataclass(frozen=True)
class Series:
    """The curves of one label.

    Attributes:
        label: The label.
        curves: A curve for each seed; empty if the seed's run has none.
    """

    label: str
    curves: Mapping[int, Curve]

    @property
    def mean(self) -> list[MeanPoint]:
        """The mean over the seeds with a curve, at their common rounds."""
        by_round = [{point.round: point for point in curve} for curve in self.curves.values() if curve]
        if len(by_round) <= 1:
            return [MeanPoint(*point, deviation=0.0) for one in by_round for point in one.values()]
        mean = []
        for number in by_round[0]:
            points = [one[number] for one in by_round if number in one]
            if len(points) == len(by_round):
                ys = [point.y for point in points]
                y = statistics.fmean(ys)
                # not statistics.stdev, which computes with fractions and takes seconds for a long run
                deviation = math.sqrt(sum((one - y) ** 2 for one in ys) / (len(ys) - 1))
                x = statistics.fmean(point.x for point in points)
                mean.append(MeanPoint(number, round_digits(x), round_digits(y), deviation))
        return mean


def round_digits(value: float) -> float:
    """Return a number with six digits."""
    return float(f"{value:.6g}")


def to_percent(share: float, digits: int = 4) -> float:
    """Return a share in percent, with four decimals by default."""
    return round(100 * share, digits)


def thin(points: Sequence[T], most: int) -> list[T]:
    """Return at most `most` evenly spaced points, including the first and the last."""
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(i * step)] for i in range(most)]


# ---- of one run ------------------------------------------------------------------------------------------------------


def accuracy_curve(run: RunFolder, kind: str, cost: str = "") -> list[Point]:
    """Return an accuracy over rounds, or over the cumulative cost.

    Args:
        run: The run.
        kind: One of `KINDS`.
        cost: One of `COSTS`; "" for rounds.
    """
    if run.is_private and kind not in SERVER_KINDS:
        return []
    totals = {point.round: point.y for point in cost_curve(run, cost)} if cost else {}
    return [
        Point(number, totals[number] if cost else number, to_percent(share))
        for number, accuracies in run.evaluations
        if (share := accuracies.number(kind)) is not None and (not cost or number in totals)
    ]


def loss_curve(run: RunFolder) -> list[Point]:
    """Return the training loss over rounds, as a mean over the clients."""
    losses = {} if run.is_private else {report.round: report.train.loss for report in run.rounds}
    return [Point(number, number, round_digits(loss)) for number, loss in losses.items() if loss is not None]


def cost_curve(run: RunFolder, cost: str) -> list[Point]:
    """Return the cumulative cost over rounds. A round that does not report the cost adds nothing.

    Args:
        run: The run.
        cost: One of `COSTS`, "bytes_down" or "bytes_up".

    Returns:
        The curve; empty if no round reports the cost.
    """
    costs = {} if run.is_private else {report.round: _get_cost(report, cost) for report in run.rounds}
    if all(value is None for value in costs.values()):
        return []
    total, curve = 0.0, []
    for number, value in costs.items():
        total += value or 0
        curve.append(Point(number, number, total))
    return curve


def _get_cost(report: RoundRecord, cost: str) -> float | None:
    if cost != "bytes":
        return report.number(cost)
    return None if report.bytes_down is None or report.bytes_up is None else report.bytes_down + report.bytes_up


def level_curves(run: RunFolder) -> list[Series]:
    """Return the local accuracy of each level's clients over rounds."""
    curves: dict[str, list[Point]] = {} if run.is_private else {name: [] for name in run.last.levels}
    for number, accuracies in run.evaluations:
        for name, level in accuracies.levels.items():
            if name in curves and level.local is not None:
                curves[name].append(Point(number, number, to_percent(level.local)))
    return [Series(f"level {name}", {run.seed: curve}) for name, curve in curves.items()]


def exit_curves(run: RunFolder) -> list[Series]:
    """Return the accuracy of each exit of the largest level over rounds; with `[privacy]`, on the server's test set."""
    exits = run.summary.levels[-1].exits if run.summary.levels else []
    curves: list[list[Point]] = [[] for _ in exits]
    for number, accuracies in run.evaluations:
        shares = accuracies.test_exits if run.is_private else accuracies.exits
        for curve, share in zip(curves, shares, strict=False):
            curve.append(Point(number, number, to_percent(share)))
    names = exit_names(exits, exits)
    return [Series(f"exit {name}", {run.seed: curve}) for name, curve in zip(names, curves, strict=True)]


# ---- of rows with their seeds ----------------------------------------------------------------------------------------


def accuracy_curves(rows: Sequence[RowRecord], kind: str) -> list[Series]:
    """Return an accuracy of rows over rounds."""
    return _make_series(rows, lambda run: accuracy_curve(run, kind))


def loss_curves(rows: Sequence[RowRecord]) -> list[Series]:
    """Return the training loss of rows over rounds."""
    return _make_series(rows, loss_curve)


def accuracy_over_cost(rows: Sequence[RowRecord], kind: str, cost: str) -> list[Series]:
    """Return an accuracy of rows over a cost, in the unit of `choose_unit`."""
    unit = choose_unit(rows, cost)
    return _make_series(
        rows,
        lambda run: [Point(number, round_digits(x / unit.size), y) for number, x, y in accuracy_curve(run, kind, cost)],
    )


def _make_series(rows: Sequence[RowRecord], make_curve: Callable[[RunFolder], list[Point]]) -> list[Series]:
    return [Series(row.row, {seed: make_curve(run) for seed, run in row.runs}) for row in rows]


# ---- costs and their units -------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """A unit of a cost."""

    size: float
    name: str


@dataclass(frozen=True)
class CostAxis:
    """A cost of training.

    Attributes:
        label: Label of an axis.
        title: Name in a title.
        units: Largest first.
    """

    label: str
    title: str
    units: Sequence[Unit]


_BYTES = (Unit(1e12, "TB"), Unit(1e9, "GB"), Unit(1e6, "MB"), Unit(1e3, "kB"))
COSTS = {
    "bytes": CostAxis("sent, both directions", "bytes", _BYTES),
    "multiply_adds": CostAxis(
        "multiply-adds of clients", "multiply-adds of clients",
        (Unit(1e15, "P"), Unit(1e12, "T"), Unit(1e9, "G"), Unit(1e6, "M")),
    ),
    "simulated_s": CostAxis("simulated time", "simulated time", (Unit(3600, "h"), Unit(60, "min"), Unit(1, "s"))),
}  # fmt: skip
"""Costs for drawing accuracy over, by the keys of a round's report."""


def choose_unit(rows: Sequence[RowRecord], cost: str) -> Unit:
    """Return the unit for the largest total of a cost among runs."""
    curves = [cost_curve(run, cost) for row in rows for run in row.records]
    return fit_unit(cost, max((curve[-1].y for curve in curves if curve), default=0.0))


def fit_unit(cost: str, total: float) -> Unit:
    """Return the largest unit of a cost in which the total is at least two."""
    units = COSTS[cost].units
    return next((unit for unit in units if total >= 2 * unit.size), units[-1])


def explain_partial(runs: Sequence[RunFolder]) -> list[str]:
    """Return a sentence on the evaluations that measured a part of clients and samples; empty if there are none."""
    parts = [one.evaluate.partial for run in runs for one in run.rounds if one.evaluate and one.evaluate.partial]
    if not parts:
        return []
    clients, samples = (
        f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
        for counts in ([part.clients for part in parts], [part.samples for part in parts])
    )
    part = f"{clients} clients with {samples} samples" if any(part.clients for part in parts) else f"{samples} samples"
    return [f"Evaluations before the last one measure the same {part} each time; the last one measures all."]
