"""The values of a round: problem, clients, levels, devices, federation, job, update, server.

Values, not services: a `Job` goes in, an `Update` comes out; state is passed and returned. What the server knows of a
client (`Client`) and what a device has (`Device`) are two types, and no function gets both.
"""

from fleetfit.values.fleet import (
    Aggregator,
    Client,
    Clients,
    DataDescription,
    Device,
    Federation,
    NodeDescription,
    Simulation,
)
from fleetfit.values.local import Local
from fleetfit.values.problem import Level, Problem, tuned
from fleetfit.values.resources import Availability, Clock, DeviceResources, Drift, Speed
from fleetfit.values.work import ClientMemory, Evaluation, Failure, Job, Server, Summed, Update

__all__ = [
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
    "NodeDescription",
    "Problem",
    "Server",
    "Simulation",
    "Speed",
    "Summed",
    "Update",
    "tuned",
]
