"""Class prior: training adds the client's log class frequencies, relative to the fleet's, to the logits.

    L = CE(z + tau (log p_k - log p), y),    p_k(c) = (n_kc + 1) / (n_k + C)

with z the logits of an exit, p_k client k's smoothed class frequencies, and p the fleet's, their mean over the clients
that were asked. So a client does not learn which classes are frequent on its own device alone, while the model still
learns which are frequent in the fleet. Logit adjustment: Menon et al. (ICLR 2021); by each client's own frequencies:
FedLC (Zhang et al., ICML 2022); the relative form is ours.

The loss is adjusted at every exit that the method trains, in training and early stopping only. Divergences between
exits, evaluation and exported models have the plain logits. Classification and next tokens have classes; in another
task the option does nothing.

Before the first round the server asks up to 1,000 clients for p_k (`fleetfit.rounds.class_frequencies`), and sees each
answer; with `[secure]` it sees the sum only. With `[privacy]` no client is asked, and p is uniform.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor

from fleetfit.core import Device, Job
from fleetfit.core.tasks import Task
from fleetfit.errors import check_range
from fleetfit.hooks import Method
from fleetfit.training import compute_class_frequencies, compute_offset


def class_prior(tau: float = 1.0) -> Method:
    """Make the option.

    Args:
        tau: Strength, from 0 on; 0 is the method without it, bit for bit.
    """
    check_range("tau", tau, 0, closed=True)
    return Method(adapt_task=partial(adjust_task, tau=tau), needs_prior=tau > 0)


def adjust_task(job: Job, device: Device, tau: float) -> Task:
    """Return the task with the class prior in its loss; the task itself if it has no classes or tau is 0."""
    task = device.problem.task
    if not tau or not task.has_classes:
        return task
    offset = compute_offset(compute_class_frequencies(device.data), job.prior, tau).to(device.accelerator)

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return task.loss(logits + offset, y)

    return replace(task, loss=loss)
