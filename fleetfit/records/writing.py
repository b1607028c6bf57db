"""Values that JSON can hold, names for what is whole, and the environment that a result depends on."""

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

from fleetfit.files import flush, write_atomically

__all__ = ["environment", "flush", "into_place", "jsonable", "write_atomically"]


def jsonable(value: Any) -> Any:
    """Return JSON values; numbers that JSON lacks (NaN, infinity) become None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def into_place(part: Path, path: Path) -> None:
    """Flush a file or folder to disk and give it its name."""
    flush(part)
    part.replace(path)
    flush(path.parent)


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
