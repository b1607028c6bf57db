"""The loop over rounds: it repeats `run_round`, evaluates, and stops a run that learns nothing, or no more."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleetfit.core import Federation, Server
from fleetfit.engines.base import Engine
from fleetfit.errors import NoUsableUpdates, RunError
from fleetfit.evaluation import Statistics, evaluate
from fleetfit.rounds.class_frequencies import learn_prior
from fleetfit.rounds.report import explain_empty_rounds, make_rollback_record, make_round_report
from fleetfit.rounds.round import Settings, run_round
from fleetfit.rounds.timekeeper import Timekeeper
from fleetfit.secure import SKIPPED, TOO_FEW
from fleetfit.training import initial_state


@dataclass(frozen=True, eq=False)
class Round:
    """The outcome of a round: the server after it, its report, and the statistics of an evaluation of all.

    `is_last` tells whether no round follows.
    """

    server: Server
    report: dict[str, Any]
    statistics: Statistics | None = None
    is_last: bool = False


def start(federation: Federation) -> Server:
    """Return the server before the first round.

    Raises:
        RunError: No client can take part.
    """
    if not len(federation.able):
        raise RunError(
            "no client can take part: none affords the smallest level, or none has training data.", key="fleet"
        )
    return Server(initial_state(federation.problem, federation.seed))


Renew = Callable[[Federation], Federation]
"""Returns the federation as it is now: on a real fleet, clients come, change and leave."""


def run(
    federation: Federation, engine: Engine, settings: Settings, server: Server,
    renew: Renew = lambda federation: federation, past_reports: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Round]:  # fmt: skip
    """Run the remaining rounds, and yield after each.

    Args:
        federation: The server's view.
        engine: Runs the jobs.
        settings: The settings of the rounds.
        server: The server after the rounds that are done.
        renew: Called before each round.
        past_reports: The reports of the rounds that are done.

    Raises:
        NoUsableUpdates: `settings.max_empty` rounds in a row had no usable update, or all rounds of the run.
    """
    stall, timer = StallDetector(settings, server, past_reports), Timekeeper()
    stopping = PlateauDetector(settings.patience, settings.scope.norms[0], past_reports)
    while server.round < settings.rounds and not stopping.is_due:
        federation = renew(federation)
        began = time.perf_counter()
        with timer.on("training"):
            server, frequencies = learn_prior(federation, engine, settings, server)
        if (secure := settings.secure) is not None and secure.journal.has_begun(secure.run, server.round):
            server, report = _skip_round(federation, settings, server)
        else:
            if settings.privacy is not None:
                settings.privacy.begin_round(server.round)
            server, report = run_round(federation, engine, settings, server, timer)
        report = report if frequencies is None else frequencies.add_to_report(report)
        public = report if settings.privacy is None else settings.privacy.redact_report(report)
        stall.note(report, public)
        is_last, statistics = server.round == settings.rounds, None
        is_due = is_last or (settings.evaluate_every and server.round % settings.evaluate_every == 0)
        if is_due and not (is_last and stall.has_failed):
            scope = settings.scope if is_last else settings.scope.reduce(settings.between)
            with timer.on("evaluation"):
                public["evaluate"], measured = evaluate(federation, engine, server, scope)
                if not is_last and stopping.would_stop(public):
                    scope = settings.scope
                    public["evaluate"], measured = evaluate(federation, engine, server, scope)
            stopping.note(public)
            is_last = is_last or stopping.is_due
            statistics = measured if scope.part is None else None
        public |= {"seconds": time.perf_counter() - began, "seconds_of": timer.read()}
        yield Round(server, public, statistics, is_last)
    stall.raise_if_failed()


class PlateauDetector:
    """Ends a run after `patience` evaluations in a row without a better validation accuracy.

    Where the evaluations before the last one measure a part, the complete one of the round decides.

    Args:
        patience: The number of evaluations; None for a run of all rounds.
        norm: The main batch-norm policy.
        reports: The reports of the rounds that are done.
    """

    def __init__(self, patience: int | None, norm: str, reports: Sequence[Mapping[str, Any]]) -> None:
        self._patience, self._norm = patience, norm
        self._best, self._since = -math.inf, 0
        for report in reports:
            self.note(report)

    @property
    def is_due(self) -> bool:
        """Whether the run ends."""
        return self._patience is not None and self._since >= self._patience

    def would_stop(self, report: Mapping[str, Any]) -> bool:
        """Return whether the run ends if a round's accuracies stay as they are."""
        return self._patience is not None and self._count(report) >= self._patience

    def note(self, report: Mapping[str, Any]) -> None:
        """Take the report of a round."""
        self._since = self._count(report)
        accuracy = self._find_accuracy(report)
        if accuracy is not None:
            self._best = max(self._best, accuracy)

    def _count(self, report: Mapping[str, Any]) -> int:
        """Return the number of evaluations since the best one, a round included."""
        accuracy = self._find_accuracy(report)
        if accuracy is None:
            return self._since
        return 0 if accuracy > self._best else self._since + 1

    def _find_accuracy(self, report: Mapping[str, Any]) -> float | None:
        return report.get("evaluate", {}).get(self._norm, {}).get("local")


