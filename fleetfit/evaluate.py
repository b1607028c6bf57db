"""Evaluation: its jobs, and the columns of its results.

`global` is the largest model that the method trains, on each client's test data, averaged over clients (ScaleFL 4.4);
`local` is each client's own level's model on its own test data, averaged (4.5); for a real device that reports no
budget, the largest level that it has trained; `avg` and `full` are the mean over the levels' models and the largest one
on the whole test set (AdaptiveFL); `mean_over_exits` is the mean over the exits of the full model (ReeFL).

Differs from the paper: ScaleFL evaluates with each batch's own statistics, so that a prediction depends on its
neighbours. The headline here uses static batch-norm statistics, re-estimated for each level from statistics jobs: the
sums of the clients over some of their training data. They belong to a level and are not part of the server's state.
Batch statistics are a second column, which states batch size and order. Federated training itself keeps no running
statistics. ReeFL's mean over the exits is on the whole test set; `mean_over_exits`, `exits` and `ensemble` are means
over the clients, as `global` is, and `test_exits` has the exits on the whole test set.

`personal` is `local` with log p_k - log p added to the logits, p_k the class frequencies of the client's training
labels, p the fleet's (`fleetfit.rounds.class_frequencies`): what the client's own device predicts if it knows which
classes it sees often. It has the logits of `local`, and is no part of it.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fleetfit.core import Device, Evaluation, Failure, Federation, Job, Server, Update
from fleetfit.core.section import Norm
from fleetfit.core.work import Kind, Split
from fleetfit.data import Data
from fleetfit.errors import DataError, ModelError
from fleetfit.layout import State, batch_norms, build_module, named_tensors, settle_norms
from fleetfit.layout.meta import on_meta
from fleetfit.machine import one_thread
from fleetfit.seeds import derive_seed, make_numpy_rng
from fleetfit.training import run_job, set_statistics
from fleetfit.validation import pair_jobs_with_replies, validate_reply

# ---- the levels' models: their states, and their batch-norm statistics, re-estimated by statistics jobs ------------


class JobRunner(Protocol):
    """The part of an engine that evaluation uses."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run jobs and yield their replies in the jobs' order."""
        ...


Statistics = dict[int, State]
"""Batch-norm statistics by level index: `layer.mean` and `layer.var`."""

_MAX_STATISTICS_CLIENTS = 100
_PART_CLIENTS = 10
"""Fewest clients with statistics jobs where a part is measured, and below their samples if there are more."""
_PART_SAMPLES = 32


@dataclass(frozen=True)
class EvaluationPart:
    """The part of an evaluation that those before the last one measure, the same each time. None leaves all.

    Attributes:
        clients: The largest number of clients.
        client_samples: The largest number of samples of each client.
        samples: The largest number of samples of the server's own test set.
        statistics_samples: The largest number of training samples for static statistics, over all clients.
    """

    clients: int | None = None
    client_samples: int | None = None
    samples: int | None = None
    statistics_samples: int | None = None


@dataclass(frozen=True)
class EvaluationScope:
    """The scope of an evaluation.

    Attributes:
        evaluation: Split and batch size.
        norms: Batch-norm policies, the headline first: "static", "batch".
        statistics_samples: Training samples, over all clients, from which static statistics are re-estimated.
        whole: Also each level on the server's own test set, and each client at its best exit.
        clients: The largest number of clients; None for all.
        samples: The largest number of samples of the server's own test set, the same in all rounds; None for all.
        always: Whether evaluations before the last one are `whole` too.
        beyond: Whether clients run models that they do not afford, which only simulated devices can.
        triggered: A device of the server's with the test set on which a backdoor attack's success is measured; part of
            a `whole` evaluation.
        part: The part of all this that is measured; None for all.
    """

    evaluation: Evaluation = field(default_factory=Evaluation)
    norms: tuple[Norm, ...] = ("static", "batch")
    statistics_samples: int = 5000
    whole: bool = True
    clients: int | None = None
    samples: int | None = None
    always: bool = False
    beyond: bool = True
    triggered: Device | None = None
    part: EvaluationPart | None = None

    def reduce(self, part: EvaluationPart | None) -> "EvaluationScope":
        """Return the scope of an evaluation before the last one, which may measure a part."""
        scope = replace(self, whole=self.whole and self.always, norms=self.norms[:1], part=part)
        if part is None:
            return scope
        numbers = [one for one in (self.statistics_samples, part.statistics_samples) if one is not None]
        limits = [one for one in (self.samples, part.samples) if one is not None]
        return replace(scope, statistics_samples=min(numbers), samples=min(limits, default=None))


