"""Attacks: each formula on small numbers, who is drawn, what reaches the devices and the server, the same bits."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Expected, raises
from support.attacks import CORE, FULL, LAYOUT, MIDDLE, PROBLEM, SENT, TINY, elements, make_job, make_update
from tiny import tiny_data, tiny_parts
from torch import Tensor

import fleetfit as ff
from fleetfit import names
from fleetfit.attacks.base import Attack, Attackers, Knowledge, Scene, draw_hostile_clients
from fleetfit.attacks.min_max import compute_products, find_largest_gamma
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble, assemble_fleet
from fleetfit.core import Clients, DataDescription, Job, NodeDescription, Update
from fleetfit.data import Data
from fleetfit.errors import ConfigError
from fleetfit.submodel import Submodel, concat_state, extract

KINDS = names.list_names("attacks")


def forged(
    kind: str, piece: Submodel = FULL, own: Submodel = FULL, untrained: tuple[str, ...] = (), **keys: Any
) -> tuple[Update, Update, Job]:
    """Return an honest update, what an attack makes of it when two others of the round are known, and its job."""
    job = make_job(piece)
    honest = make_update(piece, 1, job)
    updates = [replace(make_update(p, s, make_job(p)), untrained=untold)
               for p, s, untold in ((piece, 1, ()), (FULL, 2, untrained), (CORE, 3, ()))]  # fmt: skip
    moves = [(one, concat_state(one.state) - concat_state(extract(LAYOUT, SENT, one.submodel))) for one in updates]
    attack = names.resolve("attacks", kind)(**keys)
    scene = Scene(LAYOUT, job, CORE, own, Knowledge(LAYOUT, moves))
    return honest, attack.forge(honest, scene, torch.Generator().manual_seed(7)), job


@pytest.mark.parametrize(
    ("kind", "keys", "factor"),
    [("sign_flip", {"scale": 3.0}, -3.0), ("backdoor", {"scale": 4.0}, 4.0), ("free_rider", {}, 0.0)],
)
def test_an_update_that_moves_along_its_own_line(kind: str, keys: dict[str, Any], factor: float) -> None:
    honest, forgery, job = forged(kind, MIDDLE, **keys)
    sent, trained, changed = elements(job.state), elements(honest.state), elements(forgery.state)
    for place, number in changed.items():
        assert number == pytest.approx(sent[place] + factor * (trained[place] - sent[place]), abs=1e-4)


def test_beyond_the_core_the_sign_is_flipped() -> None:
    honest, forgery, job = forged("beyond_core", MIDDLE, scale=2.0)
    core = elements(extract(LAYOUT, SENT, CORE)).keys()
    sent, trained, changed = elements(job.state), elements(honest.state), elements(forgery.state)
    assert 0 < len(core & changed.keys()) < len(changed)
    for place, number in changed.items():
        factor = 1.0 if place in core else -2.0
        assert number == pytest.approx(sent[place] + factor * (trained[place] - sent[place]), abs=1e-4)


@pytest.mark.parametrize(("kind", "keys"), [("little_is_enough", {"z": 0.7}), ("inner_product", {"scale": 2.0})])
def test_colluders_use_moments_of_coverers(kind: str, keys: dict[str, float]) -> None:
    """Three updates: of the middle sub-model, the full one (but for two tensors) and the core."""
    untrained = ("stem.weight", "heads.2.bias")
    _, forgery, _ = forged(kind, MIDDLE, untrained=untrained, **keys)
    sent = elements(SENT)
    states = [elements(make_update(p, s, make_job(p)).state) for p, s in ((MIDDLE, 1), (FULL, 2), (CORE, 3))]
    counts = set()
    for place, number in elements(forgery.state).items():
        trained = [one for one in states if place in one and not (one is states[1] and place[0] in untrained)]
        moves = [one[place] - sent[place] for one in trained]
        mean = sum(moves) / len(moves)
        deviation = (sum((m - mean) ** 2 for m in moves) / max(1, len(moves) - 1)) ** 0.5
        moved = mean - 0.7 * deviation if kind == "little_is_enough" else -2.0 * mean
        assert number == pytest.approx(sent[place] + moved, abs=1e-4)
        counts.add(len(moves))
    assert counts == {1, 2, 3}


@pytest.mark.parametrize("chunk", [4, 1 << 18])
def test_min_max_moves_as_far_as_two_updates_are_apart(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest gamma, by trying: just above it some update is farther away than the two that are farthest apart."""
    monkeypatch.setattr("fleetfit.attacks.min_max._CHUNK", chunk)
    rng = torch.Generator().manual_seed(3)
    for _ in range(5):
        moves = torch.randn(6, 9, generator=rng).double()
        mean, direction = moves.mean(0), -moves.std(0)
        found_mean, deviation, products, along = compute_products(list(moves.float()))
        torch.testing.assert_close([found_mean.double(), -deviation.double()], [mean, direction], atol=1e-6, rtol=1e-5)
        gamma = find_largest_gamma(products, along, float(direction.square().sum()))
        most = max(float((a - b).norm()) for a in moves for b in moves)

        def farthest(g: float, m: Tensor = mean, d: Tensor = direction, all_of: Tensor = moves) -> float:
            return max(float((m + g * d - one).norm()) for one in all_of)

        assert gamma > 0.5
        assert farthest(gamma) <= most + 1e-5 < farthest(gamma * 1.001)


