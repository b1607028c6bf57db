"""The verb `compare`: many runs and one table."""

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
    path_argument,
    path_option,
)
from fleetfit.errors import COMMAND, NoUsableUpdates

if TYPE_CHECKING:
    from fleetfit.api.comparison import Comparison


def compare(
    file: Annotated[
        Path, path_argument(parse_run_file, "Run file with [[compare.row]], [compare.grid], [compare.tune].")
    ],
    out: NewOrStopped = None,
    jobs: Jobs = 1,
    against: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="Label of the baseline row. Default: compare.against, or the first row."),
    ] = None,
    record: Annotated[
        Path | None,
        path_option(parse_folder, "Also write the final results to NAME.json in this folder, for version control."),
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
        quiet: Print only the folder.
        fast: Set `engine.speed=fast`.
        against: Label of the baseline row.
        record: Folder where the results are also stored.
    """
    from fleetfit.api.comparison import compare as compare_rows, plan_comparison
    from fleetfit.api.progress import ComparisonDisplay

    values = {"--out": out, "--jobs": jobs if jobs > 1 else None, "--against": against, "--record": record}
    options = [str(word) for option, value in values.items() if value is not None for word in (option, value)]
    options += [word for override in overrides or () for word in ("--set", override)] + ["--fast"] * fast
    command = shlex.join(["fleetfit", *verb, *options])
    with output.explain_interrupt(command):
        plan = plan_comparison(file, add_speed(overrides, fast))
        display = ComparisonDisplay(jobs, None if quiet else sys.stdout)
        comparison = compare_rows(plan, out=out, jobs=jobs, against=against, record=record, progress=display)
    if quiet:
        output.print_locations(comparison.folder, quiet=True)
    else:
        print_comparison(comparison)
    if comparison.failures:
        raise NoUsableUpdates(
            f"{len(comparison.failures)} runs failed, all others are finished: {'; '.join(comparison.failures)}. See "
            "the notes below the table for the reasons.",
            path=comparison.folder,
        )


def print_comparison(comparison: "Comparison") -> None:
    """Print the tables of a comparison, and where its files are."""
    from fleetfit.report.tables import make_row_level_table

    for table in comparison.tables:
        output.print_table(table, None if table is comparison.table else 100)
    output.print_table(
        make_row_level_table({key: [run.files.read_summary() for run in runs] for key, runs in comparison.runs.items()})
    )
    output.print_line(f"Results: {comparison.results}")
    output.print_locations(comparison.folder, "Folder of all runs")
    run = next(iter(comparison.runs.values()))[0].folder
    output.print_line(
        f"eval, predict, calibrate, export and pictures take the folder of one run:{COMMAND}"
        f"{shlex.join(['fleetfit', 'eval', str(run)])}"
    )
