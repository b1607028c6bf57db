"""What an author of a method or of a hook needs. docs/add-a-method.md shows its use."""

from fleetfit.aggregate import Aggregate as Aggregate, Mean as Mean
from fleetfit.anatomy import State as State, outputs as outputs
from fleetfit.core import (
    Device as Device,
    Failure as Failure,
    Federation as Federation,
    Job as Job,
    Level as Level,
    LocalResult as LocalResult,
    Problem as Problem,
    Server as Server,
    Update as Update,
)
from fleetfit.factories import declare_unused as declare_unused
from fleetfit.hooks import (
    CoverageMean as CoverageMean,
    ExtraShapes as ExtraShapes,
    Loss as Loss,
    Method as Method,
    get_round_submodel as get_round_submodel,
    movements as movements,
    take_mean as take_mean,
    weigh_by_samples as weigh_by_samples,
    weigh_equally as weigh_equally,
)
from fleetfit.hooks.level_tensors import keep_per_level as keep_per_level
from fleetfit.hooks.levels import split_levels as split_levels
from fleetfit.hooks.movements import ServerStep as ServerStep, get_movement as get_movement
from fleetfit.planner import Targets as Targets
from fleetfit.submodel import (
    Channels as Channels,
    Submodel as Submodel,
    concat_state as concat_state,
    extract as extract,
    get_slice_plan as get_slice_plan,
)
from fleetfit.training import make_shared_submodels as make_shared_submodels
