"""A node's life: receive a message, have the worker answer it, send the reply.

One message at a time, so that no reply can belong to another message. Nothing of a message is left when its run has
ended, and a message that cannot be answered gets an error as its reply.
"""

import logging
import time
from typing import Any

from flwr.app import Error, Message

from fleetfit.fleet import transport
from fleetfit.fleet.logs import trace
from fleetfit.fleet.superlink import Incomplete, RunOver, SuperLink, Trouble
from fleetfit.fleet.worker import NodeWorker, WorkerDeath

_LOG = logging.getLogger("fleetfit")

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 3.0  # between two looks for a message: a quarter of the time without one
_TROUBLE_S = 1.0
_FAILED = 2  # Flower's code of an error of the client app


def answer_messages(link: SuperLink, worker: NodeWorker) -> None:
    """Answer messages until the SuperLink refuses this node.

    Raises:
        Refusal: It does.
    """
    idle_s = 0.0
    while True:
        try:
            received = link.receive()
            if received is None:
                pause = min(max(_MIN_PAUSE_S, idle_s / 4), _MAX_PAUSE_S)
                link.rest(pause)
                idle_s += pause
                continue
            idle_s = 0.0
            _answer(*received, link, worker)
        except Trouble as trouble:
            _LOG.warning("The SuperLink has an error (%s); the node continues.", trouble)
            link.rest(_TROUBLE_S)


def _answer(message: Message, tree: Any, link: SuperLink, worker: NodeWorker) -> None:
    name, run, began = message.metadata.message_id, message.metadata.run_id, time.monotonic()
    trace("taken", name, f"{message.metadata.message_type} of run {run}")
    try:
        try:
            parts = link.fetch(message, tree)
            trace("whole", name)
            content = worker.ask(parts, lambda: link.is_running(run))
            if content is None:
                raise RunOver
            trace("answered", name)
            reply = transport.make_reply(message, {"answer": content})
        except (Incomplete, WorkerDeath) as reason:
            reply = _make_error(message, str(reason))
        try:
            link.send(reply, time.monotonic() - began)
        except Trouble as trouble:
            if reply.has_error():
                raise
            link.send(_make_error(message, f"its answer could not be sent: {trouble}"), time.monotonic() - began)
        trace("sent", name)
    except RunOver:
        trace("given up", name, "its run has ended")


def _make_error(message: Message, reason: str) -> Message:
    _LOG.warning("A message has no answer: %s", reason)
    trace("failed", message.metadata.message_id, reason)
    return Message(Error(_FAILED, reason), reply_to=message)
