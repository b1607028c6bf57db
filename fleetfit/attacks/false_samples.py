"""False samples: clients report more samples than they have, and so weigh more."""

from dataclasses import replace
from functools import partial

import numpy as np

from fleetfit.attacks.base import Attack
from fleetfit.core import Clients
from fleetfit.errors import check_range


def false_samples(scale: float = 100.0) -> Attack:
    """Make the attack.

    Args:
        scale: How many times as many, above 1.
    """
    check_range("attack.scale", scale, 1, 1e6)
    return Attack(
        misreport=partial(report_more_samples, scale=scale),
        forge=lambda update, scene, rng: replace(update, num_examples=int(update.num_examples * scale)),
    )


def report_more_samples(clients: Clients, hostile: np.ndarray, scale: float) -> Clients:
    """Return the clients with more samples for hostile ones."""
    counts = clients.num_examples.copy()
    counts[hostile] = (counts[hostile] * scale).astype(counts.dtype)
    return replace(clients, num_examples=counts)
