"""A node's life: receive a message, have the worker answer it, send the reply.

One message at a time, so that no reply can belong to another message. Nothing of a message is left when its run has
ended. A message that cannot be answered gets an error as its reply. A message that the SuperLink fails to deliver is
dropped, and the server asks for it again.
"""

import logging
import math
import random
import time
from typing import Any

from flwr.app import Error, Message

from fleetfit.fleet import transport
from fleetfit.fleet.logs import trace
from fleetfit.fleet.superlink import Incomplete, RunOver, SuperLink, Trouble
from fleetfit.fleet.worker import NodeWorker, WorkerDeath

_LOG = logging.getLogger("fleetfit")

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 10.0  # between two looks for a message
_FIRST_LOOK_S, _BUSY = 3.0, 30.0  # until a server says more: between two looks; and times as long as a look took
_MAX_LOOK_S, _MAX_EARLY_S = 15.0, 18.0  # that the server can ask for: between two looks; before the next message is due
_DUE, _SHARE = 0.7, 0.05  # of the time until the next message is expected: until it is due; between two looks then
_JITTER = 0.1  # part of a pause that is added at random
_TROUBLE_S, _MAX_TROUBLE_S = 1.0, 60.0  # pauses after errors of the SuperLink, which double
_FAILED = 2  # Flower's code of an error of the client app


def answer_messages(link: SuperLink, worker: NodeWorker) -> None:
    """Answer messages until the SuperLink refuses this node.

    Raises:
        Refusal: It does.
    """
    since, due, pace, trouble_s = time.monotonic(), 0.0, None, _TROUBLE_S
    jitter = random.Random()  # noqa: S311 - so that nodes do not look all at once
    while True:
        try:
            asked = time.monotonic()
            received = link.receive()
            taken, trouble_s = time.monotonic(), _TROUBLE_S
            if received is not None:
                pace = transport.read_pace(received[0].metadata.group_id)
                _answer(*received, link, worker)
                now = time.monotonic()
                link.note_round(now - since)
                since, due = now, taken + _DUE * pace.next_s
            if pace is None:
                look_s = max(_FIRST_LOOK_S, _BUSY * (taken - asked))
            else:
                look_s = max(pace.look_s, _SHARE * pace.next_s)
            pause = compute_pause(time.monotonic() - since, due - since, look_s)
            link.rest(pause * jitter.uniform(1.0, 1.0 + _JITTER))
        except Trouble as trouble:
            _LOG.warning(
                "The SuperLink, or a proxy before it, has an error (%s); see its log. The node continues.", trouble
            )
            link.rest(trouble_s)
            trouble_s = min(2 * trouble_s, _MAX_TROUBLE_S)


def compute_pause(silent_s: float, due_s: float, look_s: float) -> float:
    """Return the seconds until the next look for a message, to which the loop adds up to a tenth.

    A node does not look before a message is due, except every 18 s. Then it looks again after `look_s`, and ever more
    rarely: a message waits for a quarter of the time by which it is late, 10 s at most, or for `look_s`.

    Args:
        silent_s: Since the last message was answered.
        due_s: From then until the next one is due; 0.0 or less where it may come at any time.
        look_s: Between two looks, at least; 15 s at most.
    """
    look_s = min(max(look_s, _MIN_PAUSE_S), _MAX_LOOK_S)
    if silent_s < due_s:
        return min(max(due_s - silent_s, look_s), _MAX_EARLY_S)
    return max(look_s, min((silent_s - max(due_s, 0.0)) / 4, _MAX_PAUSE_S))


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
    return transport.make_error(message, Error(_FAILED, reason))
