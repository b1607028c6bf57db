"""Running a batch with early stopping: who has left is not computed any more."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fleetfit.errors import ConfigError, RunError
from fleetfit.inference.stopping import Policy
from fleetfit.layout import with_segments


@dataclass(frozen=True, eq=False)
class Stopped:
    """Predictions of samples that left as soon as they could.

    Attributes:
        logits: Of the exit where each left [B, classes].
        exits: Which exit that was, from 0, int64 [B].
    """

    logits: Tensor
    exits: Tensor


@torch.no_grad()
def stop_early(module: nn.Module, x: Tensor, policy: Policy) -> Stopped:
    """Run a batch segment by segment, and go on with those samples only that do not leave.

    Args:
        module: In eval mode, with `start`, `segment` and `head`.
        x: Samples [B, ...].
        policy: When a sample leaves; one threshold for each exit.

    Raises:
        ModelError: The module cannot be run segment by segment.
        ConfigError: The policy is for another number of exits.
    """
    parts = with_segments(module)
    last = len(parts.exits) - 1
    if len(policy.thresholds) != last + 1:
        raise ConfigError(f"the policy has {len(policy.thresholds)} thresholds, and the model {last + 1} exits.")
    carry = parts.start(x)
    here = torch.arange(len(x), device=x.device)
    logits, exits = None, torch.full((len(x),), last, device=x.device)
    for i in range(last + 1):
        carry = parts.segment(i, carry)
        z = parts.head(i, carry)
        logits = z.new_empty(len(x), z.shape[-1]) if logits is None else logits
        logits[here] = z
        leaves = policy.leaves(i, z) if i < last else torch.ones(len(z), dtype=torch.bool, device=z.device)
        exits[here[leaves]] = i
        stays = ~leaves
        if not bool(stays.any()):
            break
        here, carry = here[stays], tree_map(_kept(stays, len(z)), carry)
    if logits is None:
        raise RunError("the model has no exits.")
    return Stopped(logits, exits)


def _kept(stays: Tensor, count: int) -> Callable[[Any], Any]:
    def kept(part: Any) -> Any:
        return part[stays] if isinstance(part, Tensor) and part.dim() and len(part) == count else part

    return kept
