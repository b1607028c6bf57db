"""An attack as a record of functions, and who attacks: hostile clients of a simulation.

The server and its defences see nothing of it but what comes in. Three places are enough for all of `fleetfit.attacks`:
the samples that a hostile client trains on, what it tells when it registers, and what it makes of its own update. The
first two are settled before the first round; updates are made in the process of the server, where they come in and
before they are looked at, so that a run has the same bits on every engine.

Clients that collude see all updates of the round before they make theirs: the worst case. A round of such an attack
holds all of its updates in memory.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fleetfit.data import Data
from fleetfit.data.image_reader import EncodedImages
from fleetfit.errors import ConfigError
from fleetfit.layout import Layout
from fleetfit.seeds import make_numpy_rng, make_torch_rng
from fleetfit.submodel import SlicePlan, Submodel, concat_state, full_submodel, get_slice_plan, move_state
from fleetfit.values import Clients, Device, Failure, Job, Update

Parts = Sequence[Mapping[str, Tensor]]

# ---- what an attack is -----------------------------------------------------------------------------------------------


class PoisonHook(Protocol):
    """Say what a hostile client trains on instead of its samples."""

    def __call__(self, data: Data, indices: Tensor, rng: torch.Generator, /) -> tuple[Tensor, Tensor]:
        """Return samples and labels, as many as there are indices, as `Data.x` and `Data.y` hold them.

        Args:
            data: The whole data set.
            indices: The client's training samples, int64 [n].
            rng: Seeded by run and client.
        """
        ...


class ProbeHook(Protocol):
    """Make samples on which a hit is the attack's success: those of the test set with a trigger."""

    def __call__(self, data: Data, indices: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return samples and the labels that the attack wants, of as many of these samples as it is worth asking.

        Args:
            data: The whole data set.
            indices: Of the test set, int64 [n].
        """
        ...


class TellHook(Protocol):
    """Say what hostile clients tell of themselves when they register."""

    def __call__(self, clients: Clients, hostile: np.ndarray, /) -> Clients:
        """Return what the server is told.

        Args:
            clients: All that clients could tell, if they told the truth.
            hostile: Ids of those who lie.
        """
        ...


class ForgeHook(Protocol):
    """Make a hostile client's update of the honest one that it has trained."""

    def __call__(self, update: Update, scene: "Scene", rng: torch.Generator, /) -> Update:
        """Return what is sent instead.

        Args:
            update: What honest training on the client's samples gave; its tensors must not be written to.
            scene: What the client was sent, and what it knows.
            rng: Seeded by run, round and client.
        """
        ...


@dataclass(frozen=True)
class Attack:
    """An attack: what hostile clients do otherwise; None where they are as honest as the others.

    Attributes:
        poison: What they train on.
        probe: On which samples success is measured.
        tell: What they tell of themselves.
        forge: What they send.
        together: Whether they see all updates of the round before they send theirs.
    """

    poison: PoisonHook | None = None
    probe: ProbeHook | None = None
    tell: TellHook | None = None
    forge: ForgeHook | None = None
    together: bool = False


# ---- what a hostile client knows when it makes its update ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scene:
    """What a hostile client was sent, and what it knows.

    Attributes:
        layout: Of the model.
        job: What it was sent.
        core: The smallest level's sub-model in this round, which everybody trains.
        own: The sub-model that the client affords in truth.
        round: What all clients of the round would have sent; empty unless the attack is one `together`.
    """

    layout: Layout
    job: Job
    core: Submodel
    own: Submodel
    round: "Knowledge"

    def movement(self, update: Update) -> Tensor:
        """Return an update less what was sent, flat."""
        return concat_state(update.state) - sent(self.layout, self.job, update)

    def moved(self, update: Update, movement: Tensor) -> Update:
        """Return the update that moves what was sent by so much."""
        compiled = get_slice_plan(self.layout, update.submodel)
        return replace(update, state=compiled.views(sent(self.layout, self.job, update) + movement))

    def inside(self, update: Update, piece: Submodel) -> Tensor:
        """Tell which elements of an update belong to another sub-model, bool, flat."""
        full = torch.zeros(get_slice_plan(self.layout, full_submodel(self.layout)).size)
        get_slice_plan(self.layout, piece).scatter_scalar(full, 1.0)
        return get_slice_plan(self.layout, update.submodel).gather(full) > 0


def sent(layout: Layout, job: Job, update: Update) -> Tensor:
    """Return what was sent of an update's sub-model, flat."""
    if update.submodel == job.submodel:
        return concat_state(job.state)
    return concat_state(move_state(layout, job.state, job.submodel, update.submodel))


@dataclass(frozen=True, eq=False)
class Move:
    """An update less what was sent.

    Attributes:
        piece: The sub-model.
        flat: Its elements.
        untrained: Names of the tensors that no gradient reached.
    """

    piece: Submodel
    flat: Tensor
    untrained: tuple[str, ...] = ()

    def counted(self, compiled: SlicePlan, values: Tensor) -> Tensor:
        """Return values of the sub-model's elements with 0 where no gradient came, in place unless they are `flat`."""
        if self.untrained:
            values = values.clone() if values is self.flat else values
            for name in self.untrained:
                compiled.views(values)[name].zero_()
        return values


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The honest updates of a round, those included that hostile clients would have sent.

    Attributes:
        layout: Of the model.
        moves: How each moves.
        kept: What an attack keeps for the other hostile clients of the round, under keys of its own.
    """

    layout: Layout
    moves: Sequence[Move] = ()
    kept: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each element over those who trained it, of the full model, flat.

        The deviation divides by the number less one; of an element that one client trained it is 0.
        """
        size = get_slice_plan(self.layout, full_submodel(self.layout)).size
        total, count, squares = torch.zeros(size), torch.zeros(size), torch.zeros(size)
        for move in self.moves:
            compiled = get_slice_plan(self.layout, move.piece)
            compiled.scatter(total, move.counted(compiled, move.flat), add=True)
            compiled.scatter(count, move.counted(compiled, torch.ones(compiled.size)), add=True)
        mean = total / count.clamp_min(1)
        for move in self.moves:
            compiled = get_slice_plan(self.layout, move.piece)
            away = (move.flat - compiled.gather(mean)).square_()
            compiled.scatter(squares, move.counted(compiled, away), add=True)
        return mean, (squares / (count - 1).clamp_min(1)).sqrt_()

    def moments_of(self, piece: Submodel) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of a sub-model's elements, flat."""
        compiled, (mean, deviation) = get_slice_plan(self.layout, piece), self.moments
        return compiled.gather(mean), compiled.gather(deviation)

    def alike(self, piece: Submodel) -> list[Tensor]:
        """Return the movements of exactly this sub-model."""
        return [move.flat for move in self.moves if move.piece == piece]


# ---- who attacks -----------------------------------------------------------------------------------------------------


def drawn(levels: np.ndarray, share: float, among: str | Sequence[int], seed: int) -> tuple[int, ...]:
    """Draw who is hostile.

    Args:
        levels: Level of each client by what it affords in truth, 0-based, int [K]; -1: it takes no part.
        share: Of the clients.
        among: "all" of them; "each": the same share of each level; or the levels (from 1) among which they are.
        seed: The run's.

    Returns:
        Ids, ascending.

    Raises:
        ConfigError: That is nobody, or a level is not there.
    """
    there = sorted({int(level) + 1 for level in levels if level >= 0})
    if among == "all":
        groups = [list(there)]
    else:
        groups = [[level] for level in there] if among == "each" else [list(map(int, among))]
    missing = [level for group in groups for level in group if level not in there]
    if missing:
        raise ConfigError(
            f"[attack] among: no client is of level {missing[0]}; there are {', '.join(map(str, there))}.",
            key="attack.among",
        )
    found: list[int] = []
    for group in groups:
        ids = np.flatnonzero(np.isin(levels + 1, group))
        count = int(share * len(ids) + 0.5)
        found += make_numpy_rng(seed, "attack", *group).choice(ids, count, replace=False).tolist()
    if not found:
        raise ConfigError(
            f"[attack] share: {share:g} of {int((levels >= 0).sum())} clients is less than one client. Set a larger "
            "share, or leave [attack] out.",
            key="attack.share",
        )
    return tuple(sorted(found))


@dataclass(frozen=True, eq=False)
class Attackers:
    """Who attacks, and how.

    Attributes:
        attack: What they do.
        clients: Their ids, ascending.
        own: The level, 0-based, that each of them affords in truth.
        piece: Returns the sub-model of a level with the channels that a client gets in a round (round, client, level).
        seed: The run's.
    """

    attack: Attack
    clients: tuple[int, ...]
    own: Mapping[int, int]
    piece: Callable[[int, int, int], Submodel]
    seed: int

    def poisoned(self, data: Data, parts: Parts) -> tuple[Data, Parts]:
        """Return the data set with the samples that hostile clients train on at its end, and who has which.

        Whoever keeps something by the number of a sample, such as features, so never mistakes one for the other.

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
        xs, ys, dealt, at = [data.x], [data.y], list(parts), len(data.x)
        for client in self.clients:
            x, y = self.attack.poison(data, parts[client]["train"], make_torch_rng(self.seed, "poison", client))
            dealt[client] = {**parts[client], "train": torch.arange(at, at + len(x))}
            xs, ys, at = [*xs, x.to(data.x.dtype)], [*ys, y.to(data.y.dtype)], at + len(x)
        groups = data.groups
        if groups is not None:
            groups = torch.cat([groups, groups.new_zeros(at - len(data.x))])
        return dataclasses.replace(data, x=torch.cat(xs), y=torch.cat(ys), groups=groups), dealt

    def probed(self, server: Device) -> Device | None:
        """Return a device whose test set is what success is measured on; None where the attack has none."""
        data = server.data
        if self.attack.probe is None:
            return None
        x, y = self.attack.probe(data, data.split("test"))
        found = dataclasses.replace(data, x=x, y=y, groups=None, splits={"test": torch.arange(len(x))})
        return replace(server, data=found)

    def told(self, clients: Clients) -> Clients:
        """Return what the server is told."""
        tell = self.attack.tell
        return clients if tell is None else tell(clients, np.array(self.clients))

    def on(self, engine: Any, layout: Layout) -> Any:
        """Return an engine on which these clients send what they like."""
        return engine if self.attack.forge is None else _Forging(engine, self, layout)

    def forged(self, update: Update, job: Job, layout: Layout, known: Knowledge) -> Update:
        """Return what a hostile client sends."""
        assert self.attack.forge is not None and job.client is not None
        core, own = (self.piece(job.round, job.client, level) for level in (0, self.own[job.client]))
        scene = Scene(layout, job, core, own, known)
        return self.attack.forge(update, scene, make_torch_rng(self.seed, "forge", job.round, job.client))


@dataclass(eq=False)
class _Forging:
    """An engine whose hostile clients' updates are replaced as they come in, before anybody has looked at them."""

    engine: Any
    attackers: Attackers
    layout: Layout
    _sent: dict[int, Job] = field(default_factory=dict)

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run jobs; those of attackers who collude wait for the last of the round."""
        self._sent.clear()
        replies, together = self.engine.run(self._noted(jobs)), self.attackers.attack.together
        held: list[Update | Failure] = []
        for reply in replies:
            if reply.index not in self._sent:
                yield reply
            elif together:
                held.append(reply)
            else:
                yield self._made(reply, self._sent.pop(reply.index), Knowledge(self.layout))
        if held:
            known = self._known(held)
            yield from (self._made(reply, self._sent[reply.index], known) for reply in held)

    def _noted(self, jobs: Iterator[Job]) -> Iterator[Job]:
        for job in jobs:
            if job.kind == "train" and (self.attackers.attack.together or job.client in self.attackers.own):
                self._sent[job.index] = job
            yield job

    def _known(self, held: Sequence[Update | Failure]) -> Knowledge:
        moves = []
        for reply in held:
            if isinstance(reply, Update):
                flat = concat_state(reply.state) - sent(self.layout, self._sent[reply.index], reply)
                moves.append(Move(reply.submodel, flat, reply.untrained))
        return Knowledge(self.layout, moves)

    def _made(self, reply: Update | Failure, job: Job, known: Knowledge) -> Update | Failure:
        if isinstance(reply, Failure) or job.client not in self.attackers.own:
            return reply
        return self.attackers.forged(reply, job, self.layout, known)

    def accept(self, update: Update) -> None:
        """Have the client remember."""
        self.engine.accept(update)

    def save(self) -> dict[str, Any]:
        """Return the clients' memories."""
        found: dict[str, Any] = self.engine.save()
        return found

    def load(self, memories: Mapping[str, Any]) -> None:
        """Take back what `save` returned."""
        self.engine.load(memories)

    def close(self) -> None:
        """End what the engine started."""
        self.engine.close()


Factory = Callable[..., Attack]
"""Makes an attack of its keys in `[attack]`."""
