"""Flower's messages: named parts of bytes out, replies in, so that no reply delays another one.

`fleetfit.messages` defines the bytes. A small part, such as the header, is in the message's label, Flower's `group_id`,
and costs no request. Any other part is one record, or several where it is large, and a record is one Flower object:
Flower stores one that several messages share (the state of a level) once, and sends it to each node from there.
Nothing in a message is pickled, and Flower's labels are not trusted: a record must be one name with bytes.

A thread asks for all replies in one request. A reply is announced before its content, which comes in minutes if the
node is slow, and never if it died: the thread takes what has come, and looks for the rest later. Replies that wait for
their turn are in memory up to a bound, and on disk beyond it.

The SuperLink delivers each message and each reply once. If it is killed at that moment, or the network fails, the
message is lost: the node does not know of the job, or the server does not get its reply. `LostJobDetector` finds such
jobs, which are then sent again.

The client app imports this module in a process without torch, so nothing here imports torch.
"""

import base64
import itertools
import logging
import math
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)

from fleetfit.errors import RunError, format_exception, one_line
from fleetfit.fleet.logs import trace

_LOG = logging.getLogger("fleetfit")

# ---- messages ------------------------------------------------------------------------------------------------------

_RECORD_BYTES = 8 * 2**20  # copies of a record are made on its way; a broken connection repeats one
_LABEL_BYTES = 32 * 2**10  # of a part in the label; the SuperLink keeps a label in memory or in a column of its table

Part = bytes | bytearray | Sequence[ConfigRecord]

HOLD = "hold"
"""Part of a message that is answered only when a later one has come, or after a few seconds: see `client_manager`."""


def make_part(name: str, content: bytes | bytearray) -> list[ConfigRecord]:
    """Return a part, which several messages may share."""
    starts, view = range(0, len(content) or 1, _RECORD_BYTES), memoryview(content)
    return [
        ConfigRecord({f"{name}.{number}": bytes(view[start : start + _RECORD_BYTES])})
        for number, start in enumerate(starts)
    ]


@dataclass(frozen=True)
class Pace:
    """When the node of a message looks for the next one, as the server says.

    Attributes:
        next_s: Seconds until the next message is expected; 0.0 where it may come at any time.
        look_s: Seconds between two looks, at least: the nodes of a large fleet look rarely.
    """

    next_s: float = 0.0
    look_s: float = 0.0


def make_request(
    node: int, kind: str, parts: Mapping[str, Part], ttl_s: float, round: int, pace: Pace = Pace()
) -> Message:
    """Return a message to a node: kind "query", "train" or "evaluate"."""
    content, words = _pack(parts)
    label = " ".join([str(round), f"{pace.next_s:.1f}", f"{pace.look_s:.1f}", *words])
    return Message(content, dst_node_id=node, message_type=kind, ttl=ttl_s, group_id=label)


def make_reply(message: Message, parts: Mapping[str, Part]) -> Message:
    """Return the reply to a message."""
    content, words = _pack(parts)
    reply = Message(content, reply_to=message)
    reply.metadata.group_id = " ".join([_read_round(message.metadata.group_id), *words])
    return reply


def make_error(message: Message, error: Error) -> Message:
    """Return the reply to a message that has no answer."""
    reply = Message(error, reply_to=message)
    reply.metadata.group_id = _read_round(message.metadata.group_id)
    return reply


def _pack(parts: Mapping[str, Part]) -> tuple[RecordDict, list[str]]:
    """Return the records of parts, and the words of the label that has the small ones."""
    made, words = list[Sequence[ConfigRecord]](), list[str]()
    for name, part in parts.items():
        if not isinstance(part, bytes | bytearray):
            made.append(part)
        elif len(part) > _LABEL_BYTES:
            made.append(make_part(name, part))
        else:
            words.append(f"{name}={base64.b64encode(part).decode()}")
    return RecordDict({name: record for records in made for record in records for name in record}), words


def _read_round(label: str) -> str:
    return label.partition(" ")[0]


def read_pace(label: str) -> Pace:
    """Return the pace in the label of a message; one without says nothing."""
    try:
        next_s, look_s = map(float, label.split(" ", 3)[1:3])
    except ValueError:
        return Pace()
    return Pace(next_s, look_s) if 0 <= next_s < math.inf and 0 <= look_s < math.inf else Pace()


def read_label(label: str) -> dict[str, bytearray]:
    """Return the parts in the label of a message or of a reply.

    Raises:
        ValueError: The label is malformed.
    """
    words = [word.partition("=") for word in label.split(" ") if "=" in word]
    return {name: bytearray(base64.b64decode(text, validate=True)) for name, _, text in words}


def read_parts(message: Message) -> dict[str, bytearray]:
    """Return the parts of a message.

    Raises:
        ValueError: A record is not one of `make_part`, or the label is malformed.
    """
    return join_records(message.content.values()) | read_label(message.metadata.group_id)


