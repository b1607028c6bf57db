"""This process: jobs run one after the other; on a CUDA device with `device = "cuda"`."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from fleetfit.engines.memories import KeepsMemories
from fleetfit.errors import ConfigError
from fleetfit.training import group_jobs, resolve_device, run_group, run_job
from fleetfit.training.runtime import keep_freed_memory
from fleetfit.values import Device, Failure, Job, Simulation, Update


def local(simulation: Simulation, device: str = "cpu", threads: int = 1) -> "InProcess":
    """Make the engine.

    Args:
        simulation: The fleet.
        device: "cpu", "cuda" or "cuda:N".
        threads: Threads per job; other than 1 changes the last bits of results.
    """
    return InProcess(simulation, resolve_device(device), threads)


def on_accelerator(simulation: Simulation, accelerator: torch.device) -> Simulation:
    """Return the simulation with its data where it is computed on."""
    if accelerator.type == "cpu":
        return simulation
    return replace(simulation, data=simulation.data.to(accelerator), accelerator=accelerator)


class InProcess(KeepsMemories):
    """The engine that runs jobs in this process."""

    def __init__(self, simulation: Simulation, accelerator: torch.device, threads: int) -> None:
        """Take the threads and move the data."""
        if threads < 1:
            raise ConfigError(f"engine.threads must be at least 1, got {threads}.", key="engine.threads")
        super().__init__()
        keep_freed_memory()
        self._simulation = on_accelerator(simulation, accelerator)
        self._threads = threads

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run each job when its reply is asked for; those that measure one model on several devices are one work."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            for group in group_jobs(jobs):
                if len(group) > 1:
                    yield from run_group(group, [self._device(job) for job in group])
                    continue
                job = group[0]
                version, _ = self._memories.of(job.client)
                reply, remembered = run_job(replace(job, memory_version=version), self._device(job))
                if job.kind == "train":
                    self._memories.offer(job.round, job.index, remembered)
                yield reply
        finally:
            torch.set_num_threads(before)

    def _device(self, job: Job) -> Device:
        return self._simulation.device(job.client, self._memories.of(job.client)[1], job.round)

    def close(self) -> None:
        """Nothing was started."""
