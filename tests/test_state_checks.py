"""What the memories in a checkpoint may hold, what a round may leave, and the clients and counts that its reports name.

The runs whose checkpoints are damaged are in `test_checkpoints`, and rounds that are rolled back in `test_standing`.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import raises
from tiny import tiny_federation

from fleetfit.anatomy import State, build_module
from fleetfit.core import Server
from fleetfit.rounds import start
from fleetfit.rounds.report import explain_empty_rounds, format_largest_updates, format_rollback
from fleetfit.rounds.restore import check_checkpoint
from fleetfit.rounds.rollback import find_invalid_state
from fleetfit.runs.checkpoints import CheckpointError
from fleetfit.submodel import extract, pack_state

FEDERATION, _ = tiny_federation({"name": "scalefl"})
LAYOUT, STATE = FEDERATION.problem.layout, dict(start(FEDERATION).state)
SMALL = FEDERATION.levels[0].submodel
PACKED = pack_state(SMALL, dict(extract(LAYOUT, STATE, SMALL)))
BLOCK = {
    f"block:{name.removeprefix('blocks.1.')}": torch.zeros(tuple(parameter.shape))
    for name, parameter in build_module(FEDERATION.problem.architecture, LAYOUT.full_sizes, (2,)).named_parameters()
    if name.startswith("blocks.1.")
}
SCORES = {"curiosity": torch.ones(3, 6).double(), "resources": torch.ones(3, 6).double()}
ROWS = {"clients": torch.tensor([0, 4]), "directions": torch.ones(2, 3, 8)}
LOSSES = {"exits": [1, 3], "losses": torch.tensor([0.5, 0.25])}


def check(memory: Any = None, clients: Any = None, statistics: Any = None, state: State = STATE, **method: Any) -> None:
    server = {"state": state, "round": 3, "memory": memory}
    federation = replace(FEDERATION, method_spec=method) if method else FEDERATION
    check_checkpoint(federation, {"server": server, "clients": clients or {}, "statistics": statistics}, 3)


METHODS: dict[str, Any] = {
    "movement": {"name": "inclusivefl"}, "adaptivefl": {"name": "adaptivefl"},
    "exit_losses": {"name": "reefl", "estimate": "kept"},
    "choice": {"name": "scalefl", "cohort": {"name": "loss"}},
    "directions": {"name": "scalefl", "cohort": {"name": "diversity"}},
}  # fmt: skip
"""The method that has an entry of a memory, by the entry's name."""


def check_as_its_own(memory: Any, clients: Any = None) -> None:
    """Check a memory as one of the method that has such entries."""
    name = next(iter(memory))
    choice = memory.get("choice")
    name = "directions" if isinstance(choice, dict) and choice.keys() & {"clients", "directions"} else name
    check(None if clients else memory, clients, **METHODS.get(name, {}))


RIGHT: dict[str, Any] = {
    "movements of a block": {"movement": {"2": BLOCK}},
    "scores": {"adaptivefl": SCORES},
    "numbers by client": {"choice": {"loss": torch.tensor([0.5, float("inf")])}},
    "directions": {"choice": ROWS},
    "a state and its sub-model": {"h": PACKED},
    "states in a list": {"h": [PACKED, {"deep": (PACKED,)}]},
    "a state of the whole model": {"velocity": STATE},
    "losses of exits": {"exit_losses": LOSSES},
    "what nobody knows": {"mine": [1, "two", None]},
}


@pytest.mark.parametrize("what", RIGHT)
def test_memories_that_fit_are_accepted(what: str) -> None:
    check_as_its_own(RIGHT[what])
    if what not in ("movements of a block", "scores", "numbers by client", "directions"):
        check(clients={"5": {"version": 2, "memory": RIGHT[what]}})


def test_versions_are_no_memories() -> None:
    """The clients of a real fleet store their memories; the checkpoint has their versions, one of them beyond it."""
    check(clients={"versions": {"0": 2, "7": 9}})


def test_statistics_that_fit_are_accepted() -> None:
    """Level 1 has one block with one batch norm, of 6 of the 12 channels; nobody measured level 2."""
    moments = {"blocks.0.1.mean": torch.zeros(6), "blocks.0.1.var": torch.ones(6)}
    check(statistics={0: moments, 1: {}})
    with raises(CheckpointError, "statistics/0/blocks.0.1.var"):
        check(statistics={0: {**moments, "blocks.0.1.var": -torch.ones(6)}})


def test_prefixed_states_are_levels_or_blocks() -> None:
    """The first level's own model, and a copy of block 2."""
    small = {f"level1/{name}": tensor for name, tensor in PACKED["state"].items()}
    block = {f"exit2/{name}": tensor for name, tensor in STATE.items() if name.startswith("blocks.1.")}
    own = {**STATE, **small, **block}
    check(state=own)
    for name in ("stem.bias", "level1/stem.bias", "exit2/blocks.1.0.bias"):
        with raises(CheckpointError, name):
            check(state={key: tensor for key, tensor in own.items() if key != name})
        with raises(CheckpointError, name, (1,)):
            check(state={**own, name: torch.zeros(1)})
    for name in ("level0/stem.bias", "level4/stem.bias", "level1/heads.3.bias", "exit2/stem.bias", "exit2/odd", "odd"):
        with raises(CheckpointError, name.removesuffix("stem.bias")):
            check(state={**own, name: STATE["stem.bias"]})


