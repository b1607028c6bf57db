"""Runs with `[privacy]` and `[secure]`: clipping by clients, noise on sums, what it costs, and what nobody can do."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Expected, raises
from support.privacy import KEY, WITHHELD, exact_delta, read_state
from support.secure import HERE, TINY, WatchedEngine, make_block, merge_tables, stop_in_second_round

import fleetfit as ff
from fleetfit.api.run import prepare
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Failure, Job, RoundSums, Update
from fleetfit.engines import secure as secure_engine
from fleetfit.engines.secure import SecureEngine
from fleetfit.errors import ConfigError, NoUsableUpdates, RunError
from fleetfit.privacy import Randomness, compute_epsilon, count_registered, find_noise
from fleetfit.privacy.mechanism import Privacy
from fleetfit.rounds import run_round, start
from fleetfit.secure import Quantizer
from fleetfit.submodel import concat_state, full_submodel, get_slice_plan

accountants = pytest.importorskip("opacus.accountants", reason="the accountant is an extra: fleetfit[privacy]")

PRIVATE: dict[str, Any] = {"clipping_norm": 0.05, "noise_multiplier": 1.0, "delta": 0.01, "key_file": "never made"}
BOTH = merge_tables(TINY, {"secure": {"min_clients": 3, "clipping_range": 0.05}, "privacy": PRIVATE})


def table(tmp_path: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    return merge_tables(BOTH, {"privacy": {"key_file": str(tmp_path / "keys" / "run.key")}}, *changes)


def assembly_of(*changes: dict[str, Any]) -> Any:
    """Return an assembly whose noise and cohorts are known, with or without sums."""
    assembly = assemble(load_experiment(merge_tables(BOTH, *changes)))
    privacy = assembly.settings.privacy
    assert privacy is not None
    privacy.randomness = Randomness(KEY, b"s" * 16)
    return assembly


def round_of(
    assembly: Any,
    away: secure_engine.Dropout | None = None,
    watch: type[WatchedEngine] = WatchedEngine,
    round: int = 0,
) -> tuple[Any, Any, dict[str, Any], WatchedEngine]:
    """Return the server before and after a round, its report, and what clients had to send before they clipped it."""
    watched = watch(replace(assembly, settings=replace(assembly.settings, secure=None)).engine())
    layout, secure = assembly.federation.problem.layout, assembly.settings.secure
    engine = SecureEngine(
        watched,
        layout,
        secure,
        partial(secure_engine.SimulatedParties, watched, dropout=away),
    )
    server = replace(start(assembly.federation), round=round)
    after, report = run_round(assembly.federation, engine, assembly.settings, server)
    return server, after, report, watched


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the noise away, to look at what it covers."""
    monkeypatch.setattr(Privacy, "_add_noise", lambda self, total, round: None)


def choose_clients(assembly: Any, round: int = 0) -> list[int]:
    federation = assembly.federation
    return list(
        federation.method.choose_clients(federation, replace(start(federation), round=round), np.random.default_rng(0))
    )


def full_round(assembly: Any) -> int:
    """Return a round for which enough clients of each level are drawn."""
    levels = assembly.federation.level_of
    return next(r for r in range(100) if np.bincount(levels[choose_clients(assembly, r)], minlength=3).min() >= 3)


# ---- what a client sends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["long", "short", "even", "one element", "all at the half of a step"])
@pytest.mark.parametrize("bits", [8, 12, 20])
def test_a_movement_is_never_longer_than_the_clip(kind: str, bits: int) -> None:
    grid, rng = Quantizer(0.5, bits, 0.3), np.random.default_rng(1)
    moved = {
        "long": rng.normal(size=500),
        "short": 1e-3 * rng.normal(size=500),
        "even": np.full(500, 0.3 / math.sqrt(500)),
        "one element": np.eye(1, 500)[0] * 7,
        "all at the half of a step": np.full(500, 1.5 * grid.step + 1e-9),
    }[kind].astype(np.float32)
    sent = grid.quantize_clipped(moved)
    assert np.linalg.norm(sent * grid.step) <= 0.3 and np.abs(sent).max() <= grid.most_clipped <= grid.most
    exact = moved.astype(float) * min(1.0, 0.3 / np.linalg.norm(moved.astype(float)))
    assert np.abs(sent * grid.step - exact).max() <= grid.step + 1e-6


