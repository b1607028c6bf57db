"""Whether a state may be used: what a round would leave, and what was read from a checkpoint.

The layout says what the state must be, the levels what may stand beside it under a prefix (`level{l}/`: a model of its
own; any other: copies of the full model's tensors, whole blocks of them). A memory that is a state comes with its
sub-model and is held to it. What functions from elsewhere keep is theirs: it is only looked at where it has one of
these forms.

Replies that are right one by one can still add up to numbers that are not finite, by a large weight, a momentum, or a
product of two of them. The state, once it has such a number, makes every client diverge for the rest of the run. So the
server goes on with the state and memory from before the round, no client is told to remember it, and the report says
who took part, with the size of each update.
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
from fleetfit.records.checkpoints import CheckpointError, validate_checkpoint
from fleetfit.submodel import Submodel, finite, misfit, submodel_of
from fleetfit.values import Failure, Federation, Level, Problem, Server, Update

# ---- read from a checkpoint: names, shapes, dtypes, and that numbers are finite ------------------------------------

_LEVEL = re.compile(r"level(\d{1,4})")
_PIECE = {"state", "channels", "exits"}
Shapes = Mapping[str, tuple[int, ...]]


def fitting(federation: Federation, nest: Any, round: int) -> None:
    """Look at a checkpoint before it is used.

    Args:
        federation: Whose run it is.
        nest: As it was read.
        round: That its file is named after.

    Raises:
        CheckpointError: It is no state of this run; the sentence names the tensor.
    """
    found = validate_checkpoint(nest, round)
    layout, own = federation.problem.layout, _is_own(federation.method_spec)
    _check_state(found["server"]["state"], federation, own)
    _check_statistics(found["statistics"] or {}, federation)
    if any(level >= len(federation.levels) for level in found["server"].get("trained", {}).values()):
        raise CheckpointError(f"server/trained has levels beyond the {len(federation.levels)}")
    if own:
        _check_server_memory(found["server"], federation)
    simulated = "versions" not in found["clients"]
    for client, kept in found["clients"].items() if simulated else ():
        where = f"clients/{client}"
        if int(client) >= len(federation.clients):
            raise CheckpointError(f"{where} is none of the {len(federation.clients)} clients")
        if kept["version"] >= round:
            raise CheckpointError(f"{where} remembers round {kept['version'] + 1}, which is still to come")
        _walk(kept["memory"], f"{where}/memory", layout)


def check_base(problem: Problem, stored: State) -> None:
    """Compare what was never trained, as it was read, with what the model has of it.

    Args:
        problem: With a base, made anew where none was read.
        stored: As it was read.

    Raises:
        RunError: Something is missing, too much, or not as it should be; the sentence names it.
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
        raise CheckpointError(f"{where} is no state")
    for name in shapes:
        if name not in state:
            raise CheckpointError(f'"{where}{name}" is missing')
    for name, tensor in state.items():
        if name not in shapes:
            raise CheckpointError(f'"{where}{name}" is no tensor of this model')
        _check_tensor(tensor, shapes[name], f"{where}{name}")


def _check_tensor(tensor: Any, shape: tuple[int, ...], name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f'"{name}" is no tensor')
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f'"{name}" has shape {tuple(tensor.shape)}, expected {shape}')
    if tensor.dtype != torch.float32:
        raise CheckpointError(f'"{name}" is {tensor.dtype}, expected torch.float32')
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f'"{name}" has numbers that are not finite')


def _check_state(state: State, federation: Federation, own: bool) -> None:
    """Compare the server's state with the full model, and what stands beside it with what it may be."""
    layout = federation.problem.layout
    plain = {name: tensor for name, tensor in state.items() if name in layout.tensors}
    _check(plain, layout.shapes({}, layout.exits), "server/state/")
    beside: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if name not in layout.tensors:
            prefix, slash, rest = name.partition("/")
            if own and (not slash or rest not in layout.tensors):
                raise CheckpointError(f'"server/state/{name}" is no tensor of this model')
            beside.setdefault(prefix, {})[rest] = tensor
    for prefix, tensors in beside.items():
        if own:
            _check(tensors, _beside(prefix, tensors, federation), f"server/state/{prefix}/")


def _beside(prefix: str, tensors: State, federation: Federation) -> Shapes:
    """Return the shapes of what stands under a prefix: a level's own model, or blocks of the full one."""
    layout, match = federation.problem.layout, _LEVEL.fullmatch(prefix)
    if match is None:
        blocks = {layout.tensors[name].block for name in tensors}
        every = layout.shapes({}, layout.exits)
        return {name: every[name] for name, tensor in layout.tensors.items() if tensor.block in blocks}
    if not 1 <= int(match[1]) <= len(federation.levels):
        raise CheckpointError(f'"server/state/{prefix}/" is none of the {len(federation.levels)} levels')
    return _shapes_of(federation.levels[int(match[1]) - 1].submodel, layout)


