"""An engine whose rounds of training give sums only: secure aggregation of simulated clients, over any engine.

Each simulated client is a `fleetfit.secure.SecureClient`: it trains where the engine below trains it, quantises how far
it has moved, and what leaves it are masked words. The server of the protocol is the one that a real fleet would have.
Bytes are those of its messages. What the engine reports as lost was lost before its upload; losses in the other phases
can be had with `away`.

A block's words are its elements, then for each tensor that has some in it a 1 where a gradient reached the tensor on
the client, then a 1 where something of the block had to be clipped. So the mean is that of those who trained, as
without masks, and of who has trained what the server learns numbers of clients.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.aggregate import SummedBlock
from fleetfit.errors import FleetFitError, RunError, one_line, what_raised
from fleetfit.layout import Layout, State
from fleetfit.messages import job_size
from fleetfit.secure import (
    BlockSum,
    Dealt,
    Identity,
    Journal,
    Quantiser,
    SecureClient,
    SecureRun,
    SecureServer,
    Sent,
    Signer,
    certified,
    digest,
    size,
)
from fleetfit.submodel import Cut, Submodel, cut, flat_of, plain, shapes_of, submodel_of, whole
from fleetfit.validation import paired
from fleetfit.values import Failure, Job, Summed, Update

Away = Callable[[str, int, int], bool]
"""Tells of (phase, round, client) whether it goes away before it sends its "shares", "upload", "sign" or "unmask"."""
_MOST_PIECES = 62  # bits of a block's number


def nobody(phase: str, round: int, client: int) -> bool:
    """Lose nobody but those that the engine loses."""
    return False


def worded(piece: Submodel) -> str:
    """Return a sub-model in the words that members and server compare."""
    return json.dumps(plain(piece), sort_keys=True)


@dataclass(frozen=True, eq=False)
class _Block:
    """Where a block lies.

    Attributes:
        places: Of its elements in the full model's flat buffer, ascending.
        tensors: Names of the tensors that have some of it.
        which: For each element the number of its tensor among these.
    """

    places: Tensor
    tensors: tuple[str, ...]
    which: Tensor

    @property
    def words(self) -> int:
        """Numbers that are sent of it."""
        return len(self.places) + len(self.tensors) + 1


class Segments:
    """The blocks of cohorts, by their members' sub-models; clients and server compute them alike."""

    def __init__(self, layout: Layout) -> None:
        """Take the model's layout."""
        self._layout = layout
        full = cut(layout, whole(layout))
        sizes = torch.tensor([int(np.prod(shape)) for shape in full.shapes.values()])
        self._names = full.names
        self._tensor = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        self._of = lru_cache(maxsize=4)(self._made)

    def of(self, pieces: Sequence[str]) -> tuple[Tensor, Mapping[int, _Block]]:
        """Return the number of each element's block, and the blocks."""
        return self._of(tuple(pieces))

    def _made(self, pieces: tuple[str, ...]) -> tuple[Tensor, Mapping[int, _Block]]:
        if len(pieces) > _MOST_PIECES:
            raise RunError(f"{len(pieces)} different sub-models in one cohort; at most {_MOST_PIECES} have blocks.")
        codes = torch.zeros(len(self._tensor), dtype=torch.int64)
        for number, piece in enumerate(pieces):
            self._cut_of(piece).scatter_scalar(codes, 1 << number)
        found = {}
        for code in torch.unique(codes).tolist():
            if code:
                places = (codes == code).nonzero().flatten()
                tensors, which = torch.unique(self._tensor[places], return_inverse=True)
                found[int(code)] = _Block(places, tuple(self._names[t] for t in tensors.tolist()), which)
        return codes, found

    def _cut_of(self, piece: str) -> Cut:
        try:
            return cut(self._layout, submodel_of(json.loads(piece)))
        except (FleetFitError, ValueError, RecursionError):
            raise RunError("a member says that it trains a sub-model which this model does not have.") from None

    def lengths(self, pieces: Sequence[str]) -> Mapping[int, int]:
        """Return the words of each block."""
        return {code: block.words for code, block in self.of(pieces)[1].items()}

    def words(
        self, pieces: Sequence[str], job: Job, update: Update, blocks: Sequence[int], grid: Quantiser
    ) -> tuple[dict[int, NDArray[np.uint32]], Sent]:
        """Return a client's words of blocks, and what it was sent.

        Raises:
            RunError: It trained something else than it was sent, or its movement is not finite.
        """
        compiled = cut(self._layout, job.submodel)
        if update.submodel != job.submodel or update.compressed or shapes_of(update.state) != compiled.shapes:
            raise RunError("it has another sub-model to send than it was sent, which has no place among the blocks.")
        codes, known = self.of(pieces)
        mine = compiled.gather(codes)
        sent = flat_of(job.state).cpu()
        moved = flat_of(update.state).cpu() - sent
        words = {}
        for code in blocks:
            inside = mine == code
            numbers, clipped = grid.quantised(moved[inside].numpy())
            trained = [int(name not in update.untrained) for name in known[code].tensors]
            numbers *= np.array(trained, dtype=np.int64)[known[code].which.numpy()]
            words[code] = np.concatenate([numbers, trained, [int(clipped)]]).astype(np.int32).view(np.uint32)
        states = {code: state_digest(code, sent[mine == code]) for code in torch.unique(mine).tolist()}
        return words, Sent(terms_of(job), states)

    def sent(self, pieces: Sequence[str], job: Job, state: State) -> Sent:
        """Return what all clients of a round were sent: how to train, and of each block the state."""
        full, blocks = flat_of(state).cpu(), self.of(pieces)[1]
        return Sent(terms_of(job), {code: state_digest(code, full[block.places]) for code, block in blocks.items()})


