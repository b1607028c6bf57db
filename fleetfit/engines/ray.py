"""Actors of a Ray cluster, on this machine or on many; same bits as `local`. It needs the extra `ray`.

An actor is made once and keeps its modules. The data set lies in Ray's object store, one copy for each machine, and the
tensors of a level are put there once, however many clients train them; jobs and updates are messages. A call of an
actor costs some milliseconds of CPU in several processes, so short jobs go several at a time (`Batches`). An actor or a
machine that dies loses no round. Images that are read from files when they are needed are read by each machine, from
the same place.

Differs from Ray's habits: workers run at this process's niceness, with as many threads for torch and BLAS as `threads`
says. What comes out of the store is copied before it is trained on, since the store is memory that all actors share,
and torch would write to it.
"""

import contextlib
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from fleetfit.data.dataset import pack_data, unpack_data
from fleetfit.engines.batches import Batches
from fleetfit.engines.pool import Placed, Pool
from fleetfit.engines.work import answer, check_rebuildable, said, setup_nest, simulation_of
from fleetfit.errors import ConfigError, MissingExtra, RunError
from fleetfit.layout import State
from fleetfit.machine import available_cores
from fleetfit.messages import dump_job, dump_state, pack, unpack
from fleetfit.submodel import Submodel
from fleetfit.training.runtime import keep_freed_memory
from fleetfit.values import Job, Simulation

_PATIENCE_S = 120.0  # for the first of the actors, while none is there
_DIRECT = 4 * 1024 * 1024  # bytes of a reply up to which it comes as it is, and not by way of the object store
_SHARED = 8  # states that are kept in the store: those of jobs that wait or are in flight


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
        device: "cpu", or "cuda" for the GPU that Ray gives to each actor.
        threads: Threads per job; other than 1 changes the last bits of results.
        cpus: Cores that Ray sets aside for an actor, also a fraction; by default `threads`.
        gpus: GPUs that Ray sets aside for an actor, also a fraction (0.25: four actors share one); by default 1 with
            device "cuda" and 0 without.
        address: Of a cluster that runs ("auto": the one on this machine); by default that of RAY_ADDRESS, or else one
            is started here and ended with the engine.

    Raises:
        MissingExtra: Ray is not installed.
        ConfigError: A setting is out of range, no cluster answers, or the cluster has no room for an actor.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"engine.workers must be at least 1, got {workers}.", key="engine.workers")
    if threads < 1:
        raise ConfigError(f"engine.threads must be at least 1, got {threads}.", key="engine.threads")
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f'engine.device must be "cpu" or "cuda" with engine ray, which hands out GPUs; got "{device}".',
            key="engine.device",
        )
    cores, cards = float(threads) if cpus is None else cpus, (device == "cuda") * 1.0 if gpus is None else gpus
    if cores <= 0 or cards < 0 or (device == "cuda") != (cards > 0):
        raise ConfigError(
            f'engine.cpus must be above 0, and engine.gpus above 0 with engine.device = "cuda" and 0 without; got '
            f'{cores:g} and {cards:g} with "{device}".',
            key="engine.cpus",
        )
    check_rebuildable(simulation, "ray")
    return Actors(_ray(), simulation, workers, device, threads, {"CPU": cores, "GPU": cards}, address)


