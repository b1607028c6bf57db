"""The duration of a training job, and its deadline.

A training step costs three times the multiply-adds of its forward pass: the backward pass computes gradients for the
inputs of every layer and for its weights, each at about the cost of the forward pass (Kaplan et al. 2020, 2.1, count
the same way). Early stopping's evaluation of the client's validation data counts as a forward pass. What a method adds
counts where its loss declares it, as `extra_multiply_adds`; small work, such as distillation between exits or a
penalty, does not.

If the device has figures, seconds = latency + bytes down / down + multiply-adds / speed + bytes up / up, and the same
job gives the same bits on every machine. Without figures the real time counts, and the speed of this machine is
estimated from its last job. Two such runs may differ.
"""

import math
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fleetfit import messages
from fleetfit.core import Device, Failure, Job, Local, Problem, Update
from fleetfit.cost import submodel_cost
from fleetfit.errors import ConfigError, truncate
from fleetfit.hooks import build
from fleetfit.seeds import isolate_rng
from fleetfit.submodel import Submodel
from fleetfit.training.batches import compute_batch_sizes, count_steps

STEP = 3
"""Passes of a training step, per sample."""
_METRICS = 1024  # bytes reserved for the metrics and the header of a reply, whose size is unknown beforehand
_SLACK = 1 + 1e-9

_multiply_adds: WeakKeyDictionary[Problem, dict[Submodel, int]] = WeakKeyDictionary()
_speeds: WeakKeyDictionary[Problem, float] = WeakKeyDictionary()  # multiply-adds per second of this machine


def start_clock(job: Job, device: Device) -> Device:
    """Return the device with its clock at the start of the job; only training takes time."""
    clock = device.clock
    if job.kind != "train" or (clock.speed is None and job.local.deadline_s is None):
        return device
    if clock.speed is None:
        return replace(device, clock=replace(clock, began=clock.now()))
    return replace(device, clock=replace(clock, received=messages.job_size(job, device.problem.layout)))


def stamp_time(reply: Update | Failure, job: Job, device: Device) -> Update | Failure:
    """Return a training job's reply with its simulated seconds; an update after the deadline becomes a failure.

    The server waits until the deadline for clients that are late or absent. Without a deadline it notices at once that
    a client is absent.
    """
    clock, deadline_s = device.clock, job.local.deadline_s
    if job.kind != "train" or clock.speed is None:
        return reply
    if isinstance(reply, Failure) and (reply.late or reply.absent):
        noticed_s = clock.speed.seconds(clock.received, 0, 0)
        return replace(reply, simulated_s=noticed_s if deadline_s is None else deadline_s)
    sent = messages.reply_size(reply, device.problem.layout)
    seconds = clock.speed.seconds(clock.received, reply.multiply_adds, sent)
    if deadline_s is not None and seconds > deadline_s * _SLACK and isinstance(reply, Update):
        return replace(make_late_failure(job, reply.multiply_adds), simulated_s=deadline_s)
    return replace(reply, simulated_s=seconds)


def make_late_failure(job: Job, multiply_adds: int) -> Failure:
    """Return the failure of a job whose update is too late."""
    reason = f"out of time: no update within {job.local.deadline_s:g} s (a longer cohort.deadline_s may help)"
    return Failure.of(job, reason, late=True, multiply_adds=multiply_adds)


# ---- the work of a job -----------------------------------------------------------------------------------------------


def forward_work(problem: Problem, submodel: Submodel) -> int:
    """Return the multiply-adds of one pass: one sample forward through a sub-model with all its exits."""
    cache = _multiply_adds.setdefault(problem, {})
    key = Submodel({axis: range(size) for axis, size in submodel.sizes.items()}, submodel.exits)
    if key not in cache:
        cache[key] = submodel_cost(problem.architecture, key, problem.input_shape).multiply_adds
    return cache[key]


def count_step_work(job: Job, device: Device, loss: Any) -> int:
    """Return the multiply-adds of a training step, per sample.

    Args:
        job: The job, with its sub-model.
        device: Has the problem.
        loss: Its `extra_multiply_adds`, if it has them, are per sample, forward and backward, beyond the sub-model's;
            below 0 where it computes a part of the sub-model.

    Raises:
        ConfigError: They are not a number, or leave less than nothing.
    """
    own, extra = STEP * forward_work(device.problem, job.submodel), getattr(loss, "extra_multiply_adds", 0)
    if not isinstance(extra, int | float) or not -own <= extra < math.inf:
        raise ConfigError(
            f"a loss's extra_multiply_adds must be a number from -{own}, the sub-model's, on; got "
            f"{truncate(repr(extra))}.",
            key="extra_multiply_adds",
        )
    return own + round(extra)


