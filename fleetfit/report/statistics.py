"""Differences between rows of a comparison, paired by seed, with intervals by Student's t.

Two rows with the same seed share clients, data and initial state, so their difference varies less than each row. Over n
common seeds, with differences d_i of mean d and standard deviation s, the interval is d +- t(n - 1) s / sqrt(n), where
t(n - 1) leaves 2.5% on either side.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from fleetfit.report.columns import number_name
from fleetfit.runs.schema import ComparisonResults

LEVEL = 0.95
_EQUAL = 1e-9
"""Smaller differences count as equal."""
AS_GOOD = 1.0
"""Percentage points by which the other rows may at most be above a smallest model that is as good as they are."""


@dataclass(frozen=True)
class Difference:
    """A row's difference from the baseline row in one setting and one number.

    Attributes:
        row: Label of the row.
        setting: Label of the setting.
        column: The table's column.
        seeds: The common seeds with a number in both rows.
        mean: Mean of row minus baseline, in percentage points or in rounds; None without seeds.
        low: Lower end of the 95% interval; None with fewer than two seeds, and if all differences are equal, which may
            happen by chance with a coarse measure.
        high: Upper end of the interval.
    """

    row: str
    setting: str
    column: str
    seeds: tuple[int, ...]
    mean: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def order(self) -> int:
        """1 if the interval is above zero, -1 if it is below, 0 if the order is inconclusive."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


def paired_differences(results: ComparisonResults, columns: Sequence[str], against: str = "") -> list[Difference]:
    """Return the differences of all rows from the baseline row, by row and setting.

    The row "smallest model" that `compare.smallest_baseline` added is left out, unless it is the baseline.

    Args:
        results: The results of the comparison.
        columns: The columns of the table.
        against: Label of the baseline row; that of the results by default.
    """
    reference = against or results.against
    numbers: dict[tuple[str, str], dict[int, Mapping[str, float]]] = {}
    for run in results.runs:
        numbers.setdefault((run.row, run.setting), {})[run.seed] = run.final
    rows = dict.fromkeys(row for row, _ in numbers if row not in (reference, results.smallest))
    settings = dict.fromkeys(setting for _, setting in numbers)
    differences = []
    for row, setting, column in product(rows, settings, columns):
        row_numbers, reference_numbers = numbers.get((row, setting), {}), numbers.get((reference, setting), {})
        name = number_name(column)
        seeds = tuple(
            seed for seed in row_numbers if name in row_numbers[seed] and name in reference_numbers.get(seed, {})
        )
        values = [row_numbers[seed][name] - reference_numbers[seed][name] for seed in seeds]
        low, high = confidence_interval(values) or (None, None)
        mean = statistics.fmean(values) if values else None
        differences.append(Difference(row, setting, column, seeds, mean, low, high))
    return differences


def explain_smallest(results: ComparisonResults) -> list[str]:
    """Return a sentence on each setting in which no row is above the row "smallest model".

    A row is above it in an accuracy if the interval of their paired difference is above zero or, without an interval,
    the mean difference is. The smallest model is as good as the rest, so that levels gain nothing, if the intervals of
    all rows end below `AS_GOOD`, in each accuracy; otherwise it is open.
    """
    if not results.smallest:
        return []
    measured = {name for run in results.runs if run.row == results.smallest for name in run.final}
    kinds = ("local", "global") if measured & {"local", "global"} else ("avg", "full")  # with `[privacy]`
    columns = [kind for kind in kinds if kind in measured]
    differences = paired_differences(results, columns, results.smallest)
    sentences = []
    for setting in dict.fromkeys(one.setting for one in differences):
        here = [one for one in differences if one.setting == setting]
        if any(one.mean is None or (one.mean if one.low is None else one.low) > 0 for one in here):
            continue
        best = [max((one for one in here if one.column == c), key=lambda one: one.mean or 0.0) for c in columns]
        seeds = min(len(one.seeds) for one in best)
        is_as_good = seeds > 1 and all(((one.mean or 0.0) if one.high is None else one.high) < AS_GOOD for one in here)
        where = f" in {setting}" if setting else ""
        sentences.append(
            (
                f"The smallest model is as good as the other rows{where}, so that a fleet needs no levels"
                if is_as_good
                else f"Whether levels gain anything{where} is open"
            )
            + f": the best of the other rows differs from the smallest model by "
            f"{' and '.join(map(_format_difference, best))} percentage points "
            f"({seeds} seed{'' if seeds == 1 else 's, 95% intervals'})."
        )
    return sentences


def _format_difference(one: Difference) -> str:
    interval = "" if one.low is None or one.high is None else f" [{one.low:+.2f}, {one.high:+.2f}]"
    return f"{one.mean or 0.0:+.2f}{interval} in {one.column} ({one.row})"


def confidence_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Return the interval of the mean by Student's t; None for fewer than two values or equal values."""
    if len(values) < 2 or max(values) - min(values) < _EQUAL:
        return None
    from scipy.special import stdtrit  # takes 0.1 s

    mean = statistics.fmean(values)
    quantile = float(stdtrit(len(values) - 1, (1 + level) / 2))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half
