"""Deadlines: which exit fits, how many steps end in time, who is dropped; by brute force and by hand."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import aggregate_updates
from support.devices import set_speeds
from tiny import plain, spec_of, tiny_federation

import fleetfit
from fleetfit import messages, names
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Clock, Device, Failure, Federation, Job, Local, Simulation, Speed, Update
from fleetfit.cost import submodel_cost
from fleetfit.engines.local import local
from fleetfit.options import in_time
from fleetfit.rounds import Settings, run_round, start
from fleetfit.rounds.report import count_deadlines
from fleetfit.submodel import Submodel
from fleetfit.training import clock, run_job
from fleetfit.validation import find_update_error

SHALLOWER = {"name": "scalefl", "options": {"in_time": {}}}
LATENCY, DOWN, UP = 0.1, 1e5, 5e4


def one_job(
    federation: Federation, training: Local, level: int = 2, client: int = 2, state: Mapping[str, Any] | None = None
) -> Job:
    """Return the job of a client for a level, as the server sends it."""
    piece = federation.levels[level].submodel
    server = start(federation)
    sent = federation.method.dispatch(federation, server, client, piece)
    return Job("train", 0, 3, 0, client, piece, sent if state is None else state, federation.method_spec, 11, level,
               training)  # fmt: skip


def device_of(simulation: Simulation, client: int, speed: float) -> Device:
    device = simulation.device(client)
    device.clock = Clock(Speed(speed, DOWN, UP, LATENCY))
    return device


def seconds_of(federation: Federation, job: Job, exits: int, samples: int, speed: float) -> float:
    """Return the predicted seconds of a whole training of the first exits, from the parts; 1024 bytes are left over."""
    piece = Submodel(job.submodel.channels, job.submodel.exits[:exits])
    shapes = federation.problem.layout.shapes(piece.sizes, piece.exits)
    reply = Update(0, 0, job.client, job.level, piece, piece, {n: torch.zeros(s) for n, s in shapes.items()}, 0, {})
    forward = submodel_cost(federation.problem.architecture, piece, (1, 4, 4)).multiply_adds
    up = len(messages.pack(messages.dump_reply(reply, federation.problem.layout))) + 1024
    work = 3 * forward * samples * job.local.epochs
    return (
        LATENCY + len(messages.pack(messages.dump_job(job, federation.problem.layout))) / DOWN + work / speed + up / UP
    )


def test_deepest_fitting_exit_is_trained() -> None:
    """Every deadline from far too short to long enough, for slow and fast devices, against all exits tried in turn."""
    federation, simulation = tiny_federation(SHALLOWER)
    samples = len(simulation.parts[2]["train"])
    seen = set()
    for speed in (2e5, 1e6, 1e8):
        for deadline_s in np.linspace(0.3, 6, 24):
            job = one_job(federation, plain(epochs=2, batch_size=8, deadline_s=float(deadline_s)))
            fitting = [n for n in (1, 2, 3) if seconds_of(federation, job, n, samples, speed) <= deadline_s]
            adapted = in_time.train_shallower(job, clock.start_clock(job, device_of(simulation, 2, speed)))
            assert adapted.submodel.exits == job.submodel.exits[: max(fitting, default=1)], (speed, deadline_s)
            seen.add(len(adapted.submodel.exits))
    assert seen == {1, 2, 3}


def test_shallower_update_is_in_time() -> None:
    federation, simulation = tiny_federation(SHALLOWER)
    whole = one_job(federation, plain(epochs=2, batch_size=8))
    samples = len(simulation.parts[2]["train"])
    limit = seconds_of(federation, whole, 2, samples, 5e5) + 0.01
    job = one_job(federation, whole.local.replace(deadline_s=limit))
    update, _ = run_job(job, device_of(simulation, 2, 5e5))
    assert isinstance(update, Update)
    assert update.submodel.exits == (1, 2) and update.dispatched.exits == (1, 2, 3)
    assert find_update_error(update, job, federation) is None
    assert update.simulated_s is not None and update.simulated_s <= limit
    assert "stopped" not in update.metrics
    alone = replace(job, submodel=update.submodel, local=whole.local, state={n: job.state[n] for n in update.state})
    expected, _ = run_job(alone, simulation.device(2))  # as if that part had been sent, with all the time there is
    assert isinstance(expected, Update)
    assert all(torch.equal(update.state[name], tensor) for name, tensor in expected.state.items())
    assert update.state.keys() == expected.state.keys()
    assert count_deadlines([update, expected]) == {"shallower": 1, "stopped": 0, "late": 0}


@pytest.mark.parametrize("late", ["stop", "shallower"])
def test_training_stops_in_time(late: Any) -> None:
    """Steps by hand: each costs 3 x forward x batch; the state is that of a training of so many steps."""
    federation, simulation = tiny_federation({"name": "heterofl", "options": {"in_time": {}}})
    federation = replace(federation, levels=tuple(replace(v, submodel=replace(v.submodel, exits=(3,)))
                                                  for v in federation.levels))  # fmt: skip
    samples, speed = len(simulation.parts[2]["train"]), 1e6
    forward = submodel_cost(federation.problem.architecture, federation.levels[2].submodel, (1, 4, 4)).multiply_adds
    per_epoch = -(-samples // 8)
    for steps_in_time in (1, 2, per_epoch - 1, per_epoch, per_epoch + 3):
        full, rest = divmod(steps_in_time, per_epoch)
        passes = 3 * (full * samples + min(rest * 8, samples))
        job = one_job(federation, plain(epochs=3, batch_size=8))
        without = seconds_of(federation, job, 1, 0, speed)
        limit = without + (passes + 0.5) * forward / speed
        job = replace(job, local=job.local.replace(deadline_s=limit, late=late))
        reply, _ = run_job(job, device_of(simulation, 2, speed))
        assert isinstance(reply, Update)
        assert reply.metrics["steps"] == steps_in_time and reply.metrics["stopped"] is True
        assert count_deadlines([reply]) == {"shallower": 0, "stopped": 1, "late": 0}
        assert reply.multiply_adds == passes * forward
        assert reply.simulated_s is not None and reply.simulated_s <= limit
        free = replace(job, local=job.local.replace(deadline_s=None, max_steps=steps_in_time))
        expected, _ = run_job(free, simulation.device(2))
        assert isinstance(expected, Update)
        assert all(torch.equal(reply.state[name], tensor) for name, tensor in expected.state.items())


EXTRA = 5000


def costly_loss(job: Job, device: Device) -> Any:
    """FedAvg's loss, which declares extra work where the job has all three exits."""

    def loss(module: Any, x: Any, y: Any) -> Any:
        return device.problem.task.loss(module(x)[-1], y)

    if job.submodel.depth == 3:
        loss.extra_multiply_adds = EXTRA  # type: ignore[attr-defined]
    return loss


