"""The page of a comparison, and of several runs wherever their folders are."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleetfit.errors import truncate
from fleetfit.records.schema import ComparisonResults, CurvesRecord, EntryRecord, RunResult, TuningResult
from fleetfit.report.columns import find_numbers, is_rounds, make_final_numbers, number_name
from fleetfit.report.order import explain_row_order
from fleetfit.report.page import participants, plan, where
from fleetfit.report.page.parts import FactList, Fold, Link, Page, PageSection, Part, Plot, Plots, Sheet, Words
from fleetfit.report.page.single import (
    COSTS,
    KINDS,
    accuracy_line,
    cost_axis,
    in_percent,
    loss_line,
    scaled,
    sections,
    spent_until,
    told_of,
)
from fleetfit.report.page.traces import (
    HOW_SEEDS,
    ROUNDS,
    Dots,
    PlotAxis,
    bundled,
    bundles,
    dotted,
    same_scale,
    score_axis,
)
from fleetfit.report.record import ComparisonRecord, RowRecord, RunRecord
from fleetfit.report.statistics import paired_differences
from fleetfit.report.tables import make_comparison_table, make_difference_table, make_tuning_table
from fleetfit.report.text import Table, describe_data, format_bytes, format_mean, format_percent, get_score_name

_BEST = ("local", "global")
_PRIVATE = ("full", "avg")
_TIMES = 4
_MOST_RUNS = 300
_ALIKE = ("data", "fleet", "rounds", "evaluate")


@dataclass(frozen=True)
class Compared:
    """What a page of several runs is made of.

    Attributes:
        groups: The runs.
        results: Their final numbers, against one of the rows.
        columns: What the table shows.
        entries: `compare.json`, where there is one.
        notes: Sentences below the table.
        paired: Whether differences between rows are given.
    """

    groups: Sequence[RowRecord]
    results: ComparisonResults
    columns: Sequence[str]
    entries: Sequence[EntryRecord] = ()
    notes: Sequence[str] = ()
    paired: bool = True

    @property
    def rows(self) -> list[str]:
        """The labels of the rows."""
        return list(dict.fromkeys(one.row for one in self.results.runs))

    @property
    def settings(self) -> list[str]:
        """The labels of the settings."""
        return list(dict.fromkeys(one.setting for one in self.results.runs))

    @property
    def seeds(self) -> list[int]:
        """All seeds."""
        return list(dict.fromkeys(one.seed for one in self.results.runs))

    def of(self, setting: str) -> list[RowRecord]:
        """Return the runs of a setting, row by row."""
        return [one for one in self.groups if one.setting == setting]

    @property
    def score(self) -> str:
        """What the accuracies are called."""
        return get_score_name(*(record.summary for one in self.groups for _, record in one.runs))

    @property
    def private(self) -> bool:
        """Whether a run among them withholds what its clients do."""
        return bool(self.withheld)

    @property
    def withheld(self) -> set[tuple[str, str]]:
        """The rows, with their settings, of which a run withholds what its clients do."""
        return {(one.row, one.setting) for one in self.groups if any(record.is_private for _, record in one.runs)}

    def told(self) -> "Compared":
        """Return what may be said of the runs."""
        if not self.private:
            return self
        runs = [
            one.model_copy(
                update={"final": {k: v for k, v in one.final.items() if k in _PRIVATE}, "per_level": {}, "per_exit": {}}
            )
            if (one.row, one.setting) in self.withheld
            else one
            for one in self.results.runs
        ]
        entries = [
            one.model_copy(
                update={"columns": {k: v if k in _PRIVATE or is_rounds(k) else None for k, v in one.columns.items()}}
            )
            if (one.row, one.setting) in self.withheld
            else one
            for one in self.entries
        ]
        return replace(self, results=self.results.model_copy(update={"runs": runs}), entries=entries)


def page_of_comparison(record: ComparisonRecord, page: Path) -> Page:
    """Return the page of a comparison.

    Args:
        record: What its folder says.
        page: Where the page will be.
    """
    found = compared(record)
    begun = "" if record.entries else ", not finished"
    title = record.results.name
    first = ("What was compared, and where", lambda: where.of_comparison(record, page))
    return _page(title, found, page, first, record.problems, begun)


def compared(record: ComparisonRecord) -> Compared:
    """Return the runs of a comparison's folder side by side."""
    columns = list(record.entries[0].columns) if record.entries else _columns(record.rows)
    return Compared(record.rows, record.results, columns, record.entries, record.notes)


