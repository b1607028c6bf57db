"""FedAvgM: momentum on the server (Hsu, Qi and Brown, 2019).

v <- beta v + (mean - x);  x <- x + lr v, for the elements that a client trained in the round. The others keep value and
momentum.
"""

from functools import partial

from fleetfit.aggregate import Aggregate
from fleetfit.core import Federation, Server
from fleetfit.errors import check_range
from fleetfit.hooks import Method, Reports
from fleetfit.hooks.movements import ServerStep


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
    federation: Federation, server: Server, aggregate: Aggregate, reports: Reports, momentum: float, lr: float
) -> Server:
    """Move by the momentum."""
    move = ServerStep(server, aggregate)
    before = move.load_memory("velocity")
    velocity = momentum * before + (move.mean - move.old)
    new = move.mean + momentum * before if lr == 1 else move.old + lr * velocity
    return move.make_server(new, velocity=(velocity, before))
