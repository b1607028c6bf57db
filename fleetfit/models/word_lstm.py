"""The word LSTM of the FedAvg paper (McMahan et al., AISTATS 2017): one layer of 256 units over 10,000 words.

Words are embedded in 192 dimensions, go through one LSTM layer of 256 units, and a linear layer of its own gives the
next word at every position; the paper unrolls 10 words. It prints 4,950,544 parameters, which `cell = "peephole"` has
to the digit, with one bias per gate and a linear layer from all 256 units. So the output embedding, which the text
calls 192-dimensional as well, must have 256.

Differs from the paper: the default cells are PyTorch's, without peepholes and with two biases per gate, because they
are more than twice as fast; they have 4,950,800 parameters.
"""

from fleetfit.models._lstm import Cell, LanguageModel


def word_lstm(
    classes: int = 10_000,
    vocabulary: int = 10_000,
    embedding: int = 192,
    hidden: int = 256,
    layers: int = 1,
    cell: Cell = "plain",
) -> LanguageModel:
    """Return the family of the word LSTM.

    Args:
        classes: Words that can be predicted; never cut.
        vocabulary: Words that can be read; never cut.
        embedding: Channels of the input embedding.
        hidden: Channels of each LSTM layer.
        layers: LSTM layers; a linear layer may sit after each.
        cell: "plain", or "peephole" for the paper's count.

    Raises:
        ModelError: The inputs are not tokens, or there is no layer.
    """
    return LanguageModel(classes, vocabulary, embedding, hidden, layers, cell)
