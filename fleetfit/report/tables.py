"""Tables in the papers' layout, from the records of runs and comparisons."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleetfit.errors import NO_STATISTICS
from fleetfit.report.columns import format_cell, is_rounds
from fleetfit.report.order import explain_order
from fleetfit.report.text import (
    EXITS,
    Table,
    describe_data,
    exit_names,
    format_bytes,
    format_count,
    format_duration,
    format_mean,
    format_percent,
    format_privacy,
    get_score_name,
)

if TYPE_CHECKING:  # `list` prints a table without them
    from fleetfit.cost import Cost, Latency
    from fleetfit.planner import Plan, Scaling, SplitLevel
    from fleetfit.report.statistics import Difference
    from fleetfit.runs.schema import AccuracyRecord, LevelRecord, SummaryRecord, TuningCandidate, TuningResult

_SMALL = 0.05  # parts of a run's time below this share are on the page only

# ---- one run ---------------------------------------------------------------------------------------------------------


def make_level_table(summary: "SummaryRecord") -> Table:
    """Return the levels with their sizes and the accuracy of their clients."""
    columns = ("level", "width", "depth", EXITS, "parameters", "multiply-adds", "clients",
               f"local {get_score_name(summary)} %")  # fmt: skip
    every = sorted({exit for level in summary.levels for exit in level.exits})
    rows = []
    for level in summary.levels:
        name, width, depth, *sizes = _format_level(level)
        exits = ", ".join(exit_names(level.exits, every))
        rows.append((name, width, depth, exits, *sizes, format_percent(level.local)))
    rounds = f"{summary.rounds} round{'' if summary.rounds == 1 else 's'}"
    title = f"{summary.method} on {summary.data} with {summary.model}, {rounds}"
    if summary.evaluate.split != "test":
        title += f", on {describe_data(summary)}"
    return Table(columns, tuple(rows), title)


def _format_level(level: "LevelRecord") -> tuple[str, ...]:
    return (
        level.level,
        f"{level.width:.2f}",
        f"{level.depth}/{level.blocks}",
        format_count(level.parameters),
        format_count(level.multiply_adds),
        str(level.clients),
    )


def make_total_table(summary: "SummaryRecord") -> Table:
    """Return the numbers of the run as a whole."""
    score, headline = get_score_name(summary), summary.headline
    rows = [
        (f"global {score} %", f"{format_percent(summary.global_)}{format_sample_counts(headline, 'global')}"),
        (f"local {score} %", f"{format_percent(summary.local)}{format_sample_counts(headline, 'local')}"),
    ]
    if summary.best is not None:
        rows.append((f"local {score} % after the best round, {summary.best.round}", format_percent(summary.best.local)))
    if headline.personal is not None:
        rows.append((f"personal {score} %, with each client's class frequencies", format_percent(headline.personal)))
    for norm, title in (("static", "static batch-norm statistics"), ("batch", "batch statistics")):
        accuracies = summary.evaluate.accuracies(norm)
        if accuracies is not None and norm != summary.norm:
            has_batches = accuracies.batch_size is not None
            batches = f", batches of {accuracies.batch_size}, {accuracies.order}" if has_batches else ""
            both = f"{format_percent(accuracies.global_)} / {format_percent(accuracies.local)}"
            rows.append((f"global / local {score} %, {title}{batches}", both))
    if summary.privacy is not None:
        rows = [
            (f"{score} of the full model %, on the server's test set", format_percent(headline.full)),
            ("mean over the levels' models %, on the server's test set", format_percent(headline.avg)),
            ("spent of the clients' privacy", format_privacy(summary.privacy.epsilon, summary.privacy.delta)),
        ]
    else:
        rows.append(("bytes sent down / up", _format_traffic(summary)))
    if summary.waste:
        rows.append(("sent but not returned %, mean over rounds", format_percent(summary.waste)))
    if summary.failures:
        rows.append(("failed jobs", str(summary.failures)))
    if summary.empty_rounds:
        rows.append(("rounds without a usable update", f"{summary.empty_rounds} of {summary.rounds}"))
    if summary.simulated_s is not None:
        rows.append(("simulated time", format_duration(summary.simulated_s)))
    rows.append(("time", format_duration(summary.seconds)))
    large = {part: seconds for part, seconds in summary.seconds_of.items() if seconds >= _SMALL * summary.seconds}
    rows += [(f"  of it {part}", format_duration(seconds)) for part, seconds in large.items()]
    failed = explain_missing(summary) or explain_failures(summary)
    notes = (*summary.notes, *failed, *explain_order([summary])[-1:])  # the page has all
    return Table(("", summary.method), tuple(rows), notes=notes)


def _format_traffic(summary: "SummaryRecord") -> str:
    if summary.bytes_down is None or summary.bytes_up is None:
        return "-"
    return f"{format_bytes(summary.bytes_down)} / {format_bytes(summary.bytes_up)}"


def explain_missing(summary: "SummaryRecord") -> list[str]:
    """Return a sentence on the accuracies of a run that could not be computed; empty if all could."""
    evaluation, score = summary.evaluate, get_score_name(summary)
    is_evaluated = bool(evaluation.model_fields_set)
    if summary.privacy is not None:
        is_missing = is_evaluated and summary.headline.full is None
        return [f"No {score}: the server has no test set."] if is_missing else []
    kinds = [f"{kind} {score}" for kind in ("global", "local") if summary.number(kind) is None]
    levels = [level.level for level in summary.levels if level.clients and level.local is None]
    if summary.local is not None and levels:
        kinds.append(f"local {score} of level {', '.join(levels)}")
    if not kinds:
        return []
    reasons = Counter(failure.reason for failure in evaluation.failures)
    if not is_evaluated:
        cause = "no round was evaluated"
    elif reasons:
        cause = f"{reasons.total()} jobs failed, {_format_main_reason(reasons)}"
    else:
        cause = f"no asked client that runs it has {evaluation.split or 'test'} samples"
    return [f"No {' and no '.join(kinds)}: {cause}."]


def explain_failures(summary: "SummaryRecord") -> list[str]:
    """Return a sentence with the main reason of failed jobs; empty if none failed."""
    reasons = Counter(summary.failure_reasons)
    return [f"{summary.failures} jobs failed, {_format_main_reason(reasons)}."] if reasons else []


def _format_main_reason(reasons: "Counter[str]") -> str:
    """Return the most frequent reason that is not the consequence of others."""
    causes = {reason: count for reason, count in reasons.items() if NO_STATISTICS not in reason} or reasons
    reason, count = max(causes.items(), key=lambda one: one[1])
    return f"{count} of them by {reason}"


def format_sample_counts(accuracies: "AccuracyRecord", kind: str) -> str:
    """Return the number of samples of an accuracy, such as " (30 of 40 samples)"; "" for all samples.

    Args:
        accuracies: Accuracies of an evaluation.
        kind: The accuracy. Only the samples of "global" and "local" are known.
    """
    samples = {"global": accuracies.global_samples, "local": accuracies.local_samples}.get(kind)
    every = accuracies.test_samples
    return f" ({samples:,} of {every:,} samples)" if samples is not None and every and samples < every else ""


# ---- a plan ----------------------------------------------------------------------------------------------------------

LATENCIES = ("measured latency ± spread (ms)", "measured / full")
"""Titles of the columns of `format_latency`."""
_OTHER_COSTS = {
    "memory_bytes": "training memory, batch {batch}",
    "size_bytes": "bytes of a message",
    "latency_s": "latency ± spread (ms)",
}


def make_plan_table(
    plan: "Plan", title: str = "", latencies: Sequence["Latency"] = (), notes: Sequence[str] = ()
) -> Table:
    """Return the levels of a plan with their costs.

    Args:
        plan: The plan.
        title: Its title.
        latencies: Latency of each level on this machine, and last of the full model; empty if not measured.
        notes: Sentences about the latencies.
    """
    costs = [cost for cost in plan.levels[-1].further if not cost.endswith("_spread_s")]
    columns = (
        "level",
        "width",
        "depth",
        EXITS,
        "parameters",
        "multiply-adds",
        *(_OTHER_COSTS.get(cost, cost).format(batch=plan.batch_size) for cost in costs),
        *(LATENCIES if latencies else ()),
        "target",
        f"{plan.cost} / full",
        "clients",
    )
    every = sorted({exit for level in plan.levels for exit in level.exits})
    rows = tuple(
        (
            level.name,
            f"{level.width:.2f}",
            f"{level.depth}/{plan.blocks}",
            ", ".join(exit_names(level.exits, every)),
            format_count(level.parameters),
            format_count(level.multiply_adds),
            *(_format_cost(level.further, cost) for cost in costs),
            *(format_latency(latencies[i], latencies[-1]) if latencies else ()),
            f"{level.target:.3g} ± {100 * level.tolerance:.3g}%",
            f"{level.share:.3f}",
            str(level.clients),
        )
        for i, level in enumerate(plan.levels)
    )
    lines = list(notes)
    if plan.early_heads.parameters:
        lines.append(describe_early_heads(plan.levels[-1].name, plan.early_heads))
    if plan.left_out:
        lines.append(f"{len(plan.left_out)} clients afford no level: {', '.join(plan.left_out)}.")
    return Table(columns, rows, title, tuple(lines))


def make_split_table(splits: "Mapping[Scaling, Sequence[SplitLevel]]", plan: "Plan") -> Table:
    """Return what the levels of each split cost to train and to run.

    Args:
        splits: The levels of each split, smallest first.
        plan: The run's.
    """
    profiles = sorted({name for levels in splits.values() for level in levels for name in level.step_s})
    columns = ("split", "level", "width", "depth", "parameters", "multiply-adds", "to train a sample",
               f"training memory, batch {plan.batch_size}", "bytes of a message",
               *(f"step on {name}" for name in profiles))  # fmt: skip
    rows = tuple(
        (
            split if index == 0 else "",
            str(index + 1),
            f"{level.width:.2f}",
            f"{level.depth}/{plan.blocks}",
            format_count(level.counts.parameters),
            format_count(level.counts.multiply_adds),
            format_count(level.training_work),
            format_bytes(level.memory_bytes),
            format_bytes(level.message_bytes),
            *(f"{level.step_s[name]:.3g} s" for name in profiles),
        )
        for split, levels in splits.items()
        for index, level in enumerate(levels)
    )
    return Table(columns, rows, "The same budgets, split in other ways (fleet.scaling)", keys=2)


def describe_early_heads(level: str, heads: "Cost") -> str:
    """Describe the counting of the full model, and the cost of its early classifiers."""
    return (
        f"Level {level} is counted without its early classifiers: {format_count(heads.parameters)} parameters, "
        f"{format_count(heads.multiply_adds)} multiply-adds."
    )


def format_latency(latency: "Latency", full: "Latency") -> tuple[str, str]:
    """Return a median with its spread in milliseconds, and as a fraction of the full model's."""
    return _format_milliseconds(latency.median_s, latency.spread_s), f"{latency.median_s / full.median_s:.3f}"


