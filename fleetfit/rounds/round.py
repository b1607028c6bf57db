"""The round loop: select, dispatch, train, validate, aggregate, step, report.

ScaleFL, Algorithm 1, lines 6-19. `run_round` is the only round; `run` repeats it, evaluates, and stops a run that
learns nothing. Jobs are dispatched, and updates aggregated, in one order: predicted cost, largest first, then client
id. So all engines compute the same bits.

A round without a usable update leaves the state as it was. So does a round that is rolled back, because a reply made a
hook raise or because the new state would not be finite (`fleetfit.rounds.rollback`). After `patience` such rounds in a
row, or if all rounds are like that, the run stops with an error. Rounds in which no client was connected do not count
in a row. Under a simulated attack, such rounds do not stop a run that has received an update before.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fleetfit import messages
from fleetfit.aggregate import Aggregate, average_sums
from fleetfit.core import Aggregator, Failure, Federation, Job, Local, RoundSums, Server, Update
from fleetfit.errors import (
    ConfigError,
    FleetFitError,
    ModelError,
    NoUsableUpdates,
    RunError,
    format_exception,
    one_line,
)
from fleetfit.evaluate import EvaluationPart, EvaluationScope, Statistics, evaluate, find_trained_levels
from fleetfit.hooks import Slot
from fleetfit.layout import State
from fleetfit.privacy import Privacy
from fleetfit.rounds.class_frequencies import (
    ClassFrequencies,
    ask_class_frequencies,
    needs_class_frequencies,
    sum_class_frequencies,
)
from fleetfit.rounds.links import LinkFaults, LossyNetwork
from fleetfit.rounds.report import (
    LEFT_OUT,
    ElementCounter,
    count_by_honesty,
    explain_empty_rounds,
    make_rollback_record,
    make_rollback_report,
    make_round_report,
)
from fleetfit.rounds.rollback import find_invalid_state
from fleetfit.rounds.timekeeper import Timekeeper
from fleetfit.secure import SKIPPED, TOO_FEW, SecureRun
from fleetfit.seeds import derive_seed, make_numpy_rng
from fleetfit.submodel import Submodel, concat_state, make_flat_state
from fleetfit.training import initial_state
from fleetfit.validation import find_extra_error, find_sums_error, reject, validate_reply


class Engine(Protocol):
    """Where jobs run; it knows nothing of methods."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run jobs, drawn as they are needed, and yield the replies in job order."""
        ...

    def accept(self, update: Update) -> None:
        """Keep the client's memory of an update that the server accepted."""
        ...

    def save(self) -> dict[str, Any]:
        """Return the clients' memories as plain values and tensors."""
        ...

    def load(self, memories: Mapping[str, Any]) -> None:
        """Restore the memories that `save` returned."""
        ...

    def close(self) -> None:
        """End what the engine started."""
        ...


@dataclass(frozen=True)
class Settings:
    """The settings of a run's rounds.

    Attributes:
        rounds: Number of rounds.
        local: Local training.
        evaluate_every: Rounds between two evaluations; the last round is always evaluated. 0 for the last only.
        scope: Scope of the last evaluation. Earlier ones cover clients, with the first norm only, and the whole test
            set if `scope.always`.
        between: The part of the evaluation that earlier ones measure; None for all of it.
        patience: Rounds in a row without a usable update, or rolled back, after which the run stops.
        hostile: Clients that attack, in a simulation. The report counts them apart, and once an update has come in, no
            number of empty rounds stops the run.
        secure: Secure aggregation; the engine then has `sums` (`fleetfit.engines.secure`). None without.
        links: Simulated faults of links; None for reliable links.
        quorum: Number of updates that ends a round, in a simulation with a clock; None to wait for every client.
        privacy: Differential privacy; its hooks are the method's. None without.
    """

    rounds: int
    local: Local = field(default_factory=Local)
    evaluate_every: int = 0
    scope: EvaluationScope = field(default_factory=EvaluationScope)
    between: EvaluationPart | None = None
    patience: int = 5
    hostile: frozenset[int] = frozenset()
    secure: SecureRun | None = None
    links: LinkFaults | None = None
    quorum: int | None = None
    privacy: Privacy | None = None


