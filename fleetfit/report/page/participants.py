"""Who took part, who failed and why, and what the clients have: of runs that do not withhold it."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fleetfit.errors import truncate
from fleetfit.records.schema import RoundRecord
from fleetfit.report.page.parts import PageSection, Part, Plot, Plots, Sheet, Words
from fleetfit.report.page.traces import FAILED, ROUNDS, Bars, PlotAxis, level_color, partition, stacked
from fleetfit.report.record import RunRecord
from fleetfit.report.text import Table

_MOST_BARS = 200
_MOST_REASONS = 25
_MOST_NAMED = 10
_MOST_NODES = 200
_MOST_CLIENTS = 50
_REASON = 240


def section_of(record: RunRecord) -> PageSection | None:
    """Return who took part in a run; where that is withheld, one sentence."""
    if record.is_private:
        return PageSection("who", "Who took part", [Words(
            "Withheld: with [privacy] nothing here tells who took part, who failed, what a client has or how well it "
            "does. Accuracy is that on the server's own test set."
        )])  # fmt: skip
    if not record.rounds:
        return None
    parts: list[Part] = []
    plot = took_part(record)
    if plot is not None:
        parts.append(Plots([plot]))
    parts += _failures(record)
    parts += _undone(record)
    counted = _counted(record.rounds)
    if counted:
        parts.append(Sheet(Table(("over all rounds", "count"), tuple(counted))))
    return PageSection("who", "Who took part, who failed and why", parts)


def took_part(record: RunRecord) -> Plot | None:
    """Return updates by level, and jobs that brought nothing back, over rounds."""
    reports = record.rounds
    size = math.ceil(len(reports) / _MOST_BARS)
    bins = [reports[i : i + size] for i in range(0, len(reports), size)]
    names = sorted({name for report in reports for name in report.train.by_level}, key=lambda name: (len(name), name))
    at = [chunk[-1].round for chunk in bins]

    def mean(of: Any) -> list[float]:
        return [round(sum(map(of, chunk)) / len(chunk), 3) for chunk in bins]

    bars = [
        Bars(f"level {name}", at, mean(lambda report, name=name: report.train.by_level.get(name, 0)), level_color(i))
        for i, name in enumerate(names)
    ]
    bars.append(Bars("brought nothing back", at, mean(lambda report: len(report.failures)), FAILED, "/"))
    caption = "Clients whose update came in, by the level that they trained; above them those whose update did not."
    if size > 1:
        caption += f" Each bar is the mean of {size} rounds."
    return stacked("took-part", "Clients in each round", bars, ROUNDS, PlotAxis("clients", zero=True), caption)


def reasons_of(record: RunRecord) -> list[tuple[str, str, int, list[Any], list[int]]]:
    """Return why jobs brought nothing back, the commonest first: kind, reason, how often, which clients and rounds."""
    found: dict[tuple[str, str], tuple[list[Any], list[int]]] = {}
    for report in record.rounds:
        for kind, failures in (
            ("training", report.failures),
            ("evaluation", report.evaluate.failures if report.evaluate is not None else ()),
        ):
            for one in failures:
                clients, rounds = found.setdefault((kind, truncate(one.reason, _REASON)), ([], []))
                clients.append(one.client)
                rounds.append(report.round)
    rows = [(kind, reason, len(clients), clients, rounds) for (kind, reason), (clients, rounds) in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def _failures(record: RunRecord) -> list[Part]:
    rows = reasons_of(record)
    if not rows:
        return [Words("No job failed.")]
    cells = tuple(
        (reason, kind, str(count), _named(clients), _between(rounds))
        for kind, reason, count, clients, rounds in rows[:_MOST_REASONS]
    )
    left = sum(row[2] for row in rows[_MOST_REASONS:])
    notes = (f"{left} more jobs brought nothing back, for {len(rows) - _MOST_REASONS} other reasons.",) if left else ()
    title = f"{sum(row[2] for row in rows):,} jobs brought nothing back"
    return [Sheet(Table(("reason", "job", "times", "clients (times)", "rounds"), cells, title, notes))]


def _named(clients: Sequence[Any]) -> str:
    """Return clients with how often each, those of most failures first."""
    counted = Counter(truncate(client, 20) for client in clients if client is not None).most_common()
    said = ", ".join(f"{client} ({times})" if times > 1 else client for client, times in counted[:_MOST_NAMED])
    more = len(counted) - _MOST_NAMED
    return f"{said} and {more} more" if more > 0 else said


def _between(rounds: Sequence[int]) -> str:
    low, high = min(rounds), max(rounds)
    return str(low) if low == high else f"{low} to {high}"


def _undone(record: RunRecord) -> list[Part]:
    found = [(one.round, one.undone.reason) for one in record.rounds if one.undone is not None]
    if not found:
        return []
    cells = tuple((str(number), truncate(reason, _REASON)) for number, reason in found[:_MOST_REASONS])
    return [Sheet(Table(("round", "why it was undone"), cells, f"{len(found)} rounds were undone"))]


_COUNTED = {
    ("deadline", "shallower"): "updates of a shallower exit, to be in time",
    ("deadline", "stopped"): "updates that stopped early, to be in time",
    ("deadline", "late"): "clients that were too late",
    ("links", "lost_down"): "messages lost on the way to a client",
    ("links", "lost_up"): "messages lost on the way back",
    ("links", "repeated"): "messages that came twice, and counted once",
    ("secure", "clipped"): "updates of which something was clipped to the range",
}


def _counted(rounds: Sequence[RoundRecord]) -> list[tuple[str, str]]:
    """Return what the rounds count, added up."""
    found: Counter[str] = Counter()
    for report in rounds:
        for (part, key), words in _COUNTED.items():
            counts = getattr(report, part)
            if counts is not None and getattr(counts, key) is not None:
                found[words] += getattr(counts, key)
    return [(words, f"{count:,}") for words, count in found.items()]


# ---- what the clients are ----------------------------------------------------------------------------------------


def clients_section(record: RunRecord) -> PageSection | None:
    """Return who the clients are: groups, classes of their samples, nodes of a fleet; None where that is withheld."""
    if record.is_private:
        return None
    parts: list[Part] = []
    plot = partition_of(record)
    if plot is not None:
        parts.append(Plots([plot]))
    parts += _groups(record)
    parts += _nodes(record)
    return PageSection("clients", "The clients and their data", parts) if parts else None


def partition_of(record: RunRecord, name: str = "partition") -> Plot | None:
    """Return the plot of the classes of the first clients' samples."""
    if record.is_private or not record.class_counts:
        return None
    some = record.class_counts[:_MOST_CLIENTS]
    total, most = record.fleet.clients if record.fleet else None, max(n for row in some for n in row)
    which = f"the first {len(some)} of {total}" if total is not None and total > len(some) else f"all {len(some)}"
    caption = f"Training samples by class of {which} clients; area: number of samples, the largest {most}."
    return partition(name, "Classes of the clients", some, caption)


