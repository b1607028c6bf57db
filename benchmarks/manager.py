"""What a node costs the server of a real fleet: messages and bytes, and the memory and CPU seconds of its processes.

One SuperLink, the real server app, and ten and then a hundred light nodes over loopback (`benchmarks.light_nodes`),
each with a key of its own; they send back what they were sent. The SuperLink notes each request that it answers.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measuring import Figure, Options, amount

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "fleet"))
from deployment import Deployment

import fleetfit as ff
from benchmarks import stock_nodes

ROOT = Path(__file__).parents[1]
NODES = (10, 100)
ROUNDS = 4
RUN: dict[str, Any] = {
    "rounds": ROUNDS, "model": {"name": "mlp_2nn"}, "method": {"name": "fedavg"}, "cohort": {"fraction": 1.0},
    "local": {"epochs": 1}, "fleet": {"groups": [{"budget": 1.0}]}, "evaluate": {"every": 0},
}  # fmt: skip
_MB = 1e6
# Of no message: looks for one, heartbeats, what Flower asks between its own processes, and commands.
POLLS = ("/v1/fleet/send-node-heartbeat", "/v1/runtime/get-nodes", "/v1/runtime/acquire-task", "/v1/runtime/push-logs")
# In the SuperLink: its own log leaves out what succeeds.
NOTING = """
import os, sys
if "REQUESTS" in os.environ and "flower-superlink" in " ".join(sys.orig_argv):
    from flwr.supercore.http_logging import RoutineAccessFilter
    file, judge = open(os.environ["REQUESTS"], "a", 1), RoutineAccessFilter.filter
    def noting(self, record):
        if record.name == "uvicorn.access":
            file.write(record.args[2] + chr(10))
        return judge(self, record)
    RoutineAccessFilter.filter = noting
