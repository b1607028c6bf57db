"""Jobs that nobody works on any more: a message or its answer got lost, and the node would be waited for in vain.

The SuperLink hands out each message, and each answer, once. Where it is killed at that moment, or the network goes
away, the message is gone: the node does not know of the job, or the server does not hear of its answer. A node answers
one message at a time, in the order in which they were sent. So after a while it is asked something else; if it answers
that, and the answer to the job does not come, it has nothing to do, and the job is sent to it again. A node at work
does not notice: it is asked less and less often, and a question that it has not come to is dropped.
"""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fleetfit.fleet.transport import Reply, Transport

_SILENT_S = 30.0  # until a node is asked: not sooner, since slow nodes answer all; twice as long each further time
_AFTER_S = 3.0  # that the answer to the job may come after the one to the question


@dataclass
class _Doubt:
    """A job that has no answer yet: when its node is asked next, by which message it was, and when it was free."""

    asks_s: float
    pause_s: float
    question: str = ""
    free_s: float = math.inf


class Doubts:
    """What is known of the jobs that are out."""

    def __init__(self, transport: Transport, ask: Callable[[str, float], str]) -> None:
        """Take what pulls answers, and what asks a job's node: by the job's message, within seconds; returns an id."""
        self._transport, self._ask = transport, ask
        self._doubts: dict[str, _Doubt] = {}

    def lost(self, out: Collection[str]) -> list[str]:
        """Return which of the messages that are out got lost; ask the nodes of those that have been out for long."""
        now = time.monotonic()
        self._doubts = {message: doubt for message, doubt in self._doubts.items() if message in out}
        found = []
        for message in out:
            doubt = self._doubts.setdefault(message, _Doubt(now + _SILENT_S, _SILENT_S))
            if now - doubt.free_s > _AFTER_S and not self._transport.pulls(message):
                found.append(message)
            elif now >= doubt.asks_s and doubt.free_s == math.inf:
                doubt.question = self._ask(message, doubt.pause_s)
                doubt.asks_s, doubt.pause_s = now + doubt.pause_s, 2 * doubt.pause_s
        return found

    def heard(self, reply: Reply) -> None:
        """Take a reply that answers none of the jobs that are out."""
        for doubt in self._doubts.values():
            if doubt.question == reply.message and not reply.problem:
                doubt.free_s = time.monotonic()
