"""The SuperNode's loop with a fake SuperLink: whatever happens to a message, the next one gets its own reply."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

import flwr.supernode.start_client_internal as loop
import httpx
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import Status, SubStatus
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate import NodeStateFactory

from fleetfit.fleet.warm import turns
from fleetfit.fleet.warm.turns import Turns

NODE, OLD, NEW = 7, 1, 2  # the node, a run that is stopped, and the next one


class SuperLink:
    """What a node asks of a SuperLink, in this process."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.contents: dict[str, bytes] = {}
        self.stopped: set[int] = set()
        self.replies: list[tuple[str, str]] = []  # what was answered, and with what
        self.before_confirm: Callable[[], None] = lambda: None
        self.error = 0

    def send(self, run: int, text: str, whole: bool = True) -> Message:
        """Send the node a message."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 1, 1
        message = Message(RecordDict({"job": ConfigRecord({"text": text})}), NODE, "query")
        message.metadata.__dict__["_message_id"] = message.object_id
        with no_object_id_recompute():
            objects = get_all_nested_objects(message)
            self.contents |= {name: part.deflate() for name, part in objects.items()} if whole else {}
        self.messages.append(message)
        return message

    def receive(self) -> Any:
        if self.error:
            request = httpx.Request("POST", "https://superlink")
            raise httpx.HTTPStatusError("locked", request=request, response=httpx.Response(self.error, request=request))
        if not self.messages:
            return None
        message = self.messages.pop(0)
        with no_object_id_recompute():
            return message, get_object_tree(message)

    def going(self, run: int) -> None:
        if run in self.stopped:
            raise RunNotRunningException

    def get_run(self, run: int) -> Run:
        self.going(run)
        return Run.create_empty(run)

    def pull_object(self, run: int, name: str) -> bytes:
        self.going(run)
        if name not in self.contents:
            raise ObjectUnavailableError(name)
        return self.contents[name]

    def confirm(self, run: int, message: str) -> None:
        self.before_confirm()
        self.going(run)

    def push(self, message: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        self.going(message.metadata.run_id)
        reason = message.error.reason if message.has_error() else "an answer"
        self.replies.append((message.metadata.reply_to_message_id, str(reason)))
        return {tree.object_id}, "session"


class Node:
    """Flower's node, with the loop's two halves as given, and client apps that are told what to do."""

    def __init__(self, superlink: SuperLink, ours: bool = True) -> None:
        self.superlink = superlink
        self.store = ObjectStoreFactory(":flwr-in-memory:").store()
        self.state: Any = NodeStateFactory(objectstore_factory=ObjectStoreFactory(":flwr-in-memory:")).state()
        self.store = self.state.object_store
        self.state.set_node_id(NODE)
        halves = Turns(loop._pull_and_store_message, loop._push_messages, loop._insert_message)
        self.pull: Any = halves.pull if ours else loop._pull_and_store_message
        self.push: Any = halves.push if ours else loop._push_messages
        for run in (OLD, NEW):  # it knows the runs, so that no app need be sent
            self.state.store_run(Run.create_empty(run))

    def take(self) -> int | None:
        link = self.superlink
        run: int | None = self.pull(
            state=self.state, object_store=self.store, node_config={}, receive=link.receive, get_run=link.get_run,
            get_fab=lambda *_: Fab("", b"", {}), pull_object=link.pull_object, confirm_message_received=link.confirm,
            trusted_entities=None)  # fmt: skip
        return run

    def send(self) -> None:
        """Wait for the reply and send it, as the loop does; no longer than some seconds."""
        link, failed = self.superlink, list[BaseException]()

        def sending() -> None:
            try:
                self.push(state=self.state, object_store=self.store, send=link.push, push_object=lambda *_: None)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=sending, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "the node waits for a reply that never comes"
        assert not failed, failed

    # -- what the process of a message does

    def begin(self) -> tuple[int, str]:
        """Start the process of the oldest task; return the task and its token."""
        [task, *_] = self.state.get_tasks(statuses=[Status.PENDING], order_by="pending_at")
        token = self.state.claim_task(task.task_id)
        assert self.state.activate_task(task.task_id)
        return task.task_id, token

    def answer(self, message: Message, begun: tuple[int, str], whole: bool = True) -> None:
        """Answer a message, unless the process has been told to end, by a token that is not valid any more."""
        if self.state.get_task_by_token(begun[1]) is None:
            return
        self.store.delete(message.metadata.message_id)  # it confirms that it has it
        TaskIdentity.run_id, TaskIdentity.node_id = message.metadata.run_id, NODE
        reply = Message(RecordDict({"said": ConfigRecord({"to": message.metadata.message_id})}), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.state.record_message_processing_start(message.metadata.message_id)
        self.state.record_message_processing_end(message.metadata.message_id)
        with no_object_id_recompute():
            session = self.state.start_session(message.metadata.run_id)
            self.state.store_message_and_object_tree(reply, get_object_tree(reply), session)
            for name, part in get_all_nested_objects(reply).items() if whole else ():
                self.state.store_object(message.metadata.run_id, session, name, part.deflate())
        self.state.finish_task(begun[0], SubStatus.COMPLETED if whole else SubStatus.FAILED, "")


@pytest.fixture
def link() -> Iterator[SuperLink]:
    yield SuperLink()
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_ASK_S", 0.1)
    monkeypatch.setattr(turns, "_MISSING_S", 0.1)


def hears(node: Node) -> None:
    """See that a message gets its own reply, and that nothing is left."""
    message = node.superlink.send(NEW, "do you hear me?")
    before = len(node.superlink.replies)
    assert node.take() == NEW
    timer = threading.Timer(0.3, node.answer, (message, node.begin()))  # while the node waits for it
    timer.start()
    node.send()
    timer.join()
    assert node.superlink.replies[before:] == [(message.metadata.message_id, "an answer")]
    assert not node.state.msg_store and not len(node.store)
    assert {task.status.status for task in node.state.get_tasks()} == {Status.FINISHED}


def stopped_while_it_is_confirmed(node: Node) -> None:
    link = node.superlink
    old = link.send(OLD, "old")
    begun = list[tuple[int, str]]()

    def stop() -> None:
        begun.append(node.begin())
        link.stopped.add(OLD)

    link.before_confirm = stop
    assert node.take() is None
    link.before_confirm = lambda: None
    node.answer(old, begun[0])


def test_a_run_stopped_during_confirmation(link: SuperLink) -> None:
    node = Node(link)
    stopped_while_it_is_confirmed(node)
    hears(node)
    assert len(link.replies) == 1


def test_flower_alone_answers_late(link: SuperLink) -> None:
    """Why all this is needed; where it fails, Flower has mended it."""
    node = Node(link, ours=False)
    stopped_while_it_is_confirmed(node)
    first = link.send(NEW, "first")
    node.take()
    node.send()
    assert not link.replies
    node.answer(first, node.begin())
    link.send(NEW, "second")
    node.take()
    node.send()
    assert link.replies == [(first.metadata.message_id, "an answer")]


def test_replies_after_a_given_up_message(link: SuperLink) -> None:
    node = Node(link)
    old = link.send(OLD, "old")
    link.before_confirm = lambda: link.stopped.add(OLD)
    assert node.take() is None
    TaskIdentity.run_id, TaskIdentity.node_id = OLD, NODE
    loop._insert_message(Message(Error(2, "late"), reply_to=old), node.state, node.store)  # it was on its way
    hears(node)


def test_a_run_that_is_stopped_while_its_job_is_done(link: SuperLink) -> None:
    node = Node(link)
    link.send(OLD, "long")
    assert node.take() == OLD
    _, token = node.begin()
    link.stopped.add(OLD)
    node.send()
    assert node.state.get_task_by_token(token) is None, "the process of the job goes on"
    hears(node)


def test_a_job_that_takes_long_is_waited_for(link: SuperLink) -> None:
    node = Node(link)
    message = link.send(NEW, "long")
    assert node.take() == NEW
    begun = node.begin()
    timer = threading.Timer(1.5, node.answer, (message, begun))
    timer.start()
    node.send()
    timer.join()
    assert link.replies == [(message.metadata.message_id, "an answer")]
    hears(node)


def test_a_process_that_ends_without_a_reply(link: SuperLink) -> None:
    node = Node(link)
    message = link.send(NEW, "deadly")
    assert node.take() == NEW
    task, _ = node.begin()
    node.state.finish_task(task, SubStatus.FAILED, "it could not have its message")
    node.send()
    reason = "the process of the message ended without an answer: it could not have its message"
    assert link.replies == [(message.metadata.message_id, reason)]
    hears(node)


def test_a_process_that_ends_in_the_middle_of_its_reply(link: SuperLink) -> None:
    node = Node(link)
    message = link.send(NEW, "half")
    assert node.take() == NEW
    node.answer(message, node.begin(), whole=False)
    node.send()
    hears(node)


def test_a_server_that_ends_in_its_message(link: SuperLink) -> None:
    node = Node(link)
    message = link.send(NEW, "half", whole=False)
    began = time.monotonic()
    assert node.take() == NEW
    assert time.monotonic() - began < 60  # Flower's own: 500 times up to ten seconds
    node.send()
    assert [(name, bool(reason)) for name, reason in link.replies] == [(message.metadata.message_id, True)]
    hears(node)


def test_a_run_stopped_during_a_pull(link: SuperLink) -> None:
    node = Node(link)
    link.send(OLD, "old", whole=False)
    link.stopped.add(OLD)
    assert node.take() is None
    hears(node)


def test_a_locked_database_of_the_superlink(link: SuperLink) -> None:
    node = Node(link)
    link.error = 500
    assert node.take() is None
    link.error = 401
    with pytest.raises(httpx.HTTPStatusError):
        node.take()
    link.error = 0
    hears(node)