def test_rounding_to_the_nearest_alone_would_be_longer() -> None:
    """Else the test above could not fail."""
    step = Quantizer(0.5, 8).step
    moved = np.full(5000, 0.6 * step, dtype=np.float32)
    assert Quantizer(0.5, 8, 1.1 * step * math.sqrt(5000)).quantize_clipped(moved).tolist() == [1] * 5000
    assert Quantizer(0.5, 8, 0.9 * step * math.sqrt(5000)).quantize_clipped(moved).tolist() == [0] * 5000


def test_a_movement_that_is_not_finite_counts_as_none() -> None:
    grid = Quantizer(0.5, 20, 0.3)
    assert not grid.quantize_clipped(np.array([1.0, np.nan], dtype=np.float32)).any()
    assert not grid.quantize_clipped(np.array([np.inf, 0.1], dtype=np.float32)).any()


# ---- a round ---------------------------------------------------------------------------------------------------------


def sum_by_hand(assembly: Any, server: Any, watched: WatchedEngine) -> torch.Tensor:
    """Return the state after a round without its noise, of whole numbers that are added up client by client."""
    layout, grid = assembly.federation.problem.layout, assembly.settings.secure.grid
    full = get_slice_plan(layout, full_submodel(layout)).size
    total = [0] * full
    for job, update in watched.replies:
        if isinstance(update, Failure):
            continue
        moved = (concat_state(update.state) - concat_state(job.state)).double() / grid.step
        length = float(moved.norm())
        moved *= min(1.0, grid.clip / grid.step / length * (1 - 1e-6))
        whole_numbers = moved.round()
        if float(whole_numbers.norm()) > grid.clip / grid.step:
            whole_numbers = moved.trunc()
        places = get_slice_plan(layout, job.submodel).gather(torch.arange(full)).tolist()
        for place, number in zip(places, whole_numbers.tolist(), strict=True):
            total[place] += int(number)
    divided = assembly.settings.privacy.rate * count_registered(assembly.federation, 0).double()
    return concat_state(server.state).double() + torch.tensor(total, dtype=torch.float64) * grid.step / divided


@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_a_round_is_the_quantized_sum(silent: None, fraction: float) -> None:
    assembly = assembly_of({"cohort": {"fraction": fraction}})
    round = full_round(assembly)
    server, after, report, watched = round_of(assembly, round=round)
    assert len(watched.replies) == len(choose_clients(assembly, round)) == report["train"]["clients"] > 8
    away = (concat_state(after.state) - sum_by_hand(assembly, server, watched)).abs().max()
    assert float(away) < 2e-7, "the rounding of fp32"
    assert not torch.equal(concat_state(after.state), concat_state(server.state))


@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_a_round_nearly_equals_the_plain_private_one(fraction: float) -> None:
    change = {"cohort": {"fraction": fraction}}
    both, plain = assembly_of(change), assembly_of(change)
    plain = replace(plain, settings=replace(plain.settings, secure=None))
    server, after, _, watched = round_of(both, round=full_round(both))
    there, _ = run_round(plain.federation, plain.engine(), plain.settings, server)
    members = count_registered(both.federation, 0)
    most = len(watched.replies) * both.settings.secure.grid.step / (members * both.settings.privacy.rate) + 1e-6
    away = (concat_state(after.state) - concat_state(there.state)).abs()
    assert bool((away <= most).all()) and float(away.max()) > 0
    assert float((concat_state(after.state) - concat_state(server.state)).abs().max()) > 1e3 * float(most.max()), (
        "noise is louder"
    )


def test_every_element_of_a_sum_gets_the_promised_noise() -> None:
    """Where no sum was opened, too: two of the four who have level 3 are away."""
    assembly = assembly_of()
    top = [int(c) for c in (assembly.federation.level_of == 2).nonzero()[0][:2]]
    privacy, seen = assembly.settings.privacy, []
    server = start(assembly.federation)
    for round in range(300):
        summed = RoundSums((), assembly.settings.secure.grid.step, ())
        released = privacy.release_sums(assembly.federation, replace(server, round=round), summed)
        seen.append(concat_state(released.mean) - concat_state(server.state))
    members = count_registered(assembly.federation, 0)
    ratios = torch.stack(seen) / (privacy.noise_multiplier * privacy.clipping_norm / (privacy.rate * members))
    assert ((ratios.std(0) - 1).abs() < 0.25).all() and 0.97 < float(ratios.std()) < 1.03
    server, after, report, _ = round_of(assembly, lambda phase, round, client: phase == "update" and client in top)
    assert report["secure"]["hidden"] > 0 and bool((concat_state(after.state) != concat_state(server.state)).all())


