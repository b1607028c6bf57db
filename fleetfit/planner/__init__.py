"""From budgets of devices to levels, and from levels to sub-models (ScaleFL 3.1.1, CVPR 2023).

Task 1: `make_targets` turns budgets into levels with a target cost and a tolerance. Task 2: `search` gives each level
the depth and width whose cost is near its target and that are nearest to each other (Eq. 1); `find_shapes` also knows
other splits. Then `assign` gives each
client the largest level that it affords, and `make_plan` returns all of it as a `Plan`.

A budget may name several costs; all of them must fit. Levels and their targets come from the fleet's cost alone. Each
further cost gives a level a ceiling, the smallest budget among the clients clustered there, and Eq. 1 admits only pairs
whose further costs are at most (1 + the level's tolerance) times their ceilings. The full model is always level L. A
client then gets the largest level all of whose costs are within its own tolerance; one that affords none is named with
the cost that failed.

Differs from the paper:
- The levels are solved together: depth strictly grows, width never shrinks, and the sum of |s_d - s_w| is smallest; of
  equal sums the one with the nearest costs, then the deeper one, then the one whose small levels are shallower. A
  level's cost counts its shallower classifiers.
- A client gets the largest level whose cost is at most (1 + its own tolerance) times its budget. The inequality
  printed in 3.1.1 would hand it more than it affords.
- Where no client affords the full model, the full model is a level of its own without clients.
- `strict` admits only pairs at or under every budget of the level.
- Budgets in several costs are not in the paper.
"""

from fleetfit.planner.budgets import (
    Amount as Amount,
    Budget as Budget,
    LevelShape as LevelShape,
    Scaling as Scaling,
    Targets as Targets,
    affords as affords,
    as_fractions as as_fractions,
    assign as assign,
    convert_budgets as convert_budgets,
    find_budget_error as find_budget_error,
    make_fixed_targets as make_fixed_targets,
    make_targets as make_targets,
    parse_amount as parse_amount,
)
from fleetfit.planner.kept import (
    add_change as add_change,
    is_same_split as is_same_split,
    keep_shapes as keep_shapes,
)
from fleetfit.planner.plan import (
    LevelChange as LevelChange,
    Plan as Plan,
    PlannedLevel as PlannedLevel,
    SplitLevel as SplitLevel,
    compute_further_costs as compute_further_costs,
    find_scaling as find_scaling,
    make_plan as make_plan,
)
from fleetfit.planner.search import make_grids as make_grids, search as search
from fleetfit.planner.split import (
    choose_scaling as choose_scaling,
    find_shapes as find_shapes,
    get_sizes as get_sizes,
    may_keep_shapes as may_keep_shapes,
)
