"""Check a state: one that a round leaves, and one from a checkpoint.

The layout gives the tensors of a state. Beside them, a state may have tensors under a prefix: `level{l}/` for a level's
own model, any other for copies of whole blocks of the full model. A memory that holds a state has its sub-model with
it. What plug-ins keep is checked only where it has one of these forms.

Replies that are valid one by one can still add up to numbers that are not finite, by a large weight, a momentum, or a
product of two of them. A state with such a number makes every client diverge for the rest of the run. So the round is
rolled back: the server keeps state and memory from before it, clients do not remember it, and the report lists the
clients with the norms of their updates.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fleetfit.errors import ModelError, RunError, one_line
from fleetfit.layout import Layout, State, batch_norms, build_module
from fleetfit.layout.meta import on_meta
from fleetfit.runs.checkpoints import CheckpointError, validate_checkpoint
from fleetfit.submodel import Submodel, find_mismatch, is_finite, parse_submodel
from fleetfit.validation import find_prior_error
from fleetfit.values import Failure, Federation, Level, Problem, Server, Update

# ---- read from a checkpoint: names, shapes, dtypes, and that numbers are finite ------------------------------------

_LEVEL = re.compile(r"level(\d{1,4})")
_STORED_STATE = {"state", "channels", "exits"}
Shapes = Mapping[str, tuple[int, ...]]


def check_checkpoint(federation: Federation, payload: Any, round: int) -> None:
    """Check a checkpoint before it is used.

    Args:
        federation: The federation of the run.
        payload: The content of the checkpoint.
        round: The round in the name of its file.

    Raises:
        CheckpointError: It does not fit the run; the sentence names the tensor.
    """
    checkpoint = validate_checkpoint(payload, round)
    layout, own = federation.problem.layout, _is_own(federation.method_spec)
    _check_state(checkpoint["server"]["state"], federation, own)
    _check_statistics(checkpoint["statistics"] or {}, federation)
    if any(level >= len(federation.levels) for level in checkpoint["server"].get("trained", {}).values()):
        raise CheckpointError(f"server/trained has levels beyond the {len(federation.levels)}")
    prior = torch.tensor(checkpoint["server"].get("prior", []), dtype=torch.float64)
    if len(prior) and (reason := find_prior_error(prior, federation.classes)):
        raise CheckpointError(f"server/prior: {reason.removesuffix('.')}")
    if own:
        _check_server_memory(checkpoint["server"], federation)
    is_simulated = "versions" not in checkpoint["clients"]
    for client, entry in checkpoint["clients"].items() if is_simulated else ():
        where = f"clients/{client}"
        if int(client) >= len(federation.clients):
            raise CheckpointError(f"{where} is not one of the {len(federation.clients)} clients")
        if entry["version"] >= round:
            raise CheckpointError(f"{where} has the memory of round {entry['version'] + 1}, which is still to come")
        _walk(entry["memory"], f"{where}/memory", layout)


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
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{where} is not a state")
    for name in shapes:
        if name not in state:
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
    prefixed: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if name not in layout.tensors:
            prefix, slash, rest = name.partition("/")
            if own and (not slash or rest not in layout.tensors):
                raise CheckpointError(f'"server/state/{name}" is not a tensor of this model')
            prefixed.setdefault(prefix, {})[rest] = tensor
    for prefix, tensors in prefixed.items():
        if own:
            _check(tensors, _get_prefixed_shapes(prefix, tensors, federation), f"server/state/{prefix}/")


def _get_prefixed_shapes(prefix: str, tensors: State, federation: Federation) -> Shapes:
    """Return the shapes of the tensors under a prefix: a level's own model, or blocks of the full one."""
    layout, match = federation.problem.layout, _LEVEL.fullmatch(prefix)
    if match is None:
        blocks = {layout.tensors[name].block for name in tensors}
        every = layout.shapes({}, layout.exits)
        return {name: every[name] for name, tensor in layout.tensors.items() if tensor.block in blocks}
    if not 1 <= int(match[1]) <= len(federation.levels):
        raise CheckpointError(f'"server/state/{prefix}/" is not one of the {len(federation.levels)} levels')
    return _get_shapes(federation.levels[int(match[1]) - 1].submodel, layout)


def _get_shapes(submodel: Submodel, layout: Layout) -> Shapes:
    return layout.shapes(submodel.sizes, submodel.exits)


