"""A Flower grid in this process: each message is answered at once by the real client app, with one node per file.

`_runtime_client` has the three requests by which a server app gets replies.
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
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
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
        self.twist: Callable[[Message, Message], Message | None] = lambda message, reply: reply
        self.late: set[str] = set()
        self.node, self._runtime_client = Node(node_id=1), self
        self._objects: dict[str, tuple[str, bytes]] = {}
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
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        with self._turn:
            self.sent.append(message)
            node = message.metadata.dst_node_id
            name = f"{message.object_id}-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            TaskIdentity.node_id = node  # becomes the reply's source
            try:
                reply = app(message=message, context=self.contexts[node])
            except Exception as error:
                reply = Message(Error(2, repr(error)), reply_to=message)
            finally:
                TaskIdentity.node_id = 1
            self.replies[name] = self.twist(message, reply)
            return name

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
        del self._objects[request.message_object_id]


def node_file(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """Write a node's configuration, in a folder of its own."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "node.toml").write_text(tomli_w.dumps({"name": name, **settings}))
    return place / "node.toml"
