"""The Flower ClientApp, for Flower's own node (`flower-supernode`): a process for each message, which imports torch.

It uses the public API of Flower alone. `fleetfit flower node` does without it.
"""

import os
import sys
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fleetfit.errors import FleetFitError
from fleetfit.fleet import transport
from fleetfit.fleet.logs import trace

_HOLD_S = 5.0  # that an answer waits for a later one

app = ClientApp()


def answer_message(message: Message, context: Context) -> Message:
    """Answer a message of any kind."""
    config = context.node_config.get("config")
    if not isinstance(config, str) or not config:
        raise ValueError(
            "this node does not say where its configuration is: start it with `fleetfit flower node NODE.toml`, or "
            "with --node-config 'config=\"/path/to/node.toml\"'."
        )
    is_own_process = "torch" not in sys.modules
    trace("begun", message.metadata.message_id)
    parts = transport.read_parts(message)
    is_held = parts.pop(transport.HOLD, None) is not None
    from fleetfit.fleet.node import answer

    content = answer(config, parts)
    if is_own_process:
        _note_answer(config, is_held)
    trace("answered", message.metadata.message_id)
    return transport.make_reply(message, {"answer": content})


def _note_answer(config: str, is_held: bool) -> None:
    """Note an answer in the node's folder; one that is held waits for a later one, a few seconds at most."""
    from fleetfit.fleet.node import get_node

    try:
        folder = Path(get_node(config).settings.folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        latest, own = folder / "latest", str(os.getpid())
        latest.write_text(own)
        until = time.monotonic() + _HOLD_S
        while is_held and time.monotonic() < until and latest.read_text() == own:
            time.sleep(0.02)
    except (FleetFitError, OSError):  # the answer says what is wrong
        return


for _kind in (app.query, app.train, app.evaluate):
    _kind()(answer_message)
