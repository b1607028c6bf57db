"""`fleetfit runs`: what run folders hold, and how much room they take; old checkpoints go when asked."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fleetfit import stored
from fleetfit.cli.arguments import parse_folder
from fleetfit.errors import ConfigError
from fleetfit.report.text import Table, percent, size
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
    """List run folders: what was trained, how far, how well, since when, and how much room it takes.

    A comparison is one line; name its folder to see its runs. With --clear-checkpoints old checkpoints are removed,
    after a question: of a finished run the newest that can be read stays, of any other run all stay.
    """
    from fleetfit.cli import output

    if not clear:
        given = {"--last": last, "--unfinished": unfinished, "--yes": yes}
        if any(given.values()):
            raise ConfigError(f"{', '.join(o for o, on in given.items() if on)}: only with --clear-checkpoints.")
        found = stored.runs(folder)
        if as_json:
            output.print_json([one.to_dict() for one in found])
        else:
            _show(listed(found, folder))
        return
    if as_json and not yes:
        raise ConfigError("--json with --clear-checkpoints asks nobody: give --yes as well.")
    going = stored.plan_cleanup(stored.runs(folder), last=last, unfinished=unfinished)
    if not as_json:
        _show(clearing(going, folder))
        if any(one.files for one in going) and not yes:
            _ask(going)
    gone = [stored.remove_checkpoints(one) for one in going]
    if as_json:
        output.print_json([_plain(one) for one in gone])
    elif any(one.files for one in going):
        for before, one in zip(going, gone, strict=True):
            if one.kept and not before.kept:
                output.print_line(f"Kept: {one.folder}: {one.kept}.")
        output.print_line(f"Removed: {_amount(gone)}.")


def _show(table: Table) -> None:
    from fleetfit.cli import output

    if table.rows:
        output.print_table(table)
    else:
        for line in (table.title, *table.notes):
            output.print_line(line)


def listed(found: Sequence[StoredRun], folder: Path) -> Table:
    """Return runs as a table, a line each."""
    columns = ("folder", "what", "done", "local / global %", "begun", "size", "in checkpoints")
    if not found:
        return Table(columns, (), f"There are no runs in {folder}.")
    notes = [f"Damaged: {_below(one, folder)}: {one.damage}." for one in found if one.damage]
    total, kept = sum(one.size_bytes for one in found), sum(one.checkpoints_bytes for one in found)
    notes.append(f"{size(total)} in all, {size(kept)} of it in checkpoints; --clear-checkpoints removes old ones.")
    return Table(columns, tuple(_line(one, folder) for one in found), f"Runs in {folder}", tuple(notes))


def _line(one: StoredRun, folder: Path) -> tuple[str, ...]:
    what = f"{_methods(one) or '?'}, {one.model or '?'} on {one.data or '?'}"
    what = what if one.kind == "run" else f"{one.kind}: {what}"
    unit = " runs" if one.kind == "comparison" else ""
    state = "damaged" if one.damage else "finished" if one.finished else "unfinished"
    both = f"{percent(one.local)} / {percent(one.global_)}" if (one.local, one.global_) != (None, None) else "-"
    return (
        _below(one, folder), what, f"{one.rounds}/{one.asked or '?'}{unit}, {state}", both, one.begun[:10] or "-",
        size(one.size_bytes), f"{size(one.checkpoints_bytes)} ({one.checkpoints})" if one.checkpoints else "-",
    )  # fmt: skip


def _methods(one: StoredRun) -> str:
    """Return the method of a run; of a comparison its methods, or how many rows it has, where it has more."""
    if one.kind != "comparison":
        return one.method
    rows = {child.folder.relative_to(one.folder).parts[0] for child in one.children} - {"tune"}
    methods = list(dict.fromkeys(child.method for child in one.children if child.method))
    if len(methods) == 1 < len(rows):
        return f"{len(rows)} rows of {one.method}"
    if len(rows) > len(methods):
        return f"{len(rows)} rows of {len(methods)} methods"
    return one.method if len(one.method) <= _MOST_METHODS else f"{len(methods)} methods"


def clearing(going: Sequence[ClearedRun], folder: Path) -> Table:
    """Return which checkpoints go as a table, with what can no longer be done then."""
    rows = tuple(
        (_below(one, folder), "finished" if one.finished else "unfinished", str(len(one.files)), size(one.size_bytes),
         "none" if one.last else "the newest good one")
        for one in going if one.files
    )  # fmt: skip
    notes = [f"Kept: {_below(one, folder)}: {one.kept}." for one in going if one.kept]
    if any(one.last and one.finished for one in going):
        notes.append(
            "Without a checkpoint eval, predict, calibrate, export, attention and other runs' start have no trained "
            "model any more; numbers and plots stay."
        )
    if any(one.last and not one.finished for one in going):
        notes.append("An unfinished run without a checkpoint cannot go on.")
    title = f"Checkpoints to remove in {folder}" if rows else f"There are no old checkpoints in {folder}."
    return Table(("folder", "run", "checkpoints", "size", "left"), rows, title, tuple(notes))


def _ask(going: Sequence[ClearedRun]) -> None:
    """Ask whether they should go.

    Raises:
        ConfigError: Nobody is there to ask.
        Abort: They should not.
    """
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to ask whether these checkpoints should go: give --yes.")
    from fleetfit.cli import output

    if not typer.confirm(f"Remove {_amount(going)}?"):
        output.print_line("Nothing was removed.")
        raise typer.Exit


def _amount(gone: Sequence[ClearedRun]) -> str:
    count, runs = sum(len(one.files) for one in gone), sum(bool(one.files) for one in gone)
    taken = size(sum(one.size_bytes for one in gone))
    return f"{count} checkpoint{'' if count == 1 else 's'} of {runs} run{'' if runs == 1 else 's'}, {taken}"


def _plain(one: ClearedRun) -> dict[str, object]:
    return {
        "folder": str(one.folder), "removed": [str(path) for path in one.files], "size_bytes": one.size_bytes,
        "kept": one.kept or None,
    }  # fmt: skip


def _below(one: StoredRun | ClearedRun, folder: Path) -> str:
    """Return a folder as it is seen from the one that was asked for."""
    name = str(one.folder.relative_to(folder)) if one.folder.is_relative_to(folder) else str(one.folder)
    return str(one.folder) if name == "." else name
