"""The method: a record of functions, one per hook, whose defaults are FedAvg's; and how a spec becomes one.

A method is its difference from FedAvg: a factory returns `Method(loss=..., weight=...)`, and is rebuilt from its spec
wherever a job runs, never pickled. `hooks` documents each hook, `building` has the record and makes one of a spec.
"""

from fleetfit.method.building import (
    FEDAVG,
    HOOKS,
    Method,
    build,
    find_unused_parts,
    hyperparameters,
    is_portable,
    modelled,
    rebuilt,
)
from fleetfit.method.hooks import (
    Loss,
    Penalty,
    Weight,
    all_of_it,
    all_received,
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

__all__ = [
    "FEDAVG",
    "HOOKS",
    "Loss",
    "Method",
    "Penalty",
    "Weight",
    "all_of_it",
    "all_received",
    "build",
    "by_count",
    "by_samples",
    "coverage_mean",
    "cut_out",
    "find_unused_parts",
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
