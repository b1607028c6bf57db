"""`check-model` says what it finds in plain words: counts by hand, the line to write, what a model lacks."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from own_models import HEAD, STACK
from support import Expected, check_error, raises, run_verb
from torch import nn

from fleetfit.anatomy import Architecture, Axis
from fleetfit.anatomy.proof import check_layout
from fleetfit.api.model_report import check_model_report
from fleetfit.errors import ConfigError, FleetFitError, ModelError
from fleetfit.report.text import Table
from fleetfit.training.job import DIVERGED

EXAMPLES = Path(__file__).parents[1] / "examples"
# One block and one exit, forward alone: `made` makes the module of a width and the classes.
SINGLE = """
class Single(Architecture):
    blocks = 1

    def __init__(self, classes):
        self.axes = {"wide": Axis(12, GRANULE), "classes": Axis(classes, scaled=False)}

    def build(self, axes, exits):
        return Net(axes["wide"], axes["classes"])
"""
Report = Callable[..., str]


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """Write a file, check a model of it, and return what is said, tables as Markdown."""

    def of(
        source: str, model: str, shape: tuple[int, ...] = (5,), settings: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> str:  # fmt: skip
        count = len(list(tmp_path.glob("own*.py")))
        path = tmp_path / f"own{count}.py"
        path.write_text(HEAD + source)
        parts = check_model_report(f"{path}:{model}", settings, shape, **options)
        return "\n".join(part.to_markdown() if isinstance(part, Table) else part for part in parts)

    return of


def table_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:] if "---" not in line]


def exits_of(cell: str) -> list[str]:
    """Return the block counts of "1 (3), 2 (4)"."""
    return re.findall(r"\((\d+)\)", cell)


# ---- what is said of a right model -------------------------------------------------------------------------------


def test_counts_are_those_of_the_formula(report: Report) -> None:
    """Stack with h = 32, 4 blocks and C = 10 classes.

    Dimensions of `hidden`: stem 2 (weight's rows, bias), each block 3 (both of the weight, bias), each of E heads 1
    (the weight's columns). Parameters: 5h + h + 4 (h^2 + h) in stem and blocks, E (hC + C) in heads.
    """
    text = report(STACK, "Stack")
    exits = exits_of(table_rows(text)[-1][3])
    h, c, e = 32, 10, len(exits)
    total = 5 * h + h + 4 * (h * h + h) + e * (h * c + c)
    assert f'"hidden": {2 + 4 * 3 + e} dimensions of {2 + 8 + e} tensors with {total - e * c:,} of {total:,}' in text
    assert f'"classes": {2 * e} dimensions of {2 * e} tensors with {e * (h * c + c):,} of {total:,}' in text
    for quoted in ("1 dimension: stem.weight[1]", 'axis "hidden": 32', "depth: 4", "can stop at any exit"):
        assert quoted in text


def test_every_level_is_trained_for_a_step(report: Report) -> None:
    rows = table_rows(report(STACK, "Stack"))
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    for name, width, depth, exits, parameters, multiply_adds, loss, seconds in rows:
        before, after = map(float, loss.split(" -> "))
        assert after < before, name
        assert 0 < float(width) <= 1 and depth.endswith("/4") and exits_of(exits)[-1] == depth[0]
        assert parameters and multiply_adds and seconds.endswith("ms")
    assert rows[-1][1:3] == ["1.00", "4/4"]


@pytest.mark.parametrize("task", ["classification", "regression", "multi_label"])
def test_labels_are_of_the_task(report: Report, task: str) -> None:
    text = report(STACK, "Stack", task=task, classes=3)
    assert f"task {task}" in text
    assert len(table_rows(text)) == 4


TOKENS = (
    STACK.replace("nn.Linear(5, hidden)", "nn.Embedding(7, hidden)")
    + """
class Tokens(Stack):
    def __init__(self, classes, vocabulary, padding):
        assert padding == -1
        super().__init__(classes)
        self.tokens = vocabulary
"""
)


def test_models_of_tokens_get_tokens(report: Report) -> None:
    text = report(TOKENS, "Tokens", shape=(32,), task="next_token", settings={"vocabulary": 7})
    assert "32 tokens below 7, 7 tokens" in text
    with raises(ConfigError, "--set model.vocabulary=1000"):
        report(TOKENS, "Tokens")
    with raises(ConfigError, "own2.py", 0):
        report(STACK, "Stack", task="next_token")


def test_shallow_models_have_levels_by_width(report: Report) -> None:
    rows = table_rows(report(STACK.replace("blocks=4", "blocks=2"), "Stack"))
    assert [row[2] for row in rows] == ["2/2"] * 4
    widths = [float(row[1]) for row in rows]
    assert widths == sorted(set(widths)) and widths[-1] == 1


def test_where_no_levels_fit_they_have_fixed_widths(report: Report) -> None:
    source = STACK.replace("blocks=4", "blocks=2").replace("Axis(hidden)", "Axis(hidden, hidden)")
    text = report(source, "Stack")
    assert "0.3, 0.5, 0.8, 1.0" in text
    assert [row[1] for row in table_rows(text)] == ["0.30", "0.50", "0.80", "1.00"]


def single(net: str, granule: int = 1) -> str:
    return net + SINGLE.replace("GRANULE", str(granule))


PLAIN = """
class Net(nn.Module):
    def __init__(self, wide, classes):
        super().__init__()
        self.up, self.fc = nn.Linear(5, wide), nn.Linear(wide, classes)
    def forward(self, x):
        return self.fc(self.up(x).relu())
"""


def test_missing_methods_of_a_plain_module_are_listed(report: Report) -> None:
    text = report(single(PLAIN), "Single")
    assert {row[2] for row in table_rows(text)} == {"1/1"}


def test_missing_segments_are_listed(report: Report) -> None:
    start = "def start(self, x):\n        return self.stem(x)"
    listed = STACK.replace("(ExitModel)", "(nn.Module)").replace(start, """\
def forward(self, x):
        x, logits = self.stem(x), []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i + 1 in self.exits:
                logits.append(self.heads[str(i + 1)](x))
        return logits""")  # fmt: skip
    text = report(listed, "Stack")
    assert all(method in text for method in ("start", "segment", "head"))
    assert len(table_rows(text)) == 4


def test_parameters_that_no_exit_uses_are_named(report: Report) -> None:
    idle = STACK.replace(
        "self.stem = nn.Linear(5, hidden)", "self.stem, self.idle = nn.Linear(5, hidden), nn.Linear(2, 3)"
    )
    assert "idle.weight, idle.bias" in report(idle, "Stack")
    assert "idle" not in report(STACK, "Stack")


# ---- the order of places -------------------------------------------------------------------------------------------

FUSED = """
class Net(nn.Module):
    def __init__(self, wide, classes):
        super().__init__()
        self.up, self.qkv, self.fc = nn.Linear(5, wide), nn.Linear(wide, 3 * wide), nn.Linear(wide, classes)
    def forward(self, x):
        q, k, v = self.qkv(self.up(x).relu()).chunk(3, dim=-1)
        return self.fc(q * k.tanh() + v)
"""
GATES = """
class Net(nn.Module):
    def __init__(self, wide, classes):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(5, wide, batch_first=True), nn.Linear(wide, classes)
    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1])
"""
FLAT = """
class Net(nn.Module):
    def __init__(self, wide, classes):
        super().__init__()
        self.conv, self.fc = nn.Conv1d(1, wide, 3, padding=1), nn.Linear(5 * wide, classes)
    def forward(self, x):
        return self.fc(self.conv(x).relu().flatten(1))
"""
BESIDE = """
class Net(nn.Module):
    def __init__(self, wide, classes):
        super().__init__()
        self.up, self.fc = nn.Linear(5, wide), nn.Linear(5 + wide, classes)
    def forward(self, x):
        return self.fc(torch.cat([x, self.up(x).relu()], dim=1))
"""


@pytest.mark.parametrize(
    ("net", "shape", "order"),
    [
        (FUSED, (5,), "3 x wide: qkv.weight[0], qkv.bias"),
        (GATES, (4, 5), "4 x wide: lstm.weight_ih_l0[0], lstm.weight_hh_l0[0]"),
        (FLAT, (1, 5), "wide x 5: fc.weight[1]"),
        (BESIDE, (5,), "5 + wide: fc.weight[1]"),
    ],
    ids=["fused", "gates", "flatten", "concatenation"],
)
def test_orders_are_listed_with_their_dimensions(report: Report, net: str, shape: tuple[int, ...], order: str) -> None:
    assert order in report(single(net), "Single", shape)


def test_pytorchs_transformer_is_read() -> None:
    """Its inner layer is four times as wide, and follows no axis."""

    class Encoder(nn.Module):
        def __init__(self, dim: int, heads: int, classes: int) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(dim, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x.expand(-1, -1, self.head.in_features)).mean(1))

    class Encoders(Architecture):
        def __init__(self) -> None:
            self.axes = {"dim": Axis(32, granule=8), "classes": Axis(3, scaled=False)}
            self.blocks = 1

        def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
            return Encoder(axes["dim"], axes["dim"] // 8, axes["classes"])

    assert not check_layout(Encoders(), input_shape=(5, 1)).not_proved


# ---- what goes wrong -----------------------------------------------------------------------------------------------


LAST_ALONE = (
    STACK
    + """
