"""Check the tensors of a run folder against its run: names, shapes, dtypes, and that numbers are finite.

The layout gives the tensors of a state. Beside them, a state may have tensors under a prefix: `level{l}/` for a level's
own model, any other for copies of whole blocks of the full model. A memory that holds a state has its sub-model with
it. A method declares the check of what else it keeps (`Method.check_memory`).
"""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fleetfit.anatomy import Layout, State
from fleetfit.core import ClientMemory, Federation, Problem
from fleetfit.errors import ModelError, RunError, format_exception
from fleetfit.hooks import build
from fleetfit.hooks.level_tensors import get_select
from fleetfit.runs.checkpoints import CheckpointError, validate_checkpoint
from fleetfit.submodel import find_mismatch, parse_submodel
from fleetfit.validation import find_prior_error, get_statistics_shapes

_LEVEL, _HEAD = re.compile(r"level(\d{1,4})"), re.compile(r"heads\.\d{1,4}\.")
_MAX_LEVELS = 10_000
_STORED_STATE = {"state", "channels", "exits"}
Shapes = Mapping[str, tuple[int, ...]]


def check_checkpoint(federation: Federation, payload: Any, round: int) -> dict[str, Any]:
    """Return a checkpoint by the levels of the run, after checking it.

    Args:
        federation: The federation of the run.
        payload: The content of the checkpoint.
        round: The round in the name of its file.

    Raises:
        CheckpointError: It does not fit the run; the sentence names the tensor.
    """
    checkpoint = _match_levels(validate_checkpoint(payload, round), federation)
    own = _is_own(federation.method_spec)
    _check_state(checkpoint["server"]["state"], federation, own)
    _check_statistics(checkpoint["statistics"] or {}, federation)
    if any(level >= len(federation.levels) for level in checkpoint["server"].get("trained", {}).values()):
        raise CheckpointError(f"server/trained has levels beyond the {len(federation.levels)}")
    prior = torch.tensor(checkpoint["server"].get("prior", []), dtype=torch.float64)
    if len(prior) and (reason := find_prior_error(prior, federation.classes)):
        raise CheckpointError(f"server/prior: {reason.removesuffix('.')}")
    if own and (memory := checkpoint["server"]["memory"]) is not None:
        if not isinstance(memory, Mapping):
            raise CheckpointError("server/memory is not a table by name")
        shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint["server"]["state"].items()}
        _check_memory(memory, "server/memory", federation, shapes)
    is_simulated = "versions" not in checkpoint["clients"]
    for client, entry in checkpoint["clients"].items() if is_simulated else ():
        where = f"clients/{client}"
        if int(client) >= len(federation.clients):
            raise CheckpointError(f"{where} is not one of the {len(federation.clients)} clients")
        if entry["version"] >= round:
            raise CheckpointError(f"{where} has the memory of round {entry['version'] + 1}, which is still to come")
        _check_memory(entry["memory"], f"{where}/memory", federation, {})
    return checkpoint


def _match_levels(checkpoint: dict[str, Any], federation: Federation) -> dict[str, Any]:
    """Return a checkpoint with the tensors of each level by its present index, where the levels of the run changed."""
    names = [level.name for level in federation.levels]
    stored = checkpoint.get("levels") or [str(i + 1) for i in range(_MAX_LEVELS)]
    if names == stored[: len(names)] or not all(name.isdecimal() for name in names):
        return checkpoint
    index = {i: names.index(name) for i, name in enumerate(stored) if name in names}
    tensors = federation.problem.layout.tensors
    server, statistics = checkpoint["server"], checkpoint["statistics"]
    server = server | {
        "state": _rename_levels(server["state"], index, tensors),
        "memory": _rename_levels(server["memory"], index, tensors),
    }
    if "trained" in server:
        server["trained"] = {client: index[level] for client, level in server["trained"].items() if level in index}
    if statistics is not None:
        statistics = {index[level]: state for level, state in statistics.items() if level in index}
    return {**checkpoint, "server": server, "statistics": statistics}


def _rename_levels(table: Any, index: Mapping[int, int], tensors: Container[str]) -> Any:
    """Return tables in which the tensors under `level{l}/` are those of the same level by its new index.

    Tensors of levels that are gone are left out, and those of classifiers that the model (`tensors`) no longer has.
    """
    if not isinstance(table, Mapping):
        return table
    renamed = {}
    for name, value in table.items():
        match = _LEVEL.match(name) if isinstance(name, str) else None
        if match is not None and name[match.end() :].startswith("/"):
            if int(match[1]) - 1 not in index:
                continue
            name = f"level{index[int(match[1]) - 1] + 1}{name[match.end() :]}"
        if not isinstance(name, str) or not _HEAD.match(name) or name in tensors:
            renamed[name] = _rename_levels(value, index, tensors)
    return renamed


def check_base(problem: Problem, stored: State) -> None:
    """Compare the stored tensors that are never trained with those of the model.

    Args:
        problem: The problem, with its base.
        stored: The tensors of `base.safetensors`.

    Raises:
        RunError: A tensor is missing, unknown, or of another shape; the sentence names it.
    """
    if not stored and not problem.base:
        return
    layout = replace(problem, base={}).layout if stored else problem.layout
    try:
        _check(stored, layout.frozen.shapes({}, layout.exits), "")
    except CheckpointError as error:
        raise RunError(
            f"base.safetensors, the tensors that are never trained, does not fit the model: {error}."
        ) from None