def test_min_max_is_honest_without_a_second_update() -> None:
    _, forgery, job = forged("min_max", FULL)
    moves = torch.stack([concat_state(make_update(FULL, s, job).state) - concat_state(job.state) for s in (1, 2)])
    moved = concat_state(forgery.state) - concat_state(job.state)
    most = float((moves[0] - moves[1]).norm())
    assert max(float((moved - one).norm()) for one in moves) == pytest.approx(most, rel=1e-4)
    honest, alone, _ = forged("min_max", MIDDLE)
    assert alone is honest


def test_noise_has_the_given_length_and_repeats() -> None:
    honest, forgery, job = forged("noise", MIDDLE, scale=3.0)
    sent = concat_state(job.state)
    noise, trained = concat_state(forgery.state) - sent, concat_state(honest.state) - sent
    assert float(noise.norm()) == pytest.approx(3 * float(trained.norm()), rel=1e-4)
    assert abs(float(torch.cosine_similarity(noise, trained, 0))) < 0.3
    assert torch.equal(concat_state(forged("noise", MIDDLE, scale=3.0)[1].state), concat_state(forgery.state))
    _, hidden, _ = forged("free_rider", MIDDLE, scale=0.1)
    assert float((concat_state(hidden.state) - sent).norm()) == pytest.approx(0.1 * float(trained.norm()), rel=1e-3)


def test_noise_differs_by_round_and_client() -> None:
    job = make_job(FULL, 1)
    attackers, honest = hostile("noise"), make_update(FULL, 1, job)
    later = replace(job, round=2)
    first, again, next_round, other = (
        concat_state(attackers.forge(honest, one, LAYOUT, Knowledge(LAYOUT)).state)
        for one in (job, job, later, replace(job, client=3))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, next_round) and not torch.equal(first, other)


def test_lies_about_samples_budget_and_level() -> None:
    reported = names.resolve("attacks", "false_samples")(scale=50.0).misreport(
        Clients(np.array([10, 20, 30])), np.array([1])
    )
    assert reported.num_examples.tolist() == [10, 1000, 30]
    assert forged("false_samples", scale=50.0)[1].num_examples == 1000

    lie = names.resolve("attacks", "false_budget")()
    clients = Clients(np.array([9, 9]), np.array([0.1, 0.2]), further={"size_bytes": np.array([0.3, 0.4])})
    reported = lie.misreport(clients, np.array([0]))
    assert (reported.budget.tolist(), reported.further["size_bytes"].tolist()) == ([1.0, 0.2], [1.0, 0.4])
    honest, forgery, job = forged("false_budget", FULL, own=CORE)
    core = elements(extract(LAYOUT, SENT, CORE)).keys()
    sent, trained = elements(job.state), elements(honest.state)
    for place, number in elements(forgery.state).items():
        assert number == pytest.approx(trained[place] if place in core else sent[place], abs=1e-5)

    honest, forgery, _ = forged("false_level", MIDDLE)
    assert forgery.submodel == CORE and forgery.submodel.is_part_of(MIDDLE)
    assert elements(forgery.state) == {p: n for p, n in elements(honest.state).items() if p in core}


