"""An engine whose rounds of training give sums only: secure aggregation, over any engine.

The server's side asks clients phase by phase (`Parties`). Each simulated client is a `fleetfit.secure.SecureClient`: it
trains on the engine below, quantizes its movement, and sends masked words. On a real fleet the same clients are nodes.
Bytes are those of the messages. A client that the engine reports as lost was lost before its upload; a `Dropout` loses
clients in the other phases.

A block's words are its elements, then for each of its tensors a 1 if a gradient reached the tensor on the client, then
a 1 if an element of the block was clipped. So the mean is that of the clients that trained, as without masks, and the
server learns how many these are.

Class frequencies are added up in the same way, as one tensor that all sub-models have whole (`make_label_layout`), and
under a run's name of their own, since journals count rounds.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.aggregate import SummedBlock
from fleetfit.core import FREQUENCIES, Failure, Job, RoundSums, Update
from fleetfit.engines.base import Engine, WrappedEngine
from fleetfit.errors import FleetFitError, RunError, format_exception, one_line
from fleetfit.layout import Layout, Segment, State, TensorLayout
from fleetfit.messages import job_size
from fleetfit.names import drop_folders
from fleetfit.secure import (
    BlockSum,
    Identity,
    Journal,
    Keys,
    Quantizer,
    SealedShares,
    SecureClient,
    SecureRun,
    SecureServer,
    SentDigests,
    Signer,
    digest,
    make_identity,
    pack_message,
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

Dropout = Callable[[str, int, int], bool]
"""Returns of (phase, round, client) whether it drops out before its "keys", "shares", "update", "sign" or "unmask"."""
_MAX_SUBMODELS = 62  # bits of a block's number
LABEL_GRID = Quantizer(1.0, 22)
"""The quantization of class frequencies: steps of 4.8e-7, sums of at most 1,024 clients."""


def make_label_layout(layout: Layout, classes: int) -> Layout:
    """Return the layout of class frequencies, which has the same sub-models as the layout of a model."""
    frequencies = TensorLayout(((Segment(None, classes),),), None, None, True)
    return Layout(layout.axes, layout.exits, {FREQUENCIES: frequencies})


def format_submodel(submodel: Submodel) -> str:
    """Return a sub-model as the text that members and server compare."""
    return json.dumps(dump_submodel(submodel), sort_keys=True)


@dataclass(frozen=True, eq=False)
class _Block:
    positions: Tensor  # of its elements in the full model's flat buffer, ascending
    tensors: tuple[str, ...]  # names of those that have elements in it
    tensor_of: Tensor  # for each element the number of its tensor among these

    @property
    def words(self) -> int:
        return len(self.positions) + len(self.tensors) + 1


class BlockLayout:
    """The blocks of cohorts, by their members' sub-models; clients and server compute the same ones."""

    def __init__(self, layout: Layout, setting: str = "") -> None:
        """Prepare the blocks.

        Args:
            layout: The model's.
            setting: Anything else that must be the same for all members.
        """
        self._layout, self._setting = layout, setting
        full = get_slice_plan(layout, full_submodel(layout))
        sizes = torch.tensor([int(np.prod(shape)) for shape in full.shapes.values()])
        self._names = full.names
        self._tensor = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        self._cached = lru_cache(maxsize=4)(self._make_blocks)

    def get_blocks(self, submodels: Sequence[str]) -> tuple[Tensor, Mapping[int, _Block]]:
        """Return the number of each element's block, and the blocks."""
        return self._cached(tuple(submodels))

    def _make_blocks(self, submodels: tuple[str, ...]) -> tuple[Tensor, Mapping[int, _Block]]:
        if len(submodels) > _MAX_SUBMODELS:
            raise RunError(
                f"{len(submodels)} different sub-models in one cohort; at most {_MAX_SUBMODELS} have blocks.",
                key="cohort",
            )
        codes = torch.zeros(len(self._tensor), dtype=torch.int64)
        for number, submodel in enumerate(submodels):
            self._find_slices(submodel).scatter_scalar(codes, 1 << number)
        blocks = {}
        for code in torch.unique(codes).tolist():
            if code:
                positions = (codes == code).nonzero().flatten()
                tensors, tensor_of = torch.unique(self._tensor[positions], return_inverse=True)
                blocks[int(code)] = _Block(positions, tuple(self._names[t] for t in tensors.tolist()), tensor_of)
        return codes, blocks

    def _find_slices(self, submodel: str) -> SlicePlan:
        try:
            return get_slice_plan(self._layout, parse_submodel(json.loads(submodel)))
        except (FleetFitError, ValueError, RecursionError):
            raise RunError("a member trains a sub-model that this model does not have.", key="roster") from None

    def get_lengths(self, submodels: Sequence[str]) -> Mapping[int, int]:
        """Return the words of each block."""
        return {code: block.words for code, block in self.get_blocks(submodels)[1].items()}

    def quantize_update(
        self, submodels: Sequence[str], job: Job, update: Update | None, blocks: Sequence[int], grid: Quantizer
    ) -> tuple[dict[int, NDArray[np.uint32]], SentDigests]:
        """Return a client's words of blocks, and digests of what it was sent.

        A client that clips its movement always says that it has trained each tensor, and clipped nothing.

        Args:
            submodels: The cohort's.
            job: The client's.
            update: Its update; None: nothing, of a client that clips.
            blocks: Numbers of the blocks.
            grid: The quantization.

        Raises:
            RunError: It trained another sub-model than it was sent, or its movement is not finite.
        """
        slices = get_slice_plan(self._layout, job.submodel)
        codes, all_blocks = self.get_blocks(submodels)
        own_codes = slices.gather(codes)
        sent = concat_state(job.state).cpu() if job.state else torch.zeros(slices.size)
        movement = torch.zeros_like(sent)
        if update is not None:
            if update.submodel != job.submodel or update.compressed or get_shapes(update.state) != slices.shapes:
                raise RunError("its update is of another sub-model than it was sent, and has no place in the blocks.")
            movement = concat_state(update.state).cpu() - sent
        clipped_whole = None if grid.clip is None else torch.from_numpy(grid.quantize_clipped(movement.numpy()))
        words = {}
        for code in blocks:
            inside, tensors = own_codes == code, all_blocks[code].tensors
            if clipped_whole is not None:
                numbers, trained, clipped = clipped_whole[inside].numpy(), [1] * len(tensors), False
            else:
                assert update is not None
                numbers, clipped = grid.quantize(movement[inside].numpy())
                trained = [int(name not in update.untrained) for name in tensors]
                numbers *= np.array(trained, dtype=np.int64)[all_blocks[code].tensor_of.numpy()]
            words[code] = np.concatenate([numbers, trained, [int(clipped)]]).astype(np.int32).view(np.uint32)
        states = {code: digest_state(code, sent[own_codes == code]) for code in torch.unique(own_codes).tolist()}
        return words, SentDigests(_digest_terms(job, grid, self._setting), states)

    def digest_sent(self, submodels: Sequence[str], job: Job, state: State, grid: Quantizer) -> SentDigests:
        """Return digests of what all clients of a round were sent: how to train, and the state of each block."""
        full, blocks = concat_state(state).cpu(), self.get_blocks(submodels)[1]
        terms = _digest_terms(job, grid, self._setting)
        return SentDigests(terms, {code: digest_state(code, full[block.positions]) for code, block in blocks.items()})


