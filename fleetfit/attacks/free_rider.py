"""Free rider: sends back the state that it received, as if trained (Lin et al., 2019; Fraboni et al., AISTATS 2021)."""

from functools import partial

import torch

from fleetfit.attacks.base import Attack, Scene
from fleetfit.core import Update
from fleetfit.errors import check_range


def free_rider(scale: float = 0.0) -> Attack:
    """Make the attack.

    Args:
        scale: Noise that hides it: its norm as a share of what an honest update would have moved; 0 for none.
    """
    check_range("attack.scale", scale, 0, closed=True)
    return Attack(forge=partial(send_back, scale=scale))


def send_back(update: Update, scene: Scene, rng: torch.Generator, scale: float) -> Update:
    """Return the state that was sent, perhaps with a little noise."""
    honest = scene.movement(update)
    if not scale:
        return scene.move(update, torch.zeros_like(honest))
    noise = torch.randn(honest.shape, generator=rng)
    return scene.move(update, scale * float(honest.norm()) / max(float(noise.norm()), 1e-30) * noise)
