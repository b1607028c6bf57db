"""`watch`: follows the rounds of a run, or of a comparison's runs, that another process computes; it only reads."""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from fleetfit import files
from fleetfit.api import Run, load
from fleetfit.api.compare.plan import is_running, list_planned_runs
from fleetfit.api.progress import Rounds, bars
from fleetfit.cli import display, output
from fleetfit.cli.output import UserInterrupt
from fleetfit.errors import RunError

LOOK_S = 1.0


class _Watched:
    """A run that is watched, perhaps one that has not begun."""

    def __init__(self, place: Path, title: str, bar: Progress | None) -> None:
        self.place, self.title, self._bar = place, title, bar
        self.run: Run | None = None
        self.finished = False
        self._size = -1
        self._shown: Rounds | None = None
        self._told = 0

    def look(self) -> None:
        """Show what is new."""
        if self.finished or not files.is_file(self.place / "config.toml"):
            return
        first = self.run is None
        self.run = self.run or load(self.place)
        finished = self.run.finished
        if not (first and finished):
            self._rounds(self.run)
        if finished:
            self.finished = True
            if self._shown is not None:
                self._shown.close()
            if self.title:
                output.print_line(f"{self.title}: finished.")

    def _rounds(self, run: Run) -> None:
        metrics = run.folder / "metrics.jsonl"
        with contextlib.suppress(FileNotFoundError):
            size = metrics.stat().st_size
            if size == self._size:
                return
            known = self._size
            self._size = size
            reports = run.files.metrics()
            if reports and reports[-1]["round"] < self._told:
                output.print_line(f"{self.title or run.folder} goes on after round {reports[-1]['round']}.")
                self._told = reports[-1]["round"]
            self._show(run, reports, first=known < 0)

    def _show(self, run: Run, reports: Sequence[Mapping[str, Any]], first: bool) -> None:
        for report in reports[self._told :]:
            if self._shown is None:
                self._shown = Rounds(self.title, run.experiment, self._bar)
            if first and report is not reports[-1]:
                self._shown.seen(report)  # of the rounds before, the last one is enough
            else:
                self._shown(report)
            self._told = report["round"]

    @property
    def how_far(self) -> str:
        """How many rounds are done, in words."""
        if self.run is None:
            return "has not begun"
        return f"after round {self._told} of {self.run.experiment.rounds}" if self._told else "before its first round"

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._shown is not None:
            self._shown.close()


def watch(folder: Path, once: bool = False) -> None:
    """Show the rounds of what is in a folder until it is finished, or stopped, or Ctrl-C; the run does not notice.

    Args:
        folder: Of a run, or of a comparison.
        once: Only say how far it is now.

    Raises:
        RunError: There is neither.
    """
    if files.is_file(folder / "config.toml"):
        _follow(folder, [_Watched(folder, "", None)], once)
        return
    runs = list_planned_runs(folder)
    if not runs:
        raise RunError(f"{folder} is no folder of a run or a comparison that can be watched.")
    bar = bars() if sys.stdout.isatty() else None
    count = len(runs)
    found = [_Watched(folder / r.place, f"[{i}/{count}] {r.title}", bar) for i, r in enumerate(runs, 1)]
    with bar or contextlib.nullcontext():
        _follow(folder, found, once)


def _follow(folder: Path, found: Sequence[_Watched], once: bool) -> None:
    if not once and is_running(folder):
        output.print_line(f"Watching {folder}; Ctrl-C leaves it alone.")
    try:
        while True:
            alive = is_running(folder)  # first: what it wrote before it ended is looked at then
            for one in found:
                one.look()
            if once or not alive or all(one.finished for one in found):
                break
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        raise UserInterrupt(f"stopped watching; {folder} goes on.") from None
    finally:
        for one in found:
            one.close()
    _conclude(folder, found, alive)


def _conclude(folder: Path, found: Sequence[_Watched], alive: bool) -> None:
    """Say how it stands."""
    if len(found) == 1 and not found[0].title:
        (one,) = found
        if one.finished and one.run is not None:
            output.print_line(f"{folder} is finished.")
            display.result(one.run)
        elif alive:
            output.print_line(f"{folder} is at work, {one.how_far}.")
        else:
            output.print_line(f"{folder} was stopped {one.how_far}; go on with: fleetfit resume {folder}")
        return
    done = sum(one.finished for one in found)
    of = f"{done} of {len(found)} runs are finished"
    if alive:
        output.print_line(f"{folder} is at work: {of}.")
    elif done == len(found):
        output.print_line(f"{folder} is finished: {of}. Its table: {folder / 'table.md'}")
    else:
        output.print_line(f"{folder} was stopped: {of}; the same fleetfit compare command goes on.")
