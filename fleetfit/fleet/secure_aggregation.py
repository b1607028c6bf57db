"""Secure rounds on a fleet: the messages of `fleetfit.secure` between the server and its nodes.

`NodeParties` is the server's side: it sends a phase to the nodes and returns their answers. A node that does not answer
within the deadline of a job has dropped out, in any phase. `Member` is the node's side: the secrets of a round are in
the memory of the node's worker alone, and a worker that ends has dropped out. It writes down that a round has begun
before it sends anything of it.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fleetfit import files
from fleetfit.core import Failure, Job, Update
from fleetfit.engines.secure import BlockLayout, PhaseAnswer, Requests, answer_phase, format_submodel, mask_update
from fleetfit.errors import ConfigError, RunError, format_exception
from fleetfit.layout import Layout
from fleetfit.messages import pack, unpack
from fleetfit.secure import (
    Identity,
    Journal,
    Keys,
    MaskedUpdate,
    OpenedShares,
    Quantizer,
    Roster,
    SealedShares,
    SecureClient,
    SecureRun,
    Shares,
    Signature,
    Signatures,
    Signer,
    Survivors,
    pack_message,
    read_message,
)
from fleetfit.submodel import parse_submodel

if TYPE_CHECKING:
    from fleetfit.fleet.engine import FleetEngine

REQUESTS: Mapping[str, type] = {"shares": Roster, "train": SealedShares, "sign": Survivors, "unmask": Signatures}
"""The server's message of each phase but the first."""
ANSWERS: Mapping[str, type] = {
    "keys": Keys, "shares": Shares, "train": MaskedUpdate, "sign": Signature, "unmask": OpenedShares
}  # fmt: skip
"""The node's message of each phase."""
PHASES = ANSWERS.keys()
_MAX_RUNS = 1000  # whose last round a node keeps
Header = Mapping[str, Any]

# ---- the server's side -----------------------------------------------------------------------------------------------


class NodeParties:
    """The clients of secure rounds on a fleet: its nodes, of which each makes the blocks itself."""

    def __init__(self, engine: "FleetEngine", blocks: BlockLayout, secure: SecureRun) -> None:
        self._engine, self._secure = engine, secure

    def ask(self, phase: str, requests: Requests) -> Iterator[tuple[int, PhaseAnswer | Failure]]:
        """Send a phase's messages to the nodes; yield each one's answer."""
        grid, messages = self._secure.grid, {}
        packed: dict[int, bytes] = {}  # a message to all nodes is packed once
        for index, (job, request) in requests.items():
            parts = {}
            if request is not None:
                parts["secure"] = packed.setdefault(id(request), b"") or pack_message(request)
                packed[id(request)] = parts["secure"]
            messages[index] = (job if phase == "train" else replace(job, state={}), parts)
        numbers = {"range": grid.range, "bits": grid.bits} | ({} if grid.clip is None else {"clip": grid.clip})
        what = {"what": "secure", "secure": {"phase": phase, "run": self._secure.run, **numbers}}
        for index, answer in self._engine.exchange(what, messages):
            job = requests[index][0]
            yield index, answer if isinstance(answer, Failure) else _read_answer(phase, job, answer)


def _read_answer(phase: str, job: Job, answer: Mapping[str, Any]) -> PhaseAnswer | Failure:
    try:
        content = answer.get("secure")
        if not isinstance(content, torch.Tensor) or content.dtype != torch.uint8 or content.ndim != 1:
            raise RunError("it has no message of a secure round.")
        message: Any = read_message(ANSWERS[phase], content.numpy().tobytes())
        if message.client != job.client:
            raise RunError("it is another client's.")
        return PhaseAnswer(message, _read_report(job, answer) if phase == "train" else None)
    except Exception as error:  # a malformed answer is a failure of its node
        return Failure.of(job, f"its answer was refused: {format_exception(error)}")


def _read_report(job: Job, answer: Mapping[str, Any]) -> Update:
    samples, multiply_adds = answer.get("num_examples"), answer.get("multiply_adds")
    if any(type(number) is not int or not 0 <= number < 2**60 for number in (samples, multiply_adds)):
        raise RunError("its report on training is missing or wrong.")
    assert isinstance(samples, int) and isinstance(multiply_adds, int)
    return Update.of(job, {}, samples, multiply_adds=multiply_adds)


# ---- the node's side -------------------------------------------------------------------------------------------------


