"""Checkpoints: nests of plain values and tensors in safetensors files with a checksum; no pickle.

A file holds the flat buffers that `fleetfit.state` makes of a nest, one tensor for each type of numbers under the name
of its type ("float32"), and the plain values beside them, in the header.

FleetFit writes them itself, because the library orders several keys of metadata at random (safetensors issue #584): the
same tensors give the same bytes in every process. No link is followed, and the header holds the checksum.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetfit import files
from fleetfit.errors import RunError
from fleetfit.state import DTYPES, flatten, tensor_bytes, unflatten

# ---- flat tensors in a safetensors file, with a checksum of the whole: the header as well as the data --------------

CHECKSUM = "sha256"
"""The key of the checksum among a file's metadata."""
_BLANK = "0" * 64  # what stands in the checksum's place while it is computed
_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
_MOST_HEADER, _CHUNK = 100_000_000, 1 << 20


class CheckpointError(RunError):
    """A file of a run is not what was written."""


def _write(path: Path, buffers: Mapping[str, Sequence[Tensor]], about: Mapping[str, str]) -> None:
    """Write flat tensors, each in parts, and some texts about them, atomically.

    Raises:
        OSError: The file cannot be written.
    """
    header = _header(buffers, {**about, CHECKSUM: _BLANK})
    digest = hashlib.sha256(header)
    for part in _contents(buffers):
        digest.update(part)
    with files.atomic_write(path) as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(_with_checksum(header, _BLANK, digest.hexdigest()))
        for part in _contents(buffers):
            file.write(part)


def _contents(buffers: Mapping[str, Sequence[Tensor]]) -> Iterator[memoryview | bytes]:
    for parts in buffers.values():
        yield from map(tensor_bytes, parts)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, and the texts about them.

    Raises:
        CheckpointError: The checksum, where there is one, is not that of the file; or it is no such file.
    """
    try:
        with files.open_file(path) as file:
            header, about = _header_of(file)
            if CHECKSUM in about:
                _verify(header, about.pop(CHECKSUM), file)
        with safe_open(path, framework="pt") as found:
            names = found.keys()
            return {name: found.get_tensor(name) for name in names}, about
    except OSError as error:
        raise CheckpointError(error.strerror or str(error)) from None
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"it is no safetensors file ({error})") from None


def _header(buffers: Mapping[str, Sequence[Tensor]], about: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, parts in buffers.items():  # the widest type comes first: aligned without gaps
        count = sum(part.numel() for part in parts)
        start, end = end, end + count * DTYPES[name].itemsize
        entries[name] = {"dtype": _TYPES[name], "shape": [count], "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _with_checksum(header: bytes, old: str, new: str) -> bytes:
    return header.replace(f'"{CHECKSUM}":"{old}"'.encode(), f'"{CHECKSUM}":"{new}"'.encode(), 1)


def _header_of(file: BinaryIO) -> tuple[bytes, dict[str, str]]:
    """Return a file's header and its metadata.

    Raises:
        ValueError: It is not as long as it says, or no header.
    """
    start = file.read(8)
    size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    header = file.read(size) if 0 < size <= _MOST_HEADER else b""
    if not header or len(header) < size:
        raise ValueError("its header is not whole")
    entries = files.parse_json(header.decode())
    about = entries.get("__metadata__", {}) if isinstance(entries, dict) else None
    if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
        raise ValueError("its header is none")
    return header, about


def _verify(header: bytes, stated: str, file: BinaryIO) -> None:
    """Compare a file, read until behind its header, with its checksum.

    Raises:
        CheckpointError: It is another one.
    """
    digest = hashlib.sha256(_with_checksum(header, stated, _BLANK))
    for chunk in _chunks(file):
        digest.update(chunk)
    if digest.hexdigest() != stated:
        raise CheckpointError("its checksum is not that of what it holds")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


# ---- files --------------------------------------------------------------------------------------------------------

FORMAT = 2
"""Version of checkpoints; any other is refused."""
_KIND = "checkpoint"


def write_checkpoint(path: Path, nest: Mapping[str, Any]) -> None:
    """Write a nest atomically.

    Raises:
        RunError: Something in it is no plain value and no tensor; the disk is full, or the folder is not to be written.
    """
    try:
        plain, buffers = flatten(nest)
    except ValueError as error:
        raise RunError(f"a checkpoint holds numbers, text, tensors and nests of them; {error}.") from None
    try:
        _write(path, buffers, {"fleetfit": _KIND, "format": str(FORMAT), "nest": json.dumps(plain)})
    except OSError as error:
        raise RunError(
            f"the checkpoint {path} cannot be written: {error.strerror or error}. What was written before is intact."
        ) from None


def read_checkpoint(path: Path) -> Any:
    """Return what `write_checkpoint` wrote.

    Raises:
        CheckpointError: It is not what was written.
        RunError: A later version wrote it.
    """
    tensors, about = _read(path)
    version = about.get("format", "none")
    if about.get("fleetfit") != _KIND or version != str(FORMAT):
        raise RunError(
            f"{path} has format {version}; this version of FleetFit reads format {FORMAT}. Use the version of "
            "FleetFit that wrote it."
        )
    if about.keys() != {"fleetfit", "format", "nest"}:
        raise CheckpointError(f"its header has {', '.join(sorted(about))}")
    try:
        plain = files.parse_json(about["nest"])
    except ValueError as error:
        raise CheckpointError(f"its structure cannot be read: {error}") from None
    try:
        return unflatten(plain, _flat(tensors))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # also of torch
        raise CheckpointError(str(error)) from None


def _flat(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    for name, tensor in tensors.items():
        if DTYPES.get(name) != tensor.dtype or tensor.dim() != 1:
            raise ValueError(f'it has a tensor "{name}" that is no buffer of that type')
    return tensors


# ---- what the checkpoint of a run holds: the server, what the clients remember, and the last statistics ------------


def validate_checkpoint(nest: Any, round: int) -> dict[str, Any]:
    """Return a checkpoint whose parts are of the right types.

    Args:
        nest: As it was read.
        round: That its file is named after.

    Raises:
        CheckpointError: They are not.
    """
    from fleetfit.records.schema import CheckpointRecord, InvalidRecord  # imports pydantic

    try:
        CheckpointRecord.load(nest, separator="/")
    except InvalidRecord as error:
        raise CheckpointError(str(error), key=error.key) from None
    if nest["server"]["round"] != round:
        raise CheckpointError(f"it is of round {nest['server']['round']}")
    return dict(nest)
