"""By reward, after AdaptiveFL (Jia et al., DAC 2024, section 3.3): curiosity times success, for any method.

Clients are drawn one after the other with probability by min(0.5, R_s) R_c. Curiosity is R_c = 1 / sqrt(T_c), with T_c
one more than how often the client was chosen. R_s = (1 + jobs that brought an update) / (2 + all jobs) stands for the
resources: a client that declined, missed its time or went away is chosen less often.

Differs from the paper: it draws a client for each model of its pool, with T_c for each kind of model and R_s from a
table of which models the client could train; here a client has one level, so that both are one number per client. The
paper itself is the method `adaptivefl`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fleetfit.aggregate import Aggregate
from fleetfit.method import Method
from fleetfit.selection._drawing import (
    by_weight,
    listed,
    remembering,
    table,
)
from fleetfit.values import Failure, Federation, Server, Update


def rl() -> Method:
    """Make the selection."""
    return Method(choose=choose, observe=observe)


def rewards(jobs: np.ndarray, successes: np.ndarray) -> np.ndarray:
    """Return min(0.5, R_s) R_c.

    Args:
        jobs: How often each client was chosen [n].
        successes: How often that brought an update [n].
    """
    return np.minimum(0.5, (1 + successes) / (2 + jobs)) / np.sqrt(1 + jobs)


def choose(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    """Draw among the connected clients."""
    here, clients = federation.reachable(server.round), len(federation.clients)
    jobs, successes = table(server, "jobs", clients)[here], table(server, "successes", clients)[here]
    return listed(by_weight(here, rewards(jobs, successes), federation.cohort, rng))


def observe(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure]
) -> Server:
    """Count jobs and what came of them."""
    jobs, successes = (table(server, name, len(federation.clients)) for name in ("jobs", "successes"))
    for report in reports:
        if report.client is not None:
            jobs[report.client] += 1
            successes[report.client] += isinstance(report, Update)
    return remembering(server, jobs=torch.from_numpy(jobs), successes=torch.from_numpy(successes))
