"""The server's side of secure rounds on a fleet: phases go to nodes as messages, and their answers come back.

A node that does not answer within the deadline of a job has gone away, in whichever phase it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from fleetfit.errors import RunError, format_exception
from fleetfit.fleet.engine import FlowerEngine
from fleetfit.secure import Keys, MaskedUpdate, Opened, SecureRun, Shares, Signed, packed, read
from fleetfit.secured import Answer, Asked
from fleetfit.values import Failure, Job, Update

ANSWERS: Mapping[str, type] = {
    "keys": Keys, "shares": Shares, "train": MaskedUpdate, "sign": Signed, "unmask": Opened
}  # fmt: skip
"""What is answered in each phase."""


class NodeParties:
    """The clients of secure rounds on a fleet: its nodes."""

    def __init__(self, engine: FlowerEngine, secure: SecureRun) -> None:
        """Take the engine that reaches the nodes, and what the run asks of a round."""
        self._engine, self._secure = engine, secure

    def ask(self, phase: str, asked: Asked) -> Iterator[tuple[int, Answer | Failure]]:
        """Ask nodes in a phase."""
        grid, sent = self._secure.grid, {}
        known: dict[int, bytes] = {}  # what all are told is packed once
        for index, (job, told) in asked.items():
            parts = {}
            if told is not None:
                parts["secure"] = known.setdefault(id(told), b"") or packed(told)
                known[id(told)] = parts["secure"]
            sent[index] = (job if phase == "train" else replace(job, state={}), parts)
        numbers = {"range": grid.range, "bits": grid.bits} | ({} if grid.clip is None else {"clip": grid.clip})
        what = {"what": "secure", "secure": {"phase": phase, "run": self._secure.run, **numbers}}
        for index, found in self._engine.exchange(what, sent):
            job = asked[index][0]
            yield index, found if isinstance(found, Failure) else _answer(phase, job, found)


def _answer(phase: str, job: Job, nest: Mapping[str, Any]) -> Answer | Failure:
    try:
        content = nest.get("secure")
        if not isinstance(content, torch.Tensor) or content.dtype != torch.uint8 or content.ndim != 1:
            raise RunError("it has no message of a secure round.")
        message: Any = read(ANSWERS[phase], content.numpy().tobytes())
        if message.client != job.client:
            raise RunError("it is another client's.")
        return Answer(message, _report(job, nest) if phase == "train" else None)
    except Exception as error:  # whatever a node sends, it is that node's failure
        return Failure.of(job, f"its answer was refused: {format_exception(error)}")


def _report(job: Job, nest: Mapping[str, Any]) -> Update:
    samples, spent = nest.get("num_examples"), nest.get("multiply_adds")
    if any(type(number) is not int or not 0 <= number < 2**60 for number in (samples, spent)):
        raise RunError("its report on training is missing or wrong.")
    assert isinstance(samples, int) and isinstance(spent, int)
    piece = job.submodel
    return Update(job.round, job.index, job.client, job.level, piece, piece, {}, samples, {}, multiply_adds=spent)