def test_untrained_clients_send_zeros(silent: None) -> None:
    """Else, of a block with three members, the other two's sum would be seen or not by what the third has."""

    class Broken(WatchedEngine):
        def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
            for reply in super().run(jobs):
                if reply.client in (0, 1):
                    self.replies[-1] = self.replies[-1][0], Failure.of(self.replies[-1][0], "it diverged")
                    yield self.replies[-1][1]
                elif reply.client == 2 and isinstance(reply, Update):
                    self.replies[-1] = self.replies[-1][0], Failure.of(self.replies[-1][0], "it diverged")
                    yield replace(reply, state={n: t * float("nan") for n, t in reply.state.items()})
                else:
                    yield reply

    assembly = assembly_of()
    server, after, report, watched = round_of(assembly, watch=Broken)
    assert report["train"]["clients"] == 12 and report["failures"] == [] and report["secure"]["hidden"] == 0
    assert float((concat_state(after.state) - sum_by_hand(assembly, server, watched)).abs().max()) < 2e-7


def test_dropouts_count_as_without_privacy() -> None:
    assembly = assembly_of()
    _, _, report, _ = round_of(assembly, lambda phase, round, client: phase == "shares" and client == 4)
    assert [f["client"] for f in report["failures"]] == [4] and report["train"]["clients"] == 11


# ---- who does not keep to it -----------------------------------------------------------------------------------------


