"""Plan a comparison: the runs of a file, and every check before the first of them starts.

Every row is run in every setting with every seed. A setting is one of `[[compare.setting]]`, one combination of the
lists in `[compare.grid]`, or both combined. `[compare.tune]` adds runs that try the same small grid for every row and
setting on validation data. They have seeds of their own: values chosen with the seed of a run fit that run best (ReeFL,
appendix A, tunes likewise).

`plan_runs` checks what needs no data. `check_rows` then assembles each row in each setting once, with the first seed.
"""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from fleetfit import files
from fleetfit.api.results import load
from fleetfit.api.run import is_related_key
from fleetfit.config import Assembly, Experiment, assemble
from fleetfit.config.assembly import UnusedKey
from fleetfit.config.build.data import share_data
from fleetfit.config.build.method import build_method_spec
from fleetfit.config.components import check_keys, find_function
from fleetfit.config.dump import dump_section, fill_in_defaults
from fleetfit.config.load import expand_sections, parse_overrides, resolve_paths
from fleetfit.config.merge import deep_merge, find_value, list_choosers, list_keys, merge_tables
from fleetfit.config.parse import parse_experiment
from fleetfit.config.records import record_latencies
from fleetfit.config.toml import find_base_folder, read_toml
from fleetfit.errors import ConfigError, FleetFitError, RunError, did_you_mean, truncate
from fleetfit.files import make_slug
from fleetfit.method import build, list_hyperparameters
from fleetfit.records.schema import PlannedRunsRecord
from fleetfit.report.columns import ATTACKED, BATCH, COLUMNS, ON_THE_WAY, ROUNDS, expanded

RowSetting = tuple[str, str]
"""The labels of a row and a setting."""
TunedValues = tuple[tuple[str, Any], ...]
"""Dotted keys of a run file, and their values."""
PrintedNumbers = Mapping[tuple[str, str, str], float]
"""A paper's numbers by (row, setting, column): percent, or rounds."""

TUNING_FOLDER = "tune"
"""Folder of the runs that try values, below the comparison's."""
RUNS_FILE = "runs.json"
"""Lists all runs of a comparison, for other processes."""
_LOCK = ".lock"
_NOT_IN_RUN_FILES = ("label", "printed")
_TAKEN = (TUNING_FOLDER, "plots", RUNS_FILE, "results.json", "compare.json", "differences.json", "table.md",
          "table.csv", "report.html", "config.toml", "plan.toml", "metrics.jsonl", "summary.json")  # fmt: skip
