"""Simulated time: seconds of a job from its parts, who is slow, what a round and a run report."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import raises
from support.devices import FIGURES, set_speeds
from tiny import plain, tiny_federation

from fleetfit import messages
from fleetfit.config import load_experiment
from fleetfit.config.assemble.fleet import draw_slow_clients
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Device, DeviceResources, Failure, Federation, Job, Local, Simulation, Speed, Update
from fleetfit.cost import submodel_cost
from fleetfit.engines.local import local
from fleetfit.errors import ConfigError
from fleetfit.profiles import PROFILES
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.rounds.report import simulated_seconds
from fleetfit.seeds import make_numpy_rng
from fleetfit.submodel import Submodel
from fleetfit.training import run_job
from fleetfit.training.clock import STEP, count_planned_passes, forward_work


def clocked(spec: dict[str, Any] | None = None, **more: Any) -> tuple[Federation, Simulation]:
    federation, simulation = tiny_federation(spec or {"name": "scalefl"}, **more)
    return federation, set_speeds(simulation, 1e6, 2e4, 1e4, 0.25)


def replies(federation: Federation, simulation: Simulation, training: Local) -> list[Update | Failure]:
    """Return the replies of the first round with their bytes counted."""
    results: list[Update | Failure] = []
    engine = local(simulation)

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def run(self, jobs: Any) -> Any:
            jobs_sent = []

            def record() -> Any:
                for job in jobs:
                    jobs_sent.append(job)
                    yield job

            for index, reply in enumerate(engine.run(record())):
                layout = federation.problem.layout
                down, up = messages.job_size(jobs_sent[index], layout), messages.reply_size(reply, layout)
                sizes = {"bytes_down": down, "bytes_up": up}
                results.append(replace(reply, **sizes))
                yield reply

    run_round(federation, Watched(), Settings(1, training), start(federation))  # type: ignore[arg-type]
    return results


def test_seconds_add_latency_transfer_and_compute() -> None:
    """0.25 s + down / 20 kB/s + 3 x forward x samples x epochs / 1e6 per s + up / 10 kB/s, from the reported bytes."""
    federation, simulation = clocked()
    training = plain(epochs=2, batch_size=8)
    _, report = run_round(federation, local(simulation), Settings(1, training), start(federation))
    result = replies(federation, simulation, training)
    for update in result:
        assert isinstance(update, Update)
        forward = submodel_cost(federation.problem.architecture, update.submodel, (1, 4, 4)).multiply_adds
        work = 3 * forward * 2 * update.num_examples
        assert update.multiply_adds == work
        assert update.simulated_s == pytest.approx(0.25 + update.bytes_down / 2e4 + work / 1e6 + update.bytes_up / 1e4)
    assert report["simulated_s"] == max(u.simulated_s for u in result if u.simulated_s is not None)
    assert report["multiply_adds"] == sum(u.multiply_adds for u in result)
    assert (report["bytes_down"], report["bytes_up"]) == (
        sum(u.bytes_down for u in result), sum(u.bytes_up for u in result)
    )  # fmt: skip


def test_forward_work_of_the_tiny_model_by_hand() -> None:
    """Level 2 has 6 of 8 channels a, 8 of 12 channels b (granule 2), two blocks and two heads of four classes."""
    federation, _ = tiny_federation({"name": "scalefl"})
    piece = federation.levels[1].submodel
    a, b = piece.sizes["a"], piece.sizes["b"]
    assert (a, b) == (6, 8)
    assert forward_work(federation.problem, piece) == 16 * a + 2 * (a * b + b * a) + 2 * a * 4
    moved = Submodel({"a": (1, 2, 4, 5, 6, 7), "b": range(b)}, piece.exits)  # other channels, the same work
    assert forward_work(federation.problem, moved) == forward_work(federation.problem, piece)


def test_validation_counts_as_forward_passes() -> None:
    """One epoch, one look at all validation samples: 3 per training sample and 1 per validation sample."""
    federation, simulation = clocked(clients=3, cohort=1)
    result = replies(federation, simulation, plain(epochs=1, batch_size=8, patience=1))[0]
    assert isinstance(result, Update) and result.client is not None
    looked = len(simulation.parts[result.client]["validation"])
    assert looked > 0
    forward = submodel_cost(federation.problem.architecture, result.submodel, (1, 4, 4)).multiply_adds
    assert result.multiply_adds == forward * (3 * result.num_examples + looked)


def declare_extra(extra: Any) -> Any:
    """Return FedAvg's loss, as a hook, with `extra_multiply_adds`."""

    def hook(job: Job, device: Device) -> Any:
        class Declaring:
            extra_multiply_adds = extra

            def __call__(self, module: Any, x: Any, y: Any) -> Any:
                return device.problem.task.loss(module(x)[-1], y)

        return Declaring()

    return hook


