"""The public functions (`run`, `resume`, `load`, `compare`, `plan`, ...) and `Run`, the result of a run."""

from fleetfit.api.comparison import Comparison, compare, load_comparison
from fleetfit.api.profiling import Machine, Wishes, profile
from fleetfit.api.results import Run, load
from fleetfit.api.run import derive, plan, resume, run
from fleetfit.report.page import write_report

__all__ = [
    "Comparison",
    "Machine",
    "Run",
    "Wishes",
    "compare",
    "derive",
    "load",
    "load_comparison",
    "plan",
    "profile",
    "resume",
    "run",
    "write_report",
]
