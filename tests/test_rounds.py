"""The round loop: order, failures, what is refused, memories, bytes, patience, schedules."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import raises
from support.bits import assert_same_bits, has_same_bits
from support.engines import EVERYBODY, LOCAL, MeddlingEngine, Reply, choose_always, make_fleet, shorten_client
from support.training import assert_close, last_exit_loss, make_job, plain_sgd
from tiny import plain, tiny_federation
from torch import Tensor, nn

from fleetfit.anatomy import outputs
from fleetfit.core import Device, Evaluation, Failure, Job, Local, Update
from fleetfit.core.local import Step
from fleetfit.engines.local import InProcess as LocalEngine, local as local_engine
from fleetfit.errors import NoUsableUpdates, RunError
from fleetfit.evaluation import EvaluationScope
from fleetfit.hooks import Loss
from fleetfit.messages import dump_job, dump_reply, pack
from fleetfit.rounds import Round, Settings, run, run_round, sort_by_cost, start
from fleetfit.submodel import Submodel, extract
from fleetfit.training.job import DIVERGED

# ---- order -------------------------------------------------


class Listed:
    """A schedule with a factor for each round."""

    def __init__(self, factors: Sequence[float]) -> None:
        self.factors = factors

    def factor_at(self, rounds: int, round: int) -> float:
        return self.factors[round]


def set_schedule(local: Local, factors: Sequence[float]) -> Local:
    return local.model_copy(update={"schedule": Listed(factors)})


def test_the_order_is_largest_first_then_client() -> None:
    """Clients 0 to 5 have levels 1, 2, 3, 1, 2, 3; whatever order the method chose them in."""
    for chosen in ((0, 1, 2, 3, 4, 5), (5, 0, 3, 2, 1, 4)):
        federation, simulation = make_fleet(choose=choose_always(*chosen))
        engine = MeddlingEngine(simulation)
        run_round(federation, engine, Settings(1, LOCAL), start(federation))
        assert [j.client for j in engine.jobs] == [2, 5, 1, 4, 0, 3]
        assert [j.index for j in engine.jobs] == list(range(6))
        assert [j.level for j in engine.jobs] == [2, 2, 1, 1, 0, 0]


def test_the_order_of_choice_is_irrelevant() -> None:
    states = []
    for chosen in ((0, 1, 2, 3, 4, 5), (5, 0, 3, 2, 1, 4)):
        federation, simulation = make_fleet(choose=choose_always(*chosen))
        states.append(run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))[0].state)
    assert has_same_bits(*states)


def test_canonical_counts_elements_not_exits() -> None:
    """A narrow deep sub-model may be smaller than a wide shallow one: elements decide."""
    federation, _ = make_fleet()
    deep = Submodel({"a": range(1), "b": range(2), "classes": range(4)}, (1, 2, 3))
    wide = Submodel({"a": range(8), "b": range(12), "classes": range(4)}, (1,))
    assert [s[0] for s in sort_by_cost(federation, [(0, 0, deep), (1, 1, wide), (2, 2, wide)])] == [1, 2, 0]


def test_seeds_differ_by_round_and_client() -> None:
    seeds = []
    for _ in range(2):
        federation, simulation = make_fleet()
        engine = MeddlingEngine(simulation)
        list(run(federation, engine, Settings(2, LOCAL), start(federation)))
        seeds.append([j.seed for j in engine.jobs if j.kind == "train"])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 12
    other, simulation = tiny_federation({"name": "scalefl", "hooks": {"choose_clients": EVERYBODY}}, seed=1)
    engine = MeddlingEngine(simulation)
    run_round(other, engine, Settings(1, LOCAL), start(other))
    assert not {j.seed for j in engine.jobs} & set(seeds[0])


# ---- who -------------------------------------------------


def test_a_cohort_is_limited_by_able_clients() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"}, cohort=50)
    counts, reported = federation.clients.num_examples.copy(), federation.clients.budget
    assert reported is not None
    counts[3], reported = 0, reported.copy()
    reported[1] = 0.01
    federation = replace(federation, clients=replace(federation.clients, num_examples=counts, budget=reported))
    assert federation.able.tolist() == [0, 2, 4, 5]
    _, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert report["train"]["clients"] == 4 and report["train"]["by_level"] == {"3": 2, "2": 1, "1": 1}


def test_uniform_selection_is_without_replacement() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"}, clients=12, cohort=4)
    engine = MeddlingEngine(simulation)
    server = start(federation)
    for _ in range(8):
        server, _ = run_round(federation, engine, Settings(9, LOCAL), server)
    cohorts = [tuple(sorted(j.client for j in engine.jobs if j.round == r)) for r in range(8)]  # type: ignore[type-var]
    assert all(len(set(c)) == 4 for c in cohorts)
    assert len(set(cohorts)) > 4


def test_no_able_client_is_an_early_error() -> None:
    federation, _ = tiny_federation({"name": "scalefl"})
    none = replace(federation, clients=replace(federation.clients, budget=np.full(6, 0.01)))
    with raises(RunError, key="fleet"):
        start(none)


# ---- failures -------------------------------------------------


@pytest.mark.parametrize(("n", "reason"), [(0, "no training data"), (1, "value per channel")])
def test_a_client_that_cannot_train_is_a_failure(n: int, reason: str) -> None:
    """None of its own data, or one sample under batch norm: a failure with a reason; the round goes on."""
    federation, simulation = make_fleet()
    after, report = run_round(
        federation, local_engine(shorten_client(simulation, 5, n)), Settings(1, LOCAL), start(federation)
    )
    (failure,) = report["failures"]
    assert (failure["client"], failure["level"]) == (5, 3) and reason in failure["reason"]
    assert report["train"]["clients"] == 5 and report["train"]["by_level"] == {"3": 1, "2": 2, "1": 2}
    engine = MeddlingEngine(simulation)
    run_round(federation, engine, Settings(1, LOCAL), start(federation))
    alone = next(r for r in engine.replies if r.client == 2)  # the only one left that trains block 3
    assert isinstance(alone, Update)
    assert torch.equal(after.state["blocks.2.0.weight"], alone.state["blocks.2.0.weight"])


def test_one_sample_without_batch_norm_trains() -> None:
    federation, simulation = make_fleet(norm=False)
    _, report = run_round(
        federation, local_engine(shorten_client(simulation, 5, 1)), Settings(1, LOCAL), start(federation)
    )
    assert not report["failures"] and report["train"]["samples"] == 5 * 28 + 1


def exploding(job: Job, device: Device) -> Loss:
    """Client 5's loss is not a number."""

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        value = device.problem.task.loss(outputs(module, x)[-1], y)
        return value * float("nan") if job.client == 5 else value

    return loss


