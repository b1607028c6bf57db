"""Whether every key of a comparison is used by a run of it: rows and settings are assembled before any runs.

A key of a row, a setting, a list of values or an override that no run with it uses is refused; one that all rows share
is a note. Runs are assembled only as far as that takes: a key that its first run uses needs no other one.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fleetfit.api.asking import covers
from fleetfit.api.comparison.planned import Entry, Planned, nested
from fleetfit.api.described import settled
from fleetfit.config import Assembly, assemble
from fleetfit.config.checking import checked
from fleetfit.config.reading import leaves, merged, value_at
from fleetfit.config.unused import Unused
from fleetfit.errors import ConfigError, FleetFitError


class Rehearsal:
    """The runs of a comparison with its first seed, assembled when they are asked for."""

    def __init__(self, plan: Planned) -> None:
        """Begin with none assembled."""
        self._plan = plan
        self._entries = [entry for entry in plan.entries() if entry.seed == plan.seeds[0]]
        self._unused: dict[tuple[str, str], tuple[Unused, ...]] = {}

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
        shared = [self._idle(key, self._entries) for key in leaves(plan.base)]
        return [*self._gone(), *dict.fromkeys(str(one) for one in shared if one is not None)]

    def assemblies(self) -> Iterator[tuple[Entry, Assembly]]:
        """Yield every run, assembled."""
        for entry in self._entries:
            yield entry, self._assembled(entry, self._plan.tuning[0])

    def _gone(self) -> Iterator[str]:
        """Yield a note for each key that all rows share and that no run has, since all name something else."""
        for key in leaves(self._plan.base):
            if not any(value_at(entry.table, key) for entry in self._entries):
                yield f"{key} of the file is in no run: every row names something else in its place."

    def _check_kept(self, change: Mapping[str, Any], entries: list[Entry], where: str) -> None:
        """Refuse a key of a row that the settings replace in every run of it.

        Raises:
            ConfigError: There is one.
        """
        for key in leaves(change):
            if not any(value_at(entry.written, key) == value_at(change, key) for entry in entries):
                raise ConfigError(f"{where} {key}: every setting replaces it; leave it out, or out of the settings.")

    def _has(self, entry: Entry, number: int) -> bool:
        """Tell whether a run has a setting of the file, which may be combined with the grid's."""
        each = len(self._plan.settings) // len(self._plan.section.setting)
        return list(self._plan.settings).index(entry.setting) // each == number - 1

    def _refuse(self, keys: Iterable[str], entries: list[Entry], where: str) -> None:
        for key in keys:
            idle = self._idle(key, entries)
            if idle is not None:
                raise ConfigError(f"{where} {key}: {idle} Leave it out.")

    def _idle(self, key: str, entries: list[Entry]) -> Unused | None:
        """Return why no run of several uses a key; None where one does."""
        why = None
        for entry in entries:
            why = next((one for one in self._unused_in(entry) if covers(one.key, key)), None)
            if why is None:
                return None
        return why

    def _unused_in(self, entry: Entry) -> tuple[Unused, ...]:
        place = (entry.row, entry.setting)
        if place not in self._unused:
            found = [self._assembled(entry, choice).unused for choice in self._choices()]
            used_by_one = [{one.key for one in unused} for unused in found]
            everywhere = set.intersection(*used_by_one)
            self._unused[place] = tuple(one for one in found[0] if one.key in everywhere)
        return self._unused[place]

    def _choices(self) -> list[Any]:
        return [choice for choice, _ in itertools.groupby([self._plan.tuning[0], self._plan.tuning[-1]])]

    def _assembled(self, entry: Entry, choice: Any) -> Assembly:
        table: Mapping[str, Any] = merged(entry.table, nested(choice))
        try:
            return assemble(settled(checked(table)))
        except FleetFitError as error:
            error.args = (f"{entry.title}: {error}",)
            raise
