"""The page of a comparison, and of runs from several folders."""

import math
from collections.abc import Sequence
from pathlib import Path

from fleetfit.errors import truncate
from fleetfit.report.columns import find_numbers
from fleetfit.report.curves import KINDS
from fleetfit.report.page.accuracy import make_accuracy_section, make_levels_section
from fleetfit.report.page.blocks import Block, Fact, FactList, Fold, Page, PageSection, Paragraph, Sheet
from fleetfit.report.page.participants import make_participation_section, make_partitions_section
from fleetfit.report.page.plan import make_plans_section
from fleetfit.report.page.provenance import list_links, make_comparison_provenance_section, make_runs_provenance_section
from fleetfit.report.page.run_set import PRIVATE_KINDS, RunSet, collect_runs
from fleetfit.report.text import Table, format_bytes, format_percent
from fleetfit.runs.comparison import ComparisonRecord, RowRecord

_MAX_RUNS = 300
_MAX_PROBLEMS = 20


def make_comparison_page(record: ComparisonRecord, page: Path) -> Page:
    """Return the page of a comparison.

    Args:
        record: The comparison.
        page: The file, to which links are relative.
    """
    state = "" if record.results.notes else ", not finished"
    provenance = make_comparison_provenance_section(record, page)
    runs = RunSet(record.rows, record.results)
    return _make_page(record.results.name, state, runs, provenance, page, record.problems)


def make_runs_page(rows: Sequence[RowRecord], page: Path) -> Page:
    """Return the page of runs from several folders.

    Args:
        rows: The runs, from `group_runs`. The first row is the baseline.
        page: The file, to which links are relative.
    """
    problems = [f"{run.path}: {sentence}" for row in rows for run in row.records for sentence in run.find_problems()]
    return _make_page("Several runs", "", collect_runs(rows), make_runs_provenance_section(rows), page, problems)


def _make_page(
    title: str, state: str, runs: RunSet, provenance: PageSection, page: Path, problems: Sequence[str]
) -> Page:
    runs = runs.hide_private()
    sections = [
        make_tables_section(runs),
        provenance,
        *(make_accuracy_section(runs, setting, i) for i, setting in enumerate(runs.settings)),
        make_levels_section(runs),
        make_plans_section(runs.rows),
        make_participation_section(runs.rows),
        make_partitions_section(runs.rows),
        make_run_list_section(runs, page),
    ]
    seeds = {run.seed for run in runs.results.runs}
    counts = {"row": len(runs.labels), "setting": len(runs.settings), "seed": len(seeds), "run": len(runs.results.runs)}
    subtitle = ", ".join(
        f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items() if name != "setting" or count > 1
    )
    return Page(
        truncate(title, 120),
        subtitle + state,
        [section for section in sections if section is not None],
        notes=list(dict.fromkeys(problems))[:_MAX_PROBLEMS],
    )


def make_tables_section(runs: RunSet) -> PageSection:
    """Return the main table, the differences, and the tuning."""
    blocks: list[Block] = [Sheet(runs.make_table())]
    if (differences := runs.make_difference_table()) is not None:
        blocks.append(Sheet(differences))
    tuning = runs.make_tuning_table()
    if tuning is not None:
        blocks.append(Fold("Tuning", [Sheet(tuning)]))
    return PageSection("table", "The table", blocks)


def make_run_list_section(runs: RunSet, page: Path) -> PageSection | None:
    """Return a list of all runs with their numbers and links to their files."""
    kinds = [column for column in runs.columns if column in KINDS]
    cells: list[tuple[str, ...]] = []
    facts: list[Fact] = []
    for row in runs.rows:
        for seed, run in row.runs:
            label = f"{row.label}, seed {seed}"
            facts.append((label, list_links(run.path, page)))
            numbers = find_numbers(run.summary, run.rounds, kinds)
            shares = [
                "withheld" if run.is_private and kind not in PRIVATE_KINDS else format_percent(numbers[kind])
                for kind in kinds
            ]
            down, up = run.summary.bytes_down, run.summary.bytes_up
            if run.is_private or down is None or up is None:
                traffic = "-"
            else:
                traffic = f"{format_bytes(down)} / {format_bytes(up)}"
            seconds = math.fsum(report.seconds for report in run.rounds)
            cells.append((label, str(len(run.rounds)), *shares, traffic, f"{seconds:,.1f}"))
    columns = ("run", "rounds", *(f"{kind} %" for kind in kinds), "bytes down / up", "wall seconds")
    blocks: list[Block] = [
        Sheet(Table(columns, tuple(cells[:_MAX_RUNS]))),
        Fold("configuration and raw numbers of each run", [FactList(facts[:_MAX_RUNS])]),
    ]
    if len(cells) > _MAX_RUNS:
        blocks.append(Paragraph(f"{len(cells) - _MAX_RUNS} more runs are in results.json.", "note"))
    return PageSection("runs", "All runs", blocks) if cells else None
