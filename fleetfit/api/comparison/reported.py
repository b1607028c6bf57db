"""A finished comparison: its table as Markdown and CSV, all numbers as JSON, the plots."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetfit.api.comparison.kept import ResultsFile
from fleetfit.api.comparison.planned import ComparisonPlan
from fleetfit.api.results import Run
from fleetfit.config.reading import checked, leaves, value_at
from fleetfit.errors import MissingExtra
from fleetfit.files import write_text
from fleetfit.markup import escape_html
from fleetfit.report import page, plots
from fleetfit.report.columns import is_rounds, numbers_of
from fleetfit.report.differences import LEVEL, Difference, difference_table, differences
from fleetfit.report.lines import table_csv
from fleetfit.report.order import rows_out_of_order
from fleetfit.report.results import TuningResult
from fleetfit.report.tables import OF_THE_PAPER, compare_table, samples_left_out
from fleetfit.report.text import Table, data_of, score_of
from fleetfit.report.tuning import tuning_table

Runs = dict[tuple[str, str], list[Run]]
Tuned = Mapping[tuple[str, str], str]


@dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison: what `compare` returns, and `load_comparison`.

    Attributes:
        folder: Its folder, with `table.md`, `table.csv`, `compare.json`, `differences.json` and `results.json`.
        table: Methods as rows, the columns of each setting side by side; a paper's numbers below ours.
        runs: The runs by (row, setting), one per seed.
        tuned: What each (row, setting) got from the tuned grid.
        results: All results as one small file, `results.json`, or the copy that was asked for.
        differences: Of every row from the reference row, by setting and column; empty where there is one row only.
        difference_table: The same as a table, or None.
        tuning: What was tried for every row and setting, and what each got.
        tuning_table: The same as a table, or None.
        finished: Whether all runs are; of one that is not, the table has what is.
        failures: Titles of the runs that had no usable update, which the notes below the table explain.
    """

    folder: Path
    table: Table
    runs: Mapping[tuple[str, str], Sequence[Run]]
    tuned: Tuned
    results: Path
    differences: tuple[Difference, ...] = ()
    difference_table: Table | None = None
    tuning: tuple[TuningResult, ...] = ()
    tuning_table: Table | None = None
    finished: bool = True
    failures: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """Return the tables, for notebooks."""
        return "".join(one.to_html() for one in self.tables) + f"<p>{escape_html(str(self.folder))}</p>"

    @property
    def tables(self) -> list[Table]:
        """All tables that there are, in the order in which they are printed and stand in `table.md`."""
        return [one for one in (self.table, self.difference_table, self.tuning_table) if one is not None]


