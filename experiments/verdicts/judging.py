"""Claims against what was run: paired by seed, a t-test for each sum, Holm's correction within a table of a paper."""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from experiments.verdicts.claims import Claim, Claims, ClaimTable, Contrast, Place, contrasts
from experiments.verdicts.stored import ExperimentResults, Value, differing, value_of
from fleetfit.report.statistics import confidence_interval

ALPHA = 0.05


class Verdict(enum.StrEnum):
    """What can be said of a claim."""

    HOLDS = "holds"
    CONTRADICTED = "contradicted"
    OPEN = "inconclusive"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Estimate:
    """The result of one contrast.

    Attributes:
        contrast: The contrast.
        seeds: How many runs it is the mean of.
        mean: The mean over the seeds, in percentage points, or as a ratio (the geometric mean).
        low, high: The ends of its 95% interval; None of a single seed, and where all seeds gave the same.
        above, below: One-sided p of being above and below the claim's threshold; 1 where that cannot be shown.
        bounded: "at least" or "at most" where runs ended before their number was known.
        problem: Why no verdict follows from it.
    """

    contrast: Contrast
    seeds: int
    mean: float
    low: float | None = None
    high: float | None = None
    above: float = 1.0
    below: float = 1.0
    bounded: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Judged:
    """A claim and its verdict.

    Attributes:
        table, claim: The claim.
        verdict: The verdict.
        weakest: The contrast that has least for it, which decides; None where nothing was run.
        estimates: Those of all its contrasts; empty where nothing was run.
        contrasts: How many the claim has.
        p: Two-sided p, after the correction; None where there is no test.
        reason: Why it is not run or inconclusive.
    """

    table: ClaimTable
    claim: Claim
    verdict: Verdict
    weakest: Estimate | None = None
    estimates: tuple[Estimate, ...] = ()
    contrasts: int = 1
    p: float | None = None
    reason: str = ""


def judge(claims: Claims, results: Mapping[str, ExperimentResults]) -> list[Judged]:
    """Return a verdict for every claim, in the file's order; those of a table or a family are corrected together."""
    families: dict[str, list[ClaimTable]] = {}
    for number, table in enumerate(claims.table):
        families.setdefault(table.family or str(number), []).append(table)
    by_id = {
        one.claim.id: one
        for tables in families.values()
        for one in _judge_family([(table, claim) for table in tables for claim in table.claim], results)
    }
    return [by_id[claim.id] for table in claims.table for claim in table.claim]


def judge_also(table: ClaimTable, results: Mapping[str, ExperimentResults]) -> list[Judged]:
    """Return what is to be said of the orders that were looked at after the runs, corrected for one another alone."""
    return _judge_family([(table, claim) for claim in table.also], results)


