"""FEMNIST from LEAF's JSON and from Parquet: pixels, labels, writers, splits."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Expected, raises

from fleetfit.data import Data, partition
from fleetfit.data.files import folders
from fleetfit.data.sets import femnist
from fleetfit.errors import DataError

pytest.importorskip("PIL")
pytest.importorskip("pyarrow")
REAL = Path(os.environ.get("FLEETFIT_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
NAMES = [*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]


def pages(count: int, seed: int = 0) -> np.ndarray:
    """Bright paper with a little dark ink, uint8 [count, 28, 28]."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random((count, 28, 28)) < 0.1, rng.integers(0, 100, (count, 28, 28)), 255).astype(np.uint8)


def as_leaf(writers: dict[str, tuple[np.ndarray, list[int]]]) -> str:
    """What LEAF's preprocessing writes: gray values divided by 255, in lists."""
    data = {w: {"x": (x.reshape(len(x), 784) / 255.0).tolist(), "y": y} for w, (x, y) in writers.items()}
    return json.dumps({"users": [*writers], "num_samples": [len(y) for _, y in writers.values()], "user_data": data})


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Two undivided files: writers b (10 images), a (20), then c (10)."""
    x = pages(40)
    labels = [i % 62 for i in range(40)]
    place = tmp_path / "femnist" / "data" / "all_data"
    place.mkdir(parents=True)
    (place / "all_data_0.json").write_text(as_leaf({"b": (x[:10], labels[:10]), "a": (x[10:30], labels[10:30])}))
    (place / "all_data_1.json").write_text(as_leaf({"c": (x[30:], labels[30:])}))
    return tmp_path / "femnist", x


def test_leaf_s_pixels_are_exact_and_ink_is_bright(whole: tuple[Path, np.ndarray]) -> None:
    folder, x = whole
    data = femnist.femnist(str(folder))
    assert np.array_equal(data.x.numpy(), 255 - x[:, None])
    assert data.y.tolist() == list(range(40)) and data.classes == 62 and list(data.class_names) == NAMES
    assert data.groups is not None and data.groups.tolist() == [1] * 10 + [0] * 20 + [2] * 10
    batch = data.batch(torch.tensor([2]))[0]
    assert np.allclose(batch.numpy()[0, 0], ((255 - x[2]) / 255 - 0.04) / 0.17, atol=1e-5)


def test_each_writer_gives_up_its_share_and_is_a_client(whole: tuple[Path, np.ndarray]) -> None:
    data = femnist.femnist(str(whole[0]), test=0.2, validation=0.25)
    assert data.groups is not None
    for split, share in (("test", [4, 2, 2]), ("validation", [4, 2, 2]), ("train", [12, 6, 6])):
        assert torch.bincount(data.groups[data.split(split)]).tolist() == share
    parts = partition(data, "natural", None, 0)
    assert [[len(part[s]) for s in ("train", "validation", "test")] for part in parts] == [
        [12, 4, 4],
        [6, 2, 2],
        [6, 2, 2],
    ]


def test_a_number_of_samples_is_drawn_class_by_class(whole: tuple[Path, np.ndarray]) -> None:
    data = femnist.femnist(str(whole[0]), test=0.2, validation=0.25, samples=16)
    assert {split: len(data.split(split)) for split in data.splits} == {"train": 12, "validation": 4, "test": 8}
    with pytest.raises(DataError) as caught:
        femnist.femnist(str(whole[0]), test=0.2, samples=33)  # of 32
    assert caught.value.key == "samples"


def test_leaf_s_own_division(tmp_path: Path) -> None:
    x = pages(9)
    for split, rows in (("train", slice(0, 6)), ("test", slice(6, 9))):
        place = tmp_path / "data" / split
        place.mkdir(parents=True)
        (place / f"all_data_0_keep_0_{split}_9.json").write_text(
            as_leaf({"w": (x[rows], [1, 61, 0, 5, 9, 2][: rows.stop - rows.start])})
        )
    data = femnist.femnist(str(tmp_path), validation=0.0)
    assert data.split("test").tolist() == [6, 7, 8] and len(data.split("train")) == 6
    assert data.y.tolist() == [1, 61, 0, 5, 9, 2, 1, 61, 0]


def test_leaf_is_cached(whole: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    first = femnist.femnist(str(whole[0]))
    monkeypatch.setattr(femnist, "read_leaf_users", None)
    again = femnist.femnist(str(whole[0]))
    assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y)
    assert again.groups is not None and first.groups is not None and torch.equal(first.groups, again.groups)


@pytest.mark.parametrize("label", ["label", "character"])
def test_parquet_is_the_same(
    whole: tuple[Path, np.ndarray],
    tmp_path: Path,
    write: Callable[..., Path],
    picture: Callable[..., bytes],
    label: str,
) -> None:
    folder, x = whole
    writers = ["b"] * 10 + ["a"] * 20 + ["c"] * 10
    write(tmp_path / "p" / "train-00000-of-00001.parquet", [picture(page) for page in x], list(range(40)), label=label,
          names=NAMES, writer_id=writers)  # fmt: skip
    sets: list[Data] = [femnist.femnist(str(place)) for place in (folder, tmp_path / "p")]
    assert torch.equal(sets[0].x, sets[1].x) and torch.equal(sets[0].y, sets[1].y)
    for split in ("train", "validation", "test"):
        assert torch.equal(sets[0].split(split), sets[1].split(split))
    assert sets[1].class_names == tuple(NAMES) and sets[1].sample_shape == (1, 28, 28)
    assert femnist.femnist(str(tmp_path / "p"), resize=224).sample_shape == (1, 224, 224)


def test_digits_alone_have_ten_classes(
    tmp_path: Path, write: Callable[..., Path], picture: Callable[..., bytes]
) -> None:
    dark = [picture(255 - page) for page in pages(10)]
    write(tmp_path / "train.parquet", dark, [0, 1] * 5, writer_id=["w"] * 10)
    data = femnist.femnist(str(tmp_path))
    assert data.classes == 10 and data.class_names == tuple("0123456789")
    assert np.array_equal(data.x[:, 0].numpy(), 255 - pages(10))  # dark paper stays as it is


def test_characters_that_are_absent_keep_their_places(
    tmp_path: Path, write: Callable[..., Path], picture: Callable[..., bytes]
) -> None:
    write(tmp_path / "train.parquet", [*map(picture, pages(10))], [*"Bab1B"] * 2, label="character",
          writer_id=["w"] * 10)  # fmt: skip
    data = femnist.femnist(str(tmp_path))
    assert [data.class_names[code] for code in data.y.tolist()] == [*"Bab1B"] * 2 and data.classes == 62


def bad(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def at(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content["user_data"]["c"])
        path.write_text(json.dumps(content))

    return at


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (bad(lambda c: c["x"][0].pop()), Expected('"c"', path="all_data_1.json")),
        (bad(lambda c: [x.pop() for x in c["x"]]), Expected('"c"', 784, path="all_data_1.json")),
        (bad(lambda c: c["x"][0].__setitem__(3, 1.5)), Expected(0, 1, 784, 1.5, path="all_data_1.json")),
        (bad(lambda c: c["x"][0].__setitem__(3, "a")), Expected('"c"', path="all_data_1.json")),
        (bad(lambda c: c["y"].__setitem__(0, 62)), Expected('"c"', "0..61", path="all_data_1.json")),
        (bad(lambda c: c["y"].__setitem__(0, 0.5)), Expected('"c"', 0, path="all_data_1.json")),
        (bad(lambda c: c["y"].pop()), Expected('"c"', '"x"', path="all_data_1.json")),
        (lambda path: path.write_text('{"users": ['), Expected(1, 12, path="all_data_1.json")),
    ],
)
def test_malformed_leaf_files(
    whole: tuple[Path, np.ndarray], change: Callable[[Path], object], expected: Expected
) -> None:
    change(whole[0] / "data" / "all_data" / "all_data_1.json")
    with raises(DataError, expected):
        femnist.femnist(str(whole[0]))
    assert list(Path(os.environ["FLEETFIT_CACHE"]).iterdir()) == []


def test_other_images_are_refused(tmp_path: Path, write: Callable[..., Path], picture: Callable[..., bytes]) -> None:
    write(tmp_path / "train.parquet", [picture(np.zeros((8, 8), np.uint8))] * 4, [0, 1] * 2, writer_id=["w"] * 4)
    with raises(DataError, "28x28", 2, "8x8"):
        femnist.femnist(str(tmp_path))


def test_from_the_hub_where_it_is_nowhere_else(monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, np.ndarray]) -> None:
    requests = []

    def downloaded(name: str, *more: object) -> Path:
        requests.append((name, *more))
        return whole[0]

    monkeypatch.setattr(folders, "download", downloaded)
    with raises(DataError, "hub = true", key="hub"):
        femnist.femnist()
    assert len(femnist.femnist(hub=True).x) == 40
    assert requests == [("femnist", "flwrlabs/femnist", None, None)]
    assert len(femnist.femnist(str(whole[0]), hub=True).x) == 40 and len(requests) == 1


def test_the_digits_of_190_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (REAL / "femnist_digits" / "train.parquet").is_file():
        pytest.skip("no femnist_digits: set FLEETFIT_DATA to the folder that holds it")
    monkeypatch.setenv("FLEETFIT_DATA", str(REAL))
    data = femnist.femnist("femnist_digits")
    assert data.x.shape == (18_504, 1, 28, 28) and data.classes == 10 and len(data.split("test")) == 3706
    parts = partition(data, "natural", None, 0)
    assert len(parts) == 190
    assert min(len(part["test"]) for part in parts) > 0
    x, _ = data.batch(torch.arange(0, 18_504, 7))
    assert abs(float(x.mean())) < 0.1 and 0.9 < float(x.std()) < 1.1
