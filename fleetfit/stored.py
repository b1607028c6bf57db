"""What lies in folders of runs, and how much room it takes; their old checkpoints, taken away when asked.

A folder may come from anybody, and may be half gone: whatever is wrong with one is said beside its name, and the others
are listed. No link is followed and nothing is imported that takes long; only `clear_checkpoints` reads checkpoints.
"""

import dataclasses
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import FleetFitError, RunError

RUNS = Path("runs")
"""Where run folders go by default."""
_OF_A_RUN = {"plan.toml", "metrics.jsonl", "summary.json"}  # a config.toml alone may be anybody's
_OF_A_COMPARISON = {"results.json", "compare.json"}
_CHECKPOINT = re.compile(r"round-(\d{6,12})\.safetensors")
_DEEPEST = 4  # folders between the one that is asked for and a run: a comparison has three
_MOST_CHARACTERS = 80  # of a name that a folder gives


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """A run, or a comparison of several, as its folder tells it.

    Attributes:
        folder: The folder.
        kind: "run"; "fleet", of real nodes; or "comparison".
        method: Its method; of a comparison those of its runs with commas between, as the next two.
        model: Its model.
        data: Its data set.
        rounds: Rounds that are done; of a comparison, runs that are finished.
        asked: Rounds, or runs, that there are to be; 0 where nobody can tell.
        finished: Whether all of it is done.
        local: Local accuracy of the last evaluation, between 0 and 1; None where there is none.
        global_: The same of global accuracy.
        begun: When it was begun, as ISO 8601 in UTC; empty where nobody can tell.
        size_bytes: What all of its files take.
        checkpoints_bytes: What of that its checkpoints take.
        checkpoints: How many checkpoints there are.
        damage: What is wrong with the folder, or empty.
        children: The runs of a comparison, those that tune among them.
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
    children: "tuple[StoredRun, ...]" = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain values, as `fleetfit runs --json` prints them."""
        nest = {one.name.rstrip("_"): getattr(self, one.name) for one in dataclasses.fields(self)}
        return nest | {"folder": str(self.folder), "children": [child.to_dict() for child in self.children]}


def runs(folder: str | Path = RUNS) -> list[StoredRun]:
    """Return what a folder holds: itself if it is a run, the runs of a comparison, else what lies below it.

    Args:
        folder: Where to look, four folders deep at most; links below it are not followed.

    Raises:
        RunError: There is no such folder, or it cannot be read.
    """
    place = files.parse_path(folder)
    try:
        if not place.is_dir():
            raise RunError(f"there is no folder {place}.")
        names = _names(place)
    except OSError as error:
        raise RunError(f"{place} cannot be read: {files.format_os_error(error)}.") from None
    if _holds_run(names):
        return [_run(place)]
    if names & _OF_A_COMPARISON:
        return list(_comparison(place).children)
    return list(_below(place, _DEEPEST))


def _below(place: Path, deep: int) -> Iterator[StoredRun]:
    """Yield what lies in a folder, by name."""
    for inner in _folders(place):
        try:
            names = _names(inner)
        except OSError as error:
            yield StoredRun(inner, damage=f"it cannot be read: {files.format_os_error(error)}")
            continue
        if _holds_run(names):
            yield _run(inner)
        elif names & _OF_A_COMPARISON:
            yield _comparison(inner)
        elif deep > 1:
            yield from _below(inner, deep - 1)


def _holds_run(names: set[str]) -> bool:
    return bool(names & _OF_A_RUN) or {"config.toml", "checkpoints"} <= names


