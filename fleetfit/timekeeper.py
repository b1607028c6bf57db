"""Where the time of a round goes: wall seconds by part, each moment counted once."""

import contextlib
import time
from collections.abc import Callable, Iterator

PARTS = ("training", "evaluation", "averaging", "validation", "checkpoints")
"""What a round's seconds are told apart by.

Training is what the server waits for updates, cutting out what is sent included; averaging is `merge`, `step` and what
a method does between them; validation is the look at each update, and at the state that they gave.
"""


class Timekeeper:
    """Adds up the seconds of parts; while one is inside of another, the outer one stands still."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Begin with nothing; `now` gives the time in seconds."""
        self._now = now
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count the seconds of a block as this part's."""
        self._turn()
        self._open.append(part)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = self._now()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def read(self) -> dict[str, float]:
        """Return the seconds of each part so far, and begin anew."""
        found, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return found
