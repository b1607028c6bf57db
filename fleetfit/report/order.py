"""Notes on a deeper exit or a larger level that is less accurate than a smaller one.

A larger part has more to learn, and fewer clients train it completely, so it may be behind after few rounds. A table or
a plot of these rounds does not show the final accuracy of the method.

Chance differences are left out. A difference counts if it exceeds two percentage points, two standard errors of a
difference of binomial shares and, with several seeds, the standard deviation of their differences. The sample size of a
mean over different clients is the number of clients. The notes name no cause with `[privacy]`, whose noise may be one,
or if the largest part is not behind.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from fleetfit.report.text import describe_data

if TYPE_CHECKING:  # `list` prints a table without pydantic
    from fleetfit.runs.schema import SummaryRecord

K = TypeVar("K")

BEHIND = 0.02
"""A larger part is behind a smaller one if its accuracy is lower by more than two percentage points."""
_ERRORS = 2
"""Standard errors that a difference must exceed."""
_REASON = (
    "The usual reason is few rounds, or few clients that train the whole part: train longer, or give more clients its "
    "budget."
)
_LARGER = {"exit": "deeper exit", "level": "larger level"}
_SMALLER = {"exit": "shallower one", "level": "smaller one"}


@dataclass(frozen=True)
class PartAccuracies:
    """Accuracies of the exits or of the levels, smaller parts first.

    Attributes:
        seeds: Accuracies of each part by its name, one per seed, in the same order of seeds.
        counts: Sample size of each part: samples, or clients. A part is missing if the number is unknown.
        data: Description of the data.
    """

    seeds: Mapping[str, Sequence[float]]
    counts: Mapping[str, int]
    data: str

    @property
    def means(self) -> dict[str, float]:
        """The mean over the seeds of each part."""
        return {name: statistics.fmean(accuracies) for name, accuracies in self.seeds.items()}

    @property
    def behind(self) -> set[str]:
        """The parts that are behind a smaller one."""
        names = list(self.seeds)
        return {large for i, large in enumerate(names) for small in names[:i] if self._is_behind(large, small)}

    def _is_behind(self, large: str, small: str) -> bool:
        gaps = [a - b for a, b in zip(self.seeds[small], self.seeds[large], strict=True)]
        deviation = statistics.stdev(gaps) if len(gaps) > 1 else 0.0
        means = self.means
        chance = math.hypot(*(_compute_standard_error(means[name], self.counts.get(name)) for name in (small, large)))
        return statistics.fmean(gaps) > max(BEHIND, _ERRORS * chance, deviation)

    @property
    def last_is_behind(self) -> bool:
        """Whether the largest part is behind."""
        return bool(self.seeds) and list(self.seeds)[-1] in self.behind


def _compute_standard_error(accuracy: float, count: int | None) -> float:
    """Return sqrt(p (1 - p) / n). Outside of 0 to 1 (a regression) p counts as one half; 0 if n is unknown."""
    if not count:
        return 0.0
    return math.sqrt((accuracy * (1 - accuracy) if 0 <= accuracy <= 1 else 0.25) / count)


def explain_order(summaries: "Sequence[SummaryRecord]") -> list[str]:
    """Return a sentence each for exits and levels in the wrong order, with the means over the seeds.

    Args:
        summaries: The final numbers of a run, or of all seeds of a row.
    """
    sentences, has_caught_up = [], True
    for name, parts in (("exit", measure_exits(summaries)), ("level", measure_levels(summaries))):
        if not parts.behind:
            continue
        numbers = ", ".join(f"{name} {part} {100 * accuracy:.1f}%" for part, accuracy in parts.means.items())
        is_late = parts.last_is_behind and not _is_private(summaries)
        has_caught_up = has_caught_up and not is_late
        behind = [f"{name} {part}" for part in parts.means if part in parts.behind]
        some = f"{', '.join(behind[:-1])} and {behind[-1]}" if len(behind) > 1 else behind[0]
        late = f"{some} {'has' if len(behind) == 1 else 'have'} not caught up"
        worse = f"{some} {'does' if len(behind) == 1 else 'do'} worse than a {_SMALLER[name]}"
        rounds = f"{summaries[0].rounds} round{'' if summaries[0].rounds == 1 else 's'}"
        sentences.append(f"After {rounds} {late if is_late else worse}: {numbers}, {parts.data}.")
    return sentences if has_caught_up else _add_reason(sentences)


def explain_row_order(rows: "Mapping[str, Sequence[SummaryRecord]]") -> list[str]:
    """Return a sentence each for exits and levels, with the rows in which they are in the wrong order.

    Args:
        rows: The final numbers of all seeds by row.
    """
    sentences, has_caught_up = [], True
    for name, measure in (("exit", measure_exits), ("level", measure_levels)):
        late: list[str] = []
        worse: list[str] = []
        for row, summaries in rows.items():
            parts = measure(summaries)
            if parts.behind:
                (late if parts.last_is_behind and not _is_private(summaries) else worse).append(row)
        if late:
            has_caught_up = False
            sentences.append(f"The {_LARGER[name]}s have not caught up in {'; '.join(late)}.")
        if worse:
            sentences.append(f"A {_LARGER[name]} does worse than a {_SMALLER[name]} in {'; '.join(worse)}.")
    return sentences if has_caught_up else _add_reason(sentences)


def _add_reason(sentences: list[str]) -> list[str]:
    """Add the usual reason to the last sentence on parts that are still behind."""
    last = max(i for i, sentence in enumerate(sentences) if "caught up" in sentence)
    return [f"{sentence} {_REASON}" if i == last else sentence for i, sentence in enumerate(sentences)]


def _is_private(summaries: "Sequence[SummaryRecord]") -> bool:
    return any(summary.privacy is not None for summary in summaries)


def is_behind(accuracies: Sequence[float]) -> bool:
    """Return whether an accuracy (smaller parts first) from 0 to 1 is behind an earlier one."""
    return bool(PartAccuracies({str(i): [one] for i, one in enumerate(accuracies)}, {}, "").behind)


def measure_exits(summaries: "Sequence[SummaryRecord]") -> PartAccuracies:
    """Return the accuracies of each exit of the largest model, by its number."""
    headlines = [summary.headline for summary in summaries]
    for every, samples, data in (
        ([one.test_exits for one in headlines], [one.test_samples for one in headlines], "on the server's test set"),
        ([one.exits for one in headlines], [one.global_samples for one in headlines],
         f"on all clients' {describe_data(*summaries)}"),
    ):  # fmt: skip
        by_number = _collect_seeds([dict(enumerate(exits, 1)) for exits in every])
        if by_number:
            count = _find_smallest(samples)
            seeds = {str(number): accuracies for number, accuracies in by_number.items()}
            return PartAccuracies(seeds, dict.fromkeys(seeds, count) if count else {}, data)
    return PartAccuracies({}, {}, "")


def number_levels(names: Sequence[str]) -> dict[str, str]:
    """Return the number of each level, the key of its accuracy on the server's test set, by its name."""
    return {name: name if name.isdecimal() else str(number) for number, name in enumerate(names, 1)}


