"""Plan a comparison: list its runs, and check them all before the first run.

Every row is run in every setting with every seed. A setting is one of `[[compare.setting]]`, one combination of the
lists in `[compare.grid]`, or both combined. `[compare.tune]` adds runs that try the same small grid for every row and
setting on validation data, as in ReeFL, appendix A. They have their own seeds, because values chosen with the seed of a
run would be biased towards that run.

The tables of a run are merged in one order: the file, overrides, its row, its setting, its values of the grid, tuned
values. The later wins. Rows and settings so are what their labels say, whatever the overrides are.

The row "smallest model" is plain FedAvg at the smallest budget, with the file's own `[local]` and all other sections
that the rows share, except `[method]` and `fleet.split`. Where it is as good as the other rows, a fleet needs no
levels. By default it never refuses a comparison: if it does not fit, a note says why it is left out.

`plan_comparison` checks what needs no data. `check_rows` then assembles each row in each setting once, with the first
seed: a row that does not fit its data or its fleet is refused before another row has trained.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from fleetfit import files
from fleetfit.api.comparison.recipe import copy_recipe
from fleetfit.api.results import load
from fleetfit.api.run import is_related_key
from fleetfit.config import Assembly, Experiment
from fleetfit.config.assemble.data import share_data
from fleetfit.config.assemble.method import build_method_spec
from fleetfit.config.assemble.run import assemble
from fleetfit.config.assembly import UnusedKey
from fleetfit.config.components import check_keys, find_function
from fleetfit.config.load import complete_experiment, expand_sections, parse_overrides, read_run_file, resolve_paths
from fleetfit.config.merge import deep_merge, find_value, list_keys, merge_tables
from fleetfit.config.parse import parse_experiment
from fleetfit.config.schema import CompareSection, MethodSection
from fleetfit.config.toml import find_base_folder
from fleetfit.errors import ConfigError, FleetFitError, RunError, did_you_mean, truncate
from fleetfit.files import make_slug
from fleetfit.method import build
from fleetfit.report.columns import ATTACKED, BATCH, COLUMNS, ON_THE_WAY, PERSONAL, ROUNDS, expand_columns
from fleetfit.runs.planned import RUNS_FILE
from fleetfit.values.section import replace_key

RowSetting = tuple[str, str]
"""The labels of a row and a setting."""
TunedValues = tuple[tuple[str, Any], ...]
"""Dotted keys of a run file, and their values."""
PrintedNumbers = Mapping[tuple[str, str, str], float]
"""A paper's numbers by (row, setting, column): percent, or rounds."""

SMALLEST = "smallest model"
"""Label of the row of FedAvg at the smallest budget."""
_FEDAVG = {"method": {"name": "fedavg"}}
TUNING_FOLDER = "tune"
"""Folder of the tuning runs, in the comparison's folder."""
RESULTS_FILE = "results.json"
_LOCK = ".lock"
_LONGEST_LABEL = 200
_NOT_IN_RUN_FILES = ("label", "printed")
_RESERVED = (TUNING_FOLDER, "plots", RUNS_FILE, RESULTS_FILE, "table.md",
             "table.csv", "report.html", "config.toml", "plan.toml", "metrics.jsonl", "summary.json")  # fmt: skip
