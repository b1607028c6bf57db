"""FedSGD: one gradient step a round on all of a client's data; FedAvg with E = 1, B = infinity (McMahan et al., 2017).

As FedAvg here, it trains the full model narrowed to level 1.
"""

from dataclasses import replace

from fleetfit.core import Device, Job
from fleetfit.hooks import Method
from fleetfit.hooks.levels import smallest_width

_SETTLED = ("epochs", "batch_size", "schedule_in_round", "max_steps", "patience", "check_every", "momentum",
                  "nesterov")  # fmt: skip


def fedsgd() -> Method:
    """Make the method."""
    return Method(make_levels=smallest_width, adapt_job=train_one_step, fixed_keys=_SETTLED)


def train_one_step(job: Job, device: Device) -> Job:
    """Train one epoch in one batch, whatever the run file sets: a single step has no momentum and no early stopping."""
    momentum = {"momentum": 0.0, "nesterov": False} if job.local.optimizer == "sgd" else {}
    local = job.local.replace(epochs=1, batch_size="all", max_steps=None, patience=None, check_every=None, **momentum)
    return replace(job, local=local)
