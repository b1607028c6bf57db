"""Nodes and servers that die, hang, come late or lie, each a real process: the run goes on, the state unharmed."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from deployment import Deployment
from fleet.waiting import finished, stop_run, until, worker_of

import fleetfit as ff
from fleetfit import rounds
from fleetfit.config import Assembly, load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Failure, Job, Update

pytestmark = pytest.mark.fleet

NAMES = ("node-a", "node-b", "node-c")
DIVISION = {"kind": "iid", "clients": len(NAMES)}
DEADLINE_S = 120.0  # nobody waits for it, but where a test gives another one


def settings_of(client: int) -> dict[str, Any]:
    return {"budget": 1.0, "data": {"name": "digits", "partition": DIVISION, "client": client}}


def run_file(rounds: int, epochs: int = 1, **engine: Any) -> dict[str, Any]:
    return {
        "rounds": rounds, "data": {"name": "digits", "partition": DIVISION}, "model": {"name": "mlp_2nn"},
        "method": {"name": "fedavg"}, "fleet": {"groups": [{"budget": 1.0}]}, "local": {"epochs": epochs, "lr": 0.05},
        "cohort": {"fraction": 1.0}, "evaluate": {"every": 0},
        "engine": {"name": "flower", "nodes": len(NAMES), "deadline_s": DEADLINE_S, **engine},
    }  # fmt: skip


@contextlib.contextmanager
def deployed(
    folder: Path, names: Sequence[str], is_kept: bool, environment: Mapping[str, str] | None = None,
    superlinks: Sequence[str] = ("superlink",),
) -> Iterator[Deployment]:  # fmt: skip
    """A fleet with its server app in a process of its own, so that it outlives the SuperLink."""
    nodes = {name: settings_of(client) for client, name in enumerate(names)}
    with Deployment(folder / "lab", nodes, own_process=True, kept=is_kept, superlinks=superlinks) as deployment:
        deployment.register(*names)
        for name in names:
            deployment.start_node(name, environment={
                "FLEETFIT_TRACE": str(deployment.folder / f"{name}.trace"), "NODE": name, **(environment or {})
            })  # fmt: skip
        yield deployment


LINK = """
import os, sys
if "--superlink" in sys.orig_argv:
    import contextlib, random, time
    from fleetfit.fleet.superlink import SuperLink
    receive, send, before, name = SuperLink.receive, SuperLink.send, [], os.environ["NODE"]
    coin = random.Random(name)
    on = lambda: os.path.exists(os.path.join(os.environ["LINKS"], "on"))
    def noted(what, message):
        with open(os.path.join(os.environ["LINKS"], name), "a") as file:
            file.write(f"{what} {message.metadata.group_id.split()[0]}\\n")
    def receiving(self):
        found = receive(self)
        if on() and found is not None and found[0].metadata.message_type == "train":
            noted("asked", found[0])
        return found
    def sending(self, message, seconds):
        if message.metadata.message_type != "train":
            return send(self, message, seconds)
        once = os.path.join(os.environ["LINKS"], "once-" + name)
        if os.path.exists(once):
            os.remove(once)
            return
        if not on():
            return send(self, message, seconds)
        for old in before:  # an answer of an earlier round comes again
            noted("again", old)
            send(self, old, seconds)
        before.clear()
        if coin.random() < 0.5:
            noted("lost", message)
            return
        if coin.random() < 0.7:  # as after an answer to it that was lost: what it says the second time holds
            noted("twice", message)
            send(self, message, seconds)
            before.append(message)
        noted("sent", message)
        send(self, message, seconds)
    SuperLink.receive, SuperLink.send = receiving, sending
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Nodes whose links can be made unreliable, by a file "on" in the folder links."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "links").mkdir()
    (folder / "links" / "sitecustomize.py").write_text(LINK)
    with deployed(
        folder, NAMES, False, {"PYTHONPATH": str(folder / "links"), "LINKS": str(folder / "links")}
    ) as deployment:
        yield deployment


class Going:
    """A run that is going on, read from its folder and its log."""

    def __init__(self, lab: Deployment, name: str, table: dict[str, Any], out: Path) -> None:
        self.lab, self.name, self.out = lab, name, out
        self.process = lab.start_run(name, table, out=str(out))

    @property
    def log(self) -> str:
        return self.lab.log(f"run-{self.name}")

    def reports(self) -> list[dict[str, Any]]:
        place = self.out / "metrics.jsonl"
        lines = place.read_text().splitlines(keepends=True) if place.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def has(self, rounds: int) -> None:
        until(lambda: len(self.reports()) >= rounds, f"round {rounds}", lambda: self.log)

    def ended(self) -> ff.Run:
        until((self.out / "summary.json").exists, "the end", lambda: self.log)
        self.lab.stop(f"run-{self.name}")
        return ff.load(self.out)


