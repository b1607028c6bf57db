"""SST-2: phrases and sentences of film reviews, negative or positive.

Socher et al., "Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank" (2013), as divided by the
GLUE benchmark (Wang et al., 2019). The training texts are phrases of the sentences; validation and test are whole
sentences. GLUE, and the hub with it, withholds the labels of its 1,821 test sentences (they are -1): then the 872
validation sentences are the test set and validation texts are held out of the training phrases.

Differs from the paper (ScaleFL, section 4.1): word pieces are learned from the training texts unless `tokenizer` names
those of BERT-base-uncased.
"""

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.text import named

FACTS = Facts(
    train=67_349,
    test=1_821,
    classes=2,
    resolution="64 tokens",
    source="Socher et al. (2013), https://gluebenchmark.com",
)
HUB = "stanfordnlp/sst2"
NAMES = ("negative", "positive")


def sst2(
    folder: str | None = None,
    tokenizer: str | None = None,
    vocabulary: int = 8000,
    length: int = 64,
    samples: int | None = None,
    validation: float = 0.1,
    seed: int = 0,
    hub: bool = False,
) -> Data:
    """Return SST-2 from a folder with train, validation and test.parquet, columns text (or sentence) and label.

    Args:
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        tokenizer: Folder of a Hugging Face checkpoint, or a tokenizer.json; None: word pieces are learned from the
            training texts, lower-cased.
        vocabulary: Number of word pieces at most, if they are learned.
        length: Tokens of a text; longer ones are cut, shorter ones filled up.
        samples: So many training texts only, drawn class by class; None: all.
        validation: Share of the training texts that is held out, class by class, where the validation sentences are
            the test set or absent.
        seed: Of what is held out and drawn.
        hub: Whether the set is downloaded from the Hugging Face hub where it is not on disk.

    Raises:
        DataError: The files or the tokeniser are missing or wrong, or a number is out of range.
        MissingExtra: pyarrow, or what the tokeniser or the hub needs, is not installed.
    """
    return named(
        "sst2", FACTS, HUB, folder, NAMES, tokenizer, vocabulary, length, samples, validation, seed, hub
    )  # fmt: skip
