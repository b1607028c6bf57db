"""Runs with `[secure]`: sums against brute force and the plain run, what is withheld and refused, resume, engines."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Expected, raises
from support.secure import HERE, TINY, Stopped, WatchedEngine, make_block, merge_tables, stop_in_second_round

import fleetfit as ff
from fleetfit.aggregate import Mean, SummedBlock, apply_mean, average_sums
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Failure, Job, RoundSums, Update
from fleetfit.engines import secure as secure_engine
from fleetfit.engines.secure import SecureEngine
from fleetfit.errors import ConfigError, RunError
from fleetfit.rounds import run_round, start
from fleetfit.submodel import concat_state, full_submodel, get_slice_plan
from fleetfit.validation import find_sums_error

SECURE: dict[str, Any] = {"min_clients": 3}
PROFILE = {"multiply_adds_per_s": 1e9, "down_bytes_per_s": 1e6, "up_bytes_per_s": 1e6}


def round_of(
    change: dict[str, Any], away: secure_engine.Dropout | None = None
) -> tuple[Any, Any, Any, dict[str, Any], WatchedEngine]:
    """Return the assembly, the server before and after one secure round, its report, and what clients had to send."""
    assembly = assemble(load_experiment(merge_tables(TINY, {"secure": SECURE}, change)))
    plain = replace(assembly, settings=replace(assembly.settings, secure=None)).engine()
    watched = WatchedEngine(plain)
    assert assembly.settings.secure is not None
    layout, secure = assembly.federation.problem.layout, assembly.settings.secure
    make_parties = partial(secure_engine.SimulatedParties, watched, dropout=away)
    engine = SecureEngine(watched, layout, secure, make_parties)
    server = start(assembly.federation)
    after, report = run_round(assembly.federation, engine, assembly.settings, server)
    return assembly, server, after, report, watched


def compute_state(assembly: Any, server: Any, watched: WatchedEngine, without: set[int]) -> torch.Tensor:
    """Return the state after a round, element by element and client by client, in whole numbers of the grid's step."""
    layout, grid = assembly.federation.problem.layout, assembly.settings.secure.grid
    full = get_slice_plan(layout, full_submodel(layout)).size
    total, count = [0] * full, [0] * full
    before = concat_state(server.state)
    for job, update in watched.replies:
        if job.client in without:
            continue
        places = get_slice_plan(layout, job.submodel).gather(torch.arange(full)).tolist()
        names = [n for n, t in update.state.items() for _ in range(t.numel())]
        moved = (concat_state(update.state) - concat_state(job.state)).double() / grid.step
        for place, name, value in zip(places, names, moved.tolist(), strict=True):
            if name not in update.untrained:
                total[place] += max(-grid.most, min(grid.most, round(value)))
                count[place] += 1
    numbers = [
        b if c < 1 else b + s * grid.step / c for b, s, c in zip(before.double().tolist(), total, count, strict=True)
    ]
    return torch.tensor(numbers, dtype=torch.float64).float()


@pytest.mark.parametrize("method", ["scalefl", "fedrolex", "fjord", "heterofl"])
def test_a_round_is_the_mean_of_the_quantized_movements(method: str) -> None:
    keys = {"name": method, "hooks": {"weigh": "by_count"}} if method in ("fedrolex", "fjord") else {"name": method}
    assembly, server, after, report, watched = round_of({"method": keys})
    assert len({job.submodel for job, _ in watched.replies}) == 3
    assert torch.equal(concat_state(after.state), compute_state(assembly, server, watched, set()))
    assert not torch.equal(concat_state(after.state), concat_state(server.state))
    assert report["secure"] == {"hidden": 0, "clipped": 0} and report["train"]["clients"] == 12


