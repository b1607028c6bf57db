"""A hundred light nodes: this process answers for all of them, each with a connection, key and heartbeat of its own.

Each is the loop of `fleetfit flower node`, with a worker that trains nothing: what it was sent it sends back. Run by
`benchmarks.manager` as `python -m benchmarks.light_nodes SUPERLINK CA OUT KEY ...` until SIGTERM; what each got stands
in OUT then.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetfit.core import Job, Problem, Update
from fleetfit.fleet import node_loop, superlink
from fleetfit.fleet.connection import Connection, FaultReporter
from fleetfit.fleet.protocol import pack_message
from fleetfit.hooks import rebuild_problem
from fleetfit.messages import dump_reply, load_job, unpack

FACTS = {"name": "light", "task": "classification", "sample_shape": [1, 8, 8], "classes": 10, "vocabulary": 0,
         "padding": 0}  # fmt: skip
EXAMPLES = 32
BUDGET = float(os.environ.get("LIGHT_BUDGET", "1"))


class Worker:
    """A node's worker without data."""

    def __init__(self, name: str, problems: dict[str, Problem]) -> None:
        """Take a name and what all nodes share: problems, by what they are built from."""
        self.name, self.got, self.bytes = name, Counter[str](), 0
        self._problems = problems

    def ask(self, parts: dict[str, bytearray], is_wanted: Callable[[], bool]) -> bytes:
        """Answer a message."""
        answer = self._answer(parts)
        self.bytes += sum(map(len, parts.values())) + len(answer)
        return answer

    def _answer(self, parts: dict[str, bytearray]) -> bytes:
        header = unpack(parts["header"])
        what = header["job"]["kind"] if header["what"] == "job" else header["what"]
        self.got[what] += 1
        if what in ("hello", "setup", "base"):
            hello = {"name": self.name, "facts": FACTS, "examples": {"train": EXAMPLES}, "budget": BUDGET,
                     "tolerance": 0.1, "labels": None}  # fmt: skip
            ready = {} if what == "hello" else {"ready": True}
            return pack_message(ready if what == "base" else {"hello": hello, **ready})
        key = json.dumps(header["problem"], sort_keys=True)
        if key not in self._problems:
            self._problems[key] = rebuild_problem(header["problem"])
        layout = self._problems[key].layout
        job = load_job({**header["job"], "state": unpack(parts["state"])}, layout)
        return pack_message({"reply": dump_reply(update_of(job), layout)})


def update_of(job: Job) -> Update:
    """Return what a client would say that has learned nothing."""
    metrics: dict[str, Any] = {"loss": 1.0, "steps": 1}
    if job.kind == "evaluate":
        metrics = {"n": 1, "correct": [0] * len(job.submodel.exits), "ensemble": 0}
    state = job.state if job.kind == "train" else {}
    return Update.of(job, state, EXAMPLES, metrics=metrics)


def main(address: str, ca: str, out: str, *keys: str) -> None:
    """Live as so many nodes, until SIGTERM."""
    over, problems = threading.Event(), dict[str, Problem]()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    workers = [Worker(f"light-{number:04d}", problems) for number in range(len(keys))]
    nodes = []
    for worker, key in zip(workers, keys, strict=True):
        nodes.append(_Node(Connection(address, root_certificates=Path(ca), key=Path(key)), worker))
        threading.Thread(target=nodes[-1].live, args=(over,), daemon=True).start()
        time.sleep(0.02)  # not all in the same moment
    over.wait()
    Path(out).write_text(json.dumps([{"name": w.name, "messages": w.got, "bytes": w.bytes} for w in workers]))
    for node in nodes:
        node.link.leave()


class _Node:
    """A node, which tries again where the SuperLink refuses it: it still has the one before that was killed."""

    def __init__(self, connection: Connection, worker: Worker) -> None:
        self._connection, self._worker = connection, worker
        self.link = self._connect()

    def _connect(self) -> superlink.SuperLink:
        return superlink.SuperLink(self._connection, FaultReporter(lambda: None, lambda _: None))

    def live(self, over: threading.Event) -> None:
        """Join and answer, until all is over."""
        with contextlib.suppress(superlink._Left):
            while not over.is_set():
                with contextlib.suppress(superlink.Refusal, superlink.Trouble):
                    self.link.join()
                    print(f"{self._worker.name} has joined", flush=True)
                    worker: Any = self._worker
                    node_loop.answer_messages(self.link, worker)
                self.link.leave()
                over.wait(2.0)
                self.link = self._connect()


if __name__ == "__main__":
    main(*sys.argv[1:])
