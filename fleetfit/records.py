"""The run folder: configuration, environment, metrics, checkpoints, plan, summary; plain values and tensors.

    config.toml        the resolved configuration
    environment.json   versions, platform, git commit
    plan.toml          the levels with their sizes and costs
    fleet.json         how many clients each budget group has; class counts, group and level of the first clients
    metrics.jsonl      one JSON object per round
    checkpoints/       round-000012.safetensors: server, client memories and the last statistics; the newest two
    summary.json       the final numbers; written last, so its presence says that the run is finished
    plots/

A folder appears at once, with its configuration, or not at all. Every file but `metrics.jsonl` is written beside its place,
flushed to disk and renamed, so a process killed at any moment leaves each of them old or new, never half. A round's line goes
to `metrics.jsonl` before its checkpoint is written; a resumed run cuts off the lines after the checkpoint that it starts from,
a half-written one too. Checkpoints are safetensors files with their structure as JSON in the header: no pickle.
"""

import contextlib
import datetime
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fleetfit.errors import RunError

FORMAT = 1
"""Version of checkpoints and summaries; one that is not known is refused."""
_NAME = re.compile(r"round-(\d{6,})\.safetensors")

# ---- nests -------------------------------------------------------------------------------------------------------


def flatten(nest: Any, tensors: dict[str, Tensor], where: str = "") -> Any:
    """Return a nest's structure as JSON values, and collect its tensors by place.

    Args:
        nest: Dicts, lists, tuples, numbers, text, None, tensors and NumPy arrays.
        tensors: Where the tensors go.
        where: Place of the nest, for names and messages.

    Raises:
        RunError: Something else is in it.
    """
    if isinstance(nest, Tensor | np.ndarray):
        name = where or "value"
        tensors[name] = torch.from_numpy(nest) if isinstance(nest, np.ndarray) else nest
        return {"$array" if isinstance(nest, np.ndarray) else "$tensor": name}
    if isinstance(nest, Mapping):
        items = [(key, flatten(value, tensors, f"{where}/{key}" if where else str(key))) for key, value in nest.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$items": [[flatten(key, tensors, where), value] for key, value in items]}
    if isinstance(nest, list | tuple):
        values = [flatten(value, tensors, f"{where}/{i}") for i, value in enumerate(nest)]
        return {"$tuple": values} if isinstance(nest, tuple) else values
    if isinstance(nest, np.generic):
        nest = nest.item()
    if nest is None or isinstance(nest, bool | int | float | str):
        return nest
    raise RunError(f"a checkpoint holds numbers, text, tensors and nests of them; {where} is a {type(nest).__name__}.")


def restore(nest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `flatten` took apart."""
    if isinstance(nest, list):
        return [restore(value, tensors) for value in nest]
    if not isinstance(nest, dict):
        return nest
    if "$tensor" in nest:
        return tensors[nest["$tensor"]]
    if "$array" in nest:
        return tensors[nest["$array"]].numpy()
    if "$tuple" in nest:
        return tuple(restore(value, tensors) for value in nest["$tuple"])
    if "$items" in nest:
        return {restore(key, tensors): restore(value, tensors) for key, value in nest["$items"]}
    return {key: restore(value, tensors) for key, value in nest.items()}


# ---- writing -----------------------------------------------------------------------------------------------------


def write_atomically(path: Path, text: str) -> None:
    """Write a file beside its place, flush it to disk, and rename it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    _into_place(part, path)


def _into_place(part: Path, path: Path) -> None:
    _flush(part)
    part.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # a folder cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def jsonable(value: Any) -> Any:
    """Return JSON values; numbers that JSON lacks (NaN, infinity) become None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment() -> dict[str, Any]:
    """Return what else a result depends on: versions, platform, threads, the git commit of the working folder."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": sys.argv,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


# ---- the folder --------------------------------------------------------------------------------------------------


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
                _flush(part / name)
            if path.exists():
                path.rmdir()
            _into_place(part, path)
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
        found = json.loads(self.text("environment.json"))
        found.setdefault("resumed", []).append({"round": round, **environment()})
        self.write("environment.json", json.dumps(found, indent=2) + "\n")

    def begun(self) -> bool:
        """Tell whether a round was written, whole or in part."""
        return (self.path / "metrics.jsonl").exists() or bool(self.checkpoints())

    # -- metrics

    def append(self, report: Mapping[str, Any]) -> None:
        """Add a round's report to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(jsonable(report), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

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

    # -- checkpoints

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint files, oldest first."""
        return sorted(p for p in (self.path / "checkpoints").glob("round-*.safetensors") if _NAME.fullmatch(p.name))

    def save_checkpoint(self, round: int, nest: Mapping[str, Any], keep: int = 2) -> None:
        """Write a checkpoint and remove all but the newest `keep`."""
        tensors: dict[str, Tensor] = {}
        structure = flatten(nest, tensors)
        header = {"fleetfit": "checkpoint", "format": str(FORMAT), "nest": json.dumps(structure)}
        path = self.path / "checkpoints" / f"round-{round:06d}.safetensors"
        part = path.with_name(f".{path.name}.part")
        save_file(_separate(tensors), part, header)
        _into_place(part, path)
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
                found: dict[str, Any] = _read_checkpoint(path)
                return found
            except (SafetensorError, OSError, json.JSONDecodeError, KeyError) as error:
                damaged.append(f"{path.name} ({error})")
        if damaged:
            raise RunError(f"every checkpoint in {self.path} is damaged: {', '.join(damaged)}.")
        return None


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the host, of which no two share memory, as safetensors wants them."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        here = tensor.detach().cpu()
        place = here.untyped_storage().data_ptr()
        alone = here.is_contiguous() and here.untyped_storage().nbytes() == here.nbytes and place not in seen
        found[name] = here if alone else here.contiguous().clone()
        seen.add(place)
    return found


def _read_checkpoint(path: Path) -> Any:
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        version = header.get("format", "none")
        if header.get("fleetfit") != "checkpoint" or version != str(FORMAT):
            raise RunError(f"{path} has format {version}; this version of FleetFit reads format {FORMAT}. Use the version of "
                           "FleetFit that wrote it.")  # fmt: skip
        return restore(json.loads(header["nest"]), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
