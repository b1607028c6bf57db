"""The environment on which results depend: versions, hardware, git commits."""

import contextlib
import datetime
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def describe_environment() -> dict[str, Any]:
    """Return versions, platform, threads, and the git commits of FleetFit and of the working folder."""
    import numpy as np  # listing run folders imports neither
    import torch

    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "fleetfit": importlib.metadata.version("fleetfit"),
        "fleetfit_commit": _find_own_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": get_processor_name(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": sys.argv,
        "git_commit": _run_git("rev-parse", "HEAD"),
        "git_changes": bool(_run_git("status", "--porcelain", "--untracked-files=no")),
    }


@functools.cache
def _find_own_commit() -> str | None:
    """Return the commit of FleetFit's checkout, "-dirty" if the package differs; None for an installed package."""
    package = Path(__file__).resolve().parents[1]
    top = _run_git("rev-parse", "--show-toplevel", at=package)
    if top is None or Path(top).resolve() != package.parent:  # FleetFit is installed inside another repository
        return None
    commit = _run_git("rev-parse", "HEAD", at=package)
    changes = _run_git("status", "--porcelain", "--", str(package), at=package)
    return f"{commit}-dirty" if commit and changes else commit


def get_processor_name() -> str:
    """Return the processor's name, or its architecture if the system has no name."""
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def _run_git(*command: str, at: Path | None = None) -> str | None:
    try:
        result = subprocess.run(["git", *command], cwd=at, capture_output=True, text=True, timeout=10, check=False)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
