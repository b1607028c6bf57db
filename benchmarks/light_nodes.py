"""A hundred light nodes: this process answers for all of them, each with a connection, key and heartbeat of its own.

They speak FleetFit's protocol over Flower's network, and train nothing: what they were sent they send back. Run by
`benchmarks.manager` as `python -m benchmarks.light_nodes SUPERLINK CA OUT KEY ...` until SIGTERM; what each got stands
in OUT then.
"""

import contextlib
import json
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response

from fleetfit.core import Job, Problem, Update
from fleetfit.fleet import transport
from fleetfit.fleet.protocol import pack_message
from fleetfit.hooks import rebuild_problem
from fleetfit.messages import dump_reply, load_job, unpack

LOOK_S = 1.0
"""Between two questions of a node for its next message."""
FACTS = {"name": "light", "task": "classification", "sample_shape": [1, 8, 8], "classes": 10, "vocabulary": 0,
         "padding": 0}  # fmt: skip
EXAMPLES = 32
_IDENTITY = threading.Lock()  # Flower has one for a process, and here a process is many nodes


class Node:
    """A node without data."""

    def __init__(self, number: int, key: Path, problems: dict[str, Problem]) -> None:
        """Take a key and what all nodes share: problems, by what they are built from."""
        self.name, self.got, self.bytes, self.asked = f"light-{number:04d}", Counter[str](), 0, 0
        self._number, self._key, self._problems = number, key, problems

    def live(self, superlink: str, ca: bytes, over: threading.Event) -> None:
        """Answer messages until it is over."""
        private = serialization.load_ssh_private_key(self._key.read_bytes(), None)
        keys: Any = (private, private.public_key())
        time.sleep(0.02 * self._number)  # not all in the same moment
        with http_request_response(superlink, False, ca, keys) as (node, receive, send, _, _, pull, push, confirm):
            while not over.wait(LOOK_S):
                self.asked += 1
                with contextlib.suppress(Exception):  # a run that ends meanwhile
                    while (found := receive()) is not None:
                        self._answer(node, *found, send, pull, push, confirm)

    def _answer(
        self, node: int, message: Any, tree: Any, send: Any, pull: Any, push: Any, confirm: Any
    ) -> None:  # fmt: skip
        run, names = message.metadata.run_id, [each.object_id for each in iterate_object_tree(tree)]
        contents = pull_objects(names, lambda name: pull(run, name), initial_backoff=0.05)
        self.bytes += sum(map(len, contents.values()))
        confirm(run, tree.object_id)
        whole: Any = inflate_object_from_contents(tree.object_id, contents)
        said = self._said(transport.read_parts(whole))
        with _IDENTITY:
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, node, 1
            answer = transport.make_reply(message, {"answer": said})
        with no_object_id_recompute():
            answer.metadata.__dict__["_message_id"] = answer.object_id
            order, parts = get_object_tree(answer), get_all_nested_objects(answer)
            wanted, session = send(answer, order, 0.0)
            found = {name: parts[name].deflate() for name in wanted}
        self.bytes += sum(map(len, found.values()))
        push_object_contents_from_iterable(found.items(), lambda name, content: push(run, session, name, content))

    def _said(self, parts: dict[str, bytearray]) -> bytes:
        header = unpack(parts["header"])
        what = header["job"]["kind"] if header["what"] == "job" else header["what"]
        self.got[what] += 1
        if what == "hello":
            hello = {"name": self.name, "facts": FACTS, "examples": {"train": EXAMPLES}, "budget": 1.0,
                     "tolerance": 0.1, "labels": None}  # fmt: skip
            return pack_message({"hello": hello})
        if what in ("setup", "base"):
            return pack_message({"ready": True})
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


def main(superlink: str, ca: str, out: str, *keys: str) -> None:
    """Live as so many nodes, until SIGTERM."""
    problems: dict[str, Problem] = {}
    nodes = [Node(number, Path(key), problems) for number, key in enumerate(keys)]
    over, content = threading.Event(), Path(ca).read_bytes()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    threads = [threading.Thread(target=node.live, args=(superlink, content, over), daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    over.wait()
    for thread in threads:
        thread.join(10)
    found = [{"name": n.name, "messages": dict(n.got), "bytes": n.bytes, "asked": n.asked} for n in nodes]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
