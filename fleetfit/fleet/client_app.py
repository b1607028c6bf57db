"""The Flower ClientApp of every node: it hands each message to the node's worker, and sends back the answer.

It is on Flower's public API alone, and runs in whatever process a node starts or forks for a message: with Flower's own
`flower-supernode` too. A process that has torch already (a grid in this process, say) answers by itself.
"""

import sys

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fleetfit.fleet import transport, worker
from fleetfit.fleet.logs import traced

app = ClientApp()


def _answer(message: Message, context: Context) -> Message:
    config = context.node_config.get("config")
    if not isinstance(config, str) or not config:
        raise ValueError(
            "this node does not say where its configuration is: start it with `fleetfit flower node NODE.toml`, or "
            "with --node-config 'config=\"/path/to/node.toml\"'."
        )
    traced("begun", message.metadata.message_id)
    parts = transport.parts_of(message)
    held = parts.pop(transport.HOLD, None) is not None
    if "torch" in sys.modules:
        from fleetfit.fleet.node import answer

        body = answer(config, parts)
    else:
        worker.arrived(config, held)
        body = worker.asked(parts, config)
    traced("answered", message.metadata.message_id)
    return transport.reply(message, {"answer": body})


for _kind in (app.query, app.train, app.evaluate):
    _kind()(_answer)
