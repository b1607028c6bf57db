"""The results of a comparison: `results.json` while it runs, tables at the end, and reading both.

`results.json` is written after each finished run, so an interrupted comparison has the results of its finished runs.
The results of a finished comparison may be copied to a folder under version control, under the run file's name.
"""

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetfit import files
from fleetfit.api.comparison.plan import (
    TUNING_KEY,
    ComparisonPlan,
    PlannedRun,
    RowSetting,
    format_label,
    join,
)
from fleetfit.api.comparison.recipe import describe_costs, describe_recipes
from fleetfit.api.results import Run, load
from fleetfit.config import to_table
from fleetfit.config.dump import make_plain
from fleetfit.config.merge import flatten
from fleetfit.errors import ConfigError, FleetFitError, MissingExtra, RunError, import_optional
from fleetfit.files import write_text
from fleetfit.markup import escape_html
from fleetfit.names import find_attribute
from fleetfit.report import figures, page
from fleetfit.report.columns import COSTS, MEANINGS, is_rounds, list_number_names
from fleetfit.report.comparison_csv import format_comparison_csv, make_run_line
from fleetfit.report.drawing import make_plots_folder, save_figures
from fleetfit.report.order import explain_row_order
from fleetfit.report.page.run_set import RunSet
from fleetfit.report.results import format_results, make_run_result
from fleetfit.report.statistics import Difference, explain_smallest
from fleetfit.report.tables import OF_THE_PAPER
from fleetfit.report.text import Table, describe_data, get_score_name
from fleetfit.runs import RESULTS_FILE, TUNING_FOLDER
from fleetfit.runs.comparison import (
    ComparisonRecord,
    list_planned_runs,
    read_comparison,
    read_results,
)
from fleetfit.runs.schema import (
    ComparisonResults,
    EnvironmentRecord,
    LevelResult,
    PaperNumbers,
    RunResult,
    SummaryRecord,
    TuningResult,
)

