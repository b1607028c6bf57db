"""Job and Update as bytes, without pickle; and lighter updates: half precision or 8-bit integers.

Instead of its state x a client sends Q(d) with d = x - x0 + e. Server and client both have x0, the piece that was sent,
so the server goes on with x0 + Q(d), of which nothing but Q is lost; and the client keeps e <- d - Q(d) for its next
update (error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019). Where the next sub-model is
another one, what both have moves along and the rest begins at zero.

"float16" rounds to the nearest half. "int8" rounds to the nearest of 255 steps between -s and s, s being the largest
absolute value of a row of the tensor (its first dimension; a vector is one row). What travels down is not compressed:
it is the same for all clients of a sub-model, and an error in it would be everybody's.

A message is `FFIT`, a version byte, three zero bytes, the length of the header (8 bytes, little endian), a JSON
header, and the tensors' bytes. In the header a tensor stands as {"$t": [dtype, shape]}; the tensors follow in the
order of their appearance, each aligned to the size of its elements.

A message may come from a stranger. Nothing is made of what it announces before that is held against what there is: the
length of the header, how deep it nests, how many dimensions and elements its tensors have. Of a message from another
machine (`bounded`) the memory of what its header becomes is estimated first, from a count of its signs, so that a small
message cannot become a large nest.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fleetfit.errors import RunError, one_line
from fleetfit.layout import Layout, State
from fleetfit.method import is_portable
from fleetfit.submodel import Submodel, recut
from fleetfit.values import Evaluation, Failure, Job, Local, Update

# ---- lighter updates -----------------------------------------------------------------------------------------------

STEPS = 127
DTYPES = {"float16": torch.float16, "int8": torch.int8}


def compress(update: Update, job: Job, layout: Layout, kind: str, lost: Mapping[str, Any] | None) -> tuple[Update, Any]:
    """Return a training update as it travels, and what its rounding lost, for the client's memory.

    Args:
        update: With its state in float32.
        job: The job that it answers, with the state that was sent.
        layout: Of the model.
        kind: "float16" or "int8".
        lost: What this function returned for the client's last accepted update, or None.
    """
    piece, base = update.submodel, _base(update, job, layout)
    before = _moved(lost, layout, piece) if lost else None
    sent: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    errors: dict[str, Tensor] = {}
    for name, tensor in update.state.items():
        wanted = tensor - base[name] if before is None else tensor - base[name] + before[name]
        sent[name], scale = _rounded(wanted, kind)
        if scale is not None:
            scales[name] = scale
        errors[name] = wanted - _value(sent[name], scale)
    kept = {"state": errors, "channels": {a: list(c) for a, c in piece.channels.items()}, "exits": list(piece.exits)}
    return replace(update, state=sent, compressed=kind, scales=scales), kept


def decompress(update: Update, job: Job, layout: Layout) -> Update:
    """Return a compressed update with its state in float32; its shapes and dtypes must be right."""
    base = _base(update, job, layout)
    state = {name: base[name] + _value(sent, update.scales.get(name)) for name, sent in update.state.items()}
    return replace(update, state=state, compressed="", scales={})


def rows_of(shape: tuple[int, ...]) -> int:
    """Return how many scales a tensor of a shape has."""
    return shape[0] if len(shape) > 1 else 1


def _base(update: Update, job: Job, layout: Layout) -> State:
    """Return what was sent of the piece that came back."""
    if update.submodel == job.submodel:
        return job.state
    return recut(layout, job.state, job.submodel, update.submodel)


def _moved(lost: Mapping[str, Any], layout: Layout, piece: Submodel) -> State:
    source = Submodel({axis: tuple(kept) for axis, kept in lost["channels"].items()}, tuple(lost["exits"]))
    return lost["state"] if source == piece else recut(layout, lost["state"], source, piece)


def _rounded(wanted: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    if kind == "float16":
        largest = torch.finfo(torch.float16).max
        return wanted.clamp(-largest, largest).half(), None
    rows = wanted.reshape(rows_of(tuple(wanted.shape)), -1)
    scale = rows.abs().amax(1) / STEPS if rows.shape[1] else torch.zeros(len(rows))
    whole = rows / torch.where(scale > 0, scale, 1.0)[:, None]
    return whole.round().clamp(-STEPS, STEPS).to(torch.int8).view(wanted.shape), scale


def _value(sent: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return sent.float()
    rows = sent.reshape(len(scale), -1).float() * scale[:, None]
    return rows.view(sent.shape)


# ---- jobs and updates as bytes -------------------------------------------------------------------------------------

VERSION = 1
_MAGIC = b"FFIT"
_START = 16
_DEEPEST = 64  # nests within nests
_MOST_DIMENSIONS = 16
_LARGEST_SIZE = 2**40  # of a dimension; elements are bounded by the message's bytes
_MULTIPLE = 16  # bytes that a byte of a stranger's message may become,
_FREE = 2**20  # and bytes that any message may become
# about how many bytes of memory stand behind a sign of the header (CPython 3.11, torch 2): a table, a list, an element,
# one of a text's two quotes, a tensor
_WEIGHTS = ((b"{", 232), (b"[", 64), (b",", 40), (b'"', 30), (b'"$t"', 900))
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


class _Restored:
    """Puts a parsed header back together, with tensors where their descriptions stand.

    Lists and tables are filled in place: the nest is not held twice.
    """

    def __init__(self, whole: Tensor, start: int, bounded: bool) -> None:
        """Take a message's bytes, where those of its tensors begin, and whether a stranger sent it."""
        self._whole, self.end, self._bounded = whole, start, bounded

    def of(self, nest: Any, depth: int = 0) -> Any:
        """Return what a part of the header stands for."""
        if not isinstance(nest, list | dict):
            return nest
        if depth > _DEEPEST:
            raise ValueError(f"it nests more than {_DEEPEST} deep")
        if isinstance(nest, list):
            for place, value in enumerate(nest):
                nest[place] = self.of(value, depth + 1)
            return nest
        if "$t" in nest:
            return self._tensor(*_single(nest, "$t", 2))
        if "$u" in nest:
            return tuple(self.of(_single(nest, "$u"), depth + 1))
        if "$d" in nest:
            return self._table(_single(nest, "$d"), depth + 1)
        for key, value in nest.items():
            nest[key] = self.of(value, depth + 1)
        return nest

    def _table(self, pairs: Any, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in pairs:
            key, value = self.of(pair, depth)
            if self._bounded and not _plain(key):
                raise ValueError("a key of a table is no text and no number of at most 60 bits")
            found[key] = value
        return found

    def _tensor(self, name: Any, shape: Any) -> Tensor:
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise ValueError("a tensor has a type of numbers that is unknown here")
        if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has no list of at most {_MOST_DIMENSIONS} sizes")
        if not all(type(n) is int and 0 <= n < _LARGEST_SIZE for n in shape):
            raise ValueError("a tensor has sizes that are no whole numbers from 0 on")
        count = math.prod(shape)  # of at most 16 numbers below 2^40
        place = self.end + -self.end % dtype.itemsize
        self.end = place + count * dtype.itemsize
        if self.end > len(self._whole):
            raise ValueError("it ends before its tensors do")
        if not count:
            return torch.empty(shape, dtype=dtype)
        return self._whole[place : self.end].view(dtype).view(shape)  # one storage: neighbours can be read as one


def _single(nest: Mapping[str, Any], mark: str, length: int | None = None) -> Any:
    """Return what a mark stands for, a list; nothing else may stand beside it."""
    found = nest[mark]
    if len(nest) != 1 or not isinstance(found, list) or (length is not None and len(found) != length):
        raise ValueError(f'"{mark}" is no list, or not alone')
    return found


def _plain(key: Any) -> bool:
    """Tell whether a stranger may use a key: of larger numbers, and of tuples, thousands have one and the same hash."""
    return -(2**60) <= key <= 2**60 if isinstance(key, int) else isinstance(key, str | float | None)


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


def unpack(message: bytes | bytearray, bounded: bool = False) -> Any:
    """Return the nest of a message; its tensors share the message's memory.

    Args:
        message: The bytes.
        bounded: Refuse, before it is read, a header whose nest would take more than 16 times the message's bytes and
            1 MiB: for what comes from another machine.

    Raises:
        RunError: The message is damaged, of another version, or beyond the bounds.
    """
    buffer = message if isinstance(message, bytearray) else bytearray(message)
    if len(buffer) < _START or buffer[:4] != _MAGIC:
        raise RunError("a message does not begin as FleetFit's do.")
    if buffer[4] != VERSION:
        raise RunError(f"a message has format version {buffer[4]}; this FleetFit speaks version {VERSION}.")
    length = int.from_bytes(buffer[8:_START], "little")
    if length > len(buffer) - _START:
        raise RunError("a message ends inside its header.")
    if bounded:
        _check_memory(buffer, _START + length)
    try:
        nest = json.loads(buffer[_START : _START + length])
    except (ValueError, RecursionError) as error:
        raise RunError(f"a message has an unreadable header: {one_line(str(error))}") from None
    restored = _Restored(torch.frombuffer(buffer, dtype=torch.uint8), _START + length, bounded)
    try:
        found = restored.of(nest)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # also of torch, and of nests without end
        raise RunError(f"a message is not put together as it should be: {one_line(str(error))}.") from None
    if restored.end != len(buffer):
        raise RunError(f"a message has {len(buffer)} bytes where its header describes {restored.end}.")
    return found


def _check_memory(buffer: bytearray, end: int) -> None:
    """Refuse a header whose nest would take much more memory than the message, by a count of its signs."""
    found = sum(weight * buffer.count(sign, _START, end) for sign, weight in _WEIGHTS)
    if found > _MULTIPLE * len(buffer) + _FREE:
        raise RunError(
            f"a message of {len(buffer)} bytes has a header that would take about {found} bytes of memory; at most "
            f"{_MULTIPLE} times its own and {_FREE} are allowed."
        )


# ---- jobs and updates --------------------------------------------------------------------------------------------


def _submodel_nest(piece: Submodel) -> dict[str, Any]:
    channels = {
        axis: {"from": kept.start, "to": kept.stop} if isinstance(kept, range) else list(kept)
        for axis, kept in piece.channels.items()
    }
    return {"channels": channels, "exits": list(piece.exits)}


def _submodel(nest: Any) -> Submodel:
    """Return the sub-model of a nest.

    Raises:
        RunError: It is none; whether the model has these channels and exits is for others to look at.
    """
    if not isinstance(nest, Mapping) or nest.keys() != {"channels", "exits"} or not isinstance(nest["channels"], dict):
        raise RunError("a sub-model is no table of channels and exits.")
    if not _counts(nest["exits"]) or not all(isinstance(axis, str) for axis in nest["channels"]):
        raise RunError("a sub-model's exits are no list of whole numbers, or its axes have no names.")
    channels = {axis: _kept(kept) for axis, kept in nest["channels"].items()}
    return Submodel(channels, tuple(nest["exits"]))


def _kept(nest: Any) -> range | tuple[int, ...]:
    if isinstance(nest, dict) and nest.keys() == {"from", "to"} and _counts([nest["from"], nest["to"]]):
        return range(nest["from"], nest["to"])
    if _counts(nest):
        return tuple(nest)
    raise RunError("a sub-model's channels are no list, or range, of whole numbers.")


def _counts(nest: Any) -> bool:
    return isinstance(nest, Sequence) and all(type(n) is int and 0 <= n < 2**31 for n in nest)


def job_nest(job: Job) -> dict[str, Any]:
    """Return a job as a nest for `pack`; functions without an import path stand in it by their representation."""
    fields = dict(vars(job), submodel=_submodel_nest(job.submodel))
    if not is_portable(job.method):
        fields["method"] = repr(job.method)
    return {**fields, "local": dict(vars(job.local)), "evaluation": dict(vars(job.evaluation))}


def job_of(nest: Mapping[str, Any]) -> Job:
    """Return the job of a nest; what its fields hold is for `fleetfit.validation` to look at.

    Raises:
        RunError: It is none.
    """
    try:
        return Job(**{**nest, "submodel": _submodel(nest["submodel"]), "local": Local(**nest["local"]),
                      "evaluation": Evaluation(**nest["evaluation"])})  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"a job is none: {type(error).__name__}: {one_line(str(error))}.") from None


