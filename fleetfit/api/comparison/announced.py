"""Which runs a comparison has and that it is at work, for whoever watches its folder from another process."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fleetfit import files
from fleetfit.api.comparison.planned import ComparedRun, ComparisonPlan
from fleetfit.api.comparison.tuned import candidates
from fleetfit.errors import RunError
from fleetfit.records import forms

FILE = "runs.json"
_LOCK = ".lock"
_RUNS = forms.table({"runs": forms.listed(forms.table({"place": forms.text, "title": forms.text}))})


@dataclass(frozen=True)
class AnnouncedRun:
    """A run that a comparison has, perhaps one that is still to come.

    Attributes:
        place: Its folder, below the comparison's.
        title: Row, setting and seed.
    """

    place: Path
    title: str


def title_of(entry: ComparedRun) -> str:
    """Return what a run of a comparison is called."""
    return ", ".join(filter(None, [entry.row, entry.setting, f"seed {entry.seed}"]))


@contextlib.contextmanager
def announcing(plan: ComparisonPlan, folder: Path) -> Iterator[None]:
    """Write which runs there are, in the order in which they begin, and be seen at work until the end of the block."""
    runs = [(entry, "tuning ") for entry, _ in candidates(plan)] + [(entry, "") for entry in plan.entries()]
    nest = {"runs": [{"place": str(entry.place), "title": f"{tunes}{title_of(entry)}"} for entry, tunes in runs]}
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / FILE, json.dumps(nest, indent=1) + "\n")
    with files.open_in_folder(folder / _LOCK, os.O_RDWR | os.O_CREAT) as file:
        files.share_lock(file)
        yield


def announced(folder: Path) -> list[AnnouncedRun]:
    """Return which runs the comparison in a folder has; none where there is no comparison.

    Raises:
        RunError: The file that says so is damaged.
    """
    if not files.is_file(folder / FILE):
        return []
    try:
        found = files.parse_json(files.read_text(folder / FILE))
        _RUNS(found, "")
        runs = [AnnouncedRun(Path(one["place"]), one["title"]) for one in found["runs"]]
        if any(one.place.is_absolute() or ".." in one.place.parts for one in runs):
            raise ValueError("a place in it is not below the folder")
    except (ValueError, OSError) as error:
        raise RunError(
            f"{folder / FILE} is damaged: {error}. The same fleetfit compare command writes it again."
        ) from None
    return runs


def at_work(folder: Path) -> bool:
    """Tell whether a process is writing into a run folder, or runs the comparison in a folder."""
    return files.is_held(folder / _LOCK)
