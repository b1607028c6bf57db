"""BERT's structure and sizes, counted by hand; its layout; ScaleFL's Table 9."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import Expected, raises
from torch import Tensor, nn
from torch.nn import functional

from fleetfit import names
from fleetfit.anatomy import build_module, infer_layout
from fleetfit.anatomy.proof import check_layout
from fleetfit.core import Problem
from fleetfit.core.tasks import classification
from fleetfit.cost import submodel_cost
from fleetfit.errors import ModelError
from fleetfit.models.bert import Bert, bert, bert_base
from fleetfit.submodel import Submodel, extract
from fleetfit.training import initial_state

TINY: dict[str, Any] = {"hidden": 12, "layers": 3, "attention_heads": 3, "intermediate": 18, "max_positions": 8}
EXITS = (4, 6, 9, 12)


def tiny(**keys: Any) -> Bert:
    return bert(**{"classes": 4, "input_shape": (7,), "vocabulary": 11, "padding": 0, **TINY, **keys})


def count_parameters(
    hidden: int, attention: int, inner: int, exits: tuple[int, ...], classes: int, words: int = 30522, places: int = 512
) -> int:
    """Parameters of a BERT, term by term."""
    total = (words + places + 2) * hidden + 2 * hidden
    block = 3 * (hidden + 1) * attention + (attention + 1) * hidden  # q, k, v; output
    block += (hidden + 1) * inner + (inner + 1) * hidden + 2 * 2 * hidden  # MLP; two norms
    head = (hidden + 1) * hidden + (hidden + 1) * classes
    return total + exits[-1] * block + len(exits) * head


def count(architecture: Bert, width: float, exits: tuple[int, ...]) -> int:
    return submodel_cost(architecture, (architecture.sizes(width), exits), (7,)).parameters


@pytest.mark.parametrize(("name", "layers", "hidden"), [("tiny", 2, 128), ("small", 4, 512), ("base", 12, 768)])
def test_named_sizes(name: str, layers: int, hidden: int) -> None:
    """Each is what its summary says, with heads of 64 channels."""
    architecture = names.resolve("models", f"bert_{name}")(classes=2)
    expected = count_parameters(hidden, hidden, 4 * hidden, (layers,), 2)
    assert count(architecture, 1.0, (layers,)) == expected
    assert f"{expected / 1e6:.1f} M" in names.describe_entry("models", f"bert_{name}")
    assert architecture.axes["attention"].granule == 64


def test_bert_base_is_the_default() -> None:
    assert bert(classes=2) == bert_base(classes=2)


# ---- ScaleFL's Table 9 ---------------------------------------------------------------------------------------------

LEVELS = [  # s_w, exits, hidden, head size, inner, printed parameters (M) and FLOPs (M)
    (0.40, EXITS[:1], 300, 25, 1224, 13.7, 22.2),
    (0.55, EXITS[:2], 420, 35, 1680, 26.1, 42.9),
    (0.75, EXITS[:3], 576, 48, 2304, 54.8, 85.3),
    (1.00, EXITS[3:], 768, 64, 3072, 109.5, 163.5),
    (0.70, EXITS[3:], 528, 44, 2148, 57.3, 106.2),
    (0.45, EXITS[3:], 336, 28, 1380, 27.1, 72.0),
    (0.30, EXITS[3:], 228, 19, 912, 14.7, None),  # printed 22.3, which is the row of 0.40 at depth 4
]  # fmt: skip


@pytest.mark.parametrize(("width", "exits", "hidden", "head", "inner", "millions", "flops"), LEVELS)
def test_table_9(
    width: float, exits: tuple[int, ...], hidden: int, head: int, inner: int, millions: float, flops: float | None
) -> None:
    """Widths as in the authors' code, parameters within 1% (AG News, 4 classes), "FLOPs" within 3% (2 classes).

    The authors' counter takes a linear layer once, not once per token; of attention at 64 tokens it takes 64 x 64
    times the level's width for one product and times the full 768 for the other; of a layer norm 2 per element. So
    our count of one token, less its attention, plus those terms, must give the printed figure.
    """
    architecture = bert_base(4, (64,), heads="fixed")
    sizes = architecture.sizes(width)
    assert sizes == {"hidden": hidden, "head": head, "mlp": inner, "classes": 4}
    parameters = submodel_cost(architecture, (sizes, exits), (64,)).parameters
    assert parameters == count_parameters(hidden, 12 * head, inner, exits, 4)
    assert parameters / 1e6 == pytest.approx(millions, rel=0.01)
    if flops is None:
        return
    layers, pair = exits[-1], bert_base(2, (64,), heads="fixed")
    alone = submodel_cost(pair, (sizes, exits), (1,)).multiply_adds - layers * 2 * hidden
    attention = layers * 64 * 64 * (hidden + 768)
    norms = (2 * layers + 1) * 64 * hidden * 2
    assert (alone + attention + norms) / 1e6 == pytest.approx(flops, rel=0.03)


def test_multiply_adds_of_a_sentence() -> None:
    """L tokens through four projections and the MLP, L x L x width twice for attention; each head once."""
    architecture = tiny()
    sizes, length = architecture.sizes(1.0), 7
    block = length * (4 * 12 * 12 + 2 * 12 * 18) + 2 * length * length * 12
    heads = 12 * 12 + 12 * 4
    assert submodel_cost(architecture, (sizes, (1, 3)), (length,)).multiply_adds == 3 * block + 2 * heads


def test_all_heads_of_the_full_model_are_in_each_level() -> None:
    """With fixed heads a level keeps the first channels of every head, in query, key, value and output alike."""
    architecture = tiny(heads="fixed")
    layout = infer_layout(architecture, (3,), input_shape=(7,))
    state = {name: torch.randn(shape) for name, shape in layout.shapes({}, (3,)).items()}
    piece = extract(layout, state, Submodel({"head": range(3)}, (3,)))
    rows = [head * 4 + channel for head in range(3) for channel in range(3)]
    for name in ("query", "key", "value"):
        ours, full = piece[f"blocks.1.attention.{name}.weight"], state[f"blocks.1.attention.{name}.weight"]
        assert torch.equal(ours, full[rows])
        assert torch.equal(piece[f"blocks.1.attention.{name}.bias"], state[f"blocks.1.attention.{name}.bias"][rows])
    assert torch.equal(piece["blocks.1.attention.out.weight"], state["blocks.1.attention.out.weight"][:, rows])
    assert torch.equal(piece["blocks.1.attention.out.bias"], state["blocks.1.attention.out.bias"])


# ---- layout --------------------------------------------------------------------------------------------------------


def test_fixed_heads_have_the_full_scale() -> None:
    report = check_layout(tiny(heads="fixed"), input_shape=(7,))
    assert set(report.permutation) == {"hidden", "head", "mlp", "classes"}
    assert max([*report.permutation.values(), *report.cuts.values()]) < 1e-12
    assert report.numbers and not report.not_proved


def test_other_scales_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow model that leaves out what the full one does cannot be proved by putting in the full one's numbers."""
    architecture = tiny(heads="fixed")
    attend = functional.scaled_dot_product_attention

    def sharper(query: torch.Tensor, *rest: torch.Tensor, **options: Any) -> torch.Tensor:
        return attend(query.square() if query.shape[-1] < 4 else query, *rest, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", sharper)
    object.__setattr__(architecture, "size_dependent", "")
    with raises(ModelError, '"head"', "blocks.0"):
        check_layout(architecture, input_shape=(7,))


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def test_a_block_by_hand() -> None:
    """softmax(q k^T / sqrt(4)) v over real tokens, head by head; a sum and a norm after it and after the MLP."""
    torch.manual_seed(1)
    module = build_module(tiny(), tiny().sizes(1.0), (3,)).eval()
    block: Any = module.get_submodule("blocks.1")
    for parameter in block.parameters():
        parameter.data.uniform_(-1, 1)
    x, real = torch.randn(2, 5, 12), torch.tensor([[True] * 5, [True, False, True, True, False]])

    def linear(part: nn.Linear, row: Tensor) -> Tensor:
        return part.weight @ row + part.bias

    def normed(part: nn.LayerNorm, row: Tensor) -> Tensor:
        return (row - row.mean()) / (row.var(unbiased=False) + 1e-12).sqrt() * part.weight + part.bias

    with torch.no_grad():
        y = block(x, real[:, None, None])
        for b in range(2):
            tokens = [i for i in range(5) if real[b, i]]
            q, k, v = (
                [linear(p, row) for row in x[b]]
                for p in (block.attention.query, block.attention.key, block.attention.value)
            )
            for i in range(5):
                mixed = []
                for h in range(3):
                    part = slice(4 * h, 4 * h + 4)
                    weights = torch.stack([q[i][part] @ k[j][part] / 2 for j in tokens]).softmax(0)
                    mixed.append(sum(w * v[j][part] for w, j in zip(weights, tokens, strict=True)))
                row = normed(block.norm1, x[b, i] + linear(block.attention.out, torch.cat(mixed)))
                inner = linear(block.mlp.fc1, row)
                inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
                expected = normed(block.norm2, row + linear(block.mlp.fc2, inner))
                torch.testing.assert_close(y[b, i], expected, atol=1e-5, rtol=1e-4)


def test_a_sample_of_padding_alone_stays_finite() -> None:
    module = build_module(tiny(), tiny().sizes(1.0), (1, 3))
    x = torch.zeros(2, 7, dtype=torch.int64)
    loss = sum(out.sum() for out in module(x))
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)


