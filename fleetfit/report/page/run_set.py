"""The runs of a page with several runs: rows, settings and seeds with their final numbers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleetfit.errors import join_some
from fleetfit.report.columns import ROUNDS, is_rounds, number_name
from fleetfit.report.results import make_run_result
from fleetfit.report.statistics import Difference, paired_differences
from fleetfit.report.tables import make_comparison_table, make_difference_table, make_tuning_table
from fleetfit.report.text import Table, describe_data, get_score_name
from fleetfit.runs.comparison import RowRecord
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import ComparisonResults, RunResult

MAIN_KINDS = ("local", "global")
"""The accuracies of the papers' tables."""
PRIVATE_KINDS = ("full", "avg")
"""The accuracies of a run with `[privacy]`."""
_MAX_TITLES = 4  # unfinished runs listed in a note
_ALIKE = ("data", "fleet", "rounds", "evaluate")  # sections that comparable runs share
_MAY_DIFFER = ("seed", "every", "between")  # keys of these: the last evaluation is complete in each run


@dataclass(frozen=True)
class RunSet:
    """The runs of a page.

    Attributes:
        rows: The runs, by row and setting.
        results: Their final numbers, the columns and notes of the table, and the baseline row.
        has_differences: Whether differences between rows are meaningful.
    """

    rows: Sequence[RowRecord]
    results: ComparisonResults
    has_differences: bool = True

    @property
    def labels(self) -> list[str]:
        """The labels of the rows."""
        return list(dict.fromkeys([*self.results.rows, *(run.row for run in self.results.runs)]))

    @property
    def settings(self) -> list[str]:
        """The labels of the settings."""
        return list(dict.fromkeys(run.setting for run in self.results.runs))

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the table."""
        return self.results.columns

    @property
    def records(self) -> list[RunFolder]:
        """All runs."""
        return [run for row in self.rows for run in row.records]

    @property
    def score(self) -> str:
        """The name of the accuracies."""
        return get_score_name(*(run.summary for run in self.records))

    @property
    def private_rows(self) -> set[tuple[str, str]]:
        """Rows and settings with a run that withholds facts about clients."""
        return {(row.row, row.setting) for row in self.rows if row.is_private}

    def select(self, setting: str) -> list[RowRecord]:
        """Return the runs of a setting, row by row."""
        return [row for row in self.rows if row.setting == setting]

    def hide_private(self) -> "RunSet":
        """Return the set without withheld numbers."""
        private = self.private_rows
        if not private:
            return self
        runs = list(self.results.runs)
        for i, run in enumerate(runs):
            if (run.row, run.setting) in private:
                final = {name: v for name, v in run.final.items() if name.startswith((*PRIVATE_KINDS, f"{ROUNDS}_"))}
                runs[i] = run.model_copy(update={"final": final, "per_level": {}, "per_exit": {}})
        return replace(self, results=self.results.model_copy(update={"runs": runs}))

    def make_table(self, title: str = "") -> Table:
        """Return the main table; withheld numbers are marked."""
        of_runs = {(run.row, run.setting, run.seed): _list_numbers(run, self.columns) for run in self.results.runs}
        numbers = {  # empty for a seed that a row lacks
            (row, setting): [
                of_runs.get((row, setting, seed), {})
                for seed in dict.fromkeys(s for _, name, s in of_runs if name == setting)
            ]
            for row, setting, _ in of_runs
        }
        table = make_comparison_table(
            self.labels, self.settings, numbers, title, self.results.notes, self.columns, self.results.paper_numbers
        )
        cells = [(setting, column) for setting in self.settings for column in self.columns]
        rows = tuple(
            (row, *(
                "withheld" if (row, setting) in self.private_rows and _is_hidden(column) else text
                for text, (setting, column) in zip(texts, cells, strict=True)
            ))
            for row, *texts in table.rows
        )  # fmt: skip
        return replace(table, rows=rows)

    @property
    def differences(self) -> list[Difference]:
        """Differences of each row from the baseline row."""
        return paired_differences(self.results, self.columns) if self.has_differences else []

    def make_difference_table(self) -> Table | None:
        """Return the table of the differences; None if there are none."""
        paired = self.differences
        return make_difference_table(paired, self.results.against) if paired else None

    def make_tuning_table(self) -> Table | None:
        """Return the table of the tuning; None without tuning."""
        tuning = self.results.tuning
        return make_tuning_table(tuning, self.results.tune_on, self.results.tune_rounds) if tuning else None


def _is_hidden(column: str) -> bool:
    return column not in PRIVATE_KINDS and not is_rounds(column)


def _list_numbers(run: RunResult, columns: Sequence[str]) -> dict[str, float | None]:
    """Return the final numbers of a run by column, as fractions or rounds."""
    values = {column: run.final.get(number_name(column)) for column in columns}
    return {column: v if v is None or is_rounds(column) else v / 100 for column, v in values.items()}


def collect_runs(rows: Sequence[RowRecord]) -> RunSet:
    """Return runs of several folders, from `group_runs`. The first row is the baseline.

    There are no differences between rows if the runs differ in data or clients, or one is not finished.
    """
    runs = [run for row in rows for run in row.records]
    summaries = [run.summary for run in runs]
    seeds = max(len(row.runs) for row in rows)
    count = f"{seeds} seeds at most, mean ± standard deviation" if seeds > 1 else "1 seed"
    notes = [f"{capitalize(get_score_name(*summaries))} in percent on {describe_data(*summaries)}; {count}."]
    unlike = [
        key for key in _ALIKE if len({repr(_remove_seeds(run.get_setting(key), _MAY_DIFFER)) for run in runs}) > 1
    ]
    if unlike:
        notes.append(
            f"These runs also differ in {', '.join(unlike)}, so their numbers do not rank methods, and differences "
            "between rows are left out."
        )
    unfinished = [
        f"{row.label}, seed {seed} ({len(run.rounds)} of {run.get_setting('rounds')} rounds)"
        for row in rows
        for seed, run in row.runs
        if not run.is_finished
    ]
    if unfinished:
        notes.append(
            f"Not finished: {join_some(unfinished, _MAX_TITLES, '; ')}. Numbers after different rounds do not rank "
            "methods, and differences between rows are left out."
        )
    numbers = [make_run_result(row.row, row.setting, seed, run) for row in rows for seed, run in row.runs]
    results = ComparisonResults(
        name="", file="", versions={}, machine={}, against=rows[0].row, settings={}, notes=notes,
        columns=_choose_columns(rows), runs=numbers,
    )  # fmt: skip
    return RunSet(rows, results, has_differences=not (unlike or unfinished))


def group_runs(folders: Sequence[RunFolder | RowRecord]) -> list[RowRecord]:
    """Group runs into rows: runs whose configurations differ only in seeds and name are one row.

    A row has the name of its runs, or of their method if the runs have different names. Rows of comparisons keep their
    labels.

    Args:
        folders: Runs, and the rows of comparisons in their settings.
    """
    names: dict[str, list[str]] = {}
    runs: dict[str, list[tuple[int, RunFolder]]] = {}
    for number, one in enumerate(folders):
        if isinstance(one, RowRecord):
            key, name, members = f"row {number}", one.label, list(one.runs)
        else:
            config = {name: value for name, value in one.config.items() if name != "name"}
            key, name, members = repr(_remove_seeds(config)) if config else str(one.path), one.name, [(one.seed, one)]
        names.setdefault(key, []).append(name)
        runs.setdefault(key, []).extend(members)
    pending = [
        (names[key][0] if len(set(names[key])) == 1 else group[0][1].method, group) for key, group in runs.items()
    ]
    rows: dict[str, RowRecord] = {}
    for label, group in pending:
        row, count = label, 2
        while row in rows:
            row, count = f"{label} ({count})", count + 1
        by_seed: dict[int, RunFolder] = {}
        copies = [(seed, run) for seed, run in group if by_seed.setdefault(seed, run) is not run]
        rows[row] = RowRecord(row, "", sorted(by_seed.items(), key=lambda pair: pair[0]))
        if copies:  # the same run in another folder is another row
            pending.append((label, copies))
    return list(rows.values())


def capitalize(text: str) -> str:
    """Return a text with a capital first letter. `str.capitalize` would change the other letters."""
    return text[:1].upper() + text[1:]


def _remove_seeds(value: Any, names: Collection[str] = ("seed",)) -> Any:
    """Return tables without the keys called "seed", or others."""
    if isinstance(value, Mapping):
        return {key: _remove_seeds(inner, names) for key, inner in value.items() if key not in names}
    return value


def _choose_columns(rows: Sequence[RowRecord]) -> list[str]:
    private = [run.is_private for row in rows for run in row.records]
    kinds = () if all(private) else (*MAIN_KINDS, "local_worst_tenth")
    return [*kinds, *(PRIVATE_KINDS if any(private) else ())]
