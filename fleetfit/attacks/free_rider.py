"""Free rider: sends back what it got, and says that it has trained (Lin et al., 2019; Fraboni et al., AISTATS 2021)."""

from functools import partial

import torch

from fleetfit.attack import Attack, Scene
from fleetfit.errors import check_range
from fleetfit.values import Update


def free_rider(scale: float = 0.0) -> Attack:
    """Make the attack.

    Args:
        scale: Noise that hides it: its norm as a share of what an honest update would have moved; 0 for none.
    """
    check_range("attack.scale", scale, 0, closed=True)
    return Attack(forge=partial(unmoved, scale=scale))


def unmoved(update: Update, scene: Scene, rng: torch.Generator, scale: float) -> Update:
    """Return what was sent, perhaps with a little noise."""
    honest = scene.movement(update)
    if not scale:
        return scene.moved(update, torch.zeros_like(honest))
    drawn = torch.randn(honest.shape, generator=rng)
    return scene.moved(update, scale * float(honest.norm()) / max(float(drawn.norm()), 1e-30) * drawn)
