"""A figure, and how a ratio is measured: both sides alternate in one process, the median counts, CPU and wall."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Step = Callable[[], Any]
"""One side of a ratio. What it returns is ignored, unless it is `Seconds`."""
Clock = Literal["cpu", "wall"]


class Seconds(NamedTuple):
    """What a side took that was measured elsewhere, in a process of its own."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Options:
    """How much to measure.

    Attributes:
        repetitions: Pairs that each ratio is the median of; a part takes more of them where a pair is short.
        quick: Smaller cases where a part has them.
    """

    repetitions: int = 9
    quick: bool = False


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    Attributes:
        name: What was measured and against what; `--check` finds what was written down by it, so it stays.
        value: A ratio, or an amount with a unit.
        low: The smallest of what `value` is the median of.
        high: The largest.
        repetitions: How many these are.
        detail: What else is worth knowing: both sides in milliseconds, say.
        unit: "" for a ratio. Amounts are shown, but not compared: they differ from machine to machine.
        better: Whether lower or higher is better.
        wanted: At most so much, or at least where higher is better; None: nothing is asked.
    """

    name: str
    value: float
    low: float
    high: float
    repetitions: int
    detail: str = ""
    unit: str = ""
    better: Literal["lower", "higher"] = "lower"
    wanted: float | None = None

    @property
    def text(self) -> str:
        """The value with its unit."""
        return f"{shown(self.value)}{' ' if self.unit else ''}{self.unit}"

    @property
    def target(self) -> str:
        """What is wanted, and whether it is so."""
        if self.wanted is None:
            return ""
        met = self.value <= self.wanted if self.better == "lower" else self.value >= self.wanted
        limit = f"at {'most' if self.better == 'lower' else 'least'} {self.wanted:g}"
        return limit if met else f"{limit}: **not met**"

    @property
    def line(self) -> str:
        """The figure as a line of text."""
        spread = f"range {shown(self.low)}-{shown(self.high)}, n = {self.repetitions}"
        return f"{self.name}: {self.text} ({'; '.join(filter(None, (spread, self.target, self.detail)))})"


def shown(value: float) -> str:
    """Return a number with three digits behind the point, or fewer where it is large."""
    size = abs(value)
    return f"{value:.3f}" if size < 10 else f"{value:.1f}" if size < 1000 else f"{value:,.0f}"


def alternate(ours: Step, theirs: Step, repetitions: int) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Run both in turn, once unmeasured, and yield the seconds of each pair: (cpu, cpu), (wall, wall)."""
    ours(), theirs()
    for _ in range(repetitions):
        a, b = _seconds(ours), _seconds(theirs)
        yield (a.cpu, b.cpu), (a.wall, b.wall)


def _seconds(side: Step) -> Seconds:
    cpu, wall = time.process_time(), time.perf_counter()
    found = side()
    return found if isinstance(found, Seconds) else Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def ratio(name: str, ours: Step, theirs: Step, repetitions: int, clock: Clock = "cpu", **more: Any) -> Figure:
    """Return the median of ours / theirs in CPU seconds of this process, or in wall seconds; the other is told too.

    `clock = "wall"` is for work that other processes do. `more`: further fields of the figure.
    """
    pairs = list(alternate(ours, theirs, repetitions))
    by_clock = {"cpu": [cpu for cpu, _ in pairs], "wall": [wall for _, wall in pairs]}
    mine, other = by_clock.pop(clock), next(iter(by_clock.items()))
    a, b = (statistics.median(column) * 1e3 for column in zip(*mine, strict=True))
    detail = f"{shown(a)} ms against {shown(b)} ms"
    if clock == "cpu":
        detail += f"; wall {shown(statistics.median(quotients(other[1])))}"
    detail = "; ".join(filter(None, (detail, more.pop("detail", ""))))
    return of_many(name, quotients(mine), detail=detail, **more)


def quotients(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the quotient of each pair; a side too short for the clock counts as one of its ticks."""
    return [max(a, 1e-9) / max(b, 1e-9) for a, b in pairs]


def of_many(name: str, values: Sequence[float], **more: Any) -> Figure:
    """Return the figure of a median, with its range."""
    return Figure(name, statistics.median(values), min(values), max(values), len(values), **more)


def amount(name: str, value: float, unit: str, **more: Any) -> Figure:
    """Return the figure of one amount that was measured once."""
    return Figure(name, value, value, value, 1, unit=unit, **more)
