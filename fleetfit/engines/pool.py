"""What engines with several workers share: who gets which job, the order of replies, and what happens when one dies.

A worker is any process that jobs can be given to and their replies taken from. Jobs go out in the order in which they
come, longest first, one at a time or, where a message costs much, several (`Batches`); replies are yielded in that
order, so that a few early finishers wait. A worker that dies loses no round: its jobs run again, each alone, on another
one.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fleetfit.engines.batches import Batches, state_bytes
from fleetfit.engines.memories import KeepsMemories
from fleetfit.engines.work import raised
from fleetfit.errors import ConfigError, RunError, format_exception
from fleetfit.layout import Layout
from fleetfit.messages import load_reply
from fleetfit.method import is_portable
from fleetfit.values import Failure, Job, Update

_TRIES = 3  # workers that a job may cost, alone, before it counts as failed
_AHEAD = 2  # messages' worth of jobs waiting or in flight, per worker: the bound on early finishers

Placed = tuple[int, Job]
"""A job with its place in the order."""


class Worker(Protocol):
    """A worker, and the jobs that it has."""

    jobs: list[Placed]

    @property
    def free(self) -> bool:
        """Whether it can be given jobs now."""

    def give(self, jobs: list[Placed], memories: list[Any]) -> None:
        """Hand it jobs, each with its client's memory; a dead worker shows when its replies are taken."""

    def take(self) -> Sequence[Mapping[str, Any]] | None:
        """Return its replies as nests (see `fleetfit.engines.work`), or None when the worker is gone."""

    def end(self) -> None:
        """End it, whatever it does."""


class Pool(KeepsMemories, ABC):
    """An engine that keeps workers busy."""

    def __init__(self, name: str, size: int, layout: Layout, batches: Batches | None = None) -> None:
        """Take the engine's name, how many workers it will have, the layout of the model, and who makes batches."""
        super().__init__()
        self._name, self._size, self._layout, self._batches = name, size, layout, batches
        self._workers: list[Any] = []
        self._stillborn = 0

    @abstractmethod
    def _start(self, place: int) -> Worker:
        """Start the worker of a place."""

    @abstractmethod
    def _ready(self) -> Sequence[Worker]:
        """Wait until some worker has a reply, is gone, or has become free; return those of the first two kinds."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Keep every worker busy; yield the replies in the jobs' order."""
        self._drain()
        again: deque[Placed] = deque()
        tries: dict[int, int] = {}
        done: dict[int, Update | Failure] = {}
        line = _Line(jobs, self._size, self._batches)
        while True:
            for worker in self._workers:
                if worker.free and (given := [again.popleft()] if again else line.next()):
                    self._give(worker, given)
            if line.first in done:
                yield done.pop(line.first)
                line.yielded()
            elif line.over:
                return
            else:
                self._collect(done, again, tries)

    def _give(self, worker: Worker, given: list[Placed]) -> None:
        versions, memories = [], []
        for place, job in given:
            if not is_portable(job.method):
                raise ConfigError(
                    f"engine {self._name} rebuilds the method in each worker, so its functions need import paths "
                    '("package.module:function" or "file.py:function"); functions made in Python run '
                    'with engine.name = "local".',
                    key="method",
                )
            version, memory = self._memories.of(job.client)
            versions.append((place, replace(job, memory_version=version)))
            memories.append(memory)
        worker.give(versions, memories)

    def _collect(self, done: dict[int, Update | Failure], again: deque[Placed], tries: dict[int, int]) -> None:
        """Wait for some worker; note its replies, or replace it and note its jobs for others."""
        for worker in self._ready():
            given, worker.jobs = worker.jobs, []
            replies = worker.take()
            if replies is None:
                self._replace(worker)
                if given:
                    self._lost(given, done, again, tries)
                else:
                    self._not_started()
                continue
            for reply in replies:
                if "error" in reply:
                    raise raised(reply)
            for (place, job), reply in zip(given, replies, strict=False):  # a worker that has started has no job yet
                if job.kind == "train":
                    self._memories.offer(job.round, job.index, reply["memory"])
                if self._batches is not None:
                    self._batches.took(job, reply["seconds"])
                done[place] = _read(job, reply["reply"], self._layout)

    def _lost(
        self, given: list[Placed], done: dict[int, Update | Failure], again: deque[Placed], tries: dict[int, int]
    ) -> None:
        """Note jobs whose worker died for another one; of several, which one it was shows when each runs alone."""
        if len(given) > 1:
            again.extend(given)
            return
        ((place, job),) = given
        tries[place] = tries.get(place, 0) + 1
        if tries[place] < _TRIES:
            again.append((place, job))
        else:
            reason = f"{_TRIES} workers died while running it"
            done[place] = Failure.of(job, reason)

    def _not_started(self) -> None:
        self._stillborn += 1
        if self._stillborn > _TRIES * self._size:
            raise RunError(f"{self._stillborn} workers of engine {self._name} died before they could take a job.")

    def _replace(self, worker: Worker) -> None:
        place = self._workers.index(worker)
        worker.end()
        self._workers[place] = self._start(place)

    def _drain(self) -> None:
        """Take the replies of jobs that an interrupted run left behind, so that this one starts clean."""
        for worker in self._workers:
            if worker.jobs:
                worker.jobs = []
                if worker.take() is None:
                    self._replace(worker)
        self._memories.forget_pending()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []


class _Line:
    """The jobs of a run that nobody has been given yet, as far ahead as early finishers may get.

    Attributes:
        first: Place of the job whose reply is yielded next.
    """

    def __init__(self, jobs: Iterator[Job], workers: int, batches: Batches | None) -> None:
        """Take the jobs, of which none is made before it is needed."""
        self.first = 0
        self._coming, self._workers, self._batches = enumerate(jobs), workers, batches
        self._waiting: deque[Placed] = deque()
        self._bytes: deque[int] = deque()  # of all that are made and not yielded
        self._more = True

    @property
    def over(self) -> bool:
        """Whether every job was given away and its reply yielded."""
        return not self._more and not self._bytes

    def next(self) -> list[Placed]:
        """Return the jobs that a free worker gets now, in order; none where it has to wait."""
        while self._more and self._has_room() and (self._batches is not None or not self._waiting):
            found = next(self._coming, None)
            self._more = found is not None
            if found is not None:
                self._waiting.append(found)
                self._bytes.append(0 if self._batches is None else state_bytes(found[1]))
        count = 1 if self._batches is None else self._batches.size([job for _, job in self._waiting], self._workers)
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def _has_room(self) -> bool:
        messages = _AHEAD * self._workers
        if len(self._bytes) < messages:
            return True
        return self._batches is not None and sum(self._bytes) < messages * self._batches.most_bytes

    def yielded(self) -> None:
        """Count a reply that was yielded."""
        self.first += 1
        self._bytes.popleft()


def _read(job: Job, nest: Any, layout: Layout) -> Update | Failure:
    """Return the reply of a nest, or a failure where it is none."""
    try:
        return load_reply(nest, layout)
    except Exception as error:
        return Failure.of(job, format_exception(error))
