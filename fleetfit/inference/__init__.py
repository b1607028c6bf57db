"""What trained models are asked: predictions exit by exit, and when to stop early."""

import importlib
import warnings
from typing import Any

from fleetfit.inference.calibration import Calibration, calibrate, read_policy
from fleetfit.inference.scores import COSTS, Scores, exit_costs, exit_latencies, scores
from fleetfit.inference.stopping import (
    Measure,
    Mode,
    Outcome,
    Policy,
    Stopped,
    calibration_error,
    confidence,
    fitted_temperature,
    outcome,
    policy_for,
    stop_early,
)

__all__ = [
    "COSTS",
    "Calibration",
    "Measure",
    "Mode",
    "Outcome",
    "Policy",
    "Scores",
    "Stopped",
    "calibrate",
    "calibration_error",
    "confidence",
    "exit_costs",
    "exit_latencies",
    "fitted_temperature",
    "outcome",
    "policy_for",
    "read_policy",
    "scores",
    "stop_early",
]

_MOVED = {"AttentionMaps", "attention_maps"}


def __getattr__(name: str) -> Any:
    """Return what had its place here, and say where it is now."""
    if name not in _MOVED:
        raise AttributeError(f"module fleetfit.inference has no {name!r}")
    warnings.warn(f"fleetfit.inference.{name} is fleetfit.papers.attention.{name} now.", DeprecationWarning, 2)
    return getattr(importlib.import_module("fleetfit.papers.attention"), name)