def page_of_runs(groups: Sequence[RowRecord], page: Path) -> Page:
    """Return the page of several runs, wherever their folders are.

    Args:
        groups: The runs, `grouped`; the others are measured against the first row, where their data and clients agree.
        page: Where the page will be.
    """
    records = [record for one in groups for _, record in one.runs]
    runs = [_result_of(one, seed, record) for one in groups for seed, record in one.runs]
    results = ComparisonResults(
        name="", file="", versions={}, machine={}, against=groups[0].row, settings={}, runs=runs
    )
    most = max(len(one.runs) for one in groups)
    known = [record.summary for record in records]
    notes = [f"{_capital(get_score_name(*known))} in percent on {describe_data(*known)}; {_counted(most, 'seed')}"
             f"{' at most, mean ± standard deviation' if most > 1 else ''}."]  # fmt: skip
    unlike = [key for key in _ALIKE if len({repr(without_seeds(r.get_setting(key))) for r in records}) > 1]
    if unlike:
        notes.append(
            f"These runs also differ in {', '.join(unlike)}: such numbers do not rank methods, and no differences "
            "between rows are given."
        )
    found = Compared(groups, results, _columns(groups), notes=notes, paired=not unlike)
    wrong = [f"{record.folder}: {sentence}" for record in records for sentence in record.problems]
    return _page("Several runs", found, page, ("What was run, and where", lambda: _places(groups)), wrong)


def grouped(found: Sequence[RunRecord | RowRecord]) -> list[RowRecord]:
    """Return runs as rows, in their order: those whose configurations differ in seeds and name only are one.

    A row is called after its runs, or its method where these have several names; a comparison's rows keep their labels.

    Args:
        found: Runs, and the rows of comparisons in their settings.
    """
    rows: dict[str, tuple[list[str], list[tuple[int, RunRecord]]]] = {}
    for number, one in enumerate(found):
        if isinstance(one, RowRecord):
            rows[f"row {number}"] = [", ".join(filter(None, [one.row, one.setting]))], list(one.runs)
            continue
        kept = {key: value for key, value in one.config.items() if key != "name"}
        names, seeds = rows.setdefault(repr(without_seeds(kept)) if kept else str(one.folder), ([], []))
        names.append(one.name)
        seeds.append((one.seed, one))
    left = [(names[0] if len(set(names)) == 1 else seeds[0][1].method, seeds) for names, seeds in rows.values()]
    made: dict[str, RowRecord] = {}
    for label, seeds in left:
        row, count = label, 2
        while row in made:
            row, count = f"{label} ({count})", count + 1
        once: dict[int, RunRecord] = {}
        again = [(seed, record) for seed, record in seeds if once.setdefault(seed, record) is not record]
        made[row] = RowRecord(row, "", sorted(once.items(), key=lambda pair: pair[0]))
        if again:  # the same run in another folder: a row of its own
            left.append((label, again))
    return list(made.values())


def without_seeds(value: Any) -> Any:
    """Return tables without the keys called "seed", which go with the run's."""
    if isinstance(value, Mapping):
        return {key: without_seeds(inner) for key, inner in value.items() if key != "seed"}
    return value


def _result_of(one: RowRecord, seed: int, record: RunRecord) -> RunResult:
    final: dict[str, float] = {}
    if record.is_finished:
        final = make_final_numbers(record.summary, record.rounds, (), "global")
    else:
        shares = {kind: record.last.number(kind) for kind in KINDS}
        final = {kind: in_percent(share) for kind, share in shares.items() if share is not None}
    levels = {name: level.local for name, level in record.last.levels.items()}
    return RunResult(
        row=one.row, setting=one.setting, seed=seed, overrides={}, tuned={}, rounds=len(record.rounds),
        seconds=sum(report.seconds for report in record.rounds), speed="", digest="", final=final,
        per_level={name: in_percent(share) for name, share in levels.items() if share is not None},
        per_exit={str(i): in_percent(share) for i, share in enumerate(record.last.exits, 1)},
        curves=CurvesRecord(round=[]),
    )  # fmt: skip