"""Files of a comparison's or a run's folder: no row's folder has such a name."""
_SAME_IN_ALL_RUNS = {
    "seed": "all rows and settings have the same seeds: set seed, or [compare.grid] seed = [0, 1, 2]",
    "name": "it is the name of the whole comparison; a row and a setting have a label",
    "compare": "a comparison contains no other one",
}
"""Keys that no row, setting or list of values can have, and the reasons."""
NO_VALIDATION = (
    "[compare.tune] chooses on validation data, and no client has any. Hold some out, such as with "
    "data.validation = 0.1, or leave [compare.tune] out. Test data are never used to choose."
)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison.

    Attributes:
        row: Label of its row.
        setting: Label of its setting; "" where the file has one only.
        seed: Its seed.
        table: Tables of its run file.
        place: Its folder, relative to the comparison's.
        title: Its name in progress and tables, such as "fedavg, IID, seed 0".
        written: The tables without overrides.
        tried: The values that it tries; None for a run of the table.
    """

    row: str
    setting: str
    seed: int
    table: Mapping[str, Any]
    place: Path
    title: str
    written: Mapping[str, Any]
    tried: TunedValues | None = None

    @property
    def group(self) -> RowSetting:
        """Its row and setting."""
        return self.row, self.setting

    @property
    def name(self) -> str:
        """Row and setting, for messages."""
        return f'row "{self.row}"' + (f', setting "{self.setting}"' if self.setting else "")


class ComparisonPlan:
    """The runs of a comparison. Making one performs every check that needs no data.

    Args:
        base: The tables of the file.
        stem: Name of the file, for a comparison without a name.
        change: Overrides, which win over rows and settings. A paper's numbers belong to the tables without them.

    Attributes:
        name: Name of the comparison.
        section: The section `[compare]`.
        base: The tables that all rows share.
        overrides: The given overrides.
        change: Those of them that change runs.
        changes: What each row and setting sets, by ("row" or "setting", position from 0).
        rows: The tables of each row, by label.
        settings: What each setting changes, by label.
        columns: The columns of the table.
        seeds: The seeds of each row and setting.
        tuning: The combinations of values to try; one empty one without `[compare.tune]`.
        tune_seeds: The seeds to try them with.
        printed: A paper's numbers.
        runs: The runs of the table, row by row.
        tuning_runs: The runs that try values: row by row, setting by setting, values by values, seed by seed.
    """

    def __init__(self, base: Mapping[str, Any], stem: str, change: Mapping[str, Any] | None = None) -> None:
        self.base = {key: value for key, value in base.items() if key != "compare"}
        self.overrides = dict(change or {})
        self.change = {key: value for key, value in self.overrides.items() if key not in ("name", "seed", "compare")}
        experiment = parse_experiment(merge_tables(base, self.overrides))
        self.section = section = experiment.compare
        self.name = experiment.name or stem
        self.changes = {
            **{("row", i): _get_change(row) for i, row in enumerate(section.row)},
            **{("setting", i): _get_change(setting) for i, setting in enumerate(section.setting)},
        }
        self.grid, tune = _list_values(section.grid, "compare.grid"), _list_values(section.tune, "compare.tune")
        self._check_sources(tune)
        self.rows = _make_rows(section.row, self.base, self.change)
        self.settings = _make_settings(experiment)
        self._check_rows_differ()
        self.columns = _list_columns(experiment)
        self.seeds = self.grid.get("seed", [experiment.seed])
        self.tuning = list(_combine(tune))
        whole = [seed for seed in self.seeds if isinstance(seed, int)]  # its run refuses any other, below
        self.tune_seeds = section.tune_seeds or [max(whole, default=0) + 1]
        self.printed = _read_printed(base)
        self.runs = list(self._list_runs())
        self._check_names_stay()
        self._check_folders_differ()
        for run in self.runs:
            self._check_run(run)
        self._check_heads()
        self._check_splits()
        self.tuning_runs = list(self._list_tuning_runs())

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
        """A short hash of everything that changes the runs; `callbacks` do not."""
        tables = [[str(run.place), {k: v for k, v in run.table.items() if k != "callbacks"}] for run in self.runs]
        text = json.dumps(
            [*tables, self.tuning, self.tune_seeds if self.tuning != [()] else []],
            default=lambda thing: f"{thing}{token_hex(8)}",  # an object may be another one each time
            sort_keys=True,
        )
        return sha256(text.encode()).hexdigest()[:6]

    def find_reference(self, against: str | None = None) -> str:
        """Return the label of the row that the others are measured against.

        Args:
            against: The label, given beside the file; `compare.against` by default, and without it the first row.

        Raises:
            ConfigError: There is no such row.
        """
        label = self.section.against if against is None else against
        if label is None:
            return next(iter(self.rows))
        if label not in self.rows:
            where, key = ("[compare] against", "compare.against") if against is None else ("--against", "against")
            raise ConfigError(
                f'{where}: there is no row "{truncate(label)}"; the rows are {", ".join(self.rows)}.'
                f"{did_you_mean(label, self.rows)}",
                key=key,
            )
        return label

    def list_dropped_keys(self) -> list[str]:
        """Return a note on each shared key that no run has, since every row names another component."""
        return [
            f"{key} of the file is in no run: every row names something else in its place."
            for key in list_keys(self.base)
            if not any(find_value(run.table, key) for run in self.first_runs)
        ]

    def select_runs(self, kind: str, position: int) -> list[PlannedRun]:
        """Return the runs with the first seed that have a row or a setting of the file, which a grid may multiply."""
        if kind == "row":
            return [run for run in self.first_runs if run.row == list(self.rows)[position]]
        each = len(self.settings) // len(self.section.setting)
        labels = list(self.settings)[position * each : (position + 1) * each]
        return [run for run in self.first_runs if run.setting in labels]

    # -- the runs

    def _list_runs(self) -> Iterator[PlannedRun]:
        for row, setting, seed in itertools.product(self.rows, self.settings, self.seeds):
            written = merge_tables(self.rows[row], self.settings[setting])
            table = merge_tables(written, self.change) | {"seed": seed, "name": row}
            place = Path(make_slug(row, _TAKEN)) / make_slug(setting) / f"seed-{seed}"
            yield PlannedRun(row, setting, seed, table, place, _join(row, setting, f"seed {seed}"), written)

    def _list_tuning_runs(self) -> Iterator[PlannedRun]:
        for run in self.first_runs if self.tuning != [()] else ():
            for values, seed in itertools.product(self.tuning, self.tune_seeds):
                keys = make_tables(values)
                change = {**keys, "seed": seed, "evaluate": {**keys.get("evaluate", {}), "split": "validation"}}
                yield replace(
                    run,
                    seed=seed,
                    table=merge_tables(run.table, change),
                    place=TUNING_FOLDER / run.place.parent / make_slug(format_label(values)) / f"seed-{seed}",
                    title=_join(
                        "tuning",
                        run.row,
                        run.setting,
                        format_label(values),
                        f"seed {seed}" if self.tune_seeds[1:] else "",
                    ),
                    tried=values,
                )

    # -- the checks

    def _check_sources(self, tune: Mapping[str, list[Any]]) -> None:
        """Refuse a key that two parts of the file set, or a part of it and an override."""
        for (kind, position), table in self.changes.items():
            _check_allowed(table, *_locate(kind, position))
        _check_allowed([key.partition(".")[0] for key in self.grid if key != "seed"], "[compare.grid]", "compare.grid")
        _check_allowed([key.partition(".")[0] for key in tune], "[compare.tune]", "compare.tune")
        for key in self.grid:
            if any(_overlap(key, other) for other in tune):
                raise ConfigError(
                    f"[compare.tune] {key}: [compare.grid] has it too; a value is either given or tuned.",
                    key=f"compare.tune.{key}",
                )
        lists = {**dict.fromkeys(self.grid, "compare.grid"), **dict.fromkeys(tune, "compare.tune")}
        for key in list_keys({key: value for key, value in self.overrides.items() if key != "compare"}):
            for other, part in lists.items():
                if _overlap(key, other):
                    raise ConfigError(
                        f"--set {key}: [{part}] has a list of values for it, which head columns of the table. Set the "
                        f"list: --set '{part}.{other}=[...]'.",
                        key=key,
                    )
        for (kind, position), table in self.changes.items():
            where, place = _locate(kind, position)
            for key in list_keys(table):
                for other, part in lists.items():
                    if _overlap(key, other):
                        raise ConfigError(
                            f"{where} {key}: [{part}] has a list of values for it, which would win in every run. "
                            "Leave it out of one of them.",
                            key=f"{place}.{key}",
                        )

    def _check_rows_differ(self) -> None:
        """Refuse overrides that make equal two rows, or two settings, that differ in the file."""
        for kind, before, after in (
            ("rows", _make_rows(self.section.row, self.base, {}, numbered=True), self.rows),
            ("settings", self.settings, {k: merge_tables(v, self.change) for k, v in self.settings.items()}),
        ):
            written = list(before.values())
            for (i, (one, a)), (j, (other, b)) in itertools.combinations(enumerate(after.items()), 2):
                if (
                    self.change
                    and written[i] != written[j]
                    and merge_tables(a, self.change) == merge_tables(b, self.change)
                ):
                    raise ConfigError(
                        f'--set {" ".join(list_keys(self.change))}: the {kind} "{one}" and "{other}" differ in nothing '
                        "else, and would be the same run. Leave it out, or compare other rows.",
                        key=next(list_keys(self.change)),
                    )

    def _check_names_stay(self) -> None:
        """Refuse overrides that name another component for a row or a setting, and so drop its keys."""
        for run in self.runs:
            kept = set(list_keys(run.table))
            for (kind, position), table in self.changes.items():
                for key in list_keys(table):
                    if find_value(run.written, key) == find_value(table, key) and key not in kept:
                        raise ConfigError(
                            f"--set {' '.join(list_keys(self.change))}: {_locate(kind, position)[0]} sets {key}, which "
                            "the override drops. Leave it out, or change the rows.",
                            key=next(list_keys(self.change)),
                        )
        for key in list_choosers(self.change):
            if len({str(find_value(run.written, key)) for run in self.runs}) > 1:
                raise ConfigError(
                    f"--set {key}: the rows or settings differ in it, and their labels would be wrong. Leave it out, "
                    "or change the rows.",
                    key=key,
                )

    def _check_folders_differ(self) -> None:
        if len({run.place for run in self.runs}) < len(self.runs):
            raise ConfigError(
                "[compare] two runs would have the same folder: give rows different labels, and the lists of the grid "
                "different values.",
                key="compare",
            )
        if len({make_slug(format_label(values)) for values in self.tuning}) < len(self.tuning):
            raise ConfigError(
                "[compare.tune] two combinations would have the same folder: give the lists other values.",
                key="compare.tune",
            )
        if len(set(self.tune_seeds)) < len(self.tune_seeds):
            raise ConfigError("[compare] tune_seeds: a seed is given twice.", key="compare.tune_seeds")

    def _check_run(self, run: PlannedRun) -> None:
        try:
            experiment = parse_experiment(run.table)
            build(build_method_spec(experiment))
            check_keys(experiment)
        except FleetFitError as error:
            raise ConfigError(f"{run.name}: {error}", key=error.key, path=error.path) from None
        on = self.section.target_on
        if self.targets and on not in ON_THE_WAY and not experiment.evaluate.whole:
            raise ConfigError(
                f'[compare] target_on: "{on}" is measured after the last round only. Set evaluate.whole = true to '
                f"measure it at every evaluation, or choose one of {', '.join(ON_THE_WAY)}.",
                key="compare.target_on",
            )

    def _check_heads(self) -> None:
        """Refuse rows with classifiers of different kinds, unless `compare.differs` mentions heads."""
        kinds = {row: kind for row, table in self.rows.items() if (kind := _find_head(table)) is not None}
        declared = re.search(r"\bheads?\b|\bclassifiers?\b", self.section.differs, re.IGNORECASE)
        tuned = any("model.head" in dict(values) for values in self.tuning)
        if not declared and (tuned or len(set(kinds.values())) > 1):
            listed = ", ".join(f'"{row}" {kind}' for row, kind in kinds.items())
            raise ConfigError(
                "[compare] rows have classifiers of different kinds, which hides the effect of their methods: "
                f"{listed}. Give all of them one model.head, or mention the heads in compare.differs.",
                key="model.head",
            )

    def _check_splits(self) -> None:
        """Refuse rows and settings that are measured on different data."""
        if any(find_value(make_tables(values), "evaluate.split") for values in self.tuning):
            raise ConfigError(
                "[compare.tune] evaluate.split: values are tried on validation data, and the table is of one split. "
                "Set evaluate.split once, for the whole file.",
                key="compare.tune.evaluate.split",
            )
        splits = {run.name: parse_experiment(run.table).evaluate.split for run in self.first_runs}
        (one, first), *others = splits.items()
        for other, second in others:
            if second != first:
                raise ConfigError(
                    f'[compare] {one} has evaluate.split = "{first}" and {other} has "{second}": numbers on different '
                    "data do not rank methods. Give all rows and settings one evaluate.split.",
                    key="evaluate.split",
                )


def plan_runs(
    source: str | Path | Mapping[str, Any] | Experiment | None = None, overrides: Sequence[str] = (), **sections: Any
) -> ComparisonPlan:
    """Plan the comparison of a file, tables or sections; see `fleetfit.compare`.

    Raises:
        ConfigError: Something does not fit; see `ComparisonPlan`.
    """
    here, change = Path.cwd(), parse_overrides(overrides)
    given = resolve_paths(_read_sections(sections), here)
    if source is None:
        return ComparisonPlan(given, "comparison", change)
    change = deep_merge(change, given)
    if isinstance(source, str | Path):
        base = resolve_paths(expand_sections(read_toml(source)), find_base_folder(source))
        return ComparisonPlan(base, Path(source).stem, change)
    table = dump_section(source, only_set=True) if isinstance(source, Experiment) else source
    return ComparisonPlan(resolve_paths(_read_sections(table), here), "comparison", change)


def _read_sections(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with a section for each name and object, in rows and settings as well."""
    tables = expand_sections(table)
    for part in ("row", "setting"):
        if isinstance(tables.get("compare"), dict) and isinstance(tables["compare"].get(part), list | tuple):
            entries = tables["compare"][part]
            tables["compare"][part] = [expand_sections(one) if isinstance(one, Mapping) else one for one in entries]
    return tables


