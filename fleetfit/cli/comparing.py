"""A comparison that is run and shown, for the verbs that do so."""

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from fleetfit.cli.arguments import with_speed
from fleetfit.errors import NoUsableUpdates


def compared(
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
    """Run a comparison and show it.

    Args:
        file: The run file.
        verb: The verb and its arguments, to which the options below are added for who stops it and goes on.
        out: Folder to write, or to go on with.
        jobs: Runs at a time.
        overrides: `KEY=VALUE`, for all runs.
        quiet: No progress, only the result.
        fast: Compute as is fastest on this machine.
        against: Label of the row that the others are measured against.
        record: Folder where the results are kept as well.
    """
    from fleetfit import api
    from fleetfit.cli import display, output

    given = {"--out": out, "--jobs": jobs if jobs > 1 else None, "--against": against, "--record": record}
    options = [str(part) for option, value in given.items() if value is not None for part in (option, value)]
    options += [part for one in overrides or () for part in ("--set", one)] + (["--fast"] if fast else [])
    again = shlex.join(["fleetfit", *verb, *options])
    with output.explain_interrupt(again), contextlib.closing(display.ComparedRuns(quiet, jobs)) as on_run:
        if not quiet:
            output.print_line("Every row and setting is checked before the first run.")
        found = api.compare(
            file, out=out, overrides=with_speed(overrides, fast), jobs=jobs, against=against, record=record,
            on_run=on_run, on_progress=on_run.progress,
        )  # fmt: skip
    display.compared(found)
    if found.failures:
        raise NoUsableUpdates(
            f"{len(found.failures)} of the comparison's runs failed, and the others are finished: "
            f"{'; '.join(found.failures)}. The notes below the table say why."
        )
