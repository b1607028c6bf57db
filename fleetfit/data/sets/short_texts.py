"""AG News and SST-2: short texts with a label, as tokens.

AG News: Zhang, Zhao and LeCun, "Character-level Convolutional Networks for Text Classification" (2015), from the corpus
of Gulli (2005). Files may have fewer training texts; the set's name in reports then has their number.

SST-2: Socher et al., "Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank" (2013), as divided
by the GLUE benchmark (Wang et al., 2019). The training texts are phrases of the sentences; validation and test are
whole sentences. GLUE, and the hub with it, withholds the labels of its 1,821 test sentences (they are -1): then the 872
validation sentences are the test set and validation texts are held out of the training phrases.

Differs from the paper (ScaleFL, section 4.1): a tenth of AG News's training texts is held out, not 5,000, in proportion
for every class; word pieces are learned from the training texts unless `tokenizer` names those of BERT-base-uncased.
"""

import dataclasses

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files.text import make_data, read_named_set
from fleetfit.factories import Preset, make_presets

FACTS = {
    "ag_news": Facts(
        train=120_000,
        test=7_600,
        classes=4,
        resolution="64 tokens",
        source="Zhang et al. (2015), http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
    ),
    "sst2": Facts(
        train=67_349,
        test=1_821,
        classes=2,
        resolution="64 tokens",
        source="Socher et al. (2013), https://gluebenchmark.com",
    ),
}
SETS = {
    "ag_news": Preset(
        "AG News: 127,600 headlines with the beginning of the article, in four classes.",
        {
            "name": "ag_news",
            "repository": "fancyzhx/ag_news",
            "class_names": ("World", "Sports", "Business", "Sci/Tech"),
        },
    ),
    "sst2": Preset(
        "SST-2: phrases and sentences of film reviews, negative or positive.",
        {"name": "sst2", "repository": "stanfordnlp/sst2", "class_names": ("negative", "positive")},
    ),
}


def _make_short_texts(
    name: str,
    repository: str,
    class_names: tuple[str, ...],
    folder: str | None = None,
    tokenizer: str | None = None,
    vocabulary: int = 8000,
    length: int = 64,
    samples: int | None = None,
    validation: float = 0.1,
    seed: int = 0,
    hub: bool = False,
) -> Data:
    """Return a set from train, test and perhaps validation.parquet, columns text (or sentence) and label, as tokens.

    Args:
        name: The set's name.
        repository: Its repository on the hub.
        class_names: One per class.
        folder: The folder with its files or the one above; None: in the folder FLEETFIT_DATA.
        tokenizer: Folder of a Hugging Face checkpoint, or a tokenizer.json; None: word pieces are learned from the
            training texts, lower-cased.
        vocabulary: Maximal number of word pieces, if they are learned.
        length: Tokens of a text; longer texts are cut, shorter ones padded.
        samples: Number of training texts to draw, class by class, those held out included; None: all.
        validation: Share of the training texts to hold out, class by class, 0 <= validation < 1, if there are no
            validation texts or they are the test set.
        seed: Seed of the held out and drawn samples.
        hub: Whether to download the set from the Hugging Face hub if it is not on disk.

    Raises:
        DataError: The files or the tokenizer are missing or wrong, or a number is out of range.
        MissingExtra: What the tokenizer or the hub needs is not installed.
    """
    rows = read_named_set(name, FACTS[name], repository, folder, hub)
    data = make_data(name, rows, tokenizer, vocabulary, length, samples, validation, 0.0, seed)
    count, full = rows.sizes["train"], FACTS[name].train
    if full is not None and count < full:
        name = f"{name}-partial-{count}-of-{full}"
    return dataclasses.replace(data, name=name, class_names=class_names)


ag_news, sst2 = make_presets(_make_short_texts, SETS)
