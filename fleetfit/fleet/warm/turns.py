"""One message at a time, each with its own reply, for Flower's SuperNode.

Its loop takes a message, waits for any reply, and sends that. So the node receives no more messages, or answers each
one with the reply to the one before, after

- a run that is stopped while the node confirms a message of it: the message is ignored, but its task and its reply
  stay, and from then on every reply leaves one message late;
- a process that ends without a reply: the loop waits for it for ever;
- a run that is stopped while a long job of it is being done: the loop waits for the job;
- a server that ends in the middle of sending: the loop waits for content that does not come;
- an error of the SuperLink (its database is locked for some seconds, say): the loop, or its heartbeat, ends.

`Turns` wraps the two halves of the loop, and gives up a message that will not be answered, with its task and content.
It uses names inside Flower: see `fleetfit.fleet.warm.private_names`.
"""

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.supercore.run import RunNotRunningException

from fleetfit.fleet.logs import trace
from fleetfit.fleet.warm.private_names import CONNECTION, set_heartbeat

_LOG = logging.getLogger("fleetfit")

_MISSING_S = 30.0  # that the node waits for the next part of a message's content
_HEARTBEAT_S = 15.0  # between heartbeats, at most; the SuperLink notices a killed node after two of them
_ASK_S = 15.0  # between two questions whether the message's run has ended: many nodes may ask


class Turns:
    """The two halves of the SuperNode's loop, as the loop calls them."""

    def __init__(self, pull: Callable[..., int | None], push: Callable[..., None], insert: Callable[..., None]) -> None:
        """Wrap Flower's functions that take a message, send replies, and insert a reply."""
        self._pull, self._push, self._insert = pull, push, insert
        self._turn: _Turn | None = None

    def pull(self, *, state: Any, object_store: Any, receive: Any, get_run: Any, pull_object: Any, **more: Any) -> Any:
        """Take a message; give up one that does not come whole."""
        self._turn = turn = _Turn(state, object_store, get_run, self._insert)
        try:
            run = self._pull(
                state=turn,
                object_store=object_store,
                receive=turn.wrap_receive(receive),
                get_run=get_run,
                pull_object=turn.wrap_pull(pull_object),
                **more,
            )
        except httpx.HTTPStatusError as error:  # of the SuperLink; Flower's loop would end
            if not error.response.is_server_error:
                raise
            _LOG.warning("the SuperLink has an error (%d); the node continues.", error.response.status_code)
            run = None
        if run is None:
            turn.give_up("it could not be taken")
            return turn.report_missing()
        trace("whole", turn.id)
        return run

    def push(self, *, state: Any, object_store: Any, **more: Any) -> None:
        """Send the reply to the message that was taken, and no other one."""
        turn = self._turn
        assert turn is not None and turn.is_of(state)
        try:
            self._push(state=turn, object_store=_Store(object_store, turn), **more)
            trace("sent", turn.id)
            turn.finish()
        except _GivenUp as reason:
            turn.give_up(str(reason))


class _GivenUp(Exception):
    """A message will not be answered any more."""