# ---- the check of assembled rows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DryRun:
    """The result of the check of all rows.

    Attributes:
        notes: Notes on keys that all rows share and no run uses.
        suppressed: For each row and setting its notes on unused keys that all rows share and another run uses.
        measured: Measurements for each row and setting, by the check or by earlier runs in the folder.
    """

    notes: Sequence[str]
    suppressed: Mapping[RowSetting, Sequence[str]]
    measured: Mapping[RowSetting, Mapping[str, list[float]]]


def check_rows(
    plan: ComparisonPlan,
    folder: Path | None = None,
    on_assembly: Callable[[PlannedRun, Assembly], None] | None = None,
) -> DryRun:
    """Assemble each row in each setting once, and refuse keys of the comparison that no run uses.

    Args:
        plan: The comparison.
        folder: The comparison's folder, with measurements of earlier runs.
        on_assembly: Called with each row and setting and its assembly.

    Raises:
        ConfigError: No run uses a key of a row, a setting, a list of values or an override; or there are values to
            tune, and no validation data.
        FleetFitError: A run cannot be assembled.
    """
    measured: dict[RowSetting, dict[str, list[float]]] = {}
    unused: dict[RowSetting, list[tuple[UnusedKey, ...]]] = {}
    for run in plan.first_runs:
        measured[run.group], unused[run.group] = _read_measured(run, folder), []
        for position in dict.fromkeys([0, len(plan.tuning) - 1]):  # a key may have no effect with some values only
            assembly = _assemble(plan, run, plan.tuning[position], measured[run.group])
            measured[run.group] |= assembly.experiment.fleet.measured
            unused[run.group].append(assembly.unused)
            if position == 0 and on_assembly is not None:
                on_assembly(run, assembly)
    notes, used = _check_keys(plan, unused)
    shared = merge_tables(plan.base, plan.change)

    def is_used_elsewhere(run: PlannedRun, unused: str) -> bool:
        keys = [key for key in list_keys(shared) if is_related_key(unused, key)]
        same = all(find_value(run.table, key) == find_value(shared, key) for key in keys)
        return bool(keys) and same and used.issuperset(keys)

    suppressed = {
        run.group: [str(one) for some in unused[run.group] for one in some if is_used_elsewhere(run, one.key)]
        for run in plan.first_runs
    }
    return DryRun(notes, suppressed, measured)


