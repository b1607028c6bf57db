"""Any labelled texts on disk: Parquet, CSV, TSV, JSON lines, or a folder of .txt files for each class.

For example IMDB as it is unpacked, or a table of your own. A set is a folder with a train file (`train.csv`) and
perhaps `validation` (or `valid`, `val`, `dev`) and `test`, or a single file; for Parquet see `parquet`. CSV is quoted
where need be, TSV never; all is UTF-8. Folders are `train/CLASS/*.txt` and so on, or just `CLASS/*.txt`.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np
import torch

from fleetfit.data import _corpus, _tokens
from fleetfit.data._hold_out import completed, drawn, hold_out
from fleetfit.data._hub import folder_of, from_hub
from fleetfit.data.dataset import Data, Facts
from fleetfit.errors import DataError
from fleetfit.paths import given

FACTS = Facts(train=None, test=None, classes=None, resolution="any", source="a folder or a file of labelled texts")


def text(
    folder: str,
    text: str | tuple[str, ...] | None = None,
    label: str | None = None,
    groups: str | None = None,
    header: bool = True,
    tokenizer: str | None = None,
    vocabulary: int = 8000,
    length: int = 64,
    samples: int | None = None,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    hub: bool = False,
) -> Data:
    """Return a set of labelled texts as tokens [N, length], named after its folder or file.

    What has no file is held out from the training texts: in proportion for every label, or for every group where
    `groups` is given. Without a test file, a validation file is the test set. A test or validation file whose labels
    are all -1 (withheld) is left out, and so are folders called "unsup", which have no label in the IMDB set.

    Args:
        folder: A folder or a single file; a relative path that does not exist is sought in the folder FLEETFIT_DATA.
        text: Column of the texts, or several, which are joined by a space; None: `text` or `sentence`.
        label: Column of the labels, integers or text; None: `label` or `labels`. In CSV, TSV and JSON its distinct
            values, in ascending order, are the classes.
        groups: Column of a natural group such as an author, numbered in ascending order; None: no groups.
        header: Whether the first line of a CSV or TSV file names the columns; if not, they are "1", "2" and so on.
        tokenizer: Folder of a Hugging Face checkpoint, or a tokenizer.json; None: word pieces are learned from the
            training texts, lower-cased.
        vocabulary: Number of word pieces at most, if they are learned.
        length: Tokens of a text; longer ones are cut, shorter ones filled up.
        samples: So many training samples only, drawn in proportion for every label, those held out for validation
            included; None: all.
        validation: Share of the training texts that is held out, if there is no validation file.
        test: Share of the texts that is held out as the test set, if there is only a train file.
        seed: Of what is held out and drawn.
        hub: Whether `folder` is a repository of the Hugging Face hub ("stanfordnlp/imdb"), downloaded once.

    Raises:
        DataError: A file, a column, a label or the tokeniser is missing or wrong, or a number is out of range.
        MissingExtra: pyarrow, or what the tokeniser or the hub needs, is not installed.
    """
    if hub:
        name = folder.rpartition("/")[2]
        path = from_hub(name, folder)
    else:
        path = found_path(folder)
        name = path.resolve().stem if path.is_file() else path.resolve().name
    corpus = _corpus.read(name, path, text, label, groups, header)
    return from_corpus(name, corpus, tokenizer, vocabulary, length, samples, validation, test, seed)


def found_path(folder: str) -> Path:
    """Return the path of a file or folder; a relative one that does not exist is sought in FLEETFIT_DATA."""
    path = given(folder, "data.folder")
    root = os.environ.get("FLEETFIT_DATA")
    if root and not path.is_absolute() and not path.exists():
        return Path(root).expanduser() / path
    return path


def named(
    name: str,
    facts: Facts,
    repository: str,
    folder: str | None,
    class_names: tuple[str, ...],
    tokenizer: str | None,
    vocabulary: int,
    length: int,
    samples: int | None,
    validation: float,
    seed: int,
    hub: bool,
) -> Data:
    """Return one of the known sets, after a look at whether the folder holds that set.

    Where there are fewer training texts than the set has, its name says so, and with it every message and report.

    Raises:
        DataError: As `text`, or the files are those of another set, or there is no test set.
        MissingExtra: As `text`.
    """
    path = _place(name, folder)
    if (place := folder_of(name, folder, hub, repository, found=lambda *_: _corpus.located(name, path))) != folder:
        path = _place(name, place)
    corpus = _corpus.read(name, path)
    if corpus.classes != facts.classes:
        raise DataError(
            f"{name} has {facts.classes} classes of texts, but the files hold {corpus.classes}: is this another set?"
        )
    if "test" not in corpus.sizes and "validation" not in corpus.sizes:
        raise DataError(f"{name}: there is no test.parquet beside its train file.")
    data = from_corpus(name, corpus, tokenizer, vocabulary, length, samples, validation, 0.0, seed)
    found = corpus.sizes["train"]
    if facts.train is not None and found < facts.train:
        data = dataclasses.replace(data, name=f"{name}-partial-{found}-of-{facts.train}")
    return dataclasses.replace(data, class_names=class_names)


def _place(name: str, folder: str | None) -> Path | None:
    """Return the set's own folder, given that or the one above."""
    path = None if folder is None else given(folder, "data.folder")
    return path / name if path is not None and (path / name).is_dir() else path


def from_corpus(
    name: str,
    corpus: _corpus.Corpus,
    tokenizer: str | None,
    vocabulary: int,
    length: int,
    samples: int | None,
    validation: float,
    test: float,
    seed: int,
) -> Data:
    """Return the texts of the files as a data set; see `text`."""
    sizes, y = corpus.sizes, corpus.y
    strata = y if corpus.groups is None else corpus.groups
    splits = completed(sizes, strata, 0.0, test, seed)
    if samples is not None:
        splits["train"] = drawn(name, splits["train"], y[splits["train"]], samples, seed)
    if not len(splits["validation"]):
        rest = splits["train"]
        splits["train"], splits["validation"] = hold_out(rest, strata[rest], validation, seed)
    tokens = _tokens.encoded(
        name, corpus.files, corpus.marks, corpus.texts, splits["train"], tokenizer, vocabulary, length
    )
    return Data(
        name=name,
        x=torch.from_numpy(tokens.x),
        y=torch.from_numpy(y),
        splits={split: torch.from_numpy(np.sort(indices)) for split, indices in splits.items()},
        classes=corpus.classes,
        groups=None if corpus.groups is None else torch.from_numpy(corpus.groups),
        class_names=corpus.class_names,
        vocabulary=tokens.vocabulary,
        padding=tokens.padding,
        tokenizer=tokens.tokenizer,
    )
