"""Jobs and updates as bytes, without pickle.

A message is `FFIT`, a version byte, three zero bytes, the length of the header (8 bytes, little endian), a JSON
header, and the tensors' bytes. In the header a tensor stands as {"$t": [dtype, shape]}; the tensors follow in the
order of their appearance, each aligned to the size of its elements.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fleetfit.errors import RunError
from fleetfit.method import is_portable
from fleetfit.submodel import Submodel
from fleetfit.values import Evaluation, Failure, Job, Local, Update

VERSION = 1
_MAGIC = b"FFIT"
_START = 16
_DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
              torch.int8, torch.uint8, torch.bool)
}  # fmt: skip


# ---- nests -------------------------------------------------------------------------------------------------------


def _flatten(nest: Any, found: list[Tensor]) -> Any:
    """Replace tensors by their description, tuples by marked lists; collect the tensors."""
    if isinstance(nest, Tensor):
        found.append(nest)
        return {"$t": [str(nest.dtype).removeprefix("torch."), list(nest.shape)]}
    if isinstance(nest, Mapping):
        if not all(isinstance(key, str) and not key.startswith("$") for key in nest):
            return {"$d": [[_flatten(k, found), _flatten(v, found)] for k, v in nest.items()]}
        return {key: _flatten(value, found) for key, value in nest.items()}
    if isinstance(nest, tuple):
        return {"$u": [_flatten(value, found) for value in nest]}
    if isinstance(nest, list):
        return [_flatten(value, found) for value in nest]
    if nest is None or isinstance(nest, bool | int | float | str):
        return nest
    raise RunError(
        "what a client remembers or reports must be numbers, text, tensors and nests of them, got "
        f"{type(nest).__name__}."
    )


def _restore(nest: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(nest, list):
        return [_restore(value, tensors) for value in nest]
    if not isinstance(nest, dict):
        return nest
    if "$t" in nest:
        return next(tensors)
    if "$u" in nest:
        return tuple(_restore(value, tensors) for value in nest["$u"])
    if "$d" in nest:
        return {_restore(k, tensors): _restore(v, tensors) for k, v in nest["$d"]}
    return {key: _restore(value, tensors) for key, value in nest.items()}


def _places(specs: list[tuple[torch.dtype, int]], start: int) -> tuple[list[int], int]:
    """Return where each tensor's bytes begin, and the end."""
    places = []
    for dtype, count in specs:
        start += -start % dtype.itemsize
        places.append(start)
        start += count * dtype.itemsize
    return places, start


def _header(nest: Any) -> tuple[bytes, list[Tensor]]:
    tensors: list[Tensor] = []
    text = json.dumps(_flatten(nest, tensors), separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _START) % 8)
    return _MAGIC + bytes([VERSION, 0, 0, 0]) + len(text).to_bytes(8, "little") + text, tensors


def pack(nest: Any) -> bytes:
    """Return a nest of numbers, text and tensors as one message."""
    header, tensors = _header(nest)
    places, _ = _places([(t.dtype, t.numel()) for t in tensors], len(header))
    parts: list[bytes | memoryview] = [header]
    at = len(header)
    for tensor, place in zip(tensors, places, strict=True):
        parts.append(bytes(place - at))
        raw = tensor.detach().cpu().contiguous()
        parts.append(raw.reshape(-1).view(torch.uint8).numpy().data if raw.numel() else b"")
        at = place + raw.numel() * raw.element_size()
    return b"".join(parts)


def packed_size(nest: Any) -> int:
    """Return the length of `pack(nest)` in bytes without making it."""
    header, tensors = _header(nest)
    return _places([(t.dtype, t.numel()) for t in tensors], len(header))[1]


