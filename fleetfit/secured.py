"""An engine whose rounds of training give sums only: secure aggregation, over any engine.

The server's side asks clients phase by phase (`Parties`). Each simulated client is a `fleetfit.secure.SecureClient`: it
trains where the engine below trains it, quantises how far it has moved, and what leaves it are masked words. On a real
fleet the same clients are nodes. Bytes are those of the messages. What the engine reports as lost was lost before its
upload; losses in the other phases can be had with `away`.

A block's words are its elements, then for each tensor that has some in it a 1 where a gradient reached the tensor on
the client, then a 1 where something of the block had to be clipped. So the mean is that of those who trained, as
without masks, and of who has trained what the server learns numbers of clients.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.aggregate import SummedBlock
from fleetfit.errors import FleetFitError, RunError, format_exception, one_line
from fleetfit.layout import Layout, State
from fleetfit.messages import job_size
from fleetfit.secure import (
    BlockSum,
    Dealt,
    Identity,
    Journal,
    Keys,
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
from fleetfit.submodel import (
    SlicePlan,
    Submodel,
    concat_state,
    dump_submodel,
    full_submodel,
    get_shapes,
    get_slice_plan,
    parse_submodel,
)
from fleetfit.validation import pair_jobs_with_replies
from fleetfit.values import Failure, Job, RoundSums, Update

Away = Callable[[str, int, int], bool]
"""Tells of (phase, round, client) whether it goes away before its "keys", "shares", "update", "sign" or "unmask"."""
_MOST_PIECES = 62  # bits of a block's number


def nobody(phase: str, round: int, client: int) -> bool:
    """Lose nobody but those that the engine loses."""
    return False


def worded(piece: Submodel) -> str:
    """Return a sub-model in the words that members and server compare."""
    return json.dumps(dump_submodel(piece), sort_keys=True)


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

    def __init__(self, layout: Layout, setting: str = "") -> None:
        """Take the model's layout, and what else all members have to have in common."""
        self._layout, self._setting = layout, setting
        full = get_slice_plan(layout, full_submodel(layout))
        sizes = torch.tensor([int(np.prod(shape)) for shape in full.shapes.values()])
        self._names = full.names
        self._tensor = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        self._of = lru_cache(maxsize=4)(self._made)

    def of(self, pieces: Sequence[str]) -> tuple[Tensor, Mapping[int, _Block]]:
        """Return the number of each element's block, and the blocks."""
        return self._of(tuple(pieces))

    def _made(self, pieces: tuple[str, ...]) -> tuple[Tensor, Mapping[int, _Block]]:
        if len(pieces) > _MOST_PIECES:
            raise RunError(
                f"{len(pieces)} different sub-models in one cohort; at most {_MOST_PIECES} have blocks.", key="cohort"
            )
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

    def _cut_of(self, piece: str) -> SlicePlan:
        try:
            return get_slice_plan(self._layout, parse_submodel(json.loads(piece)))
        except (FleetFitError, ValueError, RecursionError):
            raise RunError("a member trains a sub-model that this model does not have.", key="roster") from None

    def lengths(self, pieces: Sequence[str]) -> Mapping[int, int]:
        """Return the words of each block."""
        return {code: block.words for code, block in self.of(pieces)[1].items()}

    def words(
        self, pieces: Sequence[str], job: Job, update: Update | None, blocks: Sequence[int], grid: Quantiser
    ) -> tuple[dict[int, NDArray[np.uint32]], Sent]:
        """Return a client's words of blocks, and what it was sent.

        A client that clips its movement says nothing further: that it has trained each tensor, and clipped nothing.

        Args:
            pieces: The cohort's sub-models.
            job: What the client was asked for.
            update: What it has trained; None: nothing, of a client that clips.
            blocks: Which.
            grid: In which numbers.

        Raises:
            RunError: It trained something else than it was sent, or its movement is not finite.
        """
        compiled = get_slice_plan(self._layout, job.submodel)
        codes, known = self.of(pieces)
        mine = compiled.gather(codes)
        sent = concat_state(job.state).cpu()
        moved = torch.zeros_like(sent) if update is None else _fitting(update, job, compiled) - sent
        short = None if grid.clip is None else torch.from_numpy(grid.shortened(moved.numpy()))
        words = {}
        for code in blocks:
            inside, tensors = mine == code, known[code].tensors
            if short is not None:
                numbers, trained, clipped = short[inside].numpy(), [1] * len(tensors), False
            else:
                assert update is not None
                numbers, clipped = grid.quantised(moved[inside].numpy())
                trained = [int(name not in update.untrained) for name in tensors]
                numbers *= np.array(trained, dtype=np.int64)[known[code].which.numpy()]
            words[code] = np.concatenate([numbers, trained, [int(clipped)]]).astype(np.int32).view(np.uint32)
        states = {code: state_digest(code, sent[mine == code]) for code in torch.unique(mine).tolist()}
        return words, Sent(terms_of(job, grid, self._setting), states)

    def sent(self, pieces: Sequence[str], job: Job, state: State, grid: Quantiser) -> Sent:
        """Return what all clients of a round were sent: how to train, and of each block the state."""
        full, blocks = concat_state(state).cpu(), self.of(pieces)[1]
        terms = terms_of(job, grid, self._setting)
        return Sent(terms, {code: state_digest(code, full[block.places]) for code, block in blocks.items()})


