"""One hook outside the package, to change one thing of a method that exists: ScaleFL without early exits.

    fleetfit run --set method.hooks.make_levels=examples/own_hook.py:own_exit_only

A hook is named by function in a run file, `method.hooks.make_levels = "own_hook.py:own_exit_only"`, so it reaches
worker processes too.
"""

from fleetfit.method import Level, Problem, Targets, split_levels


def own_exit_only(problem: Problem, targets: Targets) -> list[Level]:
    """Cut width and depth as ScaleFL does, but give each level its own last classifier only: nothing to distill."""
    return split_levels(problem, targets, scaling="both", exits="last")
