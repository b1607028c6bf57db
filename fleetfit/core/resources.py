"""Resources of simulated devices: budgets, speed, connection, and how they change over the rounds."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from fleetfit.cost import Conditions
from fleetfit.seeds import make_numpy_rng

# ---- how a device measures the time of a job -----------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """Speed and link of a device in a round.

    Attributes:
        multiply_adds_per_s: Speed of training.
        down_bytes_per_s: Speed of the download.
        up_bytes_per_s: Speed of the upload.
        latency_s: Seconds before anything is sent.
    """

    multiply_adds_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, down: float, multiply_adds: float, up: float) -> float:
        """Return the seconds of a job: latency, bytes down, computing, bytes up, one after the other."""
        return (
            self.latency_s
            + down / self.down_bytes_per_s
            + multiply_adds / self.multiply_adds_per_s
            + up / self.up_bytes_per_s
        )


@dataclass(frozen=True)
class Clock:
    """A device's clock, and where it stood when the present job began.

    Attributes:
        speed: The device's figures, by which time is simulated; None: real time counts.
        now: Real time, in seconds; for devices without figures.
        began: `now()` when the job began; for devices without figures.
        received: Bytes of the job as it was sent; for devices with figures.
    """

    speed: Speed | None = None
    now: Callable[[], float] = time.monotonic
    began: float = 0.0
    received: int = 0


# ---- availability --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Availability:
    """Client availability: a two-state Markov chain per client, optionally with a daily cycle, or a trace.

    Client c is online a share s_c of the time. In round 0 it is online with probability s_c. Later, with probability
    1 - q it stays as it was, and with probability q it is drawn anew, online with probability s_c. That is the chain of
    two states whose offline spells last 1 / (q s_c) rounds on average, and online ones 1 / (q (1 - s_c)); q follows
    from `rounds`, which is meant for a client with s_c = `online`. With a day of D rounds it is drawn with probability
    s_c + min(s_c, 1 - s_c) sin(2 pi (t / D + p_c)) in round t, with p_c uniform in [0, 1): some have their night when
    others have their day.

    A trace lists every round instead; after its last round it begins again.

    Attributes:
        clients: Number of clients.
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
        return bool(self.leave) and float(make_numpy_rng(self.seed, "leave", round, client).random()) < self.leave

    @cached_property
    def _chain(self) -> "_Chain":
        return _Chain(self)


class _Chain:
    """The chain, kept at the last round asked for, so that the next one costs a single step."""

    def __init__(self, of: Availability) -> None:
        room = of.spread * min(of.share, 1 - of.share)
        self._own = of.share + room * (2 * make_numpy_rng(of.seed, "shares").random(of.clients) - 1)
        self._phase = None if of.day is None else make_numpy_rng(of.seed, "phases").random(of.clients)
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
        u = make_numpy_rng(self._of.seed, "online", t).random(self._of.clients)
        chance = self._own
        if self._phase is not None and self._of.day is not None:
            swing = np.sin(2 * np.pi * (t / self._of.day + self._phase))
            chance = chance + np.minimum(chance, 1 - chance) * swing
        if t == 0 or self._anew == 1:
            return u < chance
        return np.where(u < self._anew, u < self._anew * chance, self._state)


# ---- budgets -------------------------------------------------------------------------------------------------------

_MEMORY = 0.9  # of the slow movement, from one round to the next