def test_deadlines_foresee_extra_work_of_a_loss() -> None:
    """Three exits fit by their forward passes alone, and do not with what the loss adds; two exits do.

    Told to stop, the client takes the steps of eight samples that end in time, by hand.
    """
    federation, simulation = tiny_federation({**SHALLOWER, "hooks": {"make_loss": costly_loss}})
    samples, speed = len(simulation.parts[2]["train"]), 1e6
    whole = one_job(federation, plain(epochs=2, batch_size=8))
    limit = seconds_of(federation, whole, 3, samples, speed) + 0.01
    assert limit < seconds_of(federation, whole, 3, samples, speed) + EXTRA * samples * 2 / speed
    job = one_job(federation, whole.local.replace(deadline_s=limit))
    update, _ = run_job(job, device_of(simulation, 2, speed))
    assert isinstance(update, Update) and update.submodel.exits == (1, 2)

    job = replace(job, local=job.local.replace(late="stop"))
    update, _ = run_job(job, device_of(simulation, 2, speed))
    forward = submodel_cost(federation.problem.architecture, job.submodel, (1, 4, 4)).multiply_adds
    work = (limit - seconds_of(federation, job, 3, 0, speed)) * speed
    assert isinstance(update, Update) and update.metrics["stopped"] is True
    assert update.metrics["steps"] == work // ((3 * forward + EXTRA) * 8)
    assert update.multiply_adds == (3 * forward + EXTRA) * 8 * update.metrics["steps"]


def test_no_finished_step_is_late_failure() -> None:
    federation, simulation = tiny_federation(SHALLOWER)
    for limit in (0.05, 0.5):  # before anything arrived; before the first step of the shallowest exit
        job = one_job(federation, plain(deadline_s=limit))
        reply, memory = run_job(job, device_of(simulation, 2, 10.0))
        assert isinstance(reply, Failure) and reply.late and not reply.declined
        assert f"{limit:g} s" in reply.reason
        assert (reply.multiply_adds, reply.simulated_s, memory) == (0, limit, None)


