"""Sections on participation, failures and clients. Runs with `[privacy]` withhold them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fleetfit.errors import join_some, truncate
from fleetfit.report.curves import MAX_CLIENTS
from fleetfit.report.page.blocks import Block, PageSection, Paragraph, Plot, Plots, Sheet
from fleetfit.report.page.plots import (
    FAILURE_COLOR,
    ROUNDS,
    Bars,
    PlotAxis,
    get_level_color,
    plot_class_counts,
    plot_stacked_bars,
)
from fleetfit.report.text import Table
from fleetfit.runs.comparison import RowRecord
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import FleetRecord, MemberRecord, RoundRecord

_MAX_BARS = 200
_MAX_REASONS = 25
_MAX_NAMES = 10
_MAX_NODES = 200
_MAX_GROUPS = 60
_MAX_RUNS = 300
_MAX_PARTITIONS = 12
_FEW_REASONS = 4
_LONGEST_REASON = 240  # characters
_WHO = "Participation and failures"
_CLIENTS = "Clients and their data"


# ---- participation of a run ------------------------------------------------------------------------------------------


def make_run_participation_section(run: RunFolder) -> PageSection | None:
    """Return the participation in a run and its failures; one sentence if these are withheld."""
    if run.is_private:
        text = (
            "Withheld by [privacy]: participation, failures, and the data and accuracy of clients. Accuracy is "
            "measured on the server's own test set."
        )
        return PageSection("who", "Participation", [Paragraph(text)])
    if not run.rounds:
        return None
    plot = plot_participation(run.rounds)
    undone = [(report.round, report.undone.reason) for report in run.rounds if report.undone is not None]
    blocks: list[Block] = [Plots([plot])] if plot is not None else []
    blocks.append(_make_failure_table(list_reasons(run.rounds)))
    if undone:
        rows = tuple((str(number), truncate(reason, _LONGEST_REASON)) for number, reason in undone)
        title, more = f"{len(undone)} rounds were rolled back", len(undone) - _MAX_REASONS
        notes = (f"{more} more rounds are in metrics.jsonl.",) if more > 0 else ()
        blocks.append(Sheet(Table(("round", "reason"), rows[:_MAX_REASONS], title, notes)))
    counts = _sum_counters(run.rounds)
    if counts:
        rows = tuple((label, f"{count:,}") for label, count in counts.items())
        blocks.append(Sheet(Table(("over all rounds", "count"), rows)))
    return PageSection("who", _WHO, blocks)


def plot_participation(reports: Sequence[RoundRecord]) -> Plot | None:
    """Return updates by level, and jobs without an update, over rounds."""
    size = math.ceil(len(reports) / _MAX_BARS)
    names = sorted({name for report in reports for name in report.train.by_level}, key=lambda name: (len(name), name))
    rounds = [reports[min(i + size, len(reports)) - 1].round for i in range(0, len(reports), size)]

    def average(counts: Sequence[int]) -> list[float]:
        return [round(sum(counts[i : i + size]) / len(counts[i : i + size]), 3) for i in range(0, len(counts), size)]

    bars = [
        Bars(f"level {name}", rounds, average([one.train.by_level.get(name, 0) for one in reports]), get_level_color(i))
        for i, name in enumerate(names)
    ]
    failures = average([len(one.failures) for one in reports])
    bars.append(Bars("failed", rounds, failures, FAILURE_COLOR, "/"))
    caption = "Clients whose update was received, by trained level; above them, clients that failed."
    if size > 1:
        caption += f" Each bar is the mean of {size} rounds."
    y = PlotAxis("clients", zero=True, whole=True)
    return plot_stacked_bars("took-part", "Clients in each round", bars, ROUNDS, y, caption)


@dataclass
class FailureReason:
    """Jobs that failed for one reason.

    Attributes:
        job: "training" or "evaluation".
        reason: The reason.
        clients: The clients, one for each job.
        rounds: The rounds, one for each job.
    """

    job: str
    reason: str
    clients: list[int | None] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of jobs."""
        return len(self.rounds)