def test_a_diverging_client_is_rejected() -> None:
    federation, simulation = make_fleet("fedavg", hooks={"make_loss": exploding})
    after, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert [f["client"] for f in report["failures"]] == [5]
    assert "diverged" in report["failures"][0]["reason"]
    assert report["train"]["clients"] == 5 and report["train"]["loss"] == report["train"]["loss"]
    assert all(bool(torch.isfinite(t).all()) for t in after.state.values())
    federation, simulation = make_fleet("fedavg")
    _, healthy = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert report["multiply_adds"] == healthy["multiply_adds"], "the failed client's work counts"


def test_a_run_stops_after_patience_diverging_rounds() -> None:
    federation, simulation = make_fleet()
    first = start(federation)
    settings = Settings(20, plain(lr=1e30, epochs=4, batch_size=8), max_empty=3)
    left: list[Round] = []

    def through() -> None:
        left.extend(run(federation, local_engine(simulation), settings, first))

    with raises(NoUsableUpdates, 3, DIVERGED):
        through()
    server, rounds = left[-1].server, [one.report for one in left]
    assert len(rounds) == 2 and server.round == 2
    assert_same_bits(server.state, first.state)
    assert all(r["train"]["loss"] is None and len(r["failures"]) == 6 for r in rounds)


