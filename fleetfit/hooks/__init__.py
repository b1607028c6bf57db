"""The method: a record of functions, one per hook, whose defaults are FedAvg's.

A method is its difference from FedAvg: a factory in `fleetfit/methods/` returns `Method(make_loss=..., weigh=...)`. It
is built anew from its spec wherever a job runs, never pickled. `build` has the record and makes a method of a spec,
`fedavg` has a function for each hook, with its documentation, and the other modules what authors of hooks call.
"""

from fleetfit.hooks.build import (
    FEDAVG as FEDAVG,
    HOOKS as HOOKS,
    Method as Method,
    apply_model_hook as apply_model_hook,
    build as build,
    check_portable as check_portable,
    dump_problem as dump_problem,
    find_replaced_parameters as find_replaced_parameters,
    find_unused_parts as find_unused_parts,
    is_portable as is_portable,
    rebuild_problem as rebuild_problem,
)
from fleetfit.hooks.fedavg import (
    CoverageMean as CoverageMean,
    ExtraShapes as ExtraShapes,
    Loss as Loss,
    Penalty as Penalty,
    Reports as Reports,
    Slot as Slot,
    assign_own_levels as assign_own_levels,
    choose_uniformly as choose_uniformly,
    get_round_submodel as get_round_submodel,
    keep_prefix as keep_prefix,
    keep_task as keep_task,
    send_all as send_all,
    take_mean as take_mean,
    weigh_by_samples as weigh_by_samples,
    weigh_equally as weigh_equally,
)
