"""Differential privacy of clients: what a round costs, what it adds, what it draws, and what a folder does not tell."""

import json
import math
import re
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from scipy import optimize
from support import Expected, aggregate_updates, raises
from support.attacks import TINY, elements, make_job, make_update
from support.privacy import KEY, WITHHELD, exact_delta, read_state

import fleetfit as ff
from fleetfit.api.run import prepare, run_remaining_rounds
from fleetfit.cli import main
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.config.dump import to_table
from fleetfit.core import Server
from fleetfit.errors import ConfigError, FleetFitError, MissingExtra, NoUsableUpdates, RunError
from fleetfit.privacy import (
    Ledger,
    Privacy,
    Randomness,
    compute_epsilon,
    count_registered,
    find_noise,
    load_or_create_key,
    max_rounds,
)
from fleetfit.privacy.mechanism import PrivateMean
from fleetfit.rounds import run_round, start
from fleetfit.submodel import concat_state

accountants = pytest.importorskip("opacus.accountants", reason="the accountant is an extra: fleetfit[privacy]")

ROOT = Path(__file__).parents[1]
QUIET: dict[str, Any] = {**TINY, "model": {"name": "tiny:tiny", "norm": False}, "cohort": {"fraction": 0.5}}


# ---- what it costs, against the definition --------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "rate", "delta"), [(1.0, 0.1, 1e-3), (0.7, 0.5, 1e-4), (2.0, 1.0, 1e-5)])
def test_one_round_costs_what_the_definition_says(noise: float, rate: float, delta: float) -> None:
    exact = optimize.brentq(lambda epsilon: exact_delta(epsilon, noise, rate) - delta, 0.0, 20.0, xtol=1e-4)
    assert exact <= compute_epsilon(noise, rate, 1, delta) <= exact + 0.03


