"""What other splits of a run's levels would cost."""

from dataclasses import replace

from fleetfit.config.assemble.fleet import build_targets, find_profile
from fleetfit.config.assemble.levels import PlannedProblem
from fleetfit.config.assembly import Assembly
from fleetfit.config.schema import Experiment
from fleetfit.cost import Conditions, compute_cost, submodel_cost
from fleetfit.errors import PlanError
from fleetfit.levels import find_split
from fleetfit.planner import LevelShape, Mode, SplitLevel, find_shapes, get_sizes
from fleetfit.training.clock import STEP
from fleetfit.values import Federation, Problem

_NOTED = 1.05  # how much more work than "both" a note names
SPLITS: tuple[Mode, ...] = ("depth_first", "both", "width", "depth")


def compare_splits(assembly: Assembly) -> dict[Mode, tuple[SplitLevel, ...]]:
    """Return the levels that each split makes of a run's budgets, smallest first, but for splits that do not fit."""
    experiment, budgets, problem = assembly.experiment, assembly.fleet, assembly.federation.problem
    targets = replace(build_targets(experiment.fleet, budgets, problem.architecture.blocks), splits=())
    levels = {}
    for split in SPLITS:
        try:
            shapes = find_shapes(problem.architecture, problem.input_shape, targets, split)
        except PlanError:
            continue
        levels[split] = tuple(_cost_split_level(experiment, problem, shape, budgets.conditions) for shape in shapes)
    return levels


def _cost_split_level(
    experiment: Experiment, problem: Problem, shape: LevelShape, conditions: Conditions
) -> SplitLevel:  # fmt: skip
    architecture, blocks = problem.architecture, problem.architecture.blocks
    exits = (blocks,) if shape.depth == blocks and shape.width == 1 else shape.exits
    piece = (get_sizes(architecture, shape), exits)
    counts = submodel_cost(architecture, piece, problem.input_shape)
    memory, message = (
        compute_cost(architecture, piece, problem.input_shape, cost, conditions)
        for cost in ("memory_bytes", "size_bytes")
    )
    profiles = {group.profile if isinstance(group.profile, str) else group.name: find_profile(group.profile)
                for group in experiment.fleet.groups if group.profile is not None}  # fmt: skip
    work = STEP * counts.multiply_adds
    step_s = {
        str(name): conditions.batch_size * work / profile.multiply_adds_per_s for name, profile in profiles.items()
    }
    return SplitLevel(shape.depth, shape.width, counts, work, memory, message, step_s)


def describe_split(federation: Federation, planned: PlannedProblem) -> list[str]:
    """Note what levels with whole early blocks cost to train, where the planner and not the user chose them."""
    problem, targets = planned.problem, planned.targets
    is_chosen = find_split(planned.method.levels, targets) == "auto" and not targets.splits
    if not is_chosen:
        return []
    try:
        others = find_shapes(problem.architecture, problem.input_shape, targets, "both")
    except PlanError:
        return []
    clients = [int((federation.level_of == i).sum()) for i in range(len(planned.levels))]
    own = [submodel_cost(problem.architecture, level.submodel, problem.input_shape) for level in planned.levels]
    other = [
        submodel_cost(problem.architecture, (get_sizes(problem.architecture, shape), shape.exits), problem.input_shape)
        for shape in others
    ]
    work, other_work = (
        sum(n * cost.multiply_adds for n, cost in zip(clients, costs, strict=True)) for costs in (own, other)
    )
    ratio = work / max(1, other_work)
    if ratio < _NOTED:
        return []
    return [
        f'Levels keep whole early blocks: training takes {ratio:.3g} times the multiply-adds of fleet.split = "both". '
        "`fleetfit plan` shows what each level costs."
    ]
