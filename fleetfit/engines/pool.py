"""Worker pools: the base of the engines with several workers, which jobs go to whom, and a worker's side of it.

A worker is any process that jobs can be sent to. Jobs go out in the order in which they come, longest first. Replies
are yielded in that order, so a few early finishers wait. A worker that dies loses no round: its jobs run on others.

Nothing is pickled, and the caller's main module is not imported again: a worker rebuilds problem and method from their
specs.
"""

import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from fleetfit.anatomy import Layout, unwrap
from fleetfit.anatomy.derive import DerivedArchitecture
from fleetfit.core import DeviceResources, Failure, Job, Simulation, Update
from fleetfit.data import Data, Parts, choose_samples
from fleetfit.engines.local import ClientMemories, move_data
from fleetfit.errors import FleetFitError, RunError, Unexpected, format_exception
from fleetfit.hooks import build, check_portable, dump_problem, rebuild_problem
from fleetfit.messages import dump_reply, load_job, load_reply, pack
from fleetfit.names import describe_failure, find_plug_in
from fleetfit.training import resolve_device, run_job
from fleetfit.training.runtime import keep_freed_memory

_TRIES = 3  # workers that a job may cost before it counts as failed
_AHEAD = 2  # jobs that are made and not yielded, for each that a worker may have: the bound on early finishers

NumberedJob = tuple[int, Job]
"""A job with its position in the order."""


class Worker(Protocol):
    """A worker, and the jobs that it has.

    Attributes:
        jobs: In the order in which it runs them.
        most: The number of jobs that it may have now; 0 while it starts.
    """

    jobs: deque[NumberedJob]
    most: int

    def send(self, job: Job, memory: Any) -> None:
        """Send a job with its client's memory. A dead worker shows in `receive`."""

    def receive(self) -> Mapping[str, Any] | None:
        """Return its next reply as `run_message` makes it, or None when the worker is dead."""

    def end(self) -> None:
        """End it, also in the middle of a job."""


class Pool(ClientMemories, ABC):
    """An engine that keeps workers busy."""

    def __init__(self, name: str, size: int, layout: Layout) -> None:
        """Make an engine without workers.

        Args:
            name: The engine's name.
            size: Its number of workers.
            layout: The model's layout.
        """
        super().__init__()
        self._name, self._size, self._layout = name, size, layout
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
        numbered, made, yielded, has_more = enumerate(jobs), 0, 0, True
        retries: deque[NumberedJob] = deque()
        tries = Counter[int]()
        replies: dict[int, Update | Failure] = {}
        while True:
            for worker in sorted(self._workers, key=lambda worker: len(worker.jobs)):
                if len(worker.jobs) >= worker.most:
                    continue
                if retries:
                    self._send(worker, *retries.popleft())
                elif has_more and made - yielded < _AHEAD * sum(worker.most for worker in self._workers):
                    one = next(numbered, None)
                    has_more = one is not None
                    if one is not None:
                        made += 1
                        self._send(worker, *one)
            if yielded in replies:
                yield replies.pop(yielded)
                yielded += 1
            elif yielded == made and not has_more:
                return
            else:
                self._collect(replies, retries, tries)

    def _send(self, worker: Worker, position: int, job: Job) -> None:
        check_portable(job.method, f"the workers of engine {self._name}")
        version, memory = self.get_memory(job.client)
        job = replace(job, memory_version=version)
        worker.jobs.append((position, job))
        worker.send(job, memory)

    def _collect(self, replies: dict[int, Update | Failure], retries: deque[NumberedJob], tries: Counter[int]) -> None:
        """Wait for workers; store their replies. Replace a dead worker and queue its jobs for others.

        The job that a worker had when it died fails after the last try.
        """
        for worker in self._wait():
            message = worker.receive()
            one = worker.jobs.popleft() if worker.jobs else None
            if message is None:
                self._replace(worker)
                if one is not None:
                    position, job = one
                    tries[position] += 1
                    if tries[position] < _TRIES:
                        retries.append(one)
                    else:
                        replies[position] = Failure.of(job, f"{_TRIES} workers died while running it")
                    retries.extend(worker.jobs)
                    continue
                self._failed_starts += 1
                if self._failed_starts > _TRIES * self._size:
                    raise RunError(
                        f"{self._failed_starts} workers of engine {self._name} died before they could take a job."
                    )
            elif "error" in message:
                raise _load_error(message)
            elif one is not None:  # a worker's first message has no job
                position, job = one
                if job.kind == "train":
                    self.add_pending(job.round, job.index, message["memory"])
                try:
                    replies[position] = load_reply(message["reply"], self._layout)
                except Exception as error:
                    replies[position] = Failure.of(job, format_exception(error))

    def _replace(self, worker: Worker) -> None:
        position = self._workers.index(worker)
        worker.end()
        self._workers[position] = self._start(position)

    def _drain(self) -> None:
        """Receive the replies to jobs of an interrupted run, so that this one starts clean."""
        for worker in list(self._workers):
            while worker.jobs:
                worker.jobs.popleft()
                if worker.receive() is None:
                    worker.jobs.clear()
                    self._replace(worker)
        self._pending.clear()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []


# ---- messages to a worker, and its replies ---------------------------------------------------------------------------


def dump_setup(simulation: Simulation, threads: int) -> dict[str, Any]:
    """Return all that a worker needs besides the data set, as a table for `fleetfit.messages.pack`."""
    parts = simulation.parts
    return {
        "problem": dump_problem(simulation.problem),
        "base": simulation.problem.base,
        "threads": threads,
        "parts": {"indices": parts.indices, "ends": parts.ends} if isinstance(parts, Parts) else list(map(dict, parts)),
        "resources": simulation.resources.payload,
    }


def load_setup(setup: Mapping[str, Any], data: Data, device: str) -> Simulation:
    """Return the simulation of a worker, and prepare its process for jobs."""
    problem = replace(rebuild_problem(setup["problem"]), base=setup["base"])
    if isinstance(derived := unwrap(problem.architecture), DerivedArchitecture):
        derived.samples = choose_samples(data)
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
