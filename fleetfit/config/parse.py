"""Validate tables as an `Experiment`. Errors have the key, its section, and the closest valid key."""

import difflib
import math
import typing
from collections.abc import Mapping, Sequence
from datetime import date, time
from typing import Any, TypeVar

import pydantic

from fleetfit import names
from fleetfit.config.assemble.fleet import check_profiles
from fleetfit.config.components import list_components
from fleetfit.config.keys import format_key
from fleetfit.config.merge import flatten
from fleetfit.config.schema import Experiment, GroupSection, LevelSection, ProfileSection, Request
from fleetfit.core.local import OPTIMIZERS, Constant, Cosine, Exponential, LocalSection, Step
from fleetfit.core.section import Section
from fleetfit.errors import ConfigError, did_you_mean, format_expected, truncate

S = TypeVar("S", bound=Section)


def parse_experiment(table: Mapping[str, Any]) -> Experiment:
    """Validate the tables of a run, with its defaults, as `config.toml` has them. Nothing is opened.

    Raises:
        ConfigError: A key is unknown, or a value has a wrong type or is out of range.
    """
    experiment = parse_section(Experiment, table)
    sections = {key: value for key in ("local", "method") if isinstance(value := table.get(key), Mapping)}
    experiment._request = Request(table, decided=frozenset(flatten(sections)))
    _check_finite(table, ())
    _check_names(experiment)
    cohort = experiment.cohort
    if cohort.fraction is not None and cohort.count is not None:
        raise ConfigError("[cohort] takes fraction or count, not both. Leave one out.", key="cohort.count")
    _check_optimizer(experiment.local)
    check_profiles(experiment.fleet)
    return experiment


