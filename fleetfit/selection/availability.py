"""Those connected now who were chosen least often so far, so that clients who are rarely there still count.

After F3AST (Ribero, Vikalo and de Veciana, 2022), which takes those connected for whom one more round moves the
long-term rates of participation most towards a target.

Differs from the paper: the target is the same rate for everybody, so that those with the lowest rate come first, drawn
among equals; rates are counts over the whole run and no moving average; and updates keep the method's weights, where
F3AST divides them by the rates.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fleetfit.aggregate import Aggregate
from fleetfit.method import Method
from fleetfit.selection._drawing import (
    best,
    listed,
    remembering,
    table,
)
from fleetfit.values import Failure, Federation, Server, Update


def availability() -> Method:
    """Make the selection."""
    return Method(choose=choose, observe=observe)


def choose(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    """Take the connected clients that were chosen least often."""
    here = federation.reachable(server.round)
    times = table(server, "times", len(federation.clients))[here]
    return listed(best(here, -times, federation.cohort, rng))


def observe(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure]
) -> Server:
    """Count who was chosen, whatever came of it: a client that always fails must not keep its place at the front."""
    times = table(server, "times", len(federation.clients))
    np.add.at(times, [r.client for r in reports if r.client is not None], 1)
    return remembering(server, times=torch.from_numpy(times))
