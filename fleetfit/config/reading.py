"""Run files, overrides and keyword arguments become an `Experiment`.

Sections are merged key by key, so an override changes one key and leaves the rest. One rule goes beyond that: where an
override names another method, model, mode of tuning, data set, engine, partition or schedule, the keys that belonged to
the old one go with it; options and single hooks, which go with any method, stay. Overrides and keywords are laid over
each other first, so none of them is lost by the order in which they are given.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from fleetfit import names
from fleetfit.config.budget_file import is_budget_file, read_budget
from fleetfit.config.checking import checked
from fleetfit.config.schema import Asked, Experiment
from fleetfit.config.tables import DEEPEST, check_values, exists, located, read_table, table_of
from fleetfit.config.writing import Table, dumped
from fleetfit.errors import ConfigError, shown

_CHOOSER = {"data": "name", "model": "name", "tuning": "name", "method": "name", "engine": "name",
            "data.partition": "kind", "data.server": "name", "local.schedule": "kind",
            "cohort.choose": "name"}  # fmt: skip
_STAYS = {"data": {"partition", "server"}, "engine": {"device"},
          "method": {"plus", "hooks"}}  # fmt: skip  # keys of the section itself, whatever it names
_PLUGINS = ("data.name", "data.server.name", "model.name", "tuning.name", "method.name", "engine.name", "cohort.choose")

# ---- from files --------------------------------------------------------------------------------------------------


def read_experiment(path: str | Path, overrides: Sequence[str] = (), **sections: Any) -> Experiment:
    """Read a run file; overrides (`a.b=c`) and sections given as keywords win over it, in that order.

    Raises:
        ConfigError: Something in it is wrong.
    """
    base = anchored(read_table(path), located(path, Path.cwd(), "run file").parent)
    return experiment_of(base, overrides, **sections)


def experiment_of(base: Mapping[str, Any] | None = None, overrides: Sequence[str] = (), **sections: Any) -> Experiment:
    """Make an experiment of tables.

    Args:
        base: Tables as in a run file; None or empty means the defaults.
        overrides: `a.b=c`, the value in TOML's notation or else text.
        **sections: Whole sections or single keys of the top level. Objects may stand in for names:
            `model=MyArchitecture()`.

    Raises:
        ConfigError: Something is wrong.
    """
    check_values(base or {})
    check_values(sections)
    here = Path.cwd()
    table = anchored(sections_of(base or {}), here)
    change = changes_of(overrides)
    change = laid(change, anchored(sections_of(sections), here))
    gone: list[str] = []
    found = checked(merged(table, change, gone=gone))
    found._asked = Asked(tuple(leaves(change)), tuple(gone))
    return found


def changes_of(overrides: Sequence[str]) -> Table:
    """Return the tables of overrides, laid over each other: of two for one key the last one counts.

    Raises:
        ConfigError: One of them has not the form of one.
    """
    change: Table = {}
    for text in overrides:
        change = laid(change, anchored(sections_of(override(text)), Path.cwd()))
    return change


def leaves(table: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the dotted keys of tables; an empty table is a key too."""
    for key, value in table.items():
        where = f"{place}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{where}.")
        else:
            yield where


