"""Validate tables as an `Experiment`. Errors have the key, its section, and the closest valid key."""

import difflib
import math
import typing
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from fleetfit import names
from fleetfit.config.assemble.fleet import check_profiles
from fleetfit.config.assemble.method import build_method_spec
from fleetfit.config.detect import choose_layout, choose_model, choose_partition, choose_training, detect_data_source
from fleetfit.config.merge import Table, deep_merge, list_keys, merge_tables
from fleetfit.config.schema import Experiment, GroupSection, Overrides, ProfileSection
from fleetfit.data import DataInMemory
from fleetfit.errors import ConfigError, did_you_mean, format_expected, truncate
from fleetfit.method import build
from fleetfit.values.local import OPTIMISERS, Constant, Cosine, Exponential, LocalSection, Step
from fleetfit.values.section import Section

S = TypeVar("S", bound=Section)


def parse_experiment(table: Mapping[str, Any], is_complete: bool = False) -> Experiment:
    """Validate the tables of a run file.

    Args:
        table: Tables as in a run file.
        is_complete: Whether the tables already hold every default, as those of a run folder do. The method then adds
            none.

    Raises:
        ConfigError: A key is unknown, or a value has a wrong type or is out of range.
    """
    table, model = _fill_in_data_and_model(table)
    complete = table if is_complete else fill_in_method_defaults(_fill_in_training(table))
    try:
        experiment = parse_section(Experiment, complete)
    except ConfigError as error:
        if complete is table:
            raise
        parse_section(Experiment, table)  # raises the error if the tables are wrong without the method's defaults
        raise ConfigError(
            f"a default that the method declares does not fit: {error}", key=error.key, path=error.path
        ) from None
    if complete is not table:
        _mark_as_default(experiment, table)
    sections = {key: value for key in ("local", "method") if isinstance(value := complete.get(key), Mapping)}
    experiment._overrides = Overrides(model=model, given=None if is_complete else frozenset(list_keys(sections)))
    _check_finite(complete, ())
    _check_names(experiment)
    cohort = experiment.cohort
    if cohort.fraction is not None and cohort.count is not None:
        raise ConfigError("[cohort] takes fraction or count, not both. Leave one out.", key="cohort.count")
    _check_optimiser(experiment.local)
    check_profiles(experiment.fleet)
    return experiment


