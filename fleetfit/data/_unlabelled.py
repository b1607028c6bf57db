"""Data without labels, for training on the server."""

import dataclasses

import torch

from fleetfit.data.dataset import Data
from fleetfit.errors import DataError
from fleetfit.seeds import torch_rng

HELD_OUT = 0.1


def unlabelled(data: Data, seed: int = 0) -> Data:
    """Return the training and validation samples of a data set without their labels.

    Where it has no validation samples, a tenth of the training samples is held out at random. Each label is 0, the same
    one for all: nothing can be learned from it.

    Args:
        data: A data set of any task.
        seed: Of what is held out.

    Raises:
        DataError: There is nothing to train on.
    """
    train, held = data.split("train"), data.split("validation")
    if not len(train):
        raise DataError(f"{data.name} has no training samples, so the server cannot train on it.")
    if not len(held):
        order = train[torch.randperm(len(train), generator=torch_rng(seed, "held out"))]
        count = int(len(train) * HELD_OUT)
        train, held = order[count:].sort().values, order[:count].sort().values
    return dataclasses.replace(
        data,
        y=torch.zeros((), dtype=torch.int64).expand(len(data.x)),
        splits={"train": train, "validation": held},
        classes=1,
        class_names=(),
        groups=None,
        task="classification",
    )
