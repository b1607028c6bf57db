"""Image sets in Parquet files: layouts, columns, decoding, errors. Every file is made by the test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Expected, raises

from fleetfit.data import image_reader
from fleetfit.data.files import folders, images as images_module, parquet
from fleetfit.data.files.images import images
from fleetfit.data.sets.images import FACTS, cifar10, cifar100, fashion_mnist, mnist
from fleetfit.errors import DataError

Picture = Callable[..., bytes]
Write = Callable[..., Path]


def noise(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture
def color(tmp_path: Path, write: Write, picture: Picture) -> tuple[Path, np.ndarray]:
    """A set of 10 training and 6 test images, 5x4 RGB, labels 0, 1, 2 in turn."""
    pixels = noise(16, 4, 5, 3)
    content = [picture(p) for p in pixels]
    write(tmp_path / "set" / "train.parquet", content[:10], [i % 3 for i in range(10)])
    write(tmp_path / "set" / "test.parquet", content[10:], [i % 3 for i in range(10, 16)])
    return tmp_path / "set", pixels


def test_decodes_every_pixel(color: tuple[Path, np.ndarray]) -> None:
    folder, pixels = color
    data = images(str(folder), validation=0.3)
    assert data.name == "set"
    assert np.array_equal(data.x.numpy(), pixels.transpose(0, 3, 1, 2))
    assert data.y.tolist() == [i % 3 for i in range(16)]
    assert data.split("test").tolist() == list(range(10, 16))
    assert sorted([*data.split("train").tolist(), *data.split("validation").tolist()]) == list(range(10))
    assert len(data.split("validation")) == 3
    assert data.classes == 3 and data.class_names == ()


@pytest.mark.parametrize("place", ["", "data", "set", "plain_text"])
@pytest.mark.parametrize(
    "names", [["train-00000-of-00002", "train-00001-of-00002"], ["train-0-of-2-ab", "train-1-of-2-cd"]]
)
def test_finds_numbered_files(tmp_path: Path, write: Write, picture: Picture, place: str, names: list[str]) -> None:
    content = [picture(p) for p in noise(6, 3, 3)]
    for i, name in enumerate(names):
        write(tmp_path / "set" / place / f"{name}.parquet", content[3 * i : 3 * i + 3], [i] * 3)
    data = images(str(tmp_path / "set"), test=0.5, validation=0.0)
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(data.split("test")) == 3 and len(data.split("train")) == 3


@pytest.mark.parametrize("name", ["validation", "valid", "val"])
def test_validation_file_is_used(tmp_path: Path, write: Write, picture: Picture, name: str) -> None:
    content = [picture(p) for p in noise(4, 3, 3)]
    for split in ("train", name, "test"):
        write(tmp_path / "s" / f"{split}.parquet", content, [0, 1, 0, 1])
    data = images(str(tmp_path / "s"), validation=0.5)
    assert [len(data.split(s)) for s in ("train", "validation", "test")] == [4, 4, 4]
    assert data.split("validation").tolist() == [4, 5, 6, 7]
    (tmp_path / "s" / "test.parquet").unlink()
    data = images(str(tmp_path / "s"), validation=0.5)  # as with ImageNet: the validation file is the test set
    assert data.split("test").tolist() == [4, 5, 6, 7]
    assert [len(data.split(s)) for s in ("train", "validation")] == [2, 2]


def test_bare_bytes_and_named_columns(tmp_path: Path, write: Write, picture: Picture) -> None:
    content = [picture(p) for p in noise(4, 3, 3)]
    write(tmp_path / "train.parquet", content, ["cat", "ant", "cat", "bee"], "photo", "kind", bare=True)
    data = images(str(tmp_path), image="photo", label="kind", test=0.0, validation=0.0)
    assert data.y.tolist() == [2, 0, 2, 1]
    assert data.class_names == ("ant", "bee", "cat")


def test_class_names_of_the_schema(tmp_path: Path, write: Write, picture: Picture) -> None:
    write(tmp_path / "train.parquet", [picture(noise(1, 3, 3)[0])] * 2, [1, 0], names=["no", "yes", "maybe"])
    data = images(str(tmp_path), test=0.0)
    assert data.classes == 3 and data.class_names == ("no", "yes", "maybe")


def test_groups_are_numbered_over_all_files(tmp_path: Path, write: Write, picture: Picture) -> None:
    content = [picture(noise(1, 3, 3)[0])] * 4
    write(tmp_path / "train.parquet", content, [0, 1, 0, 1], writer=["z", "b", "b", "z"])
    write(tmp_path / "test.parquet", content, [0, 1, 0, 1], writer=["a", "b", "b", "z"])
    data = images(str(tmp_path), groups="writer")
    assert data.groups is not None
    assert data.groups.tolist() == [2, 1, 1, 2, 0, 1, 1, 2]


def test_each_group_gives_up_its_share(tmp_path: Path, write: Write, picture: Picture) -> None:
    content = [picture(noise(1, 3, 3)[0])] * 40
    write(tmp_path / "train.parquet", content, [0] * 40, writer=[i % 4 for i in range(40)])
    data = images(str(tmp_path), groups="writer", validation=0.2, test=0.0)
    assert data.groups is not None
    assert torch.bincount(data.groups[data.split("validation")]).tolist() == [2, 2, 2, 2]


def test_grey_and_color(tmp_path: Path, write: Write, picture: Picture) -> None:
    gray, color = noise(1, 3, 3)[0], noise(1, 3, 3, 3)[0]
    write(tmp_path / "train.parquet", [picture(gray)] * 5 + [picture(color)], [0] * 6)
    mixed = images(str(tmp_path), test=0.0)
    assert mixed.x.shape == (6, 3, 3, 3)
    assert np.array_equal(mixed.x[0].numpy(), np.stack([gray] * 3))
    assert np.array_equal(mixed.x[5].numpy(), color.transpose(2, 0, 1))
    as_grey = images(str(tmp_path), test=0.0, channels=1)
    luma = (color.astype(np.float64) * [0.299, 0.587, 0.114]).sum(-1)  # ITU-R 601, as Pillow documents
    assert np.abs(as_grey.x[5, 0].numpy() - luma).max() <= 1
    write(tmp_path / "train.parquet", [picture(gray)] * 5, [0] * 5)
    assert images(str(tmp_path), test=0.0).x.shape == (5, 1, 3, 3)


def test_size_cuts_the_center_square(tmp_path: Path, write: Write, picture: Picture) -> None:
    """A 4x12 picture, black but for its white middle 4 columns, is cut to them; a 4x4 one is enlarged."""
    wide = np.zeros((4, 12), dtype=np.uint8)
    wide[:, 4:8] = 255
    write(tmp_path / "train.parquet", [picture(wide), picture(np.full((4, 4), 7, np.uint8))], [0, 0])
    cut = images(str(tmp_path), size=4, test=0.0).x
    assert cut.shape == (2, 1, 4, 4)
    assert cut[0].unique().tolist() == [255] and cut[1].unique().tolist() == [7]
    enlarged = images(str(tmp_path), size=8, test=0.0).x
    assert enlarged.shape == (2, 1, 8, 8)
    assert enlarged[0, 0, :, 1:-1].unique().tolist() == [255] and enlarged[1].unique().tolist() == [7]
    with raises(DataError, "4x4", "12x4", key="size", row=1, path="train.parquet"):
        images(str(tmp_path), test=0.0)


def test_threads_decode_the_same(color: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, pixels = color
    monkeypatch.setattr(image_reader, "_LARGE_BYTES", 0)
    monkeypatch.setattr(parquet, "_ROWS", 3)  # several rounds over each file
    assert np.array_equal(images(str(folder)).x.numpy(), pixels.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("threads", [True, False])
def test_undecodable_image_names_its_row(
    tmp_path: Path, write: Write, picture: Picture, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    monkeypatch.setattr(image_reader, "_LARGE_BYTES", 0 if threads else 10**9)
    monkeypatch.setattr(parquet, "_ROWS", 4)
    good = picture(noise(1, 32, 32, 3)[0])
    for bad in (b"no image", good[: len(good) // 2]):
        write(tmp_path / "train.parquet", [good] * 6 + [bad, good], [0] * 8)
        with raises(DataError, row=6, path="train.parquet"):
            images(str(tmp_path), channels=3)


def test_sixteen_bits_are_refused(tmp_path: Path, write: Write, picture: Picture) -> None:
    write(tmp_path / "train.parquet", [picture(np.full((3, 3), 1000, dtype=np.uint16))], [0])
    with raises(DataError, "8 bits", row=0, path="train.parquet"):
        images(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"image": "photo"}, Expected('"photo"', path="train.parquet")),
        ({"label": "kind"}, Expected('"kind"', path="train.parquet")),
        ({"groups": "writer"}, Expected('"writer"', path="train.parquet")),
        ({"image": "label"}, Expected("int64", column="label", path="train.parquet")),
        ({"label": "image"}, Expected(column="image", path="train.parquet")),
        ({"size": 0}, Expected(1, key="size")),
        ({"channels": 2}, Expected(1, 2, key="channels")),
        ({"validation": 1.0}, Expected(1, 1.0, key="validation")),
        ({"augment": "turn"}, Expected('augment = "turn"', key="augment")),
    ],
)
def test_wrong_parameters(color: tuple[Path, np.ndarray], changes: dict[str, Any], expected: Expected) -> None:
    with raises(DataError, expected):
        images(str(color[0]), **changes)


@pytest.mark.parametrize(
    ("contents", "labels", "expected"),
    [
        ([b"x", None], [0, 0], Expected(row=1, column="image", path="train.parquet")),
        ([b"x"] * 2, [0, None], Expected(row=1, column="label", path="train.parquet")),
        ([b"x"] * 2, [0, -1], Expected(-1, row=1, path="train.parquet")),
        ([b"x"] * 2, [0.5, 1.0], Expected("double", column="label", path="train.parquet")),
        ([], [], Expected(column="label", path="train.parquet")),
    ],
)
def test_bad_rows(tmp_path: Path, write: Write, contents: Any, labels: Any, expected: Expected) -> None:
    write(tmp_path / "train.parquet", contents, labels)
    with raises(DataError, expected):
        images(str(tmp_path))


def test_bad_label_names_its_file(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "train.parquet", [b"x"] * 3, [0, 1, 0])
    write(tmp_path / "test.parquet", [b"x"] * 3, [0, 1, -1])
    with raises(DataError, -1, row=2, path="test.parquet"):
        images(str(tmp_path))


def test_bad_files(tmp_path: Path, write: Write, picture: Picture) -> None:
    with raises(DataError, "train.parquet"):
        images(str(tmp_path))
    (tmp_path / "train.parquet").write_bytes(b"not Parquet")
    with raises(DataError, path="train.parquet"):
        images(str(tmp_path))
    write(tmp_path / "half" / "train-00000-of-00003.parquet", [picture(noise(1, 3, 3)[0])], [0])
    with raises(DataError, 1, 3, path="half"):
        images(str(tmp_path / "half"))


def test_where_the_files_are(tmp_path: Path, write: Write, picture: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(DataError, "cifar10", "FLEETFIT_DATA", key="hub"):
        cifar10()
    monkeypatch.setenv("FLEETFIT_DATA", str(tmp_path / "absent"))
    with raises(DataError, "FLEETFIT_DATA", key="hub", path="absent"):
        cifar10()
    content = [picture(p, "WEBP") for p in noise(10, 32, 32, 3)]
    for split in ("train", "test"):
        write(tmp_path / "cifar10" / f"{split}.parquet", content, list(range(10)), image="img")
    monkeypatch.setenv("FLEETFIT_DATA", str(tmp_path))
    by_variable = cifar10()
    monkeypatch.delenv("FLEETFIT_DATA")
    for folder in (tmp_path, tmp_path / "cifar10"):
        assert torch.equal(cifar10(str(folder)).x, by_variable.x)
    with raises(DataError, "cifar100"):
        cifar100(str(tmp_path))
    monkeypatch.setenv("FLEETFIT_DATA", str(tmp_path))
    assert images("cifar10").name == "cifar10"


def test_known_sets(tmp_path: Path, write: Write, picture: Picture) -> None:
    gray = [picture(p) for p in noise(20, 28, 28)]
    color = [picture(p) for p in noise(100, 32, 32, 3)]
    for split in ("train", "test"):
        write(tmp_path / "mnist" / f"{split}-00000-of-00001.parquet", gray, [i % 10 for i in range(20)])
        write(tmp_path / "fashion_mnist" / f"{split}.parquet", gray, [i % 10 for i in range(20)])
        coarse = [i % 20 for i in range(100)]
        write(
            tmp_path / "cifar100" / f"{split}.parquet",
            color,
            list(range(100)),
            "img",
            "fine_label",
            coarse_label=coarse,
        )
    for load in (mnist, fashion_mnist):
        data = load(str(tmp_path), validation=0.5)
        assert data.x.shape == (40, 1, 28, 28) and data.classes == 10 and data.augment is None
        assert [len(data.split(s)) for s in ("train", "validation", "test")] == [10, 10, 20]
    assert cifar100(str(tmp_path)).classes == 100
    assert cifar100(str(tmp_path), coarse=True).y[:40].tolist() == [*range(20), *range(20)]
    assert FACTS["fashion_mnist"].train == 60_000
    write(tmp_path / "wrong" / "train.parquet", color, list(range(100)))
    with raises(DataError, 10, "28x28", 100, "32x32"):
        mnist(str(tmp_path / "wrong"))
    (tmp_path / "mnist" / "test-00000-of-00001.parquet").unlink()
    with raises(DataError, "test.parquet"):
        mnist(str(tmp_path))


def test_resized_for_a_model_that_wants_larger_images(tmp_path: Path, write: Write, picture: Picture) -> None:
    """Pixels as torch interpolates the normalized batch; the set itself stays small."""
    pixels = noise(10, 32, 32, 3)
    for split in ("train", "test"):
        write(tmp_path / f"{split}.parquet", [picture(p) for p in pixels], list(range(10)), image="img")
    data, plain = cifar10(str(tmp_path), resize=224), cifar10(str(tmp_path))
    assert data.sample_shape == (3, 224, 224) and data.x.shape == (20, 3, 32, 32)
    pair = [d.batch(torch.arange(4), torch.Generator().manual_seed(0))[0] for d in (data, plain)]
    larger = torch.nn.functional.interpolate(pair[1], (224, 224), mode="bilinear")
    assert torch.allclose(pair[0], larger, atol=1e-6)


def test_from_the_hub(tmp_path: Path, write: Write, picture: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named set only if it is nowhere else; any set by its repository."""
    for split in ("train", "test"):
        content = [picture(p) for p in noise(10, 32, 32, 3)]
        write(tmp_path / "copy" / f"{split}.parquet", content, list(range(10)), image="img")
    requests: list[tuple[object, ...]] = []

    def downloaded(*name: object) -> Path:
        requests.append(name)
        return tmp_path / "copy"

    monkeypatch.setattr(folders, "download", downloaded)
    monkeypatch.setattr(images_module, "download", downloaded)
    assert len(cifar10(hub=True).x) == 20
    assert requests.pop() == ("cifar10", "uoft-cs/cifar10", None, None)
    assert len(cifar10(str(tmp_path / "copy"), hub=True).x) == 20 and not requests
    data = images("somebody/pictures", hub=True)
    assert data.name == "pictures" and requests == [("pictures", "somebody/pictures")]


