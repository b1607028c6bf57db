"""The proof before anything is trained: what a run does with it, what it says, and what it leaves alone."""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from foreign import Multihead, Tokens, fused, multihead
from support import Printed, raises, run_verb
from torch import nn
from zoo import CLASSES, Made, normed

import fleetfit as ff
from fleetfit.anatomy.proof import check_layout
from fleetfit.architecture import Architecture
from fleetfit.config import load_experiment
from fleetfit.errors import ModelError
from fleetfit.layout import Axis
from fleetfit.models.cnn import cnn

MODEL = """
from torch import nn
from fleetfit.architecture import Architecture, Axis

class Net(nn.Module):
    def __init__(self, wide, classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, wide, 3, padding=1), nn.GroupNorm(4, wide)
        self.fc = nn.Linear(wide, classes)
    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))

class Family(Architecture):
    blocks = 1
    def __init__(self, classes):
        self.axes = {"wide": Axis(16, 4), "classes": Axis(classes, scaled=False)}
    def build(self, axes, exits):
        return Net(axes["wide"], axes["classes"])

class Meant(Family):
    size_dependent = "a narrow model norms other groups, on purpose"
"""
RUN = ["data.name=digits", "data.partition.clients=4", "rounds=1", "method.name=heterofl", "cohort.count=2",
       "fleet.groups=[{budget=0.3},{budget=1.0}]", "fleet.tolerance=0.5"]  # fmt: skip


def run(model: str, out: Path, *more: str, code: int = 0) -> Printed:
    changes = [f"--set={value}" for value in (f"model.name={model}", *RUN, *more)]
    return run_verb("run", "--out", out, *changes, code=code)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(MODEL)
    return path


def test_wrong_layouts_write_no_file(file: Path, tmp_path: Path) -> None:
    err = run(f"{file}:Family", tmp_path / "out", code=2).err
    assert all(quoted in err for quoted in ('at "norm"', '"conv"', "GroupNorm", "4 groups", 'axis "wide"'))
    assert not (tmp_path / "out").exists()


