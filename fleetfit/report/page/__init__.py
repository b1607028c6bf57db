"""The page of a run, of a comparison, or of several: one file of HTML that opens from disk and loads nothing.

    parts          what a page is made of, as values
    where, plan, participants     what was run and where; the pieces; who took part
    traces         plots, in the words of plotly.js
    single, many   the page of one run; of a comparison, or of several runs
    writing        parts -> HTML, with the template and one copy of plotly.js from `assets/`

It reads run folders only. What `[privacy]` and `[secure]` withhold is not in them, and a page would leave it out all
the same. Text of users and of nodes is escaped wherever it goes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import FleetFitError, RunError
from fleetfit.report.page.many import grouped, page_of_comparison, page_of_runs
from fleetfit.report.page.parts import Page
from fleetfit.report.page.single import page_of_run
from fleetfit.report.page.writing import to_html
from fleetfit.report.record import RowRecord, RunRecord, is_comparison, read_comparison, read_run

__all__ = ["NAME", "after_comparison", "after_run", "write_report"]

NAME = "report.html"
"""What a page is called in its folder."""
_SAY = logging.getLogger("fleetfit")


def write_report(*folders: str | Path, out: str | Path | None = None) -> Path:
    """Write one page of run folders, also of runs that are not finished; nothing else is written, and nothing trained.

    Args:
        *folders: Run folders, or folders of comparisons. Of several, all runs stand on one page: those that differ in
            their seed only are one row.
        out: The file. By default `report.html`, in the folder where it is one, else in the working folder.

    Returns:
        The file.

    Raises:
        RunError: One of them is no run folder, or the file cannot be written.
    """
    if not folders:
        raise RunError("no run folder was given. Name one or several, such as runs/first.", key="folders")
    found = [files.parse_path(folder) for folder in folders]
    place = files.parse_path(out) if out is not None else (found[0] if len(found) == 1 else Path()) / NAME
    if place.is_dir():
        place = place / NAME
    made, wrong = _page_of(found, place)
    for sentence in dict.fromkeys(wrong):
        _SAY.warning("%s", sentence)
    text = to_html(made)
    try:
        if out is None and len(found) == 1:
            files.write_text(files.safe_join(found[0], NAME), text)
        else:
            files.write_user_file(place, text)
    except OSError as error:
        raise RunError(f"the page cannot be written to {place}: {error.strerror or error}.", path=place) from None
    return place


def _page_of(folders: Sequence[Path], place: Path) -> tuple[Page, Sequence[str]]:
    """Return the page, and what could not be read."""
    if len(folders) == 1:
        if is_comparison(folders[0]):
            whole = read_comparison(folders[0])
            return page_of_comparison(whole, place), whole.problems
        record = read_run(folders[0])
        return page_of_run(record, place), record.problems
    alone = {folder.resolve(): folder for folder in folders}
    found: list[RunRecord | RowRecord] = []
    for folder in alone.values():
        found += read_comparison(folder).rows if is_comparison(folder) else [read_run(folder)]
    if not found:
        raise RunError(f"no run of {', '.join(map(str, folders))} is there.", path=folders[0])
    groups = grouped(found)
    wrong = [f"{r.folder}: {said}" for one in groups for _, r in one.runs for said in r.problems]
    return page_of_runs(groups, place), wrong


# ---- at the end of a run: a page is written where it can be, and never stops anything --------------------------------


def after_run(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the page of a run that has just ended; where it cannot be written, a line says so.

    Args:
        folder: The run folder.
        summary: What will stand in `summary.json`.
    """
    _written(folder, lambda: page_of_run(read_run(folder, summary), folder / NAME))


def after_comparison(folder: Path) -> None:
    """Write the page of a comparison that has just ended; where it cannot be written, a line says so."""
    _written(folder, lambda: page_of_comparison(read_comparison(folder), folder / NAME))


def _written(folder: Path, build: Callable[[], Page]) -> None:
    try:
        text = to_html(build())
    except Exception as error:  # whatever is wrong with a page, the run is not
        _not_written(folder, error)
        return
    try:
        files.write_text(files.safe_join(folder, NAME), text)
    except OSError as error:
        _not_written(folder, error)


def _not_written(folder: Path, error: Exception) -> None:
    said = str(error) if isinstance(error, FleetFitError | OSError) else f"{type(error).__name__}: {error}"
    _SAY.warning(
        "%s was not written: %s. All numbers are in the folder; `fleetfit report %s` tries again.",
        folder / NAME, said, folder,
    )  # fmt: skip