def _columns(groups: Sequence[RowRecord]) -> list[str]:
    private = [record.is_private for one in groups for _, record in one.runs]
    told = () if all(private) else (*_BEST, "local_worst_tenth")
    return [*told, *(_PRIVATE if any(private) else ())]


def _places(groups: Sequence[RowRecord]) -> PageSection:
    """Return where the runs were made: what all of them say, and of each its folder, time and command."""
    each = [(one.row, seed, record, dict(where.machine_of(record.environment)))
            for one in groups for seed, record in one.runs]  # fmt: skip
    told = {
        key: list(dict.fromkeys(str(said[key]) for *_, said in each if said.get(key)))
        for key in ("machine", "versions", "commit of FleetFit", "commit of the working folder")
    }
    rows = tuple(
        (f"{row}, seed {seed}", str(record.folder), str(said.get("begun", "")), str(said.get("command", "")))
        for row, seed, record, said in each[:_MOST_RUNS]
    )
    facts = FactList([(key, "; ".join(values[:_TIMES])) for key, values in told.items() if values])
    table = Sheet(Table(("run", "folder", "begun", "command"), rows))
    each_run = Fold("folder, time and command of each run", [table])
    return PageSection("what", "What was run, and where", [facts, each_run])


# ---- the page --------------------------------------------------------------------------------------------------------


def _page(
    title: str,
    found: Compared,
    page: Path,
    first: tuple[str, Callable[[], PageSection | None]],
    wrong: Sequence[str],
    begun: str = "",
) -> Page:
    found = found.told()
    build: list[tuple[str, Callable[[], PageSection | None]]] = [
        ("The table", lambda: _table(found)),
        first,
        *((f"Accuracy {setting}", _learning(found, setting, i)) for i, setting in enumerate(found.settings)),
        ("Levels, exits and clients", lambda: _ends(found)),
        ("The plans", lambda: _plans(found)),
        ("Who took part", lambda: _took_part(found)),
        ("The clients and their data", lambda: _clients(found)),
        ("All runs", lambda: _runs(found, page)),
    ]
    counted = [_counted(len(found.rows), "row")]
    if len(found.settings) > 1:
        counted.append(_counted(len(found.settings), "setting"))
    counted += [_counted(len(found.seeds), "seed"), _counted(len(found.results.runs), "run")]
    return Page(
        truncate(title, 120), ", ".join(counted) + begun, sections(build), notes=list(dict.fromkeys(wrong))[:20]
    )


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _table(found: Compared) -> PageSection:
    """Return the table in the papers' layout, the differences, and what was tuned."""
    parts: list[Part] = [Sheet(table_of(found))]
    apart = paired_differences(found.results, found.columns) if found.paired else []
    if apart:
        parts.append(Sheet(make_difference_table(apart, found.results.against)))
    if found.results.tuning:
        parts.append(Fold("What was tuned", [Sheet(table_of_tuning(found.results.tuning))]))
    return PageSection("table", "The table", parts)


def table_of(found: Compared, title: str = "") -> Table:
    """Return the table in the papers' layout."""
    numbers: dict[tuple[str, str], list[Mapping[str, float | None]]] = {}
    printed: dict[tuple[str, str, str], float] = {}
    for one in found.entries:
        key = (one.row, one.setting)
        numbers.setdefault(key, []).append(one.columns)
        printed |= {(*key, column): value for column, value in one.printed.items()}
    if not numbers:
        for run in found.results.runs:
            numbers.setdefault((run.row, run.setting), []).append({c: _share(run.final, c) for c in found.columns})
    table = make_comparison_table(found.rows, found.settings, numbers, title, found.notes, found.columns, printed)
    return replace(table, rows=tuple(_said_withheld(found, row) for row in table.rows))


def table_of_tuning(tuning: Sequence[TuningResult]) -> Table:
    """Return what was tuned, where nobody knows any more by which accuracy."""
    counted = any(one.rounds is not None for each in tuning for one in each.candidates)
    return make_tuning_table(tuning, "rounds" if counted else "")


