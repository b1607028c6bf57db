"""Run one job of any kind: the only local training loop, what holds it back, and what a gradient reached."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fleetfit.errors import FleetFitError, RunError
from fleetfit.layout import Layout, outputs
from fleetfit.messages import compress
from fleetfit.method import Method, build
from fleetfit.seeds import derive_seed, isolate_rng, make_torch_rng
from fleetfit.submodel import Submodel, finite
from fleetfit.training.clock import (
    STEP,
    forward_work,
    learn,
    looked_at,
    looks_after,
    out_of_time,
    passes_in_time,
    started,
    timed,
)
from fleetfit.training.features import Feed, feed_of
from fleetfit.training.local_model import LocalModel, local_model_of
from fleetfit.training.measure import evaluate, measured_alike, statistics
from fleetfit.training.steps import epochs, joined, optimiser_of, rate_at, step_count
from fleetfit.values import ClientMemory, Clock, Device, Failure, Job, Local, Update

# ---- which parameters a gradient reaches in a job ------------------------------------------------------------------


class Reached:
    """Watches the trained parameters of a module until each has had its first gradient; costs nothing after that.

    A gradient of zeros is one; a parameter that the loss does not depend on has none.
    """

    def __init__(self, piece: LocalModel) -> None:
        """Begin to watch."""
        self._waiting = {
            name: tensor.register_post_accumulate_grad_hook(partial(self._noted, name))
            if tensor.requires_grad
            else None
            for name, tensor in piece.parameters.items()
        }

    def _noted(self, name: str, tensor: Tensor) -> None:
        handle = self._waiting.pop(name)
        if handle is not None:
            handle.remove()

    def closed(self) -> tuple[str, ...]:
        """Stop watching, and return the names of those that had no gradient, in the module's order."""
        for handle in self._waiting.values():
            if handle is not None:
                handle.remove()
        return tuple(self._waiting)


# ---- limits: gradients that are cut, a deadline, and stopping early on held-out data -------------------------------

DIVERGED = "its training diverged: the loss or the weights are not finite"
"""Reason of a job whose training diverged."""
_BATCH = 128


def clip(grad: Tensor, local: Local) -> None:
    """Cut a flat gradient in place, by value and then by norm, as far as asked for."""
    if local.clip_value is not None:
        grad.clamp_(-local.clip_value, local.clip_value)
    if local.clip_norm is not None:
        norm = torch.linalg.vector_norm(grad)
        grad.mul_(torch.clamp(local.clip_norm / (norm + 1e-6), max=1.0))


Admits = Callable[[int, int], bool]
"""Whether so many more passes, after so many, end in time; see `fleetfit.training.clock` for passes."""


def deadline(job: Job, device: Device) -> Admits | None:
    """Return what tells before each step whether it ends in time; None where there is no deadline."""
    if job.local.deadline_s is None:
        return None
    if device.clock.speed is None:
        end = device.clock.began + job.local.deadline_s
        return _Passing(device.clock, end, device.accelerator).admits
    most = passes_in_time(job, device)

    def admits(done: int, more: int) -> bool:
        return done + more <= most

    return admits


class _Passing:
    """The deadline of a device without figures: what comes next should take as long as what came before."""

    def __init__(self, clock: Clock, end: float, accelerator: torch.device) -> None:
        self._clock, self._end, self._accelerator = clock, end, accelerator
        self._first = clock.now()

    def admits(self, done: int, more: int) -> bool:
        if self._accelerator.type == "cuda":  # steps run behind the host's back
            torch.cuda.synchronize(self._accelerator)
        now = self._clock.now()
        if not done:
            return now < self._end
        return now + (now - self._first) * more / done <= self._end


class EarlyStopping:
    """Watches a loss on the device's validation data, epoch by epoch or every so many steps, and keeps the best.

    What is watched is the task's loss of the deepest exit, or `loss.held_out(module)` where the method's loss has that.

    Attributes:
        cost: Samples of each look; 0 where nobody looks.
        looked: Samples looked at so far.
    """

    def __init__(self, device: Device, piece: LocalModel, local: Local, loss: Any, feed: Feed) -> None:
        """Measure nothing yet, but with `check_every` the start; without patience or validation data, never."""
        self._device, self._piece, self._local, self._feed = device, piece, local, feed
        self._own = getattr(loss, "held_out", None)
        self.cost = looked_at(device, local)
        self.looked = 0
        self._best, self._best_at, self._epochs = math.inf, 0, 0
        self._kept: Tensor | None = None
        self._stopped = False
        if self.cost and local.check_every is not None:
            self._now(0)

    def cost_after_step(self, steps: int) -> int:
        """Return the samples of the look that comes after so many steps; 0 where none does."""
        return self.cost if looks_after(steps, self._local) else 0

    @property
    def cost_after_epoch(self) -> int:
        """Samples of the look that comes after an epoch; 0 where none does."""
        return self.cost if self._local.check_every is None else 0

    def after_step(self, steps: int) -> bool:
        """Tell, after so many steps, whether to stop."""
        if self.cost_after_step(steps):
            self._now(steps)
        return self._stopped

    def after_epoch(self) -> bool:
        """Tell, after an epoch, whether to stop."""
        self._epochs += 1
        if self.cost_after_epoch:
            self._now(self._epochs)
        return self._stopped

    def restore(self) -> None:
        """Go back to the weights of the best moment."""
        if self._kept is not None:
            self._piece.flat.copy_(self._kept)

    def _now(self, done: int) -> None:
        found = self._loss()
        self.looked += self.cost
        if found < self._best:
            self._best, self._best_at, self._kept = found, done, self._piece.flat.clone()
        self._stopped = done - self._best_at >= (self._local.patience or 0)

    @torch.no_grad()
    def _loss(self) -> float:
        device, module = self._device, self._piece.module
        training = module.training
        module.eval()
        if self._own is not None:
            found = float(self._own(module))
            module.train(training)
            return found
        total, indices = torch.zeros((), device=device.accelerator), device.data.split("validation")
        for batch in joined(indices, _BATCH):
            x, y = self._feed.batch(batch)
            total += device.problem.task.loss(outputs(module, x)[-1], y) * len(batch)
        module.train(training)
        return total.item() / len(indices)


