"""FedDyn: clients correct their drift, the server corrects the mean (Acar et al., ICLR 2021, Algorithm 1).

Client k adds -<g_k, w> + alpha/2 ||w - w_received||^2 to its loss and remembers g_k <- g_k - alpha (w_k - w_received).
The server keeps h <- h - (alpha / K) sum_k (w_k - x) over the round's clients, K being all clients, and x <- mean -
h / alpha, with the mean over the round's clients.

With unequal sub-models each element sums over the clients that trained it; without any it keeps its value and its h. A
client's g_k belongs to the sub-model it trained; if the next one keeps other channels, g_k of the common elements stays
and the rest begins at zero. Every client counts alike, so the option sets the weight by count. With other weights
(`hooks.weigh`), the sum over clients is of v_k (w_k - x), v_k being the weights divided by their mean over the round's
clients, so that h stays as large as with equal ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from fleetfit.aggregate import Aggregate
from fleetfit.core import Device, Federation, Job, LocalResult, Server, Update
from fleetfit.errors import check_range
from fleetfit.hooks import Method, Reports, weigh_equally
from fleetfit.hooks.movements import ServerStep, load_client_state
from fleetfit.options.fedprox import sum_squares
from fleetfit.submodel import FlatState, concat_state, get_shapes, pack_state


def feddyn(alpha: float = 0.1) -> Method:
    """Make the option.

    Args:
        alpha: Strength, above 0.
    """
    check_range("alpha", alpha, 0)
    return Method(
        make_penalty=partial(make_penalty, alpha=alpha),
        update_client_memory=partial(remember, alpha=alpha),
        step=partial(step, alpha=alpha),
        weigh=weigh_equally,
    )


def make_penalty(job: Job, device: Device, alpha: float) -> Callable[[nn.Module], Tensor]:
    """Return the linear and the quadratic term of this job as one square, alpha/2 ||w - (w_received + g_k / alpha)||^2.

    It has their gradient, in a third of the time.
    """
    gradient = load_client_state(job, device, "gradient")
    center = FlatState((concat_state(job.state) + gradient / alpha).to(device.accelerator), get_shapes(job.state))

    def penalty(module: nn.Module) -> Tensor:
        return alpha / 2 * sum_squares(module, center)

    return penalty


def remember(job: Job, device: Device, result: LocalResult, alpha: float) -> Any:
    """Keep g_k - alpha (w_k - w_received), with its sub-model."""
    movement = concat_state(result.state) - concat_state(job.state)
    gradient = load_client_state(job, device, "gradient") - alpha * movement
    stored = pack_state(job.submodel, FlatState(gradient, get_shapes(job.state)))
    return {**(device.memory or {}), "gradient": stored}


def step(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports, alpha: float) -> Server:
    """Move h by the round's movement, and the state to the mean less h / alpha."""
    move = ServerStep(server, aggregate)
    before = move.load_memory("h")
    weights = [federation.method.weigh(report) for report in reports if isinstance(report, Update)]
    mean_weight = sum(weights) / len(weights) if sum(weights) > 0 else 1.0  # of weights by count: exactly 1
    count = move.weight / mean_weight
    h = before - alpha / len(federation.clients) * count * (move.mean - move.old)
    return move.make_server(move.mean - h / alpha, h=(h, before))