def _format_milliseconds(median_s: float, spread_s: float) -> str:
    median, spread = float(f"{1e3 * median_s:.3g}"), float(f"{1e3 * spread_s:.2g}")
    return f"{median:g} ± {spread:g}"


def _format_cost(costs: Mapping[str, float], cost: str) -> str:
    """Return another cost of a level as text. A latency is a median with the range between quartiles."""
    if cost not in costs:
        return "-"
    if cost == "latency_s":
        return _format_milliseconds(costs[cost], costs.get("latency_spread_s", 0.0))
    return format_bytes(costs[cost]) if cost.endswith("_bytes") else format_count(costs[cost])


# ---- a comparison ----------------------------------------------------------------------------------------------------

OF_THE_PAPER = " (paper)"
"""Suffix of the label of a line with a paper's numbers."""


def make_comparison_table(
    rows: Sequence[str],
    settings: Sequence[str],
    results: Mapping[tuple[str, str], Sequence[Mapping[str, float | None]]],
    title: str = "",
    notes: Sequence[str] = (),
    columns: Sequence[str] = ("local", "global"),
    printed: Mapping[tuple[str, str, str], float] | None = None,
) -> Table:
    """Return methods as rows and the columns of each setting side by side, as in ScaleFL's Table 3.

    Args:
        rows: Labels of the rows.
        settings: Labels of the settings; one empty label if there is only one setting.
        results: The numbers of all seeds by (row, setting), each by column (`fleetfit.report.columns`); a pair may be
            missing.
        title: Title of the table.
        notes: Sentences below it.
        columns: Columns of each setting.
        printed: A paper's numbers by (row, setting, column), in percent or rounds, for a line below the row's.
    """
    pairs = [(setting, column) for setting in settings for column in columns]
    paper = printed or {}
    lines = []
    for row in rows:
        cells = []
        for setting, column in pairs:
            row_seeds, first_seeds = results.get((row, setting), ()), results.get((rows[0], setting), ())
            start = None if row == rows[0] else [numbers.get(column) for numbers in first_seeds]
            cells.append(format_cell(column, [numbers.get(column) for numbers in row_seeds], start))
        lines.append((row, *cells))
        if any((row, *pair) in paper for pair in pairs):
            first_row = None if row == rows[0] else rows[0]
            lines.append((f"{row}{OF_THE_PAPER}", *(_format_printed(paper, row, first_row, *pair) for pair in pairs)))
    groups = (("", 1), *((setting, len(columns)) for setting in settings))
    return Table(("method", *(column for _, column in pairs)), tuple(lines), title, tuple(notes), groups)


