"""How much rows of a comparison differ from one of them: seed by seed, with a 95% interval of Student's t.

Two rows with the same seed share what the seed decides, such as the clients, their data and the first state, so their
difference varies less than either of them. Over n seeds that both have, with differences d_i of mean d and standard
deviation s, the interval is d +- t(n - 1) s / sqrt(n), where t(n - 1) leaves 2.5% on either side.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from fleetfit.records.schema import ComparisonResults
from fleetfit.report.columns import is_rounds, number_name
from fleetfit.report.text import Table

LEVEL = 0.95
_ALIKE = 1e-9
"""Differences that lie no further apart are alike."""


@dataclass(frozen=True)
class Difference:
    """A row's difference from the reference row in one setting and one number.

    Attributes:
        row: Label of the row.
        setting: Label of the setting.
        column: The table's column.
        seeds: The seeds that both have, with a number in either.
        mean: The mean of row minus reference, in points of percent or in rounds; None without seeds.
        low: Lower end of the 95% interval; None of fewer than two seeds, and where all differences are alike, which a
            coarse measure makes of chance too.
        high: Its upper end.
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
        """1 where the row lies above the reference beyond the interval, -1 below, 0 where neither can be said."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


def differences(results: ComparisonResults, columns: Sequence[str], against: str = "") -> list[Difference]:
    """Return the differences of all rows from one, row by row, setting by setting.

    Args:
        results: What was found.
        columns: Those of the table.
        against: Label of the reference row; that of the results by default.
    """
    reference = against or results.against
    numbers: dict[tuple[str, str], dict[int, Mapping[str, float]]] = {}
    for run in results.runs:
        numbers.setdefault((run.row, run.setting), {})[run.seed] = run.final
    rows = dict.fromkeys(row for row, _ in numbers if row != reference)
    settings = dict.fromkeys(setting for _, setting in numbers)
    return [
        _difference(row, setting, column, numbers.get((row, setting), {}), numbers.get((reference, setting), {}))
        for row, setting, column in product(rows, settings, columns)
    ]


def _difference(
    row: str,
    setting: str,
    column: str,
    own: Mapping[int, Mapping[str, float]],
    other: Mapping[int, Mapping[str, float]],
) -> Difference:
    name = number_name(column)
    seeds = tuple(seed for seed in own if name in own[seed] and name in other.get(seed, {}))
    found = [own[seed][name] - other[seed][name] for seed in seeds]
    if not found:
        return Difference(row, setting, column, seeds)
    low, high = interval(found) or (None, None)
    return Difference(row, setting, column, seeds, statistics.fmean(found), low, high)


# ---- Student's t -----------------------------------------------------------------------------------------------------


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Return the interval of the mean by Student's t; None of fewer than two values, or of values that are alike."""
    if len(values) < 2 or max(values) - min(values) < _ALIKE:
        return None
    mean = statistics.fmean(values)
    half = quantile(level, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def quantile(level: float, freedom: int) -> float:
    """Return t such that a variable of Student's distribution lies within -t and t with a probability.

    Args:
        level: The probability, below 1.
        freedom: Degrees of freedom, from 1.
    """
    low, high = 0.0, 1.0
    while within(high, freedom) < level:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if within(middle, freedom) < level else (low, middle)
    return high


def within(t: float, freedom: int) -> float:
    """Return the probability that a variable of Student's distribution lies within -t and t.

    The finite sums of Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 26.7.3 and 26.7.4, with
    theta = arctan(t / sqrt(freedom)).
    """
    theta = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if not odd:
        return sine * total
    return 2 / math.pi * (theta + (sine * total if freedom > 1 else 0.0))


# ---- the table -------------------------------------------------------------------------------------------------------

_STAR = " *"


def difference_table(found: Sequence[Difference], against: str) -> Table:
    """Return the differences as a table, at most 100 columns of text wide with labels of usual length."""
    named = any(one.setting for one in found)
    rows = tuple(
        (one.row, *([one.setting] if named else []), one.column, str(len(one.seeds)), difference_cell(one))
        for one in found
    )
    columns = ("row", *(["setting"] if named else []), "column", "seeds", f"difference [{100 * LEVEL:.0f}% interval]")
    return Table(columns, rows, f"Differences from {against}", tuple(_notes(found)))


def difference_cell(one: Difference) -> str:
    """Return a difference as it stands in the table: "+2.60 [+1.21, +3.99] *", "+2.60", "-"."""
    digits = 1 if is_rounds(one.column) else 2
    if one.mean is None:
        return "-"
    if one.low is None or one.high is None:
        return f"{one.mean:+.{digits}f}"
    text = f"{one.mean:+.{digits}f} [{one.low:+.{digits}f}, {one.high:+.{digits}f}]"
    return text + (_STAR if one.order else "")


def _notes(found: Sequence[Difference]) -> Iterator[str]:
    yield (
        "Row minus reference in points of percent, or in rounds: the mean over the seeds that both have, paired by "
        "seed, and the interval of Student's t."
    )
    if any(one.low is not None for one in found):
        yield (
            f"{_STAR.strip()}: the interval excludes zero. Without it no order can be told; of {len(found)} intervals, "
            "some exclude zero by chance."
        )
    if any(len(one.seeds) == 1 for one in found):
        yield "Of fewer than two seeds no interval can be given, and no order told."
    if any(len(one.seeds) > 1 and one.low is None for one in found):
        yield "Where all seeds differ alike, no interval can be given either."
    if any(not one.seeds for one in found):
        yield '"-": no seed has a number in both rows.'
