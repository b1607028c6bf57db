"""Dump an `Experiment` as tables and TOML."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import tomli_w

from fleetfit import names
from fleetfit.config.keys import dump_section
from fleetfit.config.merge import Table, flatten
from fleetfit.config.schema import Experiment
from fleetfit.errors import escape_controls

_EMPTY = {"method": ("hooks", "options"), "evaluate": ("metrics",), "recorded": ("latencies", "computing")}
"""Keys that are left out if they are empty. Other empty values are the user's, and refused later."""


def to_table(experiment: Experiment) -> Table:
    """Return the experiment as tables for TOML, without keys that have no value.

    An object in place of a name becomes "<type>", which is never a valid name.
    """
    plain: Table = make_plain(dump_experiment(experiment))
    return plain


def dump_experiment(experiment: Experiment) -> Table:
    """Return the experiment as tables, with the objects in place of names, and without `[compare]`."""
    table: Table = dump_section(experiment)
    del table["compare"]
    if experiment.attack.kind is None and not experiment.attack.settings:
        del table["attack"]
    if not experiment.is_secure:
        del table["secure"]
    if not experiment.is_private:
        del table["privacy"]
    for section, keys in _EMPTY.items():
        table[section] = {key: value for key, value in table[section].items() if key not in keys or value}
    unset = ("name", "init_from", "callbacks", "recorded")
    return {key: value for key, value in table.items() if key not in unset or value}


def to_toml(experiment: Experiment) -> str:
    """Return the experiment as the text of a run file."""
    return escape_controls(tomli_w.dumps(to_table(experiment)))


def make_plain(value: Any) -> Any:
    """Return a value for TOML: without None, tuples as lists, objects as "<type>"."""
    if isinstance(value, Mapping):
        return {str(key): make_plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [make_plain(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    return value if isinstance(value, bool | int | float | str) else f"<{type(value).__name__}>"


def find_object_sections(table: Mapping[str, Any]) -> list[str]:
    """Return the sections of `to_table` that have an object in place of a name."""
    keys = [key for row in names.KINDS.values() for key in row.keys]
    sections = {
        key.partition(".")[0]
        for key, value in flatten(table).items()
        if isinstance(value, str) and value.startswith("<") and any(f"{key}.".startswith(f"{one}.") for one in keys)
    }
    return [section for section in table if section in sections]
