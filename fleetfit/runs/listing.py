"""List run folders with their sizes, and remove old checkpoints.

A folder may be untrusted or incomplete: damage is listed with the folder, and does not stop the listing. Links are not
followed. Listing reads what it shows, and imports neither PyTorch nor pydantic; only `clear_checkpoints` reads
checkpoints, and all of the reports.
"""

import contextlib
import dataclasses
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import FleetFitError, RunError, truncate
from fleetfit.runs import MAX_FOLDERS, RESULTS_FILE, RUN_FILES, RUNS, TUNING_FOLDER, InvalidRecord
from fleetfit.runs.folder import RunFolder, StoredFile, parse_round

_MAX_CHARACTERS = 80  # of a name
_FILES = ("config.toml", "metrics.jsonl", "summary.json")  # whose damage is listed


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
        folder: The folder. The search has a depth of six, and does not follow links.

    Raises:
        RunError: The folder is missing or cannot be read.
    """
    root = files.parse_path(folder)
    try:
        if not root.is_dir():
            raise RunError(f"no such folder: {root}. Name the one that has the run folders.", path=root)
        names = _list_names(root)
    except OSError as error:
        raise RunError(f"{root} cannot be read: {files.format_os_error(error)}.", path=root) from None
    if _is_run(names):
        return [_read_run(root)]
    if RESULTS_FILE in names:
        return list(_read_comparison(root).children)
    return list(_iter_folders(root, MAX_FOLDERS + 1))


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
    folder, checkpoints = RunFolder(path), list_checkpoints(path)
    (reports, metrics_damage), (summary, summary_damage) = _REPORTS.load(folder), _SUMMARY.load(folder)
    problems = [*folder.find_problems("config.toml"), *filter(None, (metrics_damage, summary_damage))]
    rounds = folder.get_setting("rounds")
    if folder.config and type(rounds) is not int:
        problems.append("config.toml is damaged: it has no number of rounds")
    shown = summary or {**folder.describe(), "rounds": len(reports), **_find_accuracies(folder, reports)}
    return RunInfo(
        path,
        kind="fleet" if _is_file(path / "nodes.json") else "run",
        method=shown["method"][:_MAX_CHARACTERS],
        model=shown["model"][:_MAX_CHARACTERS],
        data=shown["data"][:_MAX_CHARACTERS],
        rounds=shown["rounds"],
        asked=rounds if type(rounds) is int else 0,
        finished=summary is not None,
        local=shown.get("local"),
        global_=shown.get("global"),
        begun=_read_begin(folder)[:25],
        size_bytes=_sum_sizes(path),
        checkpoints_bytes=_sum_sizes(path / "checkpoints"),
        checkpoints=len(checkpoints),
        damage="; ".join(problem.rstrip(".")[:200] for problem in problems),
    )


def _read_begin(folder: RunFolder) -> str:
    with contextlib.suppress(RunError, InvalidRecord):
        environment = folder.json("environment.json")
        _check(environment, time=_is_text)
        return str(environment["time"])
    return ""


def _find_accuracies(folder: RunFolder, reports: "Sequence[_Report]") -> Mapping[str, Any]:
    """Return the accuracies of the last evaluation with the main batch-norm policy; empty without one."""
    norms = folder.get_setting("evaluate", "batch_norm", default=())
    for norm in norms if isinstance(norms, list) else _NORMS:
        for report in reversed(reports):
            if isinstance(norm, str) and norm in report.accuracies:
                return report.accuracies[norm]
    return {}


# ---- what is shown of a file: other values are not validated ---


@dataclasses.dataclass(frozen=True)
class _Report:
    """A round, and the accuracies of its evaluation by batch-norm policy."""

    round: int
    accuracies: Mapping[str, Mapping[str, Any]]


_NORMS = ("static", "batch")
_FORMAT = 1  # the newest version of summary.json that is read


def _load_report(value: Any) -> _Report:
    _check(value, train=_is_table, round=_is_count)
    evaluate = value.get("evaluate", {})
    _check({"evaluate": evaluate}, evaluate=_is_table)
    accuracies = {norm: evaluate[norm] for norm in _NORMS if norm in evaluate}
    for table in accuracies.values():
        _check(table, **{"local": _is_number, "global": _is_number})
    return _Report(value["round"], accuracies)


def _read_summary(folder: RunFolder) -> dict[str, Any]:
    summary = folder.json("summary.json")
    names = {"method": _is_text, "model": _is_text, "data": _is_text, "norm": _is_text}
    _check(summary, **names, rounds=_is_count, **{"local": _is_number, "global": _is_number})
    _check({"format": summary.get("format", _FORMAT)}, format=lambda value: value == _FORMAT)
    return dict(summary)


_REPORTS = StoredFile[list[_Report]]("metrics.jsonl", lambda folder: folder.read_reports(_load_report), list)
_SUMMARY = StoredFile["dict[str, Any] | None"]("summary.json", _read_summary, lambda: None)


def _check(table: Any, **checks: Callable[[Any], bool]) -> None:
    """Check values of a table by key.

    Raises:
        InvalidRecord: One is missing or wrong.
    """
    if not _is_table(table):
        raise InvalidRecord(f"it should be a table, got a {type(table).__name__}", None)
    for key, is_valid in checks.items():
        if key not in table:
            raise InvalidRecord(f"{key} is missing", key)
        if not is_valid(table[key]):
            is_scalar = isinstance(table[key], str | int | float)
            got = truncate(repr(table[key])) if is_scalar else f"a {type(table[key]).__name__}"
            raise InvalidRecord(f"{key} cannot be {got}", key)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < 1e300)


def _read_comparison(folder: Path) -> RunInfo:
    children = tuple(_iter_folders(folder, MAX_FOLDERS))
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
        damage = run.damage or "; ".join(RunFolder(run.folder).find_problems(*_FILES)).rstrip(".")
        if damage:
            return RemovedCheckpoints(run.folder, finished=run.finished, kept=f"the folder is damaged: {damage}")
        count = _find_newest_readable(checkpoints)
        if count < 0:
            return RemovedCheckpoints(run.folder, finished=run.finished, kept="none of its checkpoints can be read")
    best = None if last or not checkpoints else RunFolder(run.folder).find_best()
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
