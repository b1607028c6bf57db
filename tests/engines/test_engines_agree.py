"""Same run file and seed: same bits, whatever the engine and the number of workers, also when a worker dies."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from same_bits import SETTINGS, finished, fleets, same
from sampling import some_quick
from support import raises
from tiny import plain, spec_of

from fleetfit import names
from fleetfit.core import Update
from fleetfit.engines.base import Engine
from fleetfit.engines.local import local
from fleetfit.engines.processes import processes
from fleetfit.errors import ConfigError
from fleetfit.hooks import FEDAVG, build
from fleetfit.rounds import Settings, iter_jobs, run, sort_by_cost, start

SPECS: list[Mapping[str, Any]] = [
    *(spec_of(name) for name in names.list_names("methods")),
    *({"name": "scalefl", "hooks": {"choose_channels": kind}} for kind in ("window", "rolling", "random")),
    {"name": "scalefl", "scaling": "width", "beta": 0.0},
    {"name": "heterofl", "scaler": True, "masked": True},
    {"name": "fedavg", "options": {"fedprox": {"mu": 0.1}}},
    {"name": "scalefl", "options": {"feddyn": {}}},
    {"name": "heterofl", "options": {"feddistill": {}}},
    {"name": "fedrolex", "options": {"fednova": {"momentum": 0.5}}},
    {"name": "fjord", "distill": False},
    {"name": "nefl", "tiers": 1},
    {"name": "scalefl", "options": {"class_prior": {}}},
    {"name": "decoupled", "options": {"fedadam": {}}},
    {"name": "inclusivefl", "damped": True, "options": {"fedadam": {}}},
    {"name": "heterofl", "options": {"fedyogi": {}, "fedprox": {}}},
    {"name": "fedrolex", "options": {"fedavgm": {}}},
    {"name": "plugin_method:counting", "pull": 0.1},
    {"name": "plugin_method:counting", "pull": 0.1, "hooks": {"step": "test_standing:in_the_second"}},  # undone
    *({"name": "fedrolex", "cohort": {"name": choice}} for choice in names.list_names("selection")),
    {"name": "scalefl", "cohort": {"name": "diversity"}, "options": {"fedadam": {}}},
    {"name": "reefl", "modulate": False, "estimate": "kept", "options": {"feddyn": {}}},
    {"name": "reefl", "ree": False, "teacher": "batch", "ramp": 0},
    {"name": f"{Path(__file__).parents[2] / 'examples' / 'a_method.py'}:fjord", "lean": 0.5},
]


QUICK: list[Mapping[str, Any]] = [
    *map(spec_of, ("depthfl", "adaptivefl", "feddf", "fjord", "nefl", "reefl")),
    {"name": "scalefl", "hooks": {"choose_channels": "random"}},
    {"name": "scalefl", "options": {"feddyn": {}}},
    {"name": "heterofl", "options": {"feddistill": {}}},
    {"name": "fedrolex", "options": {"fednova": {"momentum": 0.5}}},
    {"name": "scalefl", "options": {"class_prior": {}}},
    {"name": "plugin_method:counting", "pull": 0.1},
    {"name": "fedrolex", "cohort": {"name": "diversity"}},
]


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Engine]:
    """One engine for all methods: a job brings its method with it."""
    engine = processes(fleets({"name": "fedavg"})[1], workers=2)
    yield engine
    engine.close()


def test_a_fresh_worker_gives_the_same_bits(fresh_workers: None) -> None:
    """Which imports all that it needs by itself; the other tests fork theirs from a process that has."""
    federation, simulation = fleets({"name": "plugin_method:counting", "pull": 0.1})
    with contextlib.closing(processes(simulation, workers=1)) as engine:
        same(finished(federation, local(simulation)), finished(federation, engine))


@pytest.mark.parametrize("spec", some_quick(SPECS, QUICK), ids=str)
def test_local_and_processes_give_the_same_bits(spec: Mapping[str, Any], two_workers: Engine) -> None:
    federation, simulation = fleets(spec)
    expected = finished(federation, local(simulation))
    assert not expected.report["failures"]
    if build(spec).adapt_model is FEDAVG.adapt_model:
        same(expected, finished(federation, two_workers))
        return
    engine = processes(simulation, workers=2)  # workers that have the model as this method makes it
    try:
        same(expected, finished(federation, engine))
    finally:
        engine.close()


def test_a_loss_sees_the_same_levels_on_each_engine(two_workers: Engine) -> None:
    federation, simulation = fleets({"name": "plugin_method:reporting_levels"})
    slots = sort_by_cost(federation, ((c, c % 3, federation.levels[c % 3].submodel) for c in range(6)))
    everything = [[level.submodel.sizes, list(level.submodel.exits)] for level in federation.levels]
    assert len({str(one) for one in everything}) == 3
    for engine in (local(simulation), two_workers):
        replies = list(engine.run(iter_jobs(federation, start(federation), slots, plain(), 1)))
        levels = [reply.metrics["levels"] for reply in replies if isinstance(reply, Update)]
        assert levels == [[slot.level, everything] for slot in slots]


@pytest.mark.slow
def test_one_worker_gives_the_same_bits() -> None:
    federation, simulation = fleets({"name": "scalefl"})
    engine = processes(simulation, workers=1)
    try:
        same(finished(federation, local(simulation)), finished(federation, engine))
    finally:
        engine.close()


@pytest.mark.slow
def test_simulated_deadlines_have_equal_bits() -> None:
    """Slow and fast clients, links that differ by round; deadlines that some miss, in all three ways."""
    federation, simulation = fleets({"name": "depthfl", "options": {"in_time": {}}})
    clients = len(simulation.parts)
    speeds = {
        "multiply_adds_per_s": np.linspace(4e4, 8e5, clients),
        "down_bytes_per_s": np.full(clients, 1e5),
        "up_bytes_per_s": np.full(clients, 5e4),
        "latency_s": np.full(clients, 0.05),
    }
    simulation = replace(simulation, resources=replace(simulation.resources, speeds=speeds, jitter=0.3))
    engine = processes(simulation, workers=2)
    counts = {"shallower": 0, "stopped": 0, "late": 0}
    try:
        for late in ("shallower", "stop", "drop"):
            timed = replace(SETTINGS, local=SETTINGS.local.replace(max_steps=None, deadline_s=0.85, late=late))
            expected = finished(federation, local(simulation), timed)
            same(expected, finished(federation, engine, timed))
            counts = {key: count + expected.report["deadline"][key] for key, count in counts.items()}
    finally:
        engine.close()
    assert min(counts.values()) > 0, counts


def test_a_worker_that_dies_loses_no_round(tmp_path: Path, two_workers: Engine) -> None:
    federation, simulation = fleets({"name": "plugin_method:killing", "folder": str(tmp_path)})
    (tmp_path / "died").touch()
    expected = finished(federation, local(simulation))
    (tmp_path / "died").unlink()
    result = finished(federation, two_workers)
    assert (tmp_path / "died").exists()
    same(expected, result)


@pytest.mark.slow
def test_a_job_that_kills_every_worker_fails(two_workers: Engine) -> None:
    federation, _ = fleets({"name": "plugin_method:always_killing"})
    two_workers.load_memories({})
    reports = [r.report for r in run(federation, two_workers, Settings(2, SETTINGS.local), start(federation))]
    reasons = [f["reason"] for report in reports for f in report["failures"] if f["client"] == 5]
    assert reasons and all("workers died" in reason for reason in reasons)


def test_objects_without_an_import_path_are_refused() -> None:
    _, simulation = fleets({"name": "fedavg"})
    pathless = replace(simulation, problem=replace(simulation.problem, spec=None))
    with raises(ConfigError, "engine.name", '"local"', key="model"):
        processes(pathless)


def test_global_randomness_is_left_alone() -> None:
    federation, simulation = fleets({"name": "fedavg"})
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    finished(federation, local(simulation))
    assert torch.equal(torch.rand(3), expected)
