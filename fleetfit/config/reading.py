"""Run files, overrides and keyword arguments become an `Experiment`.

Sections are merged key by key, so an override changes one key and leaves the rest. One rule goes beyond that: where an
override names another method, model, mode of tuning, data set, engine, partition or schedule, the keys that belonged to
the old one go with it.
"""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from fleetfit import names
from fleetfit.config.budget_file import is_budget_file, read_budget
from fleetfit.config.checking import checked
from fleetfit.config.schema import Experiment
from fleetfit.config.tables import read_table
from fleetfit.config.writing import Table, dumped
from fleetfit.errors import ConfigError

_CHOOSER = {"data": "name", "model": "name", "tuning": "name", "method": "name", "engine": "name",
            "data.partition": "kind", "data.server": "name", "local.schedule": "kind",
            "cohort.choose": "name"}  # fmt: skip
_STAYS = {"data": {"partition", "server"}, "engine": {"device"}}  # keys of the section itself, whatever it names
_PLUGINS = ("data.name", "data.server.name", "model.name", "tuning.name", "method.name", "engine.name", "cohort.choose")

# ---- from files --------------------------------------------------------------------------------------------------


def read_experiment(path: str | Path, overrides: Sequence[str] = (), **sections: Any) -> Experiment:
    """Read a run file; overrides (`a.b=c`) and sections given as keywords win over it, in that order.

    Raises:
        ConfigError: Something in it is wrong.
    """
    path = Path(path).expanduser()
    base = anchored(read_table(path), path.resolve().parent)
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
    table = anchored({key: _as_table(key, value) for key, value in (base or {}).items()}, Path.cwd())
    for text in overrides:
        table = merged(table, anchored(override(text), Path.cwd()))
    given = {key: _as_table(key, value) for key, value in sections.items()}
    return checked(merged(table, anchored(given, Path.cwd())))


def override(text: str) -> Table:
    """Return the table that `a.b=c` stands for.

    Raises:
        ConfigError: The text has no such form.
    """
    key, equals, value = text.partition("=")
    path = [part.strip().strip('"') for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(f'an override is written key=value, such as local.lr=0.03, got "{text}".')
    try:
        found: Any = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        found = value.strip()
    for part in reversed(path):
        found = {part: found}
    return dict(found)


def merged(base: Mapping[str, Any], change: Mapping[str, Any], where: str = "") -> Table:
    """Return the base with a change laid over it, table by table; see the module's rule on other names."""
    result = dict(base)
    chooser = _CHOOSER.get(where, "")
    if chooser in change and base.get(chooser, _default_name(where)) != change[chooser]:
        result = {key: value for key, value in result.items() if key in _STAYS.get(where, ())}
    for key, value in change.items():
        old = result.get(key)
        inner = f"{where}.{key}" if where else key
        if isinstance(value, Mapping) and (isinstance(old, Mapping) or inner in _CHOOSER):
            result[key] = merged(old if isinstance(old, Mapping) else {}, value, inner)
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
    for place, key in (
        *((place, key) for place in (data, server) for key in ("folder", "file", "tokenizer")),
        (model, "checkpoint"),
        (availability, "trace"),
        (table, "start"),
    ):
        if isinstance(place, dict) and isinstance(place.get(key), str) and place[key]:
            path = folder / Path(place[key]).expanduser()
            if path.exists():  # else it may lie in FLEETFIT_DATA, which the data set knows
                place[key] = str(path.resolve())
    if isinstance(fleet, dict) and isinstance(fleet.get("levels"), str) and fleet["levels"].endswith(".toml"):
        fleet["levels"] = str((folder / Path(fleet["levels"]).expanduser()).resolve())
    if isinstance(fleet, dict) and isinstance(fleet.get("groups"), list):
        fleet["groups"] = [_with_budget(group, folder) for group in fleet["groups"]]


def _with_budget(group: Any, folder: Path) -> Any:
    """Return a group with what its budget file says, if it names one; it is called as the file is."""
    if not isinstance(group, dict) or not is_budget_file(group.get("budget")):
        return group
    path = (folder / Path(group["budget"]).expanduser()).resolve()
    return {"name": path.stem} | group | read_budget(path)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def _as_table(key: str, value: Any) -> Any:
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
