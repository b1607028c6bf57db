"""FedAvg, hook by hook (`examples/fedavg_plain.py` is the same as one program); each docstring documents the hook.

McMahan et al., AISTATS 2017. A method replaces some of these functions. A round calls them from top to bottom. The
hooks of the server see the whole federation but no data; those of the device see one client's data and budget. A hook
stores nothing in variables of its own: what has to last until the next round is in the server's or the client's memory.

`docs/generate.py` makes `docs/hooks.md` from the docstrings: the paragraphs Where, Before, After, Keeps and FedAvg, the
arguments and the result. Arguments are given by place, so their names are free.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from fleetfit.aggregate import Aggregate, Mean, apply_mean
from fleetfit.anatomy import Architecture, Axis, State, outputs
from fleetfit.core import (
    Device,
    Failure,
    Federation,
    Job,
    Level,
    LocalResult,
    Problem,
    Server,
    Update,
)
from fleetfit.core.tasks import Task
from fleetfit.planner import Targets
from fleetfit.seeds import make_numpy_rng
from fleetfit.submodel import Channels, Submodel, extract, normalize_channels
from fleetfit.submodel.state import Shapes

Reports = Sequence[Update | Failure]
"""Updates without their tensors, and failures, in job order."""
Penalty = Callable[[nn.Module], Tensor]
"""From the module to a scalar, which is added to the loss of each batch."""


class Slot(NamedTuple):
    """A client, its level (0-based) and its sub-model in a round. A method may also return plain tuples."""

    client: int
    level: int
    submodel: Submodel


class Loss(Protocol):
    """What local training minimizes, for one batch.

    Its `extra_multiply_adds`, if it has them, are the multiply-adds per training sample, forward and backward, beyond
    those of the sub-model, and below 0 where it computes a part of it; they count in the update's, in simulated time
    and in deadlines.
    """

    def __call__(self, module: nn.Module, x: Any, y: Tensor, /) -> Tensor:
        """Return the mean loss of the batch's samples, a scalar."""
        ...


class ExtraShapes(NamedTuple):
    """The shapes of tensors beside the state, by name: those of a training job, and those of its update."""

    down: Shapes = MappingProxyType({})
    up: Shapes = MappingProxyType({})


# ---- once, before the first round --------------------------------------------------------------------------------


def keep_model(architecture: Architecture, input_shape: tuple[int, ...]) -> Architecture:
    """Change the model family that the method trains.

    Where: everywhere, once: on the server, and wherever jobs run.
    Before: the model is built from `[model]`, with the modules of `[peft]`.
    After: planner, layout, initial state, jobs and exported models use the family that is returned.
    FedAvg: keeps the model.

    Args:
        architecture: The family as the run file names it.
        input_shape: Shape of one sample, without the batch.

    Returns:
        A family, perhaps the same.
    """
    return architecture


def make_full_level(problem: Problem, targets: Targets) -> list[Level]:
    """Make the levels: width, depth and exits of each.

    Where: the server, once.
    Before: the fleet's groups have become targets; with `needs_budgets=False` the full model is the only one.
    After: each client gets the largest level that it affords; every level is evaluated, reported and exported.
    Keeps: nothing; the levels are in `federation.levels`.
    FedAvg: makes the full model the only level.

    Args:
        problem: Model, task and input shape.
        targets: Cost, target ratio, tolerance and ceilings of each level.

    Returns:
        The levels, smallest first.
    """
    return [Level("1", problem.submodel(1.0, (problem.architecture.blocks,)), width=1.0, needs=1.0)]


# ---- the server, before the jobs ---------------------------------------------------------------------------------


