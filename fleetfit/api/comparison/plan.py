"""Plan a comparison: list its runs, and check them all before the first run.

Every row is run in every setting with every seed. A setting is one of `[[compare.setting]]`, one combination of the
lists in `[compare.grid]`, or both combined. `[compare.tune]` adds runs that try the same small grid for every row and
setting on validation data, as in ReeFL, appendix A. They have their own seeds, because values chosen with the seed of a
run would be biased towards that run.

The tables of a run are merged in one order: the file, overrides, its row, its setting, its values of the grid, tuned
values. The later wins. Rows and settings so are what their labels say, whatever the overrides are. A key without effect
in any run is refused; one of the file, which serves many runs, gets a note.

The row "smallest model" is plain FedAvg at the smallest budget, with the file's own `[local]` and all other sections
that the rows share, except `[method]` and `fleet.scaling`. Where it is as good as the other rows, a fleet needs no
levels. By default it never refuses a comparison: if it does not fit, a note says why it is left out.

`plan_comparison` checks what needs no data. `check_rows` then assembles each row in each setting once, with the first
seed: a row that does not fit its data or its fleet is refused before another row has trained.
"""

import contextlib
import functools
import importlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from fleetfit import files
from fleetfit.api.comparison.recipe import copy_recipe
from fleetfit.api.results import find_fingerprint, load
from fleetfit.api.run import is_related_key
from fleetfit.config import Assembly, Experiment
from fleetfit.config.assemble.data import share_data
from fleetfit.config.assemble.run import assemble
from fleetfit.config.assembly import UnusedKey
from fleetfit.config.keys import replace_key
from fleetfit.config.load import check_source, complete_experiment, parse_overrides, read_run_file, resolve_tables
from fleetfit.config.merge import deep_merge, drop_absent, flatten, merge_tables
from fleetfit.config.parse import parse_experiment
from fleetfit.config.schema import CompareSection, MethodSection
from fleetfit.errors import ConfigError, FleetFitError, RunError, did_you_mean, quote_some, truncate
from fleetfit.files import make_slug
from fleetfit.report.columns import ATTACKED, BATCH, COLUMNS, ON_THE_WAY, PERSONAL, ROUNDS, expand_columns
from fleetfit.runs import RESULTS_FILE, TUNING_FOLDER
from fleetfit.runs.comparison import RUNS_FILE
from fleetfit.runs.schema import FingerprintRecord

RowSetting = tuple[str, str]
"""The labels of a row and a setting."""
TunedValues = tuple[tuple[str, Any], ...]
"""Dotted keys of a run file, and their values."""

SMALLEST = "smallest model"
"""Label of the row of FedAvg at the smallest budget."""
_FEDAVG = {"method": {"name": "fedavg"}}
TUNING_KEY = "compare.tune."
_LOCK = ".lock"
_LONGEST_LABEL = 200
_RESERVED = (TUNING_FOLDER, "plots", RUNS_FILE, RESULTS_FILE, "table.md",
             "table.csv", "report.html", "config.toml", "plan.toml", "metrics.jsonl", "summary.json")  # fmt: skip
"""Files in the folder of a comparison or a run. No folder of a row has such a name."""
_SAME_IN_ALL_RUNS = {
    "seed": "all rows and settings share the seeds. Set seed at the top, or [compare.grid] seed = [0, 1, 2]",
    "name": "this is the name of the whole comparison. Rows and settings have a label",
    "compare": "a comparison cannot contain another one. Leave it out",
    "evaluate.split": "numbers on different data do not rank methods. Set it at the top",
    "label": "only rows and settings have a label. Leave it out",
    "paper": "only rows have a paper's numbers. Move it to a row",
}
"""Keys that rows, settings and lists of values cannot have, with the reasons."""
NO_VALIDATION = (
    "[compare.tune] needs validation data, but no client has any. Hold some out, such as with data.validation = 0.1, "
    "or leave [compare.tune] out. FleetFit never tunes on test data."
)


