"""Run files, overrides and keyword arguments become an `Experiment`; every mistake is a sentence with its place.

Sections are merged key by key, so an override changes one key and leaves the rest. One rule goes beyond that: where an
override names another method, model, way of fine-tuning, data set, engine, partition, optimiser or schedule, the keys
that belonged to the old one go with it; options and single hooks, which go with any method, stay. Overrides and
keywords are laid over each other first, so none of them is lost by the order in which they are given.

`fleetfit profile` writes such files. A node's configuration and the groups of a run file name them instead of amounts.
"""

import math
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from fleetfit import names
from fleetfit.config import schema as schedules
from fleetfit.config.build.method import build_method_spec
from fleetfit.config.schema import EngineSection, Experiment, GroupSection, LocalSection, Overrides, ProfileSection
from fleetfit.config.section import NotNegative, Positive, Section, Unit
from fleetfit.config.speeds import check_profiles
from fleetfit.config.tables import DEEPEST, check_values, exists, find_base_folder, located, read_table, table_of
from fleetfit.config.usual import usual_model, with_data_found, with_values
from fleetfit.config.writing import Table, dumped
from fleetfit.data.partition import KINDS
from fleetfit.errors import ConfigError, did_you_mean, format_expected, truncate
from fleetfit.method import build
from fleetfit.profiles import PROFILES
from fleetfit.values.local import OF_OPTIMISERS, OPTIMISERS

# ---- tables are held against the schema; every mistake names its place and the nearest valid key -------------------

S = TypeVar("S", bound=Section)


def checked(table: Mapping[str, Any], is_complete: bool = False) -> Experiment:
    """Make an experiment of tables.

    Args:
        table: Tables as in a run file.
        is_complete: Whether the tables hold every default already, as those of a run folder; the method then adds none.

    Raises:
        ConfigError: An unknown key, a value of a wrong type or out of range; the message names the place.
    """
    table, model = _completed(table)
    given, table = table, table if is_complete else fill_in_method_defaults(table)
    try:
        experiment = validated(Experiment, table)
    except ConfigError as error:
        if given is table:
            raise
        validated(Experiment, given)  # raises where the tables are wrong without the method
        raise ConfigError(
            f"a default that the method declares does not fit: {error}", key=error.key, path=error.path
        ) from None
    if given is not table:
        _mark_as_default(experiment, given)
    experiment._asked = Overrides(model=model)
    _check_finite(table, ())
    _check_names(experiment)
    cohort = experiment.cohort
    if cohort.fraction is not None and cohort.count is not None:
        raise ConfigError("[cohort] takes fraction or count, not both.")
    _check_optimiser(experiment.local)
    check_profiles(experiment.fleet)
    return experiment