class _Turn:
    """The node's state as the loop sees it during one message."""

    def __init__(self, state: Any, store: Any, get_run: Any, insert: Callable[..., None]) -> None:
        self._state, self._store, self._get_run, self._insert = state, store, get_run, insert
        self._message: Any = None
        self._task: int | None = None
        self._received_at = self._asked_at = time.monotonic()
        self._missing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    @property
    def id(self) -> str:
        """Id of the message, or ""."""
        return "" if self._message is None else str(self._message.metadata.message_id)

    def is_of(self, state: Any) -> bool:
        """Return whether this is the state of the same node."""
        return state is self._state

    # -- taking the message

    def wrap_receive(self, receive: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that receives a message, and records it."""

        def receive_message() -> Any:
            received = receive()
            if received is not None:
                self._message, self._received_at = received[0], time.monotonic()
                metadata = received[0].metadata
                trace("taken", self.id, f"{metadata.message_type} of run {metadata.run_id}")
            return received

        return receive_message

    def wrap_pull(self, pull_object: Callable[[int, str], bytes]) -> Callable[[int, str], bytes]:
        """Return a function that pulls a part of the message, and gives up where none has come for a while."""

        def pull(run: int, name: str) -> bytes:
            try:
                content = pull_object(run, name)
            except ObjectUnavailableError:
                if time.monotonic() - self._received_at < _MISSING_S:
                    raise
                self._missing = True
                raise ObjectPullError(name, f"nothing of the message has come for {_MISSING_S:.0f} s") from None
            self._received_at = time.monotonic()
            return content

        return pull

    def create_task(self, **arguments: Any) -> int | None:
        """Create the task of the message, and record it."""
        self._task = self._state.create_task(**arguments)
        return self._task

    def report_missing(self) -> int | None:
        """Report to the server that the message has not come whole, if so, and return the message's run."""
        if self._message is None or not self._missing:
            return None
        self._fail("the message did not come whole")
        return int(self._message.metadata.run_id)

    # -- waiting for the reply

    def get_messages_legacy(self, **arguments: Any) -> list[Any]:
        """Return the reply to this message as soon as it has come; drop replies to other messages.

        Raises:
            _GivenUp: The run has ended.
        """
        is_over = self.is_over
        replies = self._state.get_messages_legacy(**arguments)
        ours = [reply for reply in replies if reply.metadata.reply_to_message_id == self.id]
        for reply in replies:
            if reply not in ours:
                trace("stale", reply.metadata.reply_to_message_id)
                self._forget(reply.metadata.message_id, reply.metadata.reply_to_message_id)
        if ours:
            trace("replied", self.id)
        elif is_over:
            self._fail("the process of the message ended without an answer" + self._format_details())
            return list(self._state.get_messages_legacy(**arguments))
        elif time.monotonic() - self._asked_at > _ASK_S:
            self._check_run()
        return ours

    @property
    def is_over(self) -> bool:
        """Whether the process of the message has ended; all that it has said is there then."""
        tasks = self._get_tasks()
        return bool(tasks) and all(task.status.status == Status.FINISHED for task in tasks)

    def _get_tasks(self) -> list[Any]:
        return [] if self._task is None else list(self._state.get_tasks(task_ids=[self._task]))

    def _format_details(self) -> str:
        """Return why the message's process has ended, as the end of a sentence; "" if unknown."""
        details = [str(task.status.details).rstrip(".") for task in self._get_tasks() if task.status.details]
        return f": {details[0]}" if details else ""

    def _check_run(self) -> None:
        self._asked_at = time.monotonic()
        try:
            self._get_run(self._message.metadata.run_id)
        except RunNotRunningException:
            raise _GivenUp("its run has ended") from None
        except httpx.HTTPError:  # the SuperLink is in trouble; the answer is not there either
            return

    def _fail(self, reason: str) -> None:
        """Answer the message with an error."""
        _LOG.warning("%s.", reason)
        trace("failed", self.id, reason)
        reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=self._message)
        self._insert(reply, self._state, self._store)

    # -- the end

    def finish(self) -> None:
        """Delete the message's content, which its process may not have confirmed."""
        self._store.delete(self.id)

    def give_up(self, reason: str) -> None:
        """Delete the message, its task and its content; its process ends with the task."""
        if self._message is None:
            return
        trace("given up", self.id, reason)
        if self._task is not None:
            self._state.finish_task(self._task, sub_status=SubStatus.FAILED, details=reason)
        self._forget(self.id)

    def _forget(self, *messages: str) -> None:
        self._state.delete_messages(message_ids=list(messages))
        for name in messages:
            self._store.delete(name)


class _Store:
    """The node's objects as the loop sees them while it sends a reply, whose content may never come."""

    def __init__(self, store: Any, turn: _Turn) -> None:
        self._store, self._turn = store, turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, name: str) -> Any:
        """Return an object's content, or b"" where it has not come yet."""
        is_over = self._turn.is_over
        content = self._store.get(name)
        if content == b"" and is_over:
            raise RuntimeError("the process of the message ended before its answer was whole")
        return content


def keep_heartbeat() -> None:
    """Have the SuperNode's heartbeat continue after an error of the SuperLink, which would end it.

    It also comes twice as often, so that a node that was killed is admitted again half a minute later.
    """
    module = importlib.import_module(CONNECTION)
    module.HEARTBEAT_DEFAULT_INTERVAL = _HEARTBEAT_S  # type: ignore[attr-defined]
    set_heartbeat(_HEARTBEAT_S)
    sender = module.HeartbeatSender

    def make_sender(beat: Callable[[], bool]) -> Any:
        def try_to_beat() -> bool:
            try:
                return beat()
            except httpx.HTTPStatusError as error:
                if error.response.is_server_error:
                    return False
                raise

        return sender(try_to_beat)

    module.HeartbeatSender = make_sender  # type: ignore[attr-defined]
