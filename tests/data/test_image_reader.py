"""Images that stay encoded on disk: the same pixels as decoded ones, and never more of them than asked for."""

import copy
import dataclasses
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import Expected, raises

import fleetfit as ff
from fleetfit.data import Data, EncodedImages, image_reader
from fleetfit.data.augment import augment_batch, draw_crop_numbers, find_crop
from fleetfit.data.dataset import load_data, save_data
from fleetfit.data.files import images as images_module, labeled
from fleetfit.data.files.detect import detect_format
from fleetfit.data.files.images import images
from fleetfit.data.image_reader import ImageFiles
from fleetfit.data.sets.imagenet import imagenet
from fleetfit.errors import DataError

Picture = Callable[..., bytes]
Write = Callable[..., Path]
Image = pytest.importorskip("PIL.Image")
REAL = Path(os.environ.get("FLEETFIT_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def photographs(count: int, seed: int = 0) -> list[np.ndarray]:
    """Smooth color pictures of different sizes, larger than they will be needed."""
    rng = np.random.default_rng(seed)
    resized = []
    for _ in range(count):
        small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        height, width = rng.integers(20, 50, 2).tolist()
        resized.append(np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)))
    return resized


@pytest.fixture
def shards(tmp_path: Path, write: Write, picture: Picture) -> Path:
    """13 training images in three files and 5 for validation, 3 classes, as ImageNet on the hub."""
    content = [picture(p, "JPEG") for p in photographs(18)]
    folder = tmp_path / "shards"
    for i, (start, end) in enumerate(((0, 5), (5, 6), (6, 13))):
        write(
            folder / "data" / f"train-{i:05}-of-00003.parquet", content[start:end], [j % 3 for j in range(start, end)]
        )
    write(folder / "data" / "validation-00000-of-00001.parquet", content[13:], [0, 1, 2, 0, 1])
    return folder


