"""Tables of a run file are laid over each other, key by key.

An override changes one key and leaves the rest. One rule goes beyond that: where an override names another method,
model, way of fine-tuning, data set, engine, partition, optimiser or schedule, the keys that belonged to the old one go
with it. Options and single hooks, which go with any method, stay.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fleetfit.config.schema import EngineSection, Experiment, LocalSection
from fleetfit.values.local import OF_OPTIMISERS

Table = dict[str, Any]

CHOOSERS = {"data": "name", "model": "name", "peft": "name", "method": "name", "engine": "name",
            "attack": "kind", "data.partition": "kind", "data.server": "name", "local": "optimiser",
            "local.schedule": "kind", "cohort.choose": "name"}  # fmt: skip
# keys of the section itself, whatever it names
_STAYS = {"data": {"partition", "server"}, "engine": {"device", *EngineSection.model_fields} - {"name"},
          "method": {"plus", "hooks"}, "attack": {"share", "among"},
          "local": LocalSection.model_fields.keys() - {"optimiser", *OF_OPTIMISERS}}  # fmt: skip


def list_keys(table: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the dotted keys of tables; an empty table is a key too."""
    for key, value in table.items():
        where = f"{place}{key}"
        if isinstance(value, Mapping) and value:
            yield from list_keys(value, f"{where}.")
        else:
            yield where


def list_choosers(table: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of tables that name something to which further keys belong: method.name."""
    places = [f"{section}.{key}" for section, key in CHOOSERS.items()]
    return [place for place in places if find_value(table, place)]


def find_value(table: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    """Return the value at a dotted key of tables, alone in a tuple; none where there is no such key."""
    for name, value in table.items():
        if name == key:
            return (value,)
        if isinstance(value, Mapping) and key.startswith(f"{name}."):
            found = find_value(value, key[len(name) + 1 :])
            if found:
                return found
    return ()


def deep_merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> Table:
    """Return tables with others laid over them, key by key; nothing goes that is not laid over."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = deep_merge(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return result


def merge_tables(
    base: Mapping[str, Any], change: Mapping[str, Any], where: str = "", dropped: list[str] | None = None
) -> Table:
    """Return the base with a change laid over it, table by table; see the module's rule on other names.

    Args:
        base: Tables.
        change: What is laid over them.
        where: The place of both in a run file, dotted.
        dropped: Gets the dotted keys that went with another name.
    """
    result = dict(base)
    chooser = CHOOSERS.get(where)
    if chooser is not None and chooser in change and base.get(chooser, _default_name(where)) != change[chooser]:
        result = {key: value for key, value in result.items() if key in _STAYS.get(where, ())}
        left = {key: value for key, value in base.items() if key not in result and key != chooser}
        if dropped is not None:
            dropped += list_keys(left, f"{where}.")
    for key, value in change.items():
        old = result.get(key)
        inner = f"{where}.{key}" if where else key
        if isinstance(value, Mapping) and (isinstance(old, Mapping) or inner in CHOOSERS):
            result[key] = merge_tables(old if isinstance(old, Mapping) else {}, value, inner, dropped)
        else:
            result[key] = dict(value) if isinstance(value, Mapping) else value
    return result


def _default_name(where: str) -> Any:
    section: Any = Experiment()
    for part in where.split("."):
        section = getattr(section, part)
    return section if isinstance(section, str) else getattr(section, CHOOSERS[where], None)  # cohort.choose is a name
