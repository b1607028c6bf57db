"""The nodes of a fleet's run: they enrol, receive the model's description, go away and come back.

The server asks a new node for its description and whether it can train this model: the first nodes by two messages,
since the model depends on their data, and later ones by one. A node gets the tensors that are never trained once, if it
lacks them. A node that refuses, or does not fit, is reported with the reason and asked again a minute later. A client's
number is its position in the list of members, which only grows.

Questions and answers get lost: with a node that was killed and restarted, or where Flower's own node still has the
reply to a message of a stopped run, which it sends in place of the next one, so that every later reply comes one
message late. So a question without an answer is asked again, twice at once: the node answers the first of the two
together with the second (`transport.HOLD`), and after both replies it has none left. The first answer counts.
"""

import math
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fleetfit.core import DataDescription, NodeDescription
from fleetfit.core.nodes import parse_node_description
from fleetfit.errors import RunError, format_exception, one_line
from fleetfit.fleet import transport
from fleetfit.fleet.protocol import compute_digest, pack_message, read_answer
from fleetfit.fleet.transport import NodeReply, Pace, Part, ReplyQueue, Transport

_ANSWER_S = 90.0  # a Raspberry Pi needs a minute to import torch
_SLOW_LINK = 500_000.0  # bytes a second, of a link that must have the time for the tensors that are never trained
_AGAIN_S = 60.0  # until a node that refused is asked again
_SOON_S = 5.0  # until a node is asked again whose answer was lost
_REPEAT_S = 30.0  # until a question without an answer is repeated: slow nodes answer every question
_LOOK_S = 0.025  # for each node of a fleet, between two looks of one of them: a look costs the SuperLink a few ms


@dataclass
class EnrolledNode:
    """A node of the run.

    Attributes:
        node: Flower's id of it, which belongs to its key.
        description: What it reported.
        is_described: Whether it has reported since it last came back.
        is_ready: Whether it can train this model, by its own answer.
    """

    node: int
    description: NodeDescription
    is_described: bool = False
    is_ready: bool = False


@dataclass
class Setup:
    """What every node must know before its first job.

    Attributes:
        header: For messages of kind setup, base and job: run, terms, problem, method, base, cost, privacy.
        base: The packed tensors that are never trained; empty where there are none.
    """

    header: Mapping[str, Any]
    base: bytes = b""