class Source(NamedTuple):
    """A part of the tables of runs.

    Attributes:
        heading: Its name in messages.
        key: Its key in the run file, with a dot; "" for the file and overrides.
        tables: Its tables.
    """

    heading: str
    key: str
    tables: Mapping[str, Any]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison.

    Attributes:
        row: Label of its row.
        setting: Label of its setting; "" if the file has only one.
        seed: Its seed.
        sources: The parts of its tables, from the file to tuned values.
        experiment: Its description, merged from these.
        subfolder: Its folder, relative to the comparison's.
        title: Its name in progress and tables, such as "fedavg, IID, seed 0".
        values: The values that a tuning run tries; None for a run of the table.
    """

    row: str
    setting: str
    seed: int
    sources: tuple[Source, ...]
    experiment: Experiment
    subfolder: Path
    title: str
    values: TunedValues | None = None

    @property
    def group(self) -> RowSetting:
        """Its row and setting."""
        return self.row, self.setting

    @property
    def name(self) -> str:
        """Row and setting, for messages."""
        return _name_row(*self.group)

    @property
    def tables(self) -> Mapping[str, Any]:
        """The tables of its run file."""
        return self.experiment.request.tables

    def merge(self, change: Mapping[str, Any]) -> "PlannedRun":
        """Return the run with changed tables."""
        return replace(self, experiment=complete_experiment(merge_tables(self.tables, change))) if change else self

    def tune(self, values: TunedValues) -> "PlannedRun":
        """Return the run with tuned values."""
        source = Source("[compare.tune]", TUNING_KEY, make_tables(values))
        return replace(self.merge(source.tables), sources=(*self.sources, source))


@dataclass(frozen=True)
class ComparisonPlan:
    """The runs of a comparison, and its table.

    Attributes:
        name: Name of the comparison.
        path: Its run file; of tables, the name with `.toml`.
        experiment: The file's experiment, with the overrides.
        shared: The tables that all rows share: those of the file, and the overrides.
        rows: The rows by label.
        settings: The settings by label, each with its values of the grid; one empty label if the file has one setting.
        columns: The columns of the table.
        seeds: The seeds of each row and setting.
        tuning: The combinations of values to try; a single empty one without `[compare.tune]`.
        tune_seeds: The seeds to try them with.
        printed: A paper's numbers by (row, setting, column), for the tables without overrides: percent, or rounds.
        smallest: Label of the last row if `compare.smallest_baseline` added it, or "".
        notes: Notes for the user.
    """

    name: str
    path: Path
    experiment: Experiment
    shared: tuple[Source, Source]
    rows: Mapping[str, Source]
    settings: Mapping[str, tuple[Source, ...]]
    columns: Sequence[str]
    seeds: Sequence[int]
    tuning: Sequence[TunedValues]
    tune_seeds: Sequence[int]
    printed: Mapping[tuple[str, str, str], float]
    smallest: str = ""
    notes: Sequence[str] = ()

    @property
    def section(self) -> CompareSection:
        """The section `[compare]`."""
        return self.experiment.compare

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The overrides."""
        return self.shared[1].tables

    @functools.cached_property
    def runs(self) -> list[PlannedRun]:
        """The runs of the table, row by row."""
        runs: list[PlannedRun] = []
        first: dict[str, Experiment] = {}  # of the first row, by setting
        for row, setting in itertools.product(self.rows, self.settings):
            planned = self._plan_seeds(row, setting, first.get(setting))
            first.setdefault(setting, planned[0].experiment)
            runs += planned
        return runs

    @functools.cached_property
    def tuning_runs(self) -> list[PlannedRun]:
        """The tuning runs, ordered by row, setting, values and seed."""
        combinations = itertools.product(self.first_runs, self.tuning if self.section.tune else (), self.tune_seeds)
        return [self._plan_tuning(run, values, seed) for run, values, seed in combinations]

    @property
    def first_runs(self) -> list[PlannedRun]:
        """The runs with the first seed: one for each row and setting."""
        return [run for run in self.runs if run.seed == self.seeds[0]]

    @property
    def targets(self) -> list[float]:
        """The accuracies to which rounds are counted."""
        return list(self.section.targets)

    @property
    def fingerprint(self) -> str:
        """A short hash of all keys that change the runs of the file's rows; `callbacks` do not."""
        runs = [run for run in self.runs if run.row != self.smallest]
        tables = [[str(run.subfolder), {k: v for k, v in run.tables.items() if k != "callbacks"}] for run in runs]
        text = json.dumps(
            [*tables, self.tuning, *self._list_tuning()],
            default=lambda thing: f"{thing}{token_hex(8)}",  # an object may differ each time
            sort_keys=True,
        )
        return sha256(text.encode()).hexdigest()[:6]

    def _list_tuning(self) -> list[Any]:
        """Return all that decides which of the values of `compare.tune` a row gets."""
        section = self.section
        if not section.tune:
            return []
        by_rounds = [section.target_on, *self.targets[:1]] if section.tune_on == ROUNDS else []
        return [self.tune_seeds, *self._change_rounds().items(), section.tune_on, *by_rounds]

    def find_reference(self, against: str | None = None) -> str:
        """Return the label of the baseline row.

        Args:
            against: The label; by default `compare.against`, or the first row.

        Raises:
            ConfigError: No row has the label.
        """
        label = self.section.against if against is None else against
        if label is None:
            return next(iter(self.rows))
        if label not in self.rows:
            where, key = ("[compare] against", "compare.against") if against is None else ("--against", "against")
            raise ConfigError(
                f'{where}: no row has the label "{truncate(label)}". The rows are '
                f"{', '.join(self.rows)}.{did_you_mean(label, self.rows)}",
                key=key,
            )
        return label

    def add_smallest(self) -> "ComparisonPlan":
        """Return the plan with the row "smallest model".

        Raises:
            ConfigError: A row has this label.
        """
        if SMALLEST in self.rows:
            raise ConfigError(
                f'[compare] smallest_baseline: a row of the file has the label "{SMALLEST}". Change it, or set '
                "smallest_baseline = "
                "false.",
                key="compare.smallest_baseline",
            )
        row = Source("[compare] smallest_baseline", "compare.smallest_baseline.", _FEDAVG)
        return replace(self, rows={**self.rows, SMALLEST: row}, smallest=SMALLEST)

    def drop_smallest(self, reason: str = "") -> "ComparisonPlan":
        """Return the plan without the row "smallest model".

        Args:
            reason: Why it is left out, for a note.
        """
        rows = {label: row for label, row in self.rows.items() if label != self.smallest}
        notes = [*self.notes, f'The row "{self.smallest}" is left out: {reason}'] if reason else self.notes
        return replace(self, rows=rows, smallest="", notes=notes)

    @property
    def has_implied_smallest(self) -> bool:
        """Whether it has a row "smallest model" that the file does not ask for."""
        return bool(self.smallest) and self.section.smallest_baseline is None

    def _merge(self, row: str, setting: str) -> tuple[tuple[Source, ...], dict[str, Any]]:
        """Return the sources of a row in a setting, and their merged tables."""
        if row != self.smallest:
            sources = (*self.shared, self.rows[row], *self.settings[setting])
            return sources, _merge_sources(sources)
        sources = (*self.shared, *self.settings[setting], self.rows[row])
        tables = {**_merge_sources(sources), **_FEDAVG}  # plain FedAvg, which refuses a split of levels
        if isinstance(tables.get("fleet"), Mapping):
            tables["fleet"] = {key: value for key, value in tables["fleet"].items() if key != "scaling"}
        return sources, tables

    def _plan_seeds(self, row: str, setting: str, first: Experiment | None) -> list[PlannedRun]:
        sources, tables = self._merge(row, setting)
        folder = Path(make_slug(row, _RESERVED)) / make_slug(setting)
        with _name_error(_name_row(row, setting)):
            if self.section.same_recipe and first is not None:
                tables = copy_recipe(first, tables, list(flatten(self.rows[row].tables)))
            experiments = [complete_experiment({**tables, "seed": seed, "name": row}) for seed in self.seeds]
        return [
            PlannedRun(row, setting, seed, sources, one, folder / f"seed-{seed}", join(row, setting, f"seed {seed}"))
            for seed, one in zip(self.seeds, experiments, strict=True)
        ]

    def _plan_tuning(self, run: PlannedRun, values: TunedValues, seed: int) -> PlannedRun:
        label = format_label(values)
        change = {"seed": seed, "evaluate": {"split": "validation"}, **self._change_rounds()}
        with _name_error(run.name):
            tuned = run.merge(merge_tables(make_tables(values), change))
        return replace(
            tuned,
            seed=seed,
            subfolder=TUNING_FOLDER / run.subfolder.parent / make_slug(label) / f"seed-{seed}",
            title=join("tuning", run.row, run.setting, label, f"seed {seed}" if self.tune_seeds[1:] else ""),
            values=values,
        )

    def _change_rounds(self) -> dict[str, int]:
        """Return the tables that give a tuning run its rounds."""
        rounds = self.section.tune_rounds
        return {} if rounds is None else {"rounds": rounds}


