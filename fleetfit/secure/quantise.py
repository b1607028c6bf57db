"""Movements as whole numbers that add up without rounding, so that masks vanish exactly: modulus 2^32."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import RunError

MODULUS_BITS = 32
Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Quantiser:
    """An even number line around 0.

    Attributes:
        range: The largest movement of an element, to both sides; what is beyond it is clipped.
        bits: Of a movement.
    """

    range: float
    bits: int

    @property
    def most(self) -> int:
        """The largest whole number that stands for a movement."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def step(self) -> float:
        """The distance of two neighbours."""
        return self.range / self.most

    @property
    def clients(self) -> int:
        """How many numbers can be added up without passing the modulus."""
        return int(2 ** (MODULUS_BITS - self.bits))

    def quantised(self, movement: NDArray[np.float32]) -> tuple[NDArray[np.int64], bool]:
        """Return the nearest numbers, and whether something had to be clipped.

        Raises:
            RunError: The movement has numbers that are not finite.
        """
        if not np.isfinite(movement).all():
            raise RunError("its movement has numbers that are not finite, which no sum of masked numbers could hide.")
        near = np.rint(movement.astype(np.float64) / self.step)
        clipped = bool((np.abs(near) > self.most).any())
        return np.clip(near, -self.most, self.most).astype(np.int64), clipped


def signed(words: Words) -> NDArray[np.int64]:
    """Return words as numbers from -2^31 to 2^31 - 1."""
    return words.view(np.int32).astype(np.int64)
