"""What the end of a run says where its model has learned nothing, or where jobs diverged."""

from collections.abc import Mapping
from typing import Any

import torch

from fleetfit.config import Assembly
from fleetfit.core.tasks import NOT_SCORED
from fleetfit.data import Data
from fleetfit.training.job import DIVERGED

_FEWEST_ROUNDS = 10  # a shorter run may be a trial
_MARGIN = 0.1  # of the way from chance to 100%


def describe_outcome(assembly: Assembly, summary: Mapping[str, Any]) -> list[str]:
    """Return sentences on a run that ended near chance, or with jobs that diverged, with the keys to change.

    Args:
        assembly: The run.
        summary: The content of `summary.json`.
    """
    settings, local = assembly.settings, assembly.settings.local
    sentences, rounds = [], settings.rounds
    if settings.patience is not None and summary["rounds"] < rounds and (best := summary.get("best")) is not None:
        sentences.append(
            f"Early stopping has ended the run after {summary['rounds']} of {rounds} rounds: round {best['round']} has "
            'the best validation accuracy. fleetfit.load(folder, "best") opens it.'
        )
    advice = f"Set local.lr below {local.lr:g}"
    if local.optimizer == "sgd":
        key = "local.clip_norm = 1.0" if local.clip_norm is None else 'local.optimizer = "adamw"'
        advice = f"Set {key}, or local.lr below {local.lr:g}"
    diverged = summary.get("failure_reasons", {}).get(DIVERGED, 0)
    if diverged:
        sentences.append(f"The training of {diverged} jobs diverged. {advice}.")
    accuracies = [value for key in ("local", "global") if (value := summary[key]) is not None]
    chance = find_chance(assembly.data)
    if not accuracies or chance is None or summary["rounds"] < _FEWEST_ROUNDS:
        return sentences
    highest = max(accuracies)
    if highest < chance + _MARGIN * (1 - chance):
        level = f"the best answer that is the same for all samples has {chance:.1%}"
        sentences.append(
            f"The model has learned next to nothing: {summary['score']} {highest:.1%}, where {level}. {advice}, or "
            "train for more rounds."
        )
    return sentences


def find_chance(data: Any) -> float | None:
    """Return the accuracy of a prediction that is always the same, the best one; None where it is unknown."""
    if data.task == "regression":
        return 0.0
    if not isinstance(data, Data):
        return 1 / data.classes if data.task != "multi_label" else None
    indices = next((split for name in ("test", "validation", "train") if len(split := data.split(name))), None)
    if data.task == "multi_label":
        shares = data.y[indices].double().mean(0)
        return float(torch.maximum(shares, 1 - shares).mean())
    labels = data.y[indices].flatten()
    counts = torch.bincount(labels[labels != NOT_SCORED], minlength=data.classes)
    return float(counts.max() / counts.sum().clamp_min(1))