def reply_nest(reply: Update | Failure) -> dict[str, Any]:
    """Return an update or a failure as a nest for `pack`. Byte counts are the receiver's to fill in."""
    fields = {key: value for key, value in vars(reply).items() if key not in ("bytes_down", "bytes_up")}
    fields["dispatched"] = _submodel_nest(reply.dispatched)
    if isinstance(reply, Update):
        fields["submodel"] = _submodel_nest(reply.submodel)
        if not reply.compressed:  # then nothing is said of it
            del fields["compressed"], fields["scales"]
        if not reply.untrained:
            del fields["untrained"]
    return {"kind": type(reply).__name__.lower(), **fields}


def job_size(job: Job) -> int:
    """Return the bytes of a job as the server sends it: an engine adds the version of the client's memory later."""
    return packed_size(job_nest(replace(job, memory_version=-1)))


def reply_size(reply: Update | Failure) -> int:
    """Return the bytes of a reply; what only the clock of a simulation says is not sent and not counted."""
    nest = reply_nest(reply)
    return packed_size({key: value for key, value in nest.items() if key not in ("multiply_adds", "simulated_s")})


def reply_of(nest: Mapping[str, Any]) -> Update | Failure:
    """Return the update or failure of a nest; what its fields hold is for `fleetfit.validation` to look at.

    Raises:
        RunError: It is neither.
    """
    try:
        fields = {**nest, "dispatched": _submodel(nest["dispatched"])}
        kind = fields.pop("kind")
        if kind == "failure":
            return Failure(**fields)
        if kind == "update":
            return Update(**{**fields, "submodel": _submodel(nest["submodel"])})
        raise RunError(f"it says that it is {one_line(kind, 60)}.")
    except (RunError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        why = one_line(str(error))
        raise RunError(f"a reply is no update and no failure: {type(error).__name__}: {why}") from None