def list_reasons(reports: Sequence[RoundRecord]) -> list[FailureReason]:
    """Return the reasons of failures, the most frequent first."""
    reasons: dict[tuple[str, str], FailureReason] = {}
    for report in reports:
        evaluation = report.evaluate.failures if report.evaluate is not None else []
        for job, failures in (("training", report.failures), ("evaluation", evaluation)):
            for failure in failures:
                key = (job, truncate(failure.reason, _LONGEST_REASON))
                reason = reasons.setdefault(key, FailureReason(*key))
                reason.clients.append(failure.client)
                reason.rounds.append(report.round)
    return sorted(reasons.values(), key=lambda reason: -reason.count)


def _make_failure_table(reasons: Sequence[FailureReason]) -> Block:
    if not reasons:
        return Paragraph("No job failed.")
    rows = []
    for one in reasons[:_MAX_REASONS]:
        counts = Counter(str(client) for client in one.clients if client is not None).most_common()
        names = join_some([f"{client} ({n})" if n > 1 else client for client, n in counts], _MAX_NAMES)
        low, high = min(one.rounds), max(one.rounds)
        rounds = str(low) if low == high else f"{low} to {high}"
        rows.append((one.reason, one.job, str(one.count), names, rounds))
    others = reasons[_MAX_REASONS:]
    jobs = sum(one.count for one in others)
    notes = (f"{jobs} more jobs failed, for {len(others)} other reasons.",) if others else ()
    title = f"{sum(one.count for one in reasons):,} failed jobs"
    return Sheet(Table(("reason", "job", "times", "clients (times)", "rounds"), tuple(rows), title, notes))


_COUNTERS = {
    ("deadline", "shallower"): "updates of a shallower exit, to be in time",
    ("deadline", "stopped"): "updates that stopped early, to be in time",
    ("deadline", "late"): "clients that missed the deadline",
    ("links", "lost_down"): "messages lost on the way to a client",
    ("links", "lost_up"): "messages lost on the way back",
    ("links", "repeated"): "duplicate messages, counted once",
    ("secure", "clipped"): "updates clipped to the range",
}


