"""FedSGD: one gradient step a round on all of a client's data; FedAvg with E = 1, B = infinity (McMahan et al., 2017).

As FedAvg here, it trains the full model narrowed to level 1.
"""

from dataclasses import replace

from fleetfit.levels import smallest_width
from fleetfit.method import Method
from fleetfit.values import Device, Job

_OF_MORE_STEPS = ("epochs", "batch_size", "schedule_in_round", "max_steps", "patience", "check_every", "momentum",
                  "nesterov")  # fmt: skip


def fedsgd() -> Method:
    """Make the method."""
    return Method(levels=smallest_width, adapt=one_step, settles=_OF_MORE_STEPS)


def one_step(job: Job, device: Device) -> Job:
    """Train one epoch in one batch, whatever the run says: a single step, which has nothing to remember or to stop."""
    local = replace(job.local, epochs=1, batch_size=None, max_steps=None, patience=None, check_every=None)
    return replace(job, local=replace(local, momentum=0.0, nesterov=False) if local.optimiser == "sgd" else local)
