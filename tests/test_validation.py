"""No reply but a right one passes validation, whatever it holds; a right one does, of every method and kind."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from same_bits import SETTINGS, fleets
from sampling import some_quick
from support import raises
from support.nests import nests
from tiny import TinyNet, plain, tiny_federation
from torch import Tensor

from fleetfit.core import (
    Clients,
    Evaluation,
    Failure,
    Federation,
    Job,
    Level,
    Problem,
    Simulation,
    Update,
)
from fleetfit.core.local import Cosine
from fleetfit.core.tasks import get_task
from fleetfit.data import Data
from fleetfit.engines.local import local
from fleetfit.errors import RunError
from fleetfit.evaluation import evaluate
from fleetfit.hooks import build
from fleetfit.messages import dump_job, load_job
from fleetfit.rounds import run, run_round, start
from fleetfit.submodel import Submodel, extract
from fleetfit.training import run_job
from fleetfit.validation import (
    _find_implausible_sum,
    find_job_error,
    find_update_error,
    pair_jobs_with_replies,
    validate_reply,
)

FEDERATION, SIMULATION = tiny_federation({"name": "fedavg"})


def job_of(kind: str, level: int = 1) -> Job:
    piece = FEDERATION.levels[level].submodel
    state = extract(FEDERATION.problem.layout, start(FEDERATION).state, piece)
    return Job(kind, 3, 9, 2, 4, piece, state, {"name": "fedavg"}, 11, level, plain(lr=0.1),
               Evaluation(norm="batch", split="train", samples=20))  # fmt: skip


def answered(kind: str) -> tuple[Job, Update]:
    job = job_of(kind)
    reply = next(local(SIMULATION).run(iter([job])))
    assert isinstance(reply, Update)
    return job, reply


ANSWERED = {kind: answered(kind) for kind in ("train", "evaluate", "statistics")}
JOB, UPDATE = ANSWERED["train"]
NAME = "blocks.0.4.bias"


@pytest.mark.parametrize("kind", ANSWERED)
def test_a_right_reply_comes_through_as_it_is(kind: str) -> None:
    job, update = ANSWERED[kind]
    for reply in (update, replace(update, simulated_s=0.0), replace(update, simulated_s=0.25)):
        assert validate_reply(reply, job, FEDERATION) is reply


def with_state(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {"state": {**UPDATE.state, NAME: change(UPDATE.state[NAME])}}


def poisoned(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed[-1] = value
        return changed

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (with_state(lambda t: t[:1]), f'"{NAME}" is (1,)'),
        (with_state(lambda t: t[None]), f'"{NAME}" is (1, '),
        (with_state(lambda t: t.double()), "float64"),
        (with_state(lambda t: t.half()), "float16"),
        (with_state(lambda t: t.to_sparse()), "expected a tensor"),
        (with_state(lambda t: t.tolist()), "expected a tensor"),
        (with_state(poisoned(math.nan)), "not finite"),
        (with_state(poisoned(math.inf)), "not finite"),
        (with_state(poisoned(-math.inf)), "not finite"),
        ({"state": {k: v for k, v in UPDATE.state.items() if k != NAME}}, "missing"),
        ({"state": {**UPDATE.state, "more": torch.zeros(1)}}, "unexpected"),
        ({"state": []}, "not a table"),
        ({"round": 2}, "answers round 2"),
        ({"index": 5}, "job 5"),
        ({"client": 5}, "another client"),
        ({"client": "4"}, "its client"),
        ({"dispatched": FEDERATION.levels[2].submodel}, "sub-model"),
        ({"dispatched": None}, "its dispatched is None"),
        ({"level": 9}, "level is 9"),
        ({"level": -1}, "level is -1"),
        ({"num_examples": 0}, "counts 0"),
        ({"num_examples": -3}, "num_examples is -3"),
        ({"num_examples": True}, "num_examples"),
        ({"num_examples": 7.0}, "num_examples is 7.0"),
        ({"num_examples": 10**9}, "counts 1000000000"),
        ({"num_examples": 10**30}, "num_examples"),
        ({"untrained": None}, "its untrained"),
        ({"untrained": [NAME]}, "its untrained"),
        ({"untrained": (7,)}, "its untrained"),
        ({"untrained": (NAME,) * 10_000}, "its untrained"),
        ({"untrained": (NAME, NAME)}, "untrained names"),
        ({"untrained": ("more",)}, "untrained names"),
        ({"metrics": {}}, "its loss"),
        ({"metrics": {"loss": math.nan}}, "its loss"),
        ({"metrics": {"loss": "0.1"}}, "its loss"),
        ({"metrics": {"loss": 1e200}}, "its loss"),
        ({"metrics": {"loss": 10**400}}, "64 bits"),
        ({"metrics": {"loss": 1.0, "steps": [[[10**400]]]}}, "64 bits"),
        ({"metrics": {"loss": 1.0, "teachers": {"1": 1e300}}}, "added up"),
        ({"metrics": {"loss": 1.0, "teachers": {"1": math.nan}}}, "added up"),
        ({"metrics": {"loss": 1.0, "teachers": {"1\x1b[2J": 1}}}, "its metrics: names"),
        ({"metrics": {"loss": 1.0, "teachers": {"x" * 101: 1}}}, "its metrics: names"),
        ({"metrics": {"loss": 1.0, "teachers": {(1, 2): 1}}}, "its metrics: names"),
        ({"metrics": {"loss": 1.0, "\ud800": 1}}, "its metrics: names"),
        ({"metrics": {"loss": 1.0, "x": {str(i): i for i in range(10_001)}}}, "10000 values"),
        ({"metrics": {"loss": 1.0, "x": [[[[[[[[[[1]]]]]]]]]]}}, "8 deep"),
        ({"metrics": {"loss": 1.0, "x": "y" * 501}}, "its metrics: a text"),
        (with_state(poisoned(1e38)), "their norm"),
        (with_state(poisoned(-2e19)), "their norm"),
        ({"level": 0}, "level is 0"),
        ({"level": 10**5000}, "64 bits"),
        ({"num_examples": 10**5000}, "64 bits"),
        ({"metrics": None}, "not a table"),
        ({"scales": {"a": 1.0}}, "its scales: 'a' is 1.0"),
        ({"scales": None}, "its scales: not a table"),
        ({"simulated_s": -1.0}, "simulated_s"),
        ({"simulated_s": math.inf}, "simulated_s"),
        ({"multiply_adds": 1.5}, "multiply_adds"),
        ({"submodel": Submodel({"a": (0, 1, 99), "b": range(8)}, (1, 2))}, "channels"),
        ({"submodel": Submodel({"a": (0, 0, 1), "b": range(8)}, (1, 2))}, "rising order"),
        ({"submodel": Submodel({"a": (*UPDATE.submodel.channels["a"],)[::-1], "b": range(8)}, (1, 2))}, "rising order"),
        ({"submodel": Submodel({"a": range(10**15), "b": range(8)}, (1, 2))}, "channels"),
        ({"submodel": Submodel({"a": range(0), "b": range(8)}, (1, 2))}, "channels"),
        ({"submodel": Submodel({"a": (), "b": range(8)}, (1, 2))}, "channels"),
        ({"submodel": Submodel({"z": range(1)}, (1, 2))}, "channels"),
        ({"submodel": Submodel(UPDATE.submodel.channels, (1, 7))}, "exits"),
        ({"submodel": Submodel(UPDATE.submodel.channels, (2, 1))}, "exits"),
        ({"submodel": Submodel(UPDATE.submodel.channels, ())}, "exits"),
        ({"submodel": FEDERATION.levels[2].submodel}, "not a part"),
        ({"submodel": Submodel({}, UPDATE.submodel.exits)}, "not a part"),
    ],
)
def test_wrong_updates_are_named(changes: dict[str, Any], message: str) -> None:
    wrong = replace(UPDATE, **changes)
    assert message in str(find_update_error(wrong, JOB, FEDERATION))
    reply = validate_reply(wrong, JOB, FEDERATION)
    assert isinstance(reply, Failure) and message in reply.reason
    assert (reply.round, reply.index, reply.client, reply.dispatched) == (3, 2, 4, JOB.submodel)


def test_larger_sub_models_are_refused() -> None:
    """It would be averaged without complaint."""
    piece = FEDERATION.levels[2].submodel
    state = extract(FEDERATION.problem.layout, start(FEDERATION).state, piece)
    assert "not a part" in str(find_update_error(replace(UPDATE, submodel=piece, state=state), JOB, FEDERATION))


def test_exits_that_were_never_sent_are_refused() -> None:
    """A classifier before the last one, that the server kept: its tensors are in the layout, and its shapes fit."""
    channels, layout = UPDATE.submodel.channels, FEDERATION.problem.layout
    one, two = Submodel(channels, (2,)), Submodel(channels, (1, 2))
    job = replace(JOB, submodel=one, state=extract(layout, start(FEDERATION).state, one))
    state = extract(layout, start(FEDERATION).state, two)
    right = replace(UPDATE, dispatched=one, submodel=one, state=job.state, untrained=())
    assert find_update_error(right, job, FEDERATION) is None
    assert "not a part" in str(find_update_error(replace(right, submodel=two, state=state), job, FEDERATION))
    assert not two.is_part_of(one) and one.is_part_of(two)


def test_half_a_granule_is_refused() -> None:
    """Axis b comes and goes in granules of 2; a mean over half of one raises an error."""
    piece = Submodel({**UPDATE.submodel.channels, "b": (0, 3)}, (1, 2))
    assert "whole granules" in str(find_update_error(replace(UPDATE, submodel=piece), JOB, FEDERATION))


SCORES = {"n": 5, "correct": [1.0, 2.0], "ensemble": 2.0}


@pytest.mark.parametrize(
    ("changes", "right"),
    [({}, True), ({"correct": [0.0, 5.0]}, True), ({"correct": [1.0, 5.5]}, False), ({"correct": [-1.0, 2.0]}, False),
     ({"ensemble": 6.0}, False), ({"ensemble": -0.5}, False), ({"n": 2**60}, False), ({"n": 10**400}, False),
     ({"correct": [10**400, 1]}, False)],
)  # fmt: skip
def test_no_more_is_right_than_was_asked(changes: dict[str, Any], right: bool) -> None:
    job, update = ANSWERED["evaluate"]
    reply = validate_reply(replace(update, metrics={**SCORES, **changes}), job, FEDERATION)
    assert isinstance(reply, Update) == right, reply


def test_a_regression_may_score_below_zero() -> None:
    """1 - (output - y)^2 of a bad model: far below 0, and at most 1 for each."""
    job, update = ANSWERED["evaluate"]
    federation = replace(FEDERATION, problem=replace(FEDERATION.problem, task=get_task("regression")))
    below = replace(update, metrics={**SCORES, "correct": [-700.0, -3.0], "ensemble": -9.0})
    assert validate_reply(below, job, federation) is below
    above = replace(below, metrics={**SCORES, "correct": [-700.0, 5.5]})
    assert isinstance(validate_reply(above, job, federation), Failure)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("count", lambda t: t + 1, "counts 21 inputs"),
        ("count", lambda t: t / 2, "counts 10 inputs"),
        ("count", lambda t: t * 0, "counts 0 inputs"),
        ("sum", lambda t: t * 0 + 1e6, "below 0"),
        ("sum", lambda t: t * 0 + 1e300, "below 0"),
        ("squares", lambda t: t * 0, "below 0"),
        ("squares", lambda t: t * 0 + 1e60, "not finite"),
    ],
)
def test_sums_that_so_many_samples_cannot_give(key: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    """20 samples, one input of each channel each; (sum x)^2 <= n sum x^2."""
    job, update = ANSWERED["statistics"]
    for name in (n for n in update.state if n.endswith(f".{key}")):
        wrong = replace(update, state={**update.state, name: change(update.state[name])})
        reason = str(find_update_error(wrong, job, FEDERATION))
        assert message in reason and f'"{name.removesuffix(f".{key}")}"' in reason


@pytest.mark.parametrize(("counted", "right"), [(20, True), (60, True), (19, False), (20.5, False), (0, False)])
def test_unknown_inputs_are_counted_as_whole_numbers(counted: float, right: bool) -> None:
    """A layer whose shapes do not tell has at least one input of each sample."""
    moments = {"norm.sum": torch.zeros(3), "norm.squares": torch.ones(3), "norm.count": torch.tensor([counted])}
    assert (_find_implausible_sum(moments, {"norm": (3, None)}, 20) is None) == right


def test_unknown_inputs_are_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that looks at a number does not run without numbers, which is how inputs are counted otherwise."""
    first = TinyNet.start
    monkeypatch.setattr(TinyNet, "start", lambda net, x: first(net, x + 0 * float(x.sum())))
    federation, _ = tiny_federation({"name": "fedavg"}, dropout=0.1)  # whose inputs nobody has counted yet
    job, update = ANSWERED["statistics"]
    assert find_update_error(update, job, federation) is None
    for name in (name for name in update.state if name.endswith(".count")):
        half = replace(update, state={**update.state, name: update.state[name] + 0.5})
        assert name.removesuffix(".count") in str(find_update_error(half, job, federation))


