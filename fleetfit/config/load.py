"""Run files, overrides and keyword arguments become an `Experiment`, in one pass.

A run file is read, its paths are resolved, overrides and keywords are merged into it (`fleetfit.config.merge`), and the
tables are validated (`fleetfit.config.parse`). Overrides and keywords are merged first, so that their order does not
matter. `fleetfit profile` writes budget files, which a node's configuration and the groups of a run file name.
"""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydantic

from fleetfit import names
from fleetfit.config.defaults import detect_data_source, wrap_in_memory_data
from fleetfit.config.dump import dump_section
from fleetfit.config.merge import CHOOSERS, Table, deep_merge, list_keys, merge_tables
from fleetfit.config.parse import parse_experiment, parse_section
from fleetfit.config.schema import Experiment
from fleetfit.config.section import NotNegative, Positive, Section, Unit
from fleetfit.config.toml import (
    DEEPEST,
    check_values,
    find_base_folder,
    parse_toml,
    path_exists,
    read_toml,
    resolve_path,
)
from fleetfit.data.partition import KINDS
from fleetfit.errors import ConfigError, truncate
from fleetfit.profiles import PROFILES

# ---- a budget file -------------------------------------------------------------------------------------------------


class BudgetFile(Section):
    """What a budget file holds.

    Attributes:
        budget: What the device affords, as in `[fleet] groups`.
        tolerance: How far a model may exceed that, as a fraction of it; what names the file says it otherwise.
    """

    budget: Positive | Unit | dict[str, Positive | Unit]
    tolerance: NotNegative | None = None


def is_budget_file(budget: Any) -> bool:
    """Tell whether a budget is the name of a file and no amount."""
    return isinstance(budget, str) and budget.endswith(".toml")


def read_budget_file(path: Path) -> dict[str, Any]:
    """Return what a budget file says: `budget`, and `tolerance` where the file has one.

    Raises:
        ConfigError: The file cannot be read, or says something else.
    """
    try:
        found = parse_section(BudgetFile, read_toml(path))
    except ConfigError as error:
        raise ConfigError(f"budget file {path}: {error}", key=error.key, path=path) from None
    return {"budget": found.budget} | ({} if found.tolerance is None else {"tolerance": found.tolerance})


_KIND_OF = {"data.name": "data", "data.server.name": "data", "model.name": "models", "peft.name": "peft",
            "method.name": "methods", "engine.name": "engines", "cohort.choose": "selection",
            "attack.kind": "attacks"}  # fmt: skip
_PLUGINS = tuple(_KIND_OF)

# ---- from files --------------------------------------------------------------------------------------------------


def load_experiment(
    source: str | Path | Mapping[str, Any] | Experiment | None = None,
    overrides: Sequence[str] = (),
    is_complete: bool = False,
    **keywords: Any,
) -> Experiment:
    """Load the description of a run: read, resolve paths, merge, validate.

    Args:
        source: A run file, whose name is the run's unless it has one; its tables, or an `Experiment`; the defaults when
            it is left out.
        overrides: `a.b=c`, the value in TOML's notation or else text. They win over the source.
        is_complete: Whether the tables hold every default already, as those of a run folder.
        **keywords: Whole sections or single keys of the top level, which win over both. Objects may stand in for names:
            `model=MyArchitecture()`.

    Raises:
        ConfigError: Something in it is wrong.
    """
    here, folder = Path.cwd(), Path.cwd()
    if isinstance(source, str | Path):
        table, folder = read_toml(source), find_base_folder(source)
    elif isinstance(source, Experiment):
        table = dump_section(source, only_set=True)
    else:
        table = dict(source or {})
        check_values(table)
    check_values(keywords)
    base = resolve_paths(expand_sections(table), folder)
    change = deep_merge(parse_overrides(overrides), resolve_paths(expand_sections(keywords), here))
    dropped: list[str] = []
    experiment = parse_experiment(merge_tables(base, change, dropped=dropped), is_complete)
    if isinstance(source, str | Path) and not experiment.name:
        experiment = experiment.model_copy(update={"name": Path(source).stem})
    experiment._asked = replace(experiment._asked, keys=tuple(list_keys(change)), gone=tuple(dropped))
    return experiment


