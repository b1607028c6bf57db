"""Clients that share a level's model are scored in one pass over their samples, with the numbers of each alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import OneByOne
from tiny import TinyNet, plain, tiny_data, tiny_federation, tiny_parts
from torch import Tensor

from fleetfit.core import Evaluation, Failure, Federation, Job, Server, Simulation, Update
from fleetfit.engines.local import local as local_engine
from fleetfit.evaluation import EvaluationScope, evaluate
from fleetfit.rounds import Settings, run_round, start

CLIENTS = 24
WANTED = EvaluationScope(Evaluation(batch_size=64), statistics_samples=10**6)


def fleet(rounds: int = 6, **model: Any) -> tuple[Federation, Simulation, Server]:
    """Many clients of three levels with four test samples each."""
    federation, simulation = tiny_federation({"name": "scalefl"}, clients=CLIENTS, cohort=8, **model)
    data = tiny_data(480)
    simulation = replace(simulation, data=data, parts=tiny_parts(data, CLIENTS))
    clients = replace(federation.clients, num_examples=np.array([len(p["train"]) for p in simulation.parts]))
    federation = replace(federation, clients=clients, device=simulation.device(None))
    server = start(federation)
    for _ in range(rounds):
        server, _ = run_round(
            federation, local_engine(simulation), Settings(9, plain(lr=0.2, epochs=3, batch_size=4)), server
        )
    return federation, simulation, server


class Passed:
    """Samples of each forward pass while it is in force."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        plain_start = TinyNet.start

        def record(net: TinyNet, x: Tensor) -> Tensor:
            self.batches.append(len(x))
            return plain_start(net, x)

        patch.setattr(TinyNet, "start", record)


@pytest.mark.parametrize("norm", [True, False])
def test_shared_pass_has_columns_of_single_clients(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both batch-norm policies, all levels, the whole test set, validation for the best exit; in fewer passes."""
    federation, simulation, server = fleet(norm=norm)
    passed = Passed(monkeypatch)
    alone, _ = evaluate(federation, OneByOne(simulation), server, WANTED)
    apart = len(passed.batches)
    passed.batches.clear()
    columns, _ = evaluate(federation, local_engine(simulation), server, WANTED)
    assert columns == alone and "failures" not in columns
    assert len(passed.batches) < (0.8 if norm else 0.5) * apart  # statistics and batch norm's own batches stay apart


def test_shared_pass_scores_each_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 96 test samples once for each of three levels and the 48 of validation for the largest.

    Beside that there are two batches for each, to see that samples do not depend on each other (at most 64 together
    and half of it alone), and what is too close to call.
    """
    federation, simulation, server = fleet(norm=False)
    passed = Passed(monkeypatch)
    evaluate(federation, local_engine(simulation), server, WANTED)
    assert sum(passed.batches) <= 3 * 96 + 48 + 4 * (64 + 32) + 16
    passed.batches.clear()
    evaluate(federation, OneByOne(simulation), server, WANTED)
    assert sum(passed.batches) == 96 + 2 * 32 + 3 * 96 + 48  # the largest for all, own levels, the server's, validation


def test_undecided_samples_are_scored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classifiers of zeros: all classes are equally likely, so each client's hits are those of its own batches."""
    federation, simulation, server = fleet(0, norm=False)
    state = {n: torch.zeros_like(t) if n.startswith("heads.") else t for n, t in server.state.items()}
    server = replace(server, state=state)
    passed = Passed(monkeypatch)
    alone, _ = evaluate(federation, OneByOne(simulation), server, WANTED)
    apart = len(passed.batches)
    passed.batches.clear()
    columns, _ = evaluate(federation, local_engine(simulation), server, WANTED)
    assert columns == alone
    assert len(passed.batches) > apart


def test_dependent_samples_are_scored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its carry loses the mean of the batch, so that in another batch its predictions are others."""
    federation, simulation, server = fleet(norm=False)
    plain_start = TinyNet.start

    def centered(net: TinyNet, x: Tensor) -> Tensor:
        carry = plain_start(net, x)
        return 3 * (carry - carry.mean(0))

    monkeypatch.setattr(TinyNet, "start", centered)
    alone, _ = evaluate(federation, OneByOne(simulation), server, WANTED)
    columns, _ = evaluate(federation, local_engine(simulation), server, WANTED)
    assert columns == alone


def test_failed_client_leaves_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are of another shape: it says so itself, and what the others score is what they score alone."""
    federation, simulation, server = fleet(norm=False)
    good = Simulation.device

    def device(self: Simulation, client: int | None, memory: Any = None, round: int = 0) -> Any:
        reply = good(self, client, memory, round)
        return replace(reply, data=replace(reply.data, x=reply.data.x[:, :, :2])) if client == 5 else reply

    monkeypatch.setattr(Simulation, "device", device)
    alone, _ = evaluate(federation, OneByOne(simulation), server, WANTED)
    reply, _ = evaluate(federation, local_engine(simulation), server, WANTED)
    assert reply == alone
    assert {failure["client"] for failure in reply["failures"]} == {5}


def test_statistics_jobs_run_one_by_one() -> None:
    """States that waited for each other would take memory with every client."""
    federation, simulation, server = fleet(norm=True)
    engine = local_engine(simulation)
    sizes: list[int | None] = []

    class Watching:
        def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
            drawn = 0

            def counted() -> Iterator[Job]:
                nonlocal drawn
                for job in jobs:
                    drawn += 1
                    yield job

            for answered, reply in enumerate(engine.run(counted()), start=1):
                if isinstance(reply, Update) and reply.state:
                    assert drawn - answered <= 1
                    sizes.append(reply.client)
                yield reply

    evaluate(federation, Watching(), server, WANTED)
    assert len(set(sizes)) == CLIENTS
