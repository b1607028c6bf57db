"""Losses of models with exits, as pure functions: ScaleFL Eq. 5, HeteroFL's masked CE, DepthFL's and ReeFL's.

Differs from the paper: the printed weights i / (l(l+1)) of Eq. 5 sum to one half, so that a level-1 client would
train half a cross-entropy while its baselines train a whole one; the default is 2i / (l(l+1)), which sums to one.
`printed=True` takes the printed weights. The teacher is detached, and the last exit has no divergence from itself.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fleetfit.core.tasks import Task
from fleetfit.factories import declare_unused

declare_temperature = declare_unused(
    "temperature", task="regression", reason="a regression compares outputs by their squared difference"
)
"""Decorates the factory of a method whose parameter `temperature` softens the divergences of a task."""


def exit_weights(exits: int, printed: bool = False) -> tuple[float, ...]:
    """Return the weight of each exit's loss, 2i / (l(l+1)) for i = 1..l, or half of it as printed in Eq. 5."""
    scale = (1 if printed else 2) / (exits * (exits + 1))
    return tuple(i * scale for i in range(1, exits + 1))


def self_distillation(
    logits: Sequence[Tensor],
    y: Tensor,
    task: Task,
    beta: float,
    temperature: float,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Return the loss of all exits with self-distillation from the last one (Eq. 5).

    L = sum_i w_i * (beta * KL(exit i, exit l) + CE(exit i, y)), with KL for i < l only.

    Args:
        logits: Per exit [B, C], shallow to deep.
        y: Labels [B].
        task: Gives loss and divergence.
        beta: Weight of the distillation, at least 0.
        temperature: tau > 0.
        weights: w_i, by default `exit_weights`.
    """
    weights = exit_weights(len(logits)) if weights is None else weights
    total = weights[-1] * task.loss(logits[-1], y)
    for weight, student in zip(weights[:-1], logits[:-1], strict=True):
        term = task.loss(student, y)
        if beta:
            term = term + beta * task.divergence(logits[-1], student, temperature, y)
        total = total + weight * term
    return total


def masked_cross_entropy(present: Tensor, task: Task) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a cross-entropy in which the logits of absent classes are set to 0 (HeteroFL).

    Args:
        present: Bool [C], the classes that the client has.
        task: Gives the cross-entropy.
    """

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return task.loss(logits.masked_fill(~present.to(logits.device), 0.0), y)

    return loss


def mutual_distillation(logits: Sequence[Tensor], y: Tensor, task: Task, share: float, temperature: float) -> Tensor:
    """Return the loss of all exits with distillation from every exit to every other (DepthFL, ICLR 2023).

    L = sum_i CE(exit i, y) + share / (l - 1) * sum_i sum_{j != i} KL(exit j, exit i), the teachers detached.

    Args:
        logits: Per exit [B, C], shallow to deep.
        y: Labels [B].
        task: Gives loss and divergence.
        share: Weight of the distillation, at least 0.
        temperature: tau > 0.
    """
    total = torch.stack([task.loss(z, y) for z in logits]).sum()
    if share and len(logits) > 1:
        pairs = [task.divergence(teacher, student, temperature, y) for i, student in enumerate(logits)
                 for j, teacher in enumerate(logits) if i != j]  # fmt: skip
        total = total + share / (len(logits) - 1) * torch.stack(pairs).sum()
    return total


def best_exit_distillation(
    logits: Sequence[Tensor], losses: Tensor, teacher: Tensor, y: Tensor, task: Task, share: float, temperature: float
) -> Tensor:
    """Return the loss of all exits with distillation from one of them (ReeFL Eqs. 5 and 6).

    L = sum_e CE_e + share * sum_{e != teacher} KL(exit teacher, exit e) tau^2, the teacher detached.

    Args:
        logits: Per exit [B, C], shallow to deep.
        losses: Per exit its loss [E].
        teacher: The teacher's index, a tensor [] of whole numbers, so that the device is not synchronized.
        y: Labels [B].
        task: Gives the divergence.
        share: Weight of the distillation, at least 0.
        temperature: tau > 0.
    """
    total = losses.sum()
    if share and len(logits) > 1:
        best = torch.stack([z.detach() for z in logits]).index_select(0, teacher[None])[0]
        parts = torch.stack([task.divergence(best, z, temperature, y) for z in logits])
        others = torch.arange(len(logits), device=parts.device) != teacher
        total = total + share * (parts * others).sum()
    return total
