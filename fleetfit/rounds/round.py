"""A round: select, dispatch, train, validate, average, step, report.

ScaleFL, Algorithm 1, lines 6-19. `run_round` is the only round. Jobs are dispatched, and updates averaged, in one
order: predicted cost, largest first, then client id. So all engines compute the same bits.

A round without a usable update leaves the state as it was. So does a round that is rolled back, because a reply made a
hook raise or because the new state would not be finite (`fleetfit.rounds.rollback`).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleetfit.aggregate import Aggregate, average_sums
from fleetfit.core import Aggregator, Failure, Federation, Job, Local, Server, Update
from fleetfit.engines.base import Engine
from fleetfit.engines.secure import SecureEngine
from fleetfit.errors import (
    ConfigError,
    FleetFitError,
    ModelError,
    RunError,
    format_exception,
    one_line,
)
from fleetfit.evaluation import EvaluationPart, EvaluationScope, find_trained_levels
from fleetfit.hooks import Slot
from fleetfit.layout import State
from fleetfit.privacy import Privacy
from fleetfit.rounds.links import LinkFaults, LossyLinks
from fleetfit.rounds.report import (
    LEFT_OUT,
    count_by_honesty,
    make_element_counter,
    make_rollback_record,
    make_rollback_report,
    make_round_report,
)
from fleetfit.rounds.rollback import find_invalid_state
from fleetfit.rounds.timekeeper import Timekeeper
from fleetfit.secure import TOO_FEW, SecureRun
from fleetfit.seeds import derive_seed, make_numpy_rng
from fleetfit.submodel import Submodel, concat_state, make_flat_state
from fleetfit.validation import find_extra_error, find_sums_error, validate_and_measure


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
        patience: Early stopping: evaluations in a row without a better validation accuracy, after which the run ends.
            None for all rounds.
        max_empty: Rounds in a row without a usable update, or rolled back, after which the run stops.
        hostile: Clients that attack, in a simulation. The report counts them apart, and once an update has come in, no
            number of empty rounds stops the run.
        secure: Secure aggregation; the engine is then a `fleetfit.engines.secure.SecureEngine`. None without.
        links: Simulated faults of links; None for reliable links.
        quorum: Number of updates that ends a round, in a simulation with a clock; None to wait for every client.
        privacy: Differential privacy; its hooks are the method's. None without.
    """

    rounds: int
    local: Local = field(default_factory=Local)
    evaluate_every: int = 0
    scope: EvaluationScope = field(default_factory=EvaluationScope)
    between: EvaluationPart | None = None
    patience: int | None = None
    max_empty: int = 5
    hostile: frozenset[int] = frozenset()
    secure: SecureRun | None = None
    links: LinkFaults | None = None
    quorum: int | None = None
    privacy: Privacy | None = None


# ---- one round -----------------------------------------------------------------------------------------------------


def run_round(
    federation: Federation, engine: Engine, settings: Settings, server: Server, timer: Timekeeper | None = None
) -> tuple[Server, dict[str, Any]]:
    """Run one round of training (ScaleFL, Algorithm 1, lines 6-19).

    Updates stream: the tensors of one update are held at a time, unless the method sets `filter_updates`, its
    aggregator keeps them, or a quorum ends the round.

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

    # 3. Train, validate and average what comes back: updates, one at a time, or with [secure] their sums.
    if settings.secure is None:
        collection = collect_updates(federation, engine, settings, server, jobs, timer)
    else:
        collection = collect_sums(federation, engine, settings, server, jobs, len(slots), timer)

    # 4. Step: move the server to the average.
    after, metrics, reason = server, dict[str, Any](), collection.error
    if not reason:
        with timer.on("averaging"):
            after, metrics, reason = step_server(federation, server, collection)
    if not reason:
        with timer.on("validation"):
            reason = find_invalid_state(server, after) or ""

    # 5. Report; roll the round back, or commit the clients' memories.
    report = collection.add_to_report(make_round_report(federation, unchanged, local, collection.replies))
    if settings.hostile or "filter_updates" in method.own_hooks:
        report["received"] = count_by_honesty(
            settings.hostile, collection.replies, collection.levels, federation.numbers
        )
    if reason:
        record = make_rollback_record(reason, collection.replies, collection.norms, federation.numbers)
        return unchanged, make_rollback_report(federation, report, unchanged, local, record)
    report["failures"] += commit_memories(federation, engine, collection.replies)
    return after, report | ({"server": metrics} if metrics else {})


def sort_by_cost(federation: Federation, slots: Iterable[tuple[int, int, Submodel]]) -> list[Slot]:
    """Sort slots, also a plug-in's plain tuples, by predicted cost (elements), largest first, then by client."""
    count = make_element_counter(federation.problem.layout)
    return sorted(
        (Slot(*slot) for slot in slots),
        key=lambda slot: (-count(slot.submodel), slot.submodel.exits, slot.client, slot.level),
    )


