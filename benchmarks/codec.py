"""A state to bytes and back: a message, and a checkpoint's file, against a plain copy of the same bytes."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Figure, Options, Step, ratio
from fleetfit import names
from fleetfit.anatomy import infer_layout
from fleetfit.messages import dump_state, pack, unpack
from fleetfit.runs.checkpoints import read_checkpoint, write_checkpoint
from fleetfit.submodel import full_submodel, get_slice_plan
from fleetfit.submodel.state import concat_state


def figures(options: Options) -> Iterator[Figure]:
    """Alternate each with a copy of the same bytes."""
    for what, ours, copy in steps():
        yield ratio(f"{what}, against a copy", ours, copy, 10 * options.repetitions)


def steps() -> Iterator[tuple[str, Step, Step]]:
    """Yield what is measured with the copy that it is measured against, of ResNet-110 (7 MB)."""
    architecture = names.resolve("models", "resnet110")(classes=10)
    layout = infer_layout(architecture, (architecture.blocks,))
    piece = full_submodel(layout)
    state = get_slice_plan(layout, piece).views(torch.zeros(get_slice_plan(layout, piece).size))
    message, flat = pack(dump_state(state, layout, piece)), concat_state(state)
    what = f"{len(message) / 1e6:.1f} MB"

    def copy() -> Any:
        return bytes(flat.numpy().data)

    yield f"a message of {what} packed", lambda: pack(dump_state(state, layout, piece)), copy
    received = bytearray(message)
    yield f"a message of {what} read", lambda: get_slice_plan(layout, piece).views(unpack(received, bounded=True)), copy
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "state"
        yield f"a checkpoint of {what} written", lambda: write_checkpoint(path, {"state": state}), copy
        yield f"a checkpoint of {what} read", lambda: read_checkpoint(path), copy
