"""Rounds of training: one round, the loop over them, what is reported, and what undoes a round."""

from fleetfit.rounds.loop import (
    PlateauDetector as PlateauDetector,
    Renew as Renew,
    Round as Round,
    run as run,
    start as start,
)
from fleetfit.rounds.round import (
    Settings as Settings,
    iter_jobs as iter_jobs,
    run_round as run_round,
    sort_by_cost as sort_by_cost,
)
