"""What the replies of an evaluation say, in columns."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fleetfit.evaluate.levels import Wanted, top_level
from fleetfit.values import Federation

Tag = tuple[str, str, int, int | None]
"""What an evaluation job is: norm, split, level (or `OWN`), client (or None for the server's own test set)."""
Replies = Mapping[Tag, tuple[int, Mapping[str, Any]]]
"""The level that a device took, and its metrics, by tag."""
OWN = -1
"""In a tag: the level that the device itself takes, where the server does not know which."""


def columns_of(
    federation: Federation, wanted: Wanted, norm: str, replies: Replies, known: np.ndarray
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
        "global_worst_tenth": _worst_tenth(glob.values()), "local_worst_tenth": _worst_tenth(local.values()),
        "exits": _per_exit(full.values()), "ensemble": _mean(m["ensemble"] / m["n"] for m in full.values()),
        "levels": {federation.levels[i].name: _level(i, own) for i in range(top + 1)},
        "per_client": {"global": _listed(glob), "local": _listed(local)},
    }  # fmt: skip
    columns["mean_over_exits"] = _mean(columns["exits"])
    if wanted.whole:
        columns |= _whole(federation, top, mine)
        checked = {c: m for (n, s, _, c), (_, m) in replies.items() if n == norm and s == "validation" and c in full}
        if split == "test" and checked:
            best = {c: int(np.argmax(m["correct"])) for c, m in checked.items() if c is not None}
            columns["best_exit"] = _mean(full[c]["correct"][e] / full[c]["n"] for c, e in best.items())
    return columns


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
        "samples": max((m["n"] for m in scored.values()), default=0),
        "levels": {
            level.name: {"accuracy": exits[i][-1] if i in exits else None, "exits": exits.get(i, [])}
            for i, level in enumerate(federation.levels)
        },
    }


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
    return {"avg": _mean(averaged), "full": scores.get(top), "test_levels": by_level, "test_exits": exits}


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
