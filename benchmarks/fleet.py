"""What a message to a node of a real fleet costs, with our node and with Flower's: wall and CPU seconds.

One SuperLink, one node at a time, FedAvg on the digits with a job of a few milliseconds: a round is one message.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.measuring import Figure, Options, amount

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "fleet"))
from deployment import Deployment

import fleetfit as ff

ROUNDS = 12
RUN = {
    "rounds": ROUNDS, "model": {"name": "mlp_2nn"}, "method": {"name": "fedavg"}, "cohort": {"fraction": 1.0},
    "local": {"epochs": 1, "lr": 0.05, "max_steps": 2}, "fleet": {"groups": [{"budget": 1.0}]},
    "evaluate": {"every": 0}, "engine": {"name": "flower", "nodes": 1},
}  # fmt: skip
NODE = {"data": {"name": "digits"}, "budget": 1.0}
WAYS = {
    "a process for each message imports torch (Flower's own node)": True,
    "one worker answers all messages (`fleetfit flower node`)": False,
}


def figures(options: Options) -> Iterator[Figure]:
    """Measure each way in turn, once; the figures are medians over the messages after the first two."""
    for name, plain in WAYS.items():
        with tempfile.TemporaryDirectory(prefix="fleet-") as place:
            wall, cpu = measured(Path(place), plain)
        yield amount(f"{name}, from sending to the reply", wall, "s", detail=f"{cpu:.2f} CPU s on the node")


def measured(place: Path, plain: bool) -> tuple[float, float]:
    """Return median wall seconds of a message, and mean CPU seconds of the node's processes."""
    with Deployment(place / "lab", {"node": NODE}) as lab:
        lab.register("node")
        node = lab.start_node("node", plain)
        run = lab.start_run("app", RUN, out=str(place / "run"))
        spent = []
        for wanted in (2, ROUNDS - 1):
            while not (place / "run" / "config.toml").exists() or len(ff.load(place / "run").metrics) < wanted:
                if run.poll() is not None:
                    raise RuntimeError(f"the run ended too early: {lab.log('run-app')}")
                time.sleep(0.05)
            spent.append(_cpu_s(psutil.Process(node.pid)))
        reports = ff.load(place / "run").metrics
    return statistics.median(report["seconds"] for report in reports[2:]), (spent[1] - spent[0]) / (ROUNDS - 3)


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process, of its descendants that live, and of those that it has seen end."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
