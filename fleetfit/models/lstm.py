"""The FedAvg paper's language models (McMahan et al., AISTATS 2017): an embedding, LSTM layers, a linear layer.

Each LSTM layer is a block; a linear layer of its own gives the next token at every position.

Characters are embedded in 8 dimensions and go through two layers of 256 units; the paper unrolls 80 characters. It
prints 866,578 parameters without the number of characters. With `vocabulary = 258` (256 bytes and two marks) and
`cell = "peephole"`, one bias per gate, the count is 866,578 to the digit; no vocabulary gives it with plain cells, be
it with one bias per gate or two.

Words are embedded in 192 dimensions and go through one layer of 256 units; the paper unrolls 10 words. It prints
4,950,544 parameters, which `cell = "peephole"` has to the digit, with one bias per gate and a linear layer from all 256
units. So the output embedding, which the text calls 192-dimensional as well, must have 256.

Differs from the paper: the default cells are PyTorch's, without peepholes and with two biases per gate, because they
are more than twice as fast. The character LSTM has 867,090 parameters then with 258 characters, and 822,570 with the
usual vocabulary of 90; the word LSTM has 4,950,800.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Axis
from fleetfit.models.family import Family, FamilyModule

Cell = Literal["plain", "peephole"]


class PlainLayer(nn.Module):
    """An LSTM layer (Hochreiter and Schmidhuber) by PyTorch, which has two biases per gate."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(before, after, batch_first=True)
        bias = self.lstm.get_parameter("bias_ih_l0")
        if not bias.is_meta:
            bias.data[after : 2 * after] += 1.0  # forget gates start open, as in TensorFlow's cells

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, L, after] of x [B, L, before]."""
        return self.lstm(x)[0]


class PeepholeLayer(nn.Module):
    """An LSTM layer whose gates also see the cell (Gers et al., 2002), with one bias per gate; a loop, so slower.

    With a = W x_t + U h_{t-1} + bias, its rows those of i, f, g, o in this order, and peepholes p:
        i, f = sigma(a + p * c_{t-1}),  c_t = f c_{t-1} + i tanh(a_g),  o = sigma(a_o + p_o * c_t),  h_t = o tanh(c_t).
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(4 * after, before))
        self.weight_hh = nn.Parameter(torch.empty(4 * after, after))
        self.bias = nn.Parameter(torch.empty(4 * after))
        self.to_i, self.to_f, self.to_o = (nn.Parameter(torch.empty(after)) for _ in range(3))  # peepholes
        if not self.bias.is_meta:
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -(after**-0.5), after**-0.5)
            self.bias.data[after : 2 * after] += 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, L, after] of x [B, L, before]."""
        h = c = x.new_zeros(x.shape[0], len(self.to_i))
        states = []
        for from_x in F.linear(x, self.weight_ih, self.bias).unbind(1):
            i, f, g, o = (from_x + F.linear(h, self.weight_hh)).chunk(4, dim=-1)
            c = torch.sigmoid(f + self.to_f * c) * c + torch.sigmoid(i + self.to_i * c) * torch.tanh(g)
            h = torch.sigmoid(o + self.to_o * c) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, dim=1)


_LAYERS: Mapping[str, type[PlainLayer | PeepholeLayer]] = {"plain": PlainLayer, "peephole": PeepholeLayer}


class LanguageModule(FamilyModule):
    """A module whose stem is the embedding [B, L, embedding] of token ids [B, L]."""

    stem_name = "embedding"


@dataclass(frozen=True)
class LanguageModel(Family):
    """The family; made by `language_model`, which explains the fields."""

    module_class = LanguageModule
    classes: int
    vocabulary: int
    embedding: int
    hidden: int
    blocks: int
    cell: Cell

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", self.vocabulary)
        super().__post_init__()

    def _make_axes(self) -> dict[str, Axis]:
        layers = {f"layer{i + 1}": Axis(self.hidden, block=i) for i in range(self.blocks)}
        return {"embedding": Axis(self.embedding)} | layers

    def _build_stem(self, axes: Mapping[str, int]) -> nn.Module:
        return nn.Embedding(self.vocabulary, axes["embedding"])

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        before = axes[f"layer{i}"] if i else axes["embedding"]
        return _LAYERS[self.cell](before, axes[f"layer{i + 1}"])

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        return nn.Linear(axes[f"layer{e}"], axes["classes"])


def language_model(
    classes: int,
    vocabulary: int,
    embedding: int,
    hidden: int = 256,
    layers: int = 1,
    cell: Cell = "plain",
) -> LanguageModel:
    """Return the family of an LSTM language model: logits [B, L, classes] of the next token at each position.

    Args:
        classes: Tokens that can be predicted; never cut.
        vocabulary: Tokens that can be read; never cut. Padding is read like any other token; its labels do not count.
        embedding: Channels of the input embedding.
        hidden: Channels of each LSTM layer.
        layers: LSTM layers; a linear layer may sit after each.
        cell: "plain", or "peephole" for the paper's count.

    Raises:
        ModelError: The inputs are not tokens, the cell is unknown, or the model has no layer.
    """
    if vocabulary < 1:
        raise ModelError(
            "a language model reads token ids, but the data have numbers. Choose a text data set, or another model.",
            key="vocabulary",
        )
    if layers < 1:
        raise ModelError(f"a language model needs at least one LSTM layer, got {layers}.", key="layers")
    if cell not in _LAYERS:
        raise ModelError(f'cell must be "plain" or "peephole", got {cell!r}.', key="cell")
    return LanguageModel(classes, vocabulary, embedding, hidden, layers, cell)


SIZES = {
    "char_lstm": Preset(
        "The character LSTM of the FedAvg paper (McMahan et al., AISTATS 2017): two layers of 256 units, for "
        "Shakespeare.",
        {},
        {"classes": 90, "vocabulary": 90, "embedding": 8, "layers": 2},
    ),
    "word_lstm": Preset(
        "The word LSTM of the FedAvg paper (McMahan et al., AISTATS 2017): one layer of 256 units over 10,000 words.",
        {},
        {"classes": 10_000, "vocabulary": 10_000, "embedding": 192},
    ),
}
char_lstm, word_lstm = make_presets(language_model, SIZES)
