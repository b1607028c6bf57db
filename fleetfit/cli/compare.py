"""The verb `compare`: many runs and one table."""

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetfit.cli import output
from fleetfit.cli.arguments import (
    Fast,
    Jobs,
    NewOrStopped,
    Overrides,
    Quiet,
    add_speed,
    parse_folder,
    parse_run_file,
)
from fleetfit.errors import NoUsableUpdates

if TYPE_CHECKING:
    from rich.progress import Progress

    from fleetfit.api.comparison import ComparisonProgress
    from fleetfit.api.progress import RoundProgress
    from fleetfit.api.results import Run


def compare(
    file: Annotated[
        Path,
        typer.Argument(
            help="Run file with [[compare.row]], [compare.grid], [compare.tune].",
            parser=parse_run_file,
            metavar="FILE",
        ),
    ],
    out: NewOrStopped = None,
    jobs: Jobs = 1,
    against: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="Label of the baseline row. Default: compare.against, or the first row."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Also write the final results to NAME.json in this folder, for version control.",
            parser=parse_folder,
            metavar="FOLDER",
        ),
    ] = None,
    overrides: Overrides = None,
    fast: Fast = False,
    quiet: Quiet = False,
) -> None:
    """Run every row of a file in every setting with every seed, and print one table.

    Run the same command again to continue a stopped comparison: finished runs are skipped. The tables are also written
    as Markdown and CSV, and all results as one `results.json`.
    """
    run_comparison(file, ["compare", str(file)], out=out, jobs=jobs, overrides=overrides, fast=fast, quiet=quiet,
                   against=against, record=record)  # fmt: skip


def run_comparison(
    file: Path,
    verb: Sequence[str],
    *,
    out: Path | None,
    jobs: int,
    overrides: Sequence[str] | None,
    quiet: bool,
    fast: bool = False,
    against: str | None = None,
    record: Path | None = None,
) -> None:
    """Run a comparison and print it.

    Args:
        file: The run file.
        verb: The verb and its arguments. Together with the options below they make the command that continues the
            comparison.
        out: Folder to write, or to continue.
        jobs: Runs at a time.
        overrides: `KEY=VALUE`, for all runs.
        quiet: Print only the result, no progress.
        fast: Set `engine.speed=fast`.
        against: Label of the baseline row.
        record: Folder where the results are also stored.
    """
    from fleetfit.api.comparison import compare
    from fleetfit.report.tables import make_row_level_table

    values = {"--out": out, "--jobs": jobs if jobs > 1 else None, "--against": against, "--record": record}
    options = [str(word) for option, value in values.items() if value is not None for word in (option, value)]
    options += [word for override in overrides or () for word in ("--set", override)] + ["--fast"] * fast
    command = shlex.join(["fleetfit", *verb, *options])
    with output.explain_interrupt(command), contextlib.closing(ComparisonDisplay(quiet, jobs)) as display:
        if not quiet:
            output.print_line("Checking every row and setting before the first run.")
        comparison = compare(
            file, out=out, overrides=add_speed(overrides, fast), jobs=jobs, against=against, record=record,
            on_run=display.show_run, on_progress=display.show_progress,
        )  # fmt: skip
    for table in comparison.tables:
        output.print_table(table, None if table is comparison.table else 100)
    output.print_table(
        make_row_level_table({key: [run.files.read_summary() for run in runs] for key, runs in comparison.runs.items()})
    )
    output.print_line(f"Results: {comparison.results}")
    output.print_locations(comparison.folder)
    if comparison.failures:
        raise NoUsableUpdates(
            f"{len(comparison.failures)} runs failed, all others are finished: {'; '.join(comparison.failures)}. See "
            "the notes below the table for the reasons.",
            path=comparison.folder,
        )


class ComparisonDisplay:
    """Shows the runs of a comparison and their rounds. It prints each note once per row, not once per seed."""

    def __init__(self, quiet: bool, jobs: int) -> None:
        self._quiet, self._notes = quiet, set[tuple[str, str]]()
        self._has_started, self._time_left = False, ""
        self._bars: Progress | None = None
        if jobs > 1 and not quiet and sys.stdout.isatty():
            from fleetfit.api.progress import make_bars

            self._bars = make_bars()
            self._bars.start()

    def show_run(self, title: str, number: int, count: int, run: "Run") -> "RoundProgress | None":
        """Print the title of a run; return its progress display, or None if nothing is shown."""
        from fleetfit.api.progress import RoundProgress

        heading = title if self._quiet else f"[{number}/{count}] {title}"
        for note in run.notes:
            if (run.experiment.name, note) not in self._notes:
                self._notes.add((run.experiment.name, note))
                output.print_line(f"{heading}: {note}")
        if self._quiet:
            return None
        if run.finished:
            output.print_line(f"{heading}: already finished.")
            return None
        return RoundProgress(heading, run.experiment, self._bars, lambda: self._time_left)

    def show_progress(self, progress: "ComparisonProgress") -> None:
        """Print the number of runs at first, and the estimated duration once; the rounds show it from then on."""
        from fleetfit.api.progress import print_above
        from fleetfit.report.text import format_duration

        if self._quiet:
            return
        if not self._has_started:
            self._has_started = True
            print_above(self._bars, format_run_count(progress))
        if progress.seconds_left:
            is_first, about = not self._time_left, format_duration(progress.seconds_left)
            is_guess = progress.rows_measured < progress.rows
            self._time_left = f"{'perhaps ' * is_guess}{about} left of all"
            if is_first:
                rows = f" ({progress.rows_measured} of {progress.rows} rows measured)"
                print_above(
                    self._bars,
                    (
                        f"About {about} left for the whole comparison, estimated from the rounds so "
                        f"far{rows * is_guess}."
                    ),
                )

    def close(self) -> None:
        """Restore the terminal."""
        if self._bars is not None:
            self._bars.stop()


def format_run_count(progress: "ComparisonProgress") -> str:
    """Return the number of runs: "8 runs, of which 4 tune before the others; 3 are finished."."""
    text = f"{progress.runs} run{'s' * (progress.runs != 1)}"
    if progress.tuning:
        text += f", of which {progress.tuning} tune before the others"
    if progress.jobs > 1:
        text += f", {progress.jobs} at a time"
    if progress.finished:
        text += f"; {progress.finished} {'is' if progress.finished == 1 else 'are'} finished"
    return f"{text}."