def test_extra_work_of_a_loss_counts() -> None:
    """(3 x forward + 1000) x samples x epochs, in multiply-adds and seconds; looks of early stopping are without."""
    training = plain(epochs=2, batch_size=8, patience=9)
    federation, simulation = clocked({"name": "fedavg", "hooks": {"make_loss": declare_extra(1000)}})
    for update in replies(federation, simulation, training):
        assert isinstance(update, Update) and update.client is not None
        forward = submodel_cost(federation.problem.architecture, update.submodel, (1, 4, 4)).multiply_adds
        looked = len(simulation.parts[update.client]["validation"])
        work = (3 * forward + 1000) * 2 * update.num_examples + 2 * forward * looked
        assert update.multiply_adds == work
        assert update.simulated_s == pytest.approx(0.25 + update.bytes_down / 2e4 + work / 1e6 + update.bytes_up / 1e4)


@pytest.mark.parametrize("extra", [-1e15, math.nan, math.inf, "many"])
def test_extra_work_is_a_number(extra: Any) -> None:
    federation, simulation = clocked({"name": "fedavg", "hooks": {"make_loss": declare_extra(extra)}})
    assert all(isinstance(reply, Failure) for reply in replies(federation, simulation, plain()))


def test_no_profiles_no_time() -> None:
    federation, simulation = tiny_federation({"name": "scalefl"})
    _, report = run_round(federation, local(simulation), Settings(1, plain()), start(federation))
    assert report["multiply_adds"] > 0
    assert report["simulated_s"] is None
    assert "deadline" not in report


def test_evaluation_does_not_advance_the_clock() -> None:
    federation, simulation = clocked()
    settings = Settings(2, plain(epochs=1), evaluate_every=1)
    with_it = [r.report for r in run(federation, local(simulation), settings, start(federation))]
    without = replace(settings, evaluate_every=0)
    rest = [r.report for r in run(federation, local(simulation), without, start(federation))]
    assert "evaluate" in with_it[0] and "evaluate" not in rest[0]
    for key in ("multiply_adds", "simulated_s"):
        assert [r[key] for r in with_it] == [r[key] for r in rest]


def test_clock_is_not_sent() -> None:
    """Bytes are the same with and without figures; else seconds would depend on the digits of seconds."""
    federation, simulation = tiny_federation({"name": "scalefl"})
    bare = run_round(federation, local(simulation), Settings(1, plain()), start(federation))[1]
    timed = run_round(
        federation, local(set_speeds(simulation, 1e6, 1e4, 1e4, 0.1)), Settings(1, plain()), start(federation)
    )[1]
    assert timed["simulated_s"] is not None
    assert (bare["bytes_down"], bare["bytes_up"]) == (timed["bytes_down"], timed["bytes_up"])


def by_enumeration(local: Local, samples: int, looked: int) -> int:
    """Count passes batch by batch; a single last sample joins the batch before it."""
    size, passes, steps = local.count_batch(samples), 0, 0
    for _ in range(local.epochs):
        left = samples
        while left:
            now = left if left - size == 1 else min(size, left)
            passes, left, steps = passes + 3 * now, left - now, steps + 1
            if steps == local.max_steps:
                return passes + looked
        passes += looked
    return passes


@pytest.mark.parametrize("samples", [1, 2, 8, 9, 17, 25])
@pytest.mark.parametrize("looked", [0, 5])
def test_planned_passes_cover_all_steps(samples: int, looked: int) -> None:
    for size in ("all", 4, 8):
        for epochs in (1, 3):
            for most in (None, 1, 2, 5, 100):
                local = plain(epochs=epochs, batch_size=size, max_steps=most)
                assert count_planned_passes(local, samples, looked) == by_enumeration(local, samples, looked)
    assert STEP == 3


@pytest.mark.parametrize(("most", "steps", "checks"), [(None, 10, 4), (7, 7, 4), (6, 6, 3), (2, 2, 2)])
def test_planned_checks_are_those_of_the_steps(most: int | None, steps: int, checks: int) -> None:
    """Two epochs of five steps of four samples. Checks: before the first, after each third and after the last allowed.

    After step 10 nothing is checked: it ends the epochs, and is neither a third one nor a limit.
    """
    local = plain(epochs=2, batch_size=4, max_steps=most, check_every=3)
    assert count_planned_passes(local, 20, 5) == 3 * 4 * steps + 5 * checks


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    piece = Submodel({}, (1,))

    def update(seconds: float | None) -> Update:
        return Update(0, 0, 0, 0, piece, piece, {}, 1, {}, simulated_s=seconds)

    lost = Failure(0, 1, 1, 0, piece, "its worker died")
    assert simulated_seconds([update(2.0), update(3.5)], None) == 3.5
    assert simulated_seconds([update(2.0), update(3.5)], 9.0) == 3.5  # nobody is missing: the server goes on
    assert simulated_seconds([update(2.0), lost], 9.0) == 9.0  # it waits for who was lost
    assert simulated_seconds([update(2.0), lost], None) == 2.0
    assert simulated_seconds([update(None)], 9.0) is None