@dataclass(frozen=True, eq=False)
class Round:
    """The outcome of a round: the server after it, its report, and the statistics of an evaluation of all."""

    server: Server
    report: dict[str, Any]
    statistics: Statistics | None = None


# ---- one round -----------------------------------------------------------------------------------------------------


def run_round(
    federation: Federation, engine: Engine, settings: Settings, server: Server, timer: Timekeeper | None = None
) -> tuple[Server, dict[str, Any]]:
    """Run one round of training (ScaleFL, Algorithm 1, lines 6-19).

    Updates stream: the tensors of one update are held at a time, unless the method sets `receive`, its aggregator keeps
    them, or a quorum ends the round.

    Args:
        federation: The server's view.
        engine: Runs the jobs.
        settings: The settings of the rounds.
        server: The server before the round.
        timer: Counts the seconds of the round's parts.

    Returns:
        The server after the round, with its round counted in any case, and the report. A round that is rolled back
        leaves the state and all memories as they were; its report has the reason under "undone".
    """
    method, timer = federation.method, timer or Timekeeper()
    local = settings.local.at_round(settings.rounds, server.round)
    unchanged = replace(server, round=server.round + 1)

    # 1. Select clients, and assign a sub-model to each.
    rng = make_numpy_rng(federation.seed, server.round, "choose")
    slots = sort_by_cost(federation, method.assign(federation, server, rng))
    if not slots and settings.privacy is None:  # a private round adds its noise without a client, too
        return unchanged, make_round_report(federation, unchanged, local, [])

    # 2. Dispatch: make the jobs, each when the engine asks for it.
    jobs = iter_jobs(federation, server, slots, local, settings.rounds)
    if settings.secure is not None:
        return run_secure_round(federation, engine, settings, server, local, jobs, len(slots), timer)

    # 3. Train, validate and aggregate, one reply at a time.
    network = LossyNetwork(settings.links, settings.quorum, federation.seed, federation.problem.layout)
    results = RoundResults(federation, server)
    aggregation = Aggregation(federation, server, results)
    for job, reply in timer.iterate("training", network.exchange(engine.run, jobs)):
        with timer.on("validation"):
            update = results.add(job, reply)
        if update is not None:
            with timer.on("averaging"):
                aggregation.add(update)

    # 4. Step: average the updates that the method admits, and move the server.
    with timer.on("averaging"):
        after, metrics, reason = step_server(federation, server, aggregation, results)
    if not reason:
        with timer.on("validation"):
            reason = find_invalid_state(server, after) or ""

    # 5. Report; roll the round back, or commit the clients' memories.
    report = network.add_to_report(make_round_report(federation, unchanged, local, results.replies))
    if settings.hostile or "receive" in method.own_hooks:
        report["received"] = count_by_honesty(settings.hostile, results.replies, results.levels)
    if reason:
        record = make_rollback_record(reason, results.replies, results.norms)
        return unchanged, make_rollback_report(federation, report, unchanged, local, record)
    report["failures"] += commit_memories(engine, results.replies)
    return after, report | ({"server": dict(metrics)} if metrics else {})


def sort_by_cost(federation: Federation, slots: Iterable[tuple[int, int, Submodel]]) -> list[Slot]:
    """Sort slots, also a plug-in's plain tuples, by predicted cost (elements), largest first, then by client."""
    counter = ElementCounter(federation.problem.layout)
    return sorted(
        (Slot(*slot) for slot in slots),
        key=lambda slot: (-counter.count(slot.submodel), slot.submodel.exits, slot.client, slot.level),
    )