def test_shorter_batches_and_every_exit() -> None:
    module = build_module(tiny(), tiny().sizes(0.5), (1, 2, 3)).eval()
    for length in (1, 4, 8):
        assert [tuple(out.shape) for out in module(torch.ones(2, length, dtype=torch.int64))] == [(2, 4)] * 3


def test_dropout_acts_in_training_only() -> None:
    module = build_module(tiny(dropout=0.5), tiny().sizes(1.0), (3,)).eval()
    x = torch.randint(1, 11, (3, 7))
    assert torch.equal(module(x)[0], module(x)[0])
    module.train()
    assert not torch.equal(module(x)[0], module(x)[0])
    quiet = build_module(tiny(dropout=0.0), tiny().sizes(1.0), (3,)).train()
    assert torch.equal(quiet(x)[0], quiet(x)[0])


def test_initial_parameters_are_truncated_normal() -> None:
    """A normal of deviation 0.02 cut at 2 sigma has deviation 0.02 sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)) = 0.0176."""
    architecture = bert(hidden=192, layers=1, vocabulary=500, padding=0)
    state = initial_state(Problem(architecture, (128,), classification, (1,)), 0)
    for name, tensor in state.items():
        if "norm" in name:
            assert torch.equal(tensor, torch.full_like(tensor, float(name.endswith("weight"))))
        elif tensor.dim() == 1:
            assert not tensor.any()
        elif tensor.numel() > 5000:
            assert float(tensor.abs().max()) <= 0.04 and float(tensor.abs().max()) > 0.0395, name
            assert float(tensor.std()) == pytest.approx(0.0176, rel=0.02), name