def _shapes_of(piece: Submodel, layout: Layout) -> Shapes:
    return layout.shapes(piece.sizes, piece.exits)


def _check_statistics(found: Mapping[int, State], federation: Federation) -> None:
    for index, state in found.items():
        if index >= len(federation.levels):
            raise CheckpointError(f"statistics/{index} is none of the {len(federation.levels)} levels")
        if state:  # a level of which nobody had any sample has none
            where = f"statistics/{index}/"
            _check(state, _norms(federation.problem, federation.levels[index]), where)
            for name, tensor in state.items():
                if name.endswith(".var") and bool((tensor < 0).any()):
                    raise CheckpointError(f'"{where}{name}" has variances below 0')


def _norms(problem: Problem, level: Level) -> Shapes:
    """Return what batch-norm statistics a level has."""
    piece = level.submodel
    with on_meta():
        module = build_module(problem.architecture, {**problem.layout.full_sizes, **piece.sizes}, piece.exits)
    return {f"{name}.{what}": (norm.num_features,) for name, norm in batch_norms(module).items()
            for what in ("mean", "var")}  # fmt: skip


# ---- memories ------------------------------------------------------------------------------------------------------


def _check_server_memory(server: Mapping[str, Any], federation: Federation) -> None:
    """Look at what the server remembers: tables by client, and states by name, which are as those of its own state."""
    memory, layout, where = server["memory"], federation.problem.layout, "server/memory"
    if memory is None:
        return
    _check_table(memory, where)
    shapes = {name: tuple(tensor.shape) for name, tensor in server["state"].items()}
    for key, value in memory.items():
        place = f"{where}/{key}"
        if key == "choice":
            _check_table(value, place)
            _check_choice(value, place)
        elif key == "adaptivefl":
            _check_tables(value, place, len(federation.levels))
        elif key == "movement":
            _check_table(value, place)
            for depth, state in value.items():
                _check(state, _block(layout, depth), f"{place}/{depth}/")
        else:
            _walk_states(value, place, shapes, layout)


def _block(layout: Layout, depth: str) -> Shapes:
    """Return the shapes of what is trained of a level's last block, by name within the block."""
    shapes, mark = layout.shapes({}, layout.exits), f"blocks.{int(depth) - 1 if depth.isdecimal() else -1}."
    return {name.rpartition(mark)[2]: shapes[name] for name, tensor in layout.tensors.items()
            if tensor.trainable and tensor.block is not None and mark in name}  # fmt: skip


def _check_tables(value: Any, place: str, models: int) -> None:
    """Look at AdaptiveFL's tables, [3, clients] and [models, clients]."""
    _check_table(value, place)
    for key in ("curiosity", "resources"):
        table = value.get(key)
        is_table = isinstance(table, Tensor) and table.dim() == 2 and table.dtype == torch.float64
        if not is_table or not bool(torch.isfinite(table).all()):
            raise CheckpointError(f"{place}/{key} is not a table of scores by client")
    (kinds, clients), (rows, others) = value["curiosity"].shape, value["resources"].shape
    if (kinds, rows) != (3, models) or clients != others or len(value) > 2:
        raise CheckpointError(f'"{place}" has tables of {kinds} x {clients} and {rows} x {others}')


def _check_choice(kept: Mapping[str, Any], place: str) -> None:
    """Expect numbers by client [clients], and a row of directions [clients, levels, buckets] for each of "clients"."""
    for key, value in kept.items():
        is_named = key in ("directions", "clients")
        if not isinstance(value, Tensor) or (value.dim() != 1 and not is_named) or bool(value.isnan().any()):
            raise CheckpointError(f"{place}/{key} is not a table of numbers by client")
    if not {"clients", "directions"} & kept.keys():
        return
    ids, rows = kept.get("clients"), kept.get("directions")
    if not isinstance(ids, Tensor) or not isinstance(rows, Tensor) or ids.dim() != 1 or len(ids) != len(rows):
        raise CheckpointError(f'"{place}" has no direction for each client that it names')
    if ids.dtype != torch.int64 or bool((ids < 0).any()) or not bool(torch.isfinite(rows).all()):
        raise CheckpointError(f'"{place}" has clients or directions that are none')


