"""False samples: clients say that they have more samples than they have, and so weigh more."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fleetfit.attack import Attack, Scene
from fleetfit.errors import check_range
from fleetfit.values import Clients, Update


def false_samples(scale: float = 100.0) -> Attack:
    """Make the attack.

    Args:
        scale: How many times as many, above 1.
    """
    check_range("attack.scale", scale, 1, 1e6)
    return Attack(tell=partial(registered, scale=scale), forge=partial(counted, scale=scale))


def registered(clients: Clients, hostile: np.ndarray, scale: float) -> Clients:
    """Return what is told of the numbers of samples."""
    counts = clients.num_examples.copy()
    counts[hostile] = (counts[hostile] * scale).astype(counts.dtype)
    return replace(clients, num_examples=counts)


def counted(update: Update, scene: Scene, rng: torch.Generator, scale: float) -> Update:
    """Return the update with as many samples as were told."""
    return replace(update, num_examples=int(update.num_examples * scale))
