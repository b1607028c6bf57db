"""Messages that get lost between server and nodes: the job is sent again, and never to a node that works on it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.bits import have_same_state

import fleetfit as ff

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Error, Message
from local_fleet import Lab, described

from fleetfit.fleet import node as nodes_side, transport
from fleetfit.messages import unpack

FEDDYN = {"name": "scalefl", "options": {"feddyn": {}}}  # its nodes remember


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_side.get_node.cache_clear()
    monkeypatch.setattr(transport, "_SILENT_S", 0.2)
    monkeypatch.setattr(transport, "_AFTER_S", 0.2)


def fleet(folder: Path) -> tuple[Lab, ff.Run]:
    table = described(FEDDYN, rounds=2, cohort={"fraction": 1.0})
    base = ff.run(table, out=folder / "local")
    return Lab(folder, table, [float(b) for b in base.assembly.fleet.budgets]), base


def list_requests(lab: Lab) -> list[str]:
    """What the first node was asked for, in order, from its first job on."""
    heads = [unpack(transport.read_parts(m)["header"]) for m in lab.grid.sent if m.metadata.dst_node_id == 101]
    words = [head["job"]["kind"] if head["what"] == "job" else head["what"] for head in heads]
    return words[words.index("train") :]


def is_first_job(message: Message) -> bool:
    metadata = message.metadata
    return (metadata.message_type, metadata.dst_node_id, metadata.group_id.split()[0]) == ("train", 101, "1")


def is_same_without_failures(base: ff.Run, run: ff.Run) -> bool:
    return have_same_state(base, run) and not any(m["failures"] for m in run.metrics)


def test_lost_answers_are_asked_for_again(tmp_path: Path) -> None:
    """The node does its job again from what it remembered before, so that nothing is another than without the loss."""
    times = 2
    lab, base = fleet(tmp_path)
    left = [times]

    def twist(message: Message, reply: Message) -> Message | None:
        lost = is_first_job(message) and left[0] > 0
        left[0] -= lost
        return None if lost else reply

    lab.grid.twist = twist
    run = lab.serve(deadline_s=60.0)
    assert is_same_without_failures(base, run) and run.metrics[0]["bytes_up"] == base.metrics[0]["bytes_up"]
    assert list_requests(lab)[: 2 * times + 1] == ["train", "hello"] * times + ["train"]
    assert sum("node-0" in line and "again" in line for line in lab.lines) == times


def test_a_late_answer_to_a_lost_job_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor kept: at the end no answer waits in memory."""
    lab, base = fleet(tmp_path)
    waiting: list[int] = []
    close = transport.Transport.close
    monkeypatch.setattr(transport.Transport, "close", lambda self: (waiting.append(self._waiting_bytes), close(self)))
    late: list[tuple[str, Message]] = []

    def twist(message: Message, reply: Message) -> Message | None:
        if is_first_job(message) and not late:
            late.append((message.metadata.message_id, reply))
            return None
        if is_first_job(message):
            lab.grid.replies.update(late)
        return reply

    lab.grid.twist = twist
    assert is_same_without_failures(base, lab.serve(deadline_s=60.0))
    assert set(waiting) == {0}


def at_work(lab: Lab, seconds: float) -> Callable[[], int]:
    """Have the first node take so long for its first job, and Flower drop what else it is asked."""
    until: list[float] = []

    def twist(message: Message, reply: Message) -> Message | None:
        if is_first_job(message) and not until:
            until.append(time.monotonic() + seconds)
            answer = {message.metadata.message_id: reply}
            threading.Timer(seconds, lab.grid.replies.update, (answer,)).start()
            return None
        if message.metadata.dst_node_id == 101 and until and time.monotonic() < until[0]:
            return Message(Error(3, "expired"), reply_to=message)
        return reply

    lab.grid.twist = twist
    return lambda: sum(map(is_first_job, lab.grid.sent))


def test_a_busy_node_gets_its_job_once(tmp_path: Path) -> None:
    """Each question lasts until the next one, so that at most one waits for it."""
    lab, base = fleet(tmp_path)
    jobs = at_work(lab, 3.5)
    run = lab.serve(deadline_s=60.0)
    assert is_same_without_failures(base, run) and jobs() == 1
    lasting = [m.metadata.ttl for m in lab.grid.sent if m.metadata.dst_node_id == 101 and m.metadata.ttl < 30]
    assert len(lasting) >= 3 and lasting == [0.2 * 2**i for i in range(len(lasting))]
    assert list_requests(lab)[: len(lasting) + 1] == ["train", *["hello"] * len(lasting)]


def test_an_answer_that_is_just_coming_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply is there, and its content takes a while."""
    monkeypatch.setattr(transport, "_LABEL_BYTES", -1)  # small answers have no content
    lab, base = fleet(tmp_path)

    def twist(message: Message, reply: Message) -> Message:
        if is_first_job(message):
            lab.grid.late.add(message.metadata.message_id)
            threading.Timer(2.0, lab.grid.late.clear).start()
        return reply

    lab.grid.twist = twist
    run = lab.serve(deadline_s=60.0)
    assert is_same_without_failures(base, run) and sum(map(is_first_job, lab.grid.sent)) == 1
    assert "hello" in list_requests(lab)  # it has said meanwhile that it has nothing to do


@pytest.mark.parametrize("error", [None, RuntimeError("the SuperLink is another one")])
def test_messages_that_were_sent_in_part_are_sent_whole(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the SuperLink was started anew between a message and its content."""
    monkeypatch.setattr(transport, "_PUSH_AGAIN_S", 0.01)
    monkeypatch.setattr(transport, "_LABEL_BYTES", -1)  # as where headers are large
    lab, base = fleet(tmp_path)
    push, tries = lab.grid.PushObject, list[str]()

    def pushing(request: Any) -> Any:
        tries.append(request.object_id)
        if len(tries) != 36:  # among the objects of the first jobs
            return push(request)
        if error is not None:
            raise error
        return SimpleNamespace(stored=False)

    lab.grid.PushObject = pushing  # type: ignore[method-assign]
    assert is_same_without_failures(base, lab.serve())
    assert tries.count(tries[35]) == 2 and len(tries) == len(set(tries)) + 1, "the parts that have arrived count"
    assert sum(map(is_first_job, lab.grid.sent)) == 1
