"""The method: a record of functions, one per hook, whose defaults are FedAvg's.

A method is its difference from FedAvg: a factory in `fleetfit/methods/` returns `Method(loss=..., weight=...)`, and is
built anew from its spec wherever a job runs, never pickled. `hooks` documents each hook; `building` has the record, and
builds a method from a spec.
"""

from fleetfit.hooks.build import (
    FEDAVG,
    HOOKS,
    Method,
    apply_model_hook,
    build,
    find_replaced_parameters,
    find_unused_parts,
    is_portable,
    rebuild_problem,
)
from fleetfit.hooks.fedavg import (
    CoverageMean,
    ExtraShapes,
    Loss,
    Penalty,
    Reports,
    Slot,
    assign_own_levels,
    choose_uniformly,
    dispatch_submodel,
    get_round_submodel,
    keep_prefix,
    keep_task,
    last_exit_loss,
    make_full_level,
    receive_all,
    send_all,
    take_mean,
    weigh_by_samples,
    weigh_equally,
)

__all__ = [
    "FEDAVG",
    "HOOKS",
    "CoverageMean",
    "ExtraShapes",
    "Loss",
    "Method",
    "Penalty",
    "Reports",
    "Slot",
    "apply_model_hook",
    "assign_own_levels",
    "build",
    "choose_uniformly",
    "dispatch_submodel",
    "find_replaced_parameters",
    "find_unused_parts",
    "get_round_submodel",
    "is_portable",
    "keep_prefix",
    "keep_task",
    "last_exit_loss",
    "make_full_level",
    "rebuild_problem",
    "receive_all",
    "send_all",
    "take_mean",
    "weigh_by_samples",
    "weigh_equally",
]
