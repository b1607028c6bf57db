"""What every row of an experiment has: the numbers behind the verdicts, mean and standard deviation over the seeds."""

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

from experiments.verdicts.claims import ClaimTable, Place, contrasts
from experiments.verdicts.stored import ExperimentResults, value_of

RATE = "local.lr"
GLUE = "\u00a0"  # a space at which no line breaks


def compared(table: ClaimTable) -> tuple[list[str], set[str]]:
    """Return the columns of a table's own experiment that are shown, and the settings that its claims compare."""
    own = [place for place in places_of(table) if place.file == table.file]
    return in_order([*(place.column for place in own), *table.beside]), {place.setting for place in own}


def places_of(table: ClaimTable) -> list[Place]:
    """Return all numbers that a table's claims compare."""
    return [p for claim in table.every for c in contrasts(table, claim) for p in (*c.plus, *c.minus)]


def in_order(columns: Iterable[str]) -> list[str]:
    """Return columns without repetition, as they come, but "exit 2" after "exit 1", and before "exit last"."""
    found = list(dict.fromkeys(columns))
    kinds = list(dict.fromkeys(_parted(column)[0] for column in found))
    return sorted(found, key=lambda column: (kinds.index(_parted(column)[0]), _parted(column)[1]))


def _parted(column: str) -> tuple[str, float]:
    kind, _, last = column.rpartition(" ")
    if last in ("first", "last"):
        return kind, -math.inf if last == "first" else math.inf
    return (kind, float(last)) if last.isdecimal() else (column, 0.0)


def measured(
    results: ExperimentResults,
    columns: Sequence[str],
    within: Collection[str],
    others: Sequence[tuple[ExperimentResults, Collection[tuple[str, str]]]] = (),
) -> tuple[list[str], list[list[str]]]:
    """Return the head and the lines of a table of all rows of an experiment.

    Args:
        results: The experiment.
        columns: Which of its numbers are shown.
        within: In which settings.
        others: Other experiments whose (setting, row) are compared with them, and follow with the file's name.
    """
    runs = [(results, pair) for pair in results.runs if pair[0] in within]
    runs += [(other, pair) for other, pairs in others for pair in other.runs if pair in pairs]
    first = list(dict.fromkeys(setting for _, (setting, _) in runs))
    settings = len(first) > 1
    tuned = sorted({key for one, _ in runs for found in one.tuning.values() for key in found.chosen})
    head = ["setting"] * settings + ["row", *("learning rate" if key == RATE else key for key in tuned), "seeds"]
    lines = []
    for one, (setting, row) in sorted(runs, key=lambda each: first.index(each[1][0])):
        by_seed = one.runs[setting, row]
        named = row if one is results else f"{row} ({PurePosixPath(one.file).stem})"
        line = [setting] * settings + [named, *(_chosen(one, setting, row, key) for key in tuned), str(len(by_seed))]
        found = [[value_of(one, run, column) for run in by_seed.values()] for column in columns]
        known = [[value for value in values if value is not None] for values in found]
        cells = [
            _cell([v.number for v in values], any(v.at_least for v in values), len(values) < len(by_seed))
            for values in known
        ]
        lines.append(line + cells)
    if len(lines) == 1 < len(columns):  # better read downwards
        return ["", ", ".join(lines[0][: len(head) - 1])], [
            list(pair) for pair in zip(columns, lines[0][len(head) :], strict=True)
        ]
    return [*head, *columns], lines


def _chosen(results: ExperimentResults, setting: str, row: str, key: str) -> str:
    """Return what tuning chose for a row, and where it lies among what was tried: an end of it may not be the best."""
    found = results.tuning.get((setting, row))
    if found is None or key not in found.chosen:
        return "-"
    chosen = found.chosen[key]
    if isinstance(chosen, bool) or not isinstance(chosen, int | float):
        return str(chosen)
    tried: list[Any] = sorted({one.values[key] for one in found.candidates if key in one.values})
    ends = {tried[-1]: "largest", tried[0]: "smallest"} if len(tried) > 1 else {}
    return f"{chosen:g}, the {ends[chosen]} of {len(tried)}" if chosen in ends else f"{chosen:g}"


def _cell(numbers: Sequence[float], at_least: bool, some: bool) -> str:
    """Return "45.2 ± 1.3"; of some seeds alone with their number."""
    if not numbers:
        return "-"
    mean = statistics.fmean(numbers)
    digits = 0 if mean >= 1e4 else 1 if mean >= 10 else 2 if mean >= 1 else 3
    said = f"{mean:,.{digits}f}"
    if len(numbers) > 1 and (spread := statistics.stdev(numbers)) > 0:
        said += f"{GLUE}±{GLUE}{spread:,.{digits}f}"
    return "at least " * at_least + said + f" ({len(numbers)} of them)" * some