def renyi(noise: float, rate: float, rounds: int, delta: float) -> float:
    """Return the bound of Renyi differential privacy at whole orders (Mironov et al., 2019), which is never below."""
    best = math.inf
    for order in range(2, 200):
        terms = [math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
                 + (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise**2)
                 for k in range(order + 1)]  # fmt: skip
        most = max(terms)
        moment = (most + math.log(sum(math.exp(t - most) for t in terms))) / (order - 1)
        best = min(best, rounds * moment + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return best


@pytest.mark.parametrize(
    ("noise", "rate", "delta"), [(0.6, 0.1, 1e-3), (1.0, 0.1, 1e-3), (1.0, 0.01, 1e-5), (2, 0.01, 1e-5)]
)
def test_many_rounds_cost_less_than_the_renyi_bound(noise: float, rate: float, delta: float) -> None:
    bound = renyi(noise, rate, 200, delta)
    assert 0.6 * bound < compute_epsilon(noise, rate, 200, delta) < bound


@pytest.mark.parametrize(
    "case", [(1.0, 0.1, 45, 1e-3), (0.6, 0.01, 200, 1e-5), (2.0, 1.0, 7, 1e-5), (3.0, 0.5, 90, 1e-6)]
)
def test_epsilon_is_that_of_the_accountant_of_opacus(case: tuple[float, float, int, float]) -> None:
    """Its own call, with a grid for these rounds alone."""
    noise, rate, rounds, delta = case
    accountant = accountants.PRVAccountant()
    accountant.history = [(noise, rate, rounds)]
    with np.errstate(all="ignore"):  # at a rate of 1 it takes the logarithm of 0
        assert compute_epsilon(noise, rate, rounds, delta) == pytest.approx(accountant.get_epsilon(delta), rel=1e-3)


def test_more_rounds_cost_more_and_more_noise_less() -> None:
    by_round = [compute_epsilon(1.0, 0.1, rounds, 1e-3) for rounds in range(40)]
    assert by_round == sorted(by_round) and len(set(by_round)) == 40
    by_noise = [compute_epsilon(noise, 0.1, 5, 1e-3) for noise in (1e-3, 0.01, 0.1, 0.3, 1, 10, 1e3)]
    assert by_noise == sorted(by_noise, reverse=True) and all(map(math.isfinite, by_noise))
    by_rate = [compute_epsilon(1.0, rate, 5, 1e-3) for rate in (1e-4, 0.01, 0.5, 0.999, 1.0)]
    assert by_rate == sorted(by_rate)


def test_a_tiny_delta_gets_the_renyi_bound() -> None:
    assert 0.9 * renyi(1.0, 0.1, 10, 1e-15) < compute_epsilon(1.0, 0.1, 10, 1e-15) <= renyi(1.0, 0.1, 10, 1e-15)


def test_noise_and_rounds_of_a_budget() -> None:
    noise = find_noise(3.0, 0.1, 50, 1e-3)
    assert compute_epsilon(noise, 0.1, 50, 1e-3) <= 3.0 < compute_epsilon(0.99 * noise, 0.1, 50, 1e-3)
    lasts = max_rounds(1.0, 0.1, 1e-3, 3.0, 1000)
    assert compute_epsilon(1.0, 0.1, lasts, 1e-3) <= 3.0 < compute_epsilon(1.0, 0.1, lasts + 1, 1e-3)
    assert max_rounds(1.0, 0.1, 1e-3, 3.0, lasts - 1) == lasts - 1
    assert compute_epsilon(1.0, 0.1, 0, 1e-3) == 0
    assert compute_epsilon(0.01, 0.1, 10, 1e-3) > 1000


# ---- the round, by plain loops --------------------------------------------------------------------------------------


def private(clip: float = 1.0, noise: float = 0.0, rate: float = 0.5, salt: bytes = b"s" * 16) -> Privacy:
    return Privacy(clip, noise, rate, 1e-3, None, "none", randomness=Randomness(KEY, salt))


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Any:
    key = tmp_path_factory.mktemp("key") / "run.key"
    table = {**QUIET, "privacy": {"clipping_norm": 0.5, "noise_multiplier": 1.0, "key_file": str(key)}}
    return assemble(load_experiment(table))


def coverage(assembly: Any) -> dict[Any, int]:
    """Return how many clients' levels cover each element."""
    federation, counts = assembly.federation, {}
    for client in federation.able.tolist():
        level = federation.levels[federation.level_of[client]].submodel
        for place in elements(extracted(federation, level)):
            counts[place] = counts.get(place, 0) + 1
    return counts


def extracted(federation: Any, piece: Any) -> Mapping[str, Any]:
    from fleetfit.submodel import extract

    return extract(federation.problem.layout, start(federation).state, piece)


def test_denominators_count_registered_clients(assembly: Any) -> None:
    federation = assembly.federation
    names = start(federation).state
    flat, expected = count_registered(federation, 0), coverage(assembly)
    places = list(elements(names))
    assert flat.tolist() == [float(expected.get(place, 0)) for place in places]
    assert len(set(flat.tolist())) > 1


@pytest.mark.parametrize("clip", [0.3, 1e6])
def test_clipped_movements_have_fixed_denominators(assembly: Any, clip: float) -> None:
    """Two clients of ten came, and the element's denominator is what was to be expected of those who cover it."""
    federation, server = assembly.federation, start(assembly.federation)
    sent = elements(server.state)
    pieces = [federation.levels[0].submodel, federation.levels[-1].submodel]
    rng, updates = torch.Generator().manual_seed(1), []
    for index, piece in enumerate(pieces):
        state = {n: t + torch.randn(t.shape, generator=rng) for n, t in extracted(federation, piece).items()}
        update = make_update(piece, 1, make_job(piece, index))
        updates.append(replace(update, state=as_flat(federation, piece, state)))
    added: dict[Any, float] = {}
    for update in updates:
        moved = {place: number - sent[place] for place, number in elements(update.state).items()}
        length = math.sqrt(sum(m * m for m in moved.values()))
        for place, m in moved.items():
            added[place] = added.get(place, 0.0) + m * min(1.0, clip / length)
    actual = elements(aggregate_updates(federation, server, updates, private(clip).aggregate).mean)
    members = coverage(assembly)
    for place, number in actual.items():
        assert number == pytest.approx(sent[place] + added.get(place, 0.0) / (0.5 * members[place]), abs=1e-4)


def as_flat(federation: Any, piece: Any, state: Mapping[str, torch.Tensor]) -> Any:
    from fleetfit.submodel import get_slice_plan

    return get_slice_plan(federation.problem.layout, piece).views(torch.cat([t.flatten() for t in state.values()]))


def noise_in(assembly: Any, privacy: Privacy, round: int = 0) -> torch.Tensor:
    federation = assembly.federation
    server = replace(start(federation), round=round)
    after = privacy.aggregate(federation, server).result()
    return concat_state(after.mean) - concat_state(server.state)


def test_each_element_has_the_promised_noise(assembly: Any) -> None:
    """Also where nobody came: sigma C / D_j, over many rounds."""
    privacy = private(clip=2.0, noise=1.5, rate=0.5)
    drawn = torch.stack([noise_in(assembly, privacy, round) for round in range(400)])
    expected = 1.5 * 2.0 / (0.5 * count_registered(assembly.federation, 0))
    assert ((drawn.std(0) / expected - 1).abs() < 0.2).all()
    assert 0.97 < float((drawn / expected).std()) < 1.03
    for members in set(
        count_registered(assembly.federation, 0).tolist()
    ):  # also by how many are registered for an element
        some = count_registered(assembly.federation, 0) == members
        assert 0.97 < float((drawn[:, some] / expected[some]).std()) < 1.03
    assert float((drawn / expected).mean()) == pytest.approx(0, abs=0.01)


def test_noise_goes_by_key_salt_and_round(assembly: Any) -> None:
    one = noise_in(assembly, private(noise=1.0))
    assert torch.equal(one, noise_in(assembly, private(noise=1.0)))
    others = [noise_in(assembly, private(noise=1.0), 1), noise_in(assembly, private(noise=1.0, salt=b"t" * 16)),
              noise_in(assembly, replace(private(noise=1.0), randomness=Randomness(bytes(32), b"s" * 16)))]  # fmt: skip
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.2
    assert "x00" not in repr(Randomness(bytes(32), b"s" * 16))


def test_clients_are_drawn_independently_of_connections(assembly: Any) -> None:
    federation, privacy = assembly.federation, private(rate=0.3)
    rng = np.random.default_rng(0)
    times, together, sizes = np.zeros(10), np.zeros((10, 10)), set()
    for round in range(1000):
        drawn = privacy.choose(federation, Server({}, round), rng)
        sizes.add(len(drawn))
        here = np.isin(np.arange(10), drawn)
        times += here
        together += np.outer(here, here)
    assert np.allclose(times / 1000, 0.3, atol=0.06) and {0, 1, 5} <= sizes
    pairs = together[~np.eye(10, dtype=bool)] / 1000
    assert np.allclose(pairs, 0.09, atol=0.04)
    half = np.arange(10) % 2 == 1
    away = replace(federation, connected=lambda round: half)
    for round in range(50):
        everybody = privacy.choose(federation, Server({}, round), rng)
        assert privacy.choose(away, Server({}, round), rng) == [c for c in everybody if c % 2 == 1]


# ---- a run, its folder, and going on with it ------------------------------------------------------------------------


def table(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    privacy = {
        "clipping_norm": 0.5,
        "noise_multiplier": 1.0,
        "delta": 0.01,
        "key_file": str(tmp_path / "keys" / "run.key"),
    }
    local = {"epochs": 2, "batch_size": 8, "lr": 0.1}
    settings = {**QUIET, "rounds": 4, "local": local, "privacy": privacy}
    return {**settings, **changes, "privacy": {**privacy, **changes.get("privacy", {})}}


def test_a_folder_has_the_cost_and_no_participants(tmp_path: Path) -> None:
    run = ff.run(table(tmp_path), out=tmp_path / "run")
    assert len(run.metrics) == 4
    for number, report in enumerate(run.metrics, 1):
        assert {key: report[key] for key in WITHHELD} == WITHHELD
        allowed = {"round", "lr", "privacy", "seconds", "seconds_of", "evaluate"}
        assert report.keys() <= WITHHELD.keys() | allowed
        epsilon = compute_epsilon(1.0, 0.5, number, 0.01)
        assert report["privacy"] == {
            "epsilon": epsilon,
            "delta": 0.01,
            "noise_multiplier": 1.0,
            "clipping_norm": 0.5,
            "rate": 0.5,
        }
    columns = run.columns["static"]
    assert columns["avg"] is not None and columns["full"] is not None
    assert (
        columns["local"] is None and columns["global"] is None and columns["per_client"] == {"global": {}, "local": {}}
    )
    assert run.summary["privacy"] == run.metrics[-1]["privacy"] and run.summary["bytes_down"] is None
    assert run.summary["failures"] is None and run.summary["waste"] is None and run.summary["multiply_adds"] is None
    fleet = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert fleet["first"]["samples"] is None and fleet["first"]["class_counts"] is None
    assert not run.checkpoint["clients"]
    assert any("epsilon" in note and "withheld" in note for note in run.summary["notes"])


def test_reports_show_the_cost_and_no_withheld_values(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], runs_draw: None
) -> None:
    """What is shown of one run, what a comparison keeps in files, and the run beside it that promises nothing."""
    settings = table(tmp_path, rounds=2, evaluate={"every": 1, "batch_norm": ["static"], "statistics_samples": 60})
    privacy = settings.pop("privacy")
    (tmp_path / "one.toml").write_text(tomli_w.dumps({**settings, "privacy": privacy}))
    with pytest.raises(SystemExit, match="0"):
        main(["run", str(tmp_path / "one.toml"), "--out", str(tmp_path / "one")])
    output = "".join(capfd.readouterr())
    assert f"epsilon {compute_epsilon(1.0, 0.5, 2, 0.01):.2f} at delta 0.01" in output and "round 2/2" in output
    for word in ("loss ", "bytes sent", "jobs failed", "global / local accuracy"):
        assert word not in output
    plots = [file.name for file in (tmp_path / "one" / "plots").iterdir()]
    assert plots and not [name for name in plots if "bytes" in name or "part" in name]
    rows = [{"label": "open"}, {"label": "private", "privacy": privacy}]
    compared = {"columns": ["local", "avg"], "row": rows}
    (tmp_path / "two.toml").write_text(tomli_w.dumps({**settings, "compare": compared}))
    with pytest.raises(SystemExit, match="0"):
        main(["compare", str(tmp_path / "two.toml"), "--out", str(tmp_path / "two")])
    results = json.loads((tmp_path / "two" / "results.json").read_text())
    finals = {run["row"]: run["final"] for run in results["runs"]}
    withheld = {"local", "global", "bytes_down", "bytes_up", "failures", "waste", "simulated_s"}
    assert withheld - {"simulated_s"} <= finals["open"].keys() and not withheld & finals["private"].keys()
    assert "avg" in finals["private"]


def test_the_key_is_private_and_outside_of_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ff.run(table(tmp_path, rounds=1), out=tmp_path / "run")
    key = tmp_path / "keys" / "run.key"
    secret = key.read_text().strip()
    assert len(bytes.fromhex(secret)) == 32 and stat.S_IMODE(key.stat().st_mode) == 0o600
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 5
    output = "".join(capfd.readouterr())
    for text in (secret.encode(), bytes.fromhex(secret)):
        assert not any(text in file.read_bytes() for file in files)
        assert text not in output.encode()


def prepared(tmp_path: Path, name: str = "run", **changes: Any) -> Path:
    run = prepare(load_experiment(table(tmp_path, **changes)), tmp_path / name)
    run._take_engine().close()
    return tmp_path / name


def broken_off(folder: Path, after: int) -> None:
    class Off(Exception):
        pass

    def on_round(report: Mapping[str, Any]) -> None:
        if report["round"] == after:
            raise Off

    with pytest.raises(Off):
        run_remaining_rounds(ff.load(folder), on_round)


@pytest.mark.parametrize("every", [1, 3])
def test_a_resumed_run_has_the_same_bits_and_cost(tmp_path: Path, every: int) -> None:
    """With a checkpoint every three rounds two are done again, with the same noise."""
    folder = prepared(tmp_path, checkpoint={"every": every})
    shutil.copytree(folder, tmp_path / "whole")
    ff.resume(tmp_path / "whole")
    broken_off(folder, 2)
    resumed = ff.resume(folder)
    assert torch.equal(read_state(folder), read_state(tmp_path / "whole"))
    assert resumed.summary["privacy"]["epsilon"] == compute_epsilon(1.0, 0.5, 4, 0.01)
    assert json.loads((folder / "privacy.json").read_text())["begun"] == 4


def test_more_rounds_need_the_key_before_they_are_written(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    Path(ff.load(folder).experiment.privacy.key_file).unlink()
    before = (folder / "config.toml").read_bytes()
    with pytest.raises(FleetFitError):
        ff.resume(folder, rounds=9)
    assert (folder / "config.toml").read_bytes() == before


def test_private_runs_have_equal_bits_on_all_engines(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    shutil.copytree(folder, tmp_path / "processes")
    config = tmp_path / "processes" / "config.toml"
    config.write_text(config.read_text().replace('name = "local"', 'name = "processes"\nworkers = 2'))
    for place in (folder, tmp_path / "processes", prepared(tmp_path, "another")):
        ff.resume(place)
    assert torch.equal(read_state(folder), read_state(tmp_path / "processes"))
    assert not torch.equal(read_state(folder), read_state(tmp_path / "another"))


def test_a_run_ends_with_its_budget(tmp_path: Path) -> None:
    budget = (compute_epsilon(1.0, 0.5, 2, 0.01) + compute_epsilon(1.0, 0.5, 3, 0.01)) / 2
    changes = {"privacy": {"epsilon": budget}, "rounds": 9, "checkpoint": {"every": 5}}
    run = ff.run(table(tmp_path, **changes), out=tmp_path / "run")
    assert [report["round"] for report in run.metrics] == [1, 2] and "evaluate" in run.metrics[-1]
    assert run.summary["privacy"]["epsilon"] <= budget and run.finished
    assert any("2 of the 9 rounds" in note for note in run.summary["notes"])
    assert read_state(tmp_path / "run") is not None
    environment = (tmp_path / "run" / "environment.json").read_bytes()
    assert len(ff.resume(tmp_path / "run").metrics) == 2
    assert (tmp_path / "run" / "environment.json").read_bytes() == environment, "it is finished"
    with raises(ConfigError, key="privacy.epsilon"):
        ff.resume(tmp_path / "run", rounds=12)


def test_a_resumed_run_keeps_the_noise_of_its_budget(tmp_path: Path) -> None:
    settings = table(tmp_path)
    del settings["privacy"]["noise_multiplier"]
    settings["privacy"]["epsilon"] = 5.0
    run = prepare(load_experiment(settings), tmp_path / "run")
    run._take_engine().close()
    noise = json.loads((tmp_path / "run" / "privacy.json").read_text())["noise_multiplier"]
    assert compute_epsilon(noise, 0.5, 4, 0.01) <= 5.0 < compute_epsilon(0.99 * noise, 0.5, 4, 0.01)
    broken_off(tmp_path / "run", 1)
    resumed = ff.resume(tmp_path / "run")
    assert {report["privacy"]["noise_multiplier"] for report in resumed.metrics} == {noise}
    before = {path: path.read_bytes() for path in resumed.folder.iterdir() if path.is_file()}
    with raises(ConfigError, key="rounds"):  # it would be other noise
        ff.resume(tmp_path / "run", rounds=40)
    assert {path: path.read_bytes() for path in before} == before
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 4", "rounds = 40", 1))
    with raises(RunError, key="privacy"):
        ff.resume(tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()


def test_undone_rounds_are_paid_for(tmp_path: Path) -> None:
    assembly = assemble(load_experiment(table(tmp_path)))
    privacy = assembly.settings.privacy
    assert privacy is not None
    privacy.randomness = Randomness(KEY, b"s" * 16)

    class Broken(PrivateMean):
        def result(self) -> Any:
            aggregate = super().result()
            return replace(aggregate, mean={n: t * float("nan") for n, t in aggregate.mean.items()})

    hooks = {"make_aggregator": lambda federation, server: Broken(privacy, federation, server)}
    federation = replace(assembly.federation, method=replace(assembly.federation.method, **hooks))
    server, engine = start(federation), assembly.engine()
    privacy.begin_round(0)
    after, report = run_round(federation, engine, assembly.settings, server)
    engine.close()
    assert "undone" in report and torch.equal(concat_state(after.state), concat_state(server.state))
    redacted = privacy.redact_report(report)
    assert redacted["privacy"]["epsilon"] == compute_epsilon(1.0, 0.5, 1, 0.01) > 0
    assert redacted["undone"]["reported"] == []


def test_a_missing_accountant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opacus"]:
        monkeypatch.setitem(sys.modules, name, None)
    with raises(MissingExtra, extra="privacy"):
        compute_epsilon(1.2345, 0.1, 3, 1e-3)


def test_rounds_without_clients_add_noise_and_continue(tmp_path: Path) -> None:
    """Six rounds with a client in a million: other runs stop after five without a usable update."""
    settings = table(tmp_path, rounds=6, cohort={"fraction": 1e-6}, engine={"name": "processes", "workers": 1})
    run = ff.run(settings, out=tmp_path / "run")
    assert len(run.metrics) == 6 and run.metrics[-1]["privacy"]["rate"] == 1e-6
    moved = read_state(tmp_path / "run") - concat_state(start(assemble(load_experiment(settings)).federation).state)
    assert (moved != 0).all()


def test_a_private_failing_run_names_no_client(tmp_path: Path) -> None:
    settings = table(tmp_path, rounds=9, local={"epochs": 2, "batch_size": 8, "lr": 1e30}, cohort={"fraction": 1.0})
    with raises(NoUsableUpdates, 5) as result:
        ff.run(settings, out=tmp_path / "run")
    assert "withheld" in str(result.value) and not re.search(r"client \d|finite", str(result.value))


@pytest.mark.parametrize("secure", [False, True])
def test_hostile_clients_are_bounded_by_the_clip(secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of ten, a million times as far the other way: all that they can is to be of the clipping norm."""
    monkeypatch.setattr(Privacy, "_add_noise", lambda self, total, round: None)
    attack, distances = {"kind": "sign_flip", "scale": 1e6, "fraction": 0.3}, []
    arguments = table(tmp_path, cohort={"fraction": 1.0}, **({"secure": {"min_clients": 2}} if secure else {}))
    for further in ({}, {"attack": attack}):
        assembly = assemble(load_experiment({**arguments, **further}))
        assert assembly.settings.privacy is not None
        assembly.settings.privacy.randomness = Randomness(KEY, b"s" * 16)
        engine = assembly.engine()
        after, _ = run_round(assembly.federation, engine, assembly.settings, start(assembly.federation))
        engine.close()
        distances.append(concat_state(after.state))
    moved = (distances[1] - distances[0]) * count_registered(assembly.federation, 0)
    assert len(assembly.settings.hostile) == 3
    assert 0.1 < float(moved.norm()) <= 3 * 2 * 0.5 + 1e-3


def test_a_private_run_hides_participants_under_attack(tmp_path: Path) -> None:
    attack = {"kind": "backdoor", "target": 1, "trigger": 2, "fraction": 0.3}
    run = ff.run(table(tmp_path, rounds=2, attack=attack), out=tmp_path / "run")
    assert len(json.loads((tmp_path / "run" / "fleet.json").read_text())["hostile"]) == 3
    for report in run.metrics:
        assert "received" not in report and {key: report[key] for key in WITHHELD} == WITHHELD
    assert run.summary.get("hostile_excluded") is None and run.columns["static"]["backdoor"] is not None
    assert run.summary["privacy"]["epsilon"] == compute_epsilon(1.0, 0.5, 2, 0.01)


def test_a_fleet_s_ledger_charges_a_repeated_round() -> None:
    written: list[int] = []
    for again, rounds, indices in ((False, [0, 1, 1, 2], [0, 1, 1, 2]), (True, [0, 1, 1, 2], [0, 1, 2, 3])):
        ledger, ledgers = Ledger(charges_repeats=again), []
        for round in rounds:
            ledger.begin_round(round, lambda: written.append(1))
            ledgers.append(ledger.get_draw(round))
        assert ledgers == indices and ledger.begun == indices[-1] + 1
    assert len(written) == 7


def lost(folder: Path, key: Path) -> None:
    key.unlink()


def changed(folder: Path, key: Path) -> None:
    key.write_text("ab" * 32 + "\n")


def cut_short(folder: Path, key: Path) -> None:
    key.write_text("ab\n")


def shown(folder: Path, key: Path) -> None:
    key.chmod(0o644)


def no_ledger(folder: Path, key: Path) -> None:
    (folder / "privacy.json").unlink()


def less_noise(folder: Path, key: Path) -> None:
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("noise_multiplier = 1.0", "noise_multiplier = 0.1"))


def torn(folder: Path, key: Path) -> None:
    ledger = folder / "privacy.json"
    ledger.write_bytes(ledger.read_bytes()[:40])


def another_cohort(folder: Path, key: Path) -> None:
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("fraction = 0.5", "fraction = 0.9"))


def moved_inside(folder: Path, key: Path) -> None:
    config = folder / "config.toml"
    config.write_text(config.read_text().replace(str(key), str(folder / "run.key")))


def negative(folder: Path, key: Path) -> None:
    payload = json.loads((folder / "privacy.json").read_text())
    (folder / "privacy.json").write_text(json.dumps({**payload, "begun": -3}))


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lost, Expected("privacy.json", key="privacy.key_file", path="run.key", kind=RunError)),
        (changed, Expected(key="privacy.key_file", kind=RunError)),
        (cut_short, Expected(32, key="privacy.key_file", path="run.key", kind=ConfigError)),
        (shown, Expected("chmod 600", key="privacy.key_file", path="run.key", kind=ConfigError)),
        (no_ledger, Expected("privacy.json", kind=RunError)),
        (less_noise, Expected(1, 0.1, key="privacy", kind=RunError)),
        (negative, Expected("privacy.json", "begun", kind=RunError)),
        (torn, Expected("privacy.json", kind=RunError)),
        (another_cohort, Expected(0.5, 0.9, key="privacy", kind=RunError)),
        (moved_inside, Expected(key="privacy.key_file", path="run.key", kind=ConfigError)),
    ],
)
def test_what_a_run_cannot_go_on_without(harm: Any, expected: Expected, tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    broken_off(folder, 1)
    before = (folder / "metrics.jsonl").read_bytes()
    harm(folder, tmp_path / "keys" / "run.key")
    with raises(FleetFitError, expected):
        ff.resume(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_key_in_the_run_folder_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, key="privacy.key_file", path="a.key"):
        ff.run(table(tmp_path, privacy={"key_file": str(tmp_path / "run" / "a.key")}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_key_is_made_once(tmp_path: Path) -> None:
    first = load_or_create_key(tmp_path / "new" / "a.key")
    assert load_or_create_key(tmp_path / "new" / "a.key") == first != load_or_create_key(tmp_path / "new" / "b.key")


def heavier(update: Any) -> float:
    return float(update.num_examples + 1)


REFUSED: list[tuple[dict[str, Any], Expected]] = [
    ({"privacy": {"clipping_norm": None}}, Expected("[privacy] clipping_norm")),
    ({"privacy": {"noise_multiplier": None}}, Expected("[privacy]", "noise_multiplier = 1.0", "epsilon = 3.0")),
    ({"privacy": {"key_file": ""}}, Expected("[privacy] key_file")),
    ({"privacy": {"delta": 0.2}}, Expected("[privacy] delta", 0.2)),
    ({"privacy": {"epsilon": 0.01}}, Expected("[privacy] epsilon", 0.01)),
    ({"method": {"name": "adaptivefl"}}, Expected("adaptivefl", "'assign'")),
    ({"method": {"name": "scalefl", "options": {"feddyn": {}}}}, Expected("method.options.feddyn")),
    ({"method": {"name": "scalefl", "options": {"scaffold": {}}}}, Expected("method.options.scaffold", "control")),
    ({"method": {"name": "scalefl", "options": {"outliers": {}}}}, Expected("method.options.outliers")),
    ({"method": {"name": "scalefl", "options": {"trimmed_mean": {}}}}, Expected("method.options.trimmed_mean")),
    ({"method": {"name": "decoupled"}}, Expected("decoupled", "'dispatch'")),
    (
        {"method": {"name": "scalefl", "hooks": {"choose_channels": "random"}}},
        Expected('channels = "prefix"', '"rolling"'),
    ),
    ({"method": {"name": "scalefl", "hooks": {"weigh": "by_samples"}}}, Expected("method.hooks.weigh")),
    ({"method": {"name": "scalefl", "hooks": {"weigh": "test_privacy:heavier"}}}, Expected("method.hooks.weigh")),
    ({"cohort": {"selection": "size"}}, Expected("cohort.selection")),
    ({"cohort": {"quorum": 0.8}}, Expected("over_selection")),
    ({"cohort": {"over_selection": 0.2}}, Expected("over_selection")),
    ({"model": {"name": "tiny:tiny"}}, Expected('norm = "group"')),
    ({"local": {"compress": "int8"}}, Expected("[local] compress")),
    ({"evaluate": {"split": "train"}}, Expected("[evaluate] split")),
]


@pytest.mark.parametrize(("change", "expected"), REFUSED)
def test_settings_without_a_guarantee_are_refused(change: dict[str, Any], expected: Expected, tmp_path: Path) -> None:
    settings = table(tmp_path, **change)
    settings["privacy"] = {key: value for key, value in settings["privacy"].items() if value is not None}
    with raises(ConfigError, expected):
        assemble(load_experiment(settings))


def test_an_empty_section_names_what_is_missing(tmp_path: Path) -> None:
    """As `[secure]` is on when it is empty: a header without keys must not run without privacy."""
    (tmp_path / "a.toml").write_text("rounds = 1\n[privacy]\n")
    with raises(ConfigError, key="privacy.clipping_norm"):
        ff.run(tmp_path / "a.toml", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    plain = load_experiment({"rounds": 1})
    assert not plain.is_private and "privacy" not in to_table(plain)
    assert not load_experiment(to_table(plain)).is_private, "nor is a file with every default"


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fedrolex", "fjord"])
@pytest.mark.parametrize("plus", [{}, {"fedadam": {"lr": 0.01}}, {"fedprox": {}}])
def test_what_averages_plainly_runs(method: str, plus: dict[str, Any], tmp_path: Path) -> None:
    run = ff.run(table(tmp_path, rounds=2, method={"name": method, "options": plus}), out=tmp_path / "run")
    assert run.summary["rounds"] == 2 and run.columns["static"]["full"] is not None


def test_the_threat_model_names_existing_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text().partition("## Differential privacy of clients")[2].partition("\n## ")[0]
    named = re.findall(r"`(?:(tests/[\w/]+\.py): )?(test_\w+)`", text)
    assert len(named) > 12
    for file, name in named:
        assert f"def {name}(" in (ROOT / (file or "tests/test_privacy.py")).read_text(), name
