"""The page of a run, a comparison, or several folders: one HTML file that opens from disk and loads nothing else.

    blocks                                       the elements of a page, as values
    provenance, plan, accuracy, participants     its sections
    plots                                        plots for plotly.js, from `fleetfit.report.curves`
    run_set                                      the runs of a page with several
    run_page, comparison_page                    the page of one run; of a comparison, or of several folders
    render                                       blocks -> HTML, with the template and plotly.js from `assets/`

Pages only use `RunFolder`. Run folders do not contain the numbers that `[privacy]` and `[secure]`
withhold, and pages would leave them out, too. Text of users and nodes is escaped.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetfit import files
from fleetfit.errors import FleetFitError, RunError
from fleetfit.report.page.blocks import Page
from fleetfit.report.page.comparison_page import make_comparison_page, make_runs_page
from fleetfit.report.page.render import to_html
from fleetfit.report.page.run_page import make_run_page
from fleetfit.report.page.run_set import group_runs
from fleetfit.runs.comparison import ComparisonRecord, RowRecord, is_comparison, read_comparison
from fleetfit.runs.folder import RunFolder

NAME = "report.html"
"""The file name of a page in its folder."""
_LOGGER = logging.getLogger("fleetfit")


def write_report(*folders: str | Path, out: str | Path | None = None) -> Path:
    """Write one page of run folders, also of unfinished runs. It writes no other files and trains nothing.

    Args:
        *folders: Run folders, or folders of comparisons. Several folders share one page, on which runs that differ only
            in their seed are one row.
        out: The file. By default `report.html`: of one folder, in the folder; of several, in the working folder.

    Returns:
        The file.

    Raises:
        RunError: A folder is not a run folder, or the file cannot be written.
    """
    if not folders:
        raise RunError("no run folder. Name one or several, such as runs/first.", key="folders")
    paths = [files.parse_path(folder) for folder in folders]
    target = files.parse_path(out) if out is not None else (paths[0] if len(paths) == 1 else Path()) / NAME
    if target.is_dir():
        target = target / NAME
    page, problems = _make_page(paths, target)
    for sentence in dict.fromkeys(problems):
        _LOGGER.warning("%s", sentence)
    text = to_html(page)
    try:
        if out is None and len(paths) == 1:
            files.write_text(files.safe_join(paths[0], NAME), text)
        else:
            files.write_user_file(target, text)
    except OSError as error:
        raise RunError(f"cannot write the page to {target}: {error.strerror or error}.", path=target) from None
    return target


def _make_page(folders: Sequence[Path], target: Path) -> tuple[Page, Sequence[str]]:
    """Return the page of folders, and sentences on unreadable files."""
    if len(folders) == 1 and is_comparison(folders[0]):
        comparison = read_comparison(folders[0])
        return make_comparison_page(comparison, target), comparison.problems
    if len(folders) == 1:
        run = RunFolder.open(folders[0])
        return make_run_page(run, target), run.find_problems()
    records: list[RunFolder | RowRecord] = []
    for folder in {path.resolve(): path for path in folders}.values():
        records += read_comparison(folder).rows if is_comparison(folder) else [RunFolder.open(folder)]
    if not records:
        raise RunError(f"no run of {', '.join(map(str, folders))} could be read.", path=folders[0])
    page = make_runs_page(group_runs(records), target)
    return page, page.notes


# ---- at the end of a run ---------------------------------------------------------------------------------------------


def write_run_page(run: RunFolder) -> None:
    """Write the page of a finished run. A failure is logged and does not stop the run."""
    _write_page(run.path, lambda: make_run_page(run, run.path / NAME))


def write_comparison_page(comparison: ComparisonRecord) -> None:
    """Write the page of a finished comparison. A failure is logged and does not stop the comparison."""
    _write_page(comparison.folder, lambda: make_comparison_page(comparison, comparison.folder / NAME))


def _write_page(folder: Path, make: Callable[[], Page]) -> None:
    try:
        html = to_html(make())
    except Exception as error:  # a wrong page must not stop a complete run
        _log_failure(folder, error)
        return
    try:
        files.write_text(files.safe_join(folder, NAME), html)
    except OSError as error:
        _log_failure(folder, error)


def _log_failure(folder: Path, error: Exception) -> None:
    is_expected = isinstance(error, FleetFitError | OSError)
    reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
    _LOGGER.warning(
        "%s was not written: %s. All numbers are in the folder. Retry with `fleetfit report %s`.",
        folder / NAME, reason, folder,
    )  # fmt: skip