def test_a_partial_update_is_forged_in_its_part() -> None:
    job = make_job(FULL)
    part = make_update(MIDDLE, 1, job)
    scene = Scene(LAYOUT, job, CORE, FULL, Knowledge(LAYOUT))
    forgery = names.resolve("attacks", "sign_flip")(scale=2.0).forge(part, scene, torch.Generator())
    sent, trained = elements(SENT), elements(part.state)
    assert forgery.submodel == MIDDLE
    for place, number in elements(forgery.state).items():
        assert number == pytest.approx(sent[place] - 2 * (trained[place] - sent[place]), abs=1e-4)


# ---- samples ---------------------------------------------------------------------------------------------------------


def cores(round: int, client: int, level: int) -> Submodel:
    return CORE


def hostile(kind: str, clients: tuple[int, ...] = (1, 3), **keys: Any) -> Attackers:
    return Attackers(names.resolve("attacks", kind)(**keys), clients, dict.fromkeys(clients, 0), cores, seed=4)


@pytest.mark.parametrize(("keys", "wrong"), [({}, lambda y: 3 - y), ({"target": 2}, lambda y: 0 * y + 2)])
def test_label_flip_spares_honest_clients(keys: dict[str, int], wrong: Any) -> None:
    data = tiny_data()
    parts = tiny_parts(data, 5)
    poisoned, dealt = hostile("label_flip", **keys).poison(data, parts)
    for client, (before, after) in enumerate(zip(parts, dealt, strict=True)):
        assert torch.equal(poisoned.x[after["train"]], data.x[before["train"]])
        expected = data.y[before["train"]]
        assert torch.equal(poisoned.y[after["train"]], wrong(expected) if client in (1, 3) else expected)
        for split in ("test", "validation"):
            assert torch.equal(before[split], after[split])
    assert torch.equal(poisoned.y[: len(data.y)], data.y) and torch.equal(poisoned.x[: len(data.x)], data.x)


def test_a_backdoor_marks_training_and_probe_samples() -> None:
    data = tiny_data()
    parts = tiny_parts(data, 5)
    attackers = hostile("backdoor", target=2, trigger=2, poisoned=0.25)
    poisoned, dealt = attackers.poison(data, parts)
    old, new = parts[1]["train"], dealt[1]["train"]
    marked = (poisoned.x[new] != data.x[old]).flatten(1).any(1)
    assert int(marked.sum()) == round(0.25 * len(old))
    assert bool((poisoned.x[new][marked][..., -2:, -2:] == 255).all()) and bool((poisoned.y[new][marked] == 2).all())
    assert torch.equal(poisoned.x[new][..., :-2, :], data.x[old][..., :-2, :])
    assert torch.equal(poisoned.y[new][~marked], data.y[old][~marked])
    from fleetfit.core import Device

    probed = attackers.make_probe_device(Device(PROBLEM, data))
    assert probed is not None
    probe_places = data.split("test")[data.y[data.split("test")] != 2]
    assert len(probed.data.split("test")) == len(probe_places) == len(probed.data.x)
    assert set(probed.data.y.tolist()) == {2} and bool((probed.data.x[..., -2:, -2:] == 255).all())
    assert torch.equal(probed.data.x[..., :-2, :], data.x[probe_places][..., :-2, :])