def _folders(place: Path) -> list[Path]:
    """Return the folders in a folder by name, without links and hidden ones."""
    with os.scandir(place) as found:
        names = [e.name for e in found if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    return [place / name for name in sorted(names)]


def _names(place: Path) -> set[str]:
    with os.scandir(place) as found:
        return {entry.name for entry in found}


# ---- one folder ------------------------------------------------------------------------------------------------------


def _run(place: Path) -> StoredRun:
    """Return what a run folder says; what is damaged in it is said, and the rest still told."""
    found: dict[str, Any] = {"size_bytes": _size(place), "kind": "fleet" if _is(place / "nodes.json") else "run"}
    there = list_checkpoints(place)
    found |= {"checkpoints": len(there), "checkpoints_bytes": _size(place / "checkpoints")}
    damage = []
    for part in (_configured, _reported, _summed_up):
        try:
            found |= part(place)
        except (FleetFitError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            damage.append(_wrong(error))
    found["begun"] = _begun(place)
    return StoredRun(place, **found, damage="; ".join(damage))


def _comparison(place: Path) -> StoredRun:
    """Return what the folder of a comparison holds."""
    children = tuple(_below(place, _DEEPEST))
    asked = [child for child in children if place / "tune" not in child.folder.parents]
    damage = [f"{child.folder.relative_to(place)}: {child.damage}" for child in children if child.damage]
    done = sum(child.finished for child in asked)
    whole, begun = _is(place / "compare.json"), min((child.begun for child in children if child.begun), default="")
    return StoredRun(
        place, "comparison", rounds=done, asked=len(asked) if whole else 0, begun=begun, size_bytes=_size(place),
        finished=whole and done == len(asked) > 0,
        method=_each(child.method for child in asked), model=_each(child.model for child in asked),
        data=_each(child.data for child in asked),
        checkpoints_bytes=sum(child.checkpoints_bytes for child in children),
        checkpoints=sum(child.checkpoints for child in children), damage="; ".join(damage), children=children,
    )  # fmt: skip


def _each(names: Iterable[str]) -> str:
    """Return each of some names once, with commas between; "..." ends what is too long."""
    text = ", ".join(dict.fromkeys(name for name in names if name))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _configured(place: Path) -> dict[str, Any]:
    """Return what `config.toml` says was asked for."""
    try:
        table = tomllib.loads(_text(place / "config.toml"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"config.toml is damaged: {error}") from None
    named = {key: table.get(key) for key in ("method", "model", "data")}
    asked = table.get("rounds")
    if type(asked) is not int:
        raise ValueError("config.toml is damaged: it has no number of rounds")
    found = {key: _short(one.get("name") if isinstance(one, Mapping) else one) for key, one in named.items()}
    if isinstance(named["data"], Mapping):
        found["data"] = _of_files(named["data"]) or found["data"]
    return found | {"asked": asked}


def _of_files(data: Mapping[str, Any]) -> str:
    """Return how a kind of file calls what it reads, as the summary will: after the file or folder."""
    place = data.get("file") or data.get("folder")
    if data.get("name") not in ("table", "images", "arrays", "text") or not isinstance(place, str):
        return ""
    path = Path(place)
    folder = data["name"] == "images" or (data["name"] != "arrays" and path.is_dir())
    return (path.name if folder else path.stem)[:_MOST_CHARACTERS]


def _reported(place: Path) -> dict[str, Any]:
    """Return what `metrics.jsonl` says was done; a half-written last line does not count."""
    if not _is(place / "metrics.jsonl"):
        return {}
    lines = files.read_bytes(place / "metrics.jsonl").split(b"\n")[:-1]
    accuracies: dict[str, Any] = {}
    for number, line in zip(range(len(lines), 0, -1), reversed(lines), strict=True):
        try:
            report = json.loads(line)
            if report["round"] != number:
                raise ValueError
            if "evaluate" in report:
                accuracies = _accuracies(next(v for v in report["evaluate"].values() if isinstance(v, Mapping)))
                break
        except (ValueError, TypeError, KeyError, AttributeError, StopIteration, OverflowError, RecursionError):
            raise ValueError(f"metrics.jsonl is damaged in line {number}") from None
    return {"rounds": len(lines), **accuracies}


def _summed_up(place: Path) -> dict[str, Any]:
    """Return the final numbers, where the run is finished."""
    if not _is(place / "summary.json"):
        return {}
    try:
        found = files.parse_json(_text(place / "summary.json"))
        names = {key: _short(found[key]) for key in ("method", "model", "data")}
        if type(found["rounds"]) is not int:
            raise KeyError("rounds")
        accuracies = _accuracies(found)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"summary.json is damaged: {error}") from None
    except (TypeError, KeyError):
        raise ValueError("summary.json is damaged: it lacks something") from None
    return {**names, "finished": True, "rounds": found["rounds"], **accuracies}


def _accuracies(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the local and global accuracy, None where they are not told, as with `[privacy]`."""
    known = {"local": columns.get("local"), "global_": columns.get("global")}
    return {key: float(v) if isinstance(v, int | float) else None for key, v in known.items()}


def _begun(place: Path) -> str:
    try:
        found = files.parse_json(_text(place / "environment.json"))
        return str(found["time"])[:25] if isinstance(found, dict) else ""
    except (OSError, ValueError, KeyError, UnicodeError):
        return ""


def _text(path: Path) -> str:
    try:
        return files.read_text(path)
    except FileNotFoundError:
        raise ValueError(f"there is no {path.name}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is damaged: it is no UTF-8 text") from None


def _short(name: object) -> str:
    """Return what people call a name of a run file: without the place of its function."""
    return str(name or "").rpartition(":")[2][:_MOST_CHARACTERS]


def _wrong(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(str(error.filename or '')).name or 'a file'} cannot be read: {files.format_os_error(error)}"
    return str(error)[:200] or type(error).__name__


def _is(path: Path) -> bool:
    """Tell whether a regular file is there, itself and no link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _size(place: Path) -> int:
    """Return the bytes of all files below a folder; of a link its own, and nothing of what cannot be read."""
    total = 0
    for folder, _, names in os.walk(place, followlinks=False):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - many files
            except OSError:
                continue
    return total if place.is_dir() and not place.is_symlink() else 0


def list_checkpoints(place: Path) -> list[Path]:
    """Return the checkpoints of a run folder, oldest first; no links, and nothing behind one."""
    inner = place / "checkpoints"
    try:
        if not stat.S_ISDIR(inner.lstat().st_mode):
            return []
        found = [inner / name for name in _names(inner) if _CHECKPOINT.fullmatch(name) and _is(inner / name)]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name[6:].split(".")[0]))


# ---- clearing --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ClearedRun:
    """The checkpoints of one run that go, or are gone.

    Attributes:
        folder: The run folder.
        files: The checkpoints.
        size_bytes: What they take.
        last: Whether the run has none left.
        finished: Whether the run is finished.
        kept: Why some stay that were asked for, or empty.
    """

    folder: Path
    files: tuple[Path, ...] = ()
    size_bytes: int = 0
    last: bool = False
    finished: bool = True
    kept: str = ""


def iter_runs(found: Sequence[StoredRun]) -> Iterator[StoredRun]:
    """Yield runs, and those of comparisons."""
    for one in found:
        yield from iter_runs(one.children) if one.kind == "comparison" else [one]


def plan_cleanup(found: Sequence[StoredRun], *, last: bool = False, unfinished: bool = False) -> list[ClearedRun]:
    """Return which checkpoints `clear_checkpoints` would remove of runs; nothing is removed.

    Args:
        found: The runs, comparisons among them.
        last: Also the newest checkpoint that can be read, without which nobody can ask the trained model.
        unfinished: Also of runs that are not finished, by the same rule.
    """
    asked = [_clearable(run, last) for run in iter_runs(found) if unfinished or run.finished]
    return [one for one in asked if one.files or one.kept]


def _clearable(run: StoredRun, last: bool) -> ClearedRun:
    there = list_checkpoints(run.folder)
    if last:
        return _going(run, there, there)
    good = None if run.damage else _newest_good(there)
    if there and good is None:
        why = f"the folder is damaged: {run.damage}" if run.damage else "none of its checkpoints can be read"
        return ClearedRun(run.folder, finished=run.finished, kept=why)
    return _going(run, there[: there.index(good)] if good else [], there)


def _going(run: StoredRun, gone: Sequence[Path], there: Sequence[Path]) -> ClearedRun:
    taken = sum(path.lstat().st_size for path in gone if path.exists())
    return ClearedRun(run.folder, tuple(gone), taken, bool(gone) and len(gone) == len(there), run.finished)


def _newest_good(there: Sequence[Path]) -> Path | None:
    """Return the newest checkpoint whose checksum is that of what it holds."""
    if len(there) < 2:  # none goes, whatever it holds
        return there[0] if there else None
    from fleetfit.records.checkpoints import read_checkpoint  # imports PyTorch

    for path in reversed(there):
        try:
            read_checkpoint(path)
        except FleetFitError:
            continue
        return path
    return None


def clear_checkpoints(folder: str | Path = RUNS, *, last: bool = False, unfinished: bool = False) -> list[ClearedRun]:
    """Remove old checkpoints of the runs in a folder, all but the newest that can be read of each finished run.

    Args:
        folder: As of `runs`.
        last: Also that one: `eval`, `predict`, `calibrate`, `export` and the like can then no longer be asked, and
            what the run wrote of its numbers stays.
        unfinished: Also of runs that are not finished, by the same rule; with `last` they cannot go on.

    Returns:
        What was removed, and of which runs something stayed, and why: one that another process is writing into, one
        that is damaged, or one that cannot be written.

    Raises:
        RunError: There is no such folder.
    """
    return [remove_checkpoints(one) for one in plan_cleanup(runs(folder), last=last, unfinished=unfinished)]


def remove_checkpoints(one: ClearedRun) -> ClearedRun:
    """Remove checkpoints of a run, while nobody else writes into its folder; return what is gone."""
    from fleetfit.records import RunFolder

    if not one.files:
        return one
    gone: list[Path] = []
    kept = ""
    try:
        with RunFolder(one.folder).held():
            there = set(list_checkpoints(one.folder))  # as it is now: no link, and nothing that another has put there
            for path in one.files:
                if path in there:
                    path.unlink()
                    gone.append(path)
    except RunError as error:
        kept = str(error).rstrip(".")
    except OSError as error:
        kept = f"{one.folder} cannot be written into: {files.format_os_error(error)}"
    whole = len(gone) == len(one.files)
    return dataclasses.replace(
        one, files=tuple(gone), last=one.last and whole, kept=kept, size_bytes=one.size_bytes if whole else 0
    )
