"""What a comparison is to run: rows, settings and seeds of a file, and the numbers of a paper beside them.

A setting is one of `[[compare.setting]]`, or one combination of the lists in `[compare.grid]`, or both combined; it
heads columns of the table, as a row is a line of it.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from fleetfit.config import Experiment
from fleetfit.config.build.method import build_method_spec
from fleetfit.config.naming import check_keys, find_function
from fleetfit.config.reading import checked, leaves, merged, names_among, sections_of, value_at
from fleetfit.errors import ConfigError, FleetFitError, did_you_mean, truncate
from fleetfit.method import build, hyperparameters
from fleetfit.paths import make_slug
from fleetfit.report.columns import ATTACKED, BATCH, COLUMNS, ON_THE_WAY, ROUNDS, expanded

TunedKeys = tuple[tuple[str, Any], ...]
"""Keys of a run file and their values."""

_OF_A_ROW = ("label", "printed")
"""Keys of a row or a setting that are no keys of a run file."""
_TAKEN = ("tune", "plots", "runs.json", "results.json", "compare.json", "differences.json", "table.md", "table.csv",
          "report.html", "config.toml", "plan.toml", "metrics.jsonl", "summary.json")  # fmt: skip
"""What a comparison's own folder has, or a run's, by which that is known: no row's folder is called so."""
_OF_ALL = {
    "seed": "all rows and settings have the same seeds: set seed, or [compare.grid] seed = [0, 1, 2]",
    "name": "it is the name of the whole comparison; a row and a setting have a label",
    "compare": "a comparison has no other one inside",
}
"""Keys of a run file that no row, setting or list of values can have, and why."""

Printed = Mapping[tuple[str, str, str], float]
"""Numbers of a paper by (row, setting, column): percent, or rounds."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison.

    Attributes:
        row: Label of its row.
        setting: Label of its setting.
        seed: Its seed.
        table: Tables of its run file.
        place: Its folder, below the comparison's.
        written: The tables as the file has them, without overrides.
    """

    row: str
    setting: str
    seed: int
    table: Mapping[str, Any]
    place: Path
    written: Mapping[str, Any]

    @property
    def title(self) -> str:
        """How messages call it."""
        return f'row "{self.row}"' + (f', setting "{self.setting}"' if self.setting else "")