def test_floats_get_a_trigger_of_their_largest_value() -> None:
    data = tiny_data()
    floats = Data("floats", data.x.float() / 300, data.y, data.splits, 4)
    poisoned, dealt = hostile("backdoor", (0,), trigger=1, poisoned=1.0).poison(floats, tiny_parts(data, 5))
    corner = poisoned.x[dealt[0]["train"]][..., -1, -1]
    assert float(corner.min()) == float(corner.max()) >= 0.7


# ---- who is drawn ----------------------------------------------------------------------------------------------------


def test_hostile_clients_are_drawn_by_share_and_level() -> None:
    levels = np.array([0, 1, 2, -1] * 10)
    everywhere = draw_hostile_clients(levels, 0.2, "all", 0)
    assert len(everywhere) == 6 and everywhere == tuple(sorted(set(everywhere))) and min(levels[list(everywhere)]) >= 0
    assert everywhere == draw_hostile_clients(levels, 0.2, "all", 0) != draw_hostile_clients(levels, 0.2, "all", 1)
    each = draw_hostile_clients(levels, 0.2, "each", 0)
    assert np.bincount(levels[list(each)]).tolist() == [2, 2, 2]
    top = draw_hostile_clients(levels, 0.8, [3], 0)
    assert len(top) == 8 and set(levels[list(top)]) == {2}
    assert set(levels[list(draw_hostile_clients(levels, 0.5, [1, 2], 0))]) == {0, 1}
    with raises(ConfigError, 4, 1, 2, 3, key="attack.among"):
        draw_hostile_clients(levels, 0.5, [4], 0)
    with raises(ConfigError, 0.001, 30, key="attack.fraction"):
        draw_hostile_clients(levels, 0.001, "all", 0)


# ---- runs ------------------------------------------------------------------------------------------------------------


def attacked(out: Path, **attack: Any) -> ff.Run:
    return ff.run({**TINY, **({"attack": attack} if attack else {})}, out=out)


def test_attackers_leave_honest_clients_bits(tmp_path: Path) -> None:
    run = attacked(tmp_path / "a", kind="free_rider", fraction=0.3)
    ids = json.loads((tmp_path / "a" / "fleet.json").read_text())["hostile"]
    assert len(ids) == 3 and any(note.startswith("3 ") and str(ids[0]) in note for note in run.summary["notes"])
    [first, *_] = run.metrics
    assert first["received"]["sent"]["hostile"] == 3 and sum(first["received"]["sent"]["honest"].values()) == 7
    assert first["received"]["left_out"] == {"hostile": 0, "honest": {}}
    assert run.summary["hostile_excluded"] == run.summary["honest_excluded"] == run.summary["honest_excluded_1"] == 0
    assert 'kind = "free_rider"' in (tmp_path / "a" / "config.toml").read_text()
    clean = attacked(tmp_path / "clean")
    assert "received" not in clean.metrics[0] and "hostile_excluded" not in clean.summary
    assert "[attack]" not in (tmp_path / "clean" / "config.toml").read_text()
    assert "hostile" not in json.loads((tmp_path / "clean" / "fleet.json").read_text())


def test_a_backdoor_works_and_its_success_is_a_column(tmp_path: Path) -> None:
    run = attacked(tmp_path / "a", kind="backdoor", target=1, trigger=2, scale=4.0, fraction=0.3)
    columns = run.columns["static"]
    assert columns["backdoor"] > 0.6 and columns["backdoor"] == columns["backdoor_levels"]["2"]
    honest = attacked(tmp_path / "b", kind="backdoor", target=1, trigger=2, scale=1e-6, poisoned=1e-9, fraction=0.1)
    assert honest.columns["static"]["backdoor"] < columns["backdoor"] - 0.3
    assert ff.load(tmp_path / "a").evaluate()["static"]["backdoor"] == columns["backdoor"]


@pytest.mark.parametrize("kind", ["sign_flip", "noise", "inner_product"])
def test_an_attack_ruins_undefended_runs(kind: str, tmp_path: Path) -> None:
    clean = attacked(tmp_path / "clean").accuracy(kind="global")
    assert clean > 0.8
    assert attacked(tmp_path / kind, kind=kind, fraction=0.4).accuracy(kind="global") < clean - 0.25