"""Files in the folder of a comparison or a run. No folder of a row has such a name."""
_SAME_IN_ALL_RUNS = {
    "seed": "all rows and settings share the seeds. Set seed at the top, or [compare.grid] seed = [0, 1, 2]",
    "name": "this is the name of the whole comparison. Rows and settings have a label",
    "compare": "a comparison cannot contain another one. Leave it out",
}
"""Keys that rows, settings and lists of values cannot have, with the reasons."""
NO_VALIDATION = (
    "[compare.tune] needs validation data, but no client has any. Hold some out, such as with data.validation = 0.1, "
    "or leave [compare.tune] out. FleetFit never tunes on test data."
)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison.

    Attributes:
        row: Label of its row.
        setting: Label of its setting; "" if the file has only one.
        seed: Its seed.
        table: Tables of its run file.
        subfolder: Its folder, relative to the comparison's.
        title: Its name in progress and tables, such as "fedavg, IID, seed 0".
        values: The values that a tuning run tries; None for a run of the table.
    """

    row: str
    setting: str
    seed: int
    table: Mapping[str, Any]
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
        return f'row "{self.row}"' + (f', setting "{self.setting}"' if self.setting else "")

    @functools.cached_property
    def experiment(self) -> Experiment:
        """Its run file, validated.

        Raises:
            ConfigError: The run file is wrong.
        """
        return complete_experiment(self.table)


@dataclass(frozen=True)
class ComparisonEntry:
    """A row or a setting.

    Attributes:
        label: Its label; "" for the only setting.
        change: The tables that it changes in a run file.
        heading: Its name in messages.
        key: Its key in the run file. Several settings share one, if a grid multiplies a setting of the file.
        values: The values of the grid in a setting.
    """

    label: str
    change: Mapping[str, Any]
    heading: str
    key: str
    values: TunedValues = ()

    @functools.cached_property
    def table(self) -> dict[str, Any]:
        """The tables that it changes, with the values of the grid."""
        return merge_tables(self.change, make_tables(self.values))


@dataclass(frozen=True)
class ComparisonPlan:
    """The runs of a comparison, and its table.

    Attributes:
        name: Name of the comparison.
        experiment: The file's experiment, with the overrides.
        base: The tables that all rows share: those of the file, with the overrides.
        overrides: The overrides.
        rows: The rows by label.
        settings: The settings by label; one empty label if the file has one setting.
        grid: The lists of `[compare.grid]`, by dotted key.
        columns: The columns of the table.
        seeds: The seeds of each row and setting.
        tuning: The combinations of values to try; a single empty one without `[compare.tune]`.
        tune_seeds: The seeds to try them with.
        printed: A paper's numbers, for the tables without overrides.
        smallest: Label of the last row if `compare.smallest` added it, or "".
        notes: Notes for the user.
    """

    name: str
    experiment: Experiment
    base: Mapping[str, Any]
    overrides: Mapping[str, Any]
    rows: Mapping[str, ComparisonEntry]
    settings: Mapping[str, ComparisonEntry]
    grid: Mapping[str, list[Any]]
    columns: Sequence[str]
    seeds: Sequence[int]
    tuning: Sequence[TunedValues]
    tune_seeds: Sequence[int]
    printed: PrintedNumbers
    smallest: str = ""
    notes: Sequence[str] = ()

    @property
    def section(self) -> CompareSection:
        """The section `[compare]`."""
        return self.experiment.compare

    @functools.cached_property
    def runs(self) -> list[PlannedRun]:
        """The runs of the table, row by row."""
        return list(self._make_runs())

    @functools.cached_property
    def tuning_runs(self) -> list[PlannedRun]:
        """The tuning runs, ordered by row, setting, values and seed."""
        return list(self._make_tuning_runs()) if self.tuning != [()] else []

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
        tables = [[str(run.subfolder), {k: v for k, v in run.table.items() if k != "callbacks"}] for run in runs]
        text = json.dumps(
            [*tables, self.tuning, self.tune_seeds if self.tuning != [()] else []],
            default=lambda thing: f"{thing}{token_hex(8)}",  # an object may differ each time
            sort_keys=True,
        )
        return sha256(text.encode()).hexdigest()[:6]

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
                f'[compare] smallest: a row of the file has the label "{SMALLEST}". Change it, or set smallest = '
                "false.",
                key="compare.smallest",
            )
        row = ComparisonEntry(SMALLEST, _FEDAVG, "[compare] smallest", "compare.smallest")
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
        return bool(self.smallest) and self.section.smallest is None

    def select_runs(self, key: str) -> list[PlannedRun]:
        """Return the runs with the first seed that have the row or the setting at a key."""
        return [run for run in self.first_runs if key in (self.rows[run.row].key, self.settings[run.setting].key)]

    def _make_table(self, row: ComparisonEntry, setting: ComparisonEntry) -> dict[str, Any]:
        base, change = self.base, setting.table
        if row.label == self.smallest:  # it stays plain FedAvg
            base, change = _drop_method(base), _drop_method(change)
        return merge_tables(merge_tables(base, row.change), change)

    def _make_runs(self) -> Iterator[PlannedRun]:
        first = next(iter(self.rows.values()))
        parse_first = functools.cache(lambda label: complete_experiment(self._make_table(first, self.settings[label])))
        for row, setting in itertools.product(self.rows.values(), self.settings.values()):
            table = self._make_table(row, setting)
            if self.section.same_recipe and row is not first:
                table = copy_recipe(parse_first(setting.label), table, list(list_keys(row.change)))
            folder = Path(make_slug(row.label, _RESERVED)) / make_slug(setting.label)
            for seed in self.seeds:
                title = join(row.label, setting.label, f"seed {seed}")
                own = {**table, "seed": seed, "name": row.label}
                yield PlannedRun(row.label, setting.label, seed, own, folder / f"seed-{seed}", title)

    def _make_tuning_runs(self) -> Iterator[PlannedRun]:
        for run, values, seed in itertools.product(self.first_runs, self.tuning, self.tune_seeds):
            table, label = make_tables(values), format_label(values)
            change = {**table, "seed": seed, "evaluate": {**table.get("evaluate", {}), "split": "validation"}}
            yield replace(
                run,
                seed=seed,
                table=merge_tables(run.table, change),
                subfolder=TUNING_FOLDER / run.subfolder.parent / make_slug(label) / f"seed-{seed}",
                title=join("tuning", run.row, run.setting, label, f"seed {seed}" if self.tune_seeds[1:] else ""),
                values=values,
            )


def plan_comparison(
    source: str | Path | Mapping[str, Any] | Experiment | None = None, overrides: Sequence[str] = (), **sections: Any
) -> ComparisonPlan:
    """Plan the comparison of a file, tables or sections; see `fleetfit.compare`.

    Raises:
        ConfigError: A row, a setting, a list of values or an override is wrong, two of them contradict each other, or
            the rows cannot be compared.
    """
    change, keywords = parse_overrides(overrides), resolve_paths(_expand_all(sections), Path.cwd())
    if source is None:
        return _make_plan(keywords, "comparison", change)
    change = deep_merge(change, keywords)
    if isinstance(source, str | Path):
        base = resolve_paths(expand_sections(read_run_file(source)), find_base_folder(source))
        return _make_plan(base, Path(source).stem, change)
    table = source.request.tables if isinstance(source, Experiment) else source
    return _make_plan(resolve_paths(_expand_all(table), Path.cwd()), "comparison", change)


def _expand_all(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with a section for each name and object, including rows and settings."""
    tables = expand_sections(table)
    for part in ("row", "setting"):
        if isinstance(tables.get("compare"), dict) and isinstance(tables["compare"].get(part), list | tuple):
            entries = tables["compare"][part]
            tables["compare"][part] = [expand_sections(one) if isinstance(one, Mapping) else one for one in entries]
    return tables


