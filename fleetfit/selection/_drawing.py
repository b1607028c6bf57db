"""What ways of client selection share: drawing by weight, the best of some, and what the server remembers for them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fleetfit.values import Server


def by_weight(ids: np.ndarray, weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ids one after the other without replacement, each with probability by weight among those that are left.

    All at once: the smallest of e_i / w_i with e_i exponential are that draw (Efraimidis and Spirakis, 2006).

    Args:
        ids: From whom, [n].
        weights: Above 0, [n].
        count: How many; all of them if there are fewer.
        rng: Where randomness comes from.
    """
    waits = rng.exponential(size=len(ids)) / weights
    if count >= len(ids):
        return ids[np.argsort(waits)]
    first = np.argpartition(waits, count)[:count]
    return ids[first[np.argsort(waits[first])]]


def any_of(ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ids uniformly without replacement; all of them if there are fewer."""
    return ids[rng.choice(len(ids), min(count, len(ids)), replace=False)]


def best(ids: np.ndarray, scores: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the ids with the highest scores, drawn among equals; all of them if there are fewer."""
    if count >= len(ids):
        return ids
    least = np.partition(scores, len(ids) - count)[len(ids) - count]
    above, equal = ids[scores > least], ids[scores == least]
    return np.concatenate([above, any_of(equal, count - len(above), rng)])


def listed(ids: np.ndarray) -> list[int]:
    """Return ids as the hook `choose` does."""
    return [int(i) for i in ids]


# ---- memory --------------------------------------------------------------------------------------------------------


def remembered(server: Server) -> Mapping[str, Any]:
    """Return what the server remembers for the selection, by name."""
    found: Mapping[str, Any] = (server.memory or {}).get("choice", {})  # the name that checkpoints have
    return found


def remembering(server: Server, **values: Any) -> Server:
    """Return the server with what it now remembers for the selection."""
    return replace(server, memory={**(server.memory or {}), "choice": {**remembered(server), **values}})


def table(server: Server, name: str, clients: int, initial: float = 0, dtype: torch.dtype = torch.int32) -> np.ndarray:
    """Return a copy of a remembered table with a number for each client [clients]; who is new has the initial one."""
    found, kept = torch.full((clients,), initial, dtype=dtype), remembered(server).get(name)
    if kept is not None:
        found[: len(kept)] = kept
    return found.numpy()