class Last(Net):
    def forward(self, x):
        return super().forward(x)[-1]
"""
)
DOUBLED = (
    STACK
    + """
class Last(Net):
    def forward(self, x):
        return [2 * logits for logits in super().forward(x)]
"""
)
BUILDS_LAST = """
class Wrong(Stack):
    def build(self, axes, exits):
        return Last(axes["hidden"], axes["classes"], exits)
"""
TRAINING = "(float('inf') if self.training else 1) * "
RAISING = "return [][0] if self.training and x.device.type == 'cpu' else self.fc("


@pytest.mark.parametrize(
    ("source", "model", "expected"),
    [
        (STACK, "Net", Expected("own0.py", '"hidden"', kind=ConfigError)),
        ("net = nn.Linear(5, 3)", "net", Expected("own0.py", kind=ConfigError, key="model.name")),
        ("def made():\n    return 3", "made", Expected('"axes"', kind=ConfigError)),
        (
            LAST_ALONE + BUILDS_LAST,
            "Wrong",
            Expected("Wrong", "1 outputs", "4 exits", "positions = (blocks,)", kind=ModelError),
        ),
        (DOUBLED + BUILDS_LAST, "Wrong", Expected("Wrong", "exit 1", 0.5, kind=ModelError)),
        (
            STACK.replace("Axis(classes, scaled=False)", "Axis(3, scaled=False)"),
            "Stack",
            Expected("(8, 3)", 10, "(8, 10)", kind=ModelError),
        ),
        (
            single(PLAIN.replace("nn.Linear(wide, classes)", "nn.LazyLinear(classes)")),
            "Single",
            Expected('"fc.weight"', kind=ModelError),
        ),
        (
            single(PLAIN.replace("self.fc(", f"self.fc({TRAINING}")),
            "Single",
            Expected("level 1", DIVERGED, kind=ModelError),
        ),
        (
            single(PLAIN.replace("return self.fc(", RAISING)),
            "Single",
            Expected("level 1", "IndexError", kind=ModelError),
        ),
    ],
)
def test_wrong_models_are_refused(report: Report, source: str, model: str, expected: Expected) -> None:
    with raises(FleetFitError, expected):
        report(source, model)


def test_other_classes_than_a_modules_own_are_refused(report: Report) -> None:
    source = "def make(classes=4): return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, classes))\n"
    assert "7 classes" in report(source, "make", classes=7)
    fixed = source.replace("nn.Linear(8, classes)", "nn.Linear(8, 3)")
    with raises(ConfigError, 3, 7, key="classes"):
        report(fixed, "make", classes=7)


def test_the_command_prints_sections_before_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(HEAD + single(BESIDE.replace("nn.Linear(5 + wide", "nn.Linear(3 + wide")))
    printed = run_verb("check-model", "own.py:Single", "--input-shape", "5", code=2)
    assert 'axis "wide": 12' in printed.out
    check_error(ModelError(printed.err), "(5,)", "own.py")
    assert printed.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"own.py", "__pycache__"}, "nothing is written"
