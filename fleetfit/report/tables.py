"""Tables as they will stand in a paper; their numbers come from run folders."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleetfit.report.columns import cell, is_rounds
from fleetfit.report.order import out_of_order
from fleetfit.report.text import EXITS, Table, duration, exit_names, percent, score_of, short, size, spent, spread

if TYPE_CHECKING:  # `list` prints a table without them
    from fleetfit.cost import Cost, Latency
    from fleetfit.planner import Plan
    from fleetfit.records.schema import AccuracyRecord, SummaryRecord

# ---- one run ---------------------------------------------------------------------------------------------------------


def level_table(summary: "SummaryRecord") -> Table:
    """Return the levels with their sizes, and the accuracy of each level's own clients."""
    columns = ("level", "width", "depth", EXITS, "parameters", "multiply-adds", "clients",
               f"local {score_of(summary)} %")  # fmt: skip
    every = sorted({exit for level in summary.levels for exit in level.exits})
    rows = tuple(
        (
            level.level,
            f"{level.width:.2f}",
            f"{level.depth}/{level.blocks}",
            ", ".join(exit_names(level.exits, every)),
            short(level.parameters),
            short(level.multiply_adds),
            str(level.clients),
            percent(level.local),
        )
        for level in summary.levels
    )
    return Table(columns, rows, f"{summary.method} on {summary.data} with {summary.model}, {summary.rounds} rounds")


def total_table(summary: "SummaryRecord") -> Table:
    """Return the numbers of the run as a whole."""
    score, headline = score_of(summary), summary.headline
    rows = [
        (f"global {score} %", f"{percent(summary.global_)}{samples_left_out(headline, 'global')}"),
        (f"local {score} %", f"{percent(summary.local)}{samples_left_out(headline, 'local')}"),
    ]
    for norm, title in (("static", "static batch-norm statistics"), ("batch", "batch statistics")):
        accuracies = summary.evaluate.accuracies(norm)
        if accuracies is not None and norm != summary.norm:
            has_batches = accuracies.batch_size is not None
            batches = f", batches of {accuracies.batch_size}, {accuracies.order}" if has_batches else ""
            both = f"{percent(accuracies.global_)} / {percent(accuracies.local)}"
            rows.append((f"global / local {score} %, {title}{batches}", both))
    if summary.privacy is not None:
        rows = [(f"{score} of the full model %, on the server's test set", percent(headline.full)),
                ("mean of the levels' models %, there", percent(headline.avg)),
                ("spent of the clients' privacy", spent(summary.privacy.epsilon, summary.privacy.delta))]  # fmt: skip
    else:
        rows.append(("bytes sent down / up", format_traffic(summary)))
    if summary.waste:
        rows.append(("sent and not sent back %, mean of the rounds", percent(summary.waste)))
    if summary.failures:
        rows.append(("jobs that brought nothing back", str(summary.failures)))
    if summary.empty_rounds:
        rows.append(("rounds without a usable update", f"{summary.empty_rounds} of {summary.rounds}"))
    if summary.simulated_s is not None:
        rows.append(("simulated time", duration(summary.simulated_s)))
    rows.append(("time", duration(summary.seconds)))
    rows += [(f"  of it {part}", duration(seconds)) for part, seconds in summary.seconds_of.items()]
    notes = (*summary.notes, *explain_missing(summary), *out_of_order([summary]))
    return Table(("", summary.method), tuple(rows), notes=notes)


def format_traffic(summary: "SummaryRecord") -> str:
    """Return the bytes to the clients and from them: "1.5 MB / 30 B"; "-" where the run withholds them."""
    if summary.bytes_down is None or summary.bytes_up is None:
        return "-"
    return f"{size(summary.bytes_down)} / {size(summary.bytes_up)}"