def _merge_sources(sources: Iterable[Source]) -> dict[str, Any]:
    """Return the tables of a run."""
    tables = functools.reduce(merge_tables, (source.tables for source in sources), dict[str, Any]())
    return {key: value for key, value in tables.items() if key != "compare"}


def _name_row(row: str, setting: str) -> str:
    return f'row "{row}"' + (f', setting "{setting}"' if setting else "")


@contextlib.contextmanager
def _name_error(name: str) -> Iterator[None]:
    """Name the run of an error."""
    try:
        yield
    except FleetFitError as error:
        error.args = (f"{name}: {error}",)
        raise


def plan_comparison(
    source: str | Path | Mapping[str, Any] | Experiment | None = None, overrides: Sequence[str] = (), /, **sections: Any
) -> ComparisonPlan:
    """Plan the comparison of a file, tables or sections; see `fleetfit.compare`. Sections of None are absent.

    Raises:
        ConfigError: A row, a setting, a list of values or an override is wrong, or the rows cannot be compared.
    """
    change, keywords = parse_overrides(overrides), resolve_tables(drop_absent(sections), Path.cwd())
    if source is None:
        return _make_plan(keywords, None, change)
    check_source(source)
    change = deep_merge(change, keywords)
    if isinstance(source, str | Path):
        return _make_plan(read_run_file(source), Path(source), change)
    table = source.request.tables if isinstance(source, Experiment) else source
    return _make_plan(resolve_tables(table, Path.cwd()), None, change)


