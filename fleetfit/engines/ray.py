"""Actors of a Ray cluster, on this machine or on many; same bits as `local`. It needs the extra `ray`.

An actor is made once and keeps its modules. Ray's object store has the data set, one copy per machine, and the tensors
of each level once, however many clients train it; jobs and updates are messages. A call of an actor costs some
milliseconds, so up to a tenth of a second of short jobs waits at each actor. An actor or a machine that dies loses no
round. Each machine reads images that are files itself, from the same path.

Differs from Ray's defaults: workers run at this process's niceness, and `threads` sets the threads of torch and BLAS.
Actors copy tensors from the store before training: torch would write to memory that all actors share.
"""

import contextlib
import math
import os
import socket
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from fleetfit.core import Job, Simulation, check_rebuildable
from fleetfit.data.dataset import pack_data, unpack_data
from fleetfit.engines.pool import (
    NumberedJob,
    Pool,
    dump_error,
    dump_setup,
    load_setup,
    run_message,
)
from fleetfit.errors import ConfigError, MissingExtra, RunError, check_range
from fleetfit.layout import State
from fleetfit.machine import available_cores
from fleetfit.messages import dump_job, dump_state, pack, unpack
from fleetfit.submodel import Submodel
from fleetfit.training.runtime import keep_freed_memory

_START_S = 120.0  # until the first actor must have started
_DIRECT = 4 * 1024 * 1024  # bytes of a reply up to which it bypasses the object store
_WAITING_S = 0.1  # of jobs that wait at an actor, by its last one: more jobs when they are short
_MAX_WAITING = 7
_MAX_SHARED = 8  # states in the store: those of jobs that wait or are in flight


def ray(
    simulation: Simulation,
    workers: int | None = None,
    device: str = "cpu",
    threads: int = 1,
    cpus: float | None = None,
    gpus: float | None = None,
    address: str | None = None,
) -> "Actors":
    """Make the engine.

    Args:
        simulation: The fleet.
        workers: Actors; by default as many as the cluster has room for.
        device: "cpu", or "cuda" for the GPU that Ray assigns to each actor.
        threads: Threads per job; other than 1 changes the last bits of results.
        cpus: Cores that Ray reserves for an actor, also a fraction; by default `threads`.
        gpus: GPUs that Ray reserves for an actor, also a fraction (0.25: four actors share one); by default 1 with
            device "cuda" and 0 without.
        address: Of a running cluster ("auto": the one on this machine); by default that of RAY_ADDRESS. Without
            either, the engine starts a cluster here and ends it.

    Raises:
        MissingExtra: Ray is not installed.
        ConfigError: A setting is out of range, no cluster answers, or the cluster has no room for an actor.
    """
    if workers is not None:
        check_range("engine.workers", workers, 1, closed=True)
    check_range("engine.threads", threads, 1, closed=True)
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f'engine.device must be "cpu" or "cuda" with engine ray, which assigns GPUs; got "{device}".',
            key="engine.device",
        )
    cores, cards = float(threads) if cpus is None else cpus, (device == "cuda") * 1.0 if gpus is None else gpus
    if cores <= 0 or cards < 0 or (device == "cuda") != (cards > 0):
        raise ConfigError(
            f'engine.cpus must be above 0, and engine.gpus above 0 with engine.device = "cuda" and 0 without; got '
            f'{cores:g} and {cards:g} with "{device}".',
            key="engine.cpus",
        )
    check_rebuildable(simulation.problem, "the workers of engine ray")
    return Actors(_import_ray(), simulation, workers, device, threads, {"CPU": cores, "GPU": cards}, address)