class ComparisonPlan:
    """The runs that a file asks for; everything that can be checked without data is checked here.

    Args:
        base: The tables of the file.
        stem: The file's name, where it gives the comparison none.
        change: The overrides, which win over rows and settings. The printed numbers belong to the tables without them.
    """

    def __init__(self, base: Mapping[str, Any], stem: str, change: Mapping[str, Any] | None = None) -> None:
        self.base = {key: value for key, value in base.items() if key != "compare"}
        self.said = dict(change or {})
        self.change = {key: value for key, value in self.said.items() if key not in ("name", "seed", "compare")}
        experiment = checked(merged(base, self.said))
        self.section = section = experiment.compare
        self.name = experiment.name or stem
        self.changes = {
            **{("row", i): _change(row) for i, row in enumerate(section.row, 1)},
            **{("setting", i): _change(setting) for i, setting in enumerate(section.setting, 1)},
        }
        self.grid, tune = _leaves(section.grid, "compare.grid"), _leaves(section.tune, "compare.tune")
        self._check_keys(tune)
        self.rows = _rows(section.row, self.base, self.change)
        self.settings = _settings(experiment)
        self._rows_differ()
        self.columns = _columns(experiment)
        self.seeds = self.grid.get("seed", [experiment.seed])
        self.tuning = list(product(tune))
        whole = [seed for seed in self.seeds if isinstance(seed, int)]  # any other is refused with its run, below
        self.tune_seeds = section.tune_seeds or [max(whole, default=0) + 1]
        self.count = len(self.rows) * len(self.settings) * len(self.seeds)
        self.printed = _printed(base)
        self._names_stay()
        self._places_differ()
        for entry in self.entries():
            self._check(entry)
        self._same_heads()
        self._same_split()

    def entries(self) -> Iterator[ComparedRun]:
        """Yield the runs, row by row."""
        for row, setting, seed in itertools.product(self.rows, self.settings, self.seeds):
            written = merged(self.rows[row], self.settings[setting])
            table = merged(written, self.change) | {"seed": seed, "name": row}
            place = Path(make_slug(row, _TAKEN)) / make_slug(setting) / f"seed-{seed}"
            yield ComparedRun(row, setting, seed, table, place, written)

    def reference(self, against: str | None = None) -> str:
        """Return the label of the row that the others are measured against.

        Args:
            against: What was asked for beside the file; `compare.against` by default, and without it the first row.

        Raises:
            ConfigError: There is no such row.
        """
        asked = self.section.against if against is None else against
        if asked is None:
            return next(iter(self.rows))
        if asked not in self.rows:
            where = "[compare] against" if against is None else "--against"
            raise ConfigError(
                f'{where}: there is no row "{truncate(asked)}"; there are {", ".join(self.rows)}.'
                f"{did_you_mean(asked, self.rows)}"
            )
        return asked

    @property
    def fingerprint(self) -> str:
        """A short hash of all that is run; whom it tells is no part of that."""
        text = json.dumps(
            [[str(e.place), {k: v for k, v in e.table.items() if k != "callbacks"}] for e in self.entries()]
            + [self.tuning, self.tune_seeds if self.tuning != [()] else []],
            default=lambda thing: f"{thing}{token_hex(8)}",  # an object may be another one each time
            sort_keys=True,
        )
        return sha256(text.encode()).hexdigest()[:6]

    def _check_keys(self, tune: Mapping[str, list[Any]]) -> None:
        """Refuse keys that one part of the file, or an override, would take from another."""
        for (kind, number), table in self.changes.items():
            _refuse(table, f"[compare] {kind} #{number}")
        _refuse({key.partition(".")[0]: 0 for key in self.grid if key != "seed"}, "[compare.grid]")
        _refuse({key.partition(".")[0]: 0 for key in tune}, "[compare.tune]")
        lists = {**dict.fromkeys(self.grid, "[compare.grid]"), **dict.fromkeys(tune, "[compare.tune]")}
        both = [key for key in self.grid if any(_meet(key, other) for other in tune)]
        if both:
            raise ConfigError(f"[compare.tune] {both[0]}: [compare.grid] has it too; a value is either given or tuned.")
        for key in leaves({key: value for key, value in self.said.items() if key != "compare"}):
            for other, where in lists.items():
                if _meet(key, other):
                    raise ConfigError(
                        f"--set {key}: {where} has a list of values for it, which head columns of the table. Set "
                        f"the list: --set 'compare.{where[9:-1]}.{other}=[...]'."
                    )
        for (kind, number), table in self.changes.items():
            for key in leaves(table):
                for other, where in lists.items():
                    if _meet(key, other):
                        raise ConfigError(
                            f"[compare] {kind} #{number} {key}: {where} has a list of values for it, which would "
                            "win in every run; leave it out of one of them."
                        )

    def _rows_differ(self) -> None:
        """Refuse overrides that leave no difference between rows, or between settings, that differ in the file."""
        for what, before, after in (
            ("rows", _rows(self.section.row, self.base, {}, unnamed=True), self.rows),
            ("settings", self.settings, {k: merged(v, self.change) for k, v in self.settings.items()}),
        ):
            for (one, a), (other, b) in itertools.combinations(after.items(), 2):
                written = list(before.values())
                first, second = (written[list(after).index(name)] for name in (one, other))
                if self.change and first != second and merged(a, self.change) == merged(b, self.change):
                    raise ConfigError(
                        f'--set {" ".join(leaves(self.change))}: the {what} "{one}" and "{other}" differ in nothing '
                        "else, and would be the same run. Leave it out, or compare other rows."
                    )

    def _names_stay(self) -> None:
        """Refuse overrides that give another name to what a row or a setting is about, and take its keys with it."""
        for entry in self.entries():
            kept = set(leaves(entry.table))
            lost = [
                (f"{kind} #{number}", key)
                for (kind, number), table in self.changes.items()
                for key in leaves(table)
                if value_at(entry.written, key) == value_at(table, key) and key not in kept
            ]
            if lost:
                where, key = lost[0]
                raise ConfigError(
                    f"--set {' '.join(leaves(self.change))}: [compare] {where} sets {key}, which then goes. "
                    "Leave it out, or change the rows."
                )
        for key in names_among(self.change):
            values = {str(value_at(entry.written, key)) for entry in self.entries()}
            if len(values) > 1:
                raise ConfigError(
                    f"--set {key}: the rows or settings differ in it, and would no longer be what they are called. "
                    "Leave it out, or change the rows."
                )

    def _places_differ(self) -> None:
        places = [entry.place for entry in self.entries()]
        if len(set(places)) < len(places):
            raise ConfigError(
                "[compare] two runs would have the same folder: give rows different labels, and the lists of the grid "
                "different values."
            )
        if len({make_slug(label(choice)) for choice in self.tuning}) < len(self.tuning):
            raise ConfigError("[compare.tune] two candidates would have the same folder: give the lists other values.")
        if len(set(self.tune_seeds)) < len(self.tune_seeds):
            raise ConfigError("[compare] tune_seeds: a seed stands there twice.")

    def _check(self, entry: ComparedRun) -> None:
        try:
            experiment = checked(entry.table)
            build(build_method_spec(experiment))
            check_keys(experiment)
        except FleetFitError as error:
            raise ConfigError(f"{entry.title}: {error}") from None
        on = self.section.target_on
        if self.targets and on not in ON_THE_WAY and not experiment.evaluate.whole:
            raise ConfigError(
                f'[compare] target_on: "{on}" is known after the last round only; set evaluate.whole = true to have it '
                f"at every evaluation, or choose one of {', '.join(ON_THE_WAY)}."
            )

    def _same_heads(self) -> None:
        """Refuse rows whose classifiers are of different kinds, unless the file says that they are."""
        kinds = {row: found for row, table in self.rows.items() if (found := _head(table)) is not None}
        said = re.search(r"\bheads?\b|\bclassifiers?\b", self.section.differs, re.IGNORECASE)
        tuned = any("model.head" in dict(choice) for choice in self.tuning)
        if said or not (tuned or len(set(kinds.values())) > 1):
            return
        shown = ", ".join(f'"{row}" {kind}' for row, kind in kinds.items())
        raise ConfigError(
            f"[compare] rows have classifiers of different kinds, which hides what their methods do: {shown}. Give all "
            "of them one model.head, or say that their heads differ in compare.differs."
        )

    def _same_split(self) -> None:
        """Refuse rows and settings that are measured on different data, and values to try that would be."""
        if any(value_at(nested(choice), "evaluate.split") for choice in self.tuning):
            raise ConfigError(
                "[compare.tune] evaluate.split: values are tried on validation data, and the table is of one split; "
                "set evaluate.split once, for the whole file."
            )
        splits = {e.title: checked(e.table).evaluate.split for e in self.entries() if e.seed == self.seeds[0]}
        if len(set(splits.values())) > 1:
            (one, first), *others = splits.items()
            other, second = next(pair for pair in others if pair[1] != first)
            raise ConfigError(
                f'[compare] {one} has evaluate.split = "{first}" and {other} has "{second}": numbers on different data '
                "do not rank methods. Give all rows and settings one evaluate.split."
            )

    @property
    def targets(self) -> list[float]:
        """The accuracies that the rounds are counted to."""
        return list(self.section.targets)


