"""The cache of decoded images: used, rebuilt when stale or damaged, done without when it cannot be."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleetfit.data import cache
from fleetfit.data.dataset import Data
from fleetfit.data.files import images as images_module
from fleetfit.data.files.images import images


@pytest.fixture
def folder(tmp_path: Path, write: Callable[..., Path], picture: Callable[..., bytes]) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4), dtype=np.uint8)
    write(tmp_path / "set" / "train.parquet", [picture(p) for p in pixels], [0, 1] * 3)
    return tmp_path / "set"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever images are decoded."""
    calls: list[int] = []
    original = images_module.decode_all

    def count_call(*arguments: Any) -> np.ndarray:
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(images_module, "decode_all", count_call)
    return calls


def files() -> list[Path]:
    return sorted(path for path in Path(os.environ["FLEETFIT_CACHE"]).rglob("*") if path.is_file())


def load(folder: Path, **parameters: int) -> Data:
    return images(str(folder), test=0.0, **parameters)  # type: ignore[arg-type]


def test_cached_images_are_mapped(folder: Path, decoded: list[int]) -> None:
    first = load(folder)
    second = load(folder)
    assert len(decoded) == 1
    assert torch.equal(first.x, second.x)
    assert [path.suffix for path in files()] == [".npy"]


def test_writing_to_the_data_leaves_the_file_alone(folder: Path) -> None:
    load(folder)
    before = files()[0].read_bytes()
    load(folder).x.fill_(3)
    assert files()[0].read_bytes() == before


def test_parameters_and_changed_files_decode_again(folder: Path, decoded: list[int]) -> None:
    load(folder)
    assert load(folder, size=8).x.shape[2:] == (8, 8)
    assert load(folder, channels=3).x.shape[1] == 3
    assert len(decoded) == 3
    stamp = (folder / "train.parquet").stat()
    os.utime(folder / "train.parquet", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    load(folder)
    assert len(decoded) == 4


@pytest.mark.parametrize("way", ["write", "replace", "classes"])
def test_new_pixels_of_the_same_size_and_time_decode_again(
    way: str, folder: Path, tmp_path: Path, write: Callable[..., Path], picture: Callable[..., bytes]
) -> None:
    """As `cp -p`, rsync and archives leave them: written in place, moved there, and in class folders."""
    old, new = (np.full((2, 4, 4), value, dtype=np.uint8) for value in (40, 200))
    if way == "classes":
        path = tmp_path / "birds" / "wren" / "a.png"
        for name in ("wren", "rook"):
            (path.parents[1] / name).mkdir(parents=True)
            (path.parents[1] / name / "a.png").write_bytes(picture(old[0], "BMP"))
        content, source = picture(new[0], "BMP"), path.parents[1]
    else:
        path = write(tmp_path / "other" / "train.parquet", [picture(p, "BMP") for p in new], [0, 1])
        content = path.read_bytes()
        path, source = write(folder / "train.parquet", [picture(p, "BMP") for p in old], [0, 1]), folder
    load(source)
    stat = path.stat()
    assert stat.st_size == len(content)
    target = path if way != "replace" else path.with_suffix(".new")
    target.write_bytes(content)
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    target.replace(path)
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert (load(source).x == 200).sum() == (16 if way == "classes" else 32)


def test_a_new_format_decodes_again(folder: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder)
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    load(folder)
    assert len(decoded) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"rubbish" * 100),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: np.save(path, np.zeros((5, 1, 4, 4), dtype=np.uint8)),
        lambda path: np.save(path, np.zeros((6, 1, 4, 4), dtype=np.float32)),
        lambda path: np.save(path, np.array([{}], dtype=object)),
    ],
)
def test_damaged_file_is_rebuilt(folder: Path, decoded: list[int], damage: Callable[[Path], object]) -> None:
    expected = load(folder).x.clone()
    damage(files()[0])
    assert torch.equal(load(folder).x, expected)
    assert torch.equal(load(folder).x, expected)
    assert len(decoded) == 2


def test_no_cache_where_none_can_be(
    folder: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = load(folder).x
    (tmp_path / "a file").write_text("")
    for place in (tmp_path / "a file", tmp_path / "a file" / "below"):
        monkeypatch.setenv("FLEETFIT_CACHE", str(place))
        assert torch.equal(load(folder).x, expected)
    assert len(decoded) == 3


def test_full_disk_means_memory(folder: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    data = load(folder)
    assert data.x.shape == (6, 1, 4, 4)
    assert files() == []


def test_a_failed_build_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(source: object, spec: object, allocate: Callable[..., object]) -> None:
        allocate((6, 1, 4, 4))
        raise ZeroDivisionError

    monkeypatch.setattr(images_module, "decode_all", failing)
    with pytest.raises(ZeroDivisionError):
        load(folder)
    assert files() == []


def test_home_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    monkeypatch.delenv("FLEETFIT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load(folder)
    assert len(list((tmp_path / "home" / ".cache" / "fleetfit").glob("set-*/*.npy"))) == 1


def test_several_at_once(folder: Path) -> None:
    tensors: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: tensors.append(load(folder).x)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tensors) == 4
    assert all(torch.equal(x, tensors[0]) for x in tensors)
    assert len(files()) == 1
