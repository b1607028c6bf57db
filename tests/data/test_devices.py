"""Images and texts of devices: folders for device and class, and a table of file, label and device beside the files."""

import csv
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from support import raises, run_verb

import fleetfit as ff
from fleetfit.cli.main import main
from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import build_data
from fleetfit.data import Data
from fleetfit.data.files.detect import detect_format
from fleetfit.data.transform import Transform
from fleetfit.errors import DataError

Image = pytest.importorskip("PIL.Image")
Row = tuple[str, str, int]
"""Device, class and brightness of an image."""
DEVICES, CLASSES, EACH = ("cam-a", "cam-b", "cam-c"), ("empty", "parked"), 10
ROWS: list[Row] = [(device, kind, 8 * d + 100 * k + i) for d, device in enumerate(DEVICES)
                   for k, kind in enumerate(CLASSES) for i in range(EACH)]  # fmt: skip


def write_image(path: Path, brightness: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((9, 9, 3), brightness, dtype=np.uint8)).save(path)


def load(path: Path, **keys: Any) -> tuple[Data, str]:
    """Return the data at a path, and the default kind of their partition."""
    experiment = load_experiment({"data": {"path": str(path), **keys}})
    return build_data(experiment.data), experiment.data.partition.kind


def check_rows(data: Data, rows: Sequence[Row] = ROWS) -> None:
    """Compare pixels, classes and devices of all samples with the rows, in any order."""
    assert data.groups is not None
    devices = sorted({device for device, _, _ in rows})
    pixels = data.stored(torch.arange(len(data.y)))[:, 0, 0, 0].tolist()
    names = [data.class_names[code] for code in data.y.tolist()]
    places = [devices[group] for group in data.groups.tolist()]
    assert sorted(zip(places, names, pixels, strict=True)) == sorted(rows)


def test_folders_of_devices_are_a_natural_partition(tmp_path: Path) -> None:
    """Each device has test and validation images of its own, a fifth and a tenth of the rest."""
    for device, kind, brightness in ROWS:
        write_image(tmp_path / "lot" / device / kind / f"{brightness}.png", brightness)
    data, partition = load(tmp_path / "lot")
    check_rows(data)
    assert partition == "natural" and any("cam-a" in note and "parked" in note for note in data.notes)
    assert data.groups is not None
    for split, count in (("test", 4), ("validation", 2)):
        groups = data.groups[data.split(split)].tolist()
        assert sum(abs(groups.count(group) - count) for group in range(3)) <= 1, split


@pytest.mark.parametrize("splits", [("train", "test"), ("train", "val", "test")])
def test_each_split_may_have_folders_of_devices(splits: Sequence[str], tmp_path: Path) -> None:
    """A device that lacks a class, and one without test images."""
    rows: list[Row] = []
    for number, (device, kind, brightness) in enumerate(ROWS):
        split = splits[number % len(splits)]
        if (device, kind) != ("cam-c", "parked") and (device, split) != ("cam-b", "test"):
            write_image(tmp_path / "lot" / split / device / kind / "images" / f"{brightness}.png", brightness)
            rows.append((device, kind, brightness))
    data, partition = load(tmp_path / "lot")
    check_rows(data, rows)
    assert partition == "natural" and data.groups is not None
    assert 1 not in data.groups[data.split("test")].tolist()


def test_folders_of_classes_stay_as_they_are(tmp_path: Path) -> None:
    """CLASS/* with further folders inside, and CLASS/images/*, have no devices."""
    for _, kind, brightness in ROWS:
        write_image(tmp_path / "a" / kind / f"{brightness}.png", brightness)
        write_image(tmp_path / "a" / kind / "more" / f"{brightness}.png", brightness)
        write_image(tmp_path / "b" / kind / "images" / f"{brightness}.png", brightness)
    for name in "ab":
        data, partition = load(tmp_path / name)
        assert data.groups is None and partition == "dirichlet" and data.class_names == CLASSES


@pytest.mark.parametrize("suffix", ["png", "txt"])
def test_nested_folders_without_a_common_name_are_refused(suffix: str, tmp_path: Path) -> None:
    for name in ("dog/poodle", "dog/beagle", "cat/siamese"):
        for number in range(3):
            path = tmp_path / "pets" / name / f"{number}.{suffix}"
            write_image(path.with_suffix(".png"), number)
            path.with_suffix(".png").replace(path)
    with raises(DataError, "dog/beagle", "cat/siamese", path=tmp_path / "pets"):
        load(tmp_path / "pets")


def name_in_folder(row: Row) -> str:
    return f"{row[0]}/{row[2]}.png"


