"""Tables become an `Experiment`; every mistake is a sentence with its place and the nearest valid key."""

import math
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from fleetfit.config import schema as schedules
from fleetfit.config.build.method import build_method_spec
from fleetfit.config.defaults import choose_model, detect_data_source
from fleetfit.config.merge import Table, deep_merge, merge_tables
from fleetfit.config.schema import Experiment, GroupSection, LocalSection, Overrides, ProfileSection
from fleetfit.config.section import Section
from fleetfit.config.speeds import check_profiles
from fleetfit.errors import ConfigError, did_you_mean, format_expected, truncate
from fleetfit.method import build
from fleetfit.values.local import OPTIMISERS

S = TypeVar("S", bound=Section)


def parse_experiment(table: Mapping[str, Any], is_complete: bool = False) -> Experiment:
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
        experiment = parse_section(Experiment, table)
    except ConfigError as error:
        if given is table:
            raise
        parse_section(Experiment, given)  # raises where the tables are wrong without the method
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
    if isinstance(data, Mapping) and data.get("path") is not None:  # of a grid, whose values are not validated yet
        data = detect_data_source(data, Path.cwd())
        table = {**table, "data": data}
    if not isinstance(data, Mapping) or not isinstance(model, Mapping) or "name" in model:
        return table, ""
    usual = choose_model(data)
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
        base = deep_merge(base, value)
    return merge_tables(base, table) if base else table


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


def parse_section(schema: type[S], table: Mapping[str, Any]) -> S:
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