def parse_overrides(overrides: Sequence[str]) -> Table:
    """Return the tables of overrides, laid over each other: of two for one key the last one counts.

    Raises:
        ConfigError: One of them has not the form of one.
    """
    change: Table = {}
    for text in overrides:
        change = deep_merge(change, resolve_paths(expand_sections(parse_override(text)), Path.cwd()))
    return change


def parse_override(text: str) -> Table:
    """Return the table that `a.b=c` stands for.

    Raises:
        ConfigError: The text has no such form.
    """
    key, equals, value = text.partition("=")
    path = _path(key) if equals else ()
    if not path:
        raise ConfigError(f'an override is written key=value, such as local.lr=0.03, got "{truncate(text)}".')
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
    found = parse_toml(f"value = {text}", "an override")
    return found["value"] if len(found) == 1 else text


def resolve_paths(table: Mapping[str, Any], folder: Path) -> Table:
    """Return the tables with relative paths of `file.py` plug-ins, plans and data made absolute, seen from a folder.

    Budget files are read, and their values replace them, so that a run can be repeated without the files.

    Raises:
        ConfigError: A budget file cannot be read.
    """
    result: Table = _copied(table)
    if isinstance(result.get("data"), dict):
        result["data"] = _data_anchored(result["data"], folder)
    for place in _PLUGINS:
        *sections, key = place.split(".")
        inside: Any = result
        for section in sections:
            inside = inside.get(section) if isinstance(inside, dict) else None
        if isinstance(inside, dict) and isinstance(inside.get(key), dict):
            inside, key = inside[key], "name"
        if isinstance(inside, dict) and isinstance(inside.get(key), str):
            inside[key] = names.make_absolute(names.match_name(_KIND_OF[place], inside[key]), folder)
    _understand(result)
    if isinstance(result.get("method"), dict):
        _anchor_parts(result["method"], folder)
    _anchor_told(result, folder)
    _anchor_files(result, folder)
    compare = result.get("compare")
    for part in ("row", "setting"):
        if isinstance(compare, dict) and isinstance(compare.get(part), list):
            compare[part] = [resolve_paths(one, folder) if isinstance(one, dict) else one for one in compare[part]]
    return result


def _understand(table: Table) -> None:
    """Take names that are no plug-ins however they are written, too: kinds of a partition, profiles of devices."""
    division = table.get("data", {}).get("partition") if isinstance(table.get("data"), dict) else None
    if isinstance(division, dict) and "kind" in division:
        division["kind"] = names.find_match(division["kind"], KINDS)
    groups = table.get("fleet", {}).get("groups") if isinstance(table.get("fleet"), dict) else None
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and "profile" in group:
            group["profile"] = names.find_match(group["profile"], PROFILES)


def _anchor_parts(method: Table, folder: Path) -> None:
    """Make places of single hooks and of options absolute."""
    if isinstance(method.get("hooks"), dict):
        method["hooks"] = {
            k: names.make_absolute(v, folder) if isinstance(v, str) else v for k, v in method["hooks"].items()
        }
    if isinstance(method.get("plus"), dict):
        plus = {names.match_name("options", str(key)): value for key, value in method["plus"].items()}
        method["plus"] = {names.make_absolute(key, folder): value for key, value in plus.items()}


def _anchor_told(table: Table, folder: Path) -> None:
    """Make the places of files absolute in what is measured and told: `evaluate.metrics` and `callbacks`."""
    evaluate = table.get("evaluate")
    if isinstance(evaluate, dict) and isinstance(evaluate.get("metrics"), list):
        named = evaluate["metrics"]
        evaluate["metrics"] = [names.make_absolute(one, folder) if isinstance(one, str) else one for one in named]
    if "callbacks" in table:
        table["callbacks"] = _callbacks_anchored(table["callbacks"], folder)


