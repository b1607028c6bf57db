"""Tasks: a loss, a divergence of a student from a teacher, and a metric of predictions.

An accuracy is at most 1 and larger is better, for every task. For a regression it is the explained variance: the data
set scales its targets to variance one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fleetfit.errors import ConfigError, ModelError, did_you_mean

NOT_SCORED = -100
"""The label of a position that is not scored (padding)."""


@dataclass(frozen=True)
class Task:
    """A task as a record of functions.

    Attributes:
        name: Its name in a configuration.
        measure: Its accuracy, in words.
        loss: (outputs [B, ...], y [B, ...]) -> mean loss, a scalar.
        divergence: (teacher, student, temperature, y) -> scalar, averaged over the positions that are scored.
        hits: (outputs, y) -> one number per scored unit [units], 1 at best; their mean is the task's accuracy.
        scores: outputs -> the values that an ensemble of exits averages, of the same shape; for `hits`.
        score: The name of its accuracy in tables and on axes, before "%".
        has_classes: Whether outputs [B, ..., C] are logits of classes, one of which is right.
    """

    name: str
    measure: str
    loss: Callable[[Tensor, Tensor], Tensor]
    divergence: Callable[[Tensor, Tensor, float, Tensor], Tensor]
    hits: Callable[[Tensor, Tensor], Tensor]
    scores: Callable[[Tensor], Tensor]
    score: str = "accuracy"
    has_classes: bool = False


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
    prediction = F.log_softmax(student / temperature, dim=-1)
    return F.kl_div(prediction, target, reduction="batchmean", log_target=True) * temperature**2


def _probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1)


# ---- classification: logits [B, C], y int64 [B] ------------------------------------------------------------------


classification = Task(
    "classification",
    "accuracy",
    loss=F.cross_entropy,
    divergence=lambda teacher, student, temperature, y: softened_kl(teacher, student, temperature),
    hits=lambda logits, y: logits.argmax(dim=-1) == y,
    scores=_probabilities,
    has_classes=True,
)


# ---- next token: logits [B, L, V], y int64 [B, L] ----------------------------------------------------------------


def _next_loss(logits: Tensor, y: Tensor) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=NOT_SCORED, reduction="sum")
    return total / (y != NOT_SCORED).sum().clamp_min(1)


def _next_divergence(teacher: Tensor, student: Tensor, temperature: float, y: Tensor) -> Tensor:
    scored = y != NOT_SCORED
    return softened_kl(teacher[scored], student[scored], temperature) if bool(scored.any()) else student.sum() * 0


next_token = Task(
    "next_token",
    "accuracy per token",
    loss=_next_loss,
    divergence=_next_divergence,
    hits=lambda logits, y: (logits.argmax(dim=-1) == y)[y != NOT_SCORED],
    scores=_probabilities,
    has_classes=True,
)


# ---- regression: outputs and y [B, C], y with mean 0 and variance 1 over the training data -----------------------


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error; of unlike shapes PyTorch would compare each output with each target.

    Raises:
        ModelError: The shapes differ.
    """
    if outputs.shape != y.shape:
        raise ModelError(
            f"the model gives outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(y.shape)}. Its last "
            "layer needs one output for each target."
        )
    return F.mse_loss(outputs, y)


regression = Task(
    "regression",
    "explained variance (R2)",
    loss=squared_error,
    divergence=lambda teacher, student, temperature, y: F.mse_loss(student, teacher.detach()),
    hits=lambda outputs, y: (1 - (outputs - y).square()).flatten(),
    scores=lambda outputs: outputs,
    score="R2",
)


# ---- multi-label: logits [B, C], y [B, C] of 0 and 1 -------------------------------------------------------------


def _label_divergence(teacher: Tensor, student: Tensor, temperature: float, y: Tensor) -> Tensor:
    """Return tau^2 * the mean over labels of KL(Bernoulli(teacher / tau) || Bernoulli(student / tau))."""
    t, s = teacher.detach() / temperature, student / temperature
    p = torch.sigmoid(t)
    kl = p * (F.logsigmoid(t) - F.logsigmoid(s)) + (1 - p) * (F.logsigmoid(-t) - F.logsigmoid(-s))
    return kl.mean() * temperature**2


multi_label = Task(
    "multi_label",
    "share of labels right",
    loss=F.binary_cross_entropy_with_logits,
    divergence=_label_divergence,
    hits=lambda logits, y: ((logits > 0) == (y > 0.5)).flatten(),
    scores=lambda logits: torch.sigmoid(logits) - 0.5,  # above zero where the label is likely, as logits are
)

_TASKS = {task.name: task for task in (classification, next_token, regression, multi_label)}


def get_task(name: str) -> Task:
    """Return the task of this name.

    Raises:
        ConfigError: There is none.
    """
    if name not in _TASKS:
        raise ConfigError(
            f'there is no task "{name}"; there are {", ".join(_TASKS)}.{did_you_mean(name, _TASKS)}', key="task"
        )
    return _TASKS[name]
