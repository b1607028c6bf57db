"""Sign flip: the update moves the other way, `scale` times as far (Li et al., RSA, AAAI 2019)."""

from fleetfit.attacks.base import Attack
from fleetfit.errors import check_range


def sign_flip(scale: float = 10.0) -> Attack:
    """Make the attack.

    Args:
        scale: How many times as far, above 0.
    """
    check_range("attack.scale", scale, 0)
    return Attack(forge=lambda update, scene, rng: scene.move(update, -scale * scene.movement(update)))
