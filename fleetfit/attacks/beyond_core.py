"""Beyond the core: honest in the smallest level's sub-model, hostile in the elements beyond it.

The core is the smallest level's sub-model. A hostile client's elements beyond it move the other way, `scale` times as
far; a client of the smallest level has none. A defense that compares clients in the core only does not detect it.
"""

import torch

from fleetfit.attacks.base import Attack, Scene
from fleetfit.core import Update
from fleetfit.errors import check_range


def beyond_core(scale: float = 10.0) -> Attack:
    """Make the attack.

    Args:
        scale: How many times as far, above 0.
    """
    check_range("attack.scale", scale, 0)

    def flip_beyond_core(update: Update, scene: Scene, rng: torch.Generator) -> Update:
        movement = scene.movement(update)
        return scene.move(update, torch.where(scene.mask(update, scene.core), movement, -scale * movement))

    return Attack(forge=flip_beyond_core)
