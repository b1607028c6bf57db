"""Rounds of training: one round, the loop over them, what is reported, and what undoes a round."""

from fleetfit.rounds.round import (
    Engine,
    Renew,
    Round,
    Settings,
    iter_jobs,
    keep_federation,
    run,
    run_round,
    sort_by_cost,
    start,
    validate_and_measure,
)

__all__ = [
    "Engine",
    "Renew",
    "Round",
    "Settings",
    "iter_jobs",
    "keep_federation",
    "run",
    "run_round",
    "sort_by_cost",
    "start",
    "validate_and_measure",
]