def _ray() -> ModuleType:
    """Import Ray: it reads these settings when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_max_direct_call_object_size", str(_DIRECT))
    try:
        import ray as found
    except ImportError:
        raise MissingExtra("ray", "Engine ray") from None
    return found


class Actors(Pool):
    """The engine that runs jobs in the actors of a Ray cluster."""

    def __init__(
        self, library: ModuleType, simulation: Simulation, workers: int | None, device: str, threads: int,
        each: Mapping[str, float], address: str | None,
    ) -> None:  # fmt: skip
        """Connect to a cluster or start one, put the data set into its store, and start the actors."""
        super().__init__("ray", workers or 0, simulation.problem.layout, Batches())
        self._ray, self._each, self._started = library, each, False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._shared: dict[int, _Shared] = {}
        self._numbered = 0
        keep_freed_memory()
        self._connect(address)
        try:
            room = self._room()
            if not room or (workers or 0) > room:
                raise ConfigError(
                    f"the Ray cluster has room for {room} actors with {each['CPU']:g} CPUs and {each['GPU']:g} GPUs "
                    f"each, and {workers or 1} are wanted. Lower engine.workers, engine.cpus or engine.gpus.",
                    key="engine.workers",
                )
            self._size = workers or room
            nest, arrays = pack_data(simulation.data)
            setup = pack({"data": nest, "device": device, **setup_nest(simulation, threads)})
            self._setup = [self._put(setup), *(library.put(arrays[name]) for name in ("x", "y"))]
            self._actor = self._remote(threads)
            self._workers = [self._start(place) for place in range(self._size)]
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None) -> None:
        library = self._ray
        if library.is_initialized():  # by the caller, who ends it
            return
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, about its future defaults
            if address := address or os.environ.get("RAY_ADDRESS"):
                try:
                    _check_somebody_listens(address)
                    library.init(address=address, log_to_driver=False, logging_level="ERROR")
                except (OSError, RuntimeError, ValueError) as error:
                    raise ConfigError(
                        f"no Ray cluster answers at {address}: {error}. Start one with `ray start --head`, or leave "
                        "out engine.address and RAY_ADDRESS to have one started on this machine.",
                        key="engine.address",
                    ) from None
            else:
                # A folder of its own, for this user only, in the place whose name is short: those of sockets must be.
                short = "/tmp" if Path("/tmp").is_dir() else None  # noqa: S108
                self._folder = tempfile.TemporaryDirectory(prefix="ray-", dir=short, ignore_cleanup_errors=True)
                library.init(num_cpus=available_cores(), _temp_dir=self._folder.name, **quiet)
        self._started = True

    def _room(self) -> int:
        """Return how many actors the machines of the cluster have room for."""
        found = 0
        for node in self._ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                found += min(int(has.get(kind, 0) / share + 1e-6) for kind, share in self._each.items() if share)
        return found

    def _remote(self, threads: int) -> Any:
        """Return the actor's class as Ray takes it."""
        path = os.pathsep.join([p for p in sys.path if p] + [str(Path.cwd())])
        variables = {**dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
                     "PYTHONPATH": path}  # fmt: skip
        return self._ray.remote(Actor).options(
            num_cpus=self._each["CPU"], num_gpus=self._each["GPU"], runtime_env={"env_vars": variables}, max_restarts=0
        )

    def _put(self, message: bytes) -> Any:
        return self._ray.put(np.frombuffer(message, dtype=np.uint8))

    def share(self, state: State, piece: Submodel) -> "_Shared | None":
        """Return a state as it lies in the object store, the same one while the same state is asked for."""
        if not state:
            return None
        found = self._shared.pop(id(state), None)
        if found is None:
            self._numbered += 1
            found = _Shared(self._numbered, self._put(pack(dump_state(state, self._layout, piece))), state)
        self._shared[id(state)] = found  # the latest stand last
        while len(self._shared) > _SHARED:
            del self._shared[next(iter(self._shared))]
        return found

    @property
    def shared(self) -> set[int]:
        """Numbers of the states that are kept in the store."""
        return {one.number for one in self._shared.values()}

    def nest_of(self, job: Job) -> dict[str, Any]:
        """Return a job as a nest."""
        return dump_job(job, self._layout)

    def _start(self, place: int) -> "_ActorWorker":
        return _ActorWorker(self, self._actor.remote(), self._setup)

    def _ready(self) -> list["_ActorWorker"]:
        awaited = {w.reply: w for w in self._workers if w.reply is not None}
        anybody = any(w.started for w in self._workers)
        ready, _ = self._ray.wait(list(awaited), timeout=None if anybody else _PATIENCE_S)
        if not ready:
            raise RunError(
                f"none of {self._size} Ray actors could be started within {_PATIENCE_S:g} s. The cluster has room for "
                f"{self._room()} now; `ray status` shows who uses it."
            )
        return [awaited[reply] for reply in ready]

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        super().close()
        self._shared = {}
        if self._started:
            self._ray.shutdown()
        if self._folder is not None:
            self._folder.cleanup()


