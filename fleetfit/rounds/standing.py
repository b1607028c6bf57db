"""Whether a round may stand: what it would leave is looked at, and a round that would spoil it is undone as a whole.

Replies that are right one by one can still add up to numbers that are not finite, by a large weight, a momentum, or a
product of two of them. The state, once it has such a number, makes every client diverge for the rest of the run. So the
server goes on with the state and memory from before the round, no client is told to remember it, and the report says
who took part, with the size of each update.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetfit.errors import one_line
from fleetfit.layout import State
from fleetfit.submodel import finite
from fleetfit.values import Failure, Server, Update

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