def _said_withheld(found: Compared, row: tuple[str, ...]) -> tuple[str, ...]:
    """Return a line of the table that says "withheld" where its runs do not tell a number."""
    places = [(setting, column) for setting in found.settings for column in found.columns]
    hidden = [
        (row[0], setting) in found.withheld and column not in _PRIVATE and not is_rounds(column)
        for setting, column in places
    ]
    return (row[0], *("withheld" if hide else cell for cell, hide in zip(row[1:], hidden, strict=True)))


def _share(final: Mapping[str, float], column: str) -> float | None:
    """Return a number as the table takes it: rounds, or a share."""
    value = final.get(number_name(column))
    return value if value is None or is_rounds(column) else value / 100


def _learning(found: Compared, setting: str, number: int) -> Callable[[], PageSection | None]:
    def build() -> PageSection | None:
        groups = found.of(setting)
        if not groups:
            return None
        each = [record.is_private for one in groups for _, record in one.runs]
        private, all_private = any(each), all(each)
        some = [name for name in found.columns if name in KINDS]
        kinds = list(dict.fromkeys([*some, *(_PRIVATE if private else ()), *(() if all_private else _BEST)]))
        count = len(found.settings) * (len(kinds) + 1 + 2 * len(COSTS))
        plots = [
            bundled(f"accuracy-{kind}-{number}", f"{KINDS[kind].capitalize()}",
                    bundles(groups, found.rows, lambda run, kind=kind: accuracy_line(run, kind)), ROUNDS,
                    score_axis(found.score), plots=count)
            for kind in kinds
        ]  # fmt: skip
        loss = bundles(groups, found.rows, loss_line)
        axis = PlotAxis("training loss", "", 4)
        plots.append(bundled(f"loss-{number}", "Training loss", loss, ROUNDS, axis, plots=count))
        for cost in COSTS:
            most = max((m for r in _all(groups) for m in spent_until(r, cost).values()), default=0)
            axis, scale = cost_axis(cost, most)
            for kind in _BEST:
                over = bundles(
                    groups, found.rows, lambda run, k=kind, c=cost, s=scale: scaled(accuracy_line(run, k, c), s)
                )
                title = (
                    f"{kind.capitalize()} {found.score} over {COSTS[cost][0].split(',')[0].replace('sent', 'bytes')}"
                )
                plots.append(
                    bundled(f"{kind}-{cost}-{number}", title, over, axis, score_axis(found.score), plots=count)
                )
        seeds = max(len(one.runs) for one in groups)
        how = HOW_SEEDS if seeds > 1 else "One seed: nothing here says how much chance moves a line."
        parts: list[Part] = [Words(how, "quiet"), Plots(same_scale(plots))]
        return PageSection(
            f"learning-{number}", f"{_capital(found.score)} and loss" + (f": {setting}" if setting else ""), parts
        )

    return build


def _all(groups: Sequence[RowRecord]) -> list[RunRecord]:
    return [record for one in groups for _, record in one.runs]


def _ends(found: Compared) -> PageSection | None:
    """Return the last evaluation of all rows: by level, by exit, and of the worst tenth of the clients."""
    parts: list[Part] = []
    plots: list[Plot | None] = []
    for number, setting in enumerate(found.settings):
        results = [one for one in found.results.runs if one.setting == setting]
        behind = f": {setting}" if setting else ""
        for what, title, places in (
            ("per_level", f"Local {found.score} by level", _places_of_levels(found, setting)),
            (
                "per_exit",
                f"{_capital(found.score)} of the exits of the largest level",
                _places_of_exits(found, setting),
            ),
        ):
            dots = _dots(found, results, what, places)
            order = list(dict.fromkeys(name for _, name in sorted(set(places.values()))))
            name = f"{what.replace('_', '-')}-{number}"
            plots.append(
                dotted(
                    name, f"{title}{behind}", dots, order, score_axis(found.score), "A dot for each seed, at the end."
                )
            )
    if kept := same_scale(plots):
        parts.append(Plots(kept))
    rows = {", ".join(filter(None, [one.row, one.setting])): [told_of(r) for _, r in one.runs] for one in found.groups}
    parts += [Words(sentence, "note") for sentence in explain_row_order(rows)]
    parts.append(Sheet(_by_level(found)))
    worst = _worst_tenth(found)
    if worst is not None:
        parts.append(Sheet(worst))
    return PageSection("ends", "Levels, exits and clients", parts)


