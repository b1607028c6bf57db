"""Typed records of comparisons on disk, finished or not: `runs.json` with all runs, `results.json` with their results.

A folder may be untrusted. A missing or damaged file is left out of the record and listed in `problems`. Only a folder
without a comparison raises an error.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetfit.errors import RunError, join_some
from fleetfit.files import is_file, parse_path
from fleetfit.runs import MAX_FOLDERS, RESULTS_FILE, TUNING_FOLDER
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import ComparisonResults, PlannedRunRecord, PlannedRunsRecord, RunResult

RUNS_FILE = "runs.json"
_MAX_TITLES = 4  # runs listed in a problem


def list_planned_runs(folder: Path) -> list[PlannedRunRecord]:
    """Return the runs of the comparison in a folder; empty if the folder has no comparison.

    Raises:
        RunError: `runs.json` is damaged.
    """
    path, remedy = folder / RUNS_FILE, "Run the same fleetfit compare command to write it again."
    return PlannedRunsRecord.read(path, remedy).runs if is_file(path) else []


def find_comparison(folder: Path) -> tuple[str, str]:
    """Return the title of a run in its comparison, and the name of the comparison's folder; ("", "") of other runs."""
    path = folder.resolve()
    for parent in path.parents[:MAX_FOLDERS]:
        with contextlib.suppress(RunError, OSError):
            for run in list_planned_runs(parent):
                if parent / run.subfolder == path:
                    return run.title, parent.name
    return "", ""


@dataclass(frozen=True)
class RowRecord:
    """The runs of one row in one setting.

    Attributes:
        row: Label of the row.
        setting: Label of the setting; "" if there is only one.
        runs: Seeds and runs.
    """

    row: str
    setting: str
    runs: Sequence[tuple[int, RunFolder]]

    @property
    def label(self) -> str:
        """The labels of row and setting."""
        return ", ".join(filter(None, [self.row, self.setting]))

    @property
    def records(self) -> list[RunFolder]:
        """The runs."""
        return [run for _, run in self.runs]

    @property
    def is_private(self) -> bool:
        """Whether a run withholds participation."""
        return any(run.is_private for run in self.records)


@dataclass(frozen=True)
class ComparisonRecord:
    """The folder of a comparison.

    Attributes:
        folder: The folder.
        results: Its `results.json`.
        rows: Its runs, by row and setting.
        problems: Sentences on unreadable files.
    """

    folder: Path
    results: ComparisonResults
    rows: Sequence[RowRecord]
    problems: tuple[str, ...]


def is_comparison(folder: str | Path) -> bool:
    """Return whether a folder is a comparison's."""
    path = parse_path(folder)
    return not (path / "config.toml").exists() and (path / RESULTS_FILE).is_file()


def read_comparison(folder: str | Path) -> ComparisonRecord:
    """Return the record of a comparison's folder.

    Raises:
        RunError: It has no readable `results.json`.
    """
    path = parse_path(folder)
    results, problems = read_results(path / RESULTS_FILE), list[str]()
    rows: dict[tuple[str, str], list[tuple[int, RunFolder]]] = {}
    lost: list[str] = []
    for result, record in _iter_runs(path, results.runs):
        title = ", ".join(filter(None, [result.row, result.setting, f"seed {result.seed}"]))
        if record is None:
            lost.append(title)
            continue
        rows.setdefault((result.row, result.setting), []).append((result.seed, record))
        problems += [f"{title}: {sentence}" for sentence in record.find_problems()]
    if lost:
        problems.append(
            f"No run folder has the configuration of {join_some(lost, _MAX_TITLES, '; ')}: removed, or changed "
            "afterwards. The tables have the numbers of these runs, the plots do not."
        )
    records = [RowRecord(*key, runs) for key, runs in rows.items()]
    return ComparisonRecord(path, results, records, tuple(problems))


def read_results(path: str | Path) -> ComparisonResults:
    """Read the results of a comparison from a file of `fleetfit compare`.

    Args:
        path: `results.json` of a comparison's folder, or a copy by `--record`.

    Raises:
        RunError: The file cannot be read, has no results, or has an unknown format.
    """
    return ComparisonResults.read(Path(path))


def _iter_runs(folder: Path, results: Sequence[RunResult]) -> Iterator[tuple[RunResult, RunFolder | None]]:
    """Yield each result with the run whose configuration has its checksum, or None."""
    folders: dict[str, list[Path]] = {}
    for config in sorted(folder.glob("*/**/config.toml")):
        if config.relative_to(folder).parts[0] != TUNING_FOLDER and config.is_file():
            folders.setdefault(hashlib.sha256(config.read_bytes()).hexdigest(), []).append(config.parent)
    for result in results:
        candidates = folders.get(result.digest, [])
        path = None if not candidates else candidates.pop(0) if len(candidates) > 1 else candidates[0]
        yield result, None if path is None else RunFolder.open(path)
