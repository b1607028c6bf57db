"""A Flower grid in this process: each message is answered at once by the real client app, with one node per file.

`_runtime_client` has the requests by which a server app sends messages and gets replies.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tomli_w
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.node_pb2 import Node
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fleetfit.fleet.client_app import app


class LocalGrid(Grid):
    """Nodes 101, 102, ... of configuration files; `offline` are away, `twist` may change or lose a reply.

    `late` are messages whose replies are announced, and do not come.
    """

    def __init__(self, configs: Iterable[Path]) -> None:
        self.contexts = {
            101 + i: Context(1, 101 + i, {"config": str(path)}, RecordDict(), {}) for i, path in enumerate(configs)
        }
        self.offline: set[int] = set()
        self.replies: dict[str, Message | None] = {}
        self.sent: list[Message] = []
        self.confirmed: list[str] = []
        self.twist: Callable[[Message, Message], Message | None] = lambda message, reply: reply
        self.late: set[str] = set()
        self.node, self._runtime_client = Node(node_id=1), self
        self._objects: dict[str, tuple[str, bytes]] = {}
        self._announced: dict[str, list[str]] = {}
        self._pushed: dict[str, bytes] = {}
        self._turn = threading.Lock()
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def set_run(self, run: Any) -> None:
        """There is one run."""

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        raise NotImplementedError

    def get_nodes(self) -> Any:
        raise NotImplementedError

    def send_and_receive(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        raise NotImplementedError

    def PushMessages(self, request: Any) -> Any:
        trees = {tree.object_id: [each.object_id for each in iterate_object_tree(tree)]
                 for tree in request.message_object_trees}  # fmt: skip
        self._announced |= trees
        missing = {name: None for names in trees.values() for name in names if name not in self._pushed}
        return SimpleNamespace(message_ids=list(trees), objects_to_push=list(missing), session_id="session")

    def PushObject(self, request: Any) -> Any:
        self._pushed[request.object_id] = request.object_content
        for root, names in list(self._announced.items()):
            if all(name in self._pushed for name in names):
                del self._announced[root]
                message: Any = inflate_object_from_contents(root, dict(self._pushed))
                message.metadata.__dict__["_message_id"] = root
                self._push(message)
        return SimpleNamespace(stored=True)

    def _push(self, message: Message) -> None:
        with self._turn:
            self.sent.append(message)
            node, name = message.metadata.dst_node_id, message.metadata.message_id
            TaskIdentity.node_id = node  # becomes the reply's source
            try:
                reply = app(message=message, context=self.contexts[node])
            except Exception as error:
                reply = Message(Error(2, repr(error)), reply_to=message)
            finally:
                TaskIdentity.node_id = 1
            self.replies[name] = self.twist(message, reply)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        with self._turn:
            replies = [self.replies.pop(name) for name in message_ids if self.replies.get(name) is not None]
        return [reply for reply in replies if reply is not None]

    def PullMessages(self, request: Any) -> Any:
        replies = self.pull_messages(list(request.message_ids))
        for reply in replies:
            answered = reply.metadata.reply_to_message_id
            self._objects |= {name: (answered, o.deflate()) for name, o in get_all_nested_objects(reply).items()}
        return SimpleNamespace(
            messages_list=[message_to_proto(remove_content_from_message(reply)) for reply in replies],
            message_object_trees=[get_object_tree(reply) for reply in replies],
        )

    def PullObject(self, request: Any) -> Any:
        assert (request.node.node_id, request.run_id) == (1, 1)
        message, content = self._objects[request.object_id]
        is_there = message not in self.late
        return SimpleNamespace(
            object_found=True, object_available=is_there, object_content=content if is_there else b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)
        self._objects.pop(request.message_object_id, None)


def node_file(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """Write a node's configuration, in a folder of its own."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "node.toml").write_text(tomli_w.dumps({"name": name, **settings}))
    return place / "node.toml"
