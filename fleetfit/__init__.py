"""FleetFit: federated learning across unequal devices.

Each device trains the sub-model that fits it. The names below are what a user needs; authors find theirs in
`fleetfit.architecture`, `fleetfit.method` and `fleetfit.callbacks`. They are imported on first use, so that importing
the package is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetfit.api.comparison import Comparison as Comparison, compare as compare, load_comparison as load_comparison
    from fleetfit.api.profiling import profile as profile
    from fleetfit.api.results import Run as Run, load as load
    from fleetfit.api.run import derive as derive, plan as plan, resume as resume, run as run
    from fleetfit.callbacks import Callback as Callback
    from fleetfit.config import Experiment as Experiment
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
    from fleetfit.planner import Plan as Plan
    from fleetfit.report.page import write_report as write_report
    from fleetfit.runs.listing import list_runs as list_runs

_NAMES = {
    "api.comparison": ("Comparison", "compare", "load_comparison"),
    "api.profiling": ("profile",),
    "api.results": ("Run", "load"),
    "api.run": ("derive", "plan", "resume", "run"),
    "callbacks": ("Callback",),
    "config": ("Experiment",),
    "data": ("Data",),
    "errors": ("ConfigError", "DataError", "FleetFitError", "MissingExtra", "ModelError", "PlanError", "RunError"),
    "planner": ("Plan",),
    "report.page": ("write_report",),
    "runs.listing": ("list_runs",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__version__ = "0.1.0"
"""The version, also for the package's metadata."""
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module fleetfit has no {name!r}")
    return getattr(importlib.import_module(f"fleetfit.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
