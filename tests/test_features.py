"""What a frozen backbone makes of a sample is computed once, with the results of computing it each time."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import some_quick
from support.bits import assert_same_bits
from tiny import tiny_federation
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.anatomy import Architecture, Axis, ExitModel
from fleetfit.core import Device, Problem
from fleetfit.core.tasks import classification
from fleetfit.data import Data
from fleetfit.models.vit import PatchEmbeddings, VitModule
from fleetfit.runs.folder import RunFolder
from fleetfit.training import initial_base
from fleetfit.training.features import _find_prefix, make_lazy_samples
from fleetfit.training.local_model import LocalModel

RUN: dict[str, Any] = {
    "rounds": 3,
    "data": {"partition": {"clients": 8, "kind": "iid"}, "validation": 0.1},
    "model": {"name": "vit", "hidden": 24, "depth": 4, "attention_heads": 3, "patch": 4},
    "peft": {"name": "frozen"},
    "fleet": {"levels": [{"budget": 0.5, "depth": 2}, {"budget": 1.0}], "groups": [{"budget": 0.5}, {"budget": 1.0}]},
    "method": {"name": "depthfl"},
    "local": {"epochs": 2, "lr": 0.05},
    "cohort": {"count": 4},
    "evaluate": {"every": 0, "whole_test_set": False},
}
CLOSE = 1e-4
"""Largest difference of a weight after three rounds, as a share of the largest: the rounding of another batch shape."""


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = result.get(key)
            result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often the backbone has begun on an image, by its pixels."""
    seen: Counter[bytes] = Counter()
    plain = PatchEmbeddings.forward

    def counted(self: PatchEmbeddings, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            seen.update(bytes(image.numpy().tobytes()) for image in x.detach())
        return plain(self, x)

    monkeypatch.setattr(PatchEmbeddings, "forward", counted)
    return seen


def finished(folder: Path, *changes: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state and the columns of a run."""
    run = ff.run(merged(RUN, *changes), out=folder)
    payload = RunFolder.open(run.folder).load_checkpoint()
    assert payload is not None
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert not any(line["failures"] for line in lines)
    return dict(payload["server"]["state"]), lines[-1]["evaluate"]


def cache_features(bytes_: float) -> dict[str, Any]:
    return {"engine": {"feature_cache_bytes": bytes_}}


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    largest = max(float(t.abs().max()) for t in a.values())
    return a.keys() == b.keys() and all(float((a[n] - b[n]).abs().max()) <= CLOSE * largest for n in a)


SOUND = [
    {},
    {"local": {"patience": 1}},
    {"method": {"name": "scalefl"}},
    {"method": {"name": "reefl", "ree": False}},
    {"peft": {"name": "serial_adapter", "rank": 2, "targets": ["blocks.3.*"]}},
    {"method": {"options": {"fedprox": {"mu": 0.1}}}, "local": {"optimizer": "adamw"}},
]


@pytest.mark.parametrize("change", some_quick(SOUND, [*SOUND[:2], SOUND[4]]))
def test_cached_features_keep_results(change: dict[str, Any], tmp_path: Path) -> None:
    """Two rounds of four clients of two depths, evaluated."""
    plain, columns = finished(tmp_path / "plain", change, {"rounds": 2})
    state, others = finished(tmp_path / "kept", change, {"rounds": 2}, cache_features(1e9))
    assert close(plain, state)
    assert columns["static"]["global"] == pytest.approx(others["static"]["global"], abs=0.01)


@pytest.mark.parametrize("peft", [{"name": "frozen"}, SOUND[4]["peft"]], ids=lambda peft: peft["name"])
def test_backbone_runs_once_per_sample(peft: dict[str, Any], embedded: Counter[bytes], tmp_path: Path) -> None:
    """In three rounds of two epochs, and an evaluation of all clients, with one depth for all.

    Beside that, some 64 samples are tried to see what is constant, and the last batch of a client's samples is filled
    up with its first.
    """
    one = {"fleet": {"groups": [{"budget": 1.0}]}, "peft": peft, "evaluate": {"whole_test_set": False}}
    ff.run(merged(RUN, one, cache_features(1e9)), out=tmp_path / "kept")
    tried = 64 + 32
    assert sum(count > 1 for count in embedded.values()) <= tried + 32 * 8
    assert sum(count == 1 for count in embedded.values()) > 1000


def test_file_beyond_memory_has_equal_bits(tmp_path: Path) -> None:
    """None fits, then a hundred rows of 24 numbers."""
    all_in_memory, columns = finished(tmp_path / "memory", {"rounds": 2}, cache_features(1e9))
    for bytes_ in (1.0, 100 * 24 * 4):
        state, others = finished(tmp_path / f"{bytes_:.0f}", {"rounds": 2}, cache_features(bytes_))
        assert_same_bits(all_in_memory, state)
        assert columns == others


def test_workers_and_resumed_run_have_equal_bits(tmp_path: Path) -> None:
    here, columns = finished(tmp_path / "here", cache_features(1e9))
    there, others = finished(tmp_path / "there", cache_features(1e9), {"engine": {"name": "processes", "workers": 2}})
    assert_same_bits(here, there)
    assert columns == others

    def stop(report: Mapping[str, Any]) -> None:
        if report["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ff.run(merged(RUN, cache_features(1e9)), out=tmp_path / "cut", on_round=stop)
    resumed = RunFolder.open(ff.resume(tmp_path / "cut").folder).load_checkpoint()
    assert resumed is not None
    assert_same_bits(here, dict(resumed["server"]["state"]))


def test_fast_run_caches_features(embedded: Counter[bytes], tmp_path: Path) -> None:
    """Unless it is told otherwise; in half precision with the same bits in workers."""
    fast = {"engine": {"speed": "fast", "precision": "bf16"}}
    finished(tmp_path / "without", fast, cache_features(0))
    usual = sum(embedded.values())
    embedded.clear()
    here, columns = finished(tmp_path / "here", fast)
    assert sum(embedded.values()) < 0.5 * usual
    there, others = finished(tmp_path / "there", fast, {"engine": {"name": "processes", "workers": 2}})
    assert_same_bits(here, there)
    assert columns == others


NOTHING = [
    {"data": {"augment": "shift"}, "evaluate": {"clients": 1}},
    {"peft": {"name": "lora", "rank": 2}},
    {"peft": {"name": "serial_adapter", "rank": 2}},
    {"method": {"name": "reefl"}},
    {"model": {"dropout": 0.1}},
]


@pytest.mark.parametrize("change", NOTHING)
def test_changing_features_are_not_cached(change: dict[str, Any], embedded: Counter[bytes], tmp_path: Path) -> None:
    """Augmentation, LoRA, adapters from the bottom, ReeFL's modulation, dropout: the same bits as without the key."""
    plain, _ = finished(tmp_path / "plain", change, {"rounds": 1})
    usual = sum(embedded.values())
    embedded.clear()
    state, _ = finished(tmp_path / "kept", change, {"rounds": 1}, cache_features(1e9))
    assert_same_bits(plain, state)
    assert sum(embedded.values()) > 0.8 * usual


def test_default_caches_nothing(embedded: Counter[bytes], tmp_path: Path) -> None:
    """The bits of a run without the key are those of one that keeps nothing."""
    plain, _ = finished(tmp_path / "plain")
    usual = sum(embedded.values())
    embedded.clear()
    state, _ = finished(tmp_path / "none", cache_features(0))
    assert_same_bits(plain, state)
    assert sum(embedded.values()) == usual


def test_full_disk_computes_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = finished(tmp_path / "plain")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "is not there"))
    state, _ = finished(tmp_path / "full", cache_features(100 * 24 * 4))
    assert close(plain, state)


