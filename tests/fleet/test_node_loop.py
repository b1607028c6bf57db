"""A node's loop with a fake SuperLink: whatever happens to a message, the next one gets its own reply."""

import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fleetfit.errors import ConfigError
from fleetfit.fleet import node_loop, superlink, transport
from fleetfit.fleet.connection import Connection, Fault, FaultReporter
from fleetfit.fleet.superlink import Refusal, SuperLink, Trouble
from fleetfit.fleet.worker import WorkerDeath

NODE, OLD, NEW = 7, 1, 2  # the node, a run that is stopped, and the next one


def error(status: int, code: int = 0, headers: Any = None) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://superlink")
    text = json.dumps({"code": code, "detail": "public"}) if code else "locked"
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status, text=text, headers=headers))


class Server:
    """What a node asks of a SuperLink, in this process: the methods of Flower's `FleetHttpClient`."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.contents: dict[str, bytes] = {}
        self.stopped: set[int] = set()
        self.replies: list[tuple[str, str]] = []  # what was answered, and with what
        self.on: dict[str, Callable[[], None]] = {}  # called before a method
        self.after: dict[str, Callable[[], None]] = {}  # called when it is done, before its answer arrives
        self.reply_of: dict[str, str] = {}  # the reply to a message: a second one is refused
        self.pulled: list[str] = []
        self.pushed: dict[str, bytes] = {}
        self.announced: Message | None = None
        self.announced_records: list[str] = []
        self.missing: set[str] = set()
        self.root = ""
        self.link: SuperLink

    def put(self, run: int, text: str, whole: bool = True) -> Message:
        """Have a message for the node, with its text as a record."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 1, 1
        message = transport.make_request(NODE, "query", {"text": transport.make_part("text", text.encode())}, 60.0, 0)
        return self.put_message(message, whole)

    def put_message(self, message: Message, whole: bool = True) -> Message:
        message.metadata.__dict__["_message_id"] = message.object_id
        with no_object_id_recompute():
            objects = get_all_nested_objects(message)
            self.contents |= {name: part.deflate() if whole else b"" for name, part in objects.items()}
        self.messages.append(message)
        return message

    def __getattr__(self, name: str) -> Any:
        def call(request: Any) -> Any:
            self.on.get(name, lambda: None)()
            if getattr(request, "run_id", None) in self.stopped:
                raise error(403, 2007)
            answer = getattr(self, f"_{name}")(request)
            self.after.get(name, lambda: None)()
            return answer

        return call

    def _ActivateNode(self, request: Any) -> Any:
        return SimpleNamespace(node_id=NODE)

    _RegisterNode = _SendNodeHeartbeat = _GetRun = _DeactivateNode = _UnregisterNode = _ActivateNode

    def _PullMessages(self, request: Any) -> Any:
        assert request.node.node_id == NODE
        if not self.messages:
            self.link._left.set()
            return SimpleNamespace(messages_list=[])
        message = self.messages.pop(0)
        bare = remove_content_from_message(message)
        return SimpleNamespace(messages_list=[message_to_proto(bare)], message_object_trees=[get_object_tree(message)])

    def _PullObject(self, request: Any) -> Any:
        self.pulled.append(request.object_id)
        content = self.contents.get(request.object_id)
        return SimpleNamespace(object_found=content is not None, object_available=bool(content), object_content=content)

    def _PushMessages(self, request: Any) -> Any:
        [tree], [proto] = request.message_object_trees, request.messages_list
        if proto.metadata.run_id in self.stopped:
            raise error(403, 2007)
        self.announced = message_from_proto(proto)
        names = [each.object_id for each in iterate_object_tree(tree)]
        self.announced_records = names[:-2]  # the answer, unless the label has it
        if self.reply_of.setdefault(self.announced.metadata.reply_to_message_id, tree.object_id) != tree.object_id:
            return SimpleNamespace(objects_to_push=[], session_id="session")
        if tree.object_id != self.root:
            self.missing, self.root = set(names), tree.object_id
        return SimpleNamespace(objects_to_push=[n for n in names if n in self.missing], session_id="session")

    def _PushObject(self, request: Any) -> Any:
        if request.object_id not in self.missing:
            return SimpleNamespace(stored=False)
        self.pushed[request.object_id] = request.object_content
        self.missing.discard(request.object_id)
        if not self.missing:
            whole: Any = inflate_object_from_contents(self.root, dict(self.pushed))
            text = whole.error.reason if whole.has_error() else bytes(transport.read_parts(whole)["answer"]).decode()
            self.replies.append((whole.metadata.reply_to_message_id, text))
        return SimpleNamespace(stored=True)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing."""


class FakeWorker:
    """Answers a text with itself; `on` has what happens to some texts."""

    def __init__(self) -> None:
        self.on: dict[str, Callable[[], None]] = {}
        self.asked: list[str] = []

    def ask(self, parts: dict[str, bytearray], is_wanted: Callable[[], bool]) -> bytes | None:
        text = bytes(parts["text"]).decode()
        self.asked.append(text)
        self.on.get(text, lambda: None)()
        return text.encode() if is_wanted() else None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(node_loop, "_TROUBLE_S", 0.0)
    monkeypatch.setattr(superlink, "_FIRST_PAUSE_S", 0.001)
    server = Server()
    server.link = SuperLink(Connection("127.0.0.1:1", insecure=True), FaultReporter(lambda: None, lambda _: None))
    server.link._client = server  # type: ignore[assignment]
    return server


def live(server: Server, worker: Any = None) -> FakeWorker:
    """Answer all messages that there are."""
    worker = worker or FakeWorker()
    server.link.join()
    with pytest.raises(superlink._Left):
        node_loop.answer_messages(server.link, worker)
    return worker


def test_each_message_has_its_own_reply(server: Server) -> None:
    first, second = server.put(OLD, "one"), server.put(NEW, "two")
    live(server)
    assert server.replies == [(first.object_id, "one"), (second.object_id, "two")]
    assert server.announced is not None
    assert server.announced.metadata.src_node_id == NODE and server.announced.metadata.dst_node_id == 1


def test_a_run_that_stops_during_a_job(server: Server) -> None:
    server.put(OLD, "old")
    new = server.put(NEW, "new")
    worker = FakeWorker()
    worker.on["old"] = lambda: server.stopped.add(OLD)
    live(server, worker)
    assert server.replies == [(new.object_id, "new")]


def test_a_run_that_stops_before_its_answer_is_sent(server: Server) -> None:
    server.put(OLD, "old")
    new = server.put(NEW, "new")
    server.on["PushMessages"] = lambda: server.stopped.add(OLD)
    live(server)
    assert server.replies == [(new.object_id, "new")]


def test_a_worker_that_ends_is_an_error_of_its_message(server: Server) -> None:
    def end() -> None:
        raise WorkerDeath("signal 9")

    old, new = server.put(OLD, "old"), server.put(OLD, "new")
    worker = FakeWorker()
    worker.on["old"] = end
    live(server, worker)
    assert server.replies == [(old.object_id, "signal 9"), (new.object_id, "new")]


def test_a_message_that_does_not_come_whole(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "_MISSING_S", 0.1)
    partial, new = server.put(OLD, "partial", whole=False), server.put(OLD, "new")
    gone = server.put(NEW, "gone")
    del server.contents[gone.content["text.0"].object_id]
    assert live(server).asked == ["new"]
    assert [name for name, _ in server.replies] == [partial.object_id, new.object_id, gone.object_id]
    assert "whole" in server.replies[0][1] and "whole" in server.replies[2][1]


def test_a_part_that_comes_late_is_waited_for(server: Server) -> None:
    late = server.put(OLD, "late", whole=False)
    with no_object_id_recompute():
        whole = {name: part.deflate() for name, part in get_all_nested_objects(late).items()}
    timer = threading.Timer(0.2, lambda: server.contents.update(whole))
    timer.start()
    live(server)
    assert server.replies == [(late.object_id, "late")]


def test_a_message_of_its_own_costs_one_object(server: Server) -> None:
    """All else is shared: its records, and the list of them. Small parts are in the label."""
    server.put(OLD, "text")  # sets the task's identity
    state = transport.make_part("state", b"shared")
    messages = [
        transport.make_request(node, "train", {"header": bytes([node]), "state": state}, 60.0, 0) for node in (1, 2, 3)
    ]
    stored: list[str] = []

    def announce(_: Any, trees: list[Any]) -> Any:
        names = [each.object_id for tree in trees for each in iterate_object_tree(tree)]
        return SimpleNamespace(objects_to_push=names, session_id="session")

    assert transport.push_whole(messages, announce, lambda _, name, __: stored.append(name) is None) is not None
    own = {message.object_id for message in messages}
    assert len(stored) == len(set(stored)) == 5 and own < set(stored)
    assert [transport.read_parts(message)["header"] for message in messages] == [b"\1", b"\2", b"\3"]
    assert transport.push_whole(messages, announce, lambda *_: False) is None


def test_records_of_a_reply_come_last(server: Server) -> None:
    """The server confirms a reply when it has them, which deletes it: an object that came later is not stored."""
    message = server.put(OLD, "text")
    reply = transport.make_reply(message, {"answer": transport.make_part("answer", b"0123456789")})
    stored: list[str] = []

    def announce(_: Any, trees: list[Any]) -> Any:
        return SimpleNamespace(objects_to_push=[n.object_id for n in iterate_object_tree(trees[0])], session_id="")

    assert transport.push_whole([reply], announce, lambda _, name, __: stored.append(name) is None) is not None
    assert stored[-1] == reply.content["answer.0"].object_id and len(stored) == 3


def test_a_reply_in_a_label_may_be_confirmed_at_once(server: Server) -> None:
    """Its objects are then not stored, and it is not announced again."""
    message, announced = server.put(OLD, "text"), list[int]()
    reply = transport.make_reply(message, {"answer": b"small"})
    assert not reply.content and transport.read_parts(reply) == {"answer": b"small"}

    def announce(_: Any, trees: list[Any]) -> Any:
        announced.append(len(trees))
        return SimpleNamespace(objects_to_push=[n.object_id for n in iterate_object_tree(trees[0])], session_id="")

    assert transport.push_whole([reply], announce, lambda *_: False) is not None
    assert announced == [1]


@pytest.mark.parametrize("label", ["", "3", "3 soon 1.0", "3 inf 1.0", "3 1.0 nan", "3 -1.0 1.0"])
def test_a_label_without_a_pace_says_nothing(label: str) -> None:
    assert transport.read_pace(label) == transport.Pace()
    assert transport.read_pace("3 20.5 1.2 header=AA==") == transport.Pace(20.5, 1.2)


def test_a_malformed_label_is_an_error_of_its_message(server: Server) -> None:
    bad, new = server.put(OLD, "bad"), server.put(OLD, "new")
    bad.metadata.group_id = "0 0.0 0.0 header=?"
    assert live(server).asked == ["new"]
    assert server.replies[-1] == (new.object_id, "new")


def test_what_is_refused_is_announced_once_more(server: Server) -> None:
    """All others are stored by then."""
    server.put(OLD, "text")
    parts = [{"text": transport.make_part("text", bytes([node]))} for node in (1, 2, 3)]
    messages = [transport.make_request(node, "query", part, 60.0, 0) for node, part in enumerate(parts)]
    stored, refused, announced = set[str](), [messages[0].object_id, messages[2].object_id], list[int]()

    def announce(_: Any, trees: list[Any]) -> Any:
        names = {each.object_id for tree in trees for each in iterate_object_tree(tree)} - stored
        announced.append(len(names))
        return SimpleNamespace(objects_to_push=names, session_id="session")

    def push(_: str, name: str, __: bytes) -> bool:
        if name in refused:
            refused.remove(name)
            return False
        stored.add(name)
        return True

    assert transport.push_whole(messages, announce, push) is not None
    assert announced == [9, 2]


def test_records_alone_are_pulled(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_RECORD_BYTES", 2)
    monkeypatch.setattr(transport, "_LABEL_BYTES", 2)
    message = server.put(OLD, "seven")
    live(server)
    assert server.replies == [(message.object_id, "seven")]
    assert server.pulled == [record.object_id for record in message.content.values()] and len(server.pulled) == 3
    assert list(server.pushed)[-1] == server.announced_records[0], "the server looks for it first"


def test_a_foreign_message_gets_an_error_and_no_worker(server: Server) -> None:
    server.put(OLD, "text")  # sets the task's identity
    server.messages.clear()
    foreign = server.put_message(Message(RecordDict({"job": ConfigRecord({"number": 1})}), NODE, "query"))
    assert live(server).asked == []
    [(name, reason)] = server.replies
    assert name == foreign.object_id and "number" in reason


@pytest.mark.parametrize("method", ["PullMessages", "PullObject"])
def test_an_error_of_the_superlink_costs_one_message_at_most(method: str, server: Server) -> None:
    server.put(OLD, "old")
    new = server.put(OLD, "new")

    def fail() -> None:
        del server.on[method]
        raise error(500)

    server.on[method] = fail
    live(server)
    assert server.replies[-1] == (new.object_id, "new")


def test_an_answer_that_is_not_taken_is_an_error_of_its_message(server: Server) -> None:
    old, new = server.put(OLD, "old"), server.put(OLD, "new")

    def fail() -> None:
        del server.on["PushMessages"]
        raise error(500)

    server.on["PushMessages"] = fail
    live(server)
    assert [name for name, _ in server.replies] == [old.object_id, new.object_id]
    assert "500" in server.replies[0][1] and server.replies[1][1] == "new"


def test_a_superlink_that_is_away_is_asked_again(server: Server) -> None:
    message, failures = server.put(OLD, "text"), [error(503), httpx.ConnectError(""), httpx.ReadTimeout("")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    server.on["PushObject"] = fail
    live(server)
    assert server.replies == [(message.object_id, "text")] and not failures


@pytest.mark.parametrize("method", ["PushMessages", "PushObject"])
def test_an_answer_is_sent_once_where_a_confirmation_is_lost(method: str, server: Server) -> None:
    message, new = server.put(OLD, "text"), server.put(OLD, "new")

    def lose() -> None:
        del server.after[method]
        raise httpx.ReadTimeout("")

    server.after[method] = lose
    live(server)
    assert server.replies == [(message.object_id, "text"), (new.object_id, "new")]


def test_a_job_beyond_its_time_is_not_waited_for(server: Server) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = OLD, 1, 1
    job = transport.make_request(NODE, "train", {"text": b"job"}, 0.2, 0)
    server.put_message(job)
    new = server.put(OLD, "new")
    worker = FakeWorker()
    worker.on["job"] = lambda: time.sleep(0.3)
    assert live(server, worker).asked == ["job", "new"]
    assert server.replies == [(new.object_id, "new")]


@pytest.mark.parametrize("look_s", [0.0, 2.0, 12.0])
@pytest.mark.parametrize("due", [0.0, 0.2, 5.0, 60.0])
@pytest.mark.parametrize("share", [0.3, 1.0, 1.5, 20.0])
def test_looks_for_a_message_follow_what_the_server_says(due: float, share: float, look_s: float) -> None:
    """A message that comes when it is due or later waits for a pause; one that comes before it, for 18 s at most."""
    arrival, clock, looks = due * share or share, 0.0, 0
    while clock < arrival:
        clock, looks = clock + node_loop.compute_pause(clock, due, look_s), looks + 1
    if share >= 1.0:
        assert clock - arrival <= max(look_s, 0.1, min((arrival - due) / 4, 10.0)) + 1e-9
    assert clock - arrival <= 18.0
    if share == 1.0:
        assert looks <= 1 + due / 18 or not due, "none before it is due, in a short round"
    assert node_loop.compute_pause(1e6, due, look_s) == max(10.0, look_s)
    assert node_loop.compute_pause(0.0, due, 1e6) <= 15.0 or due > 15.0


def test_a_node_does_not_look_while_it_has_just_been_told_to_wait(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(server.link, "rest", rests.append)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = OLD, 1, 1
    pace = transport.Pace(next_s=20.0, look_s=2.0)
    server.put_message(transport.make_request(NODE, "train", {"text": b"job"}, 60.0, 0, pace))
    live(server)
    assert 13.5 < rests[0] < 14.0 * 1.1


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_busy_superlink_is_asked_rarely(seconds: float, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(server.link, "rest", rests.append)
    server.on["PullMessages"] = lambda: time.sleep(seconds)
    live(server)
    assert rests[0] >= 6.0 if seconds else 3.0 <= rests[0] < 6.0


@pytest.mark.parametrize(("seconds", "lease"), [(2.0, 15.0), (20.0, 20.0), (600.0, 30.0)])
def test_heartbeats_are_rarer_in_long_rounds(
    seconds: float, lease: float, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[float] = []
    monkeypatch.setattr(server.link._left, "wait", lambda pause: beats.append(pause) or len(beats) > 1)
    monkeypatch.setattr(server, "_SendNodeHeartbeat", lambda request: beats.append(request.heartbeat_interval))
    server.link.note_round(seconds)
    server.link._beat()
    assert beats == [0.8 * lease, lease, 0.8 * lease]


@pytest.mark.parametrize(("status", "code", "lasting"), [(401, 0, False), (403, 2004, False), (403, 2001, True)])
def test_refusals_end_the_loop(status: int, code: int, lasting: bool, server: Server) -> None:
    def fail() -> None:
        raise error(status, code)

    server.link.join()
    server.on["PullMessages"] = fail
    with pytest.raises(Refusal) as refused:
        node_loop.answer_messages(server.link, FakeWorker())  # type: ignore[arg-type]
    assert refused.value.fault.lasting is lasting


def test_a_wrong_clock_is_a_lasting_fault(server: Server) -> None:
    import email.utils

    def fail() -> None:
        raise error(401, headers={"date": email.utils.formatdate(time.time() - 60, usegmt=True)})

    server.on["ActivateNode"] = fail
    with pytest.raises(Refusal) as refused:
        server.link.join()
    assert refused.value.fault.lasting and "60 s" in refused.value.fault.cause


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_lasting_fault_ends_a_node_that_has_not_joined(is_joined: bool, server: Server) -> None:
    """A certificate that expires is renewed: a node that was admitted waits for that."""
    left = 3

    def fail() -> None:
        nonlocal left
        left -= 1
        if left > 0:
            raise httpx.ConnectError("")

    server.link._reporter = FaultReporter(lambda: Fault("expired", lasting=True), lambda _: None)
    if is_joined:
        server.link.join()
        server.on["PullMessages"] = fail
        assert server.link.receive() is None
    else:
        server.on["ActivateNode"] = fail
        with pytest.raises(Refusal):
            server.link.join()


def test_a_page_in_place_of_an_answer_is_trouble(server: Server) -> None:
    def fail() -> None:
        raise ValueError("Invalid protobuf response payload")

    server.on["ActivateNode"] = fail
    with pytest.raises(Trouble):
        server.link.join()


def test_a_node_that_leaves_signs_off(server: Server) -> None:
    called = []
    server.on["DeactivateNode"] = lambda: called.append("deactivated")
    server.link.leave()
    assert not called, "it has never joined"
    server.link._left.clear()
    server.link.join()
    server.link.leave()
    assert called == ["deactivated"]
    with pytest.raises(superlink._Left):
        server.link.receive()


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "socks://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_an_error(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError):
        SuperLink(Connection("192.0.2.1:1", insecure=True), FaultReporter(lambda: None, lambda _: None))