def _completed(table: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the tables with the data at a path, and the model that fits the data where none is named; and its name."""
    data, model = table.get("data"), table.get("model", {})
    if isinstance(data, Mapping) and data.get("path") is not None:  # of a grid, whose values nobody has looked at
        data = with_data_found(data, Path.cwd())
        table = {**table, "data": data}
    if not isinstance(data, Mapping) or not isinstance(model, Mapping) or "name" in model:
        return table, ""
    usual = usual_model(data)
    return ({**table, "model": {**usual, **model}}, usual["name"]) if usual else (table, "")


def fill_in_method_defaults(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tables laid over the defaults that their method declares (`Method.defaults`)."""
    named = {key: value for key, value in table.items() if key in ("method", "cohort")}
    try:
        defaults = dict(build(build_method_spec(Experiment.model_validate(named))).defaults)
    except Exception:  # assembling the run reports it
        return table
    cohort = table.get("cohort", {})
    if isinstance(cohort, Mapping) and cohort.keys() & {"fraction", "count"}:  # a run takes one of them
        defaults = {key: value for key, value in defaults.items() if key not in ("cohort.fraction", "cohort.count")}
    base: Table = {}
    for key, value in defaults.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        base = laid(base, value)
    return merged(base, table) if base else table


def _mark_as_default(section: Section, given: Any) -> None:
    """Mark the keys of a section that were not given as defaults, so that another method's may take their place."""
    given = given if isinstance(given, Mapping) else {}
    for key in set(section.model_fields_set):
        if key not in given:
            section.model_fields_set.discard(key)
        if isinstance(inner := getattr(section, key, None), Section):
            _mark_as_default(inner, given.get(key))


def _check_optimiser(local: LocalSection) -> None:
    """Refuse keys that the optimiser does not take.

    Raises:
        ConfigError: There is one.
    """
    if local.foreign:
        key, takes = local.foreign[0], ", ".join(OPTIMISERS[local.optimiser])
        others = " and ".join(f'"{name}"' for name, own in OPTIMISERS.items() if key in own)
        raise ConfigError(
            f'[local] {key}: optimiser = "{local.optimiser}" takes {takes}; {key} is a key of {others}. Leave it out, '
            "or choose another optimiser."
        )
    if local.nesterov and not local.momentum:
        raise ConfigError("[local] nesterov: there is no momentum to look ahead with; raise momentum, or leave it out.")


def _check_finite(value: Any, place: tuple[str, ...]) -> None:
    """Refuse numbers that are none, wherever they stand: in the keys of a plug-in, too.

    Raises:
        ConfigError: There is one.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_finite(inner, (*place, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_finite(inner, (*place, str(index)))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{_place(place)}: should be a finite number, got {value}.")


def _check_names(experiment: Experiment) -> None:
    """Refuse what cannot stand for a name, and names that no folder can have.

    Raises:
        ConfigError: There is such a thing.
    """
    server = experiment.data.server
    named = [("data", experiment.data.name), ("model", experiment.model.name), ("peft", experiment.peft.name),
             ("method", experiment.method.name), ("engine", experiment.engine.name),
             *([] if server is None else [("data.server", server.name)])]  # fmt: skip
    for where, name in named:
        if name is None or name == "" or isinstance(name, bool | int | float | list | tuple | Mapping | date | time):
            section, _, inner = where.partition(".")
            raise ConfigError(
                f"[{section}] {inner}{'.' if inner else ''}name: should be a name in quotes, such as "
                f'"{_SUCH_AS[where]}", got {truncate(repr(name))}.'
            )
    for entry in experiment.callbacks:
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        if not isinstance(name, str) or not name:
            raise ConfigError(
                'callbacks: should be a list of names, such as "tensorboard" or "file.py:function", and of tables with '
                f"a name and keys, got {truncate(repr(entry))}. Objects are given in Python, run(callbacks=[...])."
            )
    strange = [what for what in experiment.fleet.measured if not what.startswith("latency_s ")]
    if strange:
        raise ConfigError(
            f"[fleet] measured {truncate(strange[0])}: unknown key; what a run measured begins with latency_s."
        )
    if not experiment.name.isprintable() or len(experiment.name) > 200:
        raise ConfigError(f"name: at most 200 characters that can be printed, got {truncate(repr(experiment.name))}.")


_SUCH_AS = {"data": "digits", "data.server": "cifar100", "model": "cnn", "peft": "lora", "method": "scalefl",
            "engine": "local"}  # fmt: skip


def validated(schema: type[S], table: Mapping[str, Any]) -> S:
    """Make a section of a schema from a table.

    Raises:
        ConfigError: An unknown key, a value of a wrong type or out of range; the message names the place.
    """
    try:
        return schema.model_validate(dict(table))
    except pydantic.ValidationError as error:
        found = error.errors()
        strange = [e for e in found if e["type"] == "extra_forbidden" and len(e["loc"]) == len(found[0]["loc"])]
        if strange and found[0]["type"] == "missing":  # a misspelled key says more than that the right one is missing
            found = strange
        first = [e for e in found if e["loc"][:2] == found[0]["loc"][:2]]
        deepest = max(first, key=lambda e: len(e["loc"]))  # of a table that may also be a number, its wrong key
        raise ConfigError(_sentence(deepest, schema)) from None


def _sentence(error: Any, schema: type[Section]) -> str:
    """Say what is wrong and where: `[local] batch_sise: unknown key. Did you mean "batch_size"?`."""
    path = [str(part) for part in error["loc"]]
    place = _place(path)
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown key.{_nearest(path, schema)}"
    if error["type"] == "union_tag_not_found":
        return f'{place}: needs a kind, such as kind = "step"; got {truncate(repr(error["input"]))}.'
    if error["type"] == "union_tag_invalid":
        kinds = ("constant", "step", "cosine", "exponential")
        kind = error["ctx"]["tag"]
        return f'{place}: there is no kind "{truncate(kind)}"; there are {", ".join(kinds)}.{did_you_mean(kind, kinds)}'
    if path == ["fleet", "levels", "str"]:
        message = 'should be "cluster", "halving", a list of at least one ratio or level, or a saved plan'
        return f"{place}: {message}, got {truncate(repr(error['input']))}."
    if error["type"] == "missing":
        return f"{place}: this key is needed."
    if error["type"] == "literal_error":
        return f"{place}: {format_expected(error['ctx']['expected'], error['input'])}"
    message = error["msg"].removeprefix("Input ").replace("dictionary or instance", "table or instance")
    if error["type"] in ("model_type", "dict_type"):
        message = "should be a table of keys"
        if path[-1] in _SUCH_AS:
            message += f', such as [{path[-1]}] name = "{_SUCH_AS[path[-1]]}"'
    return f"{place}: {message}, got {truncate(repr(error['input']))}."


_INSIDE_UNIONS = {"constant", "step", "cosine", "exponential", "int", "str", "float", "constrained-int",
                  "constrained-float", "constrained-str", "ProfileSection"}  # fmt: skip


def _place(path: Sequence[str]) -> str:
    """Return how a reader finds the key: `[local] schedule.at`, or `rounds` at the top."""
    tidy = [part for i, part in enumerate(path) if i == 0 or not _noise(part)]
    tidy = [f"#{int(part) + 1}" if part.isdigit() else part for part in tidy]
    tidy = [truncate(part) for part in tidy]
    if len(tidy) == 1:
        return tidy[0]
    return f"[{tidy[0]}] {'.'.join(tidy[1:])}".replace(".#", " #")


def _noise(part: str) -> bool:
    return part in _INSIDE_UNIONS or "[" in part


def _nearest(path: Sequence[str], schema: type[Section]) -> str:
    """Hint at a key of the same section, else at the section where the key exists."""
    section: Any = schema
    for part in path[:-1]:
        section = _inner(section, part)
    word, here = path[-1], list(getattr(section, "model_fields", {}))
    hint = did_you_mean(word, here)
    elsewhere = [s for s, f in schema.model_fields.items() if word in getattr(f.annotation, "model_fields", {})]
    if elsewhere and (not hint or len(path) == 1):
        return f" Did you mean [{elsewhere[0]}] {truncate(word)}?"
    return hint or (f" Known here: {', '.join(here)}." if here else "")


_TABLES = {
    "constant": schedules.Constant,
    "step": schedules.Step,
    "cosine": schedules.Cosine,
    "exponential": schedules.Exponential,
    "ProfileSection": ProfileSection,
}
"""Sections that stand in unions."""


def _inner(section: Any, part: str) -> Any:
    if part in _TABLES:
        return _TABLES[part]
    if part == "groups" or part.isdigit():
        return GroupSection
    field = getattr(section, "model_fields", {}).get(part)
    return section if field is None else field.annotation


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


def read_budget(path: Path) -> dict[str, Any]:
    """Return what a budget file says: `budget`, and `tolerance` where the file has one.

    Raises:
        ConfigError: The file cannot be read, or says something else.
    """
    try:
        found = validated(BudgetFile, read_table(path))
    except ConfigError as error:
        raise ConfigError(f"budget file {path}: {error}") from None
    return {"budget": found.budget} | ({} if found.tolerance is None else {"tolerance": found.tolerance})


# ---- merging -------------------------------------------------------------------------------------------------------

_CHOOSER = {"data": "name", "model": "name", "peft": "name", "method": "name", "engine": "name",
            "attack": "kind", "data.partition": "kind", "data.server": "name", "local": "optimiser",
            "local.schedule": "kind", "cohort.choose": "name"}  # fmt: skip
# keys of the section itself, whatever it names
_STAYS = {"data": {"partition", "server"}, "engine": {"device", *EngineSection.model_fields} - {"name"},
          "method": {"plus", "hooks"}, "attack": {"share", "among"},
          "local": LocalSection.model_fields.keys() - {"optimiser", *OF_OPTIMISERS}}  # fmt: skip
_KIND_OF = {"data.name": "data", "data.server.name": "data", "model.name": "models", "peft.name": "peft",
            "method.name": "methods", "engine.name": "engines", "cohort.choose": "selection",
            "attack.kind": "attacks"}  # fmt: skip
_PLUGINS = tuple(_KIND_OF)

# ---- from files --------------------------------------------------------------------------------------------------


def read_experiment(path: str | Path, overrides: Sequence[str] = (), **sections: Any) -> Experiment:
    """Read a run file; overrides (`a.b=c`) and sections given as keywords win over it, in that order.

    Raises:
        ConfigError: Something in it is wrong.
    """
    base = anchored(sections_of(read_table(path)), find_base_folder(path))
    return experiment_of(base, overrides, **sections)


def experiment_of(
    base: Mapping[str, Any] | None = None, overrides: Sequence[str] = (), is_complete: bool = False, **sections: Any
) -> Experiment:
    """Make an experiment of tables.

    Args:
        base: Tables as in a run file; None or empty means the defaults.
        overrides: `a.b=c`, the value in TOML's notation or else text.
        is_complete: Whether the tables hold every default already, as those of a run folder.
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
    found = checked(merged(table, change, gone=gone), is_complete)
    found._asked = replace(found._asked, keys=tuple(leaves(change)), gone=tuple(gone))
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
    chooser = _CHOOSER.get(where)
    if chooser is not None and chooser in change and base.get(chooser, _default_name(where)) != change[chooser]:
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
            inside[key] = names.anchor_name(names.match_name(_KIND_OF[place], inside[key]), folder)
    _understand(result)
    if isinstance(result.get("method"), dict):
        _anchor_parts(result["method"], folder)
    _anchor_told(result, folder)
    _anchor_files(result, folder)
    compare = result.get("compare")
    for part in ("row", "setting"):
        if isinstance(compare, dict) and isinstance(compare.get(part), list):
            compare[part] = [anchored(one, folder) if isinstance(one, dict) else one for one in compare[part]]
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
            k: names.anchor_name(v, folder) if isinstance(v, str) else v for k, v in method["hooks"].items()
        }
    if isinstance(method.get("plus"), dict):
        plus = {names.match_name("options", str(key)): value for key, value in method["plus"].items()}
        method["plus"] = {names.anchor_name(key, folder): value for key, value in plus.items()}