def test_attacked_runs_stop_only_without_updates() -> None:
    federation, simulation = make_fleet()
    broken = Settings(9, plain(lr=1e30, epochs=4, batch_size=8), max_empty=3, hostile=frozenset({1}))
    with raises(NoUsableUpdates, 3, DIVERGED):
        list(run(federation, local_engine(simulation), broken, start(federation)))
    later = replace(broken, local=LOCAL.replace(epochs=3, schedule=Step(kind="step", at=[1], factor=1e31)))
    left = list(run(federation, local_engine(simulation), later, start(federation)))
    assert [one.report["train"]["clients"] for one in left] == [6] + [0] * 8
    assert_same_bits(left[0].server.state, left[-1].server.state)
    again = list(run(federation, local_engine(simulation), later, left[3].server))
    assert [one.report["round"] for one in again] == [5, 6, 7, 8, 9]


def test_usable_rounds_restart_the_count() -> None:
    federation, simulation = make_fleet()
    settings = Settings(8, set_schedule(LOCAL.replace(epochs=3), [1e31, 1e31, 1.0] * 3), max_empty=3)
    reports = [r.report for r in run(federation, local_engine(simulation), settings, start(federation))]
    assert [r["train"]["clients"] for r in reports] == [0, 0, 6, 0, 0, 6, 0, 0]


# ---- replies that must not touch the state -------------------------------------------------


def refused(meddle: Callable[[int, Reply], Reply], place: int = 1) -> str:
    """Meddle with the reply at a place; it must be refused, and the round must end as if that client had failed."""
    federation, simulation = make_fleet()
    engine = MeddlingEngine(simulation, lambda i, reply: meddle(i, reply) if i == place else reply)
    after, report = run_round(federation, engine, Settings(1, LOCAL), start(federation))
    job = engine.jobs[place]

    def lost(i: int, reply: Reply) -> Reply:
        return (
            Failure(reply.round, reply.index, reply.client, reply.level, job.submodel, "lost") if i == place else reply
        )

    expected, _ = run_round(federation, MeddlingEngine(simulation, lost), Settings(1, LOCAL), start(federation))
    assert_same_bits(after.state, expected.state)
    assert [f["client"] for f in report["failures"]] == [job.client]
    assert report["train"]["clients"] == 5
    reason: str = report["failures"][0]["reason"]
    return reason


def test_a_duplicate_in_the_place_of_a_reply_is_refused() -> None:
    before: list[Reply] = []

    def duplicate(i: int, reply: Reply) -> Reply:
        return before[0]

    federation, simulation = make_fleet()

    def meddle(i: int, reply: Reply) -> Reply:
        before.append(reply)
        return before[0] if i == 1 else reply

    _, report = run_round(federation, MeddlingEngine(simulation, meddle), Settings(1, LOCAL), start(federation))
    assert [f["client"] for f in report["failures"]] == [5]
    assert re.findall(r"\d+", refused(duplicate)) == ["0", "0", "0", "1"]


class Twice(LocalEngine):
    """An engine that says its first reply twice, before it takes the next job."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Reply]:
        for index, job in enumerate(jobs):
            (reply,) = super().run(iter([job]))
            yield reply
            if index == 0:
                yield reply


class Short(LocalEngine):
    """An engine that loses its last reply."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Reply]:
        *replies, _ = super().run(jobs)
        yield from replies


def test_a_repeated_reply_is_refused() -> None:
    """Either a `RunError` about the engine, or the second one refused and the state as without it; never a bare
    IndexError.
    """
    federation, simulation = make_fleet()
    expected, _ = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    engine = Twice(simulation, torch.device("cpu"), 1)
    try:
        after, _ = run_round(federation, engine, Settings(1, LOCAL), start(federation))
    except RunError:
        return
    assert_same_bits(after.state, expected.state)


