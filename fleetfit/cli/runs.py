"""The verbs on run folders: `runs` lists them and clears checkpoints, `report`, `pictures`, `attention` draw them."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from fleetfit import stored
from fleetfit.cli import output
from fleetfit.cli.arguments import Folder, OtherData, parse_folder, parse_output_file
from fleetfit.errors import ConfigError, did_you_mean
from fleetfit.report.text import Table, format_bytes, format_percent
from fleetfit.stored import ClearedRun, StoredRun

_MOST_METHODS = 32
"""Characters that a table has for the methods of a comparison."""


def runs(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Where to look; a run, or a comparison, too.",
            parser=parse_folder,
            metavar="[FOLDER]",
        ),
    ] = stored.RUNS,
    clear: Annotated[
        bool,
        typer.Option("--clear-checkpoints", help="Remove the checkpoints of finished runs but the newest good one."),
    ] = False,
    last: Annotated[
        bool, typer.Option("--last", help="With --clear-checkpoints: that one too; eval, predict and export need it.")
    ] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="With --clear-checkpoints: also of runs that are not finished.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --clear-checkpoints: do not ask before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """List run folders: method, model and data, progress, accuracy, date, and size.

    A comparison is one line; name its folder to see its runs. With --clear-checkpoints old checkpoints are removed,
    after a question: of a finished run the newest that can be read stays, of any other run all stay.
    """
    if not clear:
        options = [name for name, is_on in (("last", last), ("unfinished", unfinished), ("yes", yes)) if is_on]
        if options:
            listed_options = ", ".join(f"--{name}" for name in options)
            raise ConfigError(f"{listed_options}: only with --clear-checkpoints.", key=options[0])
        listed = stored.runs(folder)
        if as_json:
            output.print_json([run.to_dict() for run in listed])
        else:
            _print_table_or_title(make_run_table(listed, folder))
        return
    if as_json and not yes:
        raise ConfigError("--json with --clear-checkpoints does not ask: give --yes as well.", key="yes")
    cleanup = stored.plan_cleanup(stored.runs(folder), last=last, unfinished=unfinished)
    if not as_json:
        _print_table_or_title(make_cleanup_table(cleanup, folder))
        if any(run.files for run in cleanup) and not yes:
            _confirm(cleanup)
    cleared = [stored.remove_checkpoints(run) for run in cleanup]
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


def make_run_table(listed: Sequence[StoredRun], folder: Path) -> Table:
    """Return runs as a table, a line each; `folder` is where they were found."""
    columns = ("folder", "what", "done", "local / global %", "begun", "size", "in checkpoints")
    if not listed:
        return Table(columns, (), f"There are no runs in {folder}.")
    rows = []
    for run in listed:
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
    notes = [f"Damaged: {_shorten(run, folder)}: {run.damage}." for run in listed if run.damage]
    total, checkpoints = sum(run.size_bytes for run in listed), sum(run.checkpoints_bytes for run in listed)
    notes.append(
        f"{format_bytes(total)} in all, {format_bytes(checkpoints)} of it in checkpoints; --clear-checkpoints removes "
        "old ones."
    )
    return Table(columns, tuple(rows), f"Runs in {folder}", tuple(notes))


def _format_methods(run: StoredRun) -> str:
    """Return the method of a run; of a comparison its methods, or the number of its rows if it has more."""
    if run.kind != "comparison":
        return run.method
    rows = {child.folder.relative_to(run.folder).parts[0] for child in run.children} - {"tune"}
    methods = list(dict.fromkeys(child.method for child in run.children if child.method))
    if len(methods) == 1 < len(rows):
        return f"{len(rows)} rows of {run.method}"
    if len(rows) > len(methods):
        return f"{len(rows)} rows of {len(methods)} methods"
    return run.method if len(run.method) <= _MOST_METHODS else f"{len(methods)} methods"


def make_cleanup_table(cleanup: Sequence[ClearedRun], folder: Path) -> Table:
    """Return the checkpoints to remove as a table, and notes on what is then impossible."""
    rows = tuple(
        (_shorten(run, folder), "finished" if run.finished else "unfinished", str(len(run.files)),
         format_bytes(run.size_bytes), "none" if run.last else "the newest good one")
        for run in cleanup if run.files
    )  # fmt: skip
    notes = [f"Kept: {_shorten(run, folder)}: {run.kept}." for run in cleanup if run.kept]
    if any(run.last and run.finished for run in cleanup):
        notes.append(
            "Without a checkpoint eval, predict, calibrate, export, attention and other runs' start have no trained "
            "model any more; numbers and plots stay."
        )
    if any(run.last and not run.finished for run in cleanup):
        notes.append("An unfinished run without a checkpoint cannot be resumed.")
    title = f"Checkpoints to remove in {folder}" if rows else f"There are no old checkpoints in {folder}."
    return Table(("folder", "run", "checkpoints", "size", "left"), rows, title, tuple(notes))


def _confirm(cleanup: Sequence[ClearedRun]) -> None:
    """Ask whether to remove checkpoints.

    Raises:
        ConfigError: The input is not a terminal.
        Exit: The answer is no.
    """
    if not sys.stdin.isatty():
        raise ConfigError("without a terminal, removing these checkpoints needs --yes.", key="yes")
    if not typer.confirm(f"Remove {_format_amount(cleanup)}?"):
        output.print_line("Nothing was removed.")
        raise typer.Exit


def _format_amount(cleanup: Sequence[ClearedRun]) -> str:
    count, runs = sum(len(run.files) for run in cleanup), sum(bool(run.files) for run in cleanup)
    total = format_bytes(sum(run.size_bytes for run in cleanup))
    return f"{count} checkpoint{'s' * (count != 1)} of {runs} run{'s' * (runs != 1)}, {total}"


def _shorten(run: StoredRun | ClearedRun, folder: Path) -> str:
    """Return a run's folder relative to `folder`, where it is inside."""
    name = str(run.folder.relative_to(folder)) if run.folder.is_relative_to(folder) else str(run.folder)
    return str(run.folder) if name == "." else name


