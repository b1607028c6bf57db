"""The verbs on run folders: `runs` lists them and clears checkpoints, `report` and `pictures` draw them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetfit.cli import output
from fleetfit.cli.arguments import Folder, parse_folder, parse_output_file, path_argument, path_option
from fleetfit.errors import ConfigError, RunError, did_you_mean
from fleetfit.report.text import Table, format_bytes, format_percent
from fleetfit.runs import RUNS

if TYPE_CHECKING:
    from fleetfit.runs.listing import RemovedCheckpoints, RunInfo

_MAX_METHODS = 32
"""Width of the methods of a comparison in a table, in characters."""


def runs(
    folder: Annotated[
        Path, path_argument(parse_folder, "Folder of runs, of one run, or of a comparison.", "[FOLDER]")
    ] = RUNS,
    clear: Annotated[
        bool,
        typer.Option(
            "--clear-checkpoints",
            help="Remove checkpoints of finished runs, except the newest readable and the best one.",
        ),
    ] = False,
    last: Annotated[
        bool,
        typer.Option(
            "--last", help="With --clear-checkpoints: also remove these, which eval, predict and export need."
        ),
    ] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="With --clear-checkpoints: include unfinished runs.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="With --clear-checkpoints: do not ask for confirmation.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """List run folders: method, model, data, progress, accuracy, date and size.

    A comparison is one line; pass its folder to list its runs. --clear-checkpoints removes old checkpoints after a
    confirmation. It keeps the newest readable and the best one of a finished run, and all of an unfinished run.
    """
    from fleetfit.runs.listing import list_runs, plan_cleanup, remove_checkpoints

    if not clear:
        options = [name for name, is_on in (("last", last), ("unfinished", unfinished), ("yes", yes)) if is_on]
        if options:
            listed_options = ", ".join(f"--{name}" for name in options)
            raise ConfigError(
                f"{listed_options}: only with --clear-checkpoints. Add it, or leave them out.", key=options[0]
            )
        infos = list_runs(folder)
        if as_json:
            output.print_json([run.to_dict() for run in infos])
        else:
            _print_table_or_title(make_run_table(infos, folder))
        return
    if as_json and not yes:
        raise ConfigError("--json with --clear-checkpoints cannot ask for confirmation. Add --yes.", key="yes")
    cleanup = plan_cleanup(list_runs(folder), last=last, unfinished=unfinished)
    if not as_json:
        _print_table_or_title(make_cleanup_table(cleanup, folder))
        if any(run.files for run in cleanup) and not yes:
            _confirm(cleanup)
    cleared = [remove_checkpoints(run) for run in cleanup]
    if as_json:
        output.print_json([
            {"folder": str(run.folder), "removed": [str(path) for path in run.files], "size_bytes": run.size_bytes,
             "kept": run.kept or None} for run in cleared
        ])  # fmt: skip
    elif any(run.files for run in cleanup):
        for before, run in zip(cleanup, cleared, strict=True):
            if run.kept and not before.kept:
                output.print_line(f"Kept: {run.folder}: {run.kept}.")
        output.print_line(f"Removed: {_format_amount(cleared)}.")


def _print_table_or_title(table: Table) -> None:
    if table.rows:
        output.print_table(table)
    else:
        for line in (table.title, *table.notes):
            output.print_line(line)


def make_run_table(infos: "Sequence[RunInfo]", folder: Path) -> Table:
    """Return runs of a folder as a table."""
    columns = ("folder", "what", "done", "local / global %", "begun", "size", "in checkpoints")
    if not infos:
        return Table(columns, (), f"No runs in {folder}.")
    rows = []
    for run in infos:
        content = f"{_format_methods(run) or '?'}, {run.model or '?'} on {run.data or '?'}"
        unit = " runs" if run.kind == "comparison" else ""
        state = "damaged" if run.damage else "finished" if run.finished else "unfinished"
        has_accuracies = (run.local, run.global_) != (None, None)
        rows.append((
            _shorten(run, folder), content if run.kind == "run" else f"{run.kind}: {content}",
            f"{run.rounds}/{run.asked or '?'}{unit}, {state}",
            f"{format_percent(run.local)} / {format_percent(run.global_)}" if has_accuracies else "-",
            run.begun[:10] or "-", format_bytes(run.size_bytes),
            f"{format_bytes(run.checkpoints_bytes)} ({run.checkpoints})" if run.checkpoints else "-",
        ))  # fmt: skip
    notes = [f"Damaged: {_shorten(run, folder)}: {run.damage}." for run in infos if run.damage]
    total, checkpoints = sum(run.size_bytes for run in infos), sum(run.checkpoints_bytes for run in infos)
    notes.append(
        f"{format_bytes(total)} in all, {format_bytes(checkpoints)} of it checkpoints. --clear-checkpoints removes "
        "old ones."
    )
    return Table(columns, tuple(rows), f"Runs in {folder}", tuple(notes))


def _format_methods(run: "RunInfo") -> str:
    """Return the method of a run, or the methods of a comparison if they fit, else their number."""
    if run.kind != "comparison":
        return run.method
    rows = {child.folder.relative_to(run.folder).parts[0] for child in run.children} - {"tune"}
    methods = list(dict.fromkeys(child.method for child in run.children if child.method))
    if len(methods) == 1 < len(rows):
        return f"{len(rows)} rows of {run.method}"
    if len(rows) > len(methods):
        return f"{len(rows)} rows of {len(methods)} methods"
    return run.method if len(run.method) <= _MAX_METHODS else f"{len(methods)} methods"


def make_cleanup_table(cleanup: "Sequence[RemovedCheckpoints]", folder: Path) -> Table:
    """Return the checkpoints to remove as a table, with notes on the consequences."""
    rows = tuple(
        (_shorten(run, folder), "finished" if run.finished else "unfinished", str(len(run.files)),
         format_bytes(run.size_bytes), "none" if run.last else "the newest and the best")
        for run in cleanup if run.files
    )  # fmt: skip
    notes = [f"Kept: {_shorten(run, folder)}: {run.kept}." for run in cleanup if run.kept]
    if any(run.last and run.finished for run in cleanup):
        notes.append(
            "Without a checkpoint, eval, predict, calibrate, export and the key init_from of other runs have no "
            "trained model. Numbers and plots stay."
        )
    if any(run.last and not run.finished for run in cleanup):
        notes.append("An unfinished run without a checkpoint cannot be resumed.")
    title = f"Checkpoints to remove in {folder}" if rows else f"No old checkpoints in {folder}."
    return Table(("folder", "run", "checkpoints", "size", "left"), rows, title, tuple(notes))


def _confirm(cleanup: "Sequence[RemovedCheckpoints]") -> None:
    """Ask for confirmation to remove checkpoints.

    Raises:
        ConfigError: Stdin is not a terminal.
        Exit: The user declines.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            "cannot ask for confirmation without a terminal. Add --yes to remove these checkpoints.", key="yes"
        )
    if not typer.confirm(f"Remove {_format_amount(cleanup)}?"):
        output.print_line("Nothing was removed.")
        raise typer.Exit