@dataclass
class ClientManager:
    """The nodes of a run.

    Attributes:
        transport: Messages out, replies in.
        run: The key of the run.
        terms: What it asks of a node.
        needs: What a node must know for it.
        check_node: Returns why a node does not fit this run, or "".
        say: Prints a line of the server's log.
        members: The enrolled nodes; a client's number is its position.
        setup: Set as soon as the model exists.
        transform: The transform by which the nodes prepare their samples, packed; empty where there is none.
        online: Flower's ids of the connected nodes.
        changed: Whether members were added or have changed since they were last stored.
        names: Names of the only nodes that take part, one node each; empty for any.
        heads: The last head of each member's log that came since they were last stored, by Flower's id of it.
    """

    transport: Transport
    run: str
    terms: Mapping[str, Any]
    needs: Mapping[str, Any]
    check_node: Callable[[NodeDescription], str]
    say: Callable[[str], None]
    members: list[EnrolledNode] = field(default_factory=list)
    setup: Setup | None = None
    transform: bytes = b""
    online: set[int] = field(default_factory=set)
    changed: bool = False
    names: Sequence[str] = ()
    heads: dict[str, Any] = field(default_factory=dict)
    _replies: ReplyQueue = field(default_factory=queue.Queue)
    _questions: dict[str, tuple[int, str]] = field(default_factory=dict)
    _sent_at: dict[int, float] = field(default_factory=dict)
    _not_before: dict[int, float] = field(default_factory=dict)
    _new: list[EnrolledNode] = field(default_factory=list)
    _base_part: Any = None
    _transform_part: Any = None

    def dump_members(self) -> list[dict[str, Any]]:
        """Return the members as plain values, for the run folder."""
        return [{"node": str(member.node), **member.description.payload} for member in self.members]

    def restore(self, tables: Iterable[Mapping[str, Any]]) -> None:
        """Replace the members by those that `dump_members` returned."""
        self.members = [EnrolledNode(int(table["node"]), parse_node_description(table)) for table in tables]

    def find_ready(self) -> list[bool]:
        """Return which members are connected and can train."""
        return [member.is_ready and member.node in self.online for member in self.members]

    def number_new_nodes(self) -> None:
        """Make the new nodes members, sorted by name."""
        if self._new:
            self.members += sorted(self._new, key=lambda member: (member.description.name, member.node))
            self._new, self.changed = [], True

    @property
    def enrolled(self) -> int:
        """Number of nodes that have enrolled."""
        return len(self.members) + len(self._new)

    def keep_only(self, facts: DataDescription) -> None:
        """Remove members with other data; before the first round, while numbers may still change."""
        for member in [m for m in self.members if m.description.facts.shape != facts.shape]:
            name, own = member.description.name, member.description.facts
            self.say(f"Node {name} does not take part: its data are {own}, not {facts}.")
            self._not_before[member.node] = time.monotonic() + _AGAIN_S
            self.members.remove(member)

    @property
    def willing(self) -> int:
        """Number of members, connected or not, without a recent refusal by them or of them."""
        return sum(map(self._is_willing, self.members))

    @property
    def is_unsettled(self) -> bool:
        """Whether a connected member has not yet said that it can train."""
        return any(m.node in self.online and not m.is_ready and self._is_willing(m) for m in self.members)

    def _is_willing(self, member: EnrolledNode) -> bool:
        return time.monotonic() >= self._not_before.get(member.node, 0.0)

    @property
    def is_waiting(self) -> bool:
        """Whether a question has no answer yet."""
        return bool(self._questions)

    def advance(self) -> None:
        """Find the connected nodes, send the questions that are due, and take the answers; returns at once."""
        before, self.online = self.online, self.transport.list_nodes()
        for node in before - self.online:  # it is asked again when it comes back
            self._not_before.pop(node, None)
        enrolled = {member.node: member for member in (*self.members, *self._new)}
        for node in (self.online - before) & enrolled.keys():
            enrolled[node].is_ready = enrolled[node].is_described = False
        busy, now, due = dict(self._questions.values()), time.monotonic(), list[tuple[int, str]]()
        silent = [(node, busy[node]) for node in sorted(self.online & busy.keys()) if self._is_silent(node, busy[node])]
        for node in sorted(self.online - busy.keys()):
            member = enrolled.get(node)
            if now < self._not_before.get(node, 0.0):
                continue
            if self.setup is None and (member is None or not member.is_described):
                due.append((node, "hello"))
            elif self.setup is not None and (member is None or not member.is_ready):
                due.append((node, "setup"))
        self._ask(silent, held=True)
        self._ask(due + silent)
        self._sent_at |= {node: math.inf for node, _ in silent}
        self._receive()

    def make_pace(self, next_s: float = 0.0) -> Pace:
        """Return the pace of a node whose next message is expected in some seconds."""
        return Pace(next_s, _LOOK_S * len(self.online))

    def mark_unready(self, client: int) -> None:
        """Have a member describe itself and be set up again before its next job."""
        self.members[client].is_ready = self.members[client].is_described = False

    def postpone(self, client: int) -> None:
        """Ask a member again a minute later, as one that refused to take part."""
        self.mark_unready(client)
        self._not_before[self.members[client].node] = time.monotonic() + _AGAIN_S

    @cached_property
    def digest(self) -> str:
        """The digest of the transform, or ""."""
        return compute_digest(self.transform) if self.transform else ""

    @property
    def hello(self) -> dict[str, Part]:
        """The parts of the message that asks a node for its description."""
        header = {"run": self.run, "terms": dict(self.terms), "needs": dict(self.needs), "transform": self.digest}
        return {"header": pack_message({"what": "hello", **header}), **self._make_transform()}

    def _make_transform(self) -> dict[str, Part]:
        self._transform_part = self._transform_part or transport.make_part("transform", self.transform)
        return {"transform": self._transform_part} if self.transform else {}

    def _find_member(self, node: int) -> EnrolledNode | None:
        return next((m for m in (*self.members, *self._new) if m.node == node), None)

    def _is_silent(self, node: int, what: str) -> bool:
        """Return whether a question has had no answer for a while, and is to be repeated."""
        return what != "base" and time.monotonic() - self._sent_at[node] > _REPEAT_S

    def _ask(self, questions: Sequence[tuple[int, str]], held: bool = False) -> None:
        """Ask nodes, each one question."""
        seconds = {"base": _ANSWER_S + len(self.setup.base if self.setup else b"") / _SLOW_LINK}
        messages = (
            transport.make_request(
                node, "query", self._make_question(node, what, held), seconds.get(what, _ANSWER_S), 0, self.make_pace()
            )
            for node, what in questions
        )
        for sent, (node, what) in zip(self.transport.send(messages, self._replies), questions, strict=True):
            if sent:
                self._questions[sent] = (node, what)
                self._sent_at[node] = time.monotonic()

    def _make_question(self, node: int, what: str, held: bool) -> dict[str, Part]:
        if what == "hello":
            parts = self.hello
        else:
            assert self.setup is not None
            member = self._find_member(node)
            parts = {"header": pack_message({"what": what, **self.setup.header})}
            if member is None or not member.is_described:
                parts |= self._make_transform()
            if what == "base":
                self._base_part = self._base_part or transport.make_part("base", self.setup.base)
                parts["base"] = self._base_part
        return {**parts, transport.HOLD: b"1"} if held else parts

    def _receive(self) -> None:
        while True:
            try:
                reply = self._replies.get_nowait()
            except queue.Empty:
                return
            node, what = self._questions.pop(reply.message, (0, ""))
            others = [message for message, question in self._questions.items() if question[0] == node]
            if not what or (reply.error and others):  # it has been answered, or may still be
                self.transport.take_content(reply)
                continue
            for message in others:
                del self._questions[message]
            try:
                self._read(node, what, reply)
            except Exception as error:  # a malformed answer of one node must not end the others' run
                self._not_before[node] = time.monotonic() + (_SOON_S if reply.error else _AGAIN_S)
                member = self._find_member(node)
                name = node if member is None else member.description.name
                self.say(f"Node {name} does not take part: {format_exception(error, 500)}")

    def _read(self, node: int, what: str, reply: NodeReply) -> None:
        """Read an answer.

        Raises:
            FleetFitError: The node refuses, or does not fit.
        """
        if reply.error:
            raise RunError(reply.error)
        answer = read_answer(self.transport.take_content(reply))
        member = self._find_member(node)
        if member is not None:
            self.keep_head(member, answer)
        if "refused" in answer:
            raise RunError(one_line(answer["refused"], 500))
        if what == "hello" or "hello" in answer or member is None:
            member = self._enrol(node, parse_node_description(answer.get("hello")))
            self.keep_head(member, answer)
        if what == "hello":
            return
        if answer.get("lost") is True:
            member.is_described = False
        elif answer.get("ready") is True:
            member.is_ready = True
        elif what == "setup":
            self._ask([(node, "base")])
        else:
            raise RunError("it did not keep the tensors that are never trained.")

    def _check_name(self, node: int, name: str) -> str:
        """Return why a node is none of those that the run names, or ""."""
        if self.names and name not in self.names:
            return f"its name is {name}, and engine.nodes names {', '.join(self.names)}."
        if self.names and any(m.description.name == name and m.node != node for m in (*self.members, *self._new)):
            return f"another node has the name {name}, which engine.nodes has once."
        return ""

    def keep_head(self, member: EnrolledNode, answer: Mapping[str, Any]) -> None:
        """Keep the head of a member's log, if an answer has one."""
        head = answer.get("log")
        if isinstance(head, Mapping) and type(head.get("entries")) is int and isinstance(head.get("hash"), str):
            table = {"name": member.description.name, "entries": head["entries"], "hash": head["hash"][:64]}
            self.heads[str(member.node)] = table

    def _enrol(self, node: int, description: NodeDescription) -> EnrolledNode:
        if problem := self.check_node(description) or self._check_name(node, description.name):
            raise RunError(problem)
        member, budget = self._find_member(node), _format_budget(description)
        if member is None:
            self._new.append(EnrolledNode(node, description, is_described=True))
            self.say(f"Node {description.name} has enrolled: {description.num_examples} training samples{budget}.")
            return self._new[-1]
        member.is_described = True
        if description != member.description:
            member.description, self.changed = replace(description), True
            self.say(f"Node {description.name} is back, and is another than before{budget}.")
        return member


def _format_budget(description: NodeDescription) -> str:
    budget = description.budget
    if budget is None:
        return ", budget not reported"
    if isinstance(budget, Mapping):
        return ", affords " + ", ".join(f"{cost} {amount}" for cost, amount in budget.items())
    return f", affords {budget}"
