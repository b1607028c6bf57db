"""Several jobs in one message: how many, in which order replies come, and what is left when a worker dies on them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from same_bits import finished, fleets, same
from support import raises

from fleetfit.core import Failure, Job, Local, Simulation
from fleetfit.engines.local import local
from fleetfit.engines.pool import BatchSizer, NumberedJob, Pool, run_message
from fleetfit.errors import RunError
from fleetfit.messages import dump_job, dump_reply, pack, unpack
from fleetfit.submodel import Submodel

PIECE = Submodel({}, (1,))


def job(kibibytes: float, kind: Any = "train") -> Job:
    """A job whose state has so many KiB."""
    state = {"weight": torch.zeros(int(kibibytes * 256))}
    return Job(kind, 0, 1, 0, 0, PIECE, state, {"name": "fedavg"}, 0, 0, Local())


def knowing(**seconds: float) -> tuple[BatchSizer, dict[str, Job]]:
    """BatchSizer that have seen jobs, each of its own size, take so many seconds; and these jobs."""
    batches = BatchSizer()
    jobs = {name: job(number + 1) for number, name in enumerate(seconds)}
    for name, one in jobs.items():
        batches.record_time(one, seconds[name])
    return batches, jobs


# ---- how many ------------------------------------------------------------------------------------------------------


def test_jobs_of_which_nothing_is_known_go_alone() -> None:
    assert BatchSizer().choose_size([job(1)] * 100, 2) == 1
    batches, jobs = knowing(a=0.001)
    assert batches.choose_size([jobs["a"]] * 100, 2) == 25, "half of what each of two would get"
    assert batches.choose_size([jobs["a"], jobs["a"], *[job(1, "evaluate")] * 98], 2) == 1
    assert batches.choose_size([job(1, "evaluate"), *[jobs["a"]] * 99], 2) == 1


def test_a_message_takes_half_a_second_at_most() -> None:
    batches, jobs = knowing(a=0.125, b=0.6)
    assert batches.choose_size([jobs["a"]] * 100, 2) == 4
    assert batches.choose_size([jobs["b"]] * 100, 2) == 1


def test_long_jobs_leave_work_for_others() -> None:
    """Of 0.4 s of long jobs and 0.16 s of short ones: half of two workers' shares are 0.14 s, so one long one."""
    batches, jobs = knowing(long=0.1, short=0.01)
    assert batches.choose_size([jobs["long"]] * 4 + [jobs["short"]] * 16, 2) == 1


def test_states_of_a_message_are_bounded() -> None:
    batches = BatchSizer()
    large = job(400)
    batches.record_time(large, 0.0001)
    assert batches.choose_size([large] * 100, 2) == 2
    huge = job(5000)
    batches.record_time(huge, 0.0001)
    assert batches.choose_size([huge] * 100, 2) == 1


@given(st.lists(st.sampled_from([0.001, 0.02, 0.3]), min_size=1, max_size=60), st.integers(1, 8))
def test_no_worker_gets_more_than_half_its_share(lengths: list[float], workers: int) -> None:
    """Unless a single job is more."""
    batches, jobs = knowing(**{str(length): length for length in (0.001, 0.02, 0.3)})
    count = batches.choose_size([jobs[str(length)] for length in lengths], workers)
    assert 1 <= count <= len(lengths)
    assert count == 1 or sum(lengths[:count]) <= min(0.5, sum(lengths) / 2 / workers) + 1e-9


# ---- a pool that sends them ----------------------------------------------------------------------------------------


class Here:
    """A worker in this process, which answers when it is asked for its replies, or has died of it."""

    def __init__(self, pool: "Pretended") -> None:
        self.pool, self.jobs = pool, list[NumberedJob]()

    @property
    def is_free(self) -> bool:
        return not self.jobs

    def send(self, jobs: list[NumberedJob], memories: list[Any]) -> None:
        self.jobs, self.memories = jobs, memories
        self.given = list(jobs)
        self.pool.messages.append([place for place, _ in jobs])

    def receive(self) -> Sequence[Mapping[str, Any]] | None:
        if any(self.pool.deadly(one) for _, one in self.given):
            return None
        pairs = zip(self.given, self.memories, strict=True)
        return [{**self.pool.answered(one, memory), "seconds": 0.001} for (_, one), memory in pairs]

    def end(self) -> None:
        self.pool.ended += 1


class Pretended(Pool):
    """Two workers, of which the one that was given its jobs last replies first."""

    def __init__(self, simulation: Simulation, deaths: Mapping[int, int] | None = None) -> None:
        super().__init__("pretended", 2, simulation.problem.layout, BatchSizer())
        self.simulation, self.deaths = simulation, dict(deaths or {})
        self.messages: list[list[int]] = []
        self.ended = 0
        self._workers = [self._start(place) for place in range(2)]

    def answered(self, one: Job, memory: Any) -> Mapping[str, Any]:
        """Return a worker's reply to a job."""
        task = unpack(pack({"job": dump_job(one, self._layout), "memory": memory}))
        reply: Mapping[str, Any] = unpack(run_message(task, self.simulation))
        return reply

    def deadly(self, one: Job) -> bool:
        """Tell whether a job kills the worker this time: the jobs of a client do, so many times."""
        left = self.deaths.get(one.client or 0, 0) if one.kind == "train" else 0
        self.deaths[one.client or 0] = left - 1
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
    assert max(map(len, pool.messages)) > 1, "several in a message"
    assert pool.ended == sum(deaths.values())


class Refusing(Pretended):
    """A pool whose workers answer each job with a failure, and which counts the jobs that are made and not answered."""

    count = 0

    def answered(self, one: Job, memory: Any) -> Mapping[str, Any]:
        return {"reply": dump_reply(Failure.of(one, "no"), self._layout), "memory": None}

    def counted(self, jobs: Sequence[Job]) -> Iterator[Job]:
        for one in jobs:
            self.count += 1
            yield one


def test_replies_keep_the_jobs_order() -> None:
    """States of 100 KiB: ten fit into 1 MiB, and so much twice for each of two workers is made ahead."""
    pool = Refusing(fleets({"name": "fedavg"})[1])
    jobs = [replace(job(100), index=number) for number in range(200)]
    for number, reply in enumerate(pool.run(pool.counted(jobs))):
        assert reply.index == number
        assert pool.count - number <= 41
    assert [place for places in pool.messages for place in places] == list(range(200))
    assert max(map(len, pool.messages)) == 9, "half of what each would get of the 39 in sight"


def test_large_jobs_are_made_when_needed() -> None:
    pool = Refusing(fleets({"name": "fedavg"})[1])
    jobs = [replace(job(2000), index=number) for number in range(20)]
    for number, _ in enumerate(pool.run(pool.counted(jobs))):
        assert pool.count - number <= 4
    assert max(map(len, pool.messages)) == 1


def test_the_run_after_an_error_starts_clean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Refusing(fleets({"name": "fedavg"})[1])
    jobs = [replace(job(100), index=number) for number in range(40)]
    assert len(list(pool.run(iter(jobs)))) == 40
    own = pool.answered
    monkeypatch.setattr(
        pool, "answered", lambda one, memory: {"error": "no more"} if one.index == 5 else own(one, memory)
    )
    with raises(RunError, "no more"):
        list(pool.run(iter(jobs)))
    monkeypatch.undo()
    assert [reply.index for reply in pool.run(iter(jobs))] == list(range(40))
