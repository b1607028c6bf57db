"""What the levels should cost, and what they are: the values between the planner's two tasks."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fleetfit.errors import PlanError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mode = Literal["both", "width", "depth"]


@dataclass(frozen=True)
class Split:
    """One level's sub-model.

    Attributes:
        depth: Blocks kept; its own exit sits after them.
        width: Fraction of the channels kept (s_w).
        exits: Its exits, shallow to deep, the shallower levels' included.
        share: Its cost as a fraction of cost(M).
    """

    depth: int
    width: float
    exits: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class Targets:
    """What the levels should cost.

    Attributes:
        ratios: r_l of each level, ascending, as a fraction of cost(M); the last is 1.
        tolerances: epsilon_l of each level: how far its cost may be from its target, as a fraction of it.
        cost: Name of the cost that the budgets are meant in.
        strict: Admit only costs at or under the target.
        splits: The levels themselves where they are settled (a saved plan); empty: search for them.
        mode: How `splits` cut the model.
    """

    ratios: tuple[float, ...]
    tolerances: tuple[float, ...]
    cost: str = "parameters"
    strict: bool = False
    splits: tuple[Split, ...] = ()
    mode: str = "both"

    def __post_init__(self) -> None:
        ratios = self.ratios
        if not ratios or ratios[-1] != 1 or min(ratios) <= 0 or list(ratios) != sorted(set(ratios)):
            raise PlanError(f"target ratios must be above 0, strictly ascending, and end with 1, got {list(ratios)}.")
        if len(self.tolerances) != len(ratios) or any(not math.isfinite(t) or t < 0 for t in self.tolerances):
            raise PlanError(f"each of the {len(ratios)} levels needs a tolerance of at least 0, got {self.tolerances}.")