def test_unexpectedly_large_reply_is_late() -> None:
    """Metrics of 50 kB take a second on the way up, for which no time was left."""
    federation, simulation = tiny_federation({"name": "fedavg"})
    job = one_job(federation, plain(epochs=1, batch_size=8))
    limit = seconds_of(federation, job, 3, len(simulation.parts[2]["train"]), 1e6) + 0.5
    job = replace(job, local=job.local.replace(deadline_s=limit, late="stop"))
    assert isinstance(run_job(job, device_of(simulation, 2, 1e6))[0], Update)
    talkative = replace(job, method={"name": "fedavg", "hooks": {"report": report_much}})
    reply, _ = run_job(talkative, device_of(simulation, 2, 1e6))
    assert isinstance(reply, Failure) and reply.late and reply.simulated_s == limit
    assert reply.multiply_adds > 0


def report_much(job: Job, device: Device, result: Any) -> Mapping[str, Any]:
    return {"said": "x" * 50_000}


def test_drop_discards_late_clients() -> None:
    """The slow half cannot finish; what it computed until the deadline is counted, and no update of it."""
    federation, simulation = tiny_federation({"name": "scalefl"}, clients=6, cohort=6)
    slow = np.array([1e9, 1e9, 1e9, 1e3, 1e3, 1e3])
    simulation = set_speeds(simulation, 1e9, 1e6, 1e6, 0.1)
    figures = {**simulation.resources.speeds, "multiply_adds_per_s": slow}
    simulation = replace(simulation, resources=replace(simulation.resources, speeds=figures))
    training = plain(epochs=2, batch_size=8, deadline_s=5.0, late="drop")
    _, report = run_round(federation, local(simulation), Settings(1, training), start(federation))
    assert sorted(f["client"] for f in report["failures"]) == [3, 4, 5]
    assert report["train"]["clients"] == 3
    assert report["deadline"] == {"shallower": 0, "stopped": 0, "late": 3}
    assert report["simulated_s"] == 5.0
    alone = {name: np.array([v[0]] * 6) for name, v in figures.items()}
    quick = replace(simulation, resources=replace(simulation.resources, speeds=alone))
    _, full = run_round(federation, local(quick), Settings(1, training), start(federation))
    assert full["simulated_s"] < 5.0 and not full["failures"]
    fast_ones = full["multiply_adds"] / 2  # clients 3 to 5 have the levels and as many samples as 0 to 2, or one less
    assert fast_ones * 0.9 < report["multiply_adds"] < fast_ones * 1.1 + 3 * 1e3 * 5


def test_long_deadlines_change_no_bit() -> None:
    spec = {"name": "scalefl"}
    federation, simulation = tiny_federation(spec)
    expected, _ = run_round(federation, local(simulation), Settings(1, plain()), start(federation))
    for late in ("shallower", "stop", "drop"):
        timed, _ = tiny_federation({**spec, "options": {"in_time": {}}})
        training = plain(deadline_s=1e6, late=late)  # type: ignore[arg-type]
        engine = local(set_speeds(simulation, 1e9, 1e6, 1e6, 0.1))
        after, report = run_round(timed, engine, Settings(1, training), start(timed))
        assert all(torch.equal(after.state[name], tensor) for name, tensor in expected.state.items())
        assert report["deadline"] == {"shallower": 0, "stopped": 0, "late": 0}


def test_a_deadline_works_with_max_steps_and_patience() -> None:
    """With max_steps the whole sub-model fits again; a look at validation data that does not fit ends the training."""
    federation, simulation = tiny_federation(SHALLOWER)
    samples, speed = len(simulation.parts[2]["train"]), 5e5
    job = one_job(federation, plain(epochs=4, batch_size=8))
    limit = seconds_of(federation, replace(job, local=job.local.replace(epochs=1)), 3, samples, speed) + 1e-6
    forward = submodel_cost(federation.problem.architecture, job.submodel, (1, 4, 4)).multiply_adds

    def train_once(**more: Any) -> Update:
        update, _ = run_job(replace(job, local=job.local.replace(deadline_s=limit, **more)),
                            device_of(simulation, 2, speed))  # fmt: skip
        assert isinstance(update, Update)
        return update

    assert len(train_once().submodel.exits) < 3
    limited = train_once(max_steps=2)
    assert limited.submodel == job.submodel and limited.metrics["steps"] == 2 and "stopped" not in limited.metrics
    stopped = train_once(late="stop", patience=9)
    assert stopped.metrics["stopped"] is True
    assert stopped.multiply_adds == 3 * samples * forward  # one epoch; the look after it would end too late


