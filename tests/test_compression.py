"""Compressed updates: the formulas, what error feedback keeps, and the same run on every engine with fewer bytes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from same_bits import SETTINGS, finished, fleets, same
from support import raises
from tiny import plain, tiny_federation

import fleetfit
from fleetfit.config import load_experiment
from fleetfit.core import Failure, Job, Update
from fleetfit.engines.local import local
from fleetfit.engines.processes import processes
from fleetfit.errors import ConfigError
from fleetfit.layout import State
from fleetfit.messages import compress, decompress, reply_size, update_size
from fleetfit.rounds import run_round, start
from fleetfit.submodel import Submodel, extract
from fleetfit.training import run_job
from fleetfit.validation import find_update_error, validate_reply

FEDERATION, _ = tiny_federation({"name": "fedavg"})
LAYOUT = FEDERATION.problem.layout
KINDS = ("float16", "int8")


def job_and_update(level: int = 1, seed: int = 0, client: int = 4) -> tuple[Job, Update]:
    piece = FEDERATION.levels[level].submodel
    sent = extract(LAYOUT, start(FEDERATION).state, piece)
    rng = torch.Generator().manual_seed(seed)
    state = {name: t + 0.01 * torch.randn(t.shape, generator=rng) for name, t in sent.items()}
    job = Job("train", 3, 9, 2, client, piece, sent, {"name": "fedavg"}, 11, level)
    return job, Update(3, 2, client, level, piece, piece, state, 10, {"loss": 0.5})


def round_by_hand(values: np.ndarray, kind: str) -> np.ndarray:
    """What the server gets of a change, row by row."""
    if kind == "float16":
        return values.astype(np.float16).astype(np.float32)
    rounded = np.zeros_like(values)
    for row in range(len(values)) if values.ndim > 1 else [...]:
        largest = np.abs(values[row]).max()
        steps = np.rint(values[row] / (largest / np.float32(127))) if largest else np.zeros_like(values[row])
        rounded[row] = steps * (largest / np.float32(127))
    return rounded


@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_element_by_element(kind: str) -> None:
    job, update = job_and_update()
    small, lost = compress(update, job, LAYOUT, kind, None)
    back = decompress(small, job, LAYOUT)
    assert not back.compressed and not back.scales
    for name, tensor in update.state.items():
        change = (tensor - job.state[name]).numpy()
        expected = round_by_hand(change, kind)
        np.testing.assert_allclose((back.state[name] - job.state[name]).numpy(), expected, atol=2e-7)
        np.testing.assert_allclose(lost["state"][name].numpy(), change - expected, atol=2e-9)
        assert small.state[name].dtype == getattr(torch, kind) and small.state[name].shape == tensor.shape
        assert float((back.state[name] - tensor).abs().max()) <= float(np.abs(change).max()) / 127 / 2 * 1.01 + 1e-7


def test_extreme_changes_are_compressed() -> None:
    job, update = job_and_update()
    name = "blocks.0.4.bias"
    same_as_sent = replace(update, state={**update.state, name: job.state[name].clone()})
    huge = replace(update, state={**update.state, name: job.state[name] + 1e6})
    for kind in KINDS:
        back = decompress(compress(same_as_sent, job, LAYOUT, kind, None)[0], job, LAYOUT)
        assert torch.equal(back.state[name], job.state[name])
        small, lost = compress(huge, job, LAYOUT, kind, None)
        back = decompress(small, job, LAYOUT)
        assert all(bool(t.isfinite().all()) for t in back.state.values())
        torch.testing.assert_close(back.state[name] + lost["state"][name], huge.state[name])


@pytest.mark.parametrize("kind", KINDS)
def test_compression_errors_are_made_up_for(kind: str) -> None:
    """The sum of what is sent in many rounds is that of what was wanted, but for the last rounding."""
    lost: Mapping[str, Any] | None = None
    job, _ = job_and_update()
    expected = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in job.state.items()}
    actual = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in job.state.items()}
    worst = 0.0
    for seed in range(20):
        job, update = job_and_update(seed=seed)
        small, lost = compress(update, job, LAYOUT, kind, lost)
        back = decompress(small, job, LAYOUT)
        for name in expected:
            expected[name] += (update.state[name] - job.state[name]).double()
            actual[name] += (back.state[name] - job.state[name]).double()
            worst = max(worst, float((update.state[name] - back.state[name]).abs().max()))
    for name in expected:
        torch.testing.assert_close(actual[name] + lost["state"][name].double(), expected[name], atol=1e-5, rtol=0)  # type: ignore[index]
        assert float((actual[name] - expected[name]).abs().max()) < 3 * worst  # and not 20 times


def test_compression_errors_follow_the_sub_model() -> None:
    """Channels and blocks that both have keep it, the others begin at zero."""
    job, update = job_and_update(level=2)
    _, lost = compress(update, job, LAYOUT, "int8", None)
    small_job, small_update = job_and_update(level=0)
    with_it, _ = compress(small_update, small_job, LAYOUT, "float16", lost)
    without, _ = compress(small_update, small_job, LAYOUT, "float16", None)
    full = {**{n: torch.zeros(s) for n, s in LAYOUT.shapes({}, LAYOUT.exits).items()}, **lost["state"]}
    moved = extract(LAYOUT, full, small_job.submodel)
    for name, tensor in with_it.state.items():
        torch.testing.assert_close(tensor.float() - without.state[name].float(), moved[name], atol=4e-5, rtol=0)
    _, back = compress(small_update, small_job, LAYOUT, "int8", None)
    grown, _ = compress(update, job, LAYOUT, "float16", back)
    plain, _ = compress(update, job, LAYOUT, "float16", None)
    outside = [n for n in update.state if n not in small_update.state]
    assert outside and all(torch.equal(grown.state[n], plain.state[n]) for n in outside)


# ---- validation -------------------------------------------------


def spoilt(update: Update, name: str, scale: Any) -> State:
    return {**update.scales, name: scale}


def test_compressed_updates_are_validated() -> None:
    job, update = job_and_update()
    half, _ = compress(update, job, LAYOUT, "float16", None)
    small, _ = compress(update, job, LAYOUT, "int8", None)
    for good in (half, small):
        reply = validate_reply(good, job, FEDERATION)
        assert isinstance(reply, Update) and not reply.compressed
        assert all(t.dtype == torch.float32 for t in reply.state.values())
    name = "blocks.0.4.weight"
    scale, half_name = small.scales[name], half.state[name]
    wrong = {
        "scales": [
            replace(small, scales=spoilt(small, name, scale * float("nan"))),
            replace(small, scales=spoilt(small, name, -scale - 1)),
            replace(small, scales=spoilt(small, name, scale.double())),
        ],
        "expected": [
            replace(small, scales=spoilt(small, name, scale[:1])),
            replace(small, compressed="float16"),
            replace(half, compressed="int8"),
            replace(small, compressed=""),
            replace(small, state={**small.state, name: small.state[name][:1]}),
        ],
        "missing": [replace(small, scales={}), replace(half, scales=small.scales)],
        "its compressed is": [replace(small, compressed="int4"), replace(small, compressed=None)],
        "not finite": [replace(half, state={**half.state, name: half_name * float("inf")})],
    }
    for message, updates in wrong.items():
        for odd in updates:
            assert isinstance(validate_reply(odd, job, FEDERATION), Failure)
            assert message in str(find_update_error(odd, job, FEDERATION) or validate_reply(odd, job, FEDERATION)), (
                message
            )


# ---- in a run -------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ({"name": "scalefl", "options": {"feddyn": {}}}, "float16"),
        ({"name": "adaptivefl"}, "int8"),
        ({"name": "heterofl", "masked": True, "hooks": {"choose_channels": "rolling"}}, "int8"),
    ],
    ids=str,
)
def test_the_same_bits_on_two_workers(spec: Mapping[str, Any], kind: str) -> None:
    federation, simulation = fleets(spec)
    smaller = replace(SETTINGS, local=SETTINGS.local.replace(compress=kind))
    expected = finished(federation, local(simulation), smaller)
    assert not expected.report["failures"]
    engine = processes(simulation, workers=2)
    try:
        same(expected, finished(federation, engine, smaller))
    finally:
        engine.close()
    plain = finished(federation, local(simulation))
    assert any(not torch.equal(plain.server.state[n], t) for n, t in expected.server.state.items())


def test_compression_leaves_a_methods_memory() -> None:
    """`counting` counts its rounds and checks what it remembers; the setting comes and goes."""
    federation, simulation = fleets({"name": "plugin_method:counting", "pull": 0.1})
    federation = replace(federation, cohort=7)
    engine, server = local(simulation), start(federation)
    for kind in (None, "int8", "float16", None):
        settings = replace(SETTINGS, local=SETTINGS.local.replace(compress=kind))
        server, report = run_round(federation, engine, settings, server)
        assert not report["failures"]
    memories = engine.dump_memories()
    assert {stored["memory"]["rounds"] for stored in memories.values()} == {4}


@pytest.mark.parametrize(("kind", "share"), [("float16", 0.5), ("int8", 0.25)])
def test_bytes_up_are_those_of_the_smaller_message(kind: str, share: float, tmp_path: Path) -> None:
    common: dict[str, Any] = {"rounds": 2, "data": {"name": "digits", "partition": {"clients": 8}}}
    runs = [
        fleetfit.run(**common, local={"epochs": 1, "compress": k}, out=str(tmp_path / str(k))) for k in (None, kind)
    ]
    up, down = ([sum(row[f"bytes_{way}"] for row in r.metrics) for r in runs] for way in ("up", "down"))
    assert share < up[1] / up[0] < share + 0.06
    assert down[1] == pytest.approx(down[0], rel=1e-3)


def test_the_size_of_an_update_is_counted_as_it_travels() -> None:
    job, update = job_and_update(level=2)
    elements = sum(t.numel() for t in update.state.values())
    small, _ = compress(update, job, LAYOUT, "int8", None)
    rows = sum(s.numel() for s in small.scales.values())
    header = reply_size(replace(small, state={}, scales={}), LAYOUT)
    assert elements + 4 * rows < reply_size(small, LAYOUT) < elements + 4 * rows + header + 100


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_update_sizes_are_known_beforehand(kind: str | None) -> None:
    """To the byte, but for what it counts and reports."""
    job, update = job_and_update(level=2)
    job = replace(job, local=job.local.replace(compress=kind))
    sized = replace(update, num_examples=0, metrics={})
    if kind is not None:
        sized, _ = compress(sized, job, LAYOUT, kind, None)
    assert update_size(job, LAYOUT, {}) == reply_size(sized, LAYOUT)


def test_an_unknown_kind_is_refused_in_a_run_file() -> None:
    with raises(ConfigError, "[local] compress"):
        load_experiment({"local": {"compress": "int4"}})


def test_compressed_smaller_pieces() -> None:
    """A device that pruned what it got: its change is counted from its own part."""
    job, _ = job_and_update(level=2)
    _, update = job_and_update(level=0)
    update = replace(update, dispatched=job.submodel, level=2)
    assert isinstance(update.submodel, Submodel) and update.submodel.is_part_of(job.submodel)
    small, _ = compress(update, job, LAYOUT, "float16", None)
    reply = validate_reply(small, job, FEDERATION)
    assert isinstance(reply, Update)
    for name, tensor in update.state.items():
        torch.testing.assert_close(reply.state[name], tensor, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_fails_keeps_both_of_its_memories(kind: str) -> None:
    """What its method remembers, and what compression has lost so far; the next update goes on with both."""
    spec = {"name": "plugin_method:counting"}
    federation, simulation = tiny_federation(spec)
    piece = federation.levels[1].submodel
    sent = extract(LAYOUT, start(federation).state, piece)
    job = Job("train", 0, 9, 0, 4, piece, sent, spec, 11, 1, plain(lr=0.1, batch_size=8, compress=kind))
    reply, memory = run_job(job, simulation.device(4))
    assert isinstance(reply, Update) and reply.compressed == kind and len(memory) == 2
    diverging = replace(job, round=1, memory_version=0, local=job.local.replace(lr=1e30))
    reply, after = run_job(diverging, simulation.device(4, memory))
    assert isinstance(reply, Failure) and after is memory
    again = replace(job, round=2, memory_version=0)
    first, second = (run_job(again, simulation.device(4, stored))[0] for stored in (memory, after))
    assert isinstance(first, Update) and isinstance(second, Update)
    assert all(torch.equal(first.state[n], second.state[n]) for n in first.state)