def stopped_at_work(lab: Deployment, name: str, log: Callable[[], str]) -> psutil.Process:
    """Stop the worker of a node in the middle of its next job; jobs must take a second or so."""
    trace = lab.folder / f"{name}.trace"
    jobs = trace.read_text().count("on a job")
    until(lambda: trace.read_text().count("on a job") > jobs, f"a job of {name}", log)
    worker = worker_of(lab, name)
    os.kill(worker.pid, signal.SIGSTOP)
    return worker


def trained(report: dict[str, Any]) -> int:
    return int(report["train"]["clients"])


class LeavesOut:
    """Engine local, without the replies of some clients of some rounds."""

    def __init__(self, assembly: Assembly, lost: set[tuple[int, int]]) -> None:
        self.engine, self.lost = assembly.engine(), lost

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        for job in jobs:
            [reply] = self.engine.run(iter([job]))
            yield Failure.of(job, "lost") if (job.round, job.client) in self.lost else reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def test_lost_and_repeated_answers(lab: Deployment, tmp_path: Path) -> None:
    """By the nodes' own notes: the state has the bits of the answers that came in, each counted once."""
    links = Path(lab.folder).parent / "links"
    table = run_file(6, deadline_s=12.0)
    table["cohort"] = {"fraction": 1.0, "quorum": 0.6}
    (links / "on").touch()
    try:
        run = finished(lab, "links", table, tmp_path / "run")
    finally:
        (links / "on").unlink()  # the next tests have links that hold
    events = {c: [line.split() for line in (links / name).read_text().splitlines()] for c, name in enumerate(NAMES)}
    requests = {(int(r) - 1, c) for c, lines in events.items() for what, r in lines if what == "asked"}
    lost = {(int(r) - 1, c) for c, lines in events.items() for what, r in lines if what == "lost"}
    words = [what for lines in events.values() for what, _ in lines]
    assert len(lost) >= 3 and words.count("twice") >= 2 and words.count("again") >= 1, events
    failed = {(m["round"] - 1, f["client"]) for m in run.metrics for f in m["failures"]}
    assert lost <= failed and len(failed) < len(requests)
    assert sum(trained(m) for m in run.metrics) == len(requests - failed)

    simulated = assemble(load_experiment({**table, "cohort": {"fraction": 1.0}, "engine": {"name": "local"}}))
    trace = np.array([[(r, c) in requests for c in range(len(NAMES))] for r in range(table["rounds"])])
    federation = replace(simulated.federation, connected=lambda r: trace[r])
    engine: Any = LeavesOut(simulated, failed)
    *_, last = rounds.run(federation, engine, simulated.settings, rounds.start(federation))
    for name, tensor in last.server.state.items():
        assert (run.server.state[name] == tensor).all(), name


def test_a_killed_node_costs_a_deadline_and_comes_back(lab: Deployment, tmp_path: Path) -> None:
    going = Going(lab, "killed", run_file(200, epochs=40, deadline_s=20.0), tmp_path / "run")
    going.has(1)
    worker = stopped_at_work(lab, "node-c", lambda: going.log)
    done = len(going.reports())
    lab.stop("node-c", sudden=True)
    os.kill(worker.pid, signal.SIGKILL)
    going.has(done + 2)
    without = [trained(report) for report in going.reports()[done : done + 2]]
    assert 2 in without, without
    accepted = lab.log("node-c").count("SuperNode ID:")
    resting = stopped_at_work(lab, "node-a", lambda: going.log)  # rounds wait for it: nobody trains for so long
    lab.start_node("node-c")  # refused for half a minute: the SuperLink must first have missed it
    until(lambda: lab.log("node-c").count("SuperNode ID:") > accepted, "node-c", lambda: lab.log("node-c"))
    os.kill(resting.pid, signal.SIGCONT)
    until(lambda: trained(going.reports()[-1]) == 3 and len(going.reports()) > done + 3, "node-c", lambda: going.log)
    stop_run(lab, "killed")
    assert all(report["train"]["loss"] is not None for report in going.reports())