def _make_plan(file: Mapping[str, Any], path: Path | None, overrides: Mapping[str, Any]) -> ComparisonPlan:
    experiment = _read_base(merge_tables(file, overrides))
    name = experiment.name or ("comparison" if path is None else path.stem)
    section = experiment.compare
    grid, tune = _read_lists(section.grid, "compare.grid"), _read_lists(section.tune, "compare.tune")
    seeds = grid.pop("seed", [experiment.seed])
    shared = (Source("file", "", file), Source("--set", "", overrides))
    rows = _make_rows(section, _merge_sources(shared))
    plan = ComparisonPlan(
        name=name,
        path=path or Path(f"{name}.toml"),
        experiment=experiment,
        shared=shared,
        rows=rows,
        settings=_make_settings(section, grid),
        columns=_list_columns(experiment),
        seeds=seeds,
        tuning=list(_combine(tune)),
        # a seed that is not a number is refused below
        tune_seeds=section.tune_seeds or [max((seed for seed in seeds if isinstance(seed, int)), default=0) + 1],
        printed=_read_printed(file, rows) if any("paper" in row for row in section.row) else {},
    )
    _check_allowed_keys(plan)
    if section.smallest_baseline or (section.smallest_baseline is None and _compares_methods(plan)):
        extended = plan.add_smallest()
        try:
            return _check_plan(extended)
        except ConfigError as error:
            if section.smallest_baseline:
                raise
            plan = extended.drop_smallest(str(error))
    return _check_plan(plan)


