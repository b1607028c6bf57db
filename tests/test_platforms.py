"""What works elsewhere than on Linux: simulations in one process do, and what does not says so.

On Linux, a process that has lost what Windows has not stands for Windows: modules, functions and constants are gone,
and what is open cannot be renamed. On macOS and Windows the same file runs as it is (tests/everywhere.txt).
"""

import subprocess
import sys
from pathlib import Path

import pytest

from fleetfit import compare, errors
from fleetfit.engines import processes
from fleetfit.errors import ConfigError

LIKE_WINDOWS = """
import importlib, mmap, os, pathlib, pkgutil, select, signal, subprocess, sys, multiprocessing.connection
import torch, sklearn.datasets, pydantic, typer, rich  # they have ways of their own
try:
    import matplotlib.pyplot
except ImportError:
    pass

if sys.platform != "win32":
    for name in ("fcntl", "resource", "pwd", "grp", "termios"):
        sys.modules[name] = None
    for module, names in {  # WNOHANG and SIGKILL stay: subprocess needs them here
        os: "fork getuid geteuid mkfifo killpg getpgid posix_fallocate sched_getaffinity pidfd_open uname "
            "O_NOFOLLOW O_NONBLOCK O_NOCTTY O_CLOEXEC O_DIRECTORY fchmod",
        signal: "SIGHUP SIGCHLD SIGALRM SIG_BLOCK SIG_UNBLOCK pthread_sigmask setitimer ITIMER_REAL",
        mmap: "MAP_PRIVATE MAP_ANONYMOUS MADV_HUGEPAGE PROT_READ PROT_WRITE",
        select: "poll",
    }.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "win32"
    renamed, opened = os.replace, os.open

    def replace(source, target):
        held = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                if os.path.lexists(f"/proc/self/fd/{n}")}
        if str(pathlib.Path(source).resolve()) in held:
            raise PermissionError(32, "it is open", str(source))
        renamed(source, target)

    def open_(path, flags, *rest, **more):
        if os.path.isdir(path):
            raise PermissionError(13, "a folder", str(path))
        return opened(path, flags, *rest, **more)

    os.replace, os.open = replace, open_
    import fleetfit.errors
    fleetfit.errors.WINDOWS = True

import fleetfit
failed = []
for found in pkgutil.walk_packages(fleetfit.__path__, "fleetfit."):
    if found.name.endswith("__main__") or ".executorch" in found.name:
        continue
    try:
        importlib.import_module(found.name)
    except fleetfit.MissingExtra:
        pass
    except Exception as error:
        failed.append(f"{found.name}: {type(error).__name__}: {error}")
print(*failed, sep="\\n", file=sys.stderr)
assert not failed

run = fleetfit.run(out="run", overrides=["rounds=2", "local.epochs=1", "data.partition.clients=8"])
again = fleetfit.load("run")
assert again.finished and again.accuracy("local") == run.accuracy("local")
print("trained")
"""


def test_without_what_windows_lacks_everything_is_imported_and_trains(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIKE_WINDOWS], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("trained\n")


def test_worker_processes_are_refused_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "WINDOWS", True)
    with pytest.raises(ConfigError, match='"processes" works on Linux and macOS only. engine.name = "local"'):
        processes.processes(None)  # type: ignore[arg-type]


def test_several_runs_at_a_time_are_refused_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(errors, "WINDOWS", True)
    (tmp_path / "two.toml").write_text("[[compare.row]]\nmethod.name = 'fedavg'\n[compare.grid]\nseed = [0, 1]\n")
    with pytest.raises(ConfigError, match="several runs at a time works on Linux and macOS only. Leave out --jobs"):
        compare(tmp_path / "two.toml", out=tmp_path / "out", jobs=2)
    assert not (tmp_path / "out").exists()


def test_a_fleets_node_is_refused_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from fleetfit.engines.flower.connection import Connection
    from fleetfit.engines.flower.launcher import run_node

    monkeypatch.setattr(errors, "WINDOWS", True)
    with pytest.raises(ConfigError, match="node works on Linux and macOS only. Under Windows, run it in WSL 2"):
        run_node(tmp_path / "node.toml", Connection("localhost:1"))


def test_what_is_run_everywhere_is_there() -> None:
    listed = [line for line in Path(__file__).with_name("everywhere.txt").read_text().splitlines() if line[:1] != "#"]
    root = Path(__file__).parents[1]
    assert "tests/test_platforms.py" in listed
    assert not [line for line in listed if not (root / line).is_file()]