def assign_own_levels(federation: Federation, server: Server, rng: np.random.Generator) -> list[Slot]:
    """Select the clients of the round, and assign a level and a sub-model to each.

    Where: the server, first in each round.
    Before: on a real fleet, the clients are those that are registered now.
    After: the slots are sorted (predicted cost, largest first, then client), and each becomes a job. Without slots the
        round ends here and leaves the state as it was.
    Keeps: nothing; it may read what `update_server_memory` stored in the server's memory.
    FedAvg: gives each chosen client its level, with the channels of this round.

    Args:
        federation: All that the server knows. The hooks `choose_clients` and `choose_channels` have an effect only if
            this hook calls `federation.method.choose_clients` and `federation.method.choose_channels`.
        server: The server after the last round.
        rng: Seeded by run and round.

    Returns:
        Client, level (0-based) and sub-model of each slot.
    """
    chosen = federation.method.choose_clients(federation, server, rng)
    return [Slot(c, int(federation.level_of[c]), get_round_submodel(federation, server.round, c)) for c in chosen]


def choose_uniformly(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    """Select the clients of the round.

    Where: the server, called by `assign`.
    Before: `federation.reachable(server.round)` lists the clients that afford some level, have data and are connected.
    After: each client gets its level, unless the method has an `assign` of its own.
    Keeps: nothing; it may read what `update_server_memory` stored in the server's memory.
    FedAvg: draws uniformly without replacement.

    Args:
        federation: All that the server knows of its clients; `federation.cohort` is the number of clients to choose.
        server: The server after the last round.
        rng: The generator of `assign`.

    Returns:
        Ids of clients, each once; fewer than the cohort, or none, if fewer are connected.
    """
    reachable = federation.reachable(server.round)
    return [
        int(c) for c in reachable[rng.choice(len(reachable), min(federation.cohort, len(reachable)), replace=False)]
    ]


def keep_prefix(axis: Axis, n: int, round: int, client: int | None, rng: np.random.Generator) -> Channels:
    """Select the channels of an axis that a client keeps.

    Where: the server, called by `assign` for each scaled axis of each slot.
    Before: the level gives the number of channels.
    After: the channels are part of the slot's sub-model. Levels are evaluated with those that `make_levels` gave them.
    FedAvg: keeps the first n channels (upper left; ScaleFL's default).

    Args:
        axis: Its size and granule.
        n: Number of channels to keep.
        round: 0-based.
        client: The client that trains them; None for evaluation, which takes the first n.
        rng: Seeded by run, round, client and axis.

    Returns:
        Indices in rising order, in whole granules; a range if they are neighbors.
    """
    return range(n)


def get_round_submodel(federation: Federation, round: int, client: int, level_index: int | None = None) -> Submodel:
    """Return the sub-model of a level, by default the client's, with the channels chosen for the client this round."""
    level = federation.levels[federation.level_of[client] if level_index is None else level_index]
    axes, select = federation.problem.architecture.axes, federation.method.choose_channels
    channels: dict[str, Channels] = {}
    for name, kept in level.submodel.channels.items():
        if axes[name].scaled and "choose_channels" in federation.method.own_hooks:
            rng = make_numpy_rng(federation.seed, round, client, name)
            channels[name] = normalize_channels(name, select(axes[name], len(kept), round, client, rng))
        else:
            channels[name] = kept
    return Submodel(channels, level.submodel.exits)


def dispatch_submodel(federation: Federation, server: Server, client: int | None, submodel: Submodel) -> State:
    """Make the tensors that are sent to a client.

    Where: the server, for each slot, and for each level that is evaluated (client None).
    Before: the slots are in their order. FedAvg's is called once for neighbors of one sub-model.
    After: the state travels in the job, in the layout's order; other tensors than the sub-model's are an error.
    FedAvg: sends the sub-model's own tensors.

    Args:
        federation: The server's view.
        server: Its state is the full model's.
        client: The client that gets it; None for evaluation.
        submodel: The slot's sub-model.

    Returns:
        Every tensor of the sub-model, by its name, in the layout's order.
    """
    return extract(federation.problem.layout, server.state, submodel)


def attach_nothing(federation: Federation, server: Server, client: int | None, submodel: Submodel) -> State:
    """Attach tensors to a training job, beside the sub-model's.

    Where: the server, for each slot.
    Before: `dispatch` has made the sub-model's tensors.
    After: the tensors travel in the job, as `job.extra`, and count in its bytes. The method declares their names and
        shapes by `declare_extra`: others are refused. `[secure]` and `[privacy]` refuse the method.
    Keeps: nothing; it may read what `step` or `update_server_memory` stored in the server's memory.
    FedAvg: attaches nothing.

    Args:
        federation: The server's view.
        server: The server after the last round.
        client: The client that gets them.
        submodel: The slot's sub-model.

    Returns:
        Tensors by name, float32 and finite. Those of several parts are joined.
    """
    return {}


# ---- the device --------------------------------------------------------------------------------------------------


def keep_job(job: Job, device: Device) -> Job | None:
    """Let the device change its job, or decline it.

    Where: the device, first for every job: training, evaluation and statistics.
    Before: the job is as the server sent it, with `job.level` and the sub-models of all levels in `job.levels`; the
        device knows what it affords now. `job.evaluation.scope` is "local" where the client's own level is evaluated on
        its data, and "global" where the largest level is.
    After: the changed job is run. The update names the sub-model that was sent and the one that was trained.
    FedAvg: keeps the job.

    Args:
        job: As it was sent.
        device: Its budgets are those of this round.

    Returns:
        The job. If the device shrinks it, its sub-model is a part of the one sent, with that part's state. None to
        decline.
    """
    return job


def keep_task(job: Job, device: Device) -> Task:
    """Change the task that local training sees.

    Where: the device, once for each training job.
    Before: the sub-model's module has the job's state.
    After: the hook `make_loss` finds it in `device.problem.task`, and early stopping uses its loss. All else, such as
        evaluation, uses the task as it is.
    FedAvg: keeps the task.

    Args:
        job: As it was adapted; its `prior` has the fleet's class frequencies, if the method declares `needs_prior`.
        device: Its task, its data.

    Returns:
        A task, perhaps the same. Another loss or divergence by `dataclasses.replace(task, loss=...)`.
    """
    return device.problem.task


def last_exit_loss(job: Job, device: Device) -> Loss:
    """Make the loss of local training.

    Where: the device, once for each training job, and once for each smaller job that a device considers with
        `cohort.on_deadline = "shallower"`.
    Before: the hook `adapt_task` has chosen the task. The global generators of torch, NumPy and Python are seeded
        afterwards.
    After: the loss is called for each batch. The object itself goes to `update_client_memory`, `reply` and `report`, as
        `result.loss`. If it computes much beside the sub-model, it has an attribute `extra_multiply_adds`: how many
        for each training sample, forward and backward together. They join the update's multiply-adds, simulated time
        and deadlines.
    Keeps: nothing here; `update_client_memory` may store what the loss gathers, and `report` send it.
    FedAvg: trains the deepest exit with the task's loss.

    Args:
        job: As it was adapted: round, sub-model, settings, its level and the sub-models of all levels, `job.levels`.
        device: Its task, its data, and the client's memory.

    Returns:
        Module, inputs and targets -> a scalar. `fleetfit.method.outputs(module, x)` is one tensor per exit.
    """
    task = device.problem.task

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        return task.loss(outputs(module, x)[-1], y)

    return loss


def skip_penalty(job: Job, device: Device) -> Penalty | None:
    """Make the penalty that is added to the loss.

    Where: the device, once for each training job.
    Before: as `make_loss`.
    After: it is added to each batch's loss before the gradient is taken; the reported loss is without it. Penalties of
        several parts add up.
    FedAvg: adds nothing.

    Args:
        job: Its `state` is what the client received.
        device: With the client's memory.

    Returns:
        Module -> a scalar, or None.
    """
    return None


def keep_client_memory(job: Job, device: Device, result: LocalResult) -> Any:
    """Make the client's memory, which lasts until its next job.

    Where: the device, after training, for an update that is finite.
    Before: the sub-model is trained; `device.memory` is the client's memory so far.
    After: the memory is stored once the server has accepted the update; not if the round is rolled back, or if
        `filter_updates` leaves the update out. It never travels to the server of a real fleet. Of several parts the
        later one sees the memory of the earlier one.
    Keeps: what it returns, at the client.
    FedAvg: keeps the memory as it is.

    Args:
        job: As it was adapted.
        device: With the memory so far.
        result: The state after training, and the loss.

    Returns:
        Numbers, text, tensors, and tables of them; or None. What other parts have stored stays.
    """
    return device.memory


def send_all(job: Job, device: Device, result: LocalResult) -> tuple[Submodel, State]:
    """Select the part of the trained sub-model that is sent back.

    Where: the device, after `update_client_memory`.
    Before: as `update_client_memory`.
    After: the update is compressed if `[local]` asks for it, and travels. The server rejects an update that is not a
        part of the sub-model that it sent.
    FedAvg: sends everything that was trained.

    Args:
        job: As it was adapted.
        device: Its data give, for example, the classes that it has.
        result: The state after training, and the loss.

    Returns:
        The sub-model that the update contains, and its tensors.
    """
    return job.submodel, result.state


def report_nothing(job: Job, device: Device, result: LocalResult) -> Mapping[str, Any]:
    """Report values and tensors to the server, beside the trained state.

    Where: the device, after `reply`.
    Before: as `update_client_memory`; `device.memory` is still the memory from before this job.
    After: plain values join the update's `metrics`; the server does not expect them. Tensors become its `extra`, are
        not compressed, and count in its bytes. The method declares their names and shapes by `declare_extra`, for the
        sub-model that was sent, `job.dispatched`: an update without them, or with others, is refused.
    FedAvg: reports nothing.

    Args:
        job: As it was adapted, with what `attach` gave it.
        device: With the memory so far.
        result: The state after training, and the loss.

    Returns:
        By name, numbers, texts, lists and tables of them; and tensors, float32 and finite. Those of several parts are
        joined.
    """
    return {}


# ---- the server, with the replies --------------------------------------------------------------------------------


def keep_updates(federation: Federation, server: Server, updates: Sequence[Update]) -> Iterable[Update]:
    """Judge the round's updates together: leave some out, or change them.

    Where: the server, once in each round with slots.
    Before: all jobs have their outcome, and each update was validated: its sub-model, shapes, types and numbers are
        possible; compression is undone. Failures are not among them.
    After: an update that is not returned counts as a failure, "its update was left out by the method": it joins neither
        mean nor report, and its client does not remember it. The others are noted, weighed and aggregated in the order
        in which they are returned.
    Keeps: nothing; `update_server_memory` stores what the server has to remember, from the reports.
    FedAvg: takes every update, and each as soon as it is validated.

    Args:
        federation: The server's view.
        server: The server after the last round: the clients were sent parts of its state.
        updates: All valid updates of the round, in job order. Without this hook updates are aggregated one by one as
            they come; with it the tensors of all of them are held.

    Returns:
        Some or all of them, each at most once; changed ones by `dataclasses.replace(update, state=...)`, with the
        round, index and client that they had.
    """
    return updates


def annotate_nothing(federation: Federation, server: Server, update: Update) -> Mapping[str, Any]:
    """Add values to the metrics of an update that outlast its tensors.

    Where: the server, for each update that `filter_updates` returned.
    Before: the update's tensors are still in memory.
    After: the notes join the update's `metrics`, which `step` and `update_server_memory` see. Tables of numbers are
        added up by level in the round's report, under `counts`. An error here is this update's failure.
    FedAvg: adds nothing.

    Args:
        federation: The server's view.
        server: The server after the last round.
        update: With its state and its extra tensors. Its metrics are those that the client sent, and may be missing.

    Returns:
        Plain values by name. Notes of several parts are joined.
    """
    return {}


def weigh_by_samples(update: Update) -> float:
    """Compute the aggregation weight of an update, w_k.

    Where: the server, for each update that was noted.
    Before: `num_examples` was compared with the number that the client has registered.
    After: the aggregator gets it with the update. An error, or a weight that is not finite or below 0, is this update's
        failure.
    FedAvg: weighs by training samples.

    Args:
        update: Its state may be gone.

    Returns:
        A finite number, at least 0.
    """
    return float(update.num_examples)


def weigh_equally(update: Update) -> float:
    """Weigh every client alike (ScaleFL Eq. 2)."""
    return 1.0


class CoverageMean:
    """Make the aggregator of a round.

    Where: the server, once in each round with slots.
    Before: no update of the round has come in, unless `filter_updates` is set.
    After: the aggregator gets each update by `add`, one by one, once it is validated, received, noted and weighed; then
        `step` gets its `result`. An aggregator that needs all updates of a round keeps them.
    Keeps: nothing; `Aggregate.extra` goes to this round's `step` and `update_server_memory`.
    FedAvg: averages each element over the clients that trained it.

    Secure aggregation replaces this hook: docs/adr/0012 lists the hooks that cannot be set then. The coverage mean
    needs sums of w_k x_kj and of w_k only; an aggregator that looks at single updates excludes such sums.

    Args:
        federation: The server's view.
        server: The server after the last round.

    Returns:
        An object with two methods. `add(update, weight)` takes an update, in job order unless `filter_updates` changed
        it; names that `update.untrained` lists must not count. An error in it is this update's failure, so it reads
        what a client sent before it changes anything. `result()` returns the mean and the coverage of every element
        (`aggregate.Mean` makes both), and what else `step` needs.
    """

    def __init__(self, federation: Federation, server: Server) -> None:
        device = next(iter(server.state.values())).device
        self._mean = Mean(federation.problem.layout, device)

    def add(self, update: Update, weight: float) -> None:
        """Add an update."""
        self._mean.add(update.submodel, update.state, weight, update.untrained)

    def result(self) -> Aggregate:
        """Return the average."""
        return self._mean.result()


def take_mean(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    """Move the server: take the mean, or a server optimizer's step towards it.

    Where: the server, once in each round with slots, also without a usable update.
    Before: the round's updates are aggregated.
    After: `run_round` counts the round, whatever `round` is. A round that would leave numbers that are not finite, or
        in which `make_aggregator`, `step` or `update_server_memory` raises, is rolled back as a whole: state, memory
        and the clients' memories are those from before.
    Keeps: what it puts into the server's `memory`, which is part of the checkpoint.
    FedAvg: replaces each trained element by its mean.

    Args:
        federation: The server's view.
        server: The server after the last round.
        aggregate: An element with coverage 0 was not trained: it, and its moments, must stay as they are.
        reports: Updates without their tensors, and failures, in job order.

    Returns:
        The server with its new state and memory.
    """
    if aggregate.base_state is None:
        return replace(server, state=apply_mean(server.state, aggregate))
    return replace(server, state={**server.state, **apply_mean(aggregate.base_state, aggregate)})


def keep_server_memory(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    """Make the server's memory of its clients, for the selection of later rounds.

    Where: the server, after `step`.
    Before: the server has its new state.
    After: as `step`. Of several parts the later one sees the memory of the earlier one.
    Keeps: what it puts into the server's `memory`, under a name of its own.
    FedAvg: keeps the memory as it is.

    Args:
        federation: The server's view.
        server: The server after `step`, with this round counted.
        aggregate: The result of the aggregator.
        reports: Updates without their tensors but with their notes, and failures, in job order.

    Returns:
        The server with its new memory; state and round as they are.
    """
    return server
