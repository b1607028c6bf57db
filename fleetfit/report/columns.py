"""Numbers of a run in the table of a comparison: final accuracies, rounds to a target, the waste rate.

Rounds to a target as in McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(2017), section 3: the curve of accuracies is made monotone by the best one so far, and crosses the target where the
straight line between two evaluated rounds does. Then a speed-up is the first row's rounds over a row's own.

Differs from the paper: the accuracy before the first round is not measured, so a target reached at the first evaluation
counts as reached in that round.
"""

import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from fleetfit.report.text import format_mean

if TYPE_CHECKING:  # `list` prints a table without pydantic
    from fleetfit.runs.schema import RoundRecord, SummaryRecord

ROUNDS = "rounds"
PERSONAL = "personal"
"""For runs with `evaluate.personal`: clients' own levels with their class frequencies; never mixed with "local"."""
ON_THE_WAY = ("local", "global", "local_worst_tenth", "global_worst_tenth", "ensemble", "mean_over_exits", PERSONAL)
"""Accuracies of every evaluation. Others are only in the last one, unless `evaluate.whole_test_set` is set."""
MEANINGS = {
    "local": "local is each client's model of its own level on its own data",
    "global": "global is the largest model on each client's data",
}
"""What the main accuracies are, for a line below a table."""
BATCH = ", batch"
"""Suffix of the name of an accuracy with batch statistics: "global, batch"."""
ATTACKED = ("backdoor", "hostile_excluded", "honest_excluded", *(f"honest_excluded_{n}" for n in range(1, 9)))
"""For runs with `[attack]`: success of a backdoor, and the shares of updates excluded by a defense, also by level."""
COLUMNS = (*ON_THE_WAY, "best_exit", "avg", "full", "waste", *ATTACKED, ROUNDS, f"local{BATCH}", f"global{BATCH}")
"""The names that `[compare] columns` may have; `docs/experiments.md` explains each."""
_HEADLINE_NUMBERS = tuple(name for name in COLUMNS if name != ROUNDS and not name.endswith(BATCH))

FURTHER = ("local", "global", "avg", "full")
"""Accuracies that `make_final_numbers` has for both batch-norm policies, if a run evaluates both."""
COSTS = ("parameters", "multiply_adds", "bytes_down", "bytes_up", "simulated_s", "failures")
"""Costs of a run: elements of its largest level, and sums over all rounds."""

Curve = Sequence[tuple[int, float]]
"""Evaluated rounds (ascending, from 1) with their accuracies."""


def expand_columns(names: Sequence[str], targets: Sequence[float]) -> list[str]:
    """Return the table's columns: "rounds" becomes one for each target."""
    columns: list[str] = []
    for name in names:
        columns += [rounds_column(target) for target in targets] if name == ROUNDS else [name]
    return columns


def rounds_column(target: float) -> str:
    """Return the heading of the rounds to a target: "rounds to 97%"."""
    return f"{ROUNDS} to {100 * target:.6g}%"


def is_rounds(column: str) -> bool:
    """Return whether a column counts rounds."""
    return column.startswith(f"{ROUNDS} to ")


# ---- of one run ------------------------------------------------------------------------------------------------------


def find_numbers(
    summary: "SummaryRecord",
    rounds: "Sequence[RoundRecord]",
    columns: Sequence[str],
    targets: Sequence[float] = (),
    target_on: str = "global",
) -> dict[str, float | None]:
    """Return a run's number in each column: fractions or rounds; None if a number is missing.

    Args:
        summary: Its final numbers.
        rounds: The reports of its rounds.
        columns: The columns, after `expand_columns`.
        targets: The target accuracies for counting rounds.
        target_on: The name of that accuracy.
    """
    numbers: dict[str, float | None] = {}
    for name in columns:
        number = summary.headline.number(name)
        numbers[name] = summary.number(name) if number is None else number
    batch = summary.evaluate.batch
    for name in columns:
        if name.endswith(BATCH):
            numbers[name] = None if batch is None else batch.number(name.removesuffix(BATCH))
    reached = make_accuracy_curve(rounds, summary.norm, target_on)
    return numbers | {
        rounds_column(target): find_rounds_to(reached, target) for target in targets if rounds_column(target) in columns
    }


def list_number_names(targets: Sequence[float]) -> list[str]:
    """Return the names of all numbers of `make_final_numbers`, in order."""
    other = [f"{name}_{norm}" for norm in ("static", "batch") for name in FURTHER]
    rounds = [number_name(rounds_column(target)) for target in targets]
    return [*_HEADLINE_NUMBERS, *other, *rounds, *COSTS]


