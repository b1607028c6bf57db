"""What engines with several workers share: who gets which job, the order of replies, and what happens when one dies.

A worker is any process that a job can be given to and a reply taken from. Jobs go out in the order in which they come,
longest first; replies are yielded in that order, so that a few early finishers wait. A worker that dies loses no round:
its job runs again on another one.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fleetfit.engines.memories import KeepsMemories
from fleetfit.engines.work import raised
from fleetfit.errors import ConfigError, RunError, what_raised
from fleetfit.layout import Layout
from fleetfit.messages import reply_of
from fleetfit.method import is_portable
from fleetfit.values import Failure, Job, Update

_TRIES = 3  # workers that a job may cost before it counts as failed
_AHEAD = 2  # jobs waiting or in flight, per worker: the bound on early finishers


class Worker(Protocol):
    """A worker, and the job that it has, with its place in the order."""

    job: tuple[int, Job] | None

    @property
    def free(self) -> bool:
        """Whether it can be given a job now."""

    def give(self, place: int, job: Job, memory: Any) -> None:
        """Hand it a job; a dead worker shows when its reply is taken."""

    def take(self) -> Mapping[str, Any] | None:
        """Return its reply as a nest (see `fleetfit.engines.work`), or None when the worker is gone."""

    def end(self) -> None:
        """End it, whatever it does."""


class Pool(KeepsMemories, ABC):
    """An engine that keeps workers busy."""

    def __init__(self, name: str, size: int, layout: Layout) -> None:
        """Take the engine's name, how many workers it will have, and the layout of the model that they train."""
        super().__init__()
        self._name, self._size, self._layout = name, size, layout
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
        again: deque[tuple[int, Job]] = deque()
        tries: dict[int, int] = {}
        done: dict[int, Update | Failure] = {}
        numbered = enumerate(jobs)
        given = yielded = 0
        more = True
        while True:
            for worker in self._workers:
                if not worker.free:
                    continue
                if again:
                    self._give(worker, *again.popleft())
                elif more and given - yielded < _AHEAD * self._size:
                    place, job = next(numbered, (-1, None))
                    more = job is not None
                    if job is not None:
                        given += 1
                        self._give(worker, place, job)
            if yielded in done:
                yield done.pop(yielded)
                yielded += 1
            elif yielded == given and not more:
                return
            else:
                self._collect(done, again, tries)

    def _give(self, worker: Worker, place: int, job: Job) -> None:
        if not is_portable(job.method):
            raise ConfigError(
                f"engine {self._name} rebuilds the method in each worker, so its functions need import paths "
                '("package.module:function" or "file.py:function"); functions made in Python run '
                'with engine.name = "local".'
            )
        version, memory = self._memories.of(job.client)
        worker.give(place, replace(job, memory_version=version), memory)

    def _collect(self, done: dict[int, Update | Failure], again: deque[tuple[int, Job]], tries: dict[int, int]) -> None:
        """Wait for some worker; note its reply, or replace it and note its job for another one."""
        for worker in self._ready():
            given, worker.job = worker.job, None
            reply = worker.take()
            if reply is None:
                self._replace(worker)
                if given is not None:
                    self._lost(*given, done, again, tries)
                else:
                    self._not_started()
            elif "error" in reply:
                raise raised(reply)
            elif given is not None:
                place, job = given
                if job.kind == "train":
                    self._memories.offer(job.round, job.index, reply["memory"])
                done[place] = _read(job, reply["reply"], self._layout)

    def _lost(
        self, place: int, job: Job, done: dict[int, Update | Failure], again: deque[tuple[int, Job]],
        tries: dict[int, int],
    ) -> None:  # fmt: skip
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
            if worker.job is not None:
                worker.job = None
                if worker.take() is None:
                    self._replace(worker)
        self._memories.forget_pending()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []


def _read(job: Job, nest: Any, layout: Layout) -> Update | Failure:
    """Return the reply of a nest, or a failure where it is none."""
    try:
        return reply_of(nest, layout)
    except Exception as error:
        return Failure.of(job, what_raised(error))
