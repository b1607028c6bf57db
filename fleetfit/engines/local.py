"""This process: jobs run one after the other; on a CUDA device with `device = "cuda"`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from fleetfit.core import Device, Failure, Job, Simulation, Update
from fleetfit.errors import check_range
from fleetfit.machine import use_threads
from fleetfit.training import group_jobs, resolve_device, run_group, run_job
from fleetfit.training.runtime import keep_freed_memory


def local(simulation: Simulation, device: str = "cpu", threads: int = 1) -> "InProcess":
    """Make the engine.

    Args:
        simulation: The fleet.
        device: "cpu", "cuda" or "cuda:N".
        threads: Threads per job; other than 1 changes the last bits of results.
    """
    return InProcess(simulation, resolve_device(device), threads)


def move_data(simulation: Simulation, accelerator: torch.device) -> Simulation:
    """Return the simulation with its data on the device that computes."""
    if accelerator.type == "cpu":
        return simulation
    return replace(simulation, data=simulation.data.to(accelerator), accelerator=accelerator)


class ClientMemories:
    """The memories of simulated clients, which an engine keeps in this process.

    The memory that a job leaves is pending until its round is accepted. Its version is that round.
    """

    def __init__(self) -> None:
        self._accepted: dict[int, tuple[int, Any]] = {}
        self._pending: dict[tuple[int, int], Any] = {}

    def get_memory(self, client: int | None) -> tuple[int, Any]:
        """Return (version, memory) of a client; (-1, None) when it has none."""
        return (-1, None) if client is None else self._accepted.get(client, (-1, None))

    def add_pending(self, round: int, index: int, memory: Any) -> None:
        """Keep the memory that a job left, and drop what other rounds left."""
        self._pending = {key: other for key, other in self._pending.items() if key[0] == round and key[1] != index}
        if memory is not None:
            self._pending[(round, index)] = memory

    def commit_memory(self, update: Update) -> None:
        """Make the pending memory of an accepted update the client's."""
        memory = self._pending.pop((update.round, update.index), None)
        if memory is not None and update.client is not None:
            self._accepted[update.client] = (update.round, memory)

    def dump_memories(self) -> dict[str, Any]:
        """Return the clients' memories as a table."""
        return {str(client): {"version": v, "memory": m} for client, (v, m) in sorted(self._accepted.items())}

    def load_memories(self, memories: Mapping[str, Any]) -> None:
        """Replace the memories by those that `dump_memories` returned."""
        self._accepted = {int(client): (int(row["version"]), row["memory"]) for client, row in memories.items()}
        self._pending.clear()


class InProcess(ClientMemories):
    """The engine that runs jobs in this process."""

    def __init__(self, simulation: Simulation, accelerator: torch.device, threads: int) -> None:
        check_range("engine.threads", threads, 1, closed=True)
        super().__init__()
        keep_freed_memory()
        self._simulation = move_data(simulation, accelerator)
        self._threads = threads

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run each job when its reply is due; jobs that measure one model on several devices run together."""
        with use_threads(self._threads):
            for group in group_jobs(jobs):
                if len(group) > 1:
                    yield from run_group(group, [self._make_device(job) for job in group])
                    continue
                job = group[0]
                version, _ = self.get_memory(job.client)
                reply, memory = run_job(replace(job, memory_version=version), self._make_device(job))
                if job.kind == "train":
                    self.add_pending(job.round, job.index, memory)
                yield reply

    def _make_device(self, job: Job) -> Device:
        return self._simulation.device(job.client, self.get_memory(job.client)[1], job.round)

    def close(self) -> None:
        """Do nothing: this engine starts no process."""