def test_no_more_samples_are_measured_than_asked_for() -> None:
    job, update = ANSWERED["statistics"]
    more = {name: tensor * 2 for name, tensor in update.state.items()}
    assert "at most 20" in str(find_update_error(replace(update, num_examples=40, state=more), job, FEDERATION))
    assert "missing" in str(find_update_error(replace(update, state={}), job, FEDERATION))
    assert find_update_error(replace(update, num_examples=0, state={}), job, FEDERATION) is None


@pytest.mark.parametrize("name", some_quick(["resnet20", "cnn", "msdnet24", "mobilenetv2"], ["cnn"]))
def test_honest_sums_of_pictures_pass(name: str) -> None:
    """Positions of each layer are read off its shapes; a last batch of another size makes no difference."""
    arguments = {"classes": 3, "channels": 3, "input_shape": [3, 32, 32]}
    problem = Problem.from_spec({"model": {"name": name}, "given": arguments, "task": "classification", "exits": []})
    data = Data("x", torch.randint(0, 255, (7, 3, 32, 32), dtype=torch.uint8), torch.arange(7) % 3,
                {"train": torch.arange(7)}, 3, mean=(0.5,) * 3, std=(0.25,) * 3)  # fmt: skip
    level = Level("1", problem.submodel(1.0, problem.exits), 1.0, 1.0)
    federation = Federation(problem, Clients(np.array([7])), (level,), 1, build({"name": "fedavg"}))
    job = Job("statistics", 0, 1, 0, 0, level.submodel, start(federation).state, {"name": "fedavg"}, 1, 0,
              evaluation=Evaluation(split="train", samples=5, batch_size=2))  # fmt: skip
    reply, _ = run_job(job, Simulation(problem, data, [data.splits]).device(0))
    assert isinstance(reply, Update) and reply.state and validate_reply(reply, job, federation) is reply
    count = next(n for n in reply.state if n.endswith(".count"))
    off = replace(reply, state={**reply.state, count: reply.state[count] + 5})
    assert "inputs of" in str(find_update_error(off, job, federation))


