"""Inner product: against the mean of all updates, so that the step points away from it (Xie et al., UAI 2020).

Hostile clients collude: each sends -scale times the mean of every element, over the clients that trained it. A
small scale is hard to tell from honest updates; above (honest / hostile clients) a plain mean goes backwards.
"""

import torch

from fleetfit.attacks.base import Attack, Scene
from fleetfit.core import Update
from fleetfit.errors import check_range


def inner_product(scale: float = 5.0) -> Attack:
    """Make the attack.

    Args:
        scale: How many times the mean, above 0.
    """
    check_range("attack.scale", scale, 0)

    def oppose_mean(update: Update, scene: Scene, rng: torch.Generator) -> Update:
        mean, _ = scene.round.get_moments(update.submodel)
        return scene.move(update, -scale * mean)

    return Attack(forge=oppose_mean, colludes=True)
