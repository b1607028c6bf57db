"""The verbs on one run: `run`, `resume`, `watch`; and `demo`, a comparison that needs no file."""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fleetfit
from fleetfit import files
from fleetfit.cli import output
from fleetfit.cli.arguments import (
    Fast,
    Folder,
    NewOrStopped,
    Out,
    Overrides,
    Quiet,
    RunFile,
    add_speed,
    parse_folder,
    parse_output_file,
)
from fleetfit.errors import WINDOWS, ConfigError, RunError
from fleetfit.machine import available_cores

if TYPE_CHECKING:
    from rich.progress import Progress

    from fleetfit.api.progress import RoundProgress, RunLike
    from fleetfit.api.results import Run


def run(
    file: RunFile = None, out: Out = None, overrides: Overrides = None, fast: Fast = False, quiet: Quiet = False
) -> None:
    """Train a federated model as described by a run file. Every key has a default.

    Writes a run folder (in `runs/`, or --out) with the complete configuration, metrics, checkpoints, plan, summary,
    plots and page. `fleetfit resume FOLDER` continues a stopped run.
    """
    display = TrainingDisplay(quiet)
    with display.explain_interrupt():
        finished = fleetfit.run(file, out=out, overrides=add_speed(overrides, fast), progress=display)
    output.print_locations(finished.folder)


def resume(folder: Folder, quiet: Quiet = False) -> None:
    """Continue a stopped run. The result equals that of an uninterrupted run, bit for bit."""
    display = TrainingDisplay(quiet)
    with display.explain_interrupt():
        finished = fleetfit.resume(folder, progress=display)
    if display.folder is None:
        output.print_line(f"{folder} is already finished.")
        output.print_summary(finished.summary)
    output.print_locations(finished.folder)


class TrainingDisplay:
    """Prints the notes, rounds and result of a run (see `fleetfit.api.progress.Display`).

    Attributes:
        folder: The run folder; None until the run starts.
    """

    def __init__(self, quiet: bool) -> None:
        self.folder: Path | None = None
        self._quiet = quiet
        self._notes: Sequence[str] = ()
        self._progress: RoundProgress | None = None

    def say(self, sentence: str) -> None:
        """Print a progress sentence."""
        if not self._quiet:
            output.print_line(sentence)

    def start(self, run: "RunLike", notes: Sequence[str]) -> None:
        """Print the notes and the run folder."""
        from fleetfit.api.progress import RoundProgress

        output.print_notes(notes)
        self._notes = notes
        self.folder = run.folder
        if not self._quiet:
            output.print_line(f"Run folder: {self.folder}")
            self._progress = RoundProgress("", run.experiment)

    def show_round(self, report: Mapping[str, Any]) -> None:
        """Show the report of a round."""
        if self._progress is not None:
            self._progress(report)

    def show_result(self, summary: Mapping[str, Any]) -> None:
        """Print the tables of the run."""
        self.close()
        output.print_summary(summary, self._notes)

    def close(self) -> None:
        """Restore the terminal."""
        if self._progress is not None:
            self._progress.close()

    @contextlib.contextmanager
    def explain_interrupt(self) -> Iterator[None]:
        """After the run has started, turn Ctrl-C into a message with the command that continues it."""
        try:
            yield
        except KeyboardInterrupt:
            if self.folder is None:
                raise
            with output.explain_interrupt(f"fleetfit resume {self.folder}"):
                raise


# ---- watch ---------------------------------------------------------------------------------------------------------

WATCH_S = 1.0
"""Seconds between two reads of the folder."""


def watch(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run or a comparison.", parser=parse_folder, metavar="FOLDER")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
) -> None:
    """Follow a run or a comparison that another process computes. Ctrl-C stops only the watching.

    Works on runs of a fleet, too. Writes no files.
    """
    from fleetfit.api.progress import make_bars
    from fleetfit.runs.planned import list_planned_runs

    if files.is_file(folder / "config.toml"):
        _follow(folder, [_WatchedRun(folder, "", None)], once)
        return
    runs = list_planned_runs(folder)
    if not runs:
        raise RunError(
            f"{folder} is not a run folder or a comparison's folder. Name the folder of a started run or comparison.",
            path=folder,
        )
    bars = make_bars() if sys.stdout.isatty() else None
    watched = [
        _WatchedRun(folder / run.subfolder, f"[{number}/{len(runs)}] {run.title}", bars)
        for number, run in enumerate(runs, 1)
    ]
    with bars or contextlib.nullcontext():
        _follow(folder, watched, once)


