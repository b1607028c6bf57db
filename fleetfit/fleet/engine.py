"""The engine of a fleet: jobs go to nodes as messages, replies come back in the jobs' order, before a deadline.

A node has one job at a time; the next one is sent when its reply has come, and the same one again if it was lost.
Tensors that several jobs share travel as one Flower object. A client's memory stays on its node: the engine knows its
version only.
"""

import math
import queue
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleetfit.core import Failure, Job, Update
from fleetfit.engines.flower import Rules
from fleetfit.errors import format_exception, one_line
from fleetfit.fleet import transport
from fleetfit.fleet.client_manager import ClientManager
from fleetfit.fleet.protocol import pack_message, read_answer
from fleetfit.fleet.transport import LostJobDetector, NodeReply, ReplyQueue, Transport
from fleetfit.hooks import check_portable
from fleetfit.layout import Layout, State
from fleetfit.messages import dump_job, dump_state, load_reply, pack
from fleetfit.rounds.links import AFTER_QUORUM
from fleetfit.submodel import Submodel

_AHEAD = 2  # jobs waiting or in flight, for each node
_MAX_SHARED = 4  # states that are kept as records
_WAIT_S = 0.5  # for a reply, at most, before the next look at deadlines
_JOB: Mapping[str, Any] = {"what": "job"}
_NO_PARTS: Mapping[str, transport.Part] = {}
# Beyond the deadline, at most, until Flower drops a message: a late reply shows that its node is free.
_GRACE_S = 30.0