def test_the_range_bounds_unclipped_clients(silent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of twelve sends the range in each element, and moves each by that over the denominator, beside the others."""
    honest = round_of(assembly_of())[1]
    shortened, calls = Quantizer.quantize_clipped, []

    def hostile(self: Quantizer, movement: Any) -> Any:
        calls.append(1)
        return np.full(len(movement), self.most) if len(calls) == 1 else shortened(self, movement)

    monkeypatch.setattr(Quantizer, "quantize_clipped", hostile)
    assembly = assembly_of()
    _, after, _, _ = round_of(assembly)
    away = (concat_state(after.state) - concat_state(honest.state)).abs()
    bound = 2 * 0.05 / count_registered(assembly.federation, 0)
    assert len(calls) == 12 and bool((away <= bound + 1e-6).all()) and float(away.max()) > 0.001


def summed_of(sums: list[int], counts: list[int]) -> RoundSums:
    return RoundSums((make_block([0, 2], sums, counts, 4),), 0.1, ())


def test_hostile_numbers_move_a_sum_by_the_range() -> None:
    """It is cut off, and not refused: whether a sum is too large may be what somebody else has sent."""
    privacy = Privacy(1.0, 1.0, 0.5, 1e-3, None, "none")
    held = privacy.clamp_sums(summed_of([10**9, -(10**9)], [4, 4]), 7)
    assert held.blocks[0].sums.tolist() == [28, -28] and not held.lost
    assert privacy.clamp_sums(summed_of([28, -3], [4, 4]), 7).blocks[0].sums.tolist() == [28, -3]


@pytest.mark.parametrize("counts", [[4, 3], [5, 4], [4, -1]])
def test_sums_with_wrong_counts_are_refused(counts: list[int]) -> None:
    privacy = Privacy(1.0, 1.0, 0.5, 1e-3, None, "none")
    held = privacy.clamp_sums(summed_of([1, 1], counts), 7)
    assert held.lost and held.blocks == ()


def test_masks_that_are_left_undo_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a server sends one member other settings than the rest."""
    answered, seen = secure_engine.mask_update, []

    def lied(member: Any, dealt: Any, job: Job, reply: Any, segments: Any, grid: Quantizer) -> Any:
        seen.append(1)
        return answered(member, dealt, job, reply, segments, replace(grid, clip=0.01) if len(seen) == 1 else grid)

    monkeypatch.setattr(secure_engine, "mask_update", lied)
    server, after, report, _ = round_of(assembly_of())
    assert torch.equal(concat_state(after.state), concat_state(server.state))
    assert report["undone"]["reason"]


def test_a_server_that_shrinks_the_cohort_gets_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws two, and would have their sum opened; members go by their own minimum."""
    assembly = assembly_of()
    federation = assembly.federation
    assembly = replace(assembly, federation=replace(federation, method=replace(
        federation.method, choose_clients=lambda federation, server, rng: [0, 1])))  # fmt: skip
    members = assembly.settings.secure
    greedy = replace(members, rules=replace(members.rules, minimum=1))
    watched = WatchedEngine(replace(assembly, settings=replace(assembly.settings, secure=None)).engine())
    layout = federation.problem.layout
    engine = SecureEngine(
        watched, layout, greedy, lambda blocks, _: secure_engine.SimulatedParties(watched, blocks, members)
    )
    server = start(federation)
    settings = replace(assembly.settings, secure=greedy)
    after, report = run_round(assembly.federation, engine, settings, server)
    assert not watched.replies and torch.equal(concat_state(after.state), concat_state(server.state))
    reasons = [failure["reason"] for failure in report["failures"]]
    assert len(reasons) == 2 and all("2 members" in reason and "3" in reason for reason in reasons)
    after, report = run_round(
        assembly.federation, engine, assembly.settings, server
    )  # and one that is honest asks nobody
    assert not watched.replies and report["undone"]["reason"] and report["failures"] == []


# ---- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(1.0, 1, 1e-3), (2.0, 7, 1e-5), (3.0, 90, 1e-6)])
def test_epsilon_of_full_cohorts_is_the_accountants(noise: float, rounds: int, delta: float) -> None:
    known_cohorts = compute_epsilon(noise, 1.0, rounds, delta, known_cohorts=True)
    theirs = accountants.PRVAccountant()
    theirs.history = [(noise, 1.0, rounds)]
    with np.errstate(all="ignore"):
        upper = theirs.get_epsilon(delta)
    assert known_cohorts <= upper <= known_cohorts + 0.03
    assert known_cohorts <= compute_epsilon(noise, 1.0, rounds, delta) <= known_cohorts + 0.03


def test_epsilon_of_known_cohorts() -> None:
    """Delta is the mean over the cohorts, by integrating the Gaussians of those who were drawn n times."""
    noise, rate, rounds, delta = 1.5, 0.4, 3, 1e-3
    epsilon = compute_epsilon(noise, rate, rounds, delta, known_cohorts=True)
    chances = [math.comb(rounds, n) * rate**n * (1 - rate) ** (rounds - n) for n in range(rounds + 1)]
    total = sum(c * exact_delta(epsilon, noise / math.sqrt(n), 1.0) for n, c in enumerate(chances) if n)
    assert total == pytest.approx(delta, rel=1e-3)


def test_known_cohorts_cost_more_than_hidden_ones() -> None:
    for rate in (0.05, 0.3, 0.9):
        known_cohorts = [compute_epsilon(1.0, rate, rounds, 1e-3, known_cohorts=True) for rounds in range(30)]
        assert known_cohorts == sorted(known_cohorts) and known_cohorts[0] == 0
        assert all(k > compute_epsilon(1.0, rate, n, 1e-3) - 0.02 for n, k in enumerate(known_cohorts) if n > 3)
    assert compute_epsilon(1.0, 0.05, 20, 1e-3, known_cohorts=True) > 1.5 * compute_epsilon(1.0, 0.05, 20, 1e-3)
    assert compute_epsilon(1.0, 1e-6, 3, 1e-3, known_cohorts=True) == 0.0, "who is hardly ever drawn is in delta"
    assert math.isfinite(compute_epsilon(0.02, 1.0, 500, 1e-5, known_cohorts=True))
    noise = find_noise(3.0, 0.5, 20, 1e-3, known_cohorts=True)
    assert (
        compute_epsilon(noise, 0.5, 20, 1e-3, known_cohorts=True)
        <= 3.0
        < compute_epsilon(0.99 * noise, 0.5, 20, 1e-3, known_cohorts=True)
    )


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_reports_hide_what_sums_hide(tmp_path: Path) -> None:
    run = ff.run(table(tmp_path), out=tmp_path / "run")
    for number, report in enumerate(run.metrics, 1):
        assert {key: report[key] for key in WITHHELD} == WITHHELD and "secure" not in report and "undone" not in report
        assert report["privacy"]["epsilon"] == compute_epsilon(1.0, 1.0, number, 0.01, known_cohorts=True)
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["known"] is True
    assert json.loads((tmp_path / "run" / "secure.json").read_text())["begun"] == 3
    assert any("Epsilon" in note for note in run.summary["notes"])
    assert run.summary["privacy"] == run.metrics[-1]["privacy"]


def test_the_run_ends_when_the_budget_is_spent(tmp_path: Path) -> None:
    budget = (
        compute_epsilon(1.0, 1.0, 2, 0.01, known_cohorts=True) + compute_epsilon(1.0, 1.0, 3, 0.01, known_cohorts=True)
    ) / 2
    run = ff.run(table(tmp_path, {"privacy": {"epsilon": budget}, "rounds": 9}), out=tmp_path / "run")
    assert [report["round"] for report in run.metrics] == [1, 2] and run.finished


@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_engines_end_with_the_same_bits(engine: str, tmp_path: Path) -> None:
    run = prepare(load_experiment(table(tmp_path, {"rounds": 2})), tmp_path / "local")
    run._take_engine().close()
    shutil.copytree(tmp_path / "local", tmp_path / engine)
    config = tmp_path / engine / "config.toml"
    config.write_text(config.read_text().replace('name = "local"', f'name = "{engine}"\nworkers = 2'))
    for name in ("local", engine):
        ff.resume(tmp_path / name)
    assert torch.equal(read_state(tmp_path / "local"), read_state(tmp_path / engine))


@pytest.mark.parametrize("again", [False, True])
def test_resume_skips_a_begun_round_that_was_paid_for(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rounds that are begun again are paid for again, as on a fleet: this one is not begun again."""
    calls = stop_in_second_round(monkeypatch, lambda: ff.run(table(tmp_path), out=tmp_path / "run"))
    payload = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert payload["begun"] == 2
    (tmp_path / "run" / "privacy.json").write_text(json.dumps({**payload, "again": again}))
    run = ff.resume(tmp_path / "run")
    second = run.metrics[1]
    assert calls.count(1) == 12 and second["undone"]["reason"] and second["train"]["clients"] is None
    assert second["privacy"]["epsilon"] == compute_epsilon(1.0, 1.0, 2, 0.01, known_cohorts=True)
    payload = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert payload["begun"] == 3 and payload["epsilon"] == compute_epsilon(1.0, 1.0, 3, 0.01, known_cohorts=True)


def test_too_small_rounds_are_paid_for(tmp_path: Path) -> None:
    assembly = assembly_of({"cohort": {"fraction": 0.25}, "rounds": 6})
    few = [r for r in range(60) if len(choose_clients(assembly, r)) < 3]
    assert few
    for round in few[:2]:
        server, after, report, watched = round_of(assembly, round=round)
        assert not watched.replies and torch.equal(concat_state(after.state), concat_state(server.state))
        assert report["undone"]["reason"]
    run = ff.run(table(tmp_path, {"rounds": 8, "cohort": {"fraction": 0.25}}), out=tmp_path / "run")
    assert len(run.metrics) == 8
    assert run.summary["privacy"]["epsilon"] == compute_epsilon(1.0, 0.25, 8, 0.01, known_cohorts=True)


def test_cohorts_that_are_all_too_small_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven of them: other runs stop after five rounds without a usable update."""
    monkeypatch.setattr(Privacy, "choose", lambda self, federation, server, rng: [0, 5])
    run = ff.run(table(tmp_path, {"rounds": 7}), out=tmp_path / "run")
    assert len(run.metrics) == 7
    assert run.summary["privacy"]["epsilon"] == compute_epsilon(1.0, 1.0, 7, 0.01, known_cohorts=True)


def test_a_cohort_that_always_drops_out_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        secure_engine.SimulatedParties, "_drops_out", lambda self, phase, job: phase == "update" and job.client > 1
    )
    with raises(NoUsableUpdates, 5) as caught:
        ff.run(table(tmp_path, {"rounds": 9}), out=tmp_path / "run")
    assert "withheld" in str(caught.value) and "client 2" not in str(caught.value)


def test_resume_needs_the_same_sums(tmp_path: Path) -> None:
    run = prepare(load_experiment(table(tmp_path)), tmp_path / "run")
    run._take_engine().close()
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    head, _, rest = text.partition("[secure]")
    config.write_text(head + "[" + rest.partition("\n[")[2])
    with raises(RunError, "[secure] was", key="privacy"):
        ff.resume(tmp_path / "run")


# ---- what stands in files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [True, False])
def test_files_and_lines_hide_updates_and_sums(
    noise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without noise and masks the same search finds them: sums as the mean that they make, updates as they are sent."""
    needles: dict[str, list[bytes]] = {"sums": [], "means": [], "updates": []}
    released, words = Privacy.release, secure_engine.BlockLayout.quantize_update

    def record(self: Privacy, federation: Any, server: Any, total: torch.Tensor) -> Any:
        divided = total / (count_registered(federation, server.round) * self.rate)
        needles["sums"].append(total.numpy().tobytes()[:64])
        needles["means"].append((divided + concat_state(server.state)).numpy().tobytes()[:64])
        return released(self, federation, server, total)

    def sent(self: Any, pieces: Any, job: Job, update: Any, blocks: Any, grid: Quantizer) -> Any:
        leaked = words(self, pieces, job, update, blocks, grid)
        needles["updates"] += [part.tobytes()[:64] for part in leaked[0].values()]
        needles["updates"].append(concat_state(update.state).numpy().tobytes()[:64])
        return leaked

    monkeypatch.setattr(Privacy, "release", record)
    monkeypatch.setattr(secure_engine.BlockLayout, "quantize_update", sent)
    if not noise:
        monkeypatch.setattr(Privacy, "_add_noise", lambda self, total, round: None)
    ff.run(table(tmp_path, {"checkpoint": {"every": 1}}), out=tmp_path / "run", on_round=print)
    files = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    everything = [*files, "".join(capfd.readouterr()).encode()]
    leaked = {kind for kind, parts in needles.items() for part in parts if any(part in text for text in everything)}
    assert len(needles["updates"]) > 50 and len(needles["means"]) == 3 and len(files) > 5
    assert leaked == (set() if noise else {"means"})


REFUSED: list[tuple[dict[str, Any], Expected]] = [
    ({"secure": {"clipping_range": 0.01}}, Expected(0.01, "[privacy] clipping_norm", 0.05)),
    ({"secure": {"clipping_range": 5.0, "bits": 8}}, Expected("range = 0.05")),
    ({"method": {"options": {"outliers": {}}}}, Expected("[method.options.outliers]")),
    ({"cohort": {"quorum": 0.5}}, Expected("[cohort] quorum")),
    ({"local": {"compress": "int8"}}, Expected("[secure]", "[local]", "compress")),
    ({"method": {"name": "adaptivefl"}}, Expected("adaptivefl", "'assign'")),
]


@pytest.mark.parametrize(("change", "expected"), REFUSED)
def test_settings_without_a_guarantee_are_refused(change: dict[str, Any], expected: Expected) -> None:
    with raises(ConfigError, expected):
        assemble(load_experiment(merge_tables(BOTH, change)))


def test_more_clients_than_sums_can_hold_are_refused() -> None:
    data = {"name": f"{HERE}/tiny.py:tiny_data", "n": 4000, "partition": {"kind": "iid", "clients": 300}}
    change = {"data": data, "cohort": {"fraction": 0.1}, "secure": {"bits": 24}, "privacy": {"delta": 1e-3}}
    with raises(ConfigError, "[secure] bits", 300):
        assemble(load_experiment(merge_tables(BOTH, change)))


def test_a_cohort_that_is_often_too_small_is_noted() -> None:
    notes = assemble(load_experiment(merge_tables(BOTH, {"cohort": {"fraction": 0.5}}))).notes
    assert any("69%" in note and "level 3" in note for note in notes)
    assert not any("%" in note and "level 3" in note for note in assemble(load_experiment(BOTH)).notes)