def digest_state(block: int, sent: Tensor) -> bytes:
    """Return the digest of a block's state."""
    return digest("fleetfit secure state", block, sent.contiguous().numpy().tobytes())


def _digest_terms(job: Job, grid: Quantizer, setting: str) -> bytes:
    """Return the digest of all settings of a job that are the same for its cohort."""
    terms = (job.kind, job.round, job.rounds, job.method, job.local.dump(), *astuple(grid), setting, *job.prior)
    return digest("fleetfit secure terms", drop_folders(json.dumps(terms, sort_keys=True, default=repr)))


@dataclass(frozen=True, eq=False)
class PhaseAnswer:
    """A client's answer in a phase.

    Attributes:
        message: Of the protocol.
        report: In the phase "train" its update, without the numbers that a sum hides.
    """

    message: Any
    report: Update | None = None


Requests = Mapping[int, tuple[Job, Any]]
"""By index of the job: the job, and the client's message in this phase (None: the job alone)."""


class Parties(Protocol):
    """The clients of secure rounds, simulated or real."""

    def ask(self, phase: str, requests: Requests) -> Iterator[tuple[int, PhaseAnswer | Failure]]:
        """Ask clients in a phase: "keys", "shares", "train", "sign" or "unmask"; yield each one's answer, once."""
        ...


