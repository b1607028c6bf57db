"""Mistakes in a model of one's own: each is a sentence of `check-model` and `plan` that says what to do."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from own_models import HEAD, STACK
from support import check_error, raises, run_verb
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.architecture import Architecture, Axis
from fleetfit.config import load_experiment
from fleetfit.errors import ModelError

AXES = 'self.axes = {"hidden": Axis(hidden), "classes": Axis(classes, scaled=False)}'
HIDDEN, BLOCKS = "Axis(hidden)", "self.blocks = blocks"
BUILD = 'return Net(axes["hidden"], axes["classes"], exits)'
HEADS = "nn.ModuleDict({str(e): nn.Linear(hidden, classes) for e in exits})"
START = "    def start(self, x):\n        return self.stem(x)"
EXITS, STEM = "self.exits = exits", "nn.Linear(5, hidden)"


ATTENTION = """
class Attention(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.inner = nn.MultiheadAttention(hidden, 4, batch_first=True)

    def forward(self, x):
        two = torch.stack([x, 2 * x], dim=1)
        return self.inner(two, two, two)[0].sum(1)


"""


def forward(returned: str) -> str:
    return STACK.replace("(ExitModel)", "(nn.Module)").replace(START, f"    def forward(self, x):\n        {returned}")


def positions(value: str) -> str:
    return STACK.replace(BLOCKS, f"{BLOCKS}; self.positions = {value}")


def sizes(value: str) -> str:
    return f"{STACK}\n    def sizes(self, width):\n        return {value}\n"


CASES: dict[str, tuple[str, tuple[object, ...]]] = {
    "axes as a list": (STACK.replace(AXES, "self.axes = [Axis(hidden)]"), ("Stack.axes", "list")),
    "axes as numbers": (STACK.replace(HIDDEN, "hidden"), ("Stack.axes", "'hidden'", 32)),
    "axes by number": (STACK.replace('{"hidden":', "{1:"), ("Stack.axes", "1 is Axis")),
    "no axes": (STACK.replace(AXES, "self.axes = None"), ("Stack.axes", "NoneType")),
    "half a channel": (STACK.replace(HIDDEN, "Axis(32.5)"), ("size=32.5",)),
    "a size in text": (STACK.replace(HIDDEN, 'Axis("32")'), ("size='32'",)),
    "blocks in text": (STACK.replace(BLOCKS, 'self.blocks = "4"'), ("Stack.blocks", "'4'")),
    "blocks as a list": (STACK.replace(BLOCKS, "self.blocks = [1]"), ("Stack.blocks", "[1]")),
    "no block": (STACK.replace(BLOCKS, "self.blocks = 0"), ("Stack.blocks", 1, 0)),
    "positions in text": (positions('"24"'), ("Stack.positions", "(4,)", "'24'")),
    "one position": (positions("4"), ("Stack.positions", "(4,)", "got 4")),
    "half positions": (positions("(2.0, 4.0)"), ("Stack.positions", "(4,)", "(2.0, 4.0)")),
    "positions beyond the depth": (positions("(2, 5)"), ("Stack.positions", "(4,)", "(2, 5)")),
    "positions that end early": (positions("(1, 2)"), ("Stack.positions", "(4,)", "(1, 2)")),
    "no positions": (positions("()"), ("Stack.positions", "(4,)", "()")),
    "a position before all blocks": (positions("(0, 4)"), ("Stack.positions", "(4,)", "(0, 4)")),
    "tokens in text": (STACK.replace(BLOCKS, f'{BLOCKS}; self.tokens = "x"'), ("Stack.tokens", "'x'")),
    "size_dependent without a reason": (
        STACK.replace(BLOCKS, f"{BLOCKS}; self.size_dependent = True"), ("Stack.size_dependent", "True")),
    "exits as text": (STACK.replace(EXITS, "self.exits = str(exits)"), ("Net.exits", "self.exits", "'(1, 2, 3, 4)'")),
    "exits as a number": (STACK.replace(EXITS, "self.exits = exits[-1]"), ("Net.exits", "(1, 2, 3, 4)", "is 4")),
    "exits of its own": (STACK.replace(EXITS, "self.exits = (1, 2)"), ("Net.exits", "(1, 2, 3, 4)", "(1, 2)")),
    "exits forgotten": (STACK.replace(EXITS, "pass"), ("Net.exits", "(1, 2, 3, 4)", "None")),
    "heads that are missing": (
        STACK.replace("for e in exits})", "for e in exits[:-1]})"),
        ("heads", "nn.ModuleDict({str(e): ... for e in exits})", "for 4", "ModuleDict['1', '2', '3']")),
    "a list of too few heads": (
        STACK.replace(HEADS, "nn.ModuleList(nn.Linear(hidden, classes) for e in exits[:-1])"),
        ("heads", "nn.ModuleDict({str(e): ... for e in exits})", "ModuleList['0', '1', '2']")),
    "a constructor that raises": (STACK.replace(BLOCKS, 'raise ValueError("no")'), ("ValueError: no",)),
    "a constructor that looks up": (STACK.replace(BLOCKS, '{}["x"]'), ("KeyError: 'x'",)),
    "a property that raises": (
        f"{STACK}\n    @property\n    def positions(self):\n        return 1 / 0\n", ("Stack", "ZeroDivisionError")),
    "build without a return": (
        STACK.replace(BUILD, BUILD.removeprefix("return ")), ("Stack.build", "nn.Module", "NoneType")),
    "build gives a list": (STACK.replace(BUILD, f"return [{BUILD[7:]}]"), ("Stack.build", "nn.Module", "list")),
    "build gives a class": (STACK.replace(BUILD, "return Net"), ("Stack.build", "nn.Module", "type")),
    "build with too few arguments": (
        STACK.replace("build(self, axes, exits)", "build(self, axes)"),
        ("Stack.build", "{'hidden': 32, 'classes': 10}", "(1, 2, 3, 4)", "takes 2 positional arguments")),
    "build without parameters": (STACK.replace(BUILD, "return nn.ReLU()"), ("Stack.build", "parameters")),
    "forward gives a dictionary": (forward("return {'logits': x}"), ("forward of Net", "dict")),
    "forward gives nothing": (forward("return None"), ("forward of Net", "NoneType")),
    "forward gives numbers": (
        forward("return [1 for e in self.exits]"), ("forward of Net", "['int', 'int', 'int', 'int']")),
    "sizes that are no sizes": (sizes("3"), ("Stack.sizes(0.01)", "(hidden, classes)", 3)),
    "sizes that lack one": (
        sizes("{'classes': 10}"), ("Stack.sizes(0.01)", "(hidden, classes)", "{'classes': 10}")),
    "sizes that are no counts": (
        sizes("{'hidden': 32 * width, 'classes': 10}"), ("Stack.sizes(0.01)", '"hidden"', "1 to 32", 0.32)),
    "sizes above the whole": (
        sizes("{'hidden': 64, 'classes': 10}"), ("Stack.sizes(0.01)", '"hidden"', "1 to 32", 64)),
    "sizes of nothing": (
        sizes("{'hidden': int(8 * width), 'classes': 10}"), ("Stack.sizes(0.01)", '"hidden"', "1 to 32", 0)),
    "sizes that are never whole": (
        sizes("{'hidden': 16, 'classes': 10}"), ("Stack.sizes(1)", '"hidden"', 32, 16)),
    "tokens that are not declared": (
        STACK.replace(STEM, "nn.Embedding(50, hidden)").replace("return self.stem(x)", "return self.stem(x).mean(1)"),
        ("(5,)", "vocabulary", "self.tokens = vocabulary")),
    "tokens that it does not take": (STACK.replace(BLOCKS, f"{BLOCKS}; self.tokens = 50"), ("(5,)", "tokens", 50, 0)),
    "a product of two axes": (
        STACK.replace(STEM, "nn.Linear(5, hidden * classes)"), ("(5,)", "2x320", "32x32")),
    "numbers of another precision": (
        STACK.replace(STEM, "nn.Linear(5, hidden).double()"), ("(5,)", "must have the same dtype", "own.py")),
    "an error without words": (
        STACK.replace(STEM, "next(_ for _ in ())"), ("Stack.build", "(1, 2, 3, 4)", "StopIteration")),
    "groups that are fixed": (
        STACK.replace("nn.ReLU())", "nn.Unflatten(1, (-1, 1)), nn.GroupNorm(4, hidden), nn.Flatten())").replace(
            HIDDEN, "Axis(hidden, granule=8)"),
        ("4 groups", '"hidden"', "Axis(8)", '4 * axes["hidden"]')),
    "heads that are fixed": (
        ATTENTION + STACK.replace("nn.ReLU())", "Attention(hidden))").replace(
            HIDDEN, "Axis(hidden, granule=8)"),
        ("4 heads", '"hidden"', "Axis(8)", '4 * axes["hidden"]')),
}  # fmt: skip
"""A model with one mistake, and what its error quotes."""
VERBS = {"check-model": [], "plan": ["--model"]}
PLANNED = ("axes", "blocks", "positions", "sizes", "a constr")


@pytest.mark.parametrize(
    ("verb", "case"), [(verb, case) for verb in VERBS for case in CASES if verb != "plan" or case.startswith(PLANNED)]
)
def test_verbs_explain_mistakes(verb: str, case: str, tmp_path: Path) -> None:
    source, quoted = CASES[case]
    (tmp_path / "own.py").write_text(HEAD + source)
    err = run_verb(verb, *VERBS[verb], f"{tmp_path / 'own.py'}:Stack", "--input-shape", "5", code=2).err
    assert err.startswith("fleetfit: ") and "Traceback" not in err
    check_error(ModelError(" ".join(err.split())), *quoted)


def test_heads_in_a_list_work(tmp_path: Path) -> None:
    """In the order of the exits; a deployed model can stop at any of them."""
    (tmp_path / "own.py").write_text(
        HEAD + STACK.replace(HEADS, "nn.ModuleList(nn.Linear(hidden, classes) for e in exits)")
    )
    model = f"{tmp_path / 'own.py'}:Stack"
    run_verb("check-model", model, "--input-shape", "5", code=0)
    for cost in ("memory_bytes", "size_bytes"):
        planned = run_verb("plan", "--model", model, "--input-shape", "5", "--cost", cost, "--tolerance", "0.6")
        assert planned.code in (0, 2) and "Traceback" not in planned.err


# ---- a size that forward writes out --------------------------------------------------------------------------------


class Written(nn.Module):
    """Two blocks of 8 channels and a classifier after each; `way` has a number where the others read a shape."""

    def __init__(self, width: int, exits: tuple[int, ...], way: str) -> None:
        super().__init__()
        self.exits, self.way = exits, way
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(width, 3) for e in exits})

    def forward(self, x: Tensor) -> list[Tensor]:
        x, logits = self.stem(x), []
        for i, block in enumerate(self.blocks, 1):
            x = block(x)
            if i in self.exits:
                logits.append(self.heads[str(i)](self._pool(x)))
        return logits

    def _pool(self, x: Tensor) -> Tensor:
        if self.way == "view":
            return x.mean((2, 3)).view(-1, 8)
        if self.way == "unflatten":
            return x.flatten(2).unflatten(1, (4, 2)).mean(3).flatten(1)
        if self.way == "add":
            return x.mean((2, 3)) + x.new_zeros(8)
        return torch.split(x.mean((2, 3)), [5, 3], 1)[0].repeat(1, 2)[:, :8]


class WrittenSizes(Architecture):
    def __init__(self, way: str = "view") -> None:
        self.axes, self.blocks, self.positions, self.way = {"width": Axis(8)}, 2, (1, 2), way

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return Written(axes["width"], exits, self.way)


@pytest.mark.parametrize("way", ["view", "unflatten", "add", "split"])
def test_fixed_sizes_in_forward_are_explained(way: str) -> None:
    """The default method looks at narrow models of images first; torch says what fails there."""
    with pytest.raises(RuntimeError) as caught:
        Written(2, (1, 2), way)(torch.zeros(1, 1, 8, 8))
    x, y = torch.rand(60, 1, 8, 8), torch.arange(60) % 3
    with raises(ModelError, "WrittenSizes", "width 2", str(caught.value).split(".")[0], Path(__file__).name):
        ff.plan(model=WrittenSizes(way), data=(x.numpy(), y.numpy()))


def test_verbs_explain_fixed_sizes(tmp_path: Path) -> None:
    name = f"{Path(__file__)}:WrittenSizes"
    printed = run_verb("run", "--set", f"model.name={name}", "--set", "data.name=digits", "--out", tmp_path / "run")
    assert printed.code == 2 and "[-1, 8]" in printed.err and "internal" not in printed.err


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.body(x + other)


def test_a_module_of_two_inputs_has_to_take_one() -> None:
    with raises(ModelError, "TwoInputs", "'other'", "one input", key="model.name"):
        ff.plan(model=TwoInputs(), data=(torch.rand(60, 6), torch.arange(60) % 3))


class Convolved(nn.Module):
    def __init__(self, classes: int, channels: int = 6, padding: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=padding)
        self.mix = nn.Conv2d(6, channels, 1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.conv(x).relu()).relu().mean((2, 3)))


def test_images_leave_a_constructors_padding_and_name_its_channels() -> None:
    run = ff.run(model=f"{Path(__file__)}:Convolved", data="digits", rounds=1, local={"max_steps": 1}, progress=False)
    net = run.model().net
    assert net.conv.padding == (1, 1) and net.head.in_features == 1
    assert [note for note in run.notes if "channels = 1" in note and "default 6" in note]


# ---- every plug-in --------------------------------------------------------------------------------------------------

PLUG_IN = """
def fail(*given, **named):
    return {}["spruce"]

def data(): return fail()
def deal(data, clients, rng): return fail()
def method(): return fail()
def tune(architecture): return fail()
def engine(simulation): return fail()
"""
PLACES_OF_PLUG_INS = {"data": "data.name", "deal": "data.partition.kind",
                      "method": "method.name", "tune": "peft.name", "engine": "engine.name"}  # fmt: skip


@pytest.mark.parametrize("function", PLACES_OF_PLUG_INS)
def test_an_error_of_a_plug_in_names_its_line(function: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(PLUG_IN)
    value = f"{file}:{function}"
    settings = {"data.name": "digits", "rounds": 1, "local.max_steps": 1, "data.partition.clients": 2}
    settings[PLACES_OF_PLUG_INS[function]] = value
    with raises(ff.ConfigError, "KeyError", "spruce", "broken.py, line 3"):
        ff.run(load_experiment(None, [f"{key}={one}" for key, one in settings.items()]), out=tmp_path / "run")
