"""FedAdam: Adam on the server, with the round's movement as the gradient (Reddi et al., ICLR 2021, Algorithm 2).

d = mean - x;  m <- beta1 m + (1 - beta1) d;  v <- beta2 v + (1 - beta2) d^2;  x <- x + lr m / (sqrt(v) + tau), with v
beginning at tau^2 and no bias correction, as there. With `v0 = 0.0` v begins at zero, as in the code of ReeFL's
authors, who use it for ReeFL and InclusiveFL. An element that no client trained keeps its value and its moments.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.core import Federation, Server
from fleetfit.errors import check_range
from fleetfit.hooks import Method, Reports
from fleetfit.hooks.movements import ServerStep

Second = Callable[[Tensor, Tensor, float], Tensor]
"""(v, d, beta2) -> the new second moment."""


def fedadam(
    lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3, v0: float | None = None
) -> Method:
    """Make the option.

    Args:
        lr: The server's learning rate, above 0.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Degree of adaptivity, above 0.
        v0: What v begins at, from 0 on; by default tau^2.
    """
    return make_adaptive(_average_squares, lr, beta1, beta2, tau, v0)


def make_adaptive(second: Second, lr: float, beta1: float, beta2: float, tau: float, v0: float | None) -> Method:
    """Make an adaptive server optimizer from the rule of its second moment."""
    check_range("lr", lr, 0)
    check_range("beta1", beta1, 0, 1, closed=True)
    check_range("beta2", beta2, 0, 1, closed=True)
    check_range("tau", tau, 0)
    v0 = tau**2 if v0 is None else v0
    check_range("v0", v0, 0, closed=True)
    return Method(step=partial(step, second=second, lr=lr, beta1=beta1, beta2=beta2, tau=tau, start=v0))


def step(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Reports, second: Second, lr: float,
    beta1: float, beta2: float, tau: float, start: float,
) -> Server:  # fmt: skip
    """Move each element by its own step size."""
    move = ServerStep(server, aggregate)
    d = move.mean - move.old
    m0, v0 = move.load_memory("first"), move.load_memory("second", start)
    m, v = beta1 * m0 + (1 - beta1) * d, second(v0, d, beta2)
    return move.make_server(move.old + lr * m / (v.sqrt() + tau), first=(m, m0), second=(v, v0))


def _average_squares(v: Tensor, d: Tensor, beta2: float) -> Tensor:
    return beta2 * v + (1 - beta2) * d.square()
