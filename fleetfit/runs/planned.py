"""`runs.json` in the folder of a comparison: all its runs, also those that have not started."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from fleetfit import files
from fleetfit.errors import RunError

RUNS_FILE = "runs.json"
_MOST_FOLDERS = 5
"""Folders between the folder of a comparison and a run: tune, row, setting, values and seed."""


@dataclass(frozen=True)
class ListedRun:
    """A run of a comparison. It may not have started.

    Attributes:
        subfolder: Its folder, relative to the comparison's.
        title: Row, setting and seed, or the tried values.
    """

    subfolder: Path
    title: str


def list_planned_runs(folder: Path) -> list[ListedRun]:
    """Return the runs of the comparison in a folder; empty if the folder has no comparison.

    Raises:
        RunError: `runs.json` is damaged.
    """
    from fleetfit.runs.schema import PlannedRunsRecord  # imports pydantic

    path = folder / RUNS_FILE
    if not files.is_file(path):
        return []
    try:
        record = PlannedRunsRecord.load(files.parse_json(files.read_text(path)))
        runs = [ListedRun(Path(run.place), run.title) for run in record.runs]
        if any(run.subfolder.is_absolute() or ".." in run.subfolder.parts for run in runs):
            raise ValueError("a path in it is outside of the folder")
    except (ValueError, OSError) as error:
        raise RunError(
            f"{path} is damaged: {error}. Run the same fleetfit compare command to write it again.",
            key=getattr(error, "key", None),
            path=path,
        ) from None
    return runs


def find_comparison(folder: Path) -> tuple[str, str]:
    """Return the title of a run in its comparison, and the name of the comparison's folder; ("", "") of other runs."""
    path = folder.resolve()
    for parent in path.parents[:_MOST_FOLDERS]:
        with contextlib.suppress(RunError, OSError):
            for run in list_planned_runs(parent):
                if parent / run.subfolder == path:
                    return run.title, parent.name
    return "", ""
