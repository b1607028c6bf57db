"""Levels of plain modules as files: their own numbers only, at any batch size, whole and from exit to exit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bed import ENTRIES
from safetensors.torch import load_file
from support import raises
from torch import Tensor, nn

from fleetfit.anatomy import outputs
from fleetfit.anatomy.derive import DerivedArchitecture, derive_architecture
from fleetfit.data import Data
from fleetfit.errors import ModelError
from fleetfit.inference import Policy, confidence, stop_early
from fleetfit.inference.export import LevelModel, export
from fleetfit.inference.export.level import Graph, make_segment_graphs, make_whole_graph, trace_program
from fleetfit.inference.export.on_device import Model as Loader
from fleetfit.inference.export.onnx import run_segments, run_whole

SAMPLES, CLASSES = 20, 4


def make_level(
    architecture: DerivedArchitecture, exits: tuple[int, ...], x: Tensor, policy: Policy | None = None, **keys: Any
) -> LevelModel:
    """Return a level of half the width, and data of its samples."""
    torch.manual_seed(1)
    level = architecture.build(architecture.sizes(0.5), exits).eval()
    for tensor in level.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.05 * torch.rand_like(tensor))
    indices, classes = torch.arange(len(x)), architecture.plan.classes
    y = x if keys.get("task") == "next_token" else indices % classes
    splits = {"train": indices[:2], "validation": indices[2:4], "test": indices[4:]}
    data = Data("d", x, keys.pop("y", y), splits, classes, **keys)
    return LevelModel("1", architecture, architecture.sizes(0.5), exits, level, data, policy)


def count(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def compute_logits(model: LevelModel, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.stack(outputs(model.module, x))


def run_parts(graphs: list[Graph], x: Tensor) -> Tensor:
    carry, exits = [x], []
    for graph in graphs:
        logits, *carry = graph.module(*carry)
        exits.append(logits)
    return torch.stack(exits)


def check_graphs(model: LevelModel, x: Tensor) -> list[Graph]:
    """Check the graphs of a level on batches of several sizes; return those from exit to exit."""
    whole, segments = make_whole_graph(model, x[:2]), make_segment_graphs(model, x[:2])
    assert len(segments) == len(model.exits)
    program = trace_program(whole).module()
    for batch in (x[:1], x[:3], x):
        expected = compute_logits(model, batch)
        for logits in (torch.stack(program(batch)), run_parts(segments, batch)):
            assert torch.allclose(logits, expected, atol=1e-5)
    return segments


def check_files(folder: Path, model: LevelModel, x: Tensor) -> None:
    """Check logits and numbers of the program and the ONNX graphs of a level."""
    config = json.loads((folder / "config.json").read_text())
    files = [folder / name for name in config["onnx"]["float"]["segments"]]
    assert len(files) == len(model.exits)
    program = torch.export.load(folder / "model.pt2")
    for batch in (x[:1], x[:3], x):
        expected = compute_logits(model, batch)
        scale = max(1.0, float(expected.abs().max()))
        for logits in (
            torch.stack(program.module()(batch)).detach(),
            run_whole(folder / "model.onnx", batch),
            run_segments(files, batch),
        ):
            assert float((expected - logits).abs().max()) < 1e-4 * scale
    assert load_file(folder / "model.safetensors").keys() == model.module.state_dict().keys()
    state = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
    own = {name: tensor for name, tensor in program.state_dict.items() if tensor.numel()}  # caches are empty
    assert own.keys() <= {f"model.{name}" for name in state}
    assert count(model.module.parameters()) <= count(own.values()) <= count(state.values())
    assert count_initializers(folder / "model.onnx") <= 1.2 * count(state.values()) + 200


def count_initializers(path: Path) -> int:
    onnx = pytest.importorskip("onnx")
    return sum(int(np.prod(tensor.dims)) for tensor in onnx.load(path).graph.initializer)


# ---- an own network --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu_().add_(x)


class Skipping(nn.Module):
    """Its end needs what its stem gave, and the mean of each sample."""

    def __init__(self, last: int = 20000) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, 8, 3), nn.Sequential(*[Block(8) for _ in range(3)])
        self.mix, self.fc = nn.Linear(16, last), nn.Linear(last, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        center = x.mean((1, 2, 3), keepdim=True)
        first = self.stem(x)
        both = torch.cat([first, self.blocks(first) - center], 1).mean((2, 3))
        return self.fc(self.mix(both).relu())


class Recurrent(nn.Module):
    """Its first state has the number of samples, as a plain number: a kernel reads beyond a state of fewer ones."""

    def __init__(self, kind: str = "LSTM") -> None:
        super().__init__()
        self.cells, self.fc = getattr(nn, kind)(6, 16, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), self.cells.hidden_size)
        states = (state, state) if isinstance(self.cells, nn.LSTM) else state
        return self.fc(self.cells(x[:, 0], states)[0][:, -1])


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(SAMPLES, 1, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def skipping(images: Tensor) -> DerivedArchitecture:
    torch.manual_seed(0)
    return derive_architecture(Skipping(), images[:2], exits=["blocks.0", "blocks.1"])


def test_parts_hand_on_all_values(skipping: DerivedArchitecture, images: Tensor) -> None:
    """The block's output, the stem's, and the means; in front of the last two blocks each."""
    segments = check_graphs(make_level(skipping, skipping.positions, images), images)
    assert [len(graph.inputs) for graph in segments] == [1, *[3] * (len(segments) - 1)]
    assert all(set(dims) == {0} for graph in segments for dims in graph.dims)
    shapes = {tuple(tensor.shape[1:]) for tensor in segments[1].inputs}
    assert shapes == {(4, 4, 4), (1, 1, 1)}
    numbers = [count(graph.module.state_dict().values()) for graph in segments]
    assert numbers[-1] > max(numbers[:-1])  # that of the wide end


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_plain_number_of_samples_is_refused(kind: str, images: Tensor) -> None:
    architecture = derive_architecture(Recurrent(kind), images[:2])
    with raises(ModelError, "len(x)", "x.shape[0]"):
        make_whole_graph(make_level(architecture, architecture.positions, images), images[:2])


def test_a_shallow_level_holds_nothing_behind_its_exit(skipping: DerivedArchitecture, images: Tensor) -> None:
    level = make_level(skipping, (1,), images)
    program = trace_program(make_whole_graph(level, images[:2]))
    assert not any("mix" in name or "blocks.1" in name for name in program.state_dict)
    parameters = dict(level.module.named_parameters())
    assert {f"model.{name}" for name in parameters} <= set(program.state_dict)
    assert not any("mix" in name for name in parameters)


def test_every_file_of_a_level_computes_its_logits(
    skipping: DerivedArchitecture, images: Tensor, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime", reason="the extra export is not installed")
    level = make_level(skipping, (1, 2), images)
    median = float(confidence(compute_logits(level, images)[0]).median())
    level = replace(level, policy=Policy((median, 0.0)))
    result = export(level, tmp_path / "out")
    check_files(result.folder, level, images)
    assert {variant.name for variant in result.variants} == {"pytorch", "float"} and not result.notes
    classes, exits = Loader(result.folder).predict(images.numpy())
    assert level.policy is not None
    stopped = stop_early(level.module, images, level.policy)
    assert exits.tolist() == (stopped.exits + 1).tolist() and len(set(exits.tolist())) == 2
    assert classes.tolist() == stopped.logits.argmax(-1).tolist()
    wide = 4 * count(skipping.build(skipping.sizes(0.5), (3,)).net.mix.parameters())
    for name in ("model.safetensors", "model.pt2", "model.onnx"):
        assert (result.folder / name).stat().st_size < wide / 2


def test_regression_answers_have_the_targets_unit(images: Tensor) -> None:
    """Each part gives its exit's answers itself, so that no later part holds the scale alone."""
    torch.manual_seed(0)
    architecture = derive_architecture(Skipping(8), images[:2])
    y = 50 + 9 * torch.randn(SAMPLES, CLASSES)
    level = make_level(architecture, (1, 2), images, task="regression", y=y)
    data: Any = level.data
    mean, std = data.target_scale
    segments = make_segment_graphs(level, images[:2])
    assert torch.allclose(run_parts(segments, images), compute_logits(level, images) * std + mean, rtol=1e-4)


