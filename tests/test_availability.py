"""Clients that come and go: the chain against theory, traces, rounds in which nobody is there, both engines."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import raises
from tiny import plain, tiny_federation

from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.config.trace import read_trace
from fleetfit.core import Availability, DeviceResources, Evaluation, Federation, Job, Server, Simulation
from fleetfit.engines.local import local
from fleetfit.engines.processes import processes
from fleetfit.errors import ConfigError, NoUsableUpdates
from fleetfit.evaluation import EvaluationScope
from fleetfit.hooks import Method
from fleetfit.messages import pack, unpack
from fleetfit.rounds import Round, Settings, run, run_round, start

SETTINGS = Settings(
    5,
    plain(lr=0.1, batch_size=8),
    evaluate_every=2,
    scope=EvaluationScope(Evaluation(batch_size=64), statistics_samples=60),
)


def matrix(availability: Availability, rounds: int) -> np.ndarray:
    """Who is online, bool [rounds, clients]."""
    return np.array([availability.online(t) for t in range(rounds)])


def coming(spec: dict[str, Any], there: Availability, **keys: Any) -> tuple[Federation, Simulation]:
    federation, simulation = tiny_federation(spec, there.clients, **keys)
    simulation = replace(simulation, resources=replace(simulation.resources, availability=there))
    return replace(federation, connected=there.online), simulation


# ---- the chain -------------------------------------------------


def test_the_chain_has_its_share_and_its_spells() -> None:
    """Two states with p(on -> off) = 1/8 and a share of 0.4 online: spells end with these chances, in every round."""
    on = matrix(Availability(4000, share=0.4, rounds=8.0, seed=3), 60)
    assert on.mean(1) == pytest.approx(0.4, abs=0.035)  # stationary from the first round on
    before, after = on[:-1], on[1:]
    assert (~after[before]).mean() == pytest.approx(1 / 8, abs=0.003)
    assert after[~before].mean() == pytest.approx(1 / 8 * 0.4 / 0.6, abs=0.003)
    alone = matrix(Availability(4000, share=0.4, seed=3), 40)  # each round by itself
    assert (~alone[1:][alone[:-1]]).mean() == pytest.approx(0.6, abs=0.01)


def test_the_chain_is_the_rule_written_out() -> None:
    """As it was with probability 1 - q, else drawn anew, q = 1 / (rounds (1 - share)), from the same uniforms."""
    from fleetfit.seeds import make_numpy_rng

    online = matrix(Availability(5, share=0.5, rounds=4.0, seed=2), 30)
    state = make_numpy_rng(2, "online", 0).random(5) < 0.5
    for t in range(30):
        if t:
            u = make_numpy_rng(2, "online", t).random(5)
            state = np.array([(v / 0.5 < 0.5) if v < 0.5 else s for v, s in zip(u, state, strict=True)])
        assert np.array_equal(online[t], state)


def test_clients_differ_as_much_as_asked_for() -> None:
    """Own shares uniform in 0.3 +- 0.2, whose standard deviation is 0.4 / sqrt(12)."""
    on = matrix(Availability(3000, share=0.3, spread=2 / 3), 400).mean(0)
    assert on.mean() == pytest.approx(0.3, abs=0.01)
    noise = (on * (1 - on)).mean() / 400
    assert math.sqrt(on.var() - noise) == pytest.approx(0.4 / math.sqrt(12), rel=0.05)
    assert on.min() > 0.03 and on.max() < 0.62
    same = matrix(Availability(3000, share=0.3), 400).mean(0)
    assert same.std() == pytest.approx(math.sqrt(0.21 / 400), rel=0.05)


def test_days_have_a_rhythm() -> None:
    """The chance in round t is s + min(s, 1 - s) sin(2 pi (t / D + p)); its first harmonic has that amplitude."""
    on = matrix(Availability(2000, share=0.4, day=10.0), 200).astype(float)
    wave = np.exp(-2j * np.pi * np.arange(200) / 10)
    amplitudes = 2 * np.abs((on * wave[:, None]).mean(0))
    assert amplitudes.mean() == pytest.approx(0.4, abs=0.02)
    assert on.mean(1) == pytest.approx(0.4, abs=0.06)  # mornings are spread, so the world as a whole has none
    phases = np.angle((on * wave[:, None]).mean(0))
    assert np.abs(np.exp(1j * phases).mean()) < 0.07
    assert 2 * np.abs((matrix(Availability(2000, 0.4), 200) * wave[:, None]).mean(0)).mean() < 0.1


def test_rounds_can_be_asked_for_in_any_order() -> None:
    once, again = (Availability(50, 0.5, 0.5, 5.0, 7.0, seed=4) for _ in range(2))
    late = once.online(40).copy()
    expected = matrix(again, 41)
    assert np.array_equal(late, expected[40])
    assert all(np.array_equal(once.online(t), expected[t]) for t in (3, 40, 39, 0, 12))
    assert not np.array_equal(matrix(replace(once, seed=5), 41), expected)


def test_leaving_has_its_probability_and_seed() -> None:
    availability = Availability(100, leave=0.3, seed=1)
    absences = [[availability.leaves(c, t) for c in range(100)] for t in range(40)]
    assert np.mean(absences) == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 4000))
    assert absences == [[availability.leaves(c, t) for c in range(100)] for t in range(40)]
    assert len({tuple(f) for f in absences}) == 40
    assert not any(Availability(100).leaves(c, 0) for c in range(100))


def test_availability_survives_a_message() -> None:
    for availability in (
        Availability(30, 0.5, 0.2, 4.0, 9.0, 0.5, seed=2),
        Availability(2, trace=np.eye(2, dtype=bool)),
    ):
        payload = unpack(pack(DeviceResources(availability=availability).payload))
        resources = DeviceResources.from_payload(payload)
        assert [resources.absence(c, t) for c in range(2) for t in range(20)] == [
            DeviceResources(availability=availability).absence(c, t) for c in range(2) for t in range(20)
        ]
    assert DeviceResources.from_payload(DeviceResources().payload).absence(0, 0) == ""


# ---- rounds -------------------------------------------------


def test_leaving_clients_remember_nothing() -> None:
    """FedDyn's clients remember; bytes down count, bytes up do not."""
    there = Availability(6, leave=0.5, seed=0)
    federation, simulation = coming({"name": "scalefl", "options": {"feddyn": {}}}, there, cohort=6)
    engine = local(simulation)
    server, report = run_round(federation, engine, SETTINGS, start(federation))
    left = [c for c in range(6) if there.leaves(c, 0)]
    assert 0 < len(left) < 6
    assert sorted(f["client"] for f in report["failures"]) == left
    assert all(f["absent"] and "away" in f["reason"] for f in report["failures"])
    memory = engine.dump_memories()
    assert sorted(map(int, memory)) == [c for c in range(6) if c not in left]
    alone, alone_simulation = tiny_federation({"name": "scalefl", "options": {"feddyn": {}}}, 6, 6)
    _, whole = run_round(alone, local(alone_simulation), SETTINGS, start(alone))
    assert report["bytes_down"] == whole["bytes_down"] and report["bytes_up"] < whole["bytes_up"]
    before = pack(memory)
    always = Availability(6, leave=0.999999)
    simulation = replace(simulation, resources=replace(simulation.resources, availability=always))
    engine = local(simulation)
    engine.load_memories(unpack(before))
    after, report = run_round(federation, engine, SETTINGS, server)
    assert pack(engine.dump_memories()) == before and report["bytes_up"] == 0
    assert pack(dict(after.state)) == pack(dict(server.state))