# ---- the page and figures ------------------------------------------------------------------------------------------

_FORMATS = ("png", "pdf", "svg")


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, or folders of comparisons; several go on one page.",
            parser=parse_folder,
            metavar="RUN...",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The file; report.html in the folder by default, of several folders in the working folder.",
            parser=parse_output_file,
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Write the page of a run or a comparison again, or one page of several folders; nothing is trained.

    The page is one file of HTML that opens from disk and loads nothing. It also works for a run that is not finished.
    """
    from fleetfit.api import write_report

    output.print_line(f"Page: {write_report(*folders, out=out)}")


def attention(
    folder: Folder,
    samples: Annotated[int, typer.Option(help="How many test images.")] = 4,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Picture to write (.png, .pdf, .svg); FOLDER/plots/attention.png by default.",
            parser=parse_output_file,
            metavar="FILE",
        ),
    ] = None,
    data: OtherData = None,
) -> None:
    """Draw where a vision transformer trained by ReeFL looks, before and after Ree's modulation.

    Takes the newest checkpoint. Three maps for each block: the class token's, the modulated one's, the classified
    one's (ReeFL, appendix E).
    """
    from fleetfit import files
    from fleetfit.api import load
    from fleetfit.api.inference import load_other_data, select_data
    from fleetfit.report.attention import draw_sample_attention
    from fleetfit.report.drawing import make_plots_folder, save_figure, save_figures

    run = load(folder)
    path = run.folder / "plots" / "attention.png" if out is None else files.parse_path(out)
    if path.suffix.removeprefix(".") not in _FORMATS:
        raise ConfigError(f"--out must end in .png, .pdf or .svg, got {path}.", key="out", path=path)
    images = select_data(run, None, None if data is None else load_other_data(run, data))
    figure = draw_sample_attention(run.model(), images, samples, f"{images.name}, after round {run.server.round}")
    if out is None:
        (path,) = save_figures({path.stem: figure}, make_plots_folder(run.folder))
    else:
        try:
            save_figure(figure, Path(os.path.realpath(path)))  # a link that the user names is followed
        except OSError as error:
            raise ConfigError(
                f"the picture cannot be written to {path}: {error.strerror}.", key="out", path=path
            ) from None
    output.print_line(f"Drawn: {path}")


def pictures(
    folder: Folder,
    level: Annotated[str | None, typer.Option(help="Level, 1 to L, or its name; the largest by default.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help='Average cost of a sample: up to 1 a share of the last exit\'s, else absolute, such as "35 ms"; by '
            "default that of the level's saved calibration, else 0.75."
        ),
    ] = None,
    cost: Annotated[
        str | None, typer.Option(help="multiply_adds or latency_s (on this machine); by default as the budget's unit.")
    ] = None,
    measure: Annotated[str | None, typer.Option(help="Confidence: max (the default), entropy or margin.")] = None,
    temperature: Annotated[bool, typer.Option("--temperature", help="Scale each exit's logits first.")] = False,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="Whose samples are drawn; five by default. Repeatable.")
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="How many samples of a class are drawn; 0.1 by default, more if they are few.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder to write; FOLDER/plots by default.",
            parser=parse_folder,
            metavar="FOLDER",
        ),
    ] = None,
    ending: Annotated[str, typer.Option("--format", help="png, pdf or svg.")] = "png",
    data: OtherData = None,
) -> None:
    """Draw a run's plots and early stopping: Figures 2, 3 and 5 to 9 of ScaleFL, and accuracy over budget.

    The plots are those that a run has at its end; of one of a comparison they are drawn here alone. Takes the newest
    checkpoint. Samples by the exit where they left have a blue border if they are right there, an orange one if only
    the last exit is. Nothing but pictures is written.
    """
    from fleetfit import files
    from fleetfit.api import load
    from fleetfit.api.inference import load_other_data
    from fleetfit.api.pictures import PictureOptions, draw_pictures
    from fleetfit.inference import Measure
    from fleetfit.report.drawing import make_plots_folder, save_figures

    limit: float | str | None = budget
    with contextlib.suppress(TypeError, ValueError):
        limit = float(budget)  # type: ignore[arg-type]
    if ending not in _FORMATS:
        raise ConfigError(
            f"--format must be {', '.join(_FORMATS)}, got {ending}.{did_you_mean(ending, _FORMATS)}", key="format"
        )
    run = load(folder)
    other = None if data is None else load_other_data(run, data, halves=True)
    options = PictureOptions(
        level, limit, cost, cast(Measure | None, measure), temperature, tuple(classes or ()), share, other
    )
    result = draw_pictures(run, options)
    target = make_plots_folder(run.folder) if out is None else files.parse_path(out)
    output.print_figure_paths(save_figures(result.figures, target, ending), result.notes)