def _format_printed(
    paper: Mapping[tuple[str, str, str], float], row: str, first: str | None, setting: str, column: str
) -> str:
    """Return a paper's number as the cell of a table; rounds with the speed-up over the paper's first row."""
    number = paper.get((row, setting, column))
    if number is None:
        return "-"
    if not is_rounds(column):
        return f"{number:.2f}"
    start = None if first is None else paper.get((first, setting, column))
    return f"{number:g}" if start is None else f"{number:g} ({start / number:.1f}x)"


def make_row_level_table(results: "Mapping[tuple[str, str], Sequence[SummaryRecord]]") -> Table:
    """Return the levels of each row and setting, accuracies over the seeds, and the row's bytes."""
    score = get_score_name(*(summary for summaries in results.values() for summary in summaries))
    columns = ("run", "level", "width", "depth", "parameters", "multiply-adds", "clients", f"local {score} %",
               f"global {score} %", "bytes down / up")  # fmt: skip
    rows = []
    for key, summaries in results.items():
        label = ", ".join(filter(None, key))
        totals = [format_mean([s.global_ for s in summaries]), _format_traffic(summaries[0])]
        for index, level in enumerate(summaries[0].levels):
            local = format_mean([s.levels[index].local for s in summaries if index < len(s.levels)])
            rows.append((label, *_format_level(level), local, *totals))
            label, totals = "", ["", ""]
    return Table(columns, tuple(rows), keys=2)


