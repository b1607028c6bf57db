"""In time: a client that cannot finish its level before the deadline trains a shallower exit of the same sub-model.

The critique of ScaleFL asks that early exits serve training too. A client takes the deepest exit of the sub-model it
was sent whose whole training it can finish in time, with the exits before it, and sends back that part. If not even the
shallowest fits, it takes that one, and stops at the last step that ends in time.

`cohort.deadline_s` with `on_deadline = "shallower"` adds it to any method; without a deadline it has no effect. A
sub-model with one exit has nothing shallower, and only stops.
"""

from dataclasses import replace

from fleetfit.core import Device, Job
from fleetfit.hooks import Method
from fleetfit.submodel import Submodel
from fleetfit.training import fits_deadline


def in_time() -> Method:
    """Make the option."""
    return Method(adapt_job=train_shallower)


def train_shallower(job: Job, device: Device) -> Job:
    """Return the job with the deepest exit whose training ends in time, else with the shallowest."""
    local = job.local
    if job.kind != "train" or local.deadline_s is None or local.late != "shallower":
        return job
    for count in range(len(job.submodel.exits), 1, -1):
        candidate = keep_exits(job, device, count)
        if fits_deadline(candidate, device):
            return candidate
    return keep_exits(job, device, 1)


def keep_exits(job: Job, device: Device, count: int) -> Job:
    """Return the job with the first exits of its sub-model and the blocks up to the last of them."""
    if count == len(job.submodel.exits):
        return job
    submodel = Submodel(job.submodel.channels, job.submodel.exits[:count])
    names = device.problem.layout.shapes(submodel.sizes, submodel.exits)
    return replace(job, submodel=submodel, state={name: job.state[name] for name in names})