Places = Mapping[tuple[str, str], tuple[int, str]]
"""Where a row's level or exit stands in a plot, and what the place is called."""


def _places_of_levels(found: Compared, setting: str) -> Places:
    return {
        (one.row, level.level): (number, f"level {level.level}")
        for one in found.of(setting)
        for number, level in enumerate(one.runs[0][1].summary.levels)
    }


def _places_of_exits(found: Compared, setting: str) -> Places:
    """Return the exits of each row by their blocks: the only one of a row may be the deepest of another's."""
    return {
        (one.row, str(number)): (exit, f"after block {exit}")
        for one in found.of(setting)
        for levels in [one.runs[0][1].summary.levels]
        for number, exit in enumerate(levels[-1].exits if levels else (), 1)
    }


def _dots(found: Compared, results: Sequence[RunResult], what: str, places: Places) -> list[Dots]:
    kept = []
    for i, row in enumerate(found.rows):
        points = [
            (places[row, name][1], value, f"seed {one.seed}")
            for one in results
            if one.row == row
            for name, value in getattr(one, what).items()
            if (row, name) in places
        ]
        kept.append(Dots(row, [p[0] for p in points], [p[1] for p in points], [p[2] for p in points], i))
    return kept


def _by_level(found: Compared) -> Table:
    """Return each row's levels: what they are, and their accuracy over the seeds."""
    rows: list[tuple[str, ...]] = []
    for one in found.groups:
        records = [record for _, record in one.runs]
        private = any(record.is_private for record in records)
        label: tuple[str, ...] = (one.row, *([one.setting] if len(found.settings) > 1 else []))
        for level in records[0].summary.levels:
            each = [
                {entry.level: entry.local for entry in record.summary.levels}.get(level.level) for record in records
            ]
            sizes = (f"{level.width:.2f}", f"{level.depth}/{level.blocks}", f"{level.parameters:,}",
                     f"{level.multiply_adds:,}", str(level.clients))  # fmt: skip
            rows.append((*label, level.level, *sizes, "withheld" if private else format_mean(each)))
            label = ("",) * len(label)
    columns = ("row", *(["setting"] if len(found.settings) > 1 else []), "level", "width", "depth", "parameters",
               "multiply-adds", "clients", f"local {found.score} %")  # fmt: skip
    return Table(columns, tuple(rows), "What each level is, and how well its clients do")


def _worst_tenth(found: Compared) -> Table | None:
    """Return the mean accuracy of the worst tenth of the clients, over the seeds."""
    rows = []
    for one in found.groups:
        shares = {
            kind: [None if r.is_private else r.last.number(kind) for _, r in one.runs]
            for kind in ("local", "local_worst_tenth", "global", "global_worst_tenth")
        }
        if any(share is not None for each in shares.values() for share in each):
            rows.append(
                (", ".join(filter(None, [one.row, one.setting])), *(format_mean(each) for each in shares.values()))
            )
    columns = ("row", "local, mean %", "local, worst tenth %", "global, mean %", "global, worst tenth %")
    return Table(columns, tuple(rows), "All clients, and the worst tenth of them") if rows else None


def _plans(found: Compared) -> PageSection | None:
    """Return the pieces of each row and setting; those that are alike once."""
    drawn: dict[str, tuple[list[str], RunRecord, int]] = {}
    for one in found.groups:
        record = one.runs[0][1]
        levels = record.summary.levels
        if not levels:
            continue
        shape = repr([level.model_copy(update={"local": None}) for level in levels])
        titles, *_ = drawn.setdefault(shape, ([], record, found.rows.index(one.row)))
        titles.append(", ".join(filter(None, [one.row, one.setting])))
    parts: list[Part] = []
    for titles, record, number in drawn.values():
        said = "; ".join(titles[:6]) + (f"; and {len(titles) - 6} more" if len(titles) > 6 else "")
        parts.append(plan.pieces_of(record.summary.levels, False, said, number))
    if parts:
        parts.append(Words(plan.HOW, "quiet"))
    return PageSection("plans", "The plans: the model in pieces", parts) if parts else None


