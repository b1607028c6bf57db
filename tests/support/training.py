"""Local training written out plainly: no module, no optimizer, float64; and single jobs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tiny import tiny_federation
from torch import Tensor

from fleetfit.core import Device, Failure, Federation, Job, Local, Simulation, Update
from fleetfit.layout import State
from fleetfit.rounds import start
from fleetfit.submodel import extract
from fleetfit.training import run_job

Moments = Callable[[str, Tensor], tuple[Tensor, Tensor]]
Losses = Callable[[list[Tensor], Tensor], Tensor]


def batch_moments(layer: str, z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of these inputs themselves: batch norm without running statistics."""
    return z.mean(0), z.var(0, unbiased=False)


def plain_outputs(state: State, x: Tensor, exits: Sequence[int], moments: Moments = batch_moments) -> list[Tensor]:
    """TinyNet written out: logits of every exit, shallow to deep."""

    def linear(name: str, h: Tensor) -> Tensor:
        return h @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    h, outputs = linear("stem", x.flatten(1)), []
    for i in range(exits[-1]):
        z = linear(f"blocks.{i}.0", h)
        if f"blocks.{i}.1.weight" in state:
            mean, var = moments(f"blocks.{i}.1", z)
            z = (z - mean) / (var + 1e-5).sqrt() * state[f"blocks.{i}.1.weight"] + state[f"blocks.{i}.1.bias"]
        h = linear(f"blocks.{i}.4", z.clamp_min(0)).clamp_min(0)
        if i + 1 in exits:
            outputs.append(linear(f"heads.{i + 1}", h))
    return outputs


def plain_sgd(
    state: State,
    exits: Sequence[int],
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Losses,
    local: Local,
    penalty: Callable[[State], Tensor] | None = None,
) -> State:
    """SGD with momentum, weight decay and clipping: v <- m v + (g + d w); w <- w - lr v, with g scaled to the largest
    norm; what the loss does not depend on stays.
    """
    weights = {name: tensor.detach().double().clone() for name, tensor in state.items()}
    speed = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for x, y in batches:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        value = loss(plain_outputs(leaves, x.double(), exits), y)
        if penalty is not None:
            value = value + penalty(leaves)
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        grads = [torch.zeros_like(w) if g is None else g for g, w in zip(gradients, weights.values(), strict=True)]
        norm = sum((g**2).sum() for g in grads) ** 0.5
        factor = 1.0 if local.clip_norm is None else min(1.0, local.clip_norm / float(norm))
        for (name, w), g, reached in zip(weights.items(), grads, gradients, strict=True):
            if reached is None:
                continue
            speed[name] = local.momentum * speed[name] + factor * g + local.weight_decay * w
            weights[name] = w - local.lr * speed[name]
    return weights


def last_exit_loss(logits: list[Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(logits[-1], y)


def assert_close(actual: State, expected: State, atol: float = 2e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name].double(), tensor, rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def make_job(federation: Federation, client: int, level: int, kind: str = "train", **fields: Any) -> Job:
    piece = federation.levels[level].submodel
    state = extract(federation.problem.layout, start(federation).state, piece)
    first = {"round": 0, "rounds": 10, "index": 0, "state": state, "method": federation.method_spec, "seed": 7}
    return Job(kind=kind, client=client, submodel=piece, level=level, **{**first, **fields})


def tiny_fleet(spec: Mapping[str, Any] | None = None, **more: Any) -> tuple[Federation, Simulation]:
    return tiny_federation(spec or {"name": "fedavg"}, **more)


def train_job(job: Job, device: Device) -> Update:
    reply, _ = run_job(job, device)
    assert isinstance(reply, Update), reply
    return reply


def fail_job(job: Job, device: Device) -> str:
    reply, memory = run_job(job, device)
    assert isinstance(reply, Failure)
    assert memory is device.memory
    return reply.reason


class InlineEngine:
    """Runs jobs where they stand."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        for job in jobs:
            yield run_job(job, self.simulation.device(job.client))[0]


def pooled_moments(federation: Federation, simulation: Simulation, state: State, level: int) -> dict[str, Tensor]:
    """What the clients' sums must add up to: each client's training data in one batch, moments over all of them
    together.
    """
    inputs: dict[str, list[Tensor]] = {}

    def noting(layer: str, z: Tensor) -> tuple[Tensor, Tensor]:
        inputs.setdefault(layer, []).append(z)
        return batch_moments(layer, z)

    state = {n: t.double() for n, t in state.items()}
    for client in range(len(federation.clients)):
        data = simulation.device(client).data
        x = data.batch(data.split("train"))[0].double()
        plain_outputs(state, x, federation.levels[level].submodel.exits, noting)
    pooled = {layer: torch.cat(rows) for layer, rows in inputs.items()}
    means = {f"{layer}.mean": z.mean(0) for layer, z in pooled.items()}
    return means | {f"{layer}.var": z.var(0, unbiased=False) for layer, z in pooled.items()}
