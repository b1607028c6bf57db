"""Sign flip: the update moves the other way, `scale` times as far (Li et al., RSA, AAAI 2019)."""

from functools import partial

import torch

from fleetfit.attacks.base import Attack, Scene
from fleetfit.core import Update
from fleetfit.errors import check_range


def sign_flip(scale: float = 10.0) -> Attack:
    """Make the attack.

    Args:
        scale: How many times as far, above 0.
    """
    check_range("attack.scale", scale, 0)
    return Attack(forge=partial(flip_update, scale=scale))


def flip_update(update: Update, scene: Scene, rng: torch.Generator, scale: float) -> Update:
    """Return sent - scale * (update - sent)."""
    return scene.move(update, -scale * scene.movement(update))
