"""All-Large: the full model for everybody, resources ignored (AdaptiveFL 4.2, DAC 2024).

An upper bound to compare with, not a method to deploy.
"""

from fleetfit.method import Method
from fleetfit.planner import Targets
from fleetfit.values import Level, Problem


def all_large() -> Method:
    """Make the method."""
    return Method(levels=full_for_all, settles=("fleet.levels",))


def full_for_all(problem: Problem, targets: Targets) -> list[Level]:
    """Return the full model as the one level, which needs nothing."""
    exits = (problem.architecture.blocks,)
    return [Level("1", problem.submodel(1.0, exits), 1.0, needs=0.0)]
