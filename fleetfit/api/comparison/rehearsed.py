"""Whether every key of a comparison is used by a run of it: rows and settings are assembled before any runs.

A key of a row, a setting, a list of values or an override that no run with it uses is refused; one that all rows share
is a note, and where one run uses it, the others say nothing of it. Runs are assembled only as far as that takes: a key
that its first run uses needs no other one. What is measured meanwhile is handed on to the runs.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleetfit.api.comparison.planned import ComparedRun, ComparisonPlan, nested
from fleetfit.api.comparison.tuned import NO_VALIDATION
from fleetfit.api.described import settled
from fleetfit.api.results import Run, load
from fleetfit.api.runs import covers, prepare
from fleetfit.config import Assembly, Experiment, assemble, to_table
from fleetfit.config.assembly import UnusedKey
from fleetfit.config.build.run import with_callbacks, with_measured
from fleetfit.config.reading import checked, leaves, merged, value_at
from fleetfit.config.writing import objects_in
from fleetfit.errors import ConfigError, FleetFitError


@dataclass(frozen=True)
class Spared:
    """Of which keys a run says nothing, though it does not use them.

    Attributes:
        shared: The tables that all rows share.
        used: Keys of them that some run uses.
    """

    shared: Mapping[str, Any]
    used: frozenset[str]

    def without(self, table: Mapping[str, Any], assembly: Assembly) -> Assembly:
        """Return the assembly of a run without the notes on keys that all rows share and another run uses."""
        spared = {str(one) for one in assembly.unused if self._is_for_others(table, one.key)}
        return replace(
            assembly,
            unused=tuple(one for one in assembly.unused if str(one) not in spared),
            notes=tuple(note for note in assembly.notes if note not in spared),
        )

    def _is_for_others(self, table: Mapping[str, Any], unused: str) -> bool:
        """Tell whether a run has a key, which it does not use, from what all rows share, and another run uses it."""
        keys = [key for key in leaves(self.shared) if covers(unused, key)]
        same = all(value_at(table, key) == value_at(self.shared, key) for key in keys)
        return bool(keys) and same and self.used.issuperset(keys)

    @property
    def nest(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"shared": self.shared, "used": sorted(self.used)}

    @staticmethod
    def restored(nest: Mapping[str, Any]) -> "Spared":
        """Return what `nest` was made of."""
        return Spared(nest["shared"], frozenset(nest["used"]))


def find_objects(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a run in which objects stand for names."""
    return {section: table[section] for section in objects_in(to_table(checked(table)))}


@dataclass(frozen=True)
class RowTask:
    """One run of a comparison, with all that its process needs to know.

    Attributes:
        title: How messages call it.
        table: Its run file.
        measured: What was measured for it before.
        place: Its folder.
        spared: Of which keys it says nothing.
        group: The name of the comparison's folder.
    """

    title: str
    table: Mapping[str, Any]
    measured: Mapping[str, list[float]]
    place: Path
    spared: Spared
    group: str = ""

    def begun(self) -> Run:
        """Return the run, new or to go on with, assembled."""
        if (self.place / "config.toml").is_file():
            found = load(self.place, **find_objects(self.table))
            found.experiment = with_callbacks(found.experiment, checked(self.table).callbacks)
        else:
            found = prepare(with_measured(settled(checked(self.table)), self.measured), self.place)
        if not found.finished:
            found.__dict__["assembly"] = self.spared.without(self.table, found.assembly)
        found._compared = (self.title, self.group)
        return found


