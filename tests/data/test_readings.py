"""Every kind and layout of data is read as before: samples, labels, splits, classes and groups, by hash and sums.

`readings.json` has them. Write it anew, after a change of readers that is meant, with
`FLEETFIT_WRITE_READINGS=1 pytest tests/data/test_readings.py`.
"""

import hashlib
import io
import json
import os
import shutil
import wave
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import fleetfit as ff
from fleetfit.api.inference import find_transform
from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import build_data
from fleetfit.data import Data
from fleetfit.data.files.memory import read_memory
from fleetfit.data.image_reader import EncodedImages

Image = pytest.importorskip("PIL.Image")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("tokenizers")
datasets = pytest.importorskip("datasets")

STORED = Path(__file__).with_name("readings.json")
WRITES = bool(os.environ.get("FLEETFIT_WRITE_READINGS"))
SHARED = Path(os.environ.get("FLEETFIT_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
Keys = dict[str, Any]


def summarize(data: Data, computed: bool = False) -> list[Any]:
    """Return the hash of what a run sees of a data set and a prediction needs, and sums of its floats.

    Another processor rounds otherwise, so floats are compared by their sums, and so are samples that are `computed`
    from floats, as spectrograms are.
    """
    parts: list[Any] = [data.name, data.classes, data.class_names, data.task, data.vocabulary, data.padding]
    parts += [data.channels_last, data.resize, data.augment, data.labeled, data.channels]
    parts += [{name: rows.tolist() for name, rows in data.splits.items()}]
    parts.append(json.loads(data.columns, parse_float=lambda text: f"{float(text):.5g}") if data.columns else None)
    parts.append(None if data.file_names is None else data.file_names.tolist())
    x = data.stored(torch.arange(len(data.y))) if isinstance(data.x, EncodedImages) else data.x
    x = x.double() / max(1, x.numel()) if computed else x
    sums = []
    for values in (x, data.y, data.groups, data.exact_targets, data.labeled_rows, data.mean, data.std, *data.targets):
        array = None if values is None else np.ascontiguousarray(values)
        if array is None or array.dtype.kind != "f":
            parts += [] if array is None else [str(array.dtype), array.shape, array.tobytes()]
            continue
        finite = np.isfinite(array)
        parts += [str(array.dtype), array.shape, finite.tobytes()]
        weights = np.random.default_rng(0).uniform(1, 2, array.size)
        sums.append(float(np.where(finite, array, 0).ravel().astype(float) @ weights))
        sums.append(float(np.abs(np.where(finite, array, 0)).astype(float).sum()))
    return [hashlib.sha256(repr(parts).encode()).hexdigest()[:20], *sums]


@pytest.fixture(scope="module")
def stored() -> Iterator[dict[str, list[Any]]]:
    """The stored summaries; with `FLEETFIT_WRITE_READINGS`, those of the readers now."""
    hashes: dict[str, list[Any]] = json.loads(STORED.read_text()) if STORED.exists() else {}
    yield hashes
    if WRITES:
        lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(hashes[case])}" for case in sorted(hashes))
        STORED.write_text(f"{{\n{lines}\n}}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which relative paths mean."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return Path()


def check(stored: dict[str, list[Any]], case: str, data: Data) -> None:
    digest, *sums = summarize(data, computed="sounds" in case or "speech" in case)
    if WRITES:
        stored[case] = [digest, *sums]
    expected = stored[case]
    assert expected[0] == digest, case
    scale = max([1e-6, *map(abs, expected[1:])])
    np.testing.assert_allclose(sums, expected[1:], rtol=1e-4, atol=1e-5 * scale, err_msg=case)


# ---- what readers read: each writes files, and returns the keys of [data] --------------------------------------------

DEVICES, CLASSES = ("a", "b", "c"), ("high", "low")
ROWS = [(device, kind, number) for device in DEVICES for kind in CLASSES for number in range(7)]
SPLITS = ("train", "train", "train", "val", "test")
Write = Callable[[Path, str, int], None]


def write_image(path: Path, kind: str, number: int) -> None:
    rng = np.random.default_rng([number, kind == "high", len(path.parts)])
    Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)[:, : 9 + number % 2 * 3]).save(path)


