"""Mutated data files of every kind that is read: the right data, or a sentence that names the file.

A case is a kind of set and a list of changes to its good files. Changes are plain values, so that a case that failed
can be kept in tests/corpus/data/cases.json. Files are changed as what they are (a column, its type, an array's header,
a key of JSON, the size in a sound's header), and as bytes.
"""

import io
import json
import shutil
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from fleetfit.data import Data
from fleetfit.data.files.arrays import arrays
from fleetfit.data.files.images import images
from fleetfit.data.files.plain_text import plain_text
from fleetfit.data.files.text import text
from fleetfit.data.sets.femnist import femnist
from fleetfit.data.sets.images import mnist
from fleetfit.data.sets.shakespeare import shakespeare
from fleetfit.data.sets.speech_commands import speech_commands
from fleetfit.errors import FleetFitError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
image = pytest.importorskip("PIL.Image")
soundfile = pytest.importorskip("soundfile")
pytest.importorskip("tokenizers")

CORPUS = Path(__file__).parents[1] / "corpus" / "data" / "cases.json"
RNG = np.random.default_rng(0)
ROWS = 12
Change = list[Any]
"""What is changed, and how: ["byte", place, value], ["cut", place], ["column", name, value, row] and so on."""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLEETFIT_DATA", raising=False)


# ---- good sets -----------------------------------------------------------------------------------------------------


def png(side: int, form: str = "PNG") -> bytes:
    content = io.BytesIO()
    image.fromarray(RNG.integers(0, 256, (side, side), dtype=np.uint8)).save(content, form)
    return content.getvalue()


def wav() -> bytes:
    content = io.BytesIO()
    soundfile.write(content, RNG.uniform(-1, 1, 800).astype(np.float32), 16_000, format="WAV")
    return content.getvalue()


def of_columns(**columns: Sequence[Any]) -> bytes:
    content = io.BytesIO()
    parquet.write_table(arrow.table({name: list(values) for name, values in columns.items()}), content)
    return content.getvalue()


def of_arrays(compressed: bool = False) -> bytes:
    content = io.BytesIO()
    x, y = RNG.standard_normal((ROWS, 4)).astype(np.float32), np.arange(ROWS) % 3
    (np.savez_compressed if compressed else np.savez)(content, x=x, y=y)
    return content.getvalue()


def leaf(x: Callable[[], Any], y: Callable[[], Any]) -> bytes:
    users = {name: {"x": [x() for _ in range(4)], "y": [y() for _ in range(4)]} for name in ("ann", "bob")}
    return json.dumps({"users": list(users), "num_samples": [4, 4], "user_data": users}).encode()


LABELS = [i % 3 for i in range(ROWS)]
WORDS = ["the cat sat", "a dog ran", "no bird flew"] * 4
LINES = "Speak, speak.\nFirst, you know.\nWe are accounted poor citizens.\n" * 4
IMAGES = of_columns(image=[png(8) for _ in range(ROWS)], label=LABELS)
JPEGS = of_columns(image=[{"bytes": png(8, "JPEG"), "path": None} for _ in range(ROWS)], label=LABELS)
DIGITS = of_columns(image=[png(28) for _ in range(20)], label=[i % 10 for i in range(20)])
SOUNDS = of_columns(audio=[wav() for _ in range(ROWS)], label=LABELS, speaker_id=["a", "b"] * 6)
TABLE = "text,label\n" + "".join(f'"{words}",{label}\n' for words, label in zip(WORDS, LABELS, strict=True))
ROWS_OF_JSON = "".join(json.dumps({"text": w, "label": n}) + "\n" for w, n in zip(WORDS, LABELS, strict=True))

