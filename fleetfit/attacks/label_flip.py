"""Label flip: hostile clients train on wrong labels (Biggio et al., ICML 2012; Tolpegin et al., ESORICS 2020).

Class y becomes C - 1 - y, or all samples get the label of one class. The update is that of this training.
"""

from functools import partial

import torch
from torch import Tensor

from fleetfit.attacks.base import Attack
from fleetfit.data import Data
from fleetfit.errors import ConfigError


def label_flip(target: int | None = None) -> Attack:
    """Make the attack.

    Args:
        target: The label of all samples; by default class y gets the label C - 1 - y.
    """
    return Attack(poison=partial(flip_labels, target=target))


def flip_labels(data: Data, indices: Tensor, rng: torch.Generator, target: int | None) -> tuple[Tensor, Tensor]:
    """Return the samples with wrong labels."""
    check_target(data, 0 if target is None else target)
    x, y = data.stored(indices), data.y[indices]
    return x, data.classes - 1 - y if target is None else torch.full_like(y, target)


def check_target(data: Data, target: int) -> None:
    """Check that a class is one of the data's.

    Raises:
        ConfigError: It is not, or the task is not a classification.
    """
    if data.task != "classification":
        raise ConfigError(
            f"[attack] kind: this attack needs classes; the task of {data.name} is {data.task}.", key="attack.kind"
        )
    if not 0 <= target < data.classes:
        raise ConfigError(
            f"[attack] target: {data.name} has classes 0 to {data.classes - 1}, got {target}.",
            key="attack.target",
        )
