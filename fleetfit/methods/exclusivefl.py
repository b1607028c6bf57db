"""ExclusiveFL: only clients that afford the full model take part (baseline of ReeFL, ICML 2024).

It is FedAvg without changes: the full model is the only level, and clients that do not afford it are reported and left
out. With `exits = "all"` the full model has the exits of all levels and trains the sum of their losses, as in ReeFL's
tables, which average over exits; the smaller levels are evaluated only.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

from fleetfit.core import Level, Problem
from fleetfit.hooks import Method
from fleetfit.hooks.levels import split_levels
from fleetfit.methods.depthfl import mutual_loss
from fleetfit.planner import Targets


def exclusivefl(exits: Literal["last", "all"] = "last") -> Method:
    """Make the method.

    Args:
        exits: Train the model's last exit, or the exits of all levels.
    """
    if exits == "last":
        return Method()
    return Method(make_levels=make_levels, make_loss=partial(mutual_loss, ramp=0, share=0.0, temperature=1.0))


def make_levels(problem: Problem, targets: Targets) -> list[Level]:
    """Return the levels of a depth cut, all of which cost as much as the full model."""
    return [replace(level, needs=1.0) for level in split_levels(problem, targets, "depth")]