def reported(
    plan: ComparisonPlan,
    runs: Runs,
    tuned: Tuned,
    results: ResultsFile,
    known: Sequence[str] = (),
    failures: tuple[str, ...] = (),
    kept: Path | None = None,
) -> Comparison:
    """Write the table, the numbers, the plots and the page of finished runs."""
    folder, found_out = results.path.parent, results.results
    summaries = {key: [found.summary for found in group] for key, group in runs.items()}
    metrics = {key: [found.metrics for found in group] for key, group in runs.items()}
    on = plan.section.target_on
    numbers = {
        key: [numbers_of(s, m, plan.columns, plan.targets, on) for s, m in zip(found, metrics[key], strict=True)]
        for key, found in summaries.items()
    }
    score = score_of(*(summary for found in summaries.values() for summary in found))
    pieces = rows_out_of_order({", ".join(filter(None, key)): found for key, found in summaries.items()})
    where = data_of(*(summary for found in summaries.values() for summary in found))
    notes = [*_notes(plan, tuned, f"{score} in percent on {where}"), *_notes_on_samples(summaries), *pieces, *known]
    table = compare_table(list(plan.rows), list(plan.settings), numbers, plan.name, notes, plan.columns, plan.printed)
    compared = differences(found_out, plan.columns)
    beside = difference_table(compared, found_out.against) if compared else None
    tried = tuning_table(found_out.tuning, plan.section.tune_on) if found_out.tuning else None
    comparison = Comparison(
        folder, table, runs, tuned, kept or results.path, tuple(compared), beside, found_out.tuning, tried,
        finished=not failures, failures=failures,
    )  # fmt: skip
    write_text(folder / "table.md", "\n".join(one.to_markdown() for one in comparison.tables))
    write_text(folder / "table.csv", table_csv(found_out, compared, plan.targets, plan.printed))
    write_text(folder / "differences.json", _differences_json(compared, found_out.against))
    entries = [
        {
            "row": row,
            "setting": setting,
            "tuned": tuned.get((row, setting)),
            "columns": shown,
            "printed": {c: plan.printed[row, setting, c] for c in plan.columns if (row, setting, c) in plan.printed},
            **summary,
            "folder": str(found.folder),
        }
        for (row, setting), group in runs.items()
        for found, summary, shown in zip(group, summaries[row, setting], numbers[row, setting], strict=True)
    ]
    write_text(folder / "compare.json", json.dumps(entries, indent=2) + "\n")
    with contextlib.suppress(MissingExtra):  # the command line says that there are no plots
        seeds = {key: list(zip(summaries[key], metrics[key], strict=True)) for key in runs}
        plots.plots_of_comparison(folder, seeds, plan.columns, plan.targets, on)
    page.after_comparison(folder)
    return comparison


def _differences_json(found: Sequence[Difference], against: str) -> str:
    lines = [{**dataclasses.asdict(one), "order": one.order} for one in found]
    return json.dumps({"format": 1, "against": against, "level": LEVEL, "differences": lines}, indent=2) + "\n"


def _notes(plan: ComparisonPlan, tuned: Tuned, what: str) -> list[str]:
    """Return the sentences below the table, the first of which says what its numbers are."""
    section, seeds = plan.section, len(plan.seeds)
    several = "s, mean ± standard deviation" if seeds > 1 else ""
    notes = [f"{what[:1].upper()}{what[1:]}; {seeds} seed{several}."]
    if any(map(is_rounds, plan.columns)):
        every = sorted({checked(entry.table).evaluate.every for entry in plan.entries()})
        said = ", ".join(map(_often, every))
        notes.append(
            f'Rounds until the "{section.target_on}" accuracy reaches the target, by the best one so far and a '
            f"straight line between evaluations ({said}); in brackets the speed-up over the first row."
        )
    if "waste" in plan.columns:
        notes.append("Waste: 1 - what came back / what was sent, in percent, mean over the rounds.")
    notes += [f"Tuned on validation data: {', '.join(filter(None, key))}: {value}." for key, value in tuned.items()]
    if plan.printed:
        notes.append(f'Lines that end in "{OF_THE_PAPER.strip()}" hold the paper\'s own numbers.')
    if section.differs:
        notes.append(f"Differs from the paper's setting: {section.differs.strip()}")
    if plan.said:
        changed = [f"{key} = {json.dumps(value_at(plan.said, key)[0], default=str)}" for key in leaves(plan.said)]
        notes.append(f"Changed for this table, in every row and setting: {', '.join(changed)}.")
    return notes


def _notes_on_samples(summaries: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> list[str]:
    """Say which accuracies were measured on fewer samples than there are."""
    found: dict[str, list[str]] = {}
    for key, group in summaries.items():
        headlines = [summary["evaluate"].get(summary["norm"], {}) for summary in group]
        for kind in ("global", "local"):
            for some in sorted({samples_left_out(columns, kind) for columns in headlines} - {""}):
                found.setdefault(f"{kind}{some}", []).append(", ".join(filter(None, key)))
    return [f"Measured on fewer than all samples: {what} of {'; '.join(rows)}." for what, rows in found.items()]


def _often(every: int) -> str:
    return {0: "after the last round only", 1: "every round"}.get(every, f"every {every} rounds")