def _read_base(table: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a file without its rows, which may give what the file's method needs."""
    try:
        return complete_experiment(table)
    except ConfigError as error:
        if not (error.key or "").startswith("method."):
            raise
        return parse_experiment(table)


def _compares_methods(plan: ComparisonPlan) -> bool:
    """Return whether rows of a file share data and model, and none is FedAvg at the smallest budget."""
    base = _merge_sources(plan.shared)
    rows = [merge_tables(base, row.tables) for row in plan.rows.values()]
    has_smallest = SMALLEST in plan.rows or any(
        row.get("method", {}).get("name") == "fedavg" and row.get("fleet") == base.get("fleet") for row in rows
    )
    changed = {section for row in plan.rows.values() for section in row.tables}
    return bool(plan.section.row) and not has_smallest and not changed & {"data", "model"}


# ---- rows, settings, columns ---------------------------------------------------------------------------------------


def join(*parts: str) -> str:
    """Join the non-empty parts of a title."""
    return ", ".join(filter(None, parts))


def _read_label(source: Source, table: Mapping[str, Any], default: str) -> str:
    """Return the label of a row or a setting. It must be printable, because tables and messages show it."""
    label = str(table.get("label") or default)
    if not label.isprintable() or len(label) > _LONGEST_LABEL:
        raise ConfigError(
            f"{source.heading} label: must have at most {_LONGEST_LABEL} printable characters, got "
            f"{truncate(repr(label))}.",
            key=f"{source.key}label",
        )
    return label


def _make_rows(section: CompareSection, base: Mapping[str, Any]) -> dict[str, Source]:
    """Return the rows by label. The default label is the method's name."""
    rows: dict[str, Source] = {}
    for position, table in enumerate(section.row or [{}]):
        tables = {name: value for name, value in table.items() if name not in ("label", "paper")}
        row = Source(f"[compare] row #{position + 1}", f"compare.row.{position}.", tables)
        method = merge_tables(base, tables).get("method", {}).get("name", MethodSection().name)
        label = _read_label(row, table, truncate(method, _LONGEST_LABEL))
        if label in rows:
            raise ConfigError(
                f'{row.heading}: another row has the label "{label}". Set distinct labels.', key=f"{row.key}label"
            )
        rows[label] = row
    return rows


def _make_settings(section: CompareSection, grid: Mapping[str, list[Any]]) -> dict[str, tuple[Source, ...]]:
    """Return the settings by label, each with its values of the grid; one empty label if the file has one setting."""
    of_file: list[tuple[str, tuple[Source, ...]]] = []
    for position, table in enumerate(section.setting):
        tables = {name: value for name, value in table.items() if name != "label"}
        setting = Source(f"[compare] setting #{position + 1}", f"compare.setting.{position}.", tables)
        label = _read_label(setting, table, "")
        if not label:
            raise ConfigError(
                f'{setting.heading}: has no label. Set one, such as label = "IID".', key=f"{setting.key}label"
            )
        of_file.append((label, (setting,)))
    settings: dict[str, tuple[Source, ...]] = {}
    for (name, sources), values in itertools.product(of_file or [("", ())], _combine(grid)):
        label = join(name, format_label(values))
        if label in settings:
            raise ConfigError(
                f'[compare] two settings have the label "{label}". Set distinct labels.', key="compare.setting"
            )
        settings[label] = (*sources, Source("[compare.grid]", "compare.grid.", make_tables(values)))
    return settings


def _list_columns(experiment: Experiment) -> list[str]:
    """Return the columns of the table (see `fleetfit.report.columns`)."""
    section, evaluate = experiment.compare, experiment.evaluate
    columns = section.columns
    if columns is None:
        columns = ["local", "global", *([ROUNDS] if section.targets else [])]

    def refuse(key: str, reason: str) -> None:
        raise ConfigError(f"[compare] {key}: {reason}", key=f"compare.{key}")

    for name in columns:
        if name not in COLUMNS:
            columns_text = quote_some(COLUMNS, len(COLUMNS))
            hint = did_you_mean(name, COLUMNS)
            refuse("columns", f'unknown column "{name}". The columns are {columns_text}.{hint}')
        if name.endswith(BATCH) and "batch" not in evaluate.batch_norm[1:]:
            refuse(
                "columns",
                f'"{name}" needs accuracy with both batch-norm policies. Set evaluate.batch_norm = ["static", '
                '"batch"].',
            )
    if section.target_on not in COLUMNS or section.target_on.endswith((ROUNDS, "waste", *ATTACKED, BATCH)):
        refuse("target_on", f'"{section.target_on}" is not an accuracy.{did_you_mean(section.target_on, COLUMNS)}')
    for key, names in (("columns", columns), ("target_on", [section.target_on]), ("tune_on", [section.tune_on])):
        if PERSONAL in names and not evaluate.personal:
            refuse(key, f'"{PERSONAL}" needs personal predictions. Set evaluate.personal = true.')
        if ROUNDS in names and not section.targets:
            refuse(key, '"rounds" needs a target accuracy. Set one, such as target = 0.97.')
    return expand_columns(list(dict.fromkeys(columns)), section.targets)


def _read_printed(file: Mapping[str, Any], labels: Iterable[str]) -> dict[tuple[str, str, str], float]:
    """Return a paper's numbers: in each row one per column and setting of the file, "-" for a missing one."""
    experiment = parse_experiment(file)
    section = experiment.compare
    grid = {key: values for key, values in _read_lists(section.grid, "compare.grid").items() if key != "seed"}
    cells = list(itertools.product(_make_settings(section, grid), _list_columns(experiment)))
    printed: dict[tuple[str, str, str], float] = {}
    for position, (label, row) in enumerate(zip(labels, section.row, strict=False)):
        key, numbers = f"compare.row.{position}.paper", row.get("paper", [])
        if not isinstance(numbers, list) or (numbers and len(numbers) != len(cells)):
            expected = "; ".join(join(*cell) for cell in cells)
            got = len(numbers) if isinstance(numbers, list) else repr(numbers)
            raise ConfigError(
                f'row "{label}": paper must have {len(cells)} numbers, one for each column of the table '
                f'({expected}), with "-" for a missing one; got {got}.',
                key=key,
            )
        for cell, number in zip(cells, numbers, strict=False):
            if isinstance(number, int | float) and not isinstance(number, bool):
                printed[(label, *cell)] = float(number)
            elif number != "-":
                raise ConfigError(
                    f'row "{label}": paper must have numbers, or "-" for a missing one; got {number!r}.', key=key
                )
    return printed


# ---- lists of values -----------------------------------------------------------------------------------------------


def _read_lists(table: Mapping[str, Any], section: str) -> dict[str, list[Any]]:
    """Return the lists of a grid by dotted key."""
    lists = flatten(table)
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"[{section}] {truncate(key)}: must be a list of values to try, got {truncate(repr(values))}.",
                key=f"{section}.{key}",
            )
    return lists


def _combine(lists: Mapping[str, list[Any]]) -> Iterator[TunedValues]:
    for values in itertools.product(*lists.values()):
        yield tuple(zip(lists, values, strict=True))


def make_tables(values: TunedValues) -> dict[str, Any]:
    """Return the tables of dotted keys."""
    tables = functools.reduce(merge_tables, (replace_key({}, key, value) for key, value in values), dict[str, Any]())
    return resolve_tables(tables, Path.cwd())


def format_label(values: TunedValues) -> str:
    """Return the label of a combination of values, such as "cifar10, alpha = 1"."""
    parts = []
    for key, value in values:
        *_, last = key.split(".")
        parts.append(str(value) if last in ("name", "kind") else f"{last} = {value}")
    return ", ".join(parts)


