"""A pool with several jobs at a worker: in which order replies come, and what is left when a worker dies on them."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from same_bits import finished, fleets, same
from support import raises

from fleetfit.anatomy.infer import _infer_once
from fleetfit.core import Failure, Job, Local, Simulation
from fleetfit.engines.local import local
from fleetfit.engines.pool import NumberedJob, Pool, dump_setup, load_setup, run_message
from fleetfit.errors import RunError
from fleetfit.messages import dump_job, dump_reply, pack, unpack
from fleetfit.rounds import start
from fleetfit.submodel import Submodel

MOST = 3  # jobs that a worker may have


def make_jobs(count: int) -> list[Job]:
    state, piece = {"weight": torch.zeros(4)}, Submodel({}, (1,))
    return [Job("train", 0, 1, i, 0, piece, state, {"name": "fedavg"}, 0, 0, Local()) for i in range(count)]


class Here:
    """A worker in this process, which answers its first job when it is asked for a reply, or has died of it."""

    def __init__(self, pool: "Pretended") -> None:
        self.pool, self.jobs, self.most = pool, deque[NumberedJob](), MOST
        self.given = deque[tuple[Job, Any]]()

    def send(self, job: Job, memory: Any) -> None:
        self.given.append((job, memory))
        self.pool.most = max(self.pool.most, len(self.given))

    def receive(self) -> Mapping[str, Any] | None:
        job, memory = self.given.popleft()
        return None if self.pool.is_deadly(job) else self.pool.answer(job, memory)

    def end(self) -> None:
        self.pool.ended += 1


class Pretended(Pool):
    """Two workers, of which the last one that has jobs replies first."""

    def __init__(self, simulation: Simulation, deaths: Mapping[int, int] | None = None) -> None:
        super().__init__("pretended", 2, simulation.problem.layout)
        self.simulation, self.deaths = simulation, dict(deaths or {})
        self.ended = self.most = 0
        self._workers = [self._start(place) for place in range(2)]

    def answer(self, job: Job, memory: Any) -> Mapping[str, Any]:
        """Return a worker's reply to a job."""
        task = unpack(pack({"job": dump_job(job, self._layout), "memory": memory}))
        reply: Mapping[str, Any] = unpack(run_message(task, self.simulation))
        return reply

    def is_deadly(self, job: Job) -> bool:
        """Tell whether a job kills the worker this time."""
        left = self.deaths.get(job.client or 0, 0) if job.kind == "train" else 0
        self.deaths[job.client or 0] = left - 1
        return left > 0

    def _start(self, place: int) -> Here:
        return Here(self)

    def _wait(self) -> list[Here]:
        return [next(worker for worker in reversed(self._workers) if worker.jobs)]


@pytest.mark.parametrize("deaths", [{}, {5: 1, 2: 2}], ids=["none", "some"])
def test_bits_equal_local_also_when_workers_die(deaths: Mapping[int, int]) -> None:
    federation, simulation = fleets({"name": "plugin_method:counting", "pull": 0.1})
    pool = Pretended(simulation, deaths)
    same(finished(federation, local(simulation)), finished(federation, pool))
    assert pool.most == MOST
    assert pool.ended == sum(deaths.values())


class Refusing(Pretended):
    """A pool whose workers answer each job with a failure, and which counts the jobs that are made and not answered."""

    count = 0

    def answer(self, job: Job, memory: Any) -> Mapping[str, Any]:
        return {"reply": dump_reply(Failure.of(job, "no"), self._layout), "memory": None}

    def iter_counted(self, jobs: Sequence[Job]) -> Iterator[Job]:
        for job in jobs:
            self.count += 1
            yield job


def test_replies_keep_the_jobs_order_and_few_jobs_are_made_ahead() -> None:
    pool = Refusing(fleets({"name": "fedavg"})[1])
    for number, reply in enumerate(pool.run(pool.iter_counted(make_jobs(200)))):
        assert reply.index == number
        assert pool.count - number <= 2 * 2 * MOST
    assert pool.count == 200 and pool.most == MOST


def test_the_job_that_kills_its_workers_fails_alone() -> None:
    pool = Refusing(fleets({"name": "fedavg"})[1])
    pool.is_deadly = lambda job: job.index == 4  # type: ignore[method-assign]
    reasons = {reply.index: reply.reason for reply in pool.run(iter(make_jobs(20))) if isinstance(reply, Failure)}
    assert pool.ended == 3 and "died" in reasons.pop(4) and set(reasons.values()) == {"no"} and len(reasons) == 19


def test_the_run_after_an_error_starts_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Refusing(fleets({"name": "fedavg"})[1])
    answer = pool.answer
    monkeypatch.setattr(
        pool, "answer", lambda job, memory: {"error": "no more"} if job.index == 5 else answer(job, memory)
    )
    with raises(RunError, "no more"):
        list(pool.run(iter(make_jobs(40))))
    monkeypatch.undo()
    assert [reply.index for reply in pool.run(iter(make_jobs(40)))] == list(range(40))


@pytest.mark.parametrize("method", ["fedavg", "scalefl", "reefl", "adaptivefl"])
def test_a_worker_infers_no_layout(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, simulation = fleets({"name": method})
    piece = federation.levels[0].submodel
    state = federation.method.dispatch(federation, start(federation), 0, piece)
    job = Job("train", 0, 1, 0, 0, piece, state, federation.method_spec, 0, 0, Local(lr=0.1))
    setup, task = (
        pack(dump_setup(simulation, 1)),
        pack({"job": dump_job(job, simulation.problem.layout), "memory": None}),
    )
    monkeypatch.setattr("fleetfit.anatomy.infer._infer", None)
    _infer_once.cache_clear()
    worker = load_setup(unpack(setup), simulation.data, "cpu")
    reply = unpack(run_message(unpack(task), worker))
    assert reply["reply"]["kind"] == "update"
    without = replace(worker, problem=replace(worker.problem, spec=None))
    with pytest.raises(TypeError):
        run_message(unpack(task), without)
