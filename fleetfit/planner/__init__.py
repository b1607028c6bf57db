"""From what the devices afford to levels, and from levels to sub-models (ScaleFL 3.1.1, CVPR 2023).

Task 1: budgets become levels with a target cost and a tolerance (`levels_of_budgets`). Task 2: each level gets the
depth and width whose cost is near its target and that are nearest to each other (`search`, Eq. 1). Then each client
gets the largest level that it affords (`assign`), and `make_plan` puts it all into a `Plan`. `pool` is AdaptiveFL's own
way to a set of sub-models.

A budget may name several costs; all of them must fit. Levels and their targets come from the fleet's cost alone. Each
further cost gives a level a ceiling, the smallest budget among the clients clustered there, and Eq. 1 admits only pairs
whose further costs are at most (1 + the level's tolerance) times their ceilings. The full model is always level L. A
client then gets the largest level all of whose costs are within its own tolerance; one that affords none is named with
the cost that failed.

Differs from the paper:
- The levels are solved together: depth strictly grows, width never shrinks, and the sum of |s_d - s_w| is smallest; of
  equal sums the one with the nearest costs, then the deeper one, then the one whose small levels are shallower. A
  level's cost counts the shallower classifiers that
  it carries.
- A client gets the largest level whose cost is at most (1 + its own tolerance) times its budget. The inequality
  printed in 3.1.1 would hand it more than it affords.
- Where no client affords the full model, the full model is a level of its own that nobody trains whole.
- `strict` admits only pairs at or under every budget of the level.
- Budgets in several costs are not in the paper.
"""

from fleetfit.planner.budgets import (
    Amount,
    Budget,
    LevelShape,
    Mode,
    Targets,
    absolute,
    affords,
    as_fractions,
    assign,
    budget_problem,
    budgets_by_cost,
    given_levels,
    levels_of_budgets,
)
from fleetfit.planner.plan import Plan, PlannedLevel, further_costs, make_plan
from fleetfit.planner.search import grids_of, one_level, search

__all__ = [
    "Amount",
    "Budget",
    "LevelShape",
    "Mode",
    "Plan",
    "PlannedLevel",
    "Targets",
    "absolute",
    "affords",
    "as_fractions",
    "assign",
    "budget_problem",
    "budgets_by_cost",
    "further_costs",
    "given_levels",
    "grids_of",
    "levels_of_budgets",
    "make_plan",
    "one_level",
    "search",
]
