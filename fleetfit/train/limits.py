"""What holds local training back: gradients that are cut, a deadline, and stopping early on held-out data."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fleetfit.layout import outputs
from fleetfit.train.batches import joined
from fleetfit.train.clock import looked_at, passes_in_time
from fleetfit.train.workpiece import Workpiece
from fleetfit.values import Clock, Device, Job, Local

_BATCH = 128


def clip(grad: Tensor, local: Local) -> None:
    """Cut a flat gradient in place, by value and then by norm, as far as asked for."""
    if local.clip_value is not None:
        grad.clamp_(-local.clip_value, local.clip_value)
    if local.clip_norm is not None:
        norm = torch.linalg.vector_norm(grad)
        grad.mul_(torch.clamp(local.clip_norm / (norm + 1e-6), max=1.0))


Admits = Callable[[int, int], bool]
"""Whether so many more passes, after so many, end in time; see `fleetfit.train.clock` for passes."""


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

    def __init__(self, device: Device, piece: Workpiece, local: Local, loss: Any) -> None:
        """Measure nothing yet, but with `check_every` the start; without patience or validation data, never."""
        self._device, self._piece, self._local = device, piece, local
        self._own = getattr(loss, "held_out", None)
        self.cost = looked_at(device, local)
        self.looked = 0
        self._best, self._best_at, self._epochs = math.inf, 0, 0
        self._kept: Tensor | None = None
        self._stopped = False
        if self.cost and local.check_every is not None:
            self._now(0)

    def after_step(self, steps: int) -> bool:
        """Tell, after so many steps, whether to stop."""
        every = self._local.check_every
        if every is not None and self.cost and (steps % every == 0 or steps == self._local.max_steps):
            self._now(steps)
        return self._stopped

    def after_epoch(self) -> bool:
        """Tell, after an epoch, whether to stop."""
        self._epochs += 1
        if self.cost and self._local.check_every is None:
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
            x, y = device.data.batch(batch)
            total += device.problem.task.loss(outputs(module, device.put(x))[-1], device.put(y)) * len(batch)
        module.train(training)
        return total.item() / len(indices)