# ---- checks that need no data --------------------------------------------------------------------------------------


def _check_allowed_keys(plan: ComparisonPlan) -> None:
    """Refuse keys that all runs share in rows, settings and lists of values."""
    tuned = Source("[compare.tune]", TUNING_KEY, make_tables(plan.tuning[0]))
    for source in (*plan.rows.values(), *itertools.chain(*plan.settings.values()), tuned):
        for key in flatten(source.tables):
            wrong = next((one for one in _SAME_IN_ALL_RUNS if is_related_key(one, key) and len(one) <= len(key)), None)
            if wrong is not None:
                raise ConfigError(f"{source.heading} {wrong}: {_SAME_IN_ALL_RUNS[wrong]}.", key=f"{source.key}{wrong}")


def _check_plan(plan: ComparisonPlan) -> ComparisonPlan:
    """Return the plan if no two runs share a folder, and each evaluation of a run measures the targets' accuracy."""
    _check_tuning(plan)
    folders: set[Path] = set()
    for run in (*plan.tuning_runs, *plan.runs):
        if run.subfolder in folders:
            section = "compare" if run.values is None else "compare.tune"
            raise ConfigError(
                f'[{section}] two runs would have the folder "{run.subfolder}". Set distinct labels, values and seeds.',
                key=section,
            )
        folders.add(run.subfolder)
        if plan.targets and run.experiment.evaluate.between is not None:
            raise ConfigError(
                f"[evaluate] between: rounds to a target accuracy count complete evaluations, and in {run.title} only "
                "the last one is complete. Leave evaluate.between out, or compare.target.",
                key="evaluate.between",
            )
    target_on = plan.section.target_on
    if (
        plan.targets
        and target_on not in ON_THE_WAY
        and not all(run.experiment.evaluate.whole_test_set for run in plan.runs)
    ):
        raise ConfigError(
            f'[compare] target_on: "{target_on}" is only measured after the last round. Set evaluate.whole_test_set '
            "= true to "
            f"measure it at every evaluation, or choose one of {', '.join(ON_THE_WAY)}.",
            key="compare.target_on",
        )
    return plan


def _check_tuning(plan: ComparisonPlan) -> None:
    """Refuse keys of the tuning where nothing is tuned, a criterion and rounds that its runs cannot have."""
    section, fields = plan.section, CompareSection.model_fields
    for key in ("tune_on", "tune_seeds", "tune_rounds") if not section.tune else ():
        if getattr(section, key) != fields[key].default:
            raise ConfigError(
                f"[compare] {key}: has no effect, because nothing is tuned. Leave it out, or list values in "
                "[compare.tune].",
                key=f"compare.{key}",
            )
    measured_on = section.target_on if section.tune_on == ROUNDS else section.tune_on
    for run in plan.tuning_runs:
        if run.experiment.is_private and measured_on in ON_THE_WAY:
            raise ConfigError(
                f'[compare.tune]: [privacy] withholds the "{measured_on}" accuracy, by which {run.name} would be '
                "tuned. Leave [compare.tune] out.",
                key="compare.tune",
            )
    rounds = section.tune_rounds
    if rounds is None:
        return
    if "rounds" in make_tables(plan.tuning[0]):
        raise ConfigError(
            "[compare.tune] rounds: compare.tune_rounds replaces it. Leave one of them out.", key="compare.tune.rounds"
        )
    for run in plan.first_runs:
        if rounds > run.experiment.rounds:
            raise ConfigError(
                f"[compare] tune_rounds: must be at most the rounds of the table's runs, which are "
                f"{run.experiment.rounds} in {run.name}; got {rounds}.",
                key="compare.tune_rounds",
            )


# ---- the check of assembled rows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DryRun:
    """The result of the check of all rows.

    Attributes:
        plan: The comparison, without the row "smallest model" if it is implied and does not fit the data or the fleet.
        notes: Notes of the plan, and on keys of the file without effect in any run.
        notes_of: The notes of each row and setting, without those on unused keys of the file that another run uses.
        measured: Measurements for each row and setting, by the check or by earlier runs in the folder.
        data: Fingerprints of the data as they are now; None where runs have none.
        evaluations: Tables with the evaluations that the first row chose for `evaluate.every = "auto"`, by setting and
            number of rounds: curves of all rows have the same rounds, clients and samples.
    """

    plan: ComparisonPlan
    notes: Sequence[str]
    notes_of: Mapping[RowSetting, Sequence[str]]
    measured: Mapping[RowSetting, Mapping[str, list[float]]]
    evaluations: Mapping[tuple[str, int], Mapping[str, Any]]
    data: Mapping[RowSetting, FingerprintRecord | None]

    def add_facts(self, run: PlannedRun) -> PlannedRun:
        """Return the run with the evaluations that its setting shares, and with measurements."""
        change: dict[str, Any] = {}
        if run.experiment.evaluate.every == "auto":
            change |= self.evaluations.get((run.setting, run.experiment.rounds), {})
        if measured := self.measured[run.group]:
            change["recorded"] = {"latencies": {**measured, **run.experiment.recorded.latencies}}
        return run.merge(change)