class _WatchedRun:
    """A watched run; it may not have started yet."""

    def __init__(self, folder: Path, title: str, bars: "Progress | None") -> None:
        self.folder, self.title, self._bars = folder, title, bars
        self.run: Run | None = None
        self.finished = False
        self._size = -1
        self._progress: RoundProgress | None = None
        self._round = 0  # the last round shown

    def update(self) -> None:
        """Show new rounds."""
        if self.finished or not files.is_file(self.folder / "config.toml"):
            return
        is_first = self.run is None
        self.run = self.run or fleetfit.load(self.folder)
        is_finished = self.run.finished
        if not (is_first and is_finished):
            self._show_rounds(self.run)
        if is_finished:
            self.finished = True
            self.close()
            if self.title:
                output.print_line(f"{self.title}: finished.")

    def _show_rounds(self, run: "Run") -> None:
        from fleetfit.api.progress import RoundProgress

        try:
            size = (run.folder / "metrics.jsonl").stat().st_size
        except FileNotFoundError:
            return
        if size == self._size:
            return
        is_first, self._size = self._size < 0, size
        reports = run.files.metrics()
        if reports and reports[-1]["round"] < self._round:
            self._round = reports[-1]["round"]
            output.print_line(f"{self.title or run.folder} was resumed after round {self._round}.")
        for report in reports[self._round :]:
            if self._progress is None:
                self._progress = RoundProgress(self.title, run.experiment, self._bars)
            if is_first and report is not reports[-1]:
                self._progress.skip(report)  # of the earlier rounds, show the last one only
            else:
                self._progress(report)
            self._round = report["round"]

    @property
    def state(self) -> str:
        """The number of finished rounds, in words."""
        if self.run is None:
            return "not started"
        return f"after round {self._round} of {self.run.experiment.rounds}" if self._round else "before its first round"

    def close(self) -> None:
        """Restore the terminal."""
        if self._progress is not None:
            self._progress.close()


def _follow(folder: Path, runs: Sequence[_WatchedRun], once: bool) -> None:
    from fleetfit.api.comparison.plan import is_running

    if not once and is_running(folder):
        output.print_line(f"Watching {folder}. Ctrl-C stops only the watching.")
    try:
        while True:
            alive = is_running(folder)  # before reading, so that rounds written before the end are read below
            for run in runs:
                run.update()
            if once or not alive or all(run.finished for run in runs):
                break
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        raise output.UserInterrupt(f"stopped watching; {folder} continues.") from None
    finally:
        for run in runs:
            run.close()
    _print_state(folder, runs, alive)


def _print_state(folder: Path, runs: Sequence[_WatchedRun], is_running: bool) -> None:
    (first, *_) = runs
    if not first.title:
        if first.finished and first.run is not None:
            output.print_line(f"{folder} is finished.")
            output.print_summary(first.run.summary)
            output.print_locations(folder)
        elif is_running:
            output.print_line(f"{folder} is running, {first.state}.")
        else:
            output.print_line(f"{folder} was stopped {first.state}. Continue it: fleetfit resume {folder}")
        return
    finished = sum(run.finished for run in runs)
    count = f"{finished} of {len(runs)} runs are finished"
    if is_running:
        output.print_line(f"{folder} is running: {count}.")
    elif finished == len(runs):
        output.print_line(f"{folder} is finished: {count}. Its table: {folder / 'table.md'}")
    else:
        output.print_line(f"{folder} was stopped: {count}. Run the same fleetfit compare command to continue it.")


# ---- demo ----------------------------------------------------------------------------------------------------------

DEMO = Path(__file__).with_name("demo.toml")


def demo(
    out: NewOrStopped = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Number of runs at a time. Default: the number of cores, at most 4."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Only write the run file. Edit it, then run `fleetfit compare FILE`.",
            parser=parse_output_file,
            metavar="FILE",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set one key in all runs, such as rounds=5. Repeatable."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Compare FleetFit, ScaleFL, HeteroFL and the smallest model on handwritten digits. It needs no file.

    40 clients with four budgets; takes a minute on two cores. Run the same command again to continue a stopped demo.
    """
    from fleetfit.cli.compare import run_comparison

    if write is None:
        if jobs is None:
            has_workers = any(override.startswith("engine.name") for override in overrides or ())
            jobs = 1 if has_workers or WINDOWS else min(available_cores(), 4)
        run_comparison(DEMO, ["demo"], out=out, jobs=jobs, overrides=overrides, quiet=quiet)
        if not quiet:
            output.print_line("To edit its run file: fleetfit demo --write mine.toml")
        return
    if write.is_file():
        raise ConfigError(f"{write} already exists. Choose a new file for --write.", key="write", path=write)
    try:
        files.write_user_file(write, DEMO.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot write the run file to {write}: {error.strerror}.", key="write", path=write) from None
    output.print_line(f"Edit it, then run: {shlex.join(['fleetfit', 'compare', str(write)])}")