def of_two_seeds(out: Path, **attack: Any) -> tuple[list[float], float]:
    """Return the training loss of the third round for each of two seeds, and the mean accuracy after it."""
    table = {**TINY, **({"attack": attack} if attack else {})}
    runs = [ff.run({**table, "seed": seed}, out=out / f"{seed}") for seed in (0, 1)]
    return [run.metrics[-1]["train"]["loss"] for run in runs], sum(run.accuracy(kind="global") for run in runs) / 2


@pytest.fixture(scope="module")
def clean_of_two_seeds(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float]:
    return of_two_seeds(tmp_path_factory.mktemp("clean"))


@pytest.mark.parametrize("kind", ["min_max", "little_is_enough"])
def test_hidden_attacks_slow_training(kind: str, clean_of_two_seeds: tuple[list[float], float], tmp_path: Path) -> None:
    """All lose more in training by the third round, and the model is right less often."""
    clean, right = clean_of_two_seeds
    hostile, less = of_two_seeds(tmp_path, kind=kind, fraction=0.4)
    assert all(there > 1.15 * here for here, there in zip(clean, hostile, strict=True))
    assert less < right - 0.08


def test_a_run_with_a_ruined_state_finishes(tmp_path: Path) -> None:
    """Nothing is finite in what clients train from it; the rest of a comparison does not stop for that."""
    attack = {"kind": "sign_flip", "scale": 100.0, "fraction": 0.4}
    run = ff.run({**TINY, "rounds": 10, "attack": attack}, out=tmp_path / "a")
    came = [report["train"]["clients"] for report in run.metrics]
    assert len(came) == 10 and came[0] == 10 and came[-6:] == [0] * 6
    assert all("diverged" in failure["reason"] for failure in run.metrics[-1]["failures"])
    assert run.summary["rounds"] == 10


