"""The only round loop: assign, run the jobs, check, merge, step, evaluate; engines' protocol; a round's report.

ScaleFL Algorithm 1 lines 6-19. Jobs are dispatched, and updates folded, in one canonical order: predicted cost,
largest first, then client id. A round without a usable update leaves the state as it was, and so does one that would
spoil it (`fleetfit.soundness`). After `patience` such rounds in a row the run stops, and at its end if all were. Rounds
in which nobody was connected, or all who were chosen went away, do not count. Nor do they under a known attack once
anything has come in: they are what the attack did, and the run is to show it.

The loop counts the rounds, whatever a method makes of `server.round`. Nothing that a reply makes anybody raise ends the
run: it is that reply's failure, and says what was raised.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from fleetfit import messages
from fleetfit.errors import ConfigError, FleetFitError, ModelError, NoUsableUpdates, RunError, format_exception
from fleetfit.evaluate import EvaluationScope, Statistics, evaluate, trained_levels
from fleetfit.layout import Layout, State
from fleetfit.links import Links, Way
from fleetfit.method import FEDAVG
from fleetfit.privacy import Privacy
from fleetfit.secure import SKIPPED, TOO_FEW, SecureRun
from fleetfit.seeds import derive_seed, make_numpy_rng
from fleetfit.soundness import explain_empty_rounds, spoilt, undone
from fleetfit.submodel import Submodel
from fleetfit.sums import stepped_by
from fleetfit.timekeeper import Timekeeper
from fleetfit.training import initial_state
from fleetfit.validation import examined, refused
from fleetfit.values import Failure, Federation, Job, Local, Server, Summed, Update

# ---- what a round's report says: plain values, as they stand in `metrics.jsonl` ------------------------------------


class Elements:
    """How many elements sub-models have, each shape counted once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[Any, int] = {}

    def of(self, piece: Submodel) -> int:
        """Return the elements of a sub-model."""
        key = (tuple(piece.sizes.items()), piece.exits)
        if key not in self._known:
            shapes = self._layout.shapes(piece.sizes, piece.exits).values()
            self._known[key] = sum(int(np.prod(shape)) for shape in shapes)
        return self._known[key]


def waste(layout: Layout, reports: Sequence[Update | Failure]) -> float:
    """Return a round's communication waste rate: 1 - elements that came back / elements sent (AdaptiveFL 4.4)."""
    elements = Elements(layout)
    sent = sum(elements.of(r.dispatched) for r in reports)
    back = sum(elements.of(r.submodel) for r in reports if isinstance(r, Update))
    return 1 - back / sent if sent else 0.0


def report_of(
    federation: Federation, server: Server, local: Local, reports: Sequence[Update | Failure]
) -> dict[str, Any]:
    """Return the report of a round."""
    good = [r for r in reports if isinstance(r, Update)]
    samples = sum(u.num_examples for u in good)
    by_level: dict[str, int] = {}
    for update in good:
        by_level[str(update.level + 1)] = by_level.get(str(update.level + 1), 0) + 1
    told = bool(samples) and all("loss" in u.metrics for u in good)  # of a secure round nobody tells
    loss = sum(u.metrics["loss"] * u.num_examples for u in good) / samples if told else None
    failures = [r for r in reports if isinstance(r, Failure)]
    return {
        "round": server.round,
        "lr": local.lr,
        "train": {"loss": loss, "clients": len(good), "samples": samples, "by_level": by_level},
        "failures": [{"client": r.client, "level": r.level + 1, "reason": r.reason, "absent": r.absent}
                     for r in failures],
        "bytes_down": sum(r.bytes_down for r in reports),
        "bytes_up": sum(r.bytes_up for r in reports),
        "waste": waste(federation.problem.layout, reports),
        "multiply_adds": sum(r.multiply_adds for r in reports),
        **counted(good),
        "simulated_s": simulated_seconds(reports, local.deadline_s),
        **({} if local.deadline_s is None else {"deadline": met(reports)}),
        **({} if federation.connected is None else {"online": len(federation.reachable(server.round - 1))}),
    }  # fmt: skip


