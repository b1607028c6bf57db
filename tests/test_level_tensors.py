"""Tensors that belong to one level: each level's own mean, and the mean of all for the others."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bits import assert_same_bits
from support.engines import RecordingEngine
from support.states import put_back
from support.training import assert_close
from tiny import plain, tiny_federation
from torch import Tensor

from fleetfit.core import Update
from fleetfit.engines.local import local as local_engine
from fleetfit.engines.processes import processes
from fleetfit.hooks import Method
from fleetfit.hooks.level_tensors import keep_per_level
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.rounds.restore import _check_state
from fleetfit.runs.checkpoints import CheckpointError
from fleetfit.submodel import extract

LOCAL = plain(lr=0.1, epochs=2, batch_size=8)


def is_bias(name: str) -> bool:
    return name.endswith("bias")


def own_biases() -> Method:
    return Method(**keep_per_level(is_bias))


SPEC: Mapping[str, Any] = {"name": f"{__name__}:own_biases"}


def test_each_level_has_its_own_mean() -> None:
    """Two rounds by hand: sums over clients, and for a bias over the clients of its level only."""
    federation, simulation = tiny_federation(SPEC, clients=6, cohort=6, norm=False, shares=(3, 5, 7, 4, 6, 3))
    layout, server = federation.problem.layout, start(federation)
    engine = RecordingEngine(simulation)
    full: dict[str, Tensor] = {name: tensor.double() for name, tensor in server.state.items()}
    own: dict[int, dict[str, Tensor]] = {}
    for level in range(3):
        own[level] = dict(extract(layout, server.state, federation.levels[level].submodel))

    def spread(update: Update, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What a client trained, weighed by its samples, in the full model."""
        zeros = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
        weights = {name: update.num_examples * (name not in update.untrained) for name in tensors}
        part = {name: weights[name] * tensor for name, tensor in tensors.items()}
        return put_back(layout, zeros, update.submodel, part)

    for _ in range(2):
        for record in (engine.jobs, engine.replies):
            record.clear()
        server, report = run_round(federation, engine, Settings(2, LOCAL), server)
        assert not report["failures"] and len(engine.replies) == 6
        for job in engine.jobs:
            piece = job.submodel
            shared = extract(layout, {name: tensor.float() for name, tensor in full.items()}, piece)
            expected = {name: (own[job.level] if is_bias(name) else shared)[name].double() for name in shared}
            assert_close(job.state, expected, atol=1e-5)
        sums, counts = ({name: torch.zeros_like(tensor) for name, tensor in full.items()} for _ in range(2))
        for level in range(3):
            replies = [one for one in engine.replies if isinstance(one, Update) and one.level == level]
            for one in replies:
                sums = {n: sums[n] + t for n, t in spread(one, one.state).items()}
                ones = {n: torch.ones_like(t) for n, t in one.state.items()}
                counts = {n: counts[n] + t for n, t in spread(one, ones).items()}
            for name in own[level]:
                trained = [one for one in replies if name not in one.untrained]
                if is_bias(name) and trained:
                    weights = sum(one.num_examples for one in trained)
                    own[level][name] = sum(one.state[name] * one.num_examples for one in trained) / weights  # type: ignore[assignment]
        moved = {n: torch.where(counts[n] > 0, sums[n] / counts[n].clamp_min(1), t) for n, t in full.items()}
        full = {n: t if is_bias(n) else moved[n] for n, t in full.items()}
    pairs = ((level, name, tensor) for level in own for name, tensor in own[level].items() if is_bias(name))
    biases = {f"level{level + 1}/{name}": tensor.double() for level, name, tensor in pairs}
    first = {name: tensor.double() for name, tensor in start(federation).state.items() if is_bias(name)}
    assert_close(server.state, {**{n: first.get(n, t) for n, t in full.items()}, **biases}, atol=1e-5)


def test_workers_evaluation_and_checkpoints_have_them() -> None:
    federation, simulation = tiny_federation(SPEC)
    states = []
    for engine in (local_engine(simulation), processes(simulation, workers=2)):
        with contextlib.closing(engine):
            *_, last = run(federation, engine, Settings(3, LOCAL), start(federation))
        states.append(last.server.state)
    assert_same_bits(states[0], states[1])
    assert any(name.startswith("level1/") for name in states[0])
    _check_state(states[0], federation, True)
    name = next(name for name in states[0] if name.startswith("level1/"))
    with pytest.raises(CheckpointError):
        _check_state({key: tensor for key, tensor in states[0].items() if key != name}, federation, True)
    assert replace(last.server, state=states[1]).state is states[1]
