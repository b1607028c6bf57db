"""Build `Settings` of rounds from `[cohort]`, `[evaluate]`, `[fleet] links` and others."""

import functools
import math
from dataclasses import replace

import numpy as np

from fleetfit.config.build.data import has_data_sized_clients
from fleetfit.config.build.local import build_local_training
from fleetfit.config.schema import FRACTION, MIN_COHORT, CohortSection, Experiment
from fleetfit.errors import ConfigError
from fleetfit.evaluate import EvaluationScope, has_batch_norm
from fleetfit.network import LinkFaults
from fleetfit.rounds import Settings
from fleetfit.training.clock import count_planned_passes, forward_work
from fleetfit.values import Evaluation, Federation, Simulation

_EVALUATION_SHARE = 0.1
"""Work of evaluations, relative to that of training, with `evaluate.every = "auto"`."""


def build_settings(experiment: Experiment) -> Settings:
    """Return the settings of rounds that need neither data nor clients."""
    local, evaluate = experiment.local, experiment.evaluate
    scope = EvaluationScope(
        Evaluation(
            split=evaluate.split,
            batch_size=evaluate.batch_size,
            metrics=tuple(evaluate.metrics),
            personal=evaluate.prior == "own",
        ),
        tuple(dict.fromkeys(evaluate.norms)),
        evaluate.statistics_samples,
        clients=evaluate.clients,
        samples=evaluate.samples,
        always=evaluate.whole,
    )
    training = build_local_training(local, experiment.cohort)
    schedule = functools.partial(local.schedule.factor_at, experiment.rounds)
    every = 0 if evaluate.every == "auto" else evaluate.every
    return Settings(experiment.rounds, training, schedule, every, scope)


def check_personal(experiment: Experiment, federation: Federation) -> None:
    """Check that personal predictions have classes.

    Raises:
        ConfigError: The task has none.
    """
    if experiment.evaluate.prior is not None and not federation.classes:
        raise ConfigError(
            f'[evaluate] prior: "own" adds log class frequencies to logits, but a task of the kind '
            f"{federation.problem.task.name} has no classes. Leave it out.",
            key="evaluate.prior",
        )


def choose_evaluation_interval(
    experiment: Experiment, settings: Settings, federation: Federation, evaluated: int | None
) -> int:
    """Return `evaluate.every`: as set, or for "auto" such that evaluations are about a tenth of the run's work.

    Work is multiply-adds: three forward passes for each sample that is trained, one for each that is evaluated or
    measured for batch-norm statistics, by the levels of the clients. The last round is always evaluated.

    Args:
        experiment: The run.
        settings: Of its rounds.
        federation: With the clients' levels, also where the server does not know them.
        evaluated: Samples of all clients in the split that is evaluated; None if unknown: a fourth of the others.
    """
    if experiment.evaluate.every != "auto":
        return experiment.evaluate.every
    problem, scope, samples = federation.problem, settings.scope, federation.clients.num_examples
    work = [forward_work(problem, level.submodel) for level in federation.levels]
    able = federation.able
    each = round(float(samples[able].mean()))
    level_of = federation.level_of[able]
    mean_work, top = float(np.mean([work[level] for level in level_of])), int(level_of.max())
    training = federation.cohort * count_planned_passes(settings.local, each, 0) * mean_work

    if evaluated is None:
        evaluated = int(samples.sum()) // 4
    share = 1.0 if scope.clients is None else min(1.0, scope.clients / len(samples))
    has_norms = has_batch_norm(federation)
    norms = scope.norms if has_norms else scope.norms[:1]
    evaluation = len(norms) * share * evaluated * (mean_work + work[top])
    if scope.always:  # each level on the server's own test set
        own = evaluated if scope.samples is None else min(scope.samples, evaluated)
        evaluation += len(norms) * own * sum(work[: top + 1])
    if has_norms and "static" in norms:
        evaluation += min(scope.statistics_samples, int(samples.sum())) * sum(work[: top + 1])
    times = int(_EVALUATION_SHARE * settings.rounds * training / max(evaluation, 1.0))
    return math.ceil(settings.rounds / min(max(times, 1), settings.rounds))


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
