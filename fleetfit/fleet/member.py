"""A node's part in secure rounds: what `fleetfit.secure` has of a client, from message to message.

The secrets of a round are in the memory of the node's worker alone, and gone with it: the node has then gone away.
Which rounds were begun is written down before anything of one is sent.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fleetfit import files
from fleetfit.errors import ConfigError, RunError
from fleetfit.layout import Layout
from fleetfit.messages import pack, unpack
from fleetfit.secure import (
    Agreed,
    Dealt,
    Identity,
    Journal,
    Keys,
    Quantiser,
    Roster,
    SecureClient,
    Signer,
    Survivors,
    packed,
    read,
)
from fleetfit.secured import Segments, answer_in, answered, worded
from fleetfit.submodel import parse_submodel
from fleetfit.values import Failure, Job, Update

TOLD: Mapping[str, type] = {"shares": Roster, "train": Dealt, "sign": Survivors, "unmask": Agreed}
"""What is told in each phase but the first."""
_RUNS = 1000  # whose last round is remembered
Header = Mapping[str, Any]


def read_member(path: Path) -> tuple[Identity, bytes]:
    """Return a node's identity and its fleet's authority of a file that `fleetfit flower member` wrote.

    Raises:
        ConfigError: It is none.
    """
    try:
        nest = json.loads(files.read_bytes(path))
        private, certificate, authority = (bytes.fromhex(nest[key]) for key in ("private", "certificate", "authority"))
        return Identity(Signer.of(private), certificate), authority
    except OSError as error:
        raise ConfigError(
            f"[secure] member: {path} cannot be read: {error.strerror}.", key="secure.member", path=path
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"[secure] member: {path} is no key of a member; make one: fleetfit flower member NAME --authority DIR",
            key="secure.member",
            path=path,
        ) from None


class Membership:
    """A node as a member of secure rounds; one round at a time."""

    def __init__(self, member: Path, minimum: int, folder: Path) -> None:
        """Take the node's key, its own minimum, and where it keeps what it remembers."""
        self._identity, self._authority = read_member(member)
        self._minimum, self._file = minimum, folder / "secure.ffit"
        self._journal = Journal(self._begun(), self._keep)
        self._segments: Segments | None = None
        self._client: SecureClient | None = None
        self._round: tuple[str, int, int, str] = ("", -1, -1, "")

    def answer(self, header: Header, message: bytes, layout: Layout, setting: str) -> dict[str, Any]:
        """Answer in a phase that needs no training.

        Args:
            header: Of the server's message.
            message: Of the protocol; empty in the first phase.
            layout: Of the model that the header describes.
            setting: That description: what members have to have in common.

        Raises:
            RunError: It is refused.
        """
        asked = header["secure"]
        if asked.get("phase") == "keys":
            return _sealed(self._begin(asked, header["job"], layout, setting))
        return _sealed(answer_in(asked["phase"], self._member(asked), read(TOLD[asked["phase"]], message)))

    def _begin(self, asked: Mapping[str, Any], job: Mapping[str, Any], layout: Layout, setting: str) -> Keys:
        run, round, number = asked.get("run"), job.get("round"), job.get("client")
        numbers = (round, number)
        if not isinstance(run, str) or not 0 < len(run) <= 64 or any(type(n) is not int for n in numbers):
            raise RunError("the server did not send run and round.")
        assert isinstance(round, int) and isinstance(number, int)
        if not 0 <= round < 2**31 or not 0 <= number < 2**31:
            raise RunError("the server did not send run and round.")
        piece = worded(parse_submodel(job["submodel"]))
        self._segments = Segments(layout, setting)
        self._client = SecureClient(
            number, self._identity, self._authority, self._minimum, self._segments.lengths, self._journal
        )
        self._round = (run, round, number, piece)
        return self._client.begin(run, round, piece)

    def _member(self, asked: Mapping[str, Any]) -> SecureClient:
        if self._client is None or asked.get("run") != self._round[0]:
            raise RunError("this node has not begun the round: its worker was restarted, or it is another run's.")
        return self._client

    def trained(self, header: Header, message: bytes) -> Callable[[Job, Update | Failure], dict[str, Any] | Failure]:
        """Return what makes the answer of a training job's reply.

        Raises:
            RunError: The round was not begun, or the message is wrong.
        """
        asked, member = header["secure"], self._member(header["secure"])
        dealt, grid = read(Dealt, message), _grid(asked)

        def finish(job: Job, reply: Update | Failure) -> dict[str, Any] | Failure:
            if (job.round, job.client, worded(job.submodel)) != self._round[1:]:
                raise RunError("the job is not the one that the keys of this round were for.")
            assert self._segments is not None
            found = answered(member, dealt, job, reply, self._segments, grid)
            if isinstance(found, Failure):
                return found
            assert found.report is not None
            told = {"num_examples": found.report.num_examples, "multiply_adds": found.report.multiply_adds}
            return {**_sealed(found.message), **told}

        return finish

    def _begun(self) -> dict[str, int]:
        try:
            found: dict[str, int] = unpack(files.read_bytes(self._file))["begun"]
            return found
        except FileNotFoundError:
            return {}
        except (RunError, KeyError, TypeError, OSError):
            raise ConfigError(
                f"{self._file} is damaged: it says which secure rounds this node has begun, and none of them may be "
                "done again. Remove it only if all runs that this node took part in are over.",
                path=self._file,
            ) from None

    def _keep(self, last: Mapping[str, int]) -> None:
        kept = dict(list(last.items())[-_RUNS:])
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with files.atomic_write(self._file, 0o600) as file:
            file.write(pack({"begun": kept}))


def _grid(asked: Mapping[str, Any]) -> Quantiser:
    reach, bits = asked.get("range"), asked.get("bits")
    if type(bits) is not int or not 8 <= bits <= 24 or type(reach) is not float or not 0 < reach < math.inf:
        raise RunError("the server did not send the precision of the sums.", key="precision")
    clip = asked.get("clip")
    if clip is not None and (type(clip) is not float or not 0 < clip <= reach):
        raise RunError("the server sent a clipping bound that is not a number within the range of movements.")
    return Quantiser(reach, bits, clip)


def _sealed(message: Any) -> dict[str, Any]:
    return {"secure": torch.frombuffer(bytearray(packed(message)), dtype=torch.uint8)}
