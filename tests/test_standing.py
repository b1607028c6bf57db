"""Who counts the rounds, what spoils one, and that nothing which one reply holds ends or spoils a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import raises
from support.bits import assert_same_bits, has_same_bits
from support.engines import LOCAL, MeddlingEngine, make_fleet, shorten_client
from tiny import plain, tiny_federation

from fleetfit.aggregate import Aggregate, Mean, apply_mean
from fleetfit.api.progress import RoundProgress
from fleetfit.config import load_experiment
from fleetfit.core import Failure, Federation, Server, Update
from fleetfit.engines.local import local as local_engine
from fleetfit.engines.processes import processes
from fleetfit.errors import ConfigError, NoUsableUpdates
from fleetfit.evaluation.statistics import compute_moments
from fleetfit.hooks import CoverageMean, take_mean
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.rounds.report import make_rollback_report
from fleetfit.submodel import FlatState, concat_state

Reports = Sequence[Update | Failure]


# ---- the core counts -------------------------------------------------


def keeps_the_round(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    return Server(apply_mean(server.state, aggregate), server.round, server.memory)


def goes_back(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    return replace(take_mean(federation, server, aggregate, reports), round=-7)


def counts_itself(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    return replace(take_mean(federation, server, aggregate, reports), round=server.round + 1)


@pytest.mark.parametrize(
    ("hook", "step"), [("step", keeps_the_round), ("step", goes_back), ("update_server_memory", counts_itself)]
)
def test_the_core_advances_the_round(step: Callable[..., Server], hook: str) -> None:
    """Whatever a hook makes of it; and the result is that of a method that leaves it alone."""
    federation, simulation = make_fleet("fedavg", hooks={hook: step})
    done = [r.server.round for r in run(federation, local_engine(simulation), Settings(3, LOCAL), start(federation))]
    assert done == [1, 2, 3]
    plain, simulation = make_fleet("fedavg")
    *_, expected = run(plain, local_engine(simulation), Settings(3, LOCAL), start(plain))
    *_, rounds = run(federation, local_engine(simulation), Settings(3, LOCAL), start(federation))
    assert_same_bits(rounds.server.state, expected.server.state)


@pytest.mark.parametrize("hook", ["step", "update_server_memory"])
def test_a_hook_that_returns_no_server_is_named(hook: str) -> None:
    federation, simulation = make_fleet("fedavg", hooks={hook: lambda *arguments: None})
    with raises(ConfigError, key=hook):
        run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))


# ---- a round that would spoil the state -------------------------------------------------


def spoiling(value: float, where: str = "state", rounds: Sequence[int] = (1,)) -> Callable[..., Server]:
    """A step that leaves a number where none should be, in some rounds; counts the updates in the memory."""

    def step(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
        after = take_mean(federation, server, aggregate, reports)
        seen = (server.memory or {"n": 0})["n"] + len(reports)
        now = server.round in rounds
        state = dict(after.state)
        if now and where == "state":
            state["stem.bias"] = state["stem.bias"] * 0 + value
        velocity = {"stem.bias": torch.full((8,), value if now and where == "moments" else 0.5)}
        table = torch.tensor([1.0, value if now and where == "table" else 2.0, float("inf")])
        return replace(after, state=state, memory={"n": seen, "velocity": velocity, "table": table})

    return step


@pytest.mark.parametrize("where", ["state", "moments", "table"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38])
def test_an_invalid_state_rolls_the_round_back(where: str, value: float) -> None:
    """State, memory, what clients remember: as before; the third round goes on as if it were the second."""
    if where != "state" and value == -3e38:
        value = float("-inf")
    hooks = {"step": spoiling(value, where)}
    federation, simulation = make_fleet("plugin_method:counting", hooks=hooks)
    engine = local_engine(simulation)
    settings = Settings(3, LOCAL)
    first, second, third = run(federation, engine, settings, start(federation))
    assert "undone" not in first.report and "undone" not in third.report
    assert second.server.round == 2 and has_same_bits(second.server.state, first.server.state)
    assert second.server.memory is first.server.memory and third.server.memory["n"] == 12
    taken = second.report["undone"]
    assert sorted(one["client"] for one in taken["reported"]) == [0, 1, 2, 3, 4, 5]
    assert all(one["norm"] > 0 and one["level"] in (1, 2, 3) for one in taken["reported"])
    assert ("stem.bias" if where != "table" else "table") in taken["reason"] and "finite" in taken["reason"]
    assert second.report["train"] == {"loss": None, "clients": 0, "samples": 0, "by_level": {}}
    assert abs(second.report["bytes_up"] - first.report["bytes_up"]) < 100 < first.report["bytes_up"]
    memory = engine.dump_memories()
    assert {(k["version"], k["memory"]["rounds"]) for k in memory.values()} == {(2, 2)}  # of rounds 0 and 2


def test_tables_may_say_that_nothing_is_known() -> None:
    """Losses of clients that never reported stand as infinity; a table may grow with the fleet."""
    federation, simulation = tiny_federation({"name": "fedavg", "cohort": {"name": "loss"}})
    reports = [r.report for r in run(federation, local_engine(simulation), Settings(3, LOCAL), start(federation))]
    assert not any("undone" in report for report in reports)


@pytest.mark.parametrize("hook", ["make_aggregator", "step", "update_server_memory"])
def test_errors_of_hooks_undo_their_round(hook: str) -> None:
    def broken(federation: Federation, server: Server, *arguments: Any) -> Any:
        if server.round == (0 if hook != "update_server_memory" else 1):
            raise KeyError("teachers\x1b[2J")
        plain = {"make_aggregator": CoverageMean, "step": take_mean,
                 "update_server_memory": lambda *hook_arguments: hook_arguments[1]}  # fmt: skip
        return plain[hook](federation, server, *arguments)

    federation, simulation = make_fleet("plugin_method:counting", hooks={hook: broken})
    engine = local_engine(simulation)
    first, second = run(federation, engine, Settings(2, LOCAL), start(federation))
    reason = first.report["undone"]["reason"]
    assert "KeyError" in reason and "test_standing.py, line" in reason and "\x1b" not in reason
    assert len(first.report["undone"]["reported"]) == 6 and second.report["train"]["clients"] == 6
    assert_same_bits(first.server.state, start(federation).state)
    assert {k["version"] for k in engine.dump_memories().values()} == {1}


def test_a_rollback_reports_costs_and_no_training() -> None:
    federation, _ = make_fleet("fedavg")
    report = {"round": 1, "bytes_up": 7, "counts": {"teachers": {}}, "train": {"clients": 3, "loss": 0.5}}
    record = {"reason": "odd", "reported": []}
    rolled_back = make_rollback_report(federation, report, start(federation), LOCAL, record)
    nothing = {"loss": None, "clients": 0, "samples": 0, "by_level": {}}
    assert rolled_back == {"round": 1, "bytes_up": 7, "train": nothing, "undone": record}


def test_rollbacks_in_a_row_stop_the_run() -> None:
    """Client 4's update is the largest in each of them."""
    federation, simulation = make_fleet("fedavg", hooks={"step": spoiling(float("nan"), rounds=range(9))})

    def larger(i: int, reply: Update | Failure) -> Update | Failure:
        if reply.client != 4 or not isinstance(reply, Update):
            return reply
        return replace(reply, state={name: tensor + 1e15 for name, tensor in reply.state.items()})

    settings = Settings(9, LOCAL, max_empty=3)
    with raises(NoUsableUpdates, "stem.bias", "client 4", "3 of 3"):
        list(run(federation, MeddlingEngine(simulation, larger), settings, start(federation)))