def _import_ray() -> ModuleType:
    """Import Ray, which reads these settings on import."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_max_direct_call_object_size", str(_DIRECT))
    try:
        import ray as library
    except ImportError:
        raise MissingExtra("ray", "Engine ray") from None
    return library


class Actors(Pool):
    """The engine that runs jobs in the actors of a Ray cluster."""

    def __init__(
        self, library: ModuleType, simulation: Simulation, workers: int | None, device: str, threads: int,
        each: Mapping[str, float], address: str | None,
    ) -> None:  # fmt: skip
        super().__init__("ray", workers or 0, simulation.problem.layout)
        self._ray, self._each, self._owns_cluster = library, each, False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._shared: dict[int, _SharedState] = {}
        self._last_number = 0
        keep_freed_memory()
        self._connect(address)
        try:
            capacity = self._count_capacity()
            if not capacity or (workers or 0) > capacity:
                raise ConfigError(
                    f"the Ray cluster has room for {capacity} actors with {each['CPU']:g} CPUs and {each['GPU']:g} "
                    f"GPUs each, and engine.workers is {workers or 1}. Lower engine.workers, engine.cpus or "
                    "engine.gpus.",
                    key="engine.workers",
                )
            self._size = workers or capacity
            table, arrays = pack_data(simulation.data)
            setup = pack({"data": table, "device": device, **dump_setup(simulation, threads)})
            self._setup = [self._put(setup), *(library.put(arrays[name]) for name in ("x", "y"))]
            self._actor = self._make_actor_class(threads)
            self._workers = [self._start(position) for position in range(self._size)]
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None) -> None:
        library = self._ray
        if library.is_initialized():  # by the caller, which also shuts it down
            return
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, about its future defaults
            if address := address or os.environ.get("RAY_ADDRESS"):
                try:
                    _check_port(address)
                    library.init(address=address, log_to_driver=False, logging_level="ERROR")
                except (OSError, RuntimeError, ValueError) as error:
                    raise ConfigError(
                        f"no Ray cluster answers at {address}: {error}. Start one with `ray start --head`, or leave "
                        "out engine.address and RAY_ADDRESS to have one started on this machine.",
                        key="engine.address",
                    ) from None
            else:
                # A folder for this user only; its path must be short, since those of sockets must be.
                short = "/tmp" if Path("/tmp").is_dir() else None  # noqa: S108
                self._folder = tempfile.TemporaryDirectory(prefix="ray-", dir=short, ignore_cleanup_errors=True)
                library.init(num_cpus=available_cores(), _temp_dir=self._folder.name, **quiet)
        self._owns_cluster = True

    def _count_capacity(self) -> int:
        return sum(
            min(int(node["Resources"].get(kind, 0) / share + 1e-6) for kind, share in self._each.items() if share)
            for node in self._ray.nodes()
            if node["Alive"]
        )

    def _make_actor_class(self, threads: int) -> Any:
        path = os.pathsep.join([p for p in sys.path if p] + [str(Path.cwd())])
        variables = {**dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
                     "PYTHONPATH": path}  # fmt: skip
        return self._ray.remote(Actor).options(
            num_cpus=self._each["CPU"], num_gpus=self._each["GPU"], runtime_env={"env_vars": variables}, max_restarts=0
        )

    def _put(self, message: bytes) -> Any:
        return self._ray.put(np.frombuffer(message, dtype=np.uint8))

    def share(self, state: State, submodel: Submodel) -> "_SharedState | None":
        """Return a state's entry in the object store; None for an empty state."""
        if not state:
            return None
        entry = self._shared.pop(id(state), None)
        if entry is None:
            self._last_number += 1
            entry = _SharedState(self._last_number, self._put(pack(dump_state(state, self._layout, submodel))), state)
        self._shared[id(state)] = entry  # the latest is the last
        while len(self._shared) > _MAX_SHARED:
            del self._shared[next(iter(self._shared))]
        return entry

    def _start(self, position: int) -> "_ActorWorker":
        return _ActorWorker(self, self._actor.remote(), self._setup)

    def _wait(self) -> list["_ActorWorker"]:
        awaited = {w.replies[0]: w for w in self._workers if w.replies}
        timeout_s = None if any(w.most for w in self._workers) else _START_S
        ready, _ = self._ray.wait(list(awaited), timeout=timeout_s)
        if not ready:
            raise RunError(
                f"none of {self._size} Ray actors could be started within {_START_S:g} s. The cluster has room for "
                f"{self._count_capacity()} now; `ray status` shows who uses it."
            )
        return [awaited[reply] for reply in ready]

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        super().close()
        self._shared = {}
        if self._owns_cluster:
            self._ray.shutdown()
        if self._folder is not None:
            self._folder.cleanup()


