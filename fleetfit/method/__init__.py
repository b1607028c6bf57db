"""The method: a record of functions, one per hook, whose defaults are FedAvg's; and how a spec becomes one.

A method is its difference from FedAvg: a factory returns `Method(loss=..., weight=...)`, and is rebuilt from its spec
wherever a job runs, never pickled. `hooks` documents each hook, `building` has the record and makes one of a spec.
"""

from fleetfit.method.building import (
    FEDAVG,
    HOOKS,
    Method,
    apply_model_hook,
    build,
    find_unused_parts,
    is_portable,
    list_hyperparameters,
    rebuild_problem,
)
from fleetfit.method.hooks import (
    CoverageMean,
    Loss,
    Penalty,
    all_of_it,
    by_count,
    by_samples,
    cut_out,
    full_level,
    last_exit_loss,
    own_level,
    receive_all,
    round_submodel,
    take_mean,
    uniform,
)

__all__ = [
    "FEDAVG",
    "HOOKS",
    "CoverageMean",
    "Loss",
    "Method",
    "Penalty",
    "all_of_it",
    "apply_model_hook",
    "build",
    "by_count",
    "by_samples",
    "cut_out",
    "find_unused_parts",
    "full_level",
    "is_portable",
    "last_exit_loss",
    "list_hyperparameters",
    "own_level",
    "rebuild_problem",
    "receive_all",
    "round_submodel",
    "take_mean",
    "uniform",
]
