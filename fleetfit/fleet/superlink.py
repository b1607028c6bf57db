"""A SuperLink as a node sees it: Flower's Fleet API, one call for each step of a message.

A node uses names inside Flower in this module alone, and replaces none of them; `tests/fleet/test_fence.py` lists them.
A request is repeated while the SuperLink is away. Its other answers are exceptions: `Refusal`, `RunOver`, `Trouble`.
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from flwr.app import ConfigRecord, Message
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.common.serde import message_from_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fleetfit.errors import ConfigError, format_exception, one_line
from fleetfit.fleet import transport
from fleetfit.fleet.certificates import load_node_key
from fleetfit.fleet.connection import GATEWAY, Connection, Fault, FaultReporter, find_clock_fault
from fleetfit.fleet.failover import Failover

_LEASE_S, _MAX_LEASE_S = 15.0, 30.0  # the SuperLink counts a node as lost after two of them without a heartbeat
_BEAT_SHARE = 0.8  # of a lease, between two heartbeats
_MISSING_S = 30.0  # that the node waits for the next part of a message
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 5.0  # between two tries to reach the SuperLink
_FIRST_LOOK_S, _LAST_LOOK_S = 0.1, 0.5  # between two looks for a part that is still being sent
_NO_KEY, _NOT_ACTIVATED, _RUN_OVER = 2001, 2004, (2007, 2008)  # Flower's codes of errors


class Refusal(Exception):
    """The SuperLink does not admit this node; `fault` says why, and whether waiting cannot help."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.cause)
        self.fault = fault


class RunOver(Exception):
    """The run of a message has ended."""


class Trouble(Exception):
    """The SuperLink has an error of its own, such as a locked database."""


class Incomplete(Exception):
    """A message did not come whole, or cannot be read."""


class _Left(BaseException):
    """The node has left: no handler of errors keeps its loop alive."""


