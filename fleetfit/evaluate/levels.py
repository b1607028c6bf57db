"""The levels' models: their states, and their batch-norm statistics, re-estimated by statistics jobs."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fleetfit.errors import ModelError
from fleetfit.guard import examined, paired
from fleetfit.layout import State, batch_norms, build_module, named_tensors
from fleetfit.seeds import numpy_rng, seed_of
from fleetfit.train import with_statistics
from fleetfit.values import Evaluation, Failure, Federation, Job, Server, Update


class Runs(Protocol):
    """What evaluation needs of an engine."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run jobs and yield their replies in the jobs' order."""
        ...


Statistics = dict[int, State]
"""Batch-norm statistics by level index: `layer.mean` and `layer.var`."""

_MOST_STATISTICS_CLIENTS = 100


@dataclass(frozen=True)
class Wanted:
    """What an evaluation should cover.

    Attributes:
        evaluation: Split and batch size.
        norms: Batch-norm policies, the headline first: "static", "batch".
        statistics_samples: Training samples, over all clients, from which static statistics are re-estimated.
        whole: Also each level on the server's own test set, and each client at its best exit.
        clients: At most so many clients, or None for all.
        always: Whether evaluations on the way are `whole` too, not only the last.
        beyond: Whether clients run models that they do not afford, which only simulated devices can.
    """

    evaluation: Evaluation = field(default_factory=Evaluation)
    norms: tuple[str, ...] = ("static", "batch")
    statistics_samples: int = 5000
    whole: bool = True
    clients: int | None = None
    always: bool = False
    beyond: bool = True


def has_batch_norm(federation: Federation) -> bool:
    """Tell whether the model has batch-norm layers, and so a policy for their statistics."""
    problem = federation.problem
    with torch.device("meta"):
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    return bool(batch_norms(module))


def statistics(
    federation: Federation, engine: Runs, server: Server, wanted: Wanted, levels: Sequence[int] | None = None
) -> tuple[Statistics, list[dict[str, Any]]]:
    """Re-estimate the batch-norm statistics of levels by statistics jobs.

    Args:
        federation: Whose levels.
        engine: Runs the jobs.
        server: Has the state.
        wanted: How many samples.
        levels: Indices of the levels; by default all up to the largest one that somebody trains.

    Returns:
        What was found, without the levels of which nobody could measure any; and the jobs that failed.
    """
    ids = np.flatnonzero(federation.clients.num_examples > 0)
    if len(ids) > _MOST_STATISTICS_CLIENTS:
        ids = np.sort(numpy_rng(federation.seed, "statistics").choice(ids, _MOST_STATISTICS_CLIENTS, replace=False))
    each = max(2, math.ceil(wanted.statistics_samples / max(1, len(ids))))
    settings = replace(wanted.evaluation, split="train", samples=each, shuffle=True)
    able = known_levels(federation, server, wanted)

    def jobs() -> Iterator[Job]:
        for level in range(top_level(federation) + 1) if levels is None else levels:
            state = level_state(federation, server, level)
            for i, client in enumerate(ids):
                if not wanted.beyond and able[client] < level:
                    continue
                yield job_of(
                    "statistics", federation, server, level * len(ids) + i, int(client), level, state, settings
                )

    sums: dict[int, dict[str, Tensor]] = {}
    failures: list[dict[str, Any]] = []
    for job, reply in paired(engine.run, jobs()):
        reply = examined(reply, job, federation)
        if isinstance(reply, Failure):
            failures.append(failed("batch-norm statistics", reply))
            continue
        into = sums.setdefault(job.level, {})
        for name, value in reply.state.items():
            into[name] = into[name] + value if name in into else value
    return {level: moments(found) for level, found in sums.items()}, failures


def failed(what: str, reply: Failure) -> dict[str, Any]:
    """Return how a report names a job that failed."""
    return {"client": reply.client, "level": reply.level + 1, "reason": f"{what}: {reply.reason}"}


def moments(sums: State) -> State:
    """Return `layer.mean` and `layer.var` (of all samples together) from added sums."""
    found: dict[str, Tensor] = {}
    for name in [n.removesuffix(".count") for n in sums if n.endswith(".count")]:
        count = sums[f"{name}.count"]
        mean = sums[f"{name}.sum"] / count
        found[f"{name}.mean"] = mean.float()
        found[f"{name}.var"] = (sums[f"{name}.squares"] / count - mean * mean).clamp_min(0).float()
    return found


def known_levels(federation: Federation, server: Server, wanted: Wanted) -> np.ndarray:
    """Return each client's own level as far as the server knows it, int [K]; -1 where it does not, or there is none.

    Simulated devices that tell no budget choose theirs themselves (see `OWN`), so nothing is known here. A real device
    that tells none would tell it by its answer: of such a one only the largest level is known that it has trained.
    """
    if federation.method.told:
        return federation.level_of
    found = np.full(len(federation.clients), -1)
    if not wanted.beyond:
        for client, level in server.trained.items():
            found[client] = level
    return found


def trained_levels(federation: Federation, server: Server, reports: Sequence[Update | Failure]) -> Mapping[int, int]:
    """Return `Server.trained` after a round: what its updates show of the clients that tell no budget."""
    if federation.method.told:
        return server.trained
    found = dict(server.trained)
    for report in reports:
        if isinstance(report, Update) and report.client is not None:
            with contextlib.suppress(ModelError):  # a piece that is no level's model says nothing
                level = federation.level_index(report.submodel)
                found[report.client] = max(level, found.get(report.client, -1))
    return dict(sorted(found.items()))


def top_level(federation: Federation) -> int:
    """Return the largest level that somebody trains."""
    return max(0, int(federation.level_of.max()))


def level_state(federation: Federation, server: Server, level: int) -> State:
    """Return the state of a level's model."""
    return federation.method.dispatch(federation, server, None, federation.levels[level].submodel)


def level_module(federation: Federation, server: Server, level: int, found: Statistics | None) -> nn.Module:
    """Return a level's model as a plain module in eval mode, with its static statistics where it has batch norm."""
    problem, piece = federation.problem, federation.levels[level].submodel
    module = build_module(problem.architecture, {**problem.layout.full_sizes, **piece.sizes}, piece.exits)
    state = {**level_state(federation, server, level), **problem.base_of(piece)}
    with torch.no_grad():
        for name, tensor, _ in named_tensors(module):
            if name in state:
                tensor.copy_(state[name])
    if found and level in found:
        with_statistics(module, found[level]).__enter__()
    return module.eval()


def job_of(
    kind: str, federation: Federation, server: Server, index: int, client: int | None, level: int, state: State,
    settings: Evaluation, found: State | None = None,
) -> Job:  # fmt: skip
    """Return one job on a client, or on the server's own device."""
    seed = seed_of(federation.seed, server.round, kind, settings.split, -1 if client is None else client)
    return Job(kind, server.round, server.round, index, client, federation.levels[level].submodel, state,
               federation.method_spec, seed, level, evaluation=settings, statistics=found or {})  # fmt: skip