def _format_amount(cleanup: "Sequence[RemovedCheckpoints]") -> str:
    count, runs = sum(len(run.files) for run in cleanup), sum(bool(run.files) for run in cleanup)
    total = format_bytes(sum(run.size_bytes for run in cleanup))
    return f"{count} checkpoint{'s' * (count != 1)} of {runs} run{'s' * (runs != 1)}, {total}"


def _shorten(run: "RunInfo | RemovedCheckpoints", folder: Path) -> str:
    """Return a run's folder, relative to `folder` if it is inside."""
    name = str(run.folder.relative_to(folder)) if run.folder.is_relative_to(folder) else str(run.folder)
    return str(run.folder) if name == "." else name


# ---- the page and figures ------------------------------------------------------------------------------------------

_FORMATS = ("png", "pdf", "svg")


def report(
    folders: Annotated[
        list[Path],
        path_argument(parse_folder, "Run folders or folders of comparisons. Several folders share one page.", "RUN..."),
    ],
    out: Annotated[
        Path | None,
        path_option(
            parse_output_file,
            "HTML file to write. Default: report.html in the folder; for several folders, in the working folder.",
            "--out",
        ),
    ] = None,
) -> None:
    """Write the page of a run or a comparison again, or one page of several folders.

    The page is one HTML file that loads nothing else. It works for unfinished runs, too.
    """
    from fleetfit.report.page import write_report

    output.print_line(f"Page: {write_report(*folders, out=out)}")


def pictures(
    folder: Folder,
    out: Annotated[Path | None, path_option(parse_folder, "Output folder. Default: FOLDER/plots.", "--out")] = None,
    ending: Annotated[str, typer.Option("--format", help="Image format: png, pdf or svg.")] = "png",
) -> None:
    """Draw the plots of a run or a comparison: accuracy, loss, cost, levels, and of a run the clients' classes.

    Both draw them at their end; a run of a comparison has none. It writes images only.
    """
    from fleetfit.api.commands import format_resume
    from fleetfit.report.drawing import make_plots_folder, save_figures
    from fleetfit.report.figures import draw_comparison, draw_run
    from fleetfit.runs.comparison import is_comparison, read_comparison
    from fleetfit.runs.folder import RunFolder

    if ending not in _FORMATS:
        raise ConfigError(
            f"--format must be {', '.join(_FORMATS)}; got {ending}.{did_you_mean(ending, _FORMATS)}", key="format"
        )
    if is_comparison(folder):
        comparison = read_comparison(folder)
        figures, problems = draw_comparison(comparison), comparison.problems
    else:
        run = RunFolder.open(folder)
        if not run.rounds:
            raise RunError(f"{folder} has no finished round to draw. Continue it: {format_resume(folder)}", path=folder)
        figures, problems = draw_run(run), run.find_problems()
    target = make_plots_folder(folder) if out is None else out
    output.print_figure_paths(save_figures(figures, target, ending), problems)