def test_a_dead_worker_is_replaced_and_late_answers_are_not_used(lab: Deployment, tmp_path: Path) -> None:
    going = Going(lab, "worker", run_file(500, epochs=40, deadline_s=20.0), tmp_path / "run")
    going.has(1)
    worker = stopped_at_work(lab, "node-b", lambda: going.log)
    os.kill(worker.pid, signal.SIGKILL)

    def failures(client: int) -> list[str]:
        return [f["reason"] for report in going.reports() for f in report["failures"] if f["client"] == client]

    until(lambda: failures(1) and trained(going.reports()[-1]) == 3, "another worker", lambda: going.log)
    slow = worker_of(lab, "node-a")
    os.kill(slow.pid, signal.SIGSTOP)
    until(lambda: failures(0), "a late node", lambda: going.log)
    os.kill(slow.pid, signal.SIGCONT)
    until(lambda: trained(going.reports()[-1]) == 3, "the node in time", lambda: going.log)
    stop_run(lab, "worker")
    assert "worker" in failures(1)[0] and "20 s" in failures(0)[0] and "Node node-a " in going.log


def test_a_node_dead_in_its_upload_delays_nothing(lab: Deployment, tmp_path: Path) -> None:
    """It hangs in the middle of sending, and is then killed: Flower's pull would wait for three minutes."""
    evil = tmp_path / "path"
    evil.mkdir()
    (evil / "sitecustomize.py").write_text(STALLS)
    lab.add_node("node-u", settings_of(2))
    lab.register("node-u")
    lab.start_node("node-u", environment={"PYTHONPATH": str(evil), "STALL": str(tmp_path / "stall")})
    going = Going(lab, "upload", run_file(200, nodes=4, deadline_s=15.0), tmp_path / "run")
    going.has(1)
    (tmp_path / "stall").touch()
    until((tmp_path / "stall.now").exists, "an upload", lambda: going.log)
    before = len(going.reports())
    lab.stop("node-u", sudden=True)
    going.has(before + 2)
    reports = going.reports()[before : before + 2]
    stop_run(lab, "upload")
    assert trained(reports[0]) == 3 and [failure["client"] for failure in reports[0]["failures"]] == [3]
    assert "15 s" in reports[0]["failures"][0]["reason"]  # our deadline, not Flower's


STALLS = """
import os, sys, time
if "--superlink" in sys.orig_argv:
    from flwr.supernode.fleet_http_client import FleetHttpClient
    push = FleetHttpClient.PushObject
    def stalling(self, request):
        answer = push(self, request)
        if os.path.exists(os.environ["STALL"]):
            open(os.environ["STALL"] + ".now", "w").close()
            time.sleep(600)
        return answer
    FleetHttpClient.PushObject = stalling
"""

LIES = """
import itertools, os, sys
if "--superlink" in sys.orig_argv:
    import fleetfit.fleet.transport as transport
    told, count = transport.make_reply, os.environ["COUNT"]
    def lying(message, parts):
        if message.metadata.message_type != "train":
            return told(message, parts)
        turn = os.path.getsize(count) if os.path.exists(count) else 0
        open(count, "a").write("x")
        from fleetfit.messages import pack, unpack
        nest = unpack(bytearray(parts["answer"]))
        reply, state = nest["reply"], nest["reply"]["state"]
        if turn == 0: reply["state"] = state[:-1]
        elif turn == 1: reply["state"] = state * float("nan")
        elif turn == 2: reply["num_examples"] = 10**9
        elif turn == 3: reply["state"] = {"more": state}
        elif turn == 4: nest["protocol"] = 99
        elif turn == 5: return told(message, {"answer": b"no message at all"})
        elif turn == 6: reply["state"] = {}
        return told(message, {"answer": pack(nest)})
    transport.make_reply = lying
"""