def test_a_reason_is_one_line() -> None:
    odd = Failure(3, 2, 4, 1, JOB.submodel, "first\n\x1b[31msecond\x07" + "z" * 900)
    reason = validate_reply(odd, JOB, FEDERATION).reason  # type: ignore[union-attr]
    assert reason.startswith("first [31msecond z") and len(reason) <= 500 and reason.isprintable()
    refused = validate_reply(replace(UPDATE, state={**UPDATE.state, "\x1b]0;t\x07": torch.ones(1)}), JOB, FEDERATION)
    assert isinstance(refused, Failure) and refused.reason.isprintable()


STATISTICS = {
    f"blocks.{i}.1.{key}": torch.full((JOB.submodel.sizes["b"],), value)
    for i in range(JOB.submodel.depth)
    for key, value in (("mean", -0.5), ("var", 0.5))
}
"""Statistics such as a server sends with an evaluation of this sub-model."""


def test_statistics_of_an_evaluation_are_right() -> None:
    job = replace(JOB, kind="evaluate", statistics=STATISTICS)
    assert find_job_error(job, FEDERATION.problem) is None
    none_moves = {name: tensor * 0 for name, tensor in STATISTICS.items()}  # of an input that is always the same
    assert find_job_error(replace(job, statistics=none_moves), FEDERATION.problem) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "scan"}, "its kind is 'scan'"), ({"kind": ["train"]}, "its kind is list"),
        ({"seed": "1"}, "its seed"), ({"client": None}, "its client"), ({"level": -1}, "its level"),
        ({"memory_version": 0.5}, "memory_version"), ({"method": "fedavg"}, "its method is"),
        ({"state": {"x": 1}}, "expected a tensor"), ({"state": {}}, "missing"),
        ({"statistics": [1]}, "not a table"), ({"statistics": {"x": 1}}, "its statistics: 'x' is 1"),
        ({"kind": "evaluate", "statistics": {n: t - 1 if n == "blocks.1.1.var" else t for n, t in STATISTICS.items()}},
         "below 0"),
        ({"statistics": {"a\x07": torch.tensor([math.nan])}}, '"a" has numbers'),
        ({"submodel": Submodel({"a": range(10**9)}, (1, 2))}, "channels"),
        ({"submodel": Submodel({"b": (0, 1, 3, 4)}, (1, 2))}, "whole granules"),
        ({"submodel": Submodel({}, (9,))}, "exits"),
        ({"evaluation": Evaluation(samples=1.5)}, "its samples"),
        ({"evaluation": Evaluation(split="all")}, "'all'"),
        ({"evaluation": Evaluation(batch_size=0)}, "batch_size"),
    ],
)  # fmt: skip
def test_what_a_server_asks_is_looked_at(changes: dict[str, Any], message: str) -> None:
    assert find_job_error(JOB, FEDERATION.problem) is None
    assert message in str(find_job_error(replace(JOB, **changes), FEDERATION.problem))


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", math.nan), ("lr", -1.0), ("lr", "0.1"), ("lr", 10**400), ("lr", 1e39), ("clip_norm", 1e39),
     ("epochs", 0), ("epochs", "9"), ("epochs", None), ("batch_size", -1), ("batch_size", None),
     ("clip_norm", "x"), ("late", "now"), ("optimizer", ["sgd"]),
     ("optimizer", "adamx"), ("compress", "zip"), ("schedule_in_round", 1), ("nesterov", 1), ("nesterov", []),
     ("momentum", -1), ("weight_decay", 10**400), ("betas", [0.9, 1.0]), ("betas", ["0", 0.9]), ("eps", -1),
     ("check_every", 0), ("deadline_s", 0), ("odd", 1)],
)  # fmt: skip
def test_settings_of_a_job_are_those_of_a_run_file(key: str, value: Any) -> None:
    layout = FEDERATION.problem.layout
    payload = dump_job(JOB, layout)
    assert load_job(payload, layout).local == JOB.local
    with raises(RunError, key):
        load_job({**payload, "local": {**payload["local"], key: value}}, layout)