def only(*rounds: int, clients: int = 6, length: int = 8) -> Availability:
    """Everybody in some rounds, nobody in the others."""
    trace = np.zeros((length, clients), dtype=bool)
    trace[list(rounds)] = True
    return Availability(clients, trace=trace)


def test_empty_rounds_change_nothing() -> None:
    """Six of eight rounds are empty, more in a row than patience allows for failures."""
    federation, simulation = coming({"name": "scalefl", "options": {"fedavgm": {}}}, only(0, 7), cohort=3)
    done = list(run(federation, local(simulation), replace(SETTINGS, rounds=8), start(federation)))
    assert [r.report["online"] for r in done] == [6, 0, 0, 0, 0, 0, 0, 6]
    assert [r.report["train"]["clients"] for r in done] == [3, 0, 0, 0, 0, 0, 0, 3]
    assert [r.report["round"] for r in done] == list(range(1, 9))
    states = [pack({"state": dict(r.server.state), "memory": r.server.memory}) for r in done]
    assert len(set(states[:7])) == 1 and states[7] != states[0]
    quiet = done[3].report
    assert quiet["train"]["loss"] is None and quiet["bytes_down"] == quiet["waste"] == 0 and not quiet["failures"]
    measured = quiet["evaluate"]
    assert "failures" not in measured and measured["static"]["global_clients"] == 6  # as if all were there
    json.dumps(quiet, allow_nan=False)


