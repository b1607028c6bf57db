"""Noise: a random movement in place of the trained one, `scale` times as long."""

from functools import partial

import torch

from fleetfit.attack import Attack, Scene
from fleetfit.errors import check_range
from fleetfit.values import Update


def noise(scale: float = 10.0) -> Attack:
    """Make the attack.

    Args:
        scale: How many times as long, above 0.
    """
    check_range("attack.scale", scale, 0)
    return Attack(forge=partial(random_movement, scale=scale))


def random_movement(update: Update, scene: Scene, rng: torch.Generator, scale: float) -> Update:
    """Return sent + a Gaussian movement of scale times the update's norm."""
    honest = scene.movement(update)
    drawn = torch.randn(honest.shape, generator=rng)
    length = float(honest.double().norm()) / max(float(drawn.double().norm()), 1e-30)
    return scene.moved(update, scale * length * drawn)
