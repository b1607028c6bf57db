"""One message at a time, each with its own reply: what Flower's SuperNode needs so that it never goes deaf.

Its loop takes a message, waits for a reply, any reply, and sends that. So the node hears nothing more, or answers each
message with the reply to the one before, after

- a run that is stopped while the node confirms a message of it: the message is ignored, but its task and its reply
  stay, and from then on every reply leaves one message late;
- a process that ends without a reply: the loop waits for it for ever;
- a run that is stopped while a long job of it is being done: the loop waits for the job;
- a server that ends in the middle of sending: the loop waits for content that does not come;
- an error of the SuperLink (its database is locked for some seconds, say): the loop, or its heartbeat, ends.

`Turns` stands between the loop and its two halves and sees to it that a message that will not be answered is given up
with all that belongs to it. It leans on names inside Flower: see `fleetfit.fleet.warm.private_names`.
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

from fleetfit.fleet.logs import traced
from fleetfit.fleet.warm.private_names import CONNECTION, beat_every

_LOG = logging.getLogger("fleetfit")

_MISSING_S = 30.0  # that the content of a message may keep the node waiting, since the last piece of it came
_BEAT_S = 15.0  # between heartbeats, at most; the SuperLink takes a node that was killed for alive for two of them
_ASK_S = 15.0  # between two questions whether the run of the message still goes on, of many nodes perhaps


class Turns:
    """The two halves of the SuperNode's loop, as the loop calls them."""

    def __init__(self, pull: Callable[..., int | None], push: Callable[..., None], insert: Callable[..., None]) -> None:
        """Take Flower's own: what takes a message, what sends replies, and what puts a reply in."""
        self._pull, self._push, self._insert = pull, push, insert
        self._turn: _Turn | None = None

    def pull(self, *, state: Any, object_store: Any, receive: Any, get_run: Any, pull_object: Any, **more: Any) -> Any:
        """Take a message; what belongs to one that cannot be had is given up."""
        self._turn = turn = _Turn(state, object_store, get_run, self._insert)
        try:
            run = self._pull(
                state=turn,
                object_store=object_store,
                receive=turn.noting(receive),
                get_run=get_run,
                pull_object=turn.patient(pull_object),
                **more,
            )
        except httpx.HTTPStatusError as error:  # of the SuperLink; Flower's loop would end
            if not error.response.is_server_error:
                raise
            _LOG.warning("the SuperLink has an error (%d); the node goes on.", error.response.status_code)
            run = None
        if run is None:
            turn.give_up("it could not be taken")
            return turn.answered_anyway()
        traced("whole", turn.id)
        return run

    def push(self, *, state: Any, object_store: Any, **more: Any) -> None:
        """Send the reply to the message that was taken, and no other one."""
        turn = self._turn
        assert turn is not None and turn.has(state)
        try:
            self._push(state=turn, object_store=_Store(object_store, turn), **more)
            traced("sent", turn.id)
            turn.done()
        except _GivenUp as why:
            turn.give_up(str(why))


class _GivenUp(Exception):
    """A message will not be answered any more."""