@pytest.mark.parametrize(
    ("availability", "failures"), [(Availability(6, leave=0.999999), 3), (only(length=9), 0)], ids=["left", "offline"]
)
def test_a_run_without_clients_has_no_usable_update(availability: Availability, failures: int) -> None:
    """It ends after its last round, which is not evaluated: the model is untrained."""
    federation, simulation = coming({"name": "scalefl"}, availability, cohort=3)
    done: list[dict[str, Any]] = []
    with raises(NoUsableUpdates):
        outcomes = run(federation, local(simulation), replace(SETTINGS, rounds=9), start(federation))
        done.extend(outcome.report for outcome in outcomes)
    assert len(done) == 9 and [len(report["failures"]) for report in done] == [failures] * 9
    assert "evaluate" not in done[-1]
    with raises(NoUsableUpdates):  # as it was stopped and goes on
        rest = run(federation, local(simulation), replace(SETTINGS, rounds=9), replace(start(federation), round=8),
                   past_reports=done[:8])  # fmt: skip
        list(rest)


def test_one_round_with_clients_is_enough() -> None:
    federation, simulation = coming({"name": "scalefl"}, only(5, length=9), cohort=3)
    done = list(run(federation, local(simulation), replace(SETTINGS, rounds=9), start(federation)))
    assert sum(outcome.report["train"]["clients"] for outcome in done) == 3 and "evaluate" in done[-1].report


def test_other_failures_stop_the_run() -> None:
    federation, simulation = coming({"name": "scalefl"}, only(0, 2, 4, 6, 7), cohort=3)
    for part in simulation.parts:
        part["train"] = part["train"][:0]  # type: ignore[index]
    with raises(NoUsableUpdates, 5):
        list(run(federation, local(simulation), replace(SETTINGS, rounds=9), start(federation)))


def stubborn() -> Method:
    def choose(federation: Federation, server: Server, rng: Any) -> list[int]:
        return [0, 1]

    return Method(choose_clients=choose)


def test_absent_chosen_clients_are_failures() -> None:
    trace = np.array([[True, False, True]])
    federation, simulation = coming({"name": stubborn}, Availability(3, trace=trace), cohort=2)
    _, report = run_round(federation, local(simulation), SETTINGS, start(federation))
    assert [(f["client"], f["absent"]) for f in report["failures"]] == [(1, True)]


def test_fewer_than_the_cohort_are_all_taken() -> None:
    trace = np.array([[1, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=bool)
    federation, simulation = coming({"name": "scalefl"}, Availability(6, trace=trace), cohort=4)
    reports = [r.report for r in run(federation, local(simulation), replace(SETTINGS, rounds=4), start(federation))]
    assert [r["train"]["clients"] for r in reports] == [2, 4, 2, 4]  # and the trace begins again


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    there = Availability(7, 0.6, 0.5, 3.0, leave=0.3, seed=1)
    federation, simulation = coming({"name": "scalefl", "options": {"feddyn": {}}}, there, cohort=4, dropout=0.2)
    engine = processes(simulation, workers=2)
    yield federation, simulation, engine
    engine.close()


def test_both_engines_see_the_same_clients_come_and_go(two: Any) -> None:
    federation, simulation, workers = two

    def finished(engine: Any) -> list[Round]:
        return list(run(federation, engine, replace(SETTINGS, rounds=6), start(federation)))

    here, there = local(simulation), workers
    a, b = finished(here), finished(there)
    assert sum(len(r.report["failures"]) for r in a) > 2
    for x, y in zip(a, b, strict=True):
        assert {k: v for k, v in x.report.items() if k not in ("seconds", "seconds_of")} == {
            k: v for k, v in y.report.items() if k not in ("seconds", "seconds_of")
        }
        assert pack(dict(x.server.state)) == pack(dict(y.server.state))
    assert pack(here.dump_memories()) == pack(there.dump_memories())


# ---- run files and traces -------------------------------------------------

SMALL = ["data.partition.clients=8", "rounds=2", "cohort.count=2"]


def write_csv(folder: Path, spells: Iterable[str], heading: str = "client,start,stop") -> str:
    path = folder / "trace.csv"
    path.write_text("\n".join([heading, *spells]) + "\n", encoding="utf-8")
    return str(path)


def write_json(folder: Path, payload: Any) -> str:
    path = folder / "trace.json"
    path.write_text(json.dumps(payload), encoding="utf-8")
    return str(path)


def write_npz(folder: Path, arrays: Mapping[str, np.ndarray]) -> str:
    path = folder / "trace.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


def test_three_kinds_of_file_say_the_same(tmp_path: Path) -> None:
    expected = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [1, 1, 0]], dtype=bool)
    by_line = write_csv(tmp_path, ["0,0,2", "1, 1, 4", "", "0,3,4"])
    by_client = write_json(tmp_path, {"online": {"0": [[0, 2], [3, 4]], "1": [[1, 4]]}})
    for path in (by_line, by_client, write_npz(tmp_path, {"online": expected.astype(int)})):
        assert np.array_equal(read_trace(path, 3), expected), path
    longer = write_json(tmp_path, {"rounds": 6, "online": {"2": [[0, 1]]}})
    assert read_trace(longer, 3).shape == (6, 3) and read_trace(longer, 3).sum() == 1


