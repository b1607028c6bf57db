"""AG News: 127,600 headlines with the beginning of the article, in four classes.

Zhang, Zhao and LeCun, "Character-level Convolutional Networks for Text Classification" (2015), from the corpus of
Gulli (2005). Files with fewer training texts are taken too; the set's name then says so in every report.

Differs from the paper (ScaleFL, section 4.1): a tenth of the training texts is held out, not 5,000, in proportion for
every class; word pieces are learned from the training texts unless `tokenizer` names those of BERT-base-uncased.
"""

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.text import named

FACTS = Facts(
    train=120_000,
    test=7_600,
    classes=4,
    resolution="64 tokens",
    source="Zhang et al. (2015), http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
)
HUB = "fancyzhx/ag_news"
NAMES = ("World", "Sports", "Business", "Sci/Tech")


def ag_news(
    folder: str | None = None,
    tokenizer: str | None = None,
    vocabulary: int = 8000,
    length: int = 64,
    samples: int | None = None,
    validation: float = 0.1,
    seed: int = 0,
    hub: bool = False,
) -> Data:
    """Return AG News from a folder with train.parquet and test.parquet, columns text and label, as tokens [N, length].

    Args:
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        tokenizer: Folder of a Hugging Face checkpoint, or a tokenizer.json; None: word pieces are learned from the
            training texts, lower-cased.
        vocabulary: Number of word pieces at most, if they are learned.
        length: Tokens of a text; longer ones are cut, shorter ones filled up.
        samples: So many training texts only, drawn class by class, those held out included; None: all.
        validation: Share of the training texts that is held out, class by class, 0 <= validation < 1.
        seed: Of what is held out and drawn.
        hub: Whether the set is downloaded from the Hugging Face hub where it is not on disk.

    Raises:
        DataError: The files or the tokeniser are missing or wrong, or a number is out of range.
        MissingExtra: pyarrow, or what the tokeniser or the hub needs, is not installed.
    """
    return named(
        "ag_news", FACTS, HUB, folder, NAMES, tokenizer, vocabulary, length, samples, validation, seed, hub
    )  # fmt: skip