# ---- differences between rows ----------------------------------------------------------------------------------------

_STAR = " *"


def make_difference_table(differences: Sequence["Difference"], against: str) -> Table:
    """Return the differences as a table, at most 100 characters wide with labels of usual length."""
    has_settings = any(one.setting for one in differences)
    rows = tuple(
        (one.row, *([one.setting] if has_settings else []), one.column, str(len(one.seeds)), format_difference(one))
        for one in differences
    )
    difference = "difference [95% interval]" if any(one.low is not None for one in differences) else "difference"
    columns = ("row", *(["setting"] if has_settings else []), "column", "seeds", difference)
    notes = tuple(_iter_difference_notes(differences))
    return Table(columns, rows, f"Differences from {against}", notes, keys=columns.index("seeds"))


def format_difference(difference: "Difference") -> str:
    """Return a difference as the cell of a table: "+2.60 [+1.21, +3.99] *", "+2.60", "-"."""
    digits = 1 if is_rounds(difference.column) else 2
    if difference.mean is None:
        return "-"
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.{digits}f}"
    text = f"{difference.mean:+.{digits}f} [{difference.low:+.{digits}f}, {difference.high:+.{digits}f}]"
    return text + (_STAR if difference.order else "")


def _iter_difference_notes(differences: Sequence["Difference"]) -> Iterator[str]:
    if not any(one.low is not None for one in differences):
        yield "Row minus baseline in percentage points or rounds."
    else:
        yield (
            "Row minus baseline in percentage points or rounds: the mean over common seeds, paired by seed, with the "
            "interval by Student's t."
        )
        yield (
            f"{_STAR.strip()}: the interval excludes zero. Without it the order is inconclusive; of "
            f"{sum(one.low is not None for one in differences)} intervals, some exclude zero by chance."
        )
    if any(len(one.seeds) == 1 for one in differences):
        yield "With fewer than two seeds there is no interval and no order."
    if any(len(one.seeds) > 1 and one.low is None for one in differences):
        yield "If all seeds have the same difference, there is no interval either."
    if any(not one.seeds for one in differences):
        yield '"-": no seed has a number in both rows.'


