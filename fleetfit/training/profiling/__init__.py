"""The costs of a level on this machine: a real training step with its memory and energy, and inference.

Each level is measured in a process of its own (`process`), so a process that is killed for lack of memory ends nothing
else. That process measures time, peak memory and energy, and prints each result at once.
"""

from fleetfit.training.profiling.energy import EnergyMeter, find_energy_meter
from fleetfit.training.profiling.level import Measurement, ProfileRequest, Timing, profile_level

__all__ = [
    "EnergyMeter",
    "Measurement",
    "ProfileRequest",
    "Timing",
    "find_energy_meter",
    "profile_level",
]
