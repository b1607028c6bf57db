"""The warm start is optional: without its package a node runs Flower's own SuperNode, and a fleet trains."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

from deployment import Deployment
from fleet.waiting import finished

from fleetfit.fleet import launcher
from fleetfit.fleet.connection import FaultReporter
from fleetfit.fleet.warm_start import find_warm_start, speed_up

ABSENT = "import sys\nsys.modules['fleetfit.fleet.warm'] = None\n"
"""As `sitecustomize.py`: the process has no warm start."""


@pytest.fixture
def without_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    import fleetfit.fleet

    monkeypatch.delattr(fleetfit.fleet, "warm", raising=False)
    monkeypatch.setitem(sys.modules, "fleetfit.fleet.warm", None)


def test_it_is_installed_and_names_its_processes() -> None:
    warm = find_warm_start()
    assert warm is not None
    for module in (warm.SUPERNODE, warm.ZYGOTE):
        assert module.startswith("fleetfit.fleet.warm.")


@pytest.mark.usefixtures("without_warm")
def test_a_block_of_the_server_app_runs_without_it() -> None:
    assert find_warm_start() is None
    done = []
    with speed_up(grid=object()):
        done.append("block")
    assert done == ["block"]


@pytest.mark.usefixtures("without_warm")
def test_a_node_without_it_runs_flowers_own_supernode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = tmp_path / "flower-supernode"
    command.write_text('#!/bin/sh\necho "started with $*"\nexit 3\n')
    command.chmod(0o700)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}"}
    with launcher.ProcessGroup(environment) as group:
        assert launcher._start_zygote(group, launcher.CLIENT_APP, None) is None
    assert "warm start" in caplog.text
    supernode = launcher._SuperNode(["--superlink", "127.0.0.1:1"], "127.0.0.1:2")
    reporter = FaultReporter(lambda: None, lambda cause: None)
    code, output = launcher._run_supernode(supernode, environment, None, reporter)
    assert (code, output) == (3, "started with --superlink 127.0.0.1:1\n")


def test_only_the_switch_imports_it() -> None:
    """What import-linter sees not: modules that are imported by name."""
    package = Path(launcher.__file__).parents[1]
    outside = [path for path in package.rglob("*.py") if (package / "fleet/warm") not in path.parents]
    mentions = {path.name for path in outside if "fleet.warm" in path.read_text().replace("fleet.warm_start", "")}
    assert mentions == {"warm_start.py"}


@pytest.mark.fleet
def test_a_fleet_trains_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "sitecustomize.py").write_text(ABSENT)
    path = os.pathsep.join([str(tmp_path / "absent"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", path)
    code = "from fleetfit.fleet.warm_start import find_warm_start; print(find_warm_start())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "None\n"
    node: Mapping[str, Any] = {"budget": 1.0, "data": {"name": "digits"}}
    table = {
        "rounds": 2, "model": {"name": "cnn"}, "local": {"max_steps": 2}, "cohort": {"fraction": 1.0},
        "evaluate": {"every": 0}, "engine": {"name": "flower", "nodes": 1},
    }  # fmt: skip
    with Deployment(tmp_path / "lab", {"node-a": node}, kept=False) as lab:
        lab.register("node-a")
        lab.start_node("node-a")
        run = finished(lab, "cold", table, tmp_path / "run")
        assert "warm start" in lab.log("node-a")
    assert [report["train"]["clients"] for report in run.metrics] == [1, 1]
