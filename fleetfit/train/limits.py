"""What holds local training back: gradients that are cut, and stopping early on held-out data."""

import math

import torch
from torch import Tensor

from fleetfit.layout import outputs
from fleetfit.train.batches import joined
from fleetfit.train.workpiece import Workpiece
from fleetfit.values import Device, Local

_BATCH = 128


def clip(grad: Tensor, local: Local) -> None:
    """Cut a flat gradient in place, by value and then by norm, as far as asked for."""
    if local.clip_value is not None:
        grad.clamp_(-local.clip_value, local.clip_value)
    if local.clip_norm is not None:
        norm = torch.linalg.vector_norm(grad)
        grad.mul_(torch.clamp(local.clip_norm / (norm + 1e-6), max=1.0))


class EarlyStopping:
    """Watches the loss of the deepest exit on the client's validation data, epoch by epoch."""

    def __init__(self, device: Device, piece: Workpiece, local: Local) -> None:
        """Measure nothing yet; without patience or validation data, never."""
        self._device, self._piece = device, piece
        self._patience = local.patience if len(device.data.split("validation")) else None
        self._best, self._waited = math.inf, 0
        self._kept: Tensor | None = None

    def now(self) -> bool:
        """Tell, after an epoch, whether to stop."""
        if self._patience is None:
            return False
        found = self._loss()
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
