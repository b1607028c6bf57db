"""Worker pools: the base of the engines with several workers, which jobs go to whom, and a worker's side of it.

A worker is any process that jobs can be sent to. Jobs go out in the order in which they come, longest first, one at a
time or, where a message costs much, several (`BatchSizer`). Replies are yielded in that order, so a few early finishers
wait. A worker that dies loses no round: its jobs run again, each alone, on another worker.

Nothing is pickled, and the caller's main module is not imported again: a worker rebuilds problem and method from their
specs.
"""

import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from fleetfit.core import DeviceResources, Failure, Job, Simulation, Update
from fleetfit.data import Data, Parts
from fleetfit.engines.local import ClientMemories, move_data
from fleetfit.errors import ConfigError, FleetFitError, RunError, Unexpected, format_exception
from fleetfit.hooks import build, is_portable, rebuild_problem
from fleetfit.layout import Layout
from fleetfit.messages import dump_reply, load_job, load_reply, pack
from fleetfit.names import describe_failure, find_plug_in
from fleetfit.submodel.state import FlatState
from fleetfit.training import resolve_device, run_job
from fleetfit.training.runtime import keep_freed_memory

_TRIES = 3  # workers that a job may cost, alone, before it counts as failed
_AHEAD = 2  # messages' worth of jobs waiting or in flight, per worker: the bound on early finishers

NumberedJob = tuple[int, Job]
"""A job with its position in the order."""


class Worker(Protocol):
    """A worker, and the jobs that it has."""

    jobs: list[NumberedJob]

    @property
    def is_free(self) -> bool:
        """Whether jobs can be sent to it now."""

    def send(self, jobs: list[NumberedJob], memories: list[Any]) -> None:
        """Send jobs, each with its client's memory. A dead worker shows in `receive`."""

    def receive(self) -> Sequence[Mapping[str, Any]] | None:
        """Return its replies as `run_message` makes them, or None when the worker is dead."""

    def end(self) -> None:
        """End it, also in the middle of a job."""


class Pool(ClientMemories, ABC):
    """An engine that keeps workers busy."""

    def __init__(self, name: str, size: int, layout: Layout, batches: "BatchSizer | None" = None) -> None:
        """Make an engine without workers.

        Args:
            name: The engine's name.
            size: Its number of workers.
            layout: The model's layout.
            batches: Chooses the number of jobs per message; None: one.
        """
        super().__init__()
        self._name, self._size, self._layout, self._batches = name, size, layout, batches
        self._workers: list[Any] = []
        self._failed_starts = 0

    @abstractmethod
    def _start(self, position: int) -> Worker:
        """Start the worker of a position."""

    @abstractmethod
    def _wait(self) -> Sequence[Worker]:
        """Wait until a worker has a reply, is dead, or has become free; return those of the first two kinds."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Keep every worker busy; yield the replies in the jobs' order."""
        self._drain()
        retries: deque[NumberedJob] = deque()
        tries: dict[int, int] = {}
        replies: dict[int, Update | Failure] = {}
        waiting = _JobQueue(jobs, self._size, self._batches)
        while True:
            for worker in self._workers:
                if worker.is_free and (batch := [retries.popleft()] if retries else waiting.take_batch()):
                    self._send(worker, batch)
            if waiting.first in replies:
                yield replies.pop(waiting.first)
                waiting.mark_yielded()
            elif waiting.is_done:
                return
            else:
                self._collect(replies, retries, tries)

    def _send(self, worker: Worker, batch: list[NumberedJob]) -> None:
        jobs, memories = [], []
        for position, job in batch:
            if not is_portable(job.method):
                raise ConfigError(
                    f"engine {self._name} rebuilds the method in each worker, so its functions need import paths "
                    '("package.module:function" or "file.py:function"); functions made in Python run '
                    'with engine.name = "local".',
                    key="method",
                )
            version, memory = self.get_memory(job.client)
            jobs.append((position, replace(job, memory_version=version)))
            memories.append(memory)
        worker.send(jobs, memories)

    def _collect(
        self, replies: dict[int, Update | Failure], retries: deque[NumberedJob], tries: dict[int, int]
    ) -> None:
        """Wait for workers; store their replies. Replace a dead worker and queue its jobs for others."""
        for worker in self._wait():
            batch, worker.jobs = worker.jobs, []
            messages = worker.receive()
            if messages is None:
                self._replace(worker)
                if not batch:
                    self._failed_starts += 1
                    if self._failed_starts > _TRIES * self._size:
                        raise RunError(
                            f"{self._failed_starts} workers of engine {self._name} died before they could take a job."
                        )
                elif len(batch) > 1:  # each alone: that shows which job it was
                    retries.extend(batch)
                else:
                    self._retry(*batch[0], replies, retries, tries)
                continue
            for message in messages:
                if "error" in message:
                    raise _load_error(message)
            for (position, job), message in zip(batch, messages, strict=False):  # a worker's first message has no job
                if job.kind == "train":
                    self.add_pending(job.round, job.index, message["memory"])
                if self._batches is not None:
                    self._batches.record_time(job, message["seconds"])
                try:
                    replies[position] = load_reply(message["reply"], self._layout)
                except Exception as error:
                    replies[position] = Failure.of(job, format_exception(error))

    def _retry(
        self, position: int, job: Job, replies: dict[int, Update | Failure], retries: deque[NumberedJob],
        tries: dict[int, int],
    ) -> None:  # fmt: skip
        """Queue a job whose worker died for another one, or make it fail after the last try."""
        tries[position] = tries.get(position, 0) + 1
        if tries[position] < _TRIES:
            retries.append((position, job))
        else:
            replies[position] = Failure.of(job, f"{_TRIES} workers died while running it")

    def _replace(self, worker: Worker) -> None:
        position = self._workers.index(worker)
        worker.end()
        self._workers[position] = self._start(position)

    def _drain(self) -> None:
        """Receive the replies to jobs of an interrupted run, so that this one starts clean."""
        for worker in self._workers:
            if worker.jobs:
                worker.jobs = []
                if worker.receive() is None:
                    self._replace(worker)
        self.drop_pending()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []


