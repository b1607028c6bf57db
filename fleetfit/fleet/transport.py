"""Flower's messages: named parts of bytes out, replies in, so that no reply keeps another one waiting.

What the bytes mean is known to `fleetfit.messages`. A part that several messages share (the state of a level) is the
same Flower object in all of them, so that it is stored once and sent to each node from there. Nothing in a message is
pickled, and no label of Flower's is believed: a part must be a vector of bytes.

Pulling a reply blocks for minutes where a node died while it uploaded it. So each message is asked for by itself, by a
thread that is replaced when it hangs. Replies that wait for their turn lie in memory up to a bound, and on disk beyond.
The client app imports this module in a process without torch, which nothing here imports either.
"""

import heapq
import itertools
import logging
import queue
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fleetfit.errors import format_exception, one_line
from fleetfit.fleet.logs import traced

if TYPE_CHECKING:
    from flwr.serverapp import Grid

_LOG = logging.getLogger("fleetfit")

# ---- messages ------------------------------------------------------------------------------------------------------

Part = bytes | bytearray | ArrayRecord

HOLD = "hold"
"""Part of a message that is answered only when a later one has come, or after a few seconds: see `client_manager`."""


def part(content: bytes) -> ArrayRecord:
    """Return a part that several messages may share."""
    return ArrayRecord({"bytes": Array(np.frombuffer(content, dtype=np.uint8))})


def request(node: int, kind: str, parts: Mapping[str, Part], ttl_s: float, round: int) -> Message:
    """Return a message to a node: kind "query", "train" or "evaluate"."""
    return Message(_records(parts), dst_node_id=node, message_type=kind, ttl=ttl_s, group_id=str(round))


def reply(message: Message, parts: Mapping[str, Part]) -> Message:
    """Return the reply to a message."""
    return Message(_records(parts), reply_to=message)


def _records(parts: Mapping[str, Part]) -> RecordDict:
    return RecordDict({name: p if isinstance(p, ArrayRecord) else part(bytes(p)) for name, p in parts.items()})


def parts_of(message: Message) -> dict[str, bytearray]:
    """Return the parts of a message.

    Raises:
        ValueError: It has something in it that is no vector of bytes.
    """
    found = {}
    for name, record in message.content.items():
        if not isinstance(record, ArrayRecord) or list(record) != ["bytes"]:
            raise ValueError(f'part "{str(name)[:40]}" of a message is no run of bytes.')
        array = record["bytes"].numpy()
        if array.dtype != np.uint8 or array.ndim != 1:
            raise ValueError(f'part "{str(name)[:40]}" of a message is no vector of bytes.')
        found[str(name)] = bytearray(array)
    return found


# ---- sending them, and their replies -------------------------------------------------------------------------------

_EVERY_S = 0.1  # between two questions for the same reply, at first and where few are out
_LATER = 0.05  # part of the time that it has been out
_SELDOM_S = 1.0  # at most
_PER_S = 200.0  # questions a second at most
_HANGS_S = 2.0  # a thread that pulls for longer gets a substitute
_COMES_S = 0.5  # a pull that takes longer has most likely found something
_PUSH_AGAIN_S = 1.0  # after a push that failed
_IN_MEMORY = 512 * 2**20  # bytes of replies that wait
_ERRORS = {
    1: "its client app could not be loaded",
    2: "its client app failed",
    3: "its reply did not come in time, or not whole",
    4: "its reply is not there any more",
    5: "the node was lost",
    7: "it does not trust this app",
    8: "the process that did the work ended",
}
LOST = frozenset({5})
"""Flower's codes for a node that is gone."""


@dataclass(frozen=True)
class Reply:
    """A reply that came, or what came in its place.

    Attributes:
        message: Id of the message that it answers.
        content: The answer, or the file that it lies in; None where there is none.
        problem: Why there is none, or "".
        lost: Whether the node is gone.
    """

    message: str
    content: bytearray | Path | None = None
    problem: str = ""
    lost: bool = False


Replies = queue.Queue[Reply]
"""Where replies are put as they come."""


