"""A bare loop to compare with; `naive.py` has the other one."""

import torch

from fleetfit.anatomy import build_module
from fleetfit.core import Federation, Simulation
from fleetfit.core.tasks import classification
from fleetfit.hooks.losses import self_distillation

Slots = list[tuple[int, int]]
"""Clients with their levels."""
BETA, TEMPERATURE = 0.1, 3.0


class Bare:
    """Forward, backward and optimizer steps on the same sub-models, and nothing else."""

    def __init__(self, federation: Federation, simulation: Simulation) -> None:
        self.data, self.parts, self.models = simulation.data, simulation.parts, []
        for level in federation.levels:
            sizes = {**federation.problem.layout.full_sizes, **level.submodel.sizes}
            module = build_module(federation.problem.architecture, sizes, level.submodel.exits)
            count = sum(p.numel() for p in module.parameters())
            flat, grad, at = torch.empty(count), torch.zeros(count), 0
            for parameter in module.parameters():
                here = slice(at, at := at + parameter.numel())
                flat[here] = parameter.detach().flatten()
                parameter.data, parameter.grad = flat[here].view(parameter.shape), grad[here].view(parameter.shape)
            self.models.append((module, flat, grad))

    def round(self, slots: Slots) -> None:
        rng = torch.Generator().manual_seed(0)
        for client, level in slots:
            module, flat, grad = self.models[level]
            module.train()
            whole = torch.nn.Parameter(flat)
            whole.grad = grad
            optimizer = torch.optim.SGD([whole], lr=0.05, momentum=0.9, weight_decay=5e-4, fused=True)
            indices = self.parts[client]["train"]
            for batch in indices[torch.randperm(len(indices), generator=rng)].split(16):
                x, y = self.data.batch(batch, rng)
                grad.zero_()
                self_distillation(module(x), y, classification, BETA, TEMPERATURE).backward()
                optimizer.step()