def counted(updates: Sequence[Update]) -> dict[str, Any]:
    """Return the sums of what clients count, by what is counted and by level: metrics that are tables of numbers."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for update in updates:
        for name, value in update.metrics.items():
            if isinstance(value, Mapping) and all(type(n) in (int, float) for n in value.values()):
                texts = {str(key): n for key, n in value.items()}
                found.setdefault(name, {}).setdefault(str(update.level + 1), Counter()).update(texts)
    return {"counts": {n: {lv: dict(c) for lv, c in levels.items()} for n, levels in found.items()}} if found else {}


LEFT_OUT = "its update was left out by the method (receive)"
"""The reason of a failure that stands for an update which `receive` did not give on."""


def told_apart(hostile: Set[int], reports: Sequence[Update | Failure], trained: Mapping[int, int]) -> dict[str, Any]:
    """Return how many hostile and honest clients sent an update in a round, and how many of these were left out.

    Args:
        hostile: Their ids.
        reports: What came of the round's jobs.
        trained: The level, 0-based, of the sub-model that came back, by index of the job.

    Returns:
        Under "sent" and "left_out" each: "hostile", and "honest" by the level that was trained.
    """
    found: dict[str, Any] = {key: {"hostile": 0, "honest": Counter()} for key in ("sent", "left_out")}
    for report in reports:
        left_out = isinstance(report, Failure) and report.reason == LEFT_OUT
        for key in ("sent", "left_out") if left_out else ("sent",) if isinstance(report, Update) else ():
            if report.client in hostile:
                found[key]["hostile"] += 1
            else:
                found[key]["honest"][str(trained.get(report.index, report.level) + 1)] += 1
    return {key: {**counts, "honest": dict(sorted(counts["honest"].items()))} for key, counts in found.items()}


def simulated_seconds(reports: Sequence[Update | Failure], deadline_s: float | None) -> float | None:
    """Return the simulated seconds of a synchronous round: those of its slowest client; None where no clock is.

    The server waits for everybody, until the deadline where there is one; whoever was lost on the way is waited for
    until then too.
    """
    known = [r.simulated_s for r in reports if r.simulated_s is not None]
    if not known:
        return None
    if deadline_s is None:
        return max(known)
    return deadline_s if len(known) < len(reports) else min(max(known), deadline_s)


def met(reports: Sequence[Update | Failure]) -> dict[str, int]:
    """Return how many clients trained a shallower exit, stopped before the end of their training, or came too late."""
    good = [r for r in reports if isinstance(r, Update)]
    return {
        "shallower": sum(len(u.submodel.exits) < len(u.dispatched.exits) for u in good),
        "stopped": sum(bool(u.metrics.get("stopped")) for u in good),
        "late": sum(r.late for r in reports if isinstance(r, Failure)),
    }


# ---- the loop ------------------------------------------------------------------------------------------------------


class Engine(Protocol):
    """Where jobs run; it knows nothing of methods."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run jobs, drawn as they are needed, and yield the replies in the jobs' order."""
        ...

    def accept(self, update: Update) -> None:
        """Keep what the client remembers of this update: the server accepted it."""
        ...

    def save(self) -> dict[str, Any]:
        """Return the clients' memories as a nest of plain values and tensors."""
        ...

    def load(self, memories: Mapping[str, Any]) -> None:
        """Take back what `save` returned."""
        ...

    def close(self) -> None:
        """End what the engine started."""
        ...


def constant(round: int) -> float:
    """Keep the learning rate."""
    return 1.0


@dataclass(frozen=True)
class Settings:
    """What a run does each round.

    Attributes:
        rounds: Rounds in all.
        local: Local training; its `lr` is multiplied by `schedule(round)`.
        schedule: Factor on the learning rate of each round, 0-based.
        evaluate_every: Evaluate after every so many rounds, and after the last; 0 for the last only.
        wanted: What the last evaluation covers; those on the way cover clients, with the first norm only, and the
            whole test set if `wanted.always`.
        patience: Rounds in a row without a usable update, or undone, after which the run stops.
        hostile: Clients that are known to attack, in a simulation: the report counts them apart, and once anything
            has come in, no number of such rounds stops the run.
        secure: Where the server is to see sums only; the engine then has `sums` (`fleetfit.secured`).
        links: How messages are lost and repeated, in a simulation; None: they are not.
        quorum: Updates that end a round, in a simulation with a clock; None: everybody is waited for.
        privacy: What each round pays for, and leaves out of its report; its hooks are the method's.
    """

    rounds: int
    local: Local = field(default_factory=Local)
    schedule: Callable[[int], float] = constant
    evaluate_every: int = 0
    wanted: EvaluationScope = field(default_factory=EvaluationScope)
    patience: int = 5
    hostile: frozenset[int] = frozenset()
    secure: SecureRun | None = None
    links: Links | None = None
    quorum: int | None = None
    privacy: Privacy | None = None


