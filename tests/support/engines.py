"""Local engines that keep what passes through them, and fleets for them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tiny import plain, tiny_federation

from fleetfit.core import Failure, Federation, Job, Server, Simulation, Update
from fleetfit.engines.local import InProcess as LocalEngine
from fleetfit.training import run_job


class RecordingEngine(LocalEngine):
    """The local engine, which keeps what it was given and what it gave."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, torch.device("cpu"), 1)
        self.jobs: list[Job] = []
        self.replies: list[Update | Failure] = []

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        for job in jobs:
            self.jobs.append(job)
            (reply,) = super().run(iter([job]))
            self.replies.append(reply)
            yield reply


Reply = Update | Failure


def choose_always(*clients: int) -> Callable[..., list[int]]:
    def choose(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
        return list(clients)

    return choose


EVERYBODY = choose_always(0, 1, 2, 3, 4, 5)


class MeddlingEngine(LocalEngine):
    """The local engine between whose replies and the server somebody sits; it notes jobs and replies."""

    def __init__(self, simulation: Simulation, meddle: Callable[[int, Reply], Reply] = lambda i, reply: reply) -> None:
        super().__init__(simulation, torch.device("cpu"), 1)
        self.meddle = meddle
        self.jobs: list[Job] = []
        self.replies: list[Reply] = []

    def run(self, jobs: Iterator[Job]) -> Iterator[Reply]:
        def record() -> Iterator[Job]:
            for job in jobs:
                self.jobs.append(job)
                yield job

        for index, reply in enumerate(super().run(record())):
            self.replies.append(self.meddle(index, reply))
            yield self.replies[-1]


def make_fleet(name: str = "scalefl", **more: Any) -> tuple[Federation, Simulation]:
    spec = {"name": name, "hooks": {"choose_clients": more.pop("choose", EVERYBODY)} | more.pop("hooks", {})}
    return tiny_federation(spec, **more)


def shorten_client(simulation: Simulation, client: int, n: int) -> Simulation:
    parts = [dict(p) for p in simulation.parts]
    parts[client]["train"] = parts[client]["train"][:n]
    return replace(simulation, parts=parts)


LOCAL = plain(lr=0.1, batch_size=8)


class OneByOne:
    """An engine that runs each job by itself."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        for job in jobs:
            yield run_job(job, self.simulation.device(job.client, None, job.round))[0]
