"""What trained models are asked: predictions exit by exit, when to stop early, and where they look."""

from fleetfit.inference.attention import AttentionMaps, attention_maps
from fleetfit.inference.calibration import Calibration, calibrate, read_policy
from fleetfit.inference.confidence import Measure, calibration_error, confidence, fitted_temperature
from fleetfit.inference.running import Stopped, stop_early
from fleetfit.inference.scores import COSTS, Scores, exit_costs, exit_latencies, scores
from fleetfit.inference.stopping import Mode, Outcome, Policy, outcome, policy_for

__all__ = [
    "COSTS",
    "AttentionMaps",
    "Calibration",
    "Measure",
    "Mode",
    "Outcome",
    "Policy",
    "Scores",
    "Stopped",
    "attention_maps",
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