@dataclass(frozen=True, eq=False)
class Round:
    """What a round left: the server after it, a report of plain values, and the statistics that its evaluation used."""

    server: Server
    report: dict[str, Any]
    statistics: Statistics | None = None


def start(federation: Federation) -> Server:
    """Return the server before the first round."""
    if not len(federation.able):
        raise RunError(
            "no client can take part: none affords the smallest level, or none has training data.", key="fleet"
        )
    return Server(initial_state(federation.problem, federation.seed))


Renew = Callable[[Federation], Federation]
"""Returns the federation as it is now: on a real fleet, clients come, change and go."""


def unchanged(federation: Federation) -> Federation:
    """Return the federation: nobody comes or goes."""
    return federation


def run(
    federation: Federation, engine: Engine, settings: Settings, server: Server, renew: Renew = unchanged,
    before: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Round]:  # fmt: skip
    """Run the rounds that are left, and yield after each.

    Args:
        federation: What is trained, and by whom.
        engine: Runs the jobs.
        settings: What a run does each round.
        server: The server after the rounds that are done.
        renew: Called before each round.
        before: The reports of the rounds that are done.

    Raises:
        NoUsableUpdates: `settings.patience` rounds in a row had no usable update, or all rounds of the run.
    """
    empty: list[Mapping[str, Any]] = []
    useless = [report for report in before if _is_empty(report, settings)]
    usable = any(report["train"]["clients"] != 0 for report in before)  # None: withheld
    came_in = any(report["train"]["clients"] or "undone" in report for report in before) if before else server.round > 0
    ruinable = bool(settings.hostile) and came_in
    watch = Timekeeper()
    while server.round < settings.rounds:
        federation = renew(federation)
        began = time.perf_counter()
        if settings.secure is not None and settings.secure.begun(server.round):
            server, report = _skipped(federation, settings, server)
        else:
            if settings.privacy is not None:
                settings.privacy.begin(server.round)
            server, report = one_round(federation, engine, settings, server, watch)
        told = report if settings.privacy is None else settings.privacy.withheld(report)
        if report["train"]["clients"]:
            usable, empty = True, []
        elif _is_empty(report, settings):
            empty, useless = [*empty, told], [*useless, told]
        ruinable = ruinable or bool(settings.hostile and (report["train"]["clients"] or "undone" in report))
        if not ruinable and len(empty) >= settings.patience:
            raise NoUsableUpdates(explain_empty_rounds(empty, in_a_row=True))
        last, in_vain = server.round == settings.rounds, useless and not usable and not ruinable
        report, found = told, None
        if _due(server.round, settings) and not (last and in_vain):
            wanted = settings.wanted if last else on_the_way(settings.wanted)
            with watch.on("evaluation"):
                report["evaluate"], found = evaluate(federation, engine, server, wanted)
        report |= {"seconds": time.perf_counter() - began, "seconds_of": watch.read()}
        yield Round(server, report, found)
    if useless and not usable and not ruinable:
        raise NoUsableUpdates(explain_empty_rounds(useless, in_a_row=False))


def on_the_way(wanted: EvaluationScope) -> EvaluationScope:
    """Return what an evaluation before the last one covers."""
    return replace(wanted, whole=wanted.whole and wanted.always, norms=wanted.norms[:1])


def _due(done: int, settings: Settings) -> bool:
    return done == settings.rounds or bool(settings.evaluate_every and done % settings.evaluate_every == 0)


