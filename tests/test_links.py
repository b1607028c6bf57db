"""Links that lose and repeat messages, and a quorum: what counts is what came in, once, and the run ends."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import raises
from tiny import plain, tiny_federation

import fleetfit as ff
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Availability, Evaluation, Failure, Federation, Job, Simulation, Update
from fleetfit.core.resources import Speed
from fleetfit.engines.local import local
from fleetfit.engines.processes import processes
from fleetfit.errors import ConfigError, NoUsableUpdates
from fleetfit.evaluation import EvaluationScope
from fleetfit.messages import pack, reply_size
from fleetfit.rounds import Round, Settings, run, run_round, start
from fleetfit.rounds.links import AFTER_QUORUM, LinkFaults

SCOPE = EvaluationScope(Evaluation(batch_size=64), statistics_samples=60)
SETTINGS = Settings(1, plain(lr=0.1, batch_size=8), scope=SCOPE)
REMEMBERING = {"name": "scalefl", "options": {"feddyn": {}}}
DOWN, UP = "what it was sent was lost on the way", "what it sent back was lost on the way"


class Seen:
    """An engine that notes what it ran, and leaves out the replies of some clients of some rounds."""

    def __init__(self, simulation: Simulation, without: set[tuple[int, int]] | None = None) -> None:
        self.engine, self.federation, self.without = local(simulation), simulation, without or set()
        self.replies: dict[tuple[int, int], Update | Failure] = {}

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        def record() -> Iterator[Job]:
            for job in jobs:
                sent.append(job)
                yield job

        sent: list[Job] = []
        for place, reply in enumerate(self.engine.run(record())):
            job = sent[place]
            if job.kind != "train":
                yield reply
                continue
            assert job.client is not None
            self.replies[job.round, job.client] = reply
            yield Failure.of(job, "left out") if (job.round, job.client) in self.without else reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def rounds_of(
    federation: Federation, simulation: Simulation, settings: Settings, without: set[tuple[int, int]] | None = None
) -> tuple[list[Round], Seen]:
    engine = Seen(simulation, without)
    return list(run(federation, engine, settings, start(federation))), engine


def bits(done: Round) -> bytes:
    return pack({"state": dict(done.server.state), "memory": done.server.memory})


def failed(done: list[Round]) -> set[tuple[int, int]]:
    return {(r.report["round"] - 1, f["client"]) for r in done for f in r.report["failures"]}


def size_of(federation: Federation, reply: Update | Failure) -> int:
    return reply_size(reply, federation.problem.layout)


def draw_clients(links: LinkFaults, clients: int, round: int = 0) -> list[list[int]]:
    """Return the clients whose messages are lost on the way down, lost on the way up, and come twice."""
    fates = [links.draw(round, client) for client in range(clients)]
    down = [c for c in range(clients) if fates[c].lost_down]
    up = [c for c in range(clients) if not fates[c].lost_down and fates[c].lost_up]
    return [down, up, [c for c in range(clients) if c not in (*down, *up) and fates[c].repeated]]


# ---- what is lost, and what comes twice


def test_messages_are_lost_with_their_probabilities() -> None:
    links = LinkFaults(0.2, 0.5, 0.7, seed=3)
    draws = np.array([astuple(links.draw(r, c)) for r in range(20) for c in range(200)])
    assert draws.mean(0) == pytest.approx([0.2, 0.5, 0.7], abs=4 * (0.25 / 4000) ** 0.5)
    assert abs(np.corrcoef(draws.T.astype(float)) - np.eye(3)).max() < 0.06  # each by itself
    assert links.draw(7, 5) == LinkFaults(0.2, 0.5, 0.7, seed=3).draw(7, 5)


def test_lost_messages_cost_bytes_only() -> None:
    """State and memories are those of a round in which these clients' updates are left out, to the bit."""
    federation, simulation = tiny_federation(REMEMBERING, 30, 30)
    links = LinkFaults(0.3, 0.4, 0.0)
    down, up, _ = draw_clients(links, 30)
    assert len(down) > 3 and len(up) > 3
    [lossy], engine = rounds_of(federation, simulation, replace(SETTINGS, links=links))
    without = {(0, c) for c in (*down, *up)}
    [honest], whole = rounds_of(federation, simulation, SETTINGS, without)
    assert bits(lossy) == bits(honest)
    memories = engine.dump_memories()
    assert pack(memories) == pack(whole.dump_memories()) and set(map(int, memories)) == set(range(30)) - {*down, *up}

    report = lossy.report
    assert report["links"] == {"lost_down": len(down), "lost_up": len(up), "repeated": 0}
    reasons = {f["client"]: f["reason"] for f in report["failures"]}
    assert reasons == {**dict.fromkeys(down, DOWN), **dict.fromkeys(up, UP)}
    assert report["bytes_down"] == honest.report["bytes_down"]  # what was lost had been sent
    assert {c for _, c in engine.replies} == set(range(30)) - set(down)  # nobody trains what did not arrive
    assert report["bytes_up"] == sum(size_of(federation, r) for r in engine.replies.values())
    assert report["multiply_adds"] == sum(r.multiply_adds for r in engine.replies.values())