def _check_optimizer(local: LocalSection) -> None:
    if local.foreign:
        key, takes = local.foreign[0], ", ".join(OPTIMIZERS[local.optimizer])
        others = " and ".join(f'"{name}"' for name, own in OPTIMIZERS.items() if key in own)
        raise ConfigError(
            f'[local] {key}: optimizer = "{local.optimizer}" takes {takes}; {key} belongs to {others}. Leave it out, '
            "or choose another optimizer.",
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
        raise ConfigError(f"{format_key('.'.join(path))}: should be a finite number, got {value}.", key=".".join(path))


def _check_names(experiment: Experiment) -> None:
    """Refuse values that are not names, and names that cannot be part of a folder's name."""
    check_callbacks(experiment.callbacks)
    for one in list_components(experiment):
        example, name = names.KINDS[one.kind].example, one.name
        is_value = isinstance(name, bool | int | float | list | tuple | Mapping | date | time)
        if example and (name is None or name == "" or is_value):
            raise ConfigError(
                f'{format_key(one.key)}: should be a name in quotes, such as "{example}", got {truncate(repr(name))}.',
                key=one.key,
            )
    for key in experiment.recorded.latencies:
        if not key.startswith("latency_s "):
            raise ConfigError(
                f"[recorded] latencies {truncate(key)}: unknown key. Measured keys begin with latency_s.",
                key=f"recorded.latencies.{key}",
            )
    if not experiment.name.isprintable() or len(experiment.name) > 200:
        raise ConfigError(
            f"name: should have at most 200 printable characters, got {truncate(repr(experiment.name))}.", key="name"
        )


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Check that entries of `callbacks` are names, or tables with a name.

    Raises:
        ConfigError: One is neither.
    """
    for index, entry in enumerate(callbacks):
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        if not isinstance(name, str) or not name:
            raise ConfigError(
                'callbacks: should be a list of names, such as "tensorboard" or "file.py:function", or of tables '
                f"with a name and keys; got {truncate(repr(entry))}. Pass objects from Python: run(callbacks=[...]).",
                key=f"callbacks.{index}",
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
        if deepest["type"] == "extra_forbidden":
            raise ConfigError(_describe_unknown_keys([deepest, *errors], schema), key=key) from None
        words = [
            e["ctx"]["expected"].replace("'", '"')  # of a number that may also be a word
            for e in errors
            if e is not deepest and e["type"] == "literal_error" and e["loc"][:-1] == deepest["loc"][:-1]
        ]
        raise ConfigError(_describe_error(deepest, schema, words), key=key) from None


def _describe_unknown_keys(errors: Sequence[Any], schema: type[Section]) -> str:
    """Return `[local] batch_sise: unknown key. Did you mean "batch_size"?`, for the first error and others like it."""
    first, hints = errors[0]["loc"], dict[str, str]()
    for error in errors:
        path = [str(part) for part in error["loc"]]
        is_alike = error["loc"][:-1] == first[:-1] or _drop_union_members(path) == path  # not another member of a union
        label = format_key(".".join(_drop_union_members(path)))
        if error["type"] == "extra_forbidden" and is_alike and label not in hints:
            hint = _suggest_key(path, schema)
            hints[label] = "" if hint in hints.values() else hint
    return " ".join(f"{label}: unknown key.{hint}" for label, hint in hints.items())


def _describe_error(error: Any, schema: type[Section], words: Sequence[str] = ()) -> str:
    """Return `[local] batch_sise: unknown key. Did you mean "batch_size"?`; `words` are values allowed, too."""
    path = [str(part) for part in error["loc"]]
    label, value = format_key(".".join(_drop_union_members(path))), truncate(repr(error["input"]))
    match error["type"]:
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
            message = _describe_table(path)
        case "float_type" if "budget" in path and "levels" not in path:
            message = 'should be a share up to 1, such as 0.5, or an amount, such as 20000, "20 M" or "35 ms"'
        case _:
            message = error["msg"].removeprefix("Input ").replace("dictionary or instance", "table or instance")
    if path == ["fleet", "levels", "str"]:
        message = 'should be "cluster", "halving", a list of at least one ratio or level, or a saved plan'
    hint = f" {_SEEDS}" if path == ["seed"] and isinstance(error["input"], list) else ""
    return f"{label}: {' or '.join((message, *words))}, got {value}.{hint}"


def _describe_table(path: Sequence[str]) -> str:
    """Return the table that a key should have: `should be a table of keys, such as name = "scalefl"`."""
    message = "should be a table of keys"
    for row in names.KINDS.values():
        if row.example and row.keys[0].rpartition(".")[0] == ".".join(path):
            message += f', such as {row.keys[0].rpartition(".")[2]} = "{row.example}"'
    if path == ["fleet"] or path[:2] == ["fleet", "groups"]:
        message += f", such as {_GROUPS}"
    if path == ["compare"] or path[:2] == ["compare", "row"]:
        message += f", such as {_ROWS}"
    if path[:2] == ["method", "options"]:
        own = '"file.py:function" = { strength = 0.1 }'
        message = f"should be a table with the keys of each option by its name, such as scaffold = {{}} or {own}"
    return message


_GROUPS = (
    'groups = [{ budget = 0.25 }, { budget = 1.0 }] (in Python fleet={"groups": [{"budget": 0.25}, {"budget": 1.0}]})'
)
_ROWS = (
    'row = [{ method = "scalefl" }, { method = "fleetfit" }] '
    '(in Python compare={"row": [{"method": "scalefl"}, {"method": "fleetfit"}]})'
)
_SEEDS = "A comparison lists seeds in [compare.grid]: seed = [0, 1, 2]."

_TABLES: dict[str, type[Section]] = {
    "constant": Constant,
    "step": Step,
    "cosine": Cosine,
    "exponential": Exponential,
    "ProfileSection": ProfileSection,
}
"""Sections that are members of unions, by pydantic's names."""
_ITEMS: dict[str, type[Section]] = {"groups": GroupSection, "levels": LevelSection}
"""Sections in lists."""
_UNION_MEMBERS = {*_TABLES, "int", "str", "float", "constrained-int", "constrained-float", "constrained-str"}


def _drop_union_members(path: Sequence[str]) -> list[str]:
    """Return a pydantic path without types of a union, such as `float` in fleet.groups.0.budget.float."""
    return [part for i, part in enumerate(path) if i == 0 or not (part in _UNION_MEMBERS or "[" in part)]


def find_keys(word: str) -> list[str]:
    """Return the dotted keys of a run file that a word means: a section's key (lr: local.lr), or one spelled alike."""
    sections = {name: getattr(field.annotation, "model_fields", {}) for name, field in Experiment.model_fields.items()}
    word = word if "." in word else names.find_other_name(word) or word
    if word.partition(".")[0] in sections:
        return [word]
    dotted: dict[str, list[str]] = {name: [name] for name in sections}
    for section, fields in sections.items():
        for name in fields:
            dotted.setdefault(name, []).append(f"{section}.{name}")
    near = difflib.get_close_matches(word, dotted, n=1, cutoff=0.8)
    return dotted[near[0]] if near else []


def _format_suggestion(key: str, path: Sequence[str]) -> str:
    """Return a dotted key as a run file has it; in place of one at the top also as a keyword of Python."""
    if key in _PARAMETERS:
        return _PARAMETERS[key]
    section, *parts = key.split(".")
    if len(path) > 1 or not parts:
        return format_key(key)
    value = "..."
    for part in reversed(parts):
        value = f'{{"name": frame, "{part}": {value}}}' if key == "data.label" else f'{{"{part}": {value}}}'
    return f"{format_key(key)} (in Python {section}={value})"


_PARAMETERS = {
    "out": "out= in Python, --out on the command line",
    "progress": "progress=False in Python, -q on the command line",
}
"""What is no key, but is looked for among the keys."""


def _suggest_key(path: Sequence[str], schema: type[Section]) -> str:
    """Suggest a key of the same section, else the section that has the key, else the keys of the section."""
    if path in (["seeds"], ["compare", "seeds"], ["compare", "seed"]):
        return f" {_SEEDS}"
    section: Any = schema
    for outer, part in zip(("", *path), path[:-1], strict=False):
        if part in _TABLES:
            section = _TABLES[part]
        elif part.isdigit() and outer in _ITEMS:
            section = _ITEMS[outer]
        elif part in getattr(section, "model_fields", {}):
            annotation = section.model_fields[part].annotation
            members = (one for one in typing.get_args(annotation) if isinstance(one, type) and issubclass(one, Section))
            section = next(members, annotation)  # of `DriftSection | None`
    word, keys = path[-1], list(getattr(section, "model_fields", {}))
    if other := names.find_other_name(".".join(part for part in path if not part.isdigit())):
        if other == "fleet.groups":
            return f" Did you mean [fleet] {_GROUPS}?"
        last = other.rpartition(".")[2] if len(path) > 1 else other
        return f' Did you mean "{last}"?' if last in keys else f" Did you mean {_format_suggestion(other, path)}?"
    hint = did_you_mean(word, keys)
    others = [s for s, f in schema.model_fields.items() if word in getattr(f.annotation, "model_fields", {})]
    if others and (not hint or len(path) == 1):
        return f" Did you mean {_format_suggestion(f'{others[0]}.{word}', path)}?"
    return hint or (f" The keys are {', '.join(keys)}." if keys else "")
