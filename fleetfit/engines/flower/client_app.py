"""The Flower ClientApp of every node: it hands each message to whoever has torch loaded, and sends back the answer.

Flower starts a process for each message. It would take seconds to import torch in it, so the work is done in a warm
worker that stays (`fleetfit.engines.flower.warm`), or here where torch is loaded already (`fleetfit flower node` forks
this process from one that has it).
"""

import sys

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fleetfit.engines.flower import messages, warm
from fleetfit.engines.flower.trace import told

app = ClientApp()


def _answer(message: Message, context: Context) -> Message:
    config = context.node_config.get("config")
    if not isinstance(config, str) or not config:
        raise ValueError(
            "this node does not say where its configuration is: start it with `fleetfit flower node NODE.toml`, or "
            "with --node-config 'config=\"/path/to/node.toml\"'."
        )
    told("begun", message.metadata.message_id)
    parts = messages.parts_of(message)
    held = parts.pop(messages.HOLD, None) is not None
    if "torch" in sys.modules:
        from fleetfit.engines.flower.node import answer

        body = answer(config, parts)
    else:
        warm.arrived(config, held)
        body = warm.asked(parts, config)
    told("answered", message.metadata.message_id)
    return messages.reply(message, {"answer": body})


for _kind in (app.query, app.train, app.evaluate):
    _kind()(_answer)