def _walk_states(nest: Any, where: str, shapes: Shapes, layout: Layout) -> None:
    """Hold every tensor that has the name of one of the server's state to its shape."""
    if not isinstance(nest, Mapping) or nest.keys() >= _PIECE:
        _walk(nest, where, layout)
        return
    for key, value in nest.items():
        if isinstance(value, Tensor):
            _check_tensor(value, shapes.get(key, tuple(value.shape)), f"{where}/{key}")
        else:
            _walk_states(value, f"{where}/{key}", shapes, layout)
    missing = [name for name in layout.tensors if name not in nest]
    if missing and not nest.keys().isdisjoint(layout.tensors):
        raise CheckpointError(f'"{where}/{missing[0]}" is missing')


def _walk(nest: Any, where: str, layout: Layout) -> None:
    """Hold every state that comes with its sub-model to it, and running losses to their exits."""
    if isinstance(nest, Mapping):
        if nest.keys() >= _PIECE:
            _check(nest["state"], _shapes_of(_piece(nest, where, layout), layout), f"{where}/state/")
        elif nest.keys() == {"exits", "losses"}:
            _check_losses(nest, where, layout)
        else:
            for key, value in nest.items():
                _walk(value, f"{where}/{key}", layout)
    elif isinstance(nest, list | tuple):
        for place, value in enumerate(nest):
            _walk(value, f"{where}/{place}", layout)


def _piece(nest: Mapping[str, Any], where: str, layout: Layout) -> Submodel:
    """Return the sub-model that a memory names."""
    _check_exits(nest["exits"], where, layout)
    try:
        piece = submodel_of(nest)
    except ModelError as error:
        raise CheckpointError(f"{where}/channels: {str(error).removesuffix('.')}") from None
    if misfit(layout, piece) is not None:
        raise CheckpointError(f"{where}/channels has channels that the model does not have")
    return piece


def _check_exits(exits: Any, where: str, layout: Layout) -> None:
    if not isinstance(exits, list | tuple) or not all(type(number) is int for number in exits):
        raise CheckpointError(f"{where}/exits is not a list of numbers")
    if not set(exits) <= set(layout.exits) or sorted(set(exits)) != list(exits):
        raise CheckpointError(f"{where}/exits has exits that the model does not have")


def _check_losses(nest: Mapping[str, Any], where: str, layout: Layout) -> None:
    exits, losses = nest["exits"], nest["losses"]
    _check_exits(exits, where, layout)
    if not isinstance(losses, Tensor) or losses.shape != (len(exits),) or bool(losses.isnan().any()):
        raise CheckpointError(f"{where}/losses is not one number for each of its exits")


def _check_table(value: Any, where: str) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{where} is not a table by name")


def _is_own(spec: Any) -> bool:
    """Tell whether all functions of a method are FleetFit's own: nobody else's has a colon in its name."""
    if isinstance(spec, Mapping):
        return all(_is_own(value) for key, value in spec.items()) and not any(":" in str(key) for key in spec)
    if isinstance(spec, list | tuple):
        return all(map(_is_own, spec))
    return not callable(spec) and not (isinstance(spec, str) and ":" in spec)


# ---- after a round: one that would spoil the state is undone as a whole --------------------------------------------

_NAMED = 3  # clients that a sentence names


def spoilt(before: Server, after: Server) -> str | None:
    """Return what a round would spoil, in words, or None."""
    if not finite(after.state):
        return f"{_which(after.state)} would not be finite, or so large that its square is not"
    return _in_memory(before.memory, after.memory, frozenset(before.state), ())


def _which(state: State) -> str:
    """Return the name of a tensor that is not finite, or the largest one."""
    sizes = {name: float(tensor.abs().max()) for name, tensor in state.items() if tensor.numel()}
    return f'"{max(sizes, key=lambda name: (not math.isfinite(sizes[name]), sizes[name]))}"'


def _in_memory(old: Any, new: Any, names: frozenset[str], path: tuple[str, ...]) -> str | None:
    """Return what of the memory a round would spoil: numbers that were finite before and are not now.

    A table may hold numbers that are not finite to say that nothing is known. What is named as the tensors of the
    state, such as a momentum, must be finite from its beginning.
    """
    if new is old or isinstance(new, str | int | None):
        return None
    if isinstance(new, Mapping):
        known = old if isinstance(old, Mapping) else {}
        inner = ((known.get(key), value, key) for key, value in new.items())
    elif isinstance(new, list | tuple):
        kept = old if isinstance(old, list | tuple) else ()
        inner = ((kept[i] if i < len(kept) else None, value, i) for i, value in enumerate(new))
    else:
        strict = bool(path) and path[-1] in names
        return None if _stands(old, new, strict) else f"what the method keeps as {_called(path)} would not be finite"
    found = (_in_memory(was, now, names, (*path, str(key))) for was, now, key in inner)
    return next((one for one in found if one is not None), None)


