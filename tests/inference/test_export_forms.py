"""Every model in every form, at other batch sizes and lengths than those traced: the values are the plain module's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import FOREIGN
from sampling import some_quick
from small_models import CLASSES, PADDING, SMALL, VOCABULARY, architecture_of, task_of
from support import raises
from torch import Tensor, nn

from fleetfit.anatomy import Architecture, Axis, ExitModel, batch_norms, build_module
from fleetfit.data import Data
from fleetfit.errors import ModelError
from fleetfit.inference.export import LevelModel, executorch, export, folder
from fleetfit.inference.export.level import Preprocessing, make_segment_graphs, make_whole_graph, trace_program
from fleetfit.inference.export.onnx import run_segments, run_whole
from fleetfit.method import outputs
from fleetfit.seeds import isolate_rng

pytest.importorskip("onnxruntime", reason="the extra export is not installed")

LENGTH, LONGER = 12, 15  # tokens of the samples that are traced, and of others


# ---- models of one's own -------------------------------------------------------------------------------------------


class Stack(ExitModel):
    """Blocks with a classifier after the first and after the last."""

    def __init__(self, stem: nn.Module, block: Callable[[], nn.Module], head: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.exits, self.stem = (1, 3), stem
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.heads = nn.ModuleDict({str(e): head() for e in self.exits})

    def start(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem(x)
        return y


class Permuted(nn.Module):
    """A layer norm over the channels [B, C, ...], as ConvNeXt has it: what it returns is not contiguous."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.movedim(1, -1)).movedim(-1, 1)
        return y


class Added(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


class Recurrent(nn.Module):
    """An LSTM over a series [B, F, T]."""

    def __init__(self, before: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(before, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x.transpose(1, 2))[0].transpose(1, 2)
        return y


class Last(nn.Module):
    """A linear layer on the mean over all places, or steps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x.flatten(2).mean(-1))
        return y


class Attention(nn.Module):
    """Self-attention over tokens [B, D, T], with one more token in front where it is the stem."""

    def __init__(self, dim: int, stem: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim) if stem else None
        self.first = nn.Parameter(torch.randn(dim))
        self.norm, self.qkv, self.out = Permuted(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = torch.cat([self.first.expand(len(x), 1, -1), self.embed(x)], dim=1).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x).transpose(1, 2)).unsqueeze(1).chunk(3, dim=-1)
        y: Tensor = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v)).squeeze(1).transpose(1, 2)
        return y


class Series(nn.Module):
    """A 1-d convolution over a series, with its norm over channels."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(before, channels, 3, padding=1), Permuted(channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x)).relu()
        return y


OWN: dict[str, tuple[tuple[int, ...], Callable[[], Stack]]] = {
    "channels last": ((3, 8, 8), lambda: Stack(
        nn.Sequential(nn.Conv2d(3, 6, 2, 2), Permuted(6)),
        lambda: Added(nn.Sequential(Permuted(6), nn.Conv2d(6, 6, 3, padding=1))), lambda: Last(6))),
    "lstm": ((5, 9), lambda: Stack(Recurrent(5, 6), lambda: Added(Recurrent(6, 6)), lambda: Last(6))),
    "series": ((5, 30), lambda: Stack(Series(5, 6), lambda: Added(Series(6, 6)), lambda: Last(6))),
    "tokens": ((LENGTH,), lambda: Stack(Attention(6, True), lambda: Attention(6, False), lambda: Last(6))),
    "table": ((7,), lambda: Stack(
        nn.Linear(7, 9), lambda: Added(nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 9), nn.GELU())),
        lambda: nn.Linear(9, CLASSES))),
}  # fmt: skip


class Own(Architecture):
    blocks = 3

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.axes, self.made = {"classes": Axis(CLASSES, scaled=False)}, make

    def build(self, axes: Any, exits: Any) -> nn.Module:
        return self.made()


def make_level_model(name: str) -> LevelModel:
    """A model with its parameters far from where they begin, so that logits of other samples are other ones."""
    if name in OWN:
        shape, make = OWN[name]
        family: Architecture = Own(make)
        sizes, exits, data = {"classes": CLASSES}, (1, 3), _data(shape, tokens=name == "tokens")
    elif name in FOREIGN:
        foreign = FOREIGN[name]
        family = foreign.build_architecture()
        sizes, exits = family.sizes(1.0), tuple(family.positions)
        vocabulary = foreign.arguments.get("vocabulary", 0)
        data = _data(foreign.input_shape, vocabulary, tokens=vocabulary > 0, task=foreign.task)
    else:
        small = SMALL[name]
        family = architecture_of(name, **({"max_positions": 20} if name == "bert" else {}))
        sizes = family.sizes(1.0)
        positions = tuple(family.positions)
        exits = tuple(sorted({positions[0], family.blocks}))
        shape = small.shape if small.kind == "images" else (LENGTH,)
        data = _data(shape, tokens=small.kind != "images", task=task_of(name))
    with isolate_rng(torch.device("cpu")):
        torch.manual_seed(0)
        module = build_module(family, sizes, exits).eval()
        for norm in batch_norms(module).values():
            norm.track_running_stats = True
            norm.running_mean, norm.running_var = torch.randn(norm.num_features), 0.5 + torch.rand(norm.num_features)
        noise = 0.02 if batch_norms(module) else 0.1  # much more, and a deep one is no function that float32 computes
        for parameter in module.parameters():
            parameter.data += noise * torch.randn_like(parameter)
    return LevelModel("1", family, sizes, exits, module, data)


