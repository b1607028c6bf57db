"""Checkpoints: nests of plain values and tensors in safetensors files with a checksum; no pickle.

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

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetfit import files
from fleetfit.errors import RunError
from fleetfit.records import forms

# ---- named tensors in a safetensors file, with a checksum of the whole: the header as well as the data -------------

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


# ---- nests of plain values and tensors -----------------------------------------------------------------------------

FORMAT = 1
"""Version of checkpoints; one that is not known is refused."""
_KIND, _DEPTH = "checkpoint", 100


def flatten(nest: Any, tensors: dict[str, Tensor], where: str = "", depth: int = 0) -> Any:
    """Return a nest's structure as JSON values, and collect its tensors by place.

    Args:
        nest: Dicts, lists, tuples, numbers, text, None, tensors and NumPy arrays.
        tensors: Where the tensors go.
        where: Place of the nest, for names and messages.
        depth: How deep it stands in the whole.

    Raises:
        RunError: Something else is in it, or it is nested too deeply.
    """
    if depth > _DEPTH:
        raise RunError(f"a checkpoint is nested at most {_DEPTH} deep; {where[:60]} is deeper.")
    if isinstance(nest, Tensor | np.ndarray):
        name = where or "value"
        while name in tensors:  # keys 1 and "1" give one place
            name += "'"
        tensors[name] = torch.from_numpy(nest) if isinstance(nest, np.ndarray) else nest
        return {"$array" if isinstance(nest, np.ndarray) else "$tensor": name}
    if isinstance(nest, Mapping):
        items = [
            (key, flatten(value, tensors, f"{where}/{key}" if where else str(key), depth + 1))
            for key, value in nest.items()
        ]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$items": [[flatten(key, tensors, where, depth + 1), value] for key, value in items]}
    if isinstance(nest, list | tuple):
        values = [flatten(value, tensors, f"{where}/{i}", depth + 1) for i, value in enumerate(nest)]
        return {"$tuple": values} if isinstance(nest, tuple) else values
    if isinstance(nest, np.generic):
        nest = nest.item()
    if nest is None or isinstance(nest, bool | int | float | str):
        return nest
    raise RunError(f"a checkpoint holds numbers, text, tensors and nests of them; {where} is a {type(nest).__name__}.")


def restore(nest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `flatten` took apart.

    Raises:
        Damaged: It is nothing that `flatten` returns; or tensors are missing, or are not named.
    """
    left = dict(tensors)
    found = _restored(nest, left, 0)
    if left:
        raise Damaged(f'it holds a tensor "{next(iter(left))}" that it does not name')
    return found


def _restored(nest: Any, left: dict[str, Tensor], depth: int) -> Any:
    if depth > 2 * _DEPTH:  # a tuple or a table of pairs is two levels in JSON
        raise Damaged("it is nested too deeply")
    if isinstance(nest, list):
        return [_restored(value, left, depth + 1) for value in nest]
    if not isinstance(nest, dict):
        return nest
    if not any(key.startswith("$") for key in nest):
        return {key: _restored(value, left, depth + 1) for key, value in nest.items()}
    (word, inner), *more = nest.items()
    if not more and word in ("$tensor", "$array") and isinstance(inner, str):
        if inner not in left:
            raise Damaged(f'it has no tensor "{inner}", or names it twice')
        tensor = left.pop(inner)
        return tensor if word == "$tensor" else tensor.numpy()
    if not more and word == "$tuple" and isinstance(inner, list):
        return tuple(_restored(value, left, depth + 1) for value in inner)
    if not more and word == "$items" and isinstance(inner, list):
        return _items(inner, left, depth)
    raise Damaged(f'"{word}" in it is unknown')


def _items(pairs: list[Any], left: dict[str, Tensor], depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    depth += 1
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Damaged("a table in it has something else than pairs")
        key = _restored(pair[0], left, depth)
        if not _plain(key):
            raise Damaged("a table in it has a key that is none")
        found[key] = _restored(pair[1], left, depth)
    return found


def _plain(key: Any) -> bool:
    return all(map(_plain, key)) if isinstance(key, tuple) else isinstance(key, str | int | float | None)


# ---- files --------------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, nest: Mapping[str, Any]) -> None:
    """Write a nest atomically.

    Raises:
        RunError: The disk is full, or the folder is not to be written.
    """
    tensors: dict[str, Tensor] = {}
    structure = flatten(nest, tensors)
    about = {"fleetfit": _KIND, "format": str(FORMAT), "nest": json.dumps(structure)}
    try:
        write_tensors(path, tensors, about)
    except OSError as error:
        raise RunError(
            f"the checkpoint {path} cannot be written: {error.strerror or error}. What was written before is intact."
        ) from None


def read_checkpoint(path: Path) -> Any:
    """Return what `write_checkpoint` wrote.

    Raises:
        Damaged: It is not what was written.
        RunError: Another version wrote it.
    """
    tensors, about = read_tensors(path)
    version = about.get("format", "none")
    if about.get("fleetfit") != _KIND or version != str(FORMAT):
        raise RunError(
            f"{path} has format {version}; this version of FleetFit reads format {FORMAT}. Use the version of "
            "FleetFit that wrote it."
        )
    if about.keys() != {"fleetfit", "format", "nest"}:
        raise Damaged(f"its header has {', '.join(sorted(about))}")
    try:
        structure = files.json_of(about["nest"])
    except ValueError as error:
        raise Damaged(f"its structure cannot be read: {error}") from None
    return restore(structure, tensors)


# ---- what the checkpoint of a run holds: the server, what the clients remember, and the last statistics ------------


def checkpoint_of(nest: Any, round: int) -> dict[str, Any]:
    """Return a checkpoint whose parts are of the right types.

    Args:
        nest: As it was read.
        round: That its file is named after.

    Raises:
        Damaged: They are not.
    """
    try:
        _CHECKPOINT(nest, "")
    except ValueError as error:
        raise Damaged(str(error)) from None
    if nest["server"]["round"] != round:
        raise Damaged(f"it is of round {nest['server']['round']}")
    return dict(nest)


def _state(value: Any, where: str) -> None:
    forms.mapped(_tensor)(value, where)


def _tensor(value: Any, where: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} is no tensor")


def _clients(value: Any, where: str) -> None:
    """Expect each client's memory with its version; of a real fleet the versions alone."""
    forms.mapped(forms.anything)(value, where)
    known = value.get("versions") if "versions" in value else value
    forms.mapped(_version if "versions" in value else _remembered)(known, where)
    for client in known:
        if not (client.isdecimal() and client.isascii() and len(client) < 12):
            raise ValueError(f"{where}/{client[:60]} is no client")


def _version(value: Any, where: str) -> None:
    forms.count(value + 1 if type(value) is int else value, where)


def _statistics(value: Any, where: str) -> None:
    if not isinstance(value, Mapping) or not all(type(level) is int and level >= 0 for level in value):
        raise ValueError(f"{where} is no table by level")
    for level, state in value.items():
        _state(state, f"{where}/{level}")


def _trained(value: Any, where: str) -> None:
    """Expect the largest level of each client, both as numbers from 0."""
    numbers = isinstance(value, Mapping) and all(type(n) is int and n >= 0 for pair in value.items() for n in pair)
    if not numbers:
        raise ValueError(f"{where} is no table of levels by client")


_remembered = forms.table({"version": _version, "memory": forms.anything})
_CHECKPOINT = forms.table({
    "server": forms.table({"state": _state, "round": forms.count, "memory": forms.anything}, {"trained": _trained}),
    "clients": _clients,
    "statistics": forms.maybe(_statistics),
})  # fmt: skip