def test_a_lying_node_and_a_lost_answer_change_nothing(lab: Deployment, tmp_path: Path) -> None:
    """The lost one is node-b's first, which is asked for again."""
    once = Path(lab.folder).parent / "links" / "once-node-b"
    once.touch()
    evil = tmp_path / "path"
    evil.mkdir()
    (evil / "sitecustomize.py").write_text(LIES)
    lab.add_node("node-x", settings_of(2))
    lab.register("node-x")
    lab.start_node("node-x", environment={"PYTHONPATH": str(evil), "COUNT": str(tmp_path / "count")})
    run = finished(lab, "lies", run_file(7, nodes=4), tmp_path / "run")
    lab.stop("node-x")
    assert [[failure["client"] for failure in report["failures"]] for report in run.metrics] == [[3]] * 7
    reasons = [report["failures"][0]["reason"] for report in run.metrics]
    assert len(set(reasons)) == 7, reasons
    assert lab.log("run-lies").count("  Node node-x: ") == 7
    assert [trained(report) for report in run.metrics] == [3] * 7
    assert not once.exists() and "Node node-b " in lab.log("run-lies")
    honest = ff.run({**run_file(7), "engine": {"name": "local"}}, out=tmp_path / "local")
    for name, tensor in honest.server.state.items():
        assert (run.server.state[name] == tensor).all(), name


def test_resume_after_a_kill_has_equal_bits(lab: Deployment, tmp_path: Path) -> None:
    going = Going(lab, "resumed", run_file(6), tmp_path / "run")
    going.has(2)
    ours = psutil.Process(lab.processes["superexec"].pid).children(recursive=True)
    running = [process for process in ours if process.status() != psutil.STATUS_ZOMBIE]  # those of ended runs are not
    [app] = [process for process in running if "flwr-serverapp" in " ".join(process.cmdline())]
    os.kill(app.pid, signal.SIGKILL)
    lab.stop("run-resumed")
    done = len(going.reports())
    assert 2 <= done < 6
    lab.start("resume", ["fleetfit", "flower", "resume", str(tmp_path / "run"), "lab"])
    until((tmp_path / "run" / "summary.json").exists, "the end", lambda: lab.log("resume"))
    lab.stop("resume")
    run = ff.load(tmp_path / "run")
    honest = ff.run({**run_file(6), "engine": {"name": "local"}}, out=tmp_path / "local")
    assert [report["round"] for report in run.metrics] == [1, 2, 3, 4, 5, 6]
    if not any(report["failures"] for report in run.metrics):
        assert all((run.server.state[name] == tensor).all() for name, tensor in honest.server.state.items())


def test_a_run_survives_a_restart_of_the_superlink(tmp_path: Path) -> None:
    """With its state in a file, and a fleet of its own."""
    with deployed(tmp_path, NAMES[:2], is_kept=True) as lab:
        going = Going(lab, "superlink", run_file(5, nodes=2), tmp_path / "run")
        going.has(2)
        lab.stop("superlink", sudden=True)
        time.sleep(3.0)
        lab.start_superlink()
        run = going.ended()
        failures = [failure for report in run.metrics for failure in report["failures"]]
        assert [trained(report) for report in run.metrics] == [2] * 5, failures  # what got lost with it was sent again
        ended = "finished:completed"  # told to the SuperLink a moment after the summary is written
        until(lambda: lab.runs()[0]["status"] == ended, ended, lambda: str(lab.runs()[0]) + lab.log("superlink"))
        after = finished(lab, "after", run_file(1, nodes=2), tmp_path / "after")  # starts when both nodes are back
        assert trained(after.metrics[0]) == 2


def test_a_run_survives_the_death_of_either_of_two_superlinks(tmp_path: Path) -> None:
    """Over one database, each killed in a round; nothing is lost: the state has the bits of a simulation."""
    with deployed(tmp_path, NAMES, is_kept=True, superlinks=("superlink", "second")) as lab:
        going = Going(lab, "two", run_file(5, epochs=20), tmp_path / "run")
        going.has(1)
        worker = stopped_at_work(lab, "node-a", lambda: going.log)
        lab.stop("superlink", sudden=True)
        done = len(going.reports())
        os.kill(worker.pid, signal.SIGCONT)
        going.has(done + 1)
        worker = stopped_at_work(lab, "node-a", lambda: going.log)
        lab.start_superlink("superlink")
        lab.stop("second", sudden=True)
        os.kill(worker.pid, signal.SIGCONT)
        run = going.ended()
        failures = [failure for report in run.metrics for failure in report["failures"]]
        assert [trained(report) for report in run.metrics] == [3] * 5, failures
        ended = "finished:completed"
        until(lambda: lab.runs()[0]["status"] == ended, ended, lambda: str(lab.runs()[0]) + lab.log("superlink"))
    honest = ff.run({**run_file(5, epochs=20), "engine": {"name": "local"}}, out=tmp_path / "local")
    for name, tensor in honest.server.state.items():
        assert (run.server.state[name] == tensor).all(), name
