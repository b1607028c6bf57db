"""The costs of a level on this machine: a real training step with its memory and energy, and inference.

Each level is measured in a process of its own (`process`), so a process that is killed for lack of memory ends nothing
else. That process measures time, peak memory and energy, and prints each result at once.
"""

from fleetfit.training.profiling.energy import EnergyMeter as EnergyMeter, find_energy_meter as find_energy_meter
from fleetfit.training.profiling.level import (
    Measurement as Measurement,
    ProfileRequest as ProfileRequest,
    profile_level as profile_level,
)
