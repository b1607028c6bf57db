"""Batches in a seeded order."""

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

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
