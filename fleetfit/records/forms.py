"""Whether values that were read from a file have the form that is expected: types, keys and ranges, by name.

A form is a function of a value and its place; it raises `ValueError` with a sentence that says place, value and what
was expected. Numbers are finite, and small enough to be added up.
"""

from collections.abc import Callable, Mapping
from typing import Any

Form = Callable[[Any, str], None]
_MOST = 1e300


def number(value: Any, where: str) -> None:
    """Expect a finite number."""
    if type(value) not in (int, float) or not abs(value) < _MOST:
        raise _wrong(value, where, "a number")


def share(value: Any, where: str) -> None:
    """Expect a number from 0 to 1."""
    number(value, where)
    if not 0 <= value <= 1:
        raise _wrong(value, where, "a number from 0 to 1")


def count(value: Any, where: str) -> None:
    """Expect a whole number from 0."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise _wrong(value, where, "a whole number from 0")


def truth(value: Any, where: str) -> None:
    """Expect true or false."""
    if not isinstance(value, bool):
        raise _wrong(value, where, "true or false")


def text(value: Any, where: str) -> None:
    """Expect text."""
    if not isinstance(value, str):
        raise _wrong(value, where, "text")


def anything(value: Any, where: str) -> None:
    """Expect nothing of a value."""


def maybe(form: Form) -> Form:
    """Expect a form, or nothing (null)."""
    return lambda value, where: None if value is None else form(value, where)


def listed(form: Form, least: int = 0) -> Form:
    """Expect a list of values of a form, of a length at least."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list | tuple) or len(value) < least:
            raise _wrong(value, where, f"a list{f' of at least {least}' if least else ''}")
        for place, inner in enumerate(value):
            form(inner, f"{where}/{place}")

    return check


def mapped(form: Form) -> Form:
    """Expect a table with any keys of text, whose values are of a form."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _wrong(value, where, "a table")
        for key, inner in value.items():
            form(inner, f"{where}/{key[:60]}")

    return check


def table(needed: Mapping[str, Form], further: Mapping[str, Form] | None = None) -> Form:
    """Expect a table with some keys, and forms for further ones where they are there; others may be anything."""

    def check(value: Any, where: str) -> None:
        mapped(anything)(value, where)
        for key, form in needed.items():
            if key not in value:
                raise ValueError(f"{where or 'it'} has no {key}")
            form(value[key], f"{where}/{key}" if where else key)
        for key, form in (further or {}).items():
            if key in value:
                form(value[key], f"{where}/{key}" if where else key)

    return check


def _wrong(value: Any, where: str, expected: str) -> ValueError:
    shown = f"a {type(value).__name__}"
    if value is None or isinstance(value, bool | str | float) or (type(value) is int and abs(value) < 10**20):
        shown = repr(value)[:60]
    return ValueError(f"{where or 'it'} is {shown}, expected {expected}")
