"""Which of the keys that a user gave were read: what makes a run of them notes it here, so that none is ignored.

While something is `reading`, the sections of a run file note each of their keys that is read (`noted`), and factories
say which of their own parameters the others leave without effect (`idle`). What was given and not read is not used.
Nobody lists keys: a key that is new, and read by nobody, is found too.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any


class Reading:
    """What was read so far.

    Attributes:
        idle: Parameters of factories without effect, by dotted key, and why.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._read: dict[int, set[str]] = {}
        self._sections: list[object] = []  # kept, so that no other object gets the number of one
        self.idle: dict[str, str] = {}

    def note(self, section: object, key: str) -> None:
        """Note that a key of a section is read."""
        if id(section) not in self._read:
            self._read[id(section)] = set()
            self._sections.append(section)
        self._read[id(section)].add(key)

    def has(self, section: object, key: str) -> bool:
        """Tell whether a key of a section was read."""
        return key in self._read.get(id(section), ())


_READING: ContextVar[Reading | None] = ContextVar("reading", default=None)
_CALL: ContextVar[tuple[str, Mapping[str, Any]] | None] = ContextVar("call", default=None)


@contextlib.contextmanager
def reading() -> Iterator[Reading]:
    """Note what is read from here on."""
    found = Reading()
    token = _READING.set(found)
    try:
        yield found
    finally:
        _READING.reset(token)


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Look at keys without using them: what is read meanwhile is not noted."""
    token = _READING.set(None)
    try:
        yield
    finally:
        _READING.reset(token)


def noted(section: object, key: str) -> None:
    """Say that a key of a section is read."""
    found = _READING.get()
    if found is not None:
        found.note(section, key)


@contextlib.contextmanager
def calling(where: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Say which parameters the factory that is called meanwhile got from a user, other than its defaults."""
    token = _CALL.set((where, given))
    try:
        yield
    finally:
        _CALL.reset(token)


def idle(*parameters: str, because: str) -> None:
    """Say in a factory that parameters have no effect beside the others that it got; a user who gave one is told.

    Args:
        *parameters: Their names.
        because: Why, as in `beta = 0`.
    """
    found, call = _READING.get(), _CALL.get()
    if found is None or call is None:
        return
    where, given = call
    for name in parameters:
        if name in given:
            found.idle[f"{dotted(where)}.{name}"] = because


def said(idle: Mapping[str, str]) -> None:
    """Say again what `idle` said when something was made that is now used once more: by dotted key, and why."""
    found = _READING.get()
    if found is not None:
        found.idle |= idle


def dotted(where: str) -> str:
    """Return the place of a section, such as "[data] partition", as a key is written: data.partition."""
    return where.replace("[", "").replace("] ", ".").replace("]", "")
