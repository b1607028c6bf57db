"""Rounds of training: one round, the loop over them, what is reported, and what undoes a round."""

from fleetfit.rounds.loop import Renew, Round, keep_federation, run, start
from fleetfit.rounds.round import Engine, Settings, iter_jobs, run_round, sort_by_cost, validate_and_measure

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