# ---- jobs ----------------------------------------------------------------------------------------------------------


def run_job(job: Job, device: Device) -> tuple[Update | Failure, Any]:
    """Run one job on a device: its clock starts, the work is done, the update is made lighter, its clock stops.

    Returns:
        The update, or a failure that says why; and what the client remembers if the update is accepted.
    """
    kept = ClientMemory.restored(device.memory)
    begun = started(job, _itself(device))
    reply, own = _done(job, begun)
    reply, lost = _lighter(reply, job, device.problem.layout, kept.lost)
    reply = timed(reply, job, begun)
    trained = job.kind == "train" and isinstance(reply, Update)
    return reply, ClientMemory(own, lost).nest if trained else device.memory


_TOGETHER = 256


def alike(jobs: Iterator[Job]) -> Iterator[list[Job]]:
    """Yield jobs one by one, but neighbours together that measure one model on several devices."""
    group: list[Job] = []
    for job in jobs:
        if group and (len(group) == _TOGETHER or not _like(group[-1], job)):
            yield group
            group = []
        group.append(job)
        if job.kind == "train":  # nothing is drawn ahead of it
            yield group
            group = []
    if group:
        yield group


def _like(a: Job, b: Job) -> bool:
    """Tell whether two jobs can be one pass.

    Statistics never are: each client's samples are passed alone anyway, and states that wait for the others' lie
    between the freed blocks of a pass, where they keep glibc from using these again (30 MB a client of a small CNN).
    """
    if a.kind != "evaluate":
        return False
    same = a.state is b.state and (a.statistics is b.statistics or not (a.statistics or b.statistics))
    return same and (a.kind, a.level, a.evaluation, a.submodel) == (b.kind, b.level, b.evaluation, b.submodel)


def run_alike(jobs: Sequence[Job], devices: Sequence[Device]) -> list[Update | Failure]:
    """Run jobs of one group of `alike`, each on its device; what they say is the same as of each alone."""
    if len(jobs) > 1:
        try:
            method = build(jobs[0].method)
            pairs = list(zip(jobs, devices, strict=True))
            if all(_as_it_is(method.adapt(job, _itself(device)), job) for job, device in pairs):
                with isolate_rng(devices[0].accelerator):
                    return list(measured_alike(jobs, devices))
        except (FleetFitError, ValueError, RuntimeError, SystemExit):  # each says it for itself
            pass
    return [run_job(job, device)[0] for job, device in zip(jobs, devices, strict=True)]


def _itself(device: Device) -> Device:
    """Return the device with what its method has it remember."""
    return replace(device, memory=ClientMemory.restored(device.memory).method)


def _as_it_is(adapted: Job | None, job: Job) -> bool:
    return adapted is not None and _like(adapted, job) and adapted.seed == job.seed


def _lighter(
    reply: Update | Failure, job: Job, layout: Layout, lost: Mapping[str, Any] | None
) -> tuple[Update | Failure, Mapping[str, Any] | None]:
    """Return the reply as it travels, and what compression owes the client's next update."""
    if job.kind != "train" or job.local.compress is None or isinstance(reply, Failure):
        return reply, None
    return compress(reply, job, layout, job.local.compress, lost)


