"""Evaluation: which jobs it takes, and what their updates say in columns.

`global` is the largest model that the method trains, on each client's test data, averaged over clients (ScaleFL 4.4);
`local` is each client's own level's model on its own test data, averaged (4.5); of a real device that tells no budget,
the largest level that it has trained; `avg` and `full` are the mean over
the levels' models and the largest one on the whole test set (AdaptiveFL); `mean_over_exits` is the mean over the
exits of the full model (ReeFL).

Differs from the paper: ScaleFL evaluates with each batch's own statistics, so that a prediction depends on its
neighbours. The headline here uses static batch-norm statistics, re-estimated for each level from statistics jobs: the
clients' sums over some of their training data, added up. They belong to a level and stay outside the server's state.
Batch statistics are a second column, which states batch size and order. Federated training itself keeps no running
statistics.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fleetfit.errors import ModelError
from fleetfit.evaluate.columns import OWN, Tag, columns_of, columns_on_data
from fleetfit.evaluate.levels import (
    Runs,
    Statistics,
    Wanted,
    failed,
    has_batch_norm,
    job_of,
    known_levels,
    level_module,
    level_state,
    moments,
    statistics,
    top_level,
    trained_levels,
)
from fleetfit.guard import examined, paired
from fleetfit.layout import State
from fleetfit.seeds import numpy_rng
from fleetfit.train import one_thread, run_job
from fleetfit.values import Device, Failure, Federation, Job, Server

__all__ = [
    "Runs",
    "Statistics",
    "Wanted",
    "evaluate",
    "has_batch_norm",
    "level_module",
    "level_state",
    "moments",
    "on_data",
    "statistics",
    "top_level",
    "trained_levels",
]


def evaluate(federation: Federation, engine: Runs, server: Server, wanted: Wanted) -> tuple[dict[str, Any], Statistics]:
    """Run the evaluation jobs and return the columns and the statistics they used."""
    normed = has_batch_norm(federation)
    found: Statistics = {}
    failures: list[dict[str, Any]] = []
    if normed and "static" in wanted.norms:
        found, failures = statistics(federation, engine, server, wanted)
    norms = wanted.norms if normed else wanted.norms[:1]
    own = known_levels(federation, server, wanted)
    tags = list(_tags(federation, wanted, norms, own))
    replies: dict[Tag, tuple[int, Mapping[str, Any]]] = {}
    for tag, (job, reply) in zip(tags, paired(engine.run, _jobs(federation, server, wanted, tags, found)), strict=True):
        reply = examined(reply, job, federation)
        if isinstance(reply, Failure):
            failures.append(failed("evaluation", reply))
        elif reply.metrics["n"]:
            level = federation.level_index(reply.submodel) if tag[2] == OWN else tag[2]
            replies[tag] = level, reply.metrics
    columns: dict[str, Any] = {"split": wanted.evaluation.split}
    for norm in norms:
        columns[norm] = columns_of(federation, wanted, norm, replies, own)
    if "batch" in columns:
        order = "shuffled with a seed" if wanted.evaluation.shuffle else "stored"
        columns["batch"] |= {"batch_size": wanted.evaluation.batch_size, "order": order}
    return (columns | {"failures": failures} if failures else columns), found


def on_data(
    federation: Federation, server: Server, wanted: Wanted, device: Device, found: Statistics
) -> dict[str, Any]:
    """Return the columns of every level on one device's data, where the clients and theirs are out of reach.

    Args:
        federation: Whose levels.
        server: Has the state.
        wanted: Split, batch size and norms.
        device: Has the data.
        found: Batch-norm statistics by level, as an earlier evaluation measured them; a level without any has no
            accuracy with static statistics.

    Raises:
        ModelError: A level cannot be evaluated on these data.
    """
    normed, split = has_batch_norm(federation), wanted.evaluation.split
    columns: dict[str, Any] = {"split": split, "data": device.data.name}
    for norm in wanted.norms if normed else wanted.norms[:1]:
        known = found if normed and norm == "static" else range(len(federation.levels))
        tags: list[Tag] = [(norm, split, level, None) for level in range(len(federation.levels)) if level in known]
        replies = {}
        for tag, job in zip(tags, _jobs(federation, server, wanted, tags, found), strict=True):
            with one_thread():
                reply, _ = run_job(job, device)
            if isinstance(reply, Failure):
                raise ModelError(f"level {federation.levels[tag[2]].name} cannot be evaluated: {reply.reason}")
            replies[tag[2]] = reply.metrics
        columns[norm] = columns_on_data(federation, replies)
    return columns


def _tags(federation: Federation, wanted: Wanted, norms: Sequence[str], own: np.ndarray) -> Iterator[Tag]:
    """List what to run, level by level, so that neighbours share a state."""
    top, split = top_level(federation), wanted.evaluation.split
    ids: Sequence[int] = range(len(federation.clients))
    if wanted.clients is not None and wanted.clients < len(ids):
        ids = sorted(numpy_rng(federation.seed, "evaluate").choice(len(ids), wanted.clients, replace=False).tolist())
    for norm in norms:
        for level in range(top, -1, -1):
            for client in ids:
                if own[client] == level or (level == top and wanted.beyond):
                    yield norm, split, level, client
            if wanted.whole and federation.device is not None and (federation.levels[level].averaged or level == top):
                yield norm, split, level, None
        if wanted.beyond and not federation.method.told:
            yield from ((norm, split, OWN, client) for client in ids)
        if wanted.whole and split == "test" and norm == norms[0]:
            yield from ((norm, "validation", top, client) for client in ids)


def _jobs(
    federation: Federation, server: Server, wanted: Wanted, tags: Sequence[Tag], found: Statistics
) -> Iterator[Job]:
    last, top = -1, top_level(federation)
    state: State = {}
    every = {f"level{i + 1}/{name}": t for i, moments in found.items() for name, t in moments.items()}
    for index, (norm, split, wished, client) in enumerate(tags):
        level = top if wished == OWN else wished
        if level != last:
            last, state = level, level_state(federation, server, level)
        settings = replace(wanted.evaluation, norm=norm, split=split, own=wished == OWN)
        statistics = {} if norm != "static" else every if wished == OWN else found.get(level)
        yield job_of("evaluate", federation, server, index, client, level, state, settings, statistics)
