"""A method outside the package: ScaleFL with momentum on the server (FedAvgM, Hsu et al., 2019).

    fleetfit run examples/own_method.toml

A method is its difference from FedAvg, or from another method. Its parameters are the keys under [method].
"""

from dataclasses import replace
from functools import partial

import torch

from fleetfit.method import Method, take_mean
from fleetfit.methods.scalefl import scalefl


def scalefl_with_momentum(beta: float = 0.1, momentum: float = 0.5) -> Method:
    """Make the method.

    Args:
        beta: Share of ScaleFL's self-distillation.
        momentum: How much of the last round's movement is repeated; 0 is ScaleFL bit for bit.
    """
    return replace(scalefl(beta=beta), step=partial(rolled_on, momentum=momentum))


def rolled_on(federation, server, aggregate, reports, momentum):
    """Move as the mean says and by `momentum` times the last movement, but only what somebody trained in this round."""
    after = take_mean(federation, server, aggregate, reports)
    last = server.memory or {name: torch.zeros_like(tensor) for name, tensor in server.state.items()}
    state, velocity = {}, {}
    for name, tensor in after.state.items():
        covered = aggregate.coverage[name] > 0
        state[name] = torch.where(covered, tensor + momentum * last[name], tensor)
        velocity[name] = torch.where(covered, state[name] - server.state[name], last[name])
    return replace(after, state=state, memory=velocity)