class FleetEngine:
    """The engine that runs jobs on the nodes of a fleet."""

    def __init__(self, transport: Transport, manager: ClientManager, rules: Rules, cohort: int, layout: Layout) -> None:
        """Make an engine without jobs.

        Args:
            transport: Messages out, replies in.
            manager: The nodes.
            rules: Deadline and quorum.
            cohort: Clients whose updates a round needs.
            layout: The model's layout.
        """
        self._transport, self._manager, self._rules, self._layout = transport, manager, rules, layout
        self.cohort = cohort
        self._versions: dict[int, int] = {}
        self._new_memories: set[tuple[int, int]] = set()
        self._replies: ReplyQueue = queue.Queue()
        self._late: dict[str, int] = {}
        self._shared: dict[int, tuple[State, Any]] = {}
        self._phase: tuple[str, float] | None = None  # kind of the present jobs, and when they began
        self._phases_s: dict[str, float] = {}  # from the beginning of the last ones of a kind to that of the next ones

    def find_free_clients(self) -> list[bool]:
        """Return which clients are connected, can train, and have no job of an earlier round left."""
        while not self._replies.empty():
            self._drop_late(self._replies.get())
        busy = set(self._late.values())
        return [ready and client not in busy for client, ready in enumerate(self._manager.find_ready())]

    # -- the protocol of engines

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Send each job to its node; yield a reply as soon as it and all before it have come."""
        state = _RunState()
        detector = LostJobDetector(
            self._transport, lambda message, ttl_s: self._ask_question(state.sent[message][1], ttl_s)
        )
        try:
            while True:
                self._draw(state, jobs)
                self._send_next(state)
                if state.yielded in state.done:
                    yield self._load_reply(state.done.pop(state.yielded))
                    state.yielded += 1
                elif state.yielded == state.drawn and not state.has_more:
                    return
                else:
                    self._receive(state, detector)
                    self._expire(state)
                    self._repeat_lost(state, detector)
                    self._end_at_quorum(state)
        finally:
            for message, (_, job, _) in state.sent.items():
                self._late[message] = job.client if job.client is not None else -1

    def commit_memory(self, update: Update) -> None:
        """Make this round's memory of the client its newest version."""
        if (update.round, update.index) in self._new_memories and update.client is not None:
            self._versions[update.client] = update.round

    def dump_memories(self) -> dict[str, Any]:
        """Return the versions of the clients' memories, which never leave the nodes."""
        return {"versions": {str(client): version for client, version in sorted(self._versions.items())}}

    def load_memories(self, memories: Mapping[str, Any]) -> None:
        """Replace the versions by those that `dump_memories` returned."""
        self._versions = {int(client): int(version) for client, version in memories.get("versions", {}).items()}

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    # -- one question to several nodes

    def exchange(
        self, what: Mapping[str, Any], requests: Mapping[int, tuple[Job, Mapping[str, transport.Part]]]
    ) -> Iterator[tuple[int, Mapping[str, Any] | Failure]]:
        """Send a request to several nodes at once; yield each answer as it comes, until the deadline of a job.

        Args:
            what: Entries of the header beside the job.
            requests: By index of the job: the job, and further parts of its message.
        """
        sent: dict[str, tuple[int, Job]] = {}
        self._phase = None
        try:
            free = {client for client, is_free in enumerate(self.find_free_clients()) if is_free}
            asked = [(index, *request) for index, request in requests.items() if request[0].client in free]
            ids = self._transport.send((self._make_message(job, what, parts) for _, job, parts in asked), self._replies)
            sent |= {message: (index, job) for message, (index, job, _) in zip(ids, asked, strict=True) if message}
            for index in requests.keys() - {index for index, _ in sent.values()}:
                yield index, Failure.of(requests[index][0], "the node is not connected, or not free", absent=True)
            until = time.monotonic() + self._rules.deadline_s
            while sent and (left := until - time.monotonic()) > 0:
                try:
                    reply = self._replies.get(timeout=min(left, _WAIT_S))
                except queue.Empty:
                    continue
                if reply.message in sent:
                    index, job = sent.pop(reply.message)
                    yield index, self._read_exchange(job, reply)
                else:
                    self._drop_late(reply)
            for index, job in list(sent.values()):
                yield index, Failure.of(job, self._format_deadline(), late=True)
        finally:
            self._late |= {message: job.client for message, (_, job) in sent.items() if job.client is not None}

    def _read_exchange(self, job: Job, reply: NodeReply) -> Mapping[str, Any] | Failure:
        self._note_connection(job, reply)
        if reply.error:
            return Failure.of(job, reply.error, absent=reply.node_lost)
        try:
            answer = self._read_table(job, self._transport.take_content(reply))
            if "refused" in answer or answer.get("lost") is True or "reply" in answer:
                outcome = self._read_answer(job, answer)
                if isinstance(outcome, Failure):
                    return outcome
                return Failure.of(job, "its answer is of another kind than the request")
            if answer.get("keeps") is True:
                self._note_new_memory(job)
            return answer
        except Exception as error:  # a malformed answer ends nothing but this request
            return Failure.of(job, f"its answer was refused: {format_exception(error)}")

    # -- drawing and sending

    def _draw(self, state: "_RunState", jobs: Iterator[Job]) -> None:
        bound = _AHEAD * max(len(self._manager.members), 1)
        while state.has_more and state.drawn - state.yielded < bound:
            job = next(jobs, None)
            if job is None:
                state.has_more = False
                return
            check_portable(job.method, "the nodes of a fleet")
            assert job.client is not None
            if not state.drawn:
                self._begin_phase(job.kind)
            state.queued.setdefault(job.client, deque()).append((state.drawn, job))
            state.training += job.kind == "train"
            state.drawn += 1

    def _begin_phase(self, kind: str) -> None:
        """Note how long the jobs before took, so that nodes know when the next ones come."""
        now = time.monotonic()
        if self._phase is not None:
            self._phases_s[self._phase[0]] = now - self._phase[1]
        self._phase = kind, now

    def _send_next(self, state: "_RunState") -> None:
        """Send to every node without a job the first of its jobs."""
        busy = {job.client for _, job, _ in state.sent.values()} | set(self._late.values())
        ready, jobs = self._manager.find_ready(), list[tuple[int, Job, float]]()
        for client, waiting in state.queued.items():
            if not waiting or client in busy:
                continue
            position, job = waiting.popleft()
            if ready[client]:
                jobs.append((position, job, math.inf))
            else:
                state.done[position] = Failure.of(job, "the node is not connected", absent=True)
        self._dispatch(state, jobs)

    def _dispatch(self, state: "_RunState", jobs: Sequence[tuple[int, Job, float]]) -> None:
        """Send jobs to their nodes, which must answer by the deadline, or by an earlier moment."""
        last = (not state.queued.get(job.client or 0) for _, job, _ in jobs)
        messages = (self._make_message(job, is_last=is_last) for (_, job, _), is_last in zip(jobs, last, strict=True))
        sent = self._transport.send(messages, self._replies)
        for message, (position, job, until) in zip(sent, jobs, strict=True):
            if message:
                state.sent[message] = (position, job, min(until, time.monotonic() + self._rules.deadline_s))
            else:
                state.done[position] = Failure.of(job, "the SuperLink did not take the message", absent=True)

    def _make_message(
        self, job: Job, what: Mapping[str, Any] = _JOB, further: Mapping[str, transport.Part] = _NO_PARTS,
        is_last: bool = False,
    ) -> Any:  # fmt: skip
        assert self._manager.setup is not None and job.client is not None
        version = self._versions.get(job.client, -1)
        table = dump_job(replace(job, state={}, statistics={}, extra={}, memory_version=version), self._layout)
        header = pack_message({**what, **self._manager.setup.header, "job": table})
        parts: dict[str, transport.Part] = {"header": header, **further}
        if job.state:
            parts["state"] = self._share("state", job.state, job.submodel)
        if job.statistics:
            parts["statistics"] = self._share("statistics", job.statistics, job.submodel)
        if job.extra:
            parts["extra"] = pack(dict(job.extra))
        kind = "train" if job.kind == "train" else "evaluate"
        node = self._manager.members[job.client].node
        ttl_s = self._rules.deadline_s + min(_GRACE_S, self._rules.deadline_s)
        pace = self._manager.make_pace(self._phases_s.get(job.kind, 0.0) if is_last else 0.0)
        return transport.make_request(node, kind, parts, ttl_s, job.round + 1, pace)

    def _share(self, name: str, tensors: State, submodel: Submodel) -> Any:
        """Return tensors as a part, of the same Flower objects for all jobs that share them."""
        entry = self._shared.get(id(tensors))
        if entry is None:
            while len(self._shared) >= _MAX_SHARED:
                del self._shared[next(iter(self._shared))]
            content = pack(dump_state(tensors, self._layout, submodel))
            entry = self._shared[id(tensors)] = (tensors, transport.make_part(name, content))
        return entry[1]

    # -- receiving replies

    def _receive(self, state: "_RunState", detector: LostJobDetector) -> None:
        """Wait a moment for replies, and store those that came."""
        pause = min([_WAIT_S, *(max(until - time.monotonic(), 0.0) for _, _, until in state.sent.values())])
        try:
            replies = [self._replies.get(timeout=max(pause, 0.001))]
        except queue.Empty:
            return
        while not self._replies.empty():
            replies.append(self._replies.get())
        for reply in replies:
            if reply.message in state.sent:
                position, job, _ = state.sent.pop(reply.message)
                state.done[position] = pending = self._open_reply(job, reply)
                state.usable += pending.usable
            else:
                detector.note_reply(reply)
                self._drop_late(reply)

    def _drop_late(self, reply: NodeReply) -> None:
        client = self._late.pop(reply.message, None)
        self._transport.take_content(reply)
        if client is not None and not reply.error:
            name = self._manager.members[client].description.name
            self._manager.say(f"Node {name} answered a job after its round had ended; its answer is not used.")

    def _expire(self, state: "_RunState") -> None:
        """Let jobs fail that are beyond their deadline."""
        now = time.monotonic()
        for message, (position, job, until) in list(state.sent.items()):
            if now >= until:
                self._give_up(state, message, position, job, self._format_deadline())
        if not state.sent:  # the round does not wait for nodes alone that still have a job of an earlier one
            for client in set(self._late.values()) & state.queued.keys():
                waiting = state.queued[client]
                while waiting:
                    position, job = waiting.popleft()
                    state.done[position] = Failure.of(job, "its node still has a job of an earlier round", late=True)

    def _format_deadline(self) -> str:
        return f"it did not answer within {self._rules.deadline_s:g} s"

    def _ask_question(self, job: Job, ttl_s: float) -> str:
        """Send a hello to the node of a job: it answers as soon as it is free."""
        assert job.client is not None
        node = self._manager.members[job.client].node
        question = transport.make_request(node, "query", self._manager.hello, ttl_s, 0, self._manager.make_pace())
        return self._transport.send([question], self._replies)[0]

    def _repeat_lost(self, state: "_RunState", detector: LostJobDetector) -> None:
        """Send lost jobs again; the deadline stays."""
        jobs = [state.sent.pop(message) for message in detector.find_lost(state.sent)]
        for _, job, _ in jobs:
            assert job.client is not None
            name = self._manager.members[job.client].description.name
            self._manager.say(f"Node {name} has nothing to do, and its answer has not come: it gets its job again.")
        self._dispatch(state, jobs)

    def _end_at_quorum(self, state: "_RunState") -> None:
        """End a round of training as soon as its quorum of updates has come."""
        if state.has_more or not state.training or state.training < state.drawn:
            return
        quorum = min(state.drawn, max(1, math.ceil(self._rules.quorum * self.cohort - 1e-9)))
        if state.usable >= quorum and quorum < state.drawn:
            for message, (position, job, _) in list(state.sent.items()):
                self._give_up(state, message, position, job, AFTER_QUORUM)

    def _give_up(self, state: "_RunState", message: str, position: int, job: Job, reason: str) -> None:
        del state.sent[message]
        self._late[message] = job.client if job.client is not None else -1
        state.done[position] = Failure.of(job, reason, late=True)

    def _note_connection(self, job: Job, reply: NodeReply) -> None:
        """Send nothing to a node that was lost, until the client manager sees it again."""
        if reply.node_lost and job.client is not None:
            self._manager.online.discard(self._manager.members[job.client].node)

    def _open_reply(self, job: Job, reply: NodeReply) -> "_PendingReply":
        """Read a reply, unless it is on disk until its turn."""
        self._note_connection(job, reply)
        if reply.error or isinstance(reply.content, Path):
            return _PendingReply(job, reply, usable=not reply.error)
        try:
            answer = self._read_table(job, reply.content or b"")
            outcome = answer.get("reply")
            usable = isinstance(outcome, Mapping) and outcome.get("kind") == "update"
            return _PendingReply(job, reply, answer, usable)
        except Exception as error:  # a malformed answer ends nothing but this reply
            self._transport.take_content(reply)
            return _PendingReply(job, replace(reply, error=f"its answer was refused: {format_exception(error)}"))

    def _load_reply(self, pending: "Failure | _PendingReply") -> Update | Failure:
        """Return a node's update or failure, or the failure in its place."""
        if isinstance(pending, Failure):
            return pending
        job, reply = pending.job, pending.reply
        if reply.error:
            return Failure.of(job, reply.error, absent=reply.node_lost)
        try:
            content = self._transport.take_content(reply)
            return self._read_answer(job, self._read_table(job, content) if pending.answer is None else pending.answer)
        except Exception as error:
            return Failure.of(job, f"its answer was refused: {format_exception(error)}")

    def _read_table(self, job: Job, content: bytes | bytearray) -> dict[str, Any]:
        """Return the table of an answer, and keep the head of the node's log."""
        assert job.client is not None
        answer = read_answer(content)
        self._manager.keep_head(self._manager.members[job.client], answer)
        return answer

    def _read_answer(self, job: Job, answer: Mapping[str, Any]) -> Update | Failure:
        assert job.client is not None
        if "refused" in answer:
            again = answer.get("again") is True  # its owner allows no work now: as if it were away
            if again:
                self._manager.postpone(job.client)
            return Failure.of(job, f"it refused: {one_line(answer['refused'], 500)}", absent=again)
        if answer.get("lost") is True:
            self._manager.mark_unready(job.client)
            return Failure.of(
                job, "it is another than it was, or has lost tensors or the transform; it is set up again"
            )
        reply = load_reply(answer["reply"] if isinstance(answer.get("reply"), Mapping) else {}, self._layout)
        if answer.get("forgot") is True:
            name = self._manager.members[job.client].description.name
            self._manager.say(f"Node {name} has lost its memory of this run, and began anew.")
        if answer.get("keeps") is True and job.kind == "train":
            self._note_new_memory(job)
        # A node that answers is not absent, and its only clock is real.
        return replace(reply, absent=False) if isinstance(reply, Failure) else replace(reply, simulated_s=None)

    def _note_new_memory(self, job: Job) -> None:
        self._new_memories = {key for key in self._new_memories if key[0] == job.round} | {(job.round, job.index)}


@dataclass(frozen=True)
class _PendingReply:
    """A reply that waits for its turn."""

    job: Job
    reply: NodeReply
    answer: Mapping[str, Any] | None = None
    usable: bool = False


@dataclass
class _RunState:
    """The jobs of one call of `run`: drawn, queued by client, sent by message, and done by position."""

    drawn: int = 0
    yielded: int = 0
    has_more: bool = True
    training: int = 0
    usable: int = 0
    queued: dict[int, deque[tuple[int, Job]]] = field(default_factory=dict)
    sent: dict[str, tuple[int, Job, float]] = field(default_factory=dict)
    done: dict[int, Failure | _PendingReply] = field(default_factory=dict)
