"""Beyond the core: honest where everybody looks, hostile in what only larger levels train.

The core is the smallest level's sub-model. What a hostile client has beyond it moves the other way, `scale` times as
far; a client of the smallest level has nothing beyond it. A defence that compares clients by what all train sees
nothing of it.
"""

from functools import partial

import torch

from fleetfit.attack import Attack, Scene
from fleetfit.errors import check_range
from fleetfit.values import Update


def beyond_core(scale: float = 10.0) -> Attack:
    """Make the attack.

    Args:
        scale: How many times as far, above 0.
    """
    check_range("attack.scale", scale, 0)
    return Attack(forge=partial(flipped_beyond, scale=scale))


def flipped_beyond(update: Update, scene: Scene, rng: torch.Generator, scale: float) -> Update:
    """Return sent + movement in the core, sent - scale * movement beyond it."""
    movement = scene.movement(update)
    return scene.moved(update, torch.where(scene.inside(update, scene.core), movement, -scale * movement))
