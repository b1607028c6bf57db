"""List run folders with their sizes, and remove old checkpoints.

A folder may be untrusted or incomplete: damage is listed with the folder, and does not stop the listing. Links are not
followed. Listing does not import PyTorch; only `clear_checkpoints` reads checkpoints.
"""

import dataclasses
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import FleetFitError, RunError
from fleetfit.runs import RUN_FILES, RUNS
from fleetfit.runs.comparison import RESULTS_FILE, TUNING_FOLDER
from fleetfit.runs.folder import RunFolder, parse_round

_MAX_FOLDERS = 4  # levels between the listed folder and a run; a comparison has three
_MAX_CHARACTERS = 80  # of a name


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """A run or a comparison on disk.

    Attributes:
        folder: The folder.
        kind: "run", "fleet" for a run of real nodes, or "comparison".
        method: Its method. For a comparison, the methods of its runs, joined with commas; likewise model and data.
        model: Its model.
        data: Its data set.
        rounds: Number of finished rounds; for a comparison, of finished runs.
        asked: Number of rounds, or of runs, to do; 0 if unknown.
        finished: Whether all of them are done.
        local: Local accuracy of the last evaluation, between 0 and 1; None without one.
        global_: Global accuracy, likewise.
        begun: Time of its start, as ISO 8601 in UTC; empty if unknown.
        size_bytes: Size of all its files.
        checkpoints_bytes: Size of its checkpoints.
        checkpoints: Number of its checkpoints.
        damage: Description of damage, or empty.
        children: The runs of a comparison, including those of its tuning.
    """

    folder: Path
    kind: str = "run"
    method: str = ""
    model: str = ""
    data: str = ""
    rounds: int = 0
    asked: int = 0
    finished: bool = False
    local: float | None = None
    global_: float | None = None
    begun: str = ""
    size_bytes: int = 0
    checkpoints_bytes: int = 0
    checkpoints: int = 0
    damage: str = ""
    children: "tuple[RunInfo, ...]" = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `fleetfit runs --json`."""
        table = {field.name.rstrip("_"): getattr(self, field.name) for field in dataclasses.fields(self)}
        return table | {"folder": str(self.folder), "children": [child.to_dict() for child in self.children]}


def list_runs(folder: str | Path = RUNS) -> list[RunInfo]:
    """Return the runs and comparisons in a folder. A run's folder returns the run, a comparison's folder its runs.

    Args:
        folder: The folder. The search has a depth of four, and does not follow links.

    Raises:
        RunError: The folder is missing or cannot be read.
    """
    root = files.parse_path(folder)
    try:
        if not root.is_dir():
            raise RunError(f"no such folder: {root}.", path=root)
        names = _list_names(root)
    except OSError as error:
        raise RunError(f"{root} cannot be read: {files.format_os_error(error)}.", path=root) from None
    if _is_run(names):
        return [_read_run(root)]
    if RESULTS_FILE in names:
        return list(_read_comparison(root).children)
    return list(_iter_folders(root, _MAX_FOLDERS))


def _iter_folders(root: Path, depth: int) -> Iterator[RunInfo]:
    with os.scandir(root) as entries:
        names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    for folder in (root / name for name in sorted(names)):
        try:
            inner = _list_names(folder)
        except OSError as error:
            yield RunInfo(folder, damage=f"it cannot be read: {files.format_os_error(error)}")
            continue
        if _is_run(inner):
            yield _read_run(folder)
        elif RESULTS_FILE in inner:
            yield _read_comparison(folder)
        elif depth > 1:
            yield from _iter_folders(folder, depth - 1)


def _is_run(names: set[str]) -> bool:
    return len(names & {*RUN_FILES, "checkpoints"}) > 1  # other programs have a config.toml, too


def _list_names(folder: Path) -> set[str]:
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries}


# ---- one folder ------------------------------------------------------------------------------------------------------


def _read_run(path: Path) -> RunInfo:
    folder, checkpoints = RunFolder(path).replace_contents(plan=None), list_checkpoints(path)  # its import is slow
    problems = folder.find_problems("config.toml", "metrics.jsonl", "summary.json")
    summary, rounds = folder.summary, folder.get_setting("rounds")
    if folder.config and type(rounds) is not int:
        problems += ("config.toml is damaged: it has no number of rounds",)
    return RunInfo(
        path,
        kind="fleet" if _is_file(path / "nodes.json") else "run",
        method=summary.method[:_MAX_CHARACTERS],
        model=summary.model[:_MAX_CHARACTERS],
        data=summary.data[:_MAX_CHARACTERS],
        rounds=summary.rounds,
        asked=rounds if type(rounds) is int else 0,
        finished=folder.is_finished,
        local=summary.local,
        global_=summary.global_,
        begun=folder.environment.time[:25],
        size_bytes=_sum_sizes(path),
        checkpoints_bytes=_sum_sizes(path / "checkpoints"),
        checkpoints=len(checkpoints),
        damage="; ".join(problem.rstrip(".")[:200] for problem in problems),
    )


def _read_comparison(folder: Path) -> RunInfo:
    children = tuple(_iter_folders(folder, _MAX_FOLDERS))
    rows = [child for child in children if folder / TUNING_FOLDER not in child.folder.parents]
    damage = [f"{child.folder.relative_to(folder)}: {child.damage}" for child in children if child.damage]
    finished, is_complete = sum(child.finished for child in rows), False
    try:
        is_complete = bool(RunFolder(folder).json(RESULTS_FILE).get("notes"))
    except (FleetFitError, AttributeError) as error:
        damage.append(str(error)[:200].rstrip("."))
    return RunInfo(
        folder,
        "comparison",
        method=_join_names(child.method for child in rows),
        model=_join_names(child.model for child in rows),
        data=_join_names(child.data for child in rows),
        rounds=finished,
        asked=len(rows) if is_complete else 0,
        finished=is_complete and finished == len(rows) > 0,
        begun=min((child.begun for child in children if child.begun), default=""),
        size_bytes=_sum_sizes(folder),
        checkpoints_bytes=sum(child.checkpoints_bytes for child in children),
        checkpoints=sum(child.checkpoints for child in children),
        damage="; ".join(damage),
        children=children,
    )


def _join_names(names: Iterable[str]) -> str:
    """Join distinct names with commas; a longer text ends in "..."."""
    text = ", ".join(dict.fromkeys(name for name in names if name))
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."


def _is_file(path: Path) -> bool:
    """Return whether a path is a regular file, and not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _sum_sizes(root: Path) -> int:
    """Return the bytes of all files in a folder, without following links; unreadable files count 0."""
    if root.is_symlink() or not root.is_dir():
        return 0
    total = 0
    for folder, _, names in os.walk(root, followlinks=False):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - many files
            except OSError:
                continue
    return total


