"""The method: a record of functions, one per hook."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from fleetfit import submodel
from fleetfit.aggregate import Aggregate
from fleetfit.layout import Architecture, State
from fleetfit.method import defaults
from fleetfit.method.defaults import Loss, Weight
from fleetfit.planner import Targets
from fleetfit.submodel import Channels, Submodel
from fleetfit.values import Device, Failure, Federation, Job, Level, Problem, Server, Update


@dataclass(frozen=True)
class Method:
    """A method: one function per hook, with FedAvg's as defaults; docs/add-a-method.md says what each is for.

    The core advances the round: `step` and `observe` return the server's new state and memory, and whatever `round`
    they leave in it, the server after round r has r + 1. It also looks at what they return: a round after which the
    state or the memory would have numbers that are not finite is undone as a whole, and so is one in which `merge`,
    `step` or `observe` raises. What `weight` and `note` raise is the failure of that one update.

    `told` says whether its levels need the budgets that clients tell; without, the server never gets them. `own_data`
    says whether the server trains, and so needs data of its own, `[data] server`. `settles` names the keys of `[local]`
    that its `adapt` sets whatever the run file says.
    """

    model: Callable[[Architecture, tuple[int, ...]], Architecture] = defaults.as_it_is
    levels: Callable[[Problem, Targets], list[Level]] = defaults.full_level
    channels: Callable[..., Channels] = submodel.prefix
    choose: Callable[[Federation, Server, np.random.Generator], list[int]] = defaults.uniform
    assign: Callable[[Federation, Server, np.random.Generator], list[tuple[int, int, Submodel]]] = defaults.own_level
    dispatch: Callable[[Federation, Server, int | None, Submodel], State] = defaults.cut_out
    adapt: Callable[[Job, Device], Job | None] = defaults.as_sent
    loss: Callable[[Job, Device], Loss] = defaults.last_exit_loss
    penalty: Callable[[Job, Device], Callable[[nn.Module], Tensor] | None] = defaults.no_penalty
    remember: Callable[[Job, Device, State, Any], Any] = defaults.nothing_new
    reply: Callable[[Job, Device, State], tuple[Submodel, State]] = defaults.all_of_it
    weight: Weight = defaults.by_samples
    merge: Callable[[Federation, Server, Iterator[Update], Weight], Aggregate] = defaults.coverage_mean
    note: Callable[[Federation, Server, Update], Mapping[str, Any]] = defaults.nothing_noted
    step: Callable[[Federation, Server, Aggregate, Sequence[Update | Failure]], Server] = defaults.take_mean
    observe: Callable[[Federation, Server, Aggregate, Sequence[Update | Failure]], Server] = defaults.nothing_observed
    told: bool = True
    own_data: bool = False
    settles: tuple[str, ...] = ()


HOOKS = tuple(f.name for f in dataclasses.fields(Method) if f.name not in ("told", "own_data", "settles"))
FEDAVG = Method()