def _data(shape: tuple[int, ...], vocabulary: int = VOCABULARY, tokens: bool = False, task: str = "") -> Data:
    n, rng = 60, torch.Generator().manual_seed(0)
    splits = {"train": torch.arange(20), "validation": torch.arange(20, 36), "test": torch.arange(36, n)}
    y, task = torch.arange(n) % CLASSES, task or "classification"
    if not tokens:
        return Data("drawn", torch.randn(n, *shape, generator=rng), y, splits, CLASSES)
    x = torch.randint(1, vocabulary, (n, *shape), generator=rng)
    x[torch.arange(shape[0]) >= 3 + (torch.arange(n) % (shape[0] - 2))[:, None]] = PADDING
    following = torch.roll(x, -1, 1) if task == "next_token" else y
    classes = vocabulary if task == "next_token" else CLASSES
    return Data("drawn", x, following, splits, classes, task=task, vocabulary=vocabulary, padding=PADDING)


# ---- every one in every form ---------------------------------------------------------------------------------------


def plain(level_model: LevelModel, x: Tensor) -> Tensor:
    """What the module itself answers [E, N, ...], without anything of the export but scaling."""
    with torch.no_grad():
        return torch.stack(outputs(level_model.module, Preprocessing(level_model.data)(x)))


def same(theirs: Tensor, ours: Tensor) -> None:
    spread = float(ours.std())
    assert spread > 1e-3, "the logits tell nothing apart"
    assert theirs.shape == ours.shape and float((theirs - ours).abs().max()) < 1e-3 * max(spread, 1e-2)


def near(theirs: Tensor, ours: Tensor) -> None:
    """Eight bits move logits, and have them follow."""
    assert theirs.shape == ours.shape
    assert float((theirs - ours).square().mean().sqrt()) < 0.5 * float(ours.std()), "int8"


def batches(level_model: LevelModel, free_tokens: bool, longest: int) -> list[Tensor]:
    x = level_model.samples("test", 24)[0]
    inputs = [x[:1], x[:3], x[5:16], x]
    if free_tokens:
        more = torch.cat([x, x.flip(1)], dim=1).clamp(min=1)  # whole samples, without padding
        inputs += [more[:n, :length].contiguous() for n, length in ((1, 4), (4, 9), (5, 2), (7, longest))]
    return inputs


def judge(name: str, forms: tuple[str, ...], out: Path) -> tuple[str, ...]:
    """Export a model, run each form on batches of several sizes and lengths, and return the notes."""
    level_model = make_level_model(name)
    notes = export(level_model, out, forms).notes
    config = json.loads((out / "config.json").read_text())
    free = level_model.takes_tokens and not any("The graphs take samples of exactly" in note for note in notes)
    program = torch.export.load(out / "model.pt2").module()
    for x in batches(level_model, free, LONGER):
        ours = plain(level_model, x)
        with torch.no_grad():
            same(torch.stack(list(program(x))), ours)
        for variant, files in config["onnx"].items():
            judged = same if variant == "float" else near
            judged(run_whole(out / files["all_exits"], x), ours)
            if files["segments"]:
                judged(run_segments([out / file for file in files["segments"]], x), ours)
    if "executorch" in forms:
        _judge_lowered(level_model, free, notes, out)
    return notes