def _anchor_told(table: Table, folder: Path) -> None:
    """Make the places of files absolute in what is measured and told: `evaluate.metrics` and `callbacks`."""
    evaluate = table.get("evaluate")
    if isinstance(evaluate, dict) and isinstance(evaluate.get("metrics"), list):
        named = evaluate["metrics"]
        evaluate["metrics"] = [names.anchor_name(one, folder) if isinstance(one, str) else one for one in named]
    if "callbacks" in table:
        table["callbacks"] = _callbacks_anchored(table["callbacks"], folder)


def _callbacks_anchored(callbacks: Any, folder: Path) -> Any:
    """Return `callbacks`, one or a list of them, with the places of files made absolute."""
    if isinstance(callbacks, list):
        return [_callbacks_anchored(one, folder) for one in callbacks]
    if isinstance(callbacks, dict) and isinstance(callbacks.get("name"), str):
        return {**callbacks, "name": names.anchor_name(callbacks["name"], folder)}
    return names.anchor_name(callbacks, folder) if isinstance(callbacks, str) else callbacks


def _data_anchored(data: Table, folder: Path) -> Table:
    """Return `[data]` with the data at its paths found, and the place of a partition of one's own made absolute."""
    division = data.get("partition")
    if isinstance(division, dict) and isinstance(division.get("kind"), str):
        division["kind"] = names.anchor_name(division["kind"], folder)
    if isinstance(data.get("server"), dict):
        found = with_data_found(data["server"], folder, "[data] server")
        data["server"] = {k: v for k, v in found.items() if k != "partition" or k in data["server"]}  # is not divided
    return with_data_found(data, folder)


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
    """Return tables in which a name alone has become a section: `method = "fedavg"`."""
    if "data" in table:
        table = {**table, "data": with_values(table["data"])}
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
    return {"name": _import_path(value)} if _CHOOSER.get(key) == "name" else value


def _import_path(thing: Any) -> Any:
    """Return `module:function` for a function or class that can be imported by name, else the thing itself."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not callable(thing) or module in (None, "__main__") or not name.isidentifier():
        return thing
    return f"{module}:{name}" if getattr(sys.modules.get(str(module)), name, None) is thing else thing
