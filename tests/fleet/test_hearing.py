"""Nodes that live take part again at once, whatever a stopped run has left behind; each a real process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from fleet.waiting import finished, until

pytestmark = pytest.mark.fleet

WAYS = {"forking": False, "ordinary": True}

# The node is held where it confirms that it has a message, while the file STALL is there.
STALLS = """
import os, sys, time
if any("flower-supernode" in part or part == "fleetfit.engines.flower.supernode" for part in sys.orig_argv):
    from flwr.supernode.fleet_http_client import FleetHttpClient
    confirm = FleetHttpClient.ConfirmMessageReceived
    def stalling(self, request):
        place = os.environ["STALL"]
        if os.path.exists(place):
            open(place + ".now", "w").close()
            while os.path.exists(place):
                time.sleep(0.05)
        return confirm(self, request)
    FleetHttpClient.ConfirmMessageReceived = stalling
"""


def run_file(rounds: int, epochs: int = 1) -> dict[str, Any]:
    return {
        "rounds": rounds, "data": {"name": "digits"}, "model": {"name": "mlp_2nn"}, "method": {"name": "fedavg"},
        "local": {"epochs": epochs, "lr": 0.05}, "cohort": {"fraction": 1.0}, "evaluate": {"every": 0},
        "engine": {"name": "flower", "nodes": 1, "deadline_s": 60.0},
    }  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("hearing")
    nodes = {name: {"budget": 1.0, "data": {"name": "digits"}} for name in WAYS}
    (folder / "sitecustomize.py").write_text(STALLS)
    with Deployment(folder / "lab", nodes) as made:
        for name in WAYS:
            made.register(name)
        yield made


@pytest.fixture
def node(lab: Deployment, request: pytest.FixtureRequest) -> Iterator[str]:
    """The only node; what happens to messages is written to the file `trace`."""
    name, folder = request.param, lab.folder.parent
    more = {"PYTHONPATH": str(folder), "STALL": str(folder / "stall"), "FLEETFIT_TRACE": str(folder / name)}
    lab.start_node(name, plain=WAYS[name], environment=more)
    yield name
    lab.stop(name)


def traced(lab: Deployment, name: str) -> str:
    path = lab.folder.parent / name
    return path.read_text() if path.exists() else ""


def stop(lab: Deployment, name: str) -> None:
    lab.flwr("stop", str(lab.runs()[0]["run-id"]), "lab")
    lab.stop(f"run-{name}")


def takes_part(lab: Deployment, name: str, out: Path) -> None:
    """See that the next run has the node, with its first answer to each message."""
    run = finished(lab, name, run_file(2), out)
    assert [report["failures"] for report in run.metrics] == [[], []]
    assert "does not take part" not in lab.log(f"run-{name}")


@pytest.mark.parametrize("node", WAYS, indirect=True)
def test_a_run_is_stopped_while_a_node_confirms_that_it_has_a_message(
    node: str, lab: Deployment, tmp_path: Path
) -> None:
    """From then on Flower's own node answers each message with the reply to the one before."""
    name, stall = f"confirming-{node}", lab.folder.parent / "stall"
    lab.start_run(name, run_file(500), out=str(tmp_path / "run"))
    until(lambda: "Round 1/" in lab.log(f"run-{name}"), "a round", lambda: lab.log(f"run-{name}"))
    stall.touch()
    until(stall.with_name("stall.now").exists, "a message", lambda: lab.log(f"run-{name}"))
    stop(lab, name)
    stall.unlink()
    stall.with_name("stall.now").unlink()
    until(lambda: "Ignoring message" in lab.log(node), "that it is not confirmed", lambda: lab.log(node))
    takes_part(lab, f"after-{name}", tmp_path / "after")


@pytest.mark.parametrize("node", ["forking"], indirect=True)
def test_a_run_is_stopped_in_the_middle_of_a_long_job(node: str, lab: Deployment, tmp_path: Path) -> None:
    lab.start_run("long", run_file(1, epochs=10**6), out=str(tmp_path / "run"))
    before = traced(lab, node)

    def begun() -> bool:
        lines = [line.split() for line in traced(lab, node)[len(before) :].splitlines()]
        jobs = {line[3] for line in lines if line[2] == "taken" and "train" in line}
        return any(line[2] == "begun" and line[3] in jobs for line in lines)

    until(begun, "the job", lambda: lab.log("run-long") + traced(lab, node))
    stop(lab, "long")
    takes_part(lab, "after-long", tmp_path / "after")
    assert "abandoned" in traced(lab, node) and "its run has ended" in traced(lab, node)
    messages = [line.split() for line in traced(lab, node).splitlines()]
    events = [line[2] for line in messages if line[3:4] == messages[-1][3:4]]
    assert events == ["taken", "whole", "begun", "answered", "replied", "sent"]
