"""Job and Update as bytes, without pickle; and lighter updates: half precision or 8-bit integers.

Instead of its state x a client sends Q(d) with d = x - x0 + e. Server and client both have x0, the piece that was sent,
so the server goes on with x0 + Q(d), of which nothing but Q is lost; and the client keeps e <- d - Q(d) for its next
update (error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019). Where the next sub-model is
another one, what both have moves along and the rest begins at zero.

"float16" rounds to the nearest half. "int8" rounds to the nearest of 255 steps between -s and s, s being the largest
absolute value of a row of the tensor (its first dimension; a vector is one row). What travels down is not compressed:
it is the same for all clients of a sub-model, and an error in it would be everybody's.

A message is `FFIT`, a byte for its format, three for the version of FleetFit that wrote it, the length of the header (8
bytes, little endian), the header, and flat tensors, one for each type of numbers. The header is JSON: how many numbers
of each type follow, and the plain values that `fleetfit.state` makes of a nest. A state that follows from its sub-model
and the layout is one flat tensor without a name.

A message may come from a stranger. Nothing is made of what it announces before that is held against what there is: the
length of the header, the numbers behind it, how deep it nests, how many dimensions and elements its tensors have. Of a
message from another machine (`bounded`) the memory of what its header becomes is estimated first, from a count of its
signs, so that a small message cannot become a large nest.
"""

import functools
import importlib.metadata
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fleetfit.errors import FleetFitError, RunError, one_line
from fleetfit.layout import Layout, State
from fleetfit.method import is_portable
from fleetfit.state import DTYPES, FlatState, Shapes, concat_tensors, flatten, get_shapes, tensor_bytes, unflatten
from fleetfit.submodel import Submodel, cut, kept_with, misfit, plain, recut, submodel_of
from fleetfit.values import Evaluation, Failure, Job, Local, Update

# ---- lighter updates -----------------------------------------------------------------------------------------------

STEPS = 127
LIGHTER = {"float16": torch.float16, "int8": torch.int8}


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
    return replace(update, state=sent, compressed=kind, scales=scales), kept_with(piece, errors)


def decompress(update: Update, job: Job, layout: Layout) -> Update:
    """Return a compressed update with its state in float32; its shapes and dtypes must be right."""
    base = _base(update, job, layout)
    state = {name: base[name] + _value(sent, update.scales.get(name)) for name, sent in update.state.items()}
    return replace(update, state=state, compressed="", scales={})


def count_scales(shape: tuple[int, ...]) -> int:
    """Return how many scales a tensor of a shape has."""
    return shape[0] if len(shape) > 1 else 1


def scale_shapes(state: State) -> Shapes:
    """Return the shapes of the scales of a state in "int8"."""
    return {name: (count_scales(shape),) for name, shape in get_shapes(state).items()}


def _base(update: Update, job: Job, layout: Layout) -> State:
    """Return what was sent of the piece that came back."""
    if update.submodel == job.submodel:
        return job.state
    return recut(layout, job.state, job.submodel, update.submodel)


def _moved(lost: Mapping[str, Any], layout: Layout, piece: Submodel) -> State:
    source = submodel_of(lost)
    return lost["state"] if source == piece else recut(layout, lost["state"], source, piece)