# ---- tuning ----------------------------------------------------------------------------------------------------------


def make_tuning_table(tuning: Sequence["TuningResult"], criterion: str, rounds: int | None = None) -> Table:
    """Return the candidates of each row and setting with their scores on validation data.

    Args:
        tuning: The tried and chosen values.
        criterion: The criterion: "local", "global" or "rounds"; "" if unknown.
        rounds: The rounds of the tuning runs, if they are not those of the table's runs.
    """
    has_settings, counts_rounds = any(one.setting for one in tuning), criterion == "rounds"
    columns = ("row", *(["setting"] if has_settings else []), "candidate", *(["rounds"] if counts_rounds else []),
               "score %", "")  # fmt: skip
    rows = tuple(
        (
            one.row,
            *([one.setting] if has_settings else []),
            format_values(group[0].values),
            *([_format_mean_rounds(group)] if counts_rounds else []),
            _format_score(group),
            "chosen" if group[0].values == one.chosen else "",
        )
        for one in tuning
        for group in one.groups
    )
    seeds = dict.fromkeys(tried.seed for one in tuning for tried in one.candidates)
    note = f"On validation data, with seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    if rounds is not None:
        note += f", after {rounds} round{'s' if rounds > 1 else ''}"
    if counts_rounds:
        note += ", by fewest rounds to the first target, then the best accuracy"
    elif criterion:
        note += f', by the "{criterion}" accuracy'
    return Table(columns, rows, "Tuned", (f"{note}.", *find_grid_edges(tuning)))


def find_grid_edges(tuning: Sequence["TuningResult"]) -> list[str]:
    """Return a warning for each chosen number that is the smallest or largest tried for its row."""
    warnings = []
    for one in tuning:
        label = ", ".join(filter(None, [one.row, one.setting]))
        if one.is_tied:
            has_scores = any(None not in [tried.score for tried in group] for group in one.groups)
            reason = "all tried values are equally good" if has_scores else "no tried value has a score for every seed"
            warnings.append(f"{label}: {reason}, and the first was taken.")
            continue
        for key, value in one.chosen.items():
            numbers = {tried.values[key] for tried in one.candidates if _is_number(tried.values.get(key))}
            if _is_number(value) and len(numbers) > 1 and value in (min(numbers), max(numbers)):
                end = "smallest" if value == min(numbers) else "largest"
                warnings.append(f"{label}: {key} = {value} is the {end} value tried. Try values beyond it.")
    return warnings


def format_values(values: Mapping[str, Any]) -> str:
    """Return values as the cell of a table: "local.lr = 0.1, local.weight_decay = 0.0005"."""
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def _format_score(candidates: Sequence["TuningCandidate"]) -> str:
    scores = [one.score for one in candidates if one.score is not None]
    if not scores:
        return "-"
    deviation = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
    some = f" ({len(scores)} of {len(candidates)} seeds)" if len(scores) < len(candidates) else ""
    return f"{statistics.fmean(scores):.2f}{deviation}{some}"


def _format_mean_rounds(candidates: Sequence["TuningCandidate"]) -> str:
    rounds = [one.rounds for one in candidates if one.rounds is not None]
    if len(rounds) < len(candidates):
        return f"{len(rounds)} of {len(candidates)} seeds" if rounds else "-"
    return f"{statistics.fmean(rounds):.1f}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- data sets -------------------------------------------------------------------------------------------------------


def make_data_table(facts: Mapping[str, Mapping[str, Any] | None]) -> Table:
    """Return sizes, classes and resolution of data sets, as in ScaleFL's Table 2.

    Args:
        facts: The fields of `fleetfit.data.Facts` by name; None for a set without.
    """

    def format_fact(value: Any) -> str:
        return "any" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    rows = tuple(
        (name, *("" if one is None else format_fact(one[fact]) for fact in ("train", "test", "classes", "resolution")))
        for name, one in facts.items()
    )
    return Table(("data set", "train size", "test size", "classes", "resolution"), rows)
