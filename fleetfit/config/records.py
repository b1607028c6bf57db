"""Record the values that a run measures or chooses in its experiment, so that it can be resumed and repeated."""

from collections.abc import Mapping
from typing import Any

from fleetfit.config.assemble.data import has_data_sized_clients, has_data_sized_cohort
from fleetfit.config.assemble.engine import Computing
from fleetfit.config.assemble.local import restore_training
from fleetfit.config.assemble.rounds import compute_cohort_size
from fleetfit.config.schema import CLIENTS, FRACTION, DeriveSection, EvaluationPartSection, Experiment
from fleetfit.rounds import Settings


def record_latencies(experiment: Experiment, measured: Mapping[str, list[float]]) -> Experiment:
    """Return the experiment with measured latencies."""
    if measured == experiment.fleet.measured:
        return experiment
    return experiment.model_copy(update={"fleet": experiment.fleet.model_copy(update={"measured": dict(measured)})})


def record_computing(experiment: Experiment, computing: Computing) -> Experiment:
    """Return the experiment with the chosen computation of its levels."""
    engine = experiment.engine
    if computing.chosen == engine.chosen and computing.memory_format == engine.memory_format:
        return experiment
    update = {"chosen": dict(computing.chosen), "memory_format": computing.memory_format}
    return experiment.model_copy(update={"engine": engine.model_copy(update=update)})


def record_evaluations(experiment: Experiment, settings: Settings) -> Experiment:
    """Return the experiment with the evaluations that were chosen: the rounds between them, and their part."""
    between = None if settings.between is None else EvaluationPartSection(**vars(settings.between))
    update = {"every": settings.evaluate_every, "between": between}
    return experiment.model_copy(update={"evaluate": experiment.evaluate.model_copy(update=update)})


def record_client_count(experiment: Experiment, count: int) -> Experiment:
    """Return the experiment with its number of clients and its cohort, if the data determined them."""
    data, cohort = experiment.data, experiment.cohort
    changes: dict[str, Any] = {}
    if has_data_sized_clients(experiment):
        partition = data.partition.model_copy(update={"clients": count})
        changes["data"] = data.model_copy(update={"partition": partition})
    if has_data_sized_cohort(experiment):
        fraction = FRACTION if count >= CLIENTS else compute_cohort_size(experiment, count) / count
        changes["cohort"] = cohort.model_copy(update={"fraction": fraction})
    return experiment.model_copy(update=changes)


def restore_records(experiment: Experiment, recorded: Experiment) -> Experiment:
    """Return the experiment with the values and callbacks that an earlier run recorded.

    Args:
        experiment: The user's experiment.
        recorded: The experiment of the run folder.
    """
    changes: dict[str, Any] = {"callbacks": recorded.callbacks}
    data, theirs, cohort = experiment.data, recorded.data, experiment.cohort
    if data.name == theirs.name:
        if has_data_sized_clients(experiment):
            partition = data.partition.model_copy(update={"clients": theirs.partition.clients})
            data = data.model_copy(update={"partition": partition})
        if has_data_sized_cohort(experiment):
            changes["cohort"] = cohort.model_copy(update={"fraction": recorded.cohort.fraction})
        for key in ("columns", "channels_last"):
            if (value := theirs.settings.get(key)) is not None and key not in data.settings:
                data = data.model_copy(update={key: value})
        changes["data"] = data
    derived = recorded.model.derive
    if derived is not None and derived.plan is not None:  # of a run folder, which says it of every plain module
        derive = (experiment.model.derive or DeriveSection()).model_copy(update={"plan": derived.plan})
        changes["model"] = experiment.model.model_copy(update={"derive": derive})
    if experiment.method.name == recorded.method.name:
        decided = experiment.request.decided
        own = {key: value for key, value in recorded.method.settings.items() if f"method.{key}" not in decided}
        changes["method"] = experiment.method.model_copy(update=own)
    engine = experiment.engine
    if engine.speed == "fast" and not engine.chosen:
        changes["engine"] = engine.model_copy(update={"chosen": recorded.engine.chosen})
    elif engine.speed == "exact" and engine.memory_format is None:
        changes["engine"] = engine.model_copy(update={"memory_format": recorded.engine.memory_format})
    if experiment.evaluate.every == "auto" and recorded.evaluate.every != "auto":
        update = {key: getattr(recorded.evaluate, key) for key in ("every", "between")}
        changes["evaluate"] = experiment.evaluate.model_copy(update=update)
    changed = record_latencies(experiment, recorded.fleet.measured).model_copy(update=changes)
    return restore_training(changed, recorded)
