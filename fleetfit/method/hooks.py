"""The hooks of a method: what each gets, gives back and may keep, and FedAvg's function beside it.

FedAvg (McMahan et al., AISTATS 2017). A hook is a plain function of the type that its Protocol documents. A round calls
them from top to bottom. Those of the server see the whole federation but no data, those of the device see one client's
data and budget; no hook sees both. A hook keeps nothing in variables of its own: what lasts until the next round stands
in the server's memory or the client's.

`docs/hooks.md` is made of the Protocols (`docs/generate.py`): of each docstring the paragraphs Where, Before, After and
Keeps, and the arguments and what is returned of `__call__`. Arguments are given by place, so their names are free.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from fleetfit import submodel
from fleetfit.aggregate import Aggregate, Mean, apply_mean
from fleetfit.layout import Architecture, Axis, State, outputs
from fleetfit.planner import Targets
from fleetfit.seeds import make_numpy_rng
from fleetfit.submodel import Channels, Submodel, extract
from fleetfit.values import Aggregator, Device, Failure, Federation, Job, Level, Problem, Server, Update

# ---- once, before the first round --------------------------------------------------------------------------------


class ModelHook(Protocol):
    """Make of the model family what the method trains.

    Where: everywhere, once: on the server, and wherever jobs run.
    Before: the model is built from `[model]`, with what `[peft]` puts in.
    After: all else sees the family that is returned: planner, layout, initial state, jobs, exported models.
    Keeps: nothing.
    """

    def __call__(self, architecture: Architecture, input_shape: tuple[int, ...], /) -> Architecture:
        """Return the family.

        Args:
            architecture: The family as the run file names it.
            input_shape: Shape of one sample, without the batch.

        Returns:
            A family; the same one where the model stays as it is.
        """
        ...


def as_it_is(architecture: Architecture, input_shape: tuple[int, ...]) -> Architecture:
    """Train the model as it is."""
    return architecture


class LevelsHook(Protocol):
    """Say which sub-models there are: width, depth and exits of each.

    Where: the server, once.
    Before: the fleet's groups have become targets; with `needs_budgets=False` the full model is the only one.
    After: each client gets the largest level that it affords; every level is evaluated, reported and exported.
    Keeps: nothing; the levels stand in `federation.levels`.
    """

    def __call__(self, problem: Problem, targets: Targets, /) -> list[Level]:
        """Return the levels.

        Args:
            problem: What is trained.
            targets: Cost, target ratio, tolerance and ceilings of each level.

        Returns:
            The levels, smallest first.
        """
        ...


def full_level(problem: Problem, targets: Targets) -> list[Level]:
    """Return the full model as the only level."""
    exits = (problem.architecture.blocks,)
    return [Level("1", problem.submodel(1.0, exits), 1.0, 1.0)]


# ---- the server, before the jobs ---------------------------------------------------------------------------------


class AssignHook(Protocol):
    """Say who trains what in this round.

    Where: the server, first in each round.
    Before: on a real fleet, the clients are those who are registered now.
    After: the slots are put in canonical order (predicted cost, largest first, then client), and each becomes a job.
        Without slots the round ends here and nothing moves.
    Keeps: nothing; it may read what `observe` kept in the server's memory.
    """

    def __call__(
        self, federation: Federation, server: Server, rng: np.random.Generator, /
    ) -> list[tuple[int, int, Submodel]]:
        """Return the slots of the round.

        Args:
            federation: All that the server knows; `federation.method.choose` and `.channels` are there to be asked.
            server: As the last round left it.
            rng: Seeded by run and round.

        Returns:
            Client, level (0-based) and sub-model of each slot. The hooks `choose` and `channels` have an effect only
            if this one asks them.
        """
        ...


class ChooseHook(Protocol):
    """Say which clients take part in the round.

    Where: the server, asked by `assign`.
    Before: `federation.reachable(server.round)` has those who afford some level, have data and are connected.
    After: each of them gets its level, unless `assign` is the method's own.
    Keeps: nothing; it may read what `observe` kept in the server's memory.
    """

    def __call__(self, federation: Federation, server: Server, rng: np.random.Generator, /) -> list[int]:
        """Return the clients.

        Args:
            federation: All that the server knows of its clients; `federation.cohort` says how many are wanted.
            server: As the last round left it.
            rng: The one that `assign` got.

        Returns:
            Ids of clients, none twice; fewer than the cohort, or none, where fewer are there.
        """
        ...


class ChannelsHook(Protocol):
    """Say which channels of an axis a client keeps.

    Where: the server, asked by `assign` for each scaled axis of each slot.
    Before: the level says how many channels are kept.
    After: the channels are part of the slot's sub-model. Levels are evaluated with those that `levels` gave them.
    Keeps: nothing.
    """

    def __call__(self, axis: Axis, n: int, round: int, client: int | None, rng: np.random.Generator, /) -> Channels:
        """Return the channels.

        Args:
            axis: Its size and granule.
            n: How many to keep.
            round: 0-based.
            client: Who trains them; None: nobody, the first n are what is evaluated.
            rng: Seeded by run, round, client and axis.

        Returns:
            Indices in rising order, in whole granules; a range where they are neighbours.
        """
        ...


def uniform(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    """Choose clients uniformly without replacement among those who afford some level and are connected."""
    here = federation.reachable(server.round)
    return [int(c) for c in here[rng.choice(len(here), min(federation.cohort, len(here)), replace=False)]]


def own_level(federation: Federation, server: Server, rng: np.random.Generator) -> list[tuple[int, int, Submodel]]:
    """Give each chosen client its level, with the channels of this round."""
    chosen = federation.method.choose(federation, server, rng)
    return [(c, int(federation.level_of[c]), round_submodel(federation, server.round, c)) for c in chosen]


def round_submodel(federation: Federation, round: int, client: int, level_index: int | None = None) -> Submodel:
    """Return the sub-model of a level, by default the client's, with the channels chosen for the client this round."""
    level = federation.levels[federation.level_of[client] if level_index is None else level_index]
    axes, choose = federation.problem.architecture.axes, federation.method.channels
    channels: dict[str, Channels] = {}
    for name, kept in level.submodel.channels.items():
        if axes[name].scaled and choose is not submodel.prefix:
            rng = make_numpy_rng(federation.seed, round, client, name)
            channels[name] = submodel.normalise_channels(name, choose(axes[name], len(kept), round, client, rng))
        else:
            channels[name] = kept
    return Submodel(channels, level.submodel.exits)