def _check_statistics(statistics: Mapping[int, State], federation: Federation) -> None:
    for index, state in statistics.items():
        if index >= len(federation.levels):
            raise CheckpointError(f"statistics/{index} is not one of the {len(federation.levels)} levels")
        if state:  # empty for a level without samples
            where = f"statistics/{index}/"
            _check(state, _get_norm_shapes(federation.problem, federation.levels[index]), where)
            for name, tensor in state.items():
                if name.endswith(".var") and bool((tensor < 0).any()):
                    raise CheckpointError(f'"{where}{name}" has variances below 0')


def _get_norm_shapes(problem: Problem, level: Level) -> Shapes:
    """Return the shapes of a level's batch-norm statistics."""
    sizes, exits = {**problem.layout.full_sizes, **level.submodel.sizes}, level.submodel.exits
    with on_meta():
        norms = batch_norms(build_module(problem.architecture, sizes, exits))
    return {f"{name}.{key}": (norm.num_features,) for name, norm in norms.items() for key in ("mean", "var")}


# ---- memories ------------------------------------------------------------------------------------------------------


def _check_server_memory(server: Mapping[str, Any], federation: Federation) -> None:
    """Check the server's memory: tables by client, and tensors with the names and shapes of its state."""
    memory, layout, where = server["memory"], federation.problem.layout, "server/memory"
    if memory is None:
        return
    _check_table(memory, where)
    shapes = {name: tuple(tensor.shape) for name, tensor in server["state"].items()}
    for key, value in memory.items():
        path = f"{where}/{key}"
        if key == "choice":
            _check_table(value, path)
            _check_choice(value, path)
        elif key == "adaptivefl":
            _check_reward_tables(value, path, len(federation.levels))
        elif key == "movement":
            _check_table(value, path)
            for depth, state in value.items():
                _check(state, _get_block_shapes(layout, depth), f"{path}/{depth}/")
        else:
            _walk_states(value, path, shapes, layout)


def _get_block_shapes(layout: Layout, depth: str) -> Shapes:
    """Return the shapes of the trainable tensors of a level's last block, by name within the block."""
    shapes, prefix = layout.shapes({}, layout.exits), f"blocks.{int(depth) - 1 if depth.isdecimal() else -1}."
    return {
        name.rpartition(prefix)[2]: shapes[name]
        for name, tensor in layout.tensors.items()
        if tensor.trainable and tensor.block is not None and prefix in name
    }


def _check_reward_tables(value: Any, path: str, models: int) -> None:
    """Check AdaptiveFL's tables, [3, clients] and [models, clients]."""
    _check_table(value, path)
    for key in ("curiosity", "resources"):
        table = value.get(key)
        is_table = isinstance(table, Tensor) and table.dim() == 2 and table.dtype == torch.float64
        if not is_table or not bool(torch.isfinite(table).all()):
            raise CheckpointError(f"{path}/{key} is not a table of scores by client")
    (kinds, clients), (rows, others) = value["curiosity"].shape, value["resources"].shape
    if (kinds, rows) != (3, models) or clients != others or len(value) > 2:
        raise CheckpointError(f'"{path}" has tables of {kinds} x {clients} and {rows} x {others}')


def _check_choice(tables: Mapping[str, Any], path: str) -> None:
    """Expect numbers by client [clients], and a row of directions [clients, levels, buckets] for each of "clients"."""
    for key, value in tables.items():
        is_named = key in ("directions", "clients")
        if not isinstance(value, Tensor) or (value.dim() != 1 and not is_named) or bool(value.isnan().any()):
            raise CheckpointError(f"{path}/{key} is not a table of numbers by client")
    if not {"clients", "directions"} & tables.keys():
        return
    ids, rows = tables.get("clients"), tables.get("directions")
    if not isinstance(ids, Tensor) or not isinstance(rows, Tensor) or ids.dim() != 1 or len(ids) != len(rows):
        raise CheckpointError(f'"{path}" has no direction for each client that it names')
    if ids.dtype != torch.int64 or bool((ids < 0).any()) or not bool(torch.isfinite(rows).all()):
        raise CheckpointError(f'"{path}" has clients or directions that are not valid')


def _walk_states(table: Any, where: str, shapes: Shapes, layout: Layout) -> None:
    """Check the shape of each tensor that has the name of one of the server's state."""
    if not isinstance(table, Mapping) or table.keys() >= _STORED_STATE:
        _walk(table, where, layout)
        return
    for key, value in table.items():
        if isinstance(value, Tensor):
            _check_tensor(value, shapes.get(key, tuple(value.shape)), f"{where}/{key}")
        else:
            _walk_states(value, f"{where}/{key}", shapes, layout)
    missing = [name for name in layout.tensors if name not in table]
    if missing and not table.keys().isdisjoint(layout.tensors):
        raise CheckpointError(f'"{where}/{missing[0]}" is missing')


