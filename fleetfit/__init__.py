"""FleetFit: federated learning across unequal devices.

Each device trains the sub-model that fits it. The names below are the public interface. They are imported on first use,
so that importing the package is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetfit.aggregate import Aggregate as Aggregate
    from fleetfit.api.comparison import Comparison as Comparison
    from fleetfit.api.comparison import compare as compare
    from fleetfit.api.comparison import load_comparison as load_comparison
    from fleetfit.api.profiling import Machine as Machine
    from fleetfit.api.profiling import Wishes as Wishes
    from fleetfit.api.profiling import profile as profile
    from fleetfit.api.results import Run as Run
    from fleetfit.api.results import load as load
    from fleetfit.api.run import derive as derive
    from fleetfit.api.run import plan as plan
    from fleetfit.api.run import resume as resume
    from fleetfit.api.run import run as run
    from fleetfit.callbacks import Callback as Callback
    from fleetfit.callbacks import RunStart as RunStart
    from fleetfit.callbacks import scalars as scalars
    from fleetfit.check import check_layout as check_layout
    from fleetfit.config import Experiment as Experiment
    from fleetfit.core import Device as Device
    from fleetfit.core import Failure as Failure
    from fleetfit.core import Federation as Federation
    from fleetfit.core import Job as Job
    from fleetfit.core import Level as Level
    from fleetfit.core import LocalResult as LocalResult
    from fleetfit.core import Problem as Problem
    from fleetfit.core import Server as Server
    from fleetfit.core import Update as Update
    from fleetfit.data import Data as Data
    from fleetfit.errors import ConfigError as ConfigError
    from fleetfit.errors import DataError as DataError
    from fleetfit.errors import FleetFitError as FleetFitError
    from fleetfit.errors import MissingExtra as MissingExtra
    from fleetfit.errors import ModelError as ModelError
    from fleetfit.errors import PlanError as PlanError
    from fleetfit.errors import RunError as RunError
    from fleetfit.hooks import ExtraShapes as ExtraShapes
    from fleetfit.hooks import Loss as Loss
    from fleetfit.hooks import Method as Method
    from fleetfit.hooks import take_mean as take_mean
    from fleetfit.hooks.levels import split_levels as split_levels
    from fleetfit.hooks.movements import ServerStep as ServerStep
    from fleetfit.hooks.movements import get_movement as get_movement
    from fleetfit.layout import Architecture as Architecture
    from fleetfit.layout import Axis as Axis
    from fleetfit.layout import ExitModel as ExitModel
    from fleetfit.layout import State as State
    from fleetfit.layout import alias as alias
    from fleetfit.layout import block as block
    from fleetfit.layout import blocked as blocked
    from fleetfit.layout import exit_after as exit_after
    from fleetfit.layout import interleaved as interleaved
    from fleetfit.layout import outputs as outputs
    from fleetfit.layout import product as product
    from fleetfit.layout import segments as segments
    from fleetfit.planner import Plan as Plan
    from fleetfit.planner import Targets as Targets
    from fleetfit.report.page import write_report as write_report
    from fleetfit.runs.listing import RemovedCheckpoints as RemovedCheckpoints
    from fleetfit.runs.listing import RunInfo as RunInfo
    from fleetfit.runs.listing import clear_checkpoints as clear_checkpoints
    from fleetfit.runs.listing import list_runs as list_runs
    from fleetfit.submodel import Submodel as Submodel
    from fleetfit.submodel import extract as extract

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
    "Machine": "api.profiling",
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
    "Wishes": "api.profiling",
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
