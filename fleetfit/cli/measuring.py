"""What `plan --latency` does: measure sub-models in turn, with progress on stderr, and say how it was done."""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fleetfit.cli import output
from fleetfit.cli.planning import Shown
from fleetfit.cost import Latency, Timed, latencies_in_turn
from fleetfit.errors import ConfigError
from fleetfit.papers.table import PaperTable
from fleetfit.records import processor
from fleetfit.report.text import duration

_LINE_S = 15.0  # between two lines of progress
_DRAWN_S = 0.2  # the same in a terminal
_QUIET = 0.95  # of the passes' time their thread has a processor where nothing else computes


@dataclass(frozen=True)
class Measuring:
    """How latencies are measured.

    Attributes:
        passes: How many passes of one sample count.
        threads: Threads that compute.
    """

    passes: int
    threads: int

    def __post_init__(self) -> None:
        """Check the threads; with many more than processors their library ends the process.

        Raises:
            ConfigError: The machine has not so many processors.
        """
        processors = os.cpu_count() or 1
        if self.threads > processors:
            has = _counted(processors, "processor", "processors")
            raise ConfigError(f"--threads takes at most as many as there are processors; this machine has {has}, got "
                              f"{self.threads}.")  # fmt: skip

    def of_table(self, table: PaperTable) -> PaperTable:
        """Return a table of a paper with the latencies of its rows.

        Raises:
            ConfigError: Its rows are no models.
        """
        if not table.models:
            raise ConfigError(f'--latency measures models, and the rows of "{table.title}" are none; leave it out.')
        latencies = self._measured(table.models)
        names = [str(row[0]) for row in table.rows]
        return table.measured(latencies, self._how(names, latencies))

    def of_plan(self, found: Shown) -> Shown:
        """Return a plan with the latencies of its levels and of the full model."""
        latencies = self._measured(found.models)
        names = [level.name for level in found.plan.levels]
        full, rows = latencies[-1], latencies[:-1]
        return replace(found, latencies=tuple(latencies), how=self._how(names, rows, full))

    def _measured(self, models: Sequence[Timed]) -> list[Latency]:
        distinct: list[Timed] = []
        for model in models:
            if model not in distinct:
                distinct.append(model)
        progress = _PassesShown(len(distinct), self.passes)
        try:
            found = latencies_in_turn(distinct, self.passes, self.threads, progress)
        finally:
            progress.close()
        return [found[distinct.index(model)] for model in models]

    def _how(self, names: Sequence[str], found: Sequence[Latency], full: Latency | None = None) -> tuple[str, ...]:
        passes, threads = _counted(self.passes, "pass", "passes"), _counted(self.threads, "thread", "threads")
        how = (
            f"Measured here: median of {passes} of one sample, ± what lies between the quartiles; the models in turn, "
            f"{threads} of {processor()}, PyTorch {torch.__version__}, fp32, random weights."
        )
        return how, *_busy(names, found, full or found[0])


def _busy(names: Sequence[str], found: Sequence[Latency], full: Latency) -> tuple[str, ...]:
    """Return what is to be known where other processes had the processor during the passes."""
    shares = [one.processor_share for one in found if one.processor_share is not None]
    if not shares or full.processor_s is None or statistics.mean(shares) >= _QUIET:
        return ()
    fractions = [
        f"{name}: {one.processor_s / full.processor_s:.3f}"
        for name, one in zip(names, found, strict=True)
        if one.processor_s is not None
    ]
    return (
        f"The machine was busy: the passes had a processor for {100 * statistics.mean(shares):.0f}% of their time. In "
        f"the processor's seconds, which others disturb less, measured / full is {'; '.join(fractions)}.",
    )


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


class _PassesShown:
    """Shows how many passes are done: a bar in a terminal, else a line now and then; never while a pass runs."""

    def __init__(self, models: int, passes: int) -> None:
        self._models, self._all = models, models * passes
        self._began = self._said = time.monotonic()
        what = f"{_counted(passes, 'pass', 'passes')} of {_counted(models, 'model', 'models')}"
        self._bar: Progress | None = None
        if not sys.stderr.isatty():
            output.print_sentence(f"measuring {what}.")
            return
        columns = TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.percentage:.0f}%")
        self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), auto_refresh=False,
                             transient=True)  # fmt: skip
        self._bar.start()
        self._task = self._bar.add_task(f"Measuring {what}", total=self._all)
        self._bar.refresh()

    def __call__(self, done: int) -> None:
        """Take that so many passes are done, of all models together."""
        now = time.monotonic()
        if self._bar is not None:
            if now - self._said >= _DRAWN_S:
                self._said = now
                self._bar.update(self._task, completed=done, refresh=True)
            return
        if now - self._said >= _LINE_S and done < self._all:
            self._said = now
            left = duration((now - self._began) * (self._all - done) / done)
            output.print_sentence(
                f"measured {done // self._models:,} of {self._all // self._models:,} passes; {left} left."
            )

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