# ---- rows, settings, columns ---------------------------------------------------------------------------------------


def _refuse(table: Mapping[str, Any], where: str) -> None:
    for key, why in _OF_ALL.items():
        if key in table:
            raise ConfigError(f"{where} {key}: {why}.")
    for key in _OF_A_ROW:
        if key in table:
            raise ConfigError(f"{where} {key}: belongs to a row, and is no key of a run.")


def _meet(key: str, other: str) -> bool:
    """Tell whether one of two dotted keys is the other, or inside of it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _rows(
    given: Sequence[Mapping[str, Any]], base: Mapping[str, Any], change: Mapping[str, Any], unnamed: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the tables of each row by its label; the name of its method, as it is run, where it has none."""
    rows: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(given or [{}], 1):
        table = merged(base, _change(row))
        method = merged(table, change).get("method", {}).get("name", "scalefl")
        name = _labelled(row["label"], f"row #{number}") if row.get("label") else truncate(method, 200)
        name = str(number) if unnamed else name
        if name in rows:
            raise ConfigError(
                f'[compare] row #{number}: there is a row "{name}" already; give each row a label of its own.'
            )
        rows[name] = table
    return rows


def _labelled(given: Any, where: str) -> str:
    """Return the label of a row or a setting, which stands in tables, titles and messages.

    Raises:
        ConfigError: It cannot be printed, or is too long.
    """
    text = str(given)
    if not text.isprintable() or len(text) > 200:
        raise ConfigError(
            f"[compare] {where} label: at most 200 characters that can be printed, got {truncate(repr(text))}."
        )
    return text


def _head(table: Mapping[str, Any]) -> str | None:
    """Return the kind of classifiers that a row's model has, or None for a model without such a key."""
    section = checked(table).model
    if not isinstance(section.name, str):
        return None
    parameter = hyperparameters(find_function("models", section.name)[0]).get("head")
    return None if parameter is None else str(section.settings.get("head", parameter.default))


