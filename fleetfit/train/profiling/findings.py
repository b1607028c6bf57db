"""What was found out about a level."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Timing:
    """How long something takes.

    Attributes:
        median_s: The median in seconds.
        spread_s: Between the quartiles.
        count: How many times it was done.
    """

    median_s: float
    spread_s: float
    count: int

    @staticmethod
    def of(seconds: Sequence[float]) -> "Timing":
        """Return the timing of so many times."""
        low, median, high = np.quantile(np.asarray(seconds), (0.25, 0.5, 0.75)).tolist()
        return Timing(median, high - low, len(seconds))


@dataclass(frozen=True)
class Found:
    """What was measured of a level; None: that was not measured.

    Attributes:
        step: A training step of one batch.
        latency: Inference of one sample with all exits.
        memory_bytes: Peak of a training step, beyond what the process had before: the state as it was received,
            parameters, gradients, momentum, the batch, activations, and what kernels take.
        process_bytes: The same with all that the process had before.
        energy_j: Joules of a training step; the machine's own, so nothing of what it takes when idle is left out.
        failed: Why measuring ended early, or "".
    """

    step: Timing | None = None
    latency: Timing | None = None
    memory_bytes: int | None = None
    process_bytes: int | None = None
    energy_j: float | None = None
    failed: str = ""