def iter_jobs(federation: Federation, server: Server, slots: list[Slot], local: Local, rounds: int) -> Iterator[Job]:
    """Yield a training job for each slot; neighbors with the same sub-model share its tensors."""
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


@dataclass(frozen=True)
class _Collection:
    """What a round leaves for the server's step and for the report."""

    replies: Sequence[Update | Failure]  # updates without their tensors, and failures, in job order
    aggregate: Aggregate | None  # the average; None after an error
    error: str = ""  # the reason for which the round has to be rolled back, or empty
    add_to_report: Callable[[dict[str, Any]], dict[str, Any]] = dict  # adds what only the collector knows
    norms: Mapping[int, float] = field(default_factory=dict)
    levels: Mapping[int, int] = field(default_factory=dict)


def collect_updates(
    federation: Federation, engine: Engine, settings: Settings, server: Server, jobs: Iterator[Job], timer: Timekeeper
) -> _Collection:
    """Run the jobs of a round, and average their updates."""
    links = LossyLinks(settings.links, settings.quorum, federation.seed, federation.problem.layout)
    updates = RoundUpdates(federation, server, timer)
    for job, reply in timer.iterate("training", links.exchange(engine.run, jobs)):
        updates.take(job, reply)
    with timer.on("averaging"):
        aggregate = updates.average()
    return _Collection(updates.replies, aggregate, updates.error, links.add_to_report, updates.norms, updates.levels)


class RoundUpdates:
    """The updates of a round: each averaged as it comes, or together where the method sets `filter_updates`.

    Attributes:
        error: The reason for which the round has to be rolled back, or empty. Later updates are not used then.
        norms: Euclidean norm of each update's state, by job index; of some rejected updates, too.
        levels: Level, 0-based, of the sub-model that came back, by job index, where a client shrank it.
    """

    def __init__(self, federation: Federation, server: Server, timer: Timekeeper) -> None:
        self.error = ""
        self.norms: dict[int, float] = {}
        self.levels: dict[int, int] = {}
        self._federation, self._server, self._timer = federation, server, timer
        self._is_streaming = "filter_updates" not in federation.method.own_hooks
        self._replies: dict[int, Update | Failure] = {}
        self._valid: dict[int, Job] = {}  # jobs whose update is valid, and which the method has not admitted yet
        self._updates: list[Update] = []  # that `filter_updates` will get
        self._aggregator: Aggregator | None = None

    @property
    def replies(self) -> list[Update | Failure]:
        """Updates without their tensors, and failures, in job order."""
        return list(self._replies.values())

    def take(self, job: Job, reply: Update | Failure) -> None:
        """Validate and record a reply; average it if it is a usable update and is not for `filter_updates`."""
        with self._timer.on("validation"):
            reply = validate_and_measure(reply, job, self._federation, self.norms)
            self._replies[job.index] = _without_tensors(reply)
            if isinstance(reply, Failure):
                return
            if reply.submodel != reply.dispatched:
                with contextlib.suppress(ModelError):  # not the sub-model of a level: it counts for the one sent
                    self.levels[job.index] = self._federation.level_index(reply.submodel)
            self._valid[job.index] = replace(job, state={}, extra={})
        if self._is_streaming:
            with self._timer.on("averaging"):
                self._admit(reply)
        else:
            self._updates.append(reply)

    def average(self) -> Aggregate | None:
        """Return the average of the updates that the method admits; None after an error."""
        if not self._is_streaming:
            try:
                for update in self._federation.method.filter_updates(self._federation, self._server, self._updates):
                    self._admit(update)
            except Exception as error:
                self.error = self.error or explain_hook_error("receiving the updates (filter_updates)", error)
            self._updates = []
        if self.error:
            return None
        for index in self._valid:
            self._fail(index, LEFT_OUT)
        try:
            return self._get_aggregator().result()
        except Exception as error:
            self.error = explain_hook_error(_AVERAGING, error)
            return None

    def _admit(self, update: Any) -> None:
        """Average an update with the method's notes and weight; an error of these hooks makes it a failure."""
        if self.error:
            return
        if not isinstance(update, Update):
            raise ConfigError(f"filter_updates must return updates, got {type(update).__name__}.", key="filter_updates")
        job = self._valid.pop(update.index, None)
        if job is None or (update.round, update.client) != (job.round, job.client):
            raise ConfigError(
                f"filter_updates returned an update of client {update.client} (index {update.index}) that it did not "
                "get, or twice. It may leave updates out and change values, but no update's round, index or client.",
                key="filter_updates",
            )
        method, hook = self._federation.method, "annotate"
        try:
            metrics = {**update.metrics, **method.annotate(self._federation, self._server, update)}
            hook = "weigh"
            weight = method.weigh(update)
            if not 0 <= weight < float("inf"):
                raise ValueError(f"an aggregation weight must be finite and at least 0, got {weight}")
        except Exception as error:
            self._refuse(update, hook, error)
            return
        update = replace(update, metrics=metrics)
        self._replies[job.index] = _without_tensors(update)
        try:
            aggregator = self._get_aggregator()
        except Exception as error:
            self.error = explain_hook_error(_AVERAGING, error)
            return
        try:
            aggregator.add(update, weight)
        except Exception as error:
            explain_hook_error(_AVERAGING, error)  # raises what is not the fault of a reply
            self._refuse(update, "make_aggregator", error)

    def _get_aggregator(self) -> Aggregator:
        if self._aggregator is None:
            self._aggregator = self._federation.method.make_aggregator(self._federation, self._server)
        return self._aggregator

    def _refuse(self, update: Update, hook: str, error: Exception) -> None:
        reason = f"its update was refused: the method's {hook} raised an error: {format_exception(error)}"
        self._fail(update.index, one_line(reason, 500))

    def _fail(self, index: int, reason: str) -> None:
        reply = self._replies[index]
        self._replies[index] = Failure(
            reply.round, reply.index, reply.client, reply.level, reply.dispatched, reason, bytes_down=reply.bytes_down,
            bytes_up=reply.bytes_up, multiply_adds=reply.multiply_adds, simulated_s=reply.simulated_s,
        )  # fmt: skip


