"""Lighter updates: what training changed, in half precision or 8-bit integers, with error feedback.

Instead of its state x a client sends Q(d) with d = x - x0 + e. Server and client both have x0, the piece that was sent,
so the server goes on with x0 + Q(d), of which nothing but Q is lost; and the client keeps e <- d - Q(d) for its next
update (error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019). Where the next sub-model is
another one, what both have moves along and the rest begins at zero.

"float16" rounds to the nearest half. "int8" rounds to the nearest of 255 steps between -s and s, s being the largest
absolute value of a row of the tensor (its first dimension; a vector is one row). What travels down is not compressed:
it is the same for all clients of a sub-model, and an error in it would be everybody's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fleetfit.layout import Layout, State
from fleetfit.submodel import Submodel, recut
from fleetfit.values import Job, Update

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
