"""Data files that are damaged or made to do harm: a sentence that names file and row, and nothing is started."""

import contextlib
import io
import json
import os
import struct
import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support import Expected, raises

from fleetfit.data import Data, image_reader
from fleetfit.data.files import tokens
from fleetfit.data.files.arrays import arrays
from fleetfit.data.files.images import images
from fleetfit.data.files.plain_text import plain_text
from fleetfit.data.files.text import text
from fleetfit.data.sets.femnist import femnist
from fleetfit.data.sets.images import cifar10
from fleetfit.data.sets.shakespeare import shakespeare
from fleetfit.data.sets.speech_commands import speech_commands
from fleetfit.errors import DataError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
image = pytest.importorskip("PIL.Image")

Write = Callable[..., Path]
Picture = Callable[..., bytes]
GREY = np.arange(64, dtype=np.uint8).reshape(8, 8)
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def table(path: Path, **columns: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), path)
    return path


# ---- pictures ------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that gets a file for each program that is started instead of a real one."""
    programs, marks = tmp_path / "programs", tmp_path / "marks"
    programs.mkdir()
    marks.mkdir()
    for name in ("gs", "gswin32c", "gswin64c", "djpeg", "cjpeg", "ppmquant", "convert", "xdg-open", "ffmpeg"):
        (programs / name).write_text(f'#!/bin/sh\ntouch "{marks}/{name}"\nexit 1\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    eps = pytest.importorskip("PIL.EpsImagePlugin")
    monkeypatch.setattr(eps, "gs_binary", None)  # it looks for Ghostscript once
    return marks


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("place", ["parquet", "folders"])
def test_an_image_never_starts_a_program(
    tmp_path: Path, write: Write, picture: Picture, started: Path, lazy: bool, place: str
) -> None:
    with contextlib.suppress(Exception), image.open(io.BytesIO(EPS)) as shown:
        shown.load()
    assert [mark.name for mark in started.iterdir()] == ["gs"], "with all of Pillow's formats it does"
    (started / "gs").unlink()
    good = picture(GREY)
    if place == "parquet":
        write(tmp_path / "set" / "train.parquet", [good, EPS, good, good], [0, 1, 0, 1])
    else:
        for number, content in enumerate([good, EPS, good, good]):
            (tmp_path / "set" / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
            (tmp_path / "set" / f"class{number % 2}" / f"{number}.png").write_bytes(content)
    with raises(DataError, path="train.parquet" if place == "parquet" else "class1/1.png"):
        images(str(tmp_path / "set"), lazy=lazy, validation=0.0).batch(torch.arange(4))
    assert not any(started.iterdir())


def test_every_format_that_is_read_is_decoded_by_pillow_itself(started: Path) -> None:
    with raises(DataError, path="here"):
        image_reader.open_image(b"not an image", image_reader.Origin(Path("here")))
    modules = {name: image.OPEN[name][0].__module__ for name in image_reader.FORMATS}
    for name, module in modules.items():
        source = Path(str(__import__(module, fromlist=["x"]).__file__)).read_text()
        reading = source.partition("def _save")[0]
        assert "subprocess" not in reading or name in ("JPEG", "GIF"), name
    for name in ("PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP"):
        content = io.BytesIO()
        image.fromarray(GREY).convert("RGB").save(content, name)
        target = np.empty((3, 8, 8), dtype=np.uint8)
        with image_reader.open_image(content.getvalue(), "here") as picture:
            image_reader.decode_into(target, picture, "here", None)
    assert not any(started.iterdir())


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims a size, and has hardly any pixels."""
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(9000, 9000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1)])
def test_a_picture_that_claims_a_huge_size_is_refused(tmp_path: Path, write: Write, size: tuple[int, int]) -> None:
    write(tmp_path / "bomb" / "train.parquet", [png_of(*size)] * 4, [0, 1, 0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with raises(DataError, row=0, path="train.parquet"):
            images(str(tmp_path / "bomb"))


def test_pictures_of_a_built_in_set_are_checked_first(tmp_path: Path, write: Write) -> None:
    for split in ("train", "test"):
        write(tmp_path / "cifar10" / f"{split}.parquet", [png_of(8000, 8000)] * 100, [0] * 100, image="img")
    with raises(DataError, "cifar10", 200, "8000x8000"):
        cifar10(str(tmp_path))


def test_a_cut_picture_names_its_row(tmp_path: Path, write: Write, picture: Picture) -> None:
    good = picture(np.tile(GREY, (9, 9)))
    write(tmp_path / "cut" / "train.parquet", [good, good, good[:-40]], [0, 1, 0])
    with raises(DataError, row=2, path="train.parquet"):
        images(str(tmp_path / "cut"))


# ---- Parquet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (
            arrow.array([0, 10**12, 1, 0]),
            Expected(1000000000000, row=1, path="train.parquet"),
        ),
        (
            arrow.array([0, 2**64 - 1, 1, 0], arrow.uint64()),
            Expected(18446744073709551615, row=1, column="label", path="train.parquet"),
        ),
        (arrow.array([0.0, 1.0, 0.5, float("nan")]), Expected("double", column="label", path="train.parquet")),
        (arrow.array([0, None, 1, 1]), Expected(row=1, column="label", path="train.parquet")),
        (arrow.array([[0], [1], [0], [1]]), Expected("int64", column="label", path="train.parquet")),
        (arrow.array([True, False, True, False]), Expected("bool", column="label", path="train.parquet")),
    ],
)
def test_labels_that_are_none(tmp_path: Path, picture: Picture, labels: object, expected: Expected) -> None:
    table(tmp_path / "x" / "train.parquet", image=[picture(GREY)] * 4, label=labels)
    with raises(DataError, expected):
        images(str(tmp_path / "x"))


def test_a_column_that_is_there_twice(tmp_path: Path, picture: Picture) -> None:
    (tmp_path / "x").mkdir()
    one, other = arrow.array([picture(GREY)] * 2), arrow.array([0, 1])
    twice = arrow.Table.from_arrays([one, other, other], names=["image", "label", "label"])
    parquet.write_table(twice, tmp_path / "x" / "train.parquet")
    with raises(DataError, column="label", path="train.parquet"):
        images(str(tmp_path / "x"))


@pytest.mark.parametrize("names", ['"ab"', "[" * 5000 + "]" * 5000, "[1, 2]", '["\\ud800", "b"]', "{}", '[["a"], "b"]'])
def test_metadata_that_name_no_classes_are_none(tmp_path: Path, picture: Picture, names: str) -> None:
    content = f'{{"info": {{"features": {{"label": {{"names": {names}}}}}}}}}'
    rows = arrow.table({"image": [picture(GREY)] * 10, "label": [0, 1] * 5}).replace_schema_metadata(
        {"huggingface": content}
    )
    (tmp_path / "x").mkdir()
    parquet.write_table(rows, tmp_path / "x" / "train.parquet")
    data = images(str(tmp_path / "x"))
    assert (data.classes, data.class_names) == (2, ())


@pytest.mark.parametrize("kind", ["images", "text", "sounds", "roles"])
def test_no_rows(tmp_path: Path, kind: str) -> None:
    empty, words = arrow.array([], arrow.binary()), arrow.array([], arrow.string())
    numbers = arrow.array([], arrow.int64())
    place = str(tmp_path / "x")
    columns, read = {
        "images": ({"image": empty, "label": numbers}, images),
        "text": ({"text": words, "label": numbers}, text),
        "sounds": ({"audio": empty, "label": numbers, "speaker_id": words}, speech_commands),
        "roles": ({"client_id": words, "text": words}, shakespeare),
    }[kind]
    table(tmp_path / "x" / "train.parquet", **columns)
    with raises(DataError) as error:
        read(place)
    assert kind == "roles" or error.value.path in (Path(place), Path(place) / "train.parquet")


def test_rows_that_cannot_be_in_so_few_bytes(tmp_path: Path) -> None:
    rows = 30_000_000
    column = arrow.DictionaryArray.from_arrays(arrow.array(np.zeros(rows, dtype=np.int8)), arrow.array([b"x"]))
    table(tmp_path / "x" / "train.parquet", image=column, label=arrow.array(np.zeros(rows, dtype=np.int8)))
    with raises(DataError, "30,000,000", path="train.parquet"):
        images(str(tmp_path / "x"))


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -9, -200])
def test_a_cut_parquet_file(tmp_path: Path, write: Write, picture: Picture, keep: int) -> None:
    path = write(tmp_path / "x" / "train.parquet", [picture(GREY)] * 8, [0, 1] * 4)
    path.write_bytes(path.read_bytes()[:keep])
    with raises(DataError, path="train.parquet"):
        images(str(tmp_path / "x"))


# ---- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", b"text,text,label\na,b,c\n", Expected(column="text", path="a.csv")),
        ("a.csv", b"text,label\n\xff\xfe,1\n", Expected(path="a.csv")),
        ("a.csv", b"\xff\xfet\x00e\x00", Expected(path="a.csv")),
        ("a.csv", b"text,label\na,1,2\n", Expected(2, 3, path="a.csv")),
        ("a.csv", b"", Expected(path="a.csv")),
        ("a.csv", b"text,label\n", Expected(path="a.csv")),
        ("a.jsonl", b'{"text": "a", "text": "b", "label": 1}\n', Expected(row=1, path="a.jsonl")),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", Expected(row=1, path="a.jsonl")),
        ("a.jsonl", b'{"text": "a", "label": ' + b"9" * 5000 + b"}\n", Expected(row=1, path="a.jsonl")),
        ("a.jsonl", b'{"text": "\\ud800", "label": 1}\n', Expected(row=0, column="text", path="a.jsonl")),
        ("a.jsonl", b'{"text": "\xff"}\n', Expected("a.jsonl", 10)),
        ("a.jsonl", b'{"text": {"a": 1}, "label": 1}\n', Expected(1, row=0, column="text", path="a.jsonl")),
        ("a.json", b"[1, 2]", Expected(row=0, path="a.json")),
    ],
)
def test_tables_of_text_that_are_wrong(tmp_path: Path, name: str, content: bytes, expected: Expected) -> None:
    (tmp_path / name).write_bytes(content)
    with raises(DataError, expected):
        text(str(tmp_path / name))


def test_one_long_label_takes_no_room_in_every_row(tmp_path: Path) -> None:
    rows = [f"{i},{'x' * 900 if not i else i % 2}" for i in range(3000)]
    (tmp_path / "a.csv").write_text("text,label\n" + "\n".join(rows))
    assert text(str(tmp_path / "a.csv"), vocabulary=50, length=4).classes == 3


@pytest.mark.slow
def test_a_tokenizer_that_is_damaged_or_runs_code(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "a.csv").write_text("text,label\na,0\nb,1\n" * 5)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["code.Own", None]}, "tokenizer_class": "Own"})
    )
    (tmp_path / "own" / "code.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    (tmp_path / "own" / "config.json").write_text("{}")
    with raises(DataError, path="own"):
        text(str(tmp_path / "a.csv"), tokenizer=str(tmp_path / "own"))
    assert not (tmp_path / "mark").exists()
    huge = tokens.learn_tokenizer(["a b", "c"], 50)
    document = json.loads(huge.to_str())
    document["model"]["vocab"]["a"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with raises(DataError, 2147483648, key="tokenizer"):
        text(str(tmp_path / "a.csv"), tokenizer=str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"a"])
def test_plain_text_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with raises(DataError, "a.txt" if content == b"\xff\xfe" else "characters"):
        plain_text(str(tmp_path / "a.txt"))


# ---- arrays --------------------------------------------------------------------------------------------------------


def npz(path: Path, **members: bytes | np.ndarray) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            if isinstance(content, np.ndarray):
                buffer = io.BytesIO()
                np.save(buffer, content, allow_pickle=True)
                content = buffer.getvalue()
            archive.writestr(f"{name}.npy", content)
    return str(path)


def header(shape: str, kind: str = "<f4", rest: bytes = b"") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + rest


Y = np.arange(12) % 3
X = np.ones((12, 4), dtype=np.float32)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (np.array([{"a": 1}] * 12, dtype=object), Y, Expected(column="x", path="a.npz")),
        (X, np.array([[1], 2] * 6, dtype=object), Expected(column="y", path="a.npz")),
        (header("(12, 1000000000000)"), Y, Expected(column="x", path="a.npz")),
        (header("(4611686018427387904, 4)"), Y, Expected(column="x", path="a.npz")),
        (header("(-1, 4)"), Y, Expected(column="x", path="a.npz")),
        (header("(12, 1)", rest=b"\0" * 40), Y, Expected(column="x", path="a.npz")),
        (header("12"), Y, Expected(column="x", path="a.npz")),
        (header("(12, 1)", "|O"), Y, Expected(column="x", path="a.npz")),
        (header("()", rest=b"\0" * 4), Y, Expected(column="x", path="a.npz")),
        (b"", Y, Expected(column="x", path="a.npz")),
        (b"\x93NUMPY\x09\x00" + b"\0" * 200, Y, Expected(column="x", path="a.npz")),
        (X.astype("M8[s]"), Y, Expected(key="x")),
        (X.astype(complex), Y, Expected(key="x")),
        (X, Y.astype(np.int64) * 10**12, Expected(2, 2000000000000, key="y")),
        (X, np.array([2**64 - 1] * 12, dtype=np.uint64), Expected(63, key="y")),
        (X, Y.astype(float), Expected("float64", key="y")),
        (X[:0], Y[:0], Expected("[0, 4]", column="x", path="a.npz")),
        (X[:, :0], Y, Expected("[12, 0]", column="x", path="a.npz")),
    ],
)
def test_arrays_that_are_wrong(tmp_path: Path, x: object, y: np.ndarray, expected: Expected) -> None:
    with raises(DataError, expected):
        arrays(npz(tmp_path / "a.npz", x=x, y=y))  # type: ignore[arg-type]
    if isinstance(x, bytes):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "x.npy").write_bytes(x)
        np.save(tmp_path / "folder" / "y.npy", y)
        with raises(DataError, column="x", path="folder"):
            arrays(str(tmp_path / "folder"))


def test_numbers_that_are_not_whole_are_not_cut(tmp_path: Path) -> None:
    with raises(DataError, key="x"):
        arrays(npz(tmp_path / "a.npz", x=X + 0.5, y=Y), vocabulary=9)
    with raises(DataError, key="y"):
        arrays(npz(tmp_path / "b.npz", x=X, y=np.full((12, 2), 0.7)), task="multi_label")


def test_a_member_that_unpacks_to_more_than_the_disk_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((10**4, 100)), y=np.arange(10**4) % 2)
    import collections
    import shutil

    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 10**5))
    with raises(DataError, "8,000,128", column="x", path="a.npz"):
        arrays(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "C:\\x"])
def test_members_with_paths_are_none(tmp_path: Path, name: str) -> None:
    path = npz(tmp_path / "a.npz", **{name: X, "y": Y, "z": X})
    with raises(DataError, path="a.npz"):
        arrays(path, x=name)
    assert len(arrays(path, x="z").x) == 12


def test_one_name_twice_and_no_archive(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        path = npz(tmp_path / "a.npz", x=X, y=Y)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("x.npy", b"other")
    with raises(DataError, path="a.npz"):
        arrays(path)
    (tmp_path / "b.npz").write_bytes(b"PK\x05\x06" + b"\xff" * 18)
    with raises(DataError, path="b.npz"):
        arrays(str(tmp_path / "b.npz"))


# ---- LEAF ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b'{"users": ["a", "a"], "user_data": {"a": {"x": [], "y": []}}}',
        b'{"users": [], "user_data": {"a": {"x": [], "y": []}}}',
        b'{"users": null, "user_data": {}}',
        b'{"users": [["a"]], "user_data": {"a": {"x": [], "y": []}}}',
        b'{"users": ' + b"[" * 100_000,
        b'{"users": ["a"], "num_samples": ' + b"9" * 5000 + b"}",
        b'{"users": ["\xff"]}',
        b'{"users": ["a"], "user_data": {"a": {"x": [[0, [1]]], "y": [0]}}}',
        b'{"users": ["a"], "user_data": {"a": {"x": [[1e999]], "y": [0]}}}',
        b'{"users": ["a"], "user_data": {"a": {"x": [[0.5]], "y": [[0]]}}}',
        b'{"users": ["a"], "user_data": {"a": {"x": [' + str([0.5] * 784).encode() + b'], "y": [[0]]}}}',
        b'{"users": ["a"], "user_data": {"a": {"x": [' + str([0.5] * 784).encode() + b'], "y": [1e3]}}}',
        b'{"users": ["a"], "user_data": {"a": {"x": [], "y": []}}}',
    ],
)
def test_leaf_files_that_are_wrong(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "femnist" / "data" / "train").mkdir(parents=True)
    (tmp_path / "femnist" / "data" / "train" / "all.json").write_bytes(content)
    with raises(DataError, "all.json"):
        femnist(str(tmp_path))


# ---- what is no file -----------------------------------------------------------------------------------------------


def reading(place: str, tmp_path: Path) -> Callable[[], Data]:
    """Return what reads a set in which a pipe stands where a file should."""
    root = tmp_path / "set"
    spots = {
        "parquet": (root / "train.parquet", lambda: images(str(root))),
        "parquet part": (root / "train-00000-of-00001.parquet", lambda: images(str(root))),
        "npz": (tmp_path / "set.npz", lambda: arrays(str(tmp_path / "set.npz"))),
        "npy": (root / "x.npy", lambda: arrays(str(root))),
        "csv": (root / "train.csv", lambda: text(str(root))),
        "csv itself": (root / "train.csv", lambda: text(str(root / "train.csv"))),
        "txt": (root / "a.txt", lambda: plain_text(str(root))),
        "txt in a class": (root / "good" / "a.txt", lambda: text(str(root))),
        "leaf": (root / "data" / "train" / "a.json", lambda: shakespeare(str(root))),
        "leaf whole": (root / "data" / "all_data" / "a.json", lambda: shakespeare(str(root))),
        "wav": (root / "yes" / "a_nohash_0.wav", lambda: speech_commands(str(root))),
        "tokenizer": (tmp_path / "tokenizer.json", lambda: text(str(root), tokenizer=str(tmp_path / "tokenizer.json"))),
        "picture": (root / "class" / "a.png", lambda: images(str(root))),
    }  # fmt: skip
    path, read = spots[place]
    path.parent.mkdir(parents=True, exist_ok=True)
    if place == "tokenizer":
        root.mkdir()
        (root / "train.csv").write_text("text,label\na,0\nb,1\n")
    os.mkfifo(path)
    return read


PLACES = ["parquet", "parquet part", "npz", "npy", "csv", "csv itself", "txt", "txt in a class", "leaf", "leaf whole",
          "wav", "tokenizer", "picture"]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_pipe_is_not_waited_for(tmp_path: Path, place: str) -> None:
    read, raised = reading(place, tmp_path), []

    def work() -> None:
        try:
            read()
        except DataError as error:
            raised.append(error)

    waiting = threading.Thread(target=work, daemon=True)
    waiting.start()
    waiting.join(300)
    assert not waiting.is_alive(), "it waits for somebody to write into the pipe"
    assert len(raised) == 1
