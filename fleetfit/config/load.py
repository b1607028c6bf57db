"""Load an `Experiment` from a run file, overrides and keyword arguments, in one pass.

The steps: read the run file, resolve its paths, merge overrides and keywords (`fleetfit.config.merge`), and validate
the tables (`fleetfit.config.parse`). Overrides and keywords are merged with each other first, so their order does not
matter. Nodes' configurations and groups of a run file may name budget files, which `fleetfit profile` writes.
"""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydantic

from fleetfit import files, names
from fleetfit.config.detect import detect_data_source, wrap_in_memory_data
from fleetfit.config.dump import dump_section
from fleetfit.config.merge import CHOOSERS, Table, deep_merge, list_keys, merge_tables
from fleetfit.config.parse import parse_experiment, parse_section
from fleetfit.config.schema import Experiment
from fleetfit.config.toml import (
    DEEPEST,
    check_paths,
    check_values,
    find_base_folder,
    parse_toml,
    path_exists,
    read_toml,
    resolve_path,
)
from fleetfit.data.partition import KINDS
from fleetfit.errors import COMMAND, ConfigError, truncate
from fleetfit.profiles import PROFILES
from fleetfit.values.section import NotNegative, Positive, Section, Unit

# ---- a budget file -------------------------------------------------------------------------------------------------


class BudgetFile(Section):
    """The keys of a budget file.

    Attributes:
        budget: Budget of the device, as in `[fleet] groups`.
        tolerance: Fraction by which a model may exceed it. A tolerance of the group or node that names the file wins.
    """

    budget: Positive | Unit | dict[str, Positive | Unit]
    tolerance: NotNegative | None = None


def is_budget_file(budget: Any) -> bool:
    """Return whether a budget is the name of a file."""
    return isinstance(budget, str) and budget.endswith(".toml")


def read_budget_file(path: Path) -> dict[str, Any]:
    """Return `budget` of a budget file, and `tolerance` if the file has one.

    Raises:
        ConfigError: The file cannot be read, or has other keys.
    """
    try:
        section = parse_section(BudgetFile, read_toml(path))
    except ConfigError as error:
        raise ConfigError(f"budget file {path}: {error}", key=error.key, path=path) from None
    return {"budget": section.budget} | ({} if section.tolerance is None else {"tolerance": section.tolerance})


# ---- a run file ----------------------------------------------------------------------------------------------------


def read_run_file(path: str | Path) -> Table:
    """Return the tables of a run file.

    Raises:
        ConfigError: The file cannot be read or is not a run file. For a folder, and for a file of data, the message has
            the command that takes it.
    """
    path = files.parse_path(path)
    if path_exists(path) and path.is_dir():
        raise ConfigError(f"{path} is a folder, not a run file. {_suggest_command(path)}", path=path)
    try:
        return read_toml(path)
    except ConfigError as error:
        if error.key or path.suffix == ".toml" or not path_exists(path):
            raise
        raise ConfigError(f"{error} For data, use the key data.path: --set data.path={path}", path=path) from None


def _suggest_command(folder: Path) -> str:
    """Return what takes a folder that is not a run file, as a sentence."""
    if (folder / "config.toml").is_file():
        return f"It has a run. Continue it with:{COMMAND}fleetfit resume {folder}"
    if any((folder / name).is_file() for name in ("results.json", "runs.json")):
        return (
            f"It has a comparison, which the command that started it continues. See it with:{COMMAND}"
            f"fleetfit watch {folder}"
        )
    if run_files := sorted(folder.glob("*.toml")):
        return f"Name a file in it, such as {run_files[0]}."
    return f"For data, use the key data.path: --set data.path={folder}"


def load_experiment(
    source: str | Path | Mapping[str, Any] | Experiment | None = None,
    overrides: Sequence[str] = (),
    is_complete: bool = False,
    **keywords: Any,
) -> Experiment:
    """Load the description of a run: read, resolve paths, merge, validate.

    Args:
        source: A run file, its tables, or an `Experiment`; the defaults if left out. The file's name is the default
            name of the run.
        overrides: `a.b=c`, with the value in TOML's notation or as text. They win over the source.
        is_complete: Whether the tables already hold every default, as those of a run folder do.
        **keywords: Whole sections or single keys of the top level, which win over both. Objects may replace names:
            `model=MyArchitecture()`.

    Raises:
        ConfigError: A file, an override or a keyword is wrong.
    """
    working_folder, folder = Path.cwd(), Path.cwd()
    if isinstance(source, str | Path):
        table, folder = read_run_file(source), find_base_folder(source)
    elif isinstance(source, Experiment):
        table = dump_section(source, only_set=True)
    else:
        table = dict(source or {})
        check_values(table)
    check_values(keywords)
    base = resolve_paths(expand_sections(table), folder)
    change = deep_merge(parse_overrides(overrides), resolve_paths(expand_sections(keywords), working_folder))
    dropped: list[str] = []
    experiment = parse_experiment(merge_tables(base, change, dropped=dropped), is_complete)
    if isinstance(source, str | Path) and not experiment.name:
        experiment = experiment.model_copy(update={"name": Path(source).stem})
    experiment._overrides = replace(experiment.overrides, keys=tuple(list_keys(change)), dropped=tuple(dropped))
    return experiment