def test_an_offset_is_in_the_logits_of_each_part(skipping: DerivedArchitecture, images: Tensor) -> None:
    level, offset = make_level(skipping, (1, 2), images), torch.linspace(-1.0, 2.0, CLASSES)
    segments = make_segment_graphs(replace(level, offset=offset), images[:2])
    assert torch.allclose(run_parts(segments, images), compute_logits(level, images) + offset, atol=1e-5)


# ---- forward passes that fix sizes -----------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Layers with positions, a mask of padding, and a row for each token of a batch.

    `is_moved`: its end needs tokens that have the batch second. `length`: that of all samples, if it is fixed.
    """

    def __init__(self, is_moved: bool = False, length: int = 0) -> None:
        super().__init__()
        self.is_moved, self.length = is_moved, length
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(self.length or x.shape[1])
        mask = (x != 0).unsqueeze(-1).float()
        h = self.words(x) + self.places(places)
        moved = h.transpose(0, 1)
        for layer in self.layers:
            h = layer(h.tanh())
        h = (h + (moved.transpose(0, 1) if self.is_moved else self.places(places))) * mask
        rows = h.reshape(x.shape[0] * x.shape[1], -1).tanh()
        return self.fc(rows.reshape(x.shape[0], x.shape[1], -1).mean(1))


@pytest.fixture(scope="module")
def words() -> Tensor:
    return torch.randint(1, 20, (SAMPLES, 10), generator=torch.Generator().manual_seed(0))


def test_parts_of_tokens_take_any_length(words: Tensor) -> None:
    """A mask crosses the cut; positions do not depend on samples, and are computed anew."""
    torch.manual_seed(0)
    level = make_level(derive_architecture(Tokens(), words[:2]), (1, 2, 3), words, vocabulary=20, padding=0)
    segments = check_graphs(level, words)
    assert [len(graph.inputs) for graph in segments] == [1, 2, 2]
    assert all(graph.has_free_tokens for graph in segments)
    for length in (1, 4, 9):
        short = words[:5, :length]
        assert torch.allclose(run_parts(segments, short), compute_logits(level, short), atol=1e-5)


def test_a_fixed_length_is_found(words: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    architecture = derive_architecture(Tokens(length=10), words[:2])
    level = make_level(architecture, (1, 2), words, vocabulary=20, padding=0)
    with raises(ModelError):
        make_whole_graph(level, words[:2])
    result = export(level, tmp_path / "out", ())
    assert "10" in str(result.notes)
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    assert torch.allclose(torch.stack(program(words[:3])), compute_logits(level, words[:3]), atol=1e-5)


def test_segments_need_a_row_per_sample(words: Tensor) -> None:
    torch.manual_seed(0)
    architecture = derive_architecture(Tokens(is_moved=True), words[:2])
    level = make_level(architecture, architecture.positions, words, vocabulary=20, padding=0)
    with raises(ModelError):
        make_segment_graphs(level, words[:2], free_tokens=False)


# ---- modules in other people's style, each form ----------------------------------------------------------------------

STYLES = ["resnet_basic", "vit_fused_qkv", "lstm", "gru", "hf_bert", "hf_llama_lm"]


def derive_entry(name: str) -> tuple[DerivedArchitecture, Tensor, dict[str, Any]]:
    """Return a module of the bed, samples, and the keys of its data."""
    if name.startswith("hf_"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    entry = ENTRIES[name]
    torch.manual_seed(0)
    architecture, example = derive_architecture(entry.make(), entry.example()), entry.example()
    shape = (SAMPLES, *example.shape[1:])
    x = torch.randint(1, entry.tokens, shape) if entry.tokens else torch.randn(shape)
    keys = {"vocabulary": entry.tokens, "padding": 0} if entry.tokens else {}
    return architecture, x, keys | ({"task": "next_token"} if entry.next_tokens else {})


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_every_form_of_other_peoples_modules(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra export is not installed")
    architecture, x, keys = derive_entry(name)
    level = make_level(architecture, architecture.positions[-3:], x, **keys)
    result = export(level, tmp_path / "out")
    check_files(result.folder, level, x)
    # torch unrolls an LSTM over its steps
    assert ("exactly" in str(result.notes)) == (name in ("lstm", "gru") and "vocabulary" in keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_executorch_runs_other_peoples_modules(name: str, tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    architecture, x, keys = derive_entry(name)
    level = make_level(architecture, architecture.positions[-2:], x, **keys)
    result = export(level, tmp_path / "out", ("executorch",))
    assert [variant.name for variant in result.variants] == ["pytorch", "executorch"]
    assert result.variants[1].difference < 1e-4
    assert (result.folder / "model.pte").exists()