Read = Callable[[Path], Data]
KINDS: dict[str, tuple[dict[str, bytes], Read]] = {
    "parquet of images": ({"train.parquet": IMAGES}, lambda p: images(str(p))),
    "lazy images": ({"train.parquet": JPEGS}, lambda p: images(str(p), lazy=True)),
    "mnist": ({"mnist/train.parquet": DIGITS, "mnist/test.parquet": DIGITS}, lambda p: mnist(str(p))),
    "class folders": (
        {f"{label}/{i}.{form.lower()}": png(8, form) for i, (label, form) in enumerate(
            zip("aabbcc", ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"), strict=True))},
        lambda p: images(str(p)),
    ),
    "parquet of texts": (
        {"train.parquet": of_columns(text=WORDS, label=LABELS)}, lambda p: text(str(p), vocabulary=60, length=8)),
    "csv": ({"train.csv": TABLE.encode()}, lambda p: text(str(p), vocabulary=60, length=8)),
    "tsv": ({"train.tsv": TABLE.replace(",", "\t").encode()}, lambda p: text(str(p), vocabulary=60, length=8)),
    "json lines": ({"train.jsonl": ROWS_OF_JSON.encode()}, lambda p: text(str(p), vocabulary=60, length=8)),
    "class folders of texts": (
        {f"{label}/{i}.txt": words.encode() for i, (words, label) in enumerate(zip(WORDS, LABELS, strict=True))},
        lambda p: text(str(p), vocabulary=60, length=8)),
    "plain text": ({"a.txt": LINES.encode(), "b.txt": LINES.encode()}, lambda p: plain_text(str(p), length=20)),
    "npz": ({"a.npz": of_arrays()}, lambda p: arrays(str(p / "a.npz"))),
    "compressed npz": ({"a.npz": of_arrays(True)}, lambda p: arrays(str(p / "a.npz"))),
    "leaf of images": (
        {"data/train/a.json": leaf(lambda: [0.5] * 784, lambda: 7)}, lambda p: femnist(str(p))),
    "leaf of text": (
        {"data/train/a.json": leaf(lambda: "to be or not to be", lambda: "x")}, lambda p: shakespeare(str(p))),
    "roles": (
        {"train.parquet": of_columns(client_id=["ann", "bob"], text=[LINES, LINES])}, lambda p: shakespeare(str(p))),
    "folders of sounds": (
        {f"{word}/{who}_nohash_{i}.wav": wav() for word in ("yes", "no") for who in "ab" for i in range(2)},
        lambda p: speech_commands(str(p))),
    "parquet of sounds": ({"train.parquet": SOUNDS}, lambda p: speech_commands(str(p))),
}  # fmt: skip


# ---- changes -------------------------------------------------------------------------------------------------------


def changed(content: bytes, change: Change) -> bytes:
    """Return a file with one change; what does not apply to it changes nothing."""
    kind, *how = change
    try:
        return CHANGES[kind](content, *how)
    except Exception:  # a file that an earlier change has made unreadable as what it was
        return content


def byte(content: bytes, place: float, value: int) -> bytes:
    at = int(place * len(content))
    return content[:at] + bytes([value]) + content[at + 1 :]


def cut(content: bytes, place: float) -> bytes:
    return content[: int(place * len(content))]


def insert(content: bytes, place: float, what: str) -> bytes:
    at = int(place * len(content))
    return content[:at] + what.encode("latin-1") + content[at:]


def again(content: bytes, place: float, length: int) -> bytes:
    at = int(place * len(content))
    return content[: at + length] + content[at:]


def number(content: bytes, place: float, value: int, width: int) -> bytes:
    """Overwrite what may be a length."""
    at = int(place * len(content))
    return content[:at] + struct.pack("<Q", value % 2**64)[:width] + content[at + width :]


def column(content: bytes, name: str, how: str, row: int) -> bytes:
    """Change one column of a Parquet file."""
    table = parquet.read_table(io.BytesIO(content))
    if name not in table.column_names:
        return content
    values, place = table.column(name).to_pylist(), table.column_names.index(name)
    if how == "twice":
        changed = arrow.Table.from_arrays([*table.columns, table.column(name)], [*table.column_names, name])
    elif how == "gone":
        changed = table.drop_columns([name])
    elif how == "no rows":
        changed = table.slice(0, 0)
    elif how == "nested":
        changed = table.set_column(place, name, arrow.array([[value] for value in values]))
    elif how == "dictionary":
        changed = table.set_column(place, name, table.column(name).dictionary_encode())
    else:
        odd = {"null": None, "negative": -1, "huge": 2**40, "empty": type(values[0])()}[how]
        values[row % len(values)] = odd
        changed = table.set_column(place, name, arrow.array(values))
    out = io.BytesIO()
    parquet.write_table(changed, out)
    return out.getvalue()


def cast(content: bytes, name: str, kind: str) -> bytes:
    """Give a column of a Parquet file another type."""
    table = parquet.read_table(io.BytesIO(content))
    values = table.column(name).cast(getattr(arrow, kind)(), safe=False)
    out = io.BytesIO()
    parquet.write_table(table.set_column(table.column_names.index(name), name, values), out)
    return out.getvalue()


def metadata(content: bytes, text: str) -> bytes:
    """Set the metadata in which class names stand."""
    out = io.BytesIO()
    parquet.write_table(parquet.read_table(io.BytesIO(content)).replace_schema_metadata({"huggingface": text}), out)
    return out.getvalue()


def cell(content: bytes, name: str, row: int, place: float, value: int) -> bytes:
    """Change a byte of an image or a sound in a Parquet file."""
    table = parquet.read_table(io.BytesIO(content))
    values = table.column(name).to_pylist()
    inner = values[row % len(values)]
    whole = isinstance(inner, dict)
    changed = byte(inner["bytes"] if whole else inner, place, value)
    values[row % len(values)] = {**inner, "bytes": changed} if whole else changed
    out = io.BytesIO()
    parquet.write_table(table.set_column(table.column_names.index(name), name, arrow.array(values)), out)
    return out.getvalue()


def array(content: bytes, name: str, kind: str) -> bytes:
    """Give an array of an .npz file another type, shape or values."""
    with np.load(io.BytesIO(content)) as archive:
        every = {key: archive[key] for key in archive.files}
    x = every[name]
    with np.errstate(all="ignore"):
        every[name] = {
            "objects": lambda: np.array([{}] * len(x), dtype=object), "text": lambda: x.astype(str),
            "complex": lambda: x.astype(complex), "time": lambda: x.astype(int).astype("M8[s]"),
            "half": lambda: x.astype(np.float16), "other way round": lambda: x.astype(x.dtype.newbyteorder()),
            "empty": lambda: x[:0], "scalar": lambda: x.reshape(-1)[0], "fewer": lambda: x[:-1],
            "flat": lambda: x.reshape(-1), "nan": lambda: x * np.nan, "huge": lambda: x.astype(np.int64) + 2**40,
            "unsigned": lambda: x.astype(np.uint64) - np.uint64(1), "more axes": lambda: x[..., None, None],
            "nothing wide": lambda: x[..., None][..., :0], "columns": lambda: np.asfortranarray(x),
        }[kind]()  # fmt: skip
    out = io.BytesIO()
    np.savez(out, **every)
    return out.getvalue()


def member(content: bytes, name: str, place: float, value: int) -> bytes:
    """Change a byte of an array's own file, its header for one, and write the archive anew: checksums are right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(out, "w") as target:
        for entry in source.infolist():
            inner = source.read(entry)
            target.writestr(entry.filename, byte(inner, place, value) if entry.filename == f"{name}.npy" else inner)
    return out.getvalue()


def value(content: bytes, path: list[str | int], odd: Any) -> bytes:
    """Put another value into JSON; "..." stands for a deep nest."""
    payload = json.loads(content.splitlines()[0]) if content.count(b"\n") > 1 else json.loads(content)
    inside = payload
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = odd
    line = json.dumps(payload).replace('"..."', "[" * 3000 + "]" * 3000).encode()
    return b"\n".join([line, *content.splitlines()[1:]])


CHANGES: dict[str, Callable[..., bytes]] = {
    "byte": byte, "cut": cut, "insert": insert, "again": again, "number": number, "column": column, "cast": cast,
    "metadata": metadata, "cell": cell, "array": array, "member": member, "value": value,
}  # fmt: skip

PLACE = st.floats(0, 1, exclude_max=True)
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.just("..."),
    st.lists(st.integers(0, 3), max_size=3), st.just({}), st.just("\ud800"),
)  # fmt: skip
ANY = st.one_of(
    st.tuples(st.just("byte"), PLACE, st.integers(0, 255)),
    st.tuples(st.just("cut"), PLACE),
    st.tuples(st.just("insert"), PLACE, st.text(st.characters(max_codepoint=255), min_size=1, max_size=9)),
    st.tuples(st.just("again"), PLACE, st.integers(1, 200)),
    st.tuples(st.just("number"), PLACE, st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 10**6]),
              st.sampled_from([2, 4, 8])),
)  # fmt: skip
COLUMNS = st.sampled_from(["image", "label", "text", "audio", "speaker_id", "client_id"])
OF_PARQUET = st.one_of(
    st.tuples(st.just("column"), COLUMNS, st.sampled_from(["twice", "gone", "no rows", "nested", "dictionary", "null",
              "negative", "huge", "empty"]), st.integers(0, 99)),
    st.tuples(st.just("cast"), COLUMNS, st.sampled_from(["int8", "uint64", "float32", "string", "large_string",
              "binary", "large_binary", "bool_", "float16"])),
    st.tuples(st.just("metadata"), st.sampled_from(["", "{", "[]", "9" * 5000, "[" * 5000, '{"info": []}',
              '{"info": {"features": {"label": {"names": ["a", "b"]}}}}', '{"info": {"features": {"label": []}}}',
              '{"info": {"features": {"label": {"names": 5}}}}'])),
    st.tuples(st.just("cell"), st.sampled_from(["image", "audio"]), st.integers(0, 99), PLACE, st.integers(0, 255)),
)  # fmt: skip
OF_ARRAYS = st.one_of(
    st.tuples(st.just("array"), st.sampled_from(["x", "y"]), st.sampled_from([
        "objects", "text", "complex", "time", "half", "other way round", "empty", "scalar", "fewer", "flat", "nan",
        "huge", "unsigned", "more axes", "nothing wide", "columns"])),
    st.tuples(st.just("member"), st.sampled_from(["x", "y"]), PLACE.map(lambda p: p * p), st.integers(0, 255)),
)  # fmt: skip
OF_JSON = st.tuples(
    st.just("value"),
    st.sampled_from([["users"], ["users", 0], ["num_samples"], ["user_data"], ["user_data", "ann"],
                     ["user_data", "ann", "x"], ["user_data", "ann", "y"], ["user_data", "ann", "x", 0],
                     ["user_data", "ann", "y", 1], ["user_data", "ann", "x", 2, 5], ["text"], ["label"]]),
    ODD,
)  # fmt: skip


def changes_of(kind: str) -> st.SearchStrategy[list[tuple[int, Any]]]:
    """Return lists of changes, each with the number of the file that it is made in."""
    files = KINDS[kind][0]
    ending = next(iter(files)).rpartition(".")[2]
    own = {"parquet": OF_PARQUET, "npz": OF_ARRAYS, "json": OF_JSON, "jsonl": OF_JSON}.get(ending)
    one = ANY if own is None else st.one_of(own, own, ANY)
    return st.lists(st.tuples(st.integers(0, len(files) - 1), one), min_size=1, max_size=3)


# ---- what is asked -------------------------------------------------------------------------------------------------


def outcome(kind: str, changes: Sequence[tuple[int, Change]]) -> str:
    """Read a set with changed files; return the sentence, or "" where it was read and holds together."""
    files, read = KINDS[kind]
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        for number, (name, content) in enumerate(files.items()):
            for which, change in changes:
                content = changed(content, change) if which == number else content
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="PIL")  # of damaged pictures
            warnings.filterwarnings("ignore", category=UserWarning, module="zipfile")
            return checked(read, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def checked(read: Read, place: Path) -> str:
    try:
        data = read(place)
        for split in ("train", "validation", "test"):
            indices = data.split(split)
            if len(indices):
                x, y = data.batch(indices[:4])
                assert len(x) == len(y) == min(4, len(indices))
                assert x.shape[1:] == data.sample_shape or data.vocabulary or data.resize
    except FleetFitError as error:
        message = str(error)
        assert message.strip() and "Traceback" not in message and len(message) < 4000
        return message
    if data.task == "classification":
        assert not len(data.y) or 0 <= int(data.y.min()) <= int(data.y.max()) < data.classes
    assert sum(len(data.split(split)) for split in ("train", "validation", "test")) <= len(data.x)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_the_good_files_are_read(kind: str) -> None:
    assert outcome(kind, []) == ""


def test_every_change_changes_something() -> None:
    """A mutation that does nothing would find nothing."""
    samples: dict[str, tuple[bytes, Change]] = {
        "byte": (IMAGES, ["byte", 0.5, 0]), "cut": (IMAGES, ["cut", 0.5]), "insert": (IMAGES, ["insert", 0.5, "x"]),
        "again": (IMAGES, ["again", 0.5, 9]), "number": (IMAGES, ["number", 0.5, 2**31, 4]),
        "column": (IMAGES, ["column", "label", "null", 1]), "cast": (IMAGES, ["cast", "label", "float32"]),
        "metadata": (IMAGES, ["metadata", "{"]), "cell": (IMAGES, ["cell", "image", 1, 0.5, 0]),
        "array": (of_arrays(), ["array", "x", "objects"]), "member": (of_arrays(), ["member", "x", 0.1, 200]),
        "value": (ROWS_OF_JSON.encode(), ["value", ["text"], "..."]),
    }  # fmt: skip
    assert samples.keys() == CHANGES.keys()
    for content, change in samples.values():
        assert CHANGES[change[0]](content, *change[1:]) != content, change


@pytest.mark.parametrize("case", json.loads(CORPUS.read_text(encoding="utf-8")), ids=lambda case: case["what"])
def test_stored_failures(case: dict[str, Any]) -> None:
    message = outcome(case["kind"], case["changes"])
    assert case["says"] in message if case["says"] else message == ""


SETTINGS: dict[str, Any] = {
    "deadline": None, "database": None, "derandomize": True, "phases": (Phase.generate, Phase.shrink),
    "suppress_health_check": list(HealthCheck),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_changed_files(kind: str) -> None:
    @settings(max_examples=12, **SETTINGS)
    @given(changes_of(kind))
    def run(changes: list[tuple[int, Any]]) -> None:
        outcome(kind, changes)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_changed_files(kind: str) -> None:
    @settings(max_examples=150, **SETTINGS)
    @given(changes_of(kind))
    def run(changes: list[tuple[int, Any]]) -> None:
        outcome(kind, changes)

    run()
