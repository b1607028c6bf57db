"""The FedAvg paper's language models: the printed sizes, what they compute, how they are counted and cut."""

import pytest
import torch
from support import raises
from torch import Tensor
from torch.nn import functional as F
from zoo import arrange

from fleetfit.anatomy import Segment, build_module, infer_layout
from fleetfit.anatomy.proof import check_layout
from fleetfit.cost import full_cost, submodel_cost
from fleetfit.errors import ModelError
from fleetfit.models.lstm import LanguageModel, PeepholeLayer, char_lstm, word_lstm

CELLS = ("plain", "peephole")


def layer(before: int, after: int, cell: str) -> int:
    """Four gates; two biases each, or one bias and three peepholes per unit."""
    return 4 * after * (before + after) + (8 * after if cell == "plain" else 4 * after + 3 * after)


def count_parameters(vocabulary: int, size: int, hidden: int, layers: int, cell: str) -> int:
    body = layer(size, hidden, cell) + (layers - 1) * layer(hidden, hidden, cell)
    return vocabulary * size + body + (hidden + 1) * vocabulary


@pytest.mark.parametrize(
    ("architecture", "expected", "printed"),
    [
        (char_lstm(258, 258, cell="peephole"), count_parameters(258, 8, 256, 2, "peephole"), 866_578),
        (word_lstm(cell="peephole"), count_parameters(10_000, 192, 256, 1, "peephole"), 4_950_544),
        (char_lstm(258, 258), count_parameters(258, 8, 256, 2, "plain"), 867_090),
        (char_lstm(), count_parameters(90, 8, 256, 2, "plain"), 822_570),
        (word_lstm(), count_parameters(10_000, 192, 256, 1, "plain"), 4_950_800),
    ],
)
def test_parameters_as_printed(architecture: LanguageModel, expected: int, printed: int) -> None:
    """The paper prints the first two."""
    assert full_cost(architecture, (10,)).parameters == expected == printed


def test_printed_counts_need_peepholes() -> None:
    """What is left of 866,578 for embedding and output (8 + 256 + 1 per character, 8 + 256 without its bias)."""
    gates = 4 * 256 * (8 + 256 + 256 + 256)
    for biases in (0, 1, 2):
        left = 866_578 - gates - biases * 2 * 4 * 256
        assert left % 265
        assert left % 264
    assert (866_578 - gates - 2 * 4 * 256 - 2 * 3 * 256) / 265 == 258


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("width", [1.0, 0.3])
def test_multiply_adds_on_meta_by_hand(cell: str, width: float) -> None:
    """At each of 80 characters: both matrices of each layer and the linear layer; peepholes are no matrix product."""
    architecture = char_lstm(cell=cell)
    sizes = architecture.sizes(width)
    size, first, second = sizes["embedding"], sizes["layer1"], sizes["layer2"]
    assert (size, first, second) == ((8, 256, 256) if width == 1 else (2, 76, 76))
    per_token = 4 * first * (size + first) + 4 * second * (first + second) + second * 90
    assert submodel_cost(architecture, (sizes, (2,)), (80,)).multiply_adds == 80 * per_token
    early = 4 * first * (size + first) + first * 90
    assert submodel_cost(architecture, (sizes, (1,)), (80,)).multiply_adds == 80 * early


def loops(layer: PeepholeLayer, x: Tensor) -> Tensor:
    """The cell of Gers et al. unit by unit."""
    w, u, bias = (t.detach() for t in (layer.weight_ih, layer.weight_hh, layer.bias))
    p = [t.detach() for t in (layer.to_i, layer.to_f, layer.to_o)]
    units = u.shape[1]
    outputs = torch.zeros(*x.shape[:2], units, dtype=x.dtype)
    for k in range(len(x)):
        h, c = [0.0] * units, [0.0] * units
        for t in range(x.shape[1]):
            new_h, new_c = [0.0] * units, [0.0] * units
            for n in range(units):
                rows = range(n, 4 * units, units)  # of i, f, g, o
                a = [w[r] @ x[k, t] + u[r] @ torch.tensor(h, dtype=x.dtype) + bias[r] for r in rows]
                i, f = torch.sigmoid(a[0] + p[0][n] * c[n]), torch.sigmoid(a[1] + p[1][n] * c[n])
                new_c[n] = float(f * c[n] + i * torch.tanh(a[2]))
                o = torch.sigmoid(a[3] + p[2][n] * new_c[n])
                new_h[n] = float(o * torch.tanh(torch.tensor(new_c[n])))
            h, c = new_h, new_c
            outputs[k, t] = torch.tensor(h, dtype=x.dtype)
    return outputs


def test_the_peephole_cell_unit_by_unit() -> None:
    torch.manual_seed(0)
    cell = PeepholeLayer(3, 2).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(cell(x).detach(), loops(cell, x))


