"""What holds local training back: gradients that are cut, a deadline, and stopping early on held-out data."""

import math
from collections.abc import Callable

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
    """Watches the loss of the deepest exit on the client's validation data, epoch by epoch.

    Attributes:
        cost: Samples of each look; 0 where nobody looks.
        looked: Samples looked at so far.
    """

    def __init__(self, device: Device, piece: Workpiece, local: Local) -> None:
        """Measure nothing yet; without patience or validation data, never."""
        self._device, self._piece = device, piece
        self.cost = looked_at(device, local)
        self.looked = 0
        self._patience = local.patience if self.cost else None
        self._best, self._waited = math.inf, 0
        self._kept: Tensor | None = None

    def now(self) -> bool:
        """Tell, after an epoch, whether to stop."""
        if self._patience is None:
            return False
        found = self._loss()
        self.looked += self.cost
        if found < self._best:
            self._best, self._waited, self._kept = found, 0, self._piece.flat.clone()
        else:
            self._waited += 1
        return self._waited >= self._patience

    def restore(self) -> None:
        """Go back to the weights of the best epoch."""
        if self._kept is not None:
            self._piece.flat.copy_(self._kept)

    @torch.no_grad()
    def _loss(self) -> float:
        device, module = self._device, self._piece.module
        training = module.training
        module.eval()
        total, indices = torch.zeros((), device=device.accelerator), device.data.split("validation")
        for batch in joined(indices, _BATCH):
            x, y = device.data.batch(batch)
            total += device.problem.task.loss(outputs(module, device.put(x))[-1], device.put(y)) * len(batch)
        module.train(training)
        return total.item() / len(indices)