class SimulatedParties:
    """Simulated clients: each is a `SecureClient` in this process, which trains on an engine."""

    def __init__(self, engine: Engine, blocks: BlockLayout, secure: SecureRun, dropout: Dropout | None = None) -> None:
        """Prepare the clients.

        Args:
            engine: Runs the jobs.
            blocks: Of the model.
            secure: The run's settings of a secure round.
            dropout: Which clients drop out between phases, beside those that the engine loses.
        """
        self._engine, self._blocks, self._secure, self._dropout = engine, blocks, secure, dropout
        self._authority = Signer()
        self._identities: dict[int, tuple[Identity, Journal]] = {}
        self._members: dict[int, SecureClient] = {}

    def ask(self, phase: str, requests: Requests) -> Iterator[tuple[int, PhaseAnswer | Failure]]:
        """Ask clients in a phase."""
        if phase == "train":
            yield from self._train(requests)
            return
        for index, (job, request) in requests.items():
            if self._drops_out(phase, job):
                yield index, Failure.of(job, f"it went away before it sent its {phase}.")
                continue
            try:
                if phase == "keys":
                    self._members[index] = self._make_member(job)
                    message = self._members[index].begin(self._secure.run, job.round, format_submodel(job.submodel))
                else:
                    message = answer_phase(phase, self._members[index], request)
                yield index, PhaseAnswer(message)
            except RunError as error:
                yield index, Failure.of(job, one_line(str(error), 500))

    def _make_member(self, job: Job) -> SecureClient:
        assert job.client is not None
        number = job.client
        if number not in self._identities:
            self._identities[number] = make_identity(self._authority), Journal()
        identity, journal = self._identities[number]
        return SecureClient(number, identity, self._authority.public, self._secure.rules.minimum,
                            self._blocks.get_lengths, journal)  # fmt: skip

    def _drops_out(self, phase: str, job: Job) -> bool:
        assert job.client is not None
        return self._dropout is not None and self._dropout(phase, job.round, job.client)

    def _train(self, requests: Requests) -> Iterator[tuple[int, PhaseAnswer | Failure]]:
        for job, reply in pair_jobs_with_replies(self._engine.run, [job for job, _ in requests.values()]):
            if not isinstance(reply, Failure) and self._drops_out("update", job):
                yield job.index, Failure.of(job, "it went away before it sent its update.")
                continue
            member, sealed = self._members[job.index], requests[job.index][1]
            yield job.index, mask_update(member, sealed, job, reply, self._blocks, self._secure.grid)


def answer_phase(phase: str, member: SecureClient, request: Any) -> Any:
    """Return a member's answer in a phase that needs no training."""
    if phase == "shares":
        return member.share(request)
    return member.sign(request) if phase == "sign" else member.unmask(request)


def mask_update(
    member: SecureClient, sealed: SealedShares, job: Job, reply: Update | Failure, blocks: BlockLayout, grid: Quantizer
) -> PhaseAnswer | Failure:
    """Return a client's message after training: its masked words, and a report that reveals none of them.

    A client that clips, and could not train, sends zeros: if it dropped out, its data would decide which other clients
    are in a sum.
    """
    update = None if isinstance(reply, Failure) else reply
    if isinstance(reply, Failure) and (grid.clip is None or reply.absent):
        return reply
    try:
        words, sent = blocks.quantize_update(member.submodels, job, update, member.blocks, grid)
        message = member.mask(sealed, words, sent)
    except Exception as error:  # a malformed reply is a failure of its client
        costs = {"multiply_adds": reply.multiply_adds, "simulated_s": reply.simulated_s}
        return Failure.of(job, format_exception(error), **costs)
    if update is None:
        update = Update.of(job, {}, 0, multiply_adds=reply.multiply_adds, simulated_s=reply.simulated_s)
    return PhaseAnswer(message, replace(update, state={}, scales={}, metrics={}, untrained=(), extra={}))