def _judge_family(claims: Sequence[tuple[ClaimTable, Claim]], results: Mapping[str, ExperimentResults]) -> list[Judged]:
    family = [_judged(table, claim, results) for table, claim in claims]
    tested = [one for one in family if one.p is not None]
    corrected = dict(zip(map(id, tested), holm([one.p for one in tested if one.p is not None]), strict=True))
    return [_corrected(one, corrected[id(one)]) if id(one) in corrected else one for one in family]


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down procedure, in their order.

    The smallest of m is multiplied by m, the next by m - 1, and so on; none is below one that was smaller before.
    """
    order = sorted(range(len(p)), key=lambda i: p[i])
    found, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        found[i] = least
    return found


# ---- one claim -------------------------------------------------------------------------------------------------------


def _judged(table: ClaimTable, claim: Claim, results: Mapping[str, ExperimentResults]) -> Judged:
    """Return a verdict without the correction, or with p and no verdict but "inconclusive"."""
    sums = contrasts(table, claim)
    estimates = []
    for contrast in sums:
        found = _estimated(claim, contrast, results)
        if isinstance(found, str):
            return Judged(table, claim, Verdict.NOT_RUN, contrasts=len(sums), reason=found)
        estimates.append(found)
    if claim.exact:
        return _exact(table, claim, estimates)
    weakest = max(estimates, key=lambda e: (bool(e.problem), e.above, -e.mean))
    judged = Judged(table, claim, Verdict.OPEN, weakest, tuple(estimates), len(sums), None, weakest.problem)
    alone = next((e for e in estimates if e.seeds < 2), None)
    if alone is not None:
        return replace(judged, verdict=Verdict.NOT_RUN, weakest=alone, reason="one seed only")
    if weakest.problem:
        return judged
    every, none = max(e.above for e in estimates), min(1.0, len(sums) * min(e.below for e in estimates))
    if none < every:  # the one that speaks against it
        judged = replace(judged, weakest=min(estimates, key=lambda e: (e.below, e.mean)))
    return replace(judged, p=min(1.0, 2 * min(every, none)))


def _corrected(judged: Judged, p: float) -> Judged:
    """Return the verdict that a corrected p gives."""
    if p >= ALPHA or judged.weakest is None:
        return replace(judged, p=p)
    against = judged.weakest.below < judged.weakest.above
    return replace(judged, p=p, verdict=Verdict.CONTRADICTED if against else Verdict.HOLDS)


def _exact(table: ClaimTable, claim: Claim, estimates: Sequence[Estimate]) -> Judged:
    """Judge numbers without chance: they are above the threshold, or not."""
    at = _threshold(claim)
    unfit = next((e for e in estimates if e.problem), None)
    if unfit is not None:
        return Judged(table, claim, Verdict.OPEN, unfit, tuple(estimates), len(estimates), None, unfit.problem)
    weakest = min(estimates, key=lambda e: e.mean)
    holds = weakest.mean >= at if claim.by is not None else weakest.mean > at
    verdict = Verdict.HOLDS if holds else Verdict.CONTRADICTED
    return Judged(table, claim, verdict, weakest, tuple(estimates), len(estimates))


def _threshold(claim: Claim) -> float:
    if claim.by is not None:
        return claim.by
    return 1.0 if claim.measure == "ratio" else 0.0


# ---- one sum ---------------------------------------------------------------------------------------------------------


def _estimated(claim: Claim, contrast: Contrast, results: Mapping[str, ExperimentResults]) -> Estimate | str:
    """Return what came out, or why there is nothing."""
    places = [*contrast.plus, *contrast.minus]
    numbers: list[dict[int, Value]] = []
    for place in places:
        found = _numbers(place, results)
        if isinstance(found, str):
            return found
        numbers.append(found)
    seeds = sorted(set.intersection(*(set(found) for found in numbers)))
    if not seeds:
        return "no seed that all sides share"
    by_seed = [[found[seed] for found in numbers] for seed in seeds]
    problem = next((v.problem for values in by_seed for v in values if v.problem), "") or _files_differ(
        claim, places, results
    )
    if claim.measure == "ratio" and any(v.number <= 0 for values in by_seed for v in values):
        problem = "a number that is divided by is not above zero"
        return Estimate(contrast, len(seeds), math.nan, problem=problem)
    return _tested(claim, contrast, by_seed, problem)


def _numbers(place: Place, results: Mapping[str, ExperimentResults]) -> dict[int, Value] | str:
    if place.file not in results:
        return f"no results of `experiments/{place.file}`"
    experiment = results[place.file]
    there = experiment.runs
    if (place.setting, place.row) not in there:
        where = f' in setting "{place.setting}"' if place.setting else ""
        return f'no run of row "{place.row}"{where} of `experiments/{place.file}`'
    runs = there[place.setting, place.row]
    found = {seed: value_of(experiment, run, place.column) for seed, run in runs.items()}
    known = {seed: value for seed, value in found.items() if value is not None}
    return known or f'row "{place.row}" of `experiments/{place.file}` was stored without "{place.column}"'


def _files_differ(claim: Claim, places: Sequence[Place], results: Mapping[str, ExperimentResults]) -> str:
    """Return why numbers of two experiments cannot be compared, or an empty string."""
    first = results[places[0].file]
    for place in places:
        other = results[place.file]
        said = differing(first.settings, other.settings)
        rounds = _rounds_of(first, places[0]), _rounds_of(other, place)
        if not said and other is not first and not claim.rounds_differ and rounds[0] != rounds[1]:
            said = "rounds"
        if said:
            return f"`experiments/{first.file}` and `experiments/{other.file}` differ in {said}"
    return ""


def _rounds_of(results: ExperimentResults, place: Place) -> set[int]:
    return {run.rounds for run in results.runs[place.setting, place.row].values()}


def _tested(claim: Claim, contrast: Contrast, by_seed: Sequence[Sequence[Value]], problem: str) -> Estimate:
    """Return mean, interval and one-sided p of a sum whose terms are paired by seed."""
    ratio, pluses = claim.measure == "ratio", len(contrast.plus)

    def back(value: float) -> float:
        return math.exp(value) if ratio else value

    def summed(values: Sequence[Value]) -> float:
        terms = [math.log(v.number) if ratio else v.number for v in values]
        return sum(terms[:pluses]) - sum(terms[pluses:])

    sums = [summed(values) for values in by_seed]
    least = any(v.at_least for values in by_seed for v in values[:pluses])
    most = any(v.at_least for values in by_seed for v in values[pluses:])
    if least and most:
        problem = problem or "runs ended before they reached the target"
    mean = sum(sums) / len(sums)
    bounded = "at least" if least else "at most" if most else ""
    found = Estimate(contrast, len(sums), back(mean), bounded=bounded, problem=problem)
    if len(sums) < 2 or claim.exact:
        return found
    ends = confidence_interval(sums, 1 - ALPHA)
    if ends is None:
        return replace(found, problem=problem or "all seeds gave the same, from which no interval follows")
    at = math.log(_threshold(claim)) if ratio else _threshold(claim)
    above, below = (float(stats.ttest_1samp(sums, at, alternative=side).pvalue) for side in ("greater", "less"))
    return replace(
        found,
        low=back(ends[0]),
        high=back(ends[1]),
        above=1.0 if most else above,  # the true sum is smaller
        below=1.0 if least else below,
    )
