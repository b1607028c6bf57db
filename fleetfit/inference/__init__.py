"""Inference with trained models: the logits of each exit, and early stopping."""

from fleetfit.inference.calibration import (
    Calibration as Calibration,
    calibrate as calibrate,
    check_calibration as check_calibration,
    read_policy as read_policy,
)
from fleetfit.inference.scores import (
    COSTS as COSTS,
    Scores as Scores,
    compute_scores as compute_scores,
    exit_costs as exit_costs,
    measure_exit_latencies as measure_exit_latencies,
)
from fleetfit.inference.stopping import (
    Measure as Measure,
    Mode as Mode,
    Outcome as Outcome,
    Policy as Policy,
    apply_policy as apply_policy,
    calibration_error as calibration_error,
    choose_policy as choose_policy,
    confidence as confidence,
    fit_temperature as fit_temperature,
    stop_early as stop_early,
)