def _fitting(update: Update, job: Job, compiled: SlicePlan) -> Tensor:
    """Return an update's tensors, flat.

    Raises:
        RunError: It is of another sub-model.
    """
    if update.submodel != job.submodel or update.compressed or get_shapes(update.state) != compiled.shapes:
        raise RunError("it has another sub-model to send than it was sent, which has no place among the blocks.")
    return concat_state(update.state).cpu()


def state_digest(block: int, sent: Tensor) -> bytes:
    """Return what stands for the state of a block."""
    return digest("fleetfit secure state", block, sent.contiguous().numpy().tobytes())


def terms_of(job: Job, grid: Quantiser, setting: str) -> bytes:
    """Return what stands for how a job is to be done, as far as it is the same for all of a cohort."""
    terms = (job.kind, job.round, job.rounds, job.method, asdict(job.local), *astuple(grid), setting)
    return digest("fleetfit secure terms", json.dumps(terms, sort_keys=True, default=repr))


@dataclass(frozen=True, eq=False)
class Answer:
    """What a client answers in a phase.

    Attributes:
        message: Of the protocol.
        report: In the phase "train" its update, without anything that a sum would hide.
    """

    message: Any
    report: Update | None = None


Asked = Mapping[int, tuple[Job, Any]]
"""By index of the job: the job, and what the client is told in this phase (None: nothing but the job)."""


class Parties(Protocol):
    """The clients of secure rounds, wherever they are."""

    def ask(self, phase: str, asked: Asked) -> Iterator[tuple[int, Answer | Failure]]:
        """Ask clients in a phase: "keys", "shares", "train", "sign" or "unmask"; yield what comes of each, once."""
        ...