@pytest.fixture
def folders(tmp_path: Path, picture: Picture) -> Path:
    """The layout of ImageNet: 3 classes of 4 training images, 2 of validation, and unlabeled test images."""
    folder = tmp_path / "photos"
    content = iter([picture(p, "JPEG") for p in photographs(20)])
    for split, count in (("train", 4), ("val", 2)):
        for name in ("n03", "n01", "n02"):
            place = folder / split / name
            place.mkdir(parents=True)
            for i in range(count):
                (place / f"{name}_{i}.JPEG").write_bytes(next(content))
            (place / "notes.txt").write_text("no image")
    (folder / "test").mkdir()
    (folder / "test" / "x.JPEG").write_bytes(next(content))
    return folder


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the place of each image that is decoded."""
    places: list[str] = []
    original = image_reader.decode_into

    def counted(target: np.ndarray, opened: Any, place: object, *more: Any) -> None:
        places.append(str(place))
        original(target, opened, place, *more)

    monkeypatch.setattr(image_reader, "decode_into", counted)
    return places


def read_all_rows(data: Data) -> torch.Tensor:
    return data.x.index_select(0, torch.arange(len(data.x)))


@pytest.mark.parametrize("options", [{"size": 16}, {"size": 24, "center": 0.5}, {"size": 64, "channels": 1}])
@pytest.mark.parametrize("layout", ["shards", "folders"])
def test_same_pixels_as_decoded_ones(layout: str, options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(layout)
    lazy, eager = (images(str(folder), lazy=lazy, validation=0.25, **options) for lazy in (True, False))
    assert isinstance(lazy.x, EncodedImages) and isinstance(eager.x, torch.Tensor)
    assert lazy.x.shape == eager.x.shape and len(lazy.x) == len(eager.x) and lazy.x.dtype == torch.uint8
    assert torch.equal(read_all_rows(lazy), eager.x)
    assert torch.equal(lazy.y, eager.y) and lazy.class_names == eager.class_names
    for split in ("train", "validation", "test"):
        assert torch.equal(lazy.split(split), eager.split(split))
    some = torch.tensor([7, 2, 7])
    for augment in (None, "crop-flip"):
        pair = [dataclasses.replace(data, augment=augment, resize=(10, 10)) for data in (lazy, eager)]
        a, b = (data.batch(some, torch.Generator().manual_seed(3)) for data in pair)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        assert a[0].shape[2:] == (10, 10)
    assert "encoded" in repr(lazy.x).lower() and "Data(" in repr(lazy)


def test_class_folders_are_imagenet_s(folders: Path) -> None:
    data = images(str(folders), size=8, lazy=True, validation=0.25)
    assert data.name == "photos" and data.class_names == ("n01", "n02", "n03")
    assert data.y.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0, 0, 1, 1, 2, 2]
    assert data.split("test").tolist() == list(range(12, 18))  # `val`, as there is no labeled test set
    assert len(data.split("validation")) == 3 and len(data.split("train")) == 9
    one = Image.open(folders / "train" / "n02" / "n02_3.JPEG").convert("RGB")
    side = min(one.size)
    left, top = (one.width - side) / 2, (one.height - side) / 2
    cut = one.resize((8, 8), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    assert np.array_equal(read_all_rows(data)[7].numpy(), np.asarray(cut).transpose(2, 0, 1))


@pytest.mark.parametrize("top", ["", "photos/"])
@pytest.mark.parametrize("lazy", [False, True])
def test_zip_archive_is_read_like_its_folders(folders: Path, tmp_path: Path, top: str, lazy: bool) -> None:
    with zipfile.ZipFile(tmp_path / "photos.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folders.rglob("*.*")):
            archive.write(path, top + path.relative_to(folders).as_posix())
        archive.writestr(f"__MACOSX/{top}train/n01/._n01_0.JPEG", b"\0\5\x16\7")
    detected = detect_format(str(tmp_path / "photos.zip"))
    assert (detected["name"], detected["size"]) == ("images", detect_format(str(folders))["size"])
    data, expected = (images(str(place), size=8, lazy=lazy) for place in (tmp_path / "photos.zip", folders))
    assert data.name == "photos" and data.class_names == expected.class_names
    assert torch.equal(read_all_rows(data), read_all_rows(expected)) and torch.equal(data.y, expected.y)


def write_zip(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/") + ".png", content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"not an archive"),
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"content" * 9, b"changed" * 9)),
        lambda path: write_zip(path),
        lambda path: path.unlink(),
    ],
)
def test_damaged_zip_archives(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("cat/0.png", b"content" * 99)
    damage(tmp_path / "a.zip")
    with raises(DataError, path="a.zip"):
        images(str(tmp_path / "a.zip"))


def test_zip_archive_stays_in_its_folder_and_within_its_limits(
    tmp_path: Path, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = picture(np.zeros((4, 4), np.uint8))
    write_zip(tmp_path / "a.zip", **{"cat__0": content, "dog__0": content, "..__..__..__out__0": content})
    monkeypatch.setattr(images_module, "_MAX_UNPACKED", 10)
    assert images(str(tmp_path / "a.zip"), test=0.0, validation=0.0).class_names == ("cat", "dog")
    assert not list(tmp_path.parent.rglob("out/0.png"))
    write_zip(tmp_path / "b.zip", cat__0=b"\0" * 10**6)
    with raises(DataError, "1,000,000", path="b.zip"):
        images(str(tmp_path / "b.zip"))


def test_classes_without_splits_and_one_folder_deeper(folders: Path) -> None:
    data = images(str(folders / "train"), size=8, test=0.25, validation=0.0)
    assert len(data.split("train")) == 9 and len(data.split("test")) == 3
    for place in list((folders / "train").iterdir()):
        (place / "images").mkdir()
        for file in place.glob("*.JPEG"):
            file.rename(place / "images" / file.name)
    deeper = images(str(folders / "train"), size=8, test=0.25, validation=0.0)
    assert torch.equal(deeper.x, data.x) and torch.equal(deeper.y, data.y)


def test_the_index_is_made_once_and_anew_when_files_come(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = images(str(folders), size=8, lazy=True)
    with monkeypatch.context() as patch:
        patch.setattr(labeled.np, "save", None)  # what an index needs
        assert torch.equal(read_all_rows(images(str(folders), size=8, lazy=True)), read_all_rows(first))
    shutil.copy(folders / "train" / "n01" / "n01_0.JPEG", folders / "train" / "n01" / "n01_9.JPEG")
    assert len(images(str(folders), size=8, lazy=True).x) == len(first.x) + 1


def test_rows_are_unpacked_once(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_all_rows(images(str(shards), size=8, lazy=True))
    monkeypatch.setattr(image_reader.np, "save", None)  # what unpacking needs and reading does not
    assert torch.equal(read_all_rows(images(str(shards), size=8, lazy=True)), first)


@pytest.mark.parametrize("damage", ["images.bin", "offsets.npy", "sources.json"])
def test_a_damaged_copy_is_made_again(shards: Path, damage: str) -> None:
    first = read_all_rows(images(str(shards), size=8, lazy=True))
    copy = next(Path(os.environ["FLEETFIT_CACHE"]).iterdir())
    (copy / damage).write_bytes((copy / damage).read_bytes()[:-9])
    assert torch.equal(read_all_rows(images(str(shards), size=8, lazy=True)), first)
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_without_a_cache(shards: Path, folders: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = read_all_rows(images(str(shards), size=8, lazy=True))
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("FLEETFIT_CACHE", str(tmp_path / "a file"))
    assert torch.equal(read_all_rows(images(str(shards), size=8, lazy=True)), expected)
    assert len(images(str(folders), size=8, lazy=True).x) == 18


def test_full_disk_is_an_error(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_reader.np, "save", full)
    with raises(DataError, "FLEETFIT_CACHE", path="cache"):
        images(str(shards), size=8, lazy=True)
    assert list(Path(os.environ["FLEETFIT_CACHE"]).iterdir()) == []


def test_only_selected_images_are_decoded(shards: Path, decoded: list[str]) -> None:
    data = images(str(shards), size=16, lazy=True, augment="resized-crop")
    again = copy.deepcopy(data.share({"train": torch.arange(6)}))
    assert decoded == []  # checks and copies touch no sample
    again.batch(torch.tensor([0, 5, 6, 17]))
    names = [f"row {row} of {shards}/data/{name}.parquet" for row, name in
             ((0, "train-00000-of-00003"), (0, "train-00001-of-00003"), (0, "train-00002-of-00003"),
              (4, "validation-00000-of-00001"))]  # fmt: skip
    assert decoded == names
    again.batch(torch.tensor([1, 2]), torch.Generator().manual_seed(0))
    assert len(decoded) == 6


def test_a_set_of_terabytes_takes_no_memory(folders: Path, decoded: list[str]) -> None:
    """Ten million places of one image would be 6 TB when decoded."""
    name = np.array([b"n01_0.JPEG"])
    places = ImageFiles(folders / "train" / "n01", np.lib.stride_tricks.as_strided(name, (10_000_000,), (0,)))
    x = EncodedImages(places, (3, 448, 448))
    y = torch.zeros(1, dtype=torch.int64).expand(10_000_000)
    data = Data("vast", x, y, {"train": torch.arange(1000), "test": torch.arange(1000, 1010)}, 1)
    assert data.batch(torch.tensor([5_000_000, 999]))[0].shape == (2, 3, 448, 448)
    assert len(decoded) == 2


def test_large_sets_stay_encoded_by_default(shards: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (shards, folders):
        assert isinstance(images(str(folder), size=16).x, torch.Tensor)
        monkeypatch.setattr(images_module, "LAZY_ABOVE", 18 * 3 * 16 * 16)
        assert isinstance(images(str(folder), size=16).x, torch.Tensor)
        monkeypatch.setattr(images_module, "LAZY_ABOVE", 18 * 3 * 16 * 16 - 1)
        assert isinstance(images(str(folder), size=16).x, EncodedImages)
        assert isinstance(images(str(folder), size=16, lazy=False).x, torch.Tensor)
        monkeypatch.undo()
        monkeypatch.setenv("FLEETFIT_CACHE", str(folder.parent / "cache"))


def test_images_of_one_size_need_none(tmp_path: Path, write: Write, picture: Picture) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 7, 3), dtype=np.uint8)
    write(tmp_path / "s" / "train.parquet", [picture(p) for p in pixels], [0, 1, 0, 1, 0])
    data = images(str(tmp_path / "s"), lazy=True, test=0.0)
    assert np.array_equal(read_all_rows(data).numpy(), pixels.transpose(0, 3, 1, 2))
    write(tmp_path / "s" / "train.parquet", [picture(p) for p in (*pixels, pixels[0, :4])], [0, 1, 0, 1, 0, 1])
    data = images(str(tmp_path / "s"), lazy=True, test=0.0)
    with raises(DataError, "7x4", "7x6", key="size", row=5, path="train.parquet"):
        read_all_rows(data)


def test_threads_decode_the_same(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = images(str(folders), size=16, lazy=True)
    expected = read_all_rows(data)
    monkeypatch.setattr(image_reader, "_LARGE_BYTES", 0)
    assert torch.equal(read_all_rows(data), expected)


@pytest.mark.parametrize("threads", [True, False])
def test_missing_or_damaged_image_names_its_path(folders: Path, monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    monkeypatch.setattr(image_reader, "_LARGE_BYTES", 0 if threads else 10**9)
    data = images(str(folders), size=8, lazy=True)
    broken = folders / "train" / "n01" / "n01_2.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    with raises(DataError, path="n01_2.JPEG"):
        read_all_rows(data)
    broken.unlink()
    with raises(DataError, path="n01_2.JPEG"):
        read_all_rows(data)


def test_shortened_copy_is_an_error(shards: Path) -> None:
    data = images(str(shards), size=8, lazy=True)
    copy_of = next(Path(os.environ["FLEETFIT_CACHE"]).iterdir()) / "images.bin"
    copy_of.write_bytes(copy_of.read_bytes()[:-1])
    with raises(DataError, path="images.bin"):
        read_all_rows(data)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda f: (f / "val" / "n02").rename(f / "val" / "n04"), Expected(path="n04")),
        (lambda f: [shutil.rmtree(f / "val" / n) for n in ("n01", "n02", "n03")], Expected(path="val")),
        (lambda f: [shutil.rmtree(f / "train" / n) for n in ("n01", "n02", "n03")], Expected("train.parquet")),
    ],
)
def test_wrong_class_folders(folders: Path, change: Callable[[Path], object], expected: Expected) -> None:
    change(folders)
    with raises(DataError, expected):
        images(str(folders), size=8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"label": "kind"}, Expected(path="photos")),
        ({"size": 8, "center": 0.0}, Expected(0, 1, key="center")),
        ({"center": 0.5}, Expected("center = 0.5", key="center")),
        ({"size": 8, "resize": 0}, Expected(1, key="resize")),
    ],
)
def test_wrong_parameters(folders: Path, options: dict[str, Any], expected: Expected) -> None:
    with raises(DataError, expected):
        images(str(folders), **options)


def test_imagenet_is_a_named_set(tmp_path: Path, picture: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    content = [picture(p, "JPEG") for p in photographs(2)]
    for split in ("train", "val"):
        for i in range(1000):
            place = tmp_path / "imagenet" / split / f"n{i:08}"
            place.mkdir(parents=True)
            (place / "a.JPEG").write_bytes(content[i % 2])
    monkeypatch.setenv("FLEETFIT_DATA", str(tmp_path))
    data = imagenet(size=32, validation=0.0)
    assert data.classes == 1000 and data.x.shape == (2000, 3, 32, 32) and data.augment == "resized-crop"
    assert len(data.split("test")) == 1000
    assert not isinstance(data.x, EncodedImages) and isinstance(imagenet(size=32, lazy=True).x, EncodedImages)
    shutil.rmtree(tmp_path / "imagenet" / "train" / "n00000999")
    shutil.rmtree(tmp_path / "imagenet" / "val" / "n00000999")
    with raises(DataError, 1000, 999, key="name"):
        imagenet(size=32)


# ---- worker processes -------------------------------------------------


@pytest.mark.parametrize("layout", ["shards", "folders"])
def test_stored_by_reference(layout: str, request: pytest.FixtureRequest, tmp_path: Path, decoded: list[str]) -> None:
    folder = request.getfixturevalue(layout)
    data = images(str(folder), size=16, lazy=True, augment="resized-crop")
    target = tmp_path / "setup"
    target.mkdir()
    references = json.loads(json.dumps(save_data(data, target)["encoded"]))
    assert decoded == []
    assert sum(file.stat().st_size for file in target.iterdir()) < 2000
    rest = save_data(data, target)
    again = load_data({**rest, "encoded": references}, target)
    assert torch.equal(read_all_rows(again), read_all_rows(data)) and again.augment == "resized-crop"
    rng = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    assert torch.equal(again.batch(torch.arange(9), rng[0])[0], data.batch(torch.arange(9), rng[1])[0])


def test_another_device_gets_batches_only(folders: Path) -> None:
    data = images(str(folders), size=8, lazy=True).to("meta")
    x, y = data.batch(torch.tensor([1, 2]))
    assert x.device.type == y.device.type == "meta" and x.shape == (2, 3, 8, 8)
    assert isinstance(data.x, EncodedImages) and data.x.cpu().device.type == "cpu"


@pytest.mark.slow
def test_two_rounds_in_worker_processes(folders: Path, tmp_path: Path) -> None:
    """The workers see the images through their places alone and end with the same bits as one process."""
    settings_ = {
        "rounds": 2,
        "data": {"name": "images", "folder": str(folders), "size": 8, "lazy": True, "augment": "resized-crop",
                 "validation": 0.0, "partition": {"kind": "iid", "clients": 3}},
        "model": {"name": "cnn"}, "local": {"epochs": 1, "batch_size": 2}, "cohort": {"fraction": 1.0},
        "fleet": {"groups": [{"budget": 1.0}]}, "method": {"name": "all_large"}, "evaluate": {"every": 0},
    }  # fmt: skip
    states = []
    for engine in ({"name": "local"}, {"name": "processes", "workers": 1}):
        run = ff.run(**settings_, engine=engine, out=tmp_path / engine["name"])
        states.append(run.model().state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# ---- random crops -------------------------------------------------


@given(width=st.integers(1, 600), height=st.integers(1, 600), seed=st.integers(0, 1000))
def test_a_patch_lies_inside_and_has_its_share(width: int, height: int, seed: int) -> None:
    numbers = draw_crop_numbers(1, torch.Generator().manual_seed(seed))[0]
    left, top, wide, tall, _ = find_crop(numbers, width, height)
    assert 0 <= left <= left + wide <= width and 0 <= top <= top + tall <= height and wide > 0 and tall > 0
    if min(width, height) > 100 and max(width, height) < 1.3 * min(width, height):  # rounding to pixels is small
        assert 0.07 < wide * tall / (width * height) <= 1.01
        assert 0.7 < wide / tall < 1.4


def test_patches_are_spread_as_they_should_be() -> None:
    """On a large square nothing is redrawn for a share below 3/4: then share, log ratio and place are uniform."""
    numbers = draw_crop_numbers(20_000, torch.Generator().manual_seed(0))
    crops = np.array([find_crop(row, 4000, 4000) for row in numbers], dtype=np.float64)
    left, top, wide, tall, mirrored = crops.T
    share, ratio = wide * tall / 4000**2, np.log(wide / tall)
    uncut = share < 0.7
    assert abs(share[uncut].mean() - (0.08 + 0.7) / 2) < 0.005
    assert abs(ratio[uncut].mean()) < 0.005
    assert abs(ratio[uncut].std() - 2 * np.log(4 / 3) / 12**0.5) < 0.005  # uniform over [-a, a]: 2a / sqrt(12)
    assert abs((left / (4000 - wide + 1)).mean() - 0.5) < 0.01 and abs((top / (4000 - tall + 1)).mean() - 0.5) < 0.01
    assert abs(mirrored.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(left / (4000 - wide + 1), top / (4000 - tall + 1))[0, 1]) < 0.02


def test_an_image_too_narrow_gets_its_middle() -> None:
    numbers = draw_crop_numbers(1, torch.Generator().manual_seed(0))[0]
    assert find_crop(numbers, 1000, 10)[:4] == ((1000 - 13) // 2, 0, 13, 10)
    assert find_crop(numbers, 10, 1000)[:4] == (0, (1000 - 13) // 2, 10, 13)


def test_encoded_images_are_cut_before_they_are_resized(folders: Path) -> None:
    data = images(str(folders), size=12, lazy=True, augment="resized-crop", mean=(0.0,), std=(1 / 255,))
    indices = torch.arange(12)
    numbers = draw_crop_numbers(12, torch.Generator().manual_seed(5))
    batch = data.batch(indices, torch.Generator().manual_seed(5))[0]
    names = sorted((folders / "train").glob("*/*.JPEG"))
    for row, name in enumerate(names):
        whole = Image.open(name).convert("RGB")
        left, top, wide, tall, mirrored = find_crop(numbers[row], *whole.size)
        part = whole.resize((12, 12), Image.Resampling.BILINEAR, box=(left, top, left + wide, top + tall))
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else part
        assert np.allclose(batch[row].numpy(), np.asarray(part).transpose(2, 0, 1), atol=1e-3)
    assert torch.equal(data.batch(indices)[0], data.batch(indices)[0])
    assert not torch.equal(data.batch(indices, torch.Generator().manual_seed(6))[0], batch)


@settings(deadline=None, max_examples=40)
@given(height=st.integers(1, 20), width=st.integers(1, 20), seed=st.integers(0, 1000))
def test_images_in_memory_are_interpolated(height: int, width: int, seed: int) -> None:
    """Against torch's own interpolation of each patch: half a step of 1/256 pixel and rounding apart."""
    x = torch.randint(0, 256, (4, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    numbers = draw_crop_numbers(4, torch.Generator().manual_seed(seed))
    augmented = augment_batch(x, "resized-crop", torch.Generator().manual_seed(seed))
    assert augmented.dtype == torch.uint8 and augmented.shape == x.shape
    floats = augment_batch(x.double(), "resized-crop", torch.Generator().manual_seed(seed))
    assert floats.dtype == torch.float64
    assert (augmented.double() - floats).abs().max() <= 0.5 + 1e-3  # rounded, not cut off
    for row in range(4):
        left, top, wide, tall, mirrored = find_crop(numbers[row], width, height)
        part = x[row : row + 1, :, top : top + tall, left : left + wide].double()
        whole = torch.nn.functional.interpolate(part, (height, width), mode="bilinear", align_corners=False)[0]
        expected = whole.flip(2) if mirrored else whole
        assert (augmented[row].double() - expected).abs().max() <= 255 * 2 * (0.5 / 256) + 0.5 + 1e-6
        assert (floats[row] - expected).abs().max() <= 255 * 2 * (0.5 / 256) + 1e-3


# ---- real photographs -------------------------------------------------


def test_tiny_imagenet_the_same_both_ways(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    source = REAL / "tiny_imagenet_small"
    if not (source / "train.parquet").is_file():
        pytest.skip("no tiny_imagenet_small: set FLEETFIT_DATA to the folder that holds it")
    for name in ("train", "validation"):
        batch = next(parquet.ParquetFile(source / f"{name}.parquet").iter_batches(batch_size=200))
        (tmp_path / "tiny").mkdir(exist_ok=True)
        with parquet.ParquetWriter(tmp_path / "tiny" / f"{name}.parquet", batch.schema) as writer:
            writer.write_batch(batch)
    lazy, eager = (images(str(tmp_path / "tiny"), lazy=lazy) for lazy in (True, False))
    assert lazy.x.shape == (400, 3, 64, 64) and lazy.classes == 200
    assert torch.equal(read_all_rows(lazy), eager.x)
