"""How long a comparison will take yet: from the rounds that were measured, for each row where it has any.

A round takes what the rounds of its row in its setting took on the mean, without evaluation; an evaluation what theirs
took. A row that has not run yet takes what the others take for each multiply-add that its plan foresees. Runs follow
one another on as many lines as there are jobs, those that tune before the others.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Group = tuple[str, str]
"""Row and setting, whose runs take equally long."""


@dataclass(frozen=True)
class ComparisonProgress:
    """How far a comparison is.

    Attributes:
        runs: How many runs it has, those that tune included.
        tuning: How many of them tune.
        finished: How many are finished.
        jobs: How many run at a time.
        seconds_left: Wall seconds that are left, by the rounds measured so far; None before any was.
        rows: How many rows it has.
        rows_measured: Of how many of them a round was measured. What the others take is a guess.
    """

    runs: int
    tuning: int
    finished: int
    jobs: int
    seconds_left: float | None
    rows: int
    rows_measured: int


@dataclass(frozen=True)
class ExpectedRun:
    """A run that is to come.

    Attributes:
        group: Its row and setting.
        rounds: Its rounds.
        every: After how many rounds it evaluates; 0 for the last only.
        tunes: Whether it tunes.
    """

    group: Group
    rounds: int
    every: int
    tunes: bool = False

    def evaluations(self, done: int) -> int:
        """Return how many evaluations are left after so many rounds."""
        if done >= self.rounds:
            return 0
        due = self.rounds // self.every - done // self.every if self.every else 0
        return due + (1 if not self.every or self.rounds % self.every else 0)


@dataclass
class _MeanSeconds:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += max(0.0, value)
        self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class _Measured:
    """What the runs of a group took, in seconds.

    The first round of a process also prepares what the others use again, so it counts only where there is no other.
    """

    first: _MeanSeconds = field(default_factory=_MeanSeconds)
    later: _MeanSeconds = field(default_factory=_MeanSeconds)
    evaluation: _MeanSeconds = field(default_factory=_MeanSeconds)
    around: _MeanSeconds = field(default_factory=_MeanSeconds)  # from the begin of a run to its first round

    def add(self, report: Mapping[str, Any], seconds: float, first: bool) -> None:
        evaluation = float(report.get("seconds_of", {}).get("evaluation", 0.0)) if "evaluate" in report else 0.0
        (self.first if first else self.later).add(seconds - evaluation)
        if "evaluate" in report:
            self.evaluation.add(evaluation)

    @property
    def round(self) -> float | None:
        return self.first.value if self.later.value is None else self.later.value


@dataclass
class _Begun:
    """A run at work: when its last round ended, and whether one was measured since it began."""

    since: float
    measured: bool = False


class Remaining:
    """Follows the runs of a comparison, and says what is left.

    Args:
        expected: All runs, in the order in which they begin, by their folder below the comparison's.
        jobs: How many run at a time.
        work: Multiply-adds of a round that the plan foresees, by row and setting, as far as they are known.
        clock: Gives the time in seconds.
    """

    def __init__(
        self,
        expected: Mapping[Path, ExpectedRun],
        jobs: int = 1,
        work: Mapping[Group, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expected, self._jobs, self._work, self._clock = dict(expected), jobs, work or {}, clock
        self._done = dict.fromkeys(self._expected, 0)
        self._finished: set[Path] = set()
        self._begun: dict[Path, _Begun] = {}
        self._now: dict[Group, _Measured] = {}
        self._before: dict[Group, _Measured] = {}

    # -- what happens

    def known(self, key: Path, reports: Iterable[Mapping[str, Any]], finished: bool) -> None:
        """Take in the rounds that a run's folder has from before; they count until its group is measured anew."""
        measured = self._before.setdefault(self._expected[key].group, _Measured())
        for number, report in enumerate(reports):
            measured.add(report, float(report["seconds"]), first=number == 0)
            self._done[key] = number + 1
        if finished:
            self._finished.add(key)

    def began(self, key: Path) -> None:
        """A run begins, or goes on."""
        self._begun[key] = _Begun(self._clock())

    def round(self, key: Path, report: Mapping[str, Any]) -> None:
        """A round of a run has ended."""
        now, begun = self._clock(), self._begun[key]
        measured = self._now.setdefault(self._expected[key].group, _Measured())
        seconds = now - begun.since
        if not begun.measured:
            inside = min(seconds, float(report["seconds"]))
            measured.around.add(seconds - inside)
            seconds = inside
        measured.add(report, seconds, first=not begun.measured)
        self._begun[key] = _Begun(now, measured=True)
        self._done[key] = report["round"]

    def finished(self, key: Path) -> None:
        """A run is finished."""
        self._begun.pop(key, None)
        self._finished.add(key)

    # -- what is left

    @property
    def progress(self) -> ComparisonProgress:
        """How far the comparison is."""
        return ComparisonProgress(
            runs=len(self._expected),
            tuning=sum(run.tunes for run in self._expected.values()),
            finished=len(self._finished),
            jobs=self._jobs,
            seconds_left=self.seconds_left(),
            rows=len({run.group[0] for run in self._expected.values()}),
            rows_measured=len({row for (row, _), found in self._groups().items() if found.round is not None}),
        )

    def seconds_left(self) -> float | None:
        """Return the wall seconds that are left; None before a round was measured."""
        if len(self._finished) == len(self._expected):
            return 0.0
        lines = [0.0] * self._jobs
        for tunes in (True, False):
            for key, run in self._expected.items():
                if run.tunes is tunes and key not in self._finished:
                    seconds = self._of_run(key, run)
                    if seconds is None:
                        return None
                    lines[lines.index(min(lines))] += seconds
            lines = [max(lines)] * self._jobs  # what is chosen is known when all have tuned
        return max(lines)

    def _of_run(self, key: Path, run: ExpectedRun) -> float | None:
        """Return the seconds that a run needs yet."""
        each = self._round_of(run.group)
        if each is None:
            return None
        done, begun = self._done[key], self._begun.get(key)
        seconds = (run.rounds - done) * each
        seconds += run.evaluations(done) * (self._mean(run.group, lambda found: found.evaluation.value) or 0.0)
        if begun is None or not begun.measured:
            seconds += self._mean(run.group, lambda found: found.around.value) or 0.0
        if begun is not None:
            seconds -= min(each, self._clock() - begun.since)
        return max(0.0, seconds)

    def _round_of(self, group: Group) -> float | None:
        """Return the seconds of a round without evaluation."""
        own = self._own(group, lambda found: found.round)
        if own is not None:
            return own
        work = self._work.get(group)
        others = self._others(group, lambda found: found.round)
        if not others:
            return None
        paces = [seconds / self._work[other] for other, seconds in others.items() if self._work.get(other)]
        if work and paces:
            return work * sum(paces) / len(paces)
        return sum(others.values()) / len(others)

    def _mean(self, group: Group, what: Callable[[_Measured], float | None]) -> float | None:
        """Return what a group took, or others where it was not measured."""
        own, others = self._own(group, what), self._others(group, what)
        return own if own is not None or not others else sum(others.values()) / len(others)

    def _groups(self) -> dict[Group, _Measured]:
        """Return what was measured, by group: now, or before where it was not measured anew."""
        return {**self._before, **self._now}

    def _own(self, group: Group, what: Callable[[_Measured], float | None]) -> float | None:
        for measured in (self._now, self._before):
            found = what(measured[group]) if group in measured else None
            if found is not None:
                return found
        return None

    def _others(self, group: Group, what: Callable[[_Measured], float | None]) -> dict[Group, float]:
        """Return what other groups took: those of the same row where there are some."""
        every = {one: self._own(one, what) for one in self._groups()}
        known = {one: value for one, value in every.items() if value is not None}
        return {one: value for one, value in known.items() if one[0] == group[0]} or known
