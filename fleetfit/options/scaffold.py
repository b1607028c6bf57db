"""SCAFFOLD: control variates correct the drift of clients (Karimireddy et al., ICML 2020, Algorithm 1, option II).

Each step of client i takes g - c_i + c in place of the gradient g. After K steps of rate eta from x to y_i it sets
c_i+ = c_i - c + (x - y_i) / (K eta), and sends y_i and c_i+ - c_i. The server moves x by lr times the mean of y_i - x,
and c by the sum of c_i+ - c_i over the round's clients, divided by N. All c_i and c begin at zero.

With unequal sub-models c and c_i are per element, and N counts the registered clients that may train the element. If
the rate changes from step to step, K eta is the sum of the rates. Momentum and other optimizers than SGD are refused:
x - y_i is no sum of gradients then.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.core import Device, Federation, Job, Level, Local, LocalResult, Problem, Server
from fleetfit.errors import ConfigError, check_range
from fleetfit.hooks import Method, Penalty, Reports, movements, weigh_equally
from fleetfit.layout import State
from fleetfit.submodel import concat_state, get_slice_plan


def scaffold(lr: float = 1.0) -> Method:
    """Make the option.

    Args:
        lr: The server's learning rate, above 0.
    """
    check_range("lr", lr, 0)
    return Method(
        **movements.declare_elements("control"), make_penalty=correct_drift, report=report_change,
        update_client_memory=store_control, step=partial(step, lr=lr), weigh=weigh_equally,
        defaults={"local.optimizer": "sgd", "local.momentum": 0.0}, describe=check_optimizer,
    )  # fmt: skip


def check_optimizer(problem: Problem, levels: Sequence[Level], local: Local) -> Sequence[str]:
    """Refuse momentum, and other optimizers than SGD."""
    if local.optimizer == "sgd" and not local.momentum:
        return ()
    raise ConfigError('scaffold needs local.optimizer = "sgd" and local.momentum = 0.', key="local.momentum")


def correct_drift(job: Job, device: Device) -> Penalty:
    """Add <c - c_i, y> to the loss: its gradient is c - c_i."""
    flat = movements.get_extra(job, device, "control") - movements.load_client_state(job, device, "control")
    shift = get_slice_plan(device.problem.layout, job.submodel).views(device.put(flat))
    return lambda net: torch.stack([(shift[n] * p).sum() for n, p in net.named_parameters() if n in shift]).sum()


def compute_change(job: Job, device: Device, result: LocalResult) -> Tensor:
    """Return c_i+ - c_i = (x - y_i) / (K eta) - c; zeros if the rate was 0 or no step was kept."""
    movement = concat_state(job.state) - concat_state(result.state)
    if not result.rate_sum:
        return torch.zeros_like(movement)
    return movement / result.rate_sum - movements.get_extra(job, device, "control")


def report_change(job: Job, device: Device, result: LocalResult) -> State:
    """Send c_i+ - c_i."""
    return {"control": movements.make_extra(job, device, compute_change(job, device, result))}


def store_control(job: Job, device: Device, result: LocalResult) -> Any:
    """Keep c_i+."""
    own = movements.load_client_state(job, device, "control") + compute_change(job, device, result)
    return movements.store_client_state(job, device, "control", own)


def step(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports, lr: float) -> Server:
    """Move x by the mean movement, and c by the sum of changes over N."""
    move = movements.ServerStep(server, aggregate)
    before = move.load_memory("control")
    control = before + aggregate.extra["control"] / movements.count_trainers(federation)
    new = move.mean if lr == 1 else move.old + lr * (move.mean - move.old)
    return move.make_server(new, control=(control, before))
