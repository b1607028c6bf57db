"""`table.csv` of a comparison: a line for each run, and lines with numbers over seeds.

The column `what` is the kind of a line:

- `run`: one run, with its seed;
- `mean`, `deviation`: over the seeds of a row in a setting; `seeds` is their number;
- `difference`, `low`, `high`: from the row in `against`, and its 95% interval, over `seeds` common seeds; numbers with
  fewer common seeds have lines of their own;
- `paper`: a paper's own numbers;
- `candidate`: values `tuned` for a row on validation data, and their score `validation`.

Accuracies and waste are in percent, their differences in percentage points. An empty cell was not measured or is not
known. Rounds to a target have a mean only if all seeds reached it.
"""

import csv
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence

from fleetfit.errors import escape_controls
from fleetfit.report.columns import ATTACKED, PERSONAL, list_number_names, number_name, rounds_column
from fleetfit.report.statistics import Difference, paired_differences
from fleetfit.report.tables import format_values
from fleetfit.runs.schema import ComparisonResults, RunResult, TuningResult

_FIRST = ("what", "row", "setting", "seed", "against", "seeds", "tuned", "rounds", "validation")
_LABELS = _FIRST[:7]
_LAST = ("training_seconds", "seconds")

Line = Mapping[str, str | float | None]


def format_comparison_csv(results: ComparisonResults) -> str:
    """Return the text of the file."""
    text = io.StringIO()
    differences = paired_differences(results, results.columns)
    present = {name for run in results.runs for name in run.final}
    columns = (*(one.column for one in differences), *(name for one in results.printed for name in one.numbers))
    present |= {number_name(column) for column in columns}
    names = [
        name for name in list_number_names(results.targets) if name in present or name not in (*ATTACKED, PERSONAL)
    ]
    writer = csv.DictWriter(text, [*_FIRST, *names, *_LAST], restval="", lineterminator="\n")
    writer.writeheader()
    groups: dict[tuple[str, str], list[Line]] = {}
    for run in results.runs:
        line = make_run_line(run)
        writer.writerow(line)
        groups.setdefault((run.row, run.setting), []).append(line)
    for key, lines in groups.items():
        writer.writerows(_iter_seed_lines(*key, lines))
    writer.writerows(_iter_difference_lines(differences, results.against))
    for one in results.printed:
        numbers = {number_name(column): number for column, number in one.numbers.items()}
        numbers = {name: number for name, number in numbers.items() if name in names}  # not of targets of other tables
        writer.writerow({"what": "paper", "row": one.row, "setting": one.setting, **numbers})
    writer.writerows(_iter_tuning_lines(results.tuning, results.targets))
    return escape_controls(text.getvalue())


def make_run_line(run: RunResult) -> Line:
    """Return the cells of a run, by column."""
    return {
        "what": "run", "row": run.row, "setting": run.setting, "seed": run.seed, "seeds": 1, "rounds": run.rounds,
        "tuned": format_values(run.tuned),
        **run.final, "training_seconds": run.training_seconds, "seconds": run.seconds,
    }  # fmt: skip


def _iter_seed_lines(row: str, setting: str, lines: Sequence[Line]) -> Iterator[Line]:
    """Yield mean and standard deviation over the seeds, for numbers that all seeds have."""
    labels: dict[str, str | float] = {"row": row, "setting": setting, "seeds": len(lines)}
    values: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in _LABELS and isinstance(value, int | float):
                values.setdefault(name, []).append(value)
    complete = {name: numbers for name, numbers in values.items() if len(numbers) == len(lines)}
    yield {"what": "mean", **labels, **{name: _round(statistics.fmean(numbers)) for name, numbers in complete.items()}}
    if len(lines) > 1:
        deviations = {name: _round(statistics.stdev(numbers)) for name, numbers in complete.items()}
        yield {"what": "deviation", **labels, **deviations}


def _iter_difference_lines(differences: Sequence[Difference], against: str) -> Iterator[Line]:
    groups: dict[tuple[str, str, int], list[Difference]] = {}
    for one in differences:
        groups.setdefault((one.row, one.setting, len(one.seeds)), []).append(one)
    for (row, setting, seeds), group in groups.items():
        labels: dict[str, str | float] = {"row": row, "setting": setting, "against": against, "seeds": seeds}
        for kind, values in (
            ("difference", {one.column: one.mean for one in group}),
            ("low", {one.column: one.low for one in group}),
            ("high", {one.column: one.high for one in group}),
        ):
            numbers = {number_name(column): _round(value) for column, value in values.items() if value is not None}
            if numbers:
                yield {"what": kind, **labels, **numbers}


def _iter_tuning_lines(tuning: Sequence[TuningResult], targets: Sequence[float]) -> Iterator[Line]:
    for one in tuning:
        for tried in one.candidates:
            rounds = {} if tried.rounds is None else {number_name(rounds_column(targets[0])): tried.rounds}
            yield {
                "what": "candidate", "row": one.row, "setting": one.setting, "seed": tried.seed, "seeds": 1,
                "tuned": format_values(tried.values), "validation": tried.score, **rounds,
            }  # fmt: skip


def _round(value: float) -> float:
    return round(value, 6)
