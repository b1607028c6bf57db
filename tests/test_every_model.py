"""Every built-in model: its layout is right, it trains with the core methods, and engines give the same bits."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sampling import some_quick
from small_models import CLASSES, SMALL, VOCABULARY, architecture_of, data_of, problem_of
from support.bits import has_same_bits
from tiny import plain, tiny_parts

from fleetfit import names
from fleetfit.anatomy import Layout, infer_layout, make_input, outputs
from fleetfit.anatomy.infer import _infer_once
from fleetfit.anatomy.proof import check_layout
from fleetfit.core import Clients, DeviceResources, Evaluation, Federation, Level, Problem, Simulation, apply_peft
from fleetfit.data import Data
from fleetfit.engines.base import Engine
from fleetfit.engines.local import local
from fleetfit.engines.processes import processes
from fleetfit.evaluation import EvaluationScope
from fleetfit.hooks import build, dump_problem, rebuild_problem
from fleetfit.rounds import Round, Settings, run, start
from fleetfit.training import initial_state
from fleetfit.training.local_model import LocalModel

MODELS = names.list_names("models")
TRAINED = [name for name in MODELS if not SMALL[name].family]
METHODS = ("fedavg", "heterofl", "scalefl")
LARGE = ("efficientnet_b4", "msdnet24")  # sizes of families of which a smaller one is quick
PROVEN = ("efficientnet_b0", "mobilenetv2")  # in quick tests of their own, on fewer blocks


def without(slow: tuple[str, ...], cases: list[str]) -> list[Any]:
    return some_quick(cases, [name for name in cases if name not in slow])


def test_every_model_has_a_size_for_tests() -> None:
    assert set(SMALL) == set(MODELS)
    assert all(small.family in TRAINED for small in SMALL.values() if small.family)


# ---- built --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", without(LARGE, MODELS))
def test_every_width_and_depth_builds(name: str) -> None:
    architecture = architecture_of(name)
    positions = tuple(architecture.positions)
    assert positions == tuple(sorted(set(positions))) and positions[-1] == architecture.blocks
    exits = tuple(sorted({positions[0], positions[len(positions) // 2], architecture.blocks}))
    layout = infer_layout(architecture, exits, input_shape=SMALL[name].shape)
    for width, kept_exits in ((0.26, exits[:1]), (0.6, exits[:2]), (1.0, exits)):
        sizes = architecture.sizes(width)
        assert all(1 <= sizes[a] <= axis.size and sizes[a] % axis.granule == 0 for a, axis in architecture.axes.items())
        with torch.device("meta"):
            module = architecture.build(sizes, kept_exits)
        built = {n: tuple(t.shape) for n, t in module.named_parameters()}
        assert built == {n: s for n, s in layout.shapes(sizes, kept_exits).items() if n in built}
        assert {n for n in layout.shapes(sizes, kept_exits) if layout.tensors[n].trainable} <= built.keys()


def list_parts(layout: Layout) -> list[Any]:
    """Return all that a layout has, with the order of its tensors."""
    parts = [layout.axes, layout.tensors, layout.base, layout.aliases]
    return [layout.exits, layout.by_order, *(list(part.items()) for part in parts)]


@pytest.mark.parametrize("case", [*without(LARGE, MODELS), "bert lora", "vit frozen", "vim frozen"])
def test_who_rebuilds_it_infers_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout that comes with the model is the one that was inferred, and its smallest level is built by it."""
    name, peft = f"{case} full".split()[:2]
    problem = problem_of(name)
    spec = {**(problem.spec or {}), "peft": {"name": peft}}
    problem = replace(problem, architecture=apply_peft(problem.architecture, spec["peft"]), spec=spec)
    sent = json.loads(json.dumps(dump_problem(problem)))
    monkeypatch.setattr("fleetfit.anatomy.infer._infer", None)
    _infer_once.cache_clear()
    rebuilt = rebuild_problem(sent)
    assert list_parts(rebuilt.layout) == list_parts(problem.layout)
    base = {name: torch.zeros(shape) for name, shape in problem.layout.frozen.shapes({}, problem.exits).items()}
    piece = rebuilt.submodel(0.3, rebuilt.exits[:1])
    level = LocalModel(replace(rebuilt, base=base), piece, torch.device("cpu"))
    assert level.shapes == problem.layout.shapes(piece.sizes, piece.exits)


@pytest.mark.parametrize("name", MODELS)
def test_an_exit_may_sit_at_every_position(name: str) -> None:
    architecture = architecture_of(name)
    positions = tuple(architecture.positions)
    with torch.device("meta"):
        module = architecture.build({n: a.size for n, a in architecture.axes.items()}, positions)
        logits = outputs(module.eval(), make_input(architecture, SMALL[name].shape, 2))
    shape = (2, *SMALL[name].shape, VOCABULARY) if SMALL[name].kind == "next" else (2, CLASSES)
    assert [tuple(z.shape) for z in logits] == [shape] * len(positions)


@pytest.mark.parametrize("name", without(PROVEN, TRAINED))
def test_its_layout_is_proven(name: str) -> None:
    architecture = architecture_of(name)
    report = check_layout(architecture, input_shape=SMALL[name].shape)
    assert report.levels and not report.not_proved
    single = {name for name in architecture.axes if re.search(rf"\b{name} 1\b", str(report.levels))}  # of one channel
    assert report.permutation.keys() | single == architecture.axes.keys()
    assert max([*report.permutation.values(), *report.cuts.values()]) < 1e-9


# ---- trained ------------------------------------------------------------------------------------------------------


def fleet_of(problem: Problem, data: Data, method: str) -> tuple[Federation, Simulation]:
    """Four clients of two levels: half as wide (and with ScaleFL as deep as the first exit), and all of it."""
    first, last = problem.exits[0], problem.exits[-1]
    small, full = {"fedavg": ((last,), (last,)), "heterofl": ((last,), (last,)),
                   "scalefl": ((first,), problem.exits)}[method]  # fmt: skip
    levels = (Level("1", problem.submodel(0.5, small), 0.5, 0.5), Level("2", problem.submodel(1.0, full), 1.0, 1.0))
    parts = tiny_parts(data, 4)
    reported = np.array([0.5, 1.0] * 2)
    simulation = Simulation(problem, data, parts, DeviceResources({"parameters": reported}))
    clients = Clients(np.array([len(p["train"]) for p in parts]), reported)
    spec = {"name": method}
    return Federation(problem, clients, levels, 3, build(spec), spec, 0, simulation.device(None)), simulation


def two_rounds(federation: Federation, engine: Engine) -> Round:
    settings = Settings(
        2, plain(lr=0.01, batch_size=3), scope=EvaluationScope(Evaluation(batch_size=8), statistics_samples=12)
    )
    *_, last = run(federation, engine, settings, start(federation))
    return last


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_engines_agree_on_core_methods(name: str) -> None:
    problem, data = problem_of(name), data_of(name)
    engine = processes(fleet_of(problem, data, "scalefl")[1], workers=1)
    try:
        for method in METHODS:
            federation, simulation = fleet_of(problem, data, method)
            here, there = two_rounds(federation, local(simulation)), two_rounds(federation, engine)
            assert not here.report["failures"], method
            assert all(bool(torch.isfinite(t).all()) for t in here.server.state.values()), method
            assert not has_same_bits(here.server.state, initial_state(problem, 0)), method
            assert has_same_bits(here.server.state, there.server.state), method
            assert without_time(here) == without_time(there), method
    finally:
        engine.close()


def without_time(report: Round) -> dict[str, Any]:
    return {key: value for key, value in report.report.items() if key not in ("seconds", "seconds_of")}