def _took_part(found: Compared) -> PageSection | None:
    """Return how many updates came in, how many jobs failed, and why, of all seeds of a row together."""
    rows = []
    for one in found.groups:
        label = (one.row, *([one.setting] if len(found.settings) > 1 else []), str(len(one.runs)))
        if any(record.is_private for _, record in one.runs):
            rows.append((*label, "withheld", "withheld", ""))
            continue
        came = sum(m.train.clients or 0 for _, record in one.runs for m in record.rounds)
        counted: Counter[str] = Counter()
        for _, record in one.runs:
            counted.update({reason: count for _, reason, count, *_ in participants.reasons_of(record)})
        why = "; ".join(f"{reason} ({count})" for reason, count in counted.most_common(_TIMES))
        more = f"; and {len(counted) - _TIMES} other reasons" if len(counted) > _TIMES else ""
        rows.append((*label, f"{came:,}", f"{counted.total():,}", why + more))
    settings = ["setting"] if len(found.settings) > 1 else []
    columns = ("row", *settings, "seeds", "updates that came in", "jobs that brought nothing back", "why")
    table = Table(columns, tuple(rows[:_MOST_RUNS]))
    return PageSection("who", "Who took part, who failed and why", [Sheet(table)]) if rows else None


def _clients(found: Compared) -> PageSection | None:
    """Return the classes of the clients, once for each partition, with the runs that have it where rows differ."""
    drawn: dict[str, tuple[Plot, list[str]]] = {}
    shared = all(len({_partition(one) for one in found.of(setting)}) == 1 for setting in found.settings)
    for setting in found.settings:
        for one in found.of(setting)[: 1 if shared else None]:
            seed, record = one.runs[0]
            plot = participants.partition_of(record, f"partition-{len(drawn)}")
            if plot is not None:
                label = ", ".join(filter(None, ["" if shared else one.row, setting, f"seed {seed}"]))
                drawn.setdefault(_partition(one), (plot, []))[1].append(label)
    plots = [replace(plot, title=f"{plot.title}: {'; '.join(labels[:4])}") for plot, labels in drawn.values()]
    said = "Of each run the first seed is drawn."
    if shared:
        said = "Rows of one seed and setting share their clients; of each setting the first seed is drawn."
    words = Words(said, "quiet")
    return PageSection("clients", "The clients and their data", [words, Plots(plots[:12])]) if plots else None


def _partition(one: RowRecord) -> str:
    """Return what tells the clients of a row's first seed from those of others."""
    seed, record = one.runs[0]
    return repr((seed, record.summary.data if record.is_finished else None, record.is_private, record.class_counts))


def _runs(found: Compared, page: Path) -> PageSection | None:
    """Return every run with its numbers and links to its files."""
    rows: list[tuple[str, Sequence[Link]]] = []
    table = []
    for one in found.groups:
        for seed, record in one.runs:
            label = ", ".join(filter(None, [one.row, one.setting, f"seed {seed}"]))
            rows.append((label, where.links(record.folder, page)))
            down, up = record.sum_bytes("bytes_down"), record.sum_bytes("bytes_up")
            columns = [column for column in found.columns if column in KINDS]
            numbers = find_numbers(record.summary, record.rounds, columns)
            cells = [
                "withheld" if record.is_private and c not in _PRIVATE else format_percent(numbers[c]) for c in columns
            ]
            sent = "-" if down is None or up is None else f"{format_bytes(down)} / {format_bytes(up)}"
            seconds = math.fsum(m.seconds for m in record.rounds)
            table.append((label, str(len(record.rounds)), *cells, sent, f"{seconds:,.1f}"))
    columns = [column for column in found.columns if column in KINDS]
    heads = ("run", "rounds", *(f"{column} %" for column in columns), "bytes down / up", "wall seconds")
    parts: list[Part] = [Sheet(Table(heads, tuple(table[:_MOST_RUNS])))]
    parts.append(Fold("configuration and raw numbers of each run", [FactList(rows[:_MOST_RUNS])]))
    if len(rows) > _MOST_RUNS:
        parts.append(Words(f"{len(rows) - _MOST_RUNS} more runs stand in results.json.", "note"))
    return PageSection("runs", "All runs", parts) if rows else None