def iter_jobs(federation: Federation, server: Server, slots: list[Slot], local: Local, rounds: int) -> Iterator[Job]:
    """Yield a training job for each slot; neighbours with the same sub-model share its tensors."""
    method = federation.method
    is_shared = "dispatch" not in method.own_hooks
    last: Submodel | None = None
    state: State = {}
    for index, (client, level, submodel) in enumerate(slots):
        if not is_shared or submodel != last:
            last, layout = submodel, federation.problem.layout
            state = make_flat_state(layout, submodel, method.dispatch(federation, server, client, submodel))
        extra = method.attach(federation, server, client, submodel)
        if reason := find_extra_error(extra, method.declare_extra(federation.problem, submodel)[0]):
            raise ConfigError(f"the method's attach: {reason}", key="attach")
        seed = derive_seed(federation.seed, server.round, "train", index, client)
        yield Job(
            "train", server.round, rounds, index, client, submodel, state, federation.method_spec, seed, level, local,
            prior=server.prior if method.needs_prior else (), extra=extra,
        )  # fmt: skip


class RoundResults:
    """The outcome of each job of a round, in job order.

    Attributes:
        norms: Euclidean norm of each update's state, by job index; of some rejected updates, too.
        levels: Level, 0-based, of the sub-model that came back, by job index, where a client shrank it.
    """

    def __init__(self, federation: Federation, server: Server) -> None:
        self.norms: dict[int, float] = {}
        self.levels: dict[int, int] = {}
        self._federation, self._server = federation, server
        self._replies: dict[int, Update | Failure] = {}
        self._valid: dict[int, Job] = {}  # jobs whose update is valid, and which the method has not admitted yet

    @property
    def replies(self) -> list[Update | Failure]:
        """Updates without their states, and failures."""
        return list(self._replies.values())

    def add(self, job: Job, reply: Update | Failure) -> Update | None:
        """Validate and record a reply, and return it if it is a usable update."""
        reply = validate_and_measure(reply, job, self._federation, self.norms)
        if isinstance(reply, Failure):
            self._replies[job.index] = reply
            return None
        self._replies[job.index] = replace(reply, state={}, extra={})
        if reply.submodel != reply.dispatched:
            with contextlib.suppress(ModelError):  # not the sub-model of a level: it counts for the one that was sent
                self.levels[job.index] = self._federation.level_index(reply.submodel)
        self._valid[job.index] = replace(job, state={}, extra={})
        return reply

    def admit(self, update: Any) -> tuple[Update, float] | None:
        """Return an update that the method admits, with its notes, and its weight.

        An error of the method's `note` or `weight` makes the update a failure; then this returns None.

        Raises:
            ConfigError: It is not an update of this round, or was admitted before.
        """
        if not isinstance(update, Update):
            raise ConfigError(f"receive must return updates, got {type(update).__name__}.", key="receive")
        job = self._valid.pop(update.index, None)
        if job is None or (update.round, update.client) != (job.round, job.client):
            raise ConfigError(
                f"receive returned an update of client {update.client} (index {update.index}) that it did not get, or "
                "twice. It may leave updates out and change their values, but not their round, index or client.",
                key="receive",
            )
        method, hook = self._federation.method, "note"
        try:
            metrics = {**update.metrics, **method.note(self._federation, self._server, update)}
            hook = "weight"
            weight = method.weight(update)
            if not 0 <= weight < float("inf"):
                raise ValueError(f"an aggregation weight must be finite and at least 0, got {weight}")
        except Exception as error:
            self.refuse(update, hook, error)
            return None
        update = replace(update, metrics=metrics)
        self._replies[job.index] = replace(update, state={}, extra={})
        return update, weight

    def leave_out_rest(self) -> None:
        """Make a failure of each valid update that the method has not admitted."""
        for index in self._valid:
            self._fail(index, LEFT_OUT)
        self._valid.clear()

    def refuse(self, update: Update, hook: str, error: Exception) -> None:
        """Make a failure of an update for which a hook raised an error."""
        reason = f"its update was refused: the method's {hook} raised an error: {format_exception(error)}"
        self._fail(update.index, one_line(reason, 500))

    def _fail(self, index: int, reason: str) -> None:
        reply = self._replies[index]
        self._replies[index] = Failure(
            reply.round, reply.index, reply.client, reply.level, reply.dispatched, reason, bytes_down=reply.bytes_down,
            bytes_up=reply.bytes_up, multiply_adds=reply.multiply_adds, simulated_s=reply.simulated_s,
        )  # fmt: skip