def name_file(row: Row) -> str:
    return f"{row[0]}_{row[2]}.png"


def name_stem(row: Row) -> str:
    return f"{row[0]}_{row[2]}"


TABLES: dict[str, tuple[tuple[str, str, str], dict[str, str], Callable[[Row], str], str]] = {
    "usual names": (("file", "label", "device"), {}, name_file, ""),
    "other names": (("bild", "art", "ort"), {"label": "art", "groups": "ort"}, name_file, ""),
    "one name given": (("what", "path", "who"), {"groups": "who"}, name_file, ""),
    "files in folders": (("image", "class", "camera"), {}, name_in_folder, ""),
    "in a subfolder": (("filename", "species", "client_id"), {}, name_file, "pictures"),
    "without suffix": (("id_code", "diagnosis", "user"), {}, name_stem, "images"),
}


@pytest.mark.parametrize("case", TABLES)
@pytest.mark.parametrize("form", ["folder", "csv", "tsv", "splits"])
def test_a_table_of_file_label_and_device(case: str, form: str, tmp_path: Path) -> None:
    names, keys, make_name, below = TABLES[case]
    root = tmp_path / "flat"
    order = (1, 0, 2) if case == "one name given" else (0, 1, 2)
    cells = []
    for row in ROWS:
        name = make_name(row)
        write_image(root / below / (name if name.endswith(".png") else f"{name}.png"), row[2])
        values = (name, row[1], row[0])
        cells.append([values[i] for i in order])
    frame = pandas.DataFrame(cells, columns=list(names)).assign(remark="x")[[*names, "remark"]]
    if not keys.get("label"):
        frame = frame.drop(columns="remark")
    if form == "splits":
        frame[::2].to_csv(root / "train.csv", index=False)
        frame[1::2].to_csv(root / "test.csv", index=False)
    else:
        frame.to_csv(
            root / f"index.{'tsv' if form == 'tsv' else 'csv'}", index=False, sep="\t" if form == "tsv" else ","
        )
    is_file = form in ("csv", "tsv") and case != "without suffix"
    data, partition = load(root / f"index.{form}" if is_file else root, **keys)
    check_rows(data)
    assert partition == "natural" and (form != "splits" or len(data.split("test")) == 30)
    (note,) = [note for note in data.notes if "columns" in note]
    assert all(f'"{name}"' in note for name in frame.columns)


def test_a_table_without_devices_has_labels_only(tmp_path: Path) -> None:
    """Its labels count also where the images are in a single folder, whose name is no class."""
    rows = [(f"{number}.png", kind) for number, (_, kind, _) in enumerate(ROWS)]
    for (name, _), (_, _, brightness) in zip(rows, ROWS, strict=True):
        write_image(tmp_path / "birds" / "pictures" / name, brightness)
    pandas.DataFrame(rows, columns=["filename", "species"]).to_csv(tmp_path / "birds" / "species.csv", index=False)
    data, partition = load(tmp_path / "birds")
    assert data.class_names == CLASSES and data.groups is None and partition == "dirichlet"


def test_a_file_that_a_table_lacks_is_named(tmp_path: Path) -> None:
    for _, _, brightness in ROWS[:20]:
        write_image(tmp_path / f"{brightness}.png", brightness)
    rows = [(f"{row[2]}.png", row[1], row[0]) for row in ROWS[:20]]
    rows[7] = ("nowhere.png", *rows[7][1:])
    pandas.DataFrame(rows, columns=["file", "label", "device"]).to_csv(tmp_path / "t.csv", index=False)
    with raises(DataError, "nowhere.png", path="t.csv", row=8, column="file"):
        load(tmp_path / "t.csv")
    rows[7] = ("../t.csv", *rows[7][1:])
    pandas.DataFrame(rows, columns=["file", "label", "device"]).to_csv(tmp_path / "t.csv", index=False)
    with raises(DataError, "../t.csv", path="t.csv", row=8, column="file"):
        load(tmp_path / "t.csv")


def test_a_missing_file_is_not_one_of_another_folder(tmp_path: Path) -> None:
    """A name may be that of a file elsewhere, if the inner folders of both are the same."""
    rows = [(f"{kind}/{number}.png", kind) for kind in ("cat", "dog") for number in range(20)]
    for number, (name, _) in enumerate([*rows, ("dog/99.png", "dog")]):
        write_image(tmp_path / "pets" / name, number)
    table = tmp_path / "pets" / "labels.csv"
    pandas.DataFrame([*rows, ("/old/dog/99.png", "dog")], columns=["file", "label"]).to_csv(table, index=False)
    assert len(load(tmp_path / "pets", label="label")[0].x) == 41
    (tmp_path / "pets" / "dog" / "7.png").unlink()
    with raises(DataError, "dog/7.png", path=table, row=28, column="file"):
        load(tmp_path / "pets", label="label")


