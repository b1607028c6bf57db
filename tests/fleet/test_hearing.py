"""Nodes that live take part again at once, whatever a stopped run has left behind; each a real process."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from deployment import Deployment
from fleet.waiting import finished, stop_run, until

pytestmark = pytest.mark.fleet

WAYS = {"ours": False, "flowers": True}

# While the file STALL is there, Flower's node is held where it confirms a message, and ours where it asks for a record.
STALLS = """
import os, sys, time
if "--superlink" in sys.orig_argv:
    from flwr.supernode.fleet_http_client import FleetHttpClient
    name = "PullObject" if "node" in sys.orig_argv else "ConfirmMessageReceived"
    method = getattr(FleetHttpClient, name)
    def stalling(self, request):
        place = os.environ["STALL"]
        if os.path.exists(place):
            open(place + ".now", "w").close()
            while os.path.exists(place):
                time.sleep(0.05)
        return method(self, request)
    setattr(FleetHttpClient, name, stalling)
"""


def run_file(rounds: int, epochs: int = 1) -> dict[str, Any]:
    return {
        "rounds": rounds, "data": {"name": "digits"}, "model": {"name": "mlp_2nn"}, "method": {"name": "fedavg"},
        "local": {"epochs": epochs, "lr": 0.05}, "cohort": {"fraction": 1.0}, "evaluate": {"every": 0},
        "engine": {"name": "flower", "nodes": 1, "deadline_s": 120.0},
    }  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("hearing")
    nodes = {name: {"budget": 1.0, "data": {"name": "digits"}} for name in WAYS}
    (folder / "sitecustomize.py").write_text(STALLS)
    with Deployment(folder / "lab", nodes, kept=False) as deployment:
        deployment.register(*WAYS)
        yield deployment


@pytest.fixture(scope="module")
def node(lab: Deployment, request: pytest.FixtureRequest) -> Iterator[str]:
    """The only node, which has tests one after the other; what happens to messages is written to a file."""
    name, folder = request.param, lab.folder.parent
    more = {"PYTHONPATH": str(folder), "STALL": str(folder / "stall"), "FLEETFIT_TRACE": str(folder / name)}
    lab.start_node(name, plain=WAYS[name], environment=more)
    yield name
    lab.stop(name)


def traced(lab: Deployment, name: str) -> str:
    path = lab.folder.parent / name
    return path.read_text() if path.exists() else ""


def takes_part(lab: Deployment, name: str, out: Path) -> None:
    """See that the next run has the node, with its first answer to each message."""
    run = finished(lab, name, run_file(1), out)
    assert [report["failures"] for report in run.metrics] == [[]]
    assert run.metrics[0]["train"]["clients"] == 1


@pytest.mark.parametrize("node", WAYS, indirect=True)
def test_stopping_between_a_message_and_its_content(node: str, lab: Deployment, tmp_path: Path) -> None:
    """From then on Flower's own node answers each message with the reply to the one before."""
    name, stall = f"confirming-{node}", lab.folder.parent / "stall"
    lab.start_run(name, run_file(500), out=str(tmp_path / "run"))
    until(lambda: "Round 1/" in lab.log(f"run-{name}"), "a round", lambda: lab.log(f"run-{name}"))
    stall.touch()
    until(stall.with_name("stall.now").exists, "a message", lambda: lab.log(f"run-{name}"))
    stop_run(lab, name)
    stall.unlink()
    stall.with_name("stall.now").unlink()
    until(lambda: "Ignoring message" in lab.log(node) or "given up" in traced(lab, node), "that it is given up",
          lambda: lab.log(node))  # fmt: skip
    takes_part(lab, f"after-{name}", tmp_path / "after")


def server_killed(lab: Deployment, name: str) -> None:
    """By itself the SuperLink would notice after a minute, and the node a while later."""
    below = psutil.Process(lab.processes["superlink"].pid).children(recursive=True)
    running = [process for process in below if process.status() != psutil.STATUS_ZOMBIE]
    [app] = [process for process in running if "flwr-serverapp" in " ".join(process.cmdline())]
    os.kill(app.pid, signal.SIGKILL)
    lab.stop(f"run-{name}")
    until(lambda: lab.runs()[0]["status"] == "finished:failed", "the end of the run", lambda: lab.log("superlink"))
    assert "killed" in lab.runs()[0]["status-details"]


@pytest.mark.parametrize("node", ["ours"], indirect=True)
@pytest.mark.parametrize("end", [stop_run, server_killed])
def test_a_run_ends_in_the_middle_of_a_long_job(
    end: Callable[[Deployment, str], None], node: str, lab: Deployment, tmp_path: Path
) -> None:
    name = f"long-{end.__name__}".replace("_", "-")
    before = len(traced(lab, node))

    def lines() -> list[list[str]]:
        return [line.split() for line in traced(lab, node)[before:].splitlines()]

    def begun() -> bool:
        jobs = {line[3] for line in lines() if line[2] == "taken" and "train" in line}
        return any(line[2] == "whole" and line[3] in jobs for line in lines())

    lab.start_run(name, run_file(1, epochs=10**6), out=str(tmp_path / "run"))
    until(begun, "the job", lambda: lab.log(f"run-{name}") + traced(lab, node))
    end(lab, name)
    takes_part(lab, f"after-{name}", tmp_path / "after")
    assert any(line[2] == "given" for line in lines())
    last = lines()[-1][3]
    assert [line[2] for line in lines() if line[3:4] == [last]] == ["taken", "whole", "answered", "sent"]
