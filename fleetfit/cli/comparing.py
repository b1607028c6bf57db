"""A comparison that is run and shown, for the verbs that do so."""

import contextlib
from pathlib import Path
from typing import Any


def compared(file: Path, again: str, quiet: bool, *, jobs: int, **asked: Any) -> None:
    """Run a comparison and show it.

    Args:
        file: The run file.
        again: The command that goes on with it, for who stops it.
        quiet: No progress, only the result.
        jobs: Runs at a time.
        **asked: What else `fleetfit.compare` takes.
    """
    from fleetfit import api
    from fleetfit.cli import display

    with display.interruptible(again), contextlib.closing(display.ComparedRuns(bool(quiet), jobs)) as on_run:
        if not quiet:
            display.say("Every row and setting is checked before the first run.")
        found = api.compare(file, on_run=on_run, jobs=jobs, on_progress=on_run.progress, **asked)
    display.compared(found)