class SecureEngine(WrappedEngine):
    """An engine that gives the server sums of training jobs, and runs all other jobs as they are."""

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        secure: SecureRun,
        make_parties: Callable[[BlockLayout, SecureRun], Parties] | None = None,
        setting: str = "",
    ) -> None:
        """Wrap an engine.

        Args:
            engine: Runs the jobs.
            layout: The model's.
            secure: The run's settings of a secure round.
            make_parties: Makes the clients of sums of blocks; None: simulated ones.
            setting: Anything else that must be the same for all members.
        """
        super().__init__(engine)
        self.layout, self.secure, self._setting = layout, secure, setting
        self.blocks = BlockLayout(layout, setting)
        self._make_parties = make_parties or partial(SimulatedParties, engine)
        self.parties = self._make_parties(self.blocks, secure)

    def sums(self, jobs: Iterator[Job], state: State) -> RoundSums:
        """Run a round's jobs of training.

        Args:
            jobs: Of one round.
            state: The server's, of which each job has a part.

        Returns:
            The sums, or the reason why there are none.
        """
        return _SecureRound(self, list(jobs), state).run()

    def sum_labels(self, jobs: Iterator[Job], classes: int) -> RoundSums:
        """Run jobs "labels", and return the sum of the clients' class frequencies, or the reason why there is none."""
        layout = make_label_layout(self.layout, classes)
        secure = SecureRun(self.secure.rules, LABEL_GRID, f"{self.secure.run}-labels")
        engine = SecureEngine(self.engine, layout, secure, self._make_parties, self._setting)
        return engine.sums(jobs, {FREQUENCIES: torch.zeros(classes)})

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run other jobs."""
        return iter(self.engine.run(jobs))


class _NoSums(Exception):
    """The round has no sums; the message says why."""


@dataclass(eq=False)
class _Member:
    job: Job
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(eq=False)
class _SecureRound:
    """The server's side of one round."""

    engine: SecureEngine
    jobs: list[Job]
    state: State
    _reports: dict[int, Update | Failure] = field(default_factory=dict)

    def run(self) -> RoundSums:
        """Run the phases."""
        secure = self.engine.secure
        self._server = SecureServer(secure.run, self.jobs[0].round, secure.rules, self.engine.blocks.get_lengths)
        self._members = {job.index: _Member(job) for job in self.jobs}
        try:
            sums = self._run_phases()
        except _NoSums as reason:
            return self._summarize([], str(reason))
        return self._summarize(sums, "")

    def _run_phases(self) -> list[BlockSum]:
        server = self._server
        present = self._ask("keys", dict.fromkeys(self._members), self._enrol)
        self._roster = self._call_server(server.make_roster)
        present = self._ask("shares", dict.fromkeys(present, self._roster), server.add_shares)
        sealed = self._call_server(server.deal)
        requests = {index: sealed[self._members[index].job.client] for index in present}
        present = self._ask("train", requests, server.add)
        survivors = self._call_server(server.find_survivors)
        present = self._ask("sign", dict.fromkeys(present, survivors), server.add_signature)
        signatures = self._call_server(server.collect_signatures)
        self._ask("unmask", dict.fromkeys(present, signatures), server.add_opened)
        sent = self.engine.blocks.digest_sent(self._roster.submodels, self.jobs[0], self.state, self.engine.secure.grid)
        return self._call_server(lambda: server.compute_sums(sent))

    def _call_server(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except RunError as error:
            raise _NoSums(str(error)) from None

    def _enrol(self, message: Keys, job: Job) -> None:
        if (message.client, message.submodel) != (job.client, format_submodel(job.submodel)):
            raise RunError("it has sent keys for another client, or another sub-model.")
        self._server.enrol(message)

    def _ask(self, phase: str, messages: Mapping[int, Any], take: Callable[..., None]) -> list[int]:
        """Ask clients in a phase, by index of their jobs; return those whose answer the server takes."""
        sizes: dict[int, int] = {}  # a message to several clients is measured once
        requests = {index: (self._members[index].job, message) for index, message in messages.items()}
        for index, (job, message) in requests.items():
            if message is not None and id(message) not in sizes:
                sizes[id(message)] = len(pack_message(message))
            job_bytes = job_size(job, self.engine.layout) if phase == "train" else 0
            self._members[index].bytes_down += job_bytes + sizes.get(id(message), 0)
        answered = []
        for index, answer in self.engine.parties.ask(phase, requests):
            job, member = self._members[index].job, self._members[index]
            try:
                if isinstance(answer, Failure):
                    raise RunError(answer.reason)
                member.bytes_up += len(pack_message(answer.message))
                take(answer.message, job) if phase == "keys" else take(answer.message)
            except RunError as error:
                if phase not in ("sign", "unmask"):  # in these its update has come, and counts
                    failure = answer if isinstance(answer, Failure) else Failure.of(job, "")
                    self._reports[index] = replace(failure, reason=one_line(str(error), 500))
                continue
            answered.append(index)
            if answer.report is not None:
                self._reports[index] = answer.report
        return sorted(answered)

    # ---- the round's result

    def _summarize(self, sums: Sequence[BlockSum], reason: str) -> RoundSums:
        blocks, clipped, hidden = [], 0, 0
        if not reason:
            all_blocks = self.engine.blocks.get_blocks(self._roster.submodels)[1]
            hidden = sum(len(block.positions) for block in all_blocks.values())
            for total in sums:
                block, words = all_blocks[total.block], torch.from_numpy(total.words)
                elements, end = len(block.positions), len(block.positions) + len(block.tensors)
                counts = words[elements:end][block.tensor_of]
                blocks.append(SummedBlock(block.positions, words[:elements], counts, total.clients))
                clipped, hidden = max(clipped, int(words[end])), hidden - elements
            self._fail_hidden({total.block for total in sums})
        reports = []
        for index, member in self._members.items():
            report = self._reports.get(index) or Failure.of(member.job, one_line(reason, 500))
            reports.append(replace(report, bytes_down=member.bytes_down, bytes_up=member.bytes_up))
        return RoundSums(tuple(blocks), self.engine.secure.grid.step, tuple(reports), hidden, clipped, reason)

    def _fail_hidden(self, opened: set[int]) -> None:
        """Replace the reports of clients without an opened block by failures."""
        reason = "too few others covered any part of what it trained, so no sum with it was seen."
        for index, report in self._reports.items():
            job = self._members[index].job
            if isinstance(report, Update) and not opened & set(self._roster.get_blocks(job.client or 0)):
                self._reports[index] = Failure.of(job, reason)
