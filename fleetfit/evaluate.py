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
statistics. ReeFL's mean over the exits is on the whole test set; `mean_over_exits`, `exits` and `ensemble` are means
over the clients, as `global` is, and `test_exits` has the exits on the whole test set.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fleetfit.data import Data
from fleetfit.errors import DataError, ModelError
from fleetfit.layout import State, batch_norms, build_module, named_tensors
from fleetfit.layout.meta import on_meta
from fleetfit.seeds import derive_seed, make_numpy_rng
from fleetfit.training import one_thread, run_job, set_statistics
from fleetfit.validation import pair_jobs_with_replies, validate_reply
from fleetfit.values import Device, Evaluation, Failure, Federation, Job, Server, Update

__all__ = [
    "EvaluationScope",
    "Runs",
    "Statistics",
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


# ---- the levels' models: their states, and their batch-norm statistics, re-estimated by statistics jobs ------------


class Runs(Protocol):
    """What evaluation needs of an engine."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run jobs and yield their replies in the jobs' order."""
        ...


Statistics = dict[int, State]
"""Batch-norm statistics by level index: `layer.mean` and `layer.var`."""

_MOST_STATISTICS_CLIENTS = 100


@dataclass(frozen=True)
class EvaluationScope:
    """What an evaluation should cover.

    Attributes:
        evaluation: Split and batch size.
        norms: Batch-norm policies, the headline first: "static", "batch".
        statistics_samples: Training samples, over all clients, from which static statistics are re-estimated.
        whole: Also each level on the server's own test set, and each client at its best exit.
        clients: At most so many clients, or None for all.
        always: Whether evaluations on the way are `whole` too, not only the last.
        beyond: Whether clients run models that they do not afford, which only simulated devices can.
        triggered: A device of the server's whose test set is what a backdoor attack's success is measured on; part of
            what is `whole`.
    """

    evaluation: Evaluation = field(default_factory=Evaluation)
    norms: tuple[str, ...] = ("static", "batch")
    statistics_samples: int = 5000
    whole: bool = True
    clients: int | None = None
    always: bool = False
    beyond: bool = True
    triggered: Device | None = None


def has_batch_norm(federation: Federation) -> bool:
    """Tell whether the model has batch-norm layers, and so a policy for their statistics."""
    problem = federation.problem
    with on_meta():
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    return bool(batch_norms(module))


def statistics(
    federation: Federation, engine: Runs, server: Server, wanted: EvaluationScope, levels: Sequence[int] | None = None
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
        ids = np.sort(
            make_numpy_rng(federation.seed, "statistics").choice(ids, _MOST_STATISTICS_CLIENTS, replace=False)
        )
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
    for job, reply in pair_jobs_with_replies(engine.run, jobs()):
        reply = validate_reply(reply, job, federation)
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


def known_levels(federation: Federation, server: Server, wanted: EvaluationScope) -> np.ndarray:
    """Return each client's own level as far as the server knows it, int [K]; -1 where it does not, or there is none.

    Simulated devices that tell no budget choose theirs themselves (see `OWN`), so nothing is known here. A real device
    that tells none would tell it by its answer: of such a one only the largest level is known that it has trained.
    """
    if federation.method.needs_budgets:
        return federation.level_of
    found = np.full(len(federation.clients), -1)
    if not wanted.beyond:
        for client, level in server.trained.items():
            found[client] = level
    return found


def trained_levels(federation: Federation, server: Server, reports: Sequence[Update | Failure]) -> Mapping[int, int]:
    """Return `Server.trained` after a round: what its updates show of the clients that tell no budget."""
    if federation.method.needs_budgets:
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
    state = {**level_state(federation, server, level), **problem.get_base(piece)}
    with torch.no_grad():
        for name, tensor, _ in named_tensors(module):
            if name in state:
                tensor.copy_(state[name])
    if found and level in found:
        set_statistics(module, found[level])
    return module.eval()


def job_of(
    kind: str, federation: Federation, server: Server, index: int, client: int | None, level: int, state: State,
    settings: Evaluation, found: State | None = None,
) -> Job:  # fmt: skip
    """Return one job on a client, or on the server's own device."""
    seed = derive_seed(federation.seed, server.round, kind, settings.split, -1 if client is None else client)
    return Job(kind, server.round, server.round, index, client, federation.levels[level].submodel, state,
               federation.method_spec, seed, level, evaluation=settings, statistics=found or {})  # fmt: skip


# ---- what the replies of an evaluation say, in columns -------------------------------------------------------------

Tag = tuple[str, str, int, int | None]
"""What an evaluation job is: norm, split, level (or `OWN`), client (or None for the server's own test set)."""
Replies = Mapping[Tag, tuple[int, Mapping[str, Any]]]
"""The level that a device took, and its metrics, by tag."""
OWN = -1
"""In a tag: the level that the device itself takes, where the server does not know which."""


def columns_of(
    federation: Federation, wanted: EvaluationScope, norm: str, replies: Replies, known: np.ndarray
) -> dict[str, Any]:
    """Return the columns of one norm.

    Args:
        federation: Whose clients were asked.
        wanted: What the evaluation covers.
        norm: Batch-norm policy.
        replies: What came back.
        known: Each client's own level as far as the server knows it, int [K].
    """
    top, split = top_level(federation), wanted.evaluation.split
    mine = {(level, c): m for (n, s, level, c), (_, m) in replies.items() if n == norm and s == split}
    full = {c: m for (level, c), m in mine.items() if level == top and c is not None}
    own = _own(norm, split, replies, known)
    glob = {c: _last(m) for c, m in full.items()}
    local = {c: _last(m) for c, (_, m) in own.items()}
    columns: dict[str, Any] = {
        "global": _mean(glob.values()), "local": _mean(local.values()),
        "global_clients": len(glob), "local_clients": len(local),
        "global_samples": sum(int(m["n"]) for m in full.values()),
        "local_samples": sum(int(m["n"]) for _, m in own.values()),
        "global_worst_tenth": _worst_tenth(glob.values()), "local_worst_tenth": _worst_tenth(local.values()),
        "exits": _per_exit(full.values()), "ensemble": _mean(m["ensemble"] / m["n"] for m in full.values()),
        "levels": {federation.levels[i].name: _level(i, own) for i in range(top + 1)},
        "per_client": {"global": _listed(glob), "local": _listed(local)},
    }  # fmt: skip
    columns["mean_over_exits"] = _mean(columns["exits"])
    columns |= _own_metrics(federation, wanted, top, mine, own)
    if wanted.whole:
        columns |= _whole(federation, top, mine)
        checked = {c: m for (n, s, _, c), (_, m) in replies.items() if n == norm and s == "validation" and c in full}
        if split == "test" and checked:
            best = {c: int(np.argmax(m["correct"])) for c, m in checked.items() if c is not None}
            columns["best_exit"] = _mean(full[c]["correct"][e] / full[c]["n"] for c, e in best.items())
    return columns


def _own_metrics(
    federation: Federation,
    wanted: EvaluationScope,
    top: int,
    mine: Mapping[tuple[int, int | None], Mapping[str, Any]],
    own: Mapping[int, tuple[int, Mapping[str, Any]]],
) -> dict[str, Any]:
    """Return `metrics`: for each metric of one's own the columns that accuracy has; nothing where there is none.

    A value is a client's, from all its samples at once; means are over clients that have a value, as of accuracy.
    """
    found = {}
    for name in wanted.evaluation.metrics:
        full = [m["own"][name] for (level, c), m in mine.items() if level == top and c is not None]
        local = [(level, m["own"][name]) for level, m in own.values()]
        levels = {i: [values for level, values in local if level == i] for i in range(top + 1)}
        columns: dict[str, Any] = {
            "global": _mean(values[-1] for values in full),
            "local": _mean(values[-1] for _, values in local),
            "exits": _mean_of_each(full),
            "levels": {
                federation.levels[i].name: {"local": _mean(v[-1] for v in rows), "exits": _mean_of_each(rows)}
                for i, rows in levels.items()
            },
        }
        whole = {level: mine[level, None]["own"][name] for level in range(top + 1) if (level, None) in mine}
        if whole:
            columns["test_levels"] = {str(level + 1): values[-1] for level, values in whole.items()}
            columns["test_exits"] = whole.get(top, [])
        found[name.rpartition(":")[2]] = columns
    return {"metrics": found} if found else {}


def _mean_of_each(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    return [_mean(column) for column in zip(*rows, strict=True)]


def columns_on_data(federation: Federation, replies: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of levels that were all run on the same data, from their metrics by level."""
    scored = {level: m for level, m in replies.items() if m["n"]}
    exits = {level: [float(c / m["n"]) for c in m["correct"]] for level, m in scored.items()}
    top = len(federation.levels) - 1
    full = exits.get(top, [])
    return {
        "full": full[-1] if full else None,
        "avg": _mean(found[-1] for level, found in exits.items() if federation.levels[level].averaged),
        "ensemble": float(scored[top]["ensemble"] / scored[top]["n"]) if full else None,
        "exits": full,
        "mean_over_exits": _mean(full),
        **_own_on_data(federation, scored),
        "samples": max((m["n"] for m in scored.values()), default=0),
        "levels": {
            level.name: {"accuracy": exits[i][-1] if i in exits else None, "exits": exits.get(i, [])}
            for i, level in enumerate(federation.levels)
        },
    }


def _own_on_data(federation: Federation, scored: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return `metrics` of levels that were all run on the same data."""
    found: dict[str, Any] = {}
    for level, m in scored.items():
        for name, values in m.get("own", {}).items():
            entry = {"value": values[-1], "exits": values}
            found.setdefault(name.rpartition(":")[2], {})[federation.levels[level].name] = entry
    return {"metrics": found} if found else {}


def _own(norm: str, split: str, replies: Replies, known: np.ndarray) -> dict[int, tuple[int, Mapping[str, Any]]]:
    """Return each client's own level and what its model scored: the level that it took itself, else the known one."""
    return {
        c: reply
        for (n, s, level, c), reply in sorted(replies.items(), key=lambda item: item[0][3] or 0)
        if c is not None and (n, s) == (norm, split) and (level == OWN or level == known[c] >= 0)
    }


def _whole(
    federation: Federation, top: int, mine: Mapping[tuple[int, int | None], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the columns on the server's own test set."""
    found = {level: mine[(level, None)] for level in range(top + 1) if (level, None) in mine}
    if not found:
        return {}
    scores = {level: _last(m) for level, m in found.items()}
    exits = [c / found[top]["n"] for c in found[top]["correct"]] if top in found else []
    by_level = {str(level + 1): score for level, score in scores.items()}
    averaged = [score for level, score in scores.items() if federation.levels[level].averaged]
    return {
        "avg": _mean(averaged), "full": scores.get(top), "test_levels": by_level, "test_exits": exits,
        "test_samples": max(int(m["n"]) for m in found.values()),
    }  # fmt: skip


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


# ---- the evaluation ------------------------------------------------------------------------------------------------


def evaluate(
    federation: Federation, engine: Runs, server: Server, wanted: EvaluationScope
) -> tuple[dict[str, Any], Statistics]:
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
    for tag, (job, reply) in zip(
        tags, pair_jobs_with_replies(engine.run, _jobs(federation, server, wanted, tags, found)), strict=True
    ):
        reply = validate_reply(reply, job, federation)
        if isinstance(reply, Failure):
            failures.append(failed("evaluation", reply))
        elif reply.metrics["n"]:
            level = federation.level_index(reply.submodel) if tag[2] == OWN else tag[2]
            replies[tag] = level, reply.metrics
    columns: dict[str, Any] = {"split": wanted.evaluation.split}
    for norm in norms:
        columns[norm] = columns_of(federation, wanted, norm, replies, own)
        if wanted.whole and wanted.triggered is not None:
            columns[norm] |= success(federation, server, wanted, norm, found if normed else {}, failures)
    if "batch" in columns:
        order = "shuffled with a seed" if wanted.evaluation.shuffle else "stored"
        columns["batch"] |= {"batch_size": wanted.evaluation.batch_size, "order": order}
    return (columns | {"failures": failures} if failures else columns), found


def success(
    federation: Federation, server: Server, wanted: EvaluationScope, norm: str, found: Statistics,
    failures: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Return how often each level says what a backdoor attack wants, on test samples with its trigger.

    What fails is noted in `failures`.

    Returns:
        "backdoor" of the largest level that somebody trains, and "backdoor_levels".
    """
    assert wanted.triggered is not None
    top, split = top_level(federation), "test"
    tags: list[Tag] = [(norm, split, level, None) for level in range(top + 1)]
    scores: dict[str, float] = {}
    asked = replace(wanted, evaluation=replace(wanted.evaluation, split=split))
    for tag, job in zip(tags, _jobs(federation, server, asked, tags, found), strict=True):
        with one_thread():
            reply, _ = run_job(job, wanted.triggered)
        if isinstance(reply, Failure):
            failures.append(failed("evaluation of the backdoor", reply))
        elif reply.metrics["n"]:
            scores[str(tag[2] + 1)] = _last(reply.metrics)
    return {"backdoor": scores.get(str(top + 1)), "backdoor_levels": scores}


def on_data(
    federation: Federation, server: Server, wanted: EvaluationScope, device: Device, found: Statistics
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
        DataError: They have no samples in the split.
        ModelError: A level cannot be evaluated on these data.
    """
    normed, split = has_batch_norm(federation), wanted.evaluation.split
    check_samples(device.data, split)
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


def check_samples(data: Data, split: str) -> None:
    """Refuse a split without samples, whose table would have dashes only.

    Raises:
        DataError: It has none.
    """
    if not len(data.split(split)):
        raise DataError(f"{data.name} has no {split} samples.", key="split")


def _tags(federation: Federation, wanted: EvaluationScope, norms: Sequence[str], own: np.ndarray) -> Iterator[Tag]:
    """List what to run, level by level, so that neighbours share a state."""
    top, split = top_level(federation), wanted.evaluation.split
    ids: Sequence[int] = range(len(federation.clients))
    if wanted.clients is not None and wanted.clients < len(ids):
        ids = sorted(
            make_numpy_rng(federation.seed, "evaluate").choice(len(ids), wanted.clients, replace=False).tolist()
        )
    for norm in norms:
        for level in range(top, -1, -1):
            for client in ids:
                if own[client] == level or (level == top and wanted.beyond):
                    yield norm, split, level, client
            if wanted.whole and federation.device is not None and (federation.levels[level].averaged or level == top):
                yield norm, split, level, None
        if wanted.beyond and not federation.method.needs_budgets:
            yield from ((norm, split, OWN, client) for client in ids)
        if wanted.whole and split == "test" and norm == norms[0]:
            yield from ((norm, "validation", top, client) for client in ids)


def _jobs(
    federation: Federation, server: Server, wanted: EvaluationScope, tags: Sequence[Tag], found: Statistics
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
