"""The character LSTM of the FedAvg paper (McMahan et al., AISTATS 2017): two layers of 256 units, for Shakespeare.

Characters are embedded in 8 dimensions, go through two LSTM layers of 256 units, and a linear layer gives the next
character at every position; the paper unrolls 80 characters. It prints 866,578 parameters without the number of
characters. With `vocabulary = 258` (256 bytes and two marks) and `cell = "peephole"`, one bias per gate, the count is
866,578 to the digit; no vocabulary gives it with plain cells, be it with one bias per gate or two.

Differs from the paper: the default cells are PyTorch's, without peepholes and with two biases per gate, because they
are more than twice as fast; with 258 characters they have 867,090 parameters. The usual vocabulary of 90 has 822,570.
"""

from fleetfit.models._lstm import Cell, LanguageModel


def char_lstm(
    classes: int = 90,
    vocabulary: int = 90,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    cell: Cell = "plain",
) -> LanguageModel:
    """Return the family of the character LSTM.

    Args:
        classes: Characters that can be predicted; never cut.
        vocabulary: Characters that can be read; never cut.
        embedding: Channels of the embedding.
        hidden: Channels of each LSTM layer.
        layers: LSTM layers; a linear layer may sit after each.
        cell: "plain", or "peephole" for the paper's count.

    Raises:
        ModelError: The inputs are not tokens, or there is no layer.
    """
    return LanguageModel(classes, vocabulary, embedding, hidden, layers, cell)