@pytest.mark.parametrize("deadline_s", [None, 9.0])
def test_absent_clients_take_until_the_deadline(deadline_s: float | None) -> None:
    """Without a deadline the server notices when the job cannot be delivered: 0.25 s and down / 20 kB/s."""
    federation, simulation = clocked()
    piece = federation.levels[0].submodel
    state = federation.method.dispatch(federation, start(federation), 0, piece)
    training = plain(deadline_s=deadline_s)
    job = Job("train", 0, 1, 0, 0, piece, state, federation.method_spec, 5, 0, training)
    device = replace(simulation.device(0), absent="went away")
    reply, _ = run_job(job, device)
    assert isinstance(reply, Failure) and reply.absent and not reply.late
    down = messages.job_size(job, federation.problem.layout)
    assert reply.simulated_s == pytest.approx(0.25 + down / 2e4 if deadline_s is None else 9.0)


# ---- figures of a fleet --------------------------------------------------------------------------------------------


def test_a_share_of_every_group_is_slow() -> None:
    group = np.array([0] * 10 + [1] * 20 + [2] * 10)
    slow = draw_slow_clients(group, 0.3, 5)
    assert [int(slow[group == g].sum()) for g in range(3)] == [3, 6, 3]
    assert draw_slow_clients(np.zeros(7, dtype=int), 0.3, 0).sum() == 2  # round(2.1)
    assert (slow != draw_slow_clients(group, 0.3, 6)).any() and (slow == draw_slow_clients(group, 0.3, 5)).all()


def test_profiles_of_a_run_file_reach_the_devices() -> None:
    """Groups by name and by figures; slow ones compute 4 times and send 2 times slower."""
    own = {"multiply_adds_per_s": 1e9, "down_bytes_per_s": 1e6, "up_bytes_per_s": 5e5, "latency_s": 0.05}
    assembly = assemble(load_experiment({
        "data": {"partition": {"kind": "iid", "clients": 10}},
        "fleet": {"groups": [{"budget": 0.5, "profile": "phone"}, {"budget": 1.0, "profile": own}],
                  "slow": {"fraction": 0.2, "factor": 4.0, "link": 2.0}},
    }))  # fmt: skip
    speeds = [assembly.simulation.device(c).clock.speed for c in range(10)]
    expected = [Speed(**{name: getattr(PROFILES["phone"], name) for name in FIGURES}), Speed(**own)]
    slower = [
        replace(s, multiply_adds_per_s=s.multiply_adds_per_s / 4, down_bytes_per_s=s.down_bytes_per_s / 2,
                up_bytes_per_s=s.up_bytes_per_s / 2)
        for s in expected
    ]  # fmt: skip
    for group in range(2):
        mine = [s for s, g in zip(speeds, assembly.fleet.group, strict=True) if g == group]
        assert mine.count(expected[group]) == 4 and mine.count(slower[group]) == 1
    assert assembly.federation.device is not None and assembly.federation.device.clock.speed is None


@pytest.mark.parametrize("key", ["slow={fraction=0.3}", "jitter=0.1"])
def test_slow_clients_need_profiles(key: str) -> None:
    with raises(ConfigError, f"[fleet] {key.partition('=')[0]}"):
        assemble(load_experiment({}, [f"fleet.{key}"]))


def test_jitter_is_the_formula_and_differs_by_round() -> None:
    speeds = {name: np.array([v, 2 * v]) for name, v in zip(FIGURES, (1e6, 2e4, 1e4, 0.1), strict=True)}
    resources = DeviceResources(seed=3, speeds=speeds, jitter=0.2)
    n = make_numpy_rng(3, "jitter", 1, 7).normal(size=2)
    speed = resources.get_speed(1, 7)
    assert speed is not None
    assert speed.multiply_adds_per_s == pytest.approx(2e6 * math.exp(0.2 * n[0]))
    assert speed.down_bytes_per_s / 4e4 == pytest.approx(math.exp(0.2 * n[1]))
    assert speed.up_bytes_per_s / 2e4 == pytest.approx(math.exp(0.2 * n[1]))
    assert speed.latency_s == 0.2
    assert resources.get_speed(1, 8) != speed != resources.get_speed(0, 7)
    again = DeviceResources.from_payload(resources.payload)
    assert [again.get_speed(c, t) for c in (0, 1) for t in range(5)] == [
        resources.get_speed(c, t) for c in (0, 1) for t in range(5)
    ]
    assert DeviceResources().get_speed(0, 0) is None


def test_profiles_have_sources() -> None:
    for name, profile in PROFILES.items():
        assert profile.what and "speed:" in profile.source and "memory:" in profile.source, name
        assert min(getattr(profile, figure) for figure in FIGURES) > 0
        assert profile.memory_bytes is not None and 1e9 < profile.memory_bytes < 1e11
    speeds = {name: profile.multiply_adds_per_s for name, profile in PROFILES.items()}
    assert min(speeds, key=lambda name: speeds[name]) == "raspberry-pi-4b"
    assert max(speeds, key=lambda name: speeds[name]) == "jetson-xavier-agx"