def change(state: dict[str, Any], **tensors: Any) -> dict[str, Any]:
    return {**state, **tensors}


WRONG: dict[str, tuple[Any, str]] = {
    "movements as a number": ({"movement": 3}, "server/memory"),
    "movements of no block": ({"movement": {"9": BLOCK}}, "server/memory"),
    "movements without a depth": ({"movement": {"deep": BLOCK}}, "server/memory"),
    "a short movement": ({"movement": {"2": change(BLOCK, **{"block:0.bias": torch.ones(1)})}}, "0.bias"),
    "a number as scores": ({"adaptivefl": 3}, "server/memory"),
    "flat scores": ({"adaptivefl": change(SCORES, curiosity=torch.ones(3).double())}, "server/memory"),
    "infinite scores": ({"adaptivefl": change(SCORES, curiosity=SCORES["curiosity"] / 0)}, "adaptivefl/curiosity"),
    "scores of another pool": ({"adaptivefl": change(SCORES, resources=torch.ones(5, 5).double())}, "server/memory"),
    "scores of fewer clients": ({"adaptivefl": change(SCORES, resources=torch.ones(3, 5).double())}, "[3, 5]"),
    "choice as a number": ({"choice": 3}, "server/memory"),
    "a matrix by client": ({"choice": {"loss": torch.ones(2, 2)}}, "server/memory"),
    "no number of a client": ({"choice": {"loss": torch.tensor([1.0, float("nan")])}}, "server/memory"),
    "text of a client": ({"choice": {"loss": "much"}}, "server/memory"),
    "clients without directions": ({"choice": {"clients": ROWS["clients"]}}, "server/memory"),
    "a direction too few": ({"choice": change(ROWS, directions=torch.ones(1, 3, 8))}, "server/memory"),
    "clients in a table": ({"choice": change(ROWS, clients=torch.tensor([[0], [4]]))}, "server/memory"),
    "half a client": ({"choice": change(ROWS, clients=torch.tensor([0.0, 0.5]))}, "server/memory"),
    "clients below 0": ({"choice": change(ROWS, clients=torch.tensor([0, -1]))}, "server/memory"),
    "infinite directions": ({"choice": change(ROWS, directions=ROWS["directions"] / 0)}, "server/memory"),
    "a short tensor": ({"velocity": change(STATE, **{"stem.bias": torch.ones(1)})}, "velocity/stem.bias"),
    "exits as text": ({"a": {"h": change(PACKED, exits="1")}}, "server/memory/a/h"),
    "exits of another model": ({"h": change(PACKED, exits=[4])}, "server/memory/h"),
    "exits twice": ({"h": [change(PACKED, exits=[1, 1])]}, "server/memory/h/0"),
    "channels of another model": ({"h": change(PACKED, channels={"a": [0, 99]})}, "server/memory/h"),
    "channels as a list": ({"h": change(PACKED, channels=[1])}, "server/memory/h"),
    "a state of other exits": ({"h": change(PACKED, exits=[1, 2])}, "server/memory/h/state/"),
    "a loss too few": ({"exit_losses": change(LOSSES, losses=torch.ones(1))}, "server/memory: "),
    "a loss that is no number": (
        {"exit_losses": change(LOSSES, losses=torch.full((2,), torch.nan))},
        "server/memory: ",
    ),
    "losses of no exits": ({"exit_losses": change(LOSSES, exits=[1, 7])}, "server/memory: "),
}


@pytest.mark.parametrize("what", WRONG)
def test_memories_that_do_not_fit_are_named(what: str) -> None:
    memory, path = WRONG[what]
    with raises(CheckpointError, path):
        check_as_its_own(memory)
    if path.startswith(("server/memory/h", "server/memory: ")):
        with raises(CheckpointError, path.replace("server", "clients/5")):
            check_as_its_own(memory, clients={"5": {"version": 2, "memory": memory}})


# ---- after a round -------------------------------------------------------------------------------------------------

INF = float("inf")


