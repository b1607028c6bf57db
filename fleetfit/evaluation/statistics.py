"""Batch-norm statistics of levels, re-estimated by statistics jobs: their jobs, and the moments of their sums."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fleetfit.core import Failure, Federation, Job, Server
from fleetfit.engines.base import Engine
from fleetfit.evaluation.jobs import make_failure_record, make_job
from fleetfit.evaluation.levels import Statistics, find_known_levels, find_top_level, get_level_state
from fleetfit.evaluation.scope import EvaluationScope
from fleetfit.layout import State
from fleetfit.seeds import make_numpy_rng
from fleetfit.validation import pair_jobs_with_replies, validate_reply

_MAX_STATISTICS_CLIENTS = 100
_PART_CLIENTS = 10
"""Fewest clients with statistics jobs where a part is measured, and below their samples if there are more."""
_PART_SAMPLES = 32


def estimate_statistics(
    federation: Federation,
    engine: Engine,
    server: Server,
    scope: EvaluationScope,
    levels: Sequence[int] | None = None,
) -> tuple[Statistics, list[dict[str, Any]]]:
    """Re-estimate the batch-norm statistics of levels by statistics jobs.

    Args:
        federation: The server's view.
        engine: Runs the jobs.
        server: Has the state.
        scope: Gives the number of samples.
        levels: Indices of the levels; by default all up to the largest one that a client trains.

    Returns:
        The statistics, without levels that no client measured; and the records of failed jobs.
    """
    ids = np.flatnonzero(federation.clients.num_examples > 0)
    most = _MAX_STATISTICS_CLIENTS
    if scope.part is not None:  # jobs of a few samples each cost more than their samples
        most = min(most, max(_PART_CLIENTS, math.ceil(scope.statistics_samples / _PART_SAMPLES)))
    if len(ids) > most:
        ids = np.sort(make_numpy_rng(federation.seed, "statistics").choice(ids, most, replace=False))
    each = max(2, math.ceil(scope.statistics_samples / max(1, len(ids))))
    settings = replace(scope.evaluation, split="train", samples=each, shuffle=True, personal=False)
    known = find_known_levels(federation, server, scope)

    def jobs() -> Iterator[Job]:
        for level in range(find_top_level(federation) + 1) if levels is None else levels:
            state = get_level_state(federation, server, level)
            for i, client in enumerate(ids):
                if not scope.beyond and known[client] < level:
                    continue
                index = level * len(ids) + i
                yield make_job("statistics", federation, server, index, int(client), level, state, settings)

    sums: dict[int, dict[str, Tensor]] = {}
    failures: list[dict[str, Any]] = []
    for job, reply in pair_jobs_with_replies(engine.run, jobs()):
        reply = validate_reply(reply, job, federation)
        if isinstance(reply, Failure):
            failures.append(make_failure_record(federation, "batch-norm statistics", reply))
            continue
        total = sums.setdefault(job.level, {})
        for name, value in reply.state.items():
            total[name] = total[name] + value if name in total else value
    return {level: compute_moments(total) for level, total in sums.items()}, failures


def compute_moments(sums: State) -> State:
    """Return `layer.mean` and `layer.var` (of all samples together) from added sums."""
    moments: dict[str, Tensor] = {}
    for name in [n.removesuffix(".count") for n in sums if n.endswith(".count")]:
        count = sums[f"{name}.count"]
        mean = sums[f"{name}.sum"] / count
        moments[f"{name}.mean"] = mean.float()
        moments[f"{name}.var"] = (sums[f"{name}.squares"] / count - mean * mean).clamp_min(0).float()
    return moments
