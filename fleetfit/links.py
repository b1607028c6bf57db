"""What lies between the server and simulated clients: links that lose and repeat messages, and who comes too late.

It happens in the process of the server, where replies come in, and is drawn from (seed, round, client): the same for
every method, and the same bits on every engine. Only the messages of training are lost: an evaluation measures the
models, and is no part of what is simulated. On a fleet of real nodes the links are what they are, and the engine waits
for the quorum.

A round with a quorum holds as many updates in memory as the quorum has: who was first is known when all have come.
"""

import contextlib
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fleetfit.layout import Layout
from fleetfit.messages import reply_size
from fleetfit.seeds import make_numpy_rng
from fleetfit.validation import paired
from fleetfit.values import Failure, Job, Update

ENOUGH = "the round ended without it: enough others had answered"
"""The reason of a failure that stands for an update which came after the quorum."""

Run = Callable[[Iterator[Job]], Iterator[Update | Failure]]
Pairs = Iterator[tuple[Job, Update | Failure]]


@dataclass(frozen=True)
class Links:
    """How simulated links fail; each message is drawn by itself.

    Attributes:
        lost_down: Probability that what a client is sent does not arrive: it trains nothing.
        lost_up: Probability that what a client sends back does not arrive.
        repeated: Probability that what arrives from a client arrives twice.
        seed: The run's.
        clocked: Whether the simulation has a clock: the server then waits for what is lost, until its deadline.
    """

    lost_down: float = 0.0
    lost_up: float = 0.0
    repeated: float = 0.0
    seed: int = 0
    clocked: bool = False

    def drawn(self, round: int, client: int) -> tuple[bool, bool, bool]:
        """Return whether a client's messages of a round are lost on the way down, lost on the way up, or repeated."""
        down, up, again = make_numpy_rng(self.seed, "links", round, client).random(3)
        return down < self.lost_down, up < self.lost_up, again < self.repeated


class Way:
    """The way of one round's messages: jobs out, replies in.

    Attributes:
        counts: How many messages were lost on the way down ("lost_down") and up ("lost_up"), and how many came in once
            more than they should ("repeated").
        bytes_up: Of what was lost on the way up, or came again.
    """

    def __init__(self, links: Links | None, quorum: int | None, seed: int, layout: Layout) -> None:
        """Take what the links are like.

        Args:
            links: How they fail; None: they do not.
            quorum: So many updates end the round; None: everybody is waited for. The devices need a clock.
            seed: The run's.
            layout: Of the model.
        """
        self.counts, self.bytes_up = Counter[str](), 0
        self._links, self._quorum, self._seed, self._layout = links, quorum, seed, layout

    def pairs(self, run: Run, jobs: Iterable[Job]) -> Pairs:
        """Yield each job with the one reply that counts, in the jobs' order."""
        found = paired(run, jobs) if self._links is None else self._once(self._carried(self._links, run, jobs))
        return found if self._quorum is None else soonest(found, self._quorum, self._seed)

    def told(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return a round's report with what the links did: a message that is lost on the way up was sent, too."""
        if self._links is None:
            return report
        counts = {key: self.counts[key] for key in ("lost_down", "lost_up", "repeated")}
        return report | {"bytes_up": report["bytes_up"] + self.bytes_up, "links": counts}

    def _carried(self, links: Links, run: Run, jobs: Iterable[Job]) -> Pairs:
        """Yield what comes in, in the jobs' order: what is lost as a failure, and some of it more than once."""
        out = deque[tuple[Job, tuple[bool, bool, bool]]]()  # those that have not been yielded

        def arriving() -> Iterator[Job]:
            for job in jobs:
                out.append((job, links.drawn(job.round, job.client or 0)))
                if not out[-1][1][0]:
                    yield job

        def lost_until_then() -> Pairs:
            while out and out[0][1][0]:
                self.counts["lost_down"] += 1
                yield out[0][0], self._lost(links, out.popleft()[0], "what it was sent was lost on the way")

        for job, reply in paired(run, arriving()):
            yield from lost_until_then()
            _, lost, again = out.popleft()[1]
            if isinstance(reply, Failure) and reply.absent:  # it sent nothing
                yield job, reply
            elif lost:
                self.counts["lost_up"] += 1
                self._count(reply)
                yield job, self._lost(links, job, "what it sent back was lost on the way", reply.multiply_adds)
            else:
                yield from [(job, reply)] * (1 + again)
        yield from lost_until_then()

    def _once(self, arrivals: Pairs) -> Pairs:
        """Yield the first reply to each job: what answers a job that has been answered is thrown away."""
        answered = set[int]()
        for job, reply in arrivals:
            if job.index in answered:
                self.counts["repeated"] += 1
                self._count(reply)
                continue
            answered.add(job.index)
            yield job, reply

    def _count(self, reply: Update | Failure) -> None:
        with contextlib.suppress(Exception):  # what has no bytes is refused where it counts
            self.bytes_up += reply_size(reply, self._layout)

    @staticmethod
    def _lost(links: Links, job: Job, reason: str, multiply_adds: int = 0) -> Failure:
        until = job.local.deadline_s if links.clocked else None
        return Failure.of(job, reason, absent=True, multiply_adds=multiply_adds, simulated_s=until)


def soonest(pairs: Iterable[tuple[Job, Update | Failure]], quorum: int, seed: int) -> Pairs:
    """Yield jobs with their replies; of updates those that were there first, and a failure for each later one.

    Who are equally fast are drawn among. Nobody is waited for once the quorum is there: what failed later than that
    has taken as long as the round.

    Args:
        pairs: Jobs with their replies, each update with its simulated seconds.
        quorum: How many updates end the round.
        seed: Of the draw.
    """
    held = list[tuple[Job, Update | Failure]]()
    first: list[tuple[float, float, int]] = []  # the slowest on top: seconds and draw, negative, and place
    for job, reply in pairs:
        held.append((job, reply))
        if isinstance(reply, Update):
            draw = float(make_numpy_rng(seed, "first", job.round, job.index).random())
            heapq.heappush(first, (-_seconds(reply), draw, len(held) - 1))
            if len(first) > quorum:
                late, slow = held[place := heapq.heappop(first)[2]]
                held[place] = late, Failure.of(late, ENOUGH, late=True, multiply_adds=slow.multiply_adds)
    end = -first[0][0] if len(first) == quorum else math.inf
    for job, reply in held:
        yield job, replace(reply, simulated_s=min(_seconds(reply), end)) if _over(reply, end) else reply


def _seconds(reply: Update | Failure) -> float:
    """Return when a reply was there; what has no time comes last."""
    found = reply.simulated_s
    return float(found) if type(found) in (int, float) and found >= 0 else math.inf  # type: ignore[operator, arg-type]


def _over(reply: Update | Failure, end: float) -> bool:
    return isinstance(reply, Failure) and _seconds(reply) > end
