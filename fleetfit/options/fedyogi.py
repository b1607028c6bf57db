"""FedYogi: Yogi on the server, with the round's movement as the gradient (Reddi et al., ICLR 2021, Algorithm 2).

As FedAdam, but v <- v - (1 - beta2) d^2 sign(v - d^2).
"""

from torch import Tensor

from fleetfit.hooks import Method
from fleetfit.options.fedadam import make_adaptive


def fedyogi(
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
    return make_adaptive(_control_squares, lr, beta1, beta2, tau, v0)


def _control_squares(v: Tensor, d: Tensor, beta2: float) -> Tensor:
    square = d.square()
    return v - (1 - beta2) * square * (v - square).sign()