def _is_empty(report: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether a round had no usable update although clients were drawn and connected to its end."""
    failures, why = report["failures"], report.get("undone", {}).get("reason")
    if report["train"]["clients"] != 0 or why == SKIPPED:
        return False
    if settings.privacy is not None and not failures and why in (None, TOO_FEW):
        return False
    gone = bool(failures) and all(f["absent"] for f in failures)
    return why is not None or not (gone or report.get("online") == 0)


def one_round(
    federation: Federation, engine: Engine, settings: Settings, server: Server, watch: Timekeeper | None = None
) -> tuple[Server, dict[str, Any]]:
    """Run one round of training; `watch` counts the seconds of its parts.

    Returns:
        The server after it, whose round is one more in any case, and the report. A round that is undone leaves state
        and memory as they were, and its report says so under "undone".
    """
    method = federation.method
    local = replace(settings.local, lr=settings.local.lr * settings.schedule(server.round))
    rng = make_numpy_rng(federation.seed, server.round, "choose")
    slots = canonical(federation, method.assign(federation, server, rng))
    before = replace(server, round=server.round + 1)
    if not slots and settings.privacy is None:  # nothing to merge, and no step may move what nobody trained
        return before, report_of(federation, before, local, [])
    if settings.privacy is not None and settings.secure is not None and len(slots) < settings.secure.rules.minimum:
        return before, report_of(federation, before, local, []) | {"undone": undone(TOO_FEW, [], {})}
    watch = watch or Timekeeper()
    jobs = _jobs(federation, server, slots, local, settings.rounds)
    if settings.secure is not None:
        return _round_of_sums(federation, engine, settings, server, local, jobs, watch)
    way = Way(settings.links, settings.quorum, federation.seed, federation.problem.layout)
    replies = _Replies(federation, server, way.pairs(engine.run, jobs), watch)
    with watch.on("averaging"):
        after, why, further = _stepped(federation, server, replies)
    report = way.told(report_of(federation, before, local, replies.reports))
    if settings.hostile or federation.method.receive is not FEDAVG.receive:
        report["received"] = told_apart(settings.hostile, replies.reports, replies.trained)
    if after is None:
        return before, _taken_back(federation, report, before, local, undone(why, replies.reports, replies.norms))
    report["failures"] += _accepted(engine, replies.reports)
    return after, report | further


def _taken_back(
    federation: Federation, report: Mapping[str, Any], before: Server, local: Local, taken: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the report of a round that was undone."""
    nothing = report_of(federation, before, local, [])["train"]
    return {k: v for k, v in report.items() if k != "counts"} | {"train": nothing, "undone": taken}


def _stepped(federation: Federation, server: Server, replies: "_Replies") -> tuple[Server | None, str, dict[str, Any]]:
    """Merge a round's replies and step.

    Returns:
        The server after the round, or None where the round cannot stand; why not; what else the report says.
    """
    method = federation.method
    updates = iter(replies)
    doing = "averaging the updates (merge)"
    try:
        aggregate = method.merge(federation, server, updates, replies.weight)
        for _ in updates:  # a merge that stopped early still owes the reports of the rest
            pass
        after, reports = server, tuple(replies.reports)
        for doing, hook in (("the server's step", method.step), ("what the method observes", method.observe)):
            found = hook(federation, after, aggregate, reports)
            if not isinstance(found, Server):
                raise ConfigError(
                    f"{doing} must return the server after the round, got {type(found).__name__}.", key="step"
                )
            after = replace(found, round=server.round + 1)
    except Exception as error:
        if replies.broken or (isinstance(error, FleetFitError) and not isinstance(error, RunError)):
            raise  # the engine's own error, or one that its user made: no reply's
        doing = "receiving the updates (receive)" if replies.receiving else doing
        replies.finish()
        return None, f"{doing} raised an error: {format_exception(error)}", {}
    after = replace(after, trained=trained_levels(federation, server, reports))
    with replies.watch.on("validation"):
        why = spoilt(server, after)
    return (after if why is None else None), why or "", {"server": dict(aggregate.metrics)} if aggregate.metrics else {}


# ---- rounds of which the server sees sums only -----------------------------------------------------------------------


def _skipped(federation: Federation, settings: Settings, server: Server) -> tuple[Server, dict[str, Any]]:
    """Leave out a round that was begun before."""
    before = replace(server, round=server.round + 1)
    local = replace(settings.local, lr=settings.local.lr * settings.schedule(server.round))
    return before, report_of(federation, before, local, []) | {"undone": undone(SKIPPED, [], {})}


def _round_of_sums(
    federation: Federation, engine: Engine, settings: Settings, server: Server, local: Local, jobs: Iterator[Job],
    watch: Timekeeper,
) -> tuple[Server, dict[str, Any]]:  # fmt: skip
    """Do the rest of a round by sums; the same as `one_round` returns."""
    assert settings.secure is not None
    before, sums = replace(server, round=server.round + 1), getattr(engine, "sums", None)
    if sums is None:
        raise ConfigError(
            f"[secure]: the engine {type(engine).__name__} gives updates, and no sums of them.", key="secure"
        )
    settings.secure.begin(server.round)
    with watch.on("training"):
        summed: Summed = sums(jobs, server.state)
    after, why = stepped_by(federation, server, summed, settings.secure.grid, watch, settings.privacy)
    report = report_of(federation, before, local, summed.reports)
    report["secure"] = {"hidden": summed.hidden, "clipped": summed.clipped}
    if settings.hostile:
        report["received"] = told_apart(settings.hostile, summed.reports, {})
    if after is None:
        return before, _taken_back(federation, report, before, local, undone(why, summed.reports, {}))
    report["failures"] += _accepted(engine, list(summed.reports))
    return after, report


class _Replies:
    """The replies to a round's jobs: each is checked, then `receive` says which count, and those are noted and weighed.

    Iterating, which is possible once, yields the updates to merge. As long as `receive` yields one by one, the tensors
    of one update are held.

    Attributes:
        norms: Euclidean norm of each update's state as it came, by index; of some that were refused, too.
        receiving: Whether `receive` is at work.
        broken: Whether the engine itself raised an error.
        watch: Counts the seconds until replies come, and of looking at them.
    """

    def __init__(
        self, federation: Federation, server: Server, replies: Iterator[tuple[Job, Update | Failure]], watch: Timekeeper
    ) -> None:
        self.watch = watch
        self.norms: dict[int, float] = {}
        self.trained: dict[int, int] = {}
        self.receiving = self.broken = False
        self._federation, self._server = federation, server
        self._reports: dict[int, Update | Failure] = {}
        self._waiting: dict[int, Job] = {}  # of checked updates that `receive` has not given on
        self._weights: dict[int, float] = {}
        self._checked = self._check(replies)

    @property
    def reports(self) -> list[Update | Failure]:
        """Updates without their states, and failures, in the jobs' order."""
        return list(self._reports.values())  # each has its place since it was checked

    def __iter__(self) -> Iterator[Update]:
        self.receiving = True
        received = iter(self._federation.method.receive(self._federation, self._server, self._checked))
        while True:
            self.receiving = True
            try:
                job = self._given_on(update := next(received))
            except StopIteration:
                break
            self.receiving = False
            found = self._noted(update, job)
            self._reports[job.index] = found if isinstance(found, Failure) else replace(found, state={})
            if isinstance(found, Update):
                yield update
        self.receiving = False
        self.finish()
        for index in self._waiting:
            self._reports[index] = _left_out(self._reports[index])
        self._waiting.clear()

    def finish(self) -> None:
        """Look at the replies that are left: each job's has its report, whoever stopped early."""
        for _ in self._checked:
            pass

    def weight(self, update: Update) -> float:
        """Return the aggregation weight of an update that was yielded, and what a method makes of any other."""
        known = self._weights.get(update.index)
        return self._federation.method.weight(update) if known is None else known

    def _check(self, replies: Iterator[tuple[Job, Update | Failure]]) -> Iterator[Update]:
        while True:
            try:
                with self.watch.on("training"):
                    job, reply = next(replies)
            except StopIteration:
                return
            except Exception:
                self.broken = True
                raise
            with self.watch.on("validation"):
                reply = checked(reply, job, self._federation, self.norms)
            if isinstance(reply, Failure):
                self._reports[job.index] = reply
                continue
            self._reports[job.index] = replace(reply, state={})
            if reply.submodel != reply.dispatched:  # a client may have shrunk what it was sent
                with contextlib.suppress(ModelError):  # no level's sub-model stays with the level that it was sent
                    self.trained[job.index] = self._federation.level_index(reply.submodel)
            self._waiting[job.index] = replace(job, state={})
            yield reply

    def _given_on(self, update: Any) -> Job:
        """Return the job of an update that `receive` gave on.

        Raises:
            ConfigError: It is none of this round's, or was given on before.
        """
        if not isinstance(update, Update):
            raise ConfigError(f"receive must return updates, got {type(update).__name__}.", key="receive")
        job = self._waiting.pop(update.index, None)
        if job is None or (update.round, update.client) != (job.round, job.client):
            raise ConfigError(
                f"receive returned an update of client {update.client} (index {update.index}) that it did not get, or "
                "twice. It may leave updates out and change what they say, not whose they are.",
                key="receive",
            )
        return job

    def _noted(self, update: Update, job: Job) -> Update | Failure:
        """Return an update with what is noted of it; what that raises is this update's failure."""
        method, doing = self._federation.method, "note"
        try:
            metrics = {**update.metrics, **method.note(self._federation, self._server, update)}
            doing = "weight"
            weight = method.weight(update)
            if not 0 <= weight < float("inf"):
                raise ValueError(f"an aggregation weight must be finite and at least 0, got {weight}")
        except Exception as error:
            more = {"bytes_down": update.bytes_down, "bytes_up": update.bytes_up, "simulated_s": update.simulated_s}
            why = f"the method's {doing} raised an error: {format_exception(error)}"
            return refused(job, why, multiply_adds=update.multiply_adds, **more)
        self._weights[update.index] = weight
        return replace(update, metrics=metrics)


def _left_out(report: Update | Failure) -> Failure:
    """Return the failure that stands for an update which `receive` did not give on."""
    return Failure(
        report.round, report.index, report.client, report.level, report.dispatched,
        LEFT_OUT, bytes_down=report.bytes_down, bytes_up=report.bytes_up,
        multiply_adds=report.multiply_adds, simulated_s=report.simulated_s,
    )  # fmt: skip


def _accepted(engine: Engine, reports: list[Update | Failure]) -> list[dict[str, Any]]:
    """Have the clients remember a round that stands; return the failures among that."""
    failures = []
    for report in reports:
        if isinstance(report, Update):
            try:
                engine.accept(report)
            except Exception as error:
                why = f"its update counts, but what it remembers of it could not be kept: {format_exception(error)}"
                failures.append({"client": report.client, "level": report.level + 1, "reason": why, "absent": False})
    return failures


Slot = tuple[int, int, Submodel]  # client, level, sub-model


def canonical(federation: Federation, slots: list[Slot]) -> list[Slot]:
    """Order a round's slots: predicted cost (elements of the sub-model), largest first, then client id."""
    elements = Elements(federation.problem.layout)
    return sorted(slots, key=lambda s: (-elements.of(s[2]), s[2].exits, s[0], s[1]))


def _jobs(federation: Federation, server: Server, slots: list[Slot], local: Local, rounds: int) -> Iterator[Job]:
    method = federation.method
    shared = method.dispatch is FEDAVG.dispatch  # then clients of one sub-model get the same tensors
    last: Submodel | None = None
    state: State = {}
    for index, (client, level, piece) in enumerate(slots):
        if not shared or piece != last:
            last, state = piece, method.dispatch(federation, server, client, piece)
        seed = derive_seed(federation.seed, server.round, "train", index, client)
        yield Job(
            "train", server.round, rounds, index, client, piece, state, federation.method_spec, seed, level, local
        )


def checked(
    reply: Update | Failure, job: Job, federation: Federation, norms: dict[int, float] | None = None
) -> Update | Failure:
    """Return the reply as validation lets it through, with its bytes counted; nothing is raised, whatever it holds.

    `norms` is given the norm of a training update's state, by the job's index.
    """
    found = examined(reply, job, federation, norms)
    up = 0
    if not (isinstance(found, Failure) and found.absent):
        try:
            up = messages.reply_size(reply, federation.problem.layout)
        except Exception as error:  # nobody could have sent it
            found = found if isinstance(found, Failure) else refused(job, f"it has no bytes: {format_exception(error)}")
    return replace(found, bytes_down=messages.job_size(job, federation.problem.layout), bytes_up=up)
