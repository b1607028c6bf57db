"""Build `Settings` of rounds from `[cohort]`, `[evaluate]`, `[fleet] links` and others."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fleetfit.config.schema import FRACTION, MIN_COHORT, CohortSection, Experiment
from fleetfit.core import DataDescription, Evaluation, Federation, Local, Simulation
from fleetfit.data import Data
from fleetfit.errors import ConfigError
from fleetfit.evaluation import EvaluationPart, EvaluationScope, has_batch_norm
from fleetfit.rounds import Settings
from fleetfit.rounds.links import LinkFaults
from fleetfit.training.clock import count_planned_passes, forward_work

_EVALUATION_SHARE = 0.1
"""Work of evaluations, relative to that of training, with `evaluate.every = "auto"`; likewise their numbers below."""
_FEWEST_EVALUATIONS = 10
_MAX_EVALUATIONS = 50
_FEWEST_SAMPLES = 100
"""Samples of an evaluation before the last one, if there are as many; of each client as below."""
_FEWEST_CLIENT_SAMPLES = 10


def build_settings(experiment: Experiment) -> Settings:
    """Return the settings of rounds that need neither data nor clients.

    Raises:
        ConfigError: The run should end by validation accuracy, which it does not measure.
    """
    local, evaluate = experiment.local, experiment.evaluate
    scope = EvaluationScope(
        Evaluation(
            split=evaluate.split,
            batch_size=evaluate.batch_size,
            metrics=tuple(evaluate.metrics),
            personal=evaluate.personal,
        ),
        tuple(dict.fromkeys(evaluate.batch_norm)),
        evaluate.statistics_samples,
        clients=evaluate.clients,
        samples=evaluate.samples,
        always=evaluate.whole_test_set,
    )
    cohort = experiment.cohort
    training = Local.load({**dict(local), "deadline_s": cohort.deadline_s, "late": cohort.on_deadline})
    every = 0 if evaluate.every == "auto" else evaluate.every
    if evaluate.patience is not None and evaluate.split != "validation":
        raise ConfigError(
            f'[evaluate] patience ends the run by validation accuracy, but split is "{evaluate.split}". Set '
            'evaluate.split = "validation"; run.evaluate(split="test") measures the test data afterwards.',
            key="evaluate.split",
        )
    return Settings(experiment.rounds, training, every, scope, patience=evaluate.patience)


def check_personal(experiment: Experiment, federation: Federation) -> None:
    """Check that personal predictions have classes.

    Raises:
        ConfigError: The task has none.
    """
    if experiment.evaluate.personal and not federation.classes:
        raise ConfigError(
            f'[evaluate] prior: "own" adds log class frequencies to logits, but a task of the kind '
            f"{federation.problem.task.name} has no classes. Leave it out.",
            key="evaluate.personal",
        )


def choose_evaluations(
    experiment: Experiment, settings: Settings, federation: Federation, data: Data | DataDescription
) -> Settings:
    """Return the settings with `evaluate.every` and `evaluate.between`: as set, or chosen for "auto".

    At least ten evaluations, or one for each round, are spread over the rounds. If ten complete ones are a tenth of the
    work of training, they are complete, and as many as are a tenth, at most 50. If not, those before the last one
    measure a part: fewer samples of each client, then fewer clients. Work is multiply-adds: three forward passes for
    each sample that is trained, one for each that is evaluated or measured for batch-norm statistics, by the levels of
    the clients.

    Args:
        experiment: The run.
        settings: Of its rounds.
        federation: With the clients' levels, also where the server does not know them.
        data: Of all clients. For a description, a fourth of the training samples stands for the evaluated ones.
    """
    section, rounds = experiment.evaluate, settings.rounds
    between = None if section.between is None else EvaluationPart(**section.between.model_dump())
    every = max(1, rounds // _FEWEST_EVALUATIONS) if section.every == "auto" else section.every
    if section.every != "auto" or between is not None:
        return replace(settings, evaluate_every=every, between=between)
    samples = federation.clients.num_examples
    evaluated = len(data.split(section.split)) if isinstance(data, Data) else int(samples.sum()) // 4
    sizes = _Sizes(
        clients=len(samples) if settings.scope.clients is None else min(settings.scope.clients, len(samples)),
        client_samples=math.ceil(evaluated / len(samples)),
        samples=evaluated if settings.scope.samples is None else min(settings.scope.samples, evaluated),
        statistics_samples=min(settings.scope.statistics_samples, int(samples.sum())),
    )
    work = _compute_evaluation_work(federation, settings.scope, sizes)
    budget = _EVALUATION_SHARE * rounds * _compute_training_work(federation, settings)
    count = math.ceil(rounds / every)
    if count * work <= budget:
        times = min(int(budget / max(work, 1.0)), _MAX_EVALUATIONS, rounds)
        return replace(settings, evaluate_every=math.ceil(rounds / times))
    each = max(budget - work, budget / 2) / max(1, count - 1)
    share = each / _compute_evaluation_work(federation, settings.scope.reduce(None), sizes)
    if share < 1 and count > 1:
        between = _reduce_sizes(sizes, share, settings.scope, has_batch_norm(federation))
    return replace(settings, evaluate_every=every, between=between)


class _Sizes(NamedTuple):
    """The sizes of a complete evaluation, by the names of `EvaluationPart`."""

    clients: int
    client_samples: int
    samples: int
    statistics_samples: int


def _compute_training_work(federation: Federation, settings: Settings) -> float:
    """Return the multiply-adds of a round's training, for the mean client."""
    able = federation.able
    each = round(float(federation.clients.num_examples[able].mean()))
    work = [forward_work(federation.problem, level.submodel) for level in federation.levels]
    mean_work = float(np.mean([work[level] for level in federation.level_of[able]]))
    return federation.cohort * count_planned_passes(settings.local, each, 0) * mean_work


