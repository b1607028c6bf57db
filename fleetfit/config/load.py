"""Load an `Experiment` from a run file, overrides and keyword arguments, in one pass.

The steps: read the run file, resolve its names and paths, merge overrides and keywords (`fleetfit.config.merge`), fill
in the defaults that depend on data, model and method, and validate the tables (`fleetfit.config.parse`). Only filling
in opens data (`fleetfit.config.detect`). Overrides and keywords are merged with each other first, so their order does
not matter. Nodes' configurations and groups of a run file may name budget files, which `fleetfit profile` writes.
"""

import math
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pydantic

from fleetfit import names
from fleetfit.config.assemble.method import build_method_spec
from fleetfit.config.components import list_components
from fleetfit.config.detect import choose_training, complete_data, is_path, sets_client_count, wrap_in_memory_data
from fleetfit.config.dump import make_plain
from fleetfit.config.keys import dump_section, format_key, replace_key
from fleetfit.config.merge import CHOOSERS, Table, deep_merge, drop_absent, flatten, merge_tables
from fleetfit.config.parse import check_callbacks, parse_experiment, parse_section
from fleetfit.config.schema import CLIENTS, Experiment, Request
from fleetfit.config.toml import (
    check_values,
    parse_toml,
    path_exists,
    read_toml,
    resolve_path,
)
from fleetfit.core.local import OPTIMIZERS
from fleetfit.core.section import NotNegative, Positive, Section, Unit
from fleetfit.errors import COMMAND, ConfigError, truncate
from fleetfit.factories import list_parameters
from fleetfit.hooks import build, find_replaced_parameters
from fleetfit.profiles import PROFILES

# ---- a run file ----------------------------------------------------------------------------------------------------


def read_run_file(path: str | Path) -> Table:
    """Return the resolved tables of a run file.

    Raises:
        ConfigError: The file cannot be read or is not a run file. For a folder, and for a file of data, the message has
            the command that takes it.
    """
    try:
        table = read_toml(path)
    except ConfigError as error:
        path = Path(error.path or path)
        if not path_exists(path):
            raise
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, not a run file. {_suggest_command(path)}", path=path) from None
        if error.key or path.suffix == ".toml":
            raise
        raise ConfigError(f"{error} For data, use the key data.path: --set data.path={path}", path=path) from None
    return resolve_tables(table, resolve_path(path, Path.cwd()).parent)


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
    /,
    **keywords: Any,
) -> Experiment:
    """Load the description of a run with every default: read, resolve paths, merge, complete, validate.

    Args:
        source: A run file, its tables, or an `Experiment`; the defaults if left out. The file's name is the default
            name of the run. Of an experiment, what its user wrote is changed, and the defaults follow.
        overrides: `a.b=c`, with the value in TOML's notation or as text. They win over the source.
        **keywords: Whole sections or single keys of the top level, which win over both. Objects may replace names:
            `model=MyArchitecture()`. None: absent.

    Raises:
        ConfigError: A file, an override or a keyword is wrong.
        DataError: The data at a path are missing, or of an unknown format.
    """
    check_source(source)
    keywords = drop_absent(keywords)
    check_values(keywords)
    change = deep_merge(parse_overrides(overrides), resolve_tables(keywords, Path.cwd()))
    table: Mapping[str, Any]
    if isinstance(source, str | Path):
        table = read_run_file(source)
        table = table if table.get("name") else {**table, "name": Path(source).stem}
    elif isinstance(source, Experiment) and source._request:
        if not change:
            return source
        table = source.request.tables
    else:
        table = source.request.tables if isinstance(source, Experiment) else source or {}
        check_values(table)
        table = resolve_tables(table, Path.cwd())
    dropped: list[str] = []
    tables = merge_tables(table, change, dropped=dropped)
    return complete_experiment(tables, tuple(flatten(change)), tuple(dropped))


def check_source(source: Any, *further: Any) -> None:
    """Check that the arguments without a keyword are a run file, its tables or an experiment, and nothing else.

    Raises:
        ConfigError: There is something else, such as data.
    """
    if further or (source is not None and not isinstance(source, str | Path | Mapping | Experiment)):
        got = ", ".join(truncate(type(value).__name__) for value in (source, *further))
        raise ConfigError(
            f"the only argument without a keyword is a run file or its tables, got {got}. Pass data as data=(x, y) or "
            'data=frame, a model as model=, and the rows of a comparison as compare={"row": [...]}.',
            key="file",
        )