def _assemble(
    plan: ComparisonPlan, run: PlannedRun, values: TunedValues, measured: Mapping[str, list[float]]
) -> Assembly:
    try:
        experiment = fill_in_defaults(parse_experiment(merge_tables(run.table, make_tables(values))))
        assembly = assemble(record_latencies(experiment, {**measured, **experiment.fleet.measured}))
        parts = assembly.simulation.parts if assembly.simulation is not None else ()
        if plan.tuning != [()] and not any(len(part.get("validation", ())) for part in parts):
            raise ConfigError(NO_VALIDATION, key="compare.tune")
    except FleetFitError as error:
        error.args = (f"{run.name}: {error}",)
        raise
    return assembly


def _read_measured(run: PlannedRun, folder: Path | None) -> dict[str, list[float]]:
    """Return what the folders of a row and setting have measured. A damaged folder is reported when it is run."""
    measured: dict[str, list[float]] = {}
    if folder is not None:
        near = run.place.parent
        patterns = (f"{near}/*/config.toml", f"{TUNING_FOLDER}/{near}/*/*/config.toml")
        for config in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            with contextlib.suppress(FleetFitError):
                measured |= load(config.parent).experiment.fleet.measured
    return measured


def _check_keys(
    plan: ComparisonPlan, unused: Mapping[RowSetting, Sequence[Sequence[UnusedKey]]]
) -> tuple[list[str], set[str]]:
    """Refuse keys that no run uses; return notes on the shared ones, and the shared keys that some run uses."""

    def find_unused(key: str, runs: Sequence[PlannedRun]) -> UnusedKey | None:
        reason = None
        for some in (some for run in runs for some in unused[run.group]):
            reason = next((one for one in some if is_related_key(one.key, key)), None)
            if reason is None:
                return None
        return reason

    def refuse(keys: Iterable[str], runs: Sequence[PlannedRun], where: str, place: str) -> None:
        for key in keys:
            if (reason := find_unused(key, runs)) is not None:
                raise ConfigError(f"{where} {key}: {reason} Leave it out.", key=f"{place}{key}")

    for (kind, position), change in plan.changes.items():
        runs, (where, place) = plan.select_runs(kind, position), _locate(kind, position)
        for key in list_keys(change):
            if not any(find_value(run.written, key) == find_value(change, key) for run in runs):
                raise ConfigError(
                    f"{where} {key}: every setting replaces it. Leave it out, or out of the settings.",
                    key=f"{place}.{key}",
                )
        refuse(list_keys(change), runs, where, f"{place}.")
    first = plan.first_runs
    refuse([key for key in plan.grid if key != "seed"], first, "[compare.grid]", "compare.grid.")
    tuned = [key for key, _ in plan.tuning[0]]
    refuse(tuned, first, "[compare.tune]", "compare.tune.")
    refuse(list_keys(plan.change), first, "--set", "")
    reasons = {
        key: find_unused(key, [run for run in first if find_value(run.table, key) == find_value(plan.base, key)])
        for key in list_keys(plan.base)
    }
    notes = [*plan.list_dropped_keys(), *dict.fromkeys(str(one) for one in reasons.values() if one is not None)]
    return notes, {*list_keys(plan.change), *(key for key, reason in reasons.items() if reason is None)} - {*tuned}


