"""The recipes of docs/own-architecture.md for handing out a level, with a model whose weights are tied."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support import run_verb

import fleetfit as ff

PAGE = (Path(__file__).parents[1] / "docs" / "own-architecture.md").read_text()
TIED = """
from torch import nn
from fleetfit.architecture import Architecture, Axis, ExitModel

class Net(ExitModel):
    def __init__(self, vocabulary, hidden, exits):
        super().__init__()
        self.exits = exits
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(hidden, vocabulary, bias=False) for e in exits})
        for head in self.heads.values():
            head.weight = self.embedding.weight

    def start(self, x):
        return self.embedding(x)

class Tied(Architecture):
    def __init__(self, classes, vocabulary, hidden=32, blocks=4):
        self.tokens = vocabulary
        self.axes = {"hidden": Axis(hidden)}
        self.blocks = blocks

    def build(self, axes, exits):
        return Net(self.tokens, axes["hidden"], exits)
"""


def test_a_tied_model_is_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("tied.py").write_text(TIED)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    run_verb("check-model", "tied.py:Tied", "--task", "next_token", "--set", "model.vocabulary=30", code=0)
    ff.run({"rounds": 1, "data": {"path": "text.txt", "length": 16, "partition": {"clients": 4}},
            "model": {"name": "tied.py:Tied"}, "fleet": {"tolerance": 0.6}}, out="runs/mine")  # fmt: skip
    section = PAGE[PAGE.index("## 5. Hand out a level") : PAGE.index("## Axes and granules")]
    first, second = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    vocabulary = ff.load("runs/mine").assembly.data.vocabulary
    second = second.replace("from deep import Deep", "from tied import Tied").replace(
        "Deep(classes=10, channels=1, stream=24)", f"Tied(classes={vocabulary}, vocabulary={vocabulary})"
    )
    code = first.replace("torch.zeros(5, 1, 8, 8)", "torch.arange(5 * 16).reshape(5, 16) % 9") + second
    sections: dict[str, Any] = {}
    exec(code, sections)
    with torch.no_grad():
        for a, b in zip(sections["again"](sections["images"]), sections["logits"], strict=True):
            torch.testing.assert_close(a, b)
    assert sections["again"].heads["1"].weight is sections["again"].embedding.weight
    with safe_open("level-1.safetensors", "pt") as file:
        assert sum("embedding" in name or "heads" in name for name in file.keys()) == 1  # noqa: SIM118