Runs = dict[RowSetting, list[Run]]
_LEFT_OUT = ("checkpoint", "recorded")
"""Sections without keys of training."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `compare` and of `load_comparison`: the content of `results.json`.

    Attributes:
        folder: Its folder, with `results.json`, and the tables `table.md` and `table.csv`.
        runs: The runs by (row, setting), one per seed.
        results: The file with all results, `results.json`, or its copy.
        finished: Whether all runs are finished. If not, the table has only finished ones.
    """

    folder: Path
    runs: Mapping[RowSetting, Sequence[Run]]
    results: Path
    finished: bool
    _record: ComparisonRecord

    if not TYPE_CHECKING:  # a type checker refuses other names itself
        __getattr__ = find_attribute

    def __repr__(self) -> str:
        """Return the folder, and the numbers of rows and runs."""
        rows, runs = len({row for row, _ in self.runs}), sum(map(len, self.runs.values()))
        state = "finished" if self.finished else "not finished"
        return f"Comparison({str(self.folder)!r}, {rows} rows, {runs} finished runs, {state})"

    def _repr_html_(self) -> str:
        """Return the tables, for notebooks."""
        return "".join(one.to_html() for one in self.tables) + f"<p>{escape_html(str(self.folder))}</p>"

    @cached_property
    def _visible(self) -> RunSet:
        return RunSet(self._record.rows, self._record.results).hide_private()

    @cached_property
    def table(self) -> Table:
        """Methods as rows, with the columns of each setting side by side, and a paper's numbers below the run's."""
        return self._visible.make_table(self._record.results.title or self._record.results.name)

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Differences of each row from the baseline row, by setting and column; empty for a single row."""
        return tuple(self._visible.differences)

    @property
    def difference_table(self) -> Table | None:
        """The same as a table, or None."""
        return self._visible.make_difference_table()

    @property
    def tuned(self) -> dict[RowSetting, str]:
        """The chosen values of the tuned grid, by (row, setting)."""
        runs = self._record.results.runs
        return {(run.row, run.setting): format_label(tuple(run.tuned.items())) for run in runs if run.tuned}

    @property
    def tuning(self) -> tuple[TuningResult, ...]:
        """The tried and chosen values of each row and setting."""
        return tuple(self._record.results.tuning)

    @property
    def tuning_table(self) -> Table | None:
        """The same as a table, or None."""
        return self._visible.make_tuning_table()

    @property
    def failures(self) -> tuple[str, ...]:
        """Titles of the runs without a usable update. Notes below the table have the reasons."""
        return tuple(self._record.results.failures)

    @property
    def tables(self) -> list[Table]:
        """All tables, in the order of `table.md` and of the terminal."""
        return [one for one in (self.table, self.difference_table, self.tuning_table) if one is not None]

    def to_frame(self) -> Any:
        """Return the finished runs as a `pandas.DataFrame`, a line for each, with the columns of `table.csv`.

        They are `row`, `setting` and `seed`, the final numbers, rounds and seconds. Accuracies and waste are between 0
        and 1, as in `Run.to_frame`.

        Raises:
            MissingExtra: pandas is not installed.
        """
        pandas = import_optional("pandas", "tables", "A data frame")
        frame = pandas.DataFrame([make_run_line(run) for run in self._visible.results.runs])
        percent = [name for name in list_number_names(()) if name in frame and name not in COSTS]
        frame[percent] /= 100
        return frame.drop(columns=["what", "seeds"])

    def write(self) -> None:
        """Write `table.md`, `table.csv`, the plots and the page."""
        write_text(self.folder / "table.md", "\n".join(one.to_markdown() for one in self.tables))
        write_text(self.folder / "table.csv", format_comparison_csv(self._visible.results))
        with contextlib.suppress(MissingExtra):  # the command line reports missing plots
            save_figures(figures.draw_comparison(self._record), make_plots_folder(self.folder))
        page.write_comparison_page(self._record)


# ---- results.json --------------------------------------------------------------------------------------------------


class ResultsFile:
    """Collects finished runs and writes `results.json`.

    Args:
        plan: The comparison.
        folder: The comparison's folder.
        against: Label of the row that the others are measured against.
    """

    def __init__(self, plan: ComparisonPlan, folder: Path, against: str) -> None:
        self.path = folder / RESULTS_FILE
        self._plan, self._against = plan, against
        self._runs: dict[Path, RunResult] = {}
        self._levels: dict[RowSetting, list[LevelResult]] = {}
        self._tuning: list[TuningResult] = []
        self._environments: list[EnvironmentRecord] = []
        self._labels, self._failures, self._notes = list[str](), list[str](), list[str]()

    def add(self, planned: PlannedRun, run: Run, tuned: Mapping[str, Any]) -> None:
        """Add a finished run without writing the file."""
        plan = self._plan
        tables = [source.tables for source in planned.sources if source.key not in ("", TUNING_KEY)]
        values = {key: make_plain(value) for table in tables for key, value in flatten(table).items()}
        folder = run.files.replace_contents(stored_summary=run.files.read_summary(), rounds=run._read_rounds())
        self._runs[planned.subfolder] = make_run_result(
            planned.row, planned.setting, planned.seed, folder, plan.targets, plan.section.target_on,
            overrides=self._shorten_paths(values), tuned=dict(tuned),
            digest=sha256((run.folder / "config.toml").read_bytes()).hexdigest(),
        )  # fmt: skip
        names = {"level", "width", "depth", "blocks", "parameters", "multiply_adds"}
        self._levels.setdefault(planned.group, [
            LevelResult(row=planned.row, setting=planned.setting, **level.model_dump(include=names, warnings=False))
            for level in folder.summary.levels
        ])  # fmt: skip
        self._environments.append(run.files.environment)

    def add_tuning(self, result: TuningResult, runs: Sequence[Run]) -> None:
        """Add the chosen values and the tuning runs of a row and setting without writing the file."""
        self._tuning.append(result)
        self._environments += [run.files.environment for run in runs]

    def finish(self, runs: Runs, failures: Mapping[str, str], notes: Sequence[str]) -> None:
        """Write the file after the last run, with the notes below the table.

        Args:
            runs: The finished runs.
            failures: A sentence on each run without a usable update, by title.
            notes: Further notes.
        """
        plan, results = self._plan, self.results
        summaries = {key: [run.files.read_summary() for run in group] for key, group in runs.items()}
        every = [summary for group in summaries.values() for summary in group]
        self._notes = [
            *_list_notes(plan, results, f"{get_score_name(*every)} in percent on {describe_data(*every)}"),
            *_list_recipe_notes(plan, runs, summaries),
            *_list_notes_on_samples(summaries),
            *_list_early_stops(runs, summaries),
            *explain_row_order({join(*key): group for key, group in summaries.items()}),
            *explain_smallest(results),
            *failures.values(),
            *notes,
        ]
        self._labels, self._failures = list(plan.rows), list(failures)
        self.write()

    def write(self) -> None:
        """Write the file with all added results."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, format_results(self.results))

    @property
    def results(self) -> ComparisonResults:
        """The added results, in the order of the table."""
        finished = [run for run in self._plan.runs if run.subfolder in self._runs]
        table = to_table(self._plan.experiment)
        cores = (one.processors for one in self._environments if one.processors is not None)
        file, working_folder = self._plan.path.resolve(), Path.cwd()
        return ComparisonResults(
            name=self._plan.path.stem,
            file=file.relative_to(working_folder).as_posix() if file.is_relative_to(working_folder) else file.name,
            versions={name: self._join(name) or "unknown" for name in ("fleetfit", "torch", "python")},
            commit=self._join("fleetfit_commit"),
            machine={"processor": self._join("processor") or "unknown", "cores": next(cores, 0)},
            against=self._against,
            title=self._plan.name if self._plan.name != self._plan.path.stem else "",
            smallest=self._plan.smallest,
            columns=list(self._plan.columns),
            targets=self._plan.targets,
            target_on=self._plan.section.target_on,
            tune_on=self._plan.section.tune_on,
            tune_rounds=self._plan.section.tune_rounds,
            settings=self._shorten_paths(
                {key: value for key, value in table.items() if isinstance(value, dict) and key not in _LEFT_OUT}
            ),
            runs=[self._runs[run.subfolder] for run in finished],
            tuning=self._tuning,
            levels=[level for key in dict.fromkeys(run.group for run in finished) for level in self._levels[key]],
            printed=self._list_printed(),
            rows=self._labels,
            failures=self._failures,
            notes=self._notes,
        )

    def _list_printed(self) -> list[PaperNumbers]:
        numbers: dict[RowSetting, dict[str, float]] = {}
        for (row, setting, column), number in self._plan.printed.items():
            numbers.setdefault((row, setting), {})[column] = number
        return [PaperNumbers(row=row, setting=setting, numbers=values) for (row, setting), values in numbers.items()]

    def _join(self, key: str) -> str | None:
        return ", ".join(dict.fromkeys(getattr(one, key) for one in self._environments if getattr(one, key))) or None

    def _shorten_paths(self, value: Any) -> Any:
        """Make paths in the run file's folder, or in the working folder, relative to the file."""
        if isinstance(value, Mapping):
            return {self._shorten_paths(key): self._shorten_paths(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._shorten_paths(inner) for inner in value]
        if isinstance(value, str) and Path(value).is_absolute():
            home = self._plan.path.resolve().parent
            if any(Path(value).is_relative_to(root) for root in (home, Path.cwd())):
                return os.path.relpath(value, home)
        return value


def find_record_path(file: Path, folder: str | Path) -> Path:
    """Return the path of the copy of the results.

    Raises:
        ConfigError: Another file has this path.
    """
    path = files.parse_path(folder) / f"{file.stem}.json"
    if path.exists() or path.is_symlink():
        try:
            read_results(path)
        except FleetFitError as error:
            raise ConfigError(
                f"--record would overwrite {path}, which is another file: {error} Move it, or choose another folder.",
                key="record",
                path=path,
            ) from None
    return path


def write_record(results: ComparisonResults, path: Path) -> None:
    """Write the copy of a finished comparison's results.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_user_file(path, format_results(results))
    except OSError as error:
        raise ConfigError(f"cannot write the results to {path}: {error.strerror}.", key="record", path=path) from None


# ---- the notes below the table -------------------------------------------------------------------------------------


def _list_notes(plan: ComparisonPlan, results: ComparisonResults, score: str) -> list[str]:
    """Return the sentences below the table. The first one explains its numbers."""
    section, seeds = plan.section, len(plan.seeds)
    several = "s, mean ± standard deviation" if seeds > 1 else ""
    notes = [f"{score[:1].upper()}{score[1:]}; {seeds} seed{several}."]
    meanings = [MEANINGS[column] for column in plan.columns if column in MEANINGS]
    notes += [f"Means over the clients: {'; '.join(meanings)}."] * bool(meanings)
    if any(map(is_rounds, plan.columns)):
        words = {0: "only after the last round", 1: "every round", "auto": "as a tenth of the work allows"}
        every = sorted({run.experiment.evaluate.every for run in plan.runs}, key=str)
        often = ", ".join(words.get(rounds, f"every {rounds} rounds") for rounds in every)
        notes.append(
            f'Rounds until the "{section.target_on}" accuracy reaches the target, by the best one so far and a '
            f"straight line between evaluations ({often}); in brackets the speed-up over the first row."
        )
    if "waste" in plan.columns:
        notes.append("Waste: 1 - elements returned / elements sent, in percent, mean over the rounds.")
    for one in results.tuning:
        chosen = format_label(tuple(one.chosen.items()))
        notes.append(f"Tuned on validation data: {join(one.row, one.setting)}: {chosen}.")
    if plan.printed:
        notes.append(f'Lines that end in "{OF_THE_PAPER.strip()}" have the paper\'s numbers.')
    if section.note:
        notes.append(f"Differs from the paper's setting: {section.note.strip()}")
    if plan.overrides:
        changed = [f"{key} = {json.dumps(value, default=str)}" for key, value in flatten(plan.overrides).items()]
        notes.append(f"Changed for this table, where no row or setting has its own: {', '.join(changed)}.")
    return notes


def _list_recipe_notes(
    plan: ComparisonPlan, runs: Runs, summaries: Mapping[RowSetting, Sequence[SummaryRecord]]
) -> list[str]:
    """Return notes on what rows differ in that is no method's idea: keys of the recipe, and costs of training."""
    labels = [row for row in plan.rows if all((row, setting) in runs for setting in plan.settings)]
    if len(labels) < 2:
        return []
    settings = [{row: runs[row, setting][0].experiment for row in labels} for setting in plan.settings]
    costs = {
        row: {
            (setting, run.experiment.seed): one
            for setting in plan.settings
            for run, one in zip(runs[row, setting], summaries[row, setting], strict=True)
        }
        for row in labels
    }
    given = f"compare.same_recipe gave all rows the schedule and the server momentum of {next(iter(plan.rows))}. "
    return [given * plan.section.same_recipe + describe_recipes(settings), *describe_costs(costs)]


def _list_notes_on_samples(summaries: Mapping[RowSetting, Sequence[SummaryRecord]]) -> list[str]:
    """Return notes on accuracies that were measured on a part of the samples, one for each accuracy and test set."""
    parts: dict[tuple[str, int], dict[str, list[int]]] = {}
    for key, group in summaries.items():
        for accuracies in (summary.headline for summary in group):
            every = accuracies.test_samples
            for kind, samples in (("global", accuracies.global_samples), ("local", accuracies.local_samples)):
                if every and samples is not None and samples < every:
                    parts.setdefault((kind, every), {}).setdefault(join(*key), []).append(samples)
    notes = []
    for (kind, every), rows in parts.items():
        least, most = min(map(min, rows.values())), max(map(max, rows.values()))
        samples_text = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        notes.append(
            f"Measured on a part of the samples: {kind} ({samples_text} of {every:,} samples) of {'; '.join(rows)}."
        )
    return notes


def _list_early_stops(runs: Runs, summaries: Mapping[RowSetting, Sequence[SummaryRecord]]) -> list[str]:
    """Return a note on the rows whose runs were ended by early stopping; their numbers are of the last round."""
    rows = []
    for key, group in summaries.items():
        ended = [one.rounds for one, run in zip(group, runs[key], strict=True) if one.rounds < run.experiment.rounds]
        if ended and runs[key][0].experiment.evaluate.patience is not None:
            least, most = min(ended), max(ended)
            rows.append(f"{join(*key)} ({least if least == most else f'{least} to {most}'})")
    return [f"Early stopping ended runs, after rounds: {'; '.join(rows)}. Numbers are of the last round."] * bool(rows)


# ---- reading -------------------------------------------------------------------------------------------------------


def load_comparison(folder: str | Path) -> Comparison:
    """Open the folder of a comparison, finished or not, without training or writing.

    Args:
        folder: A folder of `fleetfit compare`, such as `runs/compare-...`.

    Returns:
        The comparison. If it is unfinished, `finished` is False and the tables have its finished runs. Numbers that
        `[privacy]` withholds stay withheld.

    Raises:
        RunError: The folder is not a comparison's, no run is finished, or a file is damaged.
    """
    path = files.parse_path(folder)
    run_count = _count_runs(path)
    return open_comparison(path, run_count)


def open_comparison(
    folder: Path, run_count: int = 0, runs: Runs | None = None, results: Path | None = None
) -> Comparison:
    """Open the folder of a comparison.

    Args:
        folder: The folder.
        run_count: The number of its runs; 0 if unknown.
        runs: Its runs, if they are at hand: only Python has the objects of some.
        results: A copy of its results.
    """
    record = read_comparison(folder)
    count = len(record.results.runs)
    finished = bool(record.results.notes) and not record.results.failures and run_count in (0, count)
    if not record.results.notes or run_count not in (0, count + len(record.results.failures)):
        progress = f"{count}{f' of {run_count}' if run_count else ''} run{'' if count == 1 else 's'}"
        update = {"notes": [f"Not finished: {progress} so far."], "rows": []}
        record = replace(record, results=record.results.model_copy(update=update))
    logger = logging.getLogger("fleetfit")
    for sentence in record.problems:
        logger.warning("%s", sentence)
    if runs is None:
        runs = {}
        for group, folders in ((row, [run.path for run in row.records]) for row in record.rows):
            for path in folders:
                try:
                    runs.setdefault((group.row, group.setting), []).append(load(path))
                except FleetFitError as error:
                    logger.warning("Leaving out a run of the comparison: %s", error)
    return Comparison(folder, runs, results or folder / RESULTS_FILE, finished, record)


def _count_runs(path: Path) -> int:
    """Return the number of runs of a comparison's table; 0 if its folder does not list them.

    Raises:
        RunError: The folder is not a comparison's, or no run is finished.
    """
    if not path.is_dir():
        raise RunError(f"no such folder: {path}.{files.suggest_neighbor(path)}", path=path)
    planned = list_planned_runs(path)
    single, results = files.is_file(path / "config.toml"), files.is_file(path / RESULTS_FILE)
    if single or not (planned or results):
        hint = " It is a single run: open it with fleetfit.load." if single else ""
        raise RunError(f"{path} is not a comparison's folder: it has no {RESULTS_FILE}.{hint}", path=path)
    if not results:
        raise RunError(
            f"no run of the comparison in {path} is finished. Run the same fleetfit compare command to continue it.",
            path=path,
        )
    return sum(run.subfolder.parts[:1] != (TUNING_FOLDER,) for run in planned)
