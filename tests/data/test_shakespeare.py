"""Next-token data: windows against a plain loop, roles, LEAF's JSON, the hub's rows, plain text files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import Expected, raises

from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import build_partition
from fleetfit.data import Data, partition
from fleetfit.data.files.leaf import find_leaf_files, read_leaf_users
from fleetfit.data.files.plain_text import PRINTABLE, Vocabulary, build_vocabulary, cut_windows, plain_text, split_words
from fleetfit.data.sets.shakespeare import FACTS, join_windows, shakespeare, split_role
from fleetfit.errors import DataError

SPLITS = ("train", "validation", "test")
TOKEN = {character: number for number, character in enumerate(PRINTABLE, 2)}
LETTER = {number: character for character, number in TOKEN.items()}


def decode_row(row: torch.Tensor) -> str:
    """What a row of tokens says; padding and what is not scored are left out."""
    return "".join(LETTER.get(int(token), "") for token in row)


def write_roles(path: Path, **columns: list[Any]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), path)


# ---- windows -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(tokens=st.lists(st.integers(1, 5), max_size=30), length=st.integers(1, 9))
def test_every_token_is_predicted_once(tokens: list[int], length: int) -> None:
    """By a loop over positions: pair p lies in window p // L at place p % L."""
    x, y = cut_windows(torch.tensor(tokens, dtype=torch.int64).numpy(), length)
    pairs = max(0, len(tokens) - 1)
    assert x.shape == y.shape == (-(-pairs // length), length)
    for place in range(x.size):
        row, column = divmod(place, length)
        if place < pairs:
            following = tokens[place + 1]
            assert (x[row, column], y[row, column]) == (tokens[place], -100 if following == 1 else following)
        else:
            assert (x[row, column], y[row, column]) == (0, -100)


@settings(deadline=None)
@given(tokens=st.lists(st.integers(1, 5), min_size=2, max_size=30), length=st.integers(1, 9))
def test_leaf_s_way_scores_one_token_a_window(tokens: list[int], length: int) -> None:
    x, y = cut_windows(torch.tensor(tokens, dtype=torch.int64).numpy(), length, "last")
    if len(tokens) <= length:
        assert x.tolist() == [tokens[:-1] + [0] * (length - len(tokens) + 1)]
        scored = {len(tokens) - 2: tokens[-1]}
        assert y.tolist() == [[scored.get(i, 1) if scored.get(i, 1) != 1 else -100 for i in range(length)]]
        return
    assert len(x) == len(tokens) - length
    for start in range(len(x)):
        following = tokens[start + length]
        assert x[start].tolist() == tokens[start : start + length]
        assert y[start].tolist() == [-100] * (length - 1) + [-100 if following == 1 else following]


@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_characters_have_fixed_tokens(text: str) -> None:
    (tokens,) = Vocabulary("characters", PRINTABLE).encode([text])
    assert tokens.tolist() == [TOKEN.get(character, 1) for character in text]
    assert len(Vocabulary("characters", PRINTABLE)) == 99 == FACTS.classes


def test_most_frequent_first_then_by_code_point() -> None:
    words = build_vocabulary("words", ["To be, or not to be:", "be not"], 6)
    assert words.known == ("be", "not", "to", ",")
    assert [t.tolist() for t in words.encode(["Be not what", ""])] == [[2, 3, 1], []]
    assert build_vocabulary("characters", ["abba", "ca"], None).known == ("a", "b", "c")
    with raises(DataError, 3, key="vocabulary"):
        build_vocabulary("words", ["a"], 2)


def test_split_words() -> None:
    assert split_words("'Tis the king's,\nO Romeo!") == ["'", "tis", "the", "king's", ",", "\n", "o", "romeo", "!"]


# ---- roles -------------------------------------------------------------------------------------------------------

SAID = {
    "h": "To be, or not to be,\nthat is the question:",
    "k": "So much for him.\nNow for ourself\nand this",
    "o": "x\ny",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_roles(tmp_path / "shakespeare" / "train.parquet", client_id=["k", "h", "o"], text=[SAID[r] for r in "kho"])
    return tmp_path / "shakespeare"


def test_one_character_after_the_other(folder: Path) -> None:
    """Read back from the windows, a role says what it said; its last 20% of lines, at least one, are for testing."""
    data = shakespeare(str(folder), length=7, validation=0.0)
    assert (data.task, data.vocabulary, data.padding, data.classes) == ("next_token", 99, 0, 99)
    assert data.groups is not None
    for group, role in enumerate("hko"):
        *first, last = SAID[role].split("\n")
        for split, expected in (("train", "\n".join(first)), ("test", last)):
            rows = [int(i) for i in data.split(split) if data.groups[i] == group]
            assert "".join(decode_row(data.x[i]) for i in rows) == expected[:-1]
            assert "".join(decode_row(data.y[i]) for i in rows) == expected[1:]
    assert len(data.split("validation")) == 0


def test_files_of_their_own_divide(folder: Path) -> None:
    write_roles(folder / "test.parquet", client_id=["h", "new"], text=["Ay, there's the rub;", "only one line"])
    write_roles(folder / "train.parquet", client_id=["h", "one", "k"], text=["To die, to sleep;", "once", "a\nb c"])
    data = shakespeare(str(folder.parent), length=5, validation=0.0)
    assert data.groups is not None and sorted(data.groups.unique().tolist()) == [0, 1]  # h and k; two lines at least
    train, test = (data.split(s).tolist() for s in ("train", "test"))
    assert "".join(decode_row(data.x[i]) for i in test) == "Ay, there's the rub"
    assert [decode_row(data.x[i]) for i in train] == ["To di", "e, to", " slee", "p", "a\nb "]


def test_validation_is_a_role_s_last_windows(folder: Path) -> None:
    data = shakespeare(str(folder), length=2, validation=0.34, test=0.0)
    assert data.groups is not None
    for group in range(3):
        mine = (data.groups == group).nonzero().flatten().tolist()
        held = int(len(mine) * 0.34)
        assert [i for i in data.split("validation").tolist() if i in mine] == mine[len(mine) - held :]
    parts = partition(data, "natural", None, 0)
    assert len(parts) == 3 and sum(len(p["train"]) for p in parts) == len(data.split("train"))
    with raises(DataError, key="kind"):
        partition(data, "dirichlet", 2, 0)


@pytest.mark.parametrize(
    ("lines", "test", "expected"),
    [(2, 0.2, 1), (5, 0.2, 4), (6, 0.2, 4), (10, 0.2, 8), (3, 0.99, 1), (1, 0.2, 1), (4, 0.0, 4)],
)
def test_divided_by_lines(lines: int, test: float, expected: int) -> None:
    """The last ceil(0.2 n) lines, but never all."""
    verses = [str(i) for i in range(lines)]
    passages = split_role(["\n".join(verses)], test, has_lines=True)
    assert "".join(passages.train).split("\n") == verses[:expected]
    assert "".join(passages.test) == "\n".join(verses[expected:])


def test_divided_by_characters() -> None:
    passages = split_role(["abcd", "efg", "hij"], 0.45, has_lines=False)  # 10 characters, the last 5
    assert ([t for t in passages.train if t], [t for t in passages.test if t]) == (["abcd", "e"], ["fg", "hij"])


def test_by_words(folder: Path) -> None:
    data = shakespeare(str(folder), level="words", length=4, vocabulary=5, validation=0.0, test=0.0)
    assert data.vocabulary == 5 and int(data.x.max()) == 4
    assert int((data.y == 1).sum()) == 0 and int((data.x == 1).sum()) > 0


def leaf(folder: Path, width: int = 6, split: bool = True) -> dict[str, str]:
    """Write a set as LEAF does: windows of some characters, and the character after each."""
    texts = {"HAMLET": "to be or not to be that", "A MAN": "nothing, my lord. nothing"}
    for place, part in (("train", slice(0, 20)), ("test", slice(12, None))) if split else (("all_data", slice(None)),):
        users = {}
        for user, text in texts.items():
            speech = text[part]
            x = [speech[i : i + width] for i in range(len(speech) - width)]
            users[user] = {"x": x, "y": [speech[i + width] for i in range(len(speech) - width)]}
        content = {"users": list(users), "num_samples": [len(u["x"]) for u in users.values()], "user_data": users}
        (folder / "data" / place).mkdir(parents=True)
        (folder / "data" / place / "all_data_niid_0_keep_0_train_9.json").write_text(json.dumps(content))
    return texts


def test_leaf_windows_are_joined(tmp_path: Path) -> None:
    texts = leaf(tmp_path)
    data = shakespeare(str(tmp_path), length=5, validation=0.0)
    assert data.groups is not None
    for group, user in enumerate(sorted(texts)):
        for split, speech in (("train", texts[user][:20]), ("test", texts[user][12:])):
            rows = [int(i) for i in data.split(split) if data.groups[i] == group]
            assert "".join(decode_row(data.x[i]) for i in rows) == speech[:-1]
            assert "".join(decode_row(data.y[i]) for i in rows) == speech[1:]


def test_leaf_s_own_windows_come_back(tmp_path: Path) -> None:
    """With its length and its way of scoring, the samples are LEAF's, one for one."""
    leaf(tmp_path, width=6)
    written = read_leaf_users(find_leaf_files(tmp_path)["train"])
    data = shakespeare(str(tmp_path), length=6, score="last", validation=0.0)
    assert data.groups is not None
    for group, user in enumerate(sorted(written)):
        rows = [int(i) for i in data.split("train") if data.groups[i] == group]
        assert [decode_row(data.x[i]) for i in rows] == written[user][0]
        assert [decode_row(data.y[i, -1:]) for i in rows] == written[user][1]
    assert int((data.y[:, :-1] != -100).sum()) == 0


def test_leaf_s_undivided_file_and_shuffled_samples(tmp_path: Path) -> None:
    texts = leaf(tmp_path, split=False)
    data = shakespeare(str(tmp_path), length=4, validation=0.0)
    for split, count in (("train", sum(len(t) - -(-len(t) // 5) - 1 for t in texts.values())),
                         ("test", sum(-(-len(t) // 5) - 1 for t in texts.values()))):  # fmt: skip
        assert int((data.y[data.split(split)] != -100).sum()) == count
    assert join_windows(["abc", "xyz", "yzq"], ["d", "q", "r"], Path("f")) == ["abcd", "xyzqr"]
    with raises(DataError, 1, '"x"', '"y"', path="f"):
        join_windows(["abc", 3], ["d", "e"], Path("f"))


def test_leaf_is_found_in_the_folder_of_all_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf(tmp_path / "shakespeare")
    expected = shakespeare(str(tmp_path / "shakespeare"), length=5)
    monkeypatch.setenv("FLEETFIT_DATA", str(tmp_path))
    for folder in (None, "shakespeare"):
        assert torch.equal(shakespeare(folder, length=5).x, expected.x)


def test_leaf_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf(tmp_path)
    first = shakespeare(str(tmp_path), length=5)
    monkeypatch.setattr(
        "fleetfit.data.sets.shakespeare.read_leaf_users", lambda _: pytest.fail("the file is read again")
    )
    assert torch.equal(shakespeare(str(tmp_path), length=5).x, first.x)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("no JSON", Expected(path="a.json")),
        ('{"users": ["a"]}', Expected('"user_data"', path="a.json")),
        ('{"users": ["a"], "user_data": {}}', Expected('"a"', path="a.json")),
        ('{"users": ["a"], "user_data": {"a": {"x": ["b"], "y": []}}}', Expected('"a"', path="a.json")),
    ],
)
def test_malformed_leaf_files(tmp_path: Path, content: str, expected: Expected) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text(content)
    with raises(DataError, expected):
        shakespeare(str(tmp_path))


def test_folders_of_leaf(tmp_path: Path) -> None:
    assert find_leaf_files(tmp_path) == {}
    (tmp_path / "settings.json").write_text('{"theme": "dark"}')
    assert find_leaf_files(tmp_path) == {} and find_leaf_files(tmp_path / "settings.json")["train"]
    (tmp_path / "all_data.json").write_text('{"users": [], "num_samples": [], "user_data": {}}')
    assert find_leaf_files(tmp_path) == {"train": [tmp_path / "all_data.json"]}


def test_rows_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEAF's windows as rows of one training split."""
    datasets = pytest.importorskip("datasets")
    text = "good night, good night, parting is such sweet sorrow"
    x, y = [text[i : i + 8] for i in range(len(text) - 8)], list(text[8:])

    def load_dataset(repository: str, config: str | None, revision: str | None = None) -> Any:
        assert repository == "flwrlabs/shakespeare"
        columns = {"character_id": ["JULIET"] * len(x) + ["NURSE"], "x": [*x, "madam, m"], "y": [*y, "a"]}
        return {"train": datasets.Dataset.from_dict(columns)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with raises(DataError, "hub = true", key="hub"):
        shakespeare()
    data = shakespeare(hub=True, length=10, validation=0.0, test=0.0)
    assert data.groups is not None
    rows = [int(i) for i in data.split("train") if data.groups[i] == 0]
    assert "".join(decode_row(data.x[i]) for i in rows) == text[:-1]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"length": 0}, Expected(1, key="length")),
        ({"level": "letters"}, Expected('"characters"', '"words"', key="level")),
        ({"score": "first"}, Expected('"all"', '"last"', key="score")),
        ({"validation": 1.0}, Expected(0, 1, 1.0, key="validation")),
        ({"test": -0.1}, Expected(0, 1, key="test")),
        ({"level": "words", "vocabulary": 1}, Expected(3, key="vocabulary")),
        ({"folder": "/nowhere"}, Expected(path="nowhere")),
    ],
)
def test_wrong_parameters(folder: Path, parameters: Any, expected: Expected) -> None:
    with raises(DataError, expected):
        shakespeare(**{"folder": str(folder)} | parameters)


def test_nothing_to_train_on(tmp_path: Path) -> None:
    write_roles(tmp_path / "train.parquet", client_id=["a"], text=["one line only"])
    with raises(DataError, "shakespeare"):
        shakespeare(str(tmp_path))


# ---- plain text --------------------------------------------------------------------------------------------------


def test_a_file_is_cut_in_time(tmp_path: Path) -> None:
    text = "abcdefghijklmnopqrstuvwxyz" * 4
    (tmp_path / "novel.txt").write_text(text)
    data = plain_text(str(tmp_path / "novel.txt"), length=5, test=0.25, validation=0.2)
    assert data.name == "novel" and data.vocabulary == 28
    letters = dict(enumerate(sorted(set(text)), 2))

    def decode_split(split: str, tokens: torch.Tensor) -> str:
        return "".join(letters.get(int(t), "") for i in data.split(split) for t in tokens[i])

    assert decode_split("train", data.x) + decode_split("validation", data.x) == text[:77]
    assert decode_split("test", data.x) == text[78:-1] and decode_split("test", data.y) == text[79:]
    assert [len(data.split(s)) for s in SPLITS] == [13, 3, 5]


def test_each_file_is_a_group(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/c"):
        (tmp_path / "books" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / f"{name}.txt").write_text(f"{name} said this and that. " * 9, encoding="utf-8-sig")
    data = plain_text(str(tmp_path / "books"), length=10)
    assert data.name == "books" and data.groups is not None and data.groups.unique().tolist() == [0, 1, 2]
    assert len(partition(data, "natural", None, 0)) == 3


def test_the_vocabulary_is_that_of_the_training_part(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("ab" * 45 + "zab" * 4)
    data: Data = plain_text(str(tmp_path / "t.txt"), test=0.12, length=4)
    assert data.vocabulary == 4
    test = data.split("test")
    assert (data.x[test] == 1).any() and not (data.y[test] == 1).any()
    assert plain_text(str(tmp_path / "t.txt"), vocabulary=3, length=4).vocabulary == 3
    (tmp_path / "w.txt").write_text("so it goes. " * 30)
    assert plain_text(str(tmp_path / "w.txt"), level="words", length=4).vocabulary == 6


@pytest.mark.parametrize(
    ("several", "settings", "kind", "clients"),
    [
        (False, {"clients": 5}, "iid", 5),
        (False, {"seed": 3}, "iid", 5),  # of 162 training samples
        (True, {"clients": 2}, "natural", 2),
        (True, {"seed": 3}, "natural", 3),
        (True, {"kind": "iid", "clients": 5}, "iid", 5),
    ],
)
def test_the_default_partition_fits_the_files(
    tmp_path: Path, several: bool, settings: dict[str, Any], kind: str, clients: int
) -> None:
    for number in range(3 if several else 1):
        (tmp_path / f"{number}.txt").write_text("to be or not to be. " * 100)
    place = str(tmp_path if several else tmp_path / "0.txt")
    experiment = load_experiment({"data": {"path": place, "partition": settings}})
    assert {"kind": kind, **settings}.items() <= experiment.data.partition.model_dump().items()
    assert len(build_partition(experiment, plain_text(place, length=10))) == clients


def test_the_default_partition_of_a_named_set_without_classes_divides_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be. " * 100)
    text = plain_text(str(tmp_path / "a.txt"), length=10)
    for data in ({"name": "plain_text", "path": str(tmp_path / "a.txt")}, {"name": text}):
        experiment = load_experiment({"data": data})
        assert experiment.data.partition.kind == "iid" and len(build_partition(experiment, text)) > 1


def test_text_of_the_server_is_not_divided(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("to be or not to be. " * 100)
    data = {"path": str(tmp_path / "0.txt"), "server": {"path": str(tmp_path / "0.txt")}}
    server = load_experiment({"data": data}).data.server
    assert server is not None and server.settings["folder"] and "partition" not in server.settings


def test_wrong_parameters_of_plain_text(tmp_path: Path) -> None:
    with raises(DataError, path=tmp_path):
        plain_text(str(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with raises(DataError, "a.txt"):
        plain_text(str(tmp_path))
    (tmp_path / "a.txt").write_text("x")
    with raises(DataError, tmp_path.name, path=None):
        plain_text(str(tmp_path))
