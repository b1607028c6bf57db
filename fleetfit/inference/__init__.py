"""Inference with trained models: the logits of each exit, and early stopping."""

from fleetfit.inference.calibration import Calibration, calibrate, check_calibration, read_policy
from fleetfit.inference.scores import COSTS, Scores, compute_scores, exit_costs, measure_exit_latencies
from fleetfit.inference.stopping import (
    EarlyPredictions,
    Measure,
    Mode,
    Outcome,
    Policy,
    apply_policy,
    calibration_error,
    choose_policy,
    confidence,
    fit_temperature,
    stop_early,
)

__all__ = [
    "COSTS",
    "Calibration",
    "EarlyPredictions",
    "Measure",
    "Mode",
    "Outcome",
    "Policy",
    "Scores",
    "apply_policy",
    "calibrate",
    "calibration_error",
    "check_calibration",
    "choose_policy",
    "compute_scores",
    "confidence",
    "exit_costs",
    "fit_temperature",
    "measure_exit_latencies",
    "read_policy",
    "stop_early",
]