def test_without_peepholes_the_cell_is_pytorch_s() -> None:
    cell = PeepholeLayer(3, 5)
    for peephole in (cell.to_i, cell.to_f, cell.to_o):
        peephole.data.zero_()
    peer = torch.nn.LSTM(3, 5, batch_first=True)
    state = {"weight_ih_l0": cell.weight_ih, "weight_hh_l0": cell.weight_hh, "bias_ih_l0": cell.bias}
    peer.load_state_dict({**state, "bias_hh_l0": torch.zeros(20)})
    x = torch.randn(2, 6, 3)
    torch.testing.assert_close(cell(x), peer(x)[0])


@pytest.mark.parametrize("cell", CELLS)
def test_logits_see_earlier_positions(cell: str) -> None:
    architecture = char_lstm(7, 9, 3, 5, 2, cell)
    module = build_module(architecture, architecture.sizes(1.0), (1, 2))
    x = torch.tensor([[8, 0, 3, 4, 5]])
    other = x.clone()
    other[0, 3] = 1
    for ours, theirs in zip(module(x), module(other), strict=True):
        assert ours.shape == (1, 5, 7)
        assert torch.equal(ours[:, :3], theirs[:, :3])
        assert not torch.equal(ours[:, 3], theirs[:, 3])
        assert not torch.equal(ours[:, 4], theirs[:, 4])


@pytest.mark.parametrize("cell", CELLS)
def test_forget_gates_start_open(cell: str) -> None:
    architecture = char_lstm(cell=cell)
    module = build_module(architecture, architecture.sizes(1.0), (2,))
    for name, bias in module.named_parameters():
        if "bias" in name and name.startswith("blocks"):
            means = [float(gate.detach().mean()) for gate in bias.chunk(4)]
            added = 0.0 if "bias_hh" in name else 1.0
            assert means == pytest.approx([0.0, added, 0.0, 0.0], abs=0.01)


# ---- layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture",
    [*(char_lstm(7, 9, 3, 5, 2, cell) for cell in CELLS), word_lstm(6, 6, 4, 5), char_lstm(4, 4, 2, 3, 4)],
)
def test_the_layout_passes_all_parts(architecture: LanguageModel) -> None:
    """A unit whose tensors are zero stays at zero, its gates one half, its input tanh(0)."""
    report = check_layout(architecture, input_shape=(6,))
    assert report.permutation.keys() == architecture.axes.keys()
    assert not report.not_proved and report.cuts
    assert max([*report.permutation.values(), *report.cuts.values()]) < 1e-12


@pytest.mark.parametrize("cell", CELLS)
def test_gates_taken_as_neighbors_are_refused(cell: str) -> None:
    architecture = char_lstm(7, 9, 3, 5, 2, cell)
    layout = infer_layout(architecture, input_shape=(6,))
    gates = {(name, 0): (Segment("layer1", per=4),) for name, one in layout.tensors.items()
             if name.startswith("blocks.0.") and one.dims[0] == (Segment("layer1"),) * 4}  # fmt: skip
    assert gates
    with raises(ModelError, '"layer1"', "blocks.0"):
        check_layout(architecture, arrange(layout, gates), example=torch.zeros(2, 6, dtype=torch.int64))


def test_vocabularies_are_never_cut_and_stay_apart() -> None:
    """Input and output embeddings are two tensors, as in the paper."""
    architecture = word_lstm(50, 40, 12, 8)
    assert architecture.sizes(0.5) == {"embedding": 6, "layer1": 4, "classes": 50}
    layout = infer_layout(architecture, input_shape=(6,))
    shapes = layout.shapes(architecture.sizes(0.5), (1,))
    assert shapes["embedding.weight"] == (40, 6)
    assert shapes["heads.1.weight"] == (50, 4)
    assert not layout.aliases


def test_families_are_values() -> None:
    assert char_lstm(5, 6).tokens == 6
    assert len({char_lstm(), char_lstm(), char_lstm(cell="peephole"), word_lstm()}) == 3


@pytest.mark.parametrize("cell", CELLS)
def test_it_learns_successors(cell: str) -> None:
    """Periodic sequences with a padded end: the next token is known from the last two; padding is not scored."""
    architecture = char_lstm(6, 6, 4, 16, 2, cell)
    torch.manual_seed(0)
    module = build_module(architecture, architecture.sizes(1.0), (1, 2))
    pattern = torch.tensor([1, 2, 1, 3, 4, 5]).repeat(4)
    x = torch.stack([pattern[s : s + 12] for s in range(6)])
    y = torch.stack([pattern[s + 1 : s + 13] for s in range(6)])
    x[:, 10:], y[:, 10:] = 0, -100
    optimizer = torch.optim.Adam(module.parameters(), 0.02)
    for _ in range(120):
        optimizer.zero_grad()
        sum(F.cross_entropy(out.transpose(1, 2), y, ignore_index=-100) for out in module(x)).backward()
        optimizer.step()
    scored = y[:, 1:10]
    assert all(torch.equal(out.argmax(-1)[:, 1:10], scored) for out in module(x))
