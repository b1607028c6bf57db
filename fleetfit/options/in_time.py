"""In time: who cannot finish its level before the deadline trains a shallower exit of the same sub-model.

The critique of ScaleFL asks that early exits serve training too. A client takes the deepest exit of what it was sent
whose whole training it can finish in time, with the exits before it, and sends back that part; the average covers
what came back. Where not even the shallowest fits it takes that one, and stops at the last step that ends in time.

`cohort.deadline_s` with `late = "shallower"` brings it along with any method; without a deadline it does nothing. A
sub-model with one exit has nothing shallower, and only stops.
"""

from dataclasses import replace

from fleetfit.method import Method
from fleetfit.submodel import Submodel
from fleetfit.training import fits_deadline
from fleetfit.values import Device, Job


def in_time() -> Method:
    """Make the option."""
    return Method(adapt=shallower)


def shallower(job: Job, device: Device) -> Job:
    """Return the job with the deepest exit whose training ends in time, else with the shallowest."""
    local = job.local
    if job.kind != "train" or local.deadline_s is None or local.late != "shallower":
        return job
    for count in range(len(job.submodel.exits), 1, -1):
        candidate = with_exits(job, device, count)
        if fits_deadline(candidate, device):
            return candidate
    return with_exits(job, device, 1)


def with_exits(job: Job, device: Device, count: int) -> Job:
    """Return the job with the first exits of its sub-model and the blocks up to the last of them."""
    if count == len(job.submodel.exits):
        return job
    piece = Submodel(job.submodel.channels, job.submodel.exits[:count])
    kept = device.problem.layout.shapes(piece.sizes, piece.exits)
    return replace(job, submodel=piece, state={name: job.state[name] for name in kept})
