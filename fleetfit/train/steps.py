"""The optimiser of local training, and its learning rate at each step."""

import math

import torch
from torch import nn

from fleetfit.errors import ConfigError
from fleetfit.train.workpiece import Workpiece
from fleetfit.values import Local


def optimiser_of(piece: Workpiece, local: Local) -> torch.optim.Optimizer:
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