def _done(job: Job, device: Device) -> tuple[Update | Failure, Any]:
    if job.kind == "train" and device.absent:
        return Failure.of(job, device.absent, absent=True), device.memory
    try:
        method = build(job.method)
        adapted = method.adapt(job, device)
        if adapted is None:
            why = "declined: the client affords no part of what it was sent"
            return Failure.of(job, why, declined=True), device.memory
        work = {"train": _train, "evaluate": evaluate, "statistics": statistics}[adapted.kind]
        with isolate_rng(device.accelerator):
            return work(adapted, device, method, job.submodel)
    except FleetFitError as error:
        return Failure.of(job, str(error)), device.memory
    except (ValueError, RuntimeError) as error:  # a module that cannot take this data: the client's, not the run's end
        return Failure.of(job, f"{type(error).__name__}: {error}"), device.memory
    except SystemExit as error:  # of a plug-in: it would end a worker, or the whole run, without a word
        return Failure.of(job, f"its method, model or data called sys.exit({error.code!r})"), device.memory


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, so that the server's own work has the same bits everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_on_server(job: Job, device: Device) -> Update:
    """Run one job in this process, on the server's own device; one thread, as every job by default.

    Raises:
        RunError: It failed.
    """
    with one_thread():
        reply, _ = run_job(job, device)
    if isinstance(reply, Failure):
        raise RunError(f"the server's own training failed in round {job.round + 1}: {reply.reason}", key="method")
    return reply


def _train(job: Job, device: Device, method: Method, dispatched: Submodel) -> tuple[Update | Failure, Any]:
    indices = device.data.split("train")
    if not len(indices):
        return Failure.of(job, "the client has no training data"), device.memory
    piece = local_model_of(device.problem, job.submodel, device.accelerator)
    piece.load(job.state)
    loss, penalty = method.loss(job, device), method.penalty(job, device)
    # After module and loss are built: building draws from it. On the CPU its own generator alone, since the others'
    # would each keep a stack trace until they are used, which takes a small client longer than a step.
    globally = torch if device.accelerator.type == "cuda" else torch.default_generator
    globally.manual_seed(derive_seed(job.seed, "torch"))
    piece.module.train()
    reached = Reached(piece)
    try:
        with feed_of(device, piece, job.submodel, training=True).open() as feed:
            done = _local_sgd(job, device, piece, loss, penalty, indices, feed)
    finally:
        untrained = reached.closed()
    piece.put(job.state, untrained)  # weight decay moves what no gradient reaches, too
    spent = done.passes * forward_work(device.problem, job.submodel)
    if job.local.deadline_s is not None and device.clock.speed is None:
        learn(device, spent)
    if done.stopped and (not done.steps or job.local.late == "drop"):
        return Failure.of(job, out_of_time(job), late=True, multiply_adds=spent), device.memory
    state = piece.read()
    if not finite(state) or not math.isfinite(done.loss):
        return Failure.of(job, DIVERGED, multiply_adds=spent), device.memory
    memory = method.remember(job, device, state, loss)
    sent, state = method.reply(job, device, state)
    extra = loss.metrics() if hasattr(loss, "metrics") else {}
    metrics = {"loss": done.loss, "steps": done.steps, **({"stopped": True} if done.stopped else {}), **extra}
    update = Update(
        job.round, job.index, job.client, job.level, dispatched, sent, state, len(indices), metrics,
        multiply_adds=spent, untrained=tuple(name for name in untrained if name in state),
    )  # fmt: skip
    return update, memory


@dataclass(frozen=True)
class _Trained:
    """What local training did: mean loss per sample, steps, passes (see `clock`), whether time ran out."""

    loss: float
    steps: int
    passes: int
    stopped: bool


def _local_sgd(
    job: Job, device: Device, piece: LocalModel, loss: Any, penalty: Any, indices: Tensor, feed: Feed
) -> _Trained:
    """Run the local epochs, as far as the deadline and the other limits let them."""
    feed.ready(indices)
    if looked_at(device, job.local):
        feed.ready(device.data.split("validation"))
    local, rng = job.local, make_torch_rng(job.seed, "batches")
    optimiser, planned = optimiser_of(piece, local), step_count(local, len(indices))
    total, seen, steps = torch.zeros((), device=device.accelerator), 0, 0
    stopping, in_time, stopped = EarlyStopping(device, piece, local, loss, feed), deadline(job, device), False
    for epoch in epochs(indices, local, rng):
        for batch in epoch:
            wanted = STEP * len(batch) + stopping.cost_after_step(steps + 1)
            if in_time is not None and not in_time(STEP * seen + stopping.looked, wanted):
                stopped = True
                break
            x, y = feed.batch(batch, rng)
            piece.grad.zero_()
            value = loss(piece.module, x, y)
            (value if penalty is None else value + penalty(piece.module)).backward()
            clip(piece.grad, local)
            if local.schedule_in_round == "cosine":
                optimiser.param_groups[0]["lr"] = rate_at(steps, local, planned)
            optimiser.step()
            total += value.detach() * len(batch)
            seen, steps = seen + len(batch), steps + 1
            if stopping.after_step(steps) or steps == local.max_steps:
                break
        if in_time is not None and not in_time(STEP * seen + stopping.looked, stopping.cost_after_epoch):
            stopped = True
        if stopped or stopping.after_epoch() or steps == local.max_steps:
            break
    stopping.restore()
    return _Trained(total.item() / max(seen, 1), steps, STEP * seen + stopping.looked, stopped)