def has_batch_norm(federation: Federation) -> bool:
    """Return whether the model has batch-norm layers, and so a policy for their statistics."""
    problem = federation.problem
    with on_meta():
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    return bool(batch_norms(module))


def estimate_statistics(
    federation: Federation,
    engine: JobRunner,
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
            failures.append(make_failure_record("batch-norm statistics", reply))
            continue
        total = sums.setdefault(job.level, {})
        for name, value in reply.state.items():
            total[name] = total[name] + value if name in total else value
    return {level: compute_moments(total) for level, total in sums.items()}, failures


def make_failure_record(what: str, failure: Failure) -> dict[str, Any]:
    """Return the record of a failed job in a report."""
    return {"client": failure.client, "level": failure.level + 1, "reason": f"{what}: {failure.reason}"}


def compute_moments(sums: State) -> State:
    """Return `layer.mean` and `layer.var` (of all samples together) from added sums."""
    moments: dict[str, Tensor] = {}
    for name in [n.removesuffix(".count") for n in sums if n.endswith(".count")]:
        count = sums[f"{name}.count"]
        mean = sums[f"{name}.sum"] / count
        moments[f"{name}.mean"] = mean.float()
        moments[f"{name}.var"] = (sums[f"{name}.squares"] / count - mean * mean).clamp_min(0).float()
    return moments


def find_known_levels(federation: Federation, server: Server, scope: EvaluationScope) -> np.ndarray:
    """Return each client's own level as far as the server knows it, int [K]; -1 where it does not, or there is none.

    Simulated devices that report no budget choose their level themselves (see `OWN`). A real device would reveal its
    budget by that choice: for such a device the largest level that it has trained is taken.
    """
    if federation.method.needs_budgets:
        return federation.level_of
    levels = np.full(len(federation.clients), -1)
    if not scope.beyond:
        for client, level in server.trained.items():
            levels[client] = level
    return levels


def find_trained_levels(
    federation: Federation, server: Server, reports: Sequence[Update | Failure]
) -> Mapping[int, int]:
    """Return `Server.trained` after a round: the largest level that each client without a budget has trained."""
    if federation.method.needs_budgets:
        return server.trained
    trained = dict(server.trained)
    for report in reports:
        if isinstance(report, Update) and report.client is not None:
            with contextlib.suppress(ModelError):  # the sub-model is not a level's
                level = federation.level_index(report.submodel)
                trained[report.client] = max(level, trained.get(report.client, -1))
    return dict(sorted(trained.items()))


def find_top_level(federation: Federation) -> int:
    """Return the largest level that a client trains."""
    return max(0, int(federation.level_of.max()))


def get_level_state(federation: Federation, server: Server, level: int) -> State:
    """Return the state of a level's model."""
    return federation.method.dispatch(federation, server, None, federation.levels[level].submodel)


def build_level_module(federation: Federation, server: Server, level: int, statistics: Statistics | None) -> nn.Module:
    """Return a level's model as a plain module in eval mode, with its static statistics where it has batch norm."""
    problem, submodel = federation.problem, federation.levels[level].submodel
    module = build_module(problem.architecture, {**problem.layout.full_sizes, **submodel.sizes}, submodel.exits)
    state = {**get_level_state(federation, server, level), **problem.get_base(submodel)}
    with torch.no_grad():
        for name, tensor, _ in named_tensors(module):
            if name in state:
                tensor.copy_(state[name])
    settle_norms(module, is_saved=True)
    if statistics and level in statistics:
        set_statistics(module, statistics[level])
    return module.eval()


def make_job(
    kind: Kind, federation: Federation, server: Server, index: int, client: int | None, level: int, state: State,
    settings: Evaluation, statistics: State | None = None,
) -> Job:  # fmt: skip
    """Make a job for a client, or for the server's own device."""
    seed = derive_seed(federation.seed, server.round, kind, settings.split, -1 if client is None else client)
    prior = server.prior if settings.personal else ()
    return Job(
        kind, server.round, server.round, index, client, federation.levels[level].submodel, state,
        federation.method_spec, seed, level, evaluation=settings, statistics=statistics or {}, prior=prior,
    )  # fmt: skip


# ---- columns ---------------------------------------------------------------------------------------------------------


class Tag(NamedTuple):
    """An evaluation job: norm, split, level (or `OWN`), client (or None for the server's own test set), and scope."""

    norm: Norm
    split: Split
    level: int
    client: int | None
    scope: Literal["local", "global"]


Replies = Mapping[Tag, tuple[int, Mapping[str, Any]]]
"""The level that a device took, and its metrics, by tag."""
OWN = -1
"""In a tag: the level that the device itself chooses, if the server does not know it."""


def make_columns(
    federation: Federation, scope: EvaluationScope, norm: Norm, replies: Replies, known: np.ndarray
) -> dict[str, Any]:
    """Return the columns of one norm.

    Args:
        federation: The server's view.
        scope: The scope of the evaluation.
        norm: Batch-norm policy.
        replies: The results of the jobs.
        known: Each client's own level as far as the server knows it, int [K].
    """
    top, split = find_top_level(federation), scope.evaluation.split
    scored = {tag: reply for tag, reply in replies.items() if (tag.norm, tag.split) == (norm, split)}
    metrics = {(tag.level, tag.client): m for tag, (_, m) in scored.items() if tag.scope == "global"}
    full = {c: m for (level, c), m in metrics.items() if level == top and c is not None}
    own = {
        tag.client: reply
        for tag, reply in sorted(scored.items(), key=lambda item: item[0].client or 0)
        if tag.client is not None
        and (tag.level == OWN or tag.level == known[tag.client] >= 0)
        and (tag.scope == "local" or not _adapts_jobs(federation))
    }
    by_level = {i: [m for level, m in own.values() if level == i] for i in range(top + 1)}
    glob = {c: _get_accuracy(m) for c, m in full.items()}
    local = {c: _get_accuracy(m) for c, (_, m) in own.items()}
    columns: dict[str, Any] = {
        "global": _mean(glob.values()), "local": _mean(local.values()),
        "global_clients": len(glob), "local_clients": len(local),
        "global_samples": sum(int(m["n"]) for m in full.values()),
        "local_samples": sum(int(m["n"]) for _, m in own.values()),
        "global_worst_tenth": _worst_tenth(glob.values()), "local_worst_tenth": _worst_tenth(local.values()),
        "exits": _per_exit(full.values()), "ensemble": _mean(m["ensemble"] / m["n"] for m in full.values()),
        "levels": {
            federation.levels[i].name: {
                "local": _mean(map(_get_accuracy, rows)), "clients": len(rows), "exits": _per_exit(rows)
            }
            for i, rows in by_level.items()
        },
        "per_client": {"global": _sort_by_client(glob), "local": _sort_by_client(local)},
    }  # fmt: skip
    columns["mean_over_exits"] = _mean(columns["exits"])
    if scope.evaluation.personal:
        columns["personal"] = _mean(float(m["personal"] / m["n"]) for _, m in own.values())
    columns |= _make_own_metrics(federation, scope, top, metrics, own)
    if scope.whole:
        columns |= _make_test_columns(federation, top, metrics)
        validated = {tag.client: m for tag, (_, m) in replies.items()
                     if (tag.norm, tag.split) == (norm, "validation") and tag.client in full}  # fmt: skip
        if split == "test" and validated:
            best = {c: int(np.argmax(m["correct"])) for c, m in validated.items() if c is not None}
            columns["best_exit"] = _mean(full[c]["correct"][e] / full[c]["n"] for c, e in best.items())
    return columns


def _make_own_metrics(
    federation: Federation,
    scope: EvaluationScope,
    top: int,
    metrics: Mapping[tuple[int, int | None], Mapping[str, Any]],
    own: Mapping[int, tuple[int, Mapping[str, Any]]],
) -> dict[str, Any]:
    """Return `metrics`: for each of the user's own metrics the columns that accuracy has.

    A value is a client's, from all its samples at once; means are over clients that have a value, as of accuracy.
    """
    tables = {}
    for name in scope.evaluation.metrics:
        full = [m["own"][name] for (level, c), m in metrics.items() if level == top and c is not None]
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
        whole = {level: metrics[level, None]["own"][name] for level in range(top + 1) if (level, None) in metrics}
        if whole:
            columns["test_levels"] = {str(level + 1): values[-1] for level, values in whole.items()}
            columns["test_exits"] = whole.get(top, [])
        tables[name.rpartition(":")[2]] = columns
    return {"metrics": tables} if tables else {}


def _mean_of_each(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    return [_mean(column) for column in zip(*rows, strict=True)]


def make_device_columns(federation: Federation, replies: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of levels that were all run on one device's data, from their metrics by level."""
    scored = {level: m for level, m in replies.items() if m["n"]}
    exits = {level: [float(c / m["n"]) for c in m["correct"]] for level, m in scored.items()}
    top = len(federation.levels) - 1
    full = exits.get(top, [])
    own: dict[str, Any] = {}
    for level, m in scored.items():
        for name, values in m.get("own", {}).items():
            entry = {"value": values[-1], "exits": values}
            own.setdefault(name.rpartition(":")[2], {})[federation.levels[level].name] = entry
    return {
        "full": full[-1] if full else None,
        "avg": _mean(scores[-1] for level, scores in exits.items() if federation.levels[level].averaged),
        "ensemble": float(scored[top]["ensemble"] / scored[top]["n"]) if full else None,
        "exits": full,
        "mean_over_exits": _mean(full),
        **({"metrics": own} if own else {}),
        "samples": max((m["n"] for m in scored.values()), default=0),
        "levels": {
            level.name: {"accuracy": exits[i][-1] if i in exits else None, "exits": exits.get(i, [])}
            for i, level in enumerate(federation.levels)
        },
    }


def _make_test_columns(
    federation: Federation, top: int, metrics: Mapping[tuple[int, int | None], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the columns on the server's own test set."""
    by_index = {level: metrics[level, None] for level in range(top + 1) if (level, None) in metrics}
    if not by_index:
        return {}
    scores = {level: _get_accuracy(m) for level, m in by_index.items()}
    exits = [c / by_index[top]["n"] for c in by_index[top]["correct"]] if top in by_index else []
    by_level = {str(level + 1): score for level, score in scores.items()}
    averaged = [score for level, score in scores.items() if federation.levels[level].averaged]
    return {
        "avg": _mean(averaged), "full": scores.get(top), "test_levels": by_level, "test_exits": exits,
        "test_samples": max(int(m["n"]) for m in by_index.values()),
    }  # fmt: skip


def _get_accuracy(metrics: Mapping[str, Any]) -> float:
    return float(metrics["correct"][-1] / metrics["n"])


def _mean(values: Any) -> float | None:
    numbers = [v for v in values if v is not None]
    return float(np.mean(numbers)) if numbers else None


def _worst_tenth(values: Any) -> float | None:
    ascending = sorted(values)
    return _mean(ascending[: max(1, len(ascending) // 10)]) if ascending else None


def _per_exit(metrics: Any) -> list[float]:
    rows = [[c / m["n"] for c in m["correct"]] for m in metrics]
    return [float(v) for v in np.mean(rows, axis=0)] if rows else []


def _sort_by_client(values: Mapping[int, float]) -> dict[str, float]:
    return {str(client): values[client] for client in sorted(values)}


# ---- the evaluation ------------------------------------------------------------------------------------------------


def evaluate(
    federation: Federation, engine: JobRunner, server: Server, scope: EvaluationScope
) -> tuple[dict[str, Any], Statistics]:
    """Run the evaluation jobs and return the columns and the statistics they used.

    The columns of a part have "partial": its numbers of clients and samples.
    """
    has_norms = has_batch_norm(federation)
    statistics: Statistics = {}
    failures: list[dict[str, Any]] = []
    if has_norms and "static" in scope.norms:
        statistics, failures = estimate_statistics(federation, engine, server, scope)
    norms = scope.norms if has_norms else scope.norms[:1]
    known = find_known_levels(federation, server, scope)
    tags = list(_iter_tags(federation, scope, norms, known))
    replies: dict[Tag, tuple[int, Mapping[str, Any]]] = {}
    jobs = _iter_jobs(federation, server, scope, tags, statistics)
    for tag, (job, reply) in zip(tags, pair_jobs_with_replies(engine.run, jobs), strict=True):
        reply = validate_reply(reply, job, federation)
        if isinstance(reply, Failure):
            failures.append(make_failure_record("evaluation", reply))
        elif reply.metrics["n"]:
            level = federation.level_index(reply.submodel) if tag.level == OWN else tag.level
            replies[tag] = level, reply.metrics
    columns: dict[str, Any] = {"split": scope.evaluation.split}
    if scope.part is not None:
        sizes = {
            tag.client: int(metrics["n"]) for tag, (_, metrics) in replies.items() if tag.split == columns["split"]
        }
        test_samples = sizes.pop(None, 0)
        columns["partial"] = {"clients": len(sizes), "samples": sum(sizes.values()) or test_samples}
    for norm in norms:
        columns[norm] = make_columns(federation, scope, norm, replies, known)
        if scope.whole and scope.triggered is not None:
            columns[norm] |= measure_backdoor(federation, server, scope, norm, statistics, failures)
    if "batch" in columns:
        order = "shuffled with a seed" if scope.evaluation.shuffle else "stored"
        columns["batch"] |= {"batch_size": scope.evaluation.batch_size, "order": order}
    return (columns | {"failures": failures} if failures else columns), statistics


def measure_backdoor(
    federation: Federation, server: Server, scope: EvaluationScope, norm: Norm, statistics: Statistics,
    failures: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Return the share of test samples with its trigger on which each level predicts a backdoor attack's target.

    Failed jobs are added to `failures`.

    Returns:
        "backdoor" of the largest level that a client trains, and "backdoor_levels".
    """
    assert scope.triggered is not None
    split: Split = "test"
    top = find_top_level(federation)
    tags = [Tag(norm, split, level, None, "global") for level in range(top + 1)]
    scores: dict[str, float] = {}
    device, scope = scope.triggered, replace(scope, evaluation=replace(scope.evaluation, split=split))
    for tag, job in zip(tags, _iter_jobs(federation, server, scope, tags, statistics), strict=True):
        with one_thread():
            reply, _ = run_job(job, device)
        if isinstance(reply, Failure):
            failures.append(make_failure_record("evaluation of the backdoor", reply))
        elif reply.metrics["n"]:
            scores[str(tag.level + 1)] = _get_accuracy(reply.metrics)
    return {"backdoor": scores.get(str(top + 1)), "backdoor_levels": scores}


def evaluate_on_device(
    federation: Federation, server: Server, scope: EvaluationScope, device: Device, statistics: Statistics
) -> dict[str, Any]:
    """Return the columns of every level on one device's data, without the clients.

    Args:
        federation: The server's view.
        server: Has the state.
        scope: Split, batch size and norms.
        device: Has the data.
        statistics: Batch-norm statistics by level, of an earlier evaluation; a level without any has no accuracy with
            static statistics.

    Raises:
        DataError: The data have no samples in the split.
        ModelError: A level cannot be evaluated on these data.
    """
    has_norms, split = has_batch_norm(federation), scope.evaluation.split
    scope = replace(scope, samples=None, evaluation=replace(scope.evaluation, personal=False))
    check_samples(device.data, split)
    columns: dict[str, Any] = {"split": split, "data": device.data.name}
    for norm in scope.norms if has_norms else scope.norms[:1]:
        levels = statistics if has_norms and norm == "static" else range(len(federation.levels))
        tags = [Tag(norm, split, i, None, "global") for i in range(len(federation.levels)) if i in levels]
        replies = {}
        for tag, job in zip(tags, _iter_jobs(federation, server, scope, tags, statistics), strict=True):
            with one_thread():
                reply, _ = run_job(job, device)
            if isinstance(reply, Failure):
                raise ModelError(f"level {federation.levels[tag.level].name} cannot be evaluated: {reply.reason}")
            replies[tag.level] = reply.metrics
        columns[norm] = make_device_columns(federation, replies)
    return columns


def check_samples(data: Data, split: str) -> None:
    """Check that a split has samples.

    Raises:
        DataError: It has none.
    """
    if not len(data.split(split)):
        raise DataError(f"{data.name} has no {split} samples.", key="split")


def _adapts_jobs(federation: Federation) -> bool:
    return "adapt" in federation.method.own_hooks


def _iter_tags(
    federation: Federation, scope: EvaluationScope, norms: Sequence[Norm], known: np.ndarray
) -> Iterator[Tag]:
    """Yield the jobs level by level and scope by scope, so that neighbours share a state and are run together.

    A client at the largest level has one "global" job for both columns, unless devices adapt jobs, perhaps by scope.
    """
    top, split = find_top_level(federation), scope.evaluation.split
    ids = _draw_clients(federation, scope)
    for norm in norms:
        for level in range(top, -1, -1):
            own = [client for client in ids if known[client] == level]
            if level == top:
                yield from (Tag(norm, split, level, client, "global") for client in (ids if scope.beyond else own))
            if level != top or _adapts_jobs(federation):
                yield from (Tag(norm, split, level, client, "local") for client in own)
            if scope.whole and federation.device is not None and (federation.levels[level].averaged or level == top):
                yield Tag(norm, split, level, None, "global")
        if scope.beyond and not federation.method.needs_budgets:
            yield from (Tag(norm, split, OWN, client, "local") for client in ids)
        if scope.whole and split == "test" and norm == norms[0]:
            yield from (Tag(norm, "validation", top, client, "global") for client in ids)


def _draw_clients(federation: Federation, scope: EvaluationScope) -> Sequence[int]:
    """Return the clients of an evaluation; those of a part are the same each time, and as many of each level as fit."""
    ids: Sequence[int] = range(len(federation.clients))
    if scope.clients is not None and scope.clients < len(ids):
        ids = sorted(
            make_numpy_rng(federation.seed, "evaluate").choice(len(ids), scope.clients, replace=False).tolist()
        )
    count = None if scope.part is None else scope.part.clients
    if count is None or count >= len(ids):
        return ids
    order: list[int] = make_numpy_rng(federation.seed, "evaluate.part").permutation(ids).tolist()
    if federation.method.needs_budgets:  # without, the levels that the server knows change
        order.sort(key=lambda client: federation.level_of[client])
    return sorted(order[(2 * i + 1) * len(ids) // (2 * count)] for i in range(count))


def _iter_jobs(
    federation: Federation, server: Server, scope: EvaluationScope, tags: Sequence[Tag], statistics: Statistics
) -> Iterator[Job]:
    last, top, part = -1, find_top_level(federation), scope.part or EvaluationPart()
    state: State = {}
    all_moments = {f"level{i + 1}/{name}": t for i, moments in statistics.items() for name, t in moments.items()}
    for index, (norm, split, tag_level, client, tag_scope) in enumerate(tags):
        is_own = tag_level == OWN
        level = top if is_own else tag_level
        if level != last:
            last, state = level, get_level_state(federation, server, level)
        # also of the server's test set, which shares a pass with the clients
        personal = scope.evaluation.personal and split == scope.evaluation.split
        settings = replace(scope.evaluation, norm=norm, split=split, own=is_own, scope=tag_scope, personal=personal)
        moments = {} if norm != "static" else all_moments if is_own else statistics.get(level)
        samples = scope.samples if client is None else part.client_samples
        settings = replace(settings, samples=samples)
        job = make_job("evaluate", federation, server, index, client, level, state, settings, moments)
        if samples is not None:  # the same samples in all rounds
            owner = () if client is None else (client,)
            job = replace(job, seed=derive_seed(federation.seed, "evaluate.samples", split, *owner))
        yield job
