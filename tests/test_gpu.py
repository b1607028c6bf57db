"""On a CUDA device: the same numbers as on the processor, to tolerance, and the same bits twice."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import spec_of, tiny_federation

import fleetfit as ff
from fleetfit.core import Evaluation, Federation, Job, Local, Problem
from fleetfit.core.arithmetic import Arithmetic, ShapeArithmetic
from fleetfit.engines.base import Engine
from fleetfit.engines.local import local as local_engine
from fleetfit.engines.processes import processes
from fleetfit.evaluation import EvaluationScope
from fleetfit.rounds import Round, Settings, run, start
from fleetfit.training import run_job
from fleetfit.training.local_model import LocalModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here"),
]
SETTINGS = Settings(
    2,
    Local(lr=0.05, momentum=0.9, weight_decay=1e-3, epochs=2, batch_size=8, clip_norm=2.0),
    scope=EvaluationScope(Evaluation(batch_size=64), statistics_samples=10**6),
)
SPECS: list[Mapping[str, Any]] = [
    {"name": "fedavg"},
    {"name": "scalefl"},
    {"name": "scalefl", "hooks": {"choose_channels": "random"}},
    {"name": "heterofl", "scaler": True, "masked": True},
    {"name": "decoupled"},
    {"name": "fedavg", "options": {"fedprox": {"mu": 0.1}}},
    {"name": "plugin_method:counting"},
    spec_of("feddf"),
]


def finished(federation: Federation, engine: Engine) -> Round:
    try:
        *_, last = run(federation, engine, SETTINGS, start(federation))
    finally:
        engine.close()
    assert not last.report["failures"]
    return last


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_cuda_agrees_with_the_processor(spec: Mapping[str, Any]) -> None:
    """Sums run in another order there, so to tolerance. Without dropout, whose draws differ."""
    federation, simulation = tiny_federation(spec)
    expected = finished(federation, local_engine(simulation))
    result = finished(federation, local_engine(simulation, device="cuda"))
    for name, tensor in expected.server.state.items():
        assert result.server.state[name].device.type == "cpu"
        torch.testing.assert_close(result.server.state[name], tensor, rtol=1e-3, atol=1e-4)
    ours, theirs = expected.report, result.report
    assert theirs["train"]["loss"] == pytest.approx(ours["train"]["loss"], rel=1e-3)
    assert theirs["bytes_down"] == ours["bytes_down"]
    assert theirs["evaluate"]["static"]["full"] == pytest.approx(ours["evaluate"]["static"]["full"], abs=0.05)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_seed_gives_equal_bits_on_cuda(spec: Mapping[str, Any]) -> None:
    rounds = []
    for _ in range(2):
        federation, simulation = tiny_federation(spec, dropout=0.2)
        rounds.append(finished(federation, local_engine(simulation, device="cuda")))
    for name, tensor in rounds[0].server.state.items():
        assert torch.equal(rounds[1].server.state[name], tensor), name


def test_the_server_trains_on_cuda_as_on_the_processor() -> None:
    states = []
    for name in ("cpu", "cuda:0"):
        federation, simulation = tiny_federation(spec_of("feddf"), norm=False)
        assert federation.device is not None
        device = replace(federation.device, accelerator=torch.device(name))
        states.append(finished(replace(federation, device=device), local_engine(simulation, device=name)).server.state)
    for name, tensor in states[0].items():
        assert states[1][name].device.type == "cpu"
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-2, atol=1e-2)  # Adam magnifies what is near 0


def test_processes_and_local_give_the_same_bits_on_cuda() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"}, dropout=0.2)
    expected = finished(federation, local_engine(simulation, device="cuda:0"))
    result = finished(federation, processes(simulation, workers=2, device="cuda:0"))
    assert all(torch.equal(result.server.state[n], t) for n, t in expected.server.state.items())


def test_cuda_s_generator_is_left_alone() -> None:
    federation, simulation = tiny_federation({"name": "fedavg"}, dropout=0.2)
    torch.cuda.manual_seed(5)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(5)
    finished(federation, local_engine(simulation, device="cuda"))
    assert torch.equal(torch.rand(3, device="cuda"), expected)


FAST: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}, "augment": "shift"},
    "fleet": {"groups": [{"budget": 0.25}, {"budget": 1.0}]},
    "local": {"epochs": 1, "max_steps": 4},
    "cohort": {"count": 3},
    "evaluate": {"clients": 2, "statistics_samples": 60},
    "engine": {"speed": "fast", "device": "cuda"},
}


def test_fast_on_cuda_equals_workers(tmp_path: Path) -> None:
    run = ff.run(FAST, out=tmp_path / "fast")
    assert all("channels_last" in how for how in run.experiment.recorded.computing.values())
    if torch.cuda.get_device_capability() >= (8, 0):
        assert all("bf16" in how for how in run.experiment.recorded.computing.values())
    workers = {**FAST["engine"], "name": "processes", "workers": 1, "device": "cuda:0"}
    other = ff.run({**FAST, "engine": workers}, out=tmp_path / "workers")
    exact = ff.run({**FAST, "engine": {"device": "cuda"}}, out=tmp_path / "exact")
    for name, tensor in run.server.state.items():
        assert torch.equal(other.server.state[name], tensor), name
        assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    gap = torch.cat([(run.server.state[n] - exact.server.state[n]).flatten() for n in run.server.state]).norm()
    assert gap < 0.2 * torch.cat([tensor.flatten() for tensor in exact.server.state.values()]).norm()


@pytest.mark.parametrize("width", [0.7, 1.0])
def test_weights_are_aligned_for_channels_last(width: float) -> None:
    """cuDNN's kernels for channels-last do: "misaligned address" where weights are views at any place of a buffer."""
    arguments = {"classes": 10, "channels": 3, "input_shape": [3, 32, 32], "vocabulary": 0, "padding": -1}
    problem = Problem.from_spec(
        {"model": {"name": "resnet20"}, "given": arguments, "task": "classification", "exits": []}
    )
    submodel, gradients = problem.submodel(width, problem.exits), {}
    sizes = {**problem.layout.full_sizes, **submodel.sizes}
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, 32, 32, generator=rng), torch.arange(16) % 10
    state: dict[str, torch.Tensor] = {}
    for memory_format in ("contiguous", "channels_last"):
        how = ShapeArithmetic(sizes, problem.exits, Arithmetic("fp32", memory_format))  # type: ignore[arg-type]
        model = LocalModel(problem.replace_arithmetic((how,)), submodel, torch.device("cuda", 0))
        state = state or {name: 0.1 * torch.randn(shape, generator=rng) for name, shape in model.shapes.items()}
        model.load(state)
        model.module.train()
        torch.nn.functional.cross_entropy(model.module(x.cuda())[-1], y.cuda()).backward()
        gradients[memory_format] = model.grad.cpu()
    gap = (gradients["contiguous"] - gradients["channels_last"]).norm()
    assert 0 < gap < 0.05 * gradients["contiguous"].norm()  # TF32 rounds convolutions


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_do_not_wait_for_the_device(precision: str, tmp_path: Path) -> None:
    """A job of many steps waits for the device as often as one of few: at its end, not in its loop."""
    engine = {"device": "cuda", "precision": precision}
    prepared = ff.run({**FAST, "engine": engine, "rounds": 1}, out=tmp_path / "run")
    federation, simulation = prepared.assembly.federation, prepared.assembly.simulation
    assert simulation is not None
    there = replace(simulation, data=simulation.data.to("cuda"), accelerator=torch.device("cuda", 0))
    top = federation.levels[-1].submodel

    def waits(steps: int) -> int:
        local = Local(lr=0.01, epochs=9, batch_size=8, max_steps=steps)
        job = Job("train", 0, 1, 0, 0, top, prepared.server.state, federation.method_spec, seed=1, local=local)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run_job(job, there.device(0))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(one.message) for one in seen)

    waits(3)  # what is made once
    assert waits(20) == waits(3)