def test_a_schedule_may_end_at_0() -> None:
    layout, local = FEDERATION.problem.layout, plain(schedule=Cosine(kind="cosine"))
    last = replace(JOB, local=local.at_round(9, 8))
    assert last.local.lr == 0.0 and load_job(dump_job(last, layout), layout).local == last.local


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("evaluate", {"metrics": {}}, "its n is missing"),
        ("evaluate", {"metrics": {"n": 5, "correct": [1.0], "ensemble": 2.0}}, "1 scores for 2 exits"),
        ("evaluate", {"metrics": {"n": 5, "correct": [1.0, math.nan], "ensemble": 2.0}}, "its correct.1"),
        ("evaluate", {"metrics": {"n": -5, "correct": [1.0, 1.0], "ensemble": 2.0}}, "its n is -5"),
        ("evaluate", {"submodel": FEDERATION.levels[0].submodel}, "sub-model"),
        ("statistics", {"submodel": FEDERATION.levels[0].submodel}, "sub-model"),
        ("statistics", {"state": {"blocks.0.1.sum": torch.zeros(6)}}, "missing"),
    ],
)
def test_answers_of_other_kinds(kind: str, changes: dict[str, Any], message: str) -> None:
    job, update = ANSWERED[kind]
    reply = validate_reply(replace(update, **changes), job, FEDERATION)
    assert isinstance(reply, Failure) and message in reply.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.float(), "float64"),
        (lambda t: t * math.nan, "not finite"),
        (lambda t: t[:1].expand(3), "expected"),
    ],
)
def test_sums_that_are_none(change: Callable[[Tensor], Tensor], message: str) -> None:
    job, update = ANSWERED["statistics"]
    name = next(n for n in update.state if n.endswith(".squares"))
    wrong = replace(update, state={**update.state, name: change(update.state[name])})
    assert message in str(find_update_error(wrong, job, FEDERATION))
    below = replace(update, state={**update.state, name: -update.state[name] - 1})
    assert "below 0" in str(find_update_error(below, job, FEDERATION))


