"""The hook `filter_updates`: who counts in a round is judged on all its updates, before a client keeps its memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import Expected, Watched, raises
from support.attacks import TINY
from support.bits import assert_same_bits, has_same_bits
from support.engines import LOCAL, make_fleet
from tiny import plain, tiny_federation

from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Federation, Server, Update
from fleetfit.engines.local import InProcess as LocalEngine, local as local_engine
from fleetfit.engines.processes import processes
from fleetfit.errors import ConfigError
from fleetfit.hooks import CoverageMean, Method, build
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.submodel import concat_state

Updates = Sequence[Update]
Receive = Callable[[Federation, Server, Updates], Iterable[Update]]
HERE = "test_filter_updates"


def without(*clients: int) -> Receive:
    def receive(federation: Federation, server: Server, updates: Updates) -> Iterable[Update]:
        return [update for update in list(updates) if update.client not in clients]

    return receive


def without_four(federation: Federation, server: Server, updates: Updates) -> Iterable[Update]:
    return without(4)(federation, server, updates)


def one_by_one(federation: Federation, server: Server, updates: Updates) -> Iterable[Update]:
    yield from updates


def halved(federation: Federation, server: Server, updates: Updates) -> Iterable[Update]:
    """Move half of what each client moved."""
    for update in updates:
        sent = federation.method.dispatch(federation, server, update.client, update.dispatched)
        yield replace(update, state={name: (t + sent[name]) / 2 for name, t in update.state.items()})


def leaving_four_out() -> Method:
    return Method(filter_updates=without_four)


def halving() -> Method:
    return Method(filter_updates=halved)


def receiving(federation: Federation, receive: Receive) -> Federation:
    """Set the hook alone; the jobs, and so their bytes, stay the same."""
    return replace(federation, method=replace(federation.method, filter_updates=receive))  # type: ignore[type-var]


def chosen(*clients: int) -> Callable[..., list[int]]:
    return lambda federation, server, rng: list(clients)


@pytest.mark.parametrize("receive", [one_by_one, without(), lambda f, s, updates: iter(list(updates))])
def test_receive_all_keeps_the_bits(receive: Receive) -> None:
    plain, simulation = make_fleet("scalefl", dropout=0.2)
    *_, expected = run(plain, local_engine(simulation), Settings(2, LOCAL), start(plain))
    federation = receiving(plain, receive)
    *_, rounds = run(federation, local_engine(simulation), Settings(2, LOCAL), start(federation))
    assert_same_bits(expected.server.state, rounds.server.state)
    keys = expected.report.keys() - {"seconds", "seconds_of"}
    assert {k: expected.report[k] for k in keys} == {k: rounds.report[k] for k in keys}


def test_a_left_out_update_is_a_failure_without_memory() -> None:
    """Clients 2 and 4, of levels 3 and 2; what was sent to them and what they computed is counted all the same."""
    everybody, simulation = make_fleet("plugin_method:counting")
    federation, engine = receiving(everybody, without(2, 4)), local_engine(simulation)
    server, report = run_round(federation, engine, Settings(1, LOCAL), start(federation))
    assert [(f["client"], f["level"]) for f in report["failures"]] == [(2, 3), (4, 2)]
    assert all("(filter_updates)" in f["reason"] for f in report["failures"])
    assert report["train"]["clients"] == 4 and not any(f["absent"] for f in report["failures"])
    assert set(engine.dump_memories()) == {"0", "1", "3", "5"}
    assert server.memory["updates"] == 4
    _, full = run_round(everybody, local_engine(simulation), Settings(1, LOCAL), start(everybody))
    for key in ("bytes_down", "bytes_up", "multiply_adds"):
        assert report[key] == full[key]


def test_left_out_updates_fail_their_job() -> None:
    """A method that observes the round finds the job of each report, of those that are left out too."""

    def observe(federation: Federation, server: Server, aggregate: Any, reports: Any) -> Server:
        return replace(server, memory=[(report.index, report.client, isinstance(report, Update)) for report in reports])

    hooks = {"filter_updates": without(2, 4), "update_server_memory": observe}
    federation, simulation = make_fleet("fedavg", hooks=hooks)
    server, _ = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert [index for index, _, _ in server.memory] == list(range(6))
    assert {(client, counts) for _, client, counts in server.memory} == {(c, c not in (2, 4)) for c in range(6)}


def test_left_out_clients_are_counted_by_honesty() -> None:
    """Clients 0 and 3 are of level 1, 1 and 4 of level 2, 2 and 5 of level 3; 2 and 4 are hostile, 2 and 3 left out."""
    federation, simulation = make_fleet("fedavg", hooks={"filter_updates": without(2, 3)})
    settings = Settings(1, LOCAL, hostile=frozenset({2, 4}))
    _, report = run_round(federation, local_engine(simulation), settings, start(federation))
    assert report["received"] == {
        "sent": {"hostile": 2, "honest": {"1": 2, "2": 1, "3": 1}},
        "left_out": {"hostile": 1, "honest": {"1": 1}},
    }


def test_honest_clients_are_counted_by_trained_level() -> None:
    """AdaptiveFL sends clients more than they afford, and they send back less."""
    sent: list[Counter[str]] = []
    shrunk = 0

    def receive(federation: Federation, server: Server, updates: Updates) -> Iterable[Update]:
        nonlocal shrunk
        assembly = list(updates)
        shrunk += sum(update.submodel != update.dispatched for update in assembly)
        sent.append(Counter(str(federation.level_index(update.submodel) + 1) for update in assembly))
        return assembly[1:]

    assembly = assemble(load_experiment({**TINY, "method": {"name": "adaptivefl"}, "local": {"epochs": 1}}))
    federation = receiving(assembly.federation, receive)
    server, engine = start(federation), assembly.engine()
    for _ in range(3):
        server, report = run_round(federation, engine, assembly.settings, server)
        assert report["received"]["sent"]["honest"] == sent[-1]
        assert sum(report["received"]["left_out"]["honest"].values()) == 1
    assert shrunk


def test_the_mean_leaves_updates_out() -> None:
    """Weights by count of one level: the mean of clients 2 and 5 without 5 is what 2 sent."""
    sent: dict[int | None, Update] = {}

    def receive(federation: Federation, server: Server, updates: Updates) -> Iterable[Update]:
        for update in updates:
            sent[update.client] = update
            if update.client != 5:
                yield update

    federation, simulation = make_fleet("scalefl", choose=chosen(2, 5), hooks={"filter_updates": receive})
    server, _ = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert torch.equal(concat_state(server.state), concat_state(sent[2].state))
    assert not torch.equal(concat_state(sent[5].state), concat_state(sent[2].state))


def test_changed_updates_are_merged_as_they_are_now() -> None:
    """Halving every movement halves that of the mean, up to rounding."""
    moved = []
    for hooks in ({}, {"filter_updates": halved}):
        federation, simulation = make_fleet("scalefl", hooks=hooks)
        before = start(federation)
        after, _ = run_round(federation, local_engine(simulation), Settings(1, LOCAL), before)
        moved.append(concat_state(after.state) - concat_state(before.state))
    assert float(moved[0].abs().max()) > 1e-3
    torch.testing.assert_close(moved[1], moved[0] / 2, atol=1e-6, rtol=1e-4)


def test_notes_and_weights_follow_receive() -> None:
    """Whoever is left out is neither noted nor weighed, and a changed update is noted as it is now."""
    records, weighed = [], []

    def receive(federation: Federation, server: Server, updates: Updates) -> Iterable[Update]:
        return (replace(u, num_examples=1) for u in updates if u.client in (0, 1, 2))

    def note(federation: Federation, server: Server, update: Update) -> dict[str, Any]:
        records.append((update.client, update.num_examples))
        return {}

    def weight(update: Update) -> float:
        weighed.append((update.client, update.num_examples))
        return 1.0

    federation, simulation = make_fleet("fedavg", hooks={"filter_updates": receive, "annotate": note, "weigh": weight})
    _, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert sorted(records) == sorted(weighed) == [(0, 1), (1, 1), (2, 1)]
    assert report["train"]["samples"] == 3


def test_receive_sets_the_order_of_aggregation() -> None:
    merged: list[int | None] = []
    watched = Watched(lambda update: merged.append(update.client))

    def observe(federation: Federation, server: Server, aggregate: Any, reports: Any) -> Server:
        return replace(server, memory=[report.index for report in reports])

    hooks = {
        "filter_updates": lambda f, s, updates: reversed(updates),
        "make_aggregator": watched,
        "update_server_memory": observe,
    }
    federation, simulation = make_fleet("fedavg", hooks=hooks)
    server, _ = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert merged == [3, 0, 4, 1, 5, 2] and server.memory == list(range(6))


def test_receive_leaves_updates_out() -> None:
    federation, simulation = make_fleet("fedavg", hooks={"filter_updates": lambda f, s, updates: updates[:2]})
    _, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert report["train"]["clients"] == 2
    assert [failure["client"] for failure in report["failures"]] == [1, 4, 0, 3]


def test_leaving_out_all_is_an_empty_round() -> None:
    federation, simulation = make_fleet("fedavg", hooks={"filter_updates": lambda f, s, updates: []})
    before = start(federation)
    after, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), before)
    assert has_same_bits(before.state, after.state) and after.round == 1
    assert report["train"]["clients"] == 0 and len(report["failures"]) == 6


def test_errors_of_receive_undo_the_round() -> None:
    """At once, or in the middle: nothing moves, nobody remembers, and the report says who took part."""

    def at_once(federation: Federation, server: Server, updates: Updates) -> Iterable[Update]:
        raise ZeroDivisionError("no median")

    def midway(federation: Federation, server: Server, updates: Updates) -> Iterable[Update]:
        yield updates[0]
        raise ZeroDivisionError("no median")

    for receive in (at_once, midway):
        federation, simulation = make_fleet("plugin_method:counting", hooks={"filter_updates": receive})
        engine, before = local_engine(simulation), start(federation)
        after, report = run_round(federation, engine, Settings(1, LOCAL), before)
        reason = report["undone"]["reason"]
        assert "(filter_updates)" in reason and "ZeroDivisionError: no median" in reason
        assert len(report["undone"]["reported"]) == 6 and all(one["norm"] > 0 for one in report["undone"]["reported"])
        assert has_same_bits(before.state, after.state) and not engine.dump_memories() and not report["failures"]


@pytest.mark.parametrize("receive", [None, one_by_one], ids=["streaming", "with filter_updates"])
def test_aggregator_errors_are_not_receives(receive: Receive | None) -> None:
    """The second update is a failure; the others count."""
    added: list[int | None] = []

    def fail(update: Update) -> None:
        added.append(update.client)
        if len(added) == 2:
            raise ZeroDivisionError("no mean")

    hooks = {"make_aggregator": Watched(fail), **({} if receive is None else {"filter_updates": receive})}
    federation, simulation = make_fleet("fedavg", hooks=hooks)
    _, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    (failure,) = report["failures"]
    assert "undone" not in report and report["train"]["clients"] == 5 and len(added) == 6
    assert failure["client"] == added[1] and "make_aggregator" in failure["reason"] and "no mean" in failure["reason"]


@pytest.mark.parametrize("step", ["made", "asked for its result"])
def test_aggregator_errors_roll_back(step: str) -> None:
    def make(federation: Federation, server: Server) -> Any:
        if step == "made":
            raise ZeroDivisionError("no mean")
        return Unfinished(federation, server)

    class Unfinished(CoverageMean):
        def result(self) -> Any:
            raise ZeroDivisionError("no mean")

    federation, simulation = make_fleet("fedavg", hooks={"make_aggregator": make})
    before = start(federation)
    after, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), before)
    assert "(make_aggregator)" in report["undone"]["reason"] and "no mean" in report["undone"]["reason"]
    assert len(report["undone"]["reported"]) == 6 and has_same_bits(before.state, after.state)


@pytest.mark.parametrize(
    ("give", "expected"),
    [
        (lambda updates: [3], Expected(key="filter_updates")),
        (lambda updates: [None, *updates], Expected(key="filter_updates")),
        (lambda updates: [u for u in list(updates) for _ in range(2)], Expected(2, key="filter_updates")),
        (lambda updates: [replace(u, index=9) for u in updates], Expected(2, 9, key="filter_updates")),
        (lambda updates: [replace(u, client=0) for u in updates], Expected(0, key="filter_updates")),
    ],
    ids=["no update", "None", "twice", "unknown", "another client's"],
)
def test_foreign_updates_are_named(give: Callable[[Any], Any], expected: Expected) -> None:
    federation, simulation = make_fleet("fedavg", hooks={"filter_updates": lambda f, s, updates: give(updates)})
    with raises(ConfigError, expected):
        run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))


def test_two_parts_receive_one_after_the_other() -> None:
    """The method leaves client 4 out; the option halves what the others moved."""
    spec = {"name": f"{HERE}:leaving_four_out", "options": {f"{HERE}:halving": {}}}
    method = build(spec)
    seen = []
    federation, simulation = make_fleet("fedavg")
    federation = replace(
        federation, method=replace(method, choose_clients=federation.method.choose_clients, annotate=noting(seen))
    )
    _, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert [f["client"] for f in report["failures"]] == [4]
    once, simulation = make_fleet("fedavg", hooks={"filter_updates": without_four, "annotate": (first := noting([]))})
    run_round(once, local_engine(simulation), Settings(1, LOCAL), start(once))
    assert [c for c, _ in seen] == [c for c, _ in first.seen]
    assert all(half < whole for (_, half), (_, whole) in zip(seen, first.seen, strict=True))


class noting:  # a hook that keeps what it was given
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __call__(self, federation: Federation, server: Server, update: Update) -> dict[str, Any]:
        sent = federation.method.dispatch(federation, server, update.client, update.dispatched)
        self.seen.append((update.client, float((concat_state(update.state) - concat_state(sent)).norm())))
        return {}


def test_updates_stream_by_default() -> None:
    """Without `filter_updates`, the second update is computed when the first has been aggregated."""
    order: list[str] = []

    class Slow(LocalEngine):
        def run(self, jobs: Any) -> Any:
            for reply in super().run(jobs):
                order.append("computed")
                yield reply

    watched = Watched(lambda update: order.append("aggregated"))
    for hooks, expected in (
        ({"make_aggregator": watched}, ["computed", "aggregated"] * 6),
        ({"make_aggregator": watched, "filter_updates": one_by_one}, ["computed"] * 6 + ["aggregated"] * 6),
    ):
        order.clear()
        federation, simulation = make_fleet("fedavg", hooks=hooks)
        run_round(federation, Slow(simulation, torch.device("cpu"), 1), Settings(1, LOCAL), start(federation))
        assert order == expected


def test_workers_leave_out_with_the_same_bits() -> None:
    spec = {"name": "plugin_method:counting", "hooks": {"filter_updates": f"{HERE}:without_four"}}
    federation, simulation = tiny_federation(spec, dropout=0.2, cohort=6)
    ours, theirs = local_engine(simulation), processes(simulation, workers=2)
    try:
        *_, expected = run(federation, ours, Settings(3, plain(lr=0.1, batch_size=8)), start(federation))
        *_, rounds = run(federation, theirs, Settings(3, plain(lr=0.1, batch_size=8)), start(federation))
        assert_same_bits(expected.server.state, rounds.server.state)
        assert set(ours.dump_memories()) == set(theirs.dump_memories()) == {"0", "1", "2", "3", "5"}
    finally:
        theirs.close()
