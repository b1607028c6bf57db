"""Min-max: as far from the mean as two honest updates are apart (Shejwalkar and Houmansadr, NDSS 2021, AGR-agnostic).

Hostile clients collude: each sends m - gamma * s with mean m and standard deviation s of the updates of its own
sub-model, and the largest gamma for which no such update is farther away than two of them are from each other. With
fewer than two updates of a sub-model the client is honest.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fleetfit.attacks.base import Attack, Scene
from fleetfit.core import Update

_CHUNK = 1 << 18  # elements


def min_max() -> Attack:
    """Make the attack."""
    return Attack(forge=move_to_limit, colludes=True)


def move_to_limit(update: Update, scene: Scene, rng: torch.Generator) -> Update:
    """Return sent + m - gamma * s."""
    movements = [movement for other, movement in scene.round.moves if other.submodel == update.submodel]
    cache = scene.round.cache
    if len(movements) < 2:
        return update
    if update.submodel not in cache:  # it is the same for all hostile clients
        mean, deviation, products, along = compute_products(movements)
        gamma = find_largest_gamma(products, along, float(deviation.double().square().sum()))
        cache[update.submodel] = mean.sub_(deviation.mul_(gamma))
    return scene.move(update, cache[update.submodel])


def compute_products(moves: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the terms of the bound, computed chunk by chunk.

    Args:
        moves: d_i, each [n].

    Returns:
        Mean m and standard deviation s [n]; all products d_i.d_j and -s.d_i in float64, [K, K] and [K].
    """
    count, size = len(moves), moves[0].numel()
    mean, deviation = torch.empty(size), torch.empty(size)
    products, along = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for start in range(0, size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        rows = torch.stack([move[chunk] for move in moves]).double()
        std = rows.std(0)
        mean[chunk], deviation[chunk] = rows.mean(0), std
        products += rows @ rows.T
        along -= rows @ std
    return mean, deviation, products, along


def find_largest_gamma(products: Tensor, along: Tensor, length: float) -> float:
    """Return the largest gamma with |m + gamma * p - d_i| <= max |d_i - d_j| for all i, m being the mean of all d_i.

    For each i, gamma^2 |p|^2 + 2 gamma p.(m - d_i) + |m - d_i|^2 <= D^2 must hold: gamma is the least upper root.

    Args:
        products: d_i.d_j, float64 [K, K].
        along: p.d_i, float64 [K].
        length: |p|^2.
    """
    if length == 0:
        return 0.0
    own = products.diagonal()
    far = float((own[:, None] + own[None] - 2 * products).max())
    b = along.mean() - along
    c = products.mean() - 2 * products.mean(1) + own - far
    roots = [
        (-p + math.sqrt(max(0.0, p * p - length * q))) / length for p, q in zip(b.tolist(), c.tolist(), strict=True)
    ]
    return max(0.0, min(roots))
