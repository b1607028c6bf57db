"""Flower messages: named parts, each a run of bytes, whose meaning `fleetfit.messages` knows.

A part that several messages share (the state of a level) is the same Flower object in all of them, so that it is
stored once and sent to each node from there. Nothing in a message is pickled, and no label of Flower's is believed: a
part must be a vector of bytes.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

Part = bytes | bytearray | ArrayRecord

HOLD = "hold"
"""Part of a message that is answered only when a later one has come, or after a few seconds: see `roll`."""


def part(content: bytes) -> ArrayRecord:
    """Return a part that several messages may share."""
    return ArrayRecord({"bytes": Array(np.frombuffer(content, dtype=np.uint8))})


def request(node: int, kind: str, parts: Mapping[str, Part], ttl_s: float, round: int) -> Message:
    """Return a message to a node: kind "query", "train" or "evaluate"."""
    return Message(_records(parts), dst_node_id=node, message_type=kind, ttl=ttl_s, group_id=str(round))


def reply(message: Message, parts: Mapping[str, Part]) -> Message:
    """Return the reply to a message."""
    return Message(_records(parts), reply_to=message)


def _records(parts: Mapping[str, Part]) -> RecordDict:
    return RecordDict({name: p if isinstance(p, ArrayRecord) else part(bytes(p)) for name, p in parts.items()})


def parts_of(message: Message) -> dict[str, bytearray]:
    """Return the parts of a message.

    Raises:
        ValueError: It has something in it that is no vector of bytes.
    """
    found = {}
    for name, record in message.content.items():
        if not isinstance(record, ArrayRecord) or list(record) != ["bytes"]:
            raise ValueError(f'part "{str(name)[:40]}" of a message is no run of bytes.')
        array = record["bytes"].numpy()
        if array.dtype != np.uint8 or array.ndim != 1:
            raise ValueError(f'part "{str(name)[:40]}" of a message is no vector of bytes.')
        found[str(name)] = bytearray(array)
    return found