@pytest.mark.parametrize(
    ("write", "content", "mentions"),
    [
        (write_csv, ["9,0,2"], ["client 9", "8 clients"]),
        (write_csv, ["1,2,2"], ["line 2", "0 <= start < stop", "['1', '2', '2']"]),
        (write_csv, ["0,0,1", "1,0"], ["line 3", "['1', '0']"]),
        (write_csv, ["1,0,1.5"], ["line 2", "['1', '0', '1.5']"]),
        (write_csv, ["1,1700000000,1700000060"], ["0 <= start < stop", 1 << 20]),
        (write_csv, [], ["online"]),
        (write_json, [1], ['"online"']),
        (write_json, {"online": {"a": [[0, 1]]}}, ["client a", "['a', 0, 1]"]),
        (write_json, {"online": {"0": [3]}}, ["client 0", "['0', 3]"]),
        (write_json, {"online": {"0": 3}}, ["client 0", "['0', 3]"]),
        (write_json, {"rounds": 2, "online": {"0": [[0, 3]]}}, ["2 rounds", "round 3"]),
        (write_json, {"rounds": "2", "online": {}}, ["rounds", "'2'"]),
        (write_npz, {"there": np.ones((2, 8))}, ['"online"', "there"]),
        (write_npz, {"online": np.ones((2, 3))}, ["[rounds, 8]", "[2, 3]"]),
        (write_npz, {"online": np.full((2, 8), 2)}, ["zeros and ones"]),
    ],
)
def test_wrong_traces_are_refused(
    tmp_path: Path, write: Callable[[Path, Any], str], content: Any, mentions: list[object]
) -> None:
    path = write(tmp_path, content)
    with raises(ConfigError, Path(path).name, *mentions, key="fleet.availability.trace", path=path):
        read_trace(path, 8)


def test_a_trace_of_too_many_cells_is_refused(tmp_path: Path) -> None:
    path = write_json(tmp_path, {"rounds": 1 << 20, "online": {"0": [[0, 3]]}})
    with raises(ConfigError, 1 << 20, 1 << 14, key="fleet.availability.trace", path=path):
        read_trace(path, 1 << 14)


def test_other_files_are_refused(tmp_path: Path) -> None:
    heading = write_csv(tmp_path, [], heading="user,from,to")
    for path, mention in (
        (heading, "client,start,stop, got user,from,to"),
        (str(tmp_path / "none.csv"), "none.csv"),
        (str(tmp_path / "trace.txt"), ".csv, .json or .npz"),
    ):
        with raises(ConfigError, mention, key="fleet.availability.trace", path=path):
            read_trace(path, 8)
    for kind in ("npz", "json", "csv"):
        (tmp_path / f"odd.{kind}").write_bytes(b"\xff\xfe\x00\x01")
        with raises(ConfigError, f"odd.{kind}", key="fleet.availability.trace", path=tmp_path / f"odd.{kind}"):
            read_trace(str(tmp_path / f"odd.{kind}"), 8)


def test_a_run_file_sets_availability(tmp_path: Path) -> None:
    assembly = assemble(load_experiment({}, [*SMALL, "fleet.availability={online=0.5, rounds=4, leave=0.1, day=12}"]))
    there = assembly.simulation.resources.availability
    assert there is not None and assembly.federation.connected is not None
    assert (there.share, there.rounds, there.leave, there.day, there.clients) == (0.5, 4, 0.1, 12, 8)
    assert np.array_equal(assembly.federation.connected(3), there.online(3))
    path = write_csv(tmp_path, [f"{c},0,2" for c in range(8) if c != 5])
    traced = assemble(load_experiment({}, [*SMALL, f"fleet.availability.trace={path}"]))
    assert traced.federation.reachable(1).tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert any("1 clients" in n and "Clients 5." in n for n in traced.notes)
    always = assemble(load_experiment({}, SMALL))
    assert always.federation.connected is None and always.simulation.resources.availability is None