# ---- states --------------------------------------------------------------------------------------------------------


def _check(state: Any, shapes: Shapes, where: str) -> None:
    """Compare a state with names and shapes."""
    for name in shapes:
        if not isinstance(state, Mapping) or name not in state:
            raise CheckpointError(f'"{where}{name}" is missing')
    for name, tensor in state.items():
        if name not in shapes:
            raise CheckpointError(f'"{where}{name}" is not a tensor of this model')
        _check_tensor(tensor, shapes[name], f"{where}{name}")


def _check_tensor(tensor: Any, shape: tuple[int, ...], name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f'"{name}" is not a tensor')
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f'"{name}" has shape {tuple(tensor.shape)}, expected {shape}')
    if tensor.dtype != torch.float32:
        raise CheckpointError(f'"{name}" is {tensor.dtype}, expected torch.float32')
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f'"{name}" has numbers that are not finite')


def _check_state(state: State, federation: Federation, own: bool) -> None:
    """Compare the server's state with the full model, and its prefixed tensors with what a prefix may hold."""
    layout = federation.problem.layout
    plain = {name: tensor for name, tensor in state.items() if name in layout.tensors}
    _check(plain, layout.shapes({}, layout.exits), "server/state/")
    if not own:
        return
    prefixed: dict[str, dict[str, Tensor]] = {}
    for name in (name for name in state if name not in plain):
        prefix, slash, rest = name.partition("/")
        if not slash or rest not in layout.tensors:
            raise CheckpointError(f'"server/state/{name}" is not a tensor of this model')
        prefixed.setdefault(prefix, {})[rest] = state[name]
    for prefix, tensors in prefixed.items():
        _check(tensors, _get_prefixed_shapes(prefix, tensors, federation), f"server/state/{prefix}/")


def _get_prefixed_shapes(prefix: str, tensors: State, federation: Federation) -> Shapes:
    """Return the shapes of the tensors under a prefix: those that a level owns, or blocks of the full model."""
    layout, match = federation.problem.layout, _LEVEL.fullmatch(prefix)
    if match is None:
        blocks = {layout.tensors[name].block for name in tensors}
        every = layout.shapes({}, layout.exits)
        return {name: every[name] for name, tensor in layout.tensors.items() if tensor.block in blocks}
    if not 1 <= int(match[1]) <= len(federation.levels):
        raise CheckpointError(f'"server/state/{prefix}/" is not one of the {len(federation.levels)} levels')
    submodel, select = federation.levels[int(match[1]) - 1].submodel, get_select(federation)
    shapes = layout.shapes(submodel.sizes, submodel.exits)
    return {name: shape for name, shape in shapes.items() if select(name)}


def _check_statistics(statistics: Mapping[int, State], federation: Federation) -> None:
    for index, state in statistics.items():
        if index >= len(federation.levels):
            raise CheckpointError(f"statistics/{index} is not one of the {len(federation.levels)} levels")
        if state:  # empty for a level without samples
            where = f"statistics/{index}/"
            _check(state, get_statistics_shapes(federation.problem, federation.levels[index].submodel), where)
            for name, tensor in state.items():
                if name.endswith(".var") and bool((tensor < 0).any()):
                    raise CheckpointError(f'"{where}{name}" has variances below 0')


# ---- memories ------------------------------------------------------------------------------------------------------


def _check_memory(memory: Any, where: str, federation: Federation, shapes: Shapes) -> None:
    """Check the states in a memory, tensors that are named as those of `shapes`, and what the method declares."""
    _check_states(memory, where, federation.problem.layout, shapes)
    own = ClientMemory.from_payload(memory).method
    if isinstance(own, Mapping):
        try:
            build(federation.method_spec).check_memory(federation, own)
        except Exception as error:
            raise CheckpointError(f"{where}: {format_exception(error)}") from None


def _check_states(value: Any, where: str, layout: Layout, shapes: Shapes) -> None:
    """Check each state that has its sub-model beside it, and each tensor that has the name of one of the server's."""
    if isinstance(value, Mapping) and value.keys() >= _STORED_STATE:
        try:
            submodel = parse_submodel(value)
            reason = find_mismatch(layout, submodel)
        except ModelError as error:
            reason = str(error)
        if reason is not None:
            raise CheckpointError(f"{where}: {reason.removesuffix('.')}")
        _check(value["state"], layout.shapes(submodel.sizes, submodel.exits), f"{where}/state/")
        return
    listed = enumerate(value) if isinstance(value, list | tuple) else ()
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else listed
    for key, inner in items:
        if isinstance(inner, Tensor) and key in shapes:
            _check_tensor(inner, shapes[key], f"{where}/{key}")
        else:
            _check_states(inner, f"{where}/{key}", layout, shapes)


def _is_own(spec: Any) -> bool:
    """Return whether all functions of a method are FleetFit's own; the names of others have a colon."""
    if isinstance(spec, Mapping):
        return all(_is_own(value) for key, value in spec.items()) and not any(":" in str(key) for key in spec)
    if isinstance(spec, list | tuple):
        return all(map(_is_own, spec))
    return not callable(spec) and not (isinstance(spec, str) and ":" in spec)