class _JobQueue:
    """The jobs of a run that no worker has yet, as far ahead as early finishers may get.

    Attributes:
        first: Position of the job whose reply is yielded next.
    """

    def __init__(self, jobs: Iterator[Job], workers: int, batches: "BatchSizer | None") -> None:
        self.first = 0
        self._source, self._workers, self._batches = enumerate(jobs), workers, batches
        self._waiting: deque[NumberedJob] = deque()
        self._bytes: deque[int] = deque()  # of all that are made and not yielded
        self._has_more = True

    @property
    def is_done(self) -> bool:
        """Whether every job was sent and its reply yielded."""
        return not self._has_more and not self._bytes

    def take_batch(self) -> list[NumberedJob]:
        """Return the jobs for a free worker, in order; none where it has to wait."""
        while self._has_more and self._has_room() and (self._batches is not None or not self._waiting):
            job = next(self._source, None)
            self._has_more = job is not None
            if job is not None:
                self._waiting.append(job)
                self._bytes.append(0 if self._batches is None else _count_state_bytes(job[1]))
        count = 1
        if self._batches is not None:
            count = self._batches.choose_size([job for _, job in self._waiting], self._workers)
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def _has_room(self) -> bool:
        messages = _AHEAD * self._workers
        if len(self._bytes) < messages:
            return True
        return self._batches is not None and sum(self._bytes) < messages * self._batches.max_bytes

    def mark_yielded(self) -> None:
        """Count a reply that was yielded."""
        self.first += 1
        self._bytes.popleft()


# ---- the number of jobs in a message -------------------------------------------------------------------------------

_MAX_SECONDS = 0.5
_SHARE = 0.5  # of each worker's part of the waiting jobs


