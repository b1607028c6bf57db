"""One job: local SGD, its batches, evaluation and statistics, each against a network and an optimizer written out
plainly.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import Expected, raises
from support.training import (
    InlineEngine,
    assert_close,
    fail_job,
    last_exit_loss,
    make_job,
    plain_outputs,
    plain_sgd,
    pooled_moments,
    tiny_fleet,
    train_job,
)
from tiny import TinyNet, plain
from torch import Tensor, nn

from fleetfit.anatomy import outputs
from fleetfit.core import Device, Evaluation, Failure, Job, Local, Simulation, Update
from fleetfit.data import Data
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ConfigError
from fleetfit.evaluation import EvaluationScope, build_level_module, estimate_statistics
from fleetfit.hooks import Method
from fleetfit.rounds import Settings, run_round, start
from fleetfit.seeds import seed_global_rngs
from fleetfit.submodel import extract
from fleetfit.training import iter_batches, run_job
from fleetfit.training.batch_norm import BatchNormSums
from fleetfit.training.runtime import resolve_device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuda", Expected(0, '"cuda"', key="engine.device")),
        ("cuda:3", Expected(0, '"cuda:3"', key="engine.device")),
        ("mps", Expected(key="engine.device")),
        ("", Expected(key="engine.device")),
        ("7", Expected(key="engine.device")),
    ],
)
def test_missing_devices_are_refused(name: str, expected: Expected) -> None:
    with raises(ConfigError, expected):
        resolve_device(name)


def test_only_training_augments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of the training have the job's generator, those of an evaluation have none."""
    federation, simulation = tiny_fleet(norm=False)
    device, calls = simulation.device(5), []
    plain_batch = Data.batch

    def record(self: Data, indices: Tensor, rng: Any = None) -> tuple[Tensor, Tensor]:
        calls.append(rng)
        return plain_batch(self, indices, rng)

    monkeypatch.setattr(Data, "batch", record)
    train_job(make_job(federation, 5, 2), device)
    assert calls and all(isinstance(rng, torch.Generator) for rng in calls)
    calls.clear()
    train_job(make_job(federation, 5, 2, kind="evaluate", evaluation=Evaluation()), device)
    assert calls and not any(calls)


def leaving(job: Job, device: Device) -> Any:
    raise SystemExit(3)


def test_exit_of_a_method_fails_its_job() -> None:
    federation, simulation = tiny_fleet({"name": "fedavg", "hooks": {"make_loss": leaving}})
    message = fail_job(make_job(federation, 5, 2), simulation.device(5))
    assert "sys.exit(3)" in message


def with_train(simulation: Simulation, client: int, n: int) -> Device:
    """The device of a client that keeps n of its training samples."""
    parts = list(simulation.parts)
    parts[client] = {**parts[client], "train": parts[client]["train"][:n]}
    return replace(simulation, parts=parts).device(client)


# ---- local SGD -------------------------------------------------