class StallDetector:
    """Finds a run that learns nothing: no usable update in `max_empty` rounds in a row, or in all rounds.

    Rounds in which no client was connected do not count in a row. A simulated attack does not stop a run that has
    received an update before.
    """

    def __init__(self, settings: Settings, server: Server, past_reports: Sequence[Mapping[str, Any]]) -> None:
        self._settings = settings
        self._in_a_row: list[Mapping[str, Any]] = []
        self._empty = [report for report in past_reports if _is_empty(report, settings)]
        self._away = [report for report in past_reports if _is_away(report)]
        self._is_usable = any(report["train"]["clients"] != 0 for report in past_reports)  # None if withheld
        has_update = any(map(_has_update, past_reports)) if past_reports else server.round > 0
        self._keeps_going = bool(settings.hostile) and has_update

    @property
    def has_failed(self) -> bool:
        """Whether all rounds so far had no usable update."""
        return bool(self._empty or self._away) and not self._is_usable and not self._keeps_going

    def note(self, report: Mapping[str, Any], public: Mapping[str, Any]) -> None:
        """Take the report of a round, and what may be published of it.

        Raises:
            NoUsableUpdates: `max_empty` rounds in a row had no usable update.
        """
        if report["train"]["clients"]:
            self._is_usable, self._in_a_row = True, []
        elif _is_empty(report, self._settings):
            self._in_a_row, self._empty = [*self._in_a_row, public], [*self._empty, public]
        elif self._settings.privacy is None and _is_away(report):
            self._away.append(public)
        self._keeps_going = self._keeps_going or (bool(self._settings.hostile) and _has_update(report))
        if not self._keeps_going and len(self._in_a_row) >= self._settings.max_empty:
            raise NoUsableUpdates(explain_empty_rounds(self._in_a_row, in_a_row=True))

    def raise_if_failed(self) -> None:
        """Raise `NoUsableUpdates` if no round had a usable update."""
        if self.has_failed:
            raise NoUsableUpdates(explain_empty_rounds(self._empty or self._away, in_a_row=False))


def _has_update(report: Mapping[str, Any]) -> bool:
    """Return whether an update came in, perhaps in a round that was rolled back."""
    return bool(report["train"]["clients"]) or "undone" in report


def _is_empty(report: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether a round had no usable update although selected clients stayed connected."""
    failures, reason = report["failures"], report.get("undone", {}).get("reason")
    if report["train"]["clients"] != 0 or reason == SKIPPED:
        return False
    if settings.privacy is not None and not failures and reason in (None, TOO_FEW):
        return False
    return reason is not None or not _is_away(report)


def _is_away(report: Mapping[str, Any]) -> bool:
    """Return whether no client was connected in a round, or none stayed."""
    failures = report["failures"]
    are_absent = bool(failures) and all(failure["absent"] for failure in failures)
    return report["train"]["clients"] == 0 and (are_absent or report.get("online") == 0)


def _skip_round(federation: Federation, settings: Settings, server: Server) -> tuple[Server, dict[str, Any]]:
    """Skip a secure round that was begun before."""
    unchanged = replace(server, round=server.round + 1)
    local = settings.local.at_round(settings.rounds, server.round)
    record = make_rollback_record(SKIPPED, [], {}, federation.numbers)
    return unchanged, make_round_report(federation, unchanged, local, []) | {"undone": record}
