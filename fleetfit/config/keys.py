"""Read, replace and print dotted keys of sections and tables."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from fleetfit.errors import truncate

S = TypeVar("S")


def split_key(key: str) -> list[str]:
    """Return the parts of a dotted key. An own option's name may have dots: `method.options.own.py:option.mu`."""
    parts = key.split(".")
    last = next((i for i, part in enumerate(parts) if ":" in part), 0)
    first = parts.index("options") + 1 if last and "options" in parts[:last] else last
    return [*parts[:first], ".".join(parts[first : last + 1]), *parts[last + 1 :]]


def get_value(section: Any, key: str) -> Any:
    """Return the value at a dotted key of a section; None if there is none. The empty key is the section."""
    for part in filter(None, split_key(key)):
        section = section.get(part) if isinstance(section, Mapping) else getattr(section, part, None)
    return section


def format_key(key: str) -> str:
    """Return a dotted key as in a run file: `[local] schedule.at`, `[fleet] groups #1.budget`, or `rounds`."""
    first, *others = [f"#{int(part) + 1}" if part.isdecimal() else truncate(part) for part in key.split(".")]
    return f"[{first}] {'.'.join(others)}".replace(".#", " #") if others else first


def replace_key(section: S, key: str, value: Any) -> S:
    """Return a section, or a table, with another value at a dotted key. The value is not validated."""
    return _replace(section, split_key(key), value)


def _replace(section: S, parts: Sequence[str], value: Any) -> S:
    first, *rest = parts
    old = section.get(first, {}) if isinstance(section, Mapping) else getattr(section, first, None)
    new = _replace(old, rest, value) if rest else value
    if isinstance(section, pydantic.BaseModel):
        return section.model_copy(update={first: new})
    return {**section, first: new}  # type: ignore[dict-item, return-value]  # a table


def dump_section(value: Any, only_set: bool = False) -> Any:
    """Return a section as tables: the keys that are set, or those with a value. pydantic's dump converts objects."""
    if isinstance(value, pydantic.BaseModel):
        keys = value.model_fields_set if only_set else {key for key, inner in value if inner is not None}
        return {key: dump_section(inner, only_set) for key, inner in value if key in keys}
    return [dump_section(inner, only_set) for inner in value] if isinstance(value, list) else value