@pytest.mark.parametrize(
    "local",
    [
        plain(lr=0.1),
        plain(lr=0.1, momentum=0.9),
        plain(lr=0.1, momentum=0.9, weight_decay=0.05),
        plain(lr=0.5, clip_norm=0.05),
        plain(lr=0.5, momentum=0.5, weight_decay=0.1, clip_norm=0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", [0, 2])
def test_local_training_is_plain_sgd(local: Local, level: int) -> None:
    """Four epochs of all samples at once, so that the order of the samples does not matter.

    Clipping comes before weight decay, as it does where a loss is clipped and an optimizer decays. Heads that the loss
    never used (the shallow ones of level 3) stay as they were sent, and are named.
    """
    federation, simulation = tiny_fleet()
    local = local.replace(epochs=4, batch_size="all")
    job = make_job(federation, 5, level, local=local)
    device = simulation.device(5)
    expected = plain_sgd(
        job.state, job.submodel.exits, [device.data.batch(device.data.split("train"))] * 4, last_exit_loss, local
    )
    reply = train_job(job, device)
    assert_close(reply.state, expected)
    idle = {name for name in job.state if name.startswith("heads.") and level and not name.startswith("heads.3.")}
    assert set(reply.untrained) == idle
    assert all(torch.equal(reply.state[name], job.state[name]) for name in idle)


class Idle(nn.Module):
    """A loss on the deepest exit that uses the shallow ones in its second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        logits = outputs(module, x)
        return sum(F.cross_entropy(z, y) for z in (logits if self.steps == 2 else logits[-1:]))


def test_one_gradient_counts_as_trained() -> None:
    federation, simulation = tiny_fleet({"name": Method(make_loss=lambda job, device: Idle())})
    many = plain(lr=0.1, weight_decay=0.1).replace(epochs=3, batch_size="all")
    assert train_job(make_job(federation, 5, 2, local=many), simulation.device(5)).untrained == ()
    one = train_job(make_job(federation, 5, 2, local=many.replace(epochs=1)), simulation.device(5))
    assert set(one.untrained) == {f"heads.{e}.{kind}" for e in (1, 2) for kind in ("weight", "bias")}


def test_mean_skips_parameters_without_gradient() -> None:
    """With FedAvg's loss only level 1 trains classifier 1: it is level 1's, whatever others that have it sent back."""
    federation, simulation = tiny_fleet(clients=3, cohort=3)
    server, seen = start(federation), {}
    settings = Settings(1, plain(lr=0.1, weight_decay=0.1, batch_size="all"))
    engine = local_engine(simulation)

    class Watching:
        def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
            for reply in engine.run(jobs):
                assert isinstance(reply, Update)
                seen[reply.level] = reply
                yield reply

        def commit_memory(self, update: Update) -> None:
            engine.commit_memory(update)

    after, _ = run_round(federation, Watching(), settings, server)  # type: ignore[arg-type]
    layout, small = federation.problem.layout, federation.levels[0].submodel
    state = extract(layout, after.state, small)
    torch.testing.assert_close(state["heads.1.weight"], seen[0].state["heads.1.weight"])
    assert not torch.equal(state["heads.1.weight"], extract(layout, server.state, small)["heads.1.weight"])
    rest = [c for c in range(8) if c not in small.channels["a"]]
    assert torch.equal(after.state["heads.1.weight"][:, rest], server.state["heads.1.weight"][:, rest])
    assert float((state["stem.weight"] - seen[0].state["stem.weight"]).abs().max()) > 1e-3


def test_clipping_bounds_the_step() -> None:
    """One step of length lr * clip_norm, whatever the gradient: |w' - w| = 1 * 0.01."""
    federation, simulation = tiny_fleet()
    job = make_job(federation, 5, 2, local=plain(lr=1.0, batch_size="all", clip_norm=0.01))
    state = train_job(job, simulation.device(5)).state
    length = sum(((state[n] - job.state[n]).double() ** 2).sum() for n in state) ** 0.5
    assert float(length) == pytest.approx(0.01, rel=1e-3)


def recording(seen: list[Tensor]) -> Method:
    """FedAvg that notes the batches it sees, as rows of pixels."""

    def loss(job: Job, device: Device) -> Any:
        def value(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            seen.append(x.flatten(1).clone())
            return F.cross_entropy(outputs(module, x)[-1], y)

        return value

    return Method(make_loss=loss)


def batches_seen(n: int, local: Local, seed: int = 7) -> tuple[list[Tensor], Tensor]:
    seen: list[Tensor] = []
    federation, simulation = tiny_fleet()
    device = with_train(simulation, 5, n)
    train_job(make_job(federation, 5, 2, local=local, method={"name": recording(seen)}, seed=seed), device)
    return seen, device.data.batch(device.data.split("train"))[0].flatten(1)


def rows(x: Tensor) -> list[tuple[float, ...]]:
    return [tuple(row) for row in x.tolist()]


@pytest.mark.parametrize(
    ("n", "size", "expected"),
    [(16, 8, [8, 8]), (17, 8, [8, 9]), (18, 8, [8, 8, 2]), (9, 8, [9]), (5, 8, [5]), (7, "all", [7])],
)
def test_batches(n: int, size: Any, expected: list[int]) -> None:
    """Each sample exactly once per epoch, in an order of its own; a last batch of one sample joins the batch before
    it.
    """
    seen, every = batches_seen(n, plain(lr=0.01, epochs=3, batch_size=size))
    assert [len(x) for x in seen] == expected * 3
    epochs = [torch.cat(seen[i * len(expected) : (i + 1) * len(expected)]) for i in range(3)]
    assert len(set(rows(every))) == n
    for epoch in epochs:
        assert sorted(rows(epoch)) == sorted(rows(every))
    assert rows(epochs[0]) != rows(epochs[1]) != rows(epochs[2])


def test_seed_orders_batches() -> None:
    local = plain(lr=0.01, batch_size=4)
    first, _ = batches_seen(16, local)
    again, _ = batches_seen(16, local)
    other, _ = batches_seen(16, local, seed=8)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


@pytest.mark.parametrize("n", range(12))
def test_batches_cover_each_sample_once(n: int) -> None:
    for size in (1, 2, 3, 5, 20):
        parts = list(iter_batches(torch.arange(n), size))
        assert torch.equal(torch.cat([torch.arange(0), *parts]), torch.arange(n))
        assert all(len(p) in (size, size + 1) for p in parts[:-1])
        assert n < 2 or size == 1 or all(len(p) > 1 for p in parts)


def test_reported_loss_is_sample_mean() -> None:
    """Without a step (lr = 0) and without norm layers: batches of 8, 8 and 2 must not count alike."""
    federation, simulation = tiny_fleet(norm=False)
    device = with_train(simulation, 5, 18)
    job = make_job(federation, 5, 2, local=plain(lr=0.0, batch_size=8))
    x, y = device.data.batch(device.data.split("train"))
    expected = F.cross_entropy(plain_outputs(job.state, x, (3,))[-1], y)
    update = train_job(job, device)
    assert update.metrics["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert update.metrics["steps"] == 3
    assert update.num_examples == 18
    assert all(torch.equal(update.state[n], job.state[n]) for n in job.state)


def test_jobs_are_independent() -> None:
    """Modules, gradients and generators are reused; a job between two equal ones changes nothing."""
    federation, simulation = tiny_fleet(dropout=0.3)
    local = plain(lr=0.1, momentum=0.9, batch_size=8)
    first = train_job(make_job(federation, 5, 2, local=local), simulation.device(5))
    train_job(make_job(federation, 2, 2, local=local, seed=9), simulation.device(2))
    run_job(make_job(federation, 5, 2, kind="evaluate"), simulation.device(5))
    again = train_job(make_job(federation, 5, 2, local=local), simulation.device(5))
    other = train_job(make_job(federation, 5, 2, local=local, seed=8), simulation.device(5))
    assert all(torch.equal(first.state[n], again.state[n]) for n in first.state)
    assert not all(torch.equal(first.state[n], other.state[n]) for n in first.state)


def test_job_seed_draws_dropout() -> None:
    """All samples at once and no dropout: the seed moves only roundings; with dropout it moves more."""
    local = plain(lr=0.1, batch_size="all")
    for dropout, differs in ((0.0, False), (0.5, True)):
        federation, simulation = tiny_fleet(dropout=dropout)
        a, b = (train_job(make_job(federation, 5, 2, local=local, seed=s), simulation.device(5)) for s in (7, 8))
        gap = max(float((a.state[n] - b.state[n]).abs().max()) for n in a.state)
        assert (gap > 1e-3) == differs


def draw_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_job_seeds_the_generators_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module or a transform may draw from Python's or NumPy's own: a worker draws what this process draws."""
    federation, simulation = tiny_fleet()
    draws: list[Any] = []
    plain_batch = Data.batch

    def draw(self: Data, indices: Tensor, rng: Any = None) -> tuple[Tensor, Tensor]:
        draws.append(draw_numbers())
        return plain_batch(self, indices, rng)

    monkeypatch.setattr(Data, "batch", draw)
    runs = []
    for outside, seed in ((1, 7), (2, 7), (2, 8)):
        seed_global_rngs(torch.device("cpu"), outside)
        train_job(make_job(federation, 5, 2, seed=seed), simulation.device(5))
        after = draw_numbers()
        seed_global_rngs(torch.device("cpu"), outside)
        assert after == draw_numbers(), "the program's own were moved"
        runs.append(list(draws))
        draws.clear()
    assert runs[0] and runs[0] == runs[1] != runs[2]


# ---- failures -------------------------------------------------


def declining(job: Job, device: Device) -> Job | None:
    return None


def test_failures_have_reasons() -> None:
    federation, simulation = tiny_fleet()
    assert "training" in fail_job(make_job(federation, 5, 2), with_train(simulation, 5, 0))
    assert "ValueError: " in fail_job(make_job(federation, 5, 2), with_train(simulation, 5, 1))
    assert "diverged" in fail_job(make_job(federation, 5, 2, local=plain(lr=1e30, epochs=5)), simulation.device(5))
    spec = {"name": "fedavg", "hooks": {"adapt_job": declining}}
    assert "declined" in fail_job(make_job(federation, 5, 2, method=spec), simulation.device(5))
    assert "fedavgg" in fail_job(make_job(federation, 5, 2, method={"name": "fedavgg"}), simulation.device(5))


def infinite_loss(job: Job, device: Device) -> Any:
    return lambda module, x, y: F.cross_entropy(outputs(module, x)[-1], y) + torch.inf


@pytest.mark.parametrize(
    "fields", [{"local": plain(lr=1e38, batch_size="all")}, {"method": {"hooks": {"make_loss": infinite_loss}}}]
)
def test_state_and_loss_must_be_finite(fields: dict[str, Any]) -> None:
    """One step from a finite loss to a state that is not, and an infinite constant, which has no gradient."""
    federation, simulation = tiny_fleet()
    assert "diverged" in fail_job(make_job(federation, 5, 2, **fields), simulation.device(5))


def test_jobs_run_after_a_failure() -> None:
    federation, simulation = tiny_fleet()
    local = plain(lr=0.1, batch_size=8)
    before = train_job(make_job(federation, 5, 2, local=local), simulation.device(5))
    fail_job(make_job(federation, 5, 2, local=plain(lr=1e30, epochs=5)), simulation.device(5))
    after = train_job(make_job(federation, 5, 2, local=local), simulation.device(5))
    assert all(torch.equal(before.state[n], after.state[n]) for n in before.state)


def test_one_sample_trains_where_no_norm_needs_more() -> None:
    federation, simulation = tiny_fleet(norm=False)
    device = with_train(simulation, 5, 1)
    job = make_job(federation, 5, 2, local=plain(lr=0.1))
    expected = plain_sgd(
        job.state, (1, 2, 3), [device.data.batch(device.data.split("train"))], last_exit_loss, job.local
    )
    assert_close(train_job(job, device).state, expected)


# ---- statistics and static evaluation -------------------------------------------------


ALL = EvaluationScope(Evaluation(batch_size=64), statistics_samples=10**6)


def test_client_statistics_add_up() -> None:
    """For the first norm layer these are the moments of the pooled data, whatever the batches; for the deeper ones each
    client's batches are normalized by themselves on the way, so that its batches matter (here: one per client)."""
    federation, simulation = tiny_fleet()
    server = start(federation)
    moments, _ = estimate_statistics(federation, InlineEngine(simulation), server, ALL)
    small, _ = estimate_statistics(
        federation, InlineEngine(simulation), server, replace(ALL, evaluation=Evaluation(batch_size=7))
    )
    assert set(moments) == {0, 1, 2}
    data, train = simulation.data, simulation.data.split("train")
    for level in moments:
        piece = federation.levels[level].submodel
        state = extract(federation.problem.layout, server.state, piece)
        assert_close(moments[level], pooled_moments(federation, simulation, state, level))
        x = data.batch(train)[0].double().flatten(1)
        z = x @ state["stem.weight"].double().T + state["stem.bias"].double()
        z = z @ state["blocks.0.0.weight"].double().T + state["blocks.0.0.bias"].double()
        for tried in (moments[level], small[level]):
            torch.testing.assert_close(tried["blocks.0.1.mean"].double(), z.mean(0), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(tried["blocks.0.1.var"].double(), z.var(0, unbiased=False), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(moments[2]["blocks.1.1.var"], small[2]["blocks.1.1.var"], rtol=1e-5)


def test_statistics_sample_limits() -> None:
    federation, simulation = tiny_fleet()
    settings = Evaluation(split="train", samples=5)
    update, _ = run_job(make_job(federation, 4, 1, kind="statistics", evaluation=settings), simulation.device(4))
    assert isinstance(update, Update)
    assert float(update.state["blocks.0.1.count"]) == 5
    moments, _ = estimate_statistics(
        federation, InlineEngine(simulation), start(federation), replace(ALL, statistics_samples=1)
    )
    assert all(bool(torch.isfinite(t).all()) for state in moments.values() for t in state.values())
    counted: list[float] = []

    class Counting(InlineEngine):
        def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
            for reply in super().run(jobs):
                counted.extend(float(t) for n, t in reply.state.items() if n == "blocks.0.1.count")  # type: ignore[union-attr]
                yield reply

    estimate_statistics(federation, Counting(simulation), start(federation), replace(ALL, statistics_samples=1))
    assert counted == [2.0] * 18


def test_statistics_end_with_the_last_norm_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stem, two blocks of two layers with their classifiers, and the first of the third block, in front of its norm."""
    federation, simulation = tiny_fleet()
    ran: list[int] = []
    plain_forward = nn.Linear.forward

    def counted(layer: nn.Linear, x: Tensor) -> Tensor:
        ran.append(len(x))
        return plain_forward(layer, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    for _ in range(2):  # the first pass of all shows which norm is the last
        ran.clear()
        run_job(make_job(federation, 4, 2, kind="statistics", evaluation=ALL.evaluation), simulation.device(4))
    assert len(ran) == 1 + 2 * (2 + 1) + 1


def test_statistics_leave_the_compiler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes longer than a small job, which has no compiled kernels to switch off."""
    federation, simulation = tiny_fleet()
    monkeypatch.setattr(torch.compiler, "set_stance", None)
    assert isinstance(run_job(make_job(federation, 4, 2, kind="statistics"), simulation.device(4))[0], Update)


def test_rarely_reached_norm_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third block is left out of the first batch: whoever takes the second one for the last misses it."""
    federation, simulation = tiny_fleet()
    plain_segment, batches = TinyNet.segment, [0]

    def segment(net: TinyNet, i: int, carry: Tensor) -> Tensor:
        batches[0] += i == 0
        return carry if i == len(net.exits) - 1 and batches[0] == 1 else plain_segment(net, i, carry)

    monkeypatch.setattr(TinyNet, "segment", segment)
    job = make_job(federation, 4, 2, kind="statistics", evaluation=Evaluation(split="train", batch_size=4))
    update, _ = run_job(job, simulation.device(4))
    assert isinstance(update, Update)
    n = update.num_examples
    assert float(update.state["blocks.0.1.count"]) == n
    assert float(update.state["blocks.2.1.count"]) == n - 4


class Steps(nn.Module):
    """Two norms and two exits in one forward, without segments."""

    exits = (1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.first(x)
        return [self.head(x), self.head(self.second(2 * x))]


def test_norms_outside_of_segments_are_measured() -> None:
    """x = 1, 3 and 0, 4 in the first channel: mean 2, and standard deviations 1 and 2, so the second norm gets +-2."""
    module = Steps()
    sums = BatchNormSums(module)
    with sums.watch():
        for batch in ([[1.0, 5.0], [3.0, 5.0]], [[0.0, 5.0], [4.0, 5.0]]):
            sums.run(torch.tensor(batch))
        batch_sums = sums.take()
    assert batch_sums["first.sum"].tolist() == [8, 20] and batch_sums["first.squares"].tolist() == [26, 100]
    assert batch_sums["second.sum"].tolist() == pytest.approx([0, 0], abs=1e-3)
    assert batch_sums["second.squares"].tolist() == pytest.approx([16, 0], abs=1e-3)
    assert batch_sums["first.count"].tolist() == batch_sums["second.count"].tolist() == [4]


def test_single_image_equals_batch() -> None:
    """The point of static statistics: a prediction does not depend on its neighbors; with batch statistics it does."""
    federation, simulation = tiny_fleet()
    server = start(federation)
    moments, _ = estimate_statistics(federation, InlineEngine(simulation), server, ALL)
    x, _ = simulation.data.batch(simulation.data.split("test"))
    for level in moments:
        module = build_level_module(federation, server, level, moments)
        with torch.no_grad():
            together = module(x)
            for i in range(8):
                for alone, row in zip(module(x[i : i + 1]), together, strict=True):
                    torch.testing.assert_close(alone[0], row[i], rtol=1e-5, atol=1e-6)
    job = make_job(federation, 5, 2, kind="evaluate", statistics=moments[2])
    loss = "torch.nn.functional:cross_entropy"

    def score(norm: Any, batch_size: int) -> Mapping[str, Any]:
        evaluation = Evaluation(batch_size=batch_size, norm=norm, metrics=(loss,))
        reply, _ = run_job(replace(job, evaluation=evaluation), simulation.device(5))
        assert isinstance(reply, Update)
        return reply.metrics

    counts = [score("static", size) for size in (2, 3, 64)]
    assert len({str((metrics["correct"], metrics["ensemble"])) for metrics in counts}) == 1
    losses = [metrics["own"][loss] for metrics in counts]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] == pytest.approx(losses[2], rel=1e-5)
    assert score("batch", 2)["own"][loss] != pytest.approx(score("batch", 64)["own"][loss], rel=1e-3)


def test_evaluation_resets_norm_layers() -> None:
    """Training after a static evaluation still uses each batch's own moments."""
    federation, simulation = tiny_fleet()
    job = make_job(federation, 5, 2, local=plain(lr=0.1, batch_size=8))
    before = train_job(job, simulation.device(5))
    moments, _ = estimate_statistics(federation, InlineEngine(simulation), start(federation), ALL)
    run_job(make_job(federation, 5, 2, kind="evaluate", statistics=moments[2]), simulation.device(5))
    after = train_job(job, simulation.device(5))
    assert all(torch.equal(before.state[n], after.state[n]) for n in before.state)
