"""Backdoor: a square of bright pixels makes the model predict `target` (Gu et al., 2017; Bagdasaryan et al., 2020).

A hostile client puts the square into the lower right corner of some of its training images, labels them `target` and
moves its update `scale` times as far, so that it outweighs the others (model replacement). Success is the share of test
images of other classes with the square that the model classifies as `target`: the column `backdoor`.
"""

from functools import partial

import torch
from torch import Tensor

from fleetfit.attacks.base import Attack
from fleetfit.attacks.label_flip import check_target
from fleetfit.data import Data
from fleetfit.data.image_reader import EncodedImages
from fleetfit.errors import ConfigError, check_range


def backdoor(target: int = 0, trigger: int = 3, scale: float = 5.0, poisoned: float = 0.5) -> Attack:
    """Make the attack.

    Args:
        target: The class that the model should predict for images with the trigger.
        trigger: Side of the square, in pixels.
        scale: How many times as far the update moves, above 0.
        poisoned: Share of a hostile client's training images that get the square, above 0 and at most 1.
    """
    check_range("attack.trigger", trigger, 1, closed=True)
    check_range("attack.scale", scale, 0)
    check_range("attack.poisoned", poisoned, 0, 1 + 1e-9)
    return Attack(
        poison=partial(poison_samples, target=target, side=trigger, share=poisoned),
        probe=partial(make_probe, target=target, side=trigger),
        forge=lambda update, scene, rng: scene.move(update, scale * scene.movement(update)),
    )


def poison_samples(
    data: Data, indices: Tensor, rng: torch.Generator, target: int, side: int, share: float
) -> tuple[Tensor, Tensor]:
    """Return a client's samples, some of them with the trigger and the wrong label."""
    check_target(data, target)
    x, y = data.stored(indices).clone(), data.y[indices].clone()
    chosen = torch.randperm(len(y), generator=rng)[: max(1, round(share * len(y)))]
    x[chosen], y[chosen] = add_square(data, x[chosen], side), target
    return x, y


def make_probe(data: Data, indices: Tensor, target: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the test images of other classes with the trigger, and the target as their label."""
    check_target(data, target)
    others = indices[data.y[indices] != target]
    if not len(others):
        raise ConfigError(
            f"[attack] target: all test images of {data.name} are of class {target}, so success cannot be "
            "measured. Choose another target.",
            key="attack.target",
        )
    return add_square(data, data.stored(others), side), torch.full((len(others),), target)


def add_square(data: Data, x: Tensor, side: int) -> Tensor:
    """Return images [B, C, H, W] with a square of the largest value that they can have.

    Raises:
        ConfigError: The samples are not images, or are smaller than the square.
    """
    if x.ndim != 4 or data.vocabulary:
        raise ConfigError(f"[attack] kind: a backdoor is a square in images; {data.name} has none.", key="attack.kind")
    if side >= min(x.shape[-2:]):
        size = "x".join(map(str, x.shape[-2:]))
        raise ConfigError(
            f"[attack] trigger: the images of {data.name} are {size}, got a square of {side} pixels.",
            key="attack.trigger",
        )
    largest = 255 if x.dtype == torch.uint8 else float(x.max() if isinstance(data.x, EncodedImages) else data.x.max())
    marked = x.clone()
    marked[..., -side:, -side:] = largest
    return marked
