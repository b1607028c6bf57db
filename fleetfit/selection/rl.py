"""Reward, after AdaptiveFL (Jia et al., DAC 2024, section 3.3): curiosity times success, for any method.

Clients are drawn one after the other with probability in proportion to min(0.5, R_s) R_c. Curiosity is
R_c = 1 / sqrt(T_c), with T_c one more than the times that the client was chosen. Success is R_s = (1 + jobs with an
update) / (2 + all jobs): a client that declined, was late or disconnected is chosen less often.

Differs from the paper: it draws a client for each model of its pool, with T_c for each kind of model and R_s from a
table of which models the client could train; here a client has one level, so that both are one number per client. The
paper itself is the method `adaptivefl`.
"""

import numpy as np
import torch

from fleetfit.aggregate import Aggregate
from fleetfit.core import Federation, Server, Update
from fleetfit.hooks import Method, Reports
from fleetfit.selection._sampling import check_tables, load_table, sample_by_weight, store_memory


def rl() -> Method:
    """Make the selection."""
    return Method(choose_clients=choose, update_server_memory=observe, check_memory=check_tables)


def compute_rewards(jobs: np.ndarray, successes: np.ndarray) -> np.ndarray:
    """Return min(0.5, R_s) R_c.

    Args:
        jobs: The times that each client was chosen [n].
        successes: Those that brought an update [n].
    """
    return np.minimum(0.5, (1 + successes) / (2 + jobs)) / np.sqrt(1 + jobs)


def choose(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    """Draw among the connected clients."""
    reachable = federation.reachable(server.round)
    jobs, successes = (load_table(server, name, len(federation.clients))[reachable] for name in ("jobs", "successes"))
    return sample_by_weight(reachable, compute_rewards(jobs, successes), federation.cohort, rng).tolist()


def observe(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    """Count jobs and successes."""
    jobs, successes = (load_table(server, name, len(federation.clients)) for name in ("jobs", "successes"))
    for report in reports:
        if report.client is not None:
            jobs[report.client] += 1
            successes[report.client] += isinstance(report, Update)
    return store_memory(server, jobs=torch.from_numpy(jobs), successes=torch.from_numpy(successes))
