"""Batches in a seeded order, the optimiser of local training, and its learning rate at each step."""

import math
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from fleetfit.errors import ConfigError
from fleetfit.training.local_model import LocalModel
from fleetfit.values import Local

Order = TypeVar("Order", Tensor, range)


def epochs(indices: Tensor, local: Local, rng: torch.Generator) -> Iterator[Iterator[Tensor]]:
    """Yield the batches of each local epoch, every epoch in a new order."""
    size = local.batch_size or len(indices)
    for _ in range(local.epochs):
        yield joined(indices[torch.randperm(len(indices), generator=rng)], size)


def joined(order: Order, size: int) -> Iterator[Order]:
    """Yield batches of `size`; a single last sample joins the batch before it, since batch norm cannot use it alone."""
    at, n = 0, len(order)
    while at < n:
        end = n if n - at - size == 1 else min(at + size, n)
        yield order[at:end]
        at = end


def optimiser_of(piece: LocalModel, local: Local) -> torch.optim.Optimizer:
    """Return a fresh optimiser of all that is trained, as one tensor.

    Raises:
        ConfigError: There is no such optimiser.
    """
    parameter = nn.Parameter(piece.trained)
    parameter.grad = piece.grad
    if local.optimiser == "sgd":
        return torch.optim.SGD(
            [parameter], lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay, fused=True
        )
    if local.optimiser == "adam":
        return torch.optim.Adam([parameter], lr=local.lr, weight_decay=local.weight_decay, fused=True)
    raise ConfigError(f'the optimiser must be "sgd" or "adam", got "{local.optimiser}".')


def rate_at(step: int, local: Local) -> float:
    """Return lr * (1 + cos(pi * step / max_steps)) / 2, the learning rate of a step counted from 0."""
    return local.lr * (1 + math.cos(math.pi * step / (local.max_steps or 1))) / 2
