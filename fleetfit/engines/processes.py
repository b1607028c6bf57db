"""Worker processes, each with its modules cached and the data memory-mapped; same bits as `local`.

A worker is a fresh Python. Jobs and updates travel as `fleetfit.messages` messages over a socket pair. Workers end when
this process does.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fleetfit import files
from fleetfit.core import Job, Simulation, check_rebuildable
from fleetfit.data.dataset import load_data, save_data
from fleetfit.engines.pool import (
    NumberedJob,
    Pool,
    dump_error,
    dump_setup,
    load_setup,
    run_message,
)
from fleetfit.errors import RunError, check_range, refuse_on_windows
from fleetfit.layout import Layout
from fleetfit.machine import available_cores
from fleetfit.messages import dump_job, pack, unpack
from fleetfit.training import resolve_device
from fleetfit.training.runtime import keep_freed_memory


def processes(simulation: Simulation, workers: int | None = None, device: str = "cpu", threads: int = 1) -> "Processes":
    """Make the engine.

    Args:
        simulation: The fleet.
        workers: Worker processes; by default one per core, or one per CUDA device.
        device: "cpu", "cuda:N", or "cuda" for all CUDA devices in turn.
        threads: Threads per job; other than 1 changes the last bits of results.
    """
    refuse_on_windows('engine.name = "processes"', 'engine.name = "local" gives the same bits, in one process.')
    if workers is not None:
        check_range("engine.workers", workers, 1, closed=True)
    check_range("engine.threads", threads, 1, closed=True)
    resolve_device(device)
    check_rebuildable(simulation.problem, "the workers of engine processes")
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if device == "cuda" else [device]
    count = workers or (len(devices) if device.startswith("cuda") else available_cores())
    return Processes(simulation, [devices[i % len(devices)] for i in range(count)], threads)


class _WorkerProcess:
    """One worker process and the job that it has; it gets one at a time."""

    def __init__(self, setup: Path, device: str, layout: Layout) -> None:
        self._layout = layout
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                       "PYTHONPATH": os.pathsep.join([p for p in sys.path if p] + [str(Path.cwd())])}  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fleetfit.engines.processes", str(theirs.fileno()), str(setup), device],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
            process_group=0,  # a terminal's Ctrl-C is for this process alone, also while a worker still imports
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.jobs: deque[NumberedJob] = deque()
        self.most = 1

    def send(self, job: Job, memory: Any) -> None:
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pack({"job": dump_job(job, self._layout), "memory": memory}))

    def receive(self) -> Mapping[str, Any] | None:
        try:
            return unpack(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        self.connection.close()
        if self.jobs:  # the run does not wait for its reply
            self.process.kill()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Processes(Pool):
    """The engine that runs jobs in worker processes."""

    def __init__(self, simulation: Simulation, devices: list[str], threads: int) -> None:
        super().__init__("processes", len(devices), simulation.problem.layout)
        keep_freed_memory()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="fleetfit-"))
        except OSError as error:
            raise RunError(_format_disk_error("the folder for temporary files", error)) from None
        self._devices = devices
        try:
            setup = {"data": save_data(simulation.data, self._folder), **dump_setup(simulation, threads)}
            (self._folder / "setup").write_bytes(pack(setup))
            self._workers = [self._start(position) for position in range(len(devices))]
        except OSError as error:
            self.close()
            raise RunError(_format_disk_error(str(self._folder), error)) from None
        except BaseException:
            self.close()
            raise

    def _start(self, position: int) -> _WorkerProcess:
        return _WorkerProcess(self._folder / "setup", self._devices[position], self._layout)

    def _wait(self) -> list[_WorkerProcess]:
        busy = {w.connection: w for w in self._workers if w.jobs}
        return [busy[ready] for ready in wait(list(busy))]

    def close(self) -> None:
        """End the workers and remove their data."""
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _format_disk_error(place: str, error: OSError) -> str:
    return (
        f"the workers cannot be started, since {place} cannot be written: {files.format_os_error(error)}. Free some "
        "space, or name another folder in the environment variable TMPDIR."
    )


# ---- in a worker -------------------------------------------------------------------------------------------------


def _run_jobs(connection: Connection, setup: Path, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        table = unpack(setup.read_bytes())
        simulation = load_setup(table, load_data(table["data"], setup.parent), device)
    except BaseException as error:
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes()
            connection.send_bytes(dump_error(error))
        return
    with contextlib.suppress(EOFError, OSError):  # the engine has ended
        while True:
            connection.send_bytes(run_message(unpack(connection.recv_bytes()), simulation))


if __name__ == "__main__":
    _run_jobs(Connection(int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])
