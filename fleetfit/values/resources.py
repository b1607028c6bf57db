"""What simulated devices afford, how fast they are, and how that moves: seeded, and the same in any process."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from fleetfit.cost import Conditions
from fleetfit.seeds import numpy_rng
from fleetfit.values.availability import Availability
from fleetfit.values.clock import Speed

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
    normals = numpy_rng(seed, "drift", client).normal(size=rounds)
    jumps = numpy_rng(seed, "jumps", client).random(rounds) < drift.jump
    left = drift.low + (1 - drift.low) * numpy_rng(seed, "left", client).random(rounds)
    z, u, found = 0.0, 1.0, [1.0]
    for t in range(rounds):
        z = _MEMORY * z + (1 - _MEMORY**2) ** 0.5 * drift.sd * normals[t]
        u = left[t] if jumps[t] else u
        found.append(float(np.exp(z) * u))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class DeviceResources:
    """What the devices of a simulated fleet afford.

    Attributes:
        budgets: By cost what each client affords, as a fraction of the full model's cost [K]; infinite for no limit,
            and nothing where nobody measures.
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

    def budgets_of(self, client: int, round: int) -> dict[str, float]:
        """Return what a client affords in a round, by cost."""
        factor = 1.0 if self.drift is None else self.drift.factor(self.seed, client, round)
        return {cost: float(values[client]) * factor for cost, values in self.budgets.items()}

    def tolerance_of(self, client: int) -> float:
        """Return a client's tolerance."""
        return 0.1 if self.tolerance is None else float(self.tolerance[client])

    def speed_of(self, client: int, round: int) -> Speed | None:
        """Return a client's speed and link in a round, or None where nobody knows them.

        With jitter, speed and link are multiplied by exp(jitter n), each with a standard normal n of its own.
        """
        if not self.speeds:
            return None
        figures = {f.name: float(self.speeds[f.name][client]) for f in fields(Speed)}
        if self.jitter:
            computing, sending = np.exp(self.jitter * numpy_rng(self.seed, "jitter", client, round).normal(size=2))
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
    def nest(self) -> dict[str, Any]:
        """The same as plain values and tensors, for another process."""
        return {
            "budgets": {cost: torch.from_numpy(np.asarray(v, dtype=float)) for cost, v in self.budgets.items()},
            "tolerance": None if self.tolerance is None else torch.from_numpy(np.asarray(self.tolerance, dtype=float)),
            "drift": None if self.drift is None else dict(vars(self.drift)),
            "conditions": dict(vars(self.conditions)),
            "seed": self.seed,
            "speeds": {name: torch.from_numpy(np.asarray(v, dtype=float)) for name, v in self.speeds.items()},
            "jitter": self.jitter,
            "availability": None if self.availability is None else self.availability.nest,
        }

    @staticmethod
    def restored(nest: Mapping[str, Any]) -> "DeviceResources":
        """Return the resources of a nest."""
        return DeviceResources(
            {cost: tensor.numpy() for cost, tensor in nest["budgets"].items()},
            None if nest["tolerance"] is None else nest["tolerance"].numpy(),
            None if nest["drift"] is None else Drift(**nest["drift"]),
            Conditions(**nest["conditions"]),
            nest["seed"],
            {name: tensor.numpy() for name, tensor in nest["speeds"].items()},
            nest["jitter"],
            None if nest["availability"] is None else Availability.restored(nest["availability"]),
        )
