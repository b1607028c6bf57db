"""False samples: clients report more samples than they have, and so weigh more."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fleetfit.attacks.base import Attack, Scene
from fleetfit.core import Clients, Update
from fleetfit.errors import check_range


def false_samples(scale: float = 100.0) -> Attack:
    """Make the attack.

    Args:
        scale: How many times as many, above 1.
    """
    check_range("attack.scale", scale, 1, 1e6)
    return Attack(misreport=partial(report_more_samples, scale=scale), forge=partial(claim_samples, scale=scale))


def report_more_samples(clients: Clients, hostile: np.ndarray, scale: float) -> Clients:
    """Return the clients with more samples for hostile ones."""
    counts = clients.num_examples.copy()
    counts[hostile] = (counts[hostile] * scale).astype(counts.dtype)
    return replace(clients, num_examples=counts)


def claim_samples(update: Update, scene: Scene, rng: torch.Generator, scale: float) -> Update:
    """Return the update with the reported number of samples."""
    return replace(update, num_examples=int(update.num_examples * scale))