def explain_missing(summary: "SummaryRecord") -> list[str]:
    """Return a sentence on the accuracies of a run that could not be computed; none where all were."""
    evaluation, score = summary.evaluate, score_of(summary)
    is_evaluated = bool(evaluation.model_fields_set)
    if summary.privacy is not None:
        is_missing = is_evaluated and summary.headline.full is None
        return [f"There is no {score}: the server has no test set."] if is_missing else []
    kinds = [f"{kind} {score}" for kind in ("global", "local") if summary.number(kind) is None]
    levels = [level.level for level in summary.levels if level.clients and level.local is None]
    if summary.local is not None and levels:
        kinds.append(f"local {score} of level {', '.join(levels)}")
    if not kinds:
        return []
    reasons = Counter(failure.reason for failure in evaluation.failures)
    if not is_evaluated:
        cause = "nothing was evaluated"
    elif reasons:
        (reason, count), *_ = reasons.most_common()
        cause = f"jobs failed, most of them ({count} of {reasons.total()}) by {reason}"
    else:
        cause = f"no client that was asked and runs it has {evaluation.split or 'test'} samples"
    return [f"There is no {' and no '.join(kinds)}: {cause}."]


def samples_left_out(accuracies: "AccuracyRecord", kind: str) -> str:
    """Return on how many of all samples an accuracy is, such as " (30 of 40 samples)"; "" where it is on all.

    Args:
        accuracies: Those of an evaluation.
        kind: "global" or "local".
    """
    samples = accuracies.global_samples if kind == "global" else accuracies.local_samples
    every = accuracies.test_samples
    return f" ({samples:,} of {every:,} samples)" if samples is not None and every and samples < every else ""


def plan_table(plan: "Plan", title: str = "", latencies: Sequence["Latency"] = (), how: Sequence[str] = ()) -> Table:
    """Return the levels of a plan with their costs.

    Args:
        plan: The plan.
        title: What stands above.
        latencies: Of each level on this machine, and behind them the full model's; none where nothing was measured.
        how: What is to be known of these.
    """
    further = [cost for cost in plan.levels[-1].further if not cost.endswith("_spread_s")]
    columns = (
        "level",
        "width",
        "depth",
        EXITS,
        "parameters",
        "multiply-adds",
        *(_FURTHER.get(cost, cost).format(batch=plan.batch_size) for cost in further),
        *(LATENCIES if latencies else ()),
        "target",
        f"{plan.cost} / full",
        "clients",
    )
    every = sorted({e for level in plan.levels for e in level.exits})
    rows = tuple(
        (
            level.name,
            f"{level.width:.2f}",
            f"{level.depth}/{plan.blocks}",
            ", ".join(exit_names(level.exits, every)),
            short(level.parameters),
            short(level.multiply_adds),
            *(_further_cell(level.further, cost) for cost in further),
            *(latency_cells(latencies[i], latencies[-1]) if latencies else ()),
            f"{level.target:.3g} ± {100 * level.tolerance:.3g}%",
            f"{level.share:.3f}",
            str(level.clients),
        )
        for i, level in enumerate(plan.levels)
    )
    notes = list(how)
    if plan.early_heads.parameters:
        notes.append(without_early(plan.levels[-1].name, plan.early_heads))
    if plan.left_out:
        notes.append(f"{len(plan.left_out)} clients afford no level: {', '.join(plan.left_out)}.")
    return Table(columns, rows, title, tuple(notes))


def without_early(level: str, heads: "Cost") -> str:
    """Return how the full model is counted, and what its early classifiers cost."""
    return (
        f"Level {level} is counted without its early classifiers: {short(heads.parameters)} parameters, "
        f"{short(heads.multiply_adds)} multiply-adds."
    )


_FURTHER = {
    "memory_bytes": "training memory, batch {batch}",
    "size_bytes": "bytes of a message",
    "latency_s": "latency ± spread (ms)",
}


LATENCIES = ("measured latency ± spread (ms)", "measured / full")
"""Titles of the columns of `latency_cells`."""


def latency_cells(latency: "Latency", full: "Latency") -> tuple[str, str]:
    """Return a median with its spread in milliseconds, and the median as a fraction of the full model's."""
    return _milliseconds(latency.median_s, latency.spread_s), f"{latency.median_s / full.median_s:.3f}"


