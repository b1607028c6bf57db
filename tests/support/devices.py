"""Simulated devices."""

from dataclasses import replace

import numpy as np

from fleetfit.core import Simulation

FIGURES = ("multiply_adds_per_s", "down_bytes_per_s", "up_bytes_per_s", "latency_s")


def set_speeds(simulation: Simulation, *figures: float, jitter: float = 0.0) -> Simulation:
    """Return the simulation with the same figures for all clients."""
    count = len(simulation.parts)
    speeds = {name: np.full(count, value) for name, value in zip(FIGURES, figures, strict=True)}
    return replace(simulation, resources=replace(simulation.resources, speeds=speeds, jitter=jitter))