def test_a_round_is_the_plain_one_up_to_half_a_step() -> None:
    assembly, server, after, _, _ = round_of({})
    plain = replace(assembly, settings=replace(assembly.settings, secure=None))
    there, _ = run_round(assembly.federation, plain.engine(), plain.settings, server)
    away = (concat_state(after.state) - concat_state(there.state)).abs().max()
    step = assembly.settings.secure.grid.step
    assert 0 < away <= step / 2 + 1e-6, "half a step, and the rounding of fp32"


@pytest.mark.parametrize("phase", ["keys", "shares", "update", "sign", "unmask"])
def test_dropouts_before_their_update_fail(phase: str) -> None:
    gone = {1, 6}
    assembly, server, after, report, watched = round_of({}, lambda p, r, c: p == phase and c in gone)
    counts = gone if phase in ("keys", "shares", "update") else set()
    assert {f["client"] for f in report["failures"]} == counts
    assert all("away" in f["reason"] for f in report["failures"])
    assert torch.equal(concat_state(after.state), compute_state(assembly, server, watched, counts))
    assert report["train"]["clients"] == 12 - len(counts)


@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        ("shares", "dealt shares"),
        ("update", "sent a masked update"),
        ("sign", "signed the list of survivors"),
        ("unmask", "opened their shares"),
    ],
)
def test_too_few_survivors_leave_the_state_unchanged(phase: str, sentence: str) -> None:
    _, server, after, report, _ = round_of({}, lambda p, r, c: p == phase and c % 2 == 0)
    assert torch.equal(concat_state(after.state), concat_state(server.state)) and after.round == 1
    assert sentence in report["undone"]["reason"] and report["train"] == {
        "loss": None, "clients": 0, "samples": 0, "by_level": {}
    }  # fmt: skip


def test_a_step_that_fails_leaves_the_state_unchanged() -> None:
    def fail(*arguments: Any) -> Any:
        raise KeyError("teachers")

    assembly = assemble(load_experiment(merge_tables(TINY, {"secure": SECURE})))
    federation = replace(assembly.federation, method=replace(assembly.federation.method, step=fail))
    server = start(federation)
    after, report = run_round(federation, assembly.engine(), assembly.settings, server)
    assert after.state is server.state and after.round == 1
    assert "KeyError" in report["undone"]["reason"] and "teachers" in report["undone"]["reason"]


def test_elements_that_too_few_cover_keep_their_bits() -> None:
    """Four clients of each level, two of level 3 gone: what level 3 has alone is over two clients, below three."""
    experiment = merge_tables(TINY, {"secure": SECURE})
    levels = assemble(load_experiment(experiment)).federation.level_of
    gone = [int(c) for c in (levels == 2).nonzero()[0][:2]]
    assembly, server, after, report, _ = round_of({}, lambda p, r, c: p == "update" and c in gone)
    layout = assembly.federation.problem.layout
    smaller = torch.zeros(get_slice_plan(layout, full_submodel(layout)).size)
    get_slice_plan(layout, assembly.federation.levels[1].submodel).scatter_scalar(smaller, 1.0)
    get_slice_plan(layout, assembly.federation.levels[0].submodel).scatter_scalar(smaller, 1.0)
    alone = smaller == 0
    assert report["secure"]["hidden"] == int(alone.sum()) > 0
    assert torch.equal(concat_state(after.state)[alone], concat_state(server.state)[alone])
    assert not torch.equal(concat_state(after.state)[~alone], concat_state(server.state)[~alone])


def test_a_level_that_too_few_train_is_named() -> None:
    groups = [{"budget": 0.3, "fraction": 0.8}, {"budget": 1.0, "fraction": 0.2}]
    change = {"secure": SECURE, "fleet": {"tolerance": 0.45, "groups": groups}}
    few, enough = (
        assemble(load_experiment(merge_tables({k: v for k, v in TINY.items() if k != "fleet"}, change, more))).notes
        for more in ({"secure": {"min_clients": 3}}, {"secure": {"min_clients": 2}})
    )
    assert any("level 2" in note and "never trained" in note for note in few)
    assert not any("never trained" in note for note in enough)


