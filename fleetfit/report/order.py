"""Where a deeper exit or a larger level does worse than a smaller one: a sentence that says so, with the numbers.

A piece that is larger has more to learn, and fewer clients that train all of it, so after few rounds it may lie behind.
Whoever reads a table or a plot should not take that for what the method can do.

What chance alone would do is not said. A difference counts beyond two points of percent, beyond two standard errors of
a difference of binomial shares, and over several seeds beyond the standard deviation of their differences. A mean over
clients that differ has no more numbers behind it than clients. No cause is named with `[privacy]`, whose noise may be
one, and none where the largest piece is not behind.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from fleetfit.report.text import data_of

if TYPE_CHECKING:  # `list` prints a table without pydantic
    from fleetfit.records.schema import SummaryRecord

K = TypeVar("K")

BEHIND = 0.02
"""Two points of percent: a larger piece that lies further behind a smaller one is in the wrong order."""
_ERRORS = 2
"""So many standard errors a difference must exceed."""
_REASON = "Few rounds, or few clients that train all of it, are the usual reason."


@dataclass(frozen=True)
class MeasuredPieces:
    """What pieces reach, smaller ones first.

    Attributes:
        seeds: Accuracies of each piece by its name, one per seed, in the same order of seeds.
        counts: How many samples, or clients that differ, are behind each; a piece is missing where nobody knows.
        where: On which data that is.
    """

    seeds: Mapping[str, Sequence[float]]
    counts: Mapping[str, int]
    where: str

    @property
    def means(self) -> dict[str, float]:
        """The mean over the seeds of each piece."""
        return {name: statistics.fmean(found) for name, found in self.seeds.items()}

    @property
    def behind(self) -> set[str]:
        """The pieces that are behind a smaller one."""
        names = list(self.seeds)
        return {large for i, large in enumerate(names) for small in names[:i] if self._is_behind(large, small)}

    def _is_behind(self, large: str, small: str) -> bool:
        gaps = [a - b for a, b in zip(self.seeds[small], self.seeds[large], strict=True)]
        spread = statistics.stdev(gaps) if len(gaps) > 1 else 0.0
        means = self.means
        chance = math.hypot(*(_standard_error(means[name], self.counts.get(name)) for name in (small, large)))
        return statistics.fmean(gaps) > max(BEHIND, _ERRORS * chance, spread)

    @property
    def last_is_behind(self) -> bool:
        """Whether the largest piece is among those behind."""
        return bool(self.seeds) and list(self.seeds)[-1] in self.behind


def _standard_error(accuracy: float, count: int | None) -> float:
    """Return sqrt(p (1 - p) / n), of a p outside 0 to 1 (a regression's) that of one half; 0 where n is not known."""
    if not count:
        return 0.0
    return math.sqrt((accuracy * (1 - accuracy) if 0 <= accuracy <= 1 else 0.25) / count)


def out_of_order(summaries: "Sequence[SummaryRecord]") -> list[str]:
    """Return a sentence for exits and one for levels that are in the wrong order, with the means over the seeds.

    Args:
        summaries: The final numbers of a run, or of all seeds of a row.
    """
    said, caught_up = [], True
    private = _is_private(summaries)
    for name, found in (("exit", exits_of(summaries)), ("level", levels_of(summaries))):
        if not found.behind:
            continue
        numbers = ", ".join(f"{name} {piece} {100 * accuracy:.1f}%" for piece, accuracy in found.means.items())
        late = found.last_is_behind and not private
        caught_up = caught_up and not late
        what = (
            f"the {_LARGER[name]}s have not caught up"
            if late
            else f"a {_LARGER[name]} does worse than a {_SMALLER[name]}"
        )
        said.append(f"After {summaries[0].rounds} rounds {what}: {numbers}, {found.where}.")
    return said if caught_up else _with_reason(said)


_LARGER = {"exit": "deeper exit", "level": "larger level"}
_SMALLER = {"exit": "shallower one", "level": "smaller one"}


def rows_out_of_order(rows: Mapping[str, Sequence["SummaryRecord"]]) -> list[str]:
    """Return sentences for exits and for levels, with the names of all rows in which they are in the wrong order.

    Args:
        rows: The final numbers of all seeds by row.
    """
    said, caught_up = [], True
    for name, pieces_of in (("exit", exits_of), ("level", levels_of)):
        late: list[str] = []
        worse: list[str] = []
        for row, summaries in rows.items():
            found = pieces_of(summaries)
            if found.behind:
                (late if found.last_is_behind and not _is_private(summaries) else worse).append(row)
        if late:
            caught_up = False
            said.append(f"The {_LARGER[name]}s have not caught up in {'; '.join(late)}.")
        if worse:
            said.append(f"A {_LARGER[name]} does worse than a {_SMALLER[name]} in {'; '.join(worse)}.")
    return said if caught_up else _with_reason(said)


def _with_reason(said: list[str]) -> list[str]:
    """Return sentences with the usual reason behind the last one that says that pieces have not caught up."""
    last = max(i for i, sentence in enumerate(said) if "caught up" in sentence)
    return [f"{sentence} {_REASON}" if i == last else sentence for i, sentence in enumerate(said)]


def _is_private(summaries: "Sequence[SummaryRecord]") -> bool:
    return any(summary.privacy is not None for summary in summaries)


def is_behind(accuracies: Sequence[float], counts: Sequence[int] = ()) -> bool:
    """Tell whether one of the accuracies, smaller pieces first, is behind one before it.

    Args:
        accuracies: From 0 to 1.
        counts: Samples behind each; none where nobody knows.
    """
    names = [str(i) for i in range(len(accuracies))]
    seeds = {name: [accuracy] for name, accuracy in zip(names, accuracies, strict=True)}
    return bool(MeasuredPieces(seeds, dict(zip(names, counts, strict=False)), "").behind)


def exits_of(summaries: "Sequence[SummaryRecord]") -> MeasuredPieces:
    """Return what each exit of the largest model reaches, by its number."""
    headlines = [summary.headline for summary in summaries]
    for every, samples, where in (
        ([one.test_exits for one in headlines], [one.test_samples for one in headlines], "on the server's test set"),
        ([one.exits for one in headlines], [one.global_samples for one in headlines],
         f"on all clients' {data_of(*summaries)}"),
    ):  # fmt: skip
        found = _seeds([dict(enumerate(exits, 1)) for exits in every])
        if found:
            counts = _least(samples)
            seeds = {str(number): accuracies for number, accuracies in found.items()}
            return MeasuredPieces(seeds, dict.fromkeys(seeds, counts) if counts else {}, where)
    return MeasuredPieces({}, {}, "")


def levels_of(summaries: "Sequence[SummaryRecord]") -> MeasuredPieces:
    """Return what each level reaches, by its name."""
    names = [level.level for level in summaries[0].levels]
    headlines = [summary.headline for summary in summaries]
    by_number = _seeds([one.test_levels for one in headlines])
    found = {name: by_number[str(n)] for n, name in enumerate(names, 1) if str(n) in by_number}
    if len(found) > 1:
        samples = _least([one.test_samples for one in headlines])
        return MeasuredPieces(found, dict.fromkeys(found, samples) if samples else {}, "all on the server's test set")
    own = _seeds([{level.level: level.local for level in summary.levels} for summary in summaries])
    clients = {
        name: _least([one.levels[name].clients if name in one.levels else None for one in headlines]) for name in own
    }
    counts = {name: count for name, count in clients.items() if count}
    return MeasuredPieces(own, counts, "each on the data of its own clients, which differ")


def _least(counts: Sequence[int | None]) -> int | None:
    """Return the smallest of the seeds' counts, whose data are mostly the same; None where one is not known."""
    known = [count for count in counts if count is not None]
    return min(known) if known and len(known) == len(counts) else None


def _seeds(found: Sequence[Mapping[K, float | None]]) -> dict[K, list[float]]:
    """Return what all seeds have, in the order of the first."""
    every = {key: [one.get(key) for one in found] for key in found[0]}
    return {key: [v for v in values if v is not None] for key, values in every.items() if None not in values}