def _check_port(address: str) -> None:
    """Raise an OSError at once where Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


class _SharedState(NamedTuple):
    number: int
    reference: Any
    state: State  # held so that its id stays its own


class _ActorWorker:
    """One actor and the jobs that it has; its first reply is that it has started."""

    def __init__(self, engine: Actors, actor: Any, setup: list[Any]) -> None:
        self.engine, self.actor, self.most = engine, actor, 0
        self.jobs: deque[NumberedJob] = deque()
        self.state_numbers: set[int] = set()  # of the states that the actor has: each is sent to it once
        self.replies = deque([actor.start.remote(*setup)])

    def send(self, job: Job, memory: Any) -> None:
        shared, new = {}, {}
        for name in ("state", "statistics"):
            if (entry := self.engine.share(getattr(job, name), job.submodel)) is not None:
                shared[name] = entry.number
                if entry.number not in self.state_numbers:
                    new[entry.number] = entry.reference
        stored = {entry.number for entry in self.engine._shared.values()}
        self.state_numbers = {*shared.values(), *(self.state_numbers & stored)}
        table = dump_job(replace(job, state={}, statistics={}), self.engine._layout)
        task = {"job": table, "memory": memory, "shared": shared, "new": list(new), "holds": sorted(self.state_numbers)}
        self.replies.append(self.actor.run.remote(np.frombuffer(pack(task), dtype=np.uint8), *new.values()))

    def receive(self) -> Mapping[str, Any] | None:
        library = self.engine._ray
        try:
            message, seconds = library.get(self.replies.popleft())
        except (library.exceptions.RayActorError, library.exceptions.ObjectLostError):
            return None
        self.most = 1 + min(_MAX_WAITING, int(_WAITING_S / seconds))
        return unpack(bytearray(message))

    def end(self) -> None:
        with contextlib.suppress(Exception):  # Ray has ended already
            self.engine._ray.kill(self.actor)


# ---- in an actor -------------------------------------------------------------------------------------------------


class Actor:
    """A worker, which Ray runs in a process of its own."""

    simulation: Simulation
    states: Mapping[int, np.ndarray]

    def start(self, setup: np.ndarray, x: np.ndarray, y: np.ndarray) -> "Reply":
        """Rebuild the simulation; return an empty message, or an error."""
        torch.set_num_interop_threads(1)
        self.states = {}
        table = unpack(bytearray(setup))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the store's memory is read-only, and samples are read
                data = unpack_data(table["data"], {"x": x, "y": y})
            self.simulation = load_setup(table, data, table["device"])
        except BaseException as error:
            return _as_array(dump_error(error)), math.inf
        return _as_array(pack({})), math.inf

    def run(self, message: np.ndarray, *states: np.ndarray) -> "Reply":
        """Run a job; see `fleetfit.engines.pool.run_message`.

        Args:
            message: The job with the numbers of its states, and which states are new or needed later.
            states: The new ones, from the store.
        """
        began, task = time.perf_counter(), unpack(bytearray(message))
        available = {**self.states, **dict(zip(task["new"], states, strict=True))}
        self.states = {number: available[number] for number in task["holds"]}
        for name, number in task["shared"].items():  # a copy for each job, which may write to it
            task["job"][name] = unpack(bytearray(self.states[number]))
        return _as_array(run_message(task, self.simulation)), time.perf_counter() - began


Reply = tuple[np.ndarray, float]
"""A reply as a message, and the seconds that its job took."""


def _as_array(message: bytes) -> np.ndarray:
    return np.frombuffer(message, dtype=np.uint8)
