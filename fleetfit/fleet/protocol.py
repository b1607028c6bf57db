"""The messages between server and nodes, as tables for `fleetfit.messages`, and the checks of incoming ones.

Server to node, in part `header`: `what` is one of
- hello: describe yourself, with the files of the fleet's transform in part `transform`
- setup: as hello, and can you train this? (`problem`, `method`, `base`: the digest of the tensors that are never
  trained, or "")
- base: as setup, with those tensors in part `base`
- secure: a phase of a secure round, with a message of `fleetfit.secure` in part `secure` (see `secure_aggregation`)
- job: a job, with its tensors in parts `state` and `statistics`, which several nodes' messages share.
Each has `run`, the run's `terms` (see `fleetfit.fleet.terms`), `needs`, the versions that a node must know (see
`make_needs`), and `transform`, the digest of the transform that prepares the nodes' samples, or "". All but the first
have `privacy`, the noise and the sampling of `[privacy]`.
Node to server, in part `answer`: `hello` (also to setup), `ready`, `reply` (of a job), `secure` (of a phase), `lost`
(the node has lost the base or the transform), or `refused` with a reason; and in each `log`, the head of its log.
"""

import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch

from fleetfit.anatomy.plan import FORMAT as PLAN
from fleetfit.config import Experiment
from fleetfit.core.arithmetic import NEWEST_RULE, MemoryFormat
from fleetfit.data import Data
from fleetfit.data.transform import COLUMNS, FILE, TOKENIZER, Transform
from fleetfit.errors import DataError, RunError, one_line
from fleetfit.files import parse_json, read_text
from fleetfit.fleet import PROTOCOL
from fleetfit.hooks import is_portable
from fleetfit.messages import FORMAT as ENVELOPE, pack, unpack
from fleetfit.names import drop_folders

RUN = re.compile(r"[0-9a-f]{8,64}")

Header = Mapping[str, Any]
_HELLO: Mapping[str, type] = {"run": str, "terms": dict, "needs": dict, "transform": str}
_SETUP: Mapping[str, type] = {**_HELLO, "problem": dict, "method": dict, "base": str, "cost": str, "privacy": dict}
_ENTRIES: Mapping[str, Mapping[str, type]] = {
    "hello": _HELLO, "setup": _SETUP, "base": _SETUP,
    "job": {**_SETUP, "job": dict}, "secure": {**_SETUP, "job": dict, "secure": dict},
}  # fmt: skip


def pack_message(table: Mapping[str, Any]) -> bytes:
    """Return an answer or a header as bytes."""
    return pack({"protocol": PROTOCOL, **table})


def pack_refusal(reason: str) -> bytes:
    """Return the answer that refuses a message."""
    return pack_message({"refused": reason})


_KNOWN: Mapping[str, tuple[Any, ...]] = {
    "envelope": (ENVELOPE,), "plan": (PLAN,), "memory_format": get_args(MemoryFormat),
}  # fmt: skip


def make_needs(experiment: Experiment) -> dict[str, Any]:
    """Return what a node must know for a run, and the FleetFit that asks for it.

    They are the format of messages, of the plan of a plain module, and the memory format or its rule.
    """
    engine, needs = experiment.engine, dict[str, Any](fleetfit=_get_version(), envelope=ENVELOPE)
    if ":" in str(experiment.model.name):
        needs["plan"] = PLAN
    memory_format = engine.memory_format or experiment.recorded.memory_format or NEWEST_RULE
    return needs if engine.speed == "fast" else {**needs, "memory_format": memory_format}


def _check_needs(needs: Mapping[str, Any]) -> None:
    """Refuse a run that needs what this FleetFit does not know.

    Raises:
        RunError: It does; its key is the entry.
    """
    for key, value in needs.items():
        if key != "fleetfit" and value not in _KNOWN.get(key, ()):
            own = " or ".join(map(str, _KNOWN.get(key, ()))) or "none"
            raise RunError(
                f"the run needs {one_line(key, 40)} {_format_version(value)} of FleetFit "
                f"{one_line(needs.get('fleetfit'), 40)}; this node, with FleetFit {_get_version()}, knows {own}. Bring "
                "both to the same version of FleetFit.",
                key=f"needs.{one_line(key, 40)}",
            )


@functools.cache
def _get_version() -> str:
    return importlib.metadata.version("fleetfit")