class BatchSizer:
    """Chooses how many jobs go in one message, where a message costs as much as a short job.

    A message carries jobs of at most half a second, by prediction: stopping a run and the end of a round wait no longer
    than that. It carries at most half of a worker's part of the remaining jobs, so that all workers end at about the
    same time, and states of at most 1 MiB, which bounds the replies in memory. Seconds are predicted from those of jobs
    of the same kind and size; the first of these go alone. Which jobs travel together changes no bits.

    Attributes:
        max_bytes: Of the states of a message's jobs, if there are several.
    """

    max_bytes = 2**20

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], float] = {}

    def record_time(self, job: Job, seconds: float) -> None:
        """Record how long a job took."""
        self._seconds[job.kind, _count_state_bytes(job)] = seconds

    def choose_size(self, waiting: Sequence[Job], workers: int) -> int:
        """Return how many of the waiting jobs go to one of the workers now; at least one."""
        predictions = [self._seconds.get((job.kind, _count_state_bytes(job))) for job in waiting]
        limit = min(_MAX_SECONDS, _SHARE * sum(seconds or 0.0 for seconds in predictions) / workers)
        count, total, size = 0, 0.0, 0
        for job, seconds in zip(waiting, predictions, strict=True):
            if seconds is None:
                break
            total, size = total + seconds, size + _count_state_bytes(job)
            if total > limit or size > self.max_bytes:
                break
            count += 1
        return max(count, 1)


def _count_state_bytes(job: Job) -> int:
    if isinstance(job.state, FlatState):
        return job.state.flat.nbytes
    return sum(tensor.nbytes for tensor in job.state.values())


# ---- messages to a worker, and its replies ---------------------------------------------------------------------------


def check_rebuildable(simulation: Simulation, engine: str) -> None:
    """Raise a ConfigError where workers could not rebuild the model."""
    if simulation.problem.spec is None:
        raise ConfigError(
            f"engine {engine} rebuilds the model in each worker, so it needs a model with an import path "
            '("package.module:function" or "file.py:function"). Write it into a file beside this script, or start runs '
            'below `if __name__ == "__main__":`; objects made in Python run with engine.name = "local".',
            key="model",
        )


def dump_setup(simulation: Simulation, threads: int) -> dict[str, Any]:
    """Return all that a worker needs besides the data set, as a table for `fleetfit.messages.pack`."""
    parts = simulation.parts
    return {
        "problem": simulation.problem.spec,
        "base": simulation.problem.base,
        "threads": threads,
        "parts": {"indices": parts.indices, "ends": parts.ends} if isinstance(parts, Parts) else list(map(dict, parts)),
        "resources": simulation.resources.payload,
    }


def load_setup(setup: Mapping[str, Any], data: Data, device: str) -> Simulation:
    """Return the simulation of a worker, and prepare its process for jobs."""
    problem = replace(rebuild_problem(setup["problem"]), base=setup["base"])
    parts = Parts(**setup["parts"]) if isinstance(setup["parts"], Mapping) else setup["parts"]
    simulation = Simulation(problem, data, parts, DeviceResources.from_payload(setup["resources"]))
    torch.set_num_threads(setup["threads"])
    keep_freed_memory()
    return move_data(simulation, resolve_device(device))


def run_message(message: Mapping[str, Any], simulation: Simulation) -> bytes:
    """Run the job of a message {"job", "memory"}; return the message {"reply", "memory"}, or {"error"}.

    An error ends the run. An exception that is not a `FleetFitError` is a bug of the method or of FleetFit: the engine
    reports it, instead of a worker that dies again and again.
    """
    layout = simulation.problem.layout
    job = load_job(message["job"], layout)
    try:
        build(job.method)
        reply, memory = run_job(job, simulation.device(job.client, message["memory"], job.round))
        return pack({"reply": dump_reply(reply, layout), "memory": memory})
    except BaseException as error:
        return dump_error(error)


def dump_error(error: BaseException) -> bytes:
    """Return the message of a worker that cannot continue."""
    if isinstance(error, FleetFitError):
        return pack({"error": str(error)})
    plug_in = find_plug_in(error)
    sentence = f"{plug_in or 'FleetFit'} {describe_failure(error)}."
    if plug_in is None:
        sentence += " This is a fault of FleetFit, not yours; please report it."
    details = "".join(traceback.format_exception(error))
    return pack({"error": sentence, "details": details, "foreign": plug_in is not None})


def _load_error(message: Mapping[str, Any]) -> FleetFitError:
    sentence = f"a worker could not go on: {message['error']}"
    if not message.get("details"):
        return RunError(sentence)
    return Unexpected(sentence, str(message["details"]), bool(message.get("foreign")))