@dataclass(frozen=True)
class Drift:
    """How budgets move: every round a little around their usual size, and now and then in a jump.

    A budget is multiplied by exp(z) u. z_0 = 0 and z_t = 0.9 z_(t-1) + sqrt(1 - 0.9^2) sd n_t with standard normal n_t,
    so that its standard deviation tends to `sd`. u_0 = 1, and in each round with probability `jump` it is drawn anew
    from [low, 1]: something else has begun, or ended, to run on the device.

    Attributes:
        sd: Standard deviation of the slow movement, of the logarithm.
        jump: Probability of a jump in a round.
        low: What a jump leaves at least, as a fraction.
    """

    sd: float = 0.1
    jump: float = 0.05
    low: float = 0.25

    def factor(self, seed: int, client: int, round: int) -> float:
        """Return what a client's budgets are multiplied by in a round, counted from 0."""
        return _path(self, seed, client, 64 * (round // 64 + 1))[round]


@lru_cache(maxsize=4096)
def _path(drift: Drift, seed: int, client: int, rounds: int) -> tuple[float, ...]:
    """Return a client's factors of the first rounds; a longer path begins with the same ones."""
    normals = make_numpy_rng(seed, "drift", client).normal(size=rounds)
    jumps = make_numpy_rng(seed, "jumps", client).random(rounds) < drift.jump
    left = drift.low + (1 - drift.low) * make_numpy_rng(seed, "left", client).random(rounds)
    z, u, factors = 0.0, 1.0, [1.0]
    for t in range(rounds):
        z = _MEMORY * z + (1 - _MEMORY**2) ** 0.5 * drift.sd * normals[t]
        u = left[t] if jumps[t] else u
        factors.append(float(np.exp(z) * u))
    return tuple(factors)


@dataclass(frozen=True, eq=False)
class DeviceResources:
    """What the devices of a simulated fleet afford.

    Attributes:
        budgets: By cost what each client affords, as a fraction of the full model's cost [K]; infinite for no limit,
            and nothing where budgets are unknown.
        tolerance: How far a model may exceed a client's budgets, as a fraction of them [K]; 0.1 by default.
        drift: How budgets move during the run, or None.
        conditions: Under which costs are counted.
        seed: The run's.
        speeds: By figure of `Speed` what each client has [K]; nothing where no profiles are known.
        jitter: Standard deviation, of the logarithm, by which speed and link differ from round to round.
        availability: Which clients are connected when; None: all of them, always.
    """

    budgets: Mapping[str, np.ndarray] = field(default_factory=dict)
    tolerance: np.ndarray | None = None
    drift: Drift | None = None
    conditions: Conditions = field(default_factory=Conditions)
    seed: int = 0
    speeds: Mapping[str, np.ndarray] = field(default_factory=dict)
    jitter: float = 0.0
    availability: Availability | None = None

    def get_budgets(self, client: int, round: int) -> dict[str, float]:
        """Return what a client affords in a round, by cost."""
        factor = 1.0 if self.drift is None else self.drift.factor(self.seed, client, round)
        return {cost: float(values[client]) * factor for cost, values in self.budgets.items()}

    def get_tolerance(self, client: int) -> float:
        """Return a client's tolerance."""
        return 0.1 if self.tolerance is None else float(self.tolerance[client])

    def get_speed(self, client: int, round: int) -> Speed | None:
        """Return a client's speed and link in a round, or None where they are unknown.

        With jitter, speed and link are multiplied by exp(jitter n), each with a standard normal n of its own.
        """
        if not self.speeds:
            return None
        figures = {f.name: float(self.speeds[f.name][client]) for f in fields(Speed)}
        if self.jitter:
            computing, sending = np.exp(self.jitter * make_numpy_rng(self.seed, "jitter", client, round).normal(size=2))
            figures["multiply_adds_per_s"] *= float(computing)
            figures["down_bytes_per_s"] *= float(sending)
            figures["up_bytes_per_s"] *= float(sending)
        return Speed(**figures)

    def absence(self, client: int, round: int) -> str:
        """Return why a client brings nothing back in a round, or "": it is there all the time."""
        if self.availability is None:
            return ""
        if not self.availability.online(round)[client]:
            return "the client is not connected"
        return "the client went away during the round" if self.availability.leaves(client, round) else ""

    @cached_property
    def payload(self) -> dict[str, Any]:
        """The same as plain values and arrays, for another process."""
        return asdict(self)

    @staticmethod
    def from_payload(payload: Mapping[str, Any]) -> "DeviceResources":
        """Return the resources of a payload."""
        kinds: dict[str, Any] = {"drift": Drift, "conditions": Conditions, "availability": Availability}
        values = {key: value and kinds[key](**value) for key, value in payload.items() if key in kinds}
        return DeviceResources(**{**payload, **values})
