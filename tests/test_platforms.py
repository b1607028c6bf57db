"""What works on Linux, macOS and Windows: simulations in one process do; what does not work on Windows is refused.

The same file runs on all three (tests/everywhere.txt).
"""

import subprocess
import sys
from pathlib import Path

import pytest
from support import raises

from fleetfit import compare, errors
from fleetfit.engines import processes
from fleetfit.errors import ConfigError

IMPORT_ALL = """
import importlib, pkgutil, sys
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
"""


def test_every_module_is_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORT_ALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


def test_worker_processes_are_refused_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "WINDOWS", True)
    with raises(ConfigError, "processes", 'engine.name = "local"'):
        processes.processes(None)  # type: ignore[arg-type]


def test_several_runs_at_a_time_are_refused_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(errors, "WINDOWS", True)
    (tmp_path / "two.toml").write_text("[[compare.row]]\nmethod.name = 'fedavg'\n[compare.grid]\nseed = [0, 1]\n")
    with raises(ConfigError, "--jobs"):
        compare(tmp_path / "two.toml", out=tmp_path / "out", jobs=2)
    assert not (tmp_path / "out").exists()


def test_a_fleets_node_is_refused_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from fleetfit.fleet.connection import Connection
    from fleetfit.fleet.launcher import run_node

    monkeypatch.setattr(errors, "WINDOWS", True)
    with raises(ConfigError, "WSL 2"):
        run_node(tmp_path / "node.toml", Connection("localhost:1"))


def test_what_is_run_everywhere_is_there() -> None:
    listed = [line for line in Path(__file__).with_name("everywhere.txt").read_text().splitlines() if line[:1] != "#"]
    root = Path(__file__).parents[1]
    assert "tests/test_platforms.py" in listed
    assert not [line for line in listed if not (root / line).is_file()]