def _without_tensors(reply: Update | Failure) -> Update | Failure:
    return replace(reply, state={}, extra={}) if isinstance(reply, Update) else reply


_AVERAGING = "averaging the updates (make_aggregator)"


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


def step_server(federation: Federation, server: Server, collection: _Collection) -> tuple[Server, dict[str, Any], str]:
    """Move the server.

    Returns:
        The server after the step, the aggregate's metrics, and the reason for a rollback, or empty.
    """
    assert collection.aggregate is not None
    after, replies = server, tuple(collection.replies)
    for hook in ("step", "update_server_memory"):
        try:
            after = getattr(federation.method, hook)(federation, after, collection.aggregate, replies)
            if not isinstance(after, Server):
                raise ConfigError(
                    f"the method's {hook} must return the server after the round, got {type(after).__name__}.", key=hook
                )
        except Exception as error:
            return server, {}, explain_hook_error(f"the method's {hook}", error)
        after = replace(after, round=server.round + 1)
    trained = find_trained_levels(federation, server, replies)
    return replace(after, trained=trained), dict(collection.aggregate.metrics), ""


def commit_memories(
    federation: Federation, engine: Engine, replies: Sequence[Update | Failure]
) -> list[dict[str, Any]]:
    """Let the clients keep their memories of a round that is not rolled back; return the failures of that."""
    failures = []
    for update in replies:
        if isinstance(update, Update):
            try:
                engine.commit_memory(update)
            except Exception as error:
                reason = f"its update counts, but its memory could not be kept: {format_exception(error)}"
                level = federation.numbers[update.level]
                failures.append({"client": update.client, "level": level, "reason": reason, "absent": False})
    return failures


# ---- a secure round: the server sees sums only ---------------------------------------------------------------------


def collect_sums(
    federation: Federation, engine: Engine, settings: Settings, server: Server, jobs: Iterator[Job], clients: int,
    timer: Timekeeper,
) -> _Collection:  # fmt: skip
    """Run the jobs of a round, `clients` in number, with secure aggregation, and average the sums of their updates."""
    secure, privacy = settings.secure, settings.privacy
    assert secure is not None
    assert isinstance(engine, SecureEngine)
    if privacy is not None and clients < secure.rules.minimum:
        return _Collection([], None, TOO_FEW)
    secure.journal.enter(secure.run, server.round)  # before any message of it is sent
    with timer.on("training"):
        summed = engine.sums(jobs, server.state)
    entry = {"secure": {"hidden": summed.hidden, "clipped": summed.clipped}}
    with timer.on("validation"):
        if privacy is not None:
            summed = privacy.clamp_sums(summed, secure.grid.most_clipped)
        reason = summed.lost or find_sums_error(summed, concat_state(server.state).numel(), secure.grid.most) or ""
    aggregate: Aggregate | None = None
    if not reason:
        try:
            with timer.on("averaging"):
                if privacy is None:
                    aggregate = average_sums(federation.problem.layout, server.state, summed.blocks, summed.step)
                else:
                    aggregate = privacy.release_sums(federation, server, summed)
        except Exception as error:
            reason = explain_hook_error("averaging the sums", error)
    return _Collection(summed.reports, aggregate, reason, lambda report: report | entry)