def parse_overrides(overrides: Sequence[str]) -> Table:
    """Return the merged tables of overrides; the last override of a key wins.

    Raises:
        ConfigError: An override is malformed.
    """
    change: Table = {}
    for text in overrides:
        change = deep_merge(change, resolve_paths(expand_sections(parse_override(text)), Path.cwd()))
    return change


def parse_override(text: str) -> Table:
    """Return the table of `a.b=c`.

    Raises:
        ConfigError: The override is malformed.
    """
    key, equals, content = text.partition("=")
    path = _parse_key(key) if equals else ()
    if not path:
        raise ConfigError(f'an override must be key=value, such as local.lr=0.03; got "{truncate(text)}".')
    value = _parse_value(content.strip())
    check_values({".".join(path): value}, "an override")
    for part in reversed(path):
        value = {part: value}
    check_paths(value, "an override")
    return dict(value)


def _parse_key(key: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, which may be quoted; empty for a malformed key."""
    try:
        value: Any = tomllib.loads(f"{key.strip()} = 0") if key.isprintable() else {}
    except (tomllib.TOMLDecodeError, RecursionError):
        return ()
    parts: list[str] = []
    while isinstance(value, dict):
        if len(value) != 1 or len(parts) == DEEPEST:
            return ()
        ((part, value),) = value.items()
        parts.append(part)
    return tuple(parts)


def _parse_value(text: str) -> Any:
    """Return the value of a text in TOML's notation, or else the text."""
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if not (text.startswith('"') and "\\" in text):
            return text
    except (RecursionError, ValueError):  # valid TOML, which is refused below
        pass
    table = parse_toml(f"value = {text}", "an override")
    return table["value"] if len(table) == 1 else text


# ---- paths and names in a run file ---------------------------------------------------------------------------------

_KINDS = {"data.name": "data", "data.server.name": "data", "model.name": "models", "peft.name": "peft",
          "method.name": "methods", "engine.name": "engines", "cohort.choose": "selection",
          "attack.kind": "attacks"}  # fmt: skip
"""Kind of the name at each key that has one."""
_DATA_FILES = ("folder", "file", "tokenizer", "columns")
"""Keys of a data set that name files."""


def resolve_paths(table: Mapping[str, Any], folder: Path) -> Table:
    """Return the tables with absolute paths and the exact names of built-ins.

    Values of budget files replace the files' names, so that a run can be repeated without the files. Values are not
    validated yet, so each section may be of any type.

    Args:
        table: Tables as in a run file.
        folder: The folder to which paths are relative.

    Raises:
        ConfigError: A path is malformed, or a budget file cannot be read.
    """
    result: Table = _copy(table)
    if isinstance(result.get("data"), dict):
        result["data"] = _resolve_data(result["data"], folder)
    _resolve_components(result, folder)
    _resolve_files(result, folder)
    fleet, compare = _get_table(result, "fleet"), _get_table(result, "compare")
    if isinstance(fleet.get("groups"), list):
        fleet["groups"] = [
            _resolve_group(group, folder, f"fleet.groups.{i}.budget") for i, group in enumerate(fleet["groups"])
        ]
    for part in ("row", "setting"):
        if isinstance(compare.get(part), list):
            compare[part] = [resolve_paths(one, folder) if isinstance(one, dict) else one for one in compare[part]]
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list | tuple) else value


def _get_table(table: Table, key: str) -> Table:
    """Return the table at a key; a new empty one if the value is not a table."""
    inner = table.get(key)
    return inner if isinstance(inner, dict) else {}


def _make_absolute(name: Any, folder: Path) -> Any:
    return names.make_absolute(name, folder) if isinstance(name, str) else name


def _resolve_data(data: Table, folder: Path) -> Table:
    """Return `[data]` with detected data sets for its paths, and the resolved name of its partition."""
    partition = _get_table(data, "partition")
    if "kind" in partition:
        partition["kind"] = names.find_match(_make_absolute(partition["kind"], folder), KINDS)
    if isinstance(data.get("server"), dict):
        server = detect_data_source(data["server"], folder, "[data] server")
        data["server"] = {
            k: v for k, v in server.items() if k != "partition" or k in data["server"]
        }  # the server's data have no partition
    return detect_data_source(data, folder)