def _judge_lowered(level_model: LevelModel, free: bool, notes: tuple[str, ...], out: Path) -> None:
    """Run each method of the .pte by itself: its batches are the ones that are given, not those of the export."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(out / executorch.FILE)
    names = sorted(program.method_names)
    methods = [program.load_method(name) for name in names]
    one = any("one sample at a time" in note for note in notes)
    free = free and not any("ExecuTorch program takes samples of exactly" in note for note in notes)
    for x in batches(level_model, free, LENGTH):
        for part in x.split(1 if one else executorch.MOST):
            carry, row = [part.contiguous()], []
            for method in methods:
                logits, *carry = [each.clone() for each in method.execute(carry)]
                row.append(logits)
            same(torch.stack([*row, *carry]), plain(level_model, part))


ALL = ("onnx", "int8", "static-int8", "executorch")
BUILT_IN = [name for name, small in SMALL.items() if not small.family]
OTHERS = ["Convnext", "Text", "Wave", "Gru", "Decoder"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BUILT_IN, *OWN, *OTHERS])
def test_every_form_answers_as_the_plain_module(name: str, tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    judge(name, ALL, tmp_path / "out")


# ---- some of it quickly --------------------------------------------------------------------------------------------


def examples(level_model: LevelModel) -> Tensor:
    return level_model.samples("test", 2)[0]


@pytest.mark.parametrize("name", some_quick(["channels last", "series", "lstm", "tokens"], ["channels last", "tokens"]))
def test_a_carry_is_traced_row_by_row(name: str) -> None:
    """A runtime hands over numbers row by row; a program reads them by the strides that it was traced with."""
    level_model = make_level_model(name)
    first, last = make_segment_graphs(level_model, examples(level_model), free_tokens=name == "tokens")
    logits, *carry = trace_program(first, executorch.MOST).module()(*first.inputs)
    assert len(carry) == len(last.inputs) == 1
    for tensor in (*first.inputs, *last.inputs, *carry):
        assert tensor.stride() == torch.empty(tensor.shape).stride()
    ours = plain(level_model, examples(level_model))
    same(logits.detach(), ours[0])
    same(trace_program(last, executorch.MOST).module()(*carry)[0].detach(), ours[1])


@pytest.mark.parametrize("length", [9, 40])
def test_a_bound_for_samples_is_none_for_tokens(length: int) -> None:
    torch.manual_seed(0)
    module = Stack(Attention(6, True), lambda: Attention(6, False), lambda: Last(6)).eval()
    level_model = LevelModel(
        "1", Own(lambda: module), {"classes": CLASSES}, (1, 3), module, _data((length,), tokens=True)
    )
    program = trace_program(make_whole_graph(level_model, examples(level_model)), executorch.MOST).module()
    for batch, tokens in ((1, length), (executorch.MOST, length), (3, 2), (2, length - 1)):
        x = torch.randint(1, VOCABULARY, (batch, tokens))
        same(torch.stack(list(program(x))).detach(), plain(level_model, x))
    for batch, tokens in ((executorch.MOST + 1, length), (2, length + 1)):
        with pytest.raises(AssertionError, match="<="):
            program(torch.ones(batch, tokens, dtype=torch.int64))


BATCHED, SINGLE, FIXED = "", "one sample at a time", f"exactly {LENGTH} tokens"


@pytest.mark.parametrize(
    ("loses", "quoted"),
    [({8}, [SINGLE]), ({8, 1, "batch"}, [SINGLE, FIXED])],
)
def test_lost_sizes_are_fixed_with_a_note(
    loses: set[Any], quoted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first program is kept that gives the right numbers: with fewer free sizes, where it takes that."""
    level_model, tried = make_level_model("tokens"), []

    def write(graphs: Any, folder: Path, most: int) -> Path:
        tried.append((most, len(graphs[0].dims[0]) > 1))
        (folder / executorch.FILE).write_bytes(b"lowered")
        return folder / executorch.FILE

    def run(path: Path, graphs: Any, x: Tensor, most: int) -> Tensor:
        wrong = most in loses if len(graphs[0].dims[0]) > 1 else "batch" in loses and most > 1
        return plain(level_model, x) + (0.01 if wrong else 0.0)

    monkeypatch.setattr(folder, "check_forms", lambda forms, model: None)
    monkeypatch.setattr(executorch, "write_executorch", write)
    monkeypatch.setattr(executorch, "run_executorch", run)
    notes = [note for note in export(level_model, tmp_path / "out", ["executorch"]).notes if "ExecuTorch" in note]
    assert len(notes) == len([each for each in quoted if each]) == len({each for each in quoted if each})
    assert all(each in " ".join(notes) for each in quoted)
    assert tried == [(8, True), (1, True), (8, False), (1, False)][: len(tried)]


def test_wrong_programs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level_model = make_level_model("table")
    monkeypatch.setattr(folder, "check_forms", lambda forms, model: None)
    monkeypatch.setattr(executorch, "write_executorch", lambda graphs, folder, most: folder)
    monkeypatch.setattr(executorch, "run_executorch", lambda path, graphs, x, most: plain(level_model, x) + 0.01)
    with raises(ModelError, 0.01):
        export(level_model, tmp_path / "out", ["executorch"])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_compared_batches_have_several_sizes(tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    level_model = make_level_model("table")
    graphs = make_segment_graphs(level_model, examples(level_model))
    path = executorch.write_executorch(graphs, tmp_path)
    for n in (1, 2, 4, 11, 24):
        x = level_model.samples("test", n)[0]
        same(executorch.run_executorch(path, graphs, x), plain(level_model, x))
    with raises(ModelError, "ExecuTorch"):
        executorch.run_executorch(path, graphs, torch.randn(20, 7), most=9)
