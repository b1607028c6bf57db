"""How long a training job takes, and what of it fits into a deadline.

A training step costs three times the multiply-adds of its forward pass: the backward pass computes gradients for the
inputs of every layer and for its weights, each at about the cost of the forward pass (Kaplan et al. 2020, 2.1, count
the same way). What a method adds, such as distillation between exits or a penalty, is not counted; a look at the
client's validation data is, as a forward pass. So the work of a job is counted in passes: one sample through the
sub-model's forward pass.

Where the device has figures, seconds = latency + bytes down / down + multiply-adds / speed + bytes up / up, and the
same job gives the same bits anywhere. Without figures the time that passes counts, and how fast this machine trains is
learned from its last job: then no two runs need be alike.
"""

import math
from dataclasses import replace
from weakref import WeakKeyDictionary

from fleetfit import messages
from fleetfit.cost import submodel_cost
from fleetfit.submodel import Submodel
from fleetfit.training.steps import step_count, steps_of
from fleetfit.values import Device, Failure, Job, Local, Problem, Update

STEP = 3
"""Passes' worth of a training step, for each of its samples."""
_METRICS = 1024  # bytes that metrics and the header of a reply may take beyond what is known before
_SLACK = 1 + 1e-9

_counted: WeakKeyDictionary[Problem, dict[Submodel, int]] = WeakKeyDictionary()
_learned: WeakKeyDictionary[Problem, float] = WeakKeyDictionary()  # multiply-adds per second of this machine


def started(job: Job, device: Device) -> Device:
    """Return the device with its clock where the job began; only training takes time."""
    clock = device.clock
    if job.kind != "train" or (clock.speed is None and job.local.deadline_s is None):
        return device
    if clock.speed is None:
        return replace(device, clock=replace(clock, began=clock.now()))
    return replace(device, clock=replace(clock, received=messages.job_size(job, device.problem.layout)))


def forward_work(problem: Problem, piece: Submodel) -> int:
    """Return the multiply-adds of one pass: one sample forward through a sub-model with all its exits."""
    kept = _counted.setdefault(problem, {})
    key = Submodel({axis: range(size) for axis, size in piece.sizes.items()}, piece.exits)
    if key not in kept:
        kept[key] = submodel_cost(problem.architecture, key, problem.input_shape).multiply_adds
    return kept[key]


def planned_passes(local: Local, samples: int, looked: int) -> int:
    """Return the passes of a whole training without early stopping.

    Args:
        local: Settings of the training.
        samples: Training samples of the client.
        looked: Samples of each look at the validation data, one after each epoch or as `check_every` says; 0 for none.
    """
    sizes, steps = steps_of(local, samples), step_count(local, samples)
    full, rest = divmod(steps, len(sizes))
    looks = full + (rest > 0)
    if local.check_every is not None:
        looks = 1 + steps // local.check_every + (steps % local.check_every > 0 and looks_after(steps, local))
    return STEP * (full * samples + sum(sizes[:rest])) + looked * looks


def looks_after(steps: int, local: Local) -> bool:
    """Tell whether so many steps are followed by a look at the validation data, where looks are counted in steps."""
    every = local.check_every
    return every is not None and (steps % every == 0 or steps == local.max_steps)


def looked_at(device: Device, local: Local) -> int:
    """Return the samples of each look at the client's validation data; 0 where nobody looks."""
    return 0 if local.patience is None else len(device.data.split("validation"))


def passes_in_time(job: Job, device: Device) -> float:
    """Return the passes that a job's training may take, where the device has figures.

    Bytes up are those of a reply that holds the sub-model whole, with some room for what is not known beforehand.
    """
    clock, speed, deadline_s = device.clock, device.clock.speed, job.local.deadline_s
    assert speed is not None
    assert deadline_s is not None
    sent = messages.update_size(job, device.problem.layout) + _METRICS
    left = deadline_s - speed.seconds(clock.received, 0, sent)
    return math.floor(left * speed.multiply_adds_per_s / max(1, forward_work(device.problem, job.submodel)))


def fits(job: Job, device: Device) -> bool:
    """Tell whether a job's whole training should end in time; where nothing is known yet, that it does."""
    samples, local = len(device.data.split("train")), job.local
    if local.deadline_s is None or not samples:
        return True
    wanted = planned_passes(local, samples, looked_at(device, local))
    if device.clock.speed is not None:
        return wanted <= passes_in_time(job, device)
    known = _learned.get(device.problem)
    if known is None:
        return True
    left = device.clock.began + local.deadline_s - device.clock.now()
    return wanted * forward_work(device.problem, job.submodel) <= left * known


def learn(device: Device, multiply_adds: int) -> None:
    """Remember how fast this machine trained, for the next job of a device without figures."""
    elapsed = device.clock.now() - device.clock.began
    if elapsed > 0 and multiply_adds:
        _learned[device.problem] = multiply_adds / elapsed


def timed(reply: Update | Failure, job: Job, device: Device) -> Update | Failure:
    """Return a training job's reply with its simulated seconds; one that comes after the deadline is a failure.

    The server waits until the deadline for whoever is late or went away; without a deadline it notices at once that
    somebody went away.
    """
    clock, until = device.clock, job.local.deadline_s
    if job.kind != "train" or clock.speed is None:
        return reply
    if isinstance(reply, Failure) and (reply.late or reply.absent):
        noticed = clock.speed.seconds(clock.received, 0, 0)
        return replace(reply, simulated_s=noticed if until is None else until)
    seconds = clock.speed.seconds(
        clock.received, reply.multiply_adds, messages.reply_size(reply, device.problem.layout)
    )
    if until is not None and seconds > until * _SLACK and isinstance(reply, Update):
        spent = reply.multiply_adds
        return Failure.of(job, out_of_time(job), late=True,
            multiply_adds=spent, simulated_s=until,
        )  # fmt: skip
    return replace(reply, simulated_s=seconds)


def out_of_time(job: Job) -> str:
    """Return the reason of a failure for lack of time."""
    return f"out of time: its update was not there after {job.local.deadline_s:g} s"