def test_a_reply_that_never_comes_is_no_silent_drop() -> None:
    """Six jobs and five replies: an error, or a failure in the report; the sixth client must not just vanish."""
    federation, simulation = make_fleet()
    engine = Short(simulation, torch.device("cpu"), 1)
    try:
        _, report = run_round(federation, engine, Settings(1, LOCAL), start(federation))
    except RunError:
        return
    assert report["train"]["clients"] + len(report["failures"]) == 6


def test_a_reply_of_another_round_or_client_is_refused() -> None:
    assert "answers round 4" in refused(lambda i, r: replace(r, round=4))
    assert "answers" in refused(lambda i, r: replace(r, client=0))
    assert "answers" in refused(lambda i, r: replace(r, dispatched=Submodel({"a": range(2)}, (1,))))


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[int, Reply], Reply]:
    def meddle(i: int, reply: Reply) -> Reply:
        assert isinstance(reply, Update)
        return replace(reply, state={**reply.state, name: change(reply.state[name])})

    return meddle


def test_a_state_that_does_not_fit_is_refused() -> None:
    """By equality of shapes: a size of one never stands for another, though every operation would broadcast it."""
    assert "stem.bias" in refused(changed("stem.bias", lambda t: t[:1]))
    assert "stem.weight" in refused(changed("stem.weight", lambda t: t[:, :1]))
    assert "stem.bias" in refused(changed("stem.bias", lambda t: t.sum()))
    assert "stem.bias" in refused(changed("stem.bias", lambda t: t[None]))
    assert "float64" in refused(changed("stem.bias", lambda t: t.double()))
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert "not finite" in refused(changed("stem.bias", lambda t, bad=bad: t * 0 + bad))  # type: ignore[misc]


def test_a_client_that_counts_no_samples_is_refused() -> None:
    for n, what in ((0, "counts 0 training samples"), (-3, "num_examples is -3"), (2.5, "num_examples is 2.5")):
        assert what in refused(lambda i, r, n=n: replace(r, num_examples=n))  # type: ignore[misc]


def test_the_declared_sub_model_is_averaged() -> None:
    """Client 5 sends back the piece of level 1 only, and says so: no error; the rest is client 2's alone."""
    federation, simulation = make_fleet()
    small = federation.levels[0].submodel

    def shrink(i: int, reply: Reply) -> Reply:
        if i != 1:
            return reply
        assert isinstance(reply, Update)
        return replace(reply, submodel=small, state=extract(federation.problem.layout, reply.state, small))

    engine = MeddlingEngine(simulation, shrink)
    after, report = run_round(federation, engine, Settings(1, LOCAL), start(federation))
    assert not report["failures"]
    mine = {r.client: r for r in engine.replies if isinstance(r, Update)}
    assert torch.equal(after.state["stem.bias"][6:], mine[2].state["stem.bias"][6:])
    total = sum(mine[c].state["stem.bias"][:4].double() for c in range(6))
    torch.testing.assert_close(after.state["stem.bias"][:4].double(), total / 6, rtol=1e-5, atol=1e-7)


# ---- memories -------------------------------------------------


