"""The page of one run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetfit.errors import truncate
from fleetfit.records.schema import NO_ACCURACIES, EvaluationRecord, SummaryRecord
from fleetfit.report.order import explain_order
from fleetfit.report.page import participants, plan, where
from fleetfit.report.page.parts import Page, PageSection, Part, Plot, Plots, Sheet, Words
from fleetfit.report.page.traces import (
    ROUNDS,
    Line,
    NamedLine,
    PlotAxis,
    color,
    level_color,
    lines,
    same_scale,
    score_axis,
)
from fleetfit.report.record import RunRecord
from fleetfit.report.tables import make_total_table
from fleetfit.report.text import Table, exit_names, format_bytes, format_duration, format_percent, get_score_name

KINDS = {
    "local": "local",
    "global": "global",
    "local_worst_tenth": "local, worst tenth",
    "global_worst_tenth": "global, worst tenth",
    "ensemble": "all exits together",
    "mean_over_exits": "mean over exits",
    "full": "largest level, whole test set",
    "avg": "mean of the levels, whole test set",
    "backdoor": "success of the backdoor",
}
"""Accuracies that an evaluation may have, in words."""
MEANING = (
    "Local: each client with the model of its own level. Global: everybody with the largest. Worst tenth: mean over "
    "the tenth of the clients that do worst."
)
_OF_THE_SERVER = ("full", "avg", "backdoor")
_AT_ONCE = ("local", "global", "local_worst_tenth")
_WORST = 15

COSTS: Mapping[str, tuple[str, Sequence[tuple[float, str]]]] = {
    "bytes": ("sent, both directions", ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))),
    "multiply_adds": ("multiply-adds of clients", ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))),
    "simulated_s": ("simulated time", ((3600, "h"), (60, "min"), (1, "s"))),
}
"""What accuracy is drawn over beside rounds: how it is called, and its units, largest first."""

Build = Callable[[], PageSection | None]


def page_of_run(record: RunRecord, page: Path) -> Page:
    """Return the page of a run.

    Args:
        record: The run.
        page: Where the page will be, from where links lead to the run's files.
    """
    build: Sequence[tuple[str, Build]] = [
        ("What was run, and where", lambda: where.of_run(record, page)),
        ("The plan", lambda: plan.section_of(record)),
        ("Accuracy and loss", lambda: learning(record)),
        ("Levels and exits", lambda: levels_and_exits(record)),
        ("Clients from best to worst", lambda: by_client(record)),
        ("Who took part", lambda: participants.section_of(record)),
        ("The clients and their data", lambda: participants.clients_section(record)),
        ("Costs", lambda: costs(record)),
    ]
    summary, done = record.summary, len(record.rounds)
    what = f"{record.method} on {summary.data} with {summary.model}" if record.is_finished else record.method
    rounds = f"{done} round{'s' if done != 1 else ''}"
    asked = record.get_setting("rounds", default=None)
    state = rounds if record.is_finished else f"{rounds} of {asked}, not finished"
    notes = [*summary.notes, *record.problems]
    return Page(truncate(record.name, 120), truncate(f"{what}, {state}", 240), sections(build), tiles(record), notes)


def sections(build: Sequence[tuple[str, Build]]) -> list[PageSection]:
    """Return sections; one whose files say what cannot be, as a stranger's may, becomes a sentence."""
    found = []
    for number, (title, make) in enumerate(build):
        try:
            one = make()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
            said = f"Left out: the files of the run do not say it in the form that is known ({type(error).__name__})."
            one = PageSection(f"left-out-{number}", title, [Words(said, "note")])
        if one is not None:
            found.append(one)
    return found


def tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return the numbers that are read first."""
    last = record.last
    found: list[tuple[str, str, str]] = []
    at = f"after round {record.evaluations[-1][0]}" if record.evaluations else ""

    def add(kind: str, label: str, hint: str) -> None:
        if last.number(kind) is not None:
            found.append((label, f"{format_percent(last.number(kind))} %", hint))

    if record.is_private:
        add("full", "full model", "on the server's test set")
        add("avg", "mean of the levels", "on the server's test set")
        told = next((one.privacy for one in reversed(record.rounds) if one.privacy is not None), None)
        if told:
            found.append(("epsilon spent", f"{told.epsilon:.2f}", f"at delta {told.delta:.3g}"))
    else:
        add("local", f"local {get_score_name(record.summary)}", f"own level, own data; {at}")
        add("global", f"global {get_score_name(record.summary)}", f"largest level, all clients; {at}")
        add("local_worst_tenth", "worst tenth, local", at)
        down, up = record.sum_bytes("bytes_down"), record.sum_bytes("bytes_up")
        if down is not None and up is not None:
            found.append(("sent", format_bytes(down + up), f"{format_bytes(down)} down, {format_bytes(up)} up"))
        if record.summary.failures:
            found.append(("failures", f"{record.summary.failures:,}", "jobs that brought nothing back"))
        if record.summary.simulated_s is not None:
            found.append(("simulated time", format_duration(record.summary.simulated_s), "on the devices"))
    if record.rounds:
        seconds = sum(one.seconds for one in record.rounds)
        found.append(("computed in", format_duration(seconds), f"{len(record.rounds)} rounds"))
    return found


# ---- lines of a run ------------------------------------------------------------------------------------------------


def in_percent(share: float) -> float:
    """Return a share in percent, rounded to four decimals."""
    return round(100 * share, 4)


def accuracy_line(record: RunRecord, kind: str, cost: str = "") -> list[tuple[float, float]]:
    """Return an accuracy where it was measured: over rounds, or over what the rounds until then cost.

    Args:
        record: The run.
        kind: The accuracy's column.
        cost: One of `COSTS`, or "" for rounds.
    """
    if record.is_private and kind not in _OF_THE_SERVER:
        return []
    until = spent_until(record, cost) if cost else {}
    return [
        (until[done] if cost else done, in_percent(accuracy))
        for done, accuracies in record.evaluations
        if (accuracy := accuracies.number(kind)) is not None and (not cost or done in until)
    ]


def loss_line(record: RunRecord) -> list[tuple[float, float]]:
    """Return the training loss over rounds; nothing where it is withheld."""
    if record.is_private:
        return []
    known = ((one.round, one.train.loss) for one in record.rounds)
    return [(done, float(f"{loss:.6g}")) for done, loss in known if loss is not None]


def spent_until(record: RunRecord, cost: str) -> dict[int, float]:
    """Return by round what all rounds until then cost; nothing where no round says it, or it is withheld."""
    if record.is_private:
        return {}
    sum_, found, said = 0.0, {}, False
    for report in record.rounds:
        added: float | None
        if cost == "bytes":
            down, up = report.bytes_down, report.bytes_up
            added = None if down is None or up is None else down + up
        else:
            added = report.number(cost)
        sum_, said = sum_ + (added or 0), said or added is not None
        found[report.round] = sum_
    return found if said else {}


def cost_axis(cost: str, most: float) -> tuple[PlotAxis, float]:
    """Return the axis of a cost in the unit that fits its largest number, and that unit."""
    title, units = COSTS[cost]
    scale, unit = next(((s, u) for s, u in units if most >= 2 * s), units[-1])
    return PlotAxis(f"{title} ({unit})", f" {unit}", 2, zero=True), scale


def scaled(line: Line, scale: float) -> list[tuple[float, float]]:
    """Return a line in another unit of what it is drawn over."""
    return [(float(f"{x / scale:.6g}"), y) for x, y in line]


# ---- sections --------------------------------------------------------------------------------------------------------


def learning(record: RunRecord) -> PageSection | None:
    """Return accuracy and loss over rounds, and accuracy over each cost."""
    if not record.rounds:
        return None
    kinds = _measured_on_the_way(record)
    at_once = _OF_THE_SERVER if record.is_private else _AT_ONCE
    found = [
        NamedLine(KINDS[kind], accuracy_line(record, kind), i, kind not in at_once, kind in ("local", "global", "full"))
        for i, kind in enumerate(kinds)
    ]
    count = len(record.evaluations)
    measured = f"Measured in {count} of {len(record.rounds)} rounds, which have a marker" if count <= 40 else (
        f"Measured in {count} of {len(record.rounds)} rounds")  # fmt: skip
    caption = f"{'' if record.is_private else MEANING + ' '}{measured}. Click a label to show or hide its line."
    plots: list[Plot | None] = [
        lines("accuracy", f"{_score(record)} over rounds", found, ROUNDS, axis_of(record), caption),
        lines("loss", "Training loss over rounds", [NamedLine("mean of the clients", loss_line(record), 4)], ROUNDS,
              PlotAxis("training loss", "", 4)),
    ]  # fmt: skip
    for cost in COSTS:
        until = spent_until(record, cost)
        axis, scale = cost_axis(cost, max(until.values(), default=0))
        over = [
            NamedLine(kind, scaled(accuracy_line(record, kind, cost), scale), i, strong=True)
            for i, kind in enumerate(("local", "global"))
        ]
        title = f"{_score(record)} over {COSTS[cost][0].split(',')[0].replace('sent', 'bytes')}"
        plots.append(lines(f"accuracy-{cost}", title, over, axis, axis_of(record)))
    parts: list[Part] = [Plots(same_scale(plots))]
    if record.is_private:
        parts.append(Words("Training loss, bytes and multiply-adds are withheld ([privacy])."))
    elif record.is_secure and not loss_line(record):
        parts.append(Words("Training loss is withheld: with [secure] the server sees no client's loss."))
    return PageSection("learning", f"{_score(record)} and loss", parts)


def _measured_on_the_way(record: RunRecord) -> list[str]:
    """Return the accuracies that more than the last evaluation has; all where that is the only one."""
    counted = {kind: len(accuracy_line(record, kind)) for kind in KINDS}
    least = min(2, max(counted.values(), default=0))
    return [kind for kind, count in counted.items() if count >= max(1, least)]


def exits_of(record: RunRecord) -> list[str]:
    """Return the names of all exits of the largest level, shallow to deep; [] where they are not known."""
    levels = record.summary.levels
    every = levels[-1].exits if levels else []
    return [f"exit {name}" for name in exit_names(every, every)]


def told_of(record: RunRecord) -> SummaryRecord:
    """Return the final numbers of a run as far as they may be told."""
    summary = record.summary.model_copy(update={"rounds": len(record.rounds)})
    if not record.is_private:
        return summary
    accuracies = NO_ACCURACIES.model_copy(
        update={"test_exits": record.last.test_exits, "test_levels": record.last.test_levels}
    )
    levels = [level.model_copy(update={"local": None}) for level in summary.levels]
    evaluate = EvaluationRecord().model_copy(update={record.norm: accuracies})
    return summary.model_copy(update={"levels": levels, "evaluate": evaluate})


def levels_and_exits(record: RunRecord) -> PageSection | None:
    """Return accuracy by level and by exit: over rounds, and of the last evaluation."""
    last = record.last
    if not record.evaluations:
        return None
    parts: list[Part] = []
    plots: list[Plot | None] = []
    names = list(last.levels)
    if not record.is_private:
        of_levels = [
            NamedLine(f"level {name}", _of_level(record, name), level_color(i)) for i, name in enumerate(names)
        ]
        plots.append(
            lines(
                "levels",
                f"Local {get_score_name(record.summary)} of each level's clients",
                of_levels,
                ROUNDS,
                axis_of(record),
            )
        )
    exits = exits_of(record)
    measured = [(at, one.test_exits if record.is_private else one.exits) for at, one in record.evaluations]
    of_exits = [
        NamedLine(name, [(at, in_percent(shares[i])) for at, shares in measured if len(shares) > i], i)
        for i, name in enumerate(exits)
    ]
    how = "on the server's test set" if record.is_private else "all clients"
    plots.append(
        lines(
            "exits",
            f"{_score(record)} of each exit of the largest level, {how}",
            of_exits,
            ROUNDS,
            axis_of(record),
        )
    )
    if kept := same_scale(plots):
        parts.append(Plots(kept))
    parts.append(Sheet(_table_of_levels(record, exits)))
    if record.summary.levels:
        parts += [Words(sentence, "note") for sentence in explain_order([told_of(record)])]
    if record.is_finished:
        whole = make_total_table(record.summary)
        rows = tuple(row for row in whole.rows if row[0] != "time" and not row[0].startswith(" "))
        parts.append(Sheet(Table(("what", "value"), rows, "The run as a whole")))
    return PageSection("levels", "Levels and exits", parts)


def _of_level(record: RunRecord, name: str) -> list[tuple[float, float]]:
    known = ((done, accuracies.levels.get(name)) for done, accuracies in record.evaluations)
    return [(done, in_percent(level.local)) for done, level in known if level is not None and level.local is not None]


def _table_of_levels(record: RunRecord, exits: Sequence[str]) -> Table:
    """Return the last evaluation by level: its own clients, each of its exits, the whole test set."""
    last, own = record.last, not record.is_private
    shares, score = last.test_levels, get_score_name(record.summary)
    columns = ("level", *(("clients", f"local {score} %", *(f"{name}, local %" for name in exits)) if own else ()),
               *(("on the whole test set %",) if shares else ()))  # fmt: skip
    every = record.summary.levels[-1].exits if record.summary.levels else []
    at = {one.level: one.exits for one in record.summary.levels}
    rows = []
    for name, level in last.levels.items():
        by_exit = dict(zip(at.get(name, ()), level.exits, strict=False))
        cells = (
            str(level.clients),
            format_percent(level.local),
            *(format_percent(by_exit.get(exit)) for exit in every),
        )
        rows.append((name, *(cells if own else ()), *((format_percent(shares.get(name)),) if shares else ())))
    return Table(columns, tuple(rows), f"After round {record.evaluations[-1][0]}")


def by_client(record: RunRecord) -> PageSection | None:
    """Return the accuracies of single clients from best to worst, and the worst tenth of them by name."""
    clients = NO_ACCURACIES.per_client if record.is_private else record.last.per_client
    ranked = {
        kind: sorted(((share, name) for name, share in shares.items()), key=lambda pair: -pair[0])
        for kind, shares in (("local", clients.local), ("global", clients.global_))
        if shares
    }
    if not any(ranked.values()):
        return None
    alike = len({len(order) for order in ranked.values()}) == 1
    shaded = "; shaded: the worst tenth" if alike else ""
    plot = lines(
        "clients", f"{_score(record)} of single clients",
        [NamedLine(kind, [(i, in_percent(share)) for i, (share, _) in enumerate(order, 1)], number)
         for number, (kind, order) in enumerate(ranked.items())],
        PlotAxis("client, by rank", whole=True), axis_of(record),
        f"Each line is in its own order{shaded}. What single clients reach is coarse, as each has few test samples.",
    )  # fmt: skip
    if plot is not None and alike:
        count = len(next(iter(ranked.values())))
        plot = replace(plot, layout={**plot.layout, "shapes": [_shade(count - max(1, count // 10), count)]})
    parts: list[Part] = [Plots([plot])] if plot is not None else []
    for kind, order in ((kind, order) for kind, order in ranked.items() if order):
        tenth = order[len(order) - max(1, len(order) // 10) :]
        mean = record.last.number(f"{kind}_worst_tenth")
        title = f"The worst tenth, {kind}" + (f": {format_percent(mean)} %" if mean is not None else "")
        rows = tuple((name, format_percent(share)) for share, name in reversed(tenth[-_WORST:]))
        more = len(tenth) - len(rows)
        notes = (f"{more} more clients are in the worst tenth.",) if more > 0 else ()
        parts.append(Sheet(Table(("client", f"{get_score_name(record.summary)} %"), rows, title, notes)))
    return PageSection("by-client", "Clients from best to worst", parts)


def _score(record: RunRecord) -> str:
    """Return what the run's accuracies are called, at the beginning of a sentence."""
    name = get_score_name(record.summary)
    return name[:1].upper() + name[1:]


