"""Parts of the sub-model that a job trains: for losses of several levels in a step, or a level drawn anew in each."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fleetfit.anatomy import named_tensors, outputs
from fleetfit.core import Device, Job, Problem
from fleetfit.submodel import SlicePlan, Submodel, find_positions, get_slice_plan, narrow_layout
from fleetfit.training.clock import forward_work
from fleetfit.training.local_model import get_local_model


class SharedSubmodel:
    """A part of a module in training. It computes with the module's own parameters, so that gradients reach them.

    Batch norm takes each batch's own statistics, since a part keeps none.

    Attributes:
        submodel: The part.
        work: Multiply-adds of one sample forward, for `extra_multiply_adds` of a loss.
    """

    def __init__(self, device: Device, whole: Submodel, submodel: Submodel) -> None:
        """Prepare a part.

        Args:
            device: The device that trains.
            whole: The sub-model that is trained.
            submodel: A part of it.
        """
        self.submodel, self.work = submodel, forward_work(device.problem, submodel)
        self._module = get_local_model(device.problem, submodel, device.accelerator, "part").module
        self._plan = _get_plan(device.problem, whole, submodel)

    def __call__(self, module: nn.Module, x: Any) -> Sequence[Tensor]:
        """Return the outputs of the part's exits, from the parameters of the module of the whole."""
        if self._module.training != module.training:
            self._module.train(module.training)
        tensors = self._plan.through({name: tensor for name, tensor, _ in named_tensors(module)})
        return outputs(lambda x: functional_call(self._module, tensors, (x,)), x)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def _get_plan(problem: Problem, whole: Submodel, submodel: Submodel) -> SlicePlan:
    return get_slice_plan(narrow_layout(problem.layout, whole), find_positions(submodel, whole))


def make_shared_submodels(job: Job, device: Device) -> list[SharedSubmodel]:
    """Return the levels that are parts of a job's sub-model, smallest first; the last one is the sub-model itself."""
    smaller = [level for level in job.levels if level != job.submodel and level.is_part_of(job.submodel)]
    return [SharedSubmodel(device, job.submodel, submodel) for submodel in (*smaller, job.submodel)]
