"""How a device measures the time of a job: by its figures, or by the time that passes."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """Speed and link of a device in a round.

    Attributes:
        multiply_adds_per_s: Of training.
        down_bytes_per_s: From the server.
        up_bytes_per_s: To the server.
        latency_s: What a job costs before anything is sent.
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
        speed: The device's figures, by which time is simulated; None for a device of which nothing is known: there
            the time that passes counts.
        now: The time that passes, in seconds; for devices without figures.
        began: `now()` when the job began; for devices without figures.
        received: Bytes of the job as it was sent; for devices with figures.
    """

    speed: Speed | None = None
    now: Callable[[], float] = time.monotonic
    began: float = 0.0
    received: int = 0
