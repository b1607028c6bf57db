"""FedNova: movements are divided by the steps that made them (Wang et al., NeurIPS 2020, with local momentum).

Client i weighs its gradients in the final movement by a vector a_i: of tau steps of SGD with momentum rho

    |a_i| = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho),

and with rates that change from step to step it is the sum of rates over the first rate. The client sends |a_i|. With
p_i its share of the samples, the server takes

    d = (sum_i p_i |a_i|) sum_i p_i (y_i - x) / |a_i|,   v <- momentum v + d,   x <- x + v.

With unequal sub-models p_i is the share among the round's clients that trained the element, and so is the first sum.
Nesterov's momentum, changing rates with momentum, and other optimizers than SGD are refused.
"""

from collections.abc import Sequence
from functools import partial

import torch

from fleetfit.aggregate import Aggregate, Mean
from fleetfit.core import Federation, Level, Local, Problem, Server, Update
from fleetfit.errors import ConfigError, check_range
from fleetfit.hooks import Method, Reports, movements
from fleetfit.submodel import concat_state, get_slice_plan


def fednova(momentum: float = 0.0) -> Method:
    """Make the option.

    Args:
        momentum: The server's momentum, in [0, 1).
    """
    check_range("momentum", momentum, 0, 1, closed=True)
    return Method(
        report=lambda job, device, result: {"a": compute_length(job.local, result.steps, result.rate_sum)},
        make_aggregator=NormalizedMean, step=partial(step, momentum=momentum), describe=check_rates,
    )  # fmt: skip


def check_rates(problem: Problem, levels: Sequence[Level], local: Local) -> Sequence[str]:
    """Refuse optimizers whose steps have no weights a_i."""
    if local.optimizer == "sgd" and not (local.nesterov or (local.momentum and local.schedule_in_round != "constant")):
        return ()
    raise ConfigError("fednova needs SGD without nesterov, and with momentum a constant rate.", key="local.optimizer")


def compute_length(local: Local, steps: int, rate_sum: float) -> float:
    """Return |a_i|, the sum of the weights of all gradients; at a rate of 0, where nothing moves, the steps."""
    if not local.momentum:
        return rate_sum / local.lr if local.lr else steps
    rho = local.momentum
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)


class NormalizedMean:
    """The mean of x + (y_i - x) a / |a_i|, and of |a_i| / a for each element, with a the first |a_i|.

    The step does not depend on a. Without it, steps by the thousand would divide y_i - x below the precision of x.
    """

    def __init__(self, federation: Federation, server: Server) -> None:
        self._federation, self._server, self._layout = federation, server, federation.problem.layout
        self._mean, self._lengths, self._unit = Mean(self._layout), Mean(self._layout), 0.0

    def add(self, update: Update, weight: float) -> None:
        """Add an update."""
        length, movement = float(update.metrics["a"]), movements.get_movement(self._federation, self._server, update)
        if not 0 <= length < float("inf"):
            raise ValueError(f"its a is {length}, expected a number from 0 on")
        self._unit = self._unit or length
        share = length / self._unit if length else 0.0  # 0: no step was kept, and nothing moved
        sent, plan = concat_state(update.state) - movement, get_slice_plan(self._layout, update.submodel)
        for mean, flat in (
            (self._mean, sent + movement / (share or 1.0)),
            (self._lengths, torch.full_like(sent, share)),
        ):
            mean.add(update.submodel, plan.views(flat), weight, update.untrained)

    def result(self) -> Aggregate:
        """Return the mean of normalized movements, and the mean lengths as `extra`."""
        return self._mean.result(extra=self._lengths.result().mean)


def step(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports, momentum: float) -> Server:
    """Move by the mean normalized movement times the mean length."""
    move = movements.ServerStep(server, aggregate)
    before = move.load_memory("velocity")
    velocity = momentum * before + concat_state(aggregate.extra) * (move.mean - move.old)
    return move.make_server(move.old + velocity, velocity=(velocity, before))
