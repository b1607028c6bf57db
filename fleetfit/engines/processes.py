"""Worker processes, each with its modules cached and the data memory-mapped; same bits as `local`.

A worker is a fresh Python that rebuilds problem and method from their specs: nothing is pickled and the caller's main
module is not imported again. Jobs and updates travel as `fleetfit.wire` messages over a socket pair. A worker that
dies loses no round: its job runs again on another one. Workers end when this process does.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fleetfit.data.stored import restored, store
from fleetfit.engines.allocator import keep_freed_memory
from fleetfit.engines.local import accelerator_named, on_accelerator
from fleetfit.engines.memories import Memories
from fleetfit.errors import ConfigError, FleetFitError, RunError
from fleetfit.method import build, is_portable, rebuilt
from fleetfit.train import run_job
from fleetfit.values import Failure, Job, Resources, Simulation, Update
from fleetfit.wire import job_nest, job_of, pack, reply_nest, reply_of, unpack

_TRIES = 3  # workers that a job may cost before it counts as failed
_AHEAD = 2  # jobs waiting or in flight, per worker: the bound on early finishers


def processes(simulation: Simulation, workers: int | None = None, device: str = "cpu", threads: int = 1) -> "Processes":
    """Make the engine.

    Args:
        simulation: The fleet.
        workers: Worker processes; by default one per core, or one per CUDA device.
        device: "cpu", "cuda:N", or "cuda" for all CUDA devices in turn.
        threads: Threads per job; other than 1 changes the last bits of results.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"engine.workers must be at least 1, got {workers}.")
    if threads < 1:
        raise ConfigError(f"engine.threads must be at least 1, got {threads}.")
    accelerator_named(device)
    if simulation.problem.spec is None:
        raise ConfigError(
            "engine processes rebuilds the model in each worker, so it needs a model with an import path "
            '("package.module:function" or "file.py:function"); objects made in Python run with engine.name = "local".'
        )
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if device == "cuda" else [device]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = workers or (len(devices) if device.startswith("cuda") else cores)
    return Processes(simulation, [devices[i % len(devices)] for i in range(count)], threads)


