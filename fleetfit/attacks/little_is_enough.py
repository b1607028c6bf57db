"""A little is enough: z standard deviations beside the mean, where honest updates lie (Baruch et al., NeurIPS 2019).

Hostile clients collude: each sends mean - z * deviation of every element, over all who trained that element in the
round. With unequal sub-models mean and deviation of an element are those of its coverers.
"""

from functools import partial

import torch

from fleetfit.attack import Attack, Scene
from fleetfit.errors import check_range
from fleetfit.values import Update


def little_is_enough(z: float = 1.5) -> Attack:
    """Make the attack.

    Args:
        z: Standard deviations, above 0. What stays unseen depends on how many there are; the paper has 0.3 to 1.5.
    """
    check_range("attack.z", z, 0)
    return Attack(forge=partial(shifted, z=z), together=True)


def shifted(update: Update, scene: Scene, rng: torch.Generator, z: float) -> Update:
    """Return sent + mean - z * deviation."""
    mean, deviation = scene.round.moments_of(update.submodel)
    return scene.moved(update, mean - z * deviation)
