"""Labeled texts: layouts, tokens against transformers, word pieces against a plain loop, the cache, named sets."""

import csv
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import Expected, raises

import fleetfit as ff
from fleetfit.api.inference import load_samples
from fleetfit.config import load_experiment
from fleetfit.data import Data, partition
from fleetfit.data.files import text as text_module, tokens
from fleetfit.data.files.detect import detect_format
from fleetfit.data.files.text import read_rows, text
from fleetfit.data.files.tokens import learn_word_pieces
from fleetfit.data.sets.short_texts import ag_news, sst2
from fleetfit.data.transform import Transform
from fleetfit.errors import DataError, MissingExtra
from fleetfit.factories import call_factory

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
tokenizers = pytest.importorskip("tokenizers")

GOOD = ["a lovely film", "lovely, lovely acting", "films that love", "what a lovely day", "love it", "lovely and fine"]
BAD = ["a dull film", "dull, dull acting", "films that bore me", "what a dull day", "bore me", "dull and gray"]
TEXTS = [t for pair in zip(GOOD, BAD, strict=True) for t in pair]
LABELS = ["good", "bad"] * 6
TEST = (["a fine film", "boring"], ["good", "bad"])


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), path)
    return path


def write_csv(path: Path, rows: list[list[str]], tab: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(
            file, delimiter="\t" if tab else ",", quoting=csv.QUOTE_NONE if tab else csv.QUOTE_MINIMAL
        ).writerows(rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_parquet(tmp_path / "set" / "train.parquet", text=TEXTS, label=LABELS)
    write_parquet(tmp_path / "set" / "test.parquet", text=TEST[0], label=TEST[1])
    return tmp_path / "set"


def load(path: Path, **parameters: Any) -> Data:
    return text(str(path), **{"vocabulary": 60, "length": 8, "validation": 0.0} | parameters)


def load_tokenizer(cache: Path) -> Any:
    (file,) = cache.glob("*/tokenizer.json")
    return tokenizers.Tokenizer.from_file(str(file))


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_header_without_csv_file_is_a_note(folder: Path, suffix: str) -> None:
    write_csv(folder.parent / "plain" / "train.csv", [list(row) for row in zip(TEXTS, LABELS, strict=True)])
    place, names_of = (folder, ("text", "label")) if suffix == "parquet" else (folder.parent / "plain", ("1", "2"))
    keys = {"folder": str(place), "header": False, "text": names_of[0], "label": names_of[1], "vocabulary": 60}
    notes = [note for note in call_factory(text, "text", "[data]", keys).notes if "header" in note]
    assert len(notes) == (suffix == "parquet") and all("train.parquet" in note for note in notes)


def test_given_label_decides_the_format(tmp_path: Path) -> None:
    texts = [f"{t} and so on, number {i}" for i, t in enumerate(TEXTS)]
    columns = {"sentiment": LABELS, "stars": [str(i % 5) for i in range(12)], "text": texts}
    write_csv(tmp_path / "reviews.csv", [list(columns), *map(list, zip(*columns.values(), strict=True))])
    write_parquet(tmp_path / "reviews.parquet", **columns)
    for place in (str(tmp_path / "reviews.csv"), str(tmp_path / "reviews.parquet")):
        data = load_experiment({"data": {"path": place, "label": "sentiment"}}).data
        assert (data.name, data.settings["text"], data.settings["label"]) == ("text", "text", "sentiment")
        assert load(Path(place), text="text", label="sentiment").class_names == ("bad", "good")
        dropped = load_experiment({"data": {"path": place, "label": "sentiment", "drop": ["text"]}}).data
        assert (dropped.name, dropped.settings["drop"]) == ("table", ["text"])
        assert detect_format(place)["name"] == detect_format(place, {"label": "nobody's"})["name"] == "text"
    section = {"path": str(tmp_path / "reviews.csv"), "label": "sentiment", "partition": {"kind": "iid", "clients": 2}}
    keys: dict[str, Any] = {"method": "fedavg", "fleet": {"groups": [{"budget": 1.0}]}, "evaluate": {"every": 0}}
    model = {"name": "bert", "hidden": 8, "layers": 2, "attention_heads": 2, "intermediate": 8}
    run = ff.run(data=section, model=model, rounds=1, **keys, out=tmp_path / "run")
    assert load_samples(run, str(tmp_path / "reviews.parquet")).class_names == ("bad", "good")


def test_given_label_of_a_saved_dataset(tmp_path: Path) -> None:
    columns = {"label": TEXTS, "sentiment": LABELS}
    pytest.importorskip("datasets").Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    settings = {"label": "sentiment"}
    assert detect_format(str(tmp_path / "saved"), settings) == {
        **detect_format(str(tmp_path / "saved")),
        **settings,
        "text": "label",
    }
    assert detect_format(str(tmp_path / "saved"), {**settings, "drop": ["label"]})["name"] == "table"


# ---- layouts -----------------------------------------------------------------------------------------------------


def as_csv(root: Path) -> None:
    for split, (texts, labels) in {"train": (TEXTS, LABELS), "test": TEST}.items():
        write_csv(root / f"{split}.csv", [["text", "label"], *map(list, zip(texts, labels, strict=True))])


def as_tsv(root: Path) -> None:
    for split, (texts, labels) in {"train": (TEXTS, LABELS), "test": TEST}.items():
        rows = [["label", "sentence"], *map(list, zip(labels, texts, strict=True))]
        write_csv(root / "data" / f"{split}.tsv", rows, tab=True)


def as_json_lines(root: Path) -> None:
    for split, (texts, labels) in {"train": (TEXTS, LABELS), "test": TEST}.items():
        lines = [json.dumps({"label": k, "text": t}) for t, k in zip(texts, labels, strict=True)]
        root.mkdir(exist_ok=True)
        (root / f"{split}.jsonl").write_text("\n".join(lines) + "\n\n")


def as_json(root: Path) -> None:
    for split, (texts, labels) in {"train": (TEXTS, LABELS), "test": TEST}.items():
        root.mkdir(exist_ok=True)
        rows = [{"text": t, "label": k} for t, k in zip(texts, labels, strict=True)]
        (root / f"{split}.json").write_text(json.dumps(rows))


def as_folders(root: Path) -> None:
    for split, (texts, labels) in {"train": (TEXTS, LABELS), "test": TEST}.items():
        for i, (content, label) in enumerate(zip(texts, labels, strict=True)):
            place = root / split / label / f"{i:02}.txt"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)
    (root / "train" / "unsup").mkdir()
    (root / "train" / "unsup" / "0.txt").write_text("nobody knows")


@pytest.mark.parametrize("layout", [as_csv, as_tsv, as_json_lines, as_json, as_folders])
def test_every_layout_gives_the_same(folder: Path, tmp_path: Path, layout: Callable[[Path], None]) -> None:
    layout(tmp_path / "other")
    expected, data = load(folder), load(tmp_path / "other")
    assert data.name == "other" and data.classes == 2 and data.class_names == ("bad", "good")
    assert data.vocabulary == expected.vocabulary and data.padding == expected.padding == 0
    order = slice(None)
    if layout is as_folders:  # sorted by class there
        order = [*range(1, 12, 2), *range(0, 12, 2), 13, 12]  # type: ignore[assignment]
    assert torch.equal(data.x, expected.x[order]) and torch.equal(data.y, expected.y[order])
    assert data.split("test").tolist() == [12, 13] and len(data.split("train")) == 12


def test_tsv_has_no_quotes_and_csv_has(tmp_path: Path) -> None:
    write_csv(tmp_path / "a" / "train.csv", [["text", "label"], ['he said "no",\nthen left', "x"], ["yes", "y"]])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train.tsv").write_text('text\tlabel\n"no\tx\nyes\ty\n')
    quoted = read_rows("a", tmp_path / "a")
    assert quoted.x.read() == ['he said "no",\nthen left', "yes"]
    assert read_rows("b", tmp_path / "b").x.read() == ['"no', "yes"]


def test_columns_may_be_named_numbered_and_joined(tmp_path: Path) -> None:
    """As AG News is published: no header, classes 1 to 4, a title and a description."""
    rows = [["3", "Oil up", "It rose."], ["4", "Mars", "A rover."], ["1", "Vote", "They did."], ["2", "Goal", "One."]]
    write_csv(tmp_path / "train.csv", rows)
    samples = read_rows("n", tmp_path, ("2", "3"), "1", None, header=False)
    assert samples.x.read() == ["Oil up It rose.", "Mars A rover.", "Vote They did.", "Goal One."]
    assert samples.y.tolist() == [2, 3, 0, 1] and samples.class_names == ("1", "2", "3", "4")
    write_csv(tmp_path / "other.csv", [["kind", "says"], ["b", "x"], ["a", "y"]])
    data = text(str(tmp_path / "other.csv"), "says", "kind", vocabulary=10, length=4, test=0.0, validation=0.0)
    assert data.name == "other" and data.y.tolist() == [1, 0]


def test_numbers_are_classes_in_numeric_order(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [["text", "label"], *([f"t{i}", str(i)] for i in (10, 9, 2))])
    assert read_rows("n", tmp_path).class_names == ("2", "9", "10")


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_digits_with_leading_zeros_are_distinct(suffix: str, tmp_path: Path) -> None:
    labels, authors = ["007", "7", "42"] * 4, ["01", "1", "001", "10"] * 3
    path = tmp_path / f"t.{suffix}"
    if suffix == "jsonl":
        rows = zip(TEXTS, labels, authors, strict=True)
        path.write_text("\n".join(json.dumps({"text": t, "label": k, "author": a}) for t, k, a in rows))
    else:
        rows_of_cells = [["text", "label", "author"], *map(list, zip(TEXTS, labels, authors, strict=True))]
        write_csv(path, [[cell.replace(",", "") for cell in row] for row in rows_of_cells], tab=suffix == "tsv")
    corpus = read_rows("t", path, groups="author")
    assert [corpus.class_names[code] for code in corpus.y] == labels
    assert corpus.groups is not None and corpus.groups.tolist() == [["001", "01", "1", "10"].index(a) for a in authors]


def test_missing_splits_are_held_out_in_proportion(tmp_path: Path) -> None:
    labels = ["a"] * 40 + ["b"] * 20
    path = write_parquet(tmp_path / "train.parquet", text=[f"w{i}" for i in range(60)], label=labels)
    data = load(path, test=0.2, validation=0.25)
    assert [len(data.split(s)) for s in ("train", "validation", "test")] == [36, 12, 12]
    for split, share in (("test", [8, 4]), ("validation", [8, 4]), ("train", [24, 12])):
        assert torch.bincount(data.y[data.split(split)]).tolist() == share
    assert data.split("test").tolist() != load(path, test=0.2, validation=0.25, seed=1).split("test").tolist()


def test_samples_are_drawn_by_class_and_only_from_training(folder: Path) -> None:
    data = load(folder, samples=6, validation=0.34)
    assert len(data.split("train")) == 4 and len(data.split("validation")) == 2
    assert torch.bincount(data.y[torch.cat([data.split("train"), data.split("validation")])]).tolist() == [3, 3]
    assert data.split("test").tolist() == [12, 13]


def test_groups_are_a_natural_partition(tmp_path: Path) -> None:
    who = ["zoe", "amy", "bob"] * 4
    path = write_parquet(tmp_path / "train.parquet", text=TEXTS, label=LABELS, author=who)
    data = load(path, groups="author", test=0.25)
    assert data.groups is not None and data.groups.tolist() == [2, 0, 1] * 4
    parts = partition(data, "natural", None, 0)
    assert [len(p["train"]) for p in parts] == [3, 3, 3] and [len(p["test"]) for p in parts] == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "parameters", "expected"),
    [
        (lambda f: None, {"text": "body"}, Expected('"body"', path="train.parquet")),
        (lambda f: None, {"label": "kind"}, Expected('"kind"', path="train.parquet")),
        (lambda f: None, {"length": 2}, Expected(3, key="length")),
        (lambda f: None, {"vocabulary": 7}, Expected(8, 7, key="vocabulary")),
        (lambda f: None, {"samples": 13}, Expected("1..12", key="samples")),
        (lambda f: None, {"tokenizer": "nowhere"}, Expected('tokenizer = "nowhere"', "tokenizer.json", path="nowhere")),
        (lambda f: (f / "train.parquet").unlink(), {}, Expected("train.parquet")),
        (
            lambda f: write_parquet(f / "train.parquet", text=[1], label=["a"]),
            {},
            Expected("int64", column="text", path="train.parquet"),
        ),
        (
            lambda f: write_parquet(f / "train.parquet", text=["x", None], label=["a", "b"]),
            {},
            Expected(row=1, column="text", path="train.parquet"),
        ),
    ],
)
def test_wrong_parameters(folder: Path, make: Callable[[Path], object], parameters: Any, expected: Expected) -> None:
    make(folder)
    with raises(DataError, expected):
        load(folder, **parameters)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("train.csv", b"text,label\nonly one\n", Expected(2, 1, path="train.csv")),
        ("train.csv", b"", Expected(path="train.csv")),
        ("train.csv", b"a text,1\n", Expected("header = false", path="train.csv")),
        ("train.csv", b"text,label\nx,\ny,\n", Expected(path="train.csv")),
        (
            "train.jsonl",
            b'{"text": "x"}\n{"text": "y", "label": 1}\n{"text": 1.5, "label": 0}\n',
            Expected("1.5", row=2, column="text", path="train.jsonl"),
        ),
        ("train.csv", b"text,label\n\xff,1\n", Expected("0xff", row=1, column="text", path="train.csv")),
        ("train.jsonl", b'{"text": "x", "label": 1}\n{"text"\n', Expected(row=2, path="train.jsonl")),
        ("train.jsonl", b'{"text": "x", "label": 1}\n3\n', Expected(row=1, path="train.jsonl")),
        (
            "train.jsonl",
            b'{"text": "x", "label": 1}\n{"label": 0}\n',
            Expected(row=1, column="text", path="train.jsonl"),
        ),
        ("train.json", b"[1", Expected(row=1, path="train.json")),
    ],
)
def test_malformed_files(tmp_path: Path, name: str, content: bytes, expected: Expected) -> None:
    (tmp_path / name).write_bytes(content)
    with raises(DataError, expected):
        load(tmp_path)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_rows_without_a_label_are_left_out(tmp_path: Path, suffix: str) -> None:
    texts, labels = [*TEXTS[:7], "x", "y", *TEXTS[7:]], [*LABELS[:7], "", " ", *LABELS[7:]]
    rows = [{"text": one, "label": label} for one, label in zip(texts, labels, strict=True)]
    for name, some in (("with", rows), ("without", [row for row in rows if row["label"].strip()])):
        path = tmp_path / name / f"train{suffix}"
        if suffix == ".csv":
            write_csv(path, [["text", "label"], *([row["text"], row["label"]] for row in some)])
        else:
            path.parent.mkdir()
            path.write_text("".join(json.dumps(row) + "\n" for row in some))
    data, expected = load(tmp_path / "with"), load(tmp_path / "without")
    assert data.x.tolist() == expected.x.tolist() and torch.equal(data.y, expected.y)
    assert len(data.notes) == len(expected.notes) + 1


