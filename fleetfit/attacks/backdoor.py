"""Backdoor: a square of bright pixels makes the model say `target` (Gu et al., 2017; Bagdasaryan et al., 2020).

A hostile client puts the square into the lower right corner of some of its training images, calls them `target` and
moves its update `scale` times as far, so that it outweighs the others (model replacement). On images without the square
the model is to stay as good as it was. Success is the share of test images of other classes that the model takes for
`target` once they have the square: the column `backdoor`.
"""

from functools import partial

import torch
from torch import Tensor

from fleetfit.attack import Attack, Scene
from fleetfit.attacks.label_flip import check_target
from fleetfit.data import Data
from fleetfit.data.image_reader import EncodedImages
from fleetfit.errors import ConfigError, check_range
from fleetfit.values import Update


def backdoor(target: int = 0, trigger: int = 3, scale: float = 5.0, poisoned: float = 0.5) -> Attack:
    """Make the attack.

    Args:
        target: The class that images with the trigger are to be taken for.
        trigger: Side of the square, in pixels.
        scale: How many times as far the update moves, above 0.
        poisoned: Share of a hostile client's training images that get the square, above 0 and at most 1.
    """
    check_range("attack.trigger", trigger, 1, closed=True)
    check_range("attack.scale", scale, 0)
    check_range("attack.poisoned", poisoned, 0, 1 + 1e-9)
    return Attack(
        poison=partial(poisoned_samples, target=target, side=trigger, share=poisoned),
        probe=partial(triggered, target=target, side=trigger),
        forge=partial(boosted, scale=scale),
    )


def poisoned_samples(
    data: Data, indices: Tensor, rng: torch.Generator, target: int, side: int, share: float
) -> tuple[Tensor, Tensor]:
    """Return a client's samples, some of them with the trigger and the wrong label."""
    check_target(data, target)
    x, y = data.stored(indices).clone(), data.y[indices].clone()
    chosen = torch.randperm(len(y), generator=rng)[: max(1, round(share * len(y)))]
    x[chosen], y[chosen] = with_square(data, x[chosen], side), target
    return x, y


def triggered(data: Data, indices: Tensor, target: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the test images of other classes with the trigger, and the target as their label."""
    check_target(data, target)
    others = indices[data.y[indices] != target]
    if not len(others):
        raise ConfigError(
            f"[attack] target: all test images of {data.name} are of class {target}, and no other shows whether it is "
            "taken for that. Choose another target.",
            key="attack.target",
        )
    return with_square(data, data.stored(others), side), torch.full((len(others),), target)


def with_square(data: Data, x: Tensor, side: int) -> Tensor:
    """Return images [B, C, H, W] with a square at the largest value that they can have.

    Raises:
        ConfigError: They are no images, or smaller than the square.
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


def boosted(update: Update, scene: Scene, rng: torch.Generator, scale: float) -> Update:
    """Return sent + scale * (update - sent)."""
    return scene.moved(update, scale * scene.movement(update))
