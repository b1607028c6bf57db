"""Krum: who has the nearest neighbours counts (Blanchard et al., NIPS 2017, multi-Krum).

For comparison with `outliers`. A client's score is the sum of its squared distances to its n - f - 2 nearest of the
round's n clients, f = share * n (rounded up) being the hostile ones expected; the n - f with the least scores count.
With unequal sub-models distances are over the elements of all sub-models of the round, the core: what somebody does
beyond it, Krum does not see. A tensor that no gradient reached on a client has not moved there, so that nobody makes
the core smaller by saying so. The proof asks for n > 2f + 2: a round to which fewer come back counts as it is. All
updates of a round are kept until the last has come.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fleetfit.errors import check_range
from fleetfit.method import Method, weigh_equally
from fleetfit.movements import Movements
from fleetfit.options._ordered import at_least
from fleetfit.training import one_thread
from fleetfit.values import Federation, Server, Update


def krum(share: float = 0.2) -> Method:
    """Make the option.

    Args:
        share: Of the round's clients that are expected to be hostile, above 0 and below 0.5; so many are left out.
    """
    check_range("method.plus.krum.share", share, 0, 0.5)
    return Method(receive=partial(received, share=share), weight=weigh_equally)


def received(federation: Federation, server: Server, updates: Sequence[Update], share: float) -> Iterable[Update]:
    """Return the updates with the least scores."""
    if not judges(len(updates), share):
        return updates
    hostile = at_least(share, len(updates))
    with one_thread():
        moves = Movements(federation.problem.layout, server, updates, whole_pieces=True)
        distances = squared_distances(moves, len(updates))
    if not bool(distances.any()):  # all updates are equal
        return updates
    order = scores(distances, len(updates) - hostile - 2).argsort(stable=True).tolist()
    admitted = set(order[: len(updates) - hostile])
    return [update for place, update in enumerate(updates) if place in admitted]


def judges(count: int, share: float = 0.2) -> bool:
    """Tell whether so many clients are enough."""
    return count > 2 * at_least(share, count) + 2


def scores(apart: Tensor, near: int) -> Tensor:
    """Return each client's sum of squared distances to its nearest others [K], of all squared distances [K, K]."""
    others = apart.clone().fill_diagonal_(float("inf"))
    return others.sort(1).values[:, :near].sum(1)


def squared_distances(moves: Movements, count: int) -> Tensor:
    """Return |d_i - d_j|^2 over what all cover, float64 [K, K]."""
    products = torch.zeros(count, count, dtype=torch.float64)
    for part in moves.chunks():
        if part.block == moves.everybody():
            order = torch.tensor(part.members).argsort()
            rows = part.rows[order].double()
            products += rows @ rows.T
    lengths = products.diagonal()
    return (lengths[:, None] + lengths[None] - 2 * products).clamp_min_(0)
