"""The server's side: jobs go to nodes as messages, replies come back in the jobs' order, with a deadline of our own.

A node has one job at a time; the next one is sent when its reply is there, and the same one again where it got lost.
Tensors that several jobs share travel as one Flower object. What a client remembers stays on its node: the engine knows
only under which version.
"""

import math
import queue
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleetfit.engines.flower import Rules
from fleetfit.errors import ConfigError, format_exception, one_line
from fleetfit.fleet import transport
from fleetfit.fleet.client_manager import ClientManager
from fleetfit.fleet.doubts import Doubts
from fleetfit.fleet.protocol import answer_of, packed
from fleetfit.fleet.transport import Replies, Reply, Transport
from fleetfit.layout import Layout, State
from fleetfit.messages import dump_job, dump_state, load_reply, pack
from fleetfit.method import is_portable
from fleetfit.network import AFTER_QUORUM
from fleetfit.submodel import Submodel
from fleetfit.values import Failure, Job, Update

_AHEAD = 2  # jobs waiting or in flight, for each node
_SHARED = 4  # states that are kept as Flower objects
_JOB: Mapping[str, Any] = {"what": "job"}
_NOTHING: Mapping[str, transport.Part] = {}
_GRACE_S = 30.0  # beyond our deadline, at most, until Flower drops a message: a late reply tells that its node is free


