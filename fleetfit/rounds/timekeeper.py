"""Measure where the time of a round goes: wall seconds by part, each moment counted once."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

PARTS = ("training", "evaluation", "averaging", "validation", "checkpoints")
"""The parts of a round.

Training: the server makes the jobs and waits for updates. Averaging: the method handles updates (`filter_updates`,
`annotate`, `weigh`, `make_aggregator`) and the server steps. Validation: each update is checked, and the state after.
"""

T = TypeVar("T")


class Timekeeper:
    """Adds up the seconds of parts. A part inside another one interrupts it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count the seconds of a block as those of a part."""
        self._turn()
        self._open.append(part)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def iterate(self, part: str, items: Iterable[T]) -> Iterator[T]:
        """Yield items, and count the seconds until each comes as those of a part."""
        iterator = iter(items)
        while True:
            with self.on(part):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def _turn(self) -> None:
        now = self._now()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def read(self) -> dict[str, float]:
        """Return the seconds of each part so far, and start again at 0."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds
