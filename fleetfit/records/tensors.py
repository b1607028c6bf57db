"""Named tensors in a safetensors file, with a checksum of the whole: the header as well as the data.

Written here and not by the library, so that the same tensors give the same bytes in every process (the library orders
its metadata at random), no link is followed, and the checksum can stand in the header. Files without one, as earlier
versions wrote them, can be read too.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetfit import files
from fleetfit.errors import RunError

CHECKSUM = "sha256"
"""The key of the checksum among a file's metadata."""
_BLANK = "0" * 64  # what stands in the checksum's place while it is computed
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
_MOST_HEADER, _CHUNK = 100_000_000, 1 << 20


class Damaged(RunError):
    """A file of a run is not what was written."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors and some texts about them, atomically.

    Raises:
        OSError: The file cannot be written.
        RunError: A tensor is of a kind that files cannot hold.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned without gaps
    header = _header(tensors, ordered, {**about, CHECKSUM: _BLANK})
    digest = hashlib.sha256(header)
    for name in ordered:
        digest.update(_content(tensors[name]))
    with files.replacing(path) as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(_with_checksum(header, _BLANK, digest.hexdigest()))
        for name in ordered:
            file.write(_content(tensors[name]))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what `write_tensors` wrote.

    Raises:
        Damaged: The checksum, where there is one, is not that of the file; or it is no such file.
    """
    try:
        with files.opened(path) as file:
            header, about = _header_of(file)
            if CHECKSUM in about:
                _verify(header, about.pop(CHECKSUM), file)
        with safe_open(path, framework="pt") as found:
            names = found.keys()
            return {name: found.get_tensor(name) for name in names}, about
    except OSError as error:
        raise Damaged(error.strerror or str(error)) from None
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError, MemoryError) as error:
        raise Damaged(f"it is no safetensors file ({error})") from None


def _header(tensors: Mapping[str, Tensor], ordered: list[str], about: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES or name == "__metadata__":
            raise RunError(f'"{name}" is {tensor.dtype}, which a file of tensors cannot hold.')
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _content(tensor: Tensor) -> memoryview | bytes:
    """Return a tensor's bytes without copying more than must be."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


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
    entries = files.json_of(header.decode())
    about = entries.get("__metadata__", {}) if isinstance(entries, dict) else None
    if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
        raise ValueError("its header is none")
    return header, about


def _verify(header: bytes, stated: str, file: BinaryIO) -> None:
    """Compare a file, read until behind its header, with its checksum.

    Raises:
        Damaged: It is another one.
    """
    digest = hashlib.sha256(_with_checksum(header, stated, _BLANK))
    for chunk in _chunks(file):
        digest.update(chunk)
    if digest.hexdigest() != stated:
        raise Damaged("its checksum is not that of what it holds")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk
