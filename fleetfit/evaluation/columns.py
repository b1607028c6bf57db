"""The columns of an evaluation: means over clients, by level and exit, of the metrics that devices return."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fleetfit.core import Federation
from fleetfit.core.section import Norm
from fleetfit.evaluation.jobs import OWN, Tag, adapts_jobs
from fleetfit.evaluation.levels import find_top_level
from fleetfit.evaluation.scope import EvaluationScope

Replies = Mapping[Tag, tuple[int, Mapping[str, Any]]]
"""The level that a device took, and its metrics, by tag."""


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
        and (tag.scope == "local" or not adapts_jobs(federation))
    }
    by_level = {i: [m for level, m in own.values() if level == i] for i in range(top + 1)}
    glob = {c: get_accuracy(m) for c, m in full.items()}
    local = {c: get_accuracy(m) for c, (_, m) in own.items()}
    columns: dict[str, Any] = {
        "global": _mean(glob.values()), "local": _mean(local.values()),
        "global_clients": len(glob), "local_clients": len(local),
        "global_samples": sum(int(m["n"]) for m in full.values()),
        "local_samples": sum(int(m["n"]) for _, m in own.values()),
        "global_worst_tenth": _worst_tenth(glob.values()), "local_worst_tenth": _worst_tenth(local.values()),
        "exits": _per_exit(full.values()), "ensemble": _mean(m["ensemble"] / m["n"] for m in full.values()),
        "levels": {
            federation.levels[i].name: {
                "local": _mean(map(get_accuracy, rows)), "clients": len(rows), "exits": _per_exit(rows)
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
    scores = {level: get_accuracy(m) for level, m in by_index.items()}
    exits = [c / by_index[top]["n"] for c in by_index[top]["correct"]] if top in by_index else []
    by_level = {str(level + 1): score for level, score in scores.items()}
    averaged = [score for level, score in scores.items() if federation.levels[level].averaged]
    return {
        "avg": _mean(averaged), "full": scores.get(top), "test_levels": by_level, "test_exits": exits,
        "test_samples": max(int(m["n"]) for m in by_index.values()),
    }  # fmt: skip


def get_accuracy(metrics: Mapping[str, Any]) -> float:
    """Return the accuracy of the last exit."""
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
