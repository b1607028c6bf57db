"""Batches in a seeded order, the optimiser of local training, and its learning rate at each step."""

import inspect
import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fleetfit.errors import ConfigError, truncate
from fleetfit.training.local_model import LocalModel
from fleetfit.values import Local

Order = TypeVar("Order", Tensor, range)


def epochs(indices: Tensor, local: Local, rng: torch.Generator) -> Iterator[Iterator[Tensor]]:
    """Yield the batches of each local epoch, every epoch in a new order."""
    size = local.batch_size or len(indices)
    for _ in range(local.epochs):
        yield joined(indices[torch.randperm(len(indices), generator=rng)], size)


def joined(order: Order, size: int) -> Iterator[Order]:
    """Yield batches of `size`; a single last sample joins the batch before it, since batch norm cannot use it alone."""
    at, n = 0, len(order)
    while at < n:
        end = n if n - at - size == 1 else min(at + size, n)
        yield order[at:end]
        at = end


def _eager(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return an optimiser without what keeps PyTorch's compiler away from it: that takes two seconds to import."""
    return type(
        kind.__name__,
        (kind,),
        {
            "add_param_group": inspect.unwrap(kind.add_param_group),
            "step": torch.no_grad()(inspect.unwrap(kind.step)),
        },
    )


_KINDS: dict[str, Any] = {
    "sgd": _eager(torch.optim.SGD),
    "adam": _eager(torch.optim.Adam),
    "adamw": _eager(torch.optim.AdamW),
}


def optimiser_of(piece: LocalModel, local: Local) -> torch.optim.Optimizer:
    """Return a fresh optimiser of all that is trained, as one tensor: the fused kernel is one pass over it.

    Raises:
        ConfigError: There is no such optimiser.
    """
    if local.optimiser not in _KINDS:
        raise ConfigError(
            f"the optimiser must be one of {', '.join(_KINDS)}, got {truncate(repr(local.optimiser))}.",
            key="local.optimiser",
        )
    parameter = nn.Parameter(piece.trained)
    parameter.grad = piece.grad
    settings = {key: getattr(local, key) for key in local.own}
    found: torch.optim.Optimizer = _KINDS[local.optimiser]([parameter], fused=True, **settings)
    return found


def steps_of(local: Local, samples: int) -> list[int]:
    """Return the batch sizes of one epoch over so many samples, each a step."""
    return [len(batch) for batch in joined(range(samples), local.batch_size or samples)]


def step_count(local: Local, samples: int) -> int:
    """Return the steps of a whole training on so many samples."""
    steps = len(steps_of(local, samples)) * local.epochs
    return steps if local.max_steps is None else min(steps, local.max_steps)


def rate_at(step: int, local: Local, steps: int) -> float:
    """Return lr * (1 + cos(pi * step / steps)) / 2, the learning rate of a step counted from 0."""
    return local.lr * (1 + math.cos(math.pi * step / max(steps, 1))) / 2
