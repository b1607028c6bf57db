"""What a level costs on this machine: the training step that really runs, its memory and energy, and inference.

Each level is measured in a process of its own (`process`), so that one that is killed for lack of memory ends nothing
else. The process has the wall clock, the peak of its memory and what the platform tells of energy; whoever started it
gets every finding as soon as it is there.
"""

from fleetfit.training.profiling.energy import Energy, energy_of
from fleetfit.training.profiling.memory import free_memory
from fleetfit.training.profiling.started import ProfileRequest, measured
from fleetfit.training.profiling.steps import Found, Timing

__all__ = ["Energy", "Found", "ProfileRequest", "Timing", "energy_of", "free_memory", "measured"]