def state_digest(block: int, sent: Tensor) -> bytes:
    """Return what stands for the state of a block."""
    return digest("fleetfit secure state", block, sent.contiguous().numpy().tobytes())


def terms_of(job: Job) -> bytes:
    """Return what stands for how a job is to be done, as far as it is the same for all of a cohort."""
    terms = (job.kind, job.round, job.rounds, job.method, asdict(job.local))
    return digest("fleetfit secure terms", json.dumps(terms, sort_keys=True, default=repr))


class _Lost(Exception):
    """The round's sums cannot be had; the message says why."""


@dataclass(eq=False)
class _Member:
    job: Job
    client: SecureClient
    up: int = 0
    down: int = 0
    silent: bool = False  # after its update


class Secured:
    """An engine that gives the server sums of training jobs, and runs all others as they are."""

    def __init__(self, engine: Any, layout: Layout, secure: SecureRun, away: Away = nobody) -> None:
        """Take the engine that trains.

        Args:
            engine: Where jobs run.
            layout: Of the model.
            secure: What the run asks of a round.
            away: Who goes away between phases, beside those that the engine loses.
        """
        self.engine, self.layout, self.secure, self.away = engine, layout, secure, away
        self.segments = Segments(layout)
        self.authority = Signer.new()
        self._identities: dict[int, Identity] = {}
        self._journals: dict[int, Journal] = {}

    def member(self, job: Job) -> SecureClient:
        """Return the client of a job, as it begins a round."""
        assert job.client is not None
        number = job.client
        if number not in self._identities:
            self._identities[number], self._journals[number] = certified(self.authority, number), Journal()
        return SecureClient(number, self._identities[number], self.authority.public, self.secure.rules.minimum,
                      self.segments.lengths, self._journals[number])  # fmt: skip

    def sums(self, jobs: Iterator[Job], state: State) -> Summed:
        """Run a round's jobs of training.

        Args:
            jobs: Of one round.
            state: The server's, of which each job has a part.

        Returns:
            The sums, or why there are none.
        """
        return _SecureRound(self, list(jobs), state).done()

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run other jobs."""
        return iter(self.engine.run(jobs))

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


@dataclass(eq=False)
class _SecureRound:
    """One round of the protocol, all parties of it."""

    engine: Secured
    jobs: list[Job]
    state: State
    _reports: dict[int, Update | Failure] = field(default_factory=dict)
    _members: dict[int, _Member] = field(default_factory=dict)  # who is still there, by index of the job

    def done(self) -> Summed:
        """Go through the phases."""
        secure = self.engine.secure
        self._server = SecureServer(secure.run, self.jobs[0].round, secure.rules, self.engine.segments.lengths)
        self._everybody: dict[int, _Member] = {}
        try:
            dealt = self._shared()
            self._train(dealt)
            blocks = self._unmasked()
        except _Lost as lost:
            return self._summed([], str(lost))
        return self._summed(blocks, "")

    def _server_does(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except RunError as error:
            raise _Lost(str(error)) from None

    def _fail(self, member: _Member, why: str, **more: Any) -> None:
        index = member.job.index
        self._reports[index] = Failure.of(member.job, one_line(why, 500), **more)
        self._members.pop(index, None)

    def _goes(self, phase: str, member: _Member) -> bool:
        assert member.job.client is not None
        return self.engine.away(phase, member.job.round, member.job.client)

    # ---- the phases

    def _shared(self) -> dict[int, Dealt]:
        """Exchange keys and shares; return what each member was dealt."""
        for job in self.jobs:
            member = self._everybody[job.index] = _Member(job, self.engine.member(job))
            try:
                sent = member.client.begin(self.engine.secure.run, job.round, worded(job.submodel))
                self._server.enrol(sent)
            except RunError as error:
                self._fail(member, str(error))
                continue
            member.up += size(sent)
            self._members[job.index] = member
        self._roster = self._server_does(self._server.roster)
        heavy = size(self._roster)
        for member in list(self._members.values()):
            member.down += heavy
            if self._goes("shares", member):
                self._fail(member, "it went away before it sent its shares.")
                continue
            try:
                shares = member.client.shares(self._roster)
                self._server.deal(shares)
            except RunError as error:
                self._fail(member, str(error))
                continue
            member.up += size(shares)
        found: dict[int, Dealt] = self._server_does(self._server.dealt)
        return found

    def _train(self, dealt: Mapping[int, Dealt]) -> None:
        """Train, and add up what comes masked."""
        for job, reply in paired(self.engine.engine.run, [member.job for member in self._members.values()]):
            member = self._members[job.index]
            member.down += job_size(job, self.engine.layout) + size(dealt[member.client.number])
            if isinstance(reply, Failure):
                more = {"declined": reply.declined, "late": reply.late, "absent": reply.absent}
                spent = {"multiply_adds": reply.multiply_adds, "simulated_s": reply.simulated_s}
                self._fail(member, reply.reason, **more, **spent)
                continue
            try:
                grid = self.engine.secure.grid
                words, sent = self.engine.segments.words(self._roster.pieces, job, reply, member.client.blocks, grid)
                masked = member.client.masked(dealt[member.client.number], words, sent)
            except Exception as error:  # whatever a reply holds, it is its client's failure
                self._fail(member, what_raised(error), multiply_adds=reply.multiply_adds, simulated_s=reply.simulated_s)
                continue
            if self._goes("upload", member):
                self._fail(member, "it went away before it sent its update.")
                continue
            member.up += size(masked)
            self._server_does(partial(self._server.add, masked))
            self._reports[job.index] = replace(reply, state={}, scales={}, metrics={}, untrained=())

    def _unmasked(self) -> list[BlockSum]:
        """Open what has to be taken away, and return the sums."""
        survivors = self._server_does(self._server.survivors)
        self._ask_all("sign", survivors, SecureClient.sign, self._server.agree)
        self._ask_all("unmask", self._server_does(self._server.agreed), SecureClient.unmask, self._server.open)
        given = self.engine.segments.sent(self._roster.pieces, self.jobs[0], self.state)
        found: list[BlockSum] = self._server_does(lambda: self._server.sums(given))
        return found

    def _ask_all(
        self, phase: str, told: Any, answer: Callable[[SecureClient, Any], Any], taken: Callable[[Any], None]
    ) -> None:
        """Ask those whose update has come, and counts, whether they answer or not."""
        heavy = size(told)
        for member in self._members.values():
            member.down += heavy
            if member.silent or self._goes(phase, member):
                member.silent = True
                continue
            try:
                found = answer(member.client, told)
            except RunError:
                member.silent = True
                continue
            member.up += size(found)
            taken(found)

    # ---- what the server's core gets

    def _summed(self, sums: Sequence[BlockSum], lost: str) -> Summed:
        blocks, clipped, hidden = [], 0, 0
        if not lost:
            known = self.engine.segments.of(self._roster.pieces)[1]
            hidden = sum(len(block.places) for block in known.values())
            for found in sums:
                block, words = known[found.block], torch.from_numpy(found.words)
                here, there = len(block.places), len(block.places) + len(block.tensors)
                counts = words[here:there][block.which]
                blocks.append(SummedBlock(block.places, words[:here], counts, found.clients))
                clipped, hidden = max(clipped, int(words[there])), hidden - here
            self._unheard({found.block for found in sums})
        reports = []
        for job in self.jobs:
            member = self._everybody[job.index]
            report = self._reports.get(job.index) or Failure.of(job, one_line(lost, 500))
            reports.append(replace(report, bytes_down=member.down, bytes_up=member.up))
        return Summed(tuple(blocks), self.engine.secure.grid.step, tuple(reports), hidden, clipped, lost)

    def _unheard(self, opened: set[int]) -> None:
        """Say of whom no block was opened."""
        for member in list(self._members.values()):
            if not opened & set(member.client.blocks):
                self._fail(member, "too few others covered any part of what it trained, so no sum with it was seen.")