class _Worker:
    """One worker process and the job that it has."""

    def __init__(self, setup: Path, device: str) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                       "PYTHONPATH": os.pathsep.join([p for p in sys.path if p] + [str(Path.cwd())])}  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fleetfit.engines.processes", str(theirs.fileno()), str(setup), device],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.job: tuple[int, Job] | None = None

    def give(self, place: int, job: Job, memory: Any) -> None:
        self.job = (place, job)
        with contextlib.suppress(OSError):  # a dead worker shows when its reply is awaited
            self.connection.send_bytes(pack({"job": job_nest(job), "memory": memory}))

    def take(self) -> dict[str, Any] | None:
        """Return the reply, or None when the worker is gone."""
        try:
            found: dict[str, Any] = unpack(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return found

    def end(self) -> None:
        self.connection.close()
        if self.job is not None:  # nobody waits for what it is doing
            self.process.kill()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Processes:
    """The engine that runs jobs in worker processes."""

    def __init__(self, simulation: Simulation, devices: list[str], threads: int) -> None:
        """Write the data for the workers and start them."""
        keep_freed_memory()
        self._memories = Memories()
        self._folder = Path(tempfile.mkdtemp(prefix="fleetfit-"))
        self._workers: list[_Worker] = []
        self._devices = devices
        try:
            self._setup = _write_setup(self._folder, simulation, threads)
            self._workers = [_Worker(self._setup, device) for device in devices]
        except BaseException:
            self.close()
            raise

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
                if worker.job is not None:
                    continue
                if again:
                    self._give(worker, *again.popleft())
                elif more and given - yielded < _AHEAD * len(self._workers):
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

    def _give(self, worker: _Worker, place: int, job: Job) -> None:
        if not is_portable(job.method):
            raise ConfigError(
                "engine processes rebuilds the method in each worker, so its functions need import paths "
                '("package.module:function" or "file.py:function"); functions made in Python run '
                'with engine.name = "local".'
            )
        version, memory = self._memories.of(job.client)
        worker.give(place, replace(job, memory_version=version), memory)

    def _collect(self, done: dict[int, Update | Failure], again: deque[tuple[int, Job]], tries: dict[int, int]) -> None:
        """Wait for some worker; note its reply, or replace it and note its job for another one."""
        busy = {w.connection: w for w in self._workers if w.job is not None}
        for ready in wait(list(busy)):
            worker = busy[ready]  # type: ignore[index]
            assert worker.job is not None
            place, job = worker.job
            reply = worker.take()
            worker.job = None
            if reply is None:
                self._replace(worker)
                tries[place] = tries.get(place, 0) + 1
                if tries[place] < _TRIES:
                    again.append((place, job))
                else:
                    reason = f"{_TRIES} workers died while running it"
                    done[place] = Failure(job.round, job.index, job.client, job.level, job.submodel, reason)
            elif "error" in reply:
                raise RunError(f"a worker could not go on: {reply['error']}")
            else:
                if job.kind == "train":
                    self._memories.offer(job.round, job.index, reply["memory"])
                done[place] = reply_of(reply["reply"])

    def _replace(self, worker: _Worker) -> None:
        place = self._workers.index(worker)
        worker.end()
        self._workers[place] = _Worker(self._setup, self._devices[place])

    def _drain(self) -> None:
        """Take the replies of jobs that an interrupted run left behind, so that this one starts clean."""
        for worker in self._workers:
            if worker.job is not None:
                worker.job = None
                if worker.take() is None:
                    self._replace(worker)
        self._memories.forget_pending()

    def accept(self, update: Update) -> None:
        """Keep what the client remembers of this update."""
        self._memories.accept(update)

    def save(self) -> dict[str, Any]:
        """Return the clients' memories."""
        return self._memories.save()

    def load(self, memories: Mapping[str, Any]) -> None:
        """Take back what `save` returned."""
        self._memories.load(memories)

    def close(self) -> None:
        """End the workers and remove their data."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)


# ---- set-up, written by the engine and read by the workers -------------------------------------------------------


def _write_setup(folder: Path, simulation: Simulation, threads: int) -> Path:
    nest = {
        "problem": simulation.problem.spec, "base": simulation.problem.base, "data": store(simulation.data, folder),
        "parts": [dict(part) for part in simulation.parts], "threads": threads, "path": [p for p in sys.path if p],
        "resources": simulation.resources.nest,
    }  # fmt: skip
    (folder / "setup").write_bytes(pack(nest))
    return folder / "setup"


def _read_setup(path: Path, device: str) -> tuple[Simulation, int]:
    nest = unpack(path.read_bytes())
    data = restored(nest["data"], path.parent)
    problem = replace(rebuilt(nest["problem"]), base=nest["base"])
    simulation = Simulation(problem, data, nest["parts"], Resources.restored(nest["resources"]))
    return on_accelerator(simulation, accelerator_named(device)), nest["threads"]


def _work(connection: Connection, setup: Path, device: str) -> None:
    """Serve jobs until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        simulation, threads = _read_setup(setup, device)
    except Exception as error:
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes()
            said = str(error) if isinstance(error, FleetFitError) else traceback.format_exc()
            connection.send_bytes(pack({"error": said}))
        return
    torch.set_num_threads(threads)
    keep_freed_memory()
    while True:
        try:
            nest = unpack(connection.recv_bytes())
        except (EOFError, OSError):
            return
        job = job_of(nest["job"])
        try:
            build(job.method)
            reply, memory = run_job(job, simulation.device(job.client, nest["memory"], job.round))
            message = {"reply": reply_nest(reply), "memory": memory}
        except FleetFitError as error:
            message = {"error": str(error)}
        except (
            Exception
        ):  # a bug, the method's or ours: the engine shows it, instead of a worker that dies again and again
            message = {"error": f"a job failed unexpectedly.\n{traceback.format_exc()}"}
        try:
            connection.send_bytes(pack(message))
        except OSError:  # the engine is gone
            return


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])
