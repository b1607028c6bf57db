"""Runs on different engines, and whether they end the same."""

from collections.abc import Mapping
from typing import Any

import torch
from tiny import tiny_federation

from fleetfit.core import Evaluation, Federation, Local, Simulation
from fleetfit.engines.base import Engine
from fleetfit.evaluation import EvaluationScope
from fleetfit.messages import pack
from fleetfit.rounds import Round, Settings, run, start

SETTINGS = Settings(
    3,
    Local(lr=0.1, momentum=0.9, weight_decay=1e-3, epochs=3, batch_size=8, clip_value=0.5, max_steps=9, patience=1),
    evaluate_every=2,
    scope=EvaluationScope(Evaluation(batch_size=16), statistics_samples=60),
)


def finished(federation: Federation, engine: Engine, settings: Settings = SETTINGS) -> Round:
    engine.load_memories({})  # as a new run: nobody remembers anything
    *_, last = run(federation, engine, settings, start(federation))
    return last


def same(a: Round, b: Round) -> None:
    assert a.server.state.keys() == b.server.state.keys()
    for name in a.server.state:
        assert torch.equal(a.server.state[name], b.server.state[name]), name
    assert pack(a.server.memory) == pack(b.server.memory)
    without = {"seconds", "seconds_of"}
    assert {k: v for k, v in a.report.items() if k not in without} == {
        k: v for k, v in b.report.items() if k not in without
    }


def fleets(spec: Mapping[str, Any]) -> tuple[Federation, Simulation]:
    return tiny_federation(spec, clients=7, cohort=5, dropout=0.2)
