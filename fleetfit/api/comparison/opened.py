"""A comparison that is opened again, from its folder alone: its tables as they were printed, and its runs."""

import logging
from dataclasses import replace
from pathlib import Path

from fleetfit import files
from fleetfit.api.comparison.announced import FILE, announced
from fleetfit.api.comparison.kept import NAME
from fleetfit.api.comparison.planned import label
from fleetfit.api.comparison.reported import Comparison, Runs
from fleetfit.api.results import load
from fleetfit.errors import FleetFitError, RunError
from fleetfit.report.differences import difference_table, differences
from fleetfit.report.page.many import compared, table_of, table_of_tuning
from fleetfit.report.page.reading import ComparisonRecord, read_comparison

_TUNING = "tune"


def load_comparison(folder: str | Path) -> Comparison:
    """Open the folder of a comparison, finished or not; nothing is trained or written.

    Args:
        folder: What `fleetfit compare` made, such as `runs/compare-...`.

    Returns:
        Its tables and runs. Of one that is not finished, `finished` is False, and there is what is finished. What
        runs with `[privacy]` withhold stays withheld.

    Raises:
        RunError: It is no folder of a comparison, none of its runs is finished yet, or a file of it is damaged.
    """
    path = files.expand_path(folder)
    planned = _count(path)
    record = read_comparison(path)
    finished = bool(record.entries) and planned in (0, len(record.results.runs))
    if not finished:
        count = f"{len(record.results.runs)}{f' of {planned}' if planned else ''}"
        notes = [*record.notes, f"Not finished: {count} run{'' if count == '1' else 's'} so far."]
        record = replace(record, notes=notes, entries=())
    try:
        found = compared(record).told()
        table = table_of(found, _title(path) or record.results.name)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damaged(path / "compare.json") from None
    apart = differences(found.results, found.columns)
    tuning = found.results.tuning
    tuned = {(one.row, one.setting): label(tuple(one.tuned.items())) for one in record.results.runs if one.tuned}
    return Comparison(
        folder=path,
        table=table,
        runs=_runs(record),
        tuned=tuned,
        results=path / NAME,
        differences=tuple(apart),
        difference_table=difference_table(apart, found.results.against) if apart else None,
        tuning=tuning,
        tuning_table=table_of_tuning(tuning) if tuning else None,
        finished=finished,
    )


def _count(path: Path) -> int:
    """Return how many runs a comparison has beside those that tune; 0 where nobody can tell.

    Raises:
        RunError: It is none, or nothing of it is finished.
    """
    if not path.is_dir():
        raise RunError(f"there is no folder {path}.")
    there = announced(path)
    if files.is_file(path / "config.toml") or not (there or files.is_file(path / NAME)):
        one = " It is one run: open it with fleetfit.load." if files.is_file(path / "config.toml") else ""
        raise RunError(f"{path} is no folder of a comparison: it has no {NAME}.{one}")
    if not files.is_file(path / NAME):
        raise RunError(f"no run of the comparison in {path} is finished yet, as {FILE} without {NAME} says.")
    return sum(one.place.parts[:1] != (_TUNING,) for one in there)


def _title(path: Path) -> str:
    """Return what stands above the table in `table.md`."""
    if not files.is_file(path / "table.md"):
        return ""
    first = files.read_text(path / "table.md").partition("\n")[0]
    return first[2:-2] if first.startswith("**") and first.endswith("**") else ""


def _damaged(path: Path) -> RunError:
    return RunError(f"{path} is damaged. The same fleetfit compare command writes it again, and trains nothing twice.")


def _runs(record: ComparisonRecord) -> Runs:
    """Return the runs whose folders are there; one that cannot be opened is said and left out."""
    runs: Runs = {}
    said = logging.getLogger("fleetfit").warning
    for sentence in record.wrong:
        said("%s", sentence)
    for group in record.groups:
        for _, one in group.runs:
            try:
                runs.setdefault((group.row, group.setting), []).append(load(one.folder))
            except FleetFitError as error:
                said("A run of the comparison is left out: %s", error)
    return runs
