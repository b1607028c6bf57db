"""ScaleFL (CVPR 2023): 2-D sub-models (Eq. 1), exits with self-distillation (Eq. 5), equal client weights (Eq. 2).

Each technique has its switch: `scaling` ("both", "width", "depth"), `beta = 0` for no distillation, and the kept
channels with `method.hooks.choose_channels` ("prefix", "window", "rolling", "random").

Differs from the paper: see `fleetfit.hooks.losses` (weights of the exits sum to one), `fleetfit.planner` (levels are
solved together and no client gets more than it affords) and `fleetfit.evaluation` (static batch-norm statistics).
"""

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from fleetfit.anatomy import outputs
from fleetfit.core import Device, Job
from fleetfit.errors import ConfigError, check_range
from fleetfit.factories import declare_unused
from fleetfit.hooks import Loss, Method, weigh_equally
from fleetfit.hooks.levels import split_levels
from fleetfit.hooks.losses import declare_temperature, exit_weights, self_distillation


@declare_temperature
@declare_unused(
    "temperature", "warmup", when=lambda values: values["beta"] == 0, reason="beta = 0 switches the distillation off"
)
def scalefl(
    beta: float = 0.1,
    temperature: float = 3.0,
    scaling: Literal["both", "width", "depth"] | None = None,
    warmup: float = 0.0,
    printed: bool = False,
) -> Method:
    """Make the method.

    Args:
        beta: Share of the self-distillation, in [0, 1); 0 switches it off.
        temperature: tau of the distillation.
        scaling: Cut width and depth, width only, or depth only. By default as `fleet.scaling` says, else both.
        warmup: Fraction of the rounds, from the first, without distillation.
        printed: Weigh the exits as Eq. 5 is printed: half of the default.
    """
    check_range("temperature", temperature, 0)
    check_range("beta", beta, 0, 1, closed=True)
    if not 0 <= warmup <= 1:
        raise ConfigError(f"warmup must be in [0, 1], got {warmup}.", key="warmup")
    loss = partial(exits_loss, beta=beta, temperature=temperature, warmup=warmup, printed=printed)
    return Method(make_levels=partial(split_levels, scaling=scaling), make_loss=loss, weigh=weigh_equally)


def exits_loss(job: Job, device: Device, beta: float, temperature: float, warmup: float, printed: bool) -> Loss:
    """Return the loss of all exits of the sub-model (Eq. 5)."""
    task = device.problem.task
    share = 0.0 if job.round < warmup * job.rounds else beta

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        logits = outputs(module, x)
        return self_distillation(logits, y, task, share, temperature, exit_weights(len(logits), printed))

    return loss
