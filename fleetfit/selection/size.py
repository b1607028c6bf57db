"""Size: without replacement, with probability by number of training samples (Li et al., MLSys 2020, Algorithm 2).

Differs from the paper: FedProx draws with replacement, so that a client may count twice. Where the method also weighs
updates by samples, large clients count twice over; the paper then takes the plain mean, which is
`method.hooks.weigh = "by_count"`.
"""

import numpy as np

from fleetfit.core import Federation, Server
from fleetfit.hooks import Method
from fleetfit.selection._sampling import sample_by_weight


def size() -> Method:
    """Make the selection."""
    return Method(choose_clients=choose)


def choose(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    """Draw among the connected clients."""
    reachable = federation.reachable(server.round)
    counts = federation.clients.num_examples[reachable]
    return sample_by_weight(reachable, counts, federation.cohort, rng).tolist()