def unpack(message: bytes | bytearray) -> Any:
    """Return the nest of a message; its tensors share the message's memory.

    Raises:
        RunError: The message is damaged, or of another version.
    """
    buffer = message if isinstance(message, bytearray) else bytearray(message)
    if len(buffer) < _START or buffer[:4] != _MAGIC:
        raise RunError("a message does not begin as FleetFit's do.")
    if buffer[4] != VERSION:
        raise RunError(f"a message has format version {buffer[4]}; this FleetFit speaks version {VERSION}.")
    length = int.from_bytes(buffer[8:_START], "little")
    if length > len(buffer) - _START:
        raise RunError("a message ends inside its header.")
    try:
        nest = json.loads(buffer[_START : _START + length])
        specs = [(_DTYPES[d], tuple(int(n) for n in shape)) for d, shape in _described(nest)]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise RunError(f"a message has an unreadable header: {error}") from None
    if any(n < 0 for _, shape in specs for n in shape):
        raise RunError("a message has a tensor of negative size.")
    places, end = _places([(d, math.prod(shape)) for d, shape in specs], _START + length)
    if end != len(buffer):
        raise RunError(f"a message has {len(buffer)} bytes where its header describes {end}.")
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    tensors = (_tensor(whole, dtype, shape, place) for (dtype, shape), place in zip(specs, places, strict=True))
    try:
        return _restore(nest, tensors)
    except (ValueError, TypeError, RuntimeError, RecursionError, StopIteration) as error:
        raise RunError(f"a message is not put together as it should be: {error}") from None


def _described(nest: Any) -> Iterator[tuple[str, list[int]]]:
    if isinstance(nest, list):
        for value in nest:
            yield from _described(value)
    elif isinstance(nest, dict):
        if "$t" in nest:
            yield nest["$t"][0], nest["$t"][1]
        else:
            for value in nest.values():
                yield from _described(value)


def _tensor(whole: Tensor, dtype: torch.dtype, shape: tuple[int, ...], place: int) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return whole[place : place + size].view(dtype).view(shape)  # all in one storage: neighbours can be read as one


# ---- jobs and updates --------------------------------------------------------------------------------------------


def _submodel_nest(piece: Submodel) -> dict[str, Any]:
    channels = {
        axis: {"from": kept.start, "to": kept.stop} if isinstance(kept, range) else list(kept)
        for axis, kept in piece.channels.items()
    }
    return {"channels": channels, "exits": list(piece.exits)}


def _submodel(nest: Mapping[str, Any]) -> Submodel:
    channels = {
        axis: range(kept["from"], kept["to"]) if isinstance(kept, dict) else tuple(kept)
        for axis, kept in nest["channels"].items()
    }
    return Submodel(channels, tuple(nest["exits"]))


def job_nest(job: Job) -> dict[str, Any]:
    """Return a job as a nest for `pack`; functions without an import path stand in it by their representation."""
    fields = dict(vars(job), submodel=_submodel_nest(job.submodel))
    if not is_portable(job.method):
        fields["method"] = repr(job.method)
    return {**fields, "local": dict(vars(job.local)), "evaluation": dict(vars(job.evaluation))}


def job_of(nest: Mapping[str, Any]) -> Job:
    """Return the job of a nest."""
    return Job(**{**nest, "submodel": _submodel(nest["submodel"]), "local": Local(**nest["local"]),
                  "evaluation": Evaluation(**nest["evaluation"])})  # fmt: skip


def reply_nest(reply: Update | Failure) -> dict[str, Any]:
    """Return an update or a failure as a nest for `pack`. Byte counts are the receiver's to fill in."""
    fields = {key: value for key, value in vars(reply).items() if key not in ("bytes_down", "bytes_up")}
    fields["dispatched"] = _submodel_nest(reply.dispatched)
    if isinstance(reply, Update):
        fields["submodel"] = _submodel_nest(reply.submodel)
        if not reply.compressed:  # then nothing is said of it
            del fields["compressed"], fields["scales"]
    return {"kind": type(reply).__name__.lower(), **fields}


def job_size(job: Job) -> int:
    """Return the bytes of a job as the server sends it: an engine adds the version of the client's memory later."""
    return packed_size(job_nest(replace(job, memory_version=-1)))


def reply_size(reply: Update | Failure) -> int:
    """Return the bytes of a reply; what only the clock of a simulation says is not sent and not counted."""
    nest = reply_nest(reply)
    return packed_size({key: value for key, value in nest.items() if key not in ("multiply_adds", "simulated_s")})


def reply_of(nest: Mapping[str, Any]) -> Update | Failure:
    """Return the update or failure of a nest; what its fields hold is for `fleetfit.guard` to look at.

    Raises:
        RunError: It is neither.
    """
    try:
        fields = {**nest, "dispatched": _submodel(nest["dispatched"])}
        if fields.pop("kind") == "failure":
            return Failure(**fields)
        return Update(**{**fields, "submodel": _submodel(nest["submodel"])})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunError(f"a reply is no update and no failure: {type(error).__name__}: {error}") from None