def _walk(table: Any, where: str, layout: Layout) -> None:
    """Check each state against the sub-model beside it, and running losses against their exits."""
    if isinstance(table, Mapping):
        if table.keys() >= _STORED_STATE:
            _check(table["state"], _get_shapes(_parse_submodel(table, where, layout), layout), f"{where}/state/")
        elif table.keys() == {"exits", "losses"}:
            _check_losses(table, where, layout)
        else:
            for key, value in table.items():
                _walk(value, f"{where}/{key}", layout)
    elif isinstance(table, list | tuple):
        for index, value in enumerate(table):
            _walk(value, f"{where}/{index}", layout)


def _parse_submodel(table: Mapping[str, Any], where: str, layout: Layout) -> Submodel:
    """Return the sub-model that a memory names."""
    _check_exits(table["exits"], where, layout)
    try:
        submodel = parse_submodel(table)
    except ModelError as error:
        raise CheckpointError(f"{where}/channels: {str(error).removesuffix('.')}") from None
    if find_mismatch(layout, submodel) is not None:
        raise CheckpointError(f"{where}/channels has channels that the model does not have")
    return submodel


def _check_exits(exits: Any, where: str, layout: Layout) -> None:
    if not isinstance(exits, list | tuple) or not all(type(number) is int for number in exits):
        raise CheckpointError(f"{where}/exits is not a list of numbers")
    if not set(exits) <= set(layout.exits) or sorted(set(exits)) != list(exits):
        raise CheckpointError(f"{where}/exits has exits that the model does not have")


def _check_losses(table: Mapping[str, Any], where: str, layout: Layout) -> None:
    exits, losses = table["exits"], table["losses"]
    _check_exits(exits, where, layout)
    if not isinstance(losses, Tensor) or losses.shape != (len(exits),) or bool(losses.isnan().any()):
        raise CheckpointError(f"{where}/losses is not one number for each of its exits")


def _check_table(value: Any, where: str) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{where} is not a table by name")


def _is_own(spec: Any) -> bool:
    """Return whether all functions of a method are FleetFit's own; the names of others have a colon."""
    if isinstance(spec, Mapping):
        return all(_is_own(value) for key, value in spec.items()) and not any(":" in str(key) for key in spec)
    if isinstance(spec, list | tuple):
        return all(map(_is_own, spec))
    return not callable(spec) and not (isinstance(spec, str) and ":" in spec)


# ---- after a round: find a state that must not be kept -------------------------------------------------------------

_MOST_NAMED = 3
"""Clients or reasons that a sentence names."""


def find_invalid_state(before: Server, after: Server) -> str | None:
    """Return why the server after a round must not be kept, as a clause, or None."""
    if not is_finite(after.state):
        sizes = {name: float(tensor.abs().max()) for name, tensor in after.state.items() if tensor.numel()}
        name = max(sizes, key=lambda name: (not math.isfinite(sizes[name]), sizes[name]))
        return f'"{name}" would not be finite, or so large that its square is not'
    return _find_invalid_memory(before.memory, after.memory, frozenset(before.state), ())


def _find_invalid_memory(old: Any, new: Any, names: frozenset[str], path: tuple[str, ...]) -> str | None:
    """Find numbers of the server's memory that were finite before the round and are not now.

    A table may hold numbers that are not finite for unknown values. An entry that is named like a tensor of the state,
    such as a momentum, must be finite from its first round.
    """
    if new is old or isinstance(new, str | int | None):
        return None
    if isinstance(new, Mapping):
        before = old if isinstance(old, Mapping) else {}
        entries = [(before.get(key), value, str(key)) for key, value in new.items()]
    elif isinstance(new, list | tuple):
        items = old if isinstance(old, list | tuple) else ()
        entries = [(items[i] if i < len(items) else None, value, str(i)) for i, value in enumerate(new)]
    elif _stays_finite(old, new, is_tensor_of_state=bool(path) and path[-1] in names):
        return None
    else:
        return f'"{one_line("/".join(path), 100)}" in the memory of the method would not be finite'
    errors = (_find_invalid_memory(was, now, names, (*path, key)) for was, now, key in entries)
    return next((error for error in errors if error is not None), None)


def _stays_finite(old: Any, new: Any, is_tensor_of_state: bool) -> bool:
    if isinstance(new, float):
        was_finite = isinstance(old, float) and math.isfinite(old)
        return math.isfinite(new) or (not is_tensor_of_state and not was_finite)
    if not isinstance(new, Tensor) or not new.is_floating_point() or not new.numel() or math.isfinite(float(new.sum())):
        return True
    finite = torch.isfinite(new)
    if is_tensor_of_state or bool(finite.all()):
        return bool(finite.all())
    if not isinstance(old, Tensor) or old.ndim != new.ndim:
        return True
    common = tuple(slice(min(a, b)) for a, b in zip(old.shape, new.shape, strict=True))  # a table grows with the fleet
    return bool((finite[common] | ~torch.isfinite(old[common].to(new.device))).all())


