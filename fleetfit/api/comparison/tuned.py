"""`[compare.tune]`: the same small grid for every row and setting, judged on validation data, with seeds of its own.

The seeds are those of no run of the table, unless the file names them: what is chosen with a run's own seed fits that
run best. Test data are not looked at.
"""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fleetfit.api.comparison.planned import ComparedRun, ComparisonPlan, TunedKeys, label, nested
from fleetfit.api.results import Run
from fleetfit.config.reading import merged
from fleetfit.errors import ConfigError
from fleetfit.paths import make_slug
from fleetfit.report.columns import ROUNDS, best_so_far, curve, rounds_to
from fleetfit.report.results import TriedValues, TuningResult

FOLDER = Path("tune")

Candidate = tuple[ComparedRun, TunedKeys]
"""A run that tries values, and the values."""


def candidates(plan: ComparisonPlan) -> Iterator[Candidate]:
    """Yield what is tried: row by row, setting by setting, values by values, seed by seed."""
    if plan.tuning == [()]:
        return
    for entry in (one for one in plan.entries() if one.seed == plan.seeds[0]):
        for choice in plan.tuning:
            for seed in plan.tune_seeds:
                keys = nested(choice)
                change = {**keys, "seed": seed, "evaluate": {**keys.get("evaluate", {}), "split": "validation"}}
                place = FOLDER / entry.place.parent / make_slug(label(choice)) / f"seed-{seed}"
                table = merged(entry.table, change)
                yield ComparedRun(entry.row, entry.setting, seed, table, place, entry.written), choice


def chosen(
    plan: ComparisonPlan, tried: Sequence[Candidate], runs: Sequence[Run | None]
) -> list[tuple[TunedKeys, TuningResult]]:
    """Return what each row gets in each setting, and what was tried for it.

    Args:
        plan: What is compared.
        tried: What was tried.
        runs: The run of each; None for one without any usable update, whose values are chosen last.

    Raises:
        ConfigError: A run has no score.
    """
    each, per = len(plan.tuning), len(plan.tune_seeds)
    found = []
    for start in range(0, len(tried), each * per):
        entry, _ = tried[start]
        scored = [
            [_tried(plan, *one, run) for one, run in zip(tried[i : i + per], runs[i : i + per], strict=True)]
            for i in range(start, start + each * per, per)
        ]
        best = max(range(each), key=lambda i: _merit(plan, scored[i]))  # the first of equal ones
        values = plan.tuning[best]
        every = tuple(one for seeds in scored for one in seeds)
        found.append((values, TuningResult(entry.row, entry.setting, dict(values), every)))
    return found


def _tried(plan: ComparisonPlan, entry: ComparedRun, choice: TunedKeys, found: Run | None) -> TriedValues:
    if found is None:
        return TriedValues(dict(choice), None, entry.seed)
    section, summary = plan.section, found.summary
    if section.tune_on != ROUNDS:
        score = summary[section.tune_on]
        points: Any = [] if score is None else [(0, score)]
    else:
        points = curve(found.metrics, summary["norm"], section.target_on)
    if not points:
        raise ConfigError(NO_VALIDATION)
    best = best_so_far(points)[-1][1]
    reached = rounds_to(points, plan.targets[0]) if section.tune_on == ROUNDS else None
    return TriedValues(dict(choice), round(100 * best, 4), found.experiment.seed, reached)


NO_VALIDATION = (
    "[compare.tune] chooses on validation data, and no client has any. Hold some out, such as with "
    "data.validation = 0.1, or leave [compare.tune] out; test data are not looked at."
)


def _merit(plan: ComparisonPlan, seeds: Sequence[TriedValues]) -> tuple[float, float]:
    """Return how good values are over their seeds, larger is better: fewest rounds if these decide, then accuracy."""
    scores = [one.score for one in seeds if one.score is not None]
    accuracy = statistics.fmean(scores) if len(scores) == len(seeds) else float("-inf")
    if plan.section.tune_on != ROUNDS:
        return 0.0, accuracy
    reached = [one.rounds for one in seeds if one.rounds is not None]
    return (-statistics.fmean(reached) if len(reached) == len(seeds) else float("-inf")), accuracy
