"""Merge the tables of a run file, key by key.

An override changes one key and keeps the others, with one exception: if it names another method, model, mode of
fine-tuning, data set, engine, partition, optimizer or schedule, the keys of the old one are dropped. Options and single
hooks stay, because they fit any method.
"""

from collections.abc import Mapping
from typing import Any

from fleetfit import names
from fleetfit.config.keys import get_value
from fleetfit.config.schema import Experiment
from fleetfit.core.local import OPTIMIZER_KEYS, LocalSection

Table = dict[str, Any]

_KEYS = {key: row for row in names.KINDS.values() for key in row.keys if key.endswith((".name", ".kind"))}
CHOOSERS = {"cohort.selection": "name", "local": "optimizer", "local.schedule": "kind",
            **{key.rpartition(".")[0]: key.rpartition(".")[2] for key in _KEYS}}  # fmt: skip
"""By section, the key that names a component to which further keys belong."""
_SHARED = {"local": LocalSection.model_fields.keys() - {"optimizer", *OPTIMIZER_KEYS},
           **{key.rpartition(".")[0]: row.shared for key, row in _KEYS.items()}}  # fmt: skip
"""By section, the keys that fit any component."""


def flatten(table: Mapping[str, Any], prefix: str = "") -> Table:
    """Return the values of tables by dotted key. An empty table counts as a value."""
    flat: Table = {}
    for key, value in table.items():
        inner = f"{prefix}{key}"
        flat |= flatten(value, f"{inner}.") if isinstance(value, Mapping) and value else {inner: value}
    return flat


def drop_absent(sections: Mapping[str, Any]) -> Table:
    """Return the sections that are not None."""
    return {key: value for key, value in sections.items() if value is not None}


def deep_merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> Table:
    """Return the base with a change merged into it, key by key. No key is dropped."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = deep_merge(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return result


def merge_tables(
    base: Mapping[str, Any], change: Mapping[str, Any], where: str = "", dropped: list[str] | None = None
) -> Table:
    """Return the base with a change merged into it. A new name drops keys, by the module's rule.

    Args:
        base: Tables.
        change: Tables whose values win.
        where: Dotted key of both in a run file.
        dropped: Receives the dotted keys that are dropped.
    """
    result = dict(base)
    chooser = CHOOSERS.get(where)
    if chooser is not None and chooser in change and base.get(chooser, _find_default_name(where)) != change[chooser]:
        result = {key: value for key, value in result.items() if key in _SHARED.get(where, ())}
        if dropped is not None:
            foreign = {key: value for key, value in base.items() if key not in result and key != chooser}
            dropped += flatten(foreign, f"{where}.")
    for key, value in change.items():
        old = result.get(key)
        inner = f"{where}.{key}" if where else key
        if isinstance(value, Mapping) and (isinstance(old, Mapping) or inner in CHOOSERS):
            result[key] = merge_tables(old if isinstance(old, Mapping) else {}, value, inner, dropped)
        else:
            result[key] = dict(value) if isinstance(value, Mapping) else value
    return result


def _find_default_name(where: str) -> Any:
    section = get_value(Experiment(), where)
    return (
        section if isinstance(section, str) else getattr(section, CHOOSERS[where], None)
    )  # cohort.selection is a name
