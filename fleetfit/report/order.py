"""Where a deeper exit or a larger level does worse than a smaller one: a sentence that says so, with the numbers.

A piece that is larger has more to learn, and fewer clients that train all of it, so after few rounds it may lie behind.
Whoever reads a table or a plot should not take that for what the method can do.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

BEHIND = 0.02
"""Two points of percent: a larger piece that lies further behind a smaller one is in the wrong order."""
_REASON = "Few rounds, or few clients that train all of it, are the usual reason."


def out_of_order(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for exits and one for levels that are in the wrong order, with the means over the seeds.

    Args:
        summaries: The final numbers of a run, or of all seeds of a row.
    """
    said = []
    for name, found, where in (("exit", *exits_of(summaries)), ("level", *levels_of(summaries))):
        if is_behind(list(found.values())):
            numbers = ", ".join(f"{name} {piece} {100 * accuracy:.1f}%" for piece, accuracy in found.items())
            larger = "deeper exits" if name == "exit" else "larger levels"
            rounds = summaries[0]["rounds"]
            said.append(f"After {rounds} rounds the {larger} have not caught up: {numbers}, {where}.")
    return _with_reason(said)


def rows_out_of_order(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return a sentence for exits and one for levels, with the names of all rows in which they are in the wrong order.

    Args:
        rows: The final numbers of all seeds by row.
    """
    said = []
    for larger, accuracies_of in (("deeper exits", exits_of), ("larger levels", levels_of)):
        names = [name for name, found in rows.items() if is_behind(list(accuracies_of(found)[0].values()))]
        if names:
            said.append(f"The {larger} have not caught up in {'; '.join(names)}.")
    return _with_reason(said)


def _with_reason(said: list[str]) -> list[str]:
    """Return sentences with the usual reason behind the last one."""
    return [*said[:-1], f"{said[-1]} {_REASON}"] if said else []


def is_behind(accuracies: Sequence[float]) -> bool:
    """Tell whether one of the accuracies, smaller pieces first, is further than `BEHIND` below one before it."""
    return any(max(accuracies[:i]) - accuracies[i] > BEHIND for i in range(1, len(accuracies)))


def exits_of(summaries: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], str]:
    """Return the accuracy of each exit of the largest model, by its number, and on which data that is."""
    known = [_final(summary) for summary in summaries]
    for key, where in (("test_exits", "on the server's test set"), ("exits", "on all clients' test data")):
        found = _means([dict(enumerate(columns.get(key, ()), 1)) for columns in known])
        if found:
            return {str(number): accuracy for number, accuracy in found.items()}, where
    return {}, ""


def levels_of(summaries: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], str]:
    """Return the accuracy of each level, by its name, and on which data that is."""
    names = [str(level["level"]) for level in summaries[0]["levels"]]
    by_number = _means([_final(summary).get("test_levels", {}) for summary in summaries])
    found = {name: by_number[str(n)] for n, name in enumerate(names, 1) if by_number.get(str(n)) is not None}
    if len(found) > 1:
        return found, "all on the server's test set"
    own = [{str(level["level"]): level.get("local") for level in summary["levels"]} for summary in summaries]
    return _means(own), "each on the data of its own clients, which differ"


def _final(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    found = summary.get("evaluate", {}).get(summary["norm"], {})
    return found if isinstance(found, Mapping) else {}


def _means(seeds: Sequence[Mapping[Any, float | None]]) -> dict[Any, float]:
    """Return the mean over the seeds of what all of them have, in the order of the first."""
    every = {key: [found.get(key) for found in seeds] for key in seeds[0]}
    return {
        key: statistics.fmean(v for v in values if v is not None) for key, values in every.items() if None not in values
    }
