"""Run client jobs: local SGD, evaluation and batch-norm statistics.

Modules are built once per shape; a job copies a state in and reads an update out. All parameters of a module are in one
flat buffer, and so are their gradients, so clearing, clipping and the fused optimizer are one kernel each.

A parameter without a gradient in a job, of loss or penalty, is not trained: it keeps the value that it was sent with,
also with weight decay, and the update names it, so that the average leaves it out. Weight decay changes all other
parameters at every step, also those that the step's batch does not use.
"""

from fleetfit.training.batch_norm import set_statistics as set_statistics
from fleetfit.training.batches import iter_batches as iter_batches
from fleetfit.training.clock import fits_deadline as fits_deadline
from fleetfit.training.job import (
    group_jobs as group_jobs,
    run_group as run_group,
    run_job as run_job,
    run_on_server as run_on_server,
)
from fleetfit.training.labels import (
    compute_class_frequencies as compute_class_frequencies,
    compute_offset as compute_offset,
)
from fleetfit.training.local_model import (
    get_local_model as get_local_model,
    initial_base as initial_base,
    initial_state as initial_state,
)
from fleetfit.training.runtime import resolve_device as resolve_device
from fleetfit.training.shared_submodels import (
    SharedSubmodel as SharedSubmodel,
    make_shared_submodels as make_shared_submodels,
)
from fleetfit.training.start import describe_start as describe_start
