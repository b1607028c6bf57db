"""Noise: a random movement in place of the trained one, `scale` times as long."""

from functools import partial

import torch

from fleetfit.attacks.base import Attack, Scene
from fleetfit.core import Update
from fleetfit.errors import check_range


def noise(scale: float = 10.0) -> Attack:
    """Make the attack.

    Args:
        scale: How many times as long, above 0.
    """
    check_range("attack.scale", scale, 0)
    return Attack(forge=partial(send_noise, scale=scale))


def send_noise(update: Update, scene: Scene, rng: torch.Generator, scale: float) -> Update:
    """Return sent + a Gaussian movement of scale times the update's norm."""
    honest = scene.movement(update)
    noise = torch.randn(honest.shape, generator=rng)
    length = float(honest.double().norm()) / max(float(noise.double().norm()), 1e-30)
    return scene.move(update, scale * length * noise)
