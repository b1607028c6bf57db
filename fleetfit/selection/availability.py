"""Availability: the connected clients that were chosen least often so far (after F3AST, 2022).

F3AST (Ribero, Vikalo and de Veciana) takes the connected clients for which one more round moves the long-term rates of
participation most towards a target. So clients that are rarely connected still count.

Differs from the paper: the target is the same rate for all clients, so that those with the lowest rate come first,
drawn among equals; rates are counts over the whole run instead of a moving average; and updates keep the method's
weights, while F3AST divides them by the rates.
"""

import numpy as np
import torch

from fleetfit.aggregate import Aggregate
from fleetfit.core import Federation, Server
from fleetfit.hooks import Method, Reports
from fleetfit.selection._sampling import check_tables, load_table, store_memory, take_best


def availability() -> Method:
    """Make the selection."""
    return Method(choose_clients=choose, update_server_memory=observe, check_memory=check_tables)


def choose(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    """Take the connected clients that were chosen least often."""
    reachable = federation.reachable(server.round)
    times = load_table(server, "times", len(federation.clients))[reachable]
    return take_best(reachable, -times, federation.cohort, rng).tolist()


def observe(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    """Count the clients that were chosen, failures too: a client that always fails must not stay at the front."""
    times = load_table(server, "times", len(federation.clients))
    np.add.at(times, [r.client for r in reports if r.client is not None], 1)
    return store_memory(server, times=torch.from_numpy(times))
