"""DepthFL: depth only, every exit trained, exits teach each other, FedDyn on top (Kim et al., ICLR 2023).

A client trains its blocks and every classifier up to its depth: the sum of the exits' losses and, between every pair
of them, a divergence whose weight grows over the first rounds, exp(-5 (1 - t / ramp)^2) in round t < ramp and 1 after
that. Clients count alike, and FedDyn corrects clients and server (`options/feddyn.py`).

Differs from the paper: its classifiers differ by depth; here an exit has the classifier that the model gives it, as in
the comparison of ReeFL (ICML 2024, appendix B).
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from fleetfit.anatomy import outputs
from fleetfit.core import Device, Job
from fleetfit.errors import check_range
from fleetfit.factories import declare_unused
from fleetfit.hooks import Loss, Method, weigh_equally
from fleetfit.hooks.levels import split_levels
from fleetfit.hooks.losses import declare_temperature, mutual_distillation
from fleetfit.options.feddyn import feddyn


@declare_temperature
@declare_unused(
    "temperature", "ramp", when=lambda values: values["weight"] == 0, reason="weight = 0 switches the distillation off"
)
def depthfl(alpha: float = 0.1, ramp: int = 300, weight: float = 1.0, temperature: float = 1.0) -> Method:
    """Make the method.

    Args:
        alpha: Strength of FedDyn; 0 is the plain mean.
        ramp: Rounds until the distillation has its full weight; 0 is at once.
        weight: Full weight of the distillation; 0 switches it off.
        temperature: Softens the distributions that are compared.
    """
    check_range("temperature", temperature, 0)
    check_range("ramp", ramp, 0, closed=True)
    check_range("weight", weight, 0, closed=True)
    base = feddyn(alpha) if alpha else Method(weigh=weigh_equally)
    loss = partial(mutual_loss, ramp=ramp, share=weight, temperature=temperature)
    return replace(base, make_levels=partial(split_levels, scaling="depth"), make_loss=loss)


def ramp_up(round: int, ramp: int) -> float:
    """Return exp(-5 (1 - t / ramp)^2) before round `ramp`, counted from 0, and 1 from there on."""
    return math.exp(-5 * (1 - round / ramp) ** 2) if round < ramp else 1.0


def mutual_loss(job: Job, device: Device, ramp: int, share: float, temperature: float) -> Loss:
    """Return the loss of all exits with mutual distillation, at this round's weight."""
    task, weight = device.problem.task, share * ramp_up(job.round, ramp)

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        return mutual_distillation(outputs(module, x), y, task, weight, temperature)

    return loss
