"""Movements as whole numbers that add up without rounding, modulo 2^32, so that masks cancel exactly."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import RunError

MODULUS_BITS = 32
_BELOW = 1 - 1e-6  # so that rounding of floats does not exceed the clip


@dataclass(frozen=True)
class Quantizer:
    """Equidistant numbers around 0.

    Attributes:
        range: The largest movement of an element, to both sides; larger ones are clipped.
        bits: Of a movement.
        clip: The longest movement of a client, by its Euclidean norm over all that it sends, at most the range; None:
            any.
    """

    range: float
    bits: int
    clip: float | None = None

    @property
    def most(self) -> int:
        """The largest whole number that stands for a movement."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def step(self) -> float:
        """The distance of two neighbors."""
        return self.range / self.most

    @property
    def clients(self) -> int:
        """Number of movements whose sum cannot exceed the modulus."""
        return int(2 ** (MODULUS_BITS - self.bits))

    def quantize(self, movement: NDArray[np.float32]) -> tuple[NDArray[np.int64], bool]:
        """Return the nearest numbers, and whether any was clipped.

        Raises:
            RunError: The movement has numbers that are not finite.
        """
        if not np.isfinite(movement).all():
            raise RunError(
                "its movement has numbers that are not finite, which no sum of masked numbers could hide.",
                key="movement",
            )
        near = np.rint(movement.astype(np.float64) / self.step)
        clipped = bool((np.abs(near) > self.most).any())
        return np.clip(near, -self.most, self.most).astype(np.int64), clipped

    @property
    def most_clipped(self) -> int:
        """The largest whole number of a movement that is no longer than the clip."""
        assert self.clip is not None
        return min(self.most, int(self.clip / self.step))

    def quantize_clipped(self, movement: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the numbers of a client's whole movement, which together are no longer than the clip.

        They are the nearest ones of the movement, scaled to the clip where it is longer. If rounding makes these longer
        than the clip, all are rounded towards zero instead. So one client moves the sums by at most the clip, rounding
        included. A movement that is not finite counts as zero.
        """
        assert self.clip is not None
        scaled = movement.astype(np.float64)
        length = float(np.linalg.norm(scaled))
        if not np.isfinite(length):
            return np.zeros(len(movement), dtype=np.int64)
        scaled /= self.step
        if length > self.clip:
            scaled *= self.clip / length * _BELOW
        near = np.rint(scaled)
        if float(near @ near) > (self.clip / self.step) ** 2:
            near = np.trunc(scaled)
        return near.astype(np.int64)