def _rounded(wanted: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    if kind == "float16":
        largest = torch.finfo(torch.float16).max
        return wanted.clamp(-largest, largest).half(), None
    rows = wanted.reshape(count_scales(tuple(wanted.shape)), -1)
    scale = rows.abs().amax(1) / STEPS if rows.shape[1] else torch.zeros(len(rows))
    whole = rows / torch.where(scale > 0, scale, 1.0)[:, None]
    return whole.round().clamp(-STEPS, STEPS).to(torch.int8).view(wanted.shape), scale


def _value(sent: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return sent.float()
    rows = sent.reshape(len(scale), -1).float() * scale[:, None]
    return rows.view(sent.shape)


# ---- nests as bytes ------------------------------------------------------------------------------------------------

FORMAT = 2
_MAGIC = b"FFIT"
_START = 16
_MULTIPLE = 16  # bytes that a byte of a stranger's message may become,
_FREE = 2**20  # and bytes that any message may become
# about how many bytes of memory stand behind a sign of the header (CPython 3.11): a table, a list, an element, a key,
# one of a text's two quotes
_WEIGHTS = ((b"{", 232), (b"[", 64), (b",", 40), (b":", 60), (b'"', 30))


def pack(nest: Any) -> bytes:
    """Return a nest of numbers, text and tensors as one message."""
    header, parts = _headed(nest)
    return b"".join([header, *(tensor_bytes(flat) for flats in parts.values() for flat in flats)])


def packed_size(nest: Any) -> int:
    """Return the length of `pack(nest)` in bytes without making it."""
    header, parts = _headed(nest)
    return len(header) + sum(flat.numel() * flat.element_size() for flats in parts.values() for flat in flats)


def _headed(nest: Any) -> tuple[bytes, dict[str, list[Tensor]]]:
    try:
        plain, parts = flatten(nest)
    except ValueError as error:
        raise RunError(
            f"what a client remembers or reports must be numbers, text, tensors and nests of them: {error}."
        ) from None
    counts = {name: sum(flat.numel() for flat in flats) for name, flats in parts.items()}
    text = json.dumps([counts, plain], separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the buffers begin at a multiple of 8
    return _beginning(FORMAT, len(text)) + text, parts


def _beginning(version: int, length: int) -> bytes:
    return _MAGIC + bytes([version, *_release()]) + length.to_bytes(8, "little")


@functools.cache
def _release() -> tuple[int, ...]:
    """Return the three numbers of this FleetFit's version."""
    numbers = [int(number) for number in re.findall(r"\d+", importlib.metadata.version("fleetfit"))[:3]]
    return tuple(min(number, 255) for number in (*numbers, 0, 0, 0)[:3])


def unpack(message: bytes | bytearray, bounded: bool = False) -> Any:
    """Return the nest of a message; its tensors share the message's memory.

    Args:
        message: The bytes.
        bounded: Refuse, before it is read, a header whose nest would take more than 16 times the message's bytes and
            1 MiB: for what comes from another machine.

    Raises:
        RunError: The message is damaged, of another format, or beyond the bounds.
    """
    buffer = message if isinstance(message, bytearray) else bytearray(message)
    version = read_format(buffer)
    if version != FORMAT:
        raise RunError(_of_another_format(version, buffer))
    length = int.from_bytes(buffer[8:_START], "little")
    if length > len(buffer) - _START:
        raise RunError("a message ends inside its header.")
    left = _memory_left(buffer, _START + length) if bounded else None
    try:
        plain = json.loads(buffer[_START : _START + length])
    except (ValueError, RecursionError) as error:
        raise RunError(f"a message has an unreadable header: {one_line(str(error))}") from None
    try:
        if not isinstance(plain, list) or len(plain) != 2:
            raise ValueError("its header does not say what lies behind it")
        return unflatten(plain[1], _buffers(plain[0], buffer, _START + length), left)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # also of torch, and of nests without end
        raise RunError(f"a message is not put together as it should be: {one_line(str(error))}.") from None


def read_format(message: bytes | bytearray) -> int:
    """Return the format of a message.

    Raises:
        RunError: It is none.
    """
    if len(message) < _START or message[:4] != _MAGIC:
        raise RunError("a message does not begin as FleetFit's do.")
    return message[4]


def _of_another_format(version: int, message: bytes | bytearray) -> str:
    ours = ".".join(map(str, _release()))
    theirs = ".".join(map(str, message[5:8]))
    return (
        f"a message of format {version} came from FleetFit {theirs}; the one here, {ours}, speaks format {FORMAT}. "
        f"Install FleetFit {theirs} here, or {ours} on the side that sent it."
    )


def _memory_left(buffer: bytearray, end: int) -> int:
    """Return how much memory tensors may take after the header's nest, whose memory is told by a count of its signs.

    Raises:
        RunError: That alone is too much.
    """
    most = _MULTIPLE * len(buffer) + _FREE
    left = most - sum(weight * buffer.count(sign, _START, end) for sign, weight in _WEIGHTS)
    if left < 0:
        raise RunError(
            f"a message of {len(buffer)} bytes has a header that would take about {most - left} bytes of memory; at "
            f"most {_MULTIPLE} times its own and {_FREE} are allowed."
        )
    return left


def _buffers(counts: Any, buffer: bytearray, start: int) -> dict[str, Tensor]:
    """Return the flat tensors of a message; it must be as long as they are, to the byte."""
    if not isinstance(counts, dict) or not all(type(n) is int and 0 <= n < 2**48 for n in counts.values()):
        raise ValueError("its header does not count the numbers behind it")
    if [name for name in DTYPES if name in counts] != list(counts):
        raise ValueError("it has types of numbers that are unknown here, or in another order")
    end = start + sum(n * DTYPES[name].itemsize for name, n in counts.items())
    if end != len(buffer):
        raise ValueError(f"it has {len(buffer)} bytes where its header describes {end}")
    if counts and start % 8:
        raise ValueError("its numbers do not begin at a multiple of 8 bytes")
    whole, found = torch.frombuffer(buffer, dtype=torch.uint8), dict[str, Tensor]()
    for name, n in counts.items():
        end = start + n * DTYPES[name].itemsize
        found[name], start = whole[start:end].view(DTYPES[name]), end
    return found


# ---- jobs and updates --------------------------------------------------------------------------------------------


# Of a state whose sub-model says which tensors it has, and which shapes, only the numbers travel, as one flat tensor; a
# table of tensors by name is what none says: sums of a statistics job, what a method adds or leaves out.


def dump_job(job: Job, layout: Layout) -> dict[str, Any]:
    """Return a job as a nest for `pack`; functions without an import path stand in it by their representation."""
    fields = dict(
        vars(job), submodel=plain(job.submodel), state=dump_state(job.state, layout, job.submodel),
        local=dict(vars(job.local)), evaluation=_evaluation_nest(job.evaluation),
    )  # fmt: skip
    if not is_portable(job.method):
        fields["method"] = repr(job.method)
    return fields


def _evaluation_nest(evaluation: Evaluation) -> dict[str, Any]:
    """Return the settings of an evaluation; metrics are said where there are some, which earlier versions know not."""
    fields = dict(vars(evaluation), metrics=list(evaluation.metrics))
    return fields if evaluation.metrics else {key: value for key, value in fields.items() if key != "metrics"}


def _evaluation_of(nest: Mapping[str, Any]) -> Evaluation:
    return Evaluation(**{**nest, "metrics": tuple(nest.get("metrics", ()))})


def load_job(nest: Mapping[str, Any], layout: Layout) -> Job:
    """Return the job of a nest; what its fields hold is for `fleetfit.validation` to look at.

    Raises:
        RunError: It is none, or its state does not fit its sub-model.
    """
    try:
        piece = submodel_of(nest["submodel"])
        state = _named(nest["state"], layout, piece)
        return Job(**{**nest, "submodel": piece, "state": state, "local": Local(**nest["local"]),
                      "evaluation": _evaluation_of(nest["evaluation"])})  # fmt: skip
    except (FleetFitError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"a job is none: {type(error).__name__}: {one_line(str(error))}.") from None


def dump_reply(reply: Update | Failure, layout: Layout) -> dict[str, Any]:
    """Return an update or a failure as a nest for `pack`. Byte counts are the receiver's to fill in."""
    if isinstance(reply, Failure):
        return dump_failure(reply)
    fields = _said_of(reply)
    fields["state"] = dump_state(reply.state, layout, reply.submodel)
    fields["scales"] = _numbers(reply.scales, scale_shapes(reply.state))
    fields["submodel"] = plain(reply.submodel)
    if reply.submodel == reply.dispatched:  # what is as one expects is not said
        del fields["submodel"]
    if not reply.compressed:
        del fields["compressed"], fields["scales"]
    if not reply.untrained:
        del fields["untrained"]
    return {"kind": "update", **fields}


def dump_failure(failure: Failure) -> dict[str, Any]:
    """Return a failure as a nest for `pack`."""
    return {"kind": "failure", **_said_of(failure)}


def _said_of(reply: Update | Failure) -> dict[str, Any]:
    fields = {key: value for key, value in vars(reply).items() if key not in ("bytes_down", "bytes_up")}
    return {**fields, "dispatched": plain(reply.dispatched)}


def load_reply(nest: Mapping[str, Any], layout: Layout) -> Update | Failure:
    """Return the update or failure of a nest; what its fields hold is for `fleetfit.validation` to look at.

    Raises:
        RunError: It is neither, or its state does not fit its sub-model.
    """
    try:
        fields = {**nest, "dispatched": submodel_of(nest["dispatched"])}
        kind = fields.pop("kind")
        if kind == "failure":
            return Failure(**fields)
        if kind != "update":
            raise RunError(f"it says that it is {one_line(kind, 60)}.")
        piece = submodel_of(nest.get("submodel", nest["dispatched"]))
        state = _named(nest["state"], layout, piece)
        scales = nest.get("scales", {})
        if isinstance(scales, Tensor):
            scales = _cut_up(scales, scale_shapes(state), "scales")
        return Update(**{**fields, "submodel": piece, "state": state, "scales": scales})
    except (FleetFitError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        why = one_line(str(error))
        raise RunError(f"a reply is no update and no failure: {type(error).__name__}: {why}") from None


def dump_state(state: State, layout: Layout, piece: Submodel) -> Tensor | dict[str, Tensor]:
    """Return a state as it travels: its numbers where its sub-model says what they are, else the tensors by name."""
    if not state or misfit(layout, piece) is not None:
        return dict(state)
    return _numbers(state, cut(layout, piece).shapes)


def _numbers(state: State, shapes: Shapes) -> Tensor | dict[str, Tensor]:
    found = get_shapes(state)
    if not found or found != shapes:
        return dict(state)
    if isinstance(state, FlatState) and list(found) == list(shapes):
        return state.flat
    tensors = [state[name] for name in shapes]
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        return dict(state)
    return concat_tensors(tensors)


def _named(state: Any, layout: Layout, piece: Submodel) -> Any:
    """Return a state that has travelled by the names of its tensors; a table is left as it is."""
    if not isinstance(state, Tensor):
        return state
    wrong = misfit(layout, piece)
    if wrong is not None:
        raise RunError(wrong)
    return _cut_up(state, cut(layout, piece).shapes, "state")


def _cut_up(flat: Tensor, shapes: Shapes, what: str) -> FlatState:
    expected = sum(math.prod(shape) for shape in shapes.values())
    if tuple(flat.shape) != (expected,):
        raise RunError(f"its {what} is a tensor {tuple(flat.shape)}; its sub-model asks for ({expected},).")
    return FlatState(flat, shapes)


# ---- how many bytes they are ---------------------------------------------------------------------------------------


def job_size(job: Job, layout: Layout) -> int:
    """Return the bytes of a job as the server sends it: an engine adds the version of the client's memory later."""
    job = replace(job, memory_version=-1, state=_weightless(job.state), statistics=_weightless(job.statistics))
    return packed_size(dump_job(job, layout))


def reply_size(reply: Update | Failure, layout: Layout) -> int:
    """Return the bytes of a reply; what only the clock of a simulation says is not sent and not counted."""
    if isinstance(reply, Update):
        reply = replace(reply, state=_weightless(reply.state), scales=_weightless(reply.scales))
    nest = dump_reply(reply, layout)
    return packed_size({key: value for key, value in nest.items() if key not in ("multiply_adds", "simulated_s")})


def update_size(job: Job, layout: Layout) -> int:
    """Return the bytes of an update that answers a training job whole, before there is one: without metrics."""
    kind = job.local.compress
    update = Update(job.round, job.index, job.client, job.level, job.submodel, job.submodel, job.state, 0, {})
    if kind is not None:
        scales = _without_numbers(scale_shapes(job.state), torch.float32) if kind == "int8" else {}
        state = _without_numbers(get_shapes(job.state), LIGHTER[kind])
        update = replace(update, state=state, compressed=kind, scales=scales)
    return reply_size(update, layout)


def _weightless(state: State) -> State:
    """Return a state that is packed like another one but has no numbers, so that counting copies none."""
    dtypes = {tensor.dtype for tensor in state.values()}
    return _without_numbers(get_shapes(state), dtypes.pop()) if len(dtypes) == 1 else state


def _without_numbers(shapes: Shapes, dtype: torch.dtype) -> State:
    total = sum(math.prod(shape) for shape in shapes.values())
    return FlatState(torch.empty(total, dtype=dtype, device="meta"), shapes)
