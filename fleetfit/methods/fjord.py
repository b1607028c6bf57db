"""FjORD: ordered dropout, each local step trains a width drawn up to the client's own (Horvath et al., NeurIPS 2021).

The widths are those of the fleet's levels: each keeps the first channels of every layer, at full depth with one
classifier. In each step, that is for each batch, a client draws a width p uniformly from those up to its own, p_max,
and minimizes

    CE(F_p(x), y), or with distillation CE(F_pmax(x), y) + KL(softmax(sg F_pmax(x)) || softmax(F_p(x))),

where sg stops the gradient. The latter is the paper's (1 - alpha) CE + alpha KL at alpha = T = 1, where it is best, and
the teacher's own loss. A step that draws p_max has the teacher's loss alone, since a divergence from itself is zero.
Each element is averaged, by samples, over the clients whose p_max covers it, whatever widths they drew.

Differs from the paper: the ladder of widths is the planner's, not uniform, unless `fleet.levels` lists it, and a width
keeps the floor of its channels. Batch norm takes each batch's own statistics in training; those of evaluation are
measured for each level after training (`fleetfit.evaluation`). The authors' code averages running statistics per
width, which are old for widths that were not drawn. With distillation every element of p_max has a gradient in each
step. Without it momentum, weight decay and Adam would move elements outside the drawn width, too, as weight decay does
in the authors' code; so SGD's are 0 by default then.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from fleetfit.anatomy import outputs
from fleetfit.core import Device, Job
from fleetfit.hooks import Method
from fleetfit.hooks.levels import split_levels
from fleetfit.seeds import make_numpy_rng
from fleetfit.submodel import Submodel
from fleetfit.training import SharedSubmodel
from fleetfit.training.clock import STEP, forward_work


def fjord(distill: bool = True) -> Method:
    """Make the method.

    Args:
        distill: Train the client's widest model in each step, too; the drawn one learns from it instead of the labels.
    """
    return Method(
        make_levels=partial(split_levels, scaling="width"),
        make_loss=partial(DrawnWidthLoss, distill=distill),
        defaults={} if distill else {"local.momentum": 0.0, "local.weight_decay": 0.0},
    )


class DrawnWidthLoss:
    """The loss of a width drawn for each batch, and with `distill` that of the client's widest model.

    Attributes:
        extra_multiply_adds: Per sample beyond a step of the widest model, as the mean over the widths.
    """

    def __init__(self, job: Job, device: Device, distill: bool) -> None:
        narrower = [SharedSubmodel(device, job.submodel, submodel) for submodel in list_narrower(job)]
        self._narrower, self._distill, self._task = narrower, distill, device.problem.task
        self._rng = make_numpy_rng(job.seed, "width")
        widths = len(narrower) + 1
        saved = 0.0 if distill else forward_work(device.problem, job.submodel) * (1 - 1 / widths)
        self.extra_multiply_adds = STEP * (sum(part.work for part in narrower) / widths - saved)

    def __call__(self, module: nn.Module, x: Any, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        drawn = int(self._rng.integers(len(self._narrower) + 1))
        part = self._narrower[drawn] if drawn < len(self._narrower) else None
        if part is not None and not self._distill:
            return self._task.loss(part(module, x)[-1], y)
        teacher = outputs(module, x)[-1]
        loss = self._task.loss(teacher, y)
        return loss if part is None else loss + self._task.divergence(teacher.detach(), part(module, x)[-1], 1.0, y)


def list_narrower(job: Job) -> list[Submodel]:
    """Return a sub-model for each width below a job's own: the first ones of its channels, whichever these are."""
    own, narrower = job.submodel, list[Submodel]()
    for level in job.levels:
        if set(level.exits) <= set(own.exits) and all(level.sizes[axis] <= size for axis, size in own.sizes.items()):
            channels = {axis: kept[: level.sizes[axis]] for axis, kept in own.channels.items()}
            narrower.append(Submodel(channels, level.exits))
    return [submodel for submodel in dict.fromkeys(narrower) if submodel != own]