def names_among(table: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of tables that name something to which further keys belong: method.name."""
    places = [f"{section}.{key}" for section, key in _CHOOSER.items()]
    return [place for place in places if value_at(table, place)]


def value_at(table: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    """Return the value at a dotted key of tables, alone in a tuple; none where there is no such key."""
    for name, value in table.items():
        if name == key:
            return (value,)
        if isinstance(value, Mapping) and key.startswith(f"{name}."):
            found = value_at(value, key[len(name) + 1 :])
            if found:
                return found
    return ()


def laid(base: Mapping[str, Any], change: Mapping[str, Any]) -> Table:
    """Return tables with others laid over them, key by key; nothing goes that is not laid over."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = laid(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return result


def override(text: str) -> Table:
    """Return the table that `a.b=c` stands for.

    Raises:
        ConfigError: The text has no such form.
    """
    key, equals, value = text.partition("=")
    path = _path(key) if equals else ()
    if not path:
        raise ConfigError(f'an override is written key=value, such as local.lr=0.03, got "{shown(text)}".')
    check_values({".".join(path): (found := _value(value.strip()))}, "an override")
    for part in reversed(path):
        found = {part: found}
    return dict(found)


def _path(key: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, quoted ones too; none where it is no key of TOML."""
    try:
        found: Any = tomllib.loads(f"{key.strip()} = 0") if key.isprintable() else {}
    except (tomllib.TOMLDecodeError, RecursionError):
        return ()
    parts: list[str] = []
    while isinstance(found, dict):
        if len(found) != 1 or len(parts) == DEEPEST:
            return ()
        ((part, found),) = found.items()
        parts.append(part)
    return tuple(parts)


def _value(text: str) -> Any:
    """Return what a text stands for: a value in TOML's notation, or else itself."""
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (RecursionError, ValueError):  # it is TOML, and will be refused
        pass
    found = table_of(f"value = {text}", "an override")
    return found["value"] if len(found) == 1 else text


def merged(base: Mapping[str, Any], change: Mapping[str, Any], where: str = "", gone: list[str] | None = None) -> Table:
    """Return the base with a change laid over it, table by table; see the module's rule on other names.

    Args:
        base: Tables.
        change: What is laid over them.
        where: The place of both in a run file, dotted.
        gone: Gets the dotted keys that went with another name.
    """
    result = dict(base)
    chooser = _CHOOSER.get(where, "")
    if chooser in change and base.get(chooser, _default_name(where)) != change[chooser]:
        result = {key: value for key, value in result.items() if key in _STAYS.get(where, ())}
        left = {key: value for key, value in base.items() if key not in result and key != chooser}
        if gone is not None:
            gone += leaves(left, f"{where}.")
    for key, value in change.items():
        old = result.get(key)
        inner = f"{where}.{key}" if where else key
        if isinstance(value, Mapping) and (isinstance(old, Mapping) or inner in _CHOOSER):
            result[key] = merged(old if isinstance(old, Mapping) else {}, value, inner, gone)
        else:
            result[key] = dict(value) if isinstance(value, Mapping) else value
    return result


def _default_name(where: str) -> Any:
    section: Any = Experiment()
    for part in where.split("."):
        section = getattr(section, part)
    return section if isinstance(section, str) else getattr(section, _CHOOSER[where], None)  # cohort.choose is a name


def anchored(table: Mapping[str, Any], folder: Path) -> Table:
    """Return the tables with relative paths of `file.py` plug-ins, plans and data made absolute, seen from a folder.

    Budget files are read: what they say stands in the tables, so that a run can be repeated without them.

    Raises:
        ConfigError: A budget file cannot be read.
    """
    result: Table = _copied(table)
    for place in _PLUGINS:
        *sections, key = place.split(".")
        inside: Any = result
        for section in sections:
            inside = inside.get(section) if isinstance(inside, dict) else None
        if isinstance(inside, dict) and isinstance(inside.get(key), dict):
            inside, key = inside[key], "name"
        if isinstance(inside, dict) and isinstance(inside.get(key), str):
            inside[key] = names.anchored(inside[key], folder)
    method = result.get("method")
    if isinstance(method, dict):
        if isinstance(method.get("hooks"), dict):
            method["hooks"] = {
                k: names.anchored(v, folder) if isinstance(v, str) else v for k, v in method["hooks"].items()
            }
        if isinstance(method.get("plus"), dict):
            method["plus"] = {names.anchored(str(k), folder): v for k, v in method["plus"].items()}
    _anchor_files(result, folder)
    compare = result.get("compare")
    for part in ("row", "setting"):
        if isinstance(compare, dict) and isinstance(compare.get(part), list):
            compare[part] = [anchored(one, folder) if isinstance(one, dict) else one for one in compare[part]]
    return result


def _anchor_files(table: Table, folder: Path) -> None:
    fleet = table.get("fleet")
    data, model = table.get("data"), table.get("model")
    availability = fleet.get("availability") if isinstance(fleet, dict) else None
    server = data.get("server") if isinstance(data, dict) else None
    for place, where, key in (
        *((data, "[data]", key) for key in ("folder", "file", "tokenizer")),
        *((server, "[data] server", key) for key in ("folder", "file", "tokenizer")),
        (model, "[model]", "checkpoint"),
        (availability, "[fleet] availability", "trace"),
        (table, "", "start"),
    ):
        if isinstance(place, dict) and isinstance(place.get(key), str):
            if not place[key] and place is not table:
                raise ConfigError(f"{where} {key}: is empty; name a place, or leave it out.")
            if not place[key]:
                continue
            path = located(place[key], folder, f"{where} {key}".strip())
            if exists(path):  # else it may lie in FLEETFIT_DATA, which the data set knows
                place[key] = str(path)
    if isinstance(fleet, dict) and isinstance(fleet.get("levels"), str) and fleet["levels"].endswith(".toml"):
        fleet["levels"] = str(located(fleet["levels"], folder, "[fleet] levels"))
    if isinstance(fleet, dict) and isinstance(fleet.get("groups"), list):
        fleet["groups"] = [_with_budget(group, folder) for group in fleet["groups"]]


def _with_budget(group: Any, folder: Path) -> Any:
    """Return a group with what its budget file says, if it names one; it is called as the file is."""
    if not isinstance(group, dict) or not is_budget_file(group.get("budget")):
        return group
    path = located(group["budget"], folder, "[fleet] groups.budget")
    return {"name": path.stem} | group | read_budget(path)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def sections_of(table: Mapping[str, Any]) -> Table:
    """Return tables with sections where a name stands for one: `method = "fedavg"`."""
    return {key: _as_section(key, value) for key, value in table.items()}


def _as_section(key: str, value: Any) -> Any:
    """Let a name, an object or a section stand for a whole section, and a path for its text."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, pydantic.BaseModel):
        return dumped(value, only_set=True)
    if isinstance(value, Mapping):
        if isinstance(value.get("name"), str) or "name" not in value:
            return dict(value)
        return {**value, "name": _import_path(value["name"])}
    return {"name": _import_path(value)} if key in _CHOOSER else value


def _import_path(thing: Any) -> Any:
    """Return `module:function` for a function or class that can be imported by name, else the thing itself."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not callable(thing) or module in (None, "__main__") or not name.isidentifier():
        return thing
    return f"{module}:{name}" if getattr(sys.modules.get(str(module)), name, None) is thing else thing