@given(st.sampled_from(sorted(ANSWERED)), st.dictionaries(st.sampled_from(sorted(vars(UPDATE))), nests, max_size=3))
@settings(max_examples=100, deadline=None)
def test_whatever_the_fields_hold_it_is_a_sentence(kind: str, odd: dict[str, Any]) -> None:
    """Nothing is raised, and what comes through has the state of a right one."""
    job, update = ANSWERED[kind]
    reply = validate_reply(replace(update, **odd), job, FEDERATION)
    if isinstance(reply, Failure):
        assert (reply.round, reply.index, reply.client) == (job.round, job.index, job.client)
        assert isinstance(reply.reason, str) and len(reply.reason) < 400
    elif kind == "train":
        assert reply.state.keys() == update.state.keys()
        assert all(reply.state[n].shape == update.state[n].shape for n in update.state)


@given(nests, nests, nests)
@settings(max_examples=50, deadline=None)
def test_a_failure_has_the_numbers_of_its_job(reason: Any, number: Any, flag: Any) -> None:
    odd = Failure(
        number, number, number, number, number, reason, declined=flag, multiply_adds=number, simulated_s=number
    )
    reply = validate_reply(odd, JOB, FEDERATION)
    assert isinstance(reply, Failure)
    assert (reply.round, reply.index, reply.client, reply.level) == (JOB.round, JOB.index, JOB.client, JOB.level)
    assert isinstance(reply.reason, str) and isinstance(reply.declined, bool) and isinstance(reply.multiply_adds, int)