def _settings(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Return what each setting changes, by its label; one empty label where there is only one setting."""
    named: list[tuple[str, dict[str, Any]]] = []
    for number, given in enumerate(experiment.compare.setting, 1):
        if not given.get("label"):
            raise ConfigError(f'[compare] setting #{number}: needs a label, such as label = "IID".')
        if "printed" in given:
            raise ConfigError(f"[compare] setting #{number} printed: printed numbers stand in the rows.")
        named.append((_labelled(given["label"], f"setting #{number}"), _change(given)))
    grid = _leaves(experiment.compare.grid, "compare.grid")
    grid.pop("seed", None)
    found: dict[str, dict[str, Any]] = {}
    for (name, change), choice in itertools.product(named or [("", {})], product(grid)):
        whole = ", ".join(filter(None, [name, label(choice)]))
        if whole in found:
            raise ConfigError(f'[compare] there is a setting "{whole}" already; give each a label of its own.')
        found[whole] = merged(change, nested(choice))
    return found


def _change(given: Mapping[str, Any]) -> dict[str, Any]:
    return sections_of({key: value for key, value in given.items() if key not in _OF_A_ROW})


def _columns(experiment: Experiment) -> list[str]:
    """Return the columns of the table; see `fleetfit.report.columns`."""
    section = experiment.compare
    names = section.columns
    if names is None:
        names = ["local", "global", *([ROUNDS] if section.targets else [])]
    for name in names:
        if name not in COLUMNS:
            raise ConfigError(
                f'[compare] columns: there is no column "{name}"; there are {", ".join(COLUMNS)}.'
                f"{did_you_mean(name, COLUMNS)}"
            )
    if ROUNDS in names and not section.targets:
        raise ConfigError('[compare] columns: "rounds" needs an accuracy to reach, such as target = 0.97.')
    if section.tune_on == ROUNDS and not section.targets:
        raise ConfigError('[compare] tune_on: "rounds" needs an accuracy to reach, such as target = 0.97.')
    alone = [name for name in names if name.endswith(BATCH) and "batch" not in experiment.evaluate.norms[1:]]
    if alone:
        raise ConfigError(
            f'[compare] columns: "{alone[0]}" is accuracy with batch statistics beside others; set '
            'evaluate.norms = ["static", "batch"].'
        )
    if section.target_on not in COLUMNS or section.target_on.endswith((ROUNDS, "waste", *ATTACKED, BATCH)):
        raise ConfigError(f'[compare] target_on: "{section.target_on}" is no accuracy.'
                          f'{did_you_mean(section.target_on, COLUMNS)}')  # fmt: skip
    return expanded(list(dict.fromkeys(names)), section.targets)


def _printed(table: Mapping[str, Any]) -> Printed:
    """Return the numbers of a paper that the rows of a file hold.

    Raises:
        ConfigError: A row has another number of them than the table has columns, or something that is no number.
    """
    experiment = checked(table)
    places = [(setting, column) for setting in _settings(experiment) for column in _columns(experiment)]
    rows = experiment.compare.row
    names = list(_rows(rows, {key: value for key, value in table.items() if key != "compare"}, {}))
    found: dict[tuple[str, str, str], float] = {}
    for row, name in zip(rows, names, strict=False):
        numbers = row.get("printed", [])
        if not isinstance(numbers, list) or (numbers and len(numbers) != len(places)):
            wanted = "; ".join(", ".join(filter(None, place)) for place in places)
            got = len(numbers) if isinstance(numbers, list) else repr(numbers)
            raise ConfigError(
                f'row "{name}": printed must have a number for each column of the table, {len(places)} in all '
                f'({wanted}), "-" where the paper has none; got {got}.'
            )
        for place, number in zip(places, numbers, strict=False):
            if isinstance(number, int | float) and not isinstance(number, bool):
                found[(name, *place)] = float(number)
            elif number != "-":
                raise ConfigError(f'row "{name}": printed must hold numbers, or "-" for none; got {number!r}.')
    return found


# ---- lists of values -----------------------------------------------------------------------------------------------


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
            raise ConfigError(
                f"[{where}] {truncate('.'.join(inner))}: must be a list of values to try, got {truncate(repr(value))}."
            )
    return found


def product(lists: Mapping[str, list[Any]]) -> Iterator[TunedKeys]:
    """Yield every combination of the lists' values."""
    for values in itertools.product(*lists.values()):
        yield tuple(zip(lists, values, strict=True))


def nested(choice: TunedKeys) -> dict[str, Any]:
    """Return the tables that dotted keys stand for."""
    table: dict[str, Any] = {}
    for key, value in choice:
        change: Any = value
        for part in reversed(key.split(".")):
            change = {part: change}
        table = merged(table, change)
    return table


def label(choice: TunedKeys) -> str:
    """Return how a choice is called: "cifar10, alpha = 1"."""
    parts = []
    for key, value in choice:
        *_, last = key.split(".")
        parts.append(str(value) if last in ("name", "kind") else f"{last} = {value}")
    return ", ".join(parts)
