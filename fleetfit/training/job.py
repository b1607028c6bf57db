"""Run a client's job: local SGD with its deadline and early stopping, or a measurement; then the reply.

`run_job` is called by every engine. A training job goes through `_train`, whose loop is `train_locally`; evaluation and
statistics jobs go to `fleetfit.training.scoring`.
"""

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.anatomy import outputs
from fleetfit.core import ClientMemory, Device, Failure, Job, Local, LocalResult, Update
from fleetfit.core.tasks import Task
from fleetfit.errors import ConfigError, FleetFitError, RunError
from fleetfit.hooks import Method, build
from fleetfit.machine import use_threads
from fleetfit.messages import compress
from fleetfit.names import find_plug_in
from fleetfit.seeds import derive_seed, isolate_global_rngs, make_torch_rng, seed_global_rngs
from fleetfit.submodel import is_finite
from fleetfit.training.batches import count_steps, iter_batches, iter_epochs
from fleetfit.training.clock import (
    Deadline,
    count_step_work,
    count_validation_samples,
    forward_work,
    is_check_step,
    make_late_failure,
    record_speed,
    stamp_time,
    start_clock,
)
from fleetfit.training.features import BatchLoader, make_batch_loader
from fleetfit.training.labels import report_class_frequencies
from fleetfit.training.local_model import LocalModel, get_local_model
from fleetfit.training.scoring import score_jobs, sum_batch_norm_inputs
from fleetfit.validation import find_extra_error

DIVERGED = "its training diverged: the loss or the weights are not finite (a smaller local.lr may help)"
"""Reason of a job whose training diverged."""
_VALIDATION_BATCH = 128


def run_job(job: Job, device: Device) -> tuple[Update | Failure, Any]:
    """Run one job on a device.

    Returns:
        The update, or a failure with its reason; and the client's memory if the update is accepted.
    """
    job, memory = _complete_job(job, device), ClientMemory.from_payload(device.memory)
    own = start_clock(job, replace(device, memory=memory.method))
    reply, method_memory = _execute(job, own)
    residual = None  # what compression leaves out, for the client's next update
    if job.kind == "train" and job.local.compress is not None and isinstance(reply, Update):
        reply, residual = compress(reply, job, device.problem.layout, job.local.compress, memory.lost)
    reply = stamp_time(reply, job, own)
    if job.kind != "train" or isinstance(reply, Failure):
        return reply, device.memory
    return reply, ClientMemory(method_memory, residual).payload


def _complete_job(job: Job, device: Device) -> Job:
    """Return a job with what is not sent."""
    return replace(job, levels=device.problem.levels, dispatched=job.submodel)


def _execute(job: Job, device: Device) -> tuple[Update | Failure, Any]:
    """Run a job as its method adapts it. An error of the method, the model or the data is the client's failure."""
    if job.kind == "train" and device.absent:
        return Failure.of(job, device.absent, absent=True), device.memory
    try:
        if job.kind == "labels":  # nothing for a method to adapt
            return report_class_frequencies(job, device), device.memory
        method = build(job.method)
        adapted = method.adapt_job(job, device)
        if adapted is None:
            reason = "declined: the client affords no part of what it was sent"
            return Failure.of(job, reason, declined=True), device.memory
        with isolate_global_rngs(device.accelerator):
            if adapted.kind == "train":
                return _train(adapted, device, method)
            is_evaluation = adapted.kind == "evaluate"
            update = score_jobs([adapted], [device])[0] if is_evaluation else sum_batch_norm_inputs(adapted, device)
            return replace(update, dispatched=job.submodel), device.memory
    except FleetFitError as error:
        return Failure.of(job, str(error)), device.memory
    except (MemoryError, OSError):  # of the machine, which the next job would meet too
        raise
    except Exception as error:  # other people's code may fail in any way, such as in training mode alone
        plug_in = find_plug_in(error)
        place = "" if plug_in is None else f" ({plug_in.rpartition(' (')[2]}"  # file and line
        return Failure.of(job, f"{type(error).__name__}: {error}{place}"), device.memory
    except SystemExit as error:  # of a plug-in: it would end the worker or the run
        return Failure.of(job, f"its method, model or data called sys.exit({error.code!r})"), device.memory


# ---- training --------------------------------------------------------------------------------------------------------


