"""FedProx: a penalty that keeps local weights near those received (Li et al., MLSys 2020)."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.core import Device, Job
from fleetfit.errors import check_range
from fleetfit.hooks import Method


def fedprox(mu: float = 0.01) -> Method:
    """Make the option.

    Args:
        mu: Strength; adds mu / 2 * ||w - w_received||^2 to the loss.
    """
    check_range("mu", mu, 0, closed=True)
    return Method(make_penalty=partial(make_penalty, mu=mu))


def make_penalty(job: Job, device: Device, mu: float) -> Callable[[nn.Module], Tensor]:
    """Return the proximal term of this job."""
    received = {name: tensor.to(device.accelerator) for name, tensor in job.state.items()}
    return lambda module: mu / 2 * sum_squares(module, received)


def sum_squares(module: nn.Module, center: Mapping[str, Tensor]) -> Tensor:
    """Return ||w - center||^2 of the parameters that `center` has."""
    terms = [F.mse_loss(p, center[name], reduction="sum") for name, p in module.named_parameters() if name in center]
    return torch.stack(terms).sum()
