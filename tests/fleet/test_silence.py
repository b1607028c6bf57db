"""What a fleet's messages show of a node that tells no budget: the size of what it has trained, and no more."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import fleetfit as ff

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Message
from local_fleet import CLIENTS, Lab, described
from own_terms import drop_head

from fleetfit.core import Update
from fleetfit.fleet import node as nodes_side, transport
from fleetfit.messages import load_job, load_reply, unpack

SILENT = {"name": "adaptivefl"}
# The tiny model's levels cost 0.21, 0.41 and 1 of it, and a node takes what costs up to 1.45 of its budget.


@pytest.fixture(autouse=True)
def fresh_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_side.get_node.cache_clear()


def recorded(folder: Path, budgets: list[float], **changes: Any) -> tuple[ff.Run, list[tuple[int, Any, Any, bytes]]]:
    """A run, and each of its messages: node, header, answer, the answer's bytes."""
    lab = Lab(folder, described(SILENT, evaluate={"every": 1}, **changes), budgets)
    messages: list[tuple[int, Any, Any, bytes]] = []

    def note(message: Message, reply: Message) -> Message:
        header, content = unpack(transport.read_parts(message)["header"]), transport.read_parts(reply)["answer"]
        messages.append((message.metadata.dst_node_id, header, unpack(content), drop_head(content)))
        return reply

    lab.grid.twist = note
    return lab.serve(), messages


def by_node(messages: list[tuple[int, Any, Any, bytes]]) -> dict[int, list[tuple[str, bytes]]]:
    """What each node was asked and answered, in its order; which node is ahead of another is a matter of threads."""
    answers = defaultdict(list)
    for node, header, _, content in messages:
        answers[node].append((header["what"], content))
    return answers


def test_messages_do_not_depend_on_a_nodes_budget(tmp_path: Path) -> None:
    """Budgets that admit the same models of the pool give the same bytes, tolerances included."""
    a, first = recorded(tmp_path / "a", [0.2, 0.9, 1.0, 0.6, 0.3])
    b, second = recorded(tmp_path / "b", [0.25, 0.75, 0.95, 0.4, 0.5])
    assert a.metrics[-1]["train"] == b.metrics[-1]["train"]
    assert by_node(first) == by_node(second)
    assert {header["what"] for _, header, _, _ in first} == {"hello", "setup", "job"}


def test_nodes_evaluate_only_levels_they_trained(tmp_path: Path) -> None:
    run, messages = recorded(tmp_path, [0.25, 0.5, 1.0, 0.5, 0.25], rounds=6)
    levels, trained, kinds = run.assembly.federation, defaultdict(set), set()
    for node, header, payload, _ in messages:
        if header["what"] == "hello":
            assert payload["hello"].keys() == {"name", "facts", "examples"}
        if header["what"] != "job":
            continue
        job = load_job({**header["job"], "state": {}, "statistics": {}}, levels.problem.layout)
        reply = load_reply(payload["reply"], levels.problem.layout)
        kinds.add(job.kind)
        if job.kind == "train":
            trained[node] |= {levels.level_index(reply.submodel)} if isinstance(reply, Update) else set()
        else:
            assert isinstance(reply, Update), "nobody declines what is no larger than what it has trained"
            assert levels.level_index(job.submodel) <= max(trained[node])  # an error where it has trained nothing
            assert not job.evaluation.own
    assert kinds == {"train", "evaluate", "statistics"}
    columns, levels_reached = (
        run.columns["static"],
        {node - 101: max(messages) for node, messages in trained.items() if messages},
    )
    assert columns["local_clients"] == len(levels_reached) == CLIENTS
    assert columns["per_client"]["global"].keys() == {str(c) for c, level in levels_reached.items() if level == 2}
    assert {name: entry["clients"] for name, entry in columns["levels"].items()} == {
        name: list(levels_reached.values()).count(i) for i, name in enumerate(("S1", "M1", "L1"))
    }


def test_a_node_does_not_reveal_which_model_it_affords(tmp_path: Path) -> None:
    lab = Lab(tmp_path, described(SILENT, rounds=1), [1.0] * CLIENTS)
    messages = []

    def note(message: Message, reply: Message) -> Message:
        messages.append((transport.read_parts(message), reply))
        return reply

    lab.grid.twist = note
    lab.serve()
    parts = next(p for p, _ in messages if unpack(p["header"]).get("job", {}).get("kind") == "evaluate")
    header = unpack(parts["header"])
    header["job"]["evaluation"]["own"] = True
    from fleetfit.fleet.protocol import pack_message

    answer = unpack(nodes_side.answer(str(lab.configs[0]), {**parts, "header": pack_message(header)}))
    assert answer.keys() & {"refused", "reply"} == {"refused"}