def axis_of(record: RunRecord) -> PlotAxis:
    """Return the axis of the run's accuracies."""
    return score_axis(get_score_name(record.summary))


def _shade(low: float, high: float) -> Mapping[str, Any]:
    """Return a shaded strip from one place of the horizontal axis to another."""
    return {"type": "rect", "xref": "x", "yref": "paper", "x0": low + 0.5, "x1": high + 0.5, "y0": 0, "y1": 1,
            "line": {"width": 0}, "fillcolor": color(7, 0.13), "layer": "below"}  # fmt: skip


def costs(record: RunRecord) -> PageSection | None:
    """Return bytes, multiply-adds and simulated seconds over rounds, and where the wall time went."""
    if not record.rounds:
        return None
    plots: list[Plot | None] = []
    if not record.is_private:
        down, up = _running(record, "bytes_down"), _running(record, "bytes_up")
        most = max((y for _, y in (*down, *up)), default=0)
        scale, unit = next(((s, u) for s, u in COSTS["bytes"][1] if most >= 2 * s), (1, "B"))
        pair = [NamedLine("down", _divided(down, scale), 0), NamedLine("up", _divided(up, scale), 1)]
        plots.append(
            lines("bytes", "Bytes sent until then", pair, ROUNDS, PlotAxis(f"sent ({unit})", f" {unit}", 3, True))
        )
        for key, label in (("multiply_adds", "Multiply-adds of clients"), ("simulated_s", "Simulated time")):
            line = _running(record, key)
            axis, scale = cost_axis(key, max((y for _, y in line), default=0))
            one = [NamedLine(label.lower(), _divided(line, scale), 2)]
            plots.append(lines(key.replace("_", "-"), f"{label} until then", one, ROUNDS, axis))
    parts: list[Part] = [Plots(kept)] if (kept := [plot for plot in plots if plot is not None]) else []
    table = _where_time_went(record)
    if table is not None:
        parts.append(Sheet(table))
    return PageSection("costs", "What it cost", parts) if parts else None


