"""Attacks of hostile clients, in a simulation: the record of an attack's functions, and the attackers.

The server and its defenses see the updates only. An attack changes three things: the samples that a hostile client
trains on, the values that it reports when it registers, and its update. The first two are changed before the first
round; updates are replaced in the server's process, as they come in and before they are validated, so that a run has
the same bits on every engine.

Clients that collude see all updates of the round before they make theirs: the worst case. A round of such an attack
holds all of its updates in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit.core import Clients, Device, Failure, Job, Update
from fleetfit.data import Data
from fleetfit.data.image_reader import EncodedImages
from fleetfit.engines.base import Engine, WrappedEngine
from fleetfit.errors import ConfigError
from fleetfit.layout import Layout
from fleetfit.seeds import make_numpy_rng, make_torch_rng
from fleetfit.submodel import Submodel, concat_state, full_submodel, get_slice_plan, move_flat

Parts = Sequence[Mapping[str, Tensor]]

# ---- an attack -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """An attack: the functions of hostile clients; None for honest behavior.

    Attributes:
        poison: Replaces the samples that a client trains on: from the data set, the client's training samples (indices,
            int64 [n]) and a generator, seeded by run and client, to n samples and labels, as `Data.x` and `Data.y` hold
            them.
        probe: Makes the samples on which success is measured: from the data set and the test samples (indices) to
            samples with a trigger and the labels that the attack wants; of all test samples or fewer.
        misreport: Changes the values that clients report: from the true values of all clients and the ids of hostile
            ones to the clients as the server sees them.
        forge: Makes the update that is sent: from the result of honest training on the client's samples, whose tensors
            must not be written to, the client's `Scene`, and a generator, seeded by run, round and client.
        colludes: Whether they see all updates of the round before they send theirs.
    """

    poison: Callable[[Data, Tensor, torch.Generator], tuple[Tensor, Tensor]] | None = None
    probe: Callable[[Data, Tensor], tuple[Tensor, Tensor]] | None = None
    misreport: Callable[[Clients, np.ndarray], Clients] | None = None
    forge: Callable[[Update, "Scene", torch.Generator], Update] | None = None
    colludes: bool = False


# ---- the knowledge of a hostile client -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scene:
    """The job of a hostile client, and its knowledge.

    Attributes:
        layout: The model's layout.
        job: The client's job.
        core: The smallest level's sub-model in this round, which all clients train.
        own: The sub-model that the client really affords.
        round: The honest updates of all clients of the round; empty unless the attack `colludes`.
    """

    layout: Layout
    job: Job
    core: Submodel
    own: Submodel
    round: "Knowledge"

    def movement(self, update: Update) -> Tensor:
        """Return an update less the state that was sent, flat."""
        return concat_state(update.state) - get_sent_state(self.layout, self.job, update)

    def move(self, update: Update, movement: Tensor) -> Update:
        """Return the update with another movement, flat."""
        compiled = get_slice_plan(self.layout, update.submodel)
        return replace(update, state=compiled.views(get_sent_state(self.layout, self.job, update) + movement))

    def mask(self, update: Update, submodel: Submodel) -> Tensor:
        """Return the elements of an update that belong to another sub-model, bool, flat."""
        ones = torch.ones(get_slice_plan(self.layout, submodel).size)
        return move_flat(self.layout, ones, submodel, update.submodel) > 0


def get_sent_state(layout: Layout, job: Job, update: Update) -> Tensor:
    """Return the state that was sent, of an update's sub-model, flat."""
    return move_flat(layout, concat_state(job.state), job.submodel, update.submodel)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The honest updates of a round, also those of the hostile clients.

    Attributes:
        layout: The model's layout.
        moves: Each update with its movement: the update less the state that was sent, flat.
        cache: Results that an attack shares among the hostile clients of the round.
    """

    layout: Layout
    moves: Sequence[tuple[Update, Tensor]] = ()
    cache: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each element over the clients that trained it, of the full model, flat.

        The deviation divides by the number less one; it is 0 for an element that one client trained.
        """
        size = get_slice_plan(self.layout, full_submodel(self.layout)).size
        total, count, squares = torch.zeros(size), torch.zeros(size), torch.zeros(size)
        for update, movement in self.moves:
            compiled = get_slice_plan(self.layout, update.submodel)
            compiled.scatter(total, compiled.zero(movement.clone(), update.untrained), add=True)
            compiled.scatter(count, compiled.zero(torch.ones(compiled.size), update.untrained), add=True)
        mean = total / count.clamp_min(1)
        for update, movement in self.moves:
            compiled = get_slice_plan(self.layout, update.submodel)
            deviations = (movement - compiled.gather(mean)).square_()
            compiled.scatter(squares, compiled.zero(deviations, update.untrained), add=True)
        return mean, (squares / (count - 1).clamp_min(1)).sqrt_()

    def get_moments(self, submodel: Submodel) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of a sub-model's elements, flat."""
        compiled, (mean, deviation) = get_slice_plan(self.layout, submodel), self.moments
        return compiled.gather(mean), compiled.gather(deviation)


# ---- the attackers ---------------------------------------------------------------------------------------------------


