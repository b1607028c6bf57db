"""One body for every method, option, data set and engine that is found on disk; models have `test_every_model`."""

import contextlib
import inspect
import json
import typing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampling import some_quick
from support import raises
from support.bits import assert_same_bits, has_same_bits
from tiny import plain, spec_of, tiny_data, tiny_federation, tiny_parts, tiny_problem, tiny_server_data
from torch import Tensor

from fleetfit import names
from fleetfit.anatomy import outputs
from fleetfit.core import Clients, DeviceResources, Evaluation, Federation, Job, Simulation
from fleetfit.data import Data, partition
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ConfigError, FleetFitError
from fleetfit.evaluation import EvaluationScope, build_level_module
from fleetfit.factories import call_factory
from fleetfit.hooks import FEDAVG, apply_model_hook, build, is_portable
from fleetfit.planner import Targets
from fleetfit.rounds import Round, Settings, run, start
from fleetfit.rounds.report import LEFT_OUT

METHODS, OPTIONS, MODELS = (names.list_names(kind) for kind in ("methods", "options", "models"))
CHOICES, TUNING = names.list_names("selection"), names.list_names("peft")
DATA, ENGINES = names.list_names("data"), names.list_names("engines")
KINDS = {"methods": METHODS, "options": OPTIONS, "selection": CHOICES, "models": MODELS, "data": DATA,
         "engines": ENGINES, "peft": TUNING, "attacks": names.list_names("attacks")}  # fmt: skip
EVERYTHING = [(kind, name) for kind, entries in KINDS.items() for name in entries]


OUTSIDE = f"{Path(__file__).parents[1] / 'examples' / 'a_method.py'}:fjord"


@pytest.mark.parametrize(("kind", "name"), [*EVERYTHING, pytest.param("methods", OUTSIDE, id="methods-fjord")])
def test_the_factory_documents_itself(kind: str, name: str) -> None:
    """The signature is the schema, so every parameter is annotated, explained and, but for what FleetFit gives, has a
    default.
    """
    factory = names.resolve(kind, name)
    parameters = inspect.signature(factory).parameters
    # a data set may have to be told where it is
    supplied = {"engines": {"simulation"}, "data": {"folder", "file"}, "peft": {"architecture"}}.get(kind, set())
    hints = typing.get_type_hints(factory)
    doc = inspect.getdoc(inspect.unwrap(factory)) or ""  # of a preset, the general factory's
    assert inspect.getdoc(factory) and (name == OUTSIDE or names.describe_entry(kind, name))
    for key, parameter in parameters.items():
        assert key in hints, key
        assert f"{key}: " in doc, f"{key} is not explained"
        assert key in supplied or parameter.default is not inspect.Parameter.empty, key


# ---- methods and options -------------------------------------------------

TARGETS = Targets((0.3, 0.55, 1.0), (0.25, 0.25, 0.25))


BY_DEPTH = Targets((0.46, 0.77, 1.0), (0.25, 0.25, 0.25))  # what one and two of three blocks cost
WITH_REE = Targets((0.7, 0.85, 1.0), (0.1, 0.1, 0.1))  # and what they cost with Ree, which all levels have


def planned(spec: Mapping[str, Any], targets: Targets | None = None, **model: Any) -> tuple[Federation, Simulation]:
    """A fleet whose levels are the method's own."""
    problem, data = apply_model_hook(tiny_problem(exits=(3,), **model), spec), tiny_data()
    targets = targets or {"depthfl": BY_DEPTH, "inclusivefl": BY_DEPTH, "reefl": WITH_REE}.get(spec["name"], TARGETS)
    method = build(spec)
    levels = tuple(method.make_levels(problem, targets))
    problem = problem.replace_exits({e for level in levels for e in level.submodel.exits})
    parts = tiny_parts(data, 6)
    budgets = np.array([targets.ratios[i % len(targets.ratios)] * 1.25 for i in range(6)])
    simulation = Simulation(
        problem, data, parts, DeviceResources({"parameters": budgets}), unlabeled=tiny_server_data()
    )
    clients = Clients(np.array([len(p["train"]) for p in parts]), budgets if method.needs_budgets else None)
    return Federation(problem, clients, levels, 4, method, spec, device=simulation.device(None)), simulation


SETTINGS = Settings(
    2, plain(lr=0.1, batch_size=8), scope=EvaluationScope(Evaluation(batch_size=64), statistics_samples=60)
)


def finished(federation: Federation, simulation: Simulation) -> Round:
    *_, last = run(federation, local_engine(simulation), SETTINGS, start(federation))
    return last


def with_option(option: str) -> dict[str, Any]:
    """Return the specification of FedAvg with an option."""
    return {"name": "fedavg", "options": {option: {}}}


