"""What trained models are asked: predictions exit by exit, and when to stop early."""

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