def join_records(records: Iterable[Any]) -> dict[str, bytearray]:
    """Return the parts that are in records, in any order.

    Raises:
        ValueError: A record is not one of `make_part`.
    """
    pieces: dict[str, dict[int, bytes]] = {}
    for record in records:
        [(key, content)] = record.items() if isinstance(record, ConfigRecord) and len(record) == 1 else [("", "")]
        name, _, number = key.rpartition(".")
        if not name or not number.isdecimal() or not isinstance(content, bytes):
            raise ValueError(f'record "{one_line(key, 40)}" of a message is not a piece of bytes.')
        pieces.setdefault(name, {})[int(number)] = content
    parts = {name: bytearray() for name in pieces}
    for name, numbered in pieces.items():
        for position in sorted(numbered):
            parts[name] += numbered.pop(position)
    return parts


_PUSHES = 3  # times that messages are announced


def push_whole(
    messages: Sequence[Message],
    announce: Callable[[list[Any], list[Any]], Any],
    push: Callable[[str, str, bytes], bool],
) -> Any:
    """Announce messages to a SuperLink and push all of their objects: what is not whole in three minutes is deleted.

    The server asks for the records of a reply alone, and confirms it when it has them, which deletes it: so they come
    last. A reply without records it confirms at once. Requests are confirmed when they have been pushed and answered.

    Args:
        messages: With content or an error.
        announce: Given their metadata and trees of objects, as protobuf messages; returns the SuperLink's answer.
        push: Given the session of the answer, an object's name and content; returns whether it was stored now. One
            whose confirmation was lost is not stored again: the messages, announced once more when all others are
            stored, say what lacks.

    Returns:
        The last answer to `announce`; None if objects were not stored.
    """
    objects = dict[str, Any]()
    with no_object_id_recompute():
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            objects |= dict(reversed(get_all_nested_objects(message).items()))
        has_records = any(isinstance(each, ConfigRecord) for each in objects.values())
        metadata = [message_to_proto(remove_content_from_message(message)) for message in messages]
        trees = [get_object_tree(message) for message in messages]
        for _ in range(_PUSHES):
            answer = announce(metadata, trees)
            wanted = set(answer.objects_to_push)
            stored = [push(answer.session_id, n, each.deflate()) for n, each in objects.items() if n in wanted]
            if all(stored) or not has_records:  # the server has had such a reply since it was announced
                return answer
    return None


# ---- sending them, and their replies -------------------------------------------------------------------------------

_MESSAGES = 8  # that are announced together: a node that asks while their contents are being sent asks again
_PULLS = 4  # replies that are pulled at the same time: a request takes ten times as long where the SuperLink is busy
_MIN_PAUSE_S = 0.1  # between two looks for replies, and for the content of one
_PAUSE_SHARE = 0.05  # part of the time without any
_MAX_PAUSE_S = 1.0
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


@dataclass
class _Arrival:
    """A reply that was announced: its Flower object, an error, its label, objects that lack, records that came."""

    name: str
    error: NodeReply | None
    label: str
    missing: list[str]
    records: list[ConfigRecord] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    look_at: float = 0.0


