"""Tasks: what a prediction is worth. A task is a loss, a divergence of a student from a teacher, and metrics."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fleetfit.errors import ConfigError


@dataclass(frozen=True)
class Task:
    """A task as a record of functions.

    Attributes:
        name: Its name in a configuration.
        loss: (logits [B, C], y [B]) -> mean loss, a scalar.
        divergence: (teacher logits, student logits, temperature) -> scalar, averaged over the batch.
        hits: (logits [B, C], y [B]) -> bool [B]; its mean is the task's accuracy.
        scores: logits [B, C] -> what an ensemble of exits averages, [B, C].
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    divergence: Callable[[Tensor, Tensor, float], Tensor]
    hits: Callable[[Tensor, Tensor], Tensor]
    scores: Callable[[Tensor], Tensor]


def softened_kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return tau^2 * KL(softmax(teacher / tau) || softmax(student / tau)), ScaleFL Eq. 5.

    Args:
        teacher: Logits [B, C]; no gradient flows into them.
        student: Logits [B, C].
        temperature: tau > 0.

    Returns:
        A scalar: summed over classes, averaged over the batch.
    """
    target = F.log_softmax(teacher.detach() / temperature, dim=-1)
    guess = F.log_softmax(student / temperature, dim=-1)
    return F.kl_div(guess, target, reduction="batchmean", log_target=True) * temperature**2


def _hits(logits: Tensor, y: Tensor) -> Tensor:
    return logits.argmax(dim=-1) == y


def _probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1)


classification = Task("classification", F.cross_entropy, softened_kl, _hits, _probabilities)

_TASKS = {task.name: task for task in (classification,)}


def task_named(name: str) -> Task:
    """Return the task of this name.

    Raises:
        ConfigError: There is none.
    """
    if name not in _TASKS:
        raise ConfigError(f'there is no task "{name}"; there are {", ".join(_TASKS)}.')
    return _TASKS[name]