def list_plans(file: str | Path, overrides: Sequence[str] = ()) -> list[tuple[list[str], Assembly]]:
    """Return each plan of a comparison once: the titles of the rows that have it, and an assembly of one of them.

    Raises:
        FleetFitError: Something does not fit.
    """
    plans: dict[str, tuple[list[str], Assembly]] = {}

    def add(run: PlannedRun, assembly: Assembly) -> None:
        titles, _ = plans.setdefault(assembly.plan.to_toml(), ([], assembly))
        titles.append(_join(*run.group))

    with share_data():
        check_rows(plan_runs(file, overrides), on_assembly=add)
    return list(plans.values())


# ---- runs.json: the runs of a comparison, for other processes -------------------------------------------------------


@dataclass(frozen=True)
class ListedRun:
    """A run of a comparison, perhaps one that has not started.

    Attributes:
        place: Its folder, relative to the comparison's.
        title: Row, setting and seed, or the values that it tries.
    """

    place: Path
    title: str


@contextlib.contextmanager
def hold_folder(plan: ComparisonPlan, folder: Path) -> Iterator[None]:
    """List the runs in the order in which they start, and lock the folder until the end of the block."""
    runs = [{"place": str(run.place), "title": run.title} for run in (*plan.tuning_runs, *plan.runs)]
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / RUNS_FILE, json.dumps({"runs": runs}, indent=1) + "\n")
    with files.open_in_folder(folder / _LOCK, os.O_RDWR | os.O_CREAT) as file:
        files.share_lock(file)
        yield


