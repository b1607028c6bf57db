"""Run the jobs of an evaluation, on the clients or on one device, and collect the columns of their replies."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from fleetfit.core import Device, Failure, Federation, Server, Update
from fleetfit.core.section import Norm
from fleetfit.data import Data
from fleetfit.engines.base import Engine
from fleetfit.errors import DataError, ModelError
from fleetfit.evaluation.columns import Metrics, get_accuracy, make_columns, make_device_columns
from fleetfit.evaluation.jobs import OWN, Tag, iter_jobs, iter_tags, make_failure_record
from fleetfit.evaluation.levels import Statistics, find_top_level, has_batch_norm
from fleetfit.evaluation.scope import EvaluationScope
from fleetfit.evaluation.statistics import estimate_statistics
from fleetfit.machine import use_threads
from fleetfit.training import run_job
from fleetfit.validation import pair_jobs_with_replies, validate_reply


def evaluate(
    federation: Federation, engine: Engine, server: Server, scope: EvaluationScope
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
    tags = list(iter_tags(federation, server, scope, norms))
    replies: dict[Tag, tuple[int, Metrics]] = {}
    jobs = iter_jobs(federation, server, scope, tags, statistics)
    for tag, (job, reply) in zip(tags, pair_jobs_with_replies(engine.run, jobs), strict=True):
        reply = validate_reply(reply, job, federation)
        if isinstance(reply, Failure):
            failures.append(make_failure_record(federation, "evaluation", reply))
        elif reply.metrics["n"]:
            level = federation.level_index(reply.submodel) if tag.level == OWN else tag.level
            replies[tag] = level, _get_metrics(reply)
    columns: dict[str, Any] = {"split": scope.evaluation.split}
    if scope.part is not None:
        sizes = {
            tag.client: metrics["samples"] for tag, (_, metrics) in replies.items() if tag.split == columns["split"]
        }
        test_samples = sizes.pop(None, 0)
        columns["partial"] = {"clients": len(sizes), "samples": sum(sizes.values()) or test_samples}
    for norm in norms:
        columns[norm] = make_columns(federation, scope, norm, replies)
        if scope.whole and scope.triggered is not None:
            columns[norm] |= measure_backdoor(federation, server, scope, norm, statistics, scope.triggered, failures)
    if "batch" in columns:
        order = "shuffled with a seed" if scope.evaluation.shuffle else "stored"
        columns["batch"] |= {"batch_size": scope.evaluation.batch_size, "order": order}
    return (columns | {"failures": failures} if failures else columns), statistics


def _get_metrics(reply: Update) -> Metrics:
    """Return the metrics of a reply with its number of samples: a task may score several units of each."""
    return {**reply.metrics, "samples": reply.num_examples}


def measure_backdoor(
    federation: Federation, server: Server, scope: EvaluationScope, norm: Norm, statistics: Statistics, device: Device,
    failures: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Return the share of test samples with its trigger on which each level predicts a backdoor attack's target.

    Failed jobs are added to `failures`.

    Returns:
        "backdoor" of the largest level that a client trains, and "backdoor_levels".
    """
    top = find_top_level(federation)
    scope = replace(scope, evaluation=replace(scope.evaluation, split="test"))
    scores: dict[str, float] = {}
    for level, reply in _run_levels(federation, server, scope, norm, range(top + 1), statistics, device):
        if isinstance(reply, Failure):
            failures.append(make_failure_record(federation, "evaluation of the backdoor", reply))
        elif reply.metrics["n"]:
            scores[str(federation.numbers[level])] = get_accuracy(reply.metrics)
    return {"backdoor": scores.get(str(federation.numbers[top])), "backdoor_levels": scores}


def _run_levels(
    federation: Federation, server: Server, scope: EvaluationScope, norm: Norm, levels: Iterable[int],
    statistics: Statistics, device: Device,
) -> Iterator[tuple[int, Update | Failure]]:  # fmt: skip
    """Yield each level's reply on one device, which runs in this process."""
    tags = [Tag(norm, scope.evaluation.split, level, None, "global") for level in levels]
    for tag, job in zip(tags, iter_jobs(federation, server, scope, tags, statistics), strict=True):
        with use_threads(1):
            reply, _ = run_job(job, device)
        yield tag.level, reply


def evaluate_on_device(
    federation: Federation, server: Server, scope: EvaluationScope, device: Device, statistics: Statistics
) -> dict[str, Any]:
    """Return the columns of every trained level on one device's data, without the clients.

    Args:
        federation: The server's view.
        server: Has the state.
        scope: Split, number of samples, batch size and norms.
        device: Has the data.
        statistics: Batch-norm statistics by level, of an earlier evaluation; a level without any has no accuracy with
            static statistics.

    Raises:
        DataError: The data have no samples in the split.
        ModelError: A level cannot be evaluated on these data.
    """
    has_norms, split = has_batch_norm(federation), scope.evaluation.split
    scope = replace(scope, evaluation=replace(scope.evaluation, personal=False))
    check_samples(device.data, split)
    columns: dict[str, Any] = {"split": split, "data": device.data.name}
    for norm in scope.norms if has_norms else scope.norms[:1]:
        needs_statistics = has_norms and norm == "static"
        levels = [i for i in range(find_top_level(federation) + 1) if i in statistics or not needs_statistics]
        replies = {}
        for level, reply in _run_levels(federation, server, scope, norm, levels, statistics, device):
            if isinstance(reply, Failure):
                raise ModelError(f"level {federation.levels[level].name} cannot be evaluated: {reply.reason}")
            replies[level] = _get_metrics(reply)
        columns[norm] = make_device_columns(federation, replies)
    return columns


def check_samples(data: Data, split: str) -> None:
    """Check that a split has samples.

    Raises:
        DataError: It has none.
    """
    if not len(data.split(split)):
        raise DataError(f"{data.name} has no {split} samples.", key="split")
