"""The verbs as functions: `run`, `resume`, `load`, `compare`, `plan` and `profile`; `Run`, the result of one."""

from fleetfit.api.comparison import Comparison, compare
from fleetfit.api.profiling import Machine, Wishes, profile
from fleetfit.api.results import Run, load
from fleetfit.api.runs import plan, resume, run

__all__ = ["Comparison", "Machine", "Run", "Wishes", "compare", "load", "plan", "profile", "resume", "run"]