@pytest.mark.parametrize(
    ("before", "after", "invalid"),
    [
        ({"table": torch.tensor([1.0, INF])}, {"table": torch.tensor([2.0, INF])}, ""),
        ({"table": torch.tensor([1.0, INF])}, {"table": torch.tensor([INF, 2.0])}, "table"),
        ({"table": torch.tensor([1.0])}, {"table": torch.tensor([1.0, INF])}, ""),  # it grew with the fleet
        ({"table": torch.tensor([1.0, 2.0])}, {"table": torch.tensor([INF])}, "table"),
        ({"table": torch.tensor([1.0])}, {"table": torch.tensor([[INF]])}, ""),
        ({}, {"table": torch.tensor([INF])}, ""),
        ({}, {"velocity": {"stem.bias": torch.tensor([INF])}}, "velocity/stem.bias"),
        ({"deep": [1.0, 2.0]}, {"deep": [1.0, INF]}, "deep/1"),
        ({"deep": [1.0]}, {"deep": (1.0, INF)}, ""),
        ({"deep": {3: 1.0}}, {"deep": {3: INF}}, "deep/3"),
        (None, {"text": "inf", "count": 3, "nothing": None}, ""),
    ],
)
def test_a_memory_may_not_lose_a_number(before: Any, after: Any, invalid: str) -> None:
    reason = find_invalid_state(Server(STATE, memory=before), Server(STATE, memory=after))
    assert (reason is None) == (not invalid), reason
    assert f'"{invalid}"' in (reason or '""')


def test_the_largest_invalid_tensor_is_named() -> None:
    """One whose square is not finite is named only where none is infinite itself."""
    large, infinite = torch.full((8,), 1e30), torch.full((4,), INF)
    state = {**STATE, "stem.bias": large}
    assert '"stem.bias"' in str(find_invalid_state(Server(STATE), Server(state)))
    state = {**state, "heads.1.bias": infinite, "none": torch.zeros(0)}
    assert '"heads.1.bias"' in str(find_invalid_state(Server(STATE), Server(state)))


# ---- reports -------------------------------------------------------------------------------------------------------


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def fail(*reasons: str) -> dict[str, Any]:
    return {"failures": [{"reason": reason} for reason in reasons]}


def undo(reason: str, *reported: tuple[int | None, float | None]) -> dict[str, Any]:
    entries = [{"client": client, "level": 1, "norm": norm} for client, norm in reported]
    return {"undone": {"reason": reason, "reported": entries}, "failures": []}


@pytest.mark.parametrize("in_a_row", [True, False])
def test_frequent_reasons_are_named(in_a_row: bool) -> None:
    """Five reasons, of which two are beyond the three that a sentence names: 4 rounds, 3 times, 2 times, once."""
    reports = [fail("asleep", "far"), fail("asleep", "far"), fail("asleep", "dull"), fail("lost", "odd")]
    text = explain_empty_rounds(reports, in_a_row)
    assert numbers(text) == [4, 3, 2, 2] if in_a_row else [3, 2, 2]
    assert text.index("asleep") < text.index("far") < text.index("dull") and not re.search("lost|odd", text)
    assert numbers(explain_empty_rounds(reports[:3], in_a_row)) == [3, 3, 2] if in_a_row else [3, 2]


def test_the_last_rollback_without_updates_is_quoted() -> None:
    text = explain_empty_rounds([fail("asleep"), undo("early"), undo("late.")], in_a_row=True)
    assert "late" in text and "early" not in text and ".." not in text and numbers(text) == [3]
    assert "late" not in explain_empty_rounds([fail("asleep")], in_a_row=True)


def test_private_rollbacks_name_no_client() -> None:
    reports = [{**undo("early", (7, 1.0)), "privacy": {}}]
    assert numbers(explain_empty_rounds(reports, in_a_row=True)) == [1]
    assert not re.search(r"\d|early", explain_empty_rounds(reports, in_a_row=False))


def test_clients_with_the_largest_updates_are_named() -> None:
    """Client 7: at most 5.5, in two of three rounds; 2: 4, in one; 9: without a norm, in two, so before 8 in one."""
    reports = [undo("early", (7, 5.5), (9, None)), undo("late", (7, 1.0), (2, 4.0), (9, None)), undo("last", (8, 0.0))]
    records = [report["undone"] for report in reports]
    assert numbers(format_largest_updates(records)) == [7, 5.5, 2, 3, 2, 4, 1, 3, 9, 0, 2, 3]
    assert not numbers(format_largest_updates([undo("early")["undone"]]))
    for in_a_row in (True, False):
        text = explain_empty_rounds(reports, in_a_row)
        assert numbers(text)[0] == 3 and numbers(text)[-12:] == numbers(format_largest_updates(records))
        assert "last" in text and "early" not in text
    assert numbers(explain_empty_rounds([fail("asleep"), *reports], in_a_row=True))[:2] == [3, 4]


def test_a_rollback_names_its_largest_updates() -> None:
    """Clients by name where there is one; of four updates the first three, without those that have no norm."""
    record = undo("odd", (1, 12.0), (None, 7.5), (5, 3.25), (0, 1.0))["undone"]
    text = format_rollback(record, ["ada", "bob"])
    assert "odd" in text and "bob" in text and "ada" not in text and numbers(text) == [12, 7.5, 5, 3.25]
    assert numbers(format_rollback(record)) == [1, 12, 7.5, 5, 3.25]
    assert not numbers(format_rollback(undo("odd", (1, None))["undone"]))