def test_duplicates_count_once_and_cost_twice() -> None:
    federation, simulation = tiny_federation(REMEMBERING, 20, 20)
    links = LinkFaults(repeated=0.5)
    _, _, again = draw_clients(links, 20)
    assert 3 < len(again) < 17
    [twice], engine = rounds_of(federation, simulation, replace(SETTINGS, links=links))
    [once], _ = rounds_of(federation, simulation, SETTINGS)
    assert bits(twice) == bits(once)
    assert twice.report["train"] == once.report["train"] and not twice.report["failures"]
    assert twice.report["links"]["repeated"] == len(again)
    more = sum(size_of(federation, engine.replies[0, c]) for c in again)
    assert twice.report["bytes_up"] == once.report["bytes_up"] + more


def test_absent_clients_lose_no_message() -> None:
    federation, simulation = tiny_federation({"name": "fedavg"}, 6, 6)
    gone = replace(simulation.resources, availability=Availability(6, leave=0.999999))
    simulation = replace(simulation, resources=gone)
    settings = replace(SETTINGS, links=LinkFaults(lost_up=1.0, repeated=1.0))
    done = next(run(federation, Seen(simulation), settings, start(federation)))
    assert done.report["links"] == {"lost_down": 0, "lost_up": 0, "repeated": 0} and done.report["bytes_up"] == 0
    assert all(f["absent"] for f in done.report["failures"])


@pytest.mark.parametrize("links", [LinkFaults(lost_down=1.0), LinkFaults(lost_up=1.0)])
def test_a_run_without_messages_has_no_usable_update(links: LinkFaults) -> None:
    """It has all its rounds, more in a row than patience allows for clients that fail."""
    federation, simulation = tiny_federation({"name": "fedavg"}, 6, 3)
    engine = Seen(simulation)
    with raises(NoUsableUpdates, 24):
        list(run(federation, engine, replace(SETTINGS, rounds=8, links=links), start(federation)))
    assert not links.lost_down or not engine.replies


def test_empty_rounds_leave_the_server() -> None:
    federation, simulation = tiny_federation({"name": "fedavg"}, 6, 3)
    settings = replace(SETTINGS, rounds=8, links=LinkFaults(lost_up=1.0))
    rounds = run(federation, Seen(simulation), settings, start(federation))
    assert len({bits(next(rounds)) for _ in range(8)}) == 1


def test_the_same_is_lost_on_every_engine() -> None:
    federation, simulation = tiny_federation(REMEMBERING, 12, 10, dropout=0.2)
    settings = replace(SETTINGS, rounds=3, links=LinkFaults(0.2, 0.3, 0.4))
    here, engine = rounds_of(federation, simulation, settings)
    workers = processes(simulation, workers=2)
    try:
        there = list(run(federation, workers, settings, start(federation)))
        assert pack(engine.dump_memories()) == pack(workers.dump_memories())
    finally:
        workers.close()
    assert [bits(r) for r in here] == [bits(r) for r in there]
    assert [r.report["links"] for r in here] == [r.report["links"] for r in there]


# ---- a quorum


def timed(latencies: list[float], method: Any = None, **keys: Any) -> tuple[Federation, Simulation]:
    """Devices whose jobs take exactly these seconds: what else takes time is lost in rounding."""
    clients = len(latencies)
    federation, simulation = tiny_federation(method or {"name": "fedavg"}, clients, clients, **keys)
    speeds = {f.name: np.full(clients, 1e30) for f in fields(Speed)} | {"latency_s": np.array(latencies)}
    return federation, replace(simulation, resources=replace(simulation.resources, speeds=speeds))


