"""Waiting for fleets of processes, with what they said when they do not come."""

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from deployment import Deployment
from waiting import LIMIT_S

import fleetfit as ff


def until(true: Callable[[], Any], what: str, read_log: Callable[[], str]) -> None:
    """Wait until something is true."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < LIMIT_S, f"{what} did not come within {LIMIT_S:g} s:\n{read_log()[-4000:]}"
        time.sleep(0.2)


def finished(lab: Deployment, name: str, table: Mapping[str, Any], out: Path) -> ff.Run:
    """Run an app to its end, and open its folder."""
    run = lab.start_run(name, table, out=str(out))
    log = f"run-{name}"
    until(lambda: run.poll() is not None, f"the end of {name}", lambda: lab.log(log))
    lab.processes.pop(log)
    assert (out / "summary.json").is_file(), lab.log(log)[-4000:]
    return ff.load(out)


def stop_run(lab: Deployment, name: str) -> None:
    """Have the SuperLink stop a run that goes on."""
    [number] = re.findall(r"Successfully started run (\d+)", lab.log(f"run-{name}"))
    lab.flwr("stop", number, "lab")
    lab.stop(f"run-{name}")


def worker_of(lab: Deployment, name: str) -> psutil.Process:
    """The worker of a node: the process that has torch, data and models."""
    config = str(lab.folder / name / "node.toml")
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "fleetfit.fleet.worker" in line and config in line:
            return process
    raise AssertionError(f"{name} has no worker")


def secrets_in(lab: Deployment, *folders: Path) -> list[str]:
    """Return which files that processes have written hold a line of a private key of the fleet, and whose."""
    paths = [path for path in lab.folder.rglob("*key") if path.is_file()]
    public = "".join(path.read_text() for path in lab.folder.rglob("*key.pub"))  # a node's key file has that half too
    lines = {path: path.read_text().splitlines()[1:-1] for path in paths}
    keys = {path: [line for line in lines[path] if len(line) > 40 and line not in public] for path in paths}
    assert len(keys) >= 6 and all(keys.values()), "those of four nodes, the server and the authority"
    written = [path for folder in (lab.folder, *folders) for path in folder.rglob("*") if path.is_file()]
    texts = {path: path.read_bytes() for path in written if path not in keys}
    return [f"{path}: {key}" for path, text in texts.items() for key, lines in keys.items()
            if any(line.encode() in text for line in lines)]  # fmt: skip
