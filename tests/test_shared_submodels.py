"""Parts of a module in training: several sub-models in one step, or a level drawn in each step, with its work."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.states import put_back
from support.training import make_job, plain_outputs, train_job
from tiny import plain, tiny_federation
from torch import Tensor, nn

from fleetfit.core import Device, Federation, Job, Simulation
from fleetfit.hooks import Loss
from fleetfit.layout import State
from fleetfit.submodel import Submodel, extract
from fleetfit.training import get_local_model, make_shared_submodels
from fleetfit.training.clock import STEP, forward_work


def fleet(loss: Any = None) -> tuple[Federation, Simulation]:
    spec = {"name": "fedavg", "hooks": {"make_loss": loss} if loss else {}}
    return tiny_federation(spec, norm=False)


def load(federation: Federation, device: Device, job: Job) -> nn.Module:
    model = get_local_model(device.problem, job.submodel, device.accelerator)
    model.load(job.state)
    model.grad.zero_()
    return model.module


def with_levels(job: Job, federation: Federation) -> Job:
    return replace(job, levels=federation.problem.levels)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("channels", ["prefix", "moved"])
def test_a_part_computes_as_its_own_module(level: int, channels: str) -> None:
    """The levels below, from the parameters of the whole, which may itself have other channels than the first."""
    federation, simulation = fleet()
    device, job = simulation.device(5), with_levels(make_job(federation, 5, level), federation)
    if channels == "moved":
        own = {"a": tuple(range(2, 8)), "b": (0, 1, 4, 5, 6, 7, 8, 9), "classes": range(4)}
        inner = {"a": (3, 5, 6), "b": (4, 5, 8, 9), "classes": range(4)}
        layout, exits = federation.problem.layout, job.submodel.exits
        whole, part = Submodel(own, exits), Submodel(inner, exits[:1])
        state = extract(layout, {n: t.double().float() for n, t in make_full(federation).items()}, whole)
        job = replace(job, submodel=whole, state=state, levels=(part, whole))
    full = put_back(federation.problem.layout, make_full(federation), job.submodel, job.state)
    module, x = load(federation, device, job), device.data.batch(device.data.split("train"))[0]
    parts = make_shared_submodels(job, device)
    assert [part.submodel for part in parts] == list(job.levels)[: level + 1 if channels == "prefix" else 2]
    for part in parts:
        state = extract(federation.problem.layout, full, part.submodel)
        for ours, theirs in zip(part(module, x), plain_outputs(state, x, part.submodel.exits), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def make_full(federation: Federation) -> State:
    from fleetfit.rounds import start

    return start(federation).state


def test_gradients_reach_the_part_s_elements_only() -> None:
    federation, simulation = fleet()
    device, job = simulation.device(5), with_levels(make_job(federation, 5, 2), federation)
    module = load(federation, device, job)
    x, y = device.data.batch(device.data.split("train"))
    smallest = make_shared_submodels(job, device)[0]
    device.problem.task.loss(smallest(module, x)[-1], y).backward()
    gradient = module.get_parameter("stem.weight").grad
    assert gradient is not None and bool((gradient[:4] != 0).any()) and not bool(gradient[4:].any())
    assert not bool(module.get_parameter("blocks.1.0.weight").grad.any())  # type: ignore[union-attr]


def drawn_loss(job: Job, device: Device) -> Loss:
    """FjORD: a level in each step, drawn from torch's generator, which is seeded for the job."""
    parts, task = make_shared_submodels(job, device), device.problem.task

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        part = parts[int(torch.randint(len(parts), ()))]
        return task.loss(part(module, x)[-1], y)

    mean = sum(part.work for part in parts) / len(parts)
    loss.extra_multiply_adds = STEP * (mean - parts[-1].work)  # type: ignore[attr-defined]
    return loss


def test_a_level_drawn_in_each_step_counts_its_mean_work() -> None:
    federation, simulation = fleet(drawn_loss)
    job = make_job(federation, 5, 2, local=plain(epochs=2, batch_size=8))
    update, again = (train_job(job, simulation.device(5)) for _ in range(2))
    assert all(torch.equal(update.state[name], again.state[name]) for name in update.state)
    work = [forward_work(federation.problem, level.submodel) for level in federation.levels]
    assert update.multiply_adds == 2 * update.num_examples * round(STEP * sum(work) / 3)
