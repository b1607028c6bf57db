"""Who takes part in a fleet's run: nodes enrol, are told what is trained, go away and come back.

A node that is new is asked what the server may know of it, and then whether it can train this model; what it lacks of
tensors that are never trained is sent to it once. Who refuses, or does not fit, is named with the reason and asked
again a minute later. A client's number is its place in the list of members, which only grows.

Questions and answers get lost: with a node that was killed and is back at once, or where Flower's own node still has
the reply to a message of a stopped run, which it sends in place of the next one, so that from then on every reply
leaves one message late. So a question without an answer is asked again, twice at once: the first of the two is answered
together with the second (`messages.HOLD`), and a node that sends both replies has none left. The first answer counts.
"""

import math
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fleetfit.errors import RunError, format_exception, one_line
from fleetfit.fleet import transport
from fleetfit.fleet.protocol import answer_of, hello_of, packed
from fleetfit.fleet.transport import Replies, Reply, Transport
from fleetfit.values import DataDescription, NodeDescription

_ANSWER_S = 90.0  # a Raspberry Pi needs a minute to import torch
_AGAIN_S = 60.0  # until a node that refused is asked again
_SOON_S = 5.0  # until one is asked again whose answer got lost
_REPEAT_S = 30.0  # until a question that has no answer is asked once more: not sooner, since slow nodes answer all


@dataclass
class EnrolledNode:
    """A node of the run.

    Attributes:
        node: Flower's id of it, which belongs to its key.
        told: What it told of itself.
        known: Whether it has told it since it was last away.
        ready: Whether it has said that it can train this model.
    """

    node: int
    told: NodeDescription
    known: bool = False
    ready: bool = False


@dataclass
class Setup:
    """What every node must know before its first job.

    Attributes:
        header: For messages of kind setup, base and job: run, problem, method, base, cost.
        base: The packed tensors that are never trained; empty where there are none.
    """

    header: Mapping[str, Any]
    base: bytes = b""