def _make_plan(file: Mapping[str, Any], stem: str, overrides: Mapping[str, Any]) -> ComparisonPlan:
    table = merge_tables(file, overrides)
    experiment = _read_base(table)
    section = experiment.compare
    base = {key: value for key, value in table.items() if key != "compare"}
    grid, tune = _read_lists(section.grid, "compare.grid"), _read_lists(section.tune, "compare.tune")
    seeds, rows, settings = grid.get("seed", [experiment.seed]), _make_rows(section, base), _make_settings(section)
    _check_allowed_keys([*rows.values(), *settings.values()], grid, tune)
    plan = ComparisonPlan(
        name=experiment.name or stem,
        experiment=experiment,
        base=base,
        overrides=overrides,
        rows=rows,
        settings=settings,
        grid=grid,
        columns=_list_columns(experiment),
        seeds=seeds,
        tuning=list(_combine(tune)),
        # a seed that is not a number is refused below
        tune_seeds=section.tune_seeds or [max((seed for seed in seeds if isinstance(seed, int)), default=0) + 1],
        printed=_read_printed(file, list(rows)) if any("printed" in row for row in section.row) else {},
    )
    if section.smallest or (section.smallest is None and _compares_methods(plan)):
        extended = plan.add_smallest()
        try:
            _check_plan(extended)
            return extended
        except ConfigError as error:
            if section.smallest:
                raise
            plan = extended.drop_smallest(str(error))
    _check_plan(plan)
    return plan


