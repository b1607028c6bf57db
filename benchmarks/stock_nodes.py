"""Light nodes of a stock Flower app: Flower's own connection and pauses, FedAvg of `flwr`, and the payload of ours.

A double of `flower-supernode` without its processes: it pulls every object of a message, and sends other arrays of the
same size back. Run by `benchmarks.manager`, `python -m benchmarks.stock_nodes SUPERLINK CA OUT KEY ...`, until SIGTERM.
"""

import contextlib
import json
import signal
import sys
import threading
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import tomli_w
from cryptography.hazmat.primitives import serialization
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
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
from flwr.supernode.fleet_http_connection import http_request_response

from fleetfit.fleet import app_folder

LOOK_S = 3.0
"""Flower's pause between two questions for a message."""
SERVER = """
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

SHAPES = [(200, 64), (200,), (200, 200), (200,), (10, 200), (10,)]  # those of mlp_2nn
app = ServerApp()


@app.main()
def main(grid, context):
    config, ends = context.run_config, []
    while len(list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(0.2)
    start = ArrayRecord({str(i): Array(np.full(shape, 0.1, np.float32)) for i, shape in enumerate(SHAPES)})
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=config["nodes"], min_available_nodes=config["nodes"])
    strategy.start(grid, start, num_rounds=config["rounds"],
                   evaluate_fn=lambda number, arrays: ends.append(time.monotonic()))
    Path(config["out"]).write_text(json.dumps([b - a for a, b in zip(ends, ends[1:])]))
"""
CLIENT = """
from flwr.clientapp import ClientApp

app = ClientApp()
"""


def write_app(folder: Path) -> None:
    """Write the app for `flwr run`: FleetFit's with other components."""
    app_folder.write_app(folder)
    path = folder / "pyproject.toml"
    table = tomllib.loads(path.read_text())
    table["tool"]["flwr"]["app"] |= {
        "components": {"serverapp": "server:app", "clientapp": "client:app"},
        "config": {"out": "", "nodes": 1, "rounds": 1},
    }
    path.write_text(tomli_w.dumps(table))
    (folder / "server.py").write_text(SERVER)
    (folder / "client.py").write_text(CLIENT)


def _live(superlink: str, ca: bytes, key: Path, got: Counter[str], number: int) -> None:
    private = serialization.load_ssh_private_key(key.read_bytes(), None)
    keys: Any = (private, private.public_key())
    with http_request_response(superlink, False, ca, keys) as (_, receive, send, _, _, pull, push, confirm):
        while True:
            with contextlib.suppress(Exception):  # a run that ends meanwhile
                while (found := receive()) is not None:
                    got[found[0].metadata.message_type] += 1
                    _answer(*found, send, pull, push, confirm, number)
            time.sleep(LOOK_S)


def _answer(
    message: Any, tree: Any, send: Any, pull: Any, push: Any, confirm: Any, number: int
) -> None:  # fmt: skip
    run, names = message.metadata.run_id, [each.object_id for each in iterate_object_tree(tree)]
    contents = pull_objects(names, lambda name: pull(run, name))
    confirm(run, tree.object_id)
    whole: Any = inflate_object_from_contents(tree.object_id, contents)
    metrics = MetricRecord({"num-examples": 32, "loss": 1.0})
    arrays = ArrayRecord({name: Array(array.numpy() + number) for name, array in whole.content["arrays"].items()})
    answer = Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    with no_object_id_recompute():
        answer.metadata.__dict__["_message_id"] = answer.object_id
        order, parts = get_object_tree(answer), get_all_nested_objects(answer)
        wanted, session = send(answer, order, 0.0)
        found = {name: parts[name].deflate() for name in wanted}
    push_object_contents_from_iterable(found.items(), lambda name, content: push(run, session, name, content))


def main(superlink: str, ca: str, out: str, *keys: str) -> None:
    """Live as so many nodes, until SIGTERM."""
    over, got, content = threading.Event(), [Counter[str]() for _ in keys], Path(ca).read_bytes()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    for number, (key, each) in enumerate(zip(keys, got, strict=True)):
        threading.Thread(target=_live, args=(superlink, content, Path(key), each, number), daemon=True).start()
        time.sleep(0.02)
    over.wait()
    Path(out).write_text(json.dumps([{"messages": each, "bytes": 0} for each in got]))


if __name__ == "__main__":
    main(*sys.argv[1:])