def _compute_evaluation_work(federation: Federation, scope: EvaluationScope, sizes: _Sizes) -> float:
    """Return the multiply-adds of an evaluation."""
    level_of = federation.level_of[federation.able]
    work = [forward_work(federation.problem, level.submodel) for level in federation.levels[: int(level_of.max()) + 1]]
    has_norms = has_batch_norm(federation)
    own = sizes.clients * sizes.client_samples * (float(np.mean([work[level] for level in level_of])) + work[-1])
    server = sizes.samples * sum(work) if scope.always else 0  # each level on the server's own test set
    statistics = sizes.statistics_samples * sum(work) if has_norms and "static" in scope.norms else 0
    return (len(scope.norms) if has_norms else 1) * (own + server) + statistics


def _reduce_sizes(sizes: _Sizes, share: float, scope: EvaluationScope, has_norms: bool) -> EvaluationPart:
    """Return a share of an evaluation's clients and samples, with at least `_FEWEST_SAMPLES`."""
    every, each = sizes.clients * sizes.client_samples, sizes.client_samples
    total = min(max(share * every, _FEWEST_SAMPLES), every)
    if every:
        each = min(max(math.ceil(total / sizes.clients), _FEWEST_CLIENT_SAMPLES), each)
    has_statistics = has_norms and "static" in scope.norms
    return EvaluationPart(
        clients=max(1, round(total / each)) if every else None,
        client_samples=each if each < sizes.client_samples else None,  # the mean: clients may have more
        samples=max(round(share * sizes.samples), _FEWEST_SAMPLES) if scope.always else None,
        statistics_samples=max(round(share * sizes.statistics_samples), _FEWEST_SAMPLES) if has_statistics else None,
    )


def compute_cohort_size(experiment: Experiment, clients: int) -> int:
    """Return the number of clients that take part in a round.

    Raises:
        ConfigError: `[cohort] count` exceeds the number of clients.
    """
    count = experiment.cohort.count
    if count is not None and count > clients:
        raise ConfigError(
            f"[cohort] count: must be at most the number of clients, {clients}; got {count}.", key="cohort.count"
        )
    return max(1, round(compute_cohort_fraction(experiment.cohort, clients) * clients))


def compute_cohort_fraction(section: CohortSection, clients: int) -> float:
    """Return the fraction of the clients that take part in a round: as set, or a tenth, at least four clients."""
    if section.fraction is not None:
        return section.fraction
    if section.count is not None:
        return min(1.0, section.count / clients)
    return max(FRACTION, min(1.0, MIN_COHORT / clients))


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
        settings = replace(settings, quorum=count_quorum(cohort, federation.cohort))
        federation = replace(federation, cohort=count_asked_clients(cohort, federation.cohort))
    return federation, settings


def count_quorum(section: CohortSection, cohort: int) -> int:
    """Return the number of updates that ends a round of a cohort of a size."""
    return max(1, math.ceil(section.quorum * cohort - 1e-9))


def count_asked_clients(section: CohortSection, cohort: int) -> int:
    """Return the number of clients to ask for a cohort of a size, with over-selection."""
    return math.ceil(cohort * (1 + section.over_selection) - 1e-9)