def test_a_run_with_a_reason_is_not_proved(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = run(f"{file}:Meant", out).out
    warning = 'The layout is NOT PROVED for "wide" (size_dependent: a narrow model norms other groups, on purpose)'
    assert warning in " ".join(printed.split())
    assert printed.index("NOT PROVED") < printed.index("Run folder"), "seen before the first round"
    assert any(note.startswith(warning) for note in json.loads((out / "summary.json").read_text())["notes"])


def test_check_model_prints_not_proved(file: Path) -> None:
    printed = " ".join(run_verb("check-model", f"{file}:Meant", "--input-shape", "1,8,8", code=0).out.split())
    assert 'NOT PROVED for "wide"' in printed


def test_a_resumed_run_keeps_the_warning(file: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(f"{file}:Meant", whole, "rounds=2")

    class Stopped(Exception):
        pass

    def stop(report: object) -> None:
        raise Stopped

    values = [f"model.name={file}:Meant", *RUN, "rounds=2"]
    with pytest.raises(Stopped):
        ff.run(load_experiment(None, values), out=cut, on_round=stop)
    ff.resume(cut)
    notes = [json.loads((folder / "summary.json").read_text())["notes"] for folder in (whole, cut)]
    assert notes[0] == notes[1] and "NOT PROVED" in " ".join(notes[0])


def test_workers_do_not_repeat_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that proved the layout would draw the same channels again, and say so in a file."""
    log = tmp_path / "log"
    path = tmp_path / "own.py"
    counted = "note(axes['wide'])\n        return Net("
    source = MODEL.replace("nn.GroupNorm(4, wide)", "nn.GroupNorm(wide // 4, wide)").replace("return Net(", counted)
    record = f"def note(n):\n    with open({str(log)!r}, 'a') as file:\n        file.write(f'{{n}}\\n')\n"
    path.write_text(record + source)
    model = f"model.name={path}:Family"
    counts = {}
    for engine in ("local", "processes"):
        log.unlink(missing_ok=True)
        further = ["engine.workers=1"] if engine == "processes" else []
        ff.run(load_experiment(None, [model, *RUN, f"engine.name={engine}", *further]), out=tmp_path / engine)
        counts[engine] = log.read_text().split().count("12")
    assert counts["local"] == counts["processes"] > 0, "only the proof builds a model of three granules"


def test_workers_start_during_the_proof(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_workers: None
) -> None:
    before, there = set(psutil.Process().children()), []

    def proving(*values: Any, **more: Any) -> Any:
        there.append(set(psutil.Process().children()) - before)
        return check_layout(*values, **more)

    monkeypatch.setattr(importlib.import_module("fleetfit.api.run"), "check_layout", proving)
    workers = ["engine.name=processes", "engine.workers=2"]
    with raises(ModelError, 0.13, '"wide"'):
        ff.run(load_experiment(None, [f"model.name={file}:Family", *RUN, *workers]), out=tmp_path / "out")
    assert [len(process) for process in there] == [2]
    assert set(psutil.Process().children()) == before and not (tmp_path / "out").exists()


def test_tensors_without_effect_cannot_be_proved() -> None:
    """Biases of keys, and biases before a norm of each channel: said, and not called right."""
    architecture = fused()
    report = check_layout(architecture, input_shape=architecture.input_shape)
    assert report.inert == ("attention.qkv.bias[32:64]",)
    assert "attention.qkv.bias[32:64]" in str(report)
    before_norm = check_layout(cnn(), input_shape=(1, 8, 8)).inert
    assert not before_norm, "its convolutions have no biases"


def test_fp32_inside_a_model_has_a_wider_tolerance() -> None:
    class Rough(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size, size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.float() @ self.weight.float()).double()

    architecture = normed(Rough)
    report = check_layout(architecture, input_shape=architecture.input_shape)
    assert 1e-12 < max(report.permutation.values()) < 1e-5
    assert max(report.cuts.values()) < 1e-5


def test_the_fast_path_of_attention_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for enabled in (True, False):
        torch.backends.mha.set_fastpath_enabled(enabled)
        architecture = multihead()
        check_layout(architecture, input_shape=architecture.input_shape, seed=int(enabled))
        assert torch.backends.mha.get_fastpath_enabled() is enabled
    torch.backends.mha.set_fastpath_enabled(True)


def test_the_proof_leaves_the_global_generator_alone() -> None:
    architecture = normed()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check_layout(architecture, input_shape=architecture.input_shape)
    assert torch.equal(torch.rand(2), expected)


@dataclass(frozen=True, eq=False)
class Stuck(Made):
    """Granules of a head; builds for multiples of 16 only."""

    def sizes(self, width: float) -> dict[str, int]:
        return {"dim": max(16, int(32 * width) // 16 * 16), "classes": 3}


def test_proofs_cut_at_the_levels_sizes() -> None:
    def make(heads: int) -> Made:
        def build_model(s: dict[str, int]) -> nn.Module:
            assert s["dim"] % 16 == 0, "even numbers of heads"
            return Tokens(s["dim"], Multihead(s["dim"], heads or s["dim"] // 8), s["classes"])

        return Stuck({"dim": Axis(32, 8), "classes": CLASSES}, build_model, (5, 5))  # type: ignore[arg-type]

    right, wrong = make(0), make(4)
    report = check_layout(right, layout_of_even(right), input_shape=(5, 5))
    assert report.cuts
    with raises(ModelError, "exits 1", "dim 16"):
        check_layout(wrong, layout_of_even(right), input_shape=(5, 5))


def layout_of_even(architecture: Made) -> Architecture:
    """The layout as found with granules of 16, said to have granules of 8."""
    coarse = Made({**architecture.axes, "dim": Axis(32, 16)}, architecture.make, architecture.input_shape)
    layout = coarse.infer()
    return type(layout)(architecture.axes, layout.exits, layout.tensors, layout.aliases, layout.base)


def test_a_long_proof_names_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetfit.anatomy.proof._PATIENCE_S", -1.0)
    lines: list[str] = []
    architecture = normed()
    check_layout(architecture, input_shape=architecture.input_shape, say=lines.append, seed=9)
    assert "Made" in lines[0] and lines[0].endswith(" 1 of 1") and len(lines) > 1
