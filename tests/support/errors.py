"""Assertions on errors by class and attributes; never on the wording of a message."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfit.errors import FleetFitError


class Expected:
    """What `raises` expects of an error, as a value: for tables of cases, whose errors may differ in `kind`."""

    def __init__(self, *mentions: object, kind: type[FleetFitError] | None = None, **attributes: Any) -> None:
        self.mentions, self.kind, self.attributes = mentions, kind, attributes

    def __repr__(self) -> str:
        return ", ".join([*map(repr, self.mentions), *(f"{key}={value!r}" for key, value in self.attributes.items())])


@contextlib.contextmanager
def raises(
    kind: type[BaseException], *mentions: object, **attributes: Any
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of exactly this class.

    Args:
        kind: The class, FleetFit's or another; a subclass does not do.
        *mentions: Values that the message must quote because the user needs them: names, numbers, places, never words
            of the sentence. A number must be there as a whole. An `Expected` adds its mentions and attributes.
        **attributes: Expected attributes, such as `key="local.lr"`, `path=folder / "config.toml"` or
            `errno=errno.EBUSY`. Of a relative path, only the parts that it has are compared: `path="config.toml"` fits
            in any folder.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    kinds = [expected.kind for expected in mentions if isinstance(expected, Expected) and expected.kind] or [kind]
    assert [type(error)] == kinds, f"{type(error).__name__}: {error}"
    for expected in mentions:
        if isinstance(expected, Expected):
            check_error(error, *expected.mentions, **expected.attributes)
        else:
            check_error(error, expected)
    check_error(error, **attributes)


def check_error(error: BaseException, *mentions: object, **attributes: Any) -> None:
    """Check what `raises` checks, of an error that is at hand."""
    for name, expected in attributes.items():
        value = getattr(error, name)
        if name == "path" and value is not None and expected is not None:
            value, expected = Path(value), Path(expected)
            value = value if expected.is_absolute() else Path(*value.parts[-len(expected.parts) :])
        assert value == expected, f"{name} is {value!r}, expected {expected!r}; the message is: {error}"
    for mention in mentions:
        assert _is_mentioned(mention, str(error)), f"{mention!r} is not in: {error}"


def _is_mentioned(value: object, message: str) -> bool:
    if isinstance(value, (int, float)):
        return re.search(rf"(?<![\d.]){re.escape(str(value))}(?!\.?\d)", message) is not None
    return str(value) in message