def check_rows(
    plan: ComparisonPlan,
    folder: Path | None = None,
    on_assembly: Callable[[PlannedRun, Assembly], None] | None = None,
) -> DryRun:
    """Assemble each row in each setting once, and refuse keys of the comparison without effect in any run.

    Args:
        plan: The comparison.
        folder: The comparison's folder, with measurements of earlier runs.
        on_assembly: Called with each row and setting and its assembly.

    Raises:
        ConfigError: A key of a row, a setting, a list of values or an override has no effect in any run; or tuning has
            no validation data.
        FleetFitError: A run cannot be assembled.
    """
    measured: dict[RowSetting, dict[str, list[float]]] = {}
    checked: list[tuple[PlannedRun, Sequence[UnusedKey]]] = []
    evaluations: dict[tuple[str, int], dict[str, Any]] = {}
    notes_of: dict[RowSetting, Sequence[str]] = {}
    data: dict[RowSetting, FingerprintRecord | None] = {}
    if len(plan.seeds) > 1:
        importlib.import_module("scipy.special")  # for the intervals; where it is missing, no run starts
    for run in plan.first_runs:
        if run.row not in plan.rows:
            continue
        measured[run.group] = _read_measured(run, folder)
        for position in dict.fromkeys([0, len(plan.tuning) - 1]):  # a key may have an effect with some values only
            try:
                with _name_error(run.name):
                    tuned = run.tune(plan.tuning[position]) if plan.section.tune else run
                    assembly = _assemble(tuned.experiment, measured[run.group], bool(plan.section.tune))
            except FleetFitError as error:
                if run.row != plan.smallest or not plan.has_implied_smallest:
                    raise
                plan = plan.drop_smallest(str(error))
                break
            if (groups := assembly.experiment.fleet.groups) != tuned.experiment.fleet.groups:
                budgets = ", ".join(f"{{ budget = {group.budget:g} }}" for group in groups)
                raise ConfigError(
                    f"{run.name}: no levels fit the smallest of the default budgets. Set them for all rows: "
                    f"fleet.groups = [{budgets}].",
                    key="fleet.groups",
                )
            measured[run.group] |= assembly.experiment.recorded.latencies
            checked.append((tuned, assembly.unused))
            if run.experiment.evaluate.every == "auto":
                evaluations.setdefault((run.setting, run.experiment.rounds), _make_evaluations(plan, assembly))
                rounds = plan.section.tune_rounds
                if rounds is not None and (run.setting, rounds) not in evaluations:
                    with _name_error(run.name):
                        shorter = _assemble(tuned.merge({"rounds": rounds}).experiment, measured[run.group], True)
                    evaluations[run.setting, rounds] = _make_evaluations(plan, shorter)
            notes_of.setdefault(run.group, assembly.notes)
            data.setdefault(run.group, find_fingerprint(assembly))
            if position == 0 and on_assembly is not None:
                on_assembly(run, assembly)
    notes, hidden = _check_keys(plan, [(run, unused) for run, unused in checked if run.row in plan.rows])
    notes_of = {group: [note for note in group_notes if note not in hidden] for group, group_notes in notes_of.items()}
    return DryRun(plan, [*plan.notes, *notes], notes_of, measured, evaluations, data)


def _make_evaluations(plan: ComparisonPlan, assembly: Assembly) -> dict[str, Any]:
    """Return the tables of a run's evaluations. They are complete if rounds to a target accuracy are counted."""
    chosen = assembly.experiment.evaluate
    table: dict[str, Any] = {"every": chosen.every}
    if chosen.between is not None and not plan.targets:
        table["between"] = chosen.between.model_dump(exclude_none=True)
    return {"evaluate": table}


def _assemble(experiment: Experiment, measured: Mapping[str, list[float]], tunes: bool) -> Assembly:
    latencies = {**measured, **experiment.recorded.latencies}
    assembly = assemble(replace_key(experiment, "recorded.latencies", latencies))
    parts = assembly.simulation.parts if assembly.simulation is not None else ()
    if tunes and not any(len(part.get("validation", ())) for part in parts):
        raise ConfigError(NO_VALIDATION, key="compare.tune")
    return assembly


def _read_measured(run: PlannedRun, folder: Path | None) -> dict[str, list[float]]:
    """Return the measurements in the folders of a row and setting. A damaged folder is reported when it is run."""
    measured: dict[str, list[float]] = {}
    if folder is not None:
        group = run.subfolder.parent
        patterns = (f"{group}/*/config.toml", f"{TUNING_FOLDER}/{group}/*/*/config.toml")
        for config in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            with contextlib.suppress(FleetFitError):
                measured |= load(config.parent).experiment.recorded.latencies
    return measured