def _read_base(table: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a file without its rows, which may give what the file's method needs."""
    try:
        return complete_experiment(table)
    except ConfigError as error:
        if not (error.key or "").startswith("method."):
            raise
        return parse_experiment(table)


def _drop_method(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without the method and the split of its levels, which plain FedAvg refuses."""
    rest = {key: value for key, value in table.items() if key != "method"}
    fleet = rest.get("fleet")
    if isinstance(fleet, Mapping) and "split" in fleet:
        rest["fleet"] = {key: value for key, value in fleet.items() if key != "split"}
    return rest


def _compares_methods(plan: ComparisonPlan) -> bool:
    """Return whether rows of a file share data and model, and none is FedAvg at the smallest budget."""
    rows, fleet = [merge_tables(plan.base, row.change) for row in plan.rows.values()], plan.base.get("fleet")
    has_smallest = SMALLEST in plan.rows or any(
        row.get("method", {}).get("name") == "fedavg" and row.get("fleet") == fleet for row in rows
    )
    changed = {section for row in plan.rows.values() for section in row.change}
    return bool(plan.section.row) and not has_smallest and not changed & {"data", "model"}


# ---- rows, settings, columns ---------------------------------------------------------------------------------------


def join(*parts: str) -> str:
    """Join the non-empty parts of a title."""
    return ", ".join(filter(None, parts))


def _make_entry(kind: str, position: int, table: Mapping[str, Any], label: str) -> ComparisonEntry:
    """Return a row or a setting. Its label must be printable, because tables and messages show it."""
    heading, key = f"[compare] {kind} #{position + 1}", f"compare.{kind}.{position}"
    if not label.isprintable() or len(label) > _LONGEST_LABEL:
        raise ConfigError(
            f"{heading} label: must have at most {_LONGEST_LABEL} printable characters, got {truncate(repr(label))}.",
            key=f"{key}.label",
        )
    change = expand_sections({name: value for name, value in table.items() if name not in _NOT_IN_RUN_FILES})
    return ComparisonEntry(label, change, heading, key)


def _make_rows(section: CompareSection, base: Mapping[str, Any]) -> dict[str, ComparisonEntry]:
    """Return the rows by label. The default label is the method's name."""
    rows: dict[str, ComparisonEntry] = {}
    for position, table in enumerate(section.row or [{}]):
        row = _make_entry("row", position, table, str(table.get("label") or ""))
        if not row.label:
            method = merge_tables(base, row.change).get("method", {}).get("name", MethodSection().name)
            row = replace(row, label=truncate(method, _LONGEST_LABEL))
        if row.label in rows:
            raise ConfigError(
                f'{row.heading}: another row has the label "{row.label}". Set distinct labels.', key=f"{row.key}.label"
            )
        rows[row.label] = row
    return rows


def _make_settings(section: CompareSection) -> dict[str, ComparisonEntry]:
    """Return the settings by label; one empty label if the file has one setting."""
    of_file = [
        _make_entry("setting", position, table, str(table.get("label") or ""))
        for position, table in enumerate(section.setting)
    ]
    for entry, table in zip(of_file, section.setting, strict=True):
        if not entry.label:
            raise ConfigError(
                f'{entry.heading}: has no label. Set one, such as label = "IID".', key=f"{entry.key}.label"
            )
        if "printed" in table:
            raise ConfigError(
                f"{entry.heading} printed: only rows have printed numbers. Move it to a row.",
                key=f"{entry.key}.printed",
            )
    grid = _read_lists(section.grid, "compare.grid")
    grid.pop("seed", None)
    settings: dict[str, ComparisonEntry] = {}
    for entry, values in itertools.product(of_file or [ComparisonEntry("", {}, "", "")], _combine(grid)):
        label = join(entry.label, format_label(values))
        if label in settings:
            raise ConfigError(
                f'[compare] two settings have the label "{label}". Set distinct labels.', key="compare.setting"
            )
        settings[label] = replace(entry, label=label, values=values)
    return settings


def _list_columns(experiment: Experiment) -> list[str]:
    """Return the columns of the table (see `fleetfit.report.columns`)."""
    section = experiment.compare
    columns = section.columns
    if columns is None:
        columns = ["local", "global", *([ROUNDS] if section.targets else [])]
    for name in columns:
        if name not in COLUMNS:
            raise ConfigError(
                f'[compare] columns: unknown column "{name}". The columns are '
                f"{', '.join(COLUMNS)}.{did_you_mean(name, COLUMNS)}",
                key="compare.columns",
            )
    for key, counts_rounds in (("columns", ROUNDS in columns), ("tune_on", section.tune_on == ROUNDS)):
        if counts_rounds and not section.targets:
            raise ConfigError(
                f'[compare] {key}: "rounds" needs a target accuracy. Set one, such as target = 0.97.',
                key=f"compare.{key}",
            )
    batch = [name for name in columns if name.endswith(BATCH)]
    if batch and "batch" not in experiment.evaluate.norms[1:]:
        raise ConfigError(
            f'[compare] columns: "{batch[0]}" needs accuracy with both batch-norm policies. Set evaluate.norms = '
            '["static", "batch"].',
            key="compare.columns",
        )
    for key, names in (("columns", columns), ("target_on", [section.target_on])):
        if PERSONAL in names and experiment.evaluate.prior is None:
            raise ConfigError(
                f'[compare] {key}: "{PERSONAL}" needs personal predictions. Set evaluate.prior = "own".',
                key=f"compare.{key}",
            )
    if section.target_on not in COLUMNS or section.target_on.endswith((ROUNDS, "waste", *ATTACKED, BATCH)):
        raise ConfigError(
            f'[compare] target_on: "{section.target_on}" is not an accuracy.{did_you_mean(section.target_on, COLUMNS)}',
            key="compare.target_on",
        )
    return expand_columns(list(dict.fromkeys(columns)), section.targets)


def _read_printed(file: Mapping[str, Any], labels: Sequence[str]) -> PrintedNumbers:
    """Return a paper's numbers: in each row one per column and setting of the file, "-" for a missing number."""
    experiment = _read_base(file)
    section, columns = experiment.compare, _list_columns(experiment)
    cells = [(setting, column) for setting in _make_settings(section) for column in columns]
    printed: dict[tuple[str, str, str], float] = {}
    for position, (label, row) in enumerate(zip(labels, section.row, strict=False)):
        key, numbers = f"compare.row.{position}.printed", row.get("printed", [])
        if not isinstance(numbers, list) or (numbers and len(numbers) != len(cells)):
            expected = "; ".join(join(*cell) for cell in cells)
            got = len(numbers) if isinstance(numbers, list) else repr(numbers)
            raise ConfigError(
                f'row "{label}": printed must have {len(cells)} numbers, one for each column of the table '
                f'({expected}), with "-" for a missing one; got {got}.',
                key=key,
            )
        for cell, number in zip(cells, numbers, strict=False):
            if isinstance(number, int | float) and not isinstance(number, bool):
                printed[(label, *cell)] = float(number)
            elif number != "-":
                raise ConfigError(
                    f'row "{label}": printed must have numbers, or "-" for a missing one; got {number!r}.', key=key
                )
    return printed


# ---- lists of values -----------------------------------------------------------------------------------------------


def _read_lists(table: Mapping[str, Any], section: str, path: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Return the lists of a grid by dotted key."""
    lists: dict[str, list[Any]] = {}
    for key, value in table.items():
        inner = (*path, *key.split("."))
        if isinstance(value, Mapping):
            lists |= _read_lists(value, section, inner)
        elif isinstance(value, list) and value:
            lists[".".join(inner)] = value
        else:
            dotted = ".".join(inner)
            raise ConfigError(
                f"[{section}] {truncate(dotted)}: must be a list of values to try, got {truncate(repr(value))}.",
                key=f"{section}.{dotted}",
            )
    return lists


def _combine(lists: Mapping[str, list[Any]]) -> Iterator[TunedValues]:
    for values in itertools.product(*lists.values()):
        yield tuple(zip(lists, values, strict=True))


def make_tables(values: TunedValues) -> dict[str, Any]:
    """Return the tables of dotted keys."""
    table: dict[str, Any] = {}
    for key, value in values:
        change: Any = value
        for part in reversed(key.split(".")):
            change = {part: change}
        table = merge_tables(table, change)
    return table


def format_label(values: TunedValues) -> str:
    """Return the label of a combination of values, such as "cifar10, alpha = 1"."""
    parts = []
    for key, value in values:
        *_, last = key.split(".")
        parts.append(str(value) if last in ("name", "kind") else f"{last} = {value}")
    return ", ".join(parts)


# ---- checks that need no data --------------------------------------------------------------------------------------


def _check_plan(plan: ComparisonPlan) -> None:
    _check_effect(plan)
    _check_folders_differ(plan)
    for run in plan.runs:
        _check_run(run, plan)
    _check_heads(plan)
    _check_splits(plan)


def _check_allowed_keys(entries: Sequence[ComparisonEntry], grid: Mapping[str, Any], tune: Mapping[str, Any]) -> None:
    """Refuse keys that all runs share, keys of rows in a list of values, and keys that are set in two places."""
    sources = [
        *((entry.heading, entry.key, list(entry.change)) for entry in entries),
        ("[compare.grid]", "compare.grid", [key.partition(".")[0] for key in grid if key != "seed"]),
        ("[compare.tune]", "compare.tune", [key.partition(".")[0] for key in tune]),
    ]
    for heading, section, keys in sources:
        for key in keys:
            if key in _SAME_IN_ALL_RUNS:
                raise ConfigError(f"{heading} {key}: {_SAME_IN_ALL_RUNS[key]}.", key=f"{section}.{key}")
            if key in _NOT_IN_RUN_FILES:
                raise ConfigError(
                    f"{heading} {key}: is a key of rows, not of runs. Move it to a row.", key=f"{section}.{key}"
                )
    changes = [(one.heading, one.key, list(list_keys(one.change)), {*grid, *tune}) for one in entries]
    for heading, section, keys, lists in [*changes, ("[compare.tune]", "compare.tune", list(tune), {*grid})]:
        for key, other in itertools.product(keys, lists):
            if is_related_key(key, other):
                where = "[compare.grid]" if other in grid else "[compare.tune]"
                raise ConfigError(
                    f"{heading} {key}: {where} has a list of values for {other}. Leave it out of one of them.",
                    key=f"{section}.{key}",
                )


def _list_sources(plan: ComparisonPlan) -> list[tuple[str, str, list[tuple[str, Any]], Sequence[PlannedRun]]]:
    """Return what changes runs: its name in messages, its key, its dotted keys with values, and its runs."""

    def list_values(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [(key, find_value(table, key)[0]) for key in list_keys(table)]

    overrides = {key: value for key, value in plan.overrides.items() if key not in ("name", "compare")}
    entries = {one.key: one for one in (*plan.rows.values(), *plan.settings.values())}
    grid = [(key, value) for key, values in plan.grid.items() if key != "seed" for value in values]
    tuned = [pair for values in plan.tuning for pair in values]
    return [
        ("--set", "", list_values(overrides), plan.first_runs),
        *((one.heading, f"{one.key}.", list_values(one.change), plan.select_runs(one.key)) for one in entries.values()),
        ("[compare.grid]", "compare.grid.", grid, plan.first_runs),
        ("[compare.tune]", "compare.tune.", tuned, plan.first_runs),
    ]


def _check_effect(plan: ComparisonPlan) -> None:
    """Refuse a key that something later in the order replaces in every run."""
    for heading, section, values, runs in _list_sources(plan)[:-2]:  # without lists of values
        merged = [merge_tables(run.table, make_tables(tuned)) for run in runs for tuned in plan.tuning]
        for key, value in values:
            if not any(find_value(table, key) == (value,) for table in merged):
                raise ConfigError(
                    f"{heading} {key}: another row, setting or list of values replaces it in every run. Leave it out "
                    "of one of them.",
                    key=f"{section}{key}",
                )


def _check_folders_differ(plan: ComparisonPlan) -> None:
    if len({run.subfolder for run in plan.runs}) < len(plan.runs):
        raise ConfigError(
            "[compare] two runs would have the same folder. Set distinct labels in rows, and distinct values in the "
            "lists of the grid.",
            key="compare",
        )
    if len({make_slug(format_label(values)) for values in plan.tuning}) < len(plan.tuning):
        raise ConfigError(
            "[compare.tune] two combinations would have the same folder. Set distinct values in the lists.",
            key="compare.tune",
        )
    if len(set(plan.tune_seeds)) < len(plan.tune_seeds):
        raise ConfigError("[compare] tune_seeds: two seeds are equal. Leave one out.", key="compare.tune_seeds")


def _check_run(run: PlannedRun, plan: ComparisonPlan) -> None:
    try:
        build(build_method_spec(run.experiment))
        check_keys(run.experiment)
    except FleetFitError as error:
        raise ConfigError(f"{run.name}: {error}", key=error.key, path=error.path) from None
    target_on = plan.section.target_on
    if plan.targets and target_on not in ON_THE_WAY and not run.experiment.evaluate.whole:
        raise ConfigError(
            f'[compare] target_on: "{target_on}" is only measured after the last round. Set evaluate.whole = true to '
            f"measure it at every evaluation, or choose one of {', '.join(ON_THE_WAY)}.",
            key="compare.target_on",
        )


def _check_heads(plan: ComparisonPlan) -> None:
    """Refuse rows with different kinds of classifiers, unless `compare.differs` mentions heads."""
    kinds: dict[str, str] = {}  # only rows whose model has a parameter `head`
    for run in plan.first_runs:
        section = run.experiment.model
        if run.setting == plan.first_runs[0].setting and isinstance(section.name, str):
            parameter = inspect.signature(find_function("models", section.name)[0]).parameters.get("head")
            if parameter is not None:
                kinds[run.row] = str(section.settings.get("head", parameter.default))
    is_declared = re.search(r"\bheads?\b|\bclassifiers?\b", plan.section.differs, re.IGNORECASE)
    is_tuned = any("model.head" in dict(values) for values in plan.tuning)
    if not is_declared and (is_tuned or len(set(kinds.values())) > 1):
        row_list = ", ".join(f'"{row}" {kind}' for row, kind in kinds.items())
        raise ConfigError(
            f"[compare] rows have different kinds of classifiers, which hides the effect of their methods: {row_list}. "
            "Set the same model.head in all rows, or mention the heads in compare.differs.",
            key="model.head",
        )


def _check_splits(plan: ComparisonPlan) -> None:
    """Refuse rows and settings that are evaluated on different data."""
    if any(find_value(make_tables(values), "evaluate.split") for values in plan.tuning):
        raise ConfigError(
            "[compare.tune] evaluate.split: tuning uses validation data, and the table uses one split. Set "
            "evaluate.split once for the whole file.",
            key="compare.tune.evaluate.split",
        )
    first, *others = plan.first_runs
    split = first.experiment.evaluate.split
    for other in others:
        if other.experiment.evaluate.split != split:
            raise ConfigError(
                f'[compare] {first.name} has evaluate.split = "{split}", but {other.name} has '
                f'"{other.experiment.evaluate.split}". Numbers on different data do not rank methods: set the same '
                "evaluate.split everywhere.",
                key="evaluate.split",
            )


# ---- the check of assembled rows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DryRun:
    """The result of the check of all rows.

    Attributes:
        plan: The comparison, without the row "smallest model" if it is implied and does not fit the data or the fleet.
        notes: Notes of the plan, and on keys that all rows share and that have no effect in any run.
        notes_of: The notes of each row and setting, without those on unused shared keys that another run uses.
        measured: Measurements for each row and setting, by the check or by earlier runs in the folder.
        evaluations: Tables with the evaluations that the first row chose for `evaluate.every = "auto"`, by setting and
            number of rounds: curves of all rows have the same rounds, clients and samples.
    """

    plan: ComparisonPlan
    notes: Sequence[str]
    notes_of: Mapping[RowSetting, Sequence[str]]
    measured: Mapping[RowSetting, Mapping[str, list[float]]]
    evaluations: Mapping[tuple[str, int], Mapping[str, Any]]

    def add_facts(self, run: PlannedRun) -> PlannedRun:
        """Return the run with the evaluations that its setting shares, and with measurements."""
        change: dict[str, Any] = {}
        if run.experiment.evaluate.every == "auto":
            change |= self.evaluations.get((run.setting, run.experiment.rounds), {})
        if measured := self.measured[run.group]:
            change["recorded"] = {"latencies": {**measured, **run.experiment.recorded.latencies}}
        return replace(run, table=merge_tables(run.table, change)) if change else run


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
    unused: dict[RowSetting, list[tuple[UnusedKey, ...]]] = {}
    evaluations: dict[tuple[str, int], dict[str, Any]] = {}
    notes_of: dict[RowSetting, Sequence[str]] = {}
    if len(plan.seeds) > 1:
        importlib.import_module("scipy.special")  # for the intervals; where it is missing, no run starts
    for run in plan.first_runs:
        measured[run.group], unused[run.group] = _read_measured(run, folder), []
        for position in dict.fromkeys([0, len(plan.tuning) - 1]):  # a key may have an effect with some values only
            try:
                assembly = _assemble(plan, run, plan.tuning[position], measured[run.group])
            except FleetFitError as error:
                if run.row == plan.smallest and plan.has_implied_smallest:
                    return check_rows(plan.drop_smallest(str(error)), folder, on_assembly)
                raise
            measured[run.group] |= assembly.experiment.recorded.latencies
            unused[run.group].append(assembly.unused)
            if run.experiment.evaluate.every == "auto":
                evaluations.setdefault((run.setting, run.experiment.rounds), _make_evaluations(plan, assembly))
            notes_of.setdefault(run.group, assembly.notes)
            if position == 0 and on_assembly is not None:
                on_assembly(run, assembly)
    notes, used = _check_keys(plan, unused)

    def is_used_elsewhere(run: PlannedRun, unused: str) -> bool:
        keys = [key for key in list_keys(plan.base) if is_related_key(unused, key)]
        is_shared = all(find_value(run.table, key) == find_value(plan.base, key) for key in keys)
        return bool(keys) and is_shared and used.issuperset(keys)

    for run in plan.first_runs:
        others = {str(one) for keys in unused[run.group] for one in keys if is_used_elsewhere(run, one.key)}
        notes_of[run.group] = [note for note in notes_of[run.group] if note not in others]
    return DryRun(plan, [*plan.notes, *notes], notes_of, measured, evaluations)


def _make_evaluations(plan: ComparisonPlan, assembly: Assembly) -> dict[str, Any]:
    """Return the tables of a run's evaluations. They are complete if rounds to a target accuracy are counted."""
    chosen = assembly.experiment.evaluate
    table: dict[str, Any] = {"every": chosen.every}
    if chosen.between is not None and not plan.targets:
        table["between"] = chosen.between.model_dump(exclude_none=True)
    return {"evaluate": table}


def _assemble(
    plan: ComparisonPlan, run: PlannedRun, values: TunedValues, measured: Mapping[str, list[float]]
) -> Assembly:
    try:
        tuned = complete_experiment(merge_tables(run.table, make_tables(values))) if values else None
        experiment = tuned or run.experiment
        latencies = {**measured, **experiment.recorded.latencies}
        assembly = assemble(replace_key(experiment, "recorded.latencies", latencies))
        parts = assembly.simulation.parts if assembly.simulation is not None else ()
        if plan.tuning != [()] and not any(len(part.get("validation", ())) for part in parts):
            raise ConfigError(NO_VALIDATION, key="compare.tune")
    except FleetFitError as error:
        error.args = (f"{run.name}: {error}",)
        raise
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


def _check_keys(
    plan: ComparisonPlan, unused: Mapping[RowSetting, Sequence[Sequence[UnusedKey]]]
) -> tuple[list[str], set[str]]:
    """Refuse keys without effect in any run; return notes on shared ones, and the shared keys that some run uses."""
    first = plan.first_runs

    def find_unused(key: str, runs: Sequence[PlannedRun]) -> UnusedKey | None:
        reason = None
        for keys in (keys for run in runs for keys in unused[run.group]):
            reason = next((one for one in keys if is_related_key(one.key, key)), None)
            if reason is None:
                return None
        return reason

    for heading, section, values, runs in _list_sources(plan):
        for key, value in values:
            those = [run for run in runs if find_value(run.table, key) == (value,)] if heading == "--set" else runs
            if (reason := find_unused(key, those)) is not None:
                raise ConfigError(f"{heading} {key}: {reason} Leave it out.", key=f"{section}{key}")
    reasons = {
        key: find_unused(key, [run for run in first if find_value(run.table, key) == find_value(plan.base, key)])
        for key in list_keys(plan.base)
    }
    dropped = [
        f"{key} of the file has no effect: every row names another component."
        for key in list_keys(plan.base)
        if not any(find_value(run.table, key) for run in first)
    ]
    notes = [*dropped, *dict.fromkeys(str(reason) for reason in reasons.values() if reason is not None)]
    used_keys = {key for key, reason in reasons.items() if reason is None}
    return notes, used_keys - {key for key, _ in plan.tuning[0]}


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
