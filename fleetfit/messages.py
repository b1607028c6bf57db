"""Jobs and updates as bytes, without pickle; updates in half precision or 8-bit integers.

Instead of its state x a client sends Q(d) with d = x - x0 + e, where x0 is the state that it received. The server
continues with x0 + Q(d), and the client adds e <- d - Q(d) to its next update (error feedback: Seide et al.,
Interspeech 2014; Karimireddy et al., ICML 2019). For another sub-model, e keeps the elements that both have, and the
others begin at zero.

"float16" rounds to the nearest half. "int8" rounds to the nearest of 255 steps between -s and s, where s is the largest
absolute value of a row of the tensor (its first dimension; a vector is one row). Jobs are not compressed: all clients
of a sub-model receive the same state, and would share its error.

A message is `FFIT`, a byte for its format, three for the version of FleetFit that wrote it, the length of the header (8
bytes, little endian), the header, and flat tensors, one for each dtype. The header is JSON: the number of elements of
each dtype, and the plain values of `fleetfit.submodel.state.flatten`. A state that follows from its sub-model and the
layout is one flat tensor without names.

A message may come from a stranger. All that it announces is compared with its bytes before anything is made of it: the
length of the header, the elements, the depth, the dimensions and sizes of tensors. If it comes from another machine
(`bounded`), the memory of its header's values is estimated first, by counting characters, so that a small message
cannot become large.
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

from fleetfit.core import Evaluation, Failure, Job, Local, Update
from fleetfit.core.local import Compression
from fleetfit.errors import FleetFitError, RunError, one_line
from fleetfit.hooks import is_portable
from fleetfit.layout import Layout, State
from fleetfit.submodel import (
    Submodel,
    dump_submodel,
    find_mismatch,
    get_slice_plan,
    move_state,
    pack_state,
    parse_submodel,
)
from fleetfit.submodel.state import (
    DTYPES,
    FlatState,
    Shapes,
    concat_tensors,
    flatten,
    get_shapes,
    tensor_bytes,
    unflatten,
)

# ---- compressed updates --------------------------------------------------------------------------------------------

STEPS = 127
LIGHTER = {"float16": torch.float16, "int8": torch.int8}


def compress(
    update: Update, job: Job, layout: Layout, kind: Compression, lost: Mapping[str, Any] | None
) -> tuple[Update, Any]:
    """Return a compressed update, and its rounding errors for the client's memory.

    Args:
        update: A training update, with its state in float32.
        job: The job of the update.
        layout: The layout of the model.
        kind: "float16" or "int8".
        lost: The rounding errors of the client's last accepted update, or None.
    """
    submodel, base = update.submodel, _get_base(update, job, layout)
    before = None
    if lost:
        source = parse_submodel(lost)
        before = lost["state"] if source == submodel else move_state(layout, lost["state"], source, submodel)
    compressed: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    errors: dict[str, Tensor] = {}
    for name, tensor in update.state.items():
        change = tensor - base[name] if before is None else tensor - base[name] + before[name]
        compressed[name], scale = _round(change, kind)
        if scale is not None:
            scales[name] = scale
        errors[name] = change - _restore(compressed[name], scale)
    return replace(update, state=compressed, compressed=kind, scales=scales), pack_state(submodel, errors)


def decompress(update: Update, job: Job, layout: Layout) -> Update:
    """Return a compressed update with its state in float32; its shapes and dtypes must be right."""
    base = _get_base(update, job, layout)
    state = {name: base[name] + _restore(tensor, update.scales.get(name)) for name, tensor in update.state.items()}
    return replace(update, state=state, compressed="", scales={})


def _get_base(update: Update, job: Job, layout: Layout) -> State:
    """Return the sub-model of an update as its job had it."""
    if update.submodel == job.submodel:
        return job.state
    return move_state(layout, job.state, job.submodel, update.submodel)


def _round(change: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Return a tensor in lower precision, and the scales of its rows in "int8"."""
    if kind == "float16":
        largest = torch.finfo(torch.float16).max
        return change.clamp(-largest, largest).half(), None
    rows = change.reshape(count_scales(tuple(change.shape)), -1)
    scale = rows.abs().amax(1) / STEPS if rows.shape[1] else torch.zeros(len(rows))
    steps = rows / torch.where(scale > 0, scale, 1.0)[:, None]
    return steps.round().clamp(-STEPS, STEPS).to(torch.int8).view(change.shape), scale


