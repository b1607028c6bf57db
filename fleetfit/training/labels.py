"""A client's class frequencies: the answer to a job "labels", and what a class prior is made of."""

import torch
from torch import Tensor

from fleetfit.core import FREQUENCIES, Device, Job, Update
from fleetfit.core.tasks import NOT_SCORED
from fleetfit.data import Data


def compute_class_frequencies(data: Data) -> Tensor:
    """Return the smoothed class frequencies of a client's training data, float64 [C].

    p_k(c) = (n_kc + 1) / (n_k + C), with n_kc the labels of class c; positions that are not scored do not count.
    """
    return smooth_counts(count_labels(data, "train"))


def count_labels(data: Data, split: str | None) -> Tensor:
    """Return the labels of each class in a split, or in all samples, float64 [C]; only scored positions count."""
    labels = data.y if split is None else data.y[data.split(split).to(data.y.device)]
    labels = labels.flatten().cpu()
    return torch.bincount(labels[labels != NOT_SCORED], minlength=data.classes).double()


def smooth_counts(counts: Tensor) -> Tensor:
    """Return (n_c + 1) / (n + C) of counts, float64 [C]."""
    return (counts + 1) / (counts.sum() + len(counts))


def compute_offset(frequencies: Tensor, prior: tuple[float, ...], tau: float = 1.0) -> Tensor:
    """Return tau (log p_k - log p), float32 [C].

    Args:
        frequencies: p_k, float64 [C].
        prior: p; empty: uniform.
        tau: Strength.
    """
    fleet = torch.tensor(prior, dtype=torch.float64) if prior else torch.full_like(frequencies, 1 / len(frequencies))
    return (tau * (frequencies.log() - fleet.log())).float()


def report_class_frequencies(job: Job, device: Device) -> Update:
    """Answer a job "labels"."""
    return Update.of(job, {FREQUENCIES: compute_class_frequencies(device.data)}, len(device.data.split("train")))