def _running(record: RunRecord, key: str) -> list[tuple[float, float]]:
    """Return a cost of all rounds until then, over rounds; nothing where no round says it."""
    found, sum_, said = [], 0.0, False
    for report in record.rounds:
        value = report.number(key)
        sum_, said = sum_ + (value or 0), said or value is not None
        found.append((float(report.round), sum_))
    return found if said else []


def _divided(line: Line, scale: float) -> list[tuple[float, float]]:
    return [(x, float(f"{y / scale:.6g}")) for x, y in line]


def _where_time_went(record: RunRecord) -> Table | None:
    """Return the wall seconds of all rounds by what they went into; folders of earlier versions have none."""
    of: dict[str, float] = {}
    for report in record.rounds:
        for part, seconds in report.seconds_of.items():
            of[part] = of.get(part, 0.0) + seconds
    whole = sum(report.seconds for report in record.rounds)
    if not of or not whole:
        return None
    rows = [(part, format_duration(seconds), f"{100 * seconds / whole:.1f}") for part, seconds in of.items()]
    rest = whole - sum(of.values())
    rows.append(("everything else", format_duration(max(0.0, rest)), f"{100 * max(0.0, rest) / whole:.1f}"))
    return Table(("wall time of all rounds", "time", "%"), (*rows, ("together", format_duration(whole), "100.0")))