# ---- kinds of classifiers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "pooler", "norm"])
def test_a_classifier_by_hand(kind: Any) -> None:
    """W (z) + b; W tanh(P z + p) + b; W ((z - mean) / sqrt(var + eps) g + h) + b, with z the first token."""
    architecture = tiny(head=kind, dropout=0.0)
    torch.manual_seed(0)
    module: Any = build_module(architecture, architecture.sizes(1.0), (3,)).eval()
    head = module.heads["3"]
    for p in head.parameters():
        p.data = torch.randn(p.shape)
    x = torch.randint(1, 11, (2, 7))
    tokens, _ = module.segment(0, module.start(x))
    for sample, logits in zip(tokens, module(x)[0], strict=True):
        z = sample[0]
        if kind == "pooler":
            z = torch.stack([torch.tanh(sum(w * v for w, v in zip(row, z, strict=True)) + b)
                             for row, b in zip(head.pooler.weight, head.pooler.bias, strict=True)])  # fmt: skip
        elif kind == "norm":
            mean = sum(z) / 12
            var = sum((v - mean) ** 2 for v in z) / 12
            z = (z - mean) / (var + 1e-12) ** 0.5 * head.norm.weight + head.norm.bias
        torch.testing.assert_close(logits, head.fc.weight @ z + head.fc.bias, atol=1e-4, rtol=1e-4)
    report = check_layout(architecture, input_shape=(7,))
    assert max([*report.permutation.values(), *report.cuts.values()]) < 1e-12


# ---- what does not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"input_shape": (9,)}, Expected(8, "(9,)", key="data.length")),
        ({"input_shape": (1, 28, 28)}, Expected("(1, 28, 28)", key="data.length")),
        ({"vocabulary": 0}, Expected(0, key="data.vocabulary")),
        ({"attention_heads": 5}, Expected("attention_heads", 12, 5, key="hidden")),
        ({"heads": "some"}, Expected('"whole"', '"fixed"', key="heads")),
        ({"intermediate": 17, "heads": "fixed"}, Expected(3, key="granule")),
        ({"layers": -1}, Expected(1, key="layers")),
        ({"layers": 0}, Expected(1, key="layers")),
        ({"attention_heads": 0}, Expected(1, key="attention_heads")),
        ({"head": "pooled"}, Expected('"linear"', '"pooler"', '"norm"', key="head")),
    ],
)
def test_unfit_inputs_are_refused(keys: dict[str, Any], expected: Expected) -> None:
    with raises(ModelError, expected):
        tiny(**keys)


def test_families_are_values() -> None:
    assert tiny() == tiny() and hash(tiny()) == hash(tiny())
    assert tiny() != tiny(heads="fixed") != tiny(padding=1)
    assert replace(tiny(), classes=3).axes["classes"].size == 3