def test_fleet_nodes_have_equal_bits(embedded: Counter[bytes], tmp_path: Path) -> None:
    """Each node keeps what it computes of its own data, and so computes less of it."""
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from local_fleet import Lab, described

    from fleetfit.fleet import node as nodes_side

    model = {"name": "vit", "hidden": 12, "depth": 3, "attention_heads": 3, "patch": 2}
    table = {
        **described({"name": "depthfl"}, model=model, peft={"name": "frozen"}, local={"epochs": 9}),
        **cache_features(1e9),
    }
    base = ff.run(table, out=tmp_path / "local")
    counts = []
    for name, engine in {"plain": {}, "kept": cache_features(1e9)["engine"]}.items():
        nodes_side.get_node.cache_clear()
        (tmp_path / name).mkdir()
        embedded.clear()
        run = Lab(tmp_path / name, table, [float(b) for b in base.assembly.fleet.budgets]).serve(**engine)
        counts.append(sum(embedded.values()))
        assert not any(line["failures"] for line in run.metrics)
    assert_same_bits(dict(base.server.state), dict(run.server.state))
    assert counts[1] < 0.7 * counts[0]


def of_the_batch(net: VitModule, tokens: Tensor) -> Tensor:
    return tokens - tokens.mean(0)


def of_what_is_trained(net: VitModule, tokens: Tensor) -> Tensor:
    """No gradient tells it, and no module that runs."""
    return tokens + sum(p.detach().sum() for p in net.heads.parameters())