# ---- rounds that are rolled back, and rounds without a usable update -------------------------------------------------


def make_rollback_record(
    reason: str, replies: Sequence[Update | Failure], norms: Mapping[int, float]
) -> dict[str, Any]:
    """Return the record of a rollback in a round's report: the reason, and each client with the norm of its update.

    Args:
        reason: Why the round is rolled back.
        replies: Updates and failures of the round.
        norms: Euclidean norm of each update, by job index.
    """
    reported = [
        {"client": reply.client, "level": reply.level + 1, "norm": norms.get(reply.index)}
        for reply in replies
        if isinstance(reply, Update)
    ]
    reported.sort(key=lambda entry: -(entry["norm"] or 0.0))
    return {"reason": one_line(reason, 500), "reported": reported}


def format_rollback(record: Mapping[str, Any], names: Sequence[str] | None = None) -> str:
    """Return a sentence on a round that was rolled back: the reason, and the largest updates.

    Args:
        record: The record of the rollback.
        names: Names of the clients by id; None: they have none.
    """
    entries = [entry for entry in record["reported"][:_MOST_NAMED] if entry["norm"] is not None]
    norms = ", ".join(f"{_format_client(entry, names)} ({entry['norm']:.3g})" for entry in entries)
    largest = f" Largest updates by norm: {norms}." if entries else ""
    return f"rolled back: {record['reason']}.{largest} The run continues from the state before it."


def _format_client(entry: Mapping[str, Any], names: Sequence[str] | None) -> str:
    client = entry["client"]
    return f"client {client}" if names is None or client is None or client >= len(names) else names[client]


def format_largest_updates(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the clients with the largest updates in several rollbacks, as text."""
    largest: dict[Any, float] = {}
    counts = Counter[Any]()
    for record in records:
        for entry in record["reported"]:
            largest[entry["client"]] = max(largest.get(entry["client"], 0.0), entry["norm"] or 0.0)
            counts[entry["client"]] += 1
    clients = sorted(largest, key=lambda client: (-largest[client], -counts[client]))[:_MOST_NAMED]
    if not clients:
        return "none"
    return ", ".join(f"client {c} (norm {largest[c]:.3g}, in {counts[c]} of {len(records)} rounds)" for c in clients)


def explain_empty_rounds(reports: Sequence[Mapping[str, Any]], in_a_row: bool) -> str:
    """Return why a run stops: the reasons of rounds without a usable update, with their counts.

    Args:
        reports: Their reports, redacted where a run has `[privacy]`.
        in_a_row: Whether they follow each other; else they are all rounds of the run in which clients trained.
    """
    count = len(reports)
    if "privacy" in reports[-1]:
        rounds = f"for {count} rounds in a row" if in_a_row else "in all rounds"
        return (
            f"{rounds} no client returned a usable update, or the round was rolled back. "
            "Which clients, and why, is withheld by [privacy]; the same run without it reports them."
        )
    records = [report["undone"] for report in reports if "undone" in report]
    if any(record["reported"] for record in records):
        rounds = f"{count} rounds{' in a row' if in_a_row else ''}"
        rounds = rounds if len(records) == count else f"{len(records)} of {count} rounds"
        return (
            f"{rounds} were rolled back, the last one because {records[-1]['reason'].removesuffix('.')}. Largest "
            f"updates in them: {format_largest_updates(records)}. The state is that of before. Leave these clients "
            "out, or check what they send."
        )
    reasons = Counter(failure["reason"] for report in reports for failure in report["failures"])
    reasons += Counter("no client was connected" for report in reports if report.get("online") == 0)
    listed = "; ".join(
        f"{reason} ({'once' if number == 1 else f'{number} times'})"
        for reason, number in reasons.most_common(_MOST_NAMED)
    )
    others = f"; and {len(reasons) - _MOST_NAMED} other reasons" if len(reasons) > _MOST_NAMED else ""
    last = f". The last round was rolled back: {records[-1]['reason'].removesuffix('.')}" if records else ""
    if in_a_row:
        return (
            f"for {count} rounds in a row no client returned a usable update. Reasons: {listed or 'none given'}"
            f"{others}{last}."
        )
    return (
        "no client returned a usable update in any round, so nothing was learned. Reasons: "
        f"{listed or 'none given'}{others}{last}."
    )
