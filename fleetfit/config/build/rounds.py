"""Build `Settings` of rounds from `[cohort]`, `[evaluate]`, `[fleet] links` and others."""

import functools
import math
from dataclasses import replace

from fleetfit.config.build.data import has_data_sized_clients
from fleetfit.config.build.local import build_local_training
from fleetfit.config.schema import FRACTION, MIN_COHORT, CohortSection, Experiment
from fleetfit.errors import ConfigError
from fleetfit.evaluate import EvaluationScope
from fleetfit.network import LinkFaults
from fleetfit.rounds import Settings
from fleetfit.values import Evaluation, Federation, Simulation


def build_settings(experiment: Experiment) -> Settings:
    """Return the settings of rounds that need neither data nor clients."""
    local, evaluate = experiment.local, experiment.evaluate
    scope = EvaluationScope(
        Evaluation(split=evaluate.split, batch_size=evaluate.batch_size, metrics=tuple(evaluate.metrics)),
        tuple(dict.fromkeys(evaluate.norms)),
        evaluate.statistics_samples,
        clients=evaluate.clients,
        always=evaluate.whole,
    )
    training = build_local_training(local, experiment.cohort)
    schedule = functools.partial(local.schedule.factor_at, experiment.rounds)
    return Settings(experiment.rounds, training, schedule, evaluate.every, scope)


def compute_cohort_size(experiment: Experiment, clients: int) -> int:
    """Return the number of clients that take part in a round.

    Raises:
        ConfigError: `[cohort] count` exceeds the number of clients.
    """
    section = experiment.cohort
    if section.count is None:
        fraction = FRACTION if section.fraction is None else section.fraction
        fewest = min(MIN_COHORT, clients) if section.fraction is None and has_data_sized_clients(experiment) else 1
        return max(fewest, round(fraction * clients))
    if section.count > clients:
        raise ConfigError(
            f"[cohort] count: must be at most the number of clients, {clients}; got {section.count}.",
            key="cohort.count",
        )
    return section.count


def configure_links(
    experiment: Experiment, federation: Federation, simulation: Simulation | None, settings: Settings
) -> tuple[Federation, Settings]:
    """Set the links, the quorum and the over-selection of simulated rounds.

    Quorum and over-selection need the clock of a simulation, because without profiles all clients are equally fast. On
    a real fleet the engine implements both.

    Raises:
        ConfigError: The rounds are secure.
    """
    cohort, section = experiment.cohort, experiment.fleet.links
    if experiment.is_secure:
        for where, key, is_set in (
            ("[fleet] links", "fleet.links", section is not None),
            ("[cohort] quorum", "cohort.quorum", cohort.quorum < 1),
            ("[cohort] over_selection", "cohort.over_selection", cohort.over_selection > 0),
        ):
            if is_set:
                raise ConfigError(
                    f"[secure]: each phase of a secure round waits for all remaining clients, so {where} is for plain "
                    "rounds only. Leave it out; use fleet.availability.leave to simulate dropout.",
                    key=key,
                )
    if simulation is None:
        return federation, settings
    has_clock = bool(simulation.resources.speeds)
    if section is not None:
        links = LinkFaults(section.lost_down, section.lost_up, section.repeated, experiment.seed, has_clock)
        settings = replace(settings, links=links)
    if has_clock and (cohort.quorum < 1 or cohort.over_selection):
        quorum = max(1, math.ceil(cohort.quorum * federation.cohort - 1e-9))
        settings = replace(settings, quorum=quorum)
        federation = replace(federation, cohort=count_asked_clients(cohort, federation.cohort))
    return federation, settings


def count_asked_clients(section: CohortSection, cohort: int) -> int:
    """Return the number of clients to ask for a cohort of a size, with over-selection."""
    return math.ceil(cohort * (1 + section.over_selection) - 1e-9)