_DROPPED = "every row names another component."


def _check_keys(
    plan: ComparisonPlan, checked: Sequence[tuple[PlannedRun, Sequence[UnusedKey]]]
) -> tuple[list[str], set[str]]:
    """Refuse a key without effect in any run, unless it is the file's.

    Returns:
        Notes on such keys of the file, and the notes of runs on shared keys that another run uses.
    """
    reasons: dict[tuple[str, str, str], list[UnusedKey | str | None]] = {}  # of each key of a source, by run
    seeds = [("seed", "[compare.grid]")] if "seed" in plan.section.grid else []
    for run, unused in checked:
        for number, source in enumerate(run.sources):
            later = [(key, one.heading) for one in run.sources[number + 1 :] for key in flatten(one.tables)]
            for key in flatten(source.tables):
                reason: UnusedKey | str | None = next((one for one in unused if is_related_key(one.key, key)), None)
                if winner := next((one for other, one in (*later, *seeds) if is_related_key(key, other)), ""):
                    reason = f"{winner} replaces it."
                elif not any(f"{other}.".startswith(f"{key}.") for other in flatten(run.tables)):
                    reason = _DROPPED
                if key.partition(".")[0] not in ("name", "compare"):
                    reasons.setdefault((source.heading, source.key, key), []).append(reason)
    notes: dict[str, None] = {}
    for (heading, section, key), of_runs in reasons.items():
        unused_keys = [str(one) for one in of_runs if isinstance(one, UnusedKey)]
        if None in of_runs:
            continue
        if heading != "file":
            raise ConfigError(f"{heading} {key}: {of_runs[0]} Leave it out.", key=f"{section}{key}")
        if unused_keys or set(of_runs) == {_DROPPED}:
            notes[unused_keys[0] if unused_keys else f"{key} of the file has no effect: {_DROPPED}"] = None
    shared = {key: None in of_runs for (_, section, key), of_runs in reasons.items() if not section}

    def is_used_elsewhere(unused: str) -> bool:
        effects = [is_used for key, is_used in shared.items() if is_related_key(unused, key)]
        return bool(effects) and all(effects)

    return list(notes), {str(one) for _, unused in checked for one in unused if is_used_elsewhere(one.key)}


def list_plans(file: str | Path, overrides: Sequence[str] = ()) -> list[tuple[list[str], Assembly]]:
    """Return each distinct plan of a comparison: the titles of its rows, and an assembly of one of them.

    An implied row "smallest model" is left out, so that a plan that all rows of the file share can be saved.

    Raises:
        FleetFitError: The comparison is wrong.
    """
    plans: dict[str, tuple[list[str], Assembly]] = {}

    def add(run: PlannedRun, assembly: Assembly) -> None:
        titles, _ = plans.setdefault(assembly.plan.to_toml(), ([], assembly))
        titles.append(join(*run.group))

    with share_data():
        plan = plan_comparison(file, overrides)
        check_rows(plan.drop_smallest() if plan.has_implied_smallest else plan, on_assembly=add)
    return list(plans.values())


# ---- runs.json: the runs of a comparison, for other processes -------------------------------------------------------


def check_folder(plan: ComparisonPlan, folder: Path) -> None:
    """Check that a folder is new or empty, or has a comparison or one of its rows.

    Raises:
        RunError: It has other files, such as those of a run, or cannot be read.
    """
    try:
        names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise RunError(f"{folder} cannot be read: {files.format_os_error(error)}.", path=folder) from None
    if names and not names & {RUNS_FILE, RESULTS_FILE, *(run.subfolder.parts[0] for run in plan.runs)}:
        raise RunError(
            f"{folder} has {'a run' if 'config.toml' in names else 'other files'}. Choose a new or empty folder, or "
            "that of the comparison to continue.",
            path=folder,
        )


@contextlib.contextmanager
def hold_folder(plan: ComparisonPlan, folder: Path) -> Iterator[None]:
    """Write the list of runs in starting order, and lock the folder until the end of the block."""
    runs = [{"place": str(run.subfolder), "title": run.title} for run in (*plan.tuning_runs, *plan.runs)]
    files.make_folder(folder)
    files.write_text(folder / RUNS_FILE, json.dumps({"runs": runs}, indent=1) + "\n")
    with files.open_in_folder(folder / _LOCK, os.O_RDWR | os.O_CREAT) as file:
        files.share_lock(file)
        yield


def is_running(folder: Path) -> bool:
    """Return whether a process is writing to a run folder, or running the comparison in a folder."""
    return files.is_held(folder / _LOCK)