class FlowerEngine:
    """The engine that runs jobs on the nodes of a fleet."""

    def __init__(self, transport: Transport, manager: ClientManager, rules: Rules, cohort: int, layout: Layout) -> None:
        """Take what nodes are asked by and who they are; `cohort`: clients whose updates a round wants."""
        self._transport, self._manager, self._rules, self._layout = transport, manager, rules, layout
        self.cohort = cohort
        self._versions: dict[int, int] = {}
        self._keeps: set[tuple[int, int]] = set()
        self._replies: Replies = queue.Queue()
        self._late: dict[str, int] = {}
        self._shared: dict[int, tuple[State, Any]] = {}

    # -- what a round needs to know

    def free(self) -> list[bool]:
        """Return which clients are connected, can train, and have no job of an earlier round left."""
        self._drain()
        busy = set(self._late.values())
        return [ready and client not in busy for client, ready in enumerate(self._manager.ready())]

    # -- the protocol of engines

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Send each job to its node; yield the replies in the jobs' order as they and all before them are there."""
        out = _Out()
        doubts = Doubts(self._transport, lambda message, lasts_s: self._question(out.sent[message][1], lasts_s))
        try:
            while True:
                self._draw(out, jobs)
                self._send(out)
                if out.yielded in out.done:
                    yield self._finished(out.done.pop(out.yielded))
                    out.yielded += 1
                elif out.yielded == out.drawn and not out.more:
                    return
                else:
                    self._wait(out, doubts)
                    self._expire(out)
                    self._repeat(out, doubts)
                    self._enough(out)
        finally:
            for message, (_, job, _) in out.sent.items():
                self._late[message] = job.client if job.client is not None else -1

    def accept(self, update: Update) -> None:
        """Note that the client's memory of this round is the one that counts."""
        if (update.round, update.index) in self._keeps and update.client is not None:
            self._versions[update.client] = update.round

    def save(self) -> dict[str, Any]:
        """Return the versions of the clients' memories, which themselves never leave the nodes."""
        return {"versions": {str(client): version for client, version in sorted(self._versions.items())}}

    def load(self, memories: Mapping[str, Any]) -> None:
        """Take back what `save` returned."""
        self._versions = {int(client): int(version) for client, version in memories.get("versions", {}).items()}

    def close(self) -> None:
        """Wait for nobody any more."""
        self._transport.close()

    # -- one question to each of some nodes

    def exchange(
        self, what: Mapping[str, Any], asked: Mapping[int, tuple[Job, Mapping[str, transport.Part]]]
    ) -> Iterator[tuple[int, Mapping[str, Any] | Failure]]:
        """Ask several nodes at once; yield what comes of each as it comes, until the deadline of a job.

        Args:
            what: What the header says beside the job.
            asked: By index of the job: the job, and further parts of its message.
        """
        out: dict[str, tuple[int, Job]] = {}
        try:
            busy, ready = set(self._late.values()), self._manager.ready()
            for index, (job, parts) in asked.items():
                there = job.client is not None and ready[job.client] and job.client not in busy
                message = self._transport.send(self._message(job, what, parts), self._replies) if there else ""
                if message:
                    out[message] = (index, job)
                else:
                    yield index, _failed(job, "the node is not connected, or not free", absent=True)
            until = time.monotonic() + self._rules.deadline_s
            while out and (left := until - time.monotonic()) > 0:
                self._transport.attend()
                try:
                    reply = self._replies.get(timeout=min(left, 0.5))
                except queue.Empty:
                    continue
                if reply.message in out:
                    index, job = out.pop(reply.message)
                    yield index, self._said(job, reply)
                else:
                    self._too_late(reply)
            for index, job in list(out.values()):
                yield index, _failed(job, f"it did not answer within {self._rules.deadline_s:g} s", late=True)
        finally:
            self._late |= {message: job.client for message, (_, job) in out.items() if job.client is not None}

    def _said(self, job: Job, reply: Reply) -> Mapping[str, Any] | Failure:
        """Return what a node said in an exchange."""
        if reply.lost and job.client is not None:
            self._manager.online.discard(self._manager.members[job.client].node)
        if reply.problem:
            return _failed(job, reply.problem, absent=reply.lost)
        try:
            nest = answer_of(self._transport.released(reply))
            if "refused" in nest or nest.get("lost") is True or "reply" in nest:
                found = self._read(job, nest)
                return found if isinstance(found, Failure) else _failed(job, "it has answered something else")
            if nest.get("keeps") is True:
                self._note_kept(job)
            return nest
        except Exception as error:  # whatever it is, it ends nothing but this reply
            return _failed(job, f"its answer was refused: {format_exception(error)}")

    # -- drawing and sending

    def _draw(self, out: "_Out", jobs: Iterator[Job]) -> None:
        bound = _AHEAD * max(len(self._manager.members), 1)
        while out.more and out.drawn - out.yielded < bound:
            job = next(jobs, None)
            if job is None:
                out.more = False
                return
            if not is_portable(job.method):
                raise ConfigError(
                    "engine flower rebuilds the method on each node, so its functions need import paths "
                    '("package.module:function" or "file.py:function").',
                    key="method",
                )
            assert job.client is not None
            out.queued.setdefault(job.client, deque()).append((out.drawn, job))
            out.training += job.kind == "train"
            out.drawn += 1

    def _send(self, out: "_Out") -> None:
        """Send to every node that has nothing to do the first of its jobs."""
        at_work = {job.client for _, job, _ in out.sent.values()} | set(self._late.values())
        ready = self._manager.ready()
        for client, waiting in out.queued.items():
            if not waiting or client in at_work:
                continue
            place, job = waiting[0]
            if not ready[client]:
                waiting.popleft()
                out.done[place] = _failed(job, "the node is not connected", absent=True)
                continue
            waiting.popleft()
            self._dispatch(out, place, job)

    def _dispatch(self, out: "_Out", place: int, job: Job, until: float = math.inf) -> None:
        """Send a job to its node, which answers by the deadline, or by an earlier moment."""
        message = self._transport.send(self._message(job), self._replies)
        if message:
            out.sent[message] = (place, job, min(until, time.monotonic() + self._rules.deadline_s))
        else:
            out.done[place] = _failed(job, "the SuperLink did not take the message", absent=True)

    def _message(
        self, job: Job, what: Mapping[str, Any] = _JOB, further: Mapping[str, transport.Part] = _NOTHING
    ) -> Any:
        assert self._manager.setup is not None and job.client is not None
        version = self._versions.get(job.client, -1)
        bare = dump_job(replace(job, state={}, statistics={}, memory_version=version), self._layout)
        header = packed({**what, **self._manager.setup.header, "job": bare})
        parts: dict[str, transport.Part] = {"header": header, **further}
        if job.state:
            parts["state"] = self._part(job.state, job.submodel)
        if job.statistics:
            parts["statistics"] = self._part(job.statistics, job.submodel)
        kind = "train" if job.kind == "train" else "evaluate"
        node = self._manager.members[job.client].node
        lasts_s = self._rules.deadline_s + min(_GRACE_S, self._rules.deadline_s)
        return transport.request(node, kind, parts, lasts_s, job.round + 1)

    def _part(self, state: State, piece: Submodel) -> Any:
        """Return tensors as a Flower object, the same one for jobs that share them."""
        known = self._shared.get(id(state))
        if known is None:
            while len(self._shared) >= _SHARED:
                del self._shared[next(iter(self._shared))]
            content = pack(dump_state(state, self._layout, piece))
            known = self._shared[id(state)] = (state, transport.part(content))
        return known[1]

    # -- taking replies

    def _wait(self, out: "_Out", doubts: Doubts) -> None:
        """Wait a moment for replies, and note those that came."""
        self._transport.attend()
        with_until = [until for _, _, until in out.sent.values()]
        pause = min([0.5, *(max(until - time.monotonic(), 0.0) for until in with_until)])
        try:
            replies = [self._replies.get(timeout=max(pause, 0.001))]
        except queue.Empty:
            return
        while not self._replies.empty():
            replies.append(self._replies.get())
        for reply in replies:
            if reply.message in out.sent:
                place, job, _ = out.sent.pop(reply.message)
                out.done[place] = came = self._opened(job, reply)
                out.usable += came.usable
            else:
                doubts.heard(reply)
                self._too_late(reply)

    def _drain(self) -> None:
        while not self._replies.empty():
            self._too_late(self._replies.get())

    def _too_late(self, reply: Reply) -> None:
        client = self._late.pop(reply.message, None)
        self._transport.released(reply)
        if client is not None and not reply.problem:
            name = self._manager.members[client].told.name
            self._manager.say(f"Node {name} answered a job after its round had ended; its answer is not used.")

    def _expire(self, out: "_Out") -> None:
        """Give up what is beyond the deadline."""
        now = time.monotonic()
        for message, (place, job, until) in list(out.sent.items()):
            if now >= until:
                reason = f"it did not answer within {self._rules.deadline_s:g} s"
                self._give_up(out, message, place, job, reason)
        if not out.sent:  # nobody waits for those alone that still have a job of an earlier round
            for client in set(self._late.values()) & out.queued.keys():
                waiting = out.queued[client]
                while waiting:
                    place, job = waiting.popleft()
                    out.done[place] = _failed(job, "its node still has a job of an earlier round", late=True)

    def _question(self, job: Job, lasts_s: float) -> str:
        """Ask the node of a job what it has told before: it answers as soon as it has nothing else to do."""
        assert job.client is not None
        node = self._manager.members[job.client].node
        question = transport.request(node, "query", {"header": self._manager.hello}, lasts_s, 0)
        return self._transport.send(question, self._replies)

    def _repeat(self, out: "_Out", doubts: Doubts) -> None:
        """Send jobs again that got lost, or whose answers did; the deadline stays."""
        for lost in doubts.lost(out.sent):
            place, job, until = out.sent.pop(lost)
            assert job.client is not None
            name = self._manager.members[job.client].told.name
            self._manager.say(f"Node {name} has nothing to do, and its answer has not come: it gets its job again.")
            self._dispatch(out, place, job, until)

    def _enough(self, out: "_Out") -> None:
        """End a round of training as soon as enough updates are there."""
        if out.more or not out.training or out.training < out.drawn:
            return
        needed = min(out.drawn, max(1, math.ceil(self._rules.quorum * self.cohort - 1e-9)))
        if out.usable >= needed and (needed < out.drawn):
            for message, (place, job, _) in list(out.sent.items()):
                self._give_up(out, message, place, job, AFTER_QUORUM)

    def _give_up(self, out: "_Out", message: str, place: int, job: Job, reason: str) -> None:
        del out.sent[message]
        self._late[message] = job.client if job.client is not None else -1
        out.done[place] = _failed(job, reason, late=True)

    def _opened(self, job: Job, reply: Reply) -> "_Came":
        """Look at a reply, unless it lies on disk until its turn."""
        if reply.lost and job.client is not None:  # until the client manager sees it again, it is sent nothing
            self._manager.online.discard(self._manager.members[job.client].node)
        if reply.problem or isinstance(reply.content, Path):
            return _Came(job, reply, usable=not reply.problem)
        try:
            nest = answer_of(reply.content or b"")
            said = nest.get("reply")
            return _Came(job, reply, nest, usable=isinstance(said, Mapping) and said.get("kind") == "update")
        except Exception as error:  # whatever it is, it ends nothing but this reply
            self._transport.released(reply)
            return _Came(job, replace(reply, problem=f"its answer was refused: {format_exception(error)}"))

    def _finished(self, found: "Failure | _Came") -> Update | Failure:
        """Return the reply that came, or a failure that says what came instead."""
        if isinstance(found, Failure):
            return found
        job, reply = found.job, found.reply
        if reply.problem:
            return _failed(job, reply.problem, absent=reply.lost)
        try:
            content = self._transport.released(reply)
            nest = answer_of(content) if found.nest is None else found.nest
            return self._read(job, nest)
        except Exception as error:
            return _failed(job, f"its answer was refused: {format_exception(error)}")

    def _read(self, job: Job, nest: Mapping[str, Any]) -> Update | Failure:
        assert job.client is not None
        if "refused" in nest:
            return _failed(job, f"it refused: {one_line(nest['refused'], 500)}")
        if nest.get("lost") is True:
            self._manager.unready(job.client)
            return _failed(job, "it has lost the tensors that are never trained; it gets them again")
        reply = load_reply(nest["reply"] if isinstance(nest.get("reply"), Mapping) else {}, self._layout)
        if nest.get("forgot") is True:
            name = self._manager.members[job.client].told.name
            self._manager.say(f"Node {name} has lost what it remembered of this run, and began anew.")
        if nest.get("keeps") is True and job.kind == "train":
            self._note_kept(job)
        # a node that answers is there, and has no clock but its own
        return replace(reply, absent=False) if isinstance(reply, Failure) else replace(reply, simulated_s=None)

    def _note_kept(self, job: Job) -> None:
        self._keeps = {k for k in self._keeps if k[0] == job.round} | {(job.round, job.index)}


@dataclass(frozen=True)
class _Came:
    """A reply that waits for its turn."""

    job: Job
    reply: Reply
    nest: Mapping[str, Any] | None = None
    usable: bool = False


@dataclass
class _Out:
    """What one call of `run` has out: jobs drawn, queued by client, sent by message, and done by place."""

    drawn: int = 0
    yielded: int = 0
    more: bool = True
    training: int = 0
    usable: int = 0
    queued: dict[int, deque[tuple[int, Job]]] = field(default_factory=dict)
    sent: dict[str, tuple[int, Job, float]] = field(default_factory=dict)
    done: dict[int, Failure | _Came] = field(default_factory=dict)


def _failed(job: Job, reason: str, absent: bool = False, late: bool = False) -> Failure:
    return Failure.of(job, reason, absent=absent, late=late)
