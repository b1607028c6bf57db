"""Power of choice: of some candidates drawn by data, those with the highest loss (Cho, Wang and Joshi, AISTATS 2022).

The paper's variant without further messages, rpow-d: a client's loss is the one that it last reported with an update,
the mean over its local steps, and infinite before its first.

Differs from the paper: candidates are drawn among those connected, and equal losses at random. What methods report is
their own local loss: with ScaleFL and DepthFL larger levels add more terms, so that they tend to have the higher one.
"""

from functools import partial

import numpy as np
import torch

from fleetfit.aggregate import Aggregate
from fleetfit.core import Federation, Server, Update
from fleetfit.errors import check_range
from fleetfit.hooks import Method, Reports
from fleetfit.selection._sampling import check_tables, load_table, sample_by_weight, store_memory, take_best


def loss(candidates: int = 0) -> Method:
    """Make the selection.

    Args:
        candidates: d, how many are drawn by data size; never fewer than the cohort; 0 is twice as many.
    """
    check_range("candidates", candidates, 0, closed=True)
    return Method(
        choose_clients=partial(choose, candidates=candidates), update_server_memory=observe, check_memory=check_tables
    )


def choose(federation: Federation, server: Server, rng: np.random.Generator, candidates: int) -> list[int]:
    """Draw candidates, and take those with the highest loss."""
    reachable, cohort = federation.reachable(server.round), federation.cohort
    counts = federation.clients.num_examples[reachable]
    ids = sample_by_weight(reachable, counts, max(cohort, candidates or 2 * cohort), rng)
    return take_best(ids, _load_losses(federation, server)[ids], cohort, rng).tolist()


def observe(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    """Store the losses that clients report."""
    losses = _load_losses(federation, server)
    for update in reports:
        if isinstance(update, Update) and update.client is not None and np.isfinite(update.metrics["loss"]):
            losses[update.client] = update.metrics["loss"]
    return store_memory(server, losses=torch.from_numpy(losses))


def _load_losses(federation: Federation, server: Server) -> np.ndarray:
    return load_table(server, "losses", len(federation.clients), float("inf"), torch.float32)