def test_rollbacks_under_attack_do_not_stop_the_run() -> None:
    federation, simulation = make_fleet("fedavg", hooks={"step": spoiling(float("nan"), rounds=range(9))})
    settings = Settings(9, LOCAL, max_empty=3, hostile=frozenset({4}))
    left = list(run(federation, local_engine(simulation), settings, start(federation)))
    assert ["undone" in one.report for one in left] == [True] * 9
    assert_same_bits(left[-1].server.state, start(federation).state)


def test_rollbacks_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    federation, simulation = make_fleet("fedavg", hooks={"step": spoiling(float("nan"))})
    rounds = RoundProgress("", load_experiment({"rounds": 2}))
    for done in run(federation, local_engine(simulation), Settings(2, LOCAL), start(federation)):
        rounds(done.report)
    output = capsys.readouterr().out
    assert "Round 2" in output and '"stem.bias"' in output and "client" in output


def test_processes_undo_with_the_same_bits() -> None:
    """Momentum on the server reaches what float32 does not hold; memories of the undone rounds are not kept."""
    spec = {"name": "plugin_method:counting", "hooks": {"step": "test_standing:in_the_second"}}
    federation, simulation = tiny_federation(spec, dropout=0.2)
    ours, theirs = local_engine(simulation), processes(simulation, workers=2)
    try:
        expected = list(run(federation, ours, Settings(3, LOCAL), start(federation)))
        rounds = list(run(federation, theirs, Settings(3, LOCAL), start(federation)))
        assert "undone" in expected[1].report and has_same_bits(expected[-1].server.state, rounds[-1].server.state)
        versions = [{c: k["version"] for c, k in engine.dump_memories().items()} for engine in (ours, theirs)]
        assert versions[0] == versions[1] and 1 not in versions[0].values()
    finally:
        theirs.close()