def test_clipped_movements_are_counted() -> None:
    _, _, _, report, _ = round_of({"secure": {"clipping_range": 1e-4}})
    assert report["secure"]["clipped"] == 12


def test_a_run_withholds_losses_of_clients(tmp_path: Path) -> None:
    run = ff.run(merge_tables(TINY, {"secure": SECURE}), out=tmp_path / "run")
    plain = ff.run(TINY, out=tmp_path / "plain")
    for report in run.metrics:
        assert report["train"]["loss"] is None and report["train"]["clients"] == 12
        assert "counts" not in report and "undone" not in report and report["bytes_up"] > 0
    assert all(report["train"]["loss"] is not None for report in plain.metrics)
    assert any("Secure aggregation" in note and "3 clients" in note for note in run.summary["notes"])
    assert json.loads((tmp_path / "run/secure.json").read_text())["begun"] == 3
    assert abs(run.accuracy("global") - plain.accuracy("global")) < 0.1
    assert run.metrics[0]["bytes_up"] > plain.metrics[0]["bytes_up"]
    assert "[secure]" in (tmp_path / "run/config.toml").read_text()
    assert ff.load(tmp_path / "run").experiment.is_secure and not plain.experiment.is_secure


@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_every_engine_leaves_the_same_state(engine: str, tmp_path: Path) -> None:
    """Masks differ in each run, and vanish."""
    states = []
    for name in ("local", engine):
        keys = {"name": name} | ({} if name == "local" else {"workers": 2})
        run = ff.run(merge_tables(TINY, {"secure": SECURE, "engine": keys, "rounds": 2}), out=tmp_path / name)
        states.append(concat_state(run.server.state))
    assert torch.equal(*states)


def test_resume_skips_a_round_that_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = merge_tables(TINY, {"secure": SECURE})
    calls = stop_in_second_round(monkeypatch, lambda: ff.run(config, out=tmp_path / "run"))
    name = json.loads((tmp_path / "run/secure.json").read_text())["run"]
    before = concat_state(ff.load(tmp_path / "run").server.state).clone()
    assert calls.count(1) == 12
    run = ff.resume(tmp_path / "run")
    assert calls.count(1) == 12 and calls.count(2) == 12
    first, second, third = run.metrics
    assert second["undone"]["reason"] and second["round"] == 2 and second["train"]["clients"] == 0
    assert "undone" not in first and "undone" not in third and third["train"]["clients"] == 12
    assert json.loads((tmp_path / "run/secure.json").read_text()) == {"run": name, "begun": 3}
    assert not torch.equal(concat_state(run.server.state), before)


