"""Min-max: as far from the mean as two honest updates lie apart (Shejwalkar and Houmansadr, NDSS 2021, AGR-agnostic).

Hostile clients collude: each sends m - gamma * s with mean m and standard deviation s of the updates of its own
sub-model, and the largest gamma for which no such update is farther away than two of them are from each other. With
fewer than two of a sub-model there is nothing to hide behind, and the client is honest.
"""

import math

import torch
from torch import Tensor

from fleetfit.attack import Attack, Scene
from fleetfit.values import Update


def min_max() -> Attack:
    """Make the attack."""
    return Attack(forge=farthest, together=True)


def farthest(update: Update, scene: Scene, rng: torch.Generator) -> Update:
    """Return sent + m - gamma * s."""
    alike = scene.round.alike(update.submodel)
    if len(alike) < 2:
        return update
    moves = torch.stack(alike)
    mean, deviation = moves.mean(0), moves.std(0)
    return scene.moved(update, mean - largest(moves, mean, -deviation) * deviation)


def largest(moves: Tensor, mean: Tensor, direction: Tensor) -> float:
    """Return the largest gamma with |mean + gamma * direction - d_i| <= max |d_i - d_j| for all i.

    Each i asks that gamma^2 |p|^2 + 2 gamma p.(m - d_i) + |m - d_i|^2 <= D^2: gamma is the least of the upper roots.

    Args:
        moves: d_i, [K, n].
        mean: m [n].
        direction: p [n].
    """
    moves, mean, direction = moves.double(), mean.double(), direction.double()
    far = max(float((moves - one).square().sum(1).max()) for one in moves)
    a = float(direction.square().sum())
    if a == 0:
        return 0.0
    apart = mean - moves
    b, c = apart @ direction, apart.square().sum(1) - far
    roots = [(-p + math.sqrt(max(0.0, p * p - a * q))) / a for p, q in zip(b.tolist(), c.tolist(), strict=True)]
    return max(0.0, min(roots))