def list_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a run folder, oldest first; links are left out."""
    if (path / "checkpoints").is_symlink():
        return []
    return [checkpoint for checkpoint in RunFolder(path).checkpoints() if _is_file(checkpoint)]


# ---- removing checkpoints --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RemovedCheckpoints:
    """Checkpoints of a run to remove, or removed ones.

    Attributes:
        folder: The run folder.
        files: The checkpoints.
        size_bytes: Their size.
        last: Whether the run has no others.
        finished: Whether the run is finished.
        kept: Why some were not removed, or empty.
    """

    folder: Path
    files: tuple[Path, ...] = ()
    size_bytes: int = 0
    last: bool = False
    finished: bool = True
    kept: str = ""


def iter_runs(runs: Sequence[RunInfo]) -> Iterator[RunInfo]:
    """Yield runs, with those of comparisons in place of these."""
    for run in runs:
        yield from iter_runs(run.children) if run.kind == "comparison" else [run]


def plan_cleanup(runs: Sequence[RunInfo], *, last: bool = False, unfinished: bool = False) -> list[RemovedCheckpoints]:
    """Return the checkpoints that `clear_checkpoints` would remove.

    Args:
        runs: Runs and comparisons.
        last: Also remove the newest readable and the best checkpoint, without which a run has no trained model.
        unfinished: Also clear unfinished runs, by the same rule.
    """
    plans = [_plan_run(run, last) for run in iter_runs(runs) if unfinished or run.finished]
    return [plan for plan in plans if plan.files or plan.kept]


def _plan_run(run: RunInfo, last: bool) -> RemovedCheckpoints:
    checkpoints = list_checkpoints(run.folder)
    count = len(checkpoints)
    if not last and checkpoints:
        if run.damage:
            return RemovedCheckpoints(run.folder, finished=run.finished, kept=f"the folder is damaged: {run.damage}")
        count = _find_newest_readable(checkpoints)
        if count < 0:
            return RemovedCheckpoints(run.folder, finished=run.finished, kept="none of its checkpoints can be read")
    best = None if last else RunFolder(run.folder).find_best()
    old = [path for path in checkpoints[:count] if best is None or parse_round(path) != best.round]
    size = sum(path.lstat().st_size for path in old if path.exists())
    return RemovedCheckpoints(run.folder, tuple(old), size, bool(old) and len(old) == len(checkpoints), run.finished)


def _find_newest_readable(checkpoints: Sequence[Path]) -> int:
    """Return the position of the newest intact checkpoint, or -1. A single checkpoint is not read."""
    if len(checkpoints) == 1:
        return 0
    from fleetfit.runs.checkpoints import read_checkpoint  # imports PyTorch

    for position in reversed(range(len(checkpoints))):
        try:
            read_checkpoint(checkpoints[position])
        except FleetFitError:
            continue
        return position
    return -1


def clear_checkpoints(
    folder: str | Path = RUNS, *, last: bool = False, unfinished: bool = False
) -> list[RemovedCheckpoints]:
    """Remove old checkpoints of the runs in a folder. Each finished run keeps its newest readable and its best one.

    Args:
        folder: As in `list_runs`.
        last: Also remove these. `eval`, `predict`, `calibrate`, `export` and others then have no model; numbers
            stay.
        unfinished: Also clear unfinished runs, by the same rule; with `last` they cannot be resumed.

    Returns:
        The removed checkpoints by run, with a reason if some were not removed: another process is writing to the
        folder, or the folder is damaged or read-only.

    Raises:
        RunError: The folder is missing.
    """
    return [remove_checkpoints(plan) for plan in plan_cleanup(list_runs(folder), last=last, unfinished=unfinished)]


def remove_checkpoints(plan: RemovedCheckpoints) -> RemovedCheckpoints:
    """Remove checkpoints of a run while its folder is locked, and return the removed ones."""
    if not plan.files:
        return plan
    removed: list[Path] = []
    reason = ""
    try:
        with RunFolder(plan.folder).hold():
            present = set(list_checkpoints(plan.folder))  # another process may have created links
            for path in plan.files:
                if path in present:
                    path.unlink()
                    removed.append(path)
    except RunError as error:
        reason = str(error).rstrip(".")
    except OSError as error:
        reason = f"{plan.folder} cannot be written to: {files.format_os_error(error)}"
    is_complete = len(removed) == len(plan.files)
    return dataclasses.replace(
        plan,
        files=tuple(removed),
        last=plan.last and is_complete,
        kept=reason,
        size_bytes=plan.size_bytes if is_complete else 0,
    )