class DispatchHook(Protocol):
    """Say which tensors go out.

    Where: the server, for each slot, and for each level that is evaluated (client None).
    Before: the slots are in their order. FedAvg's is asked once for neighbours of one sub-model.
    After: the state travels in the job, and the device loads it strictly.
    Keeps: nothing.
    """

    def __call__(self, federation: Federation, server: Server, client: int | None, piece: Submodel, /) -> State:
        """Return the state.

        Args:
            federation: The server's view.
            server: Its state is the full model's.
            client: Who gets it; None for evaluation.
            piece: The slot's sub-model.

        Returns:
            Every tensor of the sub-model, by its name, in the layout's order.
        """
        ...


def cut_out(federation: Federation, server: Server, client: int | None, piece: Submodel) -> State:
    """Send the sub-model's own tensors."""
    return extract(federation.problem.layout, server.state, piece)


# ---- the device --------------------------------------------------------------------------------------------------


class AdaptHook(Protocol):
    """Let the device change the job that it got, or decline it.

    Where: the device, first for every job: training, evaluation and statistics.
    Before: the job is as the server sent it; the device knows what it affords now.
    After: the changed job is done. The update says both what was sent and what was trained.
    Keeps: nothing.
    """

    def __call__(self, job: Job, device: Device, /) -> Job | None:
        """Return the job to do.

        Args:
            job: As it was sent.
            device: Its budgets are those of this round.

        Returns:
            The job; with a sub-model that is part of what was sent, and its state, where the device shrinks it. None
            to decline.
        """
        ...


def as_sent(job: Job, device: Device) -> Job | None:
    """Do the job as it was sent."""
    return job


class Loss(Protocol):
    """What local training minimises, for one batch; it may have `metrics()`, which join the update's."""

    def __call__(self, module: nn.Module, x: Any, y: Tensor, /) -> Tensor:
        """Return the mean loss of the batch's samples, a scalar."""
        ...


class LossHook(Protocol):
    """Make the loss of local training.

    Where: the device, once for each training job.
    Before: the sub-model's module has the job's state. torch's global generator is seeded afterwards.
    After: the loss is called for each batch. At the end its `metrics()`, if it has them, join the update's: plain
        values, and the server does not know beforehand that they are there. The object itself goes to `remember`.
    Keeps: nothing here; what the loss gathers while it is called, `remember` may keep.
    """

    def __call__(self, job: Job, device: Device, /) -> Loss:
        """Return the loss.

        Args:
            job: As it was adapted: round, sub-model, settings.
            device: Its task, its data, and what it remembers.

        Returns:
            Module, inputs and targets -> a scalar. `fleetfit.outputs(module, x)` is one tensor per exit.
        """
        ...


