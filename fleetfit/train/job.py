"""Run one job of any kind, and local SGD."""

import math
from typing import Any

import torch
from torch import Tensor

from fleetfit.errors import FleetFitError, RunError
from fleetfit.method import Method, build
from fleetfit.seeds import own_randomness, seed_of, torch_rng
from fleetfit.submodel import Submodel, finite
from fleetfit.train.batches import epochs
from fleetfit.train.limits import EarlyStopping, clip
from fleetfit.train.measure import evaluate, statistics
from fleetfit.train.steps import optimiser_of, rate_at
from fleetfit.train.workpiece import Workpiece, workpiece
from fleetfit.values import Device, Failure, Job, Update


def run_job(job: Job, device: Device) -> tuple[Update | Failure, Any]:
    """Run one job on a device.

    Returns:
        The update, or a failure that says why; and what the client remembers if the update is accepted.
    """
    try:
        method = build(job.method)
        adapted = method.adapt(job, device)
        if adapted is None:
            return _failure(job, "declined: the client affords no part of what it was sent", True), device.memory
        work = {"train": _train, "evaluate": evaluate, "statistics": statistics}[adapted.kind]
        with own_randomness(device.accelerator):
            return work(adapted, device, method, job.submodel)
    except FleetFitError as error:
        return _failure(job, str(error)), device.memory
    except (ValueError, RuntimeError) as error:  # a module that cannot take this data: the client's, not the run's end
        return _failure(job, f"{type(error).__name__}: {error}"), device.memory


def run_on_server(job: Job, device: Device) -> Update:
    """Run one job in this process, on the server's own device; one thread, as every job by default.

    Raises:
        RunError: It failed.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reply, _ = run_job(job, device)
    finally:
        torch.set_num_threads(before)
    if isinstance(reply, Failure):
        raise RunError(f"the server's own training failed in round {job.round + 1}: {reply.reason}")
    return reply


def _failure(job: Job, reason: str, declined: bool = False) -> Failure:
    return Failure(job.round, job.index, job.client, job.level, job.submodel, reason, declined=declined)


def _train(job: Job, device: Device, method: Method, dispatched: Submodel) -> tuple[Update | Failure, Any]:
    indices = device.data.split("train")
    if not len(indices):
        return _failure(job, "the client has no training data"), device.memory
    piece = workpiece(device.problem, job.submodel, device.accelerator)
    piece.load(job.state)
    loss, penalty = method.loss(job, device), method.penalty(job, device)
    torch.manual_seed(seed_of(job.seed, "torch"))  # after module and loss are built: building draws from it
    piece.module.train()
    mean_loss, steps = _local_sgd(job, device, piece, loss, penalty, indices)
    state = piece.read()
    if not finite(state) or not math.isfinite(mean_loss):
        return _failure(job, "its training diverged: the loss or the weights are not finite"), device.memory
    memory = method.remember(job, device, state, loss)
    sent, state = method.reply(job, device, state)
    extra = loss.metrics() if hasattr(loss, "metrics") else {}
    metrics = {"loss": mean_loss, "steps": steps, **extra}
    update = Update(job.round, job.index, job.client, job.level, dispatched, sent, state, len(indices), metrics)
    return update, memory


def _local_sgd(
    job: Job, device: Device, piece: Workpiece, loss: Any, penalty: Any, indices: Tensor
) -> tuple[float, int]:
    """Run the local epochs; return the mean loss per sample and the number of steps."""
    local, rng = job.local, torch_rng(job.seed, "batches")
    optimiser = optimiser_of(piece, local)
    total, seen, steps = torch.zeros((), device=device.accelerator), 0, 0
    stopping = EarlyStopping(device, piece, local, loss)
    for epoch in epochs(indices, local, rng):
        for batch in epoch:
            x, y = device.data.batch(batch, rng)
            x, y = device.put(x), device.put(y)
            piece.grad.zero_()
            value = loss(piece.module, x, y)
            (value if penalty is None else value + penalty(piece.module)).backward()
            clip(piece.grad, local)
            if local.cosine:
                optimiser.param_groups[0]["lr"] = rate_at(steps, local)
            optimiser.step()
            total += value.detach() * len(batch)
            seen, steps = seen + len(batch), steps + 1
            if stopping.after_step(steps) or steps == local.max_steps:
                break
        if stopping.after_epoch() or steps == local.max_steps:
            break
    stopping.restore()
    return total.item() / max(seen, 1), steps
