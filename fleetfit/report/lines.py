"""`table.csv` of a comparison: numbers as numbers, a line for each run, and lines with what they say together.

The column `what` says what a line holds:

    run                      one run, with its seed
    mean, deviation          over the seeds of a row in a setting; `seeds` says how many there are
    difference, low, high    from the row in `against`, over the seeds that both have, and its 95% interval
    paper                    a paper's own numbers
    candidate                values that were tried for a row on validation data: `tuned`, and their score `validation`

Accuracies and waste are in percent, differences of them in points of percent. An empty cell was not measured, or cannot
be told. Rounds to a target have a mean only where all seeds reached it.
"""

import csv
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence

from fleetfit.errors import escape_controls
from fleetfit.records.schema import ComparisonResults, RunResult, TuningResult
from fleetfit.report.columns import ATTACKED, names_of_numbers, number_name, rounds_column
from fleetfit.report.differences import Difference
from fleetfit.report.tuning import values_in_words

_FIRST = ("what", "row", "setting", "seed", "against", "seeds", "tuned", "rounds", "validation")
_LAST = ("training_seconds", "seconds")

Line = Mapping[str, str | float | None]


def table_csv(
    results: ComparisonResults,
    differences: Sequence[Difference],
    targets: Sequence[float],
    printed: Mapping[tuple[str, str, str], float],
) -> str:
    """Return the text of the file.

    Args:
        results: The runs.
        differences: Those of the table.
        targets: The accuracies that rounds are counted to; each is a column.
        printed: A paper's numbers by (row, setting, column).
    """
    text = io.StringIO()
    there = {name for run in results.runs for name in run.final}
    there |= {number_name(column) for column in (*(one.column for one in differences), *(c for _, _, c in printed))}
    names = [name for name in names_of_numbers(targets) if name in there or name not in ATTACKED]
    writer = csv.DictWriter(text, [*_FIRST, *names, *_LAST], restval="", lineterminator="\n")
    writer.writeheader()
    groups: dict[tuple[str, str], list[RunResult]] = {}
    for run in results.runs:
        groups.setdefault((run.row, run.setting), []).append(run)
    writer.writerows(_numbers_of(run) for run in results.runs)
    for key, runs in groups.items():
        writer.writerows(_together(*key, [_numbers_of(run) for run in runs]))
    writer.writerows(_of_differences(differences, results.against))
    writer.writerows(_of_paper(printed))
    writer.writerows(_of_tuning(results.tuning, targets))
    return escape_controls(text.getvalue())


def _numbers_of(run: RunResult) -> Line:
    return {
        "what": "run", "row": run.row, "setting": run.setting, "seed": run.seed, "seeds": 1, "rounds": run.rounds,
        "tuned": values_in_words(run.tuned),
        **run.final, "training_seconds": run.training_seconds, "seconds": run.seconds,
    }  # fmt: skip


def _together(row: str, setting: str, lines: Sequence[Line]) -> Iterator[Line]:
    """Yield the mean and the standard deviation over the seeds of what all of them have."""
    named: dict[str, str | float] = {"row": row, "setting": setting, "seeds": len(lines)}
    values: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in _FIRST[:7] and isinstance(value, int | float):
                values.setdefault(name, []).append(value)
    whole = {name: found for name, found in values.items() if len(found) == len(lines)}
    yield {"what": "mean", **named, **{name: _short(statistics.fmean(found)) for name, found in whole.items()}}
    if len(lines) > 1:
        spread = {name: _short(statistics.stdev(found)) for name, found in whole.items()}
        yield {"what": "deviation", **named, **spread}


def _of_differences(differences: Sequence[Difference], against: str) -> Iterator[Line]:
    groups: dict[tuple[str, str], list[Difference]] = {}
    for one in differences:
        groups.setdefault((one.row, one.setting), []).append(one)
    for (row, setting), found in groups.items():
        seeds = max(len(one.seeds) for one in found)
        named: dict[str, str | float] = {"row": row, "setting": setting, "against": against, "seeds": seeds}
        for what, ends in (
            ("difference", {one.column: one.mean for one in found}),
            ("low", {one.column: one.low for one in found}),
            ("high", {one.column: one.high for one in found}),
        ):
            numbers = {number_name(column): _short(end) for column, end in ends.items() if end is not None}
            if numbers:
                yield {"what": what, **named, **numbers}


def _of_paper(printed: Mapping[tuple[str, str, str], float]) -> Iterator[Line]:
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for (row, setting, column), number in printed.items():
        groups.setdefault((row, setting), {})[number_name(column)] = number
    for (row, setting), numbers in groups.items():
        yield {"what": "paper", "row": row, "setting": setting, **numbers}


def _of_tuning(tuning: Sequence[TuningResult], targets: Sequence[float]) -> Iterator[Line]:
    for one in tuning:
        for tried in one.candidates:
            reached = {} if tried.rounds is None else {number_name(rounds_column(targets[0])): tried.rounds}
            yield {
                "what": "candidate", "row": one.row, "setting": one.setting, "seed": tried.seed, "seeds": 1,
                "tuned": values_in_words(tried.values), "validation": tried.score, **reached,
            }  # fmt: skip


def _short(value: float) -> float:
    return round(value, 6)
