"""The Flower ClientApp of every node: it hands each message to the node's worker, and sends the answer back.

It uses the public API of Flower alone, and runs in any process that a node starts or forks for a message, also under
`flower-supernode`. A process that has torch already (with a grid in the same process) answers without a worker.
"""

import sys

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fleetfit.fleet import transport, worker
from fleetfit.fleet.logs import trace

app = ClientApp()


def answer_message(message: Message, context: Context) -> Message:
    """Answer a message of any kind."""
    config = context.node_config.get("config")
    if not isinstance(config, str) or not config:
        raise ValueError(
            "this node does not say where its configuration is: start it with `fleetfit flower node NODE.toml`, or "
            "with --node-config 'config=\"/path/to/node.toml\"'."
        )
    trace("begun", message.metadata.message_id)
    parts = transport.read_parts(message)
    is_held = parts.pop(transport.HOLD, None) is not None
    if "torch" in sys.modules:
        from fleetfit.fleet.node import answer

        content = answer(config, parts)
    else:
        worker.note_arrival(config, is_held)
        content = worker.ask_worker(parts, config)
    trace("answered", message.metadata.message_id)
    return transport.make_reply(message, {"answer": content})


for _kind in (app.query, app.train, app.evaluate):
    _kind()(answer_message)