"""


@dataclass
class Taken:
    """What the processes of one run took.

    Attributes:
        app_bytes: Peak of the server app.
        link_bytes: Of the SuperLink, at most.
        app_cpu_s: CPU seconds of the server app.
        rounds_s: Wall seconds of each round.
        messages: To each node, by what they ask for.
        asked: Questions of each node for its next message.
        bytes: To and from each node, content only.
    """

    app_bytes: int
    link_bytes: int
    app_cpu_s: float
    rounds_s: list[float]
    link_cpu_s: float
    requests: Counter[str]
    messages: dict[str, float]
    bytes: float

    def count_requests(self, nodes: int) -> float:
        """Return how many requests a message to one of so many nodes took with its reply, polls aside."""
        messages = sum(self.messages.values()) * nodes
        empty = self.requests["/v1/fleet/pull-messages"] - messages
        others = sum(n for path, n in self.requests.items() if path in POLLS or "/control/" in path)
        return (self.requests.total() - empty - others) / messages


def figures(options: Options) -> Iterator[Figure]:
    """Run with few nodes and with many, once each."""
    few, many = [n // 5 for n in NODES] if options.quick else NODES
    found = dict(zip((few, many), measure_fleets((few, many)), strict=True))
    [stock] = measure_fleets([few], stock=True)
    [disk] = measure_fleets([few], kept=True)
    a, b = found[few], found[many]
    each = many - few
    what = f"a fleet of {many} light nodes"
    said = ", ".join(f"{n:g} {kind}" for kind, n in sorted(b.messages.items()))
    yield amount(f"{what}: messages to a node in {ROUNDS} rounds", sum(b.messages.values()), "messages",
                 detail=f"{said}; {b.bytes / _MB:.2f} MB of content both ways")  # fmt: skip
    yield amount(f"{what}: requests to the SuperLink for a message and its reply, polls aside",
                 b.count_requests(many), "requests", wanted=15,
                 detail=f"{a.count_requests(few):.1f} with {few}; with polls "
                        f"{b.requests.total() / sum(b.messages.values()) / many:.1f}")  # fmt: skip
    yield amount(f"{what}: CPU of the SuperLink for a request", b.link_cpu_s / b.requests.total() * 1e3, "ms",
                 detail=f"{a.link_cpu_s / a.requests.total() * 1e3:.2f} ms with {few}")  # fmt: skip
    yield amount(f"a fleet of {few} light nodes, state on disk: CPU of the SuperLink for a request",
                 disk.link_cpu_s / disk.requests.total() * 1e3, "ms", wanted=3.5,
                 detail=f"{a.link_cpu_s / a.requests.total() * 1e3:.2f} ms in memory")  # fmt: skip
    yield amount(f"{what}: memory of the server app for each node more", (b.app_bytes - a.app_bytes) / each / _MB,
                 "MB", detail=f"{a.app_bytes / _MB:.0f} with {few}, {b.app_bytes / _MB:.0f} with {many}")  # fmt: skip
    yield amount(f"{what}: memory of the SuperLink for each node more", (b.link_bytes - a.link_bytes) / each / _MB,
                 "MB", detail=f"{a.link_bytes / _MB:.0f} with {few}, {b.link_bytes / _MB:.0f} with {many}")  # fmt: skip
    yield amount(f"{what}: CPU of the server app for each node more and round",
                 (b.app_cpu_s - a.app_cpu_s) / each / ROUNDS * 1e3, "ms",
                 detail=f"{a.app_cpu_s:.1f} s with {few}, {b.app_cpu_s:.1f} s with {many}, start included")  # fmt: skip
    yield amount(f"{what}: a round, wall", statistics.median(b.rounds_s), "s",
                 detail=f"{statistics.median(a.rounds_s):.1f} s with {few}")  # fmt: skip
    yield amount(f"a stock Flower app with {few} light nodes and this payload: a round, wall",
                 statistics.median(stock.rounds_s), "s",
                 detail=f"{stock.count_requests(few):.1f} requests a message, polls aside")  # fmt: skip


def measure_fleets(
    counts: Sequence[int], kept: bool = False, stock: bool = False, cohort: int | None = None
) -> Iterator[Taken]:
    """Run with so many nodes each time.

    Args:
        counts: Of nodes.
        kept: With the SuperLink's state on disk.
        stock: A stock Flower app.
        cohort: Nodes in a round; None for all.
    """
    with tempfile.TemporaryDirectory(prefix="light-") as place:
        (Path(place) / "sitecustomize.py").write_text(NOTING)
        os.environ |= {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}", "REQUESTS": f"{place}/requests"}
        with Deployment(Path(place) / "lab", {}, kept=kept) as lab:
            names = [f"light-{number:04d}" for number in range(max(counts))]
            for name in names:
                lab.add_node(name, {})
            lab.register(*names)
            for count in counts:
                yield _measure(lab, names[:count], Path(place) / "requests", stock, cohort)


def _measure(lab: Deployment, names: Sequence[str], noted: Path, stock: bool, cohort: int | None) -> Taken:
    out, count = lab.folder / f"nodes-{len(names)}.json", len(names)
    keys = [str(lab.folder / name / "key") for name in names]
    module = stock_nodes.__name__ if stock else "benchmarks.light_nodes"
    command = [sys.executable, "-m", module, f"127.0.0.1:{lab.port}", str(lab.ca), str(out), *keys]
    superlink = psutil.Process(lab.processes["superlink"].pid)
    size, spent = noted.stat().st_size, sum(superlink.cpu_times()[:2])
    lab.start("light", command)
    name, folder = f"app-{count}", lab.folder / f"run-{count}"
    if stock:
        stock_nodes.write_app(lab.folder / name)
        config = f'out="{folder}" nodes={count} rounds={RUN["rounds"]}'
        command = ["flwr", "run", str(lab.folder / name), "lab", "--stream", "--run-config", config]
        run = lab.start(f"run-{name}", command)
    else:
        table = RUN | {"engine": {"name": "flower", "nodes": count}}
        run = lab.start_run(name, table | ({"cohort": {"count": cohort}} if cohort else {}), out=str(folder))
    app, link, cpu = 0, 0, 0.0
    while run.poll() is None:
        with_app = [p for p in superlink.children(recursive=True) if _is_app(p)]
        link = max(link, superlink.memory_info().rss)
        for process in with_app:
            try:
                app, times = max(app, process.memory_info().rss), process.cpu_times()
            except psutil.Error:
                continue
            cpu = max(cpu, times.user + times.system)
        time.sleep(0.1)
    lab.stop(f"run-{name}")
    requests = Counter(noted.read_text()[size:].split())
    spent = sum(superlink.cpu_times()[:2]) - spent
    lab.stop("light")
    if not (folder if stock else folder / "summary.json").exists() or not out.exists():
        raise RuntimeError(f"the run did not finish: {lab.log(f'run-{name}')[-2000:]}{lab.log('light')[-2000:]}")
    got = json.loads(out.read_text())
    messages = Counter[str]()
    for node in got:
        messages.update(node["messages"])
    rounds = json.loads(folder.read_text()) if stock else [report["seconds"] for report in ff.load(folder).metrics]
    return Taken(
        app, link, cpu, rounds, spent, requests, {kind: n / count for kind, n in messages.items()},
        sum(node["bytes"] for node in got) / count,
    )  # fmt: skip


def _is_app(process: psutil.Process) -> bool:
    try:
        return any(Path(part).name == "flwr-serverapp" for part in process.cmdline())
    except psutil.Error:
        return False
