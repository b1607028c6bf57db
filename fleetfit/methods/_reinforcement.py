"""AdaptiveFL's client selection by reinforcement learning: two tables, their rewards, and how they move, all pure.

Jia et al., DAC 2024, Algorithm 1 and section 3.3. Models are numbered as in the pool, from S_p (0) to L_1 (2p).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Rewards = Literal["CS", "C", "S", "random", "greedy"]
Credit = Literal["printed", "authors"]
"""What L_1's score gains beyond one when a model comes back whole: p - 1 (line 18), or p, and only if it was L_1."""

_NAME = "adaptivefl"  # in the server's memory
MOST_SUCCESS = 0.5
"""Above this success rate the curiosity decides (section 3.3)."""


@dataclass(frozen=True, eq=False)
class Tables:
    """What the server learned of its clients from what it sent and what came back.

    Attributes:
        curiosity: T_c: how often each client was chosen for a type of model [3, K]; types S, M, L.
        resources: T_r: the training score of each client on each model of the pool [2p + 1, K].
    """

    curiosity: Floats
    resources: Floats

    @staticmethod
    def new(p: int, clients: int) -> "Tables":
        """Return the tables before the first round: ones (lines 1 and 2)."""
        return Tables(np.ones((3, clients)), np.ones((2 * p + 1, clients)))

    @staticmethod
    def remembered(memory: Mapping[str, Any] | None, p: int, clients: int) -> "Tables":
        """Return the tables that a server's memory holds, with ones for clients that are new, or new ones."""
        kept, new = (memory or {}).get(_NAME), Tables.new(p, clients)
        if not kept:
            return new
        old = kept["curiosity"].shape[1]
        joined = [np.concatenate([kept[name].numpy(), getattr(new, name)[:, old:]], axis=1) for name in vars(new)]
        return Tables(*joined)

    def beside(self, memory: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a server's memory with these tables in it."""
        kept = {"curiosity": torch.from_numpy(self.curiosity), "resources": torch.from_numpy(self.resources)}
        return {**(memory or {}), _NAME: kept}

    @property
    def p(self) -> int:
        """Models of each of the types S and M."""
        return (len(self.resources) - 1) // 2


def type_of(model: int, p: int) -> int:
    """Return the type of a model: 0 for S, 1 for M, 2 for L."""
    return min(model // p, 2)


def resource_reward(tables: Tables, model: int) -> Floats:
    """Return R_s(m_i, c) of every client [K].

    The mean, over the models k of m_i's type, of the sum of T_r from k up to L_1, divided by the sum of T_r over the
    whole pool; 0 for a client whose scores are all 0.
    """
    kind, p = type_of(model, tables.p), tables.p
    tails = np.cumsum(tables.resources[::-1], axis=0)[::-1]  # [k, c]: the sum from k up
    ours = tails[p * kind : p * kind + p] if kind < 2 else tails[2 * p :]
    total = tails[0]
    return np.divide(ours.mean(axis=0), total, out=np.zeros_like(total), where=total > 0)


def curiosity_reward(tables: Tables, model: int) -> Floats:
    """Return R_c(m_i, c) = 1 / sqrt(T_c[type(m_i)][c]) of every client [K]."""
    found: Floats = 1 / np.sqrt(tables.curiosity[type_of(model, tables.p)])
    return found


def reward(tables: Tables, model: int, kind: Rewards = "CS") -> Floats:
    """Return R(m_i, c) = min(0.5, R_s) R_c of every client [K], or one of its factors, or ones."""
    if kind == "CS":
        return np.minimum(MOST_SUCCESS, resource_reward(tables, model)) * curiosity_reward(tables, model)
    if kind == "C":
        return curiosity_reward(tables, model)
    if kind == "S":
        return np.minimum(MOST_SUCCESS, resource_reward(tables, model))
    return np.ones(tables.resources.shape[1])


def probabilities(rewards: Floats, free: npt.NDArray[np.int64]) -> Floats:
    """Return P(m_i, c) = R(m_i, c) / sum_j R(m_i, j) over the clients that are free; equal where all rewards are 0."""
    found = rewards[free]
    total = found.sum()
    return found / total if total > 0 else np.full(len(free), 1 / len(free))


def after_sending(chosen: Floats, model: int, p: int) -> Floats:
    """Return a client's column of T_c [3] after a model was sent to it, or came back from it (lines 12 and 13)."""
    found = chosen.copy()
    found[type_of(model, p)] += 1
    return found


def after_reply(scores: Floats, model: int, back: int, credit: Credit = "printed") -> Floats:
    """Return a client's column of T_r [2p + 1] after model `back` came back for `model` (lines 14 to 26)."""
    p = (len(scores) - 1) // 2
    found = scores.copy()
    if model == back:
        found[model:] += 1
        if credit == "printed":
            found[-1] += p - 1
        elif model == 2 * p:
            found[-1] += p
        return found
    found[back] += p
    return lowered(found, back)


def after_refusal(scores: Floats, model: int) -> Floats:
    """Return a client's column of T_r after it affords nothing of what it was sent: lines 22 to 25, without credit."""
    return lowered(scores, model)


def lowered(scores: Floats, start: int) -> Floats:
    """Return scores from a model on lowered by 0, 1, 2, ..., but not below 0 (lines 21 to 25)."""
    found = scores.copy()
    found[start:] = np.maximum(found[start:] - np.arange(len(scores) - start), 0)
    return found