def _resolve_components(table: Table, folder: Path) -> None:
    """Resolve the names of components, hooks, options, metrics and callbacks."""
    for key, kind in _KINDS.items():
        *sections, name = key.split(".")
        section = table
        for part in sections:
            section = _get_table(section, part)
        if isinstance(section.get(name), dict):
            section, name = section[name], "name"
        if isinstance(section.get(name), str):
            section[name] = names.make_absolute(names.match_name(kind, section[name]), folder)
    method, evaluate = _get_table(table, "method"), _get_table(table, "evaluate")
    hooks, plus, metrics = method.get("hooks"), method.get("plus"), evaluate.get("metrics")
    if isinstance(hooks, dict):
        method["hooks"] = {key: _make_absolute(name, folder) for key, name in hooks.items()}
    if isinstance(plus, dict):
        method["plus"] = {
            _make_absolute(names.match_name("options", str(key)), folder): settings for key, settings in plus.items()
        }
    if isinstance(metrics, list):
        evaluate["metrics"] = [_make_absolute(name, folder) for name in metrics]
    if "callbacks" in table:
        table["callbacks"] = _resolve_callbacks(table["callbacks"], folder)


def _resolve_callbacks(callbacks: Any, folder: Path) -> Any:
    if isinstance(callbacks, list):
        return [_resolve_callbacks(one, folder) for one in callbacks]
    if isinstance(callbacks, dict) and isinstance(callbacks.get("name"), str):
        return {**callbacks, "name": names.make_absolute(callbacks["name"], folder)}
    return _make_absolute(callbacks, folder)


def _resolve_files(table: Table, folder: Path) -> None:
    """Make paths of files absolute if they exist; otherwise a data set looks in FLEETFIT_DATA."""
    data, fleet = _get_table(table, "data"), _get_table(table, "fleet")
    for prefix, section, keys in (
        ("data", data, _DATA_FILES),
        ("data.server", _get_table(data, "server"), _DATA_FILES),
        ("model", _get_table(table, "model"), ("checkpoint",)),
        ("fleet.availability", _get_table(fleet, "availability"), ("trace",)),
        ("", table, ("start",)),
    ):
        for key in keys:
            file = section.get(key)
            if not isinstance(file, str) or (not file and key == "start"):
                continue
            first, _, inner = prefix.partition(".")
            where = " ".join(filter(None, [first and f"[{first}]", inner, key]))
            dotted = f"{prefix}.{key}" if prefix else key
            if not file:
                raise ConfigError(f"{where}: is empty. Set a path, or leave the key out.", key=dotted)
            path = resolve_path(file, folder, where, dotted)
            if path_exists(path):
                section[key] = str(path)
    if isinstance(fleet.get("levels"), str) and fleet["levels"].endswith(".toml"):
        fleet["levels"] = str(resolve_path(fleet["levels"], folder, "[fleet] levels", "fleet.levels"))


def _resolve_group(group: Any, folder: Path, key: str) -> Any:
    """Return a group of the fleet with its profile's built-in name and the values of its budget file."""
    if not isinstance(group, dict):
        return group
    if "profile" in group:
        group = {**group, "profile": names.find_match(group["profile"], PROFILES)}
    if not is_budget_file(group.get("budget")):
        return group
    path = resolve_path(group["budget"], folder, "[fleet] groups.budget", key)
    return {"name": path.stem} | group | read_budget_file(path)


# ---- short forms of sections ---------------------------------------------------------------------------------------


def expand_sections(table: Mapping[str, Any]) -> Table:
    """Return tables in which a name alone has become a section: `method = "fedavg"`."""
    if "data" in table:
        table = {**table, "data": wrap_in_memory_data(table["data"])}
    return {key: _expand_section(key, value) for key, value in table.items()}


def _expand_section(key: str, value: Any) -> Any:
    """Return the table of a section that is a name, an object, a table or a pydantic section. Paths become text."""
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, pydantic.BaseModel):
        return dump_section(value, only_set=True)
    if isinstance(value, Mapping):
        if isinstance(value.get("name"), str) or "name" not in value:
            return dict(value)
        return {**value, "name": _find_import_name(value["name"])}
    return {"name": _find_import_name(value)} if CHOOSERS.get(key) == "name" else value


def _find_import_name(value: Any) -> Any:
    """Return `module:function` for a function or class that can be imported by name, else the value."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not callable(value) or module in (None, "__main__") or not name.isidentifier():
        return value
    return f"{module}:{name}" if getattr(sys.modules.get(str(module)), name, None) is value else value
