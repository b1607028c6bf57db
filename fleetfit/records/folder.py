"""The run folder: its files, and what makes each of them safe against a kill at any moment and a stranger's hand."""

import contextlib
import datetime
import errno
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fleetfit import files
from fleetfit.errors import RunError
from fleetfit.files import flush_to_disk
from fleetfit.records.checkpoints import CheckpointError, read_checkpoint, write_checkpoint

if TYPE_CHECKING:
    from fleetfit.records.schema import InvalidRecord, Record

# ---- values that JSON can hold, names for what is whole, and the environment that a result depends on --------------


def to_json_value(value: Any) -> Any:
    """Return JSON values; numbers that JSON lacks (NaN, infinity) become None."""
    if isinstance(value, Mapping):
        return {str(key): to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def move_into_place(part: Path, path: Path) -> None:
    """Flush a file or folder to disk and give it its name."""
    flush_to_disk(part)
    part.replace(path)
    flush_to_disk(path.parent)


def describe_environment() -> dict[str, Any]:
    """Return what else a result depends on: versions, platform, threads, git commits of FleetFit and of the folder."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "fleetfit": importlib.metadata.version("fleetfit"),
        "fleetfit_commit": _own_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": sys.argv,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


@functools.cache
def _own_commit() -> str | None:
    """Return the commit of the checkout that FleetFit runs from, "-dirty" if its package differs; None without one."""
    package = Path(__file__).resolve().parents[1]
    top = _git("rev-parse", "--show-toplevel", at=package)
    if top is None or Path(top).resolve() != package.parent:  # installed inside of somebody else's repository
        return None
    commit = _git("rev-parse", "HEAD", at=package)
    changes = _git("status", "--porcelain", "--", str(package), at=package)
    return f"{commit}-dirty" if commit and changes else commit


def processor() -> str:
    """Return the processor's name, as far as the system tells it."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _git(*command: str, at: Path | None = None) -> str | None:
    try:
        done = subprocess.run(["git", *command], cwd=at, capture_output=True, text=True, timeout=10, check=False)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


# ---- the folder ----------------------------------------------------------------------------------------------------

_NAME = re.compile(r"round-(\d{6,12})\.safetensors")
_BASE = "base.safetensors"
_CHECKED = ("config.toml",)
_SAY = logging.getLogger("fleetfit")

Fits = Callable[[Any, int], Any]
"""Raises `CheckpointError` where a checkpoint, read from a file of this round, cannot be used."""


def choose_path(root: Path, name: str, config: str) -> Path:
    """Return `root/<time>-<name>-<short hash of the configuration>`, a folder that is not there yet."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    tidy = re.sub(r"[^\w.]+", "-", name).strip("-") or "run"
    base = root / f"{stamp}-{tidy}-{hashlib.sha256(config.encode()).hexdigest()[:6]}"
    path, count = base, 2
    while path.exists():
        path, count = base.with_name(f"{base.name}-{count}"), count + 1
    return path


@dataclass(frozen=True)
class RunFolder:
    """A run folder on disk."""

    path: Path

    @staticmethod
    def create(path: Path, first: Mapping[str, str], base: Mapping[str, Any] | None = None) -> "RunFolder":
        """Make a run folder with its first files; it appears complete or not at all.

        Args:
            path: The folder.
            first: Texts by name.
            base: What of the model is never trained; `base.safetensors` is written where there is something.

        Raises:
            RunError: The folder exists and is not empty, or cannot be made.
        """
        path = files.parse_path(path)
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise RunError(
                    f'{path} is not empty. Choose another folder, or go on with it: "fleetfit resume {path}".'
                )
            with files.atomic_folder(path) as part:
                (part / "checkpoints").mkdir()
                for name, text in first.items():
                    (part / name).write_bytes(text.encode())
                    flush_to_disk(part / name)
                if base:
                    write_checkpoint(part / _BASE, base)
                if path.exists():
                    path.rmdir()
                move_into_place(part, path)
        except OSError as error:
            raise RunError(f"the run folder {path} cannot be made: {_reason(error)}.") from None
        except UnicodeEncodeError:
            raise RunError(
                f"the run folder {path} cannot be made: a name or path in the run's configuration is no UTF-8 text."
            ) from None
        return RunFolder(path)

    @staticmethod
    def open(path: str | Path) -> "RunFolder":
        """Return an existing run folder.

        Raises:
            RunError: It is none.
        """
        path = files.parse_path(path)
        try:
            if not path.is_dir():
                raise RunError(f"there is no run folder {path}.")
            if not files.is_file(path / "config.toml"):
                raise RunError(f"{path} is no run folder: it has no config.toml.{_is_comparison(path)}")
        except OSError as error:
            raise RunError(f"{path} is no run folder that can be read: {_reason(error)}.") from None
        return RunFolder(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing into the folder; the hold ends with the process, however it ends.

        Raises:
            RunError: Another process has it, or the folder cannot be written into.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(files.hold_lock(self.path / ".lock"))
            except OSError as error:
                if error.errno == errno.EBUSY:
                    raise RunError(f"another process is writing into {self.path}.", path=self.path) from None
                raise RunError(f"{self.path} cannot be written into: {_reason(error)}.", path=self.path) from None
            yield

    def has(self, name: str) -> bool:
        """Tell whether the folder has a file.

        Raises:
            RunError: What is in its place is no file.
        """
        try:
            return files.is_file(self.path / name)
        except OSError as error:
            raise RunError(f"{self.path / name} cannot be read: {_reason(error)}.") from None

    def text(self, name: str) -> str:
        """Return a file of the folder as text.

        Raises:
            RunError: It is not there, no file, or no text.
        """
        try:
            return files.read_text(self.path / name)
        except FileNotFoundError:
            raise RunError(f"{self.path} has no {name}.") from None
        except OSError as error:
            raise RunError(f"{self.path / name} cannot be read: {_reason(error)}.") from None
        except UnicodeDecodeError as error:
            raise RunError(f"{self.path / name} is damaged: it is no UTF-8 text ({error}).") from None

    def json(self, name: str, model: "type[Record] | None" = None, remedy: str = "") -> Any:
        """Return the value of a JSON file.

        Args:
            name: The file.
            model: What the value must fit; None where the caller checks it.
            remedy: What the user can do about a damaged file, in a sentence.

        Raises:
            RunError: The file is missing or damaged.
        """
        path = self.path / name
        try:
            value = files.parse_json(self.text(name))
            if model is not None:
                model.load(value)
            return value
        except ValueError as error:
            key = getattr(error, "key", None)
            raise RunError(f"{path} is damaged: {error}.{remedy and ' '}{remedy}", key=key, path=path) from None

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder atomically.

        Raises:
            RunError: It cannot be written, or lies behind a link.
        """
        try:
            files.write_text(files.safe_join(self.path, name), text)
        except OSError as error:
            raise RunError(f"{self.path / name} cannot be written: {_reason(error)}.") from None

    def edited(self) -> list[str]:
        """Return which texts are others than when the folder was made, by the checksums in `environment.json`.

        Folders of earlier versions have none, and who damages `environment.json` loses them: it stops nothing.
        """
        try:
            found = self.json("environment.json")
        except RunError:
            found = None
        noted = found.get("sha256") if isinstance(found, dict) else None
        if not isinstance(noted, dict):
            return []
        return [name for name in _CHECKED if name in noted and noted[name] != _digest(self.text(name))]

    def note_resumption(self, round: int) -> None:
        """Add to `environment.json` that the run goes on from a round, and where; what cannot be is left out."""
        try:
            found = self.json("environment.json")
        except RunError:  # it is only for the record
            found = None
        found = found if isinstance(found, dict) else {}
        before = found.get("resumed")
        found["resumed"] = [*(before if isinstance(before, list) else []), {"round": round, **describe_environment()}]
        with contextlib.suppress(RunError, ValueError, RecursionError):
            self.write("environment.json", json.dumps(found, indent=2) + "\n")

    def begun(self) -> bool:
        """Tell whether a round was written, whole or in part."""
        return self.has("metrics.jsonl") or bool(self.checkpoints())

    # -- metrics

    def append(self, report: Mapping[str, Any]) -> None:
        """Add a round's report to `metrics.jsonl`.

        Raises:
            RunError: The disk is full, or the folder is not to be written.
        """
        path = self.path / "metrics.jsonl"
        try:
            files.append_line(path, (json.dumps(to_json_value(report), allow_nan=False) + "\n").encode())
        except OSError as error:
            raise RunError(f"{path} cannot be written: {_reason(error)}. The last checkpoint is intact.") from None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the reports of the rounds; a half-written last line does not count.

        Raises:
            RunError: A line is damaged, or belongs to another round.
        """
        path = self.path / "metrics.jsonl"
        lines, reason = self._read_lines()
        if reason:
            raise RunError(
                f"{path}, line {len(lines) + 1}, is damaged: {reason}. Remove this line and those after it.", path=path
            )
        number, error = self._find_invalid_report(lines)
        if error is not None:
            raise RunError(f"{path}, line {number + 1}, is damaged: {error}.", key=error.key, path=path)
        return [report for _, report in lines]

    def damaged_end(self) -> str:
        """Return what is wrong with the last line of `metrics.jsonl`, which `metrics` leaves out; "" if nothing is.

        A line that is not ended yet is still being written, and is no damage.
        """
        if not self.has("metrics.jsonl"):
            return ""
        good = len(self._read_lines()[0])
        return f"line {good + 1}, the last one, is damaged" if self._count_lines() > good else ""

    def _count_lines(self) -> int:
        try:
            return files.read_bytes(self.path / "metrics.jsonl").count(b"\n")
        except OSError as error:
            raise RunError(f"{self.path / 'metrics.jsonl'} cannot be read: {_reason(error)}.") from None

    def count_reports(self) -> int:
        """Return the number of rounds before the first damaged line.

        Raises:
            RunError: The file cannot be read.
        """
        return self._find_invalid_report(self._read_lines()[0])[0]

    @staticmethod
    def _find_invalid_report(lines: list[tuple[str, dict[str, Any]]]) -> "tuple[int, InvalidRecord | None]":
        """Return the number of reports before the first that does not fit its model, and the reason."""
        from fleetfit.records.schema import InvalidRecord, RoundRecord  # imports pydantic

        for number, (_, report) in enumerate(lines):
            try:
                RoundRecord.load(report)
            except InvalidRecord as error:
                return number, error
        return len(lines), None

    def _read_lines(self) -> tuple[list[tuple[str, dict[str, Any]]], str]:
        """Return the lines of `metrics.jsonl` as text and report, and the reason for which the next is damaged."""
        if not self.has("metrics.jsonl"):
            return [], ""
        path = self.path / "metrics.jsonl"
        try:
            *lines, rest = files.read_bytes(path).split(b"\n")
        except OSError as error:
            raise RunError(f"{path} cannot be read: {_reason(error)}.") from None
        found: list[tuple[str, dict[str, Any]]] = []
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode()
                report = files.parse_json(text)
                if not isinstance(report, dict) or type(report.get("round")) is not int or report["round"] != number:
                    raise ValueError(f"it is not of round {number}")
            except ValueError as error:
                return found, "" if number == len(lines) and not rest else str(error)
            found.append((text, report))
        return found, ""

    def tidy(self, round: int) -> None:
        """Drop what was written after a round, and what was being written when a process was killed.

        Raises:
            RunError: It cannot be written, or lies behind a link.
        """
        kept = self._read_lines()[0][:round]
        try:
            place = files.safe_join(self.path, "checkpoints/any").parent
            for part in (*self.path.glob(".*.part"), *place.glob(".*.part")):
                shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink(missing_ok=True)
            for later in self.checkpoints():
                if _round_of(later) > round:
                    later.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written into: {_reason(error)}.") from None
        self.write("metrics.jsonl", "".join(f"{text}\n" for text, _ in kept))

    # -- what is never trained

    def load_base(self) -> dict[str, Any]:
        """Return what of the model is never trained, as it was when the folder was made; nothing if there is nothing.

        Raises:
            RunError: It has a format that this version does not know, or is damaged.
        """
        if not self.has(_BASE):
            return {}
        try:
            found = read_checkpoint(self.path / _BASE)
            if not isinstance(found, dict):
                raise CheckpointError("it is no table of tensors")
        except CheckpointError as error:
            raise RunError(f"{self.path / _BASE} is damaged: {error}.") from None
        return found

    # -- checkpoints

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint files, oldest first."""
        place = self.path / "checkpoints"
        return sorted((p for p in place.glob("round-*.safetensors") if _NAME.fullmatch(p.name)), key=_round_of)

    def save_checkpoint(self, round: int, nest: Mapping[str, Any], keep: int = 2) -> None:
        """Write a checkpoint and remove all but the newest `keep`.

        Raises:
            RunError: It cannot be written, or lies behind a link.
        """
        name = _checkpoint_of(round)
        try:
            path = files.safe_join(self.path, name)
        except OSError as error:
            raise RunError(f"the checkpoint {self.path / name} cannot be written: {_reason(error)}.") from None
        write_checkpoint(path, nest)
        for old in self.checkpoints()[:-keep]:
            old.unlink(missing_ok=True)

    def load_checkpoint(self, fits: Fits = lambda nest, round: None, due: int = 0) -> dict[str, Any] | None:
        """Return the newest checkpoint that can be used, or None when there is none; those passed over are named.

        Args:
            fits: What else a checkpoint must be.
            due: The round that the newest is of, or a later one; where it is of an earlier one, that is said too.

        Raises:
            RunError: It has a format that this version does not know, or none can be used.
        """
        there = self.checkpoints()
        passed: list[tuple[Path, Exception | str]] = []
        if there and _round_of(there[-1]) < due:
            passed.append((self.path / _checkpoint_of(due), "it is not there"))
        for path in reversed(there):
            try:
                found: dict[str, Any] = read_checkpoint(path)
                fits(found, _round_of(path))
            except CheckpointError as error:
                passed.append((path, error))
                continue
            for other, reason in passed:
                _SAY.warning(
                    "%s is not used: %s. The state after round %d is used instead.",
                    other, reason, _round_of(path),
                )  # fmt: skip
            return found
        if passed:
            said = "; ".join(f"{path.name}: {reason}" for path, reason in passed)
            raise RunError(f"every checkpoint in {self.path} is damaged, or does not fit its config.toml: {said}.")
        return None


def compute_checksums(texts: Mapping[str, str]) -> dict[str, str]:
    """Return what `environment.json` says of the texts of a new folder that results depend on."""
    return {name: _digest(texts[name]) for name in _CHECKED if name in texts}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _checkpoint_of(round: int) -> str:
    return f"checkpoints/round-{round:06d}.safetensors"


def _round_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def _is_comparison(path: Path) -> str:
    """Return what to do with the folder of a comparison, or nothing where it is none."""
    if not any(files.is_file(path / name) for name in ("results.json", "runs.json")):
        return ""
    return " It is a comparison: name the folder of one of its runs, or open all in Python with load_comparison."


def _reason(error: OSError) -> str:
    return files.format_os_error(error)