def test_rows_of_a_test_set_without_a_label_are_left_out(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [["text", "label"], *map(list, zip(TEXTS, LABELS, strict=True))])
    write_csv(tmp_path / "test.csv", [["text", "label"], ["a fine film", "good"], ["boring", ""]])
    assert len(load(tmp_path).split("test")) == 1
    write_csv(tmp_path / "test.csv", [["text", "label"], ["a fine film", ""], ["boring", ""]])
    assert len(load(tmp_path, test=0.5).x) == 12


def test_the_case_of_a_suffix_makes_no_difference(tmp_path: Path) -> None:
    rows = [["text", "label"], *([f"{text} number {i}", LABELS[i]] for i, text in enumerate(TEXTS))]
    write_csv(tmp_path / "reviews.csv", rows)
    write_csv(tmp_path / "REVIEWS.TSV", rows, tab=True)
    expected, data = load(tmp_path / "reviews.csv"), load(tmp_path / "REVIEWS.TSV")
    others = Transform.fit(data, "text", {}).apply(tmp_path / "REVIEWS.TSV")
    assert torch.equal(data.x, expected.x) and torch.equal(others.x, data.x) and others.labeled  # type: ignore


def test_wrong_class_folders(tmp_path: Path) -> None:
    as_folders(tmp_path)
    with raises(DataError, key="groups"):
        load(tmp_path, groups="who")
    (tmp_path / "test" / "new").mkdir()
    (tmp_path / "test" / "new" / "0.txt").write_text("x")
    with raises(DataError, path="new"):
        load(tmp_path)
    (tmp_path / "rubbish").mkdir()
    with raises(DataError, path="0.txt"):
        text(str(tmp_path / "test" / "new" / "0.txt"))


