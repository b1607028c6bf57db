"""FedAvgM: momentum on the server (Hsu, Qi and Brown, 2019).

v <- beta v + (mean - x);  x <- x + lr v, for the elements that somebody trained in the round. An element that nobody
trained keeps its value and its momentum.
"""

from collections.abc import Sequence
from functools import partial

from fleetfit.aggregate import Aggregate
from fleetfit.errors import check_range
from fleetfit.method import Method
from fleetfit.options._covered import Movement
from fleetfit.values import Failure, Federation, Server, Update


def fedavgm(momentum: float = 0.9, lr: float = 1.0) -> Method:
    """Make the option.

    Args:
        momentum: How much of the last movement is kept (beta), in [0, 1); 0 with lr 1 is the plain mean, bit for bit.
        lr: The server's learning rate, above 0.
    """
    check_range("momentum", momentum, 0, 1, closed=True)
    check_range("lr", lr, 0)
    return Method(step=partial(step, momentum=momentum, lr=lr))


def step(
    federation: Federation,
    server: Server,
    aggregate: Aggregate,
    reports: Sequence[Update | Failure],
    momentum: float,
    lr: float,
) -> Server:
    """Move by the momentum."""
    found = Movement(server, aggregate)
    before = found.remembered("velocity")
    velocity = momentum * before + (found.mean - found.old)
    new = found.mean + momentum * before if lr == 1 else found.old + lr * velocity
    return found.after(new, velocity=(velocity, before))
