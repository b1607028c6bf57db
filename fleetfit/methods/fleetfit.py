"""FleetFit's own method: whole early blocks, a class prior, equal exits, server momentum and a cosine over the rounds.

A client whose sub-model has the exits 1..l, with outputs z_1..z_l, minimises

    L = 1/l sum_i [CE(z_i + tau (log p_k - log p), y) + [i < l] beta T^2 KL(softmax(sg z_l / T) || softmax(z_i / T))],

where sg stops the gradient: ScaleFL's Eq. 5 (Ilhan et al., CVPR 2023) with equal weights, since each exit is the last
one of some level. p_k are the client's class frequencies and p the fleet's, which one job before the first round asks
for (`fleetfit.options.class_prior`). Other tasks have their own loss and divergence (`fleetfit.tasks`). Every client
counts alike, as in ScaleFL's Eq. 2, and the server moves each element j that a client of the round trained, to which
the clients' mean is m_j,

    v_j <- momentum v_j + (m_j - x_j);    x_j <- x_j + v_j;

the others keep x_j and v_j (FedAvgM: Hsu, Qi and Brown, 2019; here per covered element, `fleetfit.options.fedavgm`).
The learning rate of round t of R is lr (1 + cos(pi t / (R - 1))) / 2 (Loshchilov and Hutter, ICLR 2017), unless
`local.schedule` is set.

Levels are those of `fleet.split = "auto"` (`fleetfit.planner.split`).

Each part has its switch: `tau = 0`, `beta = 0`, `momentum = 0`, `local.schedule = { kind = "constant" }` and
`fleet.split = "both"`; what is left is ScaleFL without distillation and with equal exits, and FedAvg where the model
has one exit.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from fleetfit.errors import check_range
from fleetfit.factories import declare_unused
from fleetfit.layout import outputs
from fleetfit.levels import split_levels
from fleetfit.losses import check_temperature, self_distillation
from fleetfit.method import FEDAVG, Loss, Method, take_mean, weigh_equally
from fleetfit.options.class_prior import adjust_task
from fleetfit.options.fedavgm import fedavgm
from fleetfit.values import Device, Job, Level, Problem


@declare_unused("temperature", when=lambda values: values["beta"] == 0, reason="beta = 0 switches the distillation off")
def fleetfit(tau: float = 1.0, momentum: float = 0.5, beta: float = 0.5, temperature: float = 3.0) -> Method:
    """Make the method.

    Args:
        tau: Strength of the class prior, from 0 on; 0 switches it off. `plus.class_prior` takes its place.
        momentum: How much of its last movement the server keeps, in [0, 1); 0 switches it off. A server optimiser in
            `plus` takes its place.
        beta: Weight of the distillation from a client's deepest exit, at least 0; 0 switches it off.
        temperature: T, which softens the distributions that are compared.
    """
    check_range("momentum", momentum, 0, 1, closed=True)
    check_range("beta", beta, 0, closed=True)
    check_temperature(temperature)
    check_range("tau", tau, 0, closed=True)
    return Method(
        levels=partial(split_levels, default="auto"),
        task=partial(adjust_task, tau=tau) if tau else FEDAVG.task,
        needs_prior=tau > 0,
        loss=partial(equal_exits_loss, beta=beta, temperature=temperature),
        weight=weigh_equally,
        step=fedavgm(momentum).step if momentum else take_mean,
        gives_way={"step": "momentum", "task": "tau"},
        defaults={"local.schedule.kind": "cosine"},
        describe=partial(describe_single_exit, beta=beta),
    )


def equal_exits_loss(job: Job, device: Device, beta: float, temperature: float) -> Loss:
    """Return the mean loss of all exits of the sub-model, with distillation from its deepest."""
    task = device.problem.task

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        logits = outputs(module, x)
        return self_distillation(logits, y, task, beta, temperature, [1 / len(logits)] * len(logits))

    return loss


def describe_single_exit(problem: Problem, levels: Sequence[Level], beta: float) -> Iterator[str]:
    """Say what is left of the method where no level has a second exit."""
    if beta and all(len(level.submodel.exits) == 1 for level in levels):
        yield (
            "No level has an early exit, so that nothing is distilled (method.beta has no effect): what is left of "
            "fleetfit is the class prior, momentum on the server and the schedule of the learning rate."
        )
