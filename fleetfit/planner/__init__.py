"""From what the devices afford to levels, and from levels to sub-models (ScaleFL 3.1.1, CVPR 2023).

Task 1: budgets become levels with a target cost and a tolerance (`levels_of_budgets`). Task 2: each level gets the
depth and width whose cost is near its target and that are nearest to each other (`search`, Eq. 1). Then each client
gets the largest level that it affords (`assign`), and `make_plan` puts it all into a `Plan`.

Differs from the paper:
- The levels are solved together: depth strictly grows, width never shrinks, and the sum of |s_d - s_w| is smallest; of
  equal sums the one with the nearest costs, then the deeper one. A level's cost counts the shallower classifiers that
  it carries.
- A client gets the largest level whose cost is at most (1 + its own tolerance) times its budget. The inequality
  printed in 3.1.1 would hand it more than it affords.
- Where no client affords the full model, the full model is a level of its own that nobody trains whole.
- `strict` admits only pairs at or under every budget of the level.
"""

from fleetfit.planner.budgets import as_fractions, assign, levels_of_budgets
from fleetfit.planner.plan import Plan, PlannedLevel, make_plan
from fleetfit.planner.search import one_level, search
from fleetfit.planner.targets import Mode, Split, Targets

__all__ = [
    "Mode",
    "Plan",
    "PlannedLevel",
    "Split",
    "Targets",
    "as_fractions",
    "assign",
    "levels_of_budgets",
    "make_plan",
    "one_level",
    "search",
]
