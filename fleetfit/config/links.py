"""`[fleet] links`, `[cohort] quorum` and `over_selection`: what is lost on the way, and which updates end a round."""

import math
from dataclasses import replace

from fleetfit.config.schema import CohortSection, Experiment
from fleetfit.errors import ConfigError
from fleetfit.links import Links
from fleetfit.rounds import Settings
from fleetfit.values import Federation, Simulation


def on_the_way(
    experiment: Experiment, federation: Federation, simulation: Simulation | None, settings: Settings
) -> tuple[Federation, Settings]:
    """Return how many clients a round asks, how many updates end it, and how its messages fare.

    In a simulation that takes a clock: without one nobody is faster than another. On a fleet the engine counts.

    Raises:
        ConfigError: The rounds are secure.
    """
    cohort = experiment.cohort
    _check_plain(experiment)
    if simulation is None:
        return federation, settings
    section, clocked = experiment.fleet.links, bool(simulation.resources.speeds)
    if section is not None:
        found = Links(section.lost_down, section.lost_up, section.repeated, experiment.seed, clocked)
        settings = replace(settings, links=found)
    if clocked and (cohort.quorum < 1 or cohort.over_selection):
        settings = replace(settings, quorum=needed(cohort, federation.cohort))
        federation = replace(federation, cohort=asked(cohort, federation.cohort))
    return federation, settings


def _check_plain(experiment: Experiment) -> None:
    if not experiment.is_secure:
        return
    cohort = experiment.cohort
    said = {
        "[fleet] links": experiment.fleet.links is not None,
        "[cohort] quorum": cohort.quorum < 1,
        "[cohort] over_selection": cohort.over_selection > 0,
    }
    for key in (key for key, is_said in said.items() if is_said):
        raise ConfigError(
            f"[secure]: its rounds have phases of their own, in each of which all who are left are waited for. {key} "
            "is for plain rounds. Leave it out; clients that are lost can be had with fleet.availability.leave."
        )


def needed(section: CohortSection, cohort: int) -> int:
    """Return how many updates end a round, of a cohort of so many."""
    return max(1, math.ceil(section.quorum * cohort - 1e-9))


def asked(section: CohortSection, cohort: int) -> int:
    """Return how many clients are asked, so that a cohort of so many fills up."""
    return math.ceil(cohort * (1 + section.over_selection) - 1e-9)