def test_a_reply_that_cannot_be_packed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could have sent it; one that is a failure already keeps its own reason."""

    def unpackable(reply: Reply, layout: object) -> int:
        if reply.client > 3:
            raise ValueError("no such kind of number")
        return 7

    monkeypatch.setattr("fleetfit.validation.reply_size", unpackable)
    federation, simulation = make_fleet()
    _, report = run_round(
        federation, local_engine(shorten_client(simulation, 5, 0)), Settings(1, LOCAL), start(federation)
    )
    reasons = {f["client"]: f["reason"] for f in report["failures"]}
    assert set(reasons) == {4, 5} and "training" in reasons[5] and "kind" in reasons[4]
    assert report["bytes_up"] == 4 * 7


def test_the_memory_of_a_refused_update_is_not_kept() -> None:
    """Client 5's reply is broken in round 0 and good in round 1; its memory then is of round 1, as if for the first
    time.
    """
    federation, simulation = make_fleet("plugin_method:counting")
    broken = changed("stem.bias", lambda t: t[:1])
    engine = MeddlingEngine(simulation, lambda i, r: broken(i, r) if r.client == 5 and r.round == 0 else r)
    server, report = run_round(federation, engine, Settings(3, LOCAL), start(federation))
    assert [f["client"] for f in report["failures"]] == [5]
    memory = engine.dump_memories()
    assert set(memory) == {"0", "1", "2", "3", "4"}
    assert all(k["version"] == 0 and k["memory"]["rounds"] == 1 for k in memory.values())
    server, report = run_round(federation, engine, Settings(3, LOCAL), server)
    assert not report["failures"]
    memory = engine.dump_memories()
    assert {c: (k["version"], k["memory"]["rounds"]) for c, k in memory.items()} == {
        **{str(c): (1, 2) for c in range(5)},
        "5": (1, 1),
    }
    assert server.memory == {"updates": 11}


def test_saved_memories_continue_bit_for_bit() -> None:
    federation, simulation = make_fleet("plugin_method:counting")
    engine = local_engine(simulation)
    server, _ = run_round(federation, engine, Settings(3, LOCAL), start(federation))
    other = local_engine(simulation)
    other.load_memories(engine.dump_memories())
    a, b = (run_round(federation, e, Settings(3, LOCAL), server)[0] for e in (engine, other))
    fresh, _ = run_round(federation, local_engine(simulation), Settings(3, LOCAL), server)
    assert has_same_bits(a.state, b.state) and not has_same_bits(a.state, fresh.state)


# ---- reports -------------------------------------------------


def test_bytes_are_those_of_the_messages() -> None:
    federation, simulation = make_fleet("plugin_method:counting", choose=choose_always(0, 1, 2))
    federation = replace(federation, method_spec={"name": "plugin_method:counting"})
    engine = MeddlingEngine(shorten_client(simulation, 1, 0))
    _, report = run_round(federation, engine, Settings(1, LOCAL), start(federation))
    assert len(report["failures"]) == 1
    assert report["bytes_down"] == sum(len(pack(dump_job(job, federation.problem.layout))) for job in engine.jobs)
    sent = [
        {k: v for k, v in dump_reply(r, federation.problem.layout).items() if k not in ("multiply_adds", "simulated_s")}
        for r in engine.replies
    ]
    assert report["bytes_up"] == sum(len(pack(payload)) for payload in sent)  # what a clock says is not sent
    tensors = sum(t.numel() * 4 for job in engine.jobs for t in job.state.values())
    assert tensors < report["bytes_down"] < tensors + 4500


def test_reports_describe_their_round() -> None:
    """Clients have 12 to 52 samples, so that a mean over clients is another loss than one over samples."""
    federation, simulation = make_fleet(shares=(3, 5, 7, 11, 13, 3))
    engine = MeddlingEngine(simulation)
    _, report = run_round(federation, engine, Settings(1, LOCAL), start(federation))
    updates = [r for r in engine.replies if isinstance(r, Update)]
    samples = sum(u.num_examples for u in updates)
    assert report["round"] == 1 and report["lr"] == 0.1
    assert report["train"]["samples"] == samples == 168
    assert report["train"]["by_level"] == {"3": 2, "2": 2, "1": 2}
    loss = sum(u.metrics["loss"] * u.num_examples for u in updates) / samples
    assert abs(loss - sum(u.metrics["loss"] for u in updates) / 6) > 1e-4
    assert report["train"]["loss"] == pytest.approx(loss)


def test_an_update_of_weight_0_moves_nothing() -> None:
    """Client 5 counts for nothing: the state is that of a round without it, bit for bit."""
    weigh = lambda update: 0.0 if update.client == 5 else float(update.num_examples)  # noqa: E731
    federation, simulation = make_fleet(hooks={"weigh": weigh}, shares=(3, 5, 7, 11, 13, 3))
    after, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert report["train"]["clients"] == 6 and not report["failures"]

    def lost(index: int, reply: Reply) -> Reply:
        gone = Failure(reply.round, reply.index, reply.client, reply.level, reply.dispatched, "lost")
        return gone if reply.client == 5 else reply

    without, _ = run_round(federation, MeddlingEngine(simulation, lost), Settings(1, LOCAL), start(federation))
    assert_same_bits(after.state, without.state)


def test_where_all_weights_are_0_nothing_moves() -> None:
    federation, simulation = make_fleet(hooks={"weigh": lambda update: 0.0})
    after, report = run_round(federation, local_engine(simulation), Settings(1, LOCAL), start(federation))
    assert report["train"]["clients"] == 6 and not report["failures"] and "undone" not in report
    assert_same_bits(after.state, start(federation).state)


def test_the_schedule_multiplies_the_learning_rate() -> None:
    """One client, one step a round, no norm layers: w <- w - lr f(r) g(w), with factors 1, 0 and 1/4."""
    federation, simulation = make_fleet("fedsgd", choose=choose_always(2), norm=False, hooks={"weigh": "by_count"})
    factors = (1.0, 0.0, 0.25)
    settings = Settings(3, set_schedule(plain(lr=0.4), factors))
    done = list(run(federation, local_engine(simulation), settings, start(federation)))
    assert [d.report["lr"] for d in done] == [0.4, 0.0, 0.1]
    assert_same_bits(done[0].server.state, done[1].server.state)
    data = simulation.device(2).data
    batch = data.batch(data.split("train"))
    one = plain_sgd(start(federation).state, (1, 2, 3), [batch], last_exit_loss, plain(lr=0.4))
    assert_close(done[0].server.state, one)
    assert_close(done[2].server.state, plain_sgd(one, (1, 2, 3), [batch], last_exit_loss, plain(lr=0.1)))


def test_evaluations_on_the_way_and_at_the_end() -> None:
    """Every second round and the last; those on the way cover the clients with the headline policy only."""
    federation, simulation = make_fleet()
    scope = EvaluationScope(Evaluation(batch_size=16), statistics_samples=60)
    settings = Settings(5, LOCAL, evaluate_every=2, scope=scope)
    reports = [r.report for r in run(federation, local_engine(simulation), settings, start(federation))]
    assert [r["round"] for r in reports] == [1, 2, 3, 4, 5]
    assert ["evaluate" in r for r in reports] == [False, True, False, True, True]
    assert list(reports[1]["evaluate"]) == ["split", "static"] and "full" not in reports[1]["evaluate"]["static"]
    assert list(reports[4]["evaluate"]) == ["split", "static", "batch"] and "full" in reports[4]["evaluate"]["static"]
    once = list(run(federation, local_engine(simulation), replace(settings, evaluate_every=0), start(federation)))
    assert ["evaluate" in r.report for r in once] == [False] * 4 + [True]
    assert_same_bits(
        once[-1].server.state,
        list(run(federation, local_engine(simulation), settings, start(federation)))[-1].server.state,
    )


def test_a_run_goes_on_from_any_round() -> None:
    """Rounds 0 to 3 in one go, or from the server after round 2: the same bits."""
    federation, simulation = make_fleet()
    whole = list(run(federation, local_engine(simulation), Settings(4, LOCAL), start(federation)))
    rest = list(run(federation, local_engine(simulation), Settings(4, LOCAL), whole[1].server))
    assert [r.server.round for r in rest] == [3, 4]
    assert_same_bits(rest[-1].server.state, whole[-1].server.state)
    assert not list(run(federation, local_engine(simulation), Settings(4, LOCAL), whole[-1].server))


def test_the_server_before_a_round_is_left_alone() -> None:
    federation, simulation = make_fleet()
    server = start(federation)
    before = {n: t.clone() for n, t in server.state.items()}
    run_round(federation, local_engine(simulation), Settings(1, LOCAL), server)
    assert has_same_bits(server.state, before) and server.round == 0
    assert_same_bits(start(federation).state, before)
    assert make_job(federation, 0, 0).memory_version == -1
