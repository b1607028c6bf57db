"""Rows x settings x seeds from one file: each its own run folder below one folder, resumable, and the table at the end.

Rows and tuned values are compared fairly: every row gets the same grid and the same small grid to tune, chosen on
validation data with the first seed (ReeFL, appendix A); the table says what each got. A run that is finished is not run
again, one that was cut off goes on.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from fleetfit.api.results import Run, load, settled
from fleetfit.api.runs import RUNS, OnRound, prepare, proceed
from fleetfit.config import to_toml
from fleetfit.config.assembly import check_keys, spec_of_method, with_measured
from fleetfit.config.checking import checked
from fleetfit.config.reading import anchored, merged, override, read_table
from fleetfit.errors import ConfigError, FleetFitError, MissingExtra, RunError
from fleetfit.method import build
from fleetfit.records import RunFolder, write_atomically
from fleetfit.report import plots
from fleetfit.report.tables import compare_table
from fleetfit.report.text import Table

Choice = tuple[tuple[str, Any], ...]
"""Keys of a run file and their values: a setting of the grid."""


@dataclass(frozen=True)
class Entry:
    """One run of a comparison.

    Attributes:
        row: Label of its row.
        setting: Its setting, without the seed.
        seed: Its seed.
        table: Tables of its run file.
        place: Its folder, below the comparison's.
    """

    row: str
    setting: Choice
    seed: int
    table: Mapping[str, Any]
    place: Path


@dataclass(frozen=True, eq=False)
class Comparison:
    """A finished comparison.

    Attributes:
        folder: Its folder, with `table.md`, `table.csv` and `compare.json`.
        table: Methods as rows, local and global accuracy per setting as columns.
        runs: The runs by (row, setting), one per seed.
        tuned: What each (row, setting) got from the tuned grid.
    """

    folder: Path
    table: Table
    runs: Mapping[tuple[str, str], Sequence[Run]]
    tuned: Mapping[tuple[str, str], str]


OnRun = Callable[[str, int, int, Run], OnRound | None]
"""Called before each run with its title, its number, how many there are, and the run, perhaps finished already."""


def compare(
    file: str | Path,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    on_run: OnRun | None = None,
) -> Comparison:
    """Run every row of a file in every setting with every seed.

    Args:
        file: A run file with `[[compare.row]]`, `[compare.grid]` and perhaps `[compare.tune]`.
        out: The folder; by default one below `runs/` that depends on what is compared, so the same command goes on.
        overrides: `a.b=c`, for all rows.
        on_run: Called before each run; what it returns is called with each round's report.

    Raises:
        FleetFitError: Something does not fit, or a folder holds a run of something else.
    """
    base = anchored(read_table(file), Path(file).expanduser().resolve().parent)
    for text in overrides:
        base = merged(base, anchored(override(text), Path.cwd()))
    plan = Planned(base, Path(file).stem)
    folder = Path(out).expanduser() if out is not None else RUNS / f"compare-{plan.name}-{plan.fingerprint}"
    tuned = dict(_tune(plan, folder, on_run))
    runs: dict[tuple[str, str], list[Run]] = {}
    for number, entry in enumerate(plan.entries(), 1):
        table = merged(entry.table, _nested(tuned.get((entry.row, label(entry.setting)), ())))
        title = ", ".join(filter(None, [entry.row, label(entry.setting), f"seed {entry.seed}"]))
        found = _one(table, folder / entry.place, title, number, plan.count, on_run)
        runs.setdefault((entry.row, label(entry.setting)), []).append(found)
    return _reported(plan, folder, runs, {key: label(choice) for key, choice in tuned.items()})


# ---- what is to be run ---------------------------------------------------------------------------------------------


class Planned:
    """The runs that a file asks for; everything that can be checked without data is checked here."""

    def __init__(self, base: Mapping[str, Any], stem: str) -> None:
        self.base = {key: value for key, value in base.items() if key != "compare"}
        experiment = checked(base)
        section = experiment.compare
        self.name = experiment.name or stem
        self.tune_on = section.tune_on
        self.rows = _rows(section.row, self.base)
        self.grid = _leaves(section.grid, "compare.grid")
        self.tuning = list(_product(_leaves(section.tune, "compare.tune")))
        self.seeds = self.grid.pop("seed", [experiment.seed])
        self.settings = list(_product(self.grid))
        self.count = len(self.rows) * len(self.settings) * len(self.seeds)
        self._places_differ()
        for entry in self.entries():
            _check(entry.table, entry.row)

    def entries(self) -> Iterator[Entry]:
        """Yield the runs, row by row."""
        for row, setting, seed in itertools.product(self.rows, self.settings, self.seeds):
            table = merged(merged(self.rows[row], _nested(setting)), {"seed": seed, "name": row})
            yield Entry(row, setting, seed, table, Path(_slug(row)) / _slug(label(setting)) / f"seed-{seed}")

    @property
    def fingerprint(self) -> str:
        """A short hash of all that is run."""
        text = json.dumps(
            [[str(e.place), e.table] for e in self.entries()] + [self.tuning], default=str, sort_keys=True
        )
        return sha256(text.encode()).hexdigest()[:6]

    def _places_differ(self) -> None:
        places = [entry.place for entry in self.entries()]
        if len(set(places)) < len(places):
            raise ConfigError(
                "[compare] two runs would have the same folder: give rows different labels, and the lists of the grid "
                "different values."
            )


def _rows(given: Sequence[Mapping[str, Any]], base: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tables of each row by its label, the method's name where it has none."""
    rows: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(given or [{}], 1):
        change = {key: value for key, value in row.items() if key != "label"}
        table = merged(base, change)
        name = str(row.get("label") or table.get("method", {}).get("name", "scalefl"))
        if name in rows:
            raise ConfigError(
                f'[compare] row #{number}: there is a row "{name}" already; give each row a label of its own.'
            )
        rows[name] = table
    return rows


