"""The only round loop: assign, run the jobs, check, merge, step, evaluate; and the protocol of engines.

ScaleFL Algorithm 1 lines 6-19. Jobs are dispatched, and updates folded, in one canonical order: predicted cost,
largest first, then client id. A round in which nobody returned a usable update leaves the state as it was; after
`patience` such rounds in a row the run stops. Rounds in which nobody was connected, or all who were chosen went away,
are not among them: they are reported, and the run goes on.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fleetfit import wire
from fleetfit.errors import RunError
from fleetfit.evaluate import Statistics, Wanted, evaluate, trained_levels
from fleetfit.guard import examined, paired
from fleetfit.layout import State
from fleetfit.method import FEDAVG
from fleetfit.rounds.reported import Elements, report_of
from fleetfit.seeds import numpy_rng, seed_of
from fleetfit.submodel import Submodel
from fleetfit.train import initial_state
from fleetfit.values import Failure, Federation, Job, Local, Server, Update


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
        patience: Rounds in a row without a usable update after which the run stops.
    """

    rounds: int
    local: Local = field(default_factory=Local)
    schedule: Callable[[int], float] = constant
    evaluate_every: int = 0
    wanted: Wanted = field(default_factory=Wanted)
    patience: int = 5


@dataclass(frozen=True, eq=False)
class Round:
    """What a round left: the server after it, a report of plain values, and the statistics that its evaluation used."""

    server: Server
    report: dict[str, Any]
    statistics: Statistics | None = None


def start(federation: Federation) -> Server:
    """Return the server before the first round."""
    if not len(federation.able):
        raise RunError("no client can take part: none affords the smallest level, or none has training data.")
    return Server(initial_state(federation.problem, federation.seed))


Renew = Callable[[Federation], Federation]
"""Returns the federation as it is now: on a real fleet, clients come, change and go."""


def unchanged(federation: Federation) -> Federation:
    """Return the federation: nobody comes or goes."""
    return federation


def run(
    federation: Federation, engine: Engine, settings: Settings, server: Server, renew: Renew = unchanged
) -> Iterator[Round]:
    """Run the rounds that are left, and yield after each; `renew` is asked before each."""
    empty = 0
    while server.round < settings.rounds:
        federation = renew(federation)
        began = time.perf_counter()
        server, report = one_round(federation, engine, settings, server)
        if not _nobody_there(report):
            empty = 0 if report["train"]["clients"] else empty + 1
        if empty >= settings.patience:
            raise RunError(_nobody(report, empty))
        found = None
        if _due(server.round, settings):
            last = server.round == settings.rounds
            wanted = settings.wanted if last else on_the_way(settings.wanted)
            report["evaluate"], found = evaluate(federation, engine, server, wanted)
        report["seconds"] = time.perf_counter() - began
        yield Round(server, report, found)


def on_the_way(wanted: Wanted) -> Wanted:
    """Return what an evaluation before the last one covers."""
    return replace(wanted, whole=wanted.whole and wanted.always, norms=wanted.norms[:1])


def _due(done: int, settings: Settings) -> bool:
    return done == settings.rounds or bool(settings.evaluate_every and done % settings.evaluate_every == 0)


def _nobody_there(report: Mapping[str, Any]) -> bool:
    """Tell whether a round is empty because nobody was connected from its beginning to its end."""
    failures = report["failures"]
    gone = bool(failures) and all(f["absent"] for f in failures)
    return not report["train"]["clients"] and (gone or report.get("online") == 0)


def _nobody(report: Mapping[str, Any], empty: int) -> str:
    reasons = sorted({failure["reason"] for failure in report["failures"]})
    why = "; ".join(reasons[:3]) or "none given"
    return f"for {empty} rounds in a row no client returned a usable update. Reasons: {why}."


def one_round(
    federation: Federation, engine: Engine, settings: Settings, server: Server
) -> tuple[Server, dict[str, Any]]:
    """Run one round of training."""
    method = federation.method
    local = replace(settings.local, lr=settings.local.lr * settings.schedule(server.round))
    rng = numpy_rng(federation.seed, server.round, "choose")
    slots = canonical(federation, method.assign(federation, server, rng))
    reports: list[Update | Failure] = []
    if not slots:  # nothing to merge, and no step may move what nobody trained
        after = replace(server, round=server.round + 1)
        return after, report_of(federation, after, local, reports)
    jobs = _jobs(federation, server, slots, local, settings.rounds)

    def usable() -> Iterator[Update]:
        for job, reply in paired(engine.run, jobs):
            reply = checked(reply, job, federation)
            if isinstance(reply, Update):
                noted = {**reply.metrics, **method.note(federation, server, reply)}
                reports.append(replace(reply, state={}, metrics=noted))
                engine.accept(reply)
                yield reply
            else:
                reports.append(reply)

    updates = usable()
    aggregate = method.merge(federation, server, updates, method.weight)
    for _ in updates:  # a merge that stopped early still owes the reports of the rest
        pass
    after = method.step(federation, server, aggregate, tuple(reports))
    after = method.observe(federation, after, aggregate, tuple(reports))
    after = replace(after, trained=trained_levels(federation, server, reports))
    report = report_of(federation, after, local, reports)
    return after, report | ({"server": dict(aggregate.metrics)} if aggregate.metrics else {})


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
        seed = seed_of(federation.seed, server.round, "train", index, client)
        yield Job(
            "train", server.round, rounds, index, client, piece, state, federation.method_spec, seed, level, local
        )


def checked(reply: Update | Failure, job: Job, federation: Federation) -> Update | Failure:
    """Return the reply as the guard lets it through, with its bytes counted."""
    found = examined(reply, job, federation)
    up = 0 if isinstance(found, Failure) and found.absent else _size(reply)
    return replace(found, bytes_down=wire.job_size(job), bytes_up=up)


def _size(reply: Update | Failure) -> int:
    """Return the bytes of a reply as it came; 0 for one that nobody could have sent."""
    try:
        return wire.reply_size(reply)
    except (RunError, TypeError, ValueError, RuntimeError, AttributeError):
        return 0