def _restore(compressed: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return compressed.float()
    rows = compressed.reshape(len(scale), -1).float() * scale[:, None]
    return rows.view(compressed.shape)


def count_scales(shape: tuple[int, ...]) -> int:
    """Return the number of scales of a tensor."""
    return shape[0] if len(shape) > 1 else 1


def scale_shapes(state: State) -> Shapes:
    """Return the shapes of the scales of a state in "int8"."""
    return {name: (count_scales(shape),) for name, shape in get_shapes(state).items()}


# ---- payloads as bytes ---------------------------------------------------------------------------------------------

FORMAT = 2
_MAGIC = b"FFIT"
_START = 16
_MULTIPLE = 16  # bytes of memory for each byte of a bounded message,
_FREE = 2**20  # and for every message
# bytes of memory that a character of the header stands for, about (CPython 3.11): a table, a list with its first
# element, a further element, a key, one of a text's two quotes
_WEIGHTS = ((b"{", 232), (b"[", 104), (b",", 40), (b":", 60), (b'"', 30))


def pack(payload: Any) -> bytes:
    """Return nested values and tensors as one message."""
    header, parts = _make_header(payload)
    return b"".join([header, *(tensor_bytes(flat) for flats in parts.values() for flat in flats)])


def packed_size(payload: Any) -> int:
    """Return the length of `pack(payload)` in bytes without making it."""
    header, parts = _make_header(payload)
    return len(header) + sum(flat.numel() * flat.element_size() for flats in parts.values() for flat in flats)


def _make_header(payload: Any) -> tuple[bytes, dict[str, list[Tensor]]]:
    """Return the bytes before the buffers of a message, and the parts of the buffers."""
    try:
        plain, parts = flatten(payload)
    except ValueError as error:
        raise RunError(
            f"a client remembers and reports numbers, text, tensors, and lists and tables of them only: {error}."
        ) from None
    counts = {name: sum(flat.numel() for flat in flats) for name, flats in parts.items()}
    text = json.dumps([counts, plain], separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the buffers begin at a multiple of 8
    return _MAGIC + bytes([FORMAT, *_get_release()]) + len(text).to_bytes(8, "little") + text, parts


@functools.cache
def _get_release() -> tuple[int, ...]:
    numbers = [int(number) for number in re.findall(r"\d+", importlib.metadata.version("fleetfit"))[:3]]
    return tuple(min(number, 255) for number in (*numbers, 0, 0, 0)[:3])


def unpack(message: bytes | bytearray, bounded: bool = False) -> Any:
    """Return the payload of a message; its tensors share the message's memory.

    Args:
        message: The bytes.
        bounded: Whether to refuse, before it is parsed, a header whose values would take more than 16 times the bytes
            of the message and 1 MiB: for messages from another machine.

    Raises:
        RunError: The message is damaged, has another format, or exceeds the bounds.
    """
    buffer = message if isinstance(message, bytearray) else bytearray(message)
    if len(buffer) < _START or buffer[:4] != _MAGIC:
        raise RunError("a message does not begin as FleetFit's do.")
    if (version := buffer[4]) != FORMAT:
        ours, theirs = (".".join(map(str, release)) for release in (_get_release(), buffer[5:8]))
        raise RunError(
            f"a message of format {version} came from FleetFit {theirs}; this side, {ours}, reads format {FORMAT}. "
            f"Install FleetFit {theirs} here, or {ours} on the other side."
        )
    length = int.from_bytes(buffer[8:_START], "little")
    if length > len(buffer) - _START:
        raise RunError("a message ends inside its header.")
    bytes_left = _compute_bytes_left(buffer, _START + length) if bounded else None
    try:
        plain = json.loads(buffer[_START : _START + length])
    except (ValueError, RecursionError) as error:
        raise RunError(f"a message has an unreadable header: {one_line(str(error))}") from None
    try:
        if not isinstance(plain, list) or len(plain) != 2:
            raise ValueError("its header does not have two parts")
        return unflatten(plain[1], _read_buffers(plain[0], buffer, _START + length), bytes_left)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # also of torch, and of endless nesting
        raise RunError(f"a message is damaged: {one_line(str(error))}.") from None


def _compute_bytes_left(buffer: bytearray, end: int) -> int:
    """Return the bytes that tensors may take; the header's values take bytes by its characters."""
    most = _MULTIPLE * len(buffer) + _FREE
    left = most - sum(weight * buffer.count(character, _START, end) for character, weight in _WEIGHTS)
    if left < 0:
        raise RunError(
            f"a message of {len(buffer)} bytes has a header that would take about {most - left} bytes of memory; at "
            f"most {_MULTIPLE} times its own and {_FREE} are allowed."
        )
    return left


def _read_buffers(counts: Any, buffer: bytearray, start: int) -> dict[str, Tensor]:
    """Return the flat tensors of a message, which must be as long as they are, to the byte."""
    if not isinstance(counts, dict) or not all(type(n) is int and 0 <= n < 2**48 for n in counts.values()):
        raise ValueError("its header does not count the numbers behind it")
    if [name for name in DTYPES if name in counts] != list(counts):
        raise ValueError("its dtypes are unknown, or in another order")
    end = start + sum(n * DTYPES[name].itemsize for name, n in counts.items())
    if end != len(buffer):
        raise ValueError(f"it has {len(buffer)} bytes where its header describes {end}")
    if counts and start % 8:
        raise ValueError("its numbers do not begin at a multiple of 8 bytes")
    whole, tensors = torch.frombuffer(buffer, dtype=torch.uint8), dict[str, Tensor]()
    for name, n in counts.items():
        end = start + n * DTYPES[name].itemsize
        tensors[name], start = whole[start:end].view(DTYPES[name]), end
    return tensors


# ---- jobs and updates --------------------------------------------------------------------------------------------


# A state with the shapes of its sub-model is sent as one flat tensor, any other state as a table of tensors by name:
# sums of a statistics job. Extra tensors are always a table.


def dump_job(job: Job, layout: Layout) -> dict[str, Any]:
    """Return a job as a payload for `pack`; functions without an import path become their representation."""
    evaluation = dict(vars(job.evaluation), metrics=list(job.evaluation.metrics))
    for name in ("metrics", "scope", "personal"):  # which earlier versions do not know
        if getattr(job.evaluation, name) == getattr(Evaluation, name):
            del evaluation[name]
    fields = dict(
        vars(job), submodel=dump_submodel(job.submodel), state=dump_state(job.state, layout, job.submodel),
        local=job.local.dump(), evaluation=evaluation,
    )  # fmt: skip
    del fields["levels"], fields["dispatched"]  # a device has them from its problem, and from the job itself
    for name in ("prior", "extra"):
        if not fields[name]:
            del fields[name]
    if not is_portable(job.method):
        fields["method"] = repr(job.method)
    return fields


def load_job(payload: Mapping[str, Any], layout: Layout) -> Job:
    """Return the job of a payload; `fleetfit.validation` checks the values of its fields.

    Raises:
        RunError: The payload is not a job, or its state does not fit its sub-model.
    """
    try:
        submodel, evaluation = parse_submodel(payload["submodel"]), payload["evaluation"]
        fields = {
            **payload, "submodel": submodel, "state": _load_state(payload["state"], layout, submodel),
            "local": Local.load(payload["local"]),
            "evaluation": Evaluation(**{**evaluation, "metrics": tuple(evaluation.get("metrics", ()))}),
        }  # fmt: skip
        return Job(**fields)
    except (FleetFitError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"the payload is not a job: {type(error).__name__}: {one_line(str(error))}.") from None


def dump_reply(reply: Update | Failure, layout: Layout) -> dict[str, Any]:
    """Return an update or a failure as a payload for `pack`; the receiver fills in the byte counts."""
    if isinstance(reply, Failure):
        return dump_failure(reply)
    fields = _dump_fields(reply)
    fields["state"] = dump_state(reply.state, layout, reply.submodel)
    fields["scales"] = _join_state(reply.scales, scale_shapes(reply.state))
    fields["submodel"] = dump_submodel(reply.submodel)
    if reply.submodel == reply.dispatched:  # defaults are left out
        del fields["submodel"]
    if not reply.compressed:
        del fields["compressed"], fields["scales"]
    if not reply.untrained:
        del fields["untrained"]
    if not reply.extra:
        del fields["extra"]
    return {"kind": "update", **fields}


def dump_failure(failure: Failure) -> dict[str, Any]:
    """Return a failure as a payload for `pack`."""
    return {"kind": "failure", **_dump_fields(failure)}


def _dump_fields(reply: Update | Failure) -> dict[str, Any]:
    fields = {key: value for key, value in vars(reply).items() if key not in ("bytes_down", "bytes_up")}
    return {**fields, "dispatched": dump_submodel(reply.dispatched)}


def load_reply(payload: Mapping[str, Any], layout: Layout) -> Update | Failure:
    """Return the update or failure of a payload; `fleetfit.validation` checks the values of its fields.

    Raises:
        RunError: The payload is neither, or its state does not fit its sub-model.
    """
    try:
        fields = {**payload, "dispatched": parse_submodel(payload["dispatched"])}
        kind = fields.pop("kind")
        if kind == "failure":
            return Failure(**fields)
        if kind != "update":
            raise RunError(f"its kind is {one_line(kind, 60)}.")
        submodel = parse_submodel(payload.get("submodel", payload["dispatched"]))
        state = _load_state(payload["state"], layout, submodel)
        scales = payload.get("scales", {})
        if isinstance(scales, Tensor):
            scales = _split_flat(scales, scale_shapes(state), "scales")
        return Update(**{**fields, "submodel": submodel, "state": state, "scales": scales})
    except (FleetFitError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        raise RunError(f"the payload is neither an update nor a failure: {reason}") from None


def dump_state(state: State, layout: Layout, submodel: Submodel) -> Tensor | dict[str, Tensor]:
    """Return a state for a payload: one flat tensor if it has the shapes of its sub-model, else tensors by name."""
    if not state or find_mismatch(layout, submodel) is not None:
        return dict(state)
    return _join_state(state, get_slice_plan(layout, submodel).shapes)


def _join_state(state: State, expected: Shapes) -> Tensor | dict[str, Tensor]:
    if not state or get_shapes(state) != expected:
        return dict(state)
    if isinstance(state, FlatState) and list(state) == list(expected):
        return state.flat
    tensors = [state[name] for name in expected]
    return concat_tensors(tensors) if len({tensor.dtype for tensor in tensors}) == 1 else dict(state)


def _load_state(state: Any, layout: Layout, submodel: Submodel) -> Any:
    """Return a state by the names of its tensors; a table is returned as it is."""
    if not isinstance(state, Tensor):
        return state
    reason = find_mismatch(layout, submodel)
    if reason is not None:
        raise RunError(reason)
    return _split_flat(state, get_slice_plan(layout, submodel).shapes, "state")


def _split_flat(flat: Tensor, shapes: Shapes, what: str) -> FlatState:
    expected = sum(math.prod(shape) for shape in shapes.values())
    if tuple(flat.shape) != (expected,):
        raise RunError(f"its {what} is a tensor {tuple(flat.shape)}; its sub-model asks for ({expected},).")
    return FlatState(flat, shapes)


# ---- sizes ---------------------------------------------------------------------------------------------------------


def job_size(job: Job, layout: Layout) -> int:
    """Return the bytes of a job as the server sends it: an engine adds the version of the client's memory later."""
    job = replace(
        job, memory_version=-1, state=_drop_numbers(job.state), statistics=_drop_numbers(job.statistics),
        extra=_drop_numbers(job.extra),
    )  # fmt: skip
    return packed_size(dump_job(job, layout))


def reply_size(reply: Update | Failure, layout: Layout) -> int:
    """Return the bytes of a reply without the times of a simulated clock, which are not sent."""
    if isinstance(reply, Update):
        state, scales, extra = map(_drop_numbers, (reply.state, reply.scales, reply.extra))
        reply = replace(reply, state=state, scales=scales, extra=extra)
    payload = dump_reply(reply, layout)
    return packed_size({key: value for key, value in payload.items() if key not in ("multiply_adds", "simulated_s")})


def update_size(job: Job, layout: Layout, extra: Shapes) -> int:
    """Return the bytes of an update without metrics that a training job will have, with these extra tensors."""
    kind = job.local.compress
    update = Update.of(job, job.state, 0, extra=_make_empty(extra, torch.float32) if extra else {})
    if kind is not None:
        scales = _make_empty(scale_shapes(job.state), torch.float32) if kind == "int8" else {}
        update = replace(
            update, state=_make_empty(get_shapes(job.state), LIGHTER[kind]), compressed=kind, scales=scales
        )
    return reply_size(update, layout)


def _drop_numbers(state: State) -> State:
    """Return a state of the same size without numbers, so that no numbers are copied to count them."""
    dtypes = {tensor.dtype for tensor in state.values()}
    return _make_empty(get_shapes(state), dtypes.pop()) if len(dtypes) == 1 else state


def _make_empty(shapes: Shapes, dtype: torch.dtype) -> State:
    total = sum(math.prod(shape) for shape in shapes.values())
    return FlatState(torch.empty(total, dtype=dtype, device="meta"), shapes)
