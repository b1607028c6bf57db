"""The method: a record of functions, one per hook, whose defaults are FedAvg's; and how a spec becomes one.

FedAvg (McMahan et al., AISTATS 2017). A method is its difference from FedAvg: a factory returns
`Method(loss=..., weight=...)`, and is rebuilt from its spec wherever a job runs, never pickled.
"""

from fleetfit.method.building import build, hyperparameters, is_portable, modelled, rebuilt
from fleetfit.method.defaults import (
    Loss,
    Weight,
    all_of_it,
    by_count,
    by_samples,
    coverage_mean,
    cut_out,
    full_level,
    last_exit_loss,
    own_level,
    round_submodel,
    take_mean,
    uniform,
)
from fleetfit.method.record import FEDAVG, HOOKS, Method

__all__ = [
    "FEDAVG",
    "HOOKS",
    "Loss",
    "Method",
    "Weight",
    "all_of_it",
    "build",
    "by_count",
    "by_samples",
    "coverage_mean",
    "cut_out",
    "full_level",
    "hyperparameters",
    "is_portable",
    "last_exit_loss",
    "modelled",
    "own_level",
    "rebuilt",
    "round_submodel",
    "take_mean",
    "uniform",
]