def _train(job: Job, device: Device, method: Method) -> tuple[Update | Failure, Any]:
    """Train a sub-model on the client's data; return the reply and the method's memory."""
    samples = len(device.data.split("train"))
    if not samples:
        return Failure.of(job, "the client has no training data"), device.memory
    model = get_local_model(device.problem, job.submodel, device.accelerator)
    model.load(job.state)
    task = method.adapt_task(job, device)
    own = device
    if task is not device.problem.task:
        own = replace(device, problem=device.problem.replace_task(task))
    loss, penalty = method.make_loss(job, own), method.make_penalty(job, device)
    seed_global_rngs(device.accelerator, derive_seed(job.seed, "torch"))  # now, since building draws from them
    model.module.train()

    gradients = GradientTracker(model)
    try:
        with make_batch_loader(device, model, job.submodel, training=True).open() as loader:
            result = train_locally(job, device, task, model, loss, penalty, loader)
    finally:
        untrained = gradients.close()
    model.restore(job.state, untrained)  # weight decay changed them, too

    work = result.work
    if job.local.deadline_s is not None and device.clock.speed is None:
        record_speed(device, work)
    if result.late and (not result.steps or job.local.late == "drop"):
        return make_late_failure(job, work), device.memory
    state = model.read()
    if not is_finite(state) or not math.isfinite(result.loss):
        return Failure.of(job, DIVERGED, multiply_adds=work), device.memory

    local_result = LocalResult(state, loss, task, result.kept_steps, result.rate_sum, untrained)
    dispatched = job.dispatched or job.submodel
    memory = method.update_client_memory(job, device, local_result)
    submodel, state = method.reply(job, device, local_result)
    report = method.report(job, device, local_result)
    extra = {name: value.detach().cpu() for name, value in report.items() if isinstance(value, Tensor)}
    if reason := find_extra_error(extra, method.declare_extra(device.problem, dispatched)[1]):
        raise ConfigError(f"the method's report: {reason}", key="report")
    metrics = {"loss": result.loss, "steps": result.steps, **({"stopped": True} if result.late else {})}
    update = Update(
        job.round, job.index, job.client, job.level, dispatched, submodel, state, samples,
        {**metrics, **{name: value for name, value in report.items() if name not in extra}},
        multiply_adds=work, untrained=tuple(name for name in untrained if name in state), extra=extra,
    )  # fmt: skip
    return update, memory


@dataclass(frozen=True)
class _TrainingResult:
    loss: float  # mean per sample
    steps: int  # of the optimizer
    kept_steps: int  # that made the weights: up to the best check of early stopping
    rate_sum: float  # of the learning rates of these kept steps
    work: int  # multiply-adds, see `fleetfit.training.clock`
    late: bool  # whether the deadline stopped it


def train_locally(
    job: Job, device: Device, task: Task, model: LocalModel, loss: Any, penalty: Any, loader: BatchLoader
) -> _TrainingResult:
    """Run local SGD: the epochs of a job, until its deadline, early stopping or the step limit ends them."""
    local, rng = job.local, make_torch_rng(job.seed, "batches")
    indices = device.data.split("train")
    loader.prepare(indices)
    if count_validation_samples(device, local):
        loader.prepare(device.data.split("validation"))
    optimizer, planned_steps = make_optimizer(model, local), count_steps(local, len(indices))
    stopping, deadline = EarlyStopping(device, task, model, local, loss, loader), Deadline(job, device)
    check_work, step_work = forward_work(device.problem, job.submodel), count_step_work(job, device, loss)
    total_loss, samples, steps, late = torch.zeros((), device=device.accelerator), 0, 0, False
    rate_sum = 0.0

    def count_work() -> int:
        return step_work * samples + check_work * stopping.samples

    for batch, ends_epoch in iter_epochs(indices, local, rng):
        more = step_work * len(batch) + check_work * stopping.cost_after_step(steps + 1)
        late = not deadline.admits(count_work(), more)
        if late:
            break
        x, y = loader.load(batch, rng)
        model.grad.zero_()
        value = loss(model.module, x, y)
        (value if penalty is None else value + penalty(model.module)).backward()
        clip(model.grad, local)
        if local.schedule_in_round == "cosine":
            optimizer.param_groups[0]["lr"] = compute_cosine_rate(steps, local, planned_steps)
        optimizer.step()
        rate_sum += optimizer.param_groups[0]["lr"]
        total_loss += value.detach() * len(batch)
        samples, steps = samples + len(batch), steps + 1
        ends = stopping.check(stopping.cost_after_step(steps), (steps, rate_sum)) or steps == local.max_steps
        if ends_epoch or ends:
            late = not deadline.admits(count_work(), check_work * stopping.cost_after_epoch)
            ends = late or stopping.check(stopping.cost_after_epoch, (steps, rate_sum)) or ends
        if ends:
            break

    kept = stopping.restore_best() or (steps, rate_sum)
    return _TrainingResult(total_loss.item() / max(samples, 1), steps, *kept, count_work(), late)


