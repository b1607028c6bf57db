"""Batches in a seeded order, and the number of steps of local training."""

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from fleetfit.core import Device, Local

Order = TypeVar("Order", Tensor, range)
_LOGITS_BYTES = 200_000_000


def iter_batches(order: Order, size: int) -> Iterator[Order]:
    """Yield batches of `size`. A single last sample joins the batch before it: batch norm cannot use it alone."""
    start, n = 0, len(order)
    while start < n:
        end = n if n - start - size == 1 else min(start + size, n)
        yield order[start:end]
        start = end


def limit_batch(size: int, device: Device, exits: int) -> int:
    """Return a batch size for passes without gradients: at most `size`, and logits with their scores of 200 MB.

    It is at least one sample, however large its logits are.

    Args:
        size: Samples per pass.
        device: It has the data.
        exits: The exits that are read.
    """
    data = device.data
    places = data.y[:1].numel() if device.problem.task.has_classes else 1  # logits of a sample: [places, classes]
    bytes_each = 4 * places * data.classes * (3 * exits + 2)  # scores of all exits, twice; their mean; an offset
    return max(1, min(size, _LOGITS_BYTES // max(1, bytes_each)))


def iter_epochs(indices: Tensor, local: Local, rng: torch.Generator) -> Iterator[tuple[Tensor, bool]]:
    """Yield the batches of all local epochs, each with whether it ends its epoch. Each epoch has a new order."""
    for _ in range(local.epochs):
        left = len(indices)
        for batch in iter_batches(indices[torch.randperm(left, generator=rng)], local.count_batch(left)):
            left -= len(batch)
            yield batch, not left


def compute_batch_sizes(local: Local, samples: int) -> list[int]:
    """Return the batch sizes of one epoch; each batch is a step."""
    return [len(batch) for batch in iter_batches(range(samples), local.count_batch(samples))]


def count_steps(local: Local, samples: int) -> int:
    """Return the steps of a whole training on a number of samples."""
    steps = len(compute_batch_sizes(local, samples)) * local.epochs
    return steps if local.max_steps is None else min(steps, local.max_steps)
