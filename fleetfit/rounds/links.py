"""Simulate an unreliable network: lost and duplicated messages, and a quorum that ends a round early.

Only training messages are affected; evaluation is not part of the simulation. Draws depend on (seed, round, client)
alone, so every method and every engine meets the same faults. A real fleet has real links: its engine implements the
quorum itself.
"""

import contextlib
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fleetfit.core import Failure, Job, Update
from fleetfit.layout import Layout
from fleetfit.messages import reply_size
from fleetfit.seeds import make_numpy_rng
from fleetfit.validation import pair_jobs_with_replies

AFTER_QUORUM = "the round ended without it: enough others had answered"
"""Failure reason of an update that arrived after the quorum."""

Reply = Update | Failure
RunJobs = Callable[[Iterator[Job]], Iterator[Reply]]
Exchange = Iterator[tuple[Job, Reply]]


@dataclass(frozen=True)
class Fate:
    """What happens to the messages of one client in one round."""

    lost_down: bool
    lost_up: bool
    repeated: bool


@dataclass(frozen=True)
class LinkFaults:
    """Fault probabilities of simulated links; messages are drawn independently.

    Attributes:
        lost_down: Probability that a job does not reach its client.
        lost_up: Probability that an update does not reach the server.
        repeated: Probability that an update that arrives does so twice.
        seed: Seed of the run.
        clocked: Whether the simulation has a clock. The server then waits for lost messages until the deadline.
    """

    lost_down: float = 0.0
    lost_up: float = 0.0
    repeated: float = 0.0
    seed: int = 0
    clocked: bool = False

    def draw(self, round: int, client: int) -> Fate:
        """Draw the fate of a client's messages in a round."""
        down, up, again = make_numpy_rng(self.seed, "links", round, client).random(3)
        return Fate(down < self.lost_down, up < self.lost_up, again < self.repeated)


class LossyLinks:
    """Carries the jobs of one round to the engine and the replies back.

    Attributes:
        counts: Messages "lost_down", "lost_up" and "repeated".
        extra_bytes_up: Bytes of lost and of duplicated updates.
    """

    def __init__(self, faults: LinkFaults | None, quorum: int | None, seed: int, layout: Layout) -> None:
        """Configure the links.

        Args:
            faults: None for reliable links.
            quorum: Number of updates that ends the round; None to wait for every client. Needs simulated time.
            seed: Seed of the run.
            layout: Layout of the model, for message sizes.
        """
        self.counts, self.extra_bytes_up = Counter[str](), 0
        self._faults, self._quorum, self._seed, self._layout = faults, quorum, seed, layout

    def exchange(self, run: RunJobs, jobs: Iterable[Job]) -> Exchange:
        """Yield each job with the one reply that counts, in job order."""
        replies = pair_jobs_with_replies(run, jobs) if self._faults is None else self._deliver(self._faults, run, jobs)
        return replies if self._quorum is None else first_k_updates(replies, self._quorum, self._seed)

    def add_to_report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return a round's report with the link counts; lost and duplicated updates count as bytes sent."""
        if self._faults is None:
            return report
        counts = {key: self.counts[key] for key in ("lost_down", "lost_up", "repeated")}
        return report | {"bytes_up": report["bytes_up"] + self.extra_bytes_up, "links": counts}

    def _deliver(self, faults: LinkFaults, run: RunJobs, jobs: Iterable[Job]) -> Exchange:
        """Yield what reaches the server, in job order: losses as failures, and the first of duplicates."""
        pending = deque[tuple[Job, Fate]]()

        def arriving_jobs() -> Iterator[Job]:
            for job in jobs:
                fate = faults.draw(job.round, job.client or 0)
                pending.append((job, fate))
                if not fate.lost_down:
                    yield job

        def lost_jobs() -> Exchange:  # those ahead of the next job that arrived
            while pending and pending[0][1].lost_down:
                job, _ = pending.popleft()
                self.counts["lost_down"] += 1
                yield job, _make_loss(faults, job, "what it was sent was lost on the way")

        for job, reply in pair_jobs_with_replies(run, arriving_jobs()):
            yield from lost_jobs()
            _, fate = pending.popleft()
            if isinstance(reply, Failure) and reply.absent:  # the client sent nothing that could be lost
                yield job, reply
            elif fate.lost_up:
                self.counts["lost_up"] += 1
                self._add_bytes(reply)
                yield job, _make_loss(faults, job, "what it sent back was lost on the way", reply.multiply_adds)
            else:
                if fate.repeated:
                    self.counts["repeated"] += 1
                    self._add_bytes(reply)
                yield job, reply
        yield from lost_jobs()

    def _add_bytes(self, reply: Reply) -> None:
        with contextlib.suppress(Exception):  # validation refuses replies that cannot be serialized
            self.extra_bytes_up += reply_size(reply, self._layout)


def first_k_updates(replies: Iterable[tuple[Job, Reply]], k: int, seed: int) -> Exchange:
    """Yield jobs with their replies, the first `k` updates as they are and each later one as a failure.

    Arrival is in simulated seconds; ties are broken at random. The round ends with the k-th update, so no failure
    lasts longer than that. Up to `k` updates are held, because the k-th is known only when all have arrived.

    Args:
        replies: Jobs with their replies, in job order.
        k: Number of updates that ends the round.
        seed: Seed of the run, for ties.
    """
    exchange = list[tuple[Job, Reply]]()
    fastest = list[tuple[float, float, int]]()  # heap with the slowest on top: (-seconds, tie-breaker, position)
    for job, reply in replies:
        exchange.append((job, reply))
        if isinstance(reply, Update):
            tie_breaker = float(make_numpy_rng(seed, "first", job.round, job.index).random())
            heapq.heappush(fastest, (-_arrival(reply), tie_breaker, len(exchange) - 1))
            if len(fastest) > k:
                _, _, position = heapq.heappop(fastest)
                late_job, update = exchange[position]
                failure = Failure.of(late_job, AFTER_QUORUM, late=True, multiply_adds=update.multiply_adds)
                exchange[position] = late_job, failure
    end = -fastest[0][0] if len(fastest) == k else math.inf
    for job, reply in exchange:
        if isinstance(reply, Failure) and _arrival(reply) > end:
            reply = replace(reply, simulated_s=end)
        yield job, reply


def _arrival(reply: Reply) -> float:
    """Return the simulated seconds at which a reply arrives; infinity where unknown or invalid (not yet validated)."""
    seconds = reply.simulated_s
    return float(seconds) if isinstance(seconds, (int, float)) and seconds >= 0 else math.inf


def _make_loss(faults: LinkFaults, job: Job, reason: str, multiply_adds: int = 0) -> Failure:
    """Return the failure for a lost message: the server waits until the deadline."""
    waited = job.local.deadline_s if faults.clocked else None
    return Failure.of(job, reason, absent=True, multiply_adds=multiply_adds, simulated_s=waited)
