"""Atomic writes, values that JSON can hold, and the environment that a result depends on."""

import datetime
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


def jsonable(value: Any) -> Any:
    """Return JSON values; numbers that JSON lacks (NaN, infinity) become None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, text: str) -> None:
    """Write a file beside its place, flush it to disk, and rename it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    into_place(part, path)


def into_place(part: Path, path: Path) -> None:
    """Flush a file or folder to disk and give it its name."""
    flush(part)
    part.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on disk."""
    if path.is_dir() and os.name == "nt":  # a folder cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