def test_a_part_of_the_training_images_is_drawn_class_by_class(tmp_path: Path, write: Write, picture: Picture) -> None:
    """Of 40 training images, four of each class, 20 are drawn, two of each class, and half of those held out."""
    folder = tmp_path / "cifar10"
    for split in ("train", "test"):
        write(folder / f"{split}.parquet", [picture(p) for p in noise(40, 32, 32, 3)], [i % 10 for i in range(40)])
    data = cifar10(str(folder), samples=20, validation=0.5)
    train, held = data.split("train"), data.split("validation")
    assert (len(train), len(held), len(data.split("test"))) == (10, 10, 40)
    assert len({*train.tolist(), *held.tolist()}) == 20
    assert torch.cat([train, held]).max() < 40, "a test image among those for training"
    assert torch.bincount(data.y[torch.cat([train, held])]).tolist() == [2] * 10
    whole = cifar10(str(folder), samples=40, validation=0.5)
    assert whole.split("train").tolist() == cifar10(str(folder), validation=0.5).split("train").tolist()
    assert (data.augment, cifar10(str(folder), augment="none").augment) == ("crop-flip", None)
    with raises(DataError, "cifar10", "1..40", 41, key="samples"):
        cifar10(str(folder), samples=41)


def test_cifar_is_normalized_as_in_the_paper(tmp_path: Path, write: Write, picture: Picture) -> None:
    pixels = noise(10, 32, 32, 3)
    for split in ("train", "test"):
        write(tmp_path / f"{split}.parquet", [picture(p) for p in pixels], list(range(10)), image="img")
    data = cifar10(str(tmp_path))
    x, _ = data.batch(torch.arange(10))
    assert np.abs(x.numpy() - ((pixels / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2)).max() < 1e-6
    assert data.augment == "crop-flip"