def _milliseconds(median_s: float, spread_s: float) -> str:
    median, spread = float(f"{1e3 * median_s:.3g}"), float(f"{1e3 * spread_s:.2g}")
    return f"{median:g} ± {spread:g}"


def _further_cell(costs: Mapping[str, float], cost: str) -> str:
    """Return one of a level's further costs as text; a latency is a median, and its spread is between quartiles."""
    if cost not in costs:
        return "-"
    if cost == "latency_s":
        return _milliseconds(costs[cost], costs.get("latency_spread_s", 0.0))
    return size(costs[cost]) if cost.endswith("_bytes") else short(costs[cost])


# ---- many runs -------------------------------------------------------------------------------------------------------


def compare_table(
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
        settings: Labels of the settings; one empty label where there is only one setting.
        results: The numbers of all seeds by (row, setting), each by column (`fleetfit.report.columns`); a pair may be
            missing.
        title: What stands above the table.
        notes: Sentences below it.
        columns: What is shown of each setting.
        printed: A paper's numbers by (row, setting, column), in percent or rounds: they get a line below the row's.
    """
    places = [(setting, column) for setting in settings for column in columns]
    paper = printed or {}
    body = []
    for row in rows:
        cells = []
        for setting, column in places:
            found, first = results.get((row, setting), ()), results.get((rows[0], setting), ())
            start = None if row == rows[0] else [numbers.get(column) for numbers in first]
            cells.append(cell(column, [numbers.get(column) for numbers in found], start))
        body.append((row, *cells))
        if any((row, *place) in paper for place in places):
            theirs = [_printed(paper, row, None if row == rows[0] else rows[0], *place) for place in places]
            body.append((f"{row}{OF_THE_PAPER}", *theirs))
    groups = (("", 1), *((setting, len(columns)) for setting in settings))
    return Table(("method", *(column for _, column in places)), tuple(body), title, tuple(notes), groups)


OF_THE_PAPER = " (paper)"
"""What the label of a line ends in that holds a paper's numbers."""


def _printed(
    paper: Mapping[tuple[str, str, str], float], row: str, first: str | None, setting: str, column: str
) -> str:
    """Return a paper's number as it stands in the table; rounds with the speed-up over the paper's first row."""
    number = paper.get((row, setting, column))
    if number is None:
        return "-"
    if not is_rounds(column):
        return f"{number:.2f}"
    start = None if first is None else paper.get((first, setting, column))
    return f"{number:g}" if start is None else f"{number:g} ({start / number:.1f}x)"


def levels_of_rows(results: "Mapping[tuple[str, str], Sequence[SummaryRecord]]") -> Table:
    """Return the levels of every row and setting, accuracies over the seeds, and the bytes that the row sent."""
    score = score_of(*(summary for summaries in results.values() for summary in summaries))
    columns = ("run", "level", "width", "depth", "parameters", "multiply-adds", "clients", f"local {score} %",
               f"global {score} %", "bytes down / up")  # fmt: skip
    rows = []
    for key, summaries in results.items():
        label, *totals = (
            ", ".join(filter(None, key)),
            spread([s.global_ for s in summaries]),
            format_traffic(summaries[0]),
        )
        for index, level in enumerate(summaries[0].levels):
            local = spread([s.levels[index].local for s in summaries if index < len(s.levels)])
            shape = (level.level, f"{level.width:.2f}", f"{level.depth}/{level.blocks}", short(level.parameters),
                     short(level.multiply_adds), str(level.clients))  # fmt: skip
            rows.append((label, *shape, local, *totals))
            label, totals = "", ["", ""]
    return Table(columns, tuple(rows))


def data_table(facts: Mapping[str, Any]) -> Table:
    """Return sizes, classes and resolution of data sets, as in ScaleFL's Table 2.

    Args:
        facts: Name -> `fleetfit.data.Facts`, or None where a module states none.
    """

    def cell(value: Any) -> str:
        return "any" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    rows = tuple(
        (name, *(("", "", "", "") if f is None else map(cell, (f.train, f.test, f.classes, f.resolution))))
        for name, f in facts.items()
    )
    return Table(("data set", "train size", "test size", "classes", "resolution"), rows)
