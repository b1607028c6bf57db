"""Assertions on errors by class and attributes; never on the wording of a message."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfit.errors import FleetFitError


@contextlib.contextmanager
def raises(
    kind: type[FleetFitError], *mentions: object, **attributes: Any
) -> Iterator[pytest.ExceptionInfo[FleetFitError]]:
    """Expect an error of exactly this class.

    Args:
        kind: The class; a subclass does not do.
        *mentions: Values that the message must quote because the user needs them: names, numbers, places, never words
            of the sentence.
        **attributes: Expected attributes, such as `key="local.lr"` or `path=folder / "config.toml"`.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    for name, expected in attributes.items():
        value = getattr(error, name)
        if name == "path" and value is not None:
            value, expected = Path(value), Path(expected)
        assert value == expected, f"{name} is {value!r}, expected {expected!r}; the message is: {error}"
    for value in mentions:
        assert str(value) in str(error), f"{value!r} is not in: {error}"