def validate_and_measure(
    reply: Update | Failure, job: Job, federation: Federation, norms: dict[int, float] | None = None
) -> Update | Failure:
    """Return a reply as validation passes it, with its bytes counted; never raises.

    Args:
        reply: The reply, whatever it holds.
        job: The job that it answers.
        federation: The server's view.
        norms: Gets the norm of a training update's state, by job index.
    """
    result = validate_reply(reply, job, federation, norms)
    bytes_up = 0
    if not (isinstance(result, Failure) and result.absent):
        try:
            bytes_up = messages.reply_size(reply, federation.problem.layout)
        except Exception as error:  # no client can have sent it
            if isinstance(result, Update):
                result = reject(job, f"it has no bytes: {format_exception(error)}")
    return replace(result, bytes_down=messages.job_size(job, federation.problem.layout), bytes_up=bytes_up)


class Aggregation:
    """Aggregates the updates of a round: each as it comes, or together where the method sets `receive`.

    Attributes:
        error: The reason for which the round has to be rolled back, or empty. Later updates are not used then.
    """

    def __init__(self, federation: Federation, server: Server, results: RoundResults) -> None:
        self.error = ""
        self._federation, self._server, self._results = federation, server, results
        self._is_streaming = "receive" not in federation.method.own_hooks
        self._updates: list[Update] = []
        self._aggregator: Aggregator | None = None

    def add(self, update: Update) -> None:
        """Take a valid update."""
        if not self._is_streaming:
            self._updates.append(update)
        elif not self.error and (admitted := self._results.admit(update)):
            self._aggregate(*admitted)

    def finish(self) -> Aggregate | None:
        """Return the average of the updates that the method admits; None after an error."""
        if not self._is_streaming:
            try:
                for update in self._federation.method.receive(self._federation, self._server, self._updates):
                    if not self.error and (admitted := self._results.admit(update)):
                        self._aggregate(*admitted)
            except Exception as error:
                self.error = self.error or explain_hook_error("receiving the updates (receive)", error)
            self._updates = []
        if self.error:
            return None
        self._results.leave_out_rest()
        try:
            return self._get_aggregator().result()
        except Exception as error:
            self.error = explain_hook_error(_AVERAGING, error)
            return None

    def _aggregate(self, update: Update, weight: float) -> None:
        try:
            aggregator = self._get_aggregator()
        except Exception as error:
            self.error = explain_hook_error(_AVERAGING, error)
            return
        try:
            aggregator.add(update, weight)
        except Exception as error:
            explain_hook_error(_AVERAGING, error)  # raises what is not the fault of a reply
            self._results.refuse(update, "aggregate", error)

    def _get_aggregator(self) -> Aggregator:
        if self._aggregator is None:
            self._aggregator = self._federation.method.aggregate(self._federation, self._server)
        return self._aggregator


_AVERAGING = "averaging the updates (aggregate)"


def explain_hook_error(step: str, error: Exception) -> str:
    """Return the reason for which a round is rolled back.

    Args:
        step: The step of the round in which a hook raised the error.
        error: The error.

    Raises:
        FleetFitError: The error itself, if it is not the fault of a reply but of the hook's user.
    """
    if isinstance(error, FleetFitError) and not isinstance(error, RunError):
        raise error
    return f"{step} raised an error: {format_exception(error)}"