def complete_experiment(
    tables: Mapping[str, Any], overrides: tuple[str, ...] = (), dropped: tuple[str, ...] = ()
) -> Experiment:
    """Return the experiment of what a user wrote: complete its tables and validate them, once.

    Args:
        tables: Resolved tables (`resolve_tables`).
        overrides: The dotted keys of `--set` and keywords.
        dropped: The file's keys that belonged to a name which an override replaced.

    Raises:
        FleetFitError: As `load_experiment`.
    """
    complete, model = fill_in_defaults(tables)
    try:
        experiment = parse_experiment(complete)
    except ConfigError as error:
        if error.key not in flatten(complete).keys() - flatten(tables).keys():
            raise
        raise ConfigError(
            f"a default that the method declares does not fit: {error}", key=error.key, path=error.path
        ) from None
    experiment._request = Request(tables, overrides, dropped, model, experiment.request.decided)
    return fill_in_parameters(experiment)


def restore_experiment(tables: Mapping[str, Any], **sections: Any) -> Experiment:
    """Return the experiment of tables that have every default, as those of a run folder. Nothing is filled in.

    Args:
        tables: The tables.
        **sections: Objects in place of names, and whole sections. Keys stay if the object is of the recorded type.

    Raises:
        ConfigError: A key is unknown, or a value has a wrong type or is out of range.
    """
    change = resolve_tables(sections, Path.cwd())
    for section, value in change.items():
        name = value.get("name") if isinstance(value, Mapping) else None
        if name is not None and flatten(tables).get(f"{section}.name") == make_plain(name):
            tables = replace_key(tables, f"{section}.name", name)
    return parse_experiment(merge_tables(tables, change))


def add_callbacks(experiment: Experiment, entries: Sequence[Any]) -> Experiment:
    """Return the experiment with further callbacks: names and tables, as in a run file in the working folder.

    Raises:
        ConfigError: One is neither.
    """
    check_callbacks(entries)
    further = _resolve_names("callbacks", list(entries), Path.cwd())
    return replace_key(experiment, "callbacks", [*experiment.callbacks, *further])


def parse_overrides(overrides: Sequence[str]) -> Table:
    """Return the merged tables of overrides; the last override of a key wins.

    Raises:
        ConfigError: An override is malformed.
    """
    change: Table = {}
    for text in overrides:
        change = deep_merge(change, resolve_tables(parse_override(text), Path.cwd()))
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
    table: Any = _parse_value(content.strip())
    for part in reversed(path):
        table = {part: table}
    check_values(table, "an override")
    return dict(table)


