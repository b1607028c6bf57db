"""Checkpoints: safetensors files with a checksum; no pickle.

A file holds the buffers of `fleetfit.submodel.state.flatten` as one flat tensor for each dtype, such as "float32", and
the plain values in its header.

FleetFit writes the files itself: the safetensors library orders metadata at random (its issue #584), and the same
tensors must give the same bytes in every process.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetfit import files
from fleetfit.errors import RunError
from fleetfit.runs import InvalidRecord
from fleetfit.runs.schema import Count, Digits, List, Record, Share
from fleetfit.submodel.state import DTYPES, flatten, tensor_bytes, unflatten

FORMAT = 2
"""Version of checkpoints. Others are refused."""
_KIND = "checkpoint"
CHECKSUM = "sha256"
"""The key of the checksum in a file's metadata."""
_BLANK = "0" * 64  # the checksum's value while it is computed
_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
_CHUNK_BYTES = 1 << 20


class CheckpointError(RunError):
    """A checkpoint is damaged or does not fit its run. The message completes "the file is damaged: ...".

    Users never see it: `RunFolder` adds the file.
    """


def write_checkpoint(path: Path, payload: Mapping[str, Any]) -> None:
    """Write nested values and tensors atomically.

    Raises:
        RunError: The payload has another kind of value, the disk is full, or the folder cannot be written.
    """
    try:
        plain, buffers = flatten(payload)
    except ValueError as error:
        raise RunError(
            f"a checkpoint may have numbers, text, tensors, and lists and tables of them: {error}.", path=path
        ) from None
    metadata = {"fleetfit": _KIND, "format": str(FORMAT), "nest": json.dumps(plain)}
    header = _make_header(buffers, {**metadata, CHECKSUM: _BLANK})
    digest = hashlib.sha256(header)
    flats = [flat for parts in buffers.values() for flat in parts]
    for flat in flats:
        digest.update(tensor_bytes(flat))
    try:
        with files.atomic_write(path) as file:
            file.write(struct.pack("<Q", len(header)))
            file.write(_replace_checksum(header, _BLANK, digest.hexdigest()))
            for flat in flats:
                file.write(tensor_bytes(flat))
    except OSError as error:
        raise RunError(
            f"cannot write the checkpoint {path}: {error.strerror or error}. Earlier checkpoints are intact.",
            path=path,
        ) from None


def _make_header(buffers: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, parts in buffers.items():  # widest dtype first, so that tensors are aligned without gaps
        count = sum(part.numel() for part in parts)
        start, end = end, end + count * DTYPES[name].itemsize
        entries[name] = {"dtype": _TYPES[name], "shape": [count], "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _replace_checksum(header: bytes, old: str, new: str) -> bytes:
    return header.replace(f'"{CHECKSUM}":"{old}"'.encode(), f'"{CHECKSUM}":"{new}"'.encode(), 1)


def read_checkpoint(path: Path) -> Any:
    """Return the payload of `write_checkpoint`.

    Raises:
        CheckpointError: The file is damaged.
        RunError: Another version of FleetFit wrote it.
    """
    tensors, metadata = _read_tensors(path)
    version = metadata.get("format", "none")
    if metadata.get("fleetfit") != _KIND or version != str(FORMAT):
        raise RunError(
            f"{path} has format {version}; this version of FleetFit reads format {FORMAT}. Use the version of "
            "FleetFit that wrote it.",
            path=path,
        )
    if metadata.keys() != {"fleetfit", "format", "nest"}:
        raise CheckpointError(f"its header has {', '.join(sorted(metadata))}")
    try:
        plain = files.parse_json(metadata["nest"])
    except ValueError as error:
        raise CheckpointError(f"its structure cannot be read: {error}") from None
    for name, tensor in tensors.items():
        if DTYPES.get(name) != tensor.dtype or tensor.dim() != 1:
            raise CheckpointError(f'its tensor "{name}" is not a flat buffer of that dtype')
    try:
        return unflatten(plain, tensors)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # also of torch
        raise CheckpointError(str(error)) from None


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file. Its checksum, if any, is verified."""
    try:
        with files.open_file(path) as file, safe_open(path, framework="pt") as tensors:
            metadata: dict[str, str] = tensors.metadata() or {}
            if (stated := metadata.pop(CHECKSUM, None)) is not None:
                header = file.read(struct.unpack("<Q", file.read(8))[0])  # safe_open has checked its length
                digest = hashlib.sha256(_replace_checksum(header, stated, _BLANK))
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                if digest.hexdigest() != stated:
                    raise CheckpointError("its checksum does not match its content")
            return {name: tensors.get_tensor(name) for name in tensors.keys()}, metadata  # noqa: SIM118 - no mapping
    except OSError as error:
        raise CheckpointError(error.strerror or str(error)) from None
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"it is not a safetensors file ({error})") from None


# ---- the structure of a run's checkpoint ---

State = dict[str, Tensor]
Version = Annotated[int, Field(ge=-1, lt=2**63 - 1)]
Index = Annotated[int, Field(ge=0)]


class ServerRecord(Record):
    """The server after a round, with the largest level that each client has trained, and the class frequencies."""

    state: State
    round: Count
    memory: Any
    trained: dict[Index, Index] = Field({})
    prior: List[Share] = Field([])


class ClientRecord(Record):
    """The memory of a client."""

    version: Version
    memory: Any


class VersionsRecord(Record):
    """Versions of memories that the clients of a real fleet store."""

    versions: dict[Digits, Version]


class CheckpointRecord(Record):
    """A checkpoint. Its tensors are not compared with the model here.

    Attributes:
        server: The server.
        clients: The memories of clients.
        statistics: Batch-norm statistics by index of the level.
        levels: Names of the levels, of a run whose levels changed; else they are 1, 2, and so on.
    """

    server: ServerRecord
    clients: Annotated[
        Annotated[dict[Digits, ClientRecord], Tag("is:table")] | Annotated[VersionsRecord, Tag("is:versions")],
        Discriminator(lambda value: "is:versions" if isinstance(value, dict) and "versions" in value else "is:table"),
    ]
    statistics: dict[Index, State] | None
    levels: List[str] = Field([])


def validate_checkpoint(payload: Any, round: int) -> dict[str, Any]:
    """Return a checkpoint after validating its types: server, memories of clients, and the last statistics.

    Args:
        payload: The checkpoint.
        round: The round in its file's name.

    Raises:
        CheckpointError: A type is wrong, or the checkpoint is of another round.
    """
    try:
        CheckpointRecord.load(payload, separator="/")
    except InvalidRecord as error:
        raise CheckpointError(str(error), key=error.key) from None
    if payload["server"]["round"] != round:
        raise CheckpointError(f"it is of round {payload['server']['round']}")
    return dict(payload)