class Transport:
    """Sends messages and delivers their replies."""

    def __init__(self, grid: "Grid") -> None:
        """Take the grid; threads come with the first message."""
        self._grid = grid
        self._due: list[tuple[float, int, str]] = []
        self._waiting: dict[str, Replies] = {}
        self._since: dict[str, float] = {}
        self._turn = itertools.count()
        self._changed = threading.Condition()
        self._pulling: dict[threading.Thread, tuple[str, float]] = {}
        self._waiting_bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._closed = False

    def send(self, message: Message, replies: Replies) -> str:
        """Send a message; its reply will be put into the queue. Return its id, or "" where it could not be sent."""
        sent = self._pushed(message)
        if not sent:
            return ""
        traced("pushed", sent[0], f"to {message.metadata.dst_node_id}")
        with self._changed:
            self._waiting[sent[0]], self._since[sent[0]] = replies, time.monotonic()
            heapq.heappush(self._due, (time.monotonic() + _EVERY_S / 2, next(self._turn), sent[0]))
            self._changed.notify()
        self.attend()
        return sent[0]

    def _pushed(self, message: Message) -> list[str]:
        """Push a message; once more where that fails, say because the SuperLink was restarted between its parts.

        The second time is about the same message: what has arrived of it counts.
        """
        for last in (False, True):
            try:
                return [found for found in self._grid.push_messages([message]) if found]
            except Exception as error:  # also Flower's own, of a push that took too long: no message must end a run
                if not last:
                    time.sleep(_PUSH_AGAIN_S)
                    continue
                _LOG.warning("A message could not be sent: %s: %s", type(error).__name__, error)
        return []

    def pulls(self, message: str) -> bool:
        """Return whether the reply to a message is just coming: pulling it takes a while."""
        now = time.monotonic()
        return any(name == message and now - began > _COMES_S for name, began in list(self._pulling.values()))

    def attend(self) -> None:
        """See to it that somebody pulls: start a thread where all that there are hang."""
        with self._changed:
            now = time.monotonic()
            able = [t for t, (m, began) in self._pulling.items() if t.is_alive() and (not m or now - began < _HANGS_S)]
            if able or self._closed:
                return
            thread = threading.Thread(target=self._work, daemon=True, name="fleetfit-transport")
            self._pulling[thread] = ("", 0.0)
        thread.start()

    def nodes(self) -> set[int]:
        """Return the ids of the nodes that are connected; none where the SuperLink does not answer."""
        try:
            return set(self._grid.get_node_ids())
        except httpx.HTTPError:
            return set()

    def close(self) -> None:
        """Let the threads go, and remove the replies on disk."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._folder is not None:
            self._folder.cleanup()

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            message = self._next()
            if message is None:
                return
            began = time.monotonic()
            self._pulling[me] = (message, began)
            reply = self._asked(message)
            hung = time.monotonic() - began > _HANGS_S
            self._pulling[me] = ("", 0.0)
            self._deliver(message, reply)
            if hung:  # a substitute is at work
                with self._changed:
                    del self._pulling[me]
                return

    def _next(self) -> str | None:
        with self._changed:
            while not self._closed:
                wait = None if not self._due else self._due[0][0] - time.monotonic()
                if wait is not None and wait <= 0:
                    message = heapq.heappop(self._due)[2]
                    if message in self._waiting:
                        return message
                    continue
                self._changed.wait(wait)
        return None

    def _asked(self, message: str) -> Reply | None:
        try:
            found = list(self._grid.pull_messages([message]))
            return self._read(message, found[0]) if found else None
        except httpx.HTTPError:  # the SuperLink is away, perhaps for a moment
            return None
        except Exception as error:  # whatever a node sends, the thread that reads it goes on
            return Reply(message, None, f"its reply cannot be read: {format_exception(error)}")

    def _read(self, message: str, reply: Message) -> Reply:
        if reply.has_error():
            code, reason = reply.error.code, (reply.error.reason or "").strip()
            problem = _ERRORS.get(code, f"Flower reports error {code}")
            more = f": {one_line(reason, 400)}" if reason and code in (1, 2) else ""
            return Reply(message, None, f"{problem}{more}", code in LOST)
        try:
            return Reply(message, self._kept(parts_of(reply)["answer"]))
        except (ValueError, TypeError, KeyError, EOFError) as error:
            return Reply(message, None, f"its reply is no answer: {format_exception(error)}")

    def _kept(self, content: bytearray) -> bytearray | Path:
        with self._changed:
            if self._waiting_bytes + len(content) <= _IN_MEMORY:
                self._waiting_bytes += len(content)
                return content
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="fleetfit-", ignore_cleanup_errors=True)
            path = Path(self._folder.name) / str(next(self._turn))
        path.write_bytes(content)
        return path

    def released(self, reply: Reply) -> bytes | bytearray:
        """Return the answer of a reply, once: it waits no more."""
        content = reply.content
        if isinstance(content, Path):
            found = content.read_bytes()
            content.unlink(missing_ok=True)
            return found
        with self._changed:
            self._waiting_bytes -= len(content or b"")
        return content or b""

    def _deliver(self, message: str, reply: Reply | None) -> None:
        with self._changed:
            if reply is None:
                if message in self._waiting:
                    now = time.monotonic()
                    pause = min(max(_EVERY_S, _LATER * (now - self._since[message])), _SELDOM_S)
                    pause = max(pause, len(self._waiting) / _PER_S)
                    heapq.heappush(self._due, (now + pause, next(self._turn), message))
                return
            replies = self._waiting.pop(message, None)
            self._since.pop(message, None)
        traced("delivered", message, reply.problem)
        if replies is not None:
            replies.put(reply)
