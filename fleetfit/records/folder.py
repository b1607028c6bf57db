"""The run folder: its files, and what makes each of them safe against a kill at any moment."""

import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetfit.errors import RunError
from fleetfit.records.checkpoints import DAMAGE, read_checkpoint, write_checkpoint
from fleetfit.records.writing import environment, flush, into_place, jsonable, write_atomically

_NAME = re.compile(r"round-(\d{6,})\.safetensors")


def new_path(root: Path, name: str, config: str) -> Path:
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
    def create(path: Path, files: Mapping[str, str]) -> "RunFolder":
        """Make a run folder with its first files; it appears complete or not at all.

        Raises:
            RunError: The folder exists and is not empty, or cannot be made.
        """
        path = path.expanduser()
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f'{path} is not empty. Choose another folder, or go on with it: "fleetfit resume {path}".')
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            (part / "checkpoints").mkdir(parents=True)
            for name, text in files.items():
                (part / name).write_text(text, encoding="utf-8")
                flush(part / name)
            if path.exists():
                path.rmdir()
            into_place(part, path)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise RunError(f"the run folder {path} cannot be made: {error.strerror}.") from None
        return RunFolder(path)

    @staticmethod
    def open(path: str | Path) -> "RunFolder":
        """Return an existing run folder.

        Raises:
            RunError: It is none.
        """
        path = Path(path).expanduser()
        if not path.is_dir():
            raise RunError(f"there is no run folder {path}.")
        if not (path / "config.toml").is_file():
            raise RunError(f"{path} is no run folder: it has no config.toml.")
        return RunFolder(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing into the folder; the hold ends with the process, however it ends."""
        with (self.path / ".lock").open("w") as handle:
            try:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # no such locks on this system
                pass
            except OSError:
                raise RunError(f"another process is writing into {self.path}.") from None
            yield

    def text(self, name: str) -> str:
        """Return a file of the folder as text."""
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{self.path / name} cannot be read: {error}.") from None

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder atomically."""
        write_atomically(self.path / name, text)

    def note_resumption(self, round: int) -> None:
        """Add to `environment.json` that the run goes on from a round, and where."""
        try:
            found = json.loads(self.text("environment.json"))
        except (json.JSONDecodeError, RunError):  # it is only for the record
            found = {}
        found.setdefault("resumed", []).append({"round": round, **environment()})
        self.write("environment.json", json.dumps(found, indent=2) + "\n")

    def begun(self) -> bool:
        """Tell whether a round was written, whole or in part."""
        return (self.path / "metrics.jsonl").exists() or bool(self.checkpoints())

    # -- metrics

    def append(self, report: Mapping[str, Any]) -> None:
        """Add a round's report to `metrics.jsonl`.

        Raises:
            RunError: The disk is full, or the folder is not to be written.
        """
        path = self.path / "metrics.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(jsonable(report), allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}. The last checkpoint is intact.") from None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rounds' reports; a half-written last line does not count.

        Raises:
            RunError: A line in the middle is damaged.
        """
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return []
        *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
        found = []
        for number, line in enumerate(lines, 1):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                if number < len(lines) or rest:
                    raise RunError(f"{path}, line {number}, is damaged; remove what follows the line before.") from None
        return found

    def tidy(self, round: int) -> None:
        """Drop what was written after a round, and what was being written when a process was killed."""
        for part in (*self.path.glob(".*.part"), *(self.path / "checkpoints").glob(".*.part")):
            part.unlink(missing_ok=True)
        kept = [line for line in self.metrics() if line["round"] <= round]
        self.write("metrics.jsonl", "".join(json.dumps(line, allow_nan=False) + "\n" for line in kept))

    # -- what is never trained

    def save_base(self, state: Mapping[str, Any]) -> None:
        """Write what of the model is never trained; nothing where there is nothing."""
        if state:
            write_checkpoint(self.path / "base.safetensors", state)

    def load_base(self) -> dict[str, Any]:
        """Return what `save_base` wrote.

        Raises:
            RunError: It has a format that this version does not know, or is damaged.
        """
        path = self.path / "base.safetensors"
        try:
            found: dict[str, Any] = read_checkpoint(path) if path.exists() else {}
        except DAMAGE as error:
            raise RunError(f"{path} is damaged: {error}.") from None
        return found

    # -- checkpoints

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint files, oldest first."""
        return sorted(p for p in (self.path / "checkpoints").glob("round-*.safetensors") if _NAME.fullmatch(p.name))

    def save_checkpoint(self, round: int, nest: Mapping[str, Any], keep: int = 2) -> None:
        """Write a checkpoint and remove all but the newest `keep`."""
        write_checkpoint(self.path / "checkpoints" / f"round-{round:06d}.safetensors", nest)
        for old in self.checkpoints()[:-keep]:
            old.unlink(missing_ok=True)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest complete checkpoint, or None when there is none.

        Raises:
            RunError: It has a format that this version does not know, or all are damaged.
        """
        damaged = []
        for path in reversed(self.checkpoints()):
            try:
                found: dict[str, Any] = read_checkpoint(path)
                return found
            except DAMAGE as error:
                damaged.append(f"{path.name} ({error})")
        if damaged:
            raise RunError(f"every checkpoint in {self.path} is damaged: {', '.join(damaged)}.")
        return None