def of_chance(net: VitModule, tokens: Tensor) -> Tensor:
    return tokens + 0.01 * torch.randn(()) if net.training else tokens


@pytest.mark.parametrize("change", [of_the_batch, of_what_is_trained, of_chance])
def test_hidden_dependencies_are_found_by_trying(
    change: Callable[[VitModule, Tensor], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backbone whose tokens depend on the batch, on trained values or on chance: the bits of computing it anew."""
    plain_start = VitModule.start
    monkeypatch.setattr(VitModule, "start", lambda net, x: change(net, plain_start(net, x)))
    plain, _ = finished(tmp_path / "plain")
    state, _ = finished(tmp_path / "kept", cache_features(1e9))
    assert_same_bits(plain, state)


def test_lazy_samples_load_on_use() -> None:
    """By a function's arguments, by their places and their names, and by methods."""
    _, simulation = tiny_federation({"name": "fedavg"})
    device, sample = simulation.device(1), torch.arange(12.0).view(3, 1, 2, 2)
    x = make_lazy_samples(device, lambda: sample, 3)
    assert torch.equal(torch.sum(x, dim=0, keepdim=True), sample.sum(0, keepdim=True))
    assert torch.equal(torch.add(input=torch.ones(()), other=x), sample + 1)
    assert torch.equal(x.flatten(1) * 2, sample.flatten(1) * 2)


class WordNet(ExitModel):
    """The mean of a text's words, two frozen layers, and a classifier after each."""

    def __init__(self, wide: int, exits: tuple[int, ...]) -> None:
        super().__init__()
        self.exits, self.stem = exits, nn.Embedding(7, wide)
        self.blocks = nn.ModuleList(nn.Linear(wide, wide) for _ in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(wide, 2) for e in exits})

    def start(self, x: Tensor) -> Tensor:
        return self.stem(x).mean(1)


class Words(Architecture):
    axes: Mapping[str, Axis] = {"wide": Axis(4)}
    blocks, tokens = 2, 7

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return WordNet(axes["wide"], exits)

    def trains(self, name: str) -> bool:
        return name.startswith("heads")


def test_features_of_tokens_are_cached() -> None:
    problem = Problem(Words(), (5,), classification, (1, 2))
    problem = replace(problem, base=initial_base(problem, 0))
    data = Data("words", torch.arange(160).view(32, 5) % 7, torch.arange(32) % 2, {"train": torch.arange(32)}, 2)
    device, full = Device(problem, data), problem.submodel(1.0, (1, 2))
    prefix = _find_prefix(device, LocalModel(problem, full, torch.device("cpu")))
    assert prefix is not None and len(prefix.exits) == 2 and prefix.carry is None  # nothing is left to compute
