"""Waiting for fleets of processes, with what they said when they do not come."""

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deployment import Deployment
from waiting import LIMIT_S

import fleetfit as ff


def until(true: Callable[[], Any], what: str, said: Callable[[], str]) -> None:
    """Wait until something is true."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < LIMIT_S, f"{what} did not come within {LIMIT_S:g} s:\n{said()[-4000:]}"
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
