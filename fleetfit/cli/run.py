"""The verbs on one run: `run`, `resume`, `watch`; and `demo`, a comparison that needs no file."""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fleetfit
from fleetfit import files
from fleetfit.cli import output
from fleetfit.cli.arguments import (
    Changes,
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
    path_argument,
    path_option,
)
from fleetfit.errors import WINDOWS, ConfigError, RunError
from fleetfit.machine import available_cores

if TYPE_CHECKING:
    from rich.progress import Progress

    from fleetfit.api.follow import FollowedRun
    from fleetfit.api.progress import RoundProgress, RunDisplay


def run(
    file: RunFile = None, out: Out = None, overrides: Overrides = None, fast: Fast = False, quiet: Quiet = False
) -> None:
    """Train a federated model as described by a run file. Every key has a default.

    Writes a run folder (in `runs/`, or --out) with the complete configuration, metrics, checkpoints, plan, summary,
    plots and page. `fleetfit resume FOLDER` continues a stopped run.
    """
    from fleetfit.config import load_experiment

    display = make_display(quiet)
    with _explain_interrupt(display):
        experiment = load_experiment(file, add_speed(overrides, fast))
        finished = fleetfit.run(experiment, out=out, progress=display)
    output.print_locations(finished.folder, quiet=quiet)


def resume(folder: Folder, overrides: Changes = None, quiet: Quiet = False) -> None:
    """Continue a stopped run. The result equals that of an uninterrupted run, bit for bit.

    With --set, it continues with other rounds, fleet.groups, fleet.levels, evaluate.patience or keys of [checkpoint]; a
    finished run trains further rounds.
    """
    from fleetfit.api.run import resume_run
    from fleetfit.config.load import parse_overrides

    display = make_display(quiet)
    with _explain_interrupt(display):
        finished = resume_run(folder, parse_overrides(overrides or ()), {}, progress=display)
    if display.folder is None and not quiet:
        output.print_line(f"{folder} is already finished.")
        output.print_summary(finished.summary)
    output.print_locations(finished.folder, quiet=quiet)


def make_display(quiet: bool) -> "RunDisplay":
    """Return the display of a run on stdout, which ends with the tables of the run; or one that shows nothing."""
    from fleetfit.api.progress import RunDisplay

    return RunDisplay(None) if quiet else RunDisplay(sys.stdout, output.print_summary)


@contextlib.contextmanager
def _explain_interrupt(display: "RunDisplay") -> Iterator[None]:
    """After the run has started, turn Ctrl-C into a message with the command that continues it."""
    try:
        yield
    except KeyboardInterrupt:
        if display.folder is None:
            raise
        with output.explain_interrupt(f"fleetfit resume {display.folder}"):
            raise


# ---- watch ---------------------------------------------------------------------------------------------------------

WATCH_S = 1.0
"""Seconds between two reads of the folder."""


def watch(
    folder: Annotated[Path, path_argument(parse_folder, "Folder of a run or a comparison.")],
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
) -> None:
    """Follow a run or a comparison that another process computes. Ctrl-C stops only the watching.

    Works on runs of a fleet, too. Writes no files.
    """
    from fleetfit.api.comparison.plan import is_running
    from fleetfit.runs.comparison import list_planned_runs

    is_run = files.is_file(folder / "config.toml")
    runs = [] if is_run else list_planned_runs(folder)
    if not is_run and not runs:
        raise RunError(
            f"{folder} is not a run folder or a comparison's folder. Name the folder of a started run or comparison.",
            path=folder,
        )
    titles = {run.subfolder: f"[{number}/{len(runs)}] {run.title}" for number, run in enumerate(runs, 1)}
    if not once and is_running(folder):
        output.print_line(f"Watching {folder}. Ctrl-C stops only the watching.")
    followed, alive = _follow(folder, {Path(): ""} if is_run else titles, once)
    if is_run:
        _print_run_state(followed[0], alive)
    else:
        _print_comparison_state(folder, sum(run.finished for run in followed), len(followed), alive)


def _follow(folder: Path, titles: Mapping[Path, str], once: bool) -> "tuple[list[FollowedRun], bool]":
    """Show runs until they are finished or their process ends; return them, and whether it is running."""
    from fleetfit.api.comparison.plan import is_running
    from fleetfit.api.follow import FollowedRun
    from fleetfit.api.progress import make_bars

    runs = [FollowedRun(folder / subfolder) for subfolder in titles]
    bars = make_bars() if len(runs) > 1 and sys.stdout.isatty() else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(bars or contextlib.nullcontext())
        displays = [stack.enter_context(contextlib.closing(_FollowDisplay(title, bars))) for title in titles.values()]
        try:
            while True:
                alive = is_running(folder)  # before reading, so that rounds written before the end are read below
                for run, display in zip(runs, displays, strict=True):
                    display.update(run)
                if once or not alive or all(run.finished for run in runs):
                    return runs, alive
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            raise output.UserInterrupt(f"stopped watching; {folder} continues.") from None


class _FollowDisplay:
    """Shows the new rounds of a followed run; of those before the first look only the last one."""

    def __init__(self, title: str, bars: "Progress | None") -> None:
        self._title, self._bars = title, bars
        self._rounds: RoundProgress | None = None

    def update(self, run: "FollowedRun") -> None:
        from fleetfit.api.progress import RoundProgress

        if run.finished:
            return
        before = run.round
        reports = run.read()
        if run.round < before:
            output.print_line(f"{self._title or run.folder} was resumed after round {run.round}.")
        if reports and run.run is not None and (self._rounds is not None or not run.finished):
            if self._rounds is None:
                self._rounds = RoundProgress(self._title, run.run.experiment, self._bars, folder=run.folder)
                reports = reports[-1:]
            for report in reports:
                self._rounds(report)
        if run.finished:
            self.close()
            if self._title:
                output.print_line(f"{self._title}: finished.")

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()


def _print_run_state(run: "FollowedRun", is_running: bool) -> None:
    from fleetfit.api.commands import format_resume

    folder, rounds = run.folder, run.run.experiment.rounds if run.run is not None else 0
    if run.finished and run.run is not None:
        output.print_line(f"{folder} is finished.")
        output.print_summary(run.run.summary)
        output.print_locations(folder)
        return
    state = f"after round {run.round} of {rounds}" if run.round else "before its first round"
    if is_running:
        output.print_line(f"{folder} is running, {state}.")
    else:
        output.print_line(f"{folder} was stopped {state}. Continue it: {format_resume(folder)}")


def _print_comparison_state(folder: Path, finished: int, total: int, is_running: bool) -> None:
    count = f"{finished} of {total} runs are finished"
    if is_running:
        output.print_line(f"{folder} is running: {count}.")
    elif finished == total:
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
        path_option(parse_output_file, "Only write the run file. Edit it, then run `fleetfit compare FILE`."),
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