def step_server(
    federation: Federation, server: Server, aggregation: Aggregation, results: RoundResults
) -> tuple[Server, Mapping[str, Any], str]:
    """Average the updates and move the server.

    Returns:
        The server after the step, the aggregate's metrics, and the reason for a rollback, or empty.
    """
    aggregate = aggregation.finish()
    if aggregate is None:
        return server, {}, aggregation.error
    after, replies = server, tuple(results.replies)
    for hook in ("step", "observe"):
        try:
            after = _call_step(hook, federation, after, aggregate, replies)
        except Exception as error:
            return server, {}, explain_hook_error(f"the method's {hook}", error)
        after = replace(after, round=server.round + 1)
    return replace(after, trained=find_trained_levels(federation, server, replies)), aggregate.metrics, ""


def _call_step(hook: str, federation: Federation, *arguments: Any) -> Server:
    after = getattr(federation.method, hook)(federation, *arguments)
    if not isinstance(after, Server):
        raise ConfigError(
            f"the method's {hook} must return the server after the round, got {type(after).__name__}.", key=hook
        )
    return after


def commit_memories(engine: Engine, replies: Sequence[Update | Failure]) -> list[dict[str, Any]]:
    """Let the clients keep their memories of a round that is not rolled back; return the failures of that."""
    failures = []
    for update in replies:
        if isinstance(update, Update):
            try:
                engine.accept(update)
            except Exception as error:
                reason = f"its update counts, but its memory could not be kept: {format_exception(error)}"
                failures.append({"client": update.client, "level": update.level + 1, "reason": reason, "absent": False})
    return failures


# ---- a secure round: the server sees sums only ---------------------------------------------------------------------


def run_secure_round(
    federation: Federation, engine: Engine, settings: Settings, server: Server, local: Local, jobs: Iterator[Job],
    clients: int, timer: Timekeeper,
) -> tuple[Server, dict[str, Any]]:  # fmt: skip
    """Run steps 3 to 5 of a round with secure aggregation; see `run_round` for what it returns.

    Args:
        federation: The server's view.
        engine: Runs the jobs, and returns the sums of their updates.
        settings: The settings of the rounds.
        server: The server before the round.
        local: Local training in this round.
        jobs: The jobs.
        clients: The number of jobs.
        timer: Counts the seconds of the round's parts.
    """
    assert settings.secure is not None
    unchanged = replace(server, round=server.round + 1)
    if settings.privacy is not None and clients < settings.secure.rules.minimum:
        record = make_rollback_record(TOO_FEW, [], {})
        return unchanged, make_round_report(federation, unchanged, local, []) | {"undone": record}
    sum_updates = getattr(engine, "sums", None)
    if sum_updates is None:
        raise ConfigError(
            f"[secure]: the engine {type(engine).__name__} returns updates, and not their sums.", key="secure"
        )
    settings.secure.begin(server.round)
    with timer.on("training"):
        summed: RoundSums = sum_updates(jobs, server.state)
    after, reason = step_with_sums(federation, server, summed, settings, timer)
    report = make_round_report(federation, unchanged, local, summed.reports)
    report["secure"] = {"hidden": summed.hidden, "clipped": summed.clipped}
    if settings.hostile:
        report["received"] = count_by_honesty(settings.hostile, summed.reports, {})
    if reason:
        record = make_rollback_record(reason, summed.reports, {})
        return unchanged, make_rollback_report(federation, report, unchanged, local, record)
    report["failures"] += commit_memories(engine, summed.reports)
    return after, report


def step_with_sums(
    federation: Federation, server: Server, summed: RoundSums, settings: Settings, timer: Timekeeper
) -> tuple[Server, str]:
    """Move the server by the sums of a round; return it, and the reason for a rollback, or empty."""
    assert settings.secure is not None
    grid, privacy = settings.secure.grid, settings.privacy
    with timer.on("validation"):
        if privacy is not None:
            summed = privacy.clamp_sums(summed, grid.most_clipped)
        reason = summed.lost or find_sums_error(summed, concat_state(server.state).numel(), grid.most)
    if reason:
        return server, reason
    with timer.on("averaging"):
        try:
            if privacy is None:
                aggregate = average_sums(federation.problem.layout, server.state, summed.blocks, summed.step)
            else:
                aggregate = privacy.release_sums(federation, server, summed)
            after = _call_step("step", federation, server, aggregate, summed.reports)
        except Exception as error:
            return server, explain_hook_error("the method's step", error)
    after = replace(after, round=server.round + 1, trained=find_trained_levels(federation, server, summed.reports))
    with timer.on("validation"):
        return after, find_invalid_state(server, after) or ""