def _fill_in_data_and_model(table: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the tables with the data set for a path and a model for the data, and the model's name if chosen here.

    Values of a grid are not validated yet, so both sections may be of any type.
    """
    data, model = table.get("data"), table.get("model", {})
    if isinstance(data, Mapping) and data.get("path") is not None:
        data = detect_data_source(data, Path.cwd())
        table = {**table, "data": data}
    if isinstance(data, Mapping) and isinstance(model, Mapping):
        data = {**data, **choose_layout(data, model)}
        data = choose_partition(data) if isinstance(data.get("name"), DataInMemory) else data
        table = {**table, "data": data}
    if not isinstance(data, Mapping) or not isinstance(model, Mapping) or "name" in model:
        return table, ""
    default = choose_model(data)
    return ({**table, "model": {**default, **model}}, default["name"]) if default else (table, "")


def _fill_in_training(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tables with the optimiser that suits the model, unless the file has one or keys of SGD alone."""
    model, local = table.get("model", {}), table.get("local", {})
    if not isinstance(model, Mapping) or not isinstance(local, Mapping) or local.keys() & _SHOW_OPTIMISER:
        return table
    default = choose_training(model)
    return {**table, "local": {**default, **local}} if default else table


_SHOW_OPTIMISER = {"optimiser", *(OPTIMISERS["sgd"].keys() - OPTIMISERS["adamw"].keys())}


def fill_in_method_defaults(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tables merged into the defaults that their method declares (`Method.defaults`).

    Raises:
        ConfigError: `[method]` or `[cohort]` is wrong, or the method cannot be built.
    """
    sections = {key: value for key, value in table.items() if key in ("method", "cohort")}
    with names.explain_plug_ins():
        defaults = dict(build(build_method_spec(parse_section(Experiment, sections))).defaults)
    cohort = table.get("cohort", {})
    if isinstance(cohort, Mapping) and cohort.keys() & {"fraction", "count"}:  # a run takes one of the two
        defaults = {key: value for key, value in defaults.items() if key not in ("cohort.fraction", "cohort.count")}
    base: Table = {}
    for key, value in defaults.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        base = deep_merge(base, value)
    return merge_tables(base, table) if base else table


def _mark_as_default(section: Section, table: Any) -> None:
    """Mark keys that are not in the table as defaults, so that another method's defaults may replace them."""
    table = table if isinstance(table, Mapping) else {}
    for key in set(section.model_fields_set):
        if key not in table:
            section.model_fields_set.discard(key)
        if isinstance(inner := vars(section).get(key), Section):
            _mark_as_default(inner, table.get(key))


def _check_optimiser(local: LocalSection) -> None:
    if local.foreign:
        key, takes = local.foreign[0], ", ".join(OPTIMISERS[local.optimiser])
        others = " and ".join(f'"{name}"' for name, own in OPTIMISERS.items() if key in own)
        raise ConfigError(
            f'[local] {key}: optimiser = "{local.optimiser}" takes {takes}; {key} belongs to {others}. Leave it out, '
            "or choose another optimiser.",
            key=f"local.{key}",
        )
    if local.nesterov and not local.momentum:
        raise ConfigError(
            "[local] nesterov: needs momentum above 0. Set momentum, or leave nesterov out.",
            key="local.nesterov",
        )


def _check_finite(value: Any, path: tuple[str, ...]) -> None:
    """Refuse NaN and infinity at any depth, including the keys of plug-ins."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_finite(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_finite(inner, (*path, str(index)))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{_format_key(path)}: should be a finite number, got {value}.", key=".".join(path))


_EXAMPLES = {"data.name": "digits", "data.server.name": "cifar100", "model.name": "cnn", "peft.name": "lora",
             "method.name": "scalefl", "engine.name": "local", "attack.kind": "sign_flip"}  # fmt: skip
"""An example for each key that is a name."""


def _check_names(experiment: Experiment) -> None:
    """Refuse values that are not names, and names that cannot be part of a folder's name."""
    server, attack = experiment.data.server, experiment.attack.kind
    by_key = {
        f"{section}.name": getattr(experiment, section).name
        for section in ("data", "model", "peft", "method", "engine")
    }
    by_key |= {} if server is None else {"data.server.name": server.name}
    by_key |= {} if attack is None else {"attack.kind": attack}
    for key, name in by_key.items():
        if name is None or name == "" or isinstance(name, bool | int | float | list | tuple | Mapping | date | time):
            raise ConfigError(
                f'{_format_key(key.split("."))}: should be a name in quotes, such as "{_EXAMPLES[key]}", got '
                f"{truncate(repr(name))}.",
                key=key,
            )
    for index, entry in enumerate(experiment.callbacks):
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        if not isinstance(name, str) or not name:
            raise ConfigError(
                'callbacks: should be a list of names, such as "tensorboard" or "file.py:function", or of tables '
                f"with a name and keys; got {truncate(repr(entry))}. Pass objects from Python: run(callbacks=[...]).",
                key=f"callbacks.{index}",
            )
    for key in experiment.fleet.measured:
        if not key.startswith("latency_s "):
            raise ConfigError(
                f"[fleet] measured {truncate(key)}: unknown key. Measured keys begin with latency_s.",
                key=f"fleet.measured.{key}",
            )
    if not experiment.name.isprintable() or len(experiment.name) > 200:
        raise ConfigError(
            f"name: should have at most 200 printable characters, got {truncate(repr(experiment.name))}.", key="name"
        )


# ---- one section ---------------------------------------------------------------------------------------------------


def parse_section(schema: type[S], table: Mapping[str, Any]) -> S:
    """Validate the table of a section.

    Raises:
        ConfigError: A key is unknown, or a value has a wrong type or is out of range.
    """
    try:
        return schema.model_validate(dict(table))
    except pydantic.ValidationError as error:
        errors = error.errors()
        unknown = [e for e in errors if e["type"] == "extra_forbidden" and len(e["loc"]) == len(errors[0]["loc"])]
        if unknown and errors[0]["type"] == "missing":  # report the misspelled key rather than the missing one
            errors = unknown
        first = [e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]]
        deepest = max(first, key=lambda e: len(e["loc"]))  # for a table that may also be a number, report its wrong key
        key = ".".join(_drop_union_members([str(part) for part in deepest["loc"]]))
        words = [
            e["ctx"]["expected"].replace("'", '"')  # of a number that may also be a word
            for e in errors
            if e is not deepest and e["type"] == "literal_error" and e["loc"][:-1] == deepest["loc"][:-1]
        ]
        raise ConfigError(_describe_error(deepest, schema, words), key=key) from None


def _describe_error(error: Any, schema: type[Section], words: Sequence[str] = ()) -> str:
    """Return `[local] batch_sise: unknown key. Did you mean "batch_size"?`; `words` are values allowed, too."""
    path = [str(part) for part in error["loc"]]
    label, value = _format_key(path), truncate(repr(error["input"]))
    match error["type"]:
        case "extra_forbidden":
            return f"{label}: unknown key.{_suggest_key(path, schema)}"
        case "missing":
            return f"{label}: missing. Set this key."
        case "union_tag_not_found":
            return f'{label}: has no kind. Set one, such as kind = "step"; got {value}.'
        case "union_tag_invalid":
            kind, kinds = error["ctx"]["tag"], ("constant", "step", "cosine", "exponential")
            return f'{label}: "{truncate(kind)}" is not among the kinds: {", ".join(kinds)}.{did_you_mean(kind, kinds)}'
        case "literal_error":
            return f"{label}: {format_expected(error['ctx']['expected'], error['input'])}"
        case "model_type" | "dict_type":
            message = "should be a table of keys"
            if path[-1] in _EXAMPLES:
                message += f', such as [{path[-1]}] name = "{_EXAMPLES[path[-1]]}"'
        case _:
            message = error["msg"].removeprefix("Input ").replace("dictionary or instance", "table or instance")
    if path == ["fleet", "levels", "str"]:
        message = 'should be "cluster", "halving", a list of at least one ratio or level, or a saved plan'
    hint = f" {_SEEDS}" if path == ["seed"] and isinstance(error["input"], list) else ""
    return f"{label}: {' or '.join((message, *words))}, got {value}.{hint}"


_SEEDS = "A comparison lists seeds in [compare.grid]: seed = [0, 1, 2]."

_TABLES: dict[str, type[Section]] = {
    "constant": Constant,
    "step": Step,
    "cosine": Cosine,
    "exponential": Exponential,
    "ProfileSection": ProfileSection,
}
"""Sections that are members of unions, by pydantic's names."""
_UNION_MEMBERS = {*_TABLES, "int", "str", "float", "constrained-int", "constrained-float", "constrained-str"}


def _drop_union_members(path: Sequence[str]) -> list[str]:
    """Return a pydantic path without types of a union, such as `float` in fleet.groups.0.budget.float."""
    return [part for i, part in enumerate(path) if i == 0 or not (part in _UNION_MEMBERS or "[" in part)]


def _format_key(path: Sequence[str]) -> str:
    """Return a key as in a run file: `[local] schedule.at`, `[fleet] groups #1.budget`, or `rounds` at the top."""
    first, *others = [
        f"#{int(part) + 1}" if part.isdigit() else truncate(part) for part in _drop_union_members(path)
    ]  # fmt: skip
    return f"[{first}] {'.'.join(others)}".replace(".#", " #") if others else first


_COMMON_NAMES = {"learning_rate": "lr"}
"""Names of other libraries that no comparison of letters leads from."""


_OPTION_NAMES = {"clients": "data.partition.clients", "num_clients": "data.partition.clients", "num_rounds": "rounds"}
"""Keys that people look for among the options of the command line."""


def find_keys(word: str) -> list[str]:
    """Return the dotted keys of a run file that a word means: a section's key (lr: local.lr), or one spelt alike."""
    sections = {name: getattr(field.annotation, "model_fields", {}) for name, field in Experiment.model_fields.items()}
    word = _OPTION_NAMES.get(word, _COMMON_NAMES.get(word, word))
    if word.partition(".")[0] in sections:
        return [word]
    dotted: dict[str, list[str]] = {name: [name] for name in sections}
    for section, fields in sections.items():
        for name in fields:
            dotted.setdefault(name, []).append(f"{section}.{name}")
    near = difflib.get_close_matches(word, dotted, n=1, cutoff=0.8)
    return dotted[near[0]] if near else []


def _suggest_key(path: Sequence[str], schema: type[Section]) -> str:
    """Suggest a key of the same section, else the section that has the key, else the keys of the section."""
    if path in (["seeds"], ["compare", "seeds"], ["compare", "seed"]):
        return f" {_SEEDS}"
    section: Any = schema
    for part in path[:-1]:
        if part in _TABLES:
            section = _TABLES[part]
        elif part == "groups" or part.isdigit():
            section = GroupSection
        elif part in getattr(section, "model_fields", {}):
            annotation = section.model_fields[part].annotation
            members = (one for one in typing.get_args(annotation) if isinstance(one, type) and issubclass(one, Section))
            section = next(members, annotation)  # of `DriftSection | None`
    word, keys = _COMMON_NAMES.get(path[-1], path[-1]), list(getattr(section, "model_fields", {}))
    hint = did_you_mean(word, keys)
    others = [s for s, f in schema.model_fields.items() if word in getattr(f.annotation, "model_fields", {})]
    if others and (not hint or len(path) == 1):
        return f" Did you mean [{others[0]}] {truncate(word)}?"
    return hint or (f" The keys are {', '.join(keys)}." if keys else "")
