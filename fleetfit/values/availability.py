"""Which clients of a simulated fleet are connected when: seeded, and the same in any process."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fleetfit.seeds import numpy_rng


@dataclass(frozen=True, eq=False)
class Availability:
    """Clients come and go: a Markov chain for each, with a rhythm of the day if asked for, or a trace.

    Client c is online a share s_c of the time. In round 0 it is online with probability s_c. Later, with probability
    1 - q it stays as it was, and with probability q it is drawn anew, online with probability s_c. That is the chain of
    two states whose offline spells last 1 / (q s_c) rounds on average, and online ones 1 / (q (1 - s_c)); q follows
    from `rounds`, which is meant for a client with s_c = `share`. With a day of D rounds it is drawn with probability
    s_c + min(s_c, 1 - s_c) sin(2 pi (t / D + p_c)) in round t, with p_c uniform in [0, 1): some have their night when
    others have their day.

    A trace says it for every round instead; after its last round it begins again.

    Attributes:
        clients: How many there are.
        share: Of the time that a client is online, on average over the clients.
        spread: s_c is uniform in share +- spread min(share, 1 - share).
        rounds: Mean length of an online spell, at least 1 / (1 - share), or None: every round is drawn by itself.
        day: Rounds of a day, or None.
        leave: Probability that a client goes away in a round after it was sent its model.
        trace: Who is online, bool [rounds, clients], or None.
        seed: The run's.
    """

    clients: int
    share: float = 1.0
    spread: float = 0.0
    rounds: float | None = None
    day: float | None = None
    leave: float = 0.0
    trace: np.ndarray | None = None
    seed: int = 0

    def online(self, round: int) -> np.ndarray:
        """Return who is online in a round, bool [clients]."""
        if self.trace is not None:
            return np.asarray(self.trace[round % len(self.trace)], dtype=bool)
        return self._chain.at(round)

    def leaves(self, client: int, round: int) -> bool:
        """Tell whether a client goes away in a round after it was sent its model."""
        return bool(self.leave) and float(numpy_rng(self.seed, "leave", round, client).random()) < self.leave

    @cached_property
    def _chain(self) -> "_Chain":
        return _Chain(self)

    @cached_property
    def nest(self) -> dict[str, Any]:
        """The same as plain values and tensors, for another process."""
        trace = None if self.trace is None else torch.from_numpy(np.asarray(self.trace, dtype=np.uint8))
        plain = ("clients", "share", "spread", "rounds", "day", "leave", "seed")
        return {key: getattr(self, key) for key in plain} | {"trace": trace}

    @staticmethod
    def restored(nest: Mapping[str, Any]) -> "Availability":
        """Return the availability of a nest."""
        trace = nest["trace"]
        return Availability(**{**nest, "trace": None if trace is None else trace.numpy().astype(bool)})


class _Chain:
    """The chain, kept at the last round asked for, so that the next one costs a single step."""

    def __init__(self, of: Availability) -> None:
        room = of.spread * min(of.share, 1 - of.share)
        self._own = of.share + room * (2 * numpy_rng(of.seed, "shares").random(of.clients) - 1)
        self._phase = None if of.day is None else numpy_rng(of.seed, "phases").random(of.clients)
        self._anew = 1.0 if of.rounds is None else 1 / (of.rounds * (1 - of.share))
        self._of = of
        self._round, self._state = -1, np.zeros(of.clients, dtype=bool)

    def at(self, round: int) -> np.ndarray:
        """Return who is online in a round, in whatever order rounds are asked for."""
        if round == self._round:
            return self._state
        first = 0 if round < self._round else self._round + 1
        for t in range(round if self._anew == 1 else first, round + 1):  # drawn anew, nothing depends on earlier rounds
            self._state = self._next(t)
        self._round = round
        return self._state

    def _next(self, t: int) -> np.ndarray:
        u = numpy_rng(self._of.seed, "online", t).random(self._of.clients)
        chance = self._own
        if self._phase is not None and self._of.day is not None:
            swing = np.sin(2 * np.pi * (t / self._of.day + self._phase))
            chance = chance + np.minimum(chance, 1 - chance) * swing
        if t == 0 or self._anew == 1:
            return u < chance
        return np.where(u < self._anew, u < self._anew * chance, self._state)