# ---- the loop over rounds --------------------------------------------------------------------------------------------


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


def keep_federation(federation: Federation) -> Federation:
    """Return the federation: its clients stay the same."""
    return federation


def run(
    federation: Federation, engine: Engine, settings: Settings, server: Server, renew: Renew = keep_federation,
    past_reports: Sequence[Mapping[str, Any]] = (),
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
        NoUsableUpdates: `settings.patience` rounds in a row had no usable update, or all rounds of the run.
    """
    empty_in_a_row: list[Mapping[str, Any]] = []
    empty, away = [r for r in past_reports if _is_empty(r, settings)], [r for r in past_reports if _is_away(r)]
    is_usable = any(report["train"]["clients"] != 0 for report in past_reports)  # None where a run withholds it
    has_update = any(map(_has_update, past_reports)) if past_reports else server.round > 0
    keeps_going = bool(settings.hostile) and has_update
    timer = Timekeeper()
    while server.round < settings.rounds:
        federation = renew(federation)
        began = time.perf_counter()
        server, frequencies = _ask_for_prior(federation, engine, settings, server, timer)
        if settings.secure is not None and settings.secure.has_begun(server.round):
            server, report = _skip_round(federation, settings, server)
        else:
            if settings.privacy is not None:
                settings.privacy.begin_round(server.round)
            server, report = run_round(federation, engine, settings, server, timer)
        report = report if frequencies is None else frequencies.add_to_report(report)
        public = report if settings.privacy is None else settings.privacy.redact_report(report)
        if report["train"]["clients"]:
            is_usable, empty_in_a_row = True, []
        elif _is_empty(report, settings):
            empty_in_a_row, empty = [*empty_in_a_row, public], [*empty, public]
        elif settings.privacy is None and _is_away(report):
            away.append(public)
        keeps_going = keeps_going or (bool(settings.hostile) and _has_update(report))
        if not keeps_going and len(empty_in_a_row) >= settings.patience:
            raise NoUsableUpdates(explain_empty_rounds(empty_in_a_row, in_a_row=True))
        is_last, statistics = server.round == settings.rounds, None
        has_failed = bool(empty or away) and not is_usable and not keeps_going
        is_due = is_last or (settings.evaluate_every and server.round % settings.evaluate_every == 0)
        if is_due and not (is_last and has_failed):
            scope = settings.scope if is_last else settings.scope.reduce(settings.between)
            with timer.on("evaluation"):
                public["evaluate"], measured = evaluate(federation, engine, server, scope)
            statistics = measured if scope.part is None else None
        public |= {"seconds": time.perf_counter() - began, "seconds_of": timer.read()}
        yield Round(server, public, statistics)
    if (empty or away) and not is_usable and not keeps_going:
        raise NoUsableUpdates(explain_empty_rounds(empty or away, in_a_row=False))


def _ask_for_prior(
    federation: Federation, engine: Engine, settings: Settings, server: Server, timer: Timekeeper
) -> tuple[Server, ClassFrequencies | None]:
    """Return the server with the fleet's class frequencies, and these if they are new."""
    if settings.privacy is not None or not needs_class_frequencies(federation, server, settings.scope):
        return server, None
    ask = ask_class_frequencies if settings.secure is None else sum_class_frequencies
    with timer.on("training"):
        frequencies = ask(federation, engine, server)
    return replace(server, prior=frequencies.prior), frequencies


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
    record = make_rollback_record(SKIPPED, [], {})
    return unchanged, make_round_report(federation, unchanged, local, []) | {"undone": record}
