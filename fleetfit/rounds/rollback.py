"""Find a state that must not be kept after a round.

Replies that are valid one by one can still add up to numbers that are not finite, by a large weight, a momentum, or a
product of two of them. A state with such a number makes every client diverge for the rest of the run. So the round is
rolled back: the server keeps state and memory from before it, clients do not remember it, and the report lists the
clients with the norms of their updates.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fleetfit.core import Server
from fleetfit.errors import one_line
from fleetfit.submodel import is_finite


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