def test_a_table_of_numbers_beside_images_stays_a_table(tmp_path: Path) -> None:
    write_image(tmp_path / "plot.png", 3)
    frame = pandas.DataFrame({"size": np.arange(40) * 0.5, "kind": list("ab") * 20})
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert load_experiment({"data": {"path": str(tmp_path / "t.csv")}}).data.name == "table"
    assert load_experiment({"data": {"path": str(tmp_path)}}).data.name == "table"


@pytest.mark.parametrize("splits", [("",), ("train", "test")])
def test_texts_of_devices(splits: Sequence[str], tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    for number, (device, kind, brightness) in enumerate(ROWS):
        path = tmp_path / "notes" / splits[number % len(splits)] / device / kind / f"{brightness}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{kind} in the view of {device}, number {brightness}")
    data, partition = load(tmp_path / "notes")
    assert partition == "natural" and data.groups is not None
    counts = torch.zeros(3, 2, dtype=torch.int64).index_put_((data.groups, data.y), torch.tensor(1), accumulate=True)
    assert data.class_names == CLASSES and counts.tolist() == [[EACH, EACH]] * 3


@pytest.mark.parametrize("form", ["folder", "csv", "tsv", "splits", "other names", "stems"])
def test_a_table_of_texts(form: str, tmp_path: Path) -> None:
    """Each text once, with the class and the device of its row."""
    pytest.importorskip("tokenizers")
    names = ["note", "what", "place"] if form == "other names" else ["file", "label", "device"]
    cells, root = [], tmp_path / "flat"
    for device, kind, brightness in ROWS:
        name = f"{device}_{brightness}{'' if form == 'stems' else '.txt'}"
        write_text(root / "notes" / f"{device}_{brightness}.txt", kind, device, brightness)
        cells.append((name, kind, device))
    frame = pandas.DataFrame(cells, columns=names)
    if form == "splits":
        frame[::2].to_csv(root / "train.csv", index=False)
        frame[1::2].to_csv(root / "test.csv", index=False)
    else:
        frame.to_csv(root / f"i.{'tsv' if form == 'tsv' else 'csv'}", index=False, sep="\t" if form == "tsv" else ",")
    keys = {"label": "what", "groups": "place"} if form == "other names" else {}
    path = root / f"i.{form}" if form in ("csv", "tsv") else root
    data, partition = load(path, **keys)
    assert partition == "natural" and data.groups is not None and isinstance(data.x, torch.Tensor)
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(data.tokenizer)
    decoded = sorted(
        (DEVICES[group], data.class_names[y], tokenizer.decode(x).replace("##", "").replace(" ", ""))
        for x, y, group in zip(data.x.tolist(), data.y.tolist(), data.groups.tolist(), strict=True)
    )
    assert decoded == sorted((row[0], row[1], describe(row[1], row[0], row[2]).replace(" ", "")) for row in ROWS)
    assert form != "splits" or len(data.split("test")) == 30


def describe(kind: str, device: str, number: int) -> str:
    return f"{kind} seen by {device[-1]} as {'x' * (1 + number % 7)}"


