"""FleetFit: federated learning across unequal devices.

Each device trains the sub-model that fits it. The names below are the public interface. They are imported on first use,
so that importing the package is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetfit.aggregate import Aggregate as Aggregate
    from fleetfit.api.comparison import Comparison as Comparison, compare as compare, load_comparison as load_comparison
    from fleetfit.api.profiling import profile as profile
    from fleetfit.api.results import Run as Run, load as load
    from fleetfit.api.run import derive as derive, plan as plan, resume as resume, run as run
    from fleetfit.callbacks import Callback as Callback, RunStart as RunStart, scalars as scalars
    from fleetfit.check import check_layout as check_layout
    from fleetfit.config import Experiment as Experiment
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
    from fleetfit.data import Data as Data
    from fleetfit.errors import (
        ConfigError as ConfigError,
        DataError as DataError,
        FleetFitError as FleetFitError,
        MissingExtra as MissingExtra,
        ModelError as ModelError,
        PlanError as PlanError,
        RunError as RunError,
    )
    from fleetfit.hooks import ExtraShapes as ExtraShapes, Loss as Loss, Method as Method, take_mean as take_mean
    from fleetfit.hooks.levels import split_levels as split_levels
    from fleetfit.hooks.movements import ServerStep as ServerStep, get_movement as get_movement
    from fleetfit.layout import (
        Architecture as Architecture,
        Axis as Axis,
        ExitModel as ExitModel,
        State as State,
        alias as alias,
        block as block,
        blocked as blocked,
        exit_after as exit_after,
        interleaved as interleaved,
        outputs as outputs,
        product as product,
        segments as segments,
    )
    from fleetfit.planner import Plan as Plan, Targets as Targets
    from fleetfit.report.page import write_report as write_report
    from fleetfit.runs.listing import (
        RemovedCheckpoints as RemovedCheckpoints,
        RunInfo as RunInfo,
        clear_checkpoints as clear_checkpoints,
        list_runs as list_runs,
    )
    from fleetfit.submodel import Submodel as Submodel, extract as extract

_HOMES = {
    "Aggregate": "aggregate",
    "Architecture": "layout",
    "Axis": "layout",
    "Callback": "callbacks",
    "Comparison": "api.comparison",
    "ConfigError": "errors",
    "Data": "data",
    "DataError": "errors",
    "Device": "core",
    "ExitModel": "layout",
    "Experiment": "config",
    "ExtraShapes": "hooks",
    "Failure": "core",
    "Federation": "core",
    "FleetFitError": "errors",
    "Job": "core",
    "Level": "core",
    "Loss": "hooks",
    "Method": "hooks",
    "MissingExtra": "errors",
    "ModelError": "errors",
    "Plan": "planner",
    "PlanError": "errors",
    "Problem": "core",
    "RemovedCheckpoints": "runs.listing",
    "Run": "api.results",
    "RunError": "errors",
    "RunInfo": "runs.listing",
    "RunStart": "callbacks",
    "Server": "core",
    "ServerStep": "hooks.movements",
    "State": "layout",
    "Submodel": "submodel",
    "Targets": "planner",
    "LocalResult": "core",
    "Update": "core",
    "alias": "layout",
    "block": "layout",
    "blocked": "layout",
    "check_layout": "check",
    "clear_checkpoints": "runs.listing",
    "compare": "api.comparison",
    "derive": "api.run",
    "exit_after": "layout",
    "extract": "submodel",
    "get_movement": "hooks.movements",
    "interleaved": "layout",
    "list_runs": "runs.listing",
    "load": "api.results",
    "load_comparison": "api.comparison",
    "outputs": "layout",
    "plan": "api.run",
    "product": "layout",
    "profile": "api.profiling",
    "resume": "api.run",
    "run": "api.run",
    "scalars": "callbacks",
    "segments": "layout",
    "split_levels": "hooks.levels",
    "take_mean": "hooks",
    "write_report": "report.page",
}
__version__ = "0.1.0"
"""The version, also for the package's metadata."""
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module fleetfit has no {name!r}")
    return getattr(importlib.import_module(f"fleetfit.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