def test_skipped_rounds_do_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that were done since the last checkpoint are skipped, also more of them than empty rounds end a run."""
    train = secure_engine.SimulatedParties._train

    def stops(self: Any, requests: Any) -> Any:
        if next(iter(requests.values()))[0].round == 7:
            raise Stopped
        return train(self, requests)

    experiment = merge_tables(
        TINY, {"secure": SECURE, "rounds": 9, "checkpoint": {"every": 20}, "evaluate": {"every": 0}}
    )
    with monkeypatch.context() as patch:
        patch.setattr(secure_engine.SimulatedParties, "_train", stops)
        with pytest.raises(Stopped):
            ff.run(experiment, out=tmp_path / "run")
    run = ff.resume(tmp_path / "run")
    assert [("undone" in report) for report in run.metrics] == [True] * 8 + [False]


@pytest.mark.parametrize(
    "text", ["{}", '{"run": "", "begun": 1}', '{"run": "a", "begun": -1}', '{"run": "a", "begun": "1"}', "["]
)
def test_a_damaged_record_of_begun_rounds_ends_the_run(text: str, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        ff.run(merge_tables(TINY, {"secure": SECURE}), out=tmp_path / "run", on_round=_stop)
    (tmp_path / "run/secure.json").write_text(text)
    with raises(RunError, "secure.json"):
        ff.resume(tmp_path / "run")


def _stop(report: Any) -> None:
    raise Stopped


def own_note(federation: Any, server: Any, update: Any) -> dict[str, Any]:
    return {}


REFUSED: dict[str, tuple[dict[str, Any], Expected]] = {
    "weights by samples": ({"method": {"name": "fedavg"}}, Expected("method.hooks.weigh", '"by_count"')),
    "robust": ({"method": {"options": {"outliers": {}}}}, Expected("method.options.outliers")),
    "own merge": ({"method": {"options": {"trimmed_mean": {}}}}, Expected("trimmed_mean")),
    "own levels' tensors": ({"method": {"name": "decoupled"}}, Expected("decoupled", "'dispatch'")),
    "shrinks": ({"method": {"name": "adaptivefl"}}, Expected("adaptivefl", "'adapt_job'")),
    "shallower": ({"fleet": {"groups": [{"budget": 1.0, "profile": PROFILE}]}, "cohort": {"deadline_s": 60}},
                  Expected("cohort.on_deadline", '"shallower"')),
    "rows out": ({"method": {"name": "heterofl", "masked": True}}, Expected("heterofl", "'reply'")),
    "own note": ({"method": {"hooks": {"annotate": f"{__file__}:own_note"}}}, Expected("method.hooks.annotate")),
    "chosen by loss": ({"cohort": {"selection": "loss"}}, Expected("cohort.selection")),
    "random channels": ({"method": {"hooks": {"choose_channels": "random"}}}, Expected('= "prefix"', '"rolling"')),
    "compression": ({"local": {"compress": "int8"}}, Expected("[secure]", "[local]", "compress")),
    "tensors beside the state": (
        {"method": {"name": "scalefl", "options": {"scaffold": {}}}}, Expected("method.options.scaffold", "control"),
    ),
    "clients that remember": ({"method": {"options": {"feddyn": {}}}}, Expected("method.options.feddyn")),
    "batch norm": ({"model": {"norm": True}}, Expected('norm = "group"', '"batch"')),
    "small cohort": ({"cohort": {"fraction": 0.1}}, Expected("[secure] min_clients", 3, 1)),
    "half": ({"secure": {"reconstruction_threshold": 0.5}}, Expected("[secure] reconstruction_threshold", 0.5)),
    "one": ({"secure": {"min_clients": 1}}, Expected("[secure] min_clients", 2, 1)),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_hooks_on_single_updates_are_refused(what: str) -> None:
    change, expected = REFUSED[what]
    base = {k: v for k, v in TINY.items() if k != "fleet"} if "fleet" in change else TINY
    with raises(ConfigError, expected):
        assemble(load_experiment(merge_tables(base, {"secure": SECURE}, change)))


def test_a_cohort_that_sums_cannot_hold_is_refused() -> None:
    change = {"data": {"name": f"{HERE}/tiny.py:tiny_data", "n": 4000, "partition": {"kind": "iid", "clients": 300}}}
    with raises(ConfigError, "[secure] bits", 24, 256, 300):
        assemble(load_experiment(merge_tables(TINY, {"secure": {"bits": 24}}, change)))


def test_batch_norm_with_batch_statistics_is_allowed() -> None:
    _, _, _, report, _ = round_of({"model": {"norm": True}, "evaluate": {"batch_norm": ["batch"]}})
    assert report["train"]["clients"] == 12


def test_an_empty_section_is_enough_and_none_is_none() -> None:
    on = assemble(load_experiment(merge_tables(TINY, {"secure": {}}))).settings.secure
    assert on is not None and (on.rules.minimum, on.grid.bits, on.grid.range) == (3, 20, 1.0)
    assert assemble(load_experiment(TINY)).settings.secure is None


def test_hostile_clients_stay_within_the_range(tmp_path: Path) -> None:
    change = {
        "attack": {"kind": "sign_flip", "scale": 1e6, "fraction": 0.25},
        "secure": {"clipping_range": 0.01},
        "rounds": 1,
    }
    assembly, server, after, report, _ = round_of(change)
    hostile = assembly.settings.hostile
    assert report["received"]["sent"]["hostile"] == len(hostile) == 3
    assert (concat_state(after.state) - concat_state(server.state)).abs().max() <= 0.01 + 1e-6
    assert report["secure"]["clipped"] >= 3


def test_infinite_updates_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    run = WatchedEngine.run

    def broken(self: WatchedEngine, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        for reply in run(self, jobs):
            if isinstance(reply, Update) and reply.client == 5:
                reply = replace(reply, state={n: t * float("nan") for n, t in reply.state.items()})
            yield reply

    monkeypatch.setattr(WatchedEngine, "run", broken)
    assembly, server, after, report, watched = round_of({})
    assert [f["client"] for f in report["failures"]] == [5] and "not finite" in report["failures"][0]["reason"]
    assert torch.equal(concat_state(after.state), compute_state(assembly, server, watched, {5}))


# ---- sums as values --------------------------------------------------------------------------------------------------


GOOD = make_block([0, 2], [5, -8], [2, 4])
WRONG: dict[str, tuple[Callable[[], SummedBlock], str]] = {
    "types": (lambda: replace(GOOD, sums=GOOD.sums.double()), "not as many whole numbers"),
    "lengths": (lambda: replace(GOOD, sums=GOOD.sums[:1]), "not as many whole numbers"),
    "nothing": (lambda: make_block([], [], []), "elements that the model does not have"),
    "below": (lambda: make_block([-1], [1], [1]), "elements that the model does not have"),
    "beyond": (lambda: make_block([9], [1], [1]), "elements that the model does not have"),
    "counts": (lambda: make_block([1], [1], [5]), "counts more clients than the 4"),
    "negative": (lambda: make_block([1], [1], [-1]), "counts more clients than the 4"),
    "too far": (lambda: make_block([1], [21], [4]), "beyond what 4 clients within the range can add up to"),
    "nobody trained it": (lambda: make_block([1], [1], [0]), "beyond what"),
    "another's": (lambda: make_block([2], [1], [1]), "has elements of another"),
}


@pytest.mark.parametrize("what", WRONG)
def test_sums_that_no_clients_can_have_are_refused(what: str) -> None:
    make, sentence = WRONG[what]
    assert find_sums_error(RoundSums((GOOD,), 0.1, ()), 9, 5) is None
    assert find_sums_error(RoundSums((make_block([1], [-20], [4]),), 0.1, ()), 9, 5) is None
    assert sentence in str(find_sums_error(RoundSums((GOOD, make()), 0.1, ()), 9, 5))


def test_from_sums_is_the_mean_of_trained_elements() -> None:
    assembly = assemble(load_experiment(TINY))
    layout, server = assembly.federation.problem.layout, start(assembly.federation)
    piece = assembly.federation.levels[0].submodel
    compiled, full = get_slice_plan(layout, piece), get_slice_plan(layout, full_submodel(layout)).size
    places = compiled.gather(torch.arange(full))
    rng = torch.Generator().manual_seed(1)
    numbers = torch.randint(-50, 50, (3, len(places)), generator=rng)
    sums = SummedBlock(places, numbers.sum(0), torch.full_like(places, 3), 3)
    mean = Mean(layout)
    sent = compiled.gather(concat_state(server.state))
    for row in numbers:
        mean.add(piece, compiled.views(sent + 0.01 * row), 1.0)
    state, expected = average_sums(layout, server.state, [sums], 0.01), mean.result()
    assert torch.equal(concat_state(state.coverage), concat_state(expected.coverage))
    one, other = concat_state(apply_mean(server.state, state)), concat_state(apply_mean(server.state, expected))
    assert torch.allclose(one, other, atol=1e-6)
    outside = torch.ones(full, dtype=torch.bool)
    outside[places] = False
    assert torch.equal(one[outside], concat_state(server.state)[outside]) and bool(outside.any())