def last_exit_loss(job: Job, device: Device) -> Loss:
    """Train the deepest exit with the task's loss."""
    task = device.problem.task

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        return task.loss(outputs(module, x)[-1], y)

    return loss


class Penalty(Protocol):
    """What is added to the loss of each batch."""

    def __call__(self, module: nn.Module, /) -> Tensor:
        """Return a scalar."""
        ...


class PenaltyHook(Protocol):
    """Make what is added to the loss.

    Where: the device, once for each training job.
    Before: as `loss`.
    After: it is added to each batch's loss before the gradient is taken; the reported loss is without it. Penalties of
        several parts add up.
    Keeps: nothing.
    """

    def __call__(self, job: Job, device: Device, /) -> Penalty | None:
        """Return the penalty.

        Args:
            job: Its `state` is what was received.
            device: Its memory is what the client kept.

        Returns:
            Module -> a scalar, or None for nothing.
        """
        ...


def no_penalty(job: Job, device: Device) -> Penalty | None:
    """Add nothing to the loss."""
    return None


class RememberHook(Protocol):
    """Say what the client keeps until its next job.

    Where: the device, after training, for an update that is finite.
    Before: the sub-model is trained; `device.memory` is what the client kept so far.
    After: the memory is the client's once the server has accepted the update; of a round that is rolled back, and of an
        update that `receive` leaves out, it is not. It never travels to the server of a real fleet. Of several parts
        the later one sees what the earlier one kept.
    Keeps: what it returns, at the client.
    """

    def __call__(self, job: Job, device: Device, state: State, loss: Loss, /) -> Any:
        """Return the client's memory.

        Args:
            job: As it was adapted.
            device: With the memory so far.
            state: What training left, all tensors of the sub-model.
            loss: The object that the hook `loss` made.

        Returns:
            Numbers, text, tensors, and nests of them; or None. What other parts have put there stays.
        """
        ...


def nothing_new(job: Job, device: Device, state: State, loss: Loss) -> Any:
    """Keep what the client remembered."""
    return device.memory


class ReplyHook(Protocol):
    """Say what goes back.

    Where: the device, after `remember`.
    Before: as `remember`.
    After: the update is compressed where `[local]` asks for it, and travels. The server refuses what is no part of what
        it sent.
    Keeps: nothing.
    """

    def __call__(self, job: Job, device: Device, state: State, /) -> tuple[Submodel, State]:
        """Return what is sent back.

        Args:
            job: As it was adapted.
            device: Its data say, for example, which classes it has.
            state: What training left.

        Returns:
            The sub-model that the update contains, and its tensors.
        """
        ...


def all_of_it(job: Job, device: Device, state: State) -> tuple[Submodel, State]:
    """Send back all that was trained."""
    return job.submodel, state


# ---- the server, with the replies --------------------------------------------------------------------------------


class ReceiveHook(Protocol):
    """Judge the round's updates together: leave some out, or change them.

    Where: the server, once in each round with slots.
    Before: all jobs have their outcome, and each update was validated: its sub-model, shapes, types and numbers are
        possible; compression is undone. Failures are not among them.
    After: an update that is not returned counts as a failure, "its update was left out by the method": it joins neither
        mean nor report, and its client does not remember it. The others are noted, weighed and aggregated as they are
        now, in the order in which they are returned.
    Keeps: nothing; what the server is to remember, `observe` reads from the reports.
    """

    def __call__(self, federation: Federation, server: Server, updates: Sequence[Update], /) -> Iterable[Update]:
        """Return the updates that count.

        Args:
            federation: The server's view.
            server: As the last round left it: what the clients were sent is cut out of its state.
            updates: All valid updates of the round, in job order. Without this hook updates are aggregated one by one
                as they come; with it the tensors of all of them are held.

        Returns:
            Some or all of them, each at most once; changed ones by `dataclasses.replace(update, state=...)`, with the
            round, index and client that they had.
        """
        ...


def receive_all(federation: Federation, server: Server, updates: Sequence[Update]) -> Iterable[Update]:
    """Take every update as it is."""
    return updates


class NoteHook(Protocol):
    """Say what of an update outlasts its tensors.

    Where: the server, for each update that `receive` returned.
    Before: the update's tensors are still there.
    After: it joins the update's `metrics`, which `step` and `observe` see. Tables of numbers are added up by level in
        the round's report, under `counts`. An error here is this update's failure.
    Keeps: nothing.
    """

    def __call__(self, federation: Federation, server: Server, update: Update, /) -> Mapping[str, Any]:
        """Return what is noted.

        Args:
            federation: The server's view.
            server: As the last round left it.
            update: With its state. What stands in its metrics is what a client sent, and may be missing.

        Returns:
            Plain values by name. Notes of several parts are joined.
        """
        ...