class Rehearsal:
    """The runs of a comparison with its first seed, assembled when they are asked for.

    Args:
        plan: What is compared.
        folder: The comparison's folder, perhaps with runs whose measurements hold; None: there is none.
    """

    def __init__(self, plan: ComparisonPlan, folder: Path | None = None) -> None:
        self._plan, self._folder = plan, folder
        self._shared = merged(plan.base, plan.change)
        self._used: set[str] = set()
        self._measured: dict[tuple[str, str], dict[str, list[float]]] = {}
        self._entries = [entry for entry in plan.entries() if entry.seed == plan.seeds[0]]
        self._unused: dict[tuple[str, str], tuple[UnusedKey, ...]] = {}
        self.work: dict[tuple[str, str], float] = {}
        """Multiply-adds of a round that the plan foresees, by row and setting, of those that were assembled."""

    @property
    def name(self) -> str:
        """The name of the comparison's folder."""
        return "" if self._folder is None else self._folder.resolve().name

    def check(self) -> list[str]:
        """Refuse keys that no run uses, and return a note for each that all rows share.

        Raises:
            ConfigError: There is such a key.
        """
        plan, names = self._plan, list(self._plan.rows)
        for (kind, number), change in plan.changes.items():
            own = [e for e in self._entries if (e.row == names[number - 1] if kind == "row" else self._has(e, number))]
            self._check_kept(change, own, f"[compare] {kind} #{number}")
            self._refuse(leaves(change), own, f"[compare] {kind} #{number}")
        self._refuse([key for key in plan.grid if key != "seed"], self._entries, "[compare.grid]")
        self._refuse([key for key, _ in plan.tuning[0]], self._entries, "[compare.tune]")
        self._refuse(leaves(plan.change), self._entries, "--set")
        for entry in self._entries if plan.tuning != [()] else ():
            self._unused_in(entry)  # so that whoever has no validation data is found before anything is trained
        shared = {key: self._idle(key, self._with_shared(key)) for key in leaves(plan.base)}
        self._used = {*leaves(plan.change), *(key for key, idle in shared.items() if idle is None)}
        return [*self._gone(), *dict.fromkeys(str(one) for one in shared.values() if one is not None)]

    def assemblies(self) -> Iterator[tuple[ComparedRun, Assembly]]:
        """Yield every run, assembled."""
        for entry in self._entries:
            yield entry, self.spared.without(entry.table, self._assembled(entry, self._plan.tuning[0]))

    @property
    def spared(self) -> Spared:
        """Of which keys runs say nothing; known after `check`."""
        return Spared(self._shared, frozenset(self._used))

    def with_known(self, entry: ComparedRun, experiment: Experiment) -> Experiment:
        """Return the experiment of a run with what was measured for its row and setting, here or in the folder."""
        place = (entry.row, entry.setting)
        if place not in self._measured:
            self._measured[place] = self._recorded(entry)
        return with_measured(experiment, self._measured[place] | experiment.fleet.measured)

    def _recorded(self, entry: ComparedRun) -> dict[str, list[float]]:
        """Return what the folders of a row in a setting say was measured; a damaged one says so when it is run."""
        found: dict[str, list[float]] = {}
        if self._folder is None:
            return found
        near = entry.place.parent
        for config in sorted(
            [*self._folder.glob(f"{near}/*/config.toml"), *self._folder.glob(f"tune/{near}/*/*/config.toml")]
        ):
            with contextlib.suppress(FleetFitError):
                found |= load(config.parent).experiment.fleet.measured
        return found

    def _gone(self) -> Iterator[str]:
        """Yield a note for each key that all rows share and that no run has, since all name something else."""
        for key in leaves(self._plan.base):
            if not any(value_at(entry.table, key) for entry in self._entries):
                yield f"{key} of the file is in no run: every row names something else in its place."

    def _check_kept(self, change: Mapping[str, Any], entries: list[ComparedRun], where: str) -> None:
        """Refuse a key of a row that the settings replace in every run of it.

        Raises:
            ConfigError: There is one.
        """
        for key in leaves(change):
            if not any(value_at(entry.written, key) == value_at(change, key) for entry in entries):
                raise ConfigError(f"{where} {key}: every setting replaces it; leave it out, or out of the settings.")

    def _has(self, entry: ComparedRun, number: int) -> bool:
        """Tell whether a run has a setting of the file, which may be combined with the grid's."""
        each = len(self._plan.settings) // len(self._plan.section.setting)
        return list(self._plan.settings).index(entry.setting) // each == number - 1

    def _with_shared(self, key: str) -> list[ComparedRun]:
        """Return the runs that have a key as the shared part of the file has it."""
        given = value_at(self._plan.base, key)
        return [entry for entry in self._entries if value_at(entry.table, key) == given]

    def _refuse(self, keys: Iterable[str], entries: list[ComparedRun], where: str) -> None:
        for key in keys:
            idle = self._idle(key, entries)
            if idle is not None:
                raise ConfigError(f"{where} {key}: {idle} Leave it out.")

    def _idle(self, key: str, entries: list[ComparedRun]) -> UnusedKey | None:
        """Return why no run of several uses a key; None where one does."""
        why = None
        for entry in entries:
            why = next((one for one in self._unused_in(entry) if covers(one.key, key)), None)
            if why is None:
                return None
        return why

    def _unused_in(self, entry: ComparedRun) -> tuple[UnusedKey, ...]:
        place = (entry.row, entry.setting)
        if place not in self._unused:
            found = [self._assembled(entry, choice).unused for choice in self._choices()]
            used_by_one = [{one.key for one in unused} for unused in found]
            everywhere = set.intersection(*used_by_one)
            self._unused[place] = tuple(one for one in found[0] if one.key in everywhere)
        return self._unused[place]

    def _choices(self) -> list[Any]:
        return [choice for choice, _ in itertools.groupby([self._plan.tuning[0], self._plan.tuning[-1]])]

    def _assembled(self, entry: ComparedRun, choice: Any) -> Assembly:
        table: Mapping[str, Any] = merged(entry.table, nested(choice))
        try:
            found = assemble(self.with_known(entry, settled(checked(table))))
            if self._plan.tuning != [()]:
                _check_validation(found)
        except FleetFitError as error:
            error.args = (f"{entry.title}: {error}",)
            raise
        self._measured[entry.row, entry.setting] |= found.experiment.fleet.measured
        self.work[entry.row, entry.setting] = _work_of(found)
        return found


def _check_validation(assembly: Assembly) -> None:
    """Check that there is something to tune on.

    Raises:
        ConfigError: No client has validation data.
    """
    parts = assembly.simulation.parts if assembly.simulation is not None else ()
    if not any(len(part.get("validation", ())) for part in parts):
        raise ConfigError(NO_VALIDATION)


def _work_of(assembly: Assembly) -> float:
    """Return the multiply-adds of a round as the plan foresees them, up to a factor that all rows share."""
    levels, clients = assembly.plan.levels, assembly.federation.clients
    each = sum(level.multiply_adds * level.clients for level in levels) / max(1, sum(level.clients for level in levels))
    samples = float(clients.num_examples.mean()) if len(clients) else 0.0
    return float(each * samples * assembly.settings.local.epochs * assembly.federation.cohort)