def write_sound(path: Path, kind: str, number: int) -> None:
    rate = (8000, 8000, 11025)[number % 3]
    tone = np.sin(np.arange(rate // 5 + 40 * number) * (0.5 if kind == "high" else 0.1) * (1 + number / 10))
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((tone * 12000).astype("<i2").tobytes())


def write_text(path: Path, kind: str, number: int) -> None:
    path.write_text(f"{kind} words of number {number} and {'more ' * (number % 4)}words by {path.parent.name}")


FILES: dict[str, tuple[str, Write, Keys]] = {
    "images": (".png", write_image, {}),
    "sounds": (".wav", write_sound, {}),
    "text": (".txt", write_text, {"vocabulary": 80, "length": 10}),
}
"""Suffix, writer and further keys of each kind of files."""


def write_folders(kind: str, layout: str) -> Keys:
    """Write class folders, of devices or not, with splits or not, or a table beside the files."""
    suffix, write, keys = FILES[kind]
    lines = []
    for place, (device, label, number) in enumerate(ROWS):
        split = SPLITS[place % 5] if layout.startswith("splits") else ""
        split = {"val": "dev"}.get(split, split) if kind != "images" else split
        parts = {"table": "files", "tables": "files"}.get(layout, f"{device}/{label}" if "devices" in layout else label)
        parts = f"{label}/images" if layout == "inner" else parts
        path = Path("set", split, parts, f"{device}{label}{number}{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, label, number)
        lines.append((path.name, label if number != 5 or "table" not in layout else "", device, number))
    if layout == "inner":
        Path("set/none").mkdir()
    if layout.startswith("table"):
        frame = pandas.DataFrame(lines, columns=["file", "label", "device", "number"])
        parts = {"train": frame[::2], "test": frame[1::2]} if layout == "tables" else {"index": frame}
        for name, part in parts.items():
            part.to_csv(f"set/{name}.csv", index=False)
    return {"path": "set", **keys}


def write_zip() -> Keys:
    write_folders("images", "splits")
    with zipfile.ZipFile("images.zip", "w") as archive:
        for path in sorted(Path("set").rglob("*.png")):
            archive.write(path)
    return {"path": "images.zip", "size": 8, "exif_orientation": False}


def encode_image(number: int) -> dict[str, Any]:
    content = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return {"bytes": content.getvalue(), "path": None}


def write_parquet(path: str, metadata: Keys | None = None, **columns: list[Any]) -> None:
    table = arrow.table(columns)
    if metadata is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": metadata}})})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=7)


def write_image_parquet(numbered: bool = False, labels: str = "names") -> Keys:
    for split, count in (("train", 24), ("validation", 6)):
        for part in range(2 if numbered and split == "train" else 1):
            name = f"set/data/{split}-0000{part}-of-0000{2 if split == 'train' else 1}" if numbered else f"set/{split}"
            y = [(i * 5 + part) % 3 for i in range(count)]
            column = [f"class {label}" for label in y] if labels == "texts" else y
            features = {"label": {"names": ["x", "y", "z"], "_type": "ClassLabel"}} if labels == "names" else None
            images = [encode_image(i + part) for i in range(count)]
            write_parquet(
                f"{name}.parquet", features, img=images, label=column, writer=[f"w{i % 4}" for i in range(count)]
            )
    return (
        {"path": "set", "groups": "writer", "samples": 16} if numbered else {"path": "set", "lazy": labels == "texts"}
    )


def write_texts(form: str, splits: bool = True, label: str = "label", values: str = "texts") -> Keys:
    for split in ("train", "test", "dev") if splits else ("",):
        lines = [
            (f"{kind} film number {number} of {device}, {kind} indeed", kind, device) for device, kind, number in ROWS
        ]
        lines = lines if split in ("train", "") else lines[:9]
        codes = {"texts": [kind for _, kind, _ in lines], "numbers": [7 + 3 * (k == "low") for _, k, _ in lines],
                 "withheld": [-1 if split == "test" else int(k == "low") for _, k, _ in lines]}[values]  # fmt: skip
        columns = {"text": [line[0] for line in lines], label: codes, "author": [line[2] for line in lines]}
        path = Path("set", split or "reviews").with_suffix(f".{form}")
        path.parent.mkdir(exist_ok=True)
        frame = pandas.DataFrame(columns)
        if form == "parquet":
            write_parquet(str(path), **columns)
        elif form in ("jsonl", "json"):
            frame.to_json(path, orient="records", lines=form == "jsonl")
        else:
            frame.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
    named = {"text": "text", "label": label} if values != "texts" else {"label": label}
    return {"path": "set" if splits else str(path), **FILES["text"][2], **named, "groups": "author"}


def make_frame(rows: int = 60) -> pandas.DataFrame:
    """Return numbers in odd forms, categories, dates, codes, gaps, and three labels."""
    i = np.arange(rows)
    return pandas.DataFrame({
        "id": i, "width": i % 7 * 1.5, "price": [f"CHF {n % 9 + 1},{n % 10}00.50" if n % 11 else "" for n in i],
        "share": [f"{n % 13}%" for n in i], "colour": [("red", "green", "", "blue")[n % 4] for n in i],
        "day": [f"2024-0{n % 9 + 1}-1{n % 9}" for n in i], "code": [f"00{n % 3}" for n in i],
        "site": [f"s{n % 4}" for n in i],
        "zip": i % 5 * 10, "same": 3, "target": (i * 37 % 60) / 7, "kind": [("up", "down", "still")[n % 3] for n in i],
    })  # fmt: skip


def write_table(form: str, splits: bool = False, **keys: Any) -> Keys:
    frame = make_frame()
    parts = {"train": frame[:40], "valid": frame[40:48], "test": frame[48:]} if splits else {"t": frame}
    for name, part in parts.items():
        path = Path("set", f"{name}.{form}")
        path.parent.mkdir(exist_ok=True)
        if form == "parquet":
            part.to_parquet(path, index=False)
        elif form == "german.csv":
            part.assign(price=part.width + 0.5).to_csv(path, index=False, sep=";", decimal=",")
        else:
            part.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
    return {"path": "set" if splits else str(path), "drop": ["target"], **keys}


def make_samples(kind: str, rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    y = np.arange(rows) % 3
    shape, dtype = {"rows": ((6,), "f4"), "images": ((8, 8, 3), "u1"), "gray": ((8, 8), "u1"), "doubles": ((5,), "f8"),
                    "series": ((20, 3), "f4"), "tokens": ((12,), "i4"), "halves": ((4,), "f2")}[kind]  # fmt: skip
    return (rng.integers(0, 20, (rows, *shape)) if dtype[0] in "ui" else rng.normal(2, 3, (rows, *shape))).astype(
        dtype
    ), y


PARTS = {"train": slice(24), "val": slice(24, 30), "test": slice(30, None)}
"""Rows of each split of arrays."""


def write_arrays(kind: str, form: str = "npz", **keys: Any) -> Keys:
    x, y = make_samples(kind)
    whole = {"x": x, "y": keys.pop("labels", y), "who": np.array([f"w{i % 4}" for i in range(len(x))])}
    if "splits" in form:
        whole = {f"{name}_{split}": values[rows] for name, values in whole.items()
                 for split, rows in PARTS.items()}  # fmt: skip
    if "npy" in form:
        Path("set").mkdir()
        for name, values in whole.items():
            np.save(f"set/{name}.npy", values)
        return {"path": "set", **keys}
    (np.savez_compressed if "compressed" in form else np.savez)("a.npz", **whole)
    return {"path": "a.npz", **keys}


def write_plain_text() -> Keys:
    Path("a.txt").write_text("one word and another word\n" * 40)
    return {"path": "a.txt", "length": 9}


def save_dataset(kind: str, splits: bool = True) -> Keys:
    if kind == "images":
        columns = {"image": [Image.open(io.BytesIO(encode_image(i)["bytes"])) for i in range(20)], "label": [0, 1] * 10}
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    elif kind == "text":
        columns = {
            "sentence": [f"{k} number {n} of {d}" for d, k, n in ROWS],
            "label": [int(k == "low") for _, k, _ in ROWS],
        }
        features = datasets.Features(
            {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["h", "l"])}
        )
    else:
        columns, features = make_frame().to_dict("list"), None
    dataset = datasets.Dataset.from_dict(columns, features)
    parts = {"train": dataset, "validation": dataset.select(range(5)), "test": dataset.select(range(5, 12))}
    (datasets.DatasetDict(parts) if splits else dataset).save_to_disk("saved")
    return {"path": "saved", **(FILES["text"][2] if kind == "text" else {})}


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A data set of pairs."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.arange(6.0) * i, i % 2


def make_memory(kind: str) -> Keys:
    frame, (x, y) = make_frame(), make_samples("rows")
    values: dict[str, Callable[[], Any]] = {
        "frame": lambda: frame, "arrow": lambda: arrow.table(frame), "columns": lambda: frame.to_dict("list"),
        "frames": lambda: {"train": frame[:40], "test": frame[40:]},
        "dataset": lambda: datasets.Dataset.from_pandas(frame),
        "typed": lambda: frame.assign(colour=frame.colour.astype("category"), day=pandas.to_datetime(frame.day)),
        "pair": lambda: (x, y), "pairs": lambda: ((x, y), (x[:9] + 1, y[:9])), "dict": lambda: {"x": x, "y": y},
        "tensors": lambda: (torch.from_numpy(x), torch.from_numpy(y)), "lists": lambda: (x.tolist(), y.tolist()),
        "texts": lambda: (x, np.array(["p", "q", "r"])[y]), "series": lambda: make_samples("series"),
        "images": lambda: make_samples("images"), "regression": lambda: (x, x[:, :2].astype("f8") * 1.1),
        "several": lambda: (x, np.stack([y > 0, y < 2], 1).astype(int)), "torch": Pairs,
    }  # fmt: skip
    return {"name": values[kind](), **({"drop": ["target"]} if kind in ("frame", "frames") else {})}


CASES: dict[str, Callable[[], Keys]] = {
    **{f"{kind} in {layout}": lambda kind=kind, layout=layout: write_folders(kind, layout)  # type: ignore[misc]
       for kind in FILES for layout in ("classes", "splits", "devices", "splits of devices", "table", "tables")},
    "images in inner folders": lambda: {**write_folders("images", "inner"), "samples": 20, "size": 8, "lazy": True},
    "images in a zip": write_zip,
    "images in Parquet": write_image_parquet,
    "images in numbered Parquet": lambda: write_image_parquet(True),
    "images in Parquet with texts": lambda: write_image_parquet(labels="texts"),
    **{f"texts in {form}": lambda form=form: write_texts(form) for form in ("csv", "tsv", "jsonl", "json", "parquet")},  # type: ignore[misc]
    "texts in one file": lambda: {**write_texts("csv", False), "samples": 20},
    "texts with numbers": lambda: write_texts("csv", values="numbers"),
    "texts with numbers in JSON": lambda: write_texts("jsonl", values="numbers"),
    "texts with withheld labels": lambda: write_texts("tsv", values="withheld"),
    **{f"table in {form}": lambda form=form: write_table(form) for form in ("csv", "tsv", "parquet", "german.csv")},  # type: ignore[misc]
    "table in splits": lambda: write_table("csv", True),
    "table in splits of Parquet": lambda: write_table("parquet", True, groups="site"),
    "table of a regression": lambda: write_table("csv", label="target", drop=["kind"], categories=["zip"]),
    "table with groups": lambda: write_table("csv", groups="site", missing=["s9", "4.5"], samples=30),
    "table with codes": lambda: write_table("csv", label="code"),
    **{f"arrays of {kind}": lambda kind=kind: write_arrays(kind)  # type: ignore[misc]
       for kind in ("rows", "images", "gray", "doubles", "series", "halves")},
    "arrays in a folder": lambda: write_arrays("rows", "npy", groups="who"),
    "arrays in splits": lambda: write_arrays("images", "splits"),
    "arrays in splits of a folder": lambda: write_arrays("rows", "npy splits", groups="who"),
    "compressed arrays": lambda: write_arrays("rows", "compressed", name="arrays"),
    "arrays of tokens": lambda: write_arrays("tokens", vocabulary=20, padding=0),
    "arrays of next tokens": lambda: write_arrays("tokens", task="next_token", vocabulary=20, y="x"),
    "arrays of texts": lambda: write_arrays("rows", labels=np.array(["p", "q"] * 20)),
    "arrays of a regression": lambda: write_arrays("rows", task="regression", labels=np.arange(40) / 7),
    "arrays of several labels": lambda: write_arrays("rows", labels=(make_samples("rows")[0][:, :3] > 0).astype(int)),
    "series with channels moved": lambda: write_arrays("series", channels_last="move"),
    **{f"saved {kind}": lambda kind=kind: save_dataset(kind) for kind in ("images", "text", "table")},  # type: ignore[misc]
    "saved table without splits": lambda: save_dataset("table", False),
    **{f"{kind} in memory": lambda kind=kind: make_memory(kind)  # type: ignore[misc]
       for kind in ("frame", "arrow", "columns", "frames", "dataset", "typed", "pair", "pairs", "dict", "tensors",
                    "lists",
                    "texts", "series", "images", "regression", "several", "torch")},
    "digits": lambda: {"name": "digits"},
    "plain text": lambda: write_plain_text(),
}  # fmt: skip
"""Name -> writes files and returns the keys of [data]."""


def read(keys: Keys) -> Data:
    data = build_data(load_experiment(data=keys).data)
    assert isinstance(data, Data)
    return data


@pytest.mark.parametrize("case", CASES)
def test_data_are_read_as_before(case: str, root: Path, stored: dict[str, list[Any]]) -> None:
    check(stored, case, read(CASES[case]()))


REAL = ("ag_news", "cifar10", "cifar100", "femnist_digits", "mnist", "shakespeare", "speech_commands_small", "sst2",
        "tiny_imagenet_small")  # fmt: skip
NAMED: dict[str, Keys] = {
    "femnist_digits": {"name": "femnist"}, "speech_commands_small": {"name": "speech_commands"},
    "tiny_imagenet_small": {"name": "images", "size": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_data_are_read_as_before(name: str, root: Path, stored: dict[str, list[Any]]) -> None:
    """The first rows of each file."""
    if not (SHARED / name / "train.parquet").is_file():
        pytest.skip(f"no {name}: set FLEETFIT_DATA to the folder that has {name}/train.parquet")
    Path(name).mkdir()
    for path in (SHARED / name).glob("*.parquet"):
        batch = next(parquet.ParquetFile(path).iter_batches(batch_size=30 if name == "speech_commands_small" else 120))
        with parquet.ParquetWriter(f"{name}/{path.name}", batch.schema) as writer:
            writer.write_batch(batch)
    check(stored, name, read({"name": name, **NAMED.get(name, {}), "folder": str(Path(name).absolute())}))


# ---- new samples for a trained model ---------------------------------------------------------------------------------

QUICK: Keys = {"rounds": 1, "local": {"max_steps": 1}, "cohort": {"count": 1}, "evaluate": {"every": 0},
               "method": {"name": "fedavg"}, "fleet": {"groups": [{"budget": 1.0}]}, "progress": False}  # fmt: skip
TRAINED: dict[str, Callable[[], Keys]] = {
    "images": lambda: {**write_folders("images", "table"), "center": 0.875, "resize": 12},
    "sounds": lambda: {**write_folders("sounds", "table"), "n_mels": 16},
    "text": lambda: write_folders("text", "table"),
    "texts": lambda: write_texts("csv"),
    "table": lambda: write_table("csv"),
    "regression": lambda: write_table("csv", label="target", drop=["kind"]),
    "arrays": lambda: write_arrays("rows"),
    "targets": lambda: write_arrays("rows", task="regression", labels=np.arange(40) / 7),
    "named": lambda: write_arrays("rows", labels=np.array(["p", "q"] * 20)),
    "parquet": lambda: {**write_image_parquet(), "lazy": False},
    "memory": lambda: {"name": make_samples("images")},
}


def write_new_files(kind: str, form: str) -> Path:
    suffix, write, _ = FILES[kind]
    lines = []
    for number, (label, device) in enumerate([("low", "d"), ("high", "a"), ("low", "a"), ("high", "e"), ("low", "f")]):
        path = Path("new", label if form == "classes" else "deep", f"{device}{number}{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, label, number)
        lines.append((path.name, label, device))
    if form == "table":
        pandas.DataFrame(lines, columns=["file", "label", "device"]).to_csv("new/more.csv", index=False)
    return Path("new/more.csv" if form == "table" else "new" if form != "file" else path)


def write_new_rows(kind: str, form: str) -> Any:
    """Write rows for a trained model, with labels or without."""
    if kind in FILES:
        return write_new_files(kind, form)
    Path("new").mkdir()
    os.chdir("new")
    if kind in ("table", "regression"):
        frame = make_frame(30).drop(columns=["kind", "target"] if form == "unlabeled" else [])[5:]
        frame = (
            frame.assign(kind=frame.get("kind", pandas.Series(dtype=str)).where(frame.id % 4 > 0))
            if form == "some"
            else frame
        )
        if form == "memory":
            return frame
        if form == "splits":
            Path("set").mkdir()
            for name, part in (("train", frame[:9]), ("test", frame[9:])):
                part.to_csv(f"set/{name}.csv", index=False)
            return Path("new/set")
        frame.to_csv("new.csv", index=False)
        return Path("new/new.csv")
    if kind == "texts":
        if form == "lines":
            Path("new.txt").write_text("one film\n\nanother film\n")
            return Path("new/new.txt")
        frame = pandas.DataFrame({"text": ["low film number", "high film", "a film"], "label": ["low", "high", "low"]})
        frame.drop(columns=["label"] if form == "unlabeled" else []).to_json("n.jsonl", orient="records", lines=True)
        return Path("new/n.jsonl")
    if kind == "parquet":
        write_image_parquet()
        return Path("new/set")
    x, y = make_samples("images" if kind == "memory" else "rows", 15)
    y = {"targets": np.arange(15) / 3, "named": np.array(["p", "q", "p"] * 5)}.get(kind, y)
    if form == "memory":
        return (x, y)
    whole = {"x": x} if form == "unlabeled" else {"x": x, "y": y}
    if form == "splits":
        whole = {f"{name}_{split}": v[:9] if split == "train" else v[9:] for name, v in whole.items()
                 for split in ("train", "test")}  # fmt: skip
    np.savez("new.npz", **whole)
    return Path("new/new.npz")


FORMS = {
    **dict.fromkeys(FILES, ("flat", "classes", "table", "file")), "texts": ("rows", "unlabeled", "lines"),
    "table": ("rows", "unlabeled", "some", "memory", "splits"), "regression": ("rows", "unlabeled", "some"),
    **dict.fromkeys(("arrays", "targets", "named"), ("rows", "unlabeled", "memory", "splits")), "parquet": ("rows",),
    "memory": ("memory",),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAINED)
def test_new_samples_are_prepared_as_before(kind: str, root: Path, stored: dict[str, list[Any]]) -> None:
    run = ff.run(data=TRAINED[kind](), out="run", **QUICK)
    home = Path.cwd()
    for form in FORMS[kind]:
        for number in range(2 if form == "rows" else 1):
            shutil.rmtree("new", ignore_errors=True)
            source = write_new_rows(kind, form)
            os.chdir(home)
            memory = read_memory(source)
            data = find_transform(run).apply(source if memory is None else memory, bool(number))
            check(stored, f"new {kind}: {form}{' in halves' * number}", data)