def nothing_noted(federation: Federation, server: Server, update: Update) -> Mapping[str, Any]:
    """Add nothing to the update's report."""
    return {}


class WeightHook(Protocol):
    """Give an update its aggregation weight, w_k.

    Where: the server, for each update that was noted.
    Before: `num_examples` was held against what the client has registered.
    After: the aggregator gets it with the update. An error, or a weight that is not finite or below 0, is this update's
        failure.
    Keeps: nothing.
    """

    def __call__(self, update: Update, /) -> float:
        """Return the weight.

        Args:
            update: What it says of itself; its state may be gone.

        Returns:
            A finite number, at least 0.
        """
        ...


def by_samples(update: Update) -> float:
    """Weigh by training samples."""
    return float(update.num_examples)


def by_count(update: Update) -> float:
    """Weigh every client alike (ScaleFL Eq. 2)."""
    return 1.0


class AggregateHook(Protocol):
    """Put the updates together.

    Where: the server, once in each round with slots.
    Before: nothing of the round has come in, unless `receive` is set.
    After: the aggregator gets each update by `add`, one by one, once it is validated, received, noted and weighed; then
        `result` is asked for, and `step` gets it. An aggregator that needs all updates of a round keeps them.
    Keeps: nothing; `Aggregate.extra` goes to this round's `step` and `observe`.

    Sums that hide single updates take the place of this hook: docs/adr/0012 says which hooks cannot be set then. The
    coverage mean needs sums of w_k x_kj and of w_k only; an aggregator that looks at single updates rules such sums
    out.
    """

    def __call__(self, federation: Federation, server: Server, /) -> Aggregator:
        """Return an aggregator for one round.

        Args:
            federation: The server's view.
            server: As the last round left it.

        Returns:
            An object with two methods. `add(update, weight)` takes an update, in job order unless `receive` changed
            it; names that `update.untrained` lists must not count.
            `result()` returns the mean and the coverage of every element (`aggregate.Mean` makes both), and what else
            `step` needs.
        """
        ...


class CoverageMean:
    """Average each element over those who trained it."""

    def __init__(self, federation: Federation, server: Server) -> None:
        device = next(iter(server.state.values())).device
        self._mean = Mean(federation.problem.layout, device)

    def add(self, update: Update, weight: float) -> None:
        """Add an update."""
        self._mean.add(update.submodel, update.state, weight, update.untrained)

    def result(self) -> Aggregate:
        """Return the average."""
        return self._mean.result()


class StepHook(Protocol):
    """Move the server: take the mean, or a server optimiser's step towards it.

    Where: the server, once in each round with slots, also where no update was left.
    Before: the round's updates are aggregated.
    After: the core counts the round, whatever `round` says. A round that would leave numbers that are not finite, or
        in which `aggregate`, `step` or `observe` raises, is rolled back as a whole: state, memory and the clients'
        memories are those from before.
    Keeps: what it puts into the server's `memory`, which the checkpoint has.
    """

    def __call__(
        self, federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure], /
    ) -> Server:
        """Return the server after the round.

        Args:
            federation: The server's view.
            server: As the last round left it.
            aggregate: Where its coverage is 0, nobody trained the element: it, and its moments, must stay as they are.
            reports: Updates without their tensors, and failures, in the jobs' order.

        Returns:
            The server with its new state and memory.
        """
        ...


def take_mean(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure]
) -> Server:
    """Replace what was trained by its mean."""
    if aggregate.before is None:
        return replace(server, state=apply_mean(server.state, aggregate))
    moved = apply_mean(aggregate.before, aggregate) if aggregate.before else {}
    return replace(server, state={**server.state, **moved})


class ObserveHook(Protocol):
    """Learn of the clients: what the next rounds' selections go by.

    Where: the server, after `step`.
    Before: the server has its new state.
    After: as `step`. Of several parts the later one sees what the earlier one kept.
    Keeps: what it puts into the server's `memory`, under a name of its own.
    """

    def __call__(
        self, federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure], /
    ) -> Server:
        """Return the same server with what is remembered of the round.

        Args:
            federation: The server's view.
            server: As `step` left it, with this round counted.
            aggregate: The result of the aggregator.
            reports: Updates without their tensors but with their notes, and failures, in the jobs' order.

        Returns:
            The server with its memory; state and round as they are.
        """
        ...


def nothing_observed(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure]
) -> Server:
    """Learn nothing of the clients."""
    return server
