"""Base classes and number types of the sections of a run file; reading and replacing their keys."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import ConfigDict, Field

from fleetfit.errors import truncate

Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Below1 = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Unit = Annotated[str, Field(pattern=r"[0-9]\s*[A-Za-z]+\s*$")]
Norm = Literal["static", "batch"]


class Section(pydantic.BaseModel):
    """A table of declared keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)


class OpenSection(Section):
    """A section that names a function. Further keys are the function's, checked against its signature."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True)

    @property
    def settings(self) -> dict[str, Any]:
        """The keys that belong to the function."""
        return dict(self.model_extra or {})


S = TypeVar("S")


def get_value(section: Any, key: str) -> Any:
    """Return the value at a dotted key of a section; None if there is none. The empty key is the section."""
    for part in filter(None, key.split(".")):
        section = getattr(section, part, None)
    return section


def format_key(key: str) -> str:
    """Return a dotted key as in a run file: `[local] schedule.at`, `[fleet] groups #1.budget`, or `rounds`."""
    first, *others = [f"#{int(part) + 1}" if part.isdecimal() else truncate(part) for part in key.split(".")]
    return f"[{first}] {'.'.join(others)}".replace(".#", " #") if others else first


def replace_key(section: S, key: str, value: Any) -> S:
    """Return a section, or a table, with another value at a dotted key. The value is not validated."""
    first, dot, rest = key.partition(".")
    old = section.get(first, {}) if isinstance(section, Mapping) else getattr(section, first, None)
    new = replace_key(old, rest, value) if dot else value
    if isinstance(section, pydantic.BaseModel):
        return section.model_copy(update={first: new})
    return {**section, first: new}  # type: ignore[dict-item, return-value]  # a table


def dump_section(value: Any, only_set: bool = False) -> Any:
    """Return a section as tables: the keys that are set, or those with a value. pydantic's dump converts objects."""
    if isinstance(value, pydantic.BaseModel):
        keys = value.model_fields_set if only_set else {key for key, inner in value if inner is not None}
        return {key: dump_section(inner, only_set) for key, inner in value if key in keys}
    return [dump_section(inner, only_set) for inner in value] if isinstance(value, list) else value
