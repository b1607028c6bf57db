"""Flower's messages: named parts of bytes out, replies in, so that no reply delays another one.

`fleetfit.messages` defines the bytes. A part that several messages share (the state of a level) is the same Flower
object in all of them: Flower stores it once and sends it to each node from there. Nothing in a message is pickled, and
Flower's labels are not trusted: a part must be a vector of bytes.

Pulling a reply blocks for minutes if its node died during the upload. So a thread pulls each message by itself and is
replaced when it hangs. Replies that wait for their turn are in memory up to a bound, and on disk beyond it.

The SuperLink delivers each message and each reply once. If it is killed at that moment, or the network fails, the
message is lost: the node does not know of the job, or the server does not get its reply. `LostJobDetector` finds such
jobs, which are then sent again.

The client app imports this module in a process without torch, so nothing here imports torch.
"""

import heapq
import itertools
import logging
import math
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fleetfit.errors import format_exception, one_line
from fleetfit.fleet.logs import trace

if TYPE_CHECKING:
    from flwr.serverapp import Grid

_LOG = logging.getLogger("fleetfit")

# ---- messages ------------------------------------------------------------------------------------------------------

Part = bytes | bytearray | ArrayRecord

HOLD = "hold"
"""Part of a message that is answered only when a later one has come, or after a few seconds: see `client_manager`."""


def make_part(content: bytes) -> ArrayRecord:
    """Return a part that several messages may share."""
    return ArrayRecord({"bytes": Array(np.frombuffer(content, dtype=np.uint8))})


def make_request(node: int, kind: str, parts: Mapping[str, Part], ttl_s: float, round: int) -> Message:
    """Return a message to a node: kind "query", "train" or "evaluate"."""
    return Message(_make_records(parts), dst_node_id=node, message_type=kind, ttl=ttl_s, group_id=str(round))


def make_reply(message: Message, parts: Mapping[str, Part]) -> Message:
    """Return the reply to a message."""
    return Message(_make_records(parts), reply_to=message)


def _make_records(parts: Mapping[str, Part]) -> RecordDict:
    return RecordDict({name: p if isinstance(p, ArrayRecord) else make_part(bytes(p)) for name, p in parts.items()})


def read_parts(message: Message) -> dict[str, bytearray]:
    """Return the parts of a message.

    Raises:
        ValueError: A part is not a vector of bytes.
    """
    parts = {}
    for name, record in message.content.items():
        if not isinstance(record, ArrayRecord) or list(record) != ["bytes"]:
            raise ValueError(f'part "{str(name)[:40]}" of a message is not a single array "bytes".')
        array = record["bytes"].numpy()
        if array.dtype != np.uint8 or array.ndim != 1:
            raise ValueError(f'part "{str(name)[:40]}" of a message is not a vector of bytes.')
        parts[str(name)] = bytearray(array)
    return parts


# ---- sending them, and their replies -------------------------------------------------------------------------------

_MIN_PAUSE_S = 0.1  # between two pulls of a reply, at first and where few are out
_PAUSE_SHARE = 0.05  # part of the time that a message has been out
_MAX_PAUSE_S = 1.0
_MAX_PULLS_PER_S = 200.0
_HANGS_S = 2.0  # a thread that pulls for longer is replaced
_PULLING_S = 0.5  # a pull that takes longer has most likely found a reply
_PUSH_AGAIN_S = 1.0  # after a push that failed
_MAX_BYTES = 512 * 2**20  # of waiting replies in memory
_ERRORS = {
    1: "its client app could not be loaded",
    2: "its client app failed",
    3: "its reply did not come in time, or not whole",
    4: "its reply was deleted",
    5: "the node was lost",
    7: "it does not trust this app",
    8: "the process that did the work ended",
}
NODE_LOST = frozenset({5})
"""Flower's error codes for a node that has gone away."""