class Simulated:
    """Simulated clients: each is a `SecureClient` in this process, which trains where an engine trains it."""

    def __init__(self, engine: Any, segments: "Segments", secure: SecureRun, away: Away = nobody) -> None:
        """Take the engine that trains.

        Args:
            engine: Where jobs run.
            segments: Of the model.
            secure: What the run asks of a round.
            away: Who goes away between phases, beside those that the engine loses.
        """
        self._engine, self._segments, self._secure, self._away = engine, segments, secure, away
        self._authority = Signer.new()
        self._known: dict[int, tuple[Identity, Journal]] = {}
        self._members: dict[int, SecureClient] = {}

    def ask(self, phase: str, asked: Asked) -> Iterator[tuple[int, Answer | Failure]]:
        """Ask clients in a phase."""
        if phase == "train":
            yield from self._train(asked)
            return
        for index, (job, told) in asked.items():
            if self._goes(phase, job):
                yield index, Failure.of(job, f"it went away before it sent its {phase}.")
                continue
            try:
                yield index, Answer(self._answer(phase, index, job, told))
            except RunError as error:
                yield index, Failure.of(job, one_line(str(error), 500))

    def _answer(self, phase: str, index: int, job: Job, told: Any) -> Any:
        if phase == "keys":
            self._members[index] = self._member(job)
            return self._members[index].begin(self._secure.run, job.round, worded(job.submodel))
        member = self._members[index]
        return answer_in(phase, member, told)

    def _member(self, job: Job) -> SecureClient:
        assert job.client is not None
        number = job.client
        if number not in self._known:
            self._known[number] = certified(self._authority), Journal()
        identity, journal = self._known[number]
        return SecureClient(number, identity, self._authority.public, self._secure.rules.minimum,
                            self._segments.lengths, journal)  # fmt: skip

    def _goes(self, phase: str, job: Job) -> bool:
        assert job.client is not None
        return self._away(phase, job.round, job.client)

    def _train(self, asked: Asked) -> Iterator[tuple[int, Answer | Failure]]:
        for job, reply in pair_jobs_with_replies(self._engine.run, [job for job, _ in asked.values()]):
            if not isinstance(reply, Failure) and self._goes("update", job):
                yield job.index, Failure.of(job, "it went away before it sent its update.")
                continue
            yield job.index, answered(self._members[job.index], asked[job.index][1], job, reply, self._segments,
                                      self._secure.grid)  # fmt: skip


def answer_in(phase: str, member: SecureClient, told: Any) -> Any:
    """Return a member's answer in a phase that needs no training."""
    if phase == "shares":
        return member.shares(told)
    return member.sign(told) if phase == "sign" else member.unmask(told)


def answered(
    member: SecureClient, dealt: Dealt, job: Job, reply: Update | Failure, segments: "Segments", grid: Quantiser
) -> Answer | Failure:
    """Return what a client sends when it has trained: its masked words, and a report that says nothing of them.

    A client that clips, and could not train, sends zeros: if it went away, who else is seen would go by its data.
    """
    update = None if isinstance(reply, Failure) else reply
    if isinstance(reply, Failure) and (grid.clip is None or reply.absent):
        return reply
    try:
        words, sent = segments.words(member.pieces, job, update, member.blocks, grid)
        masked = member.masked(dealt, words, sent)
    except Exception as error:  # whatever a reply holds, it is its client's failure
        spent = {"multiply_adds": reply.multiply_adds, "simulated_s": reply.simulated_s}
        return Failure.of(job, format_exception(error), **spent)
    if update is None:
        update = Update(job.round, job.index, job.client, job.level, job.submodel, job.submodel, {}, 0, {},
                        multiply_adds=reply.multiply_adds, simulated_s=reply.simulated_s)  # fmt: skip
    return Answer(masked, replace(update, state={}, scales={}, metrics={}, untrained=()))


class Secured:
    """An engine that gives the server sums of training jobs, and runs all others as they are."""

    def __init__(
        self, engine: Any, layout: Layout, secure: SecureRun, parties: Parties | None = None, setting: str = ""
    ) -> None:
        """Take the engine that trains.

        Args:
            engine: Where jobs run.
            layout: Of the model.
            secure: What the run asks of a round.
            parties: The clients; None: simulated ones.
            setting: What else all members have to have in common.
        """
        self.engine, self.layout, self.secure = engine, layout, secure
        self.segments = Segments(layout, setting)
        self.parties = Simulated(engine, self.segments, secure) if parties is None else parties

    def sums(self, jobs: Iterator[Job], state: State) -> RoundSums:
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


class _Lost(Exception):
    """The round's sums cannot be had; the message says why."""


@dataclass(eq=False)
class _Member:
    job: Job
    up: int = 0
    down: int = 0


