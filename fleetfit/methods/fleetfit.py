"""FleetFit's own method: class prior, equal exits that learn from the deepest, momentum on the server, a cosine.

Client k has the exits 1..l of its level, with outputs z_1..z_l, and minimizes

    L = 1/l sum_i [CE(z_i + tau (log p_k - log p), y) + [i < l] beta T^2 KL(softmax(sg z_l / T) || softmax(z_i / T))].

- Class prior: p_k are the client's class frequencies, p the fleet's, so that a client does not learn which classes are
  frequent on its own device alone (after Menon et al., ICLR 2021, and FedLC, Zhang et al., ICML 2022; see
  `fleetfit.options.class_prior`). Tasks without classes have none. Where classes are tokens, frequencies are a
  histogram of a client's words: there tau is 0 unless it is set.
- Exits: ScaleFL's Eq. 5 (Ilhan et al., CVPR 2023) with equal weights, since each exit is the last one of some level; sg
  stops the gradient. Other tasks have their own loss and divergence (`fleetfit.core.tasks`). In a regression a deepest
  exit has no more to teach than the target: there beta is 0 unless it is set.
- Server: every client counts alike, as in ScaleFL's Eq. 2. Each element j that a client of the round trained moves
  towards the clients' mean m_j: v_j <- momentum v_j + (m_j - x_j), x_j <- x_j + v_j. The others keep x_j and v_j
  (FedAvgM: Hsu, Qi and Brown, 2019; per covered element, `fleetfit.options.fedavgm`).
- Schedule: the learning rate falls from lr to lr / 100 along half a cosine over the rounds (Loshchilov and Hutter, ICLR
  2017), unless `local.schedule` is set. At 0 the clients of the last round would train for nothing.
- Levels: as `fleet.scaling` says, by default "auto" (`fleetfit.planner.split`).

Each part has its switch: `tau = 0`, `beta = 0`, `momentum = 0`, `local.schedule = { kind = "constant" }` and
`fleet.scaling = "both"`. What is left is ScaleFL without distillation and with equal exits. Where the model has one
exit, that is FedAvg with `method.hooks.weigh = "by_count"`: FedAvg alone weighs clients by samples.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from fleetfit.anatomy import outputs
from fleetfit.core import Device, Job, Level, Local, Problem
from fleetfit.errors import check_range
from fleetfit.factories import declare_unused
from fleetfit.hooks import Loss, Method, keep_task, take_mean, weigh_equally
from fleetfit.hooks.levels import split_levels
from fleetfit.hooks.losses import declare_temperature, self_distillation
from fleetfit.options.class_prior import class_prior
from fleetfit.options.fedavgm import fedavgm


@declare_temperature
@declare_unused("temperature", when=lambda values: values["beta"] == 0, reason="beta = 0 switches the distillation off")
def fleetfit(tau: float = 1.0, beta: float = 0.5, temperature: float = 3.0, momentum: float = 0.5) -> Method:
    """Make the method.

    Args:
        tau: Strength of the class prior, at least 0; 0 switches it off, and is the default where classes are tokens.
            `options.class_prior` takes its place.
        beta: Weight of the distillation from a client's deepest exit, at least 0; 0 switches it off, and is the default
            in regressions.
        temperature: T, which softens the distributions that are compared.
        momentum: How much of its last movement the server keeps, in [0, 1); 0 switches it off. A server optimizer in
            `options` takes its place.
    """
    check_range("momentum", momentum, 0, 1, closed=True)
    check_range("beta", beta, 0, closed=True)
    check_range("temperature", temperature, 0)
    prior = class_prior(tau)
    return Method(
        make_levels=partial(split_levels, default="auto"),
        adapt_task=prior.adapt_task if tau else keep_task,
        needs_prior=prior.needs_prior,
        make_loss=partial(equal_exits_loss, beta=beta, temperature=temperature),
        weigh=weigh_equally,
        step=fedavgm(momentum).step if momentum else take_mean,
        task_defaults={"tokens": {"tau": 0.0}, "regression": {"beta": 0.0}},
        overridable_hooks={"step": "momentum", "adapt_task": "tau"},
        defaults={"local.schedule.kind": "cosine", "local.schedule.minimum": 0.01},
        describe=partial(describe_single_exit, beta=beta, tau=tau, momentum=momentum),
    )


def equal_exits_loss(job: Job, device: Device, beta: float, temperature: float) -> Loss:
    """Return the mean loss of all exits of the sub-model, with distillation from its deepest."""
    task = device.problem.task

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        logits = outputs(module, x)
        return self_distillation(logits, y, task, beta, temperature, [1 / len(logits)] * len(logits))

    return loss


def describe_single_exit(
    problem: Problem, levels: Sequence[Level], local: Local, beta: float, tau: float, momentum: float
) -> Iterator[str]:
    """Say what is left of the method where no level has a second exit."""
    if beta and all(len(level.submodel.exits) == 1 for level in levels):
        parts = [
            *["the class prior"] * bool(tau and problem.task.has_classes),
            *["momentum on the server"] * bool(momentum),
            "the schedule of the learning rate",
            "clients that count alike",
        ]
        yield (
            "No level has an early exit, so that nothing is distilled (method.beta has no effect): what is left of "
            f"fleetfit is {', '.join(parts[:-1])} and {parts[-1]}."
        )
