"""The columns of an evaluation: means over clients, by level and exit, of the metrics that devices return."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from fleetfit.core import Federation
from fleetfit.core.section import Norm
from fleetfit.evaluation.jobs import Tag
from fleetfit.evaluation.levels import find_top_level
from fleetfit.evaluation.scope import EvaluationScope

Metrics = Mapping[str, Any]
Replies = Mapping[Tag, tuple[int, Metrics]]
"""The level that a device took, and its metrics with its number of samples, by tag."""
Values = Sequence[float | None]
"""A metric at each exit, shallow to deep."""


def make_columns(federation: Federation, scope: EvaluationScope, norm: Norm, replies: Replies) -> dict[str, Any]:
    """Return the columns of one norm.

    Args:
        federation: The server's view.
        scope: The scope of the evaluation.
        norm: Batch-norm policy.
        replies: The results of the jobs.
    """
    top, split = find_top_level(federation), scope.evaluation.split
    scored = {tag: reply for tag, reply in replies.items() if (tag.norm, tag.split) == (norm, split)}
    by_client = [(tag.client, tag, reply) for tag, reply in scored.items() if tag.client is not None]
    full = {c: m for c, tag, (_, m) in by_client if (tag.level, tag.scope) == (top, "global")}
    own = {c: reply for c, tag, reply in sorted(by_client, key=itemgetter(0)) if tag.is_own}
    on_server = {tag.level: m for tag, (_, m) in scored.items() if tag.client is None}
    glob = {str(c): get_accuracy(m) for c, m in full.items()}
    local = {str(c): get_accuracy(m) for c, (_, m) in own.items()}
    columns = _tabulate(federation, full, own, on_server, _get_accuracies) | {
        "global_clients": len(glob), "local_clients": len(local),
        "global_samples": sum(m["samples"] for m in full.values()),
        "local_samples": sum(m["samples"] for _, m in own.values()),
        "global_worst_tenth": _worst_tenth(glob.values()), "local_worst_tenth": _worst_tenth(local.values()),
        "ensemble": _mean(m["ensemble"] / m["n"] for m in full.values()),
        "per_client": {"global": glob, "local": local},
    }  # fmt: skip
    columns["mean_over_exits"] = _mean(columns["exits"])
    if scope.evaluation.personal:
        columns["personal"] = _mean(float(m["personal"] / m["n"]) for _, m in own.values())
    if scope.evaluation.metrics:
        columns["metrics"] = {
            name.rpartition(":")[2]: _tabulate(federation, full, own, on_server, partial(_get_own_metric, name))
            for name in scope.evaluation.metrics
        }
    if on_server:
        columns |= {
            "avg": _average_levels(federation, on_server),
            "full": columns["test_exits"][-1] if top in on_server else None,
            "test_samples": max(m["samples"] for m in on_server.values()),
        }
    best = [
        _get_accuracies(full[tag.client])[int(np.argmax(m["correct"]))]
        for tag, (_, m) in replies.items()
        if split == "test" and (tag.norm, tag.split) == (norm, "validation") and tag.client in full
    ]
    return columns | ({"best_exit": _mean(best)} if best else {})


def _tabulate(
    federation: Federation,
    full: Mapping[int, Metrics],
    own: Mapping[int, tuple[int, Metrics]],
    on_server: Mapping[int, Metrics],
    get_values: Callable[[Metrics], Values],
) -> dict[str, Any]:
    """Return the columns that accuracy and each of the user's metrics have; means are over clients that have a value.

    `full` has the metrics of the largest level and `own` those of each client's own level, by client; `on_server` has
    those on the server's own test set, by level.
    """
    top = find_top_level(federation)
    full_rows = [get_values(m) for m in full.values()]
    own_rows = [(level, get_values(m)) for level, m in own.values()]
    columns: dict[str, Any] = {
        "global": _mean(values[-1] for values in full_rows),
        "local": _mean(values[-1] for _, values in own_rows),
        "exits": _mean_of_each(full_rows),
        "levels": {},
    }
    for i, level in enumerate(federation.levels[: top + 1]):
        rows = [values for own_level, values in own_rows if own_level == i]
        local = _mean(values[-1] for values in rows)
        columns["levels"][level.name] = {"local": local, "clients": len(rows), "exits": _mean_of_each(rows)}
    if on_server:
        test = {level: get_values(on_server[level]) for level in sorted(on_server)}
        columns["test_levels"] = {str(federation.numbers[level]): values[-1] for level, values in test.items()}
        columns["test_exits"] = test.get(top, [])
    return columns


def make_device_columns(federation: Federation, replies: Mapping[int, Metrics]) -> dict[str, Any]:
    """Return the columns of the trained levels, all run on one device's data, from their metrics by level."""
    scored = {level: m for level, m in replies.items() if m["n"]}
    exits = {level: _get_accuracies(m) for level, m in scored.items()}
    top = find_top_level(federation)
    full = exits.get(top, [])
    own: dict[str, Any] = {}
    for level, m in scored.items():
        for name, values in m.get("own", {}).items():
            entry = {"value": values[-1], "exits": values}
            own.setdefault(name.rpartition(":")[2], {})[federation.levels[level].name] = entry
    return {
        "full": full[-1] if full else None,
        "avg": _average_levels(federation, scored),
        "ensemble": float(scored[top]["ensemble"] / scored[top]["n"]) if full else None,
        "exits": full,
        "mean_over_exits": _mean(full),
        **({"metrics": own} if own else {}),
        "samples": max((m["samples"] for m in scored.values()), default=0),
        "levels": {
            level.name: {"accuracy": exits[i][-1] if i in exits else None, "exits": exits.get(i, [])}
            for i, level in enumerate(federation.levels[: top + 1])
        },
    }


def _get_accuracies(metrics: Metrics) -> list[float]:
    return [float(correct / metrics["n"]) for correct in metrics["correct"]]


def get_accuracy(metrics: Metrics) -> float:
    """Return the accuracy of the last exit."""
    return _get_accuracies(metrics)[-1]


def _get_own_metric(name: str, metrics: Metrics) -> Values:
    return metrics["own"][name]


def _average_levels(federation: Federation, metrics: Mapping[int, Metrics]) -> float | None:
    return _mean(get_accuracy(metrics[level]) for level in sorted(metrics) if federation.levels[level].averaged)


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [v for v in values if v is not None]
    return float(np.mean(numbers)) if numbers else None


def _mean_of_each(rows: Sequence[Values]) -> list[float | None]:
    table = np.array(rows, dtype=float)  # None becomes nan
    sums = zip(np.nansum(table, 0), np.isfinite(table).sum(0), strict=True) if rows else ()
    return [float(total / count) if count else None for total, count in sums]


def _worst_tenth(values: Iterable[float]) -> float | None:
    ascending = sorted(values)
    return _mean(ascending[: max(1, len(ascending) // 10)])
