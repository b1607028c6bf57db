"""`fleetfit predict` on new texts: rows, lines and files, of known classes, others or none."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support import Expected, raises, run_verb

import fleetfit as ff
from fleetfit.api.inference import load_samples
from fleetfit.data.files.detect import detect_format
from fleetfit.data.files.text import text as read_texts
from fleetfit.errors import ConfigError, DataError

tokenizers = pytest.importorskip("tokenizers")

WORDS = {"food": "bread soup cook taste", "sport": "goal team match win"}
NEW = ["cook the soup", "our team wins the match", "a taste of bread, then goal after goal"]


def write_rows(path: Path, columns: Sequence[str], *rows: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    folder = tmp_path_factory.mktemp("texts")
    rows = [(f"{word} {word} and {other}", name) for name, words in WORDS.items() for word in words.split()
            for other in words.split()] * 2  # fmt: skip
    data = {"path": str(write_rows(folder / "texts.csv", ["text", "label"], *rows)), "length": 12,
            "partition": {"kind": "iid", "clients": 4}}  # fmt: skip
    model = {"name": "bert", "hidden": 8, "layers": 2, "attention_heads": 2, "intermediate": 8}
    return ff.run({"data": data, "model": model, "rounds": 1}, out=folder / "run")


def test_rows_lines_and_files_are_the_same_texts(trained: ff.Run, tmp_path: Path) -> None:
    """With the tokens of a table with labels, which is read as the training table was."""
    rows = [(text, "food") for text in NEW]
    folder = tmp_path / "all"
    write_rows(folder / "train.csv", ["text", "label"], *rows, ("goal", "sport"))
    write_rows(folder / "test.csv", ["text", "label"], *rows)
    expected = load_samples(trained, str(folder))
    expected_x = expected.batch(expected.split("test"))[0]
    (tmp_path / "files").mkdir()
    for number, text in enumerate(NEW):
        (tmp_path / "files" / f"{number}.txt").write_text(text)
    (tmp_path / "lines.txt").write_text("\n\n".join(NEW) + "\n")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in NEW))
    write_rows(tmp_path / "rows.csv", ["number", "text"], *[(str(n), text) for n, text in enumerate(NEW)])
    write_rows(tmp_path / "empty.csv", ["text", "label"], *[(text, " ") for text in NEW])
    for name in ("files", "lines.txt", "rows.jsonl", "rows.csv", "empty.csv"):
        data = load_samples(trained, str(tmp_path / name))
        assert not data.labeled and torch.equal(data.batch(data.split("test"))[0], expected_x), name
    lines = load_samples(trained, str(tmp_path / "lines.txt"))
    assert any("2" in note for note in lines.notes)  # blank lines are not texts


@pytest.fixture(scope="module", params=["table", "folders", "saved"])
def of_each_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    """A run on texts of a table, of folders of the classes, or of a data set of Hugging Face."""
    folder = tmp_path_factory.mktemp(request.param)
    rows = [(f"{word} {word} and {other}", name) for name, words in WORDS.items() for word in words.split()
            for other in words.split()] * 2  # fmt: skip
    data = folder / "texts"
    if request.param == "table":
        data = write_rows(folder / "texts.csv", ["text", "label"], *rows)
    elif request.param == "folders":
        for number, (text, name) in enumerate(rows):
            (data / name).mkdir(parents=True, exist_ok=True)
            (data / name / f"{number}.txt").write_text(text)
    else:
        datasets = pytest.importorskip("datasets", reason="the extra hub is not installed")
        features = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(WORDS))}
        )
        columns = {"text": [text for text, _ in rows], "label": [list(WORDS).index(name) for _, name in rows]}
        whole = datasets.Dataset.from_dict(columns, features=features)
        datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(str(data))
    model = {"name": "bert", "hidden": 8, "layers": 2, "attention_heads": 2, "intermediate": 8}
    return ff.run(data={"path": str(data), "length": 12, "partition": {"kind": "iid", "clients": 4}}, model=model,
                  rounds=1, out=folder / "run", progress=False)  # fmt: skip


def test_texts_without_labels_in_every_form(of_each_kind: ff.Run, tmp_path: Path) -> None:
    """All are the texts of the list, in its order."""
    datasets = pytest.importorskip("datasets", reason="the extra hub is not installed")
    pandas = pytest.importorskip("pandas")
    expected = of_each_kind.predict(NEW)
    rows = datasets.Dataset.from_dict({"text": NEW})
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "only test"))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "hub" / "data").mkdir(parents=True)
    rows.to_parquet(str(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet"))
    (tmp_path / "hub" / "README.md").write_text("texts")
    (tmp_path / "hub" / "dataset_infos.json").write_text("{}")
    (tmp_path / "files").mkdir()
    for number, text in enumerate(NEW):
        (tmp_path / "files" / f"{number}.txt").write_text(text)
    (tmp_path / "lines.txt").write_text("\n".join(NEW))
    (tmp_path / "LINES.TXT").write_text("\n".join(NEW))
    for number, text in enumerate(NEW):
        for name in (f"notes/{number}.md", f"mixed/inner/{number}{'.md' if number else '.txt'}"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    (tmp_path / "mixed" / "inner" / "files.csv").write_text("file\n0.txt\n1.md\n2.md\n")
    for name in ("test/test.csv", "train/train.csv", "other/new.csv"):
        write_rows(tmp_path / name, ["text"], *[(text,) for text in NEW])
    write_rows(tmp_path / "review.csv", ["review"], *[(text,) for text in NEW])
    frame = pandas.DataFrame({"number": range(3), "text": NEW})
    forms = [frame, frame["text"], frame["text"].to_numpy(), {"text": NEW}, rows,
             *(tmp_path / name for name in ("saved", "only test", "rows.parquet", "hub", "files", "lines.txt",
                                            "LINES.TXT", "notes", "mixed/inner/files.csv", "test",
                                            "train", "other", "review.csv"))]  # fmt: skip
    for form in forms:
        result = of_each_kind.predict(form)
        assert result.truth is None and set(result.labels) <= set(WORDS)
        assert torch.equal(torch.from_numpy(result.probabilities), torch.from_numpy(expected.probabilities)), form
    assert of_each_kind.predict(tmp_path / "files").names == ["0.txt", "1.txt", "2.txt"]


def test_a_markdown_file_is_one_text(trained: ff.Run, tmp_path: Path) -> None:
    (tmp_path / "note.md").write_text("\n".join(NEW))
    one = trained.predict(tmp_path / "note.md")
    assert one.names == ["note.md"]
    np.testing.assert_allclose(one.probabilities, trained.predict([" ".join(NEW)]).probabilities, atol=1e-6)
    run_verb("predict", trained.folder, "--data", tmp_path / "note.md", "--out", tmp_path / "p.csv", code=0)
    with (tmp_path / "p.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["file"], row["prediction"]) == ("note.md", one.labels[0])


def test_a_folder_of_markdown_for_each_class_is_trained_on(tmp_path: Path) -> None:
    for suffix in (".md", ".txt"):
        for name, words in WORDS.items():
            for number, word in enumerate(words.split() * 5):
                (tmp_path / suffix / "texts" / name).mkdir(parents=True, exist_ok=True)
                (tmp_path / suffix / "texts" / name / f"{number}{suffix}").write_text(f"{word} and {number}")
    assert detect_format(str(tmp_path / ".md" / "texts"))["name"] == "text"
    data = [read_texts(str(tmp_path / suffix / "texts")) for suffix in (".md", ".txt")]
    assert torch.equal(data[0].x[:], data[1].x[:]) and data[0].class_names == ("food", "sport")


def test_labels_beside_texts_in_memory(trained: ff.Run) -> None:
    labels = ["food", "sport", "food"]
    for form in ((NEW, labels), (NEW, [0, 1, 0]), {"text": NEW, "label": labels}):
        result = trained.predict(form)
        assert result.truth == labels
        assert trained.evaluate(form)["static"]["full"] == pytest.approx(result.accuracy)
    with raises(DataError, "cars", key=None):
        trained.predict((NEW, ["food", "cars", "food"]))
    with raises(DataError, 3, 2, key="y"):
        trained.predict((NEW, labels[:2]))


def test_predictions_name_rows_and_files(trained: ff.Run, tmp_path: Path) -> None:
    out = tmp_path / "predictions.csv"
    (tmp_path / "mail" / "today").mkdir(parents=True)
    (tmp_path / "mail" / "today" / "a.txt").write_text(NEW[0])
    (tmp_path / "mail" / "b.txt").write_text(NEW[1])
    for path, files in (("mail", ["b.txt", "today/a.txt"]), ("rows.csv", None)):
        write_rows(tmp_path / "rows.csv", ["text"], *[(text,) for text in NEW])
        run_verb("predict", trained.folder, "--data", tmp_path / path, "--out", out, code=0)
        with out.open() as file:
            rows = list(csv.DictReader(file))
        assert all(row["prediction"] in WORDS and "label" not in row for row in rows)
        assert files is None or [row["file"] for row in rows] == files
        assert [row["sample"] for row in rows] == [str(number) for number in range(len(rows))]


def test_labels_are_classes_of_the_run(trained: ff.Run, tmp_path: Path) -> None:
    """Of one class, of numbers, and of folders: a table by itself would call its only class 0."""
    write_rows(tmp_path / "sport.csv", ["label", "text"], ("sport", NEW[1]), ("sport", "goal"))
    write_rows(tmp_path / "numbers.csv", ["label", "text"], ("1", NEW[1]), ("0", NEW[0]))
    (tmp_path / "folders" / "sport").mkdir(parents=True)
    (tmp_path / "folders" / "sport" / "1.txt").write_text(NEW[1])
    for name, labels in (("sport.csv", [1, 1]), ("numbers.csv", [1, 0]), ("folders", [1])):
        data = load_samples(trained, str(tmp_path / name))
        assert data.labeled and data.y.tolist() == labels, name
    assert trained.evaluate(data=str(tmp_path / "sport.csv"))["static"]["samples"] == 2
    halves = load_samples(trained, str(tmp_path / "sport.csv"), halves=True)
    assert [len(halves.split(split)) for split in ("train", "validation", "test")] == [0, 1, 1]


def test_a_text_in_place_of_a_list_is_shown_as_one(trained: ff.Run) -> None:
    with raises(ConfigError, '["a lovely film"]', key="data"):
        trained.predict("a lovely film")
    assert len(trained.predict(["a lovely film"])) == 1


def test_folders_that_are_no_classes_give_no_labels(trained: ff.Run, tmp_path: Path) -> None:
    for name in ("sport", "politics"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text(NEW[1])
    data = load_samples(trained, str(tmp_path))
    assert not data.labeled and len(data.y) == 2
    assert any("politics" in note and "food" in note for note in data.notes)
    with raises(ConfigError, key="data"):
        trained.evaluate(data=str(tmp_path))


@pytest.mark.parametrize(
    ("columns", "rows", "expected"),
    [
        (["text", "label"], [(NEW[0], "food"), (NEW[1], "cars")], Expected("cars", "sport", row=1, column="label")),
        (["id", "review"], [("1", NEW[0])], Expected("review", "text", column="text")),
        (["text"], [], Expected("rows.csv")),
    ],
    ids=["another class", "no text", "no rows"],
)
def test_wrong_tables_are_refused(
    trained: ff.Run, tmp_path: Path, columns: list[str], rows: list[tuple[str, ...]], expected: Expected
) -> None:
    path = write_rows(tmp_path / "rows.csv", columns, *rows)
    with raises(DataError, expected, path=path):
        load_samples(trained, str(path))


def test_an_exported_model_has_the_tokenizer(trained: ff.Run, tmp_path: Path) -> None:
    """`tokenizers` alone makes the ids that the model was trained on, cut and padded to their length."""
    trained.export(tmp_path / "device", 1, forms=())
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "device" / "tokenizer.json"))
    (tmp_path / "lines.txt").write_text("\n".join([*NEW, " ".join(NEW * 5)]))
    expected = load_samples(trained, str(tmp_path / "lines.txt")).x
    ids = [encoding.ids for encoding in tokenizer.encode_batch([*NEW, " ".join(NEW * 5)])]
    assert torch.equal(torch.tensor(ids), torch.as_tensor(expected)) and {len(row) for row in ids} == {12}
