"""Krum: the updates with the nearest neighbors count (Blanchard et al., NIPS 2017, multi-Krum).

For comparison with `outliers`. A client's score is the sum of its squared distances to its n - f - 2 nearest of the
round's n clients, f = fraction * n (rounded up) being the hostile ones expected; the n - f with the least scores count.
With unequal sub-models distances are over the elements that all sub-models of the round have, the core: Krum does not
see elements beyond it. A tensor that no gradient reached on a client has not moved there, so a client cannot make the
core smaller by declaring tensors untrained. The proof needs n > 2f + 2: a smaller round counts as it is. All updates of
a round are kept until the last has come.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fleetfit.core import Federation, Server, Update
from fleetfit.errors import check_range
from fleetfit.hooks import Method, weigh_equally
from fleetfit.hooks.movements import Movements
from fleetfit.machine import use_threads
from fleetfit.options._order_statistics import ceil_share


def krum(fraction: float = 0.2) -> Method:
    """Make the option.

    Args:
        fraction: Fraction of the round's clients that are expected to be hostile, and left out; above 0 and below 0.5.
    """
    check_range("method.options.krum.fraction", fraction, 0, 0.5)
    return Method(filter_updates=partial(select_updates, fraction=fraction), weigh=weigh_equally)


def select_updates(
    federation: Federation, server: Server, updates: Sequence[Update], fraction: float
) -> Iterable[Update]:
    """Return the updates with the least scores."""
    if not is_large_enough(len(updates), fraction):
        return updates
    hostile = ceil_share(fraction, len(updates))
    with use_threads(1):
        movements = Movements(federation.problem.layout, server, updates, whole_pieces=True)
        distances = compute_squared_distances(movements, len(updates))
    if not bool(distances.any()):  # all updates are equal
        return updates
    order = compute_scores(distances, len(updates) - hostile - 2).argsort(stable=True).tolist()
    admitted = set(order[: len(updates) - hostile])
    return [update for index, update in enumerate(updates) if index in admitted]


def is_large_enough(count: int, fraction: float = 0.2) -> bool:
    """Return whether a round of this many clients is judged."""
    return count > 2 * ceil_share(fraction, count) + 2


def compute_scores(distances: Tensor, near: int) -> Tensor:
    """Return each client's sum of squared distances to its `near` nearest others [K], from all of them [K, K]."""
    others = distances.clone().fill_diagonal_(float("inf"))
    return others.sort(1).values[:, :near].sum(1)


def compute_squared_distances(movements: Movements, count: int) -> Tensor:
    """Return |d_i - d_j|^2 over the elements that all cover, float64 [K, K]."""
    products = torch.zeros(count, count, dtype=torch.float64)
    for part in movements.chunks():
        if part.block == movements.full_block:
            order = torch.tensor(part.members).argsort()
            rows = part.rows[order].double()
            products += rows @ rows.T
    lengths = products.diagonal()
    return (lengths[:, None] + lengths[None] - 2 * products).clamp_min_(0)