def _sum_counters(reports: Sequence[RoundRecord]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for report in reports:
        for (part, key), label in _COUNTERS.items():
            value = getattr(getattr(report, part), key, None)
            if value is not None:
                counts[label] += value
    return counts


# ---- participation of rows -------------------------------------------------------------------------------------------


def make_participation_section(rows: Sequence[RowRecord]) -> PageSection | None:
    """Return the updates and failures of rows and settings, summed over seeds."""
    has_settings = len({row.setting for row in rows}) > 1
    cells = []
    for row in rows:
        label = (row.row, *([row.setting] if has_settings else []), str(len(row.runs)))
        if row.is_private:
            cells.append((*label, "withheld", "withheld", ""))
            continue
        updates = sum(report.train.clients or 0 for run in row.records for report in run.rounds)
        counts: Counter[str] = Counter()
        for run in row.records:
            for one in list_reasons(run.rounds):  # a reason may occur in training and in evaluations
                counts[one.reason] += one.count
        reasons = "; ".join(f"{reason} ({count})" for reason, count in counts.most_common(_FEW_REASONS))
        more = f"; and {len(counts) - _FEW_REASONS} other reasons" if len(counts) > _FEW_REASONS else ""
        cells.append((*label, f"{updates:,}", f"{counts.total():,}", reasons + more))
    settings = ["setting"] if has_settings else []
    columns = ("row", *settings, "seeds", "received updates", "failed jobs", "why")
    rest = len(cells) - _MAX_RUNS
    notes = (f"{rest} more rows are left out.",) if rest > 0 else ()
    table = Table(columns, tuple(cells[:_MAX_RUNS]), notes=notes)
    return PageSection("who", _WHO, [Sheet(table)]) if cells else None


# ---- clients ---------------------------------------------------------------------------------------------------------


def make_clients_section(run: RunFolder) -> PageSection | None:
    """Return the clients of a run: classes of their samples, groups, nodes of a fleet; None if withheld."""
    if run.is_private:
        return None
    plot = plot_partition(run)
    blocks: list[Block] = [Plots([plot])] if plot is not None else []
    table = _make_node_table(run.nodes.members) or (_make_group_table(run.fleet) if run.fleet else None)
    if table is not None:
        blocks.append(Sheet(table))
    return PageSection("clients", _CLIENTS, blocks) if blocks else None


def make_partitions_section(rows: Sequence[RowRecord]) -> PageSection | None:
    """Return the classes of the clients of rows and settings; equal partitions are shown once."""
    by_setting: dict[str, list[RowRecord]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    shared = all(len(set(map(_identify_partition, group))) == 1 for group in by_setting.values())
    plots: dict[str, Plot] = {}
    labels: dict[str, list[str]] = {}
    for setting, group in by_setting.items():
        for row in group[: 1 if shared else None]:
            seed, run = row.runs[0]
            plot = plot_partition(run, f"partition-{len(plots)}")
            if plot is not None:
                key = _identify_partition(row)
                plots.setdefault(key, plot)
                label = ", ".join(filter(None, ["" if shared else row.row, setting, f"seed {seed}"]))
                labels.setdefault(key, []).append(label)
    if not plots:
        return None
    text = "The first seed of each run is shown."
    if shared:
        text = "Rows of the same seed and setting share their clients. The first seed of each setting is shown."
    titled = [replace(plot, title=f"{plot.title}: {'; '.join(labels[key][:4])}") for key, plot in plots.items()]
    more = len(titled) - _MAX_PARTITIONS
    if more > 0:
        text += f" {more} more plots are left out."
    return PageSection("clients", _CLIENTS, [Paragraph(text, "quiet"), Plots(titled[:_MAX_PARTITIONS])])


def _identify_partition(row: RowRecord) -> str:
    """Return a text that is equal for rows whose first seeds have the same clients."""
    seed, run = row.runs[0]
    return repr((seed, run.summary.data, run.is_private, run.class_counts, run.class_names))


def plot_partition(run: RunFolder, name: str = "partition") -> Plot | None:
    """Return the classes of the first clients' samples."""
    if run.is_private or not run.class_counts:
        return None
    counts = run.class_counts[:MAX_CLIENTS]
    total, largest = run.fleet.clients if run.fleet else None, max(n for row in counts for n in row)
    extent = (
        f"the first {len(counts)} of {total}" if total is not None and total > len(counts) else f"all {len(counts)}"
    )
    caption = f"Training samples by class of {extent} clients; area: number of samples, the largest {largest}."
    return plot_class_counts(name, "Classes of the clients", counts, run.class_names, caption)


def _make_group_table(fleet: FleetRecord) -> Table | None:
    if len(fleet.groups) < 2:
        return None
    levels: dict[str, set[str]] = {}
    for group, level in zip(fleet.first.group, fleet.first.level, strict=False):
        levels.setdefault(group, set()).add(str(level))
    rows = tuple(
        (truncate(name), str(count), ", ".join(sorted(levels.get(name, ()))))
        for name, count in list(fleet.groups.items())[:_MAX_GROUPS]
    )
    more = len(fleet.groups) - len(rows)
    notes = (f"{more} more groups are in fleet.json.",) if more else ()
    return Table(("group of devices", "clients", "level, of the first clients"), rows, notes=notes)


def _make_node_table(nodes: Sequence[MemberRecord]) -> Table | None:
    rows = []
    for number, node in enumerate(nodes[:_MAX_NODES]):
        numbers = (truncate("-" if value is None else value) for value in (node.budget, node.examples.get("train")))
        rows.append((str(number), truncate(node.name), *numbers))
    more = len(nodes) - len(rows)
    notes = (f"{more} more nodes are in nodes.json.",) if more else ()
    columns = ("client", "node", "budget", "training samples")
    return Table(columns, tuple(rows), f"{len(nodes)} nodes of a real fleet", notes) if rows else None