def count_planned_samples(local: Local, samples: int, validation_samples: int) -> tuple[int, int]:
    """Return the samples of a whole training that does not stop early: of its steps, and of early stopping's checks.

    Args:
        local: Settings of the training.
        samples: Training samples of the client.
        validation_samples: Samples of each check of early stopping; 0 for no checks.
    """
    sizes, steps = compute_batch_sizes(local, samples), count_steps(local, samples)
    epochs, rest = divmod(steps, len(sizes))
    checks = epochs + (rest > 0)
    if local.check_every is not None:
        checks = 1 + steps // local.check_every + (steps % local.check_every > 0 and is_check_step(steps, local))
    return epochs * samples + sum(sizes[:rest]), validation_samples * checks


def count_planned_passes(local: Local, samples: int, validation_samples: int) -> int:
    """Return the forward passes, of one sample each, of a whole training that does not stop early, see above."""
    trained, checked = count_planned_samples(local, samples, validation_samples)
    return STEP * trained + checked


def is_check_step(steps: int, local: Local) -> bool:
    """Tell whether early stopping checks after this number of steps, if it counts steps and not epochs."""
    every = local.check_every
    return every is not None and (steps % every == 0 or steps == local.max_steps)


def count_validation_samples(device: Device, local: Local) -> int:
    """Return the samples of each check of early stopping; 0 without early stopping."""
    return 0 if local.patience is None else len(device.data.split("validation"))


# ---- deadlines -------------------------------------------------------------------------------------------------------


class Deadline:
    """The deadline of a training job. Without `local.deadline_s` it admits every step.

    A device with figures has a number of multiply-adds. One without has real time, and its next step is assumed to take
    as long as its steps so far.
    """

    def __init__(self, job: Job, device: Device) -> None:
        self._clock, self._accelerator = device.clock, device.accelerator
        self._max_work: float = math.inf
        self._end: float | None = None
        if job.local.deadline_s is None:
            return
        if device.clock.speed is not None:
            self._max_work = _compute_max_work(job, device)
        else:
            self._end = device.clock.began + job.local.deadline_s
            self._start = device.clock.now()

    def admits(self, work: int, more: int) -> bool:
        """Tell whether more multiply-adds, after those so far, end in time."""
        if self._end is None:
            return work + more <= self._max_work
        if self._accelerator.type == "cuda":  # steps run asynchronously
            torch.cuda.synchronize(self._accelerator)
        now = self._clock.now()
        if not work:
            return now < self._end
        return now + (now - self._start) * more / work <= self._end


def _compute_max_work(job: Job, device: Device) -> float:
    """Return the multiply-adds of a training that ends in time. The reply is assumed to hold the whole sub-model."""
    clock, speed, deadline_s = device.clock, device.clock.speed, job.local.deadline_s
    assert speed is not None
    assert deadline_s is not None
    extra = build(job.method).declare_extra(device.problem, job.dispatched or job.submodel)[1]
    sent = messages.update_size(job, device.problem.layout, extra) + _METRICS
    return (deadline_s - speed.seconds(clock.received, 0, sent)) * speed.multiply_adds_per_s


def fits_deadline(job: Job, device: Device) -> bool:
    """Tell whether a job's whole training should end in time; true if the speed of this machine is not known yet.

    The method's loss is made once for it, since the loss may declare work of its own.
    """
    samples, local = len(device.data.split("train")), job.local
    if local.deadline_s is None or not samples:
        return True
    with isolate_rng(device.accelerator):
        step_work = count_step_work(job, device, build(job.method).make_loss(job, device))
    trained, checked = count_planned_samples(local, samples, count_validation_samples(device, local))
    work = step_work * trained + forward_work(device.problem, job.submodel) * checked
    if device.clock.speed is not None:
        return work <= _compute_max_work(job, device)
    speed = _speeds.get(device.problem)
    if speed is None:
        return True
    left_s = device.clock.began + local.deadline_s - device.clock.now()
    return work <= left_s * speed


def record_speed(device: Device, multiply_adds: int) -> None:
    """Store how fast this machine trained, for the next job of a device without figures."""
    elapsed_s = device.clock.now() - device.clock.began
    if elapsed_s > 0 and multiply_adds:
        _speeds[device.problem] = multiply_adds / elapsed_s