def _callbacks_anchored(callbacks: Any, folder: Path) -> Any:
    """Return `callbacks`, one or a list of them, with the places of files made absolute."""
    if isinstance(callbacks, list):
        return [_callbacks_anchored(one, folder) for one in callbacks]
    if isinstance(callbacks, dict) and isinstance(callbacks.get("name"), str):
        return {**callbacks, "name": names.make_absolute(callbacks["name"], folder)}
    return names.make_absolute(callbacks, folder) if isinstance(callbacks, str) else callbacks


def _data_anchored(data: Table, folder: Path) -> Table:
    """Return `[data]` with the data at its paths found, and the place of a partition of one's own made absolute."""
    division = data.get("partition")
    if isinstance(division, dict) and isinstance(division.get("kind"), str):
        division["kind"] = names.make_absolute(division["kind"], folder)
    if isinstance(data.get("server"), dict):
        found = detect_data_source(data["server"], folder, "[data] server")
        data["server"] = {k: v for k, v in found.items() if k != "partition" or k in data["server"]}  # is not divided
    return detect_data_source(data, folder)


_DATA_FILES = ("folder", "file", "tokenizer", "columns")
"""Keys of a data set that name files."""


def _anchor_files(table: Table, folder: Path) -> None:
    fleet = table.get("fleet")
    data, model = table.get("data"), table.get("model")
    availability = fleet.get("availability") if isinstance(fleet, dict) else None
    server = data.get("server") if isinstance(data, dict) else None
    for place, where, key in (
        *((data, "[data]", key) for key in _DATA_FILES),
        *((server, "[data] server", key) for key in _DATA_FILES),
        (model, "[model]", "checkpoint"),
        (availability, "[fleet] availability", "trace"),
        (table, "", "start"),
    ):
        if isinstance(place, dict) and isinstance(place.get(key), str):
            if not place[key] and place is not table:
                raise ConfigError(f"{where} {key}: is empty; name a place, or leave it out.")
            if not place[key]:
                continue
            path = resolve_path(place[key], folder, f"{where} {key}".strip())
            if path_exists(path):  # else the data set looks in FLEETFIT_DATA
                place[key] = str(path)
    if isinstance(fleet, dict) and isinstance(fleet.get("levels"), str) and fleet["levels"].endswith(".toml"):
        fleet["levels"] = str(resolve_path(fleet["levels"], folder, "[fleet] levels"))
    if isinstance(fleet, dict) and isinstance(fleet.get("groups"), list):
        fleet["groups"] = [_with_budget(group, folder) for group in fleet["groups"]]


def _with_budget(group: Any, folder: Path) -> Any:
    """Return a group with what its budget file says, if it names one; it is called as the file is."""
    if not isinstance(group, dict) or not is_budget_file(group.get("budget")):
        return group
    path = resolve_path(group["budget"], folder, "[fleet] groups.budget")
    return {"name": path.stem} | group | read_budget_file(path)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def expand_sections(table: Mapping[str, Any]) -> Table:
    """Return tables in which a name alone has become a section: `method = "fedavg"`."""
    if "data" in table:
        table = {**table, "data": wrap_in_memory_data(table["data"])}
    return {key: _as_section(key, value) for key, value in table.items()}


def _as_section(key: str, value: Any) -> Any:
    """Let a name, an object or a section stand for a whole section, and a path for its text."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, pydantic.BaseModel):
        return dump_section(value, only_set=True)
    if isinstance(value, Mapping):
        if isinstance(value.get("name"), str) or "name" not in value:
            return dict(value)
        return {**value, "name": _import_path(value["name"])}
    return {"name": _import_path(value)} if CHOOSERS.get(key) == "name" else value


def _import_path(thing: Any) -> Any:
    """Return `module:function` for a function or class that can be imported by name, else the thing itself."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not callable(thing) or module in (None, "__main__") or not name.isidentifier():
        return thing
    return f"{module}:{name}" if getattr(sys.modules.get(str(module)), name, None) is thing else thing