def _leaves(table: Mapping[str, Any], where: str, path: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Return the lists of a grid by dotted key."""
    found: dict[str, list[Any]] = {}
    for key, value in table.items():
        inner = (*path, *key.split("."))
        if isinstance(value, Mapping):
            found |= _leaves(value, where, inner)
        elif isinstance(value, list) and value:
            found[".".join(inner)] = value
        else:
            raise ConfigError(f"[{where}] {'.'.join(inner)}: must be a list of values to try, got {value!r}.")
    return found


def _product(lists: Mapping[str, list[Any]]) -> Iterator[Choice]:
    for values in itertools.product(*lists.values()):
        yield tuple(zip(lists, values, strict=True))


def _nested(choice: Choice) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in choice:
        change: Any = value
        for part in reversed(key.split(".")):
            change = {part: change}
        table = merged(table, change)
    return table


def label(choice: Choice) -> str:
    """Return how a setting is called: "cifar10, alpha = 1"."""
    parts = []
    for key, value in choice:
        *_, last = key.split(".")
        parts.append(str(value) if last in ("name", "kind") else f"{last} = {value}")
    return ", ".join(parts)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.]+", "-", text).strip("-").lower()


def _check(table: Mapping[str, Any], row: str) -> None:
    try:
        experiment = checked(table)
        build(spec_of_method(experiment))
        check_keys(experiment)
    except FleetFitError as error:
        raise ConfigError(f'row "{row}": {error}') from None


# ---- running -------------------------------------------------------------------------------------------------------


def _one(table: Mapping[str, Any], place: Path, title: str, number: int, count: int, on_run: OnRun | None) -> Run:
    """Run one, go on with it, or open it if it is finished."""
    experiment = settled(checked(table))
    if not (place / "config.toml").is_file():
        found = prepare(experiment, place)
    else:
        found = load(place)
        same = with_measured(experiment, found.experiment.fleet.measured)
        if RunFolder(place).text("config.toml") != to_toml(same):
            raise RunError(f"{place} holds a run of something else; choose another folder with --out, or delete it.")
    on_round = None if on_run is None else on_run(title, number, count, found)
    if not found.finished:
        proceed(found, on_round)
    found.let_go()  # a comparison may have many runs, each with its own data in memory
    return found


def _tune(plan: Planned, folder: Path, on_run: OnRun | None) -> Iterator[tuple[tuple[str, str], Choice]]:
    """Choose among the tuned values for every row and setting, by validation data alone."""
    if plan.tuning == [()]:
        return
    first = [entry for entry in plan.entries() if entry.seed == plan.seeds[0]]
    number, count = 0, len(first) * len(plan.tuning)
    for entry in first:
        scores = []
        for choice in plan.tuning:
            number += 1
            change = {**_nested(choice), "evaluate": {**_nested(choice).get("evaluate", {}), "split": "validation"}}
            place = folder / "tune" / entry.place.parent / _slug(label(choice))
            title = ", ".join(filter(None, ["tuning", entry.row, label(entry.setting), label(choice)]))
            found = _one(merged(entry.table, change), place, title, number, count, on_run)
            score = found.summary[plan.tune_on]
            if score is None:
                raise ConfigError("compare.tune needs validation data, and no client has any; set data.validation.")
            scores.append(score)
        best = max(range(len(scores)), key=lambda i: scores[i])  # the first of equal ones
        yield (entry.row, label(entry.setting)), plan.tuning[best]


def _reported(
    plan: Planned,
    folder: Path,
    runs: Mapping[tuple[str, str], Sequence[Run]],
    tuned: Mapping[tuple[str, str], str],
) -> Comparison:
    """Write the table as Markdown and CSV, all numbers as JSON, and the plots."""
    results = {key: [found.summary for found in group] for key, group in runs.items()}
    settings = [label(setting) for setting in plan.settings]
    notes = [f"Accuracy in percent on test data; {len(plan.seeds)} seed{'s' if len(plan.seeds) > 1 else ''}"
             f"{', mean ± standard deviation' if len(plan.seeds) > 1 else ''}."]  # fmt: skip
    notes += [f"Tuned on validation data: {', '.join(filter(None, key))}: {value}." for key, value in tuned.items()]
    table = compare_table(list(plan.rows), settings, results, plan.name, notes)
    write_atomically(folder / "table.md", table.to_markdown())
    write_atomically(folder / "table.csv", table.to_csv())
    numbers = [
        {
            "row": row,
            "setting": setting,
            "tuned": tuned.get((row, setting)),
            **found.summary,
            "folder": str(found.folder),
        }
        for (row, setting), group in runs.items()
        for found in group
    ]
    write_atomically(folder / "compare.json", json.dumps(numbers, indent=2) + "\n")
    with contextlib.suppress(MissingExtra):  # the command line says that there are no plots
        plots.plots_of_comparison(folder, results, {key: group[0].metrics for key, group in runs.items()})
    return Comparison(folder, table, runs, tuned)