# ---- methods accept what comes back --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "plus"),
    [
        *((name, {}) for name in names.list_names("methods") if name != "fedsgd"),  # one step is all it does
        *((name, plus) for name in ("scalefl", "decoupled") for plus in ({"feddyn": {}}, {"fedadam": {}})),
    ],
)
def test_methods_take_shallower_and_stopped_updates(name: str, plus: Mapping[str, Any]) -> None:
    """Two rounds in which the deadline bites: everybody's update is accepted, and client memories move along."""
    federation, simulation = tiny_federation({**spec_of(name), "options": {**plus, "in_time": {}}}, clients=6, cohort=6)
    engine = local(set_speeds(simulation, 2e5, 1e6, 1e6, 0.1))
    settings = Settings(2, plain(lr=0.05, epochs=3, batch_size=8, deadline_s=0.4))
    server = start(federation)
    for _ in range(2):
        server, report = run_round(federation, engine, settings, server)
        assert not report["failures"]
        assert report["deadline"]["shallower"] + report["deadline"]["stopped"] > 0
    assert all(torch.isfinite(tensor).all() for tensor in server.state.values())


def test_decoupled_counts_partial_updates() -> None:
    """Two clients of a level send all of it and a part: blocks that one trained are its own, others the mean."""
    federation, _ = tiny_federation({"name": "decoupled"})
    level = federation.levels[2]
    layout = federation.problem.layout
    part = Submodel({**level.submodel.channels, "a": range(4)}, (1, 2))
    states = [
        {n: torch.full(s, value) for n, s in layout.shapes(p.sizes, p.exits).items()}
        for p, value in ((level.submodel, 1.0), (part, 4.0))
    ]
    updates = [
        Update(0, i, i, 2, level.submodel, p, s, 10, {})
        for i, (p, s) in enumerate(zip((level.submodel, part), states, strict=True))
    ]
    server = start(federation)
    aggregate = aggregate_updates(federation, server, updates)
    after = federation.method.step(federation, server, aggregate, updates)
    stem = after.state["level3/stem.weight"]
    assert torch.equal(stem[:4], torch.full_like(stem[:4], 2.5)) and torch.equal(stem[4:], torch.ones_like(stem[4:]))
    deep = [n for n in after.state if n.startswith("level3/blocks.2.")]
    assert deep and all(torch.equal(after.state[n], torch.ones_like(after.state[n])) for n in deep)


# ---- real time -----------------------------------------------------------------------------------------------------


class Ticking:
    """A clock that advances by `each` seconds at every look."""

    def __init__(self, each: float) -> None:
        self.time, self.each = 100.0, each

    def __call__(self) -> float:
        self.time += self.each
        return self.time


def passing(simulation: Simulation, now: Callable[[], float]) -> Device:
    device = simulation.device(2)
    device.clock = Clock(now=now)
    return device


def test_real_time_stops_before_late_step() -> None:
    """Each look at the clock takes a second: when the job begins (0), when the loop begins (1), before each step.

    Before step n + 1 it is n + 2, and n steps took n + 1 seconds, so that the next should end at n + 2 + (n + 1) / n.
    """
    federation, simulation = tiny_federation({"name": "fedavg"})
    job = one_job(federation, plain(epochs=9, batch_size=4, deadline_s=8.5, late="stop"))
    reply, _ = run_job(job, passing(simulation, Ticking(1.0)))
    assert isinstance(reply, Update)
    expected = 1
    while expected + 2 + (expected + 1) / expected <= 8.5:
        expected += 1
    assert reply.metrics["steps"] == expected and reply.metrics["stopped"] is True
    assert reply.simulated_s is None
    dropped, _ = run_job(replace(job, local=job.local.replace(late="drop")), passing(simulation, Ticking(1.0)))
    assert isinstance(dropped, Failure) and dropped.late and dropped.simulated_s is None
    assert dropped.multiply_adds == reply.multiply_adds
    none, _ = run_job(replace(job, local=job.local.replace(deadline_s=1.5)), passing(simulation, Ticking(1.0)))
    assert isinstance(none, Failure) and none.late
    all_of_it, _ = run_job(replace(job, local=job.local.replace(deadline_s=1e3)), passing(simulation, Ticking(1.0)))
    assert isinstance(all_of_it, Update) and "stopped" not in all_of_it.metrics