def _groups(record: RunRecord) -> list[Part]:
    if record.fleet is None or len(record.fleet.groups) < 2 or record.nodes.members:
        return []
    groups, first = record.fleet.groups, record.fleet.first
    levels: dict[str, set[str]] = {}
    for group, level in zip(first.group, first.level, strict=False):
        levels.setdefault(group, set()).add(str(level))
    rows = tuple(
        (truncate(name), truncate(count), ", ".join(sorted(levels.get(name, ()))))
        for name, count in list(groups.items())[:60]
    )
    return [Sheet(Table(("group of devices", "clients", "level, of the first clients"), rows))]


def _nodes(record: RunRecord) -> list[Part]:
    found = record.nodes.members
    if not found:
        return []
    rows = []
    for number, one in enumerate(found[:_MOST_NODES]):
        rows.append(
            (
                str(number),
                truncate(one.name),
                truncate(_or_dash(one.budget)),
                truncate(_or_dash(one.examples.get("train"))),
            )
        )
    more = len(found) - len(rows)
    notes = (f"{more} more nodes stand in nodes.json.",) if more else ()
    title = f"{len(found)} nodes of a real fleet"
    return [Sheet(Table(("client", "node", "budget", "training samples"), tuple(rows), title, notes))]


def _or_dash(value: Any) -> Any:
    return "-" if value is None else value
