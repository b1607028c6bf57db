"""What a frozen backbone saves in a training step: time and peak memory, against gradients for everything.

DeiT-S cut to six blocks, images of 96x96, batch 16. The naive side is the same model with the same things put in, and
the same optimiser, which steps over what is trained only; but every parameter asks for its gradient. Memory is the
most storages alive at once during a step, both sides counted by the same means.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measuring import Figure, Options, amount, ratio
from fleetfit.cost.memory import LiveBytes
from fleetfit.layout import Architecture, build_module, outputs
from fleetfit.models.vit import deit_s
from fleetfit.values import tuned

SHAPE, BATCH, EXITS = (3, 96, 96), 16, (3, 6)
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


def stepping(architecture: Architecture, naive: bool) -> Callable[[], None]:
    """Return a function that does one training step."""
    torch.manual_seed(0)
    module = build_module(architecture, architecture.sizes(1.0), EXITS).train()
    trained = [p for name, p in module.named_parameters() if architecture.trains(name)]
    if naive:
        for parameter in module.parameters():
            parameter.requires_grad_(True)
    optimiser = torch.optim.SGD(trained, lr=0.05)
    x, y = torch.randn(BATCH, *SHAPE), torch.arange(BATCH) % 10

    def step() -> None:
        module.zero_grad(set_to_none=True)
        loss: Tensor = torch.stack([F.cross_entropy(logits, y) for logits in outputs(module, x)]).sum()
        loss.backward()
        optimiser.step()

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
        architecture = tuned(deit_s(classes=10, input_shape=SHAPE), spec)
        yield name, stepping(architecture, naive=False), stepping(architecture, naive=True)