def _parse_key(key: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, which may be quoted; empty for a malformed key."""
    try:
        value: Any = tomllib.loads(f"{key.strip()} = 0") if key.isprintable() else {}
    except (tomllib.TOMLDecodeError, RecursionError):
        return ()
    parts: list[str] = []
    while isinstance(value, dict):
        if len(value) != 1:
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


# ---- defaults ------------------------------------------------------------------------------------------------------


def fill_in_defaults(tables: Mapping[str, Any]) -> tuple[Table, str]:
    """Return tables with the defaults for their data, model and method, and the name of a model chosen for the data.

    The sections are not validated yet, so each may be of any type.

    Raises:
        DataError: The data at a path are missing, or of an unknown format.
        ConfigError: `[method]` or `[cohort]` is wrong, or the method cannot be built.
    """
    tables, chosen = dict(tables), ""
    data, model, local = tables.get("data"), tables.get("model", {}), tables.get("local", {})
    if isinstance(data, Mapping) and isinstance(model, Mapping):
        tables["data"], default = complete_data(data, model)
        if default:
            model, chosen = {**default, **model}, default["name"]
            tables["model"] = model
    if isinstance(model, Mapping) and isinstance(local, Mapping) and not local.keys() & _SHOW_OPTIMIZER:
        tables["local"] = {**choose_training(model), **local}
    return _fill_in_method_defaults(tables), chosen


_SHOW_OPTIMIZER = {"optimizer", *(OPTIMIZERS["sgd"].keys() - OPTIMIZERS["adamw"].keys())}


def _fill_in_method_defaults(tables: Table) -> Table:
    """Return the tables merged into the defaults that their method declares (`Method.defaults`)."""
    sections = {key: value for key, value in tables.items() if key in ("method", "cohort")}
    with names.explain_plug_ins():
        defaults = dict(build(build_method_spec(parse_experiment(sections))).defaults)
    cohort = tables.get("cohort", {})
    if isinstance(cohort, Mapping) and cohort.keys() & {"fraction", "count"}:  # a run takes one of the two
        defaults = {key: value for key, value in defaults.items() if key not in ("cohort.fraction", "cohort.count")}
    base: Table = {}
    for key, value in defaults.items():
        base = deep_merge(base, replace_key({}, key, value))
    return merge_tables(base, tables) if base else tables


_WITHOUT_DEFAULTS = ("hooks", "selection", "callbacks", "metrics")
"""Kinds whose own keys an experiment leaves out, unless they are set."""


def fill_in_parameters(experiment: Experiment) -> Experiment:
    """Return the experiment with the defaults of its named functions and its partition.

    Raises:
        ConfigError: A name is unknown.
    """
    replaced = find_replaced_parameters(build_method_spec(experiment))
    for one in list_components(experiment):
        if one.kind in _WITHOUT_DEFAULTS or not isinstance(one.name, str):
            continue
        skip = {*names.KINDS[one.kind].context, *one.settings, *(replaced if one.kind == "methods" else ())}
        for key, parameter in list_parameters(names.resolve(one.kind, one.name, one.key)).items():
            if key not in skip and _has_value(value := parameter.default):
                value = list(value) if isinstance(value, tuple) else value
                experiment = replace_key(experiment, f"{one.path}.{key}", value)
    partition, is_sized = experiment.data.partition, sets_client_count(experiment.data.name)
    if ":" not in partition.kind:
        if partition.seed is None:
            experiment = replace_key(experiment, "data.partition.seed", experiment.seed)
        if partition.clients is None and partition.kind != "natural" and not is_sized:
            experiment = replace_key(experiment, "data.partition.clients", CLIENTS)
    return experiment


def _has_value(default: Any) -> bool:
    """Return whether TOML can hold a parameter's default."""
    values = default if isinstance(default, list | tuple) else [default]
    if not all(isinstance(value, bool | int | float | str) for value in values):
        return False
    return default not in ("", ()) and all(math.isfinite(value) for value in values if isinstance(value, float))


# ---- short forms, names and paths ----------------------------------------------------------------------------------

_FILES = (
    *(f"{data}.{key}" for data in ("data", "data.server") for key in ("folder", "file", "tokenizer", "transform")),
    "model.checkpoint", "fleet.availability.trace", "fleet.levels", "init_from",
)  # fmt: skip
"""Keys that name files."""


def resolve_tables(table: Mapping[str, Any], folder: Path) -> Table:
    """Return tables with a section for each name or object, exact names of built-ins, and absolute paths.

    Values of budget files replace the files' names, so that a run can be repeated without the files. Nothing else is
    opened, and nothing is validated: each section may be of any type.

    Args:
        table: Tables as in a run file.
        folder: The folder to which paths are relative.

    Raises:
        ConfigError: A path is malformed, or a budget file cannot be read.
    """
    if "data" in table:
        data = wrap_in_memory_data(table["data"])
        if isinstance(data, Mapping) and "server" in data:
            data = {**data, "server": wrap_in_memory_data(data["server"])}
        table = {**table, "data": data}
    if isinstance(compare := table.get("compare"), Mapping):  # first, as a copy has lists in place of tuples of arrays
        parts = {part: _resolve_rows(compare[part], folder) for part in ("row", "setting") if part in compare}
        table = {**table, "compare": {**compare, **parts}}
    result: Table = _copy({key: _expand_section(key, value) for key, value in table.items()})
    for key in ("data.server", "data"):
        _change(result, key, partial(_resolve_data, folder=folder, key=key))
    for kind, row in names.KINDS.items():
        for key in row.keys:
            _change(result, key, partial(_resolve_names, kind, folder=folder))
    for key in _FILES:
        _change(result, key, partial(_resolve_file, folder=folder, key=key))
    _change(result, "fleet.groups", partial(_resolve_groups, folder=folder))
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(inner) for inner in value]
    is_number = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()  # of np.arange, or a tuner
    return value.item() if is_number else value


def _change(table: Table, key: str, resolve: Callable[[Any], Any]) -> None:
    """Resolve the value at a dotted key, if there is one."""
    *path, last = key.split(".")
    for part in path:
        inner = table.get(part)
        table = inner if isinstance(inner, dict) else {}
    if last in table:
        table[last] = resolve(table[last])