def check_header(table: Any) -> Header:
    """Return a header with all entries of its kind, each of the right type.

    Raises:
        RunError: It is malformed, or of another version.
    """
    if not isinstance(table, dict):
        raise RunError("a message's header is not a table.")
    if not _is_current(table):
        raise RunError(
            f"the server speaks version {_format_version(table.get('protocol'))} of the protocol, and this node "
            f"version {PROTOCOL}. Bring both to the same version of FleetFit."
        )
    entries = _ENTRIES.get(table["what"]) if isinstance(table.get("what"), str) else None
    if entries is None:
        raise RunError(f'a message is of the unknown kind "{one_line(table.get("what"), 60)}".')
    if not is_portable(table):
        raise RunError("a message's header has tensors in it.")
    for key in _iter_keys(table):
        if not isinstance(key, str):
            raise RunError(f"a message's header has the key {one_line(repr(key), 40)}; keys must be text.")
    if further := table.keys() - entries.keys() - {"protocol", "what"}:
        raise RunError(f"a message of its kind has no entry {one_line(', '.join(sorted(further)), 60)}.")
    if not RUN.fullmatch(str(table.get("run"))):
        raise RunError("a message does not name its run.", key="run")
    for key, kind in entries.items():
        if not isinstance(table.get(key), kind):
            raise RunError(f'a message\'s "{key}" is missing or of a wrong type.', key=key)
    _check_needs(table["needs"])
    return table


def iter_texts(table: Any) -> Iterator[str]:
    """Yield the texts in tables and lists, their keys included."""
    if isinstance(table, str):
        yield table
    elif isinstance(table, Mapping):
        for key, value in table.items():
            yield from iter_texts(key)
            yield from iter_texts(value)
    elif isinstance(table, list | tuple):
        for value in table:
            yield from iter_texts(value)


def _iter_keys(table: Any) -> Iterator[Any]:
    """Yield the keys of a table and of all tables in it."""
    if isinstance(table, Mapping):
        yield from table
    if isinstance(table, Mapping | list | tuple):
        for value in table.values() if isinstance(table, Mapping) else table:
            yield from _iter_keys(value)


def read_answer(content: bytes | bytearray) -> dict[str, Any]:
    """Return the table of an answer.

    Raises:
        RunError: It is malformed, or of another version.
    """
    table = unpack(content, bounded=True)
    if not isinstance(table, dict):
        raise RunError("its answer is not a table.")
    if not _is_current(table):
        raise RunError(
            f"it speaks version {_format_version(table.get('protocol'))} of the protocol, and the server {PROTOCOL}."
        )
    return table


def _is_current(table: Mapping[str, Any]) -> bool:
    return type(table.get("protocol")) is int and table["protocol"] == PROTOCOL


def _format_version(version: Any) -> str:
    return str(version) if type(version) is int and abs(version) < 2**63 else one_line(version, 40)


def describe_data(data: Data) -> dict[str, Any]:
    """Return what a model needs to know of data, as plain values."""
    return {"name": data.name, "task": data.task, "sample_shape": list(data.sample_shape), "classes": data.classes,
            "vocabulary": data.vocabulary, "padding": data.padding, "channels_last": data.channels_last,
            "encoding": _compute_encoding(data), "stored": _describe_storage(data)}  # fmt: skip


def _describe_storage(data: Data) -> str:
    kind = "float32" if data.x.dtype.is_floating_point else str(data.x.dtype).removeprefix("torch.")
    return kind + " standardized" * bool(data.mean or data.std)


def _compute_encoding(data: Data) -> str:
    """Return a digest of the names of classes, the tokenizer and the encoding of columns; "" without them."""
    tokenizer = read_text(data.tokenizer, DataError) if data.tokenizer else ""
    is_numbered = data.class_names == tuple(map(str, range(data.classes)))  # as classes without names
    parts = [() if is_numbered else data.class_names, tokenizer, data.columns]
    return compute_digest(json.dumps(parts).encode()) if any(parts) else ""


def pack_transform(transform: Transform) -> bytes:
    """Return the files of a transform as bytes."""
    texts = transform.to_files()
    return pack({name: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for name, text in texts.items()})


def unpack_transform(content: bytes | bytearray) -> dict[str, str]:
    """Return the texts of a transform's files, by name.

    Raises:
        RunError: The content is malformed.
        DataError: The transform is wrong.
    """
    table = unpack(content, bounded=True)
    if not isinstance(table, dict) or FILE not in table or not table.keys() <= {FILE, COLUMNS, TOKENIZER}:
        raise RunError("the fleet's transform has other files than a transform.", key="transform")
    try:
        texts = {name: tensor.numpy().tobytes().decode() for name, tensor in table.items()}
        Transform.from_json(parse_json(texts[FILE]))
    except (AttributeError, TypeError, ValueError):
        raise RunError("a file of the fleet's transform is not text, or not JSON.", key="transform") from None
    return texts


def make_model_key(header: Header) -> str:
    """Return a text that is the same for all headers with the same model and data."""
    return drop_folders(json.dumps([header["problem"], header["base"]], sort_keys=True))


def compute_digest(content: bytes | bytearray) -> str:
    """Return the SHA-256 of packed tensors, as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