class Transport:
    """Sends messages and delivers their replies."""

    def __init__(self, grid: Any) -> None:
        """Take Flower's grid of a server app; its client is inside Flower."""
        self._grid = grid
        self._waiting: dict[str, ReplyQueue] = {}
        self._arriving: dict[str, _Arrival] = {}
        self._look_at, self._busy_at = math.inf, 0.0
        self._counter = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting_bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._closed = False

    def send(self, messages: Iterable[Message], replies: ReplyQueue) -> list[str]:
        """Send messages, whose replies will be put into the queue. Return their ids, "" for those not sent."""
        sent, left = list[str](), iter(messages)
        while batch := list(itertools.islice(left, _MESSAGES)):
            ids = self._push(batch)
            with self._changed:
                self._waiting |= {name: replies for name in ids if name}
                self._busy_at = time.monotonic()
                self._look_at = min(self._look_at, self._busy_at + _MIN_PAUSE_S / 2)
                self._changed.notify()
            for message, name in zip(batch, ids, strict=True):
                if name:
                    trace("pushed", name, f"to {message.metadata.dst_node_id}")
            sent += ids
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="fleetfit-transport")
            self._thread.start()
        return sent

    def _push(self, messages: Sequence[Message]) -> list[str]:
        """Push messages; twice if that fails, for example since the SuperLink was restarted between their parts.

        The second push is of the same messages: the parts that have arrived count.
        """
        node, run, client = self._grid.node, self._grid.run.run_id, self._grid._runtime_client

        def announce(metadata: list[Any], trees: list[Any]) -> Any:
            return client.PushMessages(PushAppMessagesRequest(messages_list=metadata, message_object_trees=trees))

        def push(session: str, name: str, content: bytes) -> bool:
            request = PushObjectRequest(
                node=node, run_id=run, session_id=session, object_id=name, object_content=content
            )
            return bool(client.PushObject(request).stored)

        for is_last in (False, True):
            try:
                answer = push_whole(messages, announce, push)
                if answer is None:
                    raise RunError("the SuperLink did not store a part.")
                return [str(name) for name in answer.message_ids]
            except Exception as error:  # no message must end a run
                if not is_last:
                    time.sleep(_PUSH_AGAIN_S)
                    continue
                _LOG.warning("Messages could not be sent: %s: %s", type(error).__name__, error)
        return [""] * len(messages)

    def is_arriving(self, message: str) -> bool:
        """Return whether the reply to a message is on its way."""
        return message in self._arriving

    def list_nodes(self) -> set[int]:
        """Return the ids of the connected nodes; none where the SuperLink does not answer."""
        try:
            return set(self._grid.get_node_ids())
        except httpx.HTTPError:
            return set()

    def close(self) -> None:
        """Stop the thread, and remove the replies on disk."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._folder is not None:
            self._folder.cleanup()

    def _work(self) -> None:
        """Look for replies that were announced, and for the content of those that were."""
        with ThreadPoolExecutor(_PULLS, "fleetfit-pull") as pool:
            while self._wait_for_look():
                try:
                    if time.monotonic() >= self._look_at:
                        self._find_replies()
                    now = time.monotonic()
                    due = [(name, arrival) for name, arrival in self._arriving.items() if now >= arrival.look_at]
                    list(pool.map(lambda each: self._pull(*each), due))
                except Exception as error:  # the SuperLink is away, perhaps for a moment; no reply may end this thread
                    if not isinstance(error, httpx.HTTPError):
                        _LOG.warning("Replies could not be pulled: %s", format_exception(error))
                    time.sleep(_MIN_PAUSE_S)

    def _wait_for_look(self) -> bool:
        """Wait until something is to be looked for; return False after `close`."""
        with self._changed:
            while not self._closed:
                due = min([self._look_at, *(arrival.look_at for arrival in self._arriving.values())])
                wait = due - time.monotonic()
                if wait <= 0:
                    return True
                self._changed.wait(None if due == math.inf else wait)
        return False

    def _find_replies(self) -> None:
        """Ask for all replies that were not announced yet."""
        with self._changed:
            open_ids = self._waiting.keys() - self._arriving.keys()
            self._look_at = time.monotonic() + _MIN_PAUSE_S if open_ids else math.inf
        if not open_ids:
            return
        answer = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=sorted(open_ids)))
        for proto, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            message = proto.metadata.reply_to_message_id
            if message in open_ids:
                error = _read_error(message, proto.error) if proto.HasField("error") else None
                records = [record.object_id for content in tree.children for record in content.children]
                label = "" if error else proto.metadata.group_id
                self._arriving[message] = _Arrival(tree.object_id, error, label, [] if error else records[::-1])
        now = time.monotonic()
        self._busy_at = now if answer.messages_list else self._busy_at
        self._look_at = now + min(max(_MIN_PAUSE_S, _PAUSE_SHARE * (now - self._busy_at)), _MAX_PAUSE_S)

    def _pull(self, message: str, arrival: _Arrival) -> None:
        """Pull what has come of a reply, and deliver it if that is all."""
        node, run = self._grid.node, self._grid.run.run_id
        while arrival.missing:
            request = PullObjectRequest(node=node, run_id=run, object_id=arrival.missing[-1])
            answer = self._grid._runtime_client.PullObject(request)
            if not answer.object_found:
                self._deliver(NodeReply(message, None, _ERRORS[3]))
                return
            if not answer.object_available:
                now = time.monotonic()
                arrival.look_at = now + min(max(_MIN_PAUSE_S, now - arrival.since), _MAX_PAUSE_S)
                return
            try:
                arrival.records.append(ConfigRecord.inflate(answer.object_content))
            except Exception as error:  # a node's content, in any form
                self._deliver(NodeReply(message, None, f"its reply is malformed: {format_exception(error)}"))
                return
            arrival.missing.pop()
        for name in (arrival.name, message):  # until then the SuperLink keeps their content
            confirmation = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=name)
            self._grid._runtime_client.ConfirmMessageReceived(confirmation)
        try:
            parts = join_records(arrival.records) | read_label(arrival.label)
            reply = arrival.error or NodeReply(message, self._store(parts["answer"]))
        except (ValueError, KeyError) as error:
            reply = NodeReply(message, None, f"its reply is malformed: {format_exception(error)}")
        self._deliver(reply)

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

    def _deliver(self, reply: NodeReply) -> None:
        with self._changed:
            self._arriving.pop(reply.message, None)
            replies = self._waiting.pop(reply.message, None)
        trace("delivered", reply.message, reply.error)
        if replies is not None:
            replies.put(reply)


def _read_error(message: str, error: Any) -> NodeReply:
    """Return the reply for an error of Flower's, a protobuf message."""
    text, reason = _ERRORS.get(error.code, f"Flower reports error {error.code}"), error.reason.strip()
    if reason and error.code in (1, 2):
        text = f"{text}: {one_line(reason, 400)}"
    return NodeReply(message, None, text, error.code in NODE_LOST)


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
            if now - job.free_at > _AFTER_S and not self._transport.is_arriving(message):
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
