"""Run one job: the only place that runs local SGD, evaluation and batch-norm statistics.

Modules are built once per shape and kept; a job copies tensors in and reads an update out. All parameters of a module
lie in one flat buffer, and so do their gradients, so that clearing, clipping and the fused optimiser are one kernel
each.

A parameter that no gradient reaches in a job, of loss or penalty, is not trained: decay leaves it as it was sent,
and the update says so, so that it does not count in the average. Decay does reach all others at every step, whether the
step's batch used them or not.
"""

from fleetfit.training.clock import fits
from fleetfit.training.devices import accelerator_named
from fleetfit.training.job import alike, one_thread, run_alike, run_job, run_on_server
from fleetfit.training.local_model import (
    LocalModel,
    initial_base,
    initial_state,
    local_model_of,
)
from fleetfit.training.measure import with_statistics
from fleetfit.training.start import notes_on_start
from fleetfit.training.steps import joined

__all__ = [
    "LocalModel",
    "accelerator_named",
    "alike",
    "fits",
    "initial_base",
    "initial_state",
    "joined",
    "local_model_of",
    "notes_on_start",
    "one_thread",
    "run_alike",
    "run_job",
    "run_on_server",
    "with_statistics",
]