def draw_hostile_clients(levels: np.ndarray, share: float, among: str | Sequence[int], seed: int) -> tuple[int, ...]:
    """Draw the hostile clients.

    Args:
        levels: The level that each client really affords, 0-based, int [K]; -1: it takes no part.
        share: Of the clients.
        among: "all" of them; "each": the same fraction of each level; or the levels (from 1) to draw from.
        seed: The run's.

    Returns:
        Ids, ascending.

    Raises:
        ConfigError: The share is less than one client, or a level has no client.
    """
    present = sorted({int(level) + 1 for level in levels if level >= 0})
    if among == "all":
        groups = [list(present)]
    else:
        groups = [[level] for level in present] if among == "each" else [list(map(int, among))]
    missing = [level for group in groups for level in group if level not in present]
    if missing:
        raise ConfigError(
            f"[attack] among: no client is of level {missing[0]}; the levels are {', '.join(map(str, present))}.",
            key="attack.among",
        )
    attackers: list[int] = []
    for group in groups:
        ids = np.flatnonzero(np.isin(levels + 1, group))
        count = int(share * len(ids) + 0.5)
        attackers += make_numpy_rng(seed, "attack", *group).choice(ids, count, replace=False).tolist()
    if not attackers:
        raise ConfigError(
            f"[attack] fraction: {share:g} of {int((levels >= 0).sum())} clients is less than one client. Set a larger "
            "fraction, or leave [attack] out.",
            key="attack.fraction",
        )
    return tuple(sorted(attackers))


@dataclass(frozen=True, eq=False)
class Attackers:
    """The hostile clients of a run, and their attack.

    Attributes:
        attack: The attack.
        clients: Their ids, ascending.
        own: The level, 0-based, that each of them really affords.
        get_submodel: From round, client and level to the level's sub-model with the client's channels in this round.
        seed: The run's.
    """

    attack: Attack
    clients: tuple[int, ...]
    own: Mapping[int, int]
    get_submodel: Callable[[int, int, int], Submodel]
    seed: int

    def poison(self, data: Data, parts: Parts) -> tuple[Data, Parts]:
        """Return the data set with the hostile clients' samples added at its end, and the samples of each client.

        The samples have numbers of their own, so that cached features of the original ones are not taken for theirs.

        Raises:
            ConfigError: The images stay encoded on disk.
        """
        if self.attack.poison is None:
            return data, parts
        if isinstance(data.x, EncodedImages):
            raise ConfigError(
                f"[attack] kind: this attack changes samples, and {data.name} leaves its images encoded on disk; use a "
                "data set that fits into memory, or an attack on updates.",
                key="attack.kind",
            )
        xs, ys, parts, size = [data.x], [data.y], list(parts), len(data.x)
        for client in self.clients:
            x, y = self.attack.poison(data, parts[client]["train"], make_torch_rng(self.seed, "poison", client))
            parts[client] = {**parts[client], "train": torch.arange(size, size + len(x))}
            xs, ys, size = [*xs, x.to(data.x.dtype)], [*ys, y.to(data.y.dtype)], size + len(x)
        groups = data.groups
        if groups is not None:
            groups = torch.cat([groups, groups.new_zeros(size - len(data.x))])
        return replace(data, x=torch.cat(xs), y=torch.cat(ys), groups=groups), parts

    def make_probe_device(self, server: Device) -> Device | None:
        """Return a device with the test set on which success is measured; None if the attack has none."""
        data = server.data
        if self.attack.probe is None:
            return None
        x, y = self.attack.probe(data, data.split("test"))
        return replace(server, data=replace(data, x=x, y=y, groups=None, splits={"test": torch.arange(len(x))}))

    def misreport(self, clients: Clients) -> Clients:
        """Return the clients as the server sees them."""
        return clients if self.attack.misreport is None else self.attack.misreport(clients, np.array(self.clients))

    def wrap_engine(self, engine: Engine, layout: Layout) -> Engine:
        """Return an engine that replaces these clients' updates."""
        return engine if self.attack.forge is None else _ForgingEngine(engine, self, layout)

    def forge(self, update: Update, job: Job, layout: Layout, knowledge: Knowledge) -> Update:
        """Return the update that a hostile client sends."""
        assert self.attack.forge is not None and job.client is not None
        core, own = (self.get_submodel(job.round, job.client, level) for level in (0, self.own[job.client]))
        scene = Scene(layout, job, core, own, knowledge)
        return self.attack.forge(update, scene, make_torch_rng(self.seed, "forge", job.round, job.client))


class _ForgingEngine(WrappedEngine):
    """An engine that replaces the updates of hostile clients as they come in."""

    def __init__(self, engine: Engine, attackers: Attackers, layout: Layout) -> None:
        super().__init__(engine)
        self.attackers, self.layout = attackers, layout
        self._jobs: dict[int, Job] = {}

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run jobs; replies of clients that collude are yielded after the last one of the round."""
        self._jobs.clear()
        held: list[Update | Failure] = []
        for reply in self.engine.run(self._record_jobs(jobs)):
            if reply.index not in self._jobs:
                yield reply
            elif self.attackers.attack.colludes:
                held.append(reply)
            else:
                yield self._forge(reply, Knowledge(self.layout))
        moves = [
            (reply, concat_state(reply.state) - get_sent_state(self.layout, self._jobs[reply.index], reply))
            for reply in held
            if isinstance(reply, Update)
        ]
        knowledge = Knowledge(self.layout, moves)
        yield from (self._forge(reply, knowledge) for reply in held)

    def _record_jobs(self, jobs: Iterator[Job]) -> Iterator[Job]:
        for job in jobs:
            if job.kind == "train" and (self.attackers.attack.colludes or job.client in self.attackers.own):
                self._jobs[job.index] = job
            yield job

    def _forge(self, reply: Update | Failure, knowledge: Knowledge) -> Update | Failure:
        job = self._jobs.pop(reply.index)
        if isinstance(reply, Failure) or job.client not in self.attackers.own:
            return reply
        return self.attackers.forge(reply, job, self.layout, knowledge)
