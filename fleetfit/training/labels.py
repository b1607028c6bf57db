"""A client's class frequencies: the answer to a job "labels", and what a class prior is made of."""

import torch
from torch import Tensor

from fleetfit.data import Data
from fleetfit.tasks import NOT_SCORED
from fleetfit.values import FREQUENCIES, Device, Job, Update


def compute_class_frequencies(data: Data) -> Tensor:
    """Return the smoothed class frequencies of a client's training data, float64 [C].

    p_k(c) = (n_kc + 1) / (n_k + C), with n_kc the labels of class c; positions that are not scored do not count.
    """
    labels = data.y[data.split("train").to(data.y.device)].flatten().cpu()
    counts = torch.bincount(labels[labels != NOT_SCORED], minlength=data.classes).double()
    return (counts + 1) / (counts.sum() + data.classes)


def report_class_frequencies(job: Job, device: Device) -> Update:
    """Answer a job "labels"."""
    samples, state = len(device.data.split("train")), {FREQUENCIES: compute_class_frequencies(device.data)}
    return Update(job.round, job.index, job.client, job.level, job.submodel, job.submodel, state, samples, {})
