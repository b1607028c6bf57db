"""By data: without replacement, with probability by number of training samples (Li et al., MLSys 2020, Algorithm 2).

Differs from the paper: FedProx draws with replacement, so that a client may count twice. Where the method also weighs
updates by samples, large clients count twice over; the paper then takes the plain mean, which is
`method.hooks.weight = "by_count"`.
"""

import numpy as np

from fleetfit.method import Method
from fleetfit.selection._drawing import by_weight, listed
from fleetfit.values import Federation, Server


def size() -> Method:
    """Make the selection."""
    return Method(choose=choose)


def choose(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    """Draw among the connected clients."""
    here = federation.reachable(server.round)
    return listed(by_weight(here, federation.clients.num_examples[here], federation.cohort, rng))