def number_name(column: str) -> str:
    """Return a column's name in files of numbers, such as "rounds_to_97" for "rounds to 97%"."""
    return column.removesuffix("%").replace(" ", "_") if is_rounds(column) else column.replace(BATCH, "_batch")


def make_final_numbers(
    summary: "SummaryRecord", rounds: "Sequence[RoundRecord]", targets: Sequence[float], target_on: str
) -> dict[str, float]:
    """Return all numbers of a finished run for tables, by their names in files of numbers.

    Args:
        summary: Its final numbers.
        rounds: The reports of its rounds.
        targets: The target accuracies for counting rounds.
        target_on: The name of that accuracy.

    Returns:
        Accuracies and waste in percent, rounded to 4 decimals; rounds; costs. Numbers that were not measured are
        absent. An accuracy with the second batch-norm policy is named `local_batch` or `local_static`.
    """
    shares = find_numbers(summary, rounds, _HEADLINE_NUMBERS)
    for norm in ("static", "batch"):
        accuracies = summary.evaluate.accuracies(norm) if norm != summary.norm else None
        shares |= {f"{name}_{norm}": accuracies.number(name) if accuracies else None for name in FURTHER}
    numbers = {name: round(100 * share, 4) for name, share in shares.items() if share is not None}
    headings = [rounds_column(target) for target in targets]
    reached = find_numbers(summary, rounds, headings, targets, target_on)
    numbers |= {number_name(name): round(value, 4) for name, value in reached.items() if value is not None}
    costs = {"parameters": summary.levels[-1].parameters, **{name: summary.number(name) for name in COSTS[1:]}}
    return numbers | {name: value for name, value in costs.items() if value is not None}


def make_accuracy_curve(rounds: "Sequence[RoundRecord]", norm: str, kind: str) -> list[tuple[int, float]]:
    """Return the rounds of a run that were evaluated on all clients and samples, with one accuracy."""
    evaluations = [
        (one.round, one.evaluate.accuracies(norm)) for one in rounds if one.evaluate and not one.evaluate.partial
    ]
    points = [(number, accuracies.number(kind)) for number, accuracies in evaluations if accuracies is not None]
    return [(number, accuracy) for number, accuracy in points if accuracy is not None]


def keep_best(points: Curve) -> list[tuple[int, float]]:
    """Return the curve with each accuracy replaced by the best one so far."""
    best = accumulate((accuracy for _, accuracy in points), max)
    return [(number, accuracy) for (number, _), accuracy in zip(points, best, strict=True)]


def find_rounds_to(points: Curve, target: float) -> float | None:
    """Return the number of rounds until a curve first reaches a target (see the module's docstring).

    Args:
        points: The measured curve.
        target: An accuracy, between 0 and 1.

    Returns:
        r_0 + (target - a_0) / (a_1 - a_0) * (r_1 - r_0) between the last evaluated round r_0 whose best accuracy a_0 so
        far is below the target and the next one r_1; the first evaluated round if it reaches the target; None if no
        round does.
    """
    best = keep_best(points)
    if best and best[0][1] >= target:
        return float(best[0][0])
    for (before, low), (after, high) in pairwise(best):
        if high >= target:
            return before + (target - low) / (high - low) * (after - before)
    return None


# ---- over seeds ------------------------------------------------------------------------------------------------------


def compute_mean_rounds(values: Sequence[float | None]) -> float | None:
    """Return the mean over the seeds; None unless all seeds reached the target."""
    rounds = [value for value in values if value is not None]
    return statistics.fmean(rounds) if rounds and len(rounds) == len(values) else None


def format_cell(column: str, values: Sequence[float | None], first: Sequence[float | None] | None = None) -> str:
    """Return the cell of a table: "84.49", "84.49 ± 0.31 (2 of 3 seeds)", "87.2 (3.6x)", "2 of 3 seeds", "-".

    Args:
        column: The column.
        values: The numbers of all seeds.
        first: Numbers of the first row, for the speed-up; None for the first row itself.
    """
    reached = sum(value is not None for value in values)
    if not is_rounds(column):
        return format_mean(values) + (f" ({reached} of {len(values)} seeds)" if 0 < reached < len(values) else "")
    mean = compute_mean_rounds(values)
    if mean is None:
        return f"{reached} of {len(values)} seeds" if reached else "-"
    start = None if first is None else compute_mean_rounds(first)
    speedup = "" if start is None else f" ({start / mean:.1f}x)"
    text = f"{mean:.1f}" if mean < 100 else f"{mean:.0f}"
    if len(values) > 1:
        return f"{text} ± {statistics.stdev([v for v in values if v is not None]):.1f}{speedup}"
    return text.removesuffix(".0") + speedup
