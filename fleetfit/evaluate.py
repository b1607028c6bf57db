"""Evaluation: which jobs it takes, and what their updates say in columns.

`global` is the largest model that the method trains, on each client's test data, averaged over clients (ScaleFL 4.4);
`local` is each client's own level's model on its own test data, averaged (4.5); `avg` and `full` are the mean over
the levels' models and the largest one on the whole test set (AdaptiveFL); `mean_over_exits` is the mean over the
exits of the full model (ReeFL).

Differs from the paper: ScaleFL evaluates with each batch's own statistics, so that a prediction depends on its
neighbours. The headline here uses static batch-norm statistics, re-estimated for each level from statistics jobs: the
clients' sums over some of their training data, added up. They belong to a level and stay outside the server's state.
Batch statistics are a second column, which states batch size and order. Federated training itself keeps no running
statistics.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

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
    """

    evaluation: Evaluation = field(default_factory=Evaluation)
    norms: tuple[str, ...] = ("static", "batch")
    statistics_samples: int = 5000
    whole: bool = True
    clients: int | None = None


def has_batch_norm(federation: Federation) -> bool:
    """Tell whether the model has batch-norm layers, and so a policy for their statistics."""
    problem = federation.problem
    with torch.device("meta"):
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    return bool(batch_norms(module))


# ---- statistics --------------------------------------------------------------------------------------------------


def statistics(
    federation: Federation, engine: Runs, server: Server, wanted: Wanted
) -> tuple[Statistics, list[dict[str, Any]]]:
    """Re-estimate the batch-norm statistics of every level by statistics jobs.

    Returns:
        What was found, without the levels of which nobody could measure any; and the jobs that failed.
    """
    ids = np.flatnonzero(federation.clients.num_examples > 0)
    if len(ids) > _MOST_STATISTICS_CLIENTS:
        ids = np.sort(numpy_rng(federation.seed, "statistics").choice(ids, _MOST_STATISTICS_CLIENTS, replace=False))
    each = max(2, math.ceil(wanted.statistics_samples / max(1, len(ids))))
    settings = replace(wanted.evaluation, split="train", samples=each, shuffle=True)

    def jobs() -> Iterator[Job]:
        for level in range(top_level(federation) + 1):
            state = level_state(federation, server, level)
            for i, client in enumerate(ids):
                yield _job("statistics", federation, server, level * len(ids) + i, int(client), level, state, settings)

    sums: dict[int, dict[str, Tensor]] = {}
    failures: list[dict[str, Any]] = []
    for reply in engine.run(jobs()):
        if isinstance(reply, Failure):
            failures.append(_failed("batch-norm statistics", reply))
            continue
        into = sums.setdefault(reply.level, {})
        for name, value in reply.state.items():
            into[name] = into[name] + value if name in into else value
    return {level: moments(found) for level, found in sums.items()}, failures


def _failed(what: str, reply: Failure) -> dict[str, Any]:
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
    state = {**level_state(federation, server, level), **problem.base}
    with torch.no_grad():
        for name, tensor, _ in named_tensors(module):
            if name in state:
                tensor.copy_(state[name])
    if found and level in found:
        with_statistics(module, found[level]).__enter__()
    return module.eval()


# ---- evaluation --------------------------------------------------------------------------------------------------


def _job(
    kind: str, federation: Federation, server: Server, index: int, client: int | None, level: int, state: State,
    settings: Evaluation, found: State | None = None,
) -> Job:  # fmt: skip
    seed = seed_of(federation.seed, server.round, kind, settings.split, -1 if client is None else client)
    return Job(kind, server.round, server.round, index, client, federation.levels[level].submodel, state,
               federation.method_spec, seed, level, evaluation=settings, statistics=found or {})  # fmt: skip


Tag = tuple[str, str, int, int | None]  # norm, split, level, client


def evaluate(federation: Federation, engine: Runs, server: Server, wanted: Wanted) -> tuple[dict[str, Any], Statistics]:
    """Run the evaluation jobs and return the columns and the statistics they used."""
    normed = has_batch_norm(federation)
    found: Statistics = {}
    failures: list[dict[str, Any]] = []
    if normed and "static" in wanted.norms:
        found, failures = statistics(federation, engine, server, wanted)
    norms = wanted.norms if normed else wanted.norms[:1]
    tags = list(_tags(federation, wanted, norms))
    replies: dict[Tag, Mapping[str, Any]] = {}
    for tag, reply in zip(tags, engine.run(_jobs(federation, server, wanted, tags, found)), strict=True):
        if isinstance(reply, Failure):
            failures.append(_failed("evaluation", reply))
        elif reply.metrics["n"]:
            replies[tag] = reply.metrics
    columns: dict[str, Any] = {"split": wanted.evaluation.split}
    for norm in norms:
        columns[norm] = _columns(federation, wanted, norm, replies)
    if "batch" in columns:
        order = "shuffled with a seed" if wanted.evaluation.shuffle else "stored"
        columns["batch"] |= {"batch_size": wanted.evaluation.batch_size, "order": order}
    return (columns | {"failures": failures} if failures else columns), found