class _Turn:
    """The node's state as the loop sees it during one message."""

    def __init__(self, state: Any, store: Any, get_run: Any, insert: Callable[..., None]) -> None:
        self._state, self._store, self._get_run, self._insert = state, store, get_run, insert
        self._message: Any = None
        self._task: int | None = None
        self._came_s = self._asked_s = time.monotonic()
        self._missing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    @property
    def id(self) -> str:
        """Id of the message, or ""."""
        return "" if self._message is None else str(self._message.metadata.message_id)

    def has(self, state: Any) -> bool:
        """Return whether this is about the same node."""
        return state is self._state

    # -- taking the message

    def noting(self, receive: Callable[[], Any]) -> Callable[[], Any]:
        """Return what receives a message, and notes which."""

        def received() -> Any:
            found = receive()
            if found is not None:
                self._message, self._came_s = found[0], time.monotonic()
                traced("taken", self.id, f"{found[0].metadata.message_type} of run {found[0].metadata.run_id}")
            return found

        return received

    def patient(self, pull_object: Callable[[int, str], bytes]) -> Callable[[int, str], bytes]:
        """Return what pulls a piece of the message, and gives up where none has come for a while."""

        def pulled(run: int, name: str) -> bytes:
            try:
                content = pull_object(run, name)
            except ObjectUnavailableError:
                if time.monotonic() - self._came_s < _MISSING_S:
                    raise
                self._missing = True
                raise ObjectPullError(name, f"nothing of the message has come for {_MISSING_S:.0f} s") from None
            self._came_s = time.monotonic()
            return content

        return pulled

    def create_task(self, **given: Any) -> int | None:
        """Create the task of the message, and note which."""
        self._task = self._state.create_task(**given)
        return self._task

    def answered_anyway(self) -> int | None:
        """Have the server told that the message has not come whole, if that is so; return the message's run then."""
        if self._message is None or not self._missing:
            return None
        self._fail("the message did not come whole")
        return int(self._message.metadata.run_id)

    # -- waiting for the reply

    def get_messages_legacy(self, **given: Any) -> list[Any]:
        """Return the reply to this message as soon as it is there; whatever answers another one is thrown away.

        Raises:
            _GivenUp: There will be none that anybody waits for.
        """
        over = self.over
        found = self._state.get_messages_legacy(**given)
        ours = [reply for reply in found if reply.metadata.reply_to_message_id == self.id]
        for reply in found:
            if reply not in ours:
                traced("stale", reply.metadata.reply_to_message_id)
                self._forget(reply.metadata.message_id, reply.metadata.reply_to_message_id)
        if ours:
            traced("replied", self.id)
        elif over:
            self._fail("the process of the message ended without an answer" + self._details())
            return list(self._state.get_messages_legacy(**given))
        elif time.monotonic() - self._asked_s > _ASK_S:
            self._ask()
        return ours

    @property
    def over(self) -> bool:
        """Whether the process of the message has ended; all that it has said is there then."""
        tasks = self._tasks()
        return bool(tasks) and all(task.status.status == Status.FINISHED for task in tasks)

    def _tasks(self) -> list[Any]:
        return [] if self._task is None else list(self._state.get_tasks(task_ids=[self._task]))

    def _details(self) -> str:
        """Return what is known of the end of the message's process, as the end of a sentence."""
        known = [str(task.status.details).rstrip(".") for task in self._tasks() if task.status.details]
        return f": {known[0]}" if known else ""

    def _ask(self) -> None:
        self._asked_s = time.monotonic()
        try:
            self._get_run(self._message.metadata.run_id)
        except RunNotRunningException:
            raise _GivenUp("its run has ended") from None
        except httpx.HTTPError:  # the SuperLink is in trouble; the answer is not there either
            return

    def _fail(self, reason: str) -> None:
        """Answer the message with an error."""
        _LOG.warning("%s.", reason)
        traced("failed", self.id, reason)
        reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=self._message)
        self._insert(reply, self._state, self._store)

    # -- the end

    def done(self) -> None:
        """Let go of the message's content, which its process may not have confirmed."""
        self._store.delete(self.id)

    def give_up(self, reason: str) -> None:
        """Forget the message and what belongs to it; the process that works on it ends, since its task has ended."""
        if self._message is None:
            return
        traced("given up", self.id, reason)
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
        """Return an object's content, or b"" where it is not there yet."""
        over = self._turn.over
        content = self._store.get(name)
        if content == b"" and over:
            raise RuntimeError("the process of the message ended before its answer was whole")
        return content


def lasting_heartbeat() -> None:
    """Have the SuperNode's heartbeat go on after an error of the SuperLink, which would end it for good.

    And have it come twice as often, so that a node that was killed is admitted again half a minute later.
    """
    module = importlib.import_module(CONNECTION)
    module.HEARTBEAT_DEFAULT_INTERVAL = _BEAT_S  # type: ignore[attr-defined]
    beat_every(_BEAT_S)
    sender = module.HeartbeatSender

    def lasting(beat: Callable[[], bool]) -> Any:
        def again() -> bool:
            try:
                return beat()
            except httpx.HTTPStatusError as error:
                if error.response.is_server_error:
                    return False
                raise

        return sender(again)

    module.HeartbeatSender = lasting  # type: ignore[attr-defined]