class SuperLink:
    """The connection to a SuperLink, or one of several, from `join` to `leave`, which another thread may call."""

    def __init__(self, connection: Connection, reporter: FaultReporter) -> None:
        """Connect to nothing yet.

        Raises:
            ConfigError: The key cannot be read, or the proxy of the environment cannot be used.
        """
        if connection.key is None:
            private, _ = generate_key_pairs()
        else:
            private = load_node_key(connection.key.expanduser())
        authority = connection.root_certificates
        self._registers = connection.key is None
        self._key = public_key_to_bytes(private.public_key())
        self._reporter = reporter
        root = None if authority is None else authority.expanduser().read_bytes()
        self._failover = Failover(connection.superlinks)
        try:
            self._client = FleetHttpClient.from_server_address(
                connection.superlink,
                connection.insecure,
                root,
                [
                    self._failover,  # the first one, so that each try is signed anew
                    RuntimeVersionHttpInterceptor("SuperNode"),
                    NodeAuthHttpInterceptor(private, private.public_key()),
                ],
            )
        except (ImportError, ValueError) as error:  # httpx's, of a proxy in the environment
            raise ConfigError(
                f"a proxy that the environment names cannot be used: {one_line(error, 300)} Unset it, or add the "
                "SuperLink to no_proxy."
            ) from None
        self._node = Node()
        self._left = threading.Event()
        self._lease_s = _MAX_LEASE_S
        self._jitter = random.Random()  # noqa: S311 - so that nodes do not come back all at once

    @property
    def address(self) -> str:
        """Address of the SuperLink that answered last."""
        return self._failover.address

    # ---- from joining to leaving

    def join(self) -> int:
        """Have the SuperLink admit this node, send heartbeats from now on, and return the node's id.

        Raises:
            Refusal: It is not admitted.
            Trouble: The SuperLink has an error.
        """
        if self._registers:
            self._call(self._client.RegisterNode, RegisterNodeFleetRequest(public_key=self._key))
        request = ActivateNodeRequest(public_key=self._key, heartbeat_interval=self._lease_s)
        node = int(self._call(self._client.ActivateNode, request).node_id)
        self._node = Node(node_id=node)
        threading.Thread(target=self._beat, daemon=True, name="fleetfit-heartbeat").start()
        return node

    def leave(self) -> None:
        """Sign off, if the SuperLink can be reached, and end all requests."""
        self._left.set()
        with contextlib.suppress(httpx.HTTPError, ValueError, RuntimeError), self._client:
            if self._node.node_id:
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))
                if self._registers:
                    self._client.UnregisterNode(UnregisterNodeFleetRequest(node_id=self._node.node_id))

    def rest(self, seconds: float) -> None:
        """Wait.

        Raises:
            _Left: The node has left meanwhile.
        """
        if self._left.wait(seconds):
            raise _Left

    def _beat(self) -> None:
        """Send heartbeats; what goes wrong here, the next request of the loop meets too."""
        while not self._left.wait(_BEAT_SHARE * self._lease_s):
            with contextlib.suppress(Exception):
                request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=self._lease_s)
                self._client.SendNodeHeartbeat(request)

    def note_round(self, seconds: float) -> None:
        """Have heartbeats follow the time from one message to the next: in long rounds they become rarer."""
        self._lease_s = min(max(seconds, _LEASE_S), _MAX_LEASE_S)

    # ---- messages

    def receive(self) -> tuple[Message, Any] | None:
        """Return the next message, without its content, and the tree of its objects; None if there is none."""
        answer = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not answer.messages_list:
            return None
        return message_from_proto(answer.messages_list[0]), answer.message_object_trees[0]

    def fetch(self, message: Message, tree: Any) -> dict[str, bytearray]:
        """Return the parts of a message.

        Raises:
            Incomplete: They did not come whole, or are not parts.
            RunOver: Its run has ended.
        """
        run = message.metadata.run_id
        contents = [self._pull(run, record.object_id) for content in tree.children for record in content.children]
        try:
            records = [ConfigRecord.inflate(contents.pop()) for _ in range(len(contents))]
            return transport.join_records(records) | transport.read_label(message.metadata.group_id)
        except Exception as error:  # content of a foreign server, in any form
            raise Incomplete(f"the message cannot be read: {format_exception(error)}") from error

    def _pull(self, run: int, name: str) -> bytes:
        """Return an object of a message, which the server may still be sending."""
        began, pause = time.monotonic(), _FIRST_LOOK_S
        while True:
            answer = self._call(self._client.PullObject, PullObjectRequest(node=self._node, run_id=run, object_id=name))
            if answer.object_available:
                return bytes(answer.object_content)
            if not answer.object_found or time.monotonic() - began > _MISSING_S:
                raise Incomplete("the message did not come whole")
            self.rest(pause)
            pause = min(2 * pause, _LAST_LOOK_S)

    def send(self, reply: Message, seconds: float) -> None:
        """Send the reply to a message.

        Args:
            reply: With content or an error.
            seconds: How long the node worked for it.

        Raises:
            RunOver: Its run has ended.
            Trouble: The SuperLink does not take it.
        """
        run = reply.metadata.run_id

        def announce(metadata: list[Any], trees: list[Any]) -> Any:
            request = PushMessagesRequest(
                node=self._node,
                messages_list=metadata,
                message_object_trees=trees,
                clientapp_runtime_list=[seconds],
            )
            return self._call(self._client.PushMessages, request)

        def push(session: str, name: str, content: bytes) -> bool:
            request = PushObjectRequest(
                node=self._node, run_id=run, session_id=session, object_id=name, object_content=content
            )
            return bool(self._call(self._client.PushObject, request).stored)

        if transport.push_whole([reply], announce, push) is None:
            raise Trouble("it did not store a part of an answer")

    def is_running(self, run: int) -> bool:
        """Return whether a run continues: yes, if the SuperLink has an error."""
        try:
            self._call(self._client.GetRun, GetRunRequest(node=self._node, run_id=run))
        except RunOver:
            return False
        except Trouble:
            return True
        return True

    # ---- requests

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Send a request until it is answered.

        Raises:
            Refusal, RunOver, Trouble: By the answer.
        """
        pause = _FIRST_PAUSE_S
        while not self._left.is_set():
            try:
                answer = method(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in GATEWAY:
                    raise _explain(error.response) from None
                failure: Exception = error
            except httpx.TransportError as error:
                failure = error
            except Exception as error:  # a proxy's page in place of an answer, or the client was closed by `leave`
                failure = error
                if not self._left.is_set():
                    raise Trouble(format_exception(error)) from error
            else:
                self._reporter.note_success()
                return answer
            if self._left.is_set():
                break
            fault = self._reporter.note_failure(failure)
            if fault is not None and fault.lasting and not self._node.node_id:
                raise Refusal(fault)
            self.rest(pause * self._jitter.uniform(0.8, 1.2))
            pause = min(2 * pause, _LAST_PAUSE_S)
        raise _Left


def _explain(response: httpx.Response) -> Exception:
    """Return what an answer with an error means."""
    try:
        code = json.loads(response.text)["code"]
    except (ValueError, TypeError, KeyError):
        code = None
    if response.status_code == httpx.codes.UNAUTHORIZED:
        ahead_s = SYSTEM_TIME_TOLERANCE
        clock = find_clock_fault(response.headers, ahead_s, TIMESTAMP_TOLERANCE + ahead_s)
        if clock:
            return Refusal(Fault(f"This device's clock {clock}", lasting=True))
        return Refusal(Fault("The SuperLink does not accept this node's signature. Is its key registered?"))
    if code == _NO_KEY:
        cause = "The SuperLink admits registered nodes only: give the private key of one, --key FILE."
        return Refusal(Fault(cause, lasting=True))
    if code == _NOT_ACTIVATED:
        return Refusal(
            Fault(
                "The SuperLink refuses the key: it is not registered, or its node counts as online, as one that was "
                "killed does for a minute. Register it: flwr supernode register KEY.pub SUPERLINK."
            )
        )
    if code in _RUN_OVER:
        return RunOver()
    return Trouble(f"HTTP {response.status_code}: {one_line(response.text, 300)}")
