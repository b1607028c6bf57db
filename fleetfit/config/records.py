"""Record the values that a run measures or chooses in its experiment, so that it can be resumed and repeated."""

from collections.abc import Mapping
from typing import Any

from fleetfit.config.assemble.data import has_data_sized_clients
from fleetfit.config.assemble.engine import Computing
from fleetfit.config.assemble.local import restore_training
from fleetfit.config.assemble.rounds import compute_cohort_fraction
from fleetfit.config.keys import replace_key
from fleetfit.config.schema import EvaluationPartSection, Experiment
from fleetfit.rounds import Settings


def record_choices(
    experiment: Experiment, latencies: Mapping[str, list[float]], computing: Computing, settings: Settings,
    clients: int | None,
) -> Experiment:  # fmt: skip
    """Return the experiment with `[recorded]`, and the values chosen for "auto" and for the size of the data.

    Args:
        experiment: The run.
        latencies: The measured latencies.
        computing: How its levels are computed.
        settings: With its evaluations.
        clients: Number of simulated clients; None on a real fleet.
    """
    update = {"latencies": dict(latencies), "computing": dict(computing.chosen),
              "memory_format": computing.memory_format}  # fmt: skip
    changes: dict[str, Any] = {
        "recorded": experiment.recorded.model_copy(update=update),
        "evaluate.every": settings.evaluate_every,
        "evaluate.between": None if settings.between is None else EvaluationPartSection(**vars(settings.between)),
    }
    if clients is not None and has_data_sized_clients(experiment):
        changes["data.partition.clients"] = clients
    if clients is not None and experiment.cohort.count is None:
        changes["cohort.fraction"] = compute_cohort_fraction(experiment.cohort, clients)
    for key, value in changes.items():
        experiment = replace_key(experiment, key, value)
    return experiment


def restore_records(experiment: Experiment, recorded: Experiment) -> Experiment:
    """Return the experiment with the values that an earlier run recorded, its callbacks and its keys of checkpoints.

    Args:
        experiment: The user's experiment.
        recorded: The experiment of the run folder.
    """
    changes: dict[str, Any] = {key: getattr(recorded, key) for key in ("callbacks", "checkpoint", "recorded")}
    data, theirs = experiment.data, recorded.data
    if data.name == theirs.name:
        if has_data_sized_clients(experiment):
            changes["data.partition.clients"] = theirs.partition.clients
        if experiment.cohort.count is None and experiment.cohort.fraction is None:
            changes["cohort.fraction"] = recorded.cohort.fraction
        if theirs.transform is not None and data.transform is None:
            changes["data.transform"] = theirs.transform
        if (value := theirs.settings.get("channels_last")) is not None and "channels_last" not in data.settings:
            changes["data.channels_last"] = value
    if experiment.method.name == recorded.method.name:
        keys = recorded.method.settings.keys() - {key.removeprefix("method.") for key in experiment.request.decided}
        changes |= {f"method.{key}": recorded.method.settings[key] for key in keys}
    if experiment.evaluate.every == "auto" and recorded.evaluate.every != "auto":
        changes |= {f"evaluate.{key}": getattr(recorded.evaluate, key) for key in ("every", "between")}
    for key, value in changes.items():
        experiment = replace_key(experiment, key, value)
    return restore_training(experiment, recorded)