def clip(grad: Tensor, local: Local) -> None:
    """Clip a flat gradient in place, by value and then by norm."""
    if local.clip_value is not None:
        grad.clamp_(-local.clip_value, local.clip_value)
    if local.clip_norm is not None:
        norm = torch.linalg.vector_norm(grad)
        grad.mul_(torch.clamp(local.clip_norm / (norm + 1e-6), max=1.0))


def compute_cosine_rate(step: int, local: Local, steps: int) -> float:
    """Return lr * (1 + cos(pi * step / steps)) / 2, the learning rate of a step counted from 0."""
    return local.lr * (1 + math.cos(math.pi * step / max(steps, 1))) / 2


def _skip_compiler(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return an optimizer without the decorators that import PyTorch's compiler, which takes two seconds."""
    step, add_param_group = torch.no_grad()(inspect.unwrap(kind.step)), inspect.unwrap(kind.add_param_group)
    return type(kind.__name__, (kind,), {"add_param_group": add_param_group, "step": step})


_OPTIMIZERS: dict[str, Any] = {
    "sgd": _skip_compiler(torch.optim.SGD),
    "adam": _skip_compiler(torch.optim.Adam),
    "adamw": _skip_compiler(torch.optim.AdamW),
}


def make_optimizer(model: LocalModel, local: Local) -> torch.optim.Optimizer:
    """Return a new optimizer of all trained parameters as one tensor, for which the fused kernel needs one pass."""
    parameter = nn.Parameter(model.trained)
    parameter.grad = model.grad
    return _OPTIMIZERS[local.optimizer]([parameter], fused=True, **local.optimizer_settings)


class GradientTracker:
    """Finds the trained parameters without a gradient in a job. It costs nothing once each has had its first.

    A gradient of zeros counts; a parameter that the loss does not depend on has none.
    """

    def __init__(self, model: LocalModel) -> None:
        self._waiting = {
            name: tensor.register_post_accumulate_grad_hook(partial(self._remove, name))
            if tensor.requires_grad
            else None
            for name, tensor in model.parameters.items()
        }

    def _remove(self, name: str, tensor: Tensor) -> None:
        handle = self._waiting.pop(name)
        if handle is not None:
            handle.remove()

    def close(self) -> tuple[str, ...]:
        """Stop tracking, and return the names of the parameters without a gradient, in the module's order."""
        for handle in self._waiting.values():
            if handle is not None:
                handle.remove()
        return tuple(self._waiting)


class EarlyStopping:
    """Checks a loss on the device's validation data, after epochs or steps, and keeps the best weights.

    It is the task's loss of the deepest exit, or `loss.held_out(module)` if the method's loss has that. Without
    `local.patience` or validation data nothing is checked.

    Attributes:
        samples: Samples of all checks so far.
    """

    def __init__(
        self, device: Device, task: Task, model: LocalModel, local: Local, loss: Any, loader: BatchLoader
    ) -> None:
        """Check the initial weights if `check_every` is set."""
        self._device, self._task, self._model, self._local, self._loader = device, task, model, local, loader
        self._held_out = getattr(loss, "held_out", None)
        self._cost = count_validation_samples(device, local)
        self.samples = 0
        self._best_loss, self._checks_since_best = math.inf, 0
        self._best_weights: Tensor | None = None
        self._best_steps = 0, 0.0
        self._stops = False
        if local.check_every is not None:
            self.check(self._cost)
            self._checks_since_best, self._stops = 0, False  # also after a loss that is not finite

    def cost_after_step(self, steps: int) -> int:
        """Return the samples of the check after a number of steps; 0 for no check."""
        return self._cost if is_check_step(steps, self._local) else 0

    @property
    def cost_after_epoch(self) -> int:
        """Samples of the check after an epoch; 0 for no check."""
        return self._cost if self._local.check_every is None else 0

    def check(self, cost: int, steps: tuple[int, float] = (0, 0.0)) -> bool:
        """Check, unless it costs no samples; return whether to stop.

        Args:
            cost: Samples of the check.
            steps: Optimizer steps so far, and the sum of their learning rates.
        """
        if cost:
            loss = self._compute_loss()
            self.samples += cost
            self._checks_since_best += 1
            if loss < self._best_loss:
                self._best_loss, self._checks_since_best, self._best_weights = loss, 0, self._model.flat.clone()
                self._best_steps = steps
            self._stops = self._checks_since_best >= (self._local.patience or 0)
        return self._stops

    def restore_best(self) -> tuple[int, float] | None:
        """Load the best weights; return the steps that made them and the sum of their rates. None without a check."""
        if self._best_weights is None:
            return None
        self._model.flat.copy_(self._best_weights)
        return self._best_steps

    @torch.no_grad()
    def _compute_loss(self) -> float:
        device, module = self._device, self._model.module
        training = module.training
        module.eval()
        if self._held_out is not None:
            loss = float(self._held_out(module))
        else:
            total, indices = torch.zeros((), device=device.accelerator), device.data.split("validation")
            for batch in iter_batches(indices, _VALIDATION_BATCH):
                x, y = self._loader.load(batch)
                total += self._task.loss(outputs(module, x)[-1], y) * len(batch)
            loss = total.item() / len(indices)
        module.train(training)
        return loss


# ---- groups of jobs, and jobs on the server --------------------------------------------------------------------------

_MAX_GROUP = 256


def group_jobs(jobs: Iterator[Job]) -> Iterator[list[Job]]:
    """Yield groups of consecutive jobs that evaluate one model on several devices, and other jobs one by one."""
    group: list[Job] = []
    for job in jobs:
        if group and (len(group) == _MAX_GROUP or not _share_model(group[-1], job)):
            yield group
            group = []
        group.append(job)
        if job.kind == "train":  # yielded at once: the next training job is drawn after this one has run
            yield group
            group = []
    if group:
        yield group


def _share_model(a: Job, b: Job) -> bool:
    """Tell whether two jobs use the same model and settings, so that one pass evaluates both.

    Statistics jobs cannot: each client's samples are passed alone anyway, and states that wait for the others would lie
    between the freed blocks of a pass, where they keep glibc from using these again (30 MB per client of a small CNN).
    """
    if a.kind != "evaluate":
        return False
    same_state = a.state is b.state and (a.statistics is b.statistics or not (a.statistics or b.statistics))
    return same_state and (a.kind, a.level, a.evaluation, a.submodel) == (b.kind, b.level, b.evaluation, b.submodel)


def run_group(jobs: Sequence[Job], devices: Sequence[Device]) -> list[Update | Failure]:
    """Run the jobs of a group, each on its device, with the replies of running each alone."""
    if len(jobs) > 1:
        with contextlib.suppress(FleetFitError, ValueError, RuntimeError, SystemExit):  # each job reports its own
            method = build(jobs[0].method)
            jobs = [_complete_job(job, d) for job, d in zip(jobs, devices, strict=True)]
            own = [replace(d, memory=ClientMemory.from_payload(d.memory).method) for d in devices]
            adapted = [method.adapt_job(job, device) for job, device in zip(jobs, own, strict=True)]
            if all(
                new is not None and _share_model(new, job) and new.seed == job.seed
                for new, job in zip(adapted, jobs, strict=True)
            ):
                with isolate_global_rngs(devices[0].accelerator):
                    return list(score_jobs(jobs, devices))
    return [run_job(job, device)[0] for job, device in zip(jobs, devices, strict=True)]


def run_on_server(job: Job, device: Device) -> Update:
    """Run one job in this process on the server's own device, with one thread.

    Raises:
        RunError: It failed.
    """
    with use_threads(1):
        reply, _ = run_job(job, device)
    if isinstance(reply, Failure):
        raise RunError(f"the server's own training failed in round {job.round + 1}: {reply.reason}", key="method")
    return reply
