"""Label flip: hostile clients train on wrong labels (Biggio et al., ICML 2012; Tolpegin et al., ESORICS 2020).

Class y becomes C - 1 - y, or all samples become those of one class. What is sent is what that training gives.
"""

from functools import partial

import torch
from torch import Tensor

from fleetfit.attack import Attack
from fleetfit.data import Data
from fleetfit.errors import ConfigError


def label_flip(target: int | None = None) -> Attack:
    """Make the attack.

    Args:
        target: The class that all samples are said to be of; by default class y is said to be C - 1 - y.
    """
    return Attack(poison=partial(flipped, target=target))


def flipped(data: Data, indices: Tensor, rng: torch.Generator, target: int | None) -> tuple[Tensor, Tensor]:
    """Return the samples with wrong labels."""
    check_target(data, 0 if target is None else target)
    x, y = data.stored(indices), data.y[indices]
    return x, data.classes - 1 - y if target is None else torch.full_like(y, target)


def check_target(data: Data, target: int) -> None:
    """Refuse a class that the data do not have.

    Raises:
        ConfigError: It is none, or labels are no classes.
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