def measure_levels(summaries: "Sequence[SummaryRecord]") -> PartAccuracies:
    """Return the accuracies of each level, by its name."""
    names = [level.level for level in summaries[0].levels]
    headlines = [summary.headline for summary in summaries]
    by_number = _collect_seeds([one.test_levels for one in headlines])
    numbers = number_levels(names)
    on_test = {name: by_number[number] for name, number in numbers.items() if number in by_number}
    if len(on_test) > 1:
        samples = _find_smallest([one.test_samples for one in headlines])
        return PartAccuracies(
            on_test, dict.fromkeys(on_test, samples) if samples else {}, "all on the server's test set"
        )
    local_accuracies = _collect_seeds([{level.level: level.local for level in summary.levels} for summary in summaries])
    clients = {
        name: _find_smallest([one.levels[name].clients if name in one.levels else None for one in headlines])
        for name in local_accuracies
    }
    counts = {name: count for name, count in clients.items() if count}
    return PartAccuracies(local_accuracies, counts, "each on the data of its own clients")


def _find_smallest(counts: Sequence[int | None]) -> int | None:
    """Return the smallest count among the seeds, whose data are mostly equal; None if one is unknown."""
    numbers = [count for count in counts if count is not None]
    return min(numbers) if numbers and len(numbers) == len(counts) else None


def _collect_seeds(accuracies: Sequence[Mapping[K, float | None]]) -> dict[K, list[float]]:
    """Return the accuracies that all seeds have, in the order of the first seed."""
    every = {key: [one.get(key) for one in accuracies] for key in accuracies[0]}
    return {key: [v for v in values if v is not None] for key, values in every.items() if None not in values}