def test_real_time_exit_follows_last_speed() -> None:
    federation, simulation = tiny_federation(SHALLOWER)
    samples = len(simulation.parts[2]["train"])
    forward = {
        n: submodel_cost(federation.problem.architecture, Submodel(federation.levels[2].submodel.channels,
                                                                   (1, 2, 3)[:n]), (1, 4, 4)).multiply_adds
        for n in (1, 2, 3)
    }  # fmt: skip
    now = [0.0]
    device = passing(simulation, lambda: now[0])
    job = one_job(federation, plain(epochs=2, batch_size=8, deadline_s=10.0))
    assert in_time.train_shallower(job, clock.start_clock(job, device)) is job  # nothing is known yet
    began = clock.start_clock(job, device)
    now[0] = 4.0
    clock.record_speed(began, 6 * samples * forward[2])  # two exits' training took 4 s
    now[0] = 0.0
    for deadline_s, exits in ((4.01, 2), (3.99, 1), (4.01 * forward[3] / forward[2], 3), (0.01, 1)):
        timed = replace(job, local=job.local.replace(deadline_s=deadline_s))
        adapted = in_time.train_shallower(timed, clock.start_clock(timed, device))
        assert len(adapted.submodel.exits) == exits, deadline_s


def test_real_time_job_records_speed() -> None:
    """Each look at the clock takes a second. The first job knows no speed and trains all; the next, which has less time
    than that took, an exit less.
    """
    federation, simulation = tiny_federation(SHALLOWER)
    job = one_job(federation, plain(epochs=2, batch_size=4, deadline_s=1e3))
    now = Ticking(1.0)
    device, began = passing(simulation, now), now.time
    first, _ = run_job(job, device)
    took = now.time - began
    assert isinstance(first, Update) and first.submodel.exits == (1, 2, 3)
    hurried = replace(job, local=job.local.replace(deadline_s=0.8 * took))
    second, _ = run_job(hurried, device)
    assert isinstance(second, Update) and second.submodel.exits == (1, 2)


# ---- from the run file ---------------------------------------------------------------------------------------------


def test_resumed_run_with_deadlines_has_equal_bits(tmp_path: Path) -> None:
    table = {
        "rounds": 3,
        "data": {"partition": {"kind": "iid", "clients": 8}},
        "fleet": {"groups": [{"budget": 0.25, "profile": "raspberry-pi-4b"}, {"budget": 1.0, "profile": "phone"}],
                  "slow": {"fraction": 0.5, "factor": 50.0}, "jitter": 0.1},
        "method": {"name": "depthfl"},
        "local": {"epochs": 2},
        "cohort": {"count": 4, "deadline_s": 0.6},
        "evaluate": {"every": 0},
    }  # fmt: skip
    whole = fleetfit.run(table, out=tmp_path / "whole")

    def stop(report: Mapping[str, Any]) -> None:
        if report["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fleetfit.run(table, out=tmp_path / "cut", on_round=stop)
    cut = fleetfit.resume(tmp_path / "cut")
    assert all(torch.equal(cut.server.state[name], tensor) for name, tensor in whole.server.state.items())
    clocks = [[(m["simulated_s"], m["multiply_adds"], m["deadline"]) for m in r.metrics] for r in (whole, cut)]
    assert clocks[0] == clocks[1]
    assert sum(m["deadline"]["shallower"] + m["deadline"]["stopped"] for m in whole.metrics) > 0


def test_deadline_key_adds_in_time() -> None:
    def assemble_cohort(**cohort: Any) -> Any:
        return assemble(load_experiment({"cohort": cohort, "method": {"name": "scalefl", "options": {"fedprox": {}}}}))

    with_it = assemble_cohort(deadline_s=3.0)
    assert with_it.federation.method_spec["options"].keys() == {"fedprox", "in_time"}
    assert with_it.settings.local.deadline_s == 3.0 and with_it.settings.local.late == "shallower"
    assert any("real time" in note for note in with_it.notes)  # nobody has a profile
    stopping = assemble_cohort(deadline_s=3.0, on_deadline="stop")
    assert stopping.federation.method_spec["options"].keys() == {"fedprox"} and stopping.settings.local.late == "stop"
    off = assemble_cohort()
    assert off.federation.method_spec["options"].keys() == {"fedprox"} and off.settings.local.deadline_s is None
    assert not any("real time" in note for note in off.notes)