def in_the_second(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    return spoiling(float("nan"))(federation, server, aggregate, reports)


# ---- one reply -------------------------------------------------


def absurd(value: float) -> Callable[[int, Update | Failure], Update | Failure]:
    def meddle(i: int, reply: Update | Failure) -> Update | Failure:
        if reply.client != 5 or not isinstance(reply, Update):
            return reply
        return replace(reply, state={name: tensor * 0 + value for name, tensor in reply.state.items()})

    return meddle


@pytest.mark.parametrize("value", [1e38, -3e38, 1e19])
def test_an_absurd_update_fails_alone(value: float) -> None:
    """Finite, but its square is not: every mean with it would be the end of the state."""
    federation, simulation = make_fleet("fedavg")
    reports = list(run(federation, MeddlingEngine(simulation, absurd(value)), Settings(3, LOCAL), start(federation)))
    for done in reports:
        assert [f["client"] for f in done.report["failures"]] == [5] and done.report["train"]["clients"] == 5
        assert "norm" in done.report["failures"][0]["reason"]
    assert float(concat_state(reports[-1].server.state).abs().max()) < 10


@pytest.mark.parametrize("hook", ["annotate", "weigh"])
def test_errors_of_annotate_and_weigh_fail_one_update(hook: str) -> None:
    def broken(*arguments: Any) -> Any:
        update = arguments[-1]
        if update.client == 5:
            raise ZeroDivisionError("of its metrics")
        return 28.0 if hook == "weigh" else {"seen": 1}

    federation, simulation = make_fleet("plugin_method:counting", hooks={hook: broken})
    engine = local_engine(simulation)
    _, report = run_round(federation, engine, Settings(1, LOCAL), start(federation))
    [failure] = report["failures"]
    assert failure["client"] == 5 and all(
        quoted in failure["reason"] for quoted in (hook, "ZeroDivisionError: of its metrics")
    )
    assert "test_standing.py" in failure["reason"] and report["train"]["clients"] == 5
    assert report["bytes_up"] > 0 and set(engine.dump_memories()) == {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf")])
def test_a_weight_that_is_none_is_that_updates_failure(weight: float) -> None:
    federation, simulation = make_fleet("fedavg", hooks={"weigh": lambda u: weight if u.client == 0 else 1.0})
    _, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert [f["client"] for f in report["failures"]] == [0] and "at least 0" in report["failures"][0]["reason"]


def test_a_memory_that_cannot_be_kept_ends_nothing() -> None:
    class Forgetful(MeddlingEngine):
        def commit_memory(self, update: Update) -> None:
            if update.client == 2:
                raise OSError("no space left on device")
            super().commit_memory(update)

    federation, simulation = make_fleet("plugin_method:counting")
    engine = Forgetful(simulation)
    _, report = run_round(federation, engine, Settings(1, LOCAL), start(federation))
    assert report["train"]["clients"] == 6
    assert [f["client"] for f in report["failures"]] == [2] and "OSError" in report["failures"][0]["reason"]
    assert "2" not in engine.dump_memories() and len(engine.dump_memories()) == 5


def test_a_statistics_reply_of_another_level_is_refused() -> None:
    """Its sums have other shapes than that level's, and adding them would raise an error."""
    federation, simulation = make_fleet("scalefl")

    def meddle(i: int, reply: Update | Failure) -> Update | Failure:
        moved = isinstance(reply, Update) and reply.state and reply.client == 5
        return replace(reply, level=0) if moved and reply.level else reply

    engine = MeddlingEngine(simulation, meddle)
    *_, last = run(federation, engine, Settings(1, LOCAL, evaluate_every=1), start(federation))
    refused = [f for f in last.report["evaluate"]["failures"] if "level is 0, of a job at level" in f["reason"]]
    assert {f["client"] for f in refused} == {5}


# ---- what no test told -------------------------------------------------


def test_the_reported_loss_is_weighted_by_samples() -> None:
    """Client 1 has 3 samples, the others 28: sum n_k l_k / sum n_k, which is not the mean of the losses."""
    federation, simulation = make_fleet("fedavg", norm=False)
    engine = MeddlingEngine(shorten_client(simulation, 1, 3))
    _, report = run_round(federation, engine, Settings(1, LOCAL), start(federation))
    updates = [r for r in engine.replies if isinstance(r, Update)]
    assert sorted(u.num_examples for u in updates) == [3, 28, 28, 28, 28, 28]
    weighted = sum(u.num_examples * u.metrics["loss"] for u in updates) / 143
    assert report["train"]["loss"] == pytest.approx(weighted, rel=1e-9)
    assert report["train"]["loss"] != pytest.approx(np.mean([u.metrics["loss"] for u in updates]), rel=1e-4)


@pytest.mark.parametrize("zero", [(5,), (0, 1, 2, 3, 4, 5)])
def test_an_update_of_weight_zero_moves_nothing(zero: tuple[int, ...]) -> None:
    """Also where it is alone: the element keeps its bits; and it is no failure."""
    weights = {"weigh": lambda update: 0.0 if update.client in zero else 28.0}
    federation, simulation = make_fleet("fedavg", hooks=weights)
    before, engine = start(federation), MeddlingEngine(simulation)
    after, report = run_round(federation, engine, Settings(1, LOCAL), before)
    assert not report["failures"] and report["train"]["clients"] == 6 and "undone" not in report
    if len(zero) == 6:
        assert_same_bits(after.state, before.state)
        return
    mean = Mean(federation.problem.layout)
    for reply in engine.replies:
        assert isinstance(reply, Update)
        if reply.client != 5:
            mean.add(reply.submodel, reply.state, 28.0, reply.untrained)
    expected = apply_mean(before.state, mean.result())
    assert all(torch.allclose(after.state[name], expected[name], rtol=0, atol=1e-7) for name in expected)


def test_a_variance_is_never_below_zero() -> None:
    """Four values of 1e8 + 1/3: the difference of two large numbers comes out at -2 or so."""
    value = 1e8 + 1 / 3
    sums = {"n.sum": torch.tensor([4 * value], dtype=torch.float64), "n.count": torch.tensor([4.0]).double(),
            "n.squares": torch.tensor([4 * value * value - 8], dtype=torch.float64)}  # fmt: skip
    moments = compute_moments(sums)
    assert moments["n.var"].tolist() == [0.0] and moments["n.mean"].tolist() == [pytest.approx(1e8)]


def test_ordinary_runs_never_undo() -> None:
    for spec in ({"name": "decoupled", "options": {"fedadam": {}}}, {"name": "inclusivefl", "options": {"fedavgm": {}}},
                 {"name": "scalefl", "options": {"feddyn": {}}}, {"name": "adaptivefl"}):  # fmt: skip
        federation, simulation = tiny_federation(spec)
        for done in run(federation, local_engine(simulation), Settings(3, plain(lr=0.05)), start(federation)):
            assert "undone" not in done.report and done.report["train"]["clients"], spec


def test_a_state_is_flat_or_not() -> None:
    """The check sees a number that is not finite wherever it stands, in one buffer or in many."""
    flat = torch.ones(12)
    state = FlatState(flat, {"a": (4,), "b": (2, 4)})
    from fleetfit.rounds.rollback import find_invalid_state

    server = Server(state)
    for parts in (state, dict(state), {n: t.clone() for n, t in state.items()}):
        assert find_invalid_state(server, Server(parts)) is None
    flat[7] = float("nan")
    for parts in (state, dict(state), {n: t.clone() for n, t in state.items()}):
        assert '"b"' in str(find_invalid_state(server, Server(parts)))
