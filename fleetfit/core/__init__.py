"""The values of a round: problem, clients, levels, devices, federation, job, update, server.

Values, not services: a `Job` goes in, an `Update` comes out; state is passed and returned. A `Client` is the server's
knowledge of a client, a `Device` is the client's own; no function gets both.
"""

from fleetfit.core.fleet import (
    Aggregator,
    Client,
    Clients,
    DataDescription,
    Device,
    Federation,
    NodeDescription,
    Simulation,
)
from fleetfit.core.local import Local
from fleetfit.core.problem import Level, Problem, apply_peft
from fleetfit.core.resources import Availability, Clock, DeviceResources, Drift, Speed
from fleetfit.core.work import (
    FREQUENCIES,
    ClientMemory,
    Evaluation,
    Failure,
    Job,
    LocalResult,
    RoundSums,
    Server,
    Update,
)

__all__ = [
    "FREQUENCIES",
    "Aggregator",
    "Availability",
    "Client",
    "ClientMemory",
    "Clients",
    "Clock",
    "DataDescription",
    "Device",
    "DeviceResources",
    "Drift",
    "Evaluation",
    "Failure",
    "Federation",
    "Job",
    "Level",
    "Local",
    "LocalResult",
    "NodeDescription",
    "Problem",
    "RoundSums",
    "Server",
    "Simulation",
    "Speed",
    "Update",
    "apply_peft",
]
