"""A little is enough: z standard deviations from the mean, as far as honest updates (Baruch et al., NeurIPS 2019).

Hostile clients collude: each sends mean - z * deviation of every element, over the clients that trained that element in
the round.
"""

import torch

from fleetfit.attacks.base import Attack, Scene
from fleetfit.core import Update
from fleetfit.errors import check_range


def little_is_enough(z: float = 1.5) -> Attack:
    """Make the attack.

    Args:
        z: Standard deviations, above 0. The paper has 0.3 to 1.5, depending on the number of attackers.
    """
    check_range("attack.z", z, 0)

    def shift_mean(update: Update, scene: Scene, rng: torch.Generator) -> Update:
        mean, deviation = scene.round.get_moments(update.submodel)
        return scene.move(update, mean - z * deviation)

    return Attack(forge=shift_mean, colludes=True)