@pytest.mark.parametrize(
    ("keys", "key", "mentions"),
    [
        ("{online=0.8, rounds=3}", "rounds", [5, 3, 0.8]),
        ("{rounds=3}", "rounds", ["online = 1"]),
        ("{online=0}", "online", [0]),
        ("{leave=1.5}", "leave", [1, 1.5]),
        ("{trace='a.csv', online=0.5}", "online", ["trace", "online"]),
        ("{trace='a.csv', day=3}", "day", ["trace", "day"]),
        ("{onlin=0.5}", "onlin", ["[fleet] availability.onlin", '"online"']),
    ],
)
def test_wrong_keys_of_availability_are_refused(keys: str, key: str, mentions: list[object]) -> None:
    with raises(ConfigError, *mentions, key=f"fleet.availability.{key}"):
        assemble(load_experiment({}, [*SMALL, f"fleet.availability={keys}"]))


def test_traces_without_able_clients_are_refused(tmp_path: Path) -> None:
    path = write_csv(tmp_path, ["1,0,4"])
    groups = "fleet.groups=[{budget=1.0}]"
    experiment = load_experiment({}, [*SMALL, groups, f"fleet.availability.trace={path}"])
    assert assemble(experiment).federation.reachable(0).tolist() == [1]
    weak = load_experiment({}, [*SMALL, "fleet.groups=[{budget=1.0}, {budget=0.001}]", "fleet.levels=[1.0]"])
    cannot = int(np.flatnonzero(assemble(weak).federation.level_of < 0)[0])
    path = write_csv(tmp_path, [f"{cannot},0,4"])
    with raises(ConfigError, "online", key="fleet.availability.trace"):
        assemble(load_experiment(weak, [f"fleet.availability.trace={path}"]))
    with raises(ConfigError, "online", key="fleet.availability.trace", path="trace.csv"):
        assemble(load_experiment({}, [*SMALL, f"fleet.availability.trace={write_csv(tmp_path, [])}"]))


def test_a_trace_is_looked_for_beside_the_run_file(tmp_path: Path) -> None:
    from fleetfit.config import load_experiment

    write_csv(tmp_path, ["0,0,3"])
    (tmp_path / "run.toml").write_text('[fleet]\navailability = { trace = "trace.csv" }\n', encoding="utf-8")
    availability = load_experiment(tmp_path / "run.toml").fleet.availability
    assert availability is not None and availability.trace == str(tmp_path / "trace.csv")


def test_classes_are_told_where_clients_agree() -> None:
    """Counted by hand from the partition; methods that learn no budget learn them too; other tasks have none."""
    assembly = assemble(load_experiment({}, [*SMALL, "fleet.reports_labels=true"]))
    labels, y = assembly.federation.clients.labels, assembly.data.y
    assert labels is not None and labels.shape == (8, 10)
    for row, part in zip(labels, assembly.simulation.parts, strict=True):
        assert row.tolist() == [int((y[part["train"]] == c).sum()) for c in range(10)]
    assert assemble(load_experiment({}, SMALL)).federation.clients.labels is None


def test_another_choice_drops_the_old_keys() -> None:
    base = {"cohort": {"selection": {"name": "loss", "candidates": 20}}}
    assert load_experiment(base, ["cohort.selection.candidates=5"]).cohort.selection == {
        "name": "loss",
        "candidates": 5,
    }
    assert load_experiment(base, ["cohort.selection={name='size'}"]).cohort.selection == {"name": "size"}
    assert load_experiment(base, ["cohort.selection=rl"]).cohort.selection == "rl"
    assert load_experiment({}, ["cohort.selection={name='size'}"]).cohort.selection == {"name": "size"}


def test_evaluation_ignores_availability() -> None:
    from fleetfit.training import run_job

    federation, simulation = coming({"name": "scalefl"}, only(1), cohort=3)
    piece = federation.levels[2].submodel
    state = start(federation).state
    for kind in ("evaluate", "statistics"):
        job = Job(kind, 0, 1, 0, 2, piece, state, {"name": "scalefl"}, 0, 2, evaluation=Evaluation(norm="batch"))
        reply, _ = run_job(job, simulation.device(2, None, 0))
        assert not hasattr(reply, "reason")