@dataclass
class ClientManager:
    """The nodes of a run.

    Attributes:
        transport: Messages out, replies in.
        asks: What a hello asks for: `asks_budget`, `asks_labels`.
        fits: Returns why a node does not fit this run, or "".
        say: Prints a line for the person at the server.
        members: Who has enrolled; a client's number is its place.
        setup: Known as soon as the model is.
    """

    transport: Transport
    asks: Mapping[str, bool]
    fits: Callable[[NodeDescription], str]
    say: Callable[[str], None]
    members: list[EnrolledNode] = field(default_factory=list)
    setup: Setup | None = None
    online: set[int] = field(default_factory=set)
    changed: bool = False
    _replies: Replies = field(default_factory=queue.Queue)
    _asked: dict[str, tuple[int, str]] = field(default_factory=dict)
    _first: dict[int, float] = field(default_factory=dict)
    _not_before: dict[int, float] = field(default_factory=dict)
    _new: list[EnrolledNode] = field(default_factory=list)
    _base_part: Any = None

    @staticmethod
    def saved(members: Iterable[EnrolledNode]) -> list[dict[str, Any]]:
        """Return members as plain values, for the run folder."""
        return [{"node": str(member.node), **member.told.payload} for member in members]

    def restore(self, nests: Iterable[Mapping[str, Any]]) -> None:
        """Take back what `saved` returned."""
        self.members = [EnrolledNode(int(nest["node"]), hello_of(nest)) for nest in nests]

    def ready(self) -> list[bool]:
        """Return who of the members is connected and can train."""
        return [member.ready and member.node in self.online for member in self.members]

    def settle(self) -> None:
        """Number the nodes that are new, by name; until then they have no number."""
        if self._new:
            self.members += sorted(self._new, key=lambda member: (member.told.name, member.node))
            self._new, self.changed = [], True

    @property
    def arrived(self) -> int:
        """How many have enrolled."""
        return len(self.members) + len(self._new)

    def keep_only(self, facts: DataDescription) -> None:
        """Leave out members with other data; before the first round, while numbers may still change."""
        for member in [m for m in self.members if m.told.facts.shape != facts.shape]:
            self.say(f"Node {member.told.name} does not take part: its data are {member.told.facts}, not {facts}.")
            self._not_before[member.node] = time.monotonic() + _AGAIN_S
            self.members.remove(member)

    @property
    def willing(self) -> int:
        """How many members have not refused, or been refused, a short while ago; connected or not."""
        now = time.monotonic()
        return sum(now >= self._not_before.get(member.node, 0.0) for member in self.members)

    @property
    def unsettled(self) -> bool:
        """Whether somebody who is connected is still being asked."""
        now = time.monotonic()
        open_ = [m for m in self.members if m.node in self.online and not m.ready]
        return any(now >= self._not_before.get(m.node, 0.0) for m in open_)

    @property
    def pending(self) -> bool:
        """Whether somebody has been asked and has not answered yet."""
        return bool(self._asked)

    def advance(self) -> None:
        """See who is there, ask whoever must be asked, and take the answers that have come; returns at once."""
        self.transport.attend()
        before, self.online = self.online, self.transport.nodes()
        for node in before - self.online:  # whatever it knew, it is asked again when it comes back
            self._not_before.pop(node, None)
        enrolled = {member.node: member for member in (*self.members, *self._new)}
        for node in (self.online - before) & enrolled.keys():
            enrolled[node].ready = enrolled[node].known = False
        busy = dict(self._asked.values())
        for node in sorted(self.online & busy.keys()):
            self._repeat(node, busy[node])
        for node in sorted(self.online - busy.keys()):
            member = enrolled.get(node)
            if time.monotonic() < self._not_before.get(node, 0.0):
                continue
            if member is None or not member.known:
                self._ask(node, "hello")
            elif self.setup is not None and not member.ready:
                self._ask(node, "setup")
        self._take()

    def unready(self, client: int) -> None:
        """Have a member set up again before its next job."""
        self.members[client].ready = False

    @property
    def hello(self) -> bytes:
        """The header of the question what the server may know of a node."""
        return packed({"what": "hello", **self.asks})

    def _member(self, node: int) -> EnrolledNode | None:
        return next((m for m in (*self.members, *self._new) if m.node == node), None)

    def _repeat(self, node: int, what: str) -> None:
        """Ask a question once more that has had no answer for a while."""
        if what != "base" and time.monotonic() - self._first[node] > _REPEAT_S:
            self._ask(node, what, held=True)
            self._ask(node, what)
            self._first[node] = math.inf

    def _ask(self, node: int, what: str, held: bool = False) -> None:
        if what == "hello":
            parts: dict[str, transport.Part] = {"header": self.hello}
        else:
            assert self.setup is not None
            parts = {"header": packed({"what": what, **self.setup.header})}
            if what == "base":
                self._base_part = self._base_part or transport.part(self.setup.base)
                parts["base"] = self._base_part
        if held:
            parts[transport.HOLD] = b"1"
        sent = self.transport.send(transport.request(node, "query", parts, _ANSWER_S, 0), self._replies)
        if sent:
            self._asked[sent] = (node, what)
            self._first[node] = time.monotonic()

    def _take(self) -> None:
        while True:
            try:
                reply = self._replies.get_nowait()
            except queue.Empty:
                return
            node, what = self._asked.pop(reply.message, (0, ""))
            open_ = [message for message, asked in self._asked.items() if asked[0] == node]
            if not what or (reply.problem and open_):  # it has been answered, or may still be
                self.transport.released(reply)
                continue
            for message in open_:
                del self._asked[message]
            try:
                self._heard(node, what, reply)
            except Exception as error:  # whatever a node says, the others' run goes on
                self._not_before[node] = time.monotonic() + (_SOON_S if reply.problem else _AGAIN_S)
                self.say(f"Node {self._called(node)} does not take part: {format_exception(error, 500)}")

    def _called(self, node: int) -> str:
        member = self._member(node)
        return str(node) if member is None else member.told.name

    def _heard(self, node: int, what: str, reply: Reply) -> None:
        """Take one answer.

        Raises:
            FleetFitError: The node refuses, or does not fit.
        """
        if reply.problem:
            raise RunError(reply.problem)
        nest = answer_of(self.transport.released(reply))
        if "refused" in nest:
            raise RunError(one_line(nest["refused"], 500))
        if what == "hello":
            self._enrol(node, hello_of(nest.get("hello")))
            return
        member = self._member(node)
        assert member is not None
        if nest.get("ready") is True:
            member.ready = True
        elif what == "setup":
            self._ask(node, "base")
        else:
            raise RunError("it did not keep the tensors that are never trained.")

    def _enrol(self, node: int, told: NodeDescription) -> None:
        wrong = self.fits(told)
        if wrong:
            raise RunError(wrong)
        member = self._member(node)
        if member is None:
            self._new.append(EnrolledNode(node, told, known=True))
            self.say(f"Node {told.name} has enrolled: {told.num_examples} training samples{_afforded(told)}.")
            return
        member.known = True
        if told != member.told:
            member.told, self.changed = replace(told), True
            self.say(f"Node {told.name} is back, and is another than before{_afforded(told)}.")


def _afforded(told: NodeDescription) -> str:
    if told.budget is None:
        return ", budget not told"
    if isinstance(told.budget, Mapping):
        return ", affords " + ", ".join(f"{cost} {amount}" for cost, amount in told.budget.items())
    return f", affords {told.budget}"
