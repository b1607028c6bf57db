"""What every row of an experiment has: the numbers behind the verdicts, mean and standard deviation over the seeds."""

import statistics
from collections.abc import Collection, Sequence
from typing import Any

from experiments.verdicts.claims import ClaimTable, contrasts
from experiments.verdicts.stored import ExperimentResults, value_of

RATE = "local.lr"
GLUE = "\u00a0"  # a space at which no line breaks


def compared(table: ClaimTable) -> tuple[list[str], set[str]]:
    """Return the columns of a table's own experiment that its claims compare, in their order, and in which settings."""
    places = [p for claim in table.every for c in contrasts(table, claim) for p in (*c.plus, *c.minus)]
    own = [place for place in places if place.file == table.file]
    return list(dict.fromkeys(place.column for place in own)), {place.setting for place in own}


def measured(
    results: ExperimentResults, columns: Sequence[str], within: Collection[str]
) -> tuple[list[str], list[list[str]]]:
    """Return the head and the lines of a table of all rows of an experiment.

    Args:
        results: The experiment.
        columns: Which of its numbers are shown.
        within: In which settings.
    """
    runs = [(setting, row, by_seed) for (setting, row), by_seed in results.runs.items() if setting in within]
    first = list(dict.fromkeys(setting for setting, _, _ in runs))
    settings = len(first) > 1
    tuned = sorted({key for found in results.tuning.values() for key in found.chosen})
    head = ["setting"] * settings + ["row", *("learning rate" if key == RATE else key for key in tuned), "seeds"]
    lines = []
    for setting, row, by_seed in sorted(runs, key=lambda one: first.index(one[0])):
        line = [setting] * settings + [row, *(_chosen(results, setting, row, key) for key in tuned), str(len(by_seed))]
        found = [[value_of(results, run, column) for run in by_seed.values()] for column in columns]
        known = [[value for value in values if value is not None] for values in found]
        cells = [
            _cell([v.number for v in values], any(v.at_least for v in values), len(values) < len(by_seed))
            for values in known
        ]
        lines.append(line + cells)
    return [*head, *columns], lines


def _chosen(results: ExperimentResults, setting: str, row: str, key: str) -> str:
    """Return what tuning chose for a row, and where it lies among what was tried: an end of it may not be the best."""
    found = results.tuning.get((setting, row))
    if found is None or key not in found.chosen:
        return "-"
    chosen = found.chosen[key]
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
