"""The start of a model that is not drawn at random: a checkpoint of its architecture, or the end of another run."""

from pathlib import Path

import torch
from torch import Tensor

from fleetfit.core import Problem
from fleetfit.errors import ModelError, RunError
from fleetfit.hooks.level_tensors import get_largest_state
from fleetfit.layout import Layout, State, TensorLayout
from fleetfit.runs.checkpoints import validate_checkpoint
from fleetfit.runs.folder import RunFolder


def load_start(problem: Problem) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the part of a model that is not drawn at random.

    It is the architecture's checkpoint, replaced where the run that this one starts from has tensors. A classifier that
    they lack, or that is for another number of classes, keeps its drawn values.

    Returns:
        Tensors of the full model, and notes that say where they come from, and what is drawn anew.

    Raises:
        FleetFitError: A checkpoint cannot be read, or does not fit the model.
    """
    state: dict[str, Tensor] = {}
    notes: list[str] = []
    pretrained = getattr(problem.architecture, "pretrained", None)
    checkpoint = pretrained(problem.exits) if pretrained is not None else {}
    if checkpoint:
        source = getattr(problem.architecture, "checkpoint", None) or type(problem.architecture).__name__
        state |= _select_fitting(problem, checkpoint, str(source), notes)
    if problem.init_from:
        checkpoint, source = _load_last_state(problem.init_from)
        rename = getattr(problem.architecture, "rename_tensors", None)
        state |= _select_fitting(problem, checkpoint if rename is None else rename(checkpoint), source, notes)
    if problem.layout.base and not state:
        notes.append("What is never trained begins drawn: give the model a checkpoint, or the run init_from.")
    return state, tuple(notes)


def describe_start(problem: Problem) -> tuple[str, ...]:
    """Return the notes of `load_start`, or a note that the run is gone: it is needed only once."""
    if problem.init_from and not Path(problem.init_from).expanduser().exists():
        return (f"The model began as {problem.init_from}, which is not there any more.",)
    return load_start(problem)[1]


def _load_last_state(folder: str) -> tuple[State, str]:
    """Return the newest state of a run, and its name for messages."""
    checkpoint = RunFolder.open(folder).load_checkpoint(validate_checkpoint)
    if checkpoint is None:
        raise RunError(f"the run {folder} has no checkpoint yet, so nothing can start from it.", path=folder)
    server = checkpoint["server"]
    state = {**RunFolder(Path(folder)).load_base(), **get_largest_state(server["state"])}
    return state, f"{folder} after round {server['round']}"


def _select_fitting(problem: Problem, checkpoint: State, source: str, notes: list[str]) -> dict[str, Tensor]:
    """Return the tensors that the model takes, and add a note on those that are drawn anew."""
    layout, is_added = problem.layout.complete, getattr(problem.architecture, "is_new", lambda name: False)
    taken: dict[str, Tensor] = {}
    drawn: dict[str, None] = {}  # an ordered set
    for name, shape in layout.shapes({}, layout.exits).items():
        tensor, expected = checkpoint.get(name), layout.tensors[name]
        if tensor is not None and tuple(tensor.shape) == shape:
            taken[name] = tensor.float()
        elif tensor is None and is_added(name):
            drawn["what is put in"] = None
        elif expected.exit is not None if tensor is None else _differs_in_classes_only(layout, expected, tensor, shape):
            drawn[name if expected.exit is None else f"heads.{expected.exit}"] = None
        elif tensor is None:
            raise ModelError(
                f'the model cannot start from {source}, which has no "{name}". Is it the same [model]?', key="init_from"
            )
        else:
            raise ModelError(
                f'the model cannot start from {source}: "{name}" is {tuple(tensor.shape)} there and {shape} here. Set '
                "the same [model], the same number of classes aside.",
                key="init_from",
            )
    for name, tensor in taken.items():
        if not bool(torch.isfinite(tensor).all()):
            advice = (
                "" if layout.tensors[name].trainable else " Register a constant with persistent=False: it is not sent."
            )
            raise ModelError(
                f'the model cannot start from {source}: some numbers of "{name}" are not finite.{advice}',
                key="init_from",
            )
    notes.append(f"The model starts from {source}{'; new, at least in part: ' if drawn else ''}{', '.join(drawn)}.")
    return taken


def _differs_in_classes_only(layout: Layout, expected: TensorLayout, tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor fits except in dimensions that width never scales (the classes)."""
    if tensor.dim() != len(shape):
        return False
    differing = [dim for dim, a, b in zip(expected.dims, tensor.shape, shape, strict=True) if a != b]
    return all(any(not layout.axes[axis].scaled for s in dim for axis in s.axes) for dim in differing)
