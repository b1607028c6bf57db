"""Sampling of clients, and the memory of client selection at the server."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fleetfit.core import Federation, Server


def sample_by_weight(ids: np.ndarray, weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ids one after the other without replacement, each with probability in proportion to its weight.

    All at once: the smallest of e_i / w_i with e_i exponential are that draw (Efraimidis and Spirakis, 2006).

    Args:
        ids: The candidates, [n].
        weights: Above 0, [n].
        count: How many; all of them if there are fewer.
        rng: The generator.
    """
    waits = rng.exponential(size=len(ids)) / weights
    if count >= len(ids):
        return ids[np.argsort(waits)]
    first = np.argpartition(waits, count)[:count]
    return ids[first[np.argsort(waits[first])]]


def sample_uniformly(ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ids uniformly without replacement; all of them if there are fewer."""
    return ids[rng.choice(len(ids), min(count, len(ids)), replace=False)]


def take_best(ids: np.ndarray, scores: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the ids with the highest scores, drawn among equals; all of them if there are fewer."""
    if count >= len(ids):
        return ids
    least = np.partition(scores, len(ids) - count)[len(ids) - count]
    above, equal = ids[scores > least], ids[scores == least]
    return np.concatenate([above, sample_uniformly(equal, count - len(above), rng)])


# ---- memory --------------------------------------------------------------------------------------------------------


_NAME = "choice"  # in the server's memory


def load_memory(server: Server) -> Mapping[str, Any]:
    """Return the selection's values in the server's memory, by name."""
    return (server.memory or {}).get(_NAME, {})


def store_memory(server: Server, **values: Any) -> Server:
    """Return the server with values of the selection in its memory."""
    return replace(server, memory={**(server.memory or {}), _NAME: {**load_memory(server), **values}})


def check_tables(federation: Federation, memory: Mapping[str, Any]) -> None:
    """Check that the selection's values are tables with a number for each client."""
    for name, table in memory.get(_NAME, {}).items():
        if table.dim() != 1 or bool(table.isnan().any()):
            raise ValueError(f"{_NAME}/{name} is not a number for each client")


def load_table(
    server: Server, name: str, clients: int, initial: float = 0, dtype: torch.dtype = torch.int32
) -> np.ndarray:
    """Return a copy of a stored table with a number for each client [clients]; new clients have the initial one."""
    table, stored = torch.full((clients,), initial, dtype=dtype), load_memory(server).get(name)
    if stored is not None:
        table[: len(stored)] = stored
    return table.numpy()
