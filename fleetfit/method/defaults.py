"""The default of every hook of a method: FedAvg (McMahan et al., AISTATS 2017)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from fleetfit import submodel
from fleetfit.aggregate import Aggregate, Mean, applied
from fleetfit.layout import Architecture, State, outputs
from fleetfit.planner import Targets
from fleetfit.seeds import numpy_rng
from fleetfit.submodel import Channels, Submodel, extract
from fleetfit.values import Device, Failure, Federation, Job, Level, Problem, Server, Update


def as_it_is(architecture: Architecture, input_shape: tuple[int, ...]) -> Architecture:
    """Train the model as it is."""
    return architecture


def full_level(problem: Problem, targets: Targets) -> list[Level]:
    """Return the full model as the only level."""
    exits = (problem.architecture.blocks,)
    return [Level("1", problem.submodel(1.0, exits), 1.0, 1.0)]


def uniform(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    """Choose clients uniformly without replacement among those who afford some level and are connected."""
    here = federation.reachable(server.round)
    return [int(c) for c in here[rng.choice(len(here), min(federation.cohort, len(here)), replace=False)]]


def own_level(federation: Federation, server: Server, rng: np.random.Generator) -> list[tuple[int, int, Submodel]]:
    """Give each chosen client its level, with the channels of this round."""
    chosen = federation.method.choose(federation, server, rng)
    return [(c, int(federation.level_of[c]), round_submodel(federation, server.round, c)) for c in chosen]


def round_submodel(federation: Federation, round: int, client: int) -> Submodel:
    """Return the sub-model of a client's level with the channels that the method chooses in this round."""
    level = federation.levels[federation.level_of[client]]
    axes, choose = federation.problem.architecture.axes, federation.method.channels
    channels: dict[str, Channels] = {}
    for name, kept in level.submodel.channels.items():
        if axes[name].scaled and choose is not submodel.prefix:
            rng = numpy_rng(federation.seed, round, client, name)
            channels[name] = choose(axes[name], len(kept), round, client, rng)
        else:
            channels[name] = kept
    return Submodel(channels, level.submodel.exits)


def cut_out(federation: Federation, server: Server, client: int | None, piece: Submodel) -> State:
    """Send the sub-model's own tensors."""
    return extract(federation.problem.layout, server.state, piece)


def as_sent(job: Job, device: Device) -> Job | None:
    """Do the job as it was sent."""
    return job


Loss = Callable[[nn.Module, Any, Tensor], Tensor]


def last_exit_loss(job: Job, device: Device) -> Loss:
    """Train the deepest exit with the task's loss."""
    task = device.problem.task

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        return task.loss(outputs(module, x)[-1], y)

    return loss


def no_penalty(job: Job, device: Device) -> Callable[[nn.Module], Tensor] | None:
    """Add nothing to the loss."""
    return None


def nothing_new(job: Job, device: Device, state: State, loss: Any) -> Any:
    """Keep what the client remembered."""
    return device.memory


def all_of_it(job: Job, device: Device, state: State) -> tuple[Submodel, State]:
    """Send back all that was trained."""
    return job.submodel, state


def by_samples(update: Update) -> float:
    """Weigh by training samples."""
    return float(update.num_examples)


def by_count(update: Update) -> float:
    """Weigh every client alike (ScaleFL Eq. 2)."""
    return 1.0


def nothing_noted(federation: Federation, server: Server, update: Update) -> Mapping[str, Any]:
    """Add nothing to the update's report."""
    return {}


def nothing_observed(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure]
) -> Server:
    """Learn nothing of the clients."""
    return server


Weight = Callable[[Update], float]


def coverage_mean(federation: Federation, server: Server, updates: Iterator[Update], weight: Weight) -> Aggregate:
    """Average each element over those who trained it."""
    first = next(iter(server.state.values()))
    mean = Mean(federation.problem.layout, first.device)
    for update in updates:
        mean.add(update.submodel, update.state, weight(update), update.untrained)
    return mean.result()


def take_mean(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure]
) -> Server:
    """Replace what was trained by its mean."""
    if aggregate.before is None:
        return replace(server, state=applied(server.state, aggregate))
    moved = applied(aggregate.before, aggregate) if aggregate.before else {}
    return replace(server, state={**server.state, **moved})