# ---- in a run -------------------------------------------------


class Lying:
    """An engine with one client whose replies are not what they should be."""

    def __init__(self, federation: Federation, inner: Any, client: int) -> None:
        self.inner, self.client = inner, client

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        for reply in self.inner.run(jobs):
            if reply.client == self.client and isinstance(reply, Update):
                spoilt = {name: tensor * 0 - 1e9 for name, tensor in reply.state.items()}
                yield replace(reply, state=spoilt, num_examples=10**6, metrics={"n": 3, "correct": "all"})
            else:
                yield reply

    def commit_memory(self, update: Update) -> None:
        self.inner.commit_memory(update)


def test_a_liar_changes_nothing_and_the_round_goes_on() -> None:
    federation, simulation = fleets({"name": "scalefl"})
    federation = replace(federation, cohort=7)
    server = start(federation)
    honest = local(simulation)
    after, report = run_round(federation, Lying(federation, honest, 3), SETTINGS, server)  # type: ignore[arg-type]
    assert [f["client"] for f in report["failures"]] == [3] and "refused" in report["failures"][0]["reason"]
    assert report["train"]["clients"] == 6
    assert all(float(t.abs().max()) < 1e6 for t in after.state.values())
    columns, scores = evaluate(federation, Lying(federation, honest, 3), after, SETTINGS.scope)
    reasons = {f["reason"].split(":")[0] for f in columns["failures"] if f["client"] == 3}
    assert reasons == {"batch-norm statistics", "evaluation"}
    assert 0 <= columns["batch"]["global"] <= 1 and columns["batch"]["global_clients"] == 6
    assert all(float(t.abs().max()) < 1e6 for moments in scores.values() for t in moments.values())


def test_an_engine_owes_one_reply_to_each_job() -> None:
    jobs = [JOB, replace(JOB, index=3)]
    pairs = pair_jobs_with_replies(lambda jobs: (replace(UPDATE, index=job.index) for job in jobs), jobs)
    assert [(job.index, reply.index) for job, reply in pairs] == [(2, 2), (3, 3)]
    with raises(RunError, 2, key="engine"):
        list(pair_jobs_with_replies(lambda js: iter([] if list(js) else [UPDATE]), jobs))
    with raises(RunError, key="engine"):
        list(pair_jobs_with_replies(lambda js: iter([UPDATE]), []))


def test_every_method_s_replies_come_through() -> None:
    federation, simulation = fleets({"name": "heterofl", "masked": True})
    *_, last = run(federation, local(simulation), SETTINGS, start(federation))
    assert not last.report["failures"]
