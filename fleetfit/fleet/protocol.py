"""What server and nodes say to each other, as nests for `fleetfit.messages`; whatever comes in is checked here first.

Server to node, in part `header`: `what` is one of
- hello: what may the server know of you? (`asks_budget`, `asks_labels`)
- setup: can you train this? (`problem`, `method`, `base`: the digest of what is never trained, or "")
- base: as setup, with those tensors in part `base`
- secure: a phase of a secure round, with a message of `fleetfit.secure` in part `secure` (see `member`)
- job: a job, with its tensors in parts `state` and `statistics`, which several nodes' messages share.
Node to server, in part `answer`: `hello`, `ready`, `reply` (of a job), `secure` (of a phase), `lost` (the base is not
there any more), or `refused` with a reason.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fleetfit.data import Data
from fleetfit.errors import RunError, one_line
from fleetfit.messages import pack, unpack
from fleetfit.method import is_portable
from fleetfit.planner import Budget
from fleetfit.values import DataDescription, NodeDescription

PROTOCOL = 1
_NAME = re.compile(r"[\w.-]{1,60}")
TOLERANCE = 0.1
"""Of a node that does not say how far a model may exceed its budget."""
_WORD = 300  # characters of a stranger's text that are believed
_MOST = 2**31  # classes, tokens, and numbers in a sample

Header = Mapping[str, Any]
_SETUP: Mapping[str, type] = {"run": str, "problem": dict, "method": dict, "base": str, "cost": str}
_WANTED: Mapping[str, Mapping[str, type]] = {
    "hello": {"asks_budget": bool, "asks_labels": bool}, "setup": _SETUP, "base": _SETUP,
    "job": {**_SETUP, "job": dict}, "secure": {**_SETUP, "job": dict, "secure": dict},
}  # fmt: skip


def packed(nest: Mapping[str, Any]) -> bytes:
    """Return an answer or a header as bytes."""
    return pack({"protocol": PROTOCOL, **nest})


def refusal(reason: str) -> bytes:
    """Return the answer that refuses a message."""
    return packed({"refused": reason})


def checked_header(nest: Any) -> Header:
    """Return a header whose outline is right.

    Raises:
        RunError: It is none, or of another version.
    """
    if not isinstance(nest, dict):
        raise RunError("a message's header is no table.")
    if not _ours(nest):
        raise RunError(
            f"the server speaks version {_version(nest)} of the protocol, and this node version {PROTOCOL}. "
            "Bring both to the same version of FleetFit."
        )
    wanted = _WANTED.get(nest["what"]) if isinstance(nest.get("what"), str) else None
    if wanted is None:
        raise RunError(f'a message asks for "{one_line(nest.get("what"), 60)}", which is unknown here.')
    if not is_portable(nest):
        raise RunError("a message's header has tensors in it.")
    for key in _keys(nest):
        if not isinstance(key, str):
            raise RunError(f"a message's header has the key {one_line(repr(key), 40)}; keys must be text.")
    for key, kind in wanted.items():
        if not isinstance(nest.get(key), kind):
            raise RunError(f'a message\'s "{key}" is missing or of a wrong type.', key=key)
    return nest


def _keys(nest: Any) -> Iterator[Any]:
    """Yield the keys of all tables of a nest."""
    if isinstance(nest, Mapping):
        yield from nest
    if isinstance(nest, Mapping | list | tuple):
        for inner in nest.values() if isinstance(nest, Mapping) else nest:
            yield from _keys(inner)


def facts_of(data: Data) -> dict[str, Any]:
    """Return what a model needs to know of data, as plain values."""
    return {"name": data.name, "task": data.task, "sample_shape": list(data.sample_shape), "classes": data.classes,
            "vocabulary": data.vocabulary, "padding": data.padding}  # fmt: skip


def answer_of(content: bytes | bytearray) -> dict[str, Any]:
    """Return the nest of an answer.

    Raises:
        RunError: It is none, or of another version.
    """
    nest = unpack(content, bounded=True)
    if not isinstance(nest, dict):
        raise RunError("its answer is no table.")
    if not _ours(nest):
        raise RunError(f"it speaks version {_version(nest)} of the protocol, and the server {PROTOCOL}.")
    return nest


def key_of(header: Header) -> str:
    """Return what stands for the model that a header describes, data and all."""
    return json.dumps([header["problem"], header["base"]], sort_keys=True)


def digest_of(content: bytes | bytearray) -> str:
    """Return the SHA-256 of packed tensors, as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _ours(nest: Mapping[str, Any]) -> bool:
    return type(nest.get("protocol")) is int and nest["protocol"] == PROTOCOL