def _called(path: tuple[str, ...]) -> str:
    return f'"{one_line("/".join(path), 100)}"'


def _stands(old: Any, new: Any, strict: bool) -> bool:
    if isinstance(new, float):
        return math.isfinite(new) or (not strict and not (isinstance(old, float) and math.isfinite(old)))
    if not isinstance(new, Tensor) or not new.is_floating_point() or not new.numel() or math.isfinite(float(new.sum())):
        return True
    now = torch.isfinite(new)
    if strict or bool(now.all()):
        return bool(now.all())
    if not isinstance(old, Tensor) or old.ndim != new.ndim:
        return True
    common = tuple(slice(min(a, b)) for a, b in zip(old.shape, new.shape, strict=True))  # a table grows with the fleet
    return bool((now[common] | ~torch.isfinite(old[common].to(new.device))).all())


def undone(why: str, reports: Sequence[Update | Failure], norms: Mapping[int, float]) -> dict[str, Any]:
    """Return what the report of an undone round says: why, and who took part with an update of which norm.

    Args:
        why: What the round would have spoilt, or what was raised.
        reports: Updates and failures of the round.
        norms: Euclidean norm of each update, by its index.
    """
    took = [{"client": r.client, "level": r.level + 1, "norm": norms.get(r.index)}
            for r in reports if isinstance(r, Update)]  # fmt: skip
    took.sort(key=lambda one: -(one["norm"] or 0.0))
    return {"reason": one_line(why, 500), "reported": took}


def in_words(undone: Mapping[str, Any], names: Sequence[str] | None = None) -> str:
    """Return the sentence for an undone round: why, and whose updates were the largest."""
    found = [
        f"{_name(one, names)} ({one['norm']:.3g})" for one in undone["reported"][:_NAMED] if one["norm"] is not None
    ]
    largest = f" Largest updates by norm: {', '.join(found)}." if found else ""
    return f"undone: {undone['reason']}.{largest} The run goes on from the state before."


def _name(one: Mapping[str, Any], names: Sequence[str] | None) -> str:
    client = one["client"]
    return f"client {client}" if names is None or client is None or client >= len(names) else names[client]


def suspects(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Return who had the largest updates in several undone rounds, in words."""
    most: dict[Any, float] = {}
    often: dict[Any, int] = {}
    for undone in rounds:
        for one in undone["reported"]:
            most[one["client"]] = max(most.get(one["client"], 0.0), one["norm"] or 0.0)
            often[one["client"]] = often.get(one["client"], 0) + 1
    first = sorted(most, key=lambda client: (-most[client], -often[client]))[:_NAMED]
    if not first:
        return "nobody's update was in them"
    return ", ".join(f"client {c} (norm {most[c]:.3g}, in {often[c]} of {len(rounds)} rounds)" for c in first)


def explain_empty_rounds(reports: Sequence[Mapping[str, Any]], in_a_row: bool) -> str:
    """Return why a run stops: the reasons of rounds without a usable update, with their counts.

    Args:
        reports: Their reports, withheld where a run has `[privacy]`.
        in_a_row: Whether they follow each other; else they are all rounds of the run in which clients trained.
    """
    count = len(reports)
    if "privacy" in reports[-1]:
        where = f"for {count} rounds in a row" if in_a_row else "in all rounds"
        return (
            f"{where} no client returned a usable update, or the round had to be undone. "
            "Which clients, and why, is withheld: see [privacy]. The same run without [privacy] says it."
        )
    again = [report["undone"] for report in reports if "undone" in report]
    if any(undone["reported"] for undone in again):
        rounds = f"{count} rounds{' in a row' if in_a_row else ''}"
        rounds = rounds if len(again) == count else f"{len(again)} of {count} rounds"
        return (
            f"{rounds} had to be undone, the last one since {again[-1]['reason'].rstrip('.')}. Largest updates in "
            f"them: {suspects(again)}. The state is that of before; leave these clients out, or look at what they send."
        )
    reasons = Counter(failure["reason"] for report in reports for failure in report["failures"])
    why = "; ".join(f"{reason} ({_times(n)})" for reason, n in reasons.most_common(_NAMED)) or "none given"
    more = f"; and {len(reasons) - _NAMED} other reasons" if len(reasons) > _NAMED else ""
    more += f". The last round was undone: {again[-1]['reason'].rstrip('.')}" if again else ""
    if in_a_row:
        return f"for {count} rounds in a row no client returned a usable update. Reasons: {why}{more}."
    return f"no client returned a usable update in any round, so nothing was learned. Reasons: {why}{more}."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
