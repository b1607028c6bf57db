"""The verbs as functions: `run`, `resume`, `load`, `compare`, `plan`, `profile`, `write_report`; `Run`, its result."""

from fleetfit.api.comparison import Comparison, compare
from fleetfit.api.profiling import Machine, Wishes, profile
from fleetfit.api.results import Run, load
from fleetfit.api.runs import plan, resume, run
from fleetfit.report.page import write_report

__all__ = [
    "Comparison",
    "Machine",
    "Run",
    "Wishes",
    "compare",
    "load",
    "plan",
    "profile",
    "resume",
    "run",
    "write_report",
]