@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_same_bits_on_other_engines(engine: str, tmp_path: Path) -> None:
    """An attack on samples and updates, and one whose clients collude."""
    if engine == "ray":
        pytest.importorskip("ray")
    for attack in ({"kind": "backdoor", "trigger": 2}, {"kind": "little_is_enough"}):
        table = {**TINY, "rounds": 2, "attack": attack}
        here = ff.run(table, out=tmp_path / f"local-{attack['kind']}")
        there = ff.run(table, engine={"name": engine, "workers": 1}, out=tmp_path / f"{engine}-{attack['kind']}")
        a, b = (run.checkpoint["server"].state for run in (here, there))
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert here.columns == there.columns


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    whole = attacked(tmp_path / "whole", kind="noise", fraction=0.3)

    def stop(report: Mapping[str, Any]) -> None:
        if report["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ff.run({**TINY, "attack": {"kind": "noise", "fraction": 0.3}}, out=tmp_path / "cut", on_round=stop)
    again = ff.resume(tmp_path / "cut")
    a, b = (run.checkpoint["server"].state for run in (whole, again))
    assert all(torch.equal(a[name], b[name]) for name in a)


OWN = """
from dataclasses import replace
from fleetfit.attacks.base import Attack


def silent(loss: float = 0.5) -> Attack:
    return Attack(forge=lambda update, scene, rng: replace(update, metrics={"loss": loss}))


def nothing() -> None:
    return None
"""


def test_an_attack_of_ones_own_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = attacked(tmp_path / "a", kind=f"{tmp_path / 'own.py'}:silent", fraction=1.0, loss=0.125)
    assert run.metrics[-1]["train"]["loss"] == 0.125
    with raises(ConfigError, "[attack] kind"):
        assemble(load_experiment({**TINY, "attack": {"kind": f"{tmp_path / 'own.py'}:nothing"}}))


REFUSED: list[tuple[dict[str, Any], dict[str, Any], Expected]] = [
    ({"kind": "sign_flop"}, {}, Expected('"sign_flop"', '"sign_flip"')),
    ({"kind": "sign_flip", "z": 1.0}, {}, Expected("[attack] sign_flip", '"z"')),
    ({"kind": "sign_flip", "scale": -1.0}, {}, Expected(0, -1.0, key="attack.scale")),
    ({"kind": "sign_flip", "fraction": 0.0}, {}, Expected("[attack] fraction")),
    ({"kind": "sign_flip", "among": "some"}, {}, Expected("[attack] among")),
    ({"scale": 3.0}, {}, Expected("[attack] scale")),
    ({"kind": "label_flip", "target": 9}, {}, Expected(0, 3, 9, key="attack.target")),
    ({"kind": "backdoor", "trigger": 4}, {}, Expected("4x4", 4, key="attack.trigger")),
    ({"kind": "backdoor", "poisoned": 2.0}, {}, Expected(0, key="attack.poisoned")),
    ({"kind": "sign_flip"}, {"local": {"compress": "int8"}}, Expected("[local] compress")),
    ({"kind": "false_budget"}, {"method": {"name": "adaptivefl"}}, Expected(key="attack.kind")),
]


@pytest.mark.parametrize(("attack", "more", "expected"), REFUSED)
def test_impossible_attacks_are_refused(attack: dict[str, Any], more: dict[str, Any], expected: Expected) -> None:
    with raises(ConfigError, expected):
        assemble(load_experiment({**TINY, **more, "attack": attack}))


def test_other_keys_without_a_kind_are_named_as_unused() -> None:
    assembly = assemble(load_experiment({**TINY, "attack": {"fraction": 0.5}}))
    assert [one.key for one in assembly.unused] == ["attack.fraction"]


def test_a_fleet_of_real_nodes_refuses() -> None:
    nodes = [NodeDescription("a", DataDescription("tiny", "classification", (1, 4, 4), 4), 20, 1.0)]
    with raises(ConfigError, "[attack]"):
        assemble_fleet(load_experiment({**TINY, "attack": {"kind": "sign_flip"}}), nodes)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "method", ["adaptivefl", *(pytest.param(m, marks=SLOW) for m in ("scalefl", "fedrolex", "decoupled"))]
)
def test_attacks_pass_validation_or_are_rejected(method: str) -> None:
    """Beside methods with channels that move, pieces that devices cut, and models of their own for each level."""
    from fleetfit.rounds import run_round, start

    for kind in KINDS:
        if (kind, method) == ("false_budget", "adaptivefl"):
            continue
        keys = {"trigger": 2} if kind == "backdoor" else {}
        table = {**TINY, "method": {"name": method}, "local": {"epochs": 1}, "attack": {"kind": kind, **keys}}
        assembly = assemble(load_experiment(table))
        settings = replace(assembly.settings, rounds=1)
        _, report = run_round(assembly.federation, assembly.engine(), settings, start(assembly.federation))
        reasons = {f["reason"] for f in report["failures"]}
        assert not any("refused" in reason for reason in reasons), (kind, reasons)
        assert report["received"]["sent"]["hostile"] >= 1, kind


def test_the_attacked_core_rolls_with_the_channels(tmp_path: Path) -> None:
    """Whoever is of the smallest level has nothing beyond the core, in whichever round, and so is honest."""
    table = {**TINY, "method": {"name": "fedrolex"}, "local": {"epochs": 1}}
    hostile = {"attack": {"kind": "beyond_core", "fraction": 0.5, "among": [1]}}
    honest, attacked = (ff.run(table | more, out=tmp_path / str(len(more))) for more in ({}, hostile))
    a, b = (run.checkpoint["server"].state for run in (honest, attacked))
    torch.testing.assert_close(dict(a), dict(b), atol=1e-4, rtol=1e-3)  # sent + (trained - sent) is not quite trained


def test_an_attack_is_honest_by_default() -> None:
    attackers = Attackers(Attack(), (0,), {0: 0}, cores, 0)
    data = tiny_data()
    parts, engine = tiny_parts(data, 2), object()
    assert attackers.poison(data, parts) == (data, parts)
    assert attackers.wrap_engine(engine, LAYOUT) is engine