def _tags(federation: Federation, wanted: Wanted, norms: Sequence[str]) -> Iterator[Tag]:
    """List what to run, level by level, so that neighbours share a state."""
    top, split = top_level(federation), wanted.evaluation.split
    ids: Sequence[int] = range(len(federation.clients))
    if wanted.clients is not None and wanted.clients < len(ids):
        ids = sorted(numpy_rng(federation.seed, "evaluate").choice(len(ids), wanted.clients, replace=False).tolist())
    for norm in norms:
        for level in range(top, -1, -1):
            for client in ids:
                if level == top or federation.level_of[client] == level:
                    yield norm, split, level, client
            if wanted.whole and federation.device is not None:
                yield norm, split, level, None
        if wanted.whole and split == "test" and norm == norms[0]:
            yield from ((norm, "validation", top, client) for client in ids)


def _jobs(
    federation: Federation, server: Server, wanted: Wanted, tags: Sequence[Tag], found: Statistics
) -> Iterator[Job]:
    last = -1
    state: State = {}
    for index, (norm, split, level, client) in enumerate(tags):
        if level != last:
            last, state = level, level_state(federation, server, level)
        settings = replace(wanted.evaluation, norm=norm, split=split)
        statistics = found.get(level) if norm == "static" else None
        yield _job("evaluate", federation, server, index, client, level, state, settings, statistics)


def _columns(
    federation: Federation, wanted: Wanted, norm: str, replies: Mapping[Tag, Mapping[str, Any]]
) -> dict[str, Any]:
    top, split = top_level(federation), wanted.evaluation.split
    mine = {(level, c): m for (n, s, level, c), m in replies.items() if n == norm and s == split}
    full = {c: m for (level, c), m in mine.items() if level == top and c is not None}
    own = {
        c: (int(federation.level_of[c]), mine[(int(federation.level_of[c]), c)])
        for c in sorted(full.keys() | {c for _, c in mine if c is not None})
        if (int(federation.level_of[c]), c) in mine
    }
    glob = {c: _last(m) for c, m in full.items()}
    local = {c: _last(m) for c, (_, m) in own.items()}
    columns: dict[str, Any] = {
        "global": _mean(glob.values()), "local": _mean(local.values()),
        "global_clients": len(glob), "local_clients": len(local),
        "global_worst_tenth": _worst_tenth(glob.values()), "local_worst_tenth": _worst_tenth(local.values()),
        "exits": _per_exit(full.values()), "ensemble": _mean(m["ensemble"] / m["n"] for m in full.values()),
        "levels": {federation.levels[i].name: _level(i, own) for i in range(top + 1)},
        "per_client": {"global": _listed(glob), "local": _listed(local)},
    }  # fmt: skip
    columns["mean_over_exits"] = _mean(columns["exits"])
    if wanted.whole:
        columns |= _whole(top, mine)
        checked = {c: m for (n, s, _, c), m in replies.items() if n == norm and s == "validation" and c in full}
        if split == "test" and checked:
            best = {c: int(np.argmax(m["correct"])) for c, m in checked.items() if c is not None}
            columns["best_exit"] = _mean(full[c]["correct"][e] / full[c]["n"] for c, e in best.items())
    return columns


def _whole(top: int, mine: Mapping[tuple[int, int | None], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns on the server's own test set."""
    found = {level: mine[(level, None)] for level in range(top + 1) if (level, None) in mine}
    if not found:
        return {}
    scores = {level: _last(m) for level, m in found.items()}
    exits = [c / found[top]["n"] for c in found[top]["correct"]] if top in found else []
    by_level = {str(level + 1): score for level, score in scores.items()}
    return {"avg": _mean(scores.values()), "full": scores.get(top), "test_levels": by_level, "test_exits": exits}


def _level(index: int, own: Mapping[int, tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    mine = [m for level, m in own.values() if level == index]
    return {"local": _mean(_last(m) for m in mine), "clients": len(mine), "exits": _per_exit(mine)}


def _last(metrics: Mapping[str, Any]) -> float:
    return float(metrics["correct"][-1] / metrics["n"])


def _mean(values: Any) -> float | None:
    found = [v for v in values if v is not None]
    return float(np.mean(found)) if found else None


def _worst_tenth(values: Any) -> float | None:
    found = sorted(values)
    return _mean(found[: max(1, len(found) // 10)]) if found else None


def _per_exit(metrics: Any) -> list[float]:
    rows = [[c / m["n"] for c in m["correct"]] for m in metrics]
    return [float(v) for v in np.mean(rows, axis=0)] if rows else []


def _listed(values: Mapping[int, float]) -> dict[str, float]:
    return {str(client): values[client] for client in sorted(values)}
