"""`fleetfit predict` on images that do not look like the training folder: flat, single, of other classes and sizes."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import raises, run_verb

import fleetfit as ff
from fleetfit.api.inference import load_samples
from fleetfit.errors import ConfigError, DataError

Image = pytest.importorskip("PIL.Image")


def write_image(path: Path, brightness: int, size: tuple[int, int] = (24, 16), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(brightness + size[0]).integers(0, 30, (size[1], size[0], 3))
    Image.fromarray((noise + brightness).astype(np.uint8)).convert(mode).save(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    folder = tmp_path_factory.mktemp("images")
    for number in range(40):
        write_image(folder / "photos/dark" / f"{number}.png", 20)
        write_image(folder / "photos/light" / f"{number}.png", 200)
    partition = {"kind": "iid", "clients": 4}
    data = {"path": str(folder / "photos"), "partition": partition}
    return ff.run({"data": data, "rounds": 4, "cohort": {"fraction": 1.0}}, out=folder / "run")


def predict(run: ff.Run, path: Path, tmp_path: Path) -> list[dict[str, str]]:
    out = tmp_path / "predictions.csv"
    run_verb("predict", run.folder, "--data", path, "--out", out, code=0)
    with out.open() as file:
        return list(csv.DictReader(file))


def test_a_flat_folder_has_predictions_with_file_names(trained: ff.Run, tmp_path: Path) -> None:
    write_image(tmp_path / "new/a.png", 200)
    write_image(tmp_path / "new/b.jpg", 20, (60, 80))
    write_image(tmp_path / "new/c.png", 20, (60, 30), "L")
    rows = predict(trained, tmp_path / "new", tmp_path)
    assert [(row["file"], row["prediction"]) for row in rows] == [
        ("a.png", "light"),
        ("b.jpg", "dark"),
        ("c.png", "dark"),
    ]
    assert "label" not in rows[0]


def test_images_without_labels_in_every_form(trained: ff.Run, tmp_path: Path) -> None:
    """An archive, a saved data set, Parquet files: all are the images of the folder."""
    datasets = pytest.importorskip("datasets", reason="the extra hub is not installed")
    for number in range(3):
        write_image(tmp_path / "new" / f"{number}.png", 20 + 90 * number)
    expected = trained.predict(tmp_path / "new")
    images = [Image.open(tmp_path / "new" / f"{number}.png").copy() for number in range(3)]
    rows = datasets.Dataset.from_dict({"image": images}, datasets.Features({"image": datasets.Image()}))
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "only test"))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    rows.rename_column("image", "picture").add_column("number", [1, 2, 3]).to_parquet(str(tmp_path / "named.parquet"))
    (tmp_path / "folder").mkdir()
    rows.to_parquet(str(tmp_path / "folder" / "test.parquet"))
    shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path / "new")
    for name in ("saved", "only test", "rows.parquet", "named.parquet", "folder", "archive.zip"):
        result = trained.predict(tmp_path / name)
        assert result.truth is None and result.labels == expected.labels, name
        np.testing.assert_allclose(result.probabilities, expected.probabilities, atol=1e-6)
    labels = datasets.Dataset.from_dict({"image": images, "label": ["dark", "light", "light"]})
    labels.cast_column("image", datasets.Image()).to_parquet(str(tmp_path / "labeled.parquet"))
    assert trained.predict(tmp_path / "labeled.parquet").truth == ["dark", "light", "light"]
    with raises(DataError, path=tmp_path / "archive.zip"):
        ff.plan(data=tmp_path / "archive.zip")


def test_a_single_file_is_predicted(trained: ff.Run, tmp_path: Path) -> None:
    write_image(tmp_path / "x.jpg", 200, (100, 40))
    assert [(row["file"], row["prediction"]) for row in predict(trained, tmp_path / "x.jpg", tmp_path)] == [
        ("x.jpg", "light")
    ]


def test_some_of_the_classes_keep_their_labels(trained: ff.Run, tmp_path: Path) -> None:
    write_image(tmp_path / "new/light/a.png", 200)
    data = load_samples(trained, str(tmp_path / "new"))
    assert data.labeled and data.y.tolist() == [1] and data.class_names == ("dark", "light") and not data.notes
    assert trained.evaluate(data=tmp_path / "new")["static"]["samples"] == 1


def test_an_unknown_class_is_predicted_without_labels(trained: ff.Run, tmp_path: Path) -> None:
    write_image(tmp_path / "new/light/a.png", 200)
    write_image(tmp_path / "new/purple/b.png", 20)
    rows = predict(trained, tmp_path / "new", tmp_path)
    assert [row["prediction"] for row in rows] == ["light", "dark"] and "label" not in rows[0]
    assert "purple" in run_verb("predict", trained.folder, "--data", tmp_path / "new", code=0).out
    with pytest.raises(ConfigError) as caught:
        trained.evaluate(data=tmp_path / "new")
    assert caught.value.key == "data"


def test_images_are_prepared_as_in_training(trained: ff.Run) -> None:
    """The training folder read as new images gives the bits of training; its files are those of the index."""
    own = trained.assembly.data
    again = load_samples(trained, trained.experiment.data.settings["folder"])
    rows = again.split("test")
    assert own.file_names.tolist() == again.file_names.tolist()
    for mine, theirs in zip(own.batch(rows), again.batch(rows), strict=True):
        assert mine.equal(theirs)


def test_other_sizes_keep_their_proportions(trained: ff.Run, tmp_path: Path) -> None:
    """A band outside of the central box with the training proportions is cut off."""
    pixels = np.full((16, 48, 3), 100, np.uint8)
    pixels[:, :12] = pixels[:, 36:] = 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    data = load_samples(trained, str(tmp_path / "wide.png"))
    assert data.stored(data.split("test")).unique().tolist() == [100] and any("16x48" in note for note in data.notes)


def test_a_note_is_printed_once(trained: ff.Run, tmp_path: Path) -> None:
    folder = trained.experiment.data.settings["folder"]
    printed = run_verb("run", f"--set=data.path={folder}", "--set=rounds=1", "--out", tmp_path / "run", code=0).out
    assert printed.count("16x24") == 1
    assert "1 round\n" in printed


def test_the_table_names_the_level(trained: ff.Run) -> None:
    assert "--level" in run_verb("predict", trained.folder, code=0).out
    assert "--level" not in run_verb("predict", trained.folder, "--level", 1, code=0).out


def test_a_run_with_a_size_resizes_as_in_training(tmp_path: Path) -> None:
    """Gray photos of several sizes, and the central part of each; new ones in the folder's form give the same bits."""
    for number in range(30):
        for kind, brightness in (("dark", 20), ("light", 200)):
            write_image(tmp_path / "photos" / kind / f"{number}.png", brightness, (30 + number, 40), "L")
    data = {"path": str(tmp_path / "photos"), "size": 16, "center": 0.7, "partition": {"kind": "iid", "clients": 4}}
    run = ff.run({"data": data, "rounds": 1}, out=tmp_path / "run")
    again = load_samples(run, str(tmp_path / "photos"))
    rows = again.split("test")
    assert run.assembly.data.batch(rows)[0].equal(again.batch(rows)[0]) and again.sample_shape == (1, 16, 16)
    assert not again.notes


def test_a_link_to_an_image_is_read(trained: ff.Run, tmp_path: Path) -> None:
    write_image(tmp_path / "there/x.png", 200)
    (tmp_path / "link.png").symlink_to(tmp_path / "there/x.png")
    assert predict(trained, tmp_path / "link.png", tmp_path)[0]["prediction"] == "light"
