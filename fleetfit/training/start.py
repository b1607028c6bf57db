"""Where a model begins other than from drawn values: a checkpoint of its architecture, or the end of another run."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fleetfit.errors import ModelError, RunError
from fleetfit.layout import Layout, State, TensorLayout
from fleetfit.records import RunFolder
from fleetfit.records.checkpoints import validate_checkpoint
from fleetfit.values import Problem

OF_LEVEL = re.compile(r"level(\d+)/")  # Decoupled keeps one model per level; the last level's is the full model


@dataclass(frozen=True)
class Beginnings:
    """What does not begin from drawn values.

    Attributes:
        state: Tensors of the full model.
        notes: Sentences that say where they come from, and what begins anew.
    """

    state: dict[str, Tensor]
    notes: tuple[str, ...]


def beginnings(problem: Problem) -> Beginnings:
    """Return what the architecture's checkpoint gives, and over it what the run gives that this one starts from.

    A classifier that they lack, or that is for another number of classes, keeps its drawn values.

    Raises:
        FleetFitError: A checkpoint cannot be read, or does not fit the model.
    """
    state: dict[str, Tensor] = {}
    notes: list[str] = []
    pretrained = getattr(problem.architecture, "pretrained", None)
    found = pretrained(problem.exits) if pretrained is not None else {}
    if found:
        source = getattr(problem.architecture, "checkpoint", None) or type(problem.architecture).__name__
        state |= _fitting(problem, found, str(source), notes)
    if problem.start:
        found, source = _end_of(problem.start)
        adopted = getattr(problem.architecture, "adopted", None)
        state |= _fitting(problem, found if adopted is None else adopted(found), source, notes)
    if problem.layout.base and not state:
        notes.append("What is never trained begins drawn: give the model a checkpoint, or the run a start.")
    return Beginnings(state, tuple(notes))


def _end_of(folder: str) -> tuple[State, str]:
    """Return the newest state of a run, and what to call it."""
    found = RunFolder.open(folder).load_checkpoint(validate_checkpoint)
    if found is None:
        raise RunError(f"the run {folder} has no checkpoint yet, so nothing can start from it.", path=folder)
    server = found["server"]
    state: State = server["state"]
    levels = {int(match[1]) for name in state if (match := OF_LEVEL.match(name))}
    if levels:
        prefix = f"level{max(levels)}/"
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    state = {**RunFolder(Path(folder)).load_base(), **state}
    return state, f"{folder} after round {server['round']}"


def _fitting(problem: Problem, found: State, source: str, notes: list[str]) -> dict[str, Tensor]:
    """Return the tensors that the model takes, and note what begins anew."""
    layout, added = problem.layout.complete, getattr(problem.architecture, "added", lambda name: False)
    taken: dict[str, Tensor] = {}
    anew: dict[str, None] = {}  # a set in order
    for name, shape in layout.shapes({}, layout.exits).items():
        tensor, ours = found.get(name), layout.tensors[name]
        if tensor is not None and tuple(tensor.shape) == shape:
            taken[name] = tensor.float()
        elif tensor is None and added(name):
            anew["what is put in"] = None
        elif ours.exit is not None if tensor is None else _only_classes_differ(layout, ours, tensor, shape):
            anew[name if ours.exit is None else f"heads.{ours.exit}"] = None
        elif tensor is None:
            raise ModelError(
                f'the model cannot begin as {source}, which has no "{name}". Is it the same [model]?', key="start"
            )
        else:
            raise ModelError(
                f'the model cannot begin as {source}: "{name}" is {tuple(tensor.shape)} there and {shape} here. Set '
                "the same [model], the same number of classes aside.",
                key="start",
            )
    if not all(bool(torch.isfinite(tensor).all()) for tensor in taken.values()):
        raise ModelError(f"the model cannot begin as {source}: some of its numbers are not finite.", key="start")
    notes.append(f"The model begins as {source}{'; anew, at least in part: ' if anew else ''}{', '.join(anew)}.")
    return taken


def _only_classes_differ(layout: Layout, ours: TensorLayout, tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor fits but for dimensions that width never cuts (the classes)."""
    if tensor.dim() != len(shape):
        return False
    differing = [dim for dim, a, b in zip(ours.dims, tensor.shape, shape, strict=True) if a != b]
    return all(any(not layout.axes[axis].scaled for s in dim for axis in s.axes) for dim in differing)


def notes_on_start(problem: Problem) -> tuple[str, ...]:
    """Return the sentences of `beginnings`; of a run that is gone, that it is gone, for it is needed only once."""
    if problem.start and not Path(problem.start).expanduser().exists():
        return (f"The model began as {problem.start}, which is not there any more.",)
    return beginnings(problem).notes
