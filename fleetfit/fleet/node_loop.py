"""A node's life: receive a message, have the worker answer it, send the reply.

One message at a time, so that no reply can belong to another message. Nothing of a message is left when its run has
ended. A message that cannot be answered gets an error as its reply. A message that the SuperLink fails to deliver is
dropped, and the server asks for it again.
"""

import logging
import math
import time
from typing import Any

from flwr.app import Error, Message

from fleetfit.fleet import transport
from fleetfit.fleet.logs import trace
from fleetfit.fleet.superlink import Incomplete, RunOver, SuperLink, Trouble
from fleetfit.fleet.worker import NodeWorker, WorkerDeath

_LOG = logging.getLogger("fleetfit")

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 3.0  # between two looks for a message
_LONG_S, _LONG_PAUSE_S = 120.0, 10.0  # without a message: between runs, say
_TROUBLE_S, _MAX_TROUBLE_S = 1.0, 60.0  # pauses after errors of the SuperLink, which double
_FAILED = 2  # Flower's code of an error of the client app


def answer_messages(link: SuperLink, worker: NodeWorker) -> None:
    """Answer messages until the SuperLink refuses this node.

    Raises:
        Refusal: It does.
    """
    silences, since, trouble_s = (0.0, 0.0), time.monotonic(), _TROUBLE_S
    while True:
        try:
            received = link.receive()
            trouble_s = _TROUBLE_S
            silent_s = time.monotonic() - since
            if received is None:
                link.rest(compute_pause(silent_s, min(silences)))
                continue
            silences = silences[1], silent_s
            _answer(*received, link, worker)
            now = time.monotonic()
            link.note_round(now - since)
            since = now
        except Trouble as trouble:
            _LOG.warning(
                "The SuperLink, or a proxy before it, has an error (%s); see its log. The node continues.", trouble
            )
            link.rest(trouble_s)
            trouble_s = min(2 * trouble_s, _MAX_TROUBLE_S)


def compute_pause(silent_s: float, expected_s: float) -> float:
    """Return the seconds until the next look for a message.

    A node looks rarely until most of the time has passed that the last messages took to come, and often then: a message
    waits for a twentieth of that time, and 3 s at most. After two minutes without any it waits for up to 10 s.

    Args:
        silent_s: Since the last message was answered.
        expected_s: The shorter one of the last two times between an answer and the next message: training and
            evaluation take turns.
    """
    early_s = 0.7 * expected_s
    pause = early_s - silent_s if silent_s < early_s else max(expected_s / 20, (silent_s - early_s) / 4)
    return min(max(pause, _MIN_PAUSE_S), _MAX_PAUSE_S if silent_s < _LONG_S else _LONG_PAUSE_S)


def _answer(message: Message, tree: Any, link: SuperLink, worker: NodeWorker) -> None:
    name, run, began = message.metadata.message_id, message.metadata.run_id, time.monotonic()
    trace("taken", name, f"{message.metadata.message_type} of run {run}")
    try:
        try:
            parts = link.fetch(message, tree)
            trace("whole", name)
            # after its time a reply to a job is refused; a question may wait for data that are loaded
            until = math.inf if message.metadata.message_type == "query" else began + message.metadata.ttl
            content = worker.ask(parts, lambda: time.monotonic() < until and link.is_running(run))
            if content is None:
                raise RunOver
            trace("answered", name)
            reply = transport.make_reply(message, {"answer": content})
            del content
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
        trace("given up", name, "its run, or its time, has ended")


def _make_error(message: Message, reason: str) -> Message:
    _LOG.warning("A message has no answer: %s", reason)
    trace("failed", message.metadata.message_id, reason)
    return Message(Error(_FAILED, reason), reply_to=message)