@dataclass(frozen=True)
class NodeReply:
    """A reply that came, or the error in its place.

    Attributes:
        message: Id of the message that it answers.
        content: The answer, or the file that has it; None after an error.
        error: Why there is no answer, or "".
        node_lost: Whether the node has gone away.
    """

    message: str
    content: bytearray | Path | None = None
    error: str = ""
    node_lost: bool = False


ReplyQueue = queue.Queue[NodeReply]


class Transport:
    """Sends messages and delivers their replies."""

    def __init__(self, grid: "Grid") -> None:
        self._grid = grid
        self._due: list[tuple[float, int, str]] = []
        self._waiting: dict[str, ReplyQueue] = {}
        self._sent_at: dict[str, float] = {}
        self._counter = itertools.count()
        self._changed = threading.Condition()
        self._pulling: dict[threading.Thread, tuple[str, float]] = {}
        self._waiting_bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._closed = False

    def send(self, message: Message, replies: ReplyQueue) -> str:
        """Send a message, whose reply will be put into the queue. Return its id, or "" where it could not be sent."""
        sent = self._push(message)
        if not sent:
            return ""
        trace("pushed", sent, f"to {message.metadata.dst_node_id}")
        with self._changed:
            self._waiting[sent], self._sent_at[sent] = replies, time.monotonic()
            heapq.heappush(self._due, (time.monotonic() + _MIN_PAUSE_S / 2, next(self._counter), sent))
            self._changed.notify()
        self.ensure_thread()
        return sent

    def _push(self, message: Message) -> str:
        """Push a message; twice if that fails, for example since the SuperLink was restarted between its parts.

        The second push is of the same message: the parts that have arrived count.
        """
        for is_last in (False, True):
            try:
                return next((str(name) for name in self._grid.push_messages([message]) if name), "")
            except Exception as error:  # also Flower's own, of a push that took too long: no message must end a run
                if not is_last:
                    time.sleep(_PUSH_AGAIN_S)
                    continue
                _LOG.warning("A message could not be sent: %s: %s", type(error).__name__, error)
        return ""

    def is_pulling(self, message: str) -> bool:
        """Return whether the reply to a message is on its way: pulling it takes a while."""
        now = time.monotonic()
        return any(name == message and now - start > _PULLING_S for name, start in list(self._pulling.values()))

    def ensure_thread(self) -> None:
        """Start a thread that pulls if all present ones hang."""
        with self._changed:
            now = time.monotonic()
            able = [t for t, (m, start) in self._pulling.items() if t.is_alive() and (not m or now - start < _HANGS_S)]
            if able or self._closed:
                return
            thread = threading.Thread(target=self._work, daemon=True, name="fleetfit-transport")
            self._pulling[thread] = ("", 0.0)
        thread.start()

    def list_nodes(self) -> set[int]:
        """Return the ids of the connected nodes; none where the SuperLink does not answer."""
        try:
            return set(self._grid.get_node_ids())
        except httpx.HTTPError:
            return set()

    def close(self) -> None:
        """Stop the threads, and remove the replies on disk."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._folder is not None:
            self._folder.cleanup()

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            message = self._wait_for_due()
            if message is None:
                return
            start = time.monotonic()
            self._pulling[me] = (message, start)
            reply = self._pull(message)
            hung = time.monotonic() - start > _HANGS_S
            self._pulling[me] = ("", 0.0)
            self._deliver(message, reply)
            if hung:  # another thread has taken over
                with self._changed:
                    del self._pulling[me]
                return

    def _wait_for_due(self) -> str | None:
        """Return the next message whose reply is to be pulled; None after `close`."""
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

    def _pull(self, message: str) -> NodeReply | None:
        try:
            replies = list(self._grid.pull_messages([message]))
            return self._read(message, replies[0]) if replies else None
        except httpx.HTTPError:  # the SuperLink is away, perhaps for a moment
            return None
        except Exception as error:  # no reply of a node may end this thread
            return NodeReply(message, None, f"its reply cannot be read: {format_exception(error)}")

    def _read(self, message: str, reply: Message) -> NodeReply:
        if reply.has_error():
            code, reason = reply.error.code, (reply.error.reason or "").strip()
            error = _ERRORS.get(code, f"Flower reports error {code}")
            details = f": {one_line(reason, 400)}" if reason and code in (1, 2) else ""
            return NodeReply(message, None, f"{error}{details}", code in NODE_LOST)
        try:
            return NodeReply(message, self._store(read_parts(reply)["answer"]))
        except (ValueError, TypeError, KeyError, EOFError) as fault:
            return NodeReply(message, None, f"its reply is malformed: {format_exception(fault)}")

    def _store(self, content: bytearray) -> bytearray | Path:
        """Return an answer, or the file to which it was written since too many wait in memory."""
        with self._changed:
            if self._waiting_bytes + len(content) <= _MAX_BYTES:
                self._waiting_bytes += len(content)
                return content
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="fleetfit-", ignore_cleanup_errors=True)
            path = Path(self._folder.name) / str(next(self._counter))
        path.write_bytes(content)
        return path

    def take_content(self, reply: NodeReply) -> bytes | bytearray:
        """Return the answer of a reply, once, and free its place among the waiting ones."""
        content = reply.content
        if isinstance(content, Path):
            answer = content.read_bytes()
            content.unlink(missing_ok=True)
            return answer
        with self._changed:
            self._waiting_bytes -= len(content or b"")
        return content or b""

    def _deliver(self, message: str, reply: NodeReply | None) -> None:
        with self._changed:
            if reply is None:
                if message in self._waiting:
                    now = time.monotonic()
                    pause = min(max(_MIN_PAUSE_S, _PAUSE_SHARE * (now - self._sent_at[message])), _MAX_PAUSE_S)
                    pause = max(pause, len(self._waiting) / _MAX_PULLS_PER_S)
                    heapq.heappush(self._due, (now + pause, next(self._counter), message))
                return
            replies = self._waiting.pop(message, None)
            self._sent_at.pop(message, None)
        trace("delivered", message, reply.error)
        if replies is not None:
            replies.put(reply)


# ---- lost jobs -------------------------------------------------------------------------------------------------------

_SILENT_S = 30.0  # until a node is asked: slow nodes answer every question; twice as long each further time
_AFTER_S = 3.0  # that the reply to the job may come after the one to the question


@dataclass
class _OpenJob:
    """A job without a reply: when its node is asked next, by which message, and when the node was free."""

    ask_at: float
    pause_s: float
    question: str = ""
    free_at: float = math.inf


class LostJobDetector:
    """Finds jobs whose message or reply was lost.

    A node answers one message at a time, in the order in which they were sent. So a node that is silent for a while is
    asked a question. If it answers that, and the reply to its job does not come, the job is lost. A node at work is not
    disturbed: the questions become rarer, and each expires before the next one.
    """

    def __init__(self, transport: Transport, ask: Callable[[str, float], str]) -> None:
        """Start without jobs.

        Args:
            transport: Pulls the replies.
            ask: Asks the node of a job, given the job's message and the seconds that the question lasts; returns the
                id of the question.
        """
        self._transport, self._ask = transport, ask
        self._jobs: dict[str, _OpenJob] = {}

    def find_lost(self, sent: Collection[str]) -> list[str]:
        """Return which of the sent messages were lost; ask the nodes of those that have been out for long."""
        now = time.monotonic()
        self._jobs = {message: job for message, job in self._jobs.items() if message in sent}
        lost = []
        for message in sent:
            job = self._jobs.setdefault(message, _OpenJob(now + _SILENT_S, _SILENT_S))
            if now - job.free_at > _AFTER_S and not self._transport.is_pulling(message):
                lost.append(message)
            elif now >= job.ask_at and job.free_at == math.inf:
                job.question = self._ask(message, job.pause_s)
                job.ask_at, job.pause_s = now + job.pause_s, 2 * job.pause_s
        return lost

    def note_reply(self, reply: NodeReply) -> None:
        """Note a reply that answers none of the jobs: perhaps it answers a question."""
        for job in self._jobs.values():
            if job.question == reply.message and not reply.error:
                job.free_at = time.monotonic()