def test_a_round_ends_with_the_last_of_its_quorum() -> None:
    latencies = [5.0, 1.0, 9.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0, 10.0]
    federation, simulation = timed(latencies, REMEMBERING)
    [done], engine = rounds_of(federation, simulation, replace(SETTINGS, quorum=4))
    slow = [c for c in range(10) if latencies[c] > 4]
    [honest], whole = rounds_of(federation, simulation, SETTINGS, {(0, c) for c in slow})
    assert bits(done) == bits(honest) and pack(engine.dump_memories()) == pack(whole.dump_memories())
    assert {f["client"]: f["reason"] for f in done.report["failures"]} == dict.fromkeys(slow, AFTER_QUORUM)
    assert done.report["simulated_s"] == pytest.approx(4.0, abs=1e-3)
    assert done.report["multiply_adds"] == sum(r.multiply_adds for r in engine.replies.values())  # they did work


def test_rounds_wait_until_the_quorum() -> None:
    """With a deadline of 20 s: what is lost is waited for until then, unless enough others were there before."""
    federation, simulation = timed([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    links = LinkFaults(lost_up=0.4, clocked=True, seed=5)
    _, lost, _ = draw_clients(links, 6)
    there = [c for c in range(6) if c not in lost]
    assert lost and len(there) >= 2, "another seed"
    settings = replace(SETTINGS, links=links, local=SETTINGS.local.replace(deadline_s=20.0, late="drop"))
    [enough], _ = rounds_of(federation, simulation, replace(settings, quorum=2))
    assert enough.report["train"]["clients"] == 2
    assert enough.report["simulated_s"] == pytest.approx(there[1] + 1.0, abs=1e-3)
    [few], _ = rounds_of(federation, simulation, replace(settings, quorum=6))
    assert few.report["train"]["clients"] == len(there) and few.report["simulated_s"] == 20.0
    assert all(f["reason"] == UP for f in few.report["failures"])


def test_chance_decides_between_equally_fast() -> None:
    federation, simulation = timed([1.0] * 12)
    done, _ = rounds_of(federation, simulation, replace(SETTINGS, rounds=12, quorum=4))
    late = Counter(client for _, client in failed(done))
    assert all(r.report["train"]["clients"] == 4 for r in done)
    assert len(late) == 12 and max(late.values()) < 12  # nobody always, everybody some time


# ---- all of it


def unreliable(clients: int) -> tuple[Federation, Simulation]:
    """So many clients of a sample or two each, of different speed, that come and go."""
    federation, simulation = tiny_federation({"name": "scalefl"}, 12, 80)
    rng, train = np.random.default_rng(0), simulation.data.splits["train"]
    none = torch.empty(0, dtype=torch.int64)
    parts = [
        {"train": train[torch.tensor([c % len(train), (7 * c + 1) % len(train)])], "validation": none, "test": none}
        for c in range(clients)
    ]
    reporting = replace(
        federation.clients,
        num_examples=np.full(clients, 2),
        budget=np.tile((0.2, 0.5, 1.0), clients)[:clients],
    )
    there = Availability(clients, 0.5, 0.5, 4.0, leave=0.1)
    speeds = {f.name: np.full(clients, 1e9) for f in fields(Speed)}
    speeds["latency_s"] = rng.exponential(size=clients)
    resources = replace(
        simulation.resources, budgets={"parameters": reporting.budget}, speeds=speeds, jitter=0.5, availability=there
    )
    simulation = replace(simulation, parts=parts, resources=resources)
    return replace(federation, clients=reporting, connected=there.online), simulation


def test_ten_thousand_clients_with_losses() -> None:
    """Lost, repeated, late, beyond the quorum, away and back: the bits are those of the updates that came in."""
    federation, simulation = unreliable(10_000)
    settings = replace(
        SETTINGS, rounds=4, quorum=30, links=LinkFaults(0.25, 1 / 3, 0.3, clocked=True),
        local=plain(lr=0.05, batch_size=2, deadline_s=2.0, late="drop"),
        scope=replace(SCOPE, whole=False, clients=20),
    )  # fmt: skip
    done, _ = rounds_of(federation, simulation, settings)
    assert [r.report["train"]["clients"] + len(r.report["failures"]) for r in done] == [80] * 4
    reasons = Counter(f["reason"] for r in done for f in r.report["failures"])
    assert {DOWN, UP} < reasons.keys() and len(reasons) >= 4, reasons
    assert any(f["absent"] and f["reason"] not in (DOWN, UP) for r in done for f in r.report["failures"])
    assert 0.4 < (reasons[DOWN] + reasons[UP]) / 320 < 0.6
    assert sum(r.report["links"]["repeated"] for r in done) > 10
    assert all(r.report["train"]["samples"] == 2 * r.report["train"]["clients"] for r in done)
    assert all(0 < r.report["train"]["clients"] <= 30 and r.report["simulated_s"] <= 2.0 for r in done)

    honest, _ = rounds_of(federation, simulation, replace(settings, quorum=None, links=None), failed(done))
    assert [bits(r) for r in done] == [bits(r) for r in honest]
    later = list(run(federation, Seen(simulation), settings, done[1].server))  # as after an interruption
    assert [bits(r) for r in later] == [bits(r) for r in done[2:]]


# ---- run files

PHONE = {"multiply_adds_per_s": 1e9, "down_bytes_per_s": 1e6, "up_bytes_per_s": 1e6}
TABLE: dict[str, Any] = {
    "rounds": 2, "data": {"name": "tiny:tiny_data", "partition": {"kind": "iid", "clients": 10}},
    "model": {"name": "tiny:tiny"}, "method": {"name": "fedavg"}, "local": {"epochs": 1},
    "fleet": {"groups": [{"budget": 1.0, "profile": PHONE}], "jitter": 0.5, "links": {"lost_up": 0.3}},
    "cohort": {"count": 6, "quorum": 0.5, "over_selection": 0.34},
}  # fmt: skip


def test_links_come_from_a_run_file(tmp_path: Path) -> None:
    assembly = assemble(load_experiment(TABLE))
    assert assembly.settings.links == LinkFaults(lost_up=0.3, clocked=True) and assembly.settings.quorum == 3
    assert assembly.federation.cohort == 9 and not assembly.unused  # ceil(6 * 1.34)
    done = ff.run(TABLE, out=tmp_path / "run")
    assert all(m["train"]["clients"] <= 3 and set(m["links"]) == {"lost_down", "lost_up", "repeated"}
               for m in done.metrics)  # fmt: skip


def test_quorums_without_a_clock_are_noted() -> None:
    table = {**TABLE, "fleet": {"groups": [{"budget": 1.0}], "links": {"lost_up": 0.3}}}
    assembly = assemble(load_experiment(table))
    assert {one.key for one in assembly.unused} == {"cohort.quorum", "cohort.over_selection"}
    assert assembly.settings.quorum is None
    assert assembly.federation.cohort == 6 and assembly.settings.links == LinkFaults(lost_up=0.3)
    with raises(ConfigError, "[cohort] quorum", key="cohort.quorum"):
        ff.run(load_experiment({**table, "cohort": {"count": 6}}, ["cohort.quorum=0.5"]))


@pytest.mark.parametrize(
    ("key", "value"), [("quorum", 0.0), ("quorum", 1.1), ("over_selection", -0.1), ("links", {"lost_up": 1.5})]
)
def test_out_of_range(key: str, value: Any) -> None:
    section = "fleet" if key == "links" else "cohort"
    place = "links.lost_up" if key == "links" else key
    with raises(ConfigError, f"[{section}] {place}", key=f"{section}.{place}"):
        load_experiment({section: {key: value}})


@pytest.mark.parametrize("more", [{"fleet": {"links": {"lost_up": 0.3}}}, {"cohort": {"quorum": 0.5}},
                                  {"cohort": {"over_selection": 0.5}}])  # fmt: skip
def test_secure_rounds_refuse_links(more: dict[str, Any]) -> None:
    """And do not silently go on without it."""
    [(section, keys)] = more.items()
    plain_one = {"fleet": {"groups": [{"budget": 1.0, "profile": PHONE}]}, "cohort": {"count": 6}}
    table = {
        **TABLE,
        "method": {"name": "fedavg", "hooks": {"weigh": "by_count"}},
        **plain_one,
        "secure": {},
        "evaluate": {"batch_norm": ["batch"]},
    }
    assemble(load_experiment(table))
    table[section] = {**table[section], **keys}
    key = next(iter(keys))
    with raises(ConfigError, "[secure]", f"[{section}] {key}", key=f"{section}.{key}"):
        assemble(load_experiment(table))


def test_reliable_links_leave_no_record() -> None:
    federation, simulation = tiny_federation({"name": "fedavg"}, 4, 2)
    assert "links" not in run_round(federation, local(simulation), SETTINGS, start(federation))[1]
