"""What a frozen backbone saves in a training step: time and peak memory, against gradients for everything.

DeiT-S cut to six blocks, images of 96x96, batch 16. The naive side is the same model with the same things put in, and
the same optimizer, which steps over what is trained only; but every parameter asks for its gradient. Memory is the
most storages alive at once during a step, both sides counted by the same means.

A whole round with features that are kept (`engine.feature_cache_bytes`) stands against a loop that trains the
classifiers of the same clients on features that lie ready in memory.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measuring import Figure, Options, amount, ratio
from benchmarks.random_fleet import TOTAL, Kind, Parts, make_random_data
from fleetfit.anatomy import Architecture, build_module, outputs
from fleetfit.core import Clients, Federation, Level, Local, Problem, Simulation, apply_peft
from fleetfit.core.tasks import classification
from fleetfit.cost.memory import LiveBytes
from fleetfit.engines.local import local
from fleetfit.hooks import build
from fleetfit.hooks.losses import self_distillation
from fleetfit.models.vit import deit_s
from fleetfit.rounds import Settings, run_round, start
from fleetfit.training import initial_base

SHAPE, BATCH, EXITS = (3, 96, 96), 16, (3, 6)
CLIENTS, SAMPLES = 4, 128
LOCAL = Local(lr=0.05, momentum=0.9, weight_decay=5e-4, batch_size=BATCH, epochs=5)
MODES: dict[str, dict[str, Any]] = {
    "frozen, classifiers only": {"name": "frozen"},
    "serial adapters in the last two blocks": {"name": "serial_adapter", "targets": ["blocks.4.*", "blocks.5.*"]},
    "serial adapters everywhere": {"name": "serial_adapter"},
    "LoRA everywhere": {"name": "lora"},
}


def figures(options: Options) -> Iterator[Figure]:
    """Alternate each mode with the naive way, and compare the most memory alive in a step."""
    for name, ours, naive in modes():
        what = f"a training step, DeiT-S of 6 blocks, {name}, against gradients for everything"
        yield ratio(what, ours, naive, options.repetitions)
        alive = [peak_bytes(step) / 1e6 for step in (ours, naive)]
        yield amount(f"{what}: peak memory", alive[0] / alive[1], "", detail=f"{alive[0]:.1f} MB of {alive[1]:.1f} MB")
    yield from kept_features(options)


def kept_features(options: Options) -> Iterator[Figure]:
    """Alternate a round of classifiers on a frozen backbone with the same steps on ready features."""
    federation, simulation = frozen_fleet(features_bytes=1e9)
    plain, usual = frozen_fleet(features_bytes=0)
    kept, server = local(simulation), start(federation)
    ready = ReadyHeads(simulation)

    def round_of(of: Federation, engine: Any) -> None:
        run_round(of, engine, Settings(1, LOCAL), server)

    what = "a round of DeiT-S of 6 blocks, frozen, two classifiers, features kept"
    yield ratio(f"{what}, against its classifiers on ready features", lambda: round_of(federation, kept), ready.round,
                5 * options.repetitions, wanted=1.25)  # fmt: skip
    computed = local(usual)
    yield ratio(f"{what}, against computing them", lambda: round_of(federation, kept),
                lambda: round_of(plain, computed), max(2, options.repetitions // 3))  # fmt: skip


def frozen_fleet(features_bytes: float) -> tuple[Federation, Simulation]:
    """Return a federation of one level on random images that nothing is done to."""
    kind = Kind({"name": "deit_s"}, SHAPE, SAMPLES)
    data = dataclasses.replace(make_random_data(kind), augment=None)
    given = {"classes": 10, "channels": 3, "input_shape": list(SHAPE)}
    spec = {"model": dict(kind.model), "given": given, "task": "classification", "exits": list(EXITS)}
    problem = Problem.from_spec({**spec, "peft": {"name": "frozen"}})
    problem = dataclasses.replace(problem, base=initial_base(problem, 0)).replace_features_bytes(features_bytes)
    level = Level("1", problem.submodel(1.0, EXITS), 1.0, 1.0)
    clients = Clients(np.full(CLIENTS, SAMPLES), np.ones(CLIENTS), np.full(CLIENTS, 0.1))
    method = {"name": "scalefl"}
    federation = Federation(problem, clients, (level,), CLIENTS, build(method), method, 0)
    return federation, Simulation(problem, data, Parts(CLIENTS, SAMPLES, TOTAL))


class ReadyHeads:
    """The classifiers alone, in one flat buffer, on features that are there."""

    def __init__(self, simulation: Simulation) -> None:
        whole = build_module(simulation.problem.architecture, simulation.problem.layout.full_sizes, EXITS)
        self.heads = nn.ModuleList(whole.heads.values())  # type: ignore[operator, union-attr]
        self.y, self.parts = simulation.data.y, simulation.parts
        self.features = [torch.randn(len(self.y), 384) for _ in EXITS]
        count = sum(p.numel() for p in self.heads.parameters())
        self.flat, self.grad, at = torch.empty(count), torch.zeros(count), 0
        for p in self.heads.parameters():
            here = slice(at, at := at + p.numel())
            self.flat[here] = p.detach().flatten()
            p.data, p.grad = self.flat[here].view(p.shape), self.grad[here].view(p.shape)

    def round(self) -> None:
        """Do what the clients of a round do."""
        rng = torch.Generator().manual_seed(0)
        for part in self.parts:
            whole = nn.Parameter(self.flat)
            whole.grad = self.grad
            optimizer = torch.optim.SGD([whole], lr=0.05, momentum=0.9, weight_decay=5e-4, fused=True)
            indices = part["train"]
            for _ in range(LOCAL.epochs):
                for batch in indices[torch.randperm(len(indices), generator=rng)].split(BATCH):
                    self.grad.zero_()
                    logits = [head(of[batch]) for head, of in zip(self.heads, self.features, strict=True)]
                    self_distillation(logits, self.y[batch], classification, 0.1, 3.0).backward()
                    optimizer.step()


def stepping(architecture: Architecture, naive: bool) -> Callable[[], None]:
    """Return a function that does one training step."""
    torch.manual_seed(0)
    module = build_module(architecture, architecture.sizes(1.0), EXITS).train()
    trained = [p for name, p in module.named_parameters() if architecture.trains(name)]
    if naive:
        for parameter in module.parameters():
            parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(trained, lr=0.05)
    x, y = torch.randn(BATCH, *SHAPE), torch.arange(BATCH) % 10

    def step() -> None:
        module.zero_grad(set_to_none=True)
        loss: Tensor = torch.stack([F.cross_entropy(logits, y) for logits in outputs(module, x)]).sum()
        loss.backward()
        optimizer.step()

    step.module = module  # type: ignore[attr-defined]
    return step


def peak_bytes(step: Callable[[], None]) -> int:
    """Return the most bytes alive during a step, the model's own included."""
    module: nn.Module = step.module  # type: ignore[attr-defined]
    memory = LiveBytes()
    for parameter in module.parameters():
        parameter.grad = None
        memory.add(parameter)
    with memory:
        step()
    return memory.peak


def modes() -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Yield each mode's name, its step, and the naive one."""
    for name, spec in MODES.items():
        architecture = apply_peft(deit_s(classes=10, input_shape=SHAPE), spec)
        yield name, stepping(architecture, naive=False), stepping(architecture, naive=True)
