"""All-Large: the full model for every client, whatever it affords (AdaptiveFL 4.2, DAC 2024).

An upper bound to compare with, not a method to deploy.
"""

from fleetfit.core import Level, Problem
from fleetfit.hooks import Method
from fleetfit.planner import Targets


def all_large() -> Method:
    """Make the method."""
    return Method(make_levels=make_level, fixed_keys=("fleet.levels",))


def make_level(problem: Problem, targets: Targets) -> list[Level]:
    """Return the full model as the only level, which every client affords."""
    return [Level("1", problem.submodel(1.0, (problem.architecture.blocks,)), width=1.0, needs=0.0)]
