"""What the levels should cost, and what they are: the values between the planner's two tasks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from fleetfit.cost import Conditions
from fleetfit.errors import PlanError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Mode = Literal["both", "width", "depth"]


@dataclass(frozen=True)
class Split:
    """One level's sub-model.

    Attributes:
        depth: Blocks kept; its own exit sits after them.
        width: Fraction of the channels kept (s_w).
        exits: Its exits, shallow to deep, the shallower levels' included.
        share: Its cost as a fraction of cost(M).
        further: The same of each further cost that budgets name.
        needs: What a client must afford for it, where that is not its cost.
    """

    depth: int
    width: float
    exits: tuple[int, ...]
    share: float
    further: Mapping[str, float] = field(default_factory=dict, hash=False)
    needs: float | None = None


@dataclass(frozen=True)
class Targets:
    """What the levels should cost.

    Attributes:
        ratios: r_l of each level, ascending, as a fraction of cost(M); the last is 1.
        tolerances: epsilon_l of each level: how far its cost may be from its target, as a fraction of it.
        cost: Name of the cost that the budgets are meant in.
        strict: Admit only costs at or under the target, and at or under the ceilings.
        splits: The levels themselves where they are settled (a saved plan); empty: search for them.
        mode: How `splits` cut the model.
        ceilings: Each further cost that budgets name: the most that each level may cost, as a fraction of cost(M); a
            level may exceed it by its tolerance. Infinite where no client of the level names the cost.
        conditions: Under which costs are counted.
    """

    ratios: tuple[float, ...]
    tolerances: tuple[float, ...]
    cost: str = "parameters"
    strict: bool = False
    splits: tuple[Split, ...] = ()
    mode: str = "both"
    ceilings: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    conditions: Conditions = field(default_factory=Conditions)

    def __post_init__(self) -> None:
        ratios = self.ratios
        if not ratios or ratios[-1] != 1 or min(ratios) <= 0 or list(ratios) != sorted(set(ratios)):
            raise PlanError(f"target ratios must be above 0, strictly ascending, and end with 1, got {list(ratios)}.")
        if len(self.tolerances) != len(ratios) or any(not math.isfinite(t) or t < 0 for t in self.tolerances):
            raise PlanError(f"each of the {len(ratios)} levels needs a tolerance of at least 0, got {self.tolerances}.")
        for cost, most in self.ceilings.items():
            if len(most) != len(ratios) or not all(ceiling > 0 for ceiling in most):
                raise PlanError(f"each of the {len(ratios)} levels needs a ceiling above 0 of {cost}, got {most}.")


def given_levels(
    depths: Sequence[int],
    widths: Sequence[float],
    budgets: Sequence[float],
    cost: str = "parameters",
    tolerance: float = 0.0,
    further: Iterable[str] = (),
    conditions: Conditions | None = None,
) -> Targets:
    """Return targets whose levels are settled: what each one is, and what a client must afford for it.

    Args:
        depths: Blocks of each level, smallest first; the last is the full depth.
        widths: Fraction of the channels of each.
        budgets: What each needs, as a fraction of the full model's cost; the last is 1.
        cost: What the budgets are meant in.
        tolerance: epsilon of every level.
        further: Further costs that budgets name, which do not matter here.
        conditions: Under which costs are counted.

    Raises:
        PlanError: They do not grow from level to level up to the full model.
    """
    blocks = depths[-1]
    mode: Mode = "depth" if set(widths) == {1.0} else "width" if set(depths) == {blocks} else "both"
    grows = mode == "width" or list(depths) == sorted(set(depths))
    if not grows or list(widths) != sorted(widths) or (widths[-1], budgets[-1]) != (1.0, 1.0):
        raise PlanError(
            "depth grows and width does not shrink from level to level, and the last one is the full model with a "
            f"budget of 1; got depths {list(depths)}, widths {list(widths)} and budgets {list(budgets)}."
        )
    splits = tuple(
        Split(depth, width, (blocks,) if mode == "width" else tuple(depths[: i + 1]), budget, needs=budget)
        for i, (depth, width, budget) in enumerate(zip(depths, widths, budgets, strict=True))
    )
    none = dict.fromkeys(further, (math.inf,) * len(splits))
    return Targets(tuple(budgets), (tolerance,) * len(splits), cost, splits=splits, mode=mode, ceilings=none,
                   conditions=conditions or Conditions())  # fmt: skip