SPECS: list[dict[str, Any]] = [
    *(spec_of(name) for name in (*METHODS, OUTSIDE)),
    *map(with_option, OPTIONS),
    *({"name": "scalefl", "cohort": {"name": choice}} for choice in CHOICES),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_method_trains_and_evaluates(spec: dict[str, Any]) -> None:
    federation, simulation = planned(spec, dropout=0.1)
    costs = [level.needs for level in federation.levels]
    assert costs == sorted(costs)
    if federation.method.needs_budgets:
        assert [level.name for level in federation.levels] == [str(i + 1) for i in range(len(costs))]
    first, last = start(federation), finished(federation, simulation)
    assert last.report["train"]["clients"] + left_out(last, spec) == min(4, len(federation.able))
    assert all(bool(torch.isfinite(t).all()) for t in last.server.state.values())
    assert not has_same_bits(first.state, last.server.state)
    columns = last.report["evaluate"]["static"]
    for key in ("global", "local", "avg", "full", "ensemble", "mean_over_exits", "best_exit", "global_worst_tenth"):
        assert 0 <= columns[key] <= 1, key
    json.dumps(last.report, allow_nan=False)
    x, _ = simulation.data.batch(simulation.data.split("test")[:3])
    for index, level in enumerate(federation.levels):
        logits = outputs(build_level_module(federation, last.server, index, last.statistics), x)
        assert [tuple(z.shape) for z in logits] == [(3, 4)] * len(level.submodel.exits)
    again = finished(*planned(spec, dropout=0.1))
    assert_same_bits(last.server.state, again.server.state)


def test_another_seed_gives_another_state() -> None:
    federation, simulation = planned({"name": "fedavg"}, dropout=0.1)
    states = [finished(replace(federation, seed=seed), simulation).server.state for seed in (0, 1)]
    assert not has_same_bits(*states)


def left_out(last: Round, spec: Mapping[str, Any]) -> int:
    """Return how many clients a defense left out; nobody else may fail."""
    failures = last.report["failures"]
    assert not failures or spec.get("options", {}).keys() & {"outliers", "krum"}, failures
    assert all(failure["reason"] == LEFT_OUT for failure in failures)
    return len(failures)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_methods_work_with_equal_clients(spec: dict[str, Any]) -> None:
    """One level, without batch norm."""
    last = finished(*planned(spec, Targets((1.0,), (0.1,)), norm=False))
    assert last.report["train"]["clients"] + left_out(last, spec) == 4


def test_a_spec_travels() -> None:
    for spec in SPECS:
        assert is_portable(spec) and build(json.loads(json.dumps(spec))) is build(spec), spec


@pytest.mark.parametrize("name", some_quick([*METHODS, OUTSIDE], ["fedavg", "scalefl", "depthfl"]))
def test_a_method_goes_with_every_option(name: str) -> None:
    """Or both set a hook that is set once, which is said."""
    for option in OPTIONS:
        alone = {"alpha": 0.0} if name == "depthfl" else {}  # else it brings FedDyn, and one server optimizer is enough
        spec = {**spec_of(name), **alone, "options": {option: {}}}
        both = (spec_of(name), with_option(option))
        if all(build(one).make_aggregator is not FEDAVG.make_aggregator for one in both):
            with raises(ConfigError, f'"{option}"', key="method.hooks.make_aggregator"):
                build(spec)
            continue
        federation, simulation = planned(spec)
        assert left_out(finished(federation, simulation), spec) < 4


# ---- data -------------------------------------------------


@pytest.mark.parametrize("name", DATA)
def test_data_sets_load_or_name_their_needs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Embedded ones load; those read from a folder say so when there is none."""
    monkeypatch.delenv("FLEETFIT_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    factory = names.resolve("data", name)
    data: Data | None = None
    with contextlib.suppress(FleetFitError):
        data = call_factory(factory, name, "[data]", {})
    if data is None:
        with pytest.raises(FleetFitError) as caught:
            call_factory(factory, name, "[data]", {})
        message = str(caught.value)
        assert name in message.replace("-", "_").lower() or "folder" in message or "FLEETFIT_DATA" in message
        return
    assert len(data.split("train")) and len(data.split("test"))
    assert set(data.y.tolist()) == set(range(data.classes))
    x, y = data.batch(data.split("train")[:5])
    assert x.dtype == torch.float32 and len(x) == len(y) == 5
    parts = partition(data, "dirichlet", 5, 0, alpha=1.0)
    seen = torch.cat([p["train"] for p in parts])
    assert len(parts) == 5 and len(set(seen.tolist())) == len(seen)


# ---- engines -------------------------------------------------


@pytest.mark.parametrize("name", sorted({*ENGINES} - {"flower", "ray"}))  # nodes instead of a simulation; test_ray.py
def test_engines_answer_in_order(name: str) -> None:
    federation, simulation = tiny_federation({"name": "fedavg"})
    values = {"workers": 1} if "workers" in inspect.signature(names.resolve("engines", name)).parameters else {}
    engine = call_factory(names.resolve("engines", name), name, "[engine]", values, simulation=simulation)
    try:
        server = start(federation)
        pairs = [(i, c) for i, c in enumerate((3, 0, 5, 1))]

        def jobs() -> Any:
            for index, client in pairs:
                level = client % 3
                piece = federation.levels[level].submodel
                state: dict[str, Tensor] = federation.method.dispatch(federation, server, client, piece)
                yield Job(
                    "train", 0, 1, index, client, piece, state, {"name": "fedavg"}, index, level, plain(batch_size=8)
                )

        assert [(r.index, r.client) for r in engine.run(jobs())] == pairs
        assert list(engine.run(iter(()))) == []
        engine.load_memories(engine.dump_memories())
    finally:
        engine.close()
    engine.close()