def read_member(path: Path) -> tuple[Identity, bytes]:
    """Return the identity of a node, and its fleet's authority, from a file of `fleetfit flower member`.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    try:
        table = json.loads(files.read_bytes(path))
        private, certificate, authority = (bytes.fromhex(table[key]) for key in ("private", "certificate", "authority"))
        return Identity(Signer(private), certificate), authority
    except OSError as error:
        raise ConfigError(
            f"[secure] member: {path} cannot be read: {error.strerror}.", key="secure.member", path=path
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"[secure] member: {path} is not the key of a member; make one: fleetfit flower member NAME --authority "
            "DIR",
            key="secure.member",
            path=path,
        ) from None


class Member:
    """A node as a member of secure rounds; one round at a time."""

    def __init__(self, member: Path, minimum: int, folder: Path) -> None:
        """Read the node's key and its journal.

        Args:
            member: The file with the key.
            minimum: Members, at least, of a sum, by the node's own configuration.
            folder: Has the journal.
        """
        self._identity, self._authority = read_member(member)
        self._minimum, self._file = minimum, folder / "secure.ffit"
        self._journal = Journal(self._read_journal(), self._write_journal)
        self._blocks: BlockLayout | None = None
        self._client: SecureClient | None = None
        self._round: tuple[str, int, int, str] = ("", -1, -1, "")

    def answer(self, header: Header, message: bytes, layout: Layout, setting: str) -> dict[str, Any]:
        """Answer in a phase that needs no training.

        Args:
            header: Of the server's message.
            message: Of the protocol; empty in the first phase.
            layout: Of the model that the header describes.
            setting: That description, which must be the same for all members.

        Raises:
            RunError: The member refuses.
        """
        request = header["secure"]
        if request.get("phase") == "keys":
            minimum = max(self._minimum, header["terms"]["secure"]["min_clients"])
            return _make_answer(self._begin(request, header["job"], layout, setting, minimum))
        client = self._get_client(request)
        return _make_answer(answer_phase(request["phase"], client, read_message(REQUESTS[request["phase"]], message)))

    def _begin(
        self, request: Mapping[str, Any], job: Mapping[str, Any], layout: Layout, setting: str, minimum: int
    ) -> Keys:
        run, round, number = request.get("run"), job.get("round"), job.get("client")
        are_numbers = all(type(n) is int and 0 <= n < 2**31 for n in (round, number))
        if not isinstance(run, str) or not 0 < len(run) <= 64 or not are_numbers:
            raise RunError("the server did not send run and round.")
        assert isinstance(round, int) and isinstance(number, int)
        submodel = format_submodel(parse_submodel(job["submodel"]))
        self._blocks = BlockLayout(layout, setting)
        self._client = SecureClient(
            number, self._identity, self._authority, minimum, self._blocks.get_lengths, self._journal
        )
        self._round = (run, round, number, submodel)
        return self._client.begin(run, round, submodel)

    def _get_client(self, request: Mapping[str, Any]) -> SecureClient:
        if self._client is None or request.get("run") != self._round[0]:
            raise RunError("this node has not begun the round: its worker was restarted, or it is another run's.")
        return self._client

    def make_finish(
        self, header: Header, message: bytes
    ) -> Callable[[Job, Update | Failure], dict[str, Any] | Failure]:
        """Return a function that makes the answer from a training job's reply.

        Raises:
            RunError: The round was not begun, or the message is wrong.
        """
        request, client = header["secure"], self._get_client(header["secure"])
        sealed, grid = read_message(SealedShares, message), _read_grid(request)

        def finish(job: Job, reply: Update | Failure) -> dict[str, Any] | Failure:
            if (job.round, job.client, format_submodel(job.submodel)) != self._round[1:]:
                raise RunError("the job is not the one that the keys of this round were for.")
            assert self._blocks is not None
            answer = mask_update(client, sealed, job, reply, self._blocks, grid)
            if isinstance(answer, Failure):
                return answer
            assert answer.report is not None
            report = {"num_examples": answer.report.num_examples, "multiply_adds": answer.report.multiply_adds}
            return {**_make_answer(answer.message), **report}

        return finish

    def _read_journal(self) -> dict[str, int]:
        try:
            rounds: dict[str, int] = unpack(files.read_bytes(self._file))["begun"]
            return rounds
        except FileNotFoundError:
            return {}
        except (RunError, KeyError, TypeError, OSError):
            raise ConfigError(
                f"{self._file} is damaged: it says which secure rounds this node has begun, and none of them may be "
                "done again. Remove it only if all runs that this node took part in are over.",
                path=self._file,
            ) from None

    def _write_journal(self, rounds: Mapping[str, int]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with files.atomic_write(self._file, 0o600) as file:
            file.write(pack({"begun": dict(list(rounds.items())[-_MAX_RUNS:])}))


def _read_grid(request: Mapping[str, Any]) -> Quantizer:
    reach, bits = request.get("range"), request.get("bits")
    if type(bits) is not int or not 8 <= bits <= 24 or type(reach) is not float or not 0 < reach < math.inf:
        raise RunError("the server did not send the precision of the sums.", key="precision")
    clip = request.get("clip")
    if clip is not None and (type(clip) is not float or not 0 < clip <= reach):
        raise RunError("the server sent a clipping bound that is not a number within the range of movements.")
    return Quantizer(reach, bits, clip)


def _make_answer(message: Any) -> dict[str, Any]:
    return {"secure": torch.frombuffer(bytearray(pack_message(message)), dtype=torch.uint8)}
