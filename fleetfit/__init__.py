"""FleetFit: federated learning across unequal devices.

Every device trains the piece of the model that fits it. The names below are the public interface; they are imported
when they are used, so that importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetfit.api import Comparison as Comparison
    from fleetfit.api import Run as Run
    from fleetfit.api import compare as compare
    from fleetfit.api import load as load
    from fleetfit.api import resume as resume
    from fleetfit.api import run as run
    from fleetfit.config import Experiment as Experiment
    from fleetfit.data import Data as Data
    from fleetfit.errors import FleetFitError as FleetFitError
    from fleetfit.layout import Architecture as Architecture
    from fleetfit.layout import Axis as Axis
    from fleetfit.layout import ExitModel as ExitModel
    from fleetfit.layout import alias as alias
    from fleetfit.layout import blocked as blocked
    from fleetfit.layout import interleaved as interleaved
    from fleetfit.layout import segments as segments
    from fleetfit.method import Method as Method

_HOMES = {
    "Architecture": "layout",
    "Axis": "layout",
    "Comparison": "api",
    "Data": "data",
    "ExitModel": "layout",
    "Experiment": "config",
    "FleetFitError": "errors",
    "Method": "method",
    "Run": "api",
    "alias": "layout",
    "blocked": "layout",
    "compare": "api",
    "interleaved": "layout",
    "load": "api",
    "resume": "api",
    "run": "api",
    "segments": "layout",
}
__version__ = "0.1.0"
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module fleetfit has no {name!r}")
    return getattr(importlib.import_module(f"fleetfit.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