def _version(nest: Mapping[str, Any]) -> str:
    found = nest.get("protocol")
    return str(found) if type(found) is int and abs(found) < 2**63 else one_line(found, 40)


def hello_of(nest: Any) -> NodeDescription:
    """Return what a node told, every field looked at.

    Raises:
        RunError: Something in it is wrong.
    """
    if not isinstance(nest, Mapping):
        raise RunError("it sent no description of itself.", key="about")
    name, examples, labels = nest.get("name"), nest.get("examples"), nest.get("labels")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RunError("its name is not one of at most 60 letters, digits, dots and dashes.", key="name")
    if not isinstance(examples, Mapping) or not _count(examples.get("train")):
        raise RunError("its number of training samples is missing.", key="examples")
    facts, tolerance = _facts(nest.get("facts")), nest.get("tolerance", TOLERANCE)
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not 0 <= tolerance < 100:
        raise RunError("its tolerance must be a number of at least 0.", key="tolerance")
    if labels is not None and not (
        isinstance(labels, list) and len(labels) == facts.classes and all(map(_count, labels))
    ):
        raise RunError("its samples by class must be whole numbers, one for each class.", key="labels")
    if labels is not None and sum(labels) != examples["train"]:
        raise RunError("its samples by class do not add up to its training samples.", key="labels")
    return NodeDescription(name, facts, examples["train"], _budget(nest.get("budget")), float(tolerance),
                 None if labels is None else tuple(labels))  # fmt: skip


def _facts(nest: Any) -> DataDescription:
    if not isinstance(nest, Mapping):
        raise RunError("its description of the data is missing or wrong.", key="facts")
    try:
        shape = nest["sample_shape"]
        numbers = (nest["classes"], nest["vocabulary"], *shape)
        texts = (nest["name"], nest["task"])
        good = all(isinstance(t, str) and 0 < len(t) <= _WORD for t in texts) and all(map(_count, numbers))
        good = good and all(t.isprintable() for t in texts)
        good = good and type(nest["padding"]) is int and -(2**40) < nest["padding"] < 2**40
        good = good and isinstance(shape, list) and len(shape) <= 8
        good = good and 1 <= nest["classes"] <= _MOST and nest["vocabulary"] <= _MOST and math.prod(shape) <= _MOST
    except (KeyError, TypeError, IndexError):
        good = False
    if not good:
        raise RunError("its description of the data is missing or wrong.", key="facts")
    return DataDescription(*texts, tuple(shape), nest["classes"], nest["vocabulary"], nest["padding"])


def _budget(nest: Any) -> Budget | None:
    if nest is None or _amount(nest):
        return nest
    if isinstance(nest, Mapping) and 0 < len(nest) <= 16 and all(map(_amount, nest.values())) and all(map(_word, nest)):
        return dict(nest)
    raise RunError("its budget must be an amount or a table of amounts.", key="budget")


def _word(key: Any) -> bool:
    return isinstance(key, str) and 0 < len(key) <= 60 and key.isprintable()


def _amount(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= 40 and value.isprintable()
    return type(value) in (int, float) and 0 < value < 1e30  # neither infinite nor NaN


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**40