def _check_somebody_listens(address: str) -> None:
    """Raise an OSError at once where Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


class _Shared(NamedTuple):
    """A state in the object store."""

    number: int
    reference: Any
    state: State  # held so that its id stays its own


class _ActorWorker:
    """One actor and the jobs that it has; its first reply is that it has started."""

    def __init__(self, engine: Actors, actor: Any, setup: list[Any]) -> None:
        self.engine, self.actor, self.started = engine, actor, False
        self.jobs: list[Placed] = []
        self.holds: set[int] = set()  # numbers of the states that the actor has at hand: each is sent to it once
        self.reply = actor.start.remote(*setup)

    @property
    def free(self) -> bool:
        return self.started and not self.jobs

    def give(self, jobs: list[Placed], memories: list[Any]) -> None:
        self.jobs = jobs
        needed: dict[int, Any] = {}
        tasks = []
        for (_, job), memory in zip(jobs, memories, strict=True):
            numbers = {}
            for name in ("state", "statistics"):
                if (found := self.engine.share(getattr(job, name), job.submodel)) is not None:
                    numbers[name], needed[found.number] = found.number, found.reference
            nest = self.engine.nest_of(replace(job, state={}, statistics={}))
            tasks.append({"job": nest, "memory": memory, "shared": numbers})
        new = [number for number in needed if number not in self.holds]
        self.holds = {*needed, *(self.holds & self.engine.shared)}
        message = pack({"tasks": tasks, "new": new, "holds": sorted(self.holds)})
        references = [needed[number] for number in new]
        self.reply = self.actor.answer.remote(np.frombuffer(message, dtype=np.uint8), *references)

    def take(self) -> Sequence[Mapping[str, Any]] | None:
        library = self.engine._ray
        reply, self.reply = self.reply, None
        try:
            messages, seconds = library.get(reply)
        except (library.exceptions.RayActorError, library.exceptions.ObjectLostError):
            return None
        self.started = True
        return [{**unpack(bytearray(message)), "seconds": s} for message, s in zip(messages, seconds, strict=True)]

    def end(self) -> None:
        with contextlib.suppress(Exception):  # Ray is gone already
            self.engine._ray.kill(self.actor)


# ---- in an actor -------------------------------------------------------------------------------------------------


class Actor:
    """What Ray runs in a process of its own."""

    simulation: Simulation
    states: Mapping[int, np.ndarray]

    def start(self, setup: np.ndarray, x: np.ndarray, y: np.ndarray) -> "Answers":
        """Take the data set and rebuild the problem; return an empty message, or what is wrong."""
        torch.set_num_interop_threads(1)
        self.states = {}
        nest = unpack(bytearray(setup))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the store's memory is read-only, and samples are read
                data = unpack_data(nest["data"], {"x": x, "y": y})
            self.simulation = simulation_of(nest, data, nest["device"])
        except BaseException as error:
            return [_array(pack(said(error)))], [0.0]
        return [_array(pack({}))], [0.0]

    def answer(self, message: np.ndarray, *states: np.ndarray) -> "Answers":
        """Run jobs one after the other; see `fleetfit.engines.work.answer`.

        Args:
            message: The jobs, each with the numbers of its states, and which states are new or still needed later.
            states: The new ones, as they lie in the store.
        """
        nest = unpack(bytearray(message))
        known = {**self.states, **dict(zip(nest["new"], states, strict=True))}
        self.states = {number: known[number] for number in nest["holds"]}
        replies, seconds = [], []
        for task in nest["tasks"]:
            began = time.perf_counter()
            for name, number in task["shared"].items():  # a copy for each job, which may write to it
                task["job"][name] = unpack(bytearray(self.states[number]))
            replies.append(_array(answer(task, self.simulation)))
            seconds.append(time.perf_counter() - began)
        return replies, seconds


Answers = tuple[list[np.ndarray], list[float]]
"""Replies as messages, and the seconds that each job took."""


def _array(message: bytes) -> np.ndarray:
    return np.frombuffer(message, dtype=np.uint8)