# ---- tokens ------------------------------------------------------------------------------------------------------


def test_special_tokens_truncation_and_padding(folder: Path, tmp_path: Path) -> None:
    data = load(folder, length=5, vocabulary=200)
    tokenizer = load_tokenizer(tmp_path / "cache")
    assert [tokenizer.token_to_id(t) for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")] == [0, 1, 2, 3]
    assert data.vocabulary == tokenizer.get_vocab_size() and data.padding == 0
    assert (data.x[:, 0] == 2).all() and (data.x == 3).sum() == len(data.x)
    assert [tokenizer.id_to_token(i) for i in data.x[9].tolist()] == ["[CLS]", "bore", "me", "[SEP]", "[PAD]"]
    assert [tokenizer.id_to_token(i) for i in data.x[2].tolist()] == ["[CLS]", "lovely", ",", "lovely", "[SEP]"]
    x, _ = data.batch(torch.tensor([9]))
    assert x.shape == (1, 4)


def test_learned_from_the_training_split_only(tmp_path: Path) -> None:
    texts = ["common words here"] * 30
    path = write_parquet(tmp_path / "s" / "train.parquet", text=texts, label=[0, 1] * 15)
    write_parquet(tmp_path / "s" / "test.parquet", text=["zyzzyva zyzzyva"] * 2, label=[0, 1])
    data = load(path.parent, vocabulary=100)
    vocabulary = load_tokenizer(tmp_path / "cache").get_vocab()
    assert "common" in vocabulary and not any("z" in piece for piece in vocabulary)
    assert data.x[30, :4].tolist() == [2, 1, 1, 3]


def test_equals_transformers(folder: Path, tmp_path: Path) -> None:
    """A checkpoint with vocab.txt only, one with tokenizer.json, and the file itself: as `transformers` encodes."""
    transformers = pytest.importorskip("transformers")
    checkpoint = tmp_path / "checkpoint"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "lovely", "film", "##s", "a", ",", "dull", "love", "that"]
    checkpoint.mkdir()
    (checkpoint / "vocab.txt").write_text("\n".join(words))
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "bert"}))
    reference = transformers.AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    expected = reference(TEXTS + TEST[0], truncation=True, max_length=6, padding="max_length")["input_ids"]

    by_words = load(folder, tokenizer=str(checkpoint), length=6)
    assert by_words.x.tolist() == expected and by_words.vocabulary == 13 and by_words.padding == 0

    saved = tmp_path / "saved"
    reference.save_pretrained(saved)
    assert load(folder, tokenizer=str(saved), length=6).x.tolist() == expected
    assert load(folder, tokenizer=str(saved / "tokenizer.json"), length=6).x.tolist() == expected


