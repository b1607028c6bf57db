"""The verbs as functions: `run`, `resume`, `load` and `compare`; `Run`, the result of one."""

from fleetfit.api.comparison import Comparison, compare
from fleetfit.api.results import Run, load
from fleetfit.api.runs import resume, run

__all__ = ["Comparison", "Run", "compare", "load", "resume", "run"]