def write_text(path: Path, kind: str, device: str, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(describe(kind, device, number))


@pytest.mark.parametrize("form", ["flat", "table", "table of a folder", "classes"])
def test_new_texts_of_a_table_are_predicted_with_their_labels(form: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    cells = []
    for device, kind, number in ROWS:
        write_text(tmp_path / "flat" / f"{device}_{number}.txt", kind, device, number)
        cells.append((f"{device}_{number}.txt", kind, device))
    pandas.DataFrame(cells, columns=["file", "label", "device"]).to_csv(tmp_path / "flat" / "index.csv", index=False)
    settings: dict[str, Any] = {"rounds": 1, "local": {"max_steps": 1}, "progress": False}
    run = ff.run(data={"path": str(tmp_path / "flat")}, out=tmp_path / "run", **settings)
    rows = [("dawn", "parked", 130), ("dusk", "empty", 10), ("dusk", "parked", 140)]
    names = [f"{row[1]}/{row[0]}{row[2]}.txt" if form == "classes" else f"{row[0]}{row[2]}.txt" for row in rows]
    for name, row in zip(names, rows, strict=True):
        write_text(tmp_path / "new" / name, row[1], row[0], row[2])
    if form.startswith("table"):
        frame = pandas.DataFrame([(name, row[1]) for name, row in zip(names, rows, strict=True)])
        frame.to_csv(tmp_path / "new" / "more.csv", index=False, header=["file", "label"])
    path = tmp_path / "new" / "more.csv" if form == "table" else tmp_path / "new"
    run_verb("predict", run.folder, "--data", path, "--out", tmp_path / "p.csv", code=0)
    predictions = pandas.read_csv(tmp_path / "p.csv").set_index("file")
    assert sorted(predictions.index) == sorted(names)
    if form == "flat":
        assert "label" not in predictions.columns
        return
    assert predictions.label[names].tolist() == [row[1] for row in rows]
    assert run.evaluate(data=path)["static"]["samples"] == 3


def test_new_files_of_a_table_are_its_test_set(tmp_path: Path) -> None:
    """As the rows of `test.csv` say, with classes of any name."""
    pytest.importorskip("tokenizers")
    cells = []
    for number, (device, kind, _) in enumerate(ROWS):
        write_text(tmp_path / "set" / "all" / f"{number}.txt", kind, device, number)
        cells.append((f"all/{number}.txt", {"empty": "Sci/Tech", "parked": "World"}[kind]))
    frame = pandas.DataFrame(cells, columns=["file", "label"])
    frame[::2].to_csv(tmp_path / "set" / "train.csv", index=False)
    frame[1::2].to_csv(tmp_path / "set" / "test.csv", index=False)
    data, _ = load(tmp_path / "set")
    transform = Transform.fit(data, "text", {"label": "label", "length": 64})
    others = transform.apply(tmp_path / "set")
    assert others.labeled and len(others.split("test")) == 30
    for split in ("train", "test"):
        (tmp_path / "set" / f"{split}.csv").unlink()
    frame.to_csv(tmp_path / "set" / "index.csv", index=False)
    others = transform.apply(tmp_path / "set")
    assert others.labeled and [others.class_names[code] for code in others.y.tolist()] == frame.label.tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    folder = tmp_path_factory.mktemp("devices")
    rows = []
    for device, kind, brightness in ROWS:
        write_image(folder / "flat" / f"{device}_{brightness}.png", brightness)
        rows.append((f"{device}_{brightness}.png", kind, device))
    pandas.DataFrame(rows, columns=["file", "label", "device"]).to_csv(folder / "flat" / "index.csv", index=False)
    local = {"epochs": 3}
    return ff.run({"data": {"path": str(folder / "flat")}, "rounds": 2, "local": local}, out=folder / "run")


@pytest.mark.parametrize("form", ["flat", "table", "table of a folder", "classes", "devices"])
def test_new_images_are_predicted_with_their_labels(form: str, trained: ff.Run, tmp_path: Path) -> None:
    assert len(trained.assembly.federation.clients) == len(DEVICES)
    rows = [("dawn", "parked", 130), ("dusk", "empty", 10), ("dusk", "parked", 140)]
    folders = {"classes": "{1}", "devices": "{0}/{1}"}.get(form, "")
    names = [f"{folders.format(*row)}/{row[0]}{row[2]}.png".lstrip("/") for row in rows]
    for name, row in zip(names, rows, strict=True):
        write_image(tmp_path / "new" / name, row[2])
    if form.startswith("table"):
        cells = [(name, row[1]) for name, row in zip(names, rows, strict=True)]
        pandas.DataFrame(cells, columns=["file", "label"]).to_csv(tmp_path / "new" / "more.csv", index=False)
    path = tmp_path / "new" / "more.csv" if form == "table" else tmp_path / "new"
    with pytest.raises(SystemExit) as caught:
        main(["predict", str(trained.folder), "--data", str(path), "--out", str(tmp_path / "p.csv")])
    assert caught.value.code == 0
    with (tmp_path / "p.csv").open() as file:
        predictions = {Path(row["file"]).name: row for row in csv.DictReader(file)}
    assert set(predictions) == {Path(name).name for name in names}
    if form == "flat":
        assert "label" not in predictions[Path(names[0]).name]
        return
    assert [predictions[Path(name).name]["label"] for name in names] == [row[1] for row in rows]
    assert trained.evaluate(data=path)["static"]["samples"] == 3


def test_a_folder_is_listed_once_while_it_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for device, kind in itertools.product("ab", "uvw"):
        (tmp_path / device / kind).mkdir(parents=True)
        (tmp_path / device / kind / "1.txt").write_text("a text")
    listed: list[str] = []
    scan = os.scandir

    def count(path: Any) -> Any:
        listed.append(str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", count)
    assert detect_format(str(tmp_path))["name"] == "text"
    assert len(listed) == len(set(listed)) == 9