@dataclass(eq=False)
class _SecureRound:
    """The server's side of one round."""

    engine: Secured
    jobs: list[Job]
    state: State
    _reports: dict[int, Update | Failure] = field(default_factory=dict)

    def done(self) -> RoundSums:
        """Go through the phases."""
        secure = self.engine.secure
        self._server = SecureServer(secure.run, self.jobs[0].round, secure.rules, self.engine.segments.lengths)
        self._members = {job.index: _Member(job) for job in self.jobs}
        try:
            blocks = self._phases()
        except _Lost as lost:
            return self._summed([], str(lost))
        return self._summed(blocks, "")

    def _phases(self) -> list[BlockSum]:
        server = self._server
        there = self._ask("keys", dict.fromkeys(self._members), self._enrolled)
        self._roster = self._server_does(server.roster)
        there = self._ask("shares", dict.fromkeys(there, self._roster), server.deal)
        dealt = self._server_does(server.dealt)
        given = {index: dealt[self._members[index].job.client] for index in there}
        there = self._ask("train", given, server.add)
        there = self._ask("sign", dict.fromkeys(there, self._server_does(server.survivors)), server.agree)
        self._ask("unmask", dict.fromkeys(there, self._server_does(server.agreed)), server.open)
        sent = self.engine.segments.sent(self._roster.pieces, self.jobs[0], self.state, self.engine.secure.grid)
        found: list[BlockSum] = self._server_does(lambda: server.sums(sent))
        return found

    def _server_does(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except RunError as error:
            raise _Lost(str(error)) from None

    def _enrolled(self, sent: Keys, job: Job) -> None:
        if (sent.client, sent.piece) != (job.client, worded(job.submodel)):
            raise RunError("it has sent keys for another client, or another sub-model.")
        self._server.enrol(sent)

    def _ask(self, phase: str, told: Mapping[int, Any], taken: Callable[..., None]) -> list[int]:
        """Tell clients something, and take their answers; return who has answered as it should."""
        heavy, there = _Sizes(), []
        asked = {index: (self._members[index].job, message) for index, message in told.items()}
        for index, (job, message) in asked.items():
            trained = job_size(job, self.engine.layout) if phase == "train" else 0
            self._members[index].down += trained + heavy.of(message)
        for index, found in self.engine.parties.ask(phase, asked):
            job, member = self._members[index].job, self._members[index]
            try:
                if isinstance(found, Failure):
                    raise RunError(found.reason)
                member.up += size(found.message)
                taken(found.message, job) if phase == "keys" else taken(found.message)
            except RunError as error:
                if phase not in ("sign", "unmask"):  # then its update has come, and counts
                    failed = found if isinstance(found, Failure) else Failure.of(job, "")
                    self._reports[index] = replace(failed, reason=one_line(str(error), 500))
                continue
            there.append(index)
            if found.report is not None:
                self._reports[index] = found.report
        return sorted(there)

    # ---- what the server's core gets

    def _summed(self, sums: Sequence[BlockSum], lost: str) -> RoundSums:
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
        for index, member in self._members.items():
            report = self._reports.get(index) or Failure.of(member.job, one_line(lost, 500))
            reports.append(replace(report, bytes_down=member.down, bytes_up=member.up))
        return RoundSums(tuple(blocks), self.engine.secure.grid.step, tuple(reports), hidden, clipped, lost)

    def _unheard(self, opened: set[int]) -> None:
        """Say of whom no block was opened."""
        why = "too few others covered any part of what it trained, so no sum with it was seen."
        for index, report in self._reports.items():
            job = self._members[index].job
            if isinstance(report, Update) and not opened & set(self._roster.blocks_of(job.client or 0)):
                self._reports[index] = Failure.of(job, why)


class _Sizes:
    """Sizes of messages, each measured once however many get it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}

    def of(self, message: Any) -> int:
        """Return the bytes of a message, 0 of none."""
        if message is None:
            return 0
        if id(message) not in self._known:
            self._known[id(message)] = message, size(message)
        return self._known[id(message)][1]