def list_planned_runs(folder: Path) -> list[ListedRun]:
    """Return the runs of the comparison in a folder; none where the folder has no comparison.

    Raises:
        RunError: `runs.json` is damaged.
    """
    path = folder / RUNS_FILE
    if not files.is_file(path):
        return []
    try:
        record = PlannedRunsRecord.load(files.parse_json(files.read_text(path)))
        runs = [ListedRun(Path(one.place), one.title) for one in record.runs]
        if any(run.place.is_absolute() or ".." in run.place.parts for run in runs):
            raise ValueError("a place in it is outside of the folder")
    except (ValueError, OSError) as error:
        raise RunError(
            f"{path} is damaged: {error}. The same fleetfit compare command writes it again.",
            key=getattr(error, "key", None),
            path=path,
        ) from None
    return runs


def is_running(folder: Path) -> bool:
    """Return whether a process writes into a run folder, or runs the comparison in a folder."""
    return files.is_held(folder / _LOCK)


# ---- rows, settings, columns ---------------------------------------------------------------------------------------


def _join(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _locate(kind: str, position: int) -> tuple[str, str]:
    """Return a row's or setting's place for a message, `[compare] row #1`, and as a key, `compare.row.0`."""
    return f"[compare] {kind} #{position + 1}", f"compare.{kind}.{position}"


def _check_allowed(keys: Iterable[str], where: str, place: str) -> None:
    for key in keys:
        if key in _SAME_IN_ALL_RUNS:
            raise ConfigError(f"{where} {key}: {_SAME_IN_ALL_RUNS[key]}.", key=f"{place}.{key}")
        if key in _NOT_IN_RUN_FILES:
            raise ConfigError(f"{where} {key}: belongs to a row, and not to a run.", key=f"{place}.{key}")


def _overlap(key: str, other: str) -> bool:
    """Return whether one of two dotted keys contains the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _get_change(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables that a row or a setting changes."""
    return expand_sections({key: value for key, value in entry.items() if key not in _NOT_IN_RUN_FILES})


def _make_rows(
    entries: Sequence[Mapping[str, Any]], base: Mapping[str, Any], change: Mapping[str, Any], numbered: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the tables of each row by its label: by default its method with overrides, or its number."""
    rows: dict[str, dict[str, Any]] = {}
    for position, entry in enumerate(entries or [{}]):
        where, place = _locate("row", position)
        table = merge_tables(base, _get_change(entry))
        method = merge_tables(table, change).get("method", {}).get("name", "scalefl")
        name = _check_label(entry["label"], where, place) if entry.get("label") else truncate(method, 200)
        name = str(position) if numbered else name
        if name in rows:
            raise ConfigError(
                f'{where}: another row is "{name}" already. Give each row a label of its own.', key=f"{place}.label"
            )
        rows[name] = table
    return rows


def _check_label(label: Any, where: str, place: str) -> str:
    """Return a label as text. It appears in tables, titles and messages, so it must be printable."""
    text = str(label)
    if not text.isprintable() or len(text) > 200:
        raise ConfigError(
            f"{where} label: must have at most 200 characters, all printable, got {truncate(repr(text))}.",
            key=f"{place}.label",
        )
    return text


def _find_head(table: Mapping[str, Any]) -> str | None:
    """Return the kind of classifiers of a row's model; None for a model without a parameter `head`."""
    section = parse_experiment(table).model
    if not isinstance(section.name, str):
        return None
    parameter = list_hyperparameters(find_function("models", section.name)[0]).get("head")
    return None if parameter is None else str(section.settings.get("head", parameter.default))


def _make_settings(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Return what each setting changes, by its label; one empty label where the file has one setting."""
    named: list[tuple[str, dict[str, Any]]] = []
    for position, entry in enumerate(experiment.compare.setting):
        where, place = _locate("setting", position)
        if not entry.get("label"):
            raise ConfigError(f'{where}: needs a label, such as label = "IID".', key=f"{place}.label")
        if "printed" in entry:
            raise ConfigError(f"{where} printed: printed numbers belong to the rows.", key=f"{place}.printed")
        named.append((_check_label(entry["label"], where, place), _get_change(entry)))
    grid = _list_values(experiment.compare.grid, "compare.grid")
    grid.pop("seed", None)
    settings: dict[str, dict[str, Any]] = {}
    for (name, change), values in itertools.product(named or [("", {})], _combine(grid)):
        whole = _join(name, format_label(values))
        if whole in settings:
            raise ConfigError(
                f'[compare] another setting is "{whole}" already. Give each a label of its own.', key="compare.setting"
            )
        settings[whole] = merge_tables(change, make_tables(values))
    return settings


def _list_columns(experiment: Experiment) -> list[str]:
    """Return the columns of the table; see `fleetfit.report.columns`."""
    section = experiment.compare
    columns = section.columns
    if columns is None:
        columns = ["local", "global", *([ROUNDS] if section.targets else [])]
    for name in columns:
        if name not in COLUMNS:
            raise ConfigError(
                f'[compare] columns: "{name}" is unknown; the columns are {", ".join(COLUMNS)}.'
                f"{did_you_mean(name, COLUMNS)}",
                key="compare.columns",
            )
    for key, wanted in (("columns", ROUNDS in columns), ("tune_on", section.tune_on == ROUNDS)):
        if wanted and not section.targets:
            raise ConfigError(
                f'[compare] {key}: "rounds" needs an accuracy to reach, such as target = 0.97.', key=f"compare.{key}"
            )
    batch = [name for name in columns if name.endswith(BATCH)]
    if batch and "batch" not in experiment.evaluate.norms[1:]:
        raise ConfigError(
            f'[compare] columns: "{batch[0]}" is accuracy with batch statistics beside others. Set '
            'evaluate.norms = ["static", "batch"].',
            key="compare.columns",
        )
    if section.target_on not in COLUMNS or section.target_on.endswith((ROUNDS, "waste", *ATTACKED, BATCH)):
        raise ConfigError(
            f'[compare] target_on: "{section.target_on}" is not an accuracy.{did_you_mean(section.target_on, COLUMNS)}',
            key="compare.target_on",
        )
    return expanded(list(dict.fromkeys(columns)), section.targets)


def _read_printed(table: Mapping[str, Any]) -> PrintedNumbers:
    """Return a paper's numbers: in each row one for each column of each setting, "-" where the paper has none."""
    experiment = parse_experiment(table)
    places = [(setting, column) for setting in _make_settings(experiment) for column in _list_columns(experiment)]
    rows = experiment.compare.row
    labels = list(_make_rows(rows, {key: value for key, value in table.items() if key != "compare"}, {}))
    printed: dict[tuple[str, str, str], float] = {}
    for position, (row, name) in enumerate(zip(rows, labels, strict=False)):
        key = f"compare.row.{position}.printed"
        numbers = row.get("printed", [])
        if not isinstance(numbers, list) or (numbers and len(numbers) != len(places)):
            wanted = "; ".join(_join(*place) for place in places)
            got = len(numbers) if isinstance(numbers, list) else repr(numbers)
            raise ConfigError(
                f'row "{name}": printed must have a number for each column of the table, {len(places)} in all '
                f'({wanted}), "-" where the paper has none; got {got}.',
                key=key,
            )
        for place, number in zip(places, numbers, strict=False):
            if isinstance(number, int | float) and not isinstance(number, bool):
                printed[(name, *place)] = float(number)
            elif number != "-":
                raise ConfigError(f'row "{name}": printed must hold numbers, or "-" for none; got {number!r}.', key=key)
    return printed


# ---- lists of values -----------------------------------------------------------------------------------------------


def _list_values(table: Mapping[str, Any], where: str, path: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Return the lists of a grid by dotted key."""
    lists: dict[str, list[Any]] = {}
    for key, value in table.items():
        inner = (*path, *key.split("."))
        if isinstance(value, Mapping):
            lists |= _list_values(value, where, inner)
        elif isinstance(value, list) and value:
            lists[".".join(inner)] = value
        else:
            raise ConfigError(
                f"[{where}] {truncate('.'.join(inner))}: must be a list of values to try, got {truncate(repr(value))}.",
                key=f"{where}.{'.'.join(inner)}",
            )
    return lists


def _combine(lists: Mapping[str, list[Any]]) -> Iterator[TunedValues]:
    """Yield every combination of the lists' values."""
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
    """Return the label of a combination of values: "cifar10, alpha = 1"."""
    parts = []
    for key, value in values:
        *_, last = key.split(".")
        parts.append(str(value) if last in ("name", "kind") else f"{last} = {value}")
    return ", ".join(parts)