def _resolve_rows(rows: Any, folder: Path) -> Any:
    """Return the rows or settings of a comparison, each of which has tables as in a run file."""
    if not isinstance(rows, list | tuple):
        return rows
    return [resolve_tables(row, folder) if isinstance(row, Mapping) else row for row in rows]


def _expand_section(key: str, value: Any) -> Any:
    """Return the table of a section that is a name, an object, a table or a pydantic section. Paths become text."""
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, pydantic.BaseModel):
        return dump_section(value, only_set=True)
    if isinstance(value, Mapping):
        if isinstance(value.get("name"), str) or "name" not in value:
            return value
        return {**value, "name": _find_import_name(value["name"])}
    return {"name": _find_import_name(value)} if CHOOSERS.get(key) == "name" else value


def _find_import_name(value: Any) -> Any:
    """Return `module:function` for a function or class that can be imported by name, else the value."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not callable(value) or module in (None, "__main__") or not name.isidentifier():
        return value
    return f"{module}:{name}" if getattr(sys.modules.get(str(module)), name, None) is value else value


def _resolve_data(section: Any, folder: Path, key: str) -> Any:
    """Return the keys of a data set with an absolute path. Without a name, the path is the name.

    A name that looks like a path, and is not the name of a data set, is a path.
    """
    if not isinstance(section, dict):
        return section
    name, path = section.get("name"), section.get("path")
    if path is None and isinstance(name, str) and is_path(name, folder):
        name, path = None, name
    if path is None or (name is not None and (not isinstance(name, str) or ":" in name)):
        return section  # a plug-in's own key
    key = f"{key}.path"
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"{format_key(key)}: should be a path in quotes, got {truncate(repr(path))}.", key=key)
    absolute = resolve_path(str(path), folder, key)
    location = str(absolute) if path_exists(absolute) else str(path)  # the data set may look in FLEETFIT_DATA
    if name is not None:
        return {**section, "path": location}
    others = {key: value for key, value in section.items() if key not in ("name", "path")}
    if ":" in location:  # of Windows
        return {"path": location, **others}
    return {"name": location if is_path(location) else f"./{location}", **others}


def _resolve_names(kind: str, value: Any, folder: Path) -> Any:
    """Return the exact built-in names, and names of files with absolute paths: one name, a list, or a table."""
    if isinstance(value, str):
        return names.make_absolute(names.match_name(kind, value), folder)
    if isinstance(value, list):
        return [_resolve_names(kind, one, folder) for one in value]
    if not isinstance(value, dict):
        return value
    if kind == "options":
        return {_resolve_names(kind, str(name), folder): settings for name, settings in value.items()}
    return {key: _resolve_names(kind, one, folder) if kind == "hooks" or key == "name" else one
            for key, one in value.items()}  # fmt: skip


def _resolve_file(file: Any, folder: Path, key: str) -> Any:
    """Return the absolute path of a file that exists; otherwise a data set looks in FLEETFIT_DATA."""
    if key == "fleet.levels" and not (isinstance(file, str) and file.endswith(".toml")):  # no saved plan
        return file
    if not isinstance(file, str) or (key == "init_from" and not file):
        return file
    if not file:
        raise ConfigError(f"{format_key(key)}: is empty. Set a path, or leave the key out.", key=key)
    path = resolve_path(file, folder, key)
    return str(path) if key == "fleet.levels" or path_exists(path) else file


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


def read_budget_file(path: Path) -> Table:
    """Return `budget` of a budget file, and `tolerance` if the file has one.

    Raises:
        ConfigError: The file cannot be read, or has other keys.
    """
    try:
        return dict(dump_section(parse_section(BudgetFile, read_toml(path))))
    except ConfigError as error:
        raise ConfigError(f"budget file {path}: {error}", key=error.key, path=path) from None


def _resolve_groups(groups: Any, folder: Path) -> Any:
    """Return the groups of the fleet with their profiles' built-in names and the values of their budget files."""
    if not isinstance(groups, list):
        return groups
    return [_resolve_group(one, folder, i) if isinstance(one, dict) else one for i, one in enumerate(groups)]


def _resolve_group(group: Table, folder: Path, index: int) -> Table:
    if "profile" in group:
        group = {**group, "profile": names.find_match(group["profile"], PROFILES)}
    if not is_budget_file(group.get("budget")):
        return group
    path = resolve_path(group["budget"], folder, f"fleet.groups.{index}.budget")
    return {"name": path.stem} | group | read_budget_file(path)
