"""Two loops to compare with: a bare one, and one as repositories of papers write it."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.random_fleet import LOCAL
from fleetfit.data import Data
from fleetfit.layout import build_module
from fleetfit.losses import self_distillation
from fleetfit.submodel import extract
from fleetfit.tasks import classification
from fleetfit.training import initial_state
from fleetfit.values import Federation, Simulation

Slots = list[tuple[int, int]]
"""Clients with their levels."""
BETA, TEMPERATURE = 0.1, 3.0


class Bare:
    """Forward, backward and optimiser steps on the same sub-models, and nothing else."""

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
            optimiser = torch.optim.SGD([whole], lr=0.05, momentum=0.9, weight_decay=5e-4, fused=True)
            indices = self.parts[client]["train"]
            for batch in indices[torch.randperm(len(indices), generator=rng)].split(16):
                x, y = self.data.batch(batch, rng)
                grad.zero_()
                self_distillation(module(x), y, classification, BETA, TEMPERATURE).backward()
                optimiser.step()


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """One client's samples, made ready one by one: to float, cropped, flipped, normalised."""

    def __init__(self, data: Data, indices: Tensor) -> None:
        self.x, self.y = data.x[indices], data.y[indices]
        self.image = self.x.dtype == torch.uint8
        self.mean, self.std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std)) if self.image else (0, 1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if not self.image:
            return self.x[i], self.y[i]
        height, width = self.x.shape[-2:]
        image = F.pad(self.x[i].float().div(255), (4, 4, 4, 4))
        top, left = (int(torch.randint(0, 9, ())) for _ in range(2))
        image = image[:, top : top + height, left : left + width]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return (image - self.mean) / self.std, self.y[i]


class Naive:
    """A round as repositories of papers write it: every client's samples through a DataLoader, a deep copy of the model
    for each client, PyTorch's default optimiser, all updates kept, and averages of states padded with zeros.
    """

    def __init__(self, federation: Federation, simulation: Simulation) -> None:
        self.data, self.parts, problem = simulation.data, simulation.parts, federation.problem
        self.state: dict[str, Tensor] = dict(initial_state(problem, 0))
        self.models: list[nn.Module] = []
        for level in federation.levels:
            sizes = {**problem.layout.full_sizes, **level.submodel.sizes}
            self.models.append(build_module(problem.architecture, sizes, level.submodel.exits))
            cut = extract(problem.layout, self.state, level.submodel)
            found = self.part(self.models[-1])
            if found.keys() != cut.keys() or not all(torch.equal(found[name], cut[name]) for name in cut):
                raise ValueError("leading channels are not what this level trains: the naive loop cannot cut it.")

    def part(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the leading channels of the global state that a module has."""
        shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        return {name: self.state[name][_leading(shape)].clone() for name, shape in shapes.items()}

    def round(self, slots: Slots) -> None:
        updates = []
        for client, level in slots:
            module = copy.deepcopy(self.models[level])
            module.load_state_dict(self.part(module))
            self.train(module, client)
            updates.append(copy.deepcopy(module.state_dict()))
        self.state = self.average(updates)

    def train(self, module: nn.Module, client: int) -> None:
        optimiser = torch.optim.SGD(module.parameters(), lr=LOCAL.lr, momentum=LOCAL.momentum,
                                    weight_decay=LOCAL.weight_decay)  # fmt: skip
        loader = DataLoader(Samples(self.data, self.parts[client]["train"]), batch_size=16, shuffle=True)
        module.train()
        for x, y in loader:
            optimiser.zero_grad()
            self_distillation(module(x), y, classification, BETA, TEMPERATURE).backward()
            optimiser.step()

    def average(self, updates: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        after = {}
        for name, old in self.state.items():
            total, count = torch.zeros_like(old), torch.zeros_like(old)
            for update in updates:
                if name in update:
                    here = _leading(update[name].shape)
                    padded, mask = torch.zeros_like(old), torch.zeros_like(old)
                    padded[here], mask[here] = update[name], 1
                    total, count = total + padded, count + mask
            after[name] = torch.where(count > 0, total / count.clamp(min=1), old)
        return after


def _leading(shape: Any) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)