def test_copies_of_a_tokenizer_share_tokens(folder: Path, tmp_path: Path) -> None:
    """Each run on texts has a copy of its word pieces; another content has other tokens."""
    learned = Path(load(folder).tokenizer)
    copies = [tmp_path / name / "tokenizer.json" for name in ("one", "two", "other")]
    for copy in copies:
        copy.parent.mkdir()
        shutil.copy(learned, copy)
    copies[-1].write_text(learned.read_text().replace('"lowercase":true', '"lowercase":false').replace("lovely", "x"))
    one, two, other = (load(folder, tokenizer=str(copy)).tokenizer for copy in copies)
    assert one == two != other


def test_padding_of_other_tokenizers(folder: Path, tmp_path: Path) -> None:
    model = tokenizers.models.WordLevel({"<unk>": 0, "lovely": 1, "film": 2, "<fill>": 3}, unk_token="<unk>")
    other = tokenizers.Tokenizer(model)
    other.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    place = tmp_path / "theirs"
    place.mkdir()
    other.save(str(place / "tokenizer.json"))
    with raises(DataError, "pad_token", path="theirs"):
        load(folder, tokenizer=str(place))
    (place / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": "<fill>"}}))
    data = load(folder, tokenizer=str(place))
    assert data.padding == 3 and data.x[0].tolist() == [0, 1, 2, 3, 3, 3, 3, 3]
    other.enable_padding(pad_id=3, pad_token="<fill>", length=20)
    other.save(str(tmp_path / "alone.json"))
    assert torch.equal(load(folder, tokenizer=str(tmp_path / "alone.json")).x, data.x)
    (place / "tokenizer.json").write_text("{}")
    with raises(DataError, path="theirs"):
        load(folder, tokenizer=str(place))


def merge_by_loops(words: dict[str, int], size: int) -> list[str]:
    """Count all pairs anew after each merge."""
    split = {word: [word[0], *("##" + c for c in word[1:])] for word in words}
    singles: Counter[str] = Counter()
    for word, count in words.items():
        for piece in split[word]:
            singles[piece] += count
    vocabulary = sorted(singles, key=lambda piece: (-singles[piece], piece))[: size // 2]
    split = {word: pieces for word, pieces in split.items() if set(pieces) <= set(vocabulary)}
    while len(set(vocabulary)) < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in split.items():
            for a, b in itertools.pairwise(pieces):
                pairs[a, b] += words[word]
        if not pairs or max(pairs.values()) < 2:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merged = best[0] + best[1].removeprefix("##")
        vocabulary.append(merged)
        for word, pieces in split.items():
            out: list[str] = []
            for piece in pieces:
                if out and (out[-1], piece) == best:
                    out[-1] = merged
                else:
                    out.append(piece)
            split[word] = out
    return list(dict.fromkeys(vocabulary))


@settings(deadline=None, max_examples=150)
@given(
    words=st.dictionaries(st.text("abc", min_size=1, max_size=9), st.integers(1, 5), max_size=12),
    size=st.integers(2, 40),
)
def test_word_pieces_by_loops(words: dict[str, int], size: int) -> None:
    assert learn_word_pieces(words, size) == merge_by_loops(words, size)


def test_the_same_in_every_process(tmp_path: Path) -> None:
    """Another process with a cache of its own, and so with nothing to share, makes the same tokenizer and tokens."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(300)]
    texts = [" ".join(rng.choice(words, 12)) for _ in range(200)]
    path = write_parquet(tmp_path / "s" / "train.parquet", text=texts, label=[0, 1] * 100).parent
    program = (
        "import hashlib, sys; from pathlib import Path; from fleetfit.data.files.text import text\n"
        "data = text(sys.argv[1], vocabulary=150, length=16)\n"
        "file = next(Path(sys.argv[2]).glob('*/tokenizer.json'))\n"
        "print(hashlib.sha256(data.x.numpy().tobytes() + file.read_bytes()).hexdigest())"
    )
    cache = tmp_path / "another cache"
    environment = os.environ | {"PYTHONHASHSEED": "1", "FLEETFIT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(path), str(cache)]
    digest = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    here = text(str(path), vocabulary=150, length=16).x.numpy().tobytes()
    (file,) = (tmp_path / "cache").glob("*/tokenizer.json")
    assert digest.strip() == hashlib.sha256(here + file.read_bytes()).hexdigest()


# ---- the cache ---------------------------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever texts are encoded."""
    calls: list[int] = []
    original = tokens.encode

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(tokens, "encode", counted)
    return calls


def test_cached_tokens_are_mapped(folder: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(folder)
    monkeypatch.setattr(text_module, "_join_columns", lambda *_: pytest.fail("the texts are read again"))
    second = load(folder)
    assert torch.equal(first.x, second.x) and (first.vocabulary, first.padding) == (second.vocabulary, second.padding)
    assert len(encoded) == 1
    second.x.fill_(0)
    assert torch.equal(load(folder).x, first.x)


def test_whatever_decides_about_tokens_encodes_again(folder: Path, encoded: list[int], tmp_path: Path) -> None:
    load(folder)
    for parameters in ({"length": 9}, {"vocabulary": 50}, {"validation": 0.5}, {"samples": 8}):
        before = len(encoded)
        load(folder, **parameters)
        assert len(encoded) == before + 1, parameters
    stamp = (folder / "test.parquet").stat()
    os.utime(folder / "test.parquet", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    before = len(encoded)
    load(folder)
    assert len(encoded) == before + 1
    (place,) = {p.parent for p in (tmp_path / "cache").glob("*/tokens.npy") if np.load(p).shape[1] == 9}
    for seed in (1, 2):  # with a tokenizer that is given, nothing that is drawn matters
        load(folder, tokenizer=str(place / "tokenizer.json"), seed=seed, validation=0.3)
    assert len(encoded) == before + 2


def test_rows_left_out_for_another_label_have_tokens_of_their_own(tmp_path: Path) -> None:
    rows = [[text, "" if i == 2 else "ab"[i % 2], "" if i == 9 else "cd"[i % 2]] for i, text in enumerate(TEXTS)]
    write_csv(tmp_path / "train.csv", [["text", "mood", "topic"], *rows])
    learned = load(tmp_path, label="mood").tokenizer
    first = load(tmp_path, label="mood", tokenizer=learned)
    data = load(tmp_path, label="topic", tokenizer=learned)
    write_csv(tmp_path / "train.csv", [["text", "topic"], *(row[::2] for row in rows)])
    expected = load(tmp_path, label="topic", tokenizer=learned)
    assert torch.equal(data.x, expected.x) and not torch.equal(data.x, first.x)  # type: ignore[arg-type]


@pytest.mark.parametrize("damaged", ["tokens.npy", "tokens.json"])
@pytest.mark.parametrize("content", [b"", b"rubbish"])
def test_damaged_cache_is_rebuilt(
    folder: Path, encoded: list[int], tmp_path: Path, damaged: str, content: bytes
) -> None:
    expected = load(folder).x.clone()
    (file,) = (tmp_path / "cache").glob(f"*/{damaged}")
    file.unlink()
    file.write_bytes(content)
    assert torch.equal(load(folder).x, expected)
    assert torch.equal(load(folder).x, expected)
    assert len(encoded) == 2


def test_missing_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with raises(MissingExtra, extra="text"):
        load(folder)


# ---- named sets --------------------------------------------------------------------------------------------------


def test_ag_news_says_where_it_is_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "ag_news" / "train.parquet", text=TEXTS, label=[0, 1, 2, 3] * 3)
    write_parquet(tmp_path / "ag_news" / "test.parquet", text=TEXTS[:4], label=[0, 1, 2, 3])
    data = ag_news(str(tmp_path), length=8, vocabulary=50)
    assert data.name == "ag_news-partial-12-of-120000"
    assert data.class_names == ("World", "Sports", "Business", "Sci/Tech") and data.classes == 4
    assert torch.equal(ag_news(str(tmp_path / "ag_news"), length=8, vocabulary=50).x, data.x)
    monkeypatch.setenv("FLEETFIT_DATA", str(tmp_path))
    assert torch.equal(ag_news(length=8, vocabulary=50).x, data.x)
    assert text("ag_news", length=8, vocabulary=50).name == "ag_news"
    with raises(DataError, "sst2", 2, 4):
        sst2(str(tmp_path / "ag_news"))
    (tmp_path / "ag_news" / "test.parquet").unlink()
    with raises(DataError, "ag_news", "test.parquet"):
        ag_news()


def test_sst2_whose_test_labels_are_withheld(tmp_path: Path) -> None:
    """As GLUE and the hub have it: the validation sentences become the test set."""
    write_parquet(tmp_path / "train.parquet", sentence=TEXTS, label=[1, 0] * 6, idx=list(range(12)))
    write_parquet(tmp_path / "validation.parquet", sentence=TEXTS[:4], label=[1, 0] * 2)
    write_parquet(tmp_path / "test.parquet", sentence=TEXTS[:6], label=[-1] * 6)
    data = sst2(str(tmp_path), length=8, vocabulary=50, validation=0.5)
    assert [len(data.split(s)) for s in ("train", "validation", "test")] == [6, 6, 4]
    assert data.split("test").tolist() == [12, 13, 14, 15] and data.class_names == ("negative", "positive")
    write_parquet(tmp_path / "test.parquet", sentence=TEXTS[:6], label=[1, 0] * 3)
    data = sst2(str(tmp_path), length=8, vocabulary=50, validation=0.5)
    assert [len(data.split(s)) for s in ("train", "validation", "test")] == [12, 4, 6]
    write_parquet(tmp_path / "test.parquet", sentence=TEXTS[:6], label=[-1] * 5 + [0])
    with raises(DataError, -1, row=0, path="test.parquet"):
        sst2(str(tmp_path))


def test_from_the_hub_when_asked(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    requests = []

    def load_dataset(repository: str, config: str | None, revision: str | None = None) -> Any:
        requests.append(repository)
        rows = datasets.Dataset.from_dict({"sentence": TEXTS, "label": [1, 0] * 6})
        return {"train": rows, "validation": rows.select(range(4))}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with raises(DataError, "sst2", "hub = true", key="hub"):
        sst2()
    data = sst2(hub=True, length=8, vocabulary=50)
    assert len(data.split("test")) == 4 and data.name == "sst2-partial-12-of-67349"
    assert load(Path("somebody/reviews"), hub=True).name == "reviews"
    assert requests == ["stanfordnlp/sst2", "somebody/reviews"]
